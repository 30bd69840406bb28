"""Prompts of models that cannot go on after every chunk: those with sliding windows and states.

    find      the longest ending of a prompt whose whole chunks are stored
    load      the rows of the whole chunks and the ending, into an empty DynamicCache
    compute   the prompt up to its cuts, copying the ending at each
    store     whole chunks, then the endings

A prompt can go on only exactly where an ending is: one token further is a miss. All rows of a batch
go on at the same place, so there is a hit only if each row has an ending there, and rows with
padding are computed without the cache.

Endings that were copied wait in the memory of the CPU until the text is complete: three at most.

Made by `CachedModel`, for the cache of the present weights. As thread-safe as the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from pagoda.base.clock import Deadline
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import Reason
from pagoda.cache import Cache, Hit, Stored
from pagoda.connectors.endings import Endings, KeySpace
from pagoda.connectors.transformers.batch_rows import BatchRow
from pagoda.connectors.transformers.cache_shape import (
    CacheShape,
    batch_of,
    fill_cache,
    is_at,
    read_ending,
)
from pagoda.connectors.transformers.dynamic_cache import kv_of_row, room_for
from pagoda.connectors.transformers.hook_watch import HookChanges
from pagoda.connectors.transformers.model_checks import ProbedModel
from pagoda.connectors.transformers.prefill_cuts import choose_cuts, pass_over
from pagoda.connectors.transformers.stateful_probe import empty_cache
from pagoda.layout import KVLayout
from pagoda.transfer.base import Bytes, checked_slots

log = guarded_logger("pagoda.connectors")

_TRIES = 3  # to load, if chunks disappear meanwhile


@dataclass(frozen=True)
class LoadedPrompts:
    """What was loaded of the prompts of a batch."""

    cache: Any  # a DynamicCache that holds `num_tokens` tokens of each row
    num_tokens: int
    known_tokens: int  # in whole chunks that all rows have in the tiers
    hits: list[Hit]


class _CutEnding(NamedTuple):
    num_tokens: int
    payloads: list[Bytes]  # of each row


@dataclass
class ComputedPrompts:
    """The cache for `generate`, and the endings that were copied before."""

    cache: Any
    endings: list[_CutEnding] = field(default_factory=list)
    why_not: str = ""  # why what was loaded is not used


class _Found(NamedTuple):
    num_tokens: int
    known_tokens: int
    hits: list[Hit]


class StatefulPrompts:
    """The prompts of one model in one cache."""

    def __init__(
        self,
        model: Any,
        seen: ProbedModel,
        cache: Cache,
        minimum_tokens: int,
    ) -> None:
        """Args:
        model: that computes.
        seen: the probed model; it has a shape.
        cache: for its chunks and endings. ValueError if it has min_hit_tokens.
        minimum_tokens: a hit with fewer is a miss.
        """
        assert seen.shape is not None
        self._model = model
        self._seen = seen
        self._shape: CacheShape = seen.shape
        self._cache = cache
        self._endings = Endings(cache)
        self._minimum = minimum_tokens
        self._chunk_tokens = seen.layout.chunk_tokens

    # ---- load

    def load(self, rows: Sequence[BatchRow], space: KeySpace) -> LoadedPrompts:
        """Return a cache with the longest prefix that every row can go on from; count the hits.

        It never covers a whole prompt. Rows must have no padding and one length.
        """
        tokens = [row.tokens for row in rows]
        most = len(tokens[0]) - 1
        found = self._found(tokens, most, space, counted=True)
        known = found.known_tokens
        for _ in range(_TRIES):
            if not found.num_tokens:
                break
            loaded = self._loaded(tokens, found, space)
            if loaded is not None:
                return loaded
            most = found.num_tokens - 1
            found = self._found(tokens, most, space, counted=False)
        if found.num_tokens:
            hits = [
                hit.shortened(
                    0, Reason.EVICTED, "chunks disappeared while they were loaded"
                )
                for hit in found.hits
            ]
            found = _Found(0, 0, hits)
        nothing = empty_cache(self._model, self._shape)
        return LoadedPrompts(nothing, 0, known, found.hits)

    def _found(
        self,
        tokens: Sequence[Any],
        most: int,
        space: KeySpace,
        *,
        counted: bool,
    ) -> _Found:
        """Look up every row, and return where all of them can go on."""
        if len(tokens) == 1:
            return self._found_alone(tokens[0], most, space, counted=counted)
        # the longest of each row, until all rows have the same
        while most:
            lengths = {
                self._found_alone(ids, most, space, counted=False).num_tokens
                for ids in tokens
            }
            most = min(lengths)
            if len(lengths) == 1:
                break
        found = [
            self._found_alone(ids, most, space, counted=counted) for ids in tokens
        ]
        known = min(one.known_tokens for one in found)
        return _Found(
            min(one.num_tokens for one in found),
            known,
            [one.hits[0] for one in found],
        )

    def _found_alone(
        self, tokens: Any, most: int, space: KeySpace, *, counted: bool
    ) -> _Found:
        size = self._chunk_tokens
        seen: list[tuple[int, int]] = []

        def usable(hit: Hit) -> Hit:
            deadline = Deadline(self._cache.config.deadline_seconds)
            count = 0
            # there is no ending before the first chunk
            if hit.num_tokens:
                count = self._endings.find(
                    tokens,
                    whole_chunks=hit.num_tokens // size,
                    most_tokens=most,
                    payload_bytes=self._payload_bytes,
                    deadline=deadline,
                    **space,
                )
            reason, detail = hit.reason, hit.detail
            if not count and hit.num_tokens:
                reason = Reason.ABSENT
                detail = (
                    f"{hit.num_tokens} tokens are stored, but no ending: this model can go on "
                    "only where one was kept"
                )
                if deadline.passed:
                    reason = Reason.DEADLINE
                    detail = "the search for endings took too long"
            if 0 < count < self._minimum:
                reason = Reason.BELOW_MINIMUM
                detail = f"{count} of {self._minimum} tokens"
                count = 0
            seen.append((count, hit.num_tokens))
            return hit.shortened(count, reason, detail)

        hit = self._cache.lookup(
            tokens[:-1], counted=counted, usable=usable, **space
        )
        # without a count the look-up failed
        count, known = seen[-1] if seen else (0, 0)
        return _Found(count, known, [hit])

    def _payload_bytes(self, tokens: int) -> int:
        return self._shape.ending_bytes(tokens, self._chunk_tokens)

    def _loaded(
        self, tokens: Sequence[Any], found: _Found, space: KeySpace
    ) -> LoadedPrompts | None:
        """Load what was found of each row; None if a part of it is gone."""
        count = found.num_tokens
        size = self._chunk_tokens
        whole = count - count % size
        planes: list[list[Any]] = []
        if self._shape.full:
            planes = room_for(self._seen, len(tokens), count)
        payloads = []
        hits = []
        for number, ids in enumerate(tokens):
            by_tier: dict[str, int] = {}
            if whole and planes:
                kv = kv_of_row(planes, number, 0, whole, self._seen)
                hit = self._cache.retrieve(
                    ids[:whole], kv, counted=False, **space
                )
                if hit.num_tokens < whole:
                    return None
                by_tier = dict(hit.by_tier)
            ending = self._endings.load(
                ids[:count], self._payload_bytes(count), **space
            )
            if ending is None:
                return None
            payloads.append(ending.payload)
            left = count - sum(by_tier.values())
            by_tier[ending.tier] = by_tier.get(ending.tier, 0) + left
            hits.append(_hit_of(found.hits[number], count, by_tier))
        cache = empty_cache(self._model, self._shape)
        fill_cache(self._shape, cache, payloads, count, size, planes)
        if hasattr(cache, "held_tokens"):
            cache.held_tokens = count
        return LoadedPrompts(cache, count, found.known_tokens, hits)

    # ---- compute

    def computed(
        self,
        loaded: LoadedPrompts,
        input_ids: Any,
        mask: Any,
        most_tokens: int | None,
        *,
        kept: bool,
    ) -> ComputedPrompts:
        """Compute the prompts up to their cuts, and copy the ending at each; nothing, unless they
        are `kept`.

        If the model cannot, `generate` gets an empty cache and computes all. `most_tokens`: of one
        pass; None: all.
        """
        if not kept:
            return ComputedPrompts(loaded.cache)
        tokens = input_ids.shape[1]
        cuts = choose_cuts(
            tokens, self._chunk_tokens, loaded.num_tokens, loaded.known_tokens
        )
        computed = ComputedPrompts(loaded.cache)
        begin = loaded.num_tokens
        try:
            for cut in cuts:
                pass_over(
                    self._model,
                    input_ids,
                    mask,
                    begin,
                    cut,
                    loaded.cache,
                    most_tokens=most_tokens,
                )
                begin = cut
                if not is_at(self._shape, loaded.cache, cut):
                    raise ValueError(
                        f"the cache does not hold {cut} tokens as when it was probed"
                    )
                payloads = [
                    self._ending(loaded.cache, row, cut)
                    for row in range(len(input_ids))
                ]
                computed.endings.append(_CutEnding(cut, payloads))
        except HookChanges as seen:
            seen.prompt_shown = False
            raise
        except Exception as trouble:  # noqa: BLE001
            # whatever a model's code raises: `generate` itself may do better
            why_not = f"a prompt was computed in one piece: {trouble}"
            self._cache.decline(why_not)
            nothing = empty_cache(self._model, self._shape)
            return ComputedPrompts(nothing, [], why_not)
        return computed

    def _ending(self, cache: Any, row: int, tokens: int) -> Bytes:
        return read_ending(self._shape, cache, row, tokens, self._chunk_tokens)

    def count_passes(self, cache: Any) -> None:
        """Tell a cache that does not know its length of passes, as long as it lives."""
        if not self._shape.is_linear:
            return
        from pagoda.connectors.transformers.linear_cache import count_passes

        count_passes(self._model, cache)

    def counting(self, cache: Any) -> AbstractContextManager[None]:
        """Return a context in which a cache that does not know its length is told of passes."""
        if not self._shape.is_linear:
            return nullcontext()
        from pagoda.connectors.transformers.linear_cache import counted_passes

        return counted_passes(self._model, cache)

    # ---- store

    def store(
        self,
        rows: Sequence[BatchRow],
        computed: ComputedPrompts,
        every: int,
        space: KeySpace,
        *,
        with_output: bool,
    ) -> list[Stored]:
        """Store the chunks of each row up to its last ending, and the endings.

        Args:
            rows: the prompts; with the output, one for each row of the cache.
            computed: the cache after `generate`, and the endings of the prompts.
            every: rows of the cache that `generate` made of each prompt.
            space: of the keys.
            with_output: whether the ending of the whole text is stored as well.
        """
        cache = computed.cache
        endings = computed.endings
        if not with_output:
            numbers = range(0, len(rows) * every, every)
            return self._stored(rows, cache, numbers, endings, space)
        endings = [
            ending._replace(
                payloads=[one for one in ending.payloads for _ in range(every)]
            )
            for ending in endings
        ]
        numbers = range(len(rows))
        endings.append(self._ending_of_all(cache, numbers))
        return self._stored(rows, cache, numbers, endings, space)

    def store_held(
        self, rows: Sequence[BatchRow], cache: Any, every: int, space: KeySpace
    ) -> list[Stored]:
        """Store what a cache holds after a pass or `generate`: the chunks, and the ending at its
        end. Rows 0, every, 2 * every, ... of the cache are those of `rows`.

        Raises ValueError if it is no cache of this model, or holds more tokens than `rows` have.
        """
        numbers = range(0, len(rows) * every, every)
        ending = self._ending_of_all(cache, numbers)
        if ending.num_tokens > len(rows[0].tokens):
            raise ValueError(
                f"past_key_values holds {ending.num_tokens} tokens, and input_ids have "
                f"{len(rows[0].tokens)}: this model can go on only at the end of what is held, so "
                "pass the whole text"
            )
        return self._stored(rows, cache, numbers, [ending], space)

    def _ending_of_all(self, cache: Any, numbers: Sequence[int]) -> _CutEnding:
        """Return the ending of all that a cache holds. ValueError if it is none of this model."""
        if getattr(cache, "is_copy", False):
            raise ValueError(
                "past_key_values is a copy, for which nobody counted tokens: call `prefix` again, "
                "and store what it returns"
            )
        tokens = cache.get_seq_length()
        if not tokens or not is_at(self._shape, cache, tokens):
            raise ValueError(
                "past_key_values must be the cache of this model after a pass or `generate`"
            )
        batch = batch_of(self._shape, cache)
        if max(numbers) >= batch:
            raise ValueError(
                f"past_key_values holds {batch} rows, and row {max(numbers)} is asked for: give as "
                "many rows of input_ids, or another `every`"
            )
        payloads = [self._ending(cache, row, tokens) for row in numbers]
        return _CutEnding(tokens, payloads)

    def _stored(
        self,
        rows: Sequence[BatchRow],
        cache: Any,
        numbers: Sequence[int],
        endings: Sequence[_CutEnding],
        space: KeySpace,
    ) -> list[Stored]:
        """Store rows `numbers` of a cache: their tokens are those of `rows`."""
        size = self._chunk_tokens
        lengths = [ending.num_tokens for ending in endings]
        last = max(lengths, default=0)
        whole = last - last % size
        answers = []
        for index, (row, number) in enumerate(zip(rows, numbers, strict=True)):
            stored = self._cache.store(
                row.tokens[:whole],
                self._chunks_of(cache, number, whole),
                **space,
            )
            have = (stored.num_chunks + stored.present) * size
            for ending in endings:
                count = ending.num_tokens
                # its chunks must be there as well; without any it could not be found
                if count < size or count - count % size > have:
                    continue
                is_kept = self._endings.store(
                    row.tokens[:count], ending.payloads[index], **space
                )
                if not is_kept:
                    reason = stored.reason or Reason.FULL
                    stored = stored._replace(reason=reason)
            answers.append(stored)
        return answers

    def _chunks_of(self, cache: Any, row: int, whole: int) -> Any:
        if not self._shape.full:
            return _Marks(self._seen.layout, whole)
        layers = [cache.layers[number] for number in self._shape.full]
        planes = [[layer.keys, layer.values] for layer in layers]
        return kv_of_row(planes, row, 0, whole, self._seen)


class _Marks:
    """Chunks that say only that they are there: a `pagoda.transfer.Transfer`."""

    def __init__(self, layout: KVLayout, tokens: int) -> None:
        self.layout = layout
        self._tokens = tokens

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Zero the slots."""
        checked = checked_slots(
            self.layout, self._tokens, starts, slots, into_slots=True
        )
        for slot in checked:
            slot[:] = 0

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Do nothing: there is nothing to load."""


def _hit_of(hit: Hit, tokens: int, by_tier: dict[str, int]) -> Hit:
    """Return a hit of so many tokens, in whatever tiers, as `Hit.shortened` cuts chunks only."""
    mask = np.zeros_like(hit.mask)
    mask[:tokens] = True
    return replace(hit, num_tokens=tokens, by_tier=by_tier, mask=mask)
