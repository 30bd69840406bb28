"""Who may call `pagoda serve`: the token's file, TLS, the page's cookie, and wrong options in one
line.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagoda.base.errors import ConfigError
from pagoda.base.serve_token_file import default_token_file, own_token
from pagoda_tools.serve import access
from pagoda_tools.serve import server as server_module
from pagoda_tools.serve.access import AccessRules, RateLimit, Sessions, read_token
from testbed.patience import wait_until
from testbed.servers import free_port
from tests.cli.shelf import refused, run_here
from tests.serve import kit
from tests.serve.kit import engine, payload_of, server, verified


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Return a certificate for localhost, and its key."""
    certificate = tmp_path / "cert.pem"
    key = tmp_path / "key.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "1",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost",
            "-keyout",
            key,
            "-out",
            certificate,
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


@pytest.mark.slow
def test_the_token_is_made_once_and_only_its_user_can_read_it(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    for _ in range(2):
        with server(tmp_path, token=None, XDG_STATE_HOME=str(state)) as served:
            file = state / "pagoda" / "serve-token"
            assert file.stat().st_mode & 0o777 == 0o600
            assert served.get(bytes(32), bytes(32)).status == 401
            served.token = file.read_text().strip()
            assert served.get(bytes(32), bytes(32)).status == 404
            _, err = served.stop()
            assert served.token not in err
            assert len(served.token) >= 40
    file.chmod(0o644)
    assert "chmod 600" in refused(
        "serve", "--listen", "127.0.0.1:0", "--token-file", file
    )


@pytest.mark.slow
def test_wrong_options_are_one_line_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("abc")
    (tmp_path / "short").chmod(0o600)
    (tmp_path / "open").mkdir(mode=0o755)
    tcp = "serve", "--listen"
    with server(tmp_path) as served:
        assert "another address" in refused(
            *tcp, f"127.0.0.1:{served.address[1]}", PAGODA_SERVE_TOKEN=kit.TOKEN
        )
    assert "16 to 1024" in refused(
        "serve", "--listen", "127.0.0.1:0", "--token-file", tmp_path / "short"
    )
    assert "cannot be read" in refused(
        "serve", "--listen", "127.0.0.1:0", "--token-file", tmp_path / "none"
    )
    assert "0700" in refused("serve", "--listen", f"unix:{tmp_path}/open/socket")
    for listen in (
        "7777",
        "host:",
        "host:x",
        "1.2.3.4:99999",
        "unix:relative",
        "unix:/" + "a" * 200,
    ):
        assert "write" in refused("serve", "--listen", listen)
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "mine" / "notes").write_text("not a socket")
    assert "is not a socket" in refused(
        "serve", tmp_path, "--listen", f"unix:{tmp_path}/mine/notes"
    )
    assert (tmp_path / "mine" / "notes").read_text() == "not a socket"
    assert "--listen" in refused("serve", "--allow-host", "x")
    assert "both or neither" in refused(
        "serve", "--listen", "127.0.0.1:0", "--tls-cert", "x"
    )
    wrong = "--tls-cert", tmp_path / "short", "--tls-key", tmp_path / "short"
    assert "cannot be used" in refused(
        *tcp, "127.0.0.1:0", *wrong, PAGODA_SERVE_TOKEN=kit.TOKEN
    )
    assert "--host-size" in refused("serve", "--host-size", "much")
    code, out, said = run_here("serve", "--host-size", "300TiB")
    assert code == 1, out
    assert out == ""
    assert said.count("\n") == 1
    assert "300.0 TiB are needed" in said
    assert "host_size = " in said
    assert "no such directory" in refused("serve", tmp_path / "absent")


