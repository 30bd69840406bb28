"""What lies below the device: the host slots and the lower tiers of a cache, as the block manager asks them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from pagoda.blocks.plans import Place
from pagoda.blocks.request_state import Record
from pagoda.cache import Cache
from pagoda.cache.hit import Hit
from pagoda.keys import Namespace
from pagoda.ledger import Match
from pagoda.metrics import Reason

__all__ = ["Storeys"]

_NOTHING = Match(np.empty(0, np.int64), np.empty(0, np.uint64), None)


class Storeys:
    """The tiers below the device, or none of them. Not thread-safe. Trouble there is a shorter result."""

    def __init__(self, cache: Cache | None) -> None:
        self._cache = cache
        self.slots = None if cache is None else cache.slots
        self.min_hit_tokens = 0 if cache is None else cache.config.min_hit_tokens
        self._lower = () if cache is None else cache.tiers[0 if self.slots is None else 1 :]
        self._epoch = 0  # without a cache: how often the weights were changed
        self._fetches: dict[bytes, tuple[frozenset[bytes], Future[Hit]]] = {}  # by the last key of the run
        self.host_seconds = 0.0
        self.fetch_seconds = 0.0

    # ---- names

    def root(self, lora: str | None, salt: str | None) -> bytes:
        """What the keys of an adapter and a tenant begin with, under the present weights."""
        if self.slots is not None:
            return self.slots.namespace(lora, salt)
        return _root(lora, salt, self._epoch)

    @staticmethod
    def lasting_root(lora: str | None, salt: str | None) -> bytes:
        """The same under any weights: for what is found again when they have changed."""
        return _root(lora, salt, 0)

    def weights_changed(self) -> None:
        """Change every root, for good."""
        self._epoch += 1
        if self._cache is not None:
            self._cache.weights_changed()

    # ---- host

    def find(self, keys: Sequence[bytes], start: int, *, touch: bool = True) -> Match:
        """The leading run of `keys` in host slots, leased for a moment, unless they are not to be touched."""
        if self.slots is None or not keys:
            return _NOTHING
        began = time.perf_counter()
        match = self.slots.find(keys, start, touch=touch)
        self.host_seconds += time.perf_counter() - began
        return match

    def hold(
        self,
        slots: npt.NDArray[np.int64],
        generations: npt.NDArray[np.uint64],
        whole: Callable[[int], int],
    ) -> int:
        """Keep chunks until they are released: how many leading ones could be, cut by `whole` to what can be used."""
        if self.slots is None:
            return 0
        held = self.slots.hold(slots, generations)
        count = max(0, whole(held.index(False) if False in held else len(held)))
        behind = [i for i in range(count, len(held)) if held[i]]
        if behind:
            self.slots.release(slots[behind], generations[behind])
        return count

    # ---- lower tiers

    def below(self, keys: Sequence[bytes], start: int, record: Record) -> int:
        """How many of `keys`, which stand at positions from `start` on, lower tiers have in a row."""
        if self._cache is None or not self._lower or not keys:
            return 0
        hit = self._cache.lookup(
            None,
            counted=False,
            keys=self._placed(keys, start, record.block_tokens),
            lora=record.lora,
            salt=record.salt,
            tiers=self._lower,
        )
        return hit.num_tokens // record.block_tokens

    def fetch(self, keys: Sequence[bytes], start: int, record: Record) -> Future[Hit] | None:
        """Begin to bring keys[start:] up to the host; the same run is brought once. None without lower tiers."""
        if self._cache is None or self.slots is None or not self._lower:
            return None
        self._fetches = {key: fetch for key, fetch in self._fetches.items() if not fetch[1].done()}
        known = self._fetches.get(keys[-1])
        if known is not None and keys[start] in known[0]:
            return known[1]
        began = time.perf_counter()
        future = self._cache.prefetch(
            None,
            keys=self._placed(keys[start:], start, record.block_tokens),
            lora=record.lora,
            salt=record.salt,
        )
        future.add_done_callback(lambda _: self._fetched(time.perf_counter() - began))
        self._fetches[keys[-1]] = (frozenset(keys[start:]), future)
        return future

    def _fetched(self, seconds: float) -> None:
        self.fetch_seconds += seconds

    @staticmethod
    def _placed(keys: Sequence[bytes], start: int, block_tokens: int) -> list[tuple[int, int, bytes]]:
        begins = range(start * block_tokens, (start + len(keys)) * block_tokens, block_tokens)
        return [(at, at + block_tokens, key) for at, key in zip(begins, keys, strict=True)]

    # ---- both

    def where(self, key: bytes) -> Place:
        """Where a key is that the device has not. Changes nothing."""
        if self._cache is None or self.slots is None:
            return Place.FREED
        if len(self.slots.find([key], 0, touch=False).slots):
            return Place.HOST
        if any(key in keys and not future.done() for keys, future in self._fetches.values()):
            return Place.LOADING
        return Place.STORAGE if self._cache.holders(key) else Place.FREED

    def by_tier(self, record: Record, blocks: int) -> dict[str, int]:
        """The tokens of so many blocks in host slots, by the tier where they were before the request's prefetch."""
        rest, tokens = blocks * record.block_tokens, dict[str, int]()
        if record.fetch is not None and record.fetch.done() and not record.fetch.cancelled():
            for tier, brought in record.fetch.result().by_tier.items():
                if tier in self._lower:
                    tokens[tier] = min(rest, brought)
                    rest -= tokens[tier]
        tokens["host"] = rest
        return {tier: n for tier, n in tokens.items() if n}

    def asked(self, record: Record, wanted: int, held: int, reason: Reason | None) -> None:
        """Count a question about `wanted` blocks, of which `held` could be had, where the cache counts."""
        if self.slots is not None:
            self.slots.asked(wanted * record.block_tokens, self.by_tier(record, held), reason)
            if self.slots.records:
                self.slots.requested(record.keys, record.num_tokens)


def _root(lora: str | None, salt: str | None, epoch: int) -> bytes:
    only = Namespace("device blocks only", weights_epoch=epoch)
    return only.with_(lora=lora or "", salt=salt or "").root
