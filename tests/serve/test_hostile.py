"""`pagoda serve`: clients that are slow, endless, wrong or many cost a bounded amount, and others
are answered.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.patience import Patience, wait_until
from tests.serve import kit
from tests.serve.kit import (
    TOKEN,
    Engine,
    Server,
    closed_within,
    count_closed,
    engine,
    server,
)

AUTH = f"Authorization: Bearer {TOKEN}\r\n"


@pytest.fixture(scope="module")
def running(
    shm_module_root: Path,
) -> Iterator[tuple[Server, Engine, list[bytes]]]:
    """Run one engine with large chunks and one server, for the tests of this module."""
    root = shm_module_root
    with engine("LARGE", host_path=str(root), host_size=64 << 20) as made:
        keys = made.store(1, 4)
        limits = {
            "header_seconds": 1.0,
            "start_seconds": 1.0,
            "slowest_bytes_per_second": 8 << 20,
            "connections": 200,
        }
        with server(root, limits=limits) as served:
            yield served, made, keys


@pytest.fixture
def served(running: tuple[Server, Engine, list[bytes]]) -> Iterator[Server]:
    """After each test the server still answers, and soon."""
    yield running[0]
    running[0]._connection = None  # it may have been idle for longest, and ended
    patience = Patience(2.0)
    assert running[0].get(running[1].root, running[2][0]).status == 200
    assert not patience.ended, patience.said()


@pytest.fixture
def path(running: tuple[Server, Engine, list[bytes]]) -> str:
    return f"/v1/{running[1].root.hex()}/{running[2][0].hex()}"


def raw(served: Server, text: str | bytes, seconds: float = kit.SECONDS) -> int:
    """Send this as it is; return the status of the answer, 0 if the connection only ends."""
    with served.socket() as connected:
        connected.settimeout(seconds)
        with contextlib.suppress(ConnectionError):
            connected.sendall(text.encode() if isinstance(text, str) else text)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while b"\r\n\r\n" not in answer and (piece := connected.recv(65536)):
                answer += piece
        return int(answer.split()[1]) if answer else 0


def head(
    method: str, path: str, more: str = AUTH, host: str = "localhost"
) -> str:
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n"


def test_everything_but_health_needs_the_token(served: Server, path: str) -> None:
    for token in ("", "x", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "ÿ"):
        served.token = token
        statuses = [
            served.ask(how, path).status
            for how in ("GET", "HEAD", "PUT", "DELETE")
        ]
        statuses.append(served.ask("GET", "/nothing").status)
        assert set(statuses) <= {401, 429}, token
    served.token = TOKEN
    assert raw(served, head("GET", path, "")) in (401, 429)
    assert raw(served, head("GET", f"{path}?token={TOKEN}", "")) in (401, 429)
    assert raw(served, head("GET", "/healthz", "")) == 200
    # also right after so many wrong ones
    assert raw(served, head("GET", path)) == 200


def test_other_names_of_this_machine_are_refused(
    served: Server, path: str
) -> None:
    port = served.address[1]
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "localhost.evil.example",
        "127.0.0.1:1",
        "",
        "[::1]x",
        "a b",
    ):
        assert raw(served, head("GET", path, "", host=host)) in (400, 421), host
        # probes call any name
        assert raw(served, head("GET", "/healthz", host=host)) in (200, 400), host
    for host in (
        "localhost",
        f"localhost:{port}",
        "LOCALHOST",
        f"127.0.0.1:{port}",
        f"[::1]:{port}",
    ):
        assert raw(served, head("GET", path, host=host)) == 200, host


def test_tricks_with_paths_and_methods_find_nothing(
    served: Server, path: str
) -> None:
    namespace, key = path.split("/")[2:]
    tricks = [
        "/v1",
        "/v1/",
        f"/v1/{namespace}",
        f"/v1/{namespace}/",
        f"{path}/",
        f"{path}/..",
        f"/v1/../v1/{namespace}",
        f"/v1/{namespace}/..%2f..%2fetc%2fpasswd",
        f"/v1/{namespace}/{key[:-1]}",
        f"/v1/{namespace}/{key}0",
        f"/v1/{namespace}/{key[:-1]}%00",
        f"/v1/{namespace.upper()}/{key}",
        "//etc/passwd",
        "/etc/passwd",
        "/v1/" + "a" * 4000,
        "/%2e%2e/%2e%2e",
        f"/v1/{namespace}/{key[:-2]}é",
    ]
    for trick in tricks:
        assert raw(served, head("GET", trick).encode()) in (400, 404, 405), trick
    for method in ("POST", "PATCH", "OPTIONS", "TRACE", "CONNECT", "FOO", "get"):
        assert raw(served, head(method, path)) in (400, 404, 405), method
    assert raw(served, "\x00\x01\x02" * 100) in (0, 400)
    assert raw(served, "GET\r\n\r\n") in (0, 400)


def test_huge_heads_are_refused(served: Server, path: str) -> None:
    assert raw(served, head("GET", path + "?" + "a" * 100_000)) in (0, 400, 414)
    assert raw(
        served, head("GET", path, AUTH + "X: " + "a" * 100_000 + "\r\n")
    ) in (0, 400, 431)
    assert raw(
        served,
        head("GET", path, AUTH + "".join(f"X{n}: a\r\n" for n in range(100_000))),
    ) in (
        0,
        400,
        431,
    )


def test_a_huge_find_and_a_broken_one_are_refused(
    served: Server, path: str
) -> None:
    find = path.rpartition("/")[0] + "/find"
    assert served.ask("POST", find, bytes(32 * 4096)).json == {"found": 0}
    for body, status in (
        (bytes(32 * 4096 + 32), 413),
        (bytes(33), 400),
        (bytes(64 << 20), 413),
    ):
        with contextlib.suppress(ConnectionError):
            assert served.ask("POST", find, body).status == status
        served._connection = None
    endless = AUTH + "Transfer-Encoding: chunked\r\n"
    assert (
        raw(
            served,
            head("POST", find, endless).encode()
            + (b"10000\r\n" + bytes(65536) + b"\r\n") * 100,
        )
        == 413
    )


@pytest.mark.slow
def test_a_slow_head_and_an_idle_connection_end(
    served: Server, path: str
) -> None:
    with (
        served.socket() as silent,
        served.socket() as slow,
        served.socket() as second,
    ):
        slow.sendall(b"GET /healthz HT")
        second.sendall(head("GET", "/healthz", "").encode())
        assert second.recv(65536)
        second.sendall(b"GET ")  # on a connection that has been used
        begun = time.monotonic()
        for connected in (silent, slow, second):
            assert closed_within(connected, 5.0)
        assert time.monotonic() - begun > 0.5


@pytest.mark.slow
def test_a_slow_body_ends(served: Server, path: str) -> None:
    value = kit.value_of(bytes(32), bytes(32), 0, kit.payload_of(1, 0))
    find = path.rpartition("/")[0] + "/find"
    bodies = [
        ("PUT", path, 70000, b""),
        ("PUT", path, 70000, value[:4095]),
        ("PUT", path, 70000, value[:5000]),
        ("POST", find, 3200, b""),
        ("POST", find, 3200, b"x"),
        ("POST", "/login", 3200, b"x"),
    ]
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(served.socket()) for _ in bodies]
        for slow, (method, where, length, part) in zip(many, bodies, strict=True):
            slow.sendall(
                head(
                    method, where, f"{AUTH}Content-Length: {length}\r\n"
                ).encode()
                + part
            )
        for slow in many:
            assert closed_within(slow, 10.0)


@pytest.mark.slow
def test_an_endless_body_is_refused(served: Server, path: str) -> None:
    assert (
        raw(
            served,
            head("PUT", path, AUTH + "Transfer-Encoding: chunked\r\n").encode()
            + b"5\r\nabcde\r\n",
        )
        == 411
    )
    with served.socket() as endless:
        endless.sendall(
            head("PUT", path, f"{AUTH}Content-Length: {1 << 50}\r\n").encode()
        )
        patience = Patience(20.0)
        with pytest.raises(ConnectionError):
            while not patience.ended:
                endless.sendall(bytes(1 << 20))
    assert memory_of(served) < 400 << 20


@pytest.mark.slow
def test_a_reader_that_does_not_read_is_disconnected(
    served: Server, path: str
) -> None:
    with served.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(head("GET", path).encode())
        before = threads_of(served)
        time.sleep(2.5)
        assert threads_of(served) <= before + 8
        slow.settimeout(60.0)
        got = 0
        with contextlib.suppress(ConnectionError):
            while piece := slow.recv(1 << 20):
                got += len(piece)
        assert got < 4 << 20


def test_too_many_connections_are_closed_and_memory_stays_bounded(
    served: Server, path: str
) -> None:
    before = memory_of(served)
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(served.socket()) for _ in range(400)]
        assert count_closed(many, 100, 10.0) >= 100
        assert memory_of(served) - before < 100 << 20


def test_idle_connections_without_a_token_keep_nobody_out(
    served: Server, path: str
) -> None:
    asked = head("GET", "/healthz", "").encode()
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            with contextlib.suppress(ConnectionError):
                connected = stack.enter_context(served.socket())
                connected.sendall(asked)
                assert connected.recv(4096)
        served._connection = None
        assert served.ask("GET", path).status == 200
        assert sockets_of(served) < 260


@pytest.mark.slow
def test_slow_logins_keep_nobody_out(shm_module_root: Path, path: str) -> None:
    """Everybody may ask for a login; a body of it that does not come must not keep a place."""
    slow = head(
        "POST",
        "/login",
        "Content-Length: 4000\r\nContent-Type: application/json\r\n",
    ).encode()
    # no other limit ends them meanwhile
    limits = {"connections": 50, "header_seconds": 600.0, "start_seconds": 600.0}
    with (
        server(shm_module_root, limits=limits) as patient,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(60):
            stack.enter_context(patient.socket()).sendall(slow)
        time.sleep(1.0)  # else the server has read few of them
        for _ in range(3):
            assert raw(patient, head("GET", path)) == 200


def test_many_who_leave_at_once_keep_nobody_out(
    served: Server, path: str
) -> None:
    """The server sees in one turn of its event loop that all have left, and that another has
    come.
    """
    served._connection = None
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            connected = stack.enter_context(served.socket())
            # the silent are ended after a second
            connected.sendall(head("GET", "/healthz", "").encode())
            assert connected.recv(4096)
        wait_until(lambda: sockets_of(served) > 200, 10.0)
        served.process.send_signal(signal.SIGSTOP)
        os.waitid(
            os.P_PID, served.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT
        )
        try:
            stack.close()
            with served.socket() as connected:
                connected.sendall(head("GET", path).encode())
                served.process.send_signal(signal.SIGCONT)
                assert connected.recv(4096).startswith(b"HTTP/1.1 200")
        finally:
            served.process.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_who_reads_nothing_of_small_answers_is_disconnected(
    served: Server, path: str
) -> None:
    answer = served.ask("GET", "/page/page.css")
    # more than the kernel takes for who does not read: else all is sent, and the connection is idle
    count = 2 * _most_unsent_bytes() // len(answer.body)
    asked = head("GET", "/page/page.css").encode() * count
    files = sockets_of(served)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            connected = stack.enter_context(served.socket())
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            # it may be disconnected before it has asked for all
            with contextlib.suppress(ConnectionError):
                connected.sendall(asked)
            # the server has accepted it, else it is not among its sockets
            assert connected.recv(1)
        wait_until(
            lambda: sockets_of(served) <= files,
            10.0,
        )


def _most_unsent_bytes() -> int:
    """Return how much the kernel keeps at most of what was written to a socket."""
    return int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[-1])


@pytest.mark.slow
def test_many_who_leave_in_the_middle_leave_nothing(
    served: Server, path: str
) -> None:
    files = sockets_of(served)
    before = gone_of(served)
    _ = logged(served)
    for _ in range(50):
        with served.socket() as gone:
            # else the kernel takes the whole chunk, if this process is slow to leave
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            gone.sendall(head("GET", path).encode())
            gone.recv(1000)
    wait_until(
        lambda: sockets_of(served) <= files + 2,
        10.0,
    )
    wait_until(lambda: gone_of(served) == before + 50, 10.0)
    assert logged(served).count("Traceback") == 0


def test_bad_requests_are_logged_now_and_then(served: Server) -> None:
    began = time.monotonic()
    for _ in range(200):
        assert raw(served, "GET / HTTP/1.1\r\nHost localhost\r\n\r\n") == 400
    minutes = (time.monotonic() - began) / 60  # on a busy machine more than one
    assert logged(served).count("could not be handled") <= 2 + minutes


def sockets_of(served: Server) -> int:
    """How many sockets the server has open. It opens files of stores whenever it looks at them."""
    found = 0
    directory = f"/proc/{served.process.pid}/fd"
    for number in os.listdir(directory):
        with contextlib.suppress(OSError):
            found += os.readlink(f"{directory}/{number}").startswith("socket:")
    return found


def gone_of(served: Server) -> int:
    text = served.ask("GET", "/metrics").body.decode()
    found = [
        line.split()[-1]
        for line in text.splitlines()
        if "clients_gone" in line and line[0] != "#"
    ]
    return int(float(found[0])) if found else 0


def logged(served: Server) -> str:
    """Return what the server has written to stderr since this was asked last."""
    assert served.process.stderr is not None
    number = served.process.stderr.fileno()
    os.set_blocking(number, False)
    with contextlib.suppress(BlockingIOError):
        return os.read(number, 1 << 20).decode()
    return ""


def threads_of(served: Server) -> int:
    return len(os.listdir(f"/proc/{served.process.pid}/task"))


def memory_of(served: Server) -> int:
    text = Path(f"/proc/{served.process.pid}/status").read_text()
    return next(
        int(line.split()[1]) << 10
        for line in text.splitlines()
        if line.startswith("RssAnon")
    )
