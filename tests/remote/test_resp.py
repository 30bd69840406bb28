"""RESP on a connected socket: what is read and sent, and that no peer can make it wait, fill memory
or lose step.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pagoda.tiers.remote.resp import (
    NUMBER,
    ErrorReply,
    Reply,
    ReplyShape,
    RespConnection,
    command,
    command_parts,
)
from pagoda.tiers.remote.socket_keepalive import abort
from testbed.patience import Patience
from testbed.servers import authority

MIB = 1 << 20
ANY = ReplyShape(b":+$*", 512, items=1 << 14, depth=2)
# a busy machine's slack after a deadline, in seconds: a wait for the other end would never end
LATE = 30.0
Peer = tuple[RespConnection, socket.socket]
_beside: list[threading.Thread] = []


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("authority")
    authority(root)
    return root


@pytest.fixture(params=["unix", "tcp", "tls"])
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    """A RespConnection and the other end of its connection."""
    ours, theirs = socket.socketpair() if request.param == "unix" else tcp_pair()
    if request.param == "tls":
        ours, theirs = encrypted(
            ours, theirs, request.getfixturevalue("certificates")
        )
    theirs.settimeout(60)
    connection = RespConnection(ours)
    try:
        yield connection, theirs
    finally:
        abort(connection._socket)
        with contextlib.suppress(OSError):
            theirs.shutdown(socket.SHUT_RDWR)
        # else one may send on, into the next test's socket of the same number
        while _beside:
            _beside.pop().join(60)
        connection._socket.close()
        theirs.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def encrypted(
    ours: socket.socket, theirs: socket.socket, root: Path
) -> tuple[socket.socket, socket.socket]:
    there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    there.load_cert_chain(root / "server.crt", root / "server.key")
    here = ssl.create_default_context(cafile=str(root / "ca.crt"))
    done: list[socket.socket] = []
    thread = threading.Thread(
        target=lambda: done.append(there.wrap_socket(theirs, server_side=True))
    )
    thread.start()
    client = here.wrap_socket(ours, server_hostname="127.0.0.1")
    thread.join(60)
    return client, done[0]


def beside(work: Callable[[], object]) -> threading.Thread:
    """Do `work` on another thread until it ends or its socket is closed."""

    def run() -> None:
        with contextlib.suppress(OSError, ValueError):
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    _beside.append(thread)
    return thread


def asked(connection: RespConnection, number: int = 1) -> None:
    connection.send([command(b"PING")] * number, number, soon())


def test_commands_are_encoded_without_copies() -> None:
    assert command(b"GET", b"a\r\nb") == b"*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n"
    parts = command_parts(b"SET", b"k", memoryview(b"value"))
    assert b"".join(parts) == command(b"SET", b"k", b"value")
    assert isinstance(parts[1], memoryview)
    two = command_parts(b"HSET", memoryview(b"a"), b"b", memoryview(b""), b"c")
    assert b"".join(two) == command(b"HSET", b"a", b"b", b"", b"c")


@pytest.mark.parametrize(
    ("sent", "value"),
    [
        (b"+OK\r\n", b"OK"),
        (b":-12\r\n", -12),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"$0\r\n\r\n", b""),
        (b"$4\r\na\r\nb\r\n", b"a\r\nb"),
        (b"*0\r\n", []),
        (b"*2\r\n$1\r\n7\r\n*2\r\n$1\r\na\r\n:3\r\n", [b"7", [b"a", 3]]),
        (b"-OOM no room\r\n", ErrorReply("OOM", "OOM no room")),
        (
            b"*2\r\n:1\r\n-ERR no such key\r\n",
            [1, ErrorReply("ERR", "ERR no such key")],
        ),
        (b"-\r\n", ErrorReply("", "")),
    ],
)
@pytest.mark.parametrize("pace", [1000, 1])
def test_replies_are_read_whatever_their_pieces(
    peer: Peer, sent: bytes, value: Reply, pace: int
) -> None:
    connection, theirs = peer
    asked(connection, 2)
    both = sent + b":1\r\n"
    for start in range(0, len(both), pace):
        theirs.sendall(both[start : start + pace])
    assert connection.read_reply(soon(), ANY) == value
    assert connection.read_reply(soon(), ANY) == 1
    connection.check_usable()


def test_an_error_is_one_printable_line_of_bounded_length(peer: Peer) -> None:
    connection, theirs = peer
    asked(connection)
    theirs.sendall(b"-ERR \x1b[31m\xff\n" + b"x" * 3000 + b"\r\n")
    said = connection.read_reply(soon(), ANY)
    assert isinstance(said, ErrorReply)
    assert said.text.startswith("ERR ?[31m")
    assert len(said.text) <= 200
    assert "\n" not in said.text
    assert "\x1b" not in said.text


def test_a_long_string_is_cut_and_skipped(peer: Peer) -> None:
    connection, theirs = peer
    asked(connection, 2)
    thread = beside(
        lambda: theirs.sendall(b"$1000000\r\n" + b"y" * 1000000 + b"\r\n+OK\r\n")
    )
    assert connection.read_reply(soon(), ReplyShape(b"$", 10)) == b"y" * 10
    assert connection.read_reply(soon(), ANY) == b"OK"
    thread.join(60)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 4096, MIB - 1, MIB])
def test_bulk_bytes_come_straight_into_their_place(peer: Peer, size: int) -> None:
    connection, theirs = peer
    content = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    asked(connection, 4)
    answer = b"$%d\r\n%b\r\n" % (size, content.tobytes())
    thread = beside(
        lambda: theirs.sendall(answer + b"$-1\r\n" + answer + b":5\r\n")
    )
    place = np.zeros(size + 1, np.uint8)
    assert connection.read_into(place.data[:size], soon()) == size
    assert np.array_equal(place[:size], content)
    assert place[size] == 0
    assert connection.read_into(place.data[:size], soon()) is None
    place[:] = 7
    assert connection.read_into(place.data, soon()) == size, (
        "it does not fit: skipped"
    )
    assert (place == 7).all()
    assert connection.read_reply(soon(), ANY) == 5
    thread.join(60)


def test_an_error_where_a_string_was_wanted(peer: Peer) -> None:
    connection, theirs = peer
    asked(connection)
    theirs.sendall(b"-WRONGTYPE no hash\r\n")
    assert connection.read_into(memoryview(bytearray(10)), soon()) == ErrorReply(
        "WRONGTYPE", "WRONGTYPE no hash"
    )
    connection.check_usable()


NONSENSE = [
    b"$99999999999\r\n",
    b"$536870913\r\n",
    b"$-2\r\n",
    b"$+5\r\nabcde\r\n",
    b"$5_0\r\n",
    b"$ 5\r\n",
    b"$\r\n",
    b"$3\r\nabcXY",
    b"*16385\r\n",
    b"*-2\r\n",
    b"*1\r\n*1\r\n*1\r\n:1\r\n",
    b"*2\r\n*16380\r\n" + b":1\r\n" * 16380 + b"*10\r\n",
    b":1.5\r\n",
    b":" + b"9" * 21 + b"\r\n",
    b"%1\r\n+a\r\n+b\r\n",
    b"_\r\n",
    b"\r\n",
    b"HTTP/1.1 400 Bad Request\r\n",
    b"x" * 10000,
    b"+" + b"x" * 1_000_000,
]


@pytest.mark.parametrize("sent", NONSENSE, ids=lambda sent: repr(sent[:20]))
@pytest.mark.parametrize("bulk", [False, True], ids=["answer", "fill"])
def test_nonsense_is_an_error_and_the_end(
    peer: Peer, sent: bytes, bulk: bool
) -> None:
    connection, theirs = peer
    asked(connection)
    beside(lambda: theirs.sendall(sent))
    place = memoryview(bytearray(100))
    tracemalloc.start()
    try:
        with pytest.raises(OSError, match=r"RESP2|out of step"):
            connection.read_into(
                place, soon()
            ) if bulk else connection.read_reply(soon(), ANY)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()
    for call in (
        connection.check_usable,
        lambda: asked(connection),
        lambda: connection.read_reply(soon(), ANY),
        lambda: connection.read_into(place, soon()),
    ):
        with pytest.raises(OSError, match="out of step"):
            call()


@pytest.mark.parametrize(
    ("shape", "sent"),
    [
        (NUMBER, b"+OK\r\n"),
        (NUMBER, b"$1\r\n1\r\n"),
        (NUMBER, b"$-1\r\n"),
        (NUMBER, b"*1\r\n:1\r\n"),
        (ReplyShape(b"+$"), b":1\r\n"),
        (ReplyShape(b":*", items=2, depth=1), b"*3\r\n:1\r\n:1\r\n:1\r\n"),
        (ReplyShape(b":*", items=2, depth=1), b"*1\r\n*1\r\n:1\r\n"),
        (ReplyShape(b":*", items=2, depth=1), b"*1\r\n+OK\r\n"),
    ],
)
def test_an_answer_of_another_shape_than_was_asked_for_ends_the_connection(
    peer: Peer, shape: ReplyShape, sent: bytes
) -> None:
    connection, theirs = peer
    asked(connection)
    theirs.sendall(sent)
    with pytest.raises(OSError, match="RESP2"):
        connection.read_reply(soon(), shape)
    with pytest.raises(OSError, match="out of step"):
        connection.check_usable()


def test_an_error_is_an_answer_of_any_shape(peer: Peer) -> None:
    connection, theirs = peer
    asked(connection)
    theirs.sendall(b"-READONLY no\r\n")
    assert connection.read_reply(soon(), NUMBER) == ErrorReply(
        "READONLY", "READONLY no"
    )
    connection.check_usable()


def test_a_connection_is_kept_alive_and_trusted_for_thirty_seconds(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, _ = peer
    connected = connection._socket
    if connected.family != socket.AF_UNIX:
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
    connection.check_usable()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 31.0)
    with pytest.raises(OSError, match="idle"):
        connection.check_usable()


def test_a_string_too_long_for_an_answer(peer: Peer) -> None:
    connection, theirs = peer
    asked(connection)
    theirs.sendall(b"$1048577\r\n")
    with pytest.raises(OSError, match="RESP2"):
        connection.read_reply(soon(), ANY)


def test_a_string_of_any_length_that_redis_can_have_is_skipped(
    peer: Peer,
) -> None:
    """A value of another program under our name: no reason to close the connection."""
    connection, theirs = peer
    asked(connection)
    thread = beside(
        lambda: theirs.sendall(b"$3000000\r\n" + bytes(3_000_000) + b"\r\n")
    )
    place = memoryview(bytearray(100))
    assert connection.read_into(place, soon()) == 3_000_000
    connection.check_usable()
    thread.join(60)


@pytest.mark.parametrize(
    "sent", [b"", b"$10\r\nabc", b"+O", b"*3\r\n:1\r\n", b"$3\r\nabc\r"]
)
def test_a_reply_that_ends_early_is_an_error(peer: Peer, sent: bytes) -> None:
    connection, theirs = peer
    asked(connection)
    theirs.sendall(sent)
    theirs.close()
    with pytest.raises(OSError):
        connection.read_reply(soon(), ANY)
    with pytest.raises(OSError, match="out of step"):
        connection.check_usable()


@pytest.mark.parametrize(
    "sent",
    [
        b"+",
        b"$1000000\r\n",
        b"*1000\r\n",
        b"$1000000\r\nx" + b"y" * 1000,
        b"*5\r\n$900\r\n",
    ],
)
def test_drips_end_at_the_deadline(peer: Peer, sent: bytes) -> None:
    connection, theirs = peer
    asked(connection)
    stop = threading.Event()

    def drip() -> None:
        theirs.sendall(sent)
        while not stop.wait(0.005):
            theirs.sendall(b"z")

    thread = beside(drip)
    place = memoryview(bytearray(1000000))
    patience = Patience(0.3 + LATE)
    with pytest.raises(TimeoutError):
        connection.read_into(place, patience.began + 0.3) if sent.startswith(
            b"$1000000\r\n"
        ) else connection.read_reply(patience.began + 0.3, ANY)
    assert patience.waited >= 0.25
    assert not patience.ended, patience.said()
    stop.set()
    thread.join(60)


def test_silence_ends_at_the_deadline(peer: Peer) -> None:
    connection, _ = peer
    asked(connection)
    patience = Patience(0.2 + LATE)
    with pytest.raises(TimeoutError):
        connection.read_reply(patience.began + 0.2, ANY)
    assert patience.waited >= 0.15
    assert not patience.ended, patience.said()


def test_who_does_not_read_is_not_waited_for(peer: Peer) -> None:
    connection, _ = peer
    patience = Patience(0.3 + LATE)
    with pytest.raises(TimeoutError):
        connection.send(
            command_parts(b"SET", b"k", memoryview(bytearray(64 * MIB))),
            1,
            patience.began + 0.3,
        )
    assert patience.waited >= 0.2
    assert not patience.ended, patience.said()


def test_who_reads_slowly_is_not_waited_for(peer: Peer) -> None:
    connection, theirs = peer
    stop = threading.Event()

    def sip() -> None:
        while not stop.wait(0.005):
            theirs.recv(1000)

    thread = beside(sip)
    patience = Patience(0.3 + LATE)
    with pytest.raises(TimeoutError):
        connection.send(
            command_parts(b"SET", b"k", memoryview(bytearray(64 * MIB))),
            1,
            patience.began + 0.3,
        )
    assert not patience.ended, patience.said()
    stop.set()
    thread.join(60)


def test_a_deadline_that_has_passed(peer: Peer) -> None:
    connection, theirs = peer
    theirs.sendall(b"+OK\r\n")
    with pytest.raises(TimeoutError):
        connection.send([command(b"PING")], 1, time.monotonic() - 1)


def test_all_parts_are_sent_whole(peer: Peer) -> None:
    connection, theirs = peer
    sizes = [0, 1, 3 * MIB + 7, *range(2000)]  # more parts than one call may have
    parts = [
        np.random.default_rng(i).integers(0, 255, size, np.uint8).data
        for i, size in enumerate(sizes)
    ]
    came = bytearray()

    def read() -> None:
        while len(came) < sum(sizes):
            came.extend(theirs.recv(1 << 16))

    thread = beside(read)
    connection.send(parts, 0, soon(10))
    thread.join(60)
    assert came == b"".join(parts)


def test_abort_wakes_who_waits(peer: Peer) -> None:
    connection, _ = peer
    asked(connection)
    threading.Timer(0.2, lambda: abort(connection._socket)).start()
    patience = Patience(50)
    with pytest.raises(OSError):
        connection.read_reply(patience.began + 100, ANY)
    assert not patience.ended, patience.said()


def test_abort_wakes_who_sends(peer: Peer) -> None:
    connection, _ = peer
    threading.Timer(0.2, lambda: abort(connection._socket)).start()
    patience = Patience(50)
    with pytest.raises(OSError):
        connection.send(
            command_parts(b"SET", b"k", memoryview(bytearray(64 * MIB))),
            1,
            patience.began + 100,
        )
    assert not patience.ended, patience.said()


def test_abort_never_sends_in_the_clear(certificates: Path) -> None:
    raw, theirs = tcp_pair()
    ours, there = encrypted(raw, theirs, certificates)
    seen = bytearray()
    connection = RespConnection(ours)
    tap = socket.socket(fileno=there.detach())  # what is on the line from here on
    tap.settimeout(60)

    def read() -> None:
        while part := tap.recv(1 << 16):
            seen.extend(part)

    thread = beside(read)
    threading.Timer(0.1, lambda: abort(connection._socket)).start()
    with pytest.raises(OSError):
        while True:
            connection.send([b"PLAINTEXT" * 1000], 0, soon())
    thread.join(60)
    connection._socket.close()
    tap.close()
    assert seen
    assert b"PLAINTEXT" not in seen


def test_an_answer_nobody_asked_for_is_noticed(peer: Peer) -> None:
    connection, theirs = peer
    asked(connection)
    theirs.sendall(b"+OK\r\n+AND\r\n")
    time.sleep(0.05)
    assert connection.read_reply(soon(), ANY) == b"OK"
    # TLS or a slow machine may not have had it yet
    if connection._start == connection._end:
        pytest.skip("the second answer came later")
    with pytest.raises(OSError, match="out of step"):
        connection.check_usable()


def test_an_answer_nobody_read_is_noticed(peer: Peer) -> None:
    connection, theirs = peer
    asked(connection, 2)
    theirs.sendall(b"+OK\r\n+AND\r\n")
    assert connection.read_reply(soon(), ANY) == b"OK"
    with pytest.raises(OSError, match="out of step"):
        connection.check_usable()


@pytest.mark.parametrize("seed", range(4))
def test_answers_of_one_digit_are_read_together_and_others_one_by_one(
    peer: Peer, seed: int
) -> None:
    connection, theirs = peer
    draw = np.random.default_rng(seed)
    usual = [b":0\r\n", b":1\r\n"]
    rare = [b":7\r\n", b":-1\r\n", b":11\r\n", b":000\r\n"]
    sent = [
        usual[draw.integers(2)]
        if draw.random() < 0.97
        else rare[draw.integers(4)]
        for _ in range(5000)
    ]
    whole = b"".join(sent)
    cuts = sorted(draw.integers(0, len(whole), 7).tolist())

    def answer() -> None:
        for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            theirs.sendall(whole[begin:end])

    beside = threading.Thread(target=answer)
    beside.start()
    connection.send([b"x"], len(sent) + 1, soon(LATE))
    found = connection.read_bits(len(sent), soon(LATE))
    beside.join()
    assert found == [int(one[1:]) == 1 for one in sent]
    theirs.sendall(b":5\r\n")
    assert connection.read_reply(soon(LATE)) == 5  # in step


def test_an_error_among_many_answers_is_returned_and_the_rest_is_read(
    peer: Peer,
) -> None:
    connection, theirs = peer
    connection.send([b"x"], 4, soon())
    theirs.sendall(b":1\r\n-NOPERM no\r\n:0\r\n:1\r\n")
    found = connection.read_bits(3, soon())
    assert isinstance(found, ErrorReply)
    assert found.code == "NOPERM"
    assert connection.read_reply(soon()) == 1


@pytest.mark.parametrize(
    "wrong",
    [b"+OK\r\n", b"$1\r\n1\r\n", b":x\r\n\r\n", b":1\r1", b"*1\r\n:1\r\n"],
)
def test_answers_that_are_no_numbers_end_the_connection(
    peer: Peer, wrong: bytes
) -> None:
    connection, theirs = peer
    connection.send([b"x"], 2, soon())
    theirs.sendall(b":1\r\n" + wrong + b":1\r\n")
    with pytest.raises(OSError):
        connection.read_bits(2, soon(1.0))
    with pytest.raises(OSError):
        connection.read_reply(soon())
