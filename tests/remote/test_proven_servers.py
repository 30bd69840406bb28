"""Impostors of a `pagoda serve`: they do not get the token, nor anything that is worth
something elsewhere, and nothing is taken from them. And servers of an older version, proxies, and
connections that end.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pagoda.base.errors import ConfigError
from pagoda.base.metrics import Reason
from pagoda.tiers.remote.pagoda_server import PagodaServerClient
from pagoda.tiers.remote.peer_directory import PeerDirectory
from pagoda.tiers.remote.peers import PeersClient, PeerUrl
from pagoda.tiers.remote.store_client import RefusedError
from pagoda_tools.cli import main
from testbed.patience import wait_until
from testbed.programs import need
from testbed.servers import Server, pagoda_server, redis_server
from tests.faults.support import source_of
from tests.remote.chunks import (
    ROOT,
    QuickClock,
    chunks_of,
    ends,
    keys_of,
    load,
    tier_on,
)
from tests.remote.evil import Evil
from tests.remote.evil import http as raw_answer
from tests.remote.proxy import proxy_to
from tests.serve import kit as serve_kit

need("redis-server")

TOKEN = "one-token-for-all-machines"
PATIENT = {"deadline_seconds": 30.0, "look_seconds": 30.0}
OLDER = "ce45306c"  # the last version in which clients sent the token itself
_chains = iter(range(500_000, 2**31))


def fresh_keys(count: int) -> list[bytes]:
    """Return a chain that no other test uses."""
    return keys_of(count, next(_chains))


def until(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_SERVE_TOKEN", TOKEN)


@pytest.fixture(scope="module")
def directory_server() -> Iterator[Server]:
    """The Redis of the peer directory."""
    with redis_server() as server:
        yield server


@contextlib.contextmanager
def machine(*options: str, **variables: str) -> Iterator[Server]:
    """A machine with a real server."""
    root = Path(tempfile.mkdtemp(prefix="pagoda-test-", dir="/dev/shm"))
    try:
        (root / "token").write_text(TOKEN)
        (root / "token").chmod(0o600)
        given = [
            "--host-size",
            "16MiB",
            "--token-file",
            str(root / "token"),
            *options,
        ]
        with pagoda_server(
            root / "host", *given, PAGODA_POLICY="lru", **variables
        ) as server:
            yield server
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def honest() -> Iterator[Server]:
    """A machine that all tests of this module share."""
    with machine() as server:
        yield server


def give(server: Server, keys: Sequence[bytes]) -> None:
    """Store a chain on one machine."""
    with tier_on(
        PagodaServerClient(server.url), queue_chunks=4096, **PATIENT
    ) as tier:
        for done in ends(tier.store(chunks_of(keys), ROOT)):
            assert done.ok


def announce(directory_server: Server, keys: Sequence[bytes], url: str) -> None:
    """Announce keys for a machine: whoever can write to the directory can do that."""
    connection = PeerDirectory(directory_server.url).connection().open(until())
    connection.announce(keys, url, until())
    connection.close()


def found_in(directory_server: Server) -> PeersClient:
    """Return the neighbours that the directory names."""
    return PeersClient(
        [],
        directory=PeerDirectory(directory_server.url),
        look_seconds=30.0,
        clock=QuickClock(),
    )


def named(url: str, *, sends_token: bool = False) -> PeersClient:
    return PeersClient(
        [PeerUrl(url, False, sends_token)], look_seconds=30.0, clock=QuickClock()
    )


class Impostor(Evil):
    """Answers requests as `how` says, and keeps every byte that it receives.

    "older": it asks for the token itself. "silent about it": it answers as if no token were needed.
    "challenge": it asks for proofs, accepts them, and has none. "repeats": as that, with the nonce
    and the proofs that a real server once sent to somebody else.
    """

    def __init__(
        self, how: str, nonce: str = "", proofs: Sequence[str] = ()
    ) -> None:
        self.how = how
        self.received = b""
        self._nonce = nonce or secrets.token_hex(16)
        self._proofs = proofs
        super().__init__()

    def talk(self, client: socket.socket) -> None:
        proofs = list(self._proofs)
        while True:
            head = b""
            while b"\r\n\r\n" not in head:
                piece = client.recv(1 << 16)
                if not piece:
                    return
                head += piece
                self.received += piece
            client.sendall(self._answer(head, proofs))

    def _answer(self, head: bytes, proofs: list[str]) -> bytes:
        is_question = b"Authorization: Pagoda\r\n" in head
        method = head.split(b" ")[0]
        if self.how == "older":
            return raw_answer(401, b"", 0, {"WWW-Authenticate": "Bearer"})
        if is_question and self.how != "silent about it":
            return raw_answer(
                401, b"", 0, {"WWW-Authenticate": f"Pagoda nonce={self._nonce}"}
            )
        more = {"Pagoda-Proof": proofs.pop(0)} if proofs else {}
        if method == b"POST":
            return raw_answer(200, b'{"found": 3}', more=more)
        if method == b"GET":
            return raw_answer(200, bytes(4096 + 4096), more=more)
        return raw_answer(404 if method == b"HEAD" else 201, b"", 0, more)

    @property
    def proofs_received(self) -> list[bytes]:
        return re.findall(rb"Authorization: (Pagoda \S+)\r\n", self.received)


HOWS = ["older", "silent about it", "challenge"]


@pytest.fixture
def impostor(request: pytest.FixtureRequest) -> Iterator[Impostor]:
    made = Impostor(request.param)
    yield made
    made.close()


def worth_nothing_at(server: Server, impostor: Impostor) -> None:
    """Try all that an impostor has received at a server that has the same token."""
    assert TOKEN.encode() not in impostor.received
    requests = re.findall(
        rb"(\S+) (\S+) HTTP/1.1\r\nHost: (\S+)\r\n(?:.*\r\n)*?Authorization: (\S.*)\r\n",
        impostor.received,
    )
    for method, target, host, authorization in requests:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        for name in (host.decode(), f"127.0.0.1:{server.port}"):
            headers = {"Host": name, "Authorization": authorization.decode()}
            client.request(method.decode(), target.decode(), headers=headers)
            answer = client.getresponse()
            answer.read()
            assert answer.status in (401, 421, 429), authorization
            assert "Pagoda-Proof" not in answer.headers
        client.close()


@pytest.mark.parametrize("impostor", HOWS, indirect=True)
def test_an_impostor_in_the_directory_gets_nothing_and_nothing_is_taken_from_it(
    directory_server: Server,
    honest: Server,
    impostor: Impostor,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = fresh_keys(3)
    announce(directory_server, keys, f"http://127.0.0.1:{impostor.port}")
    with tier_on(found_in(directory_server), **PATIENT) as tier:
        assert tier.match_prefix(keys, namespace=ROOT) == 0
        assert tier.refusal is not None
        assert tier.refusal[0] is Reason.IO_ERROR
        assert (
            "update it" in tier.refusal[1] or "did not prove" in tier.refusal[1]
        )
        assert None not in load(tier, keys)
    assert impostor.received
    assert f"127.0.0.1:{impostor.port}" in caplog.text
    assert keys[0] not in impostor.received  # what is asked for is not sent to it
    assert bool(impostor.proofs_received) == (impostor.how == "challenge")
    worth_nothing_at(honest, impostor)


@pytest.mark.parametrize("impostor", HOWS, indirect=True)
@pytest.mark.parametrize("option", ["peers", "remote"])
def test_an_impostor_at_a_configured_address_gets_nothing_either(
    honest: Server, impostor: Impostor, option: str
) -> None:
    """Somebody changed the name, or answers instead of the server."""
    keys = fresh_keys(3)
    url = f"http://127.0.0.1:{impostor.port}"
    client = named(url) if option == "peers" else PagodaServerClient(url)
    with tier_on(client, **PATIENT) as tier:
        assert tier.match_prefix(keys, namespace=ROOT) == 0
        assert None not in load(tier, keys)
        if option == "remote":
            chunks = chunks_of(keys)
            for done in ends(tier.store(chunks, ROOT)):
                assert not done.ok
            for chunk in chunks:
                assert bytes(chunk.payload[:64]) not in impostor.received
    assert impostor.received
    assert keys[0] not in impostor.received
    worth_nothing_at(honest, impostor)


def test_answers_that_were_recorded_are_no_answers(honest: Server) -> None:
    """Later it answers by itself: with the nonce of the real server, and the proofs of all its
    answers.
    """
    keys = fresh_keys(3)
    give(honest, keys)
    impostor = Recorder(honest.port)
    url = f"http://127.0.0.1:{impostor.port}"
    try:
        with tier_on(named(url), **PATIENT) as tier:
            assert tier.match_prefix(keys, namespace=ROOT) == 3
        impostor.repeat()
        with tier_on(named(url), **PATIENT) as tier:
            assert tier.match_prefix(keys, namespace=ROOT) == 0
            assert tier.refusal is not None
            assert "did not prove" in tier.refusal[1]
    finally:
        impostor.close()


class Recorder(Impostor):
    """Passes bytes on to a real server and keeps its answers, until it repeats them."""

    def __init__(self, true_port: int) -> None:
        self._true_port = true_port
        self._answers = ""
        super().__init__("records")

    def repeat(self) -> None:
        """From now on answer without the server."""
        nonce = re.search(r"nonce=(\w+)", self._answers)
        self._proofs = re.findall(r"Pagoda-Proof: (\w+)", self._answers)
        assert nonce
        assert len(self._proofs) >= 2
        self._nonce = nonce[1]
        self.how = "repeats"
        self.cut()

    def talk(self, client: socket.socket) -> None:
        """Serve one connection."""
        if self.how == "repeats":
            super().talk(client)
            return
        with socket.create_connection(
            ("127.0.0.1", self._true_port), timeout=30.0
        ) as truth:
            threading.Thread(
                target=self._pass_down, args=(truth, client), daemon=True
            ).start()
            while piece := client.recv(1 << 16):
                truth.sendall(piece)

    def _pass_down(self, truth: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := truth.recv(1 << 16):
                self._answers += piece.decode("latin-1")
                client.sendall(piece)


def test_who_passes_requests_on_must_be_named(
    directory_server: Server, honest: Server
) -> None:
    """It is in the directory with its own address, and passes everything on to a real server."""
    keys = fresh_keys(3)
    give(honest, keys)
    with proxy_to(honest.port) as between:
        url = f"http://127.0.0.1:{between.port}"
        announce(directory_server, keys, url)
        with tier_on(found_in(directory_server), **PATIENT) as tier:
            assert tier.match_prefix(keys, namespace=ROOT) == 0
            assert tier.refusal is not None
            assert "--advertise" in tier.refusal[1]
            assert None not in load(tier, keys)
        with tier_on(named(url), **PATIENT) as tier:  # a forwarded port
            assert tier.match_prefix(keys, namespace=ROOT) == 3
            assert load(tier, keys) == [None] * 3


@pytest.mark.slow
def test_a_server_is_found_by_the_address_that_it_advertises(
    directory_server: Server,
) -> None:
    with proxy_to(1) as between:
        url = f"http://localhost:{between.port}"
        with machine(
            "--advertise", url, PAGODA_LOOKUP=directory_server.url
        ) as server:
            between.target = ("127.0.0.1", server.port)
            keys = fresh_keys(3)
            give(server, keys)
            announce(directory_server, keys, url)
            with tier_on(found_in(directory_server), **PATIENT) as tier:
                assert tier.match_prefix(keys, namespace=ROOT) == 3
                assert load(tier, keys) == [None] * 3


def test_without_a_token_nothing_is_taken_from_who_is_found(
    directory_server: Server, monkeypatch: pytest.MonkeyPatch, honest: Server
) -> None:
    keys = fresh_keys(3)
    give(honest, keys)
    monkeypatch.setenv("PAGODA_SERVE_TOKEN", "")
    impostor = Impostor("silent about it")
    try:
        announce(directory_server, keys, f"http://127.0.0.1:{impostor.port}")
        announce(directory_server, keys, honest.url)
        with tier_on(found_in(directory_server), **PATIENT) as tier:
            assert tier.match_prefix(keys, namespace=ROOT) == 0
            assert tier.refusal is not None
            assert tier.refusal[0] is Reason.IO_ERROR
    finally:
        impostor.close()


def test_a_wrong_token_says_what_to_do(
    directory_server: Server, honest: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = fresh_keys(3)
    announce(directory_server, keys, honest.url)
    monkeypatch.setenv("PAGODA_SERVE_TOKEN", "the-token-of-another-fleet")
    for client, remedy in (
        (found_in(directory_server), "copy the file"),
        (named(honest.url), "?password_file=PATH"),
    ):
        with tier_on(client, **PATIENT) as tier:
            assert tier.match_prefix(keys, namespace=ROOT) == 0
            assert tier.refusal is not None
            assert remedy in tier.refusal[1]
            assert "401" in tier.refusal[1]


# ---- connections


def test_a_connection_that_ended_is_opened_again_with_new_proofs(
    honest: Server,
) -> None:
    keys = fresh_keys(3)
    give(honest, keys)
    with proxy_to(honest.port) as between:
        connection = PagodaServerClient(
            f"http://127.0.0.1:{between.port}"
        ).connection()
        connection.open(until())
        try:
            for _ in range(3):
                assert [
                    connection.find(ROOT, keys, until()) for _ in range(4)
                ] == [3] * 4
                made = between.connections
                between.cut(reset=False)
                assert connection.find(ROOT, keys, until()) == 3
                assert between.connections == made + 1
        finally:
            connection.close()


def test_a_large_body_is_sent_once_also_on_a_new_connection(
    honest: Server,
) -> None:
    """A small request comes before it: no answer 401 to a large one is needed to learn the
    nonce.
    """
    keys = fresh_keys(4096)
    with proxy_to(honest.port) as between:
        connection = PagodaServerClient(
            f"http://127.0.0.1:{between.port}"
        ).connection()
        try:
            assert connection.find(ROOT, keys, until()) == 0
            body = 4096 * 32
            assert body < between.up_bytes < body + 4096
        finally:
            connection.close()


def test_a_proxy_that_spreads_requests_over_connections_is_named(
    honest: Server,
) -> None:
    """As nginx does: each request comes on another connection."""
    keys = fresh_keys(3)
    give(honest, keys)
    proxy = SpreadingProxy(honest.port)
    url = f"http://127.0.0.1:{proxy.port}"
    try:
        connection = PagodaServerClient(url).connection()
        with pytest.raises(RefusedError, match="a proxy passes requests on"):
            connection.find(ROOT, keys, until())
        connection.close()
        connection = PagodaServerClient(url, sends_token=True).connection()
        assert connection.find(ROOT, keys, until()) == 3
        connection.close()
    finally:
        proxy.close()


class SpreadingProxy(Evil):
    """Sends each request to the server on a new connection."""

    def __init__(self, true_port: int) -> None:
        self._true_port = true_port
        super().__init__()

    def talk(self, client: socket.socket) -> None:
        with client.makefile("rb") as requests:
            while line := requests.readline().decode("latin-1"):
                method, target, _ = line.split(" ", 2)
                headers = dict(http.client.parse_headers(requests).items())
                body = requests.read(int(headers.get("Content-Length", "0")))
                truth = http.client.HTTPConnection(
                    "127.0.0.1", self._true_port, timeout=30
                )
                truth.request(method, target, body or None, headers)
                answer = truth.getresponse()
                content = answer.read()
                more = {
                    name: value
                    for name, value in answer.headers.items()
                    if name != "Content-Length"
                }
                length = int(answer.headers.get("Content-Length", "0"))
                client.sendall(raw_answer(answer.status, content, length, more))
                truth.close()


# ---- older and newer versions


@pytest.fixture(scope="module")
def older_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of the older version, from the history of this repository."""
    return source_of(OLDER, tmp_path_factory.mktemp(OLDER))


