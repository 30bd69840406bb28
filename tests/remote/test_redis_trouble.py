"""A connection to a Redis that is away, full of hate, or not ours to use: an error in time, and
never more.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.metrics import Reason
from pagoda.codec import HEADER_BYTES
from pagoda.tiers.base import Bytes
from pagoda.tiers.remote.redis import PIECE_BYTES, RedisClient, RedisConnection
from pagoda.tiers.remote.store_client import (
    GetRequest,
    ListingDeadline,
    ListingTimeout,
    PutRequest,
    PutResult,
    RefusedError,
    Usage,
)
from testbed.patience import Patience
from testbed.programs import need
from testbed.servers import authority, free_port, redis_server
from tests.remote.chunks import begun_since, walk
from tests.remote.proxy import black_hole
from tests.remote.redis_kit import redis_client

need("redis-server")
redis = pytest.importorskip("redis")

MIB = 1 << 20
LATE = 0.7  # after a deadline, in seconds of an idle machine
ROOT = b"\x01" * 32
KEY = b"\x07" * 32
PAGE = np.random.default_rng(1).integers(0, 255, HEADER_BYTES, np.uint8)
STORED = np.random.default_rng(2).integers(0, 255, 24 * MIB + 1, np.uint8)


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def always() -> bool:
    return True


def put(
    connection: RedisConnection, stored: Bytes, until: float, key: bytes = KEY
) -> PutResult:
    (claim,) = connection.claim(ROOT, [key], until)
    return claim or connection.put(
        PutRequest(ROOT, key, PAGE, stored, always), until
    )


def get(connection: RedisConnection, room: Bytes, until: float) -> int | None:
    return connection.get(
        GetRequest(ROOT, KEY, np.zeros(HEADER_BYTES, np.uint8), lambda: room),
        until,
    )


@contextlib.contextmanager
def ends_by(until: float) -> Iterator[None]:
    """What is inside raises an OSError, not much later than `until`."""
    patience = Patience(until - time.monotonic() + LATE)
    with pytest.raises(OSError):
        yield
    assert not patience.ended, patience.said()


def works(connection: RedisConnection) -> None:
    key = os.urandom(32)
    connection.ping(soon())
    assert put(connection, STORED[: 2 * MIB], soon(), key) is PutResult.STORED
    assert connection.find(ROOT, [key], soon()) == 1
    room = np.zeros(2 * MIB, np.uint8)
    assert (
        connection.get(
            GetRequest(ROOT, key, np.zeros(HEADER_BYTES, np.uint8), lambda: room),
            soon(),
        )
        == 2 * MIB
    )
    assert np.array_equal(room, STORED[: 2 * MIB])
    connection.close()


# access


def test_the_right_password_works_and_a_wrong_one_is_refused() -> None:
    with redis_server(password="geheim/@:%") as server:
        right = f"redis://:geheim%2F%40%3A%25@127.0.0.1:{server.port}/3"
        works(RedisClient(right).connection().open(soon()))
        assert RedisClient(right).address == f"redis://127.0.0.1:{server.port}/3"
        for wrong in (right.replace("geheim", "falsch"), server.url):
            with pytest.raises(
                RefusedError, match=r"WRONGPASS|NOAUTH"
            ) as refused:
                RedisClient(wrong).connection().open(soon())
            assert refused.value.reason is Reason.IO_ERROR
            assert "geheim" not in str(refused.value)
            assert "falsch" not in str(refused.value)


def test_a_unix_socket_and_a_database() -> None:
    with redis_server(password="geheim") as server:
        url = f"unix://:geheim@{server.socket}?db=2"
        remote = RedisClient(url)
        works(remote.connection().open(soon()))
        assert remote.address == f"unix://{server.socket}?db=2"
        with redis.Redis(port=server.port, password="geheim", db=2) as client:
            assert client.dbsize() == 1
    with pytest.raises(OSError):
        remote.connection().open(soon())


def test_the_documented_user_may_do_all_we_do_and_no_more() -> None:
    """The rule of docs/how-to/redis.md."""
    page = (
        Path(__file__).parents[2] / "docs" / "how-to" / "redis.md"
    ).read_text()
    (rule,) = [
        line.strip()
        for line in page.splitlines()
        if line.strip().startswith("ACL SETUSER pagoda")
    ]
    with redis_server() as server, redis_client(server) as client:
        client.execute_command(rule)
        remote = RedisClient(
            f"redis://pagoda:PASSWORD@127.0.0.1:{server.port}/1", ttl_seconds=60
        )
        works(remote.connection().open(soon()))
        url = f"redis://pagoda:PASSWORD@127.0.0.1:{server.port}"
        connection = RedisClient(url, second_sight=True).connection().open(soon())
        assert connection.claim(ROOT, [KEY], soon()) == [PutResult.UNSEEN]
        for size in (100, 3 * MIB):
            assert put(connection, STORED[:size], soon()) is PutResult.STORED
            assert (
                connection.put(
                    PutRequest(
                        ROOT, b"\x08" * 32, PAGE, STORED[:size], lambda: False
                    ),
                    soon(),
                )
                is PutResult.STALE
            )
            assert isinstance(connection.usage(soon()), Usage)
            assert connection.count_by_namespace(walk(5)) == {ROOT: 1}
            assert connection.remove(ROOT, [KEY], soon()) == 1
        assert connection.clear(ROOT, walk(5)) == 0
        other = RedisClient(
            f"redis://pagoda:PASSWORD@127.0.0.1:{server.port}", prefix="else"
        )
        with pytest.raises(RefusedError, match="NOPERM") as refused:
            other.connection().open(soon())
        assert refused.value.reason is Reason.IO_ERROR
        assert client.dbsize() == 0


@pytest.mark.parametrize("size", [100, 3 * MIB])
def test_a_user_that_may_only_read(size: int) -> None:
    with redis_server() as server, redis_client(server) as client:
        client.execute_command(
            "ACL SETUSER reader on >x ~* -@all +exists +hget +select"
        )
        connection = (
            RedisClient(f"redis://reader:x@127.0.0.1:{server.port}")
            .connection()
            .open(soon())
        )
        with pytest.raises(RefusedError, match="NOPERM"):
            put(connection, STORED[:size], soon())
        connection.ping(soon())
        assert connection.find(ROOT, [KEY], soon()) == 0
        assert client.dbsize() == 0


@pytest.mark.slow
def test_tls_needs_the_right_authority(tmp_path: Path) -> None:
    with redis_server(tls=True) as server:
        url = f"{server.url}?ssl_ca_certs={server.ca}"
        works(RedisClient(url).connection().open(soon()))
        stranger = authority(tmp_path)
        for wrong in (
            f"{server.url}?ssl_ca_certs={stranger}",
            server.url,
            server.url.replace("rediss", "redis"),
        ):
            with ends_by(soon(2)):
                RedisClient(wrong).connection().open(soon(2))
        connection = RedisClient(url).connection().open(soon())
        server.stop()
        with ends_by(until := soon(0.5)):
            put(connection, STORED, until)
        with ends_by(until := soon(0.5)):
            RedisClient(url).connection().open(until)


def await_chunk(url: str) -> None:
    """Return when a replica has what its master had."""
    patience = Patience(30)
    while not patience.ended:
        with contextlib.suppress(OSError):  # LOADING
            connection = RedisClient(url).connection().open(soon())
            try:
                if connection.find(ROOT, [KEY], soon()):
                    return
            finally:
                connection.close()
        time.sleep(0.05)
    pytest.fail("the replica has no copy")


def test_a_replica_that_only_reads() -> None:
    with (
        redis_server("--repl-diskless-sync-delay", "0") as first,
        redis_server("--replicaof", "127.0.0.1", str(first.port)) as second,
    ):
        writer = RedisClient(first.url).connection().open(soon())
        assert put(writer, STORED[: 2 * MIB], soon()) is PutResult.STORED
        await_chunk(second.url)
        reader = RedisClient(second.url).connection().open(soon())
        room = np.zeros(2 * MIB, np.uint8)
        assert get(reader, room, soon()) == 2 * MIB
        assert np.array_equal(room, STORED[: 2 * MIB])
        for size in (100, 3 * MIB):
            with pytest.raises(RefusedError, match="READONLY") as refused:
                put(reader, STORED[:size], soon(), b"\x09" * 32)
            assert refused.value.reason is Reason.IO_ERROR
        with pytest.raises(RefusedError, match="READONLY"):
            reader.remove(ROOT, [KEY], soon())
        reader.ping(soon())


def test_a_replica_without_its_master_does_not_answer() -> None:
    options = (
        "--replicaof",
        "127.0.0.1",
        str(free_port()),
        "--replica-serve-stale-data",
        "no",
    )
    with (
        redis_server(*options) as server,
        pytest.raises(OSError, match="MASTERDOWN"),
    ):
        RedisClient(server.url).connection().open(soon())


# unreachable servers


@pytest.mark.parametrize(
    "host", ["no-such-host.invalid", "x" * 70, "..", "127.0.0.1:1"]
)
def test_a_host_without_a_server_is_an_error_in_time(host: str) -> None:
    with ends_by(soon(3)):
        RedisClient(f"redis://{host}").connection().open(soon(3))


def test_a_connection_that_nobody_takes() -> None:
    """The kernel's queue of connections is full: no answer at all, as from a machine that is
    off.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        fill = [socket.socket() for _ in range(4)]
        for each in fill:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
        with ends_by(until := soon(0.5)):
            RedisClient(f"redis://127.0.0.1:{port}").connection().open(until)
        for each in fill:
            each.close()


