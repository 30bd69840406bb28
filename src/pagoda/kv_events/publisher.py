"""A publisher of KV events over ZMQ, for engines that do not have one.

Like vLLM's messages, each message has three frames: the topic, a number (8 bytes, big endian) and a
batch in msgpack, `[time, [event, ...], data-parallel rank]`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import msgspec

from pagoda.base.errors import ConfigError
from pagoda.kv_events.event_socket import EventSocket
from pagoda.kv_events.event_types import BlocksCleared


class EventPublisher:
    """An `Outlet` that sends immediately. After `__init__` only one thread may use it; it never
    waits.
    """

    cleared = 0
    is_full = False

    def __init__(
        self, endpoint: str, topic: str = "", rank: int | None = None
    ) -> None:
        """Listen on `endpoint`, such as "tcp://10.0.0.7:5557" (see `EventSocket`).

        `rank`: this engine's data-parallel rank, for the messages. Raises ConfigError if the
        endpoint cannot be used.
        """
        self._topic = topic.encode()
        self._rank = rank
        # the numbers also rise after a restart, because a router ignores numbers that it has seen
        self._numbers = count(int(time.time() * 1000))
        self._encode = msgspec.msgpack.Encoder().encode
        try:
            self._socket = EventSocket(endpoint, topic=self._topic)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            why = (
                error.strerror
                if isinstance(error, OSError) and error.strerror
                else error
            )
            raise ConfigError(
                f"KV events at {endpoint!r}: {why}; choose another endpoint, such as "
                "tcp://127.0.0.1:5557"
            ) from None
        self.endpoint: str = self._socket.endpoint

    def newcomers(self) -> bool:
        """Whether a router has subscribed since the last call; it receives what is sent from now
        on.
        """
        return self._socket.newcomers()

    def report_all(self) -> Iterator[None]:
        """Send, in the first step, that all blocks are cleared; the caller then sends everything
        again.
        """
        self.send([BlocksCleared()])
        yield

    def on_news(self, look: Callable[[], None]) -> None:
        """Let `look` be called, on the thread of the socket, when a router has subscribed."""
        self._socket.on_subscribed = look

    def send(self, events: Sequence[object]) -> None:
        """Send one message to all subscribers."""
        batch = self._encode([time.time(), events, self._rank])
        self._socket.send(
            (self._topic, next(self._numbers).to_bytes(8, "big"), batch)
        )

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()
