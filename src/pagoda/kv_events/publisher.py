"""A publisher of KV events over ZMQ, for engines that do not have one.

Like vLLM's messages, each message has three frames: the topic, a number (8 bytes, big endian) and a batch in msgpack,
`[time, [event, ...], data-parallel rank]`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count

import msgspec

from pagoda.clock import Deadline
from pagoda.errors import ConfigError
from pagoda.kv_events.event_types import BlocksCleared

try:
    import zmq
except ImportError as missing:
    raise ConfigError(f"KV events need pyzmq: pip install 'pagodakv[events]' ({missing})") from None

# the most bytes that wait for one slow router; later messages are lost for that router
_MOST_BEHIND_BYTES = 128 << 20
_FEWEST_BEHIND = 256  # the number of messages that may always wait
_SUBSCRIBES = b"\1"  # the first byte that an XPUB socket receives for a subscription; zero is the end of one
_GIVEN_UP_SECONDS = 0.5  # how long to wait for the endpoint of a closed publisher


class EventPublisher:
    """An `Outlet` that sends immediately. After `__init__` only one thread may use it; it never waits."""

    cleared = 0
    is_full = False

    def __init__(
        self, endpoint: str, topic: str = "", rank: int | None = None, *, message_bytes: int
    ) -> None:
        """Listen on `endpoint`, such as "tcp://*:5557". `rank`: this engine's data-parallel rank, for the messages.

        `message_bytes`: about the size of the largest message; it decides how many may wait for a slow router.
        Raises ConfigError if the endpoint cannot be used.
        """
        self._topic, self._rank = topic.encode(), rank
        # the numbers also rise after a restart, because a router ignores numbers that it has seen
        self._numbers = count(int(time.time() * 1000))
        self._encode = msgspec.msgpack.Encoder().encode
        # a PUB socket that reports subscriptions
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.SNDHWM, max(_FEWEST_BEHIND, _MOST_BEHIND_BYTES // message_bytes))
            self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
            if "[" in endpoint:
                self._socket.setsockopt(zmq.IPV6, 1)
            self._bind(endpoint)
        except (zmq.ZMQError, ValueError, TypeError) as error:
            self._socket.close()
            raise ConfigError(
                f"KV events at {endpoint!r}: {error}; choose another endpoint, such as tcp://*:5557"
            ) from None
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _bind(self, endpoint: str) -> None:
        """Bind to the endpoint. Waits for a moment if a publisher that was just closed still has it."""
        deadline = Deadline(_GIVEN_UP_SECONDS)
        while True:
            try:
                self._socket.bind(endpoint)
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or deadline.passed:
                    raise
            time.sleep(0.01)

    def newcomers(self) -> bool:
        """Whether a router has subscribed since the last call; it receives what is sent from now on."""
        subscribed = False
        with suppress(zmq.Again):
            while True:
                subscribed |= self._socket.recv(zmq.NOBLOCK).startswith(_SUBSCRIBES)
        return subscribed

    def report_all(self) -> Iterator[None]:
        """Send, in the first step, that all blocks are cleared; the caller then sends everything again."""
        self.send([BlocksCleared()])
        yield

    def send(self, events: Sequence[object]) -> None:
        """Send one message to all subscribers."""
        batch = self._encode([time.time(), events, self._rank])
        self._socket.send_multipart((self._topic, next(self._numbers).to_bytes(8, "big"), batch), zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()