@pytest.mark.slow
def test_a_name_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def slow(*args: object, **options: object) -> list[object]:
        release.wait(20)
        raise socket.gaierror("too late")

    remote = RedisClient("redis://somewhere:1")
    before = threading.enumerate()
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        for _ in range(12):  # no more threads than a few are left waiting
            with ends_by(until := soon(0.1)):
                remote.connection().open(until)
        assert len(begun_since(before, "pagoda-redis-connect")) <= 8
    finally:
        release.set()


@pytest.mark.slow
def test_a_host_whose_first_address_leads_nowhere_is_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with redis_server() as server, black_hole() as hole:
        places = [("127.0.0.1", port) for port in (hole, server.port)]
        found = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        connection = (
            RedisClient("redis://somewhere:1").connection().open(soon(4.0))
        )
        assert connection.find(bytes(32), [bytes(32)], soon(4.0)) == 0
        connection.close()


@contextlib.contextmanager
def during(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    timer = threading.Timer(seconds, act)
    timer.start()
    yield
    timer.join(60)


@pytest.mark.slow
@pytest.mark.parametrize("act", ["kill", "stop", "restart"])
@pytest.mark.parametrize("verb", ["put", "get", "find"])
def test_a_server_that_goes_under_way(act: str, verb: str) -> None:
    with redis_server() as server:
        remote = RedisClient(server.url)
        connection = remote.connection().open(soon())
        assert put(connection, STORED, soon()) is PutResult.STORED
        room = np.zeros_like(STORED)
        steps: dict[str, Callable[[float], object]] = {
            "put": lambda until: put(connection, STORED, until, os.urandom(32)),
            "get": lambda until: get(connection, room, until),
            "find": lambda until: connection.find(ROOT, [KEY] * 1000, until),
        }
        until = soon(1.5)
        with during(0.05, getattr(server, act)), ends_by(until):
            while True:
                steps[verb](until)
        with pytest.raises(OSError):
            connection.ping(soon())
        connection.close()
        if act == "stop":
            # the kernel accepts the connection, but there is no answer
            with ends_by(late := soon(0.3)):
                remote.connection().open(late)
            server.cont()
        if act == "kill":
            with ends_by(soon(1)):
                remote.connection().open(soon(1))
            server.restart()
        works(remote.connection().open(soon()))


@pytest.mark.slow
def test_a_put_that_ran_into_a_stopped_server_leaves_whole_chunks_only() -> None:
    with redis_server() as server, redis_client(server) as client:
        remote = RedisClient(server.url)
        for pause in (0.0, 0.003, 0.01):
            connection = remote.connection().open(soon())
            with during(pause, server.stop), contextlib.suppress(OSError):
                while True:
                    put(connection, STORED, soon(0.2), os.urandom(32))
            connection.close()
            server.cont()
        time.sleep(2.5)
        reader = remote.connection().open(soon())
        assert client.dbsize() == sum(reader.count_by_namespace(walk(5)).values())
        for name in client.keys("*"):
            assert client.hlen(name) == 1 + -(-STORED.nbytes // PIECE_BYTES)


def test_a_link_that_is_aborted() -> None:
    with redis_server() as server:
        connection = RedisClient(server.url).connection().open(soon())
        server.stop()
        patience = Patience(5)
        with during(0.2, connection.abort), pytest.raises(OSError):
            connection.ping(soon(20))
        assert not patience.ended, patience.said()
        connection.close()
        connection.close()


def test_a_forked_child_makes_links_of_its_own() -> None:
    with redis_server() as server:
        remote = RedisClient(server.url)
        connection = remote.connection().open(soon())
        child = os.fork()
        if not child:
            try:
                del connection
                own = remote.connection().open(soon())
                os._exit(
                    0 if put(own, STORED[:100], soon()) is PutResult.STORED else 1
                )
            finally:
                os._exit(2)
        patience = Patience(20)
        while (
            not (ended := os.waitpid(child, os.WNOHANG))[0] and not patience.ended
        ):
            time.sleep(0.02)
        if not ended[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert ended[1] == 0
        assert connection.find(ROOT, [KEY], soon()) == 1, "the parent's continues"


# malicious servers


class Liar:
    """A server that greets as it should and then sends `answer`, whatever it is asked; it reads all
    that comes.
    """

    def __init__(
        self, answer: bytes, then: str, greeting: bytes = b":0\r\n" * 4
    ) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._answer = answer
        self._then = then
        self._greeting = greeting
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError), self._listener.accept()[0] as peer:
            peer.settimeout(60)
            peer.recv(4096)
            peer.sendall(self._greeting)
            peer.recv(1, socket.MSG_PEEK)
            reader = threading.Thread(
                target=self._read, args=(peer,), daemon=True
            )
            reader.start()
            try:
                self._lie(peer)
            finally:
                with contextlib.suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)
                reader.join(60)

    def _lie(self, peer: socket.socket) -> None:
        peer.sendall(self._answer)
        drips = self._then == "drip"
        more = (
            b"x"
            if drips
            else (self._answer or b"x") * (1 + 10000 // (1 + len(self._answer)))
        )
        while self._then != "close" and not self._stop.wait(
            0.002 if drips else 0
        ):
            peer.sendall(more)

    def _read(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while peer.recv(1 << 16):
                pass

    def __enter__(self) -> Liar:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._listener.close()
        self._thread.join(60)


PIECE = b"$1048576\r\n" + b"p" * MIB + b"\r\n"
LIES = {
    "nothing": b"",
    "huge": b"$109951162777600\r\n",
    "large": b"$536870912\r\n" + b"q" * 100000,
    "negative": b"$-17\r\n",
    "line": b"+" + b"w" * 100000,
    "number": b":" + b"1" * 3000,
    "array": b"*2147483647\r\n",
    "nested": b"*1\r\n" * 1000,
    "wrong type": b"+OK\r\n" * 50,
    "right type": b":1\r\n" * 50,
    "strings": b"$3\r\nabc\r\n" * 50,
    "arrays": b"*2\r\n$1\r\n7\r\n*1\r\n$3\r\nabc\r\n" * 50,
    "nils": b"$-1\r\n" * 50,
    "errors": b"-ERR password is geheim\r\n" * 50,
    "page": b"$4096\r\n" + b"h" * 4096 + b"\r\n" + PIECE,
    "page and huge": b"$4096\r\n" + b"h" * 4096 + b"\r\n$1048577\r\n",
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "three": b"%1\r\n+a\r\n:1\r\n",
}
CALLS: dict[str, Callable[[RedisConnection, float], object]] = {
    "find": lambda connection, until: connection.find(ROOT, [KEY] * 10, until),
    "put": lambda connection, until: put(connection, STORED[: 2 * MIB], until),
    "small put": lambda connection, until: put(connection, STORED[:100], until),
    "get": lambda connection, until: get(
        connection, np.zeros(3 * MIB, np.uint8), until
    ),
    "remove": lambda connection, until: connection.remove(ROOT, [KEY], until),
    "clear": lambda connection, until: connection.clear(ROOT, walk(0.3)),
    "census": lambda connection, until: connection.count_by_namespace(walk(0.3)),
    "usage": lambda connection, until: connection.usage(until),
    "ping": lambda connection, until: connection.ping(until),
}


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("then", ["close", "drip", "flood"])
def test_a_liar_is_left_in_time(lie: str, then: str) -> None:
    for name, call in CALLS.items():
        with Liar(LIES[lie], then) as liar:
            connection = RedisClient(liar.url).connection().open(soon())
            until = soon(0.3)
            patience = Patience(0.3 + LATE)
            tracemalloc.start()
            try:
                with contextlib.suppress(OSError, RefusedError):
                    came = call(connection, until)
                    assert name != "get" or came is None, (
                        "nobody has sent three pieces"
                    )
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert not patience.ended, (name, patience.said())
            assert peak < 24 * MIB, name
            connection.close()


@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        b"-ERR I know: geheim\r\n" * 2,
        b"+",
        b"$99999999999\r\n",
        b"+OK\r\n" * 9,
    ],
)
def test_a_liar_at_the_door(greeting: bytes) -> None:
    with Liar(b"", "drip", greeting) as liar:
        until = soon(0.4)
        patience = Patience(0.4 + LATE)
        with contextlib.suppress(OSError, RefusedError):
            RedisClient(liar.url.replace("//", "//:geheim@")).connection().open(
                until
            )
        assert not patience.ended, patience.said()


@pytest.mark.slow
def test_no_error_contains_the_password() -> None:
    with Liar(b"", "drip", b"-ERR you said geheim\r\n" * 5) as liar:
        url = liar.url.replace("//", "//:geheim@")
        connection = RedisClient(url).connection()
        with pytest.raises(RefusedError) as refused:
            connection.open(soon(2))
        connection.close()
        assert str(refused.value) == "ERR you said ***"


@contextlib.contextmanager
def scanned(answers: Iterator[bytes]) -> Iterator[RedisConnection]:
    """A connection to a server that answers each SCAN with the next of these, and everything else
    with a number.
    """

    def serve() -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as peer:
            while asked := peer.recv(1 << 20):
                if b"SCAN" in asked:
                    answer = next(answers)
                elif b"INFO" in asked:
                    answer = b":0\r\n" * 4
                else:
                    answer = b":0\r\n"
                peer.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        connection = (
            RedisClient(f"redis://127.0.0.1:{listener.getsockname()[1]}")
            .connection()
            .open(soon())
        )
        try:
            yield connection
        finally:
            connection.close()
            thread.join(60)


@pytest.mark.parametrize("call", ["clear", "census"])
def test_a_walk_over_names_without_end_ends_at_one_deadline(call: str) -> None:
    name = b"pagoda:1:%b:{%b}" % (ROOT.hex().encode(), KEY.hex().encode())
    page = b"*2\r\n$1\r\n7\r\n*1\r\n$%d\r\n%b\r\n" % (len(name), name)
    with scanned(itertools.repeat(page)) as connection:
        # each step is quick
        patience = Patience(5.0)
        given = ListingDeadline(5.0, 0.5)
        with pytest.raises(ListingTimeout, match=r"not ended after 0\.5 s"):
            connection.clear(
                ROOT, given
            ) if call == "clear" else connection.count_by_namespace(given)
        assert not patience.ended, patience.said()


def test_a_loading_server_does_not_count_as_answering() -> None:
    greeting = b"-LOADING Redis is loading the dataset in memory\r\n" * 4
    with (
        Liar(b"", "drip", greeting) as liar,
        pytest.raises(OSError, match="LOADING"),
    ):
        RedisClient(liar.url).connection().open(soon(2))
