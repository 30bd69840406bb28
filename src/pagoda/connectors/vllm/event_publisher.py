"""Sends an engine's KV events to routers: vLLM's own publisher, extended for a second thread.

vLLM publishes events at the end of a step. An engine that waits for requests takes no step, and
would not report what other processes evict, or what it found at its start. So the connector gives
vLLM another publisher: with the same messages, but it accepts events at any time, and where it
listens, strangers cost a bounded amount (`EventSocket`).
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
import zmq
from vllm.distributed import kv_events
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVCacheEvent

from pagoda.kv_events.event_socket import EventSocket

_MOST_WAITING = 4096
_PIECE = 64  # blocks in one message
# the first byte that an XPUB socket receives for a subscription; zero is the end of one
_SUBSCRIBES = b"\1"
_MOST_SUBSCRIPTION_BYTES = 1 << 10
_number = count()


def _nothing() -> None:
    """Nobody waits for news."""


def outlet_of(vllm_config: Any) -> EventOutlet | None:
    """Return the outlet of an engine's events; None if events are off. Changes the config like
    `EventOutlet`.
    """
    config = vllm_config.kv_events_config
    wanted = (
        config is not None
        and config.enable_kv_cache_events
        and config.publisher != "null"
    )
    return EventOutlet(config) if wanted else None


class EventOutlet:
    """The outlet of an engine's events. Thread-safe."""

    def __init__(self, config: Any) -> None:
        """Replace the publisher that vLLM will make from this `KVEventsConfig`, if it is the one
        over ZMQ.

        Changes the config's `publisher` until then. Other publishers are used by vLLM's scheduler
        only: their events wait for a step.
        """
        self._publisher: LivePublisher | None = None
        self._lock = threading.Lock()
        self._waiting: list[KVCacheEvent] = []
        self._look: Callable[[], None] = _nothing

        outlet = weakref.ref(self)  # vLLM never drops a registered publisher

        def made(*args: Any, **kwargs: Any) -> LivePublisher:
            # the next engine of this process may get the same config
            config.publisher = "zmq"
            publisher = LivePublisher(*args, **kwargs)
            if (mine := outlet()) is not None:
                mine._publisher = publisher
                publisher.on_news(mine._look)
            return publisher

        if config.publisher == "zmq":
            config.publisher = f"pagoda-zmq-{next(_number)}"
            kv_events.EventPublisherFactory.register_publisher(
                config.publisher, made
            )

    @property
    def cleared(self) -> int:
        """How often the engine reported that all its blocks are cleared; routers take that for its
        tiers too.
        """
        return self._publisher.cleared if self._publisher is not None else 0

    def newcomers(self) -> bool:
        """Whether routers have subscribed since the last call, and so have missed earlier events.
        Never waits.
        """
        return self._publisher is not None and self._publisher.newcomers()

    def report_all(self) -> Iterator[None]:
        """Report step by step that all blocks are cleared, then those in the engine's own
        memory.
        """
        return (
            iter(()) if self._publisher is None else self._publisher.report_all()
        )

    def send(self, events: Sequence[KVCacheEvent]) -> None:
        """Publish events: at once if the publisher is over ZMQ, otherwise with the next step of the
        engine.
        """
        if self._publisher is not None:
            self._publisher.send(events)
            return
        for event in events:
            if isinstance(event, BlockStored):
                event.token_ids = msgspec.msgpack.decode(event.token_ids)
        with self._lock:
            self._waiting += events

    def on_news(self, look: Callable[[], None]) -> None:
        """Let `look` be called when a router has subscribed, or the engine has cleared its
        blocks.
        """
        self._look = look
        if self._publisher is not None:
            self._publisher.on_news(look)

    @property
    def is_full(self) -> bool:
        """Whether too many events wait for a step, so that no more should be sent."""
        return len(self._waiting) >= _MOST_WAITING

    def take(self) -> list[KVCacheEvent]:
        """Return the events that wait for a step."""
        with self._lock:
            events = self._waiting
            self._waiting = []
        return events