def test_a_socket_s_directory_that_a_stopped_process_keeps_locked_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_LOCK_SECONDS", 0.1, raising=False)
    (tmp_path / "mine").mkdir(mode=0o700)
    held = os.open(tmp_path / "mine", os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "stopped" in refused(
            "serve", tmp_path, "--listen", f"unix:{tmp_path}/mine/socket"
        )
    finally:
        os.close(held)


@pytest.mark.slow
def test_two_servers_do_not_take_one_socket(tmp_path: Path) -> None:
    path = tmp_path / "mine" / "socket"
    with server(tmp_path, "--listen", f"unix:{path}", token=None) as served:
        assert "another pagoda serve" in refused(
            "serve", tmp_path, "--listen", f"unix:{path}"
        )
        assert served.ask("GET", "/healthz").status == 200


@pytest.mark.slow
@pytest.mark.parametrize("on_socket", [True, False])
def test_of_servers_that_start_at_once_on_one_address_one_serves(
    on_socket: bool, tmp_path: Path
) -> None:
    address = (
        f"unix:{tmp_path}/mine/socket"
        if on_socket
        else f"127.0.0.1:{free_port()}"
    )
    variables = {**os.environ, "PAGODA_SERVE_TOKEN": kit.TOKEN}
    code = [
        sys.executable,
        "-c",
        kit.RUN,
        "serve",
        str(tmp_path),
        "--listen",
        address,
    ]
    many = [
        subprocess.Popen(code, env=variables, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        wait_until(lambda: sum(one.poll() is None for one in many) == 1)
        said = [
            one.stderr.read()
            for one in many
            if one.stderr and one.poll() is not None
        ]
        for text in said:
            assert "choose another" in text
            assert "Traceback" not in text
        client = kit.Client(address if on_socket else f"http://{address}", None)
        wait_until(lambda: client.ask("GET", "/healthz").status == 200)
    finally:
        for one in many:
            one.kill()
            one.wait(kit.SECONDS)


@pytest.mark.slow
def test_a_server_that_ends_late_leaves_the_socket_to_the_next_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine" / "socket"
    where = tmp_path, "--listen", f"unix:{path}"
    with server(*where, token=None) as first, first.socket() as slow:
        slow.sendall(
            b"PUT /v1/"
            + b"0" * 64
            + b"/"
            + b"0" * 64
            + b" HTTP/1.1\r\nHost: localhost\r\n"
        )
        slow.sendall(b"Content-Length: 9999\r\n\r\n")
        first.process.terminate()
        wait_until(lambda: _refuses(path))
        assert not path.exists()  # what is removed later is the next one's
        with server(*where, token=None) as second:
            first.process.wait(kit.SECONDS)
            assert second.ask("GET", "/healthz").status == 200


def _refuses(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) != 0


@pytest.mark.slow
def test_with_certificates_it_speaks_https(
    shm_root: Path, certificate: tuple[Path, Path]
) -> None:
    with engine("LARGE", host_path=str(shm_root), host_size=32 << 20) as running:
        keys = running.store(1, 3)
        with server(
            shm_root, "--tls-cert", certificate[0], "--tls-key", certificate[1]
        ) as served:
            assert served.url.startswith("https://")
            context = ssl.create_default_context(cafile=str(certificate[0]))
            connection = http.client.HTTPSConnection(
                "localhost",
                served.address[1],
                context=context,
                timeout=kit.SECONDS,
            )
            for position, name in enumerate(keys):
                path = f"/v1/{running.root.hex()}/{name.hex()}"
                connection.request(
                    "GET", path, headers={"Authorization": f"Bearer {kit.TOKEN}"}
                )
                found = verified(
                    connection.getresponse().read(), running.root, name, kit.LARGE
                )
                assert found is not None
                assert (found == payload_of(1, position, kit.LARGE)).all()
            connection.close()


@pytest.mark.slow
def test_handshakes_that_never_end_are_a_bounded_number_and_keep_nobody_out(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    files = "--tls-cert", certificate[0], "--tls-key", certificate[1]
    context = ssl.create_default_context(cafile=str(certificate[0]))
    limits = {"connections": 8, "header_seconds": 600.0}
    with (
        server(tmp_path, *files, limits=limits) as served,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(2):
            silent = [stack.enter_context(served.socket()) for _ in range(20)]
            connection = http.client.HTTPSConnection(
                "localhost",
                served.address[1],
                context=context,
                timeout=kit.SECONDS,
            )
            connection.request("GET", "/healthz")
            assert connection.getresponse().status == 200
            connection.close()
            assert 12 <= kit.count_closed(silent, 20, 0.5) < 20


def test_the_host_header_names_this_server() -> None:
    rules = AccessRules("a" * 16, ["10.0.0.5", "Cache.Example"], 7777)
    for host in (
        "10.0.0.5",
        "10.0.0.5:7777",
        "cache.example",
        "CACHE.example:7777",
    ):
        assert rules.is_host(host), host
    for host in (
        "",
        "10.0.0.6",
        "10.0.0.5:80",
        "evil.example",
        "cache.example.evil",
        ":7777",
        "x@10.0.0.5",
    ):
        assert not rules.is_host(host), host


def test_a_full_volume_at_the_first_start_does_not_prevent_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container the server has the same process id at each start, and left a file of that
    name.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    state = tmp_path / "state"
    state.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(state)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a tmpfs here")
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    try:
        (state / "pagoda").mkdir(0o700)
        with contextlib.suppress(OSError):
            (state / "others").write_bytes(bytes(64 << 10))
        with pytest.raises(ConfigError, match="cannot be written: No space left"):
            read_token(None)
        assert list((state / "pagoda").iterdir()) == []
        (state / "others").unlink()
        token = read_token(None)
        assert (
            token == read_token(None) == default_token_file().read_text().strip()
        )
        assert [file.name for file in (state / "pagoda").iterdir()] == [
            "serve-token"
        ]
    finally:
        subprocess.run(["umount", str(state)], check=True)


def test_only_the_token_is_the_token() -> None:
    rules = AccessRules("a-token-of-16-or-more", [], 1)
    assert rules.is_token("a-token-of-16-or-more")
    for text in (
        "",
        "a-token-of-16-or-mor",
        "a-token-of-16-or-more ",
        "A-token-of-16-or-more",
        "\udcff",
    ):
        assert not rules.is_token(text), text


def test_a_session_ends_by_itself_or_on_request_and_few_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sessions = Sessions()
    first = sessions.begin()
    second = sessions.begin()
    assert first != second
    assert sessions.knows(first)
    assert sessions.knows(second)
    assert not sessions.knows("")
    assert not Sessions().knows(first)
    sessions.end(first)
    sessions.end("never begun")
    assert not sessions.knows(first)
    assert sessions.knows(second)
    more = [sessions.begin() for _ in range(access._MOST_SESSIONS)]
    assert not sessions.knows(second)
    assert all(map(sessions.knows, more))
    now = time.monotonic()
    monkeypatch.setattr(
        time, "monotonic", lambda: now + access.SESSION_SECONDS + 60.0
    )
    assert not any(map(sessions.knows, more))


@pytest.mark.parametrize("named", [True, False])
def test_a_token_that_another_user_wrote_or_could_write_is_refused(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He would know it. A file of root is fine: so are secrets mounted."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("PAGODA_SERVE_TOKEN", raising=False)
    file = default_token_file()
    file.parent.mkdir()
    file.write_text("a-token-that-he-knows")
    given = file if named else None
    own = os.geteuid()
    cases = [(own, 0o620), (own, 0o602)]
    if own == 0:  # only root can give a file away
        cases += [(1002, 0o644), (1002, 0o600)]
    for owner, mode in cases:
        os.chown(file, owner, -1)
        file.chmod(mode)
        with pytest.raises(ConfigError, match="another user"):
            access.read_token(given)
        assert own_token() == ""
    os.chown(file, own, -1)
    file.chmod(0o600)
    assert access.read_token(given) == own_token() == "a-token-that-he-knows"


def test_a_rate_is_of_each_client_and_remembers_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = RateLimit(0.001, 3.0)
    assert [limit.allows("a") for _ in range(4)] == [True, True, True, False]
    assert not limit.allows("a")
    assert limit.allows("b")
    for number in range(3000):
        limit.allows(f"client {number}")
    assert len(limit._left) == access._MOST_CLIENTS
