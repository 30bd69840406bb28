"""A publisher of KV events over ZMQ, for engines that have none of their own.

As from vLLM, each message has three frames: the topic, a number (8 bytes, big endian) and a batch in msgpack, `[time,
[event, ...], data-parallel rank]`.
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

_MOST_BEHIND_BYTES = 128 << 20  # that wait for one slow router; it misses what comes then
_FEWEST_BEHIND = 256  # messages
_SUBSCRIBES = b"\1"  # begins what an XPUB socket receives of a subscription; the end of one begins with zero
_GIVEN_UP_SECONDS = 0.5  # for the endpoint of a publisher that was closed


class EventPublisher:
    """An `Outlet` that sends at once. After `__init__` only one thread may use it; it waits for nobody."""

    cleared = 0
    is_full = False

    def __init__(
        self, endpoint: str, topic: str = "", rank: int | None = None, *, message_bytes: int
    ) -> None:
        """Listen on `endpoint`, such as "tcp://*:5557". `rank`: this engine's data-parallel rank, for the messages.

        `message_bytes`: of the largest of them, about: so it is known how many may wait for a slow router.
        Raises ConfigError if the endpoint cannot be used.
        """
        self._topic, self._rank = topic.encode(), rank
        # numbers that rise over restarts: a router leaves out those that it has seen
        self._numbers = count(int(time.time() * 1000))
        self._encode = msgspec.msgpack.Encoder().encode
        # a PUB socket that says who subscribes
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
        """Take the endpoint. That of a publisher which was closed just now is given up by a thread of ZMQ's."""
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
        """Whether anybody has subscribed since the last call, and so hears what is sent from now on."""
        subscribed = False
        with suppress(zmq.Again):
            while True:
                subscribed |= self._socket.recv(zmq.NOBLOCK).startswith(_SUBSCRIBES)
        return subscribed

    def tell_anew(self) -> Iterator[None]:
        """Tell, with the first step, that what was told is no longer true: all that is follows."""
        self.send([BlocksCleared()])
        yield

    def send(self, events: Sequence[object]) -> None:
        """Send one message to everybody who listens."""
        batch = self._encode([time.time(), events, self._rank])
        self._socket.send_multipart((self._topic, next(self._numbers).to_bytes(8, "big"), batch), zmq.NOBLOCK)

    def close(self) -> None:
        """End. Idempotent."""
        self._socket.close()
