"""The socket of the publisher: what it takes from routers, and what strangers cost the engine's
process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from pagoda.kv_events import event_socket
from pagoda.kv_events.event_socket import MOST_CONNECTIONS, EventSocket
from testbed.patience import wait_until

GREETING = (b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL").ljust(64, b"\0")
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
TOPIC = b"kv@engine"


@pytest.fixture
def events() -> Iterator[EventSocket]:
    made = EventSocket("tcp://127.0.0.1:*", topic=TOPIC)
    yield made
    made.close()


@contextlib.contextmanager
def router(
    events: EventSocket, topic: bytes = b"", **options: int
) -> Iterator[zmq.Socket[bytes]]:
    """Run a router that has subscribed, with a library that we did not write."""
    with zmq.Context.instance().socket(zmq.SUB) as made:
        made.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            made.setsockopt(getattr(zmq, name), value)
        made.subscribe(topic)
        made.connect(events.endpoint)
        wait_until(events.newcomers)
        yield made


def stranger(events: EventSocket) -> socket.socket:
    port = int(events.endpoint.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), 10.0)


def is_closed(sock: socket.socket) -> bool:
    """Return whether the other side has ended a connection; waits for it."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    text = Path("/proc/self/status").read_text()
    return next(
        int(line.split()[1]) << 10
        for line in text.splitlines()
        if line.startswith("VmRSS")
    )


def test_a_router_gets_what_it_has_subscribed_to(events: EventSocket) -> None:
    bodies = [b"", b"x" * 255, b"y" * 256, b"z" * (3 << 20)]
    with router(events, TOPIC[:2]) as one, router(events, TOPIC) as same:
        for body in bodies:
            events.send([TOPIC, body])
        for each in (one, same):
            assert [each.recv_multipart() for _ in bodies] == [
                [TOPIC, body] for body in bodies
            ]
        same.unsubscribe(TOPIC)
        time.sleep(0.2)
        events.send([TOPIC, b"later"])
        assert one.recv_multipart() == [TOPIC, b"later"]
        assert not same.poll(100)
        same.subscribe(b"k")
        wait_until(events.newcomers)
        events.send([TOPIC, b"again"])
        assert same.recv_multipart() == [TOPIC, b"again"]
        assert not events.newcomers()


def test_subscriptions_to_other_topics_are_not_kept(events: EventSocket) -> None:
    """A router of several engines subscribes to the topics of all of them, at each."""
    with router(events) as made:
        for number in range(50):
            made.subscribe(b"kv@another-%d" % number)
        made.unsubscribe(b"")
        made.subscribe(TOPIC)
        wait_until(events.newcomers)
        (client,) = events._clients.values()
        assert client.prefixes == {len(TOPIC)}


@pytest.mark.slow
def test_a_router_that_checks_the_connection_is_answered(
    events: EventSocket,
) -> None:
    beat = {"HEARTBEAT_IVL": 50, "HEARTBEAT_TIMEOUT": 200, "HEARTBEAT_TTL": 1000}
    with router(events, **beat) as made:
        time.sleep(1.0)
        assert not events.newcomers()  # it would have connected again
        events.send([TOPIC, b"there"])
        assert made.recv_multipart() == [TOPIC, b"there"]


