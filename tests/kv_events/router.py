"""A router of requests that believes the KV events that it receives."""

from __future__ import annotations

import msgspec
import zmq

from tests.cache.kit import CHUNK, Prompt

MEDIA = {"host": "CPU", "disk": "STORAGE"}


class Router:
    """What a router believes, from the messages alone: which tokens end in a block of a medium."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._socket.subscribe(topic)
        self.held: dict[str, set[int]] = {
            medium: set() for medium in MEDIA.values()
        }
        # by hash: all of a prompt up to the end of the block
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.adapters: dict[int, str | None] = {}
        self.events: list[dict[str, object]] = []
        self.numbers: list[int] = []
        self.clears = 0

    def receive(self) -> None:
        """Take in what has arrived."""
        while self._socket.poll(0):
            _, number, batch = self._socket.recv_multipart()
            self.numbers.append(int.from_bytes(number, "big"))
            for event in msgspec.msgpack.decode(batch)[1]:
                self.events.append(event)
                self._take(event)

    def _take(self, event: dict[str, object]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.clears += 1
            for held in self.held.values():
                held.clear()
            return
        names = event["block_hashes"]
        held = self.held[str(event["medium"])]
        assert isinstance(names, list)
        assert event["locality"] == "LOCAL"
        if event["type"] == "BlockRemoved":
            held.difference_update(names)
            return
        tokens = event["token_ids"]
        size = event["block_size"]
        before = event["parent_block_hash"]
        assert isinstance(tokens, list)
        assert size == CHUNK
        assert len(tokens) in (0, CHUNK * len(names))
        for at, name in enumerate(names):
            known = self.tokens.get(before, ()) if before is not None else ()  # type: ignore[call-overload]
            self.tokens[name] = (*known, *tokens[at * CHUNK : (at + 1) * CHUNK])
            self.adapters[name] = event["lora_name"]  # type: ignore[assignment]
            before = name
        held.update(names)

    def believes(self, tokens: Prompt, medium: str) -> int:
        """How many leading chunks of a prompt a medium has."""
        self.receive()
        held = {self.tokens[name] for name in self.held[medium]}
        ends = range(CHUNK, len(tokens) + 1, CHUNK)
        return next(
            (
                n
                for n, end in enumerate(ends)
                if tuple(tokens[:end].tolist()) not in held
            ),
            len(ends),
        )

    def close(self) -> None:
        self._socket.close()
