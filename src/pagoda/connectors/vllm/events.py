"""vLLM's KV events of the medium "CPU": they tell routers of requests which chunks host memory holds.

The rule: a chunk is reported as stored when every process can read it, that is in the first `take` after the workers
have committed all of its parts. It is reported as removed within about a second of its end (or of the next step, if
there is no step before). The scheduler does not commit and gets no message about commits; it reads the published
columns, without a lock. Reported are only chunks that this engine stored, or found when it wanted to store them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from pagoda.cache.host_slots import HostSlots
from pagoda.clock import Clock
from pagoda.ledger import Outcome, Present, Reserved

__all__ = ["StoredEvents"]

_SWEEP_SECONDS = 1.0
_GROUP = 0  # the only group of KV memory this connector works with


class StoredEvents:
    """The chunks of this engine that were reported, or will be reported, as stored; at most one for each host slot.

    For the scheduler's thread only. No method waits.
    """

    def __init__(
        self, slots: HostSlots, chunk_tokens: int, block_tokens: int, clock: Clock | None = None
    ) -> None:
        self._slots = slots
        self._block_tokens = block_tokens
        self._blocks = chunk_tokens // block_tokens
        self._clock = clock or Clock()
        self._swept = self._clock.monotonic_ns()
        self._generation = np.zeros(slots.count, np.uint64)
        self._reported = np.zeros(slots.count, np.bool_)
        self._hashes: dict[int, bytes] = {}  # of each reported slot: the hashes of its blocks, concatenated
        self._holder: dict[bytes, int] = {}  # the last of these hashes -> a slot; two may hold the same
        self._pending: dict[int, BlockStored] = {}  # by slot: reserved, and not known to be committed
        self._removed: list[bytes] = []

    def note(self, request: Any, first: int, outcomes: Sequence[Outcome]) -> None:
        """Remember the outcomes of a reserve for chunks `first`, `first` + 1, ... of a request; reports nothing yet."""
        for chunk, outcome in enumerate(outcomes, first):
            if isinstance(outcome, Reserved | Present):
                self._note(request, chunk, outcome.slot, outcome.generation)

    def take(self) -> Iterable[KVCacheEvent]:
        """Return the events since the last call: stored chunks at once, removed ones as the sweep finds them."""
        now = self._clock.monotonic_ns()
        if now - self._swept >= _SWEEP_SECONDS * 1e9:
            self._swept = now
            self._sweep()
        removed, self._removed = self._removed, []
        # in this order: a removed chunk may have been stored again, and a chunk stored now was not seen as removed
        stored = self._newly_stored() if self._pending else []
        return stored if not removed else [self._removal(removed), *stored]

    def clear(self) -> None:
        """Report everything as removed in the next `take`, because it is no longer served."""
        self._pending.clear()
        for slot in list(self._hashes):
            self._gone(slot)

    def _note(self, request: Any, chunk: int, slot: int, generation: int) -> None:
        begin, end = chunk * self._blocks, (chunk + 1) * self._blocks
        hashes = request.block_hashes[begin:end]
        known = slot in self._hashes or slot in self._pending
        if len(hashes) < self._blocks or (known and self._generation[slot] == generation):
            return
        if slot in self._hashes:  # the chunk that was reported for that slot is gone
            self._gone(slot)
        self._generation[slot] = generation
        self._pending[slot] = self._stored(request, begin, end)

    def _stored(self, request: Any, begin: int, end: int) -> BlockStored:
        """Return the event for blocks [begin, end) of a request, with the bare hashes in it."""
        tokens, lora = self._block_tokens, request.lora_request
        extra, item = [], 0
        for block in range(begin, end):
            keys, item = generate_block_hash_extra_keys(request, block * tokens, (block + 1) * tokens, item)
            extra.append(keys)
        return BlockStored(
            block_hashes=list(request.block_hashes[begin:end]),
            parent_block_hash=maybe_convert_block_hash(request.block_hashes[begin - 1]) if begin else None,
            token_ids=list(request.all_token_ids[begin * tokens : end * tokens]),
            block_size=tokens,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(extra),
            group_idx=_GROUP,
            session_id=request.session_id,
        )

    def _newly_stored(self) -> list[KVCacheEvent]:
        slots = np.fromiter(self._pending, np.int64, len(self._pending))
        ready = self._slots.ready(slots, self._generation[slots])
        events: list[KVCacheEvent] = []
        for slot in slots[ready].tolist():
            event = self._pending.pop(slot)
            hashes: list[bytes] = event.block_hashes
            self._hashes[slot], self._reported[slot] = b"".join(hashes), True
            before = self._holder.get(hashes[-1])
            self._holder[hashes[-1]] = slot
            if before is not None:  # stored again before its removal was seen, and already reported
                del self._hashes[before]
                self._reported[before] = False
                continue
            event.block_hashes = [maybe_convert_block_hash(BlockHash(each)) for each in hashes]
            events.append(event)
        return events

    def _sweep(self) -> None:
        for slot in self._ended(np.fromiter(self._pending, np.int64, len(self._pending))):
            del self._pending[slot]
        for slot in self._ended(np.flatnonzero(self._reported)):
            self._gone(slot)

    def _ended(self, slots: npt.NDArray[np.int64]) -> list[int]:
        ended: list[int] = slots[~self._slots.still_valid(slots, self._generation[slots])].tolist()
        return ended

    def _gone(self, slot: int) -> None:
        joined, self._reported[slot] = self._hashes.pop(slot), False
        size = len(joined) // self._blocks
        hashes = [joined[at : at + size] for at in range(0, len(joined), size)]
        del self._holder[hashes[-1]]
        self._removed += hashes

    def _removal(self, hashes: list[bytes]) -> BlockRemoved:
        return BlockRemoved(
            block_hashes=[maybe_convert_block_hash(BlockHash(each)) for each in hashes],
            medium=MEDIUM_CPU,
            group_idx=_GROUP,
        )