@pytest.mark.parametrize(
    "endpoint",
    [
        "ipc://{}/events",
        "ipc://@pagoda-test-{}",
        "tcp://lo:*",
        "tcp://[::1]:*",
        "tcp://*:*",
    ],
)
def test_it_listens_at_the_given_endpoint(endpoint: str, tmp_path: Path) -> None:
    where = endpoint.format(tmp_path if "@" not in endpoint else os.getpid())
    for _ in range(2):  # and again, at once
        events = EventSocket(where, topic=TOPIC)
        called = events.endpoint.replace("0.0.0.0", "127.0.0.1")
        with zmq.Context.instance().socket(zmq.SUB) as made:
            made.setsockopt(zmq.IPV6, 1)
            made.subscribe(b"")
            made.connect(called)
            wait_until(events.newcomers)
            events.send([TOPIC, b"there"])
            assert made.recv_multipart() == [TOPIC, b"there"]
        events.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\xff" + bytes(8) + b"\x7f\x01\x01",  # a version before 3
        GREETING.replace(b"NULL", b"PLAIN").ljust(64, b"\0")[:64],
        GREETING + READY.replace(b"SUB", b"REQ"),
        GREETING + b"\x04\x09\x05READY\xff\x00\x00",
        GREETING + b"\x00\x02\x01k",  # a subscription before the handshake
        GREETING + READY + b"\x02" + (4 << 20).to_bytes(8, "big") + b"\x01",
        GREETING + READY + b"\x00\x01\x01" * 1000,
    ],
)
def test_who_does_not_keep_to_the_protocol_is_disconnected(
    events: EventSocket, sent: bytes
) -> None:
    with stranger(events) as sock:
        sock.sendall(sent)
        assert is_closed(sock)
    wait_until(lambda: not events._clients)


def test_a_long_subscription_costs_no_memory(events: EventSocket) -> None:
    before = resident()
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            sock = stack.enter_context(stranger(events))
            with contextlib.suppress(ConnectionError):
                sock.sendall(
                    GREETING
                    + READY
                    + b"\x02"
                    + (4 << 20).to_bytes(8, "big")
                    + b"\x01"
                    + b"a" * (4 << 20)
                )
        with router(events):
            assert resident() - before < 20 << 20  # some of it is this test's


@pytest.mark.slow
def test_connections_are_few_and_a_router_stays_while_strangers_come(
    events: EventSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_socket, "_HANDSHAKE_SECONDS", 600.0)
    before = files()
    with router(events) as made, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(stranger(events)) for _ in range(300)]
        assert sum(map(is_closed, strangers[:260])) == 260
        assert files() - before < 300 + 2 * MOST_CONNECTIONS
        assert not events.newcomers()
        events.send([TOPIC, b"there"])
        assert made.recv_multipart() == [TOPIC, b"there"]
    wait_until(lambda: not events._clients)


@pytest.mark.slow
def test_who_does_not_end_his_handshake_is_disconnected(
    events: EventSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_socket, "_HANDSHAKE_SECONDS", 0.1)
    with router(events), stranger(events) as sock:
        sock.sendall(GREETING)
        assert is_closed(sock)
        wait_until(lambda: len(events._clients) == 1)


def test_what_the_kernel_did_not_take_of_a_first_message_counts_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing waits for a client whose buffers have just become full; the bound holds all the
    same.
    """
    monkeypatch.setattr(event_socket, "MOST_BEHIND_BYTES", 4 << 20)
    events = EventSocket("tcp://127.0.0.1:*", topic=TOPIC)
    with contextlib.closing(events), stranger(events) as sock:
        sock.sendall(GREETING + READY + b"\x00\x01\x01")
        wait_until(events.newcomers)
        # more than any kernel takes at once
        events.send([TOPIC, b"x" * (64 << 20)])
        assert events._waiting_bytes <= 4 << 20


def test_all_who_read_nothing_cost_together_what_one_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_socket, "MOST_BEHIND_BYTES", 4 << 20)
    events = EventSocket("tcp://127.0.0.1:*", topic=TOPIC)
    message = b"x" * (256 << 10)
    with contextlib.closing(events):
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                sock = stack.enter_context(stranger(events))
                sock.sendall(GREETING + READY + b"\x00\x01\x01")
                wait_until(events.newcomers)
                for _ in range(40):
                    events.send([TOPIC, message])
                    assert events._waiting_bytes <= 4 << 20
            with router(events) as made:
                events.send([TOPIC, b"there"])
                assert made.recv_multipart() == [TOPIC, b"there"]
        wait_until(lambda: not events._waiting_bytes)
