"""The tiers below the device: the host slots and the lower tiers of a cache, as the block manager
uses them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from pagoda.base.metrics import Reason
from pagoda.blocks.manager_results import Place
from pagoda.blocks.request_state import RequestState
from pagoda.cache import Cache
from pagoda.cache.call import CallOptions
from pagoda.cache.results import Hit
from pagoda.keys import Namespace, require_version
from pagoda.ledger import Match

_NOTHING = Match(np.empty(0, np.int64), np.empty(0, np.uint64), None)


class LowerTiers:
    """The tiers below the device; without a cache there are none. Not thread-safe. A failure gives
    a shorter result.
    """

    def __init__(self, cache: Cache | None) -> None:
        self._cache = cache
        self.slots = None if cache is None else cache.slots
        self.min_hit_tokens = 0 if cache is None else cache.config.min_hit_tokens
        # while True, nothing is found or loaded, and no new moves are planned
        self.paused = False
        self._epoch = 0  # without a cache: how often the weights have changed
        # by the last key of the run
        self._fetches: dict[bytes, tuple[frozenset[bytes], Future[Hit]]] = {}
        self.host_seconds = 0.0
        self.fetch_seconds = 0.0

    @property
    def _lower(self) -> tuple[str, ...]:
        """The names of the tiers below the host; one that was left out at the start may come
        later.
        """
        if self._cache is None:
            return ()
        if self.slots is None:
            return self._cache.tiers
        return self._cache.tiers[1:]

    # ---- roots

    def root(self, lora: str | None, salt: str | None) -> bytes:
        """Return the root of the keys of an adapter and a tenant, under the present weights."""
        if self.slots is not None:
            return self.slots.namespace(lora, salt)
        return _root(lora, salt, self._epoch)

    @staticmethod
    def lasting_root(lora: str | None, salt: str | None) -> bytes:
        """Return a root that is the same for all weights, so that pins are found after a change of
        weights.
        """
        return _root(lora, salt, 0)

    def weights_changed(self, version: str) -> None:
        """Change every root permanently; with a non-empty version, to the roots of that version.
        ValueError, and nothing is changed, unless it is a str.
        """
        require_version(version)
        self._epoch += 1
        if self._cache is not None:
            self._cache.weights_changed(version)

    # ---- host

    def match_host(
        self, keys: Sequence[bytes], start: int, *, touch: bool = True
    ) -> Match:
        """Return the leading run of `keys` in host slots; leases it for a moment, unless `touch` is
        False.
        """
        if self.slots is None or self.paused or not keys:
            return _NOTHING
        began = time.perf_counter()
        match = self.slots.match_prefix(keys, start, touch=touch)
        self.host_seconds += time.perf_counter() - began
        return match

    def hold(self, match: Match, count: int, whole: Callable[[int], int]) -> int:
        """Hold the first `count` chunks of a match; returns how many are held, cut by `whole` to a
        usable run.
        """
        if self.slots is None:
            return 0
        slots = match.slots[:count]
        generations = match.generations[:count]
        held = self.slots.hold(slots, generations)
        count = max(0, whole(held.index(False) if False in held else len(held)))
        rest = [i for i in range(count, len(held)) if held[i]]
        if rest:
            self.slots.release(slots[rest], generations[rest])
        return count

    # ---- lower tiers

    def match_lower(
        self, keys: Sequence[bytes], start: int, request: RequestState
    ) -> int:
        """Return how many leading `keys`, whose positions begin at `start`, the lower tiers
        have.
        """
        if self._cache is None or self.paused or not self._lower or not keys:
            return 0
        options = _call_options(keys, start, request)
        options["tiers"] = self._lower
        hit = self._cache.lookup(None, counted=False, **options)
        return hit.num_tokens // request.block_tokens

    def prefetch(
        self, keys: Sequence[bytes], start: int, request: RequestState
    ) -> Future[Hit] | None:
        """Begin to load keys[start:] to the host; the same run is loaded once. None without lower
        tiers.
        """
        if self._cache is None or self.slots is None or not self._lower:
            return None
        self._fetches = {
            key: fetch
            for key, fetch in self._fetches.items()
            if not fetch[1].done()
        }
        known = self._fetches.get(keys[-1])
        if known is not None and keys[start] in known[0]:
            return known[1]
        began = time.perf_counter()
        future = self._cache.prefetch(
            None, **_call_options(keys[start:], start, request)
        )

        def ended(_: Future[Hit]) -> None:
            self.fetch_seconds += time.perf_counter() - began

        future.add_done_callback(ended)
        self._fetches[keys[-1]] = (frozenset(keys[start:]), future)
        return future

    # ---- host and lower tiers

    def where(self, key: bytes) -> Place:
        """Return the place of a key that is not on the device. Changes nothing."""
        if self._cache is None or self.slots is None:
            return Place.FREED
        if len(self.slots.match_prefix([key], 0, touch=False).slots):
            return Place.HOST
        if any(
            key in keys and not future.done()
            for keys, future in self._fetches.values()
        ):
            return Place.LOADING
        return Place.STORAGE if self._cache.holders(key) else Place.FREED

    def by_tier(self, request: RequestState, blocks: int) -> dict[str, int]:
        """Return the tokens of `blocks` blocks in host slots, by the tier that had them before the
        prefetch.
        """
        rest = blocks * request.block_tokens
        tokens = dict[str, int]()
        if (
            request.fetch is not None
            and request.fetch.done()
            and not request.fetch.cancelled()
        ):
            for tier, brought in request.fetch.result().by_tier.items():
                if tier in self._lower:
                    tokens[tier] = min(rest, brought)
                    rest -= tokens[tier]
        tokens["host"] = rest
        return {tier: n for tier, n in tokens.items() if n}

    def count_request(
        self, request: RequestState, wanted: int, held: int, reason: Reason | None
    ) -> None:
        """Count a request for `wanted` blocks, of which `held` are held, in the cache's
        counters.
        """
        if self.slots is not None:
            tokens = wanted * request.block_tokens
            by_tier = self.by_tier(request, held)
            self.slots.count_request(tokens, by_tier, reason, request.root)
            if self.slots.is_recording:
                self.slots.record_request(request.keys, request.num_tokens)


def _call_options(
    keys: Sequence[bytes], start: int, request: RequestState
) -> CallOptions:
    """Return the options of a call of the cache for `keys` of a request, whose positions begin at
    `start`.
    """
    size = request.block_tokens
    placed = [
        (at * size, (at + 1) * size, key) for at, key in enumerate(keys, start)
    ]
    return {"keys": placed, "lora": request.lora, "salt": request.salt}


def _root(lora: str | None, salt: str | None, epoch: int) -> bytes:
    only = Namespace("device blocks only", weights_epoch=epoch)
    return only.with_(lora=lora or "", salt=salt or "").root