@pytest.mark.slow
def test_an_older_server_is_not_sent_the_token_unless_the_user_allows_it(
    directory_server: Server, older_source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = fresh_keys(3)
    with machine(PYTHONPATH=str(older_source)) as older:
        with tier_on(
            PagodaServerClient(older.url, sends_token=True), **PATIENT
        ) as tier:
            for done in ends(tier.store(chunks_of(keys), ROOT)):
                assert done.ok
        announce(directory_server, keys, older.url)
        for client, remedy in (
            (found_in(directory_server), "name it in peers with proof=off"),
            (named(older.url), "add proof=off to its URL"),
        ):
            caplog.clear()
            with tier_on(client, **PATIENT) as tier:
                assert tier.match_prefix(keys, namespace=ROOT) == 0
                assert tier.refusal is not None
                assert tier.refusal[0] is Reason.IO_ERROR
                assert "older version" in tier.refusal[1]
                assert remedy in tier.refusal[1]
            lines = [
                one
                for one in caplog.messages
                if "older version" in one and older.url in one
            ]
            assert lines
        with tier_on(named(older.url, sends_token=True), **PATIENT) as tier:
            assert tier.match_prefix(keys, namespace=ROOT) == 3
            assert load(tier, keys) == [None] * 3


_OLD_CLIENT = """
import sys, time
from pagoda.tiers.remote.pagoda_server import PagodaServerClient
from pagoda.tiers.remote.peers import PeersClient, PeerUrl
url, namespace, keys = sys.argv[1], bytes.fromhex(sys.argv[2]), [bytes.fromhex(k) for k in sys.argv[3].split(",")]
for client in (PagodaServerClient(url), PeersClient([PeerUrl(url, False)], look_seconds=30.0)):
    connection = client.connection()
    connection.open(time.monotonic() + 30)
    print(connection.find(namespace, keys, time.monotonic() + 30))
    connection.close()
"""  # noqa: E501


@pytest.mark.slow
def test_an_older_client_is_served(honest: Server, older_source: Path) -> None:
    keys = fresh_keys(3)
    give(honest, keys)
    command = [
        sys.executable,
        "-c",
        _OLD_CLIENT,
        honest.url,
        ROOT.hex(),
        ",".join(key.hex() for key in keys),
    ]
    environment = {**os.environ, "PYTHONPATH": str(older_source)}
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout.split() == ["3", "3"], done.stderr


# ---- what users write


def test_the_option_in_a_url() -> None:
    from pagoda.config.remote_urls import parse, parse_peer

    spec = parse("http://host:7777?server=pagoda&proof=off&look=80ms")
    assert dict(spec.options) == {"proof": "off"}
    assert spec.redacted.endswith("proof=off&look=80ms")
    peer = parse_peer("http://host:7777?proof=off&dns=all")
    assert dict(peer.options) == {"proof": "off", "dns": "all"}
    assert dict(parse_peer("http://host:7777").options) == {}
    for wrong in (
        "http://host:7777?server=pagoda&proof=on",
        "http://host/dav?proof=off&server=other",
    ):
        with pytest.raises(ConfigError):
            parse(wrong)


@pytest.mark.slow
def test_a_command_names_an_older_server(
    older_source: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with machine(PYTHONPATH=str(older_source)) as older:
        monkeypatch.setenv("PAGODA_PEERS", older.url)
        assert main(["config", "check"]) == 1
        said = capsys.readouterr()
        assert "older version" in said.out + said.err
        monkeypatch.setenv("PAGODA_PEERS", f"{older.url}?proof=off")
        assert main(["config", "check"]) == 0


@pytest.mark.slow
def test_kept_engines_read_over_a_server_with_a_token_of_its_own(
    shm_root: Path,
) -> None:
    """Two whole machines: an engine, its server, and an engine that reads from it."""
    first = shm_root / "first"
    second = shm_root / "second"
    with (
        serve_kit.engine(host_path=str(first), host_size=16 << 20) as producer,
        serve_kit.server(first) as served,
    ):
        producer.store(1, 4)
        url = f"http://:{serve_kit.TOKEN}@127.0.0.1:{served.address[1]}"
        with serve_kit.engine(
            host_path=str(second), host_size=16 << 20, peers=[url], worth_it=False
        ) as reader:
            wait_until(
                lambda: (
                    reader.command("retrieve", 1, 4)
                    == f"{4 * serve_kit.CHUNK} True"
                )
            )