class LivePublisher(kv_events.ZmqEventPublisher):
    """vLLM's publisher over ZMQ, for two threads, and for routers that connect late.

    A PUB socket keeps no messages for routers that are not connected. A router that connects, also
    after a restart of the engine, gets everything from the beginning. So this class remembers the
    blocks in the engine's own memory.
    """

    _ctx: zmq.Context[Any]
    _endpoint: str
    _hwm: int
    _pub: Any
    _event_queue: queue.Queue[Any]
    # whether a router has subscribed since the last call of `newcomers`
    _subscribed: bool
    _look: Callable[[], None] = staticmethod(_nothing)

    def __init__(self, *args: Any, topic: str = "", **kwargs: Any) -> None:
        self._topic = topic
        super().__init__(*args, topic=topic, **kwargs)
        # The numbers also rise after a restart, because a router ignores numbers that it has seen.
        self._seq_gen = count(int(time.time() * 1000))
        # Keeps the events of a block in order.
        self._order = threading.Lock()
        # by group and hash: the event that reported a block, and its index there
        self._device: dict[tuple[int | None, Any], tuple[BlockStored, int]] = {}
        self.cleared = 0

    def on_news(self, look: Callable[[], None]) -> None:
        """Let `look` be called when a router has subscribed, or the engine has cleared its
        blocks.
        """
        self._look = look
        if isinstance(self._pub, _ListeningSocket):
            self._pub.on_subscribed = look
        look()

    def publish(self, events: kv_events.EventBatch) -> None:
        """Publish the events of a step of the engine."""
        with self._order:
            for event in events.events:
                if isinstance(event, AllBlocksCleared):
                    self._device.clear()
                elif event.medium == kv_events.MEDIUM_GPU and isinstance(
                    event, BlockStored
                ):
                    group = event.group_idx
                    self._device.update(
                        ((group, name), (event, n))
                        for n, name in enumerate(event.block_hashes)
                    )
                elif event.medium == kv_events.MEDIUM_GPU:
                    for name in event.block_hashes:
                        self._device.pop((event.group_idx, name), None)
            super().publish(events)
        if any(isinstance(event, AllBlocksCleared) for event in events.events):
            self.cleared += 1
            self._look()

    def send(self, events: Sequence[KVCacheEvent]) -> None:
        """Publish events outside of steps; none after `shutdown`, which vLLM calls before the
        connector's.
        """
        if self._running:
            super().publish(
                kv_events.KVEventBatch(ts=time.time(), events=list(events))
            )

    def newcomers(self) -> bool:
        """Whether a router has subscribed since the last call; it receives what is sent from now
        on.
        """
        if isinstance(self._pub, _ListeningSocket):
            return self._pub.newcomers()
        # a router that subscribes right now counts at the next call
        if not self._subscribed:
            return False
        self._subscribed = False
        return True

    def _socket_setup(self) -> None:
        """Make the sockets; vLLM makes those that are not there yet."""
        self._subscribed = False
        if self._endpoint.startswith("tcp://") and self._is_bind_endpoint(
            self._endpoint
        ):
            self._pub = self._listen()
            super()._socket_setup()
            return
        # It connects to one router, or listens where only this user can connect: a socket of
        # vLLM's, but an XPUB socket, which is a PUB socket that reports subscriptions.
        context = self._ctx
        self._ctx = _Subscribed(shadow=self._ctx)
        try:
            super()._socket_setup()
        finally:
            self._ctx = context
        # only vLLM's thread may use the sockets; it calls `get` before each message, and ten times
        # per second
        self._event_queue = _Watched(
            self._event_queue.maxsize, self._note_subscriptions
        )

    def _listen(self) -> _ListeningSocket:
        """Listen where vLLM would."""
        endpoint = self._endpoint
        # vLLM then listens at this node's address only
        if endpoint == "tcp://*:0":
            node = kv_events.get_ip()
            endpoint = f"tcp://[{node}]:0" if ":" in node else f"tcp://{node}:0"
        made = _ListeningSocket(
            endpoint, topic=self._topic.encode(), most_messages=self._hwm or None
        )
        if endpoint != self._endpoint:
            self._endpoint = made.endpoint
        return made

    def _note_subscriptions(self) -> None:
        with suppress(zmq.ZMQError):  # there is no more, or the socket is closed
            while self._pub is not None:
                if self._pub.recv(zmq.NOBLOCK).startswith(_SUBSCRIBES):
                    self._subscribed = True
                    self._look()

    def report_all(self) -> Iterator[None]:
        """Report step by step that all blocks are cleared, then those in the engine's own
        memory.
        """
        self.send([AllBlocksCleared()])
        with self._order:
            names = list(self._device)
        for at in range(0, len(names), _PIECE):
            with self._order:  # only blocks that are still there
                known = (
                    self._device.get(name) for name in names[at : at + _PIECE]
                )
                events = [_block(*one) for one in known if one is not None]
                if events:
                    self.send(events)
            yield


class _ListeningSocket(EventSocket):
    """An `EventSocket` with the two methods of ZeroMQ's sockets that vLLM calls."""

    def send_multipart(self, frames: Sequence[bytes]) -> None:
        self.send(frames)

    def close(self, linger: int | None = None) -> None:
        super().close()


class _Subscribed(zmq.Context[Any]):
    """Makes XPUB sockets, which report each subscription, instead of PUB sockets."""

    def socket(self, socket_type: int, *args: Any, **kwargs: Any) -> Any:
        made = super().socket(
            zmq.XPUB if socket_type == zmq.PUB else socket_type, *args, **kwargs
        )
        if socket_type == zmq.PUB:
            made.setsockopt(zmq.XPUB_VERBOSE, 1)
            made.setsockopt(zmq.MAXMSGSIZE, _MOST_SUBSCRIPTION_BYTES)
        return made


class _Watched(queue.Queue[Any]):
    """A queue that calls a function on the thread that takes an item."""

    def __init__(self, most: int, watch: Callable[[], None]) -> None:
        super().__init__(most)
        self._watch = watch

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self._watch()
        return super().get(block, timeout)


def _block(event: BlockStored, number: int) -> BlockStored:
    """Return the event of one of the blocks that an event has reported.

    Events of windows and states leave out blocks, but not their tokens: for those only the hash is
    reported.
    """
    size = event.block_size
    if len(event.token_ids) != size * len(event.block_hashes):
        one = event.block_hashes[number : number + 1]
        return msgspec.structs.replace(
            event,
            block_hashes=one,
            parent_block_hash=None,
            token_ids=[],
            extra_keys=None,
        )
    return msgspec.structs.replace(
        event,
        block_hashes=event.block_hashes[number : number + 1],
        parent_block_hash=event.block_hashes[number - 1]
        if number
        else event.parent_block_hash,
        token_ids=event.token_ids[number * size : (number + 1) * size],
        extra_keys=event.extra_keys[number : number + 1]
        if event.extra_keys
        else None,
    )
