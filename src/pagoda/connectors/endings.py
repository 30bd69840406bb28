"""Endings: what an engine keeps of a prefix that is no row of a token, such as the state of a
recurrent layer or the rows of a sliding window; and the rows after the last whole chunk.

A chunk can be used by every prompt that begins with it, an ending only at exactly its number of
tokens. It is stored in parts, each the size of a chunk of its cache:

    key of the ending  = hash of "ending", the tokens after the last whole chunk, that chunk's key
    key of part i      = hash of the key of the ending and i

    store   whole chunks first, then `Endings.store(tokens, payload)`
    load    `Endings.find(tokens, ...)` -> how many tokens -> `Endings.load` -> payload

Each call takes what `KeySpace` names instead of the cache's, such as the salt of a tenant:
different salts share nothing.

Which endings are worth their bytes: `choose`. Used by the connectors of llama.cpp and of
Transformers; `pagoda explain` looks for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from pagoda.base.clock import Deadline
from pagoda.base.fork import per_process
from pagoda.base.oldest import drop_oldest
from pagoda.cache import Cache
from pagoda.cache.call import CallOptions
from pagoda.cache.caller_hints import LATER
from pagoda.keys import KEY_BYTES, TokenIds, derive_keys, ending_key
from pagoda.layout import KVLayout
from pagoda.transfer.base import Bytes, checked_slots

Tokens = npt.NDArray[np.int32]

# how many chunks are searched for endings, from the last that is stored down
SEARCHED_CHUNKS = 2
_KEYS_AT_A_TIME = 64
_MOST_REMEMBERED = 4096


class KeySpace(TypedDict, total=False):
    """Options of calls of a cache that are part of its keys."""

    lora: str | None
    salt: str | None
    numerics: str | None


class LoadedEnding(NamedTuple):
    """An ending that was loaded whole."""

    payload: Bytes
    tier: str  # the lowest that had a part of it


def choose(
    possible: Sequence[tuple[int, int]], marks: Iterable[int] = (), most: int = 4
) -> list[int]:
    """Return the numbers of tokens at which endings are worth being stored, ascending; pure.

    Args:
        possible: ranges (lowest, highest) of numbers at which the engine has what an ending needs.
        marks: numbers of tokens after which other prompts will go on in another way (the end of the
            system's text, the start of the last message). For each, the longest possible ending
            that is not longer is chosen.
        most: how many there are at most; the longest stay.
    """
    wanted = set()
    for mark in marks:
        below = [
            min(highest, mark) for lowest, highest in possible if lowest <= mark
        ]
        if below:
            wanted.add(max(below))
    others = {edge for edges in possible for edge in edges}
    first = sorted(wanted, reverse=True)
    then = sorted(others - wanted, reverse=True)
    return sorted([*first, *then][:most])


class Endings:
    """Stores and finds the endings of one cache. Thread-safe.

    Failures at run time are misses of the cache, which counts and logs them.
    """

    def __init__(self, cache: Cache) -> None:
        """`cache`: has the whole chunks as well; it stays the caller's to close.

        Raises ValueError if it has a minimum of tokens: an ending is asked for by itself, so the
        caller compares the whole prompt with it.
        """
        if cache.config.min_hit_tokens:
            raise ValueError("the cache of endings must have min_hit_tokens = 0")
        self._cache = cache
        self._chunk_tokens = cache.layout.chunk_tokens
        # last whole chunk -> tokens after it, of the endings that this process has seen
        self._seen: dict[bytes, set[int]] = {}

    @per_process
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    def store(
        self, tokens: Tokens, payload: Bytes, **space: Unpack[KeySpace]
    ) -> bool:
        """Store the ending of exactly these tokens; return whether it is in the cache now."""
        parents = self._parents(tokens, space)
        parts = _Parts(payload, self._cache.layout, len(parents) - 1)
        options = self._options(tokens, parents, payload.size, space)
        # no request by itself: it uses nothing
        options["hints"] = LATER
        stored = self._cache.store(None, parts, **options)
        if stored.refused:
            return False
        self._remember(parents[-1], len(tokens) % self._chunk_tokens)
        return True

    def find(
        self,
        tokens: Tokens,
        *,
        whole_chunks: int,
        most_tokens: int,
        payload_bytes: Callable[[int], int],
        deadline: Deadline,
        **space: Unpack[KeySpace],
    ) -> int:
        """Return the number of tokens of the longest ending that these tokens begin with; 0: none.

        Endings that this process has stored or loaded are found everywhere, and so are those that
        end with a whole chunk; others only within the last chunks. Only tiers of this machine are
        searched.

        Args:
            tokens: of the prompt.
            whole_chunks: how many of its chunks are in the cache.
            most_tokens: an ending may have.
            payload_bytes: the bytes of an ending of so many tokens.
            deadline: the search ends at the first step after it.
            space: the keys' adapter, tenant and numerics.
        """
        parents = self._parents(tokens, space)[: whole_chunks + 1]
        lengths = self._lengths(parents, min(most_tokens, len(tokens)))
        return self._longest(
            tokens, parents, lengths, payload_bytes, deadline, space
        )

    def find_tail(
        self,
        tokens: Tokens,
        *,
        whole_chunks: int,
        most_tokens: int,
        step: int,
        payload_bytes: Callable[[int], int],
        deadline: Deadline,
        **space: Unpack[KeySpace],
    ) -> int:
        """Return the number of tokens of the longest ending after the last whole chunk whose tail
        is a multiple of `step`; 0: none. The other arguments are those of `find`.
        """
        parents = self._parents(tokens, space)[: whole_chunks + 1]
        begin = whole_chunks * self._chunk_tokens
        most = min(most_tokens, len(tokens), begin + self._chunk_tokens - 1)
        longest = (most - begin) // step
        lengths = iter([begin + step * k for k in range(longest, 0, -1)])
        return self._longest(
            tokens, parents, lengths, payload_bytes, deadline, space
        )

    def _longest(
        self,
        tokens: Tokens,
        parents: Sequence[bytes],
        lengths: Iterator[int],
        payload_bytes: Callable[[int], int],
        deadline: Deadline,
        space: KeySpace,
    ) -> int:
        """Return the first of these lengths at which an ending is stored; 0: none."""
        while batch := list(islice(lengths, _KEYS_AT_A_TIME)):
            first_parts = [
                _part_keys(self._key(tokens[:length], parents), 1)[0]
                for length in batch
            ]
            here = self._cache.which(first_parts, **space)
            for length, is_here in zip(batch, here, strict=True):
                if is_here and self._is_whole(
                    tokens[:length], parents, payload_bytes(length), space
                ):
                    return length
            # a tier that is busy lets each step wait
            if deadline.passed:
                break
        return 0

    def load(
        self, tokens: Tokens, payload_bytes: int, **space: Unpack[KeySpace]
    ) -> LoadedEnding | None:
        """Return the ending of exactly these tokens; None if it is not whole."""
        parents = self._parents(tokens, space)
        payload = np.empty(payload_bytes, np.uint8)
        parts = _Parts(payload, self._cache.layout, len(parents) - 1)
        options = self._options(tokens, parents, payload_bytes, space)
        hit = self._cache.retrieve(None, parts, counted=False, **options)
        if hit.num_tokens < parts.count * self._chunk_tokens:
            return None
        self._remember(parents[-1], len(tokens) % self._chunk_tokens)
        return LoadedEnding(payload, list(hit.by_tier)[-1])

    def keys_with(
        self,
        tokens: Tokens,
        lengths: Iterable[int],
        payload_bytes: Callable[[int], int],
        **space: Unpack[KeySpace],
    ) -> list[bytes]:
        """Return the keys of all that a prompt has in the cache, for `Cache.note_answer`: of its
        whole chunks, and of the parts of its endings of these lengths.
        """
        parents = self._parents(tokens, space)
        keys = parents[1:]
        for length in lengths:
            count = _part_count(payload_bytes(length), self._cache.layout)
            keys += _part_keys(self._key(tokens[:length], parents), count)
        return keys

    def seen(
        self, tokens: Tokens, most: int = 4, **space: Unpack[KeySpace]
    ) -> list[int]:
        """Return the lengths of endings of these tokens that this process has probably stored or
        loaded, the longest first, at most so many.
        """
        parents = self._parents(tokens, space)
        found: list[int] = []
        for whole in range(len(parents) - 1, -1, -1):
            with self._lock:
                tails = sorted(self._seen.get(parents[whole], ()), reverse=True)
            begin = whole * self._chunk_tokens
            lengths = [begin + tail for tail in tails]
            found += [one for one in lengths if 0 < one <= len(tokens)]
            if len(found) >= most:
                break
        return found[:most]

    def _parents(self, tokens: Tokens, space: KeySpace) -> list[bytes]:
        """Return the root and the keys of the whole chunks, which contain the salt."""
        root = self._cache.present_namespace(**space).root
        keys = self._cache.keys(tokens, **space)
        return [root, *(key for _, _, key in keys)]

    def _key(self, tokens: Tokens, parents: Sequence[bytes]) -> bytes:
        whole = len(tokens) // self._chunk_tokens
        return ending_key(tokens[whole * self._chunk_tokens :], parents[whole])

    def _options(
        self,
        tokens: Tokens,
        parents: Sequence[bytes],
        payload_bytes: int,
        space: KeySpace,
    ) -> CallOptions:
        """Return what names the parts: they follow the last whole chunk in its chain."""
        size = self._chunk_tokens
        whole = len(parents) - 1
        count = _part_count(payload_bytes, self._cache.layout)
        keys = _part_keys(self._key(tokens, parents), count)
        chain = [*parents[whole:][: min(whole, 1)], *keys]
        begin = whole - min(whole, 1)
        named = [
            ((begin + i) * size, (begin + i + 1) * size, key)
            for i, key in enumerate(chain)
        ]
        return {
            "keys": named,
            "start_tokens": whole * size,
            "lora": space.get("lora"),
            "salt": space.get("salt"),
            "numerics": space.get("numerics"),
        }

    def _is_whole(
        self,
        tokens: Tokens,
        parents: Sequence[bytes],
        payload_bytes: int,
        space: KeySpace,
    ) -> bool:
        whole = len(tokens) // self._chunk_tokens
        options = self._options(
            tokens, parents[: whole + 1], payload_bytes, space
        )
        hit = self._cache.lookup(None, counted=False, **options)
        count = _part_count(payload_bytes, self._cache.layout)
        return hit.num_tokens == count * self._chunk_tokens

    def _lengths(self, parents: Sequence[bytes], most: int) -> Iterator[int]:
        """Yield the lengths that are tried, from the longest down."""
        for whole in range(len(parents) - 1, -1, -1):
            begin = whole * self._chunk_tokens
            if whole > len(parents) - 1 - SEARCHED_CHUNKS:
                tails: Iterable[int] = range(self._chunk_tokens)
            else:
                with self._lock:
                    tails = {0, *self._seen.get(parents[whole], ())}
            for tail in sorted(tails, reverse=True):
                if 0 < begin + tail <= most:
                    yield begin + tail

    def _remember(self, parent: bytes, tail: int) -> None:
        with self._lock:
            self._seen.setdefault(parent, set()).add(tail)
            drop_oldest(self._seen, _MOST_REMEMBERED)


class _Parts:
    """A payload as chunks: a `pagoda.transfer.Transfer`."""

    def __init__(self, payload: Bytes, layout: KVLayout, first: int) -> None:
        """`first`: the position of the first part, in chunks."""
        self.layout = layout
        self.count = _part_count(payload.size, layout)
        self._payload = payload
        self._first = first

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy parts into slots; what is left of the last one is zero."""
        for part, slot in self._pairs(starts, slots, into_slots=True):
            slot[: part.size] = part
            slot[part.size :] = 0

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy slots into the payload."""
        for part, slot in self._pairs(starts, slots, into_slots=False):
            part[:] = slot[: part.size]

    def _pairs(
        self, starts: Sequence[int], slots: Sequence[Bytes], *, into_slots: bool
    ) -> Iterator[tuple[Bytes, Bytes]]:
        size = self.layout.chunk_bytes
        tokens = (self._first + self.count) * self.layout.chunk_tokens
        checked = checked_slots(
            self.layout, tokens, starts, slots, into_slots=into_slots
        )
        for start, slot in zip(starts, checked, strict=True):
            number = start // self.layout.chunk_tokens - self._first
            yield self._payload[number * size : (number + 1) * size], slot


def _part_count(payload_bytes: int, layout: KVLayout) -> int:
    """Return the parts of a payload; an empty one has one as well, which says that it is there."""
    return max(1, -(-payload_bytes // layout.chunk_bytes))


def first_part_key(tail: TokenIds, parent: bytes) -> bytes:
    """Return the key of the first part of an ending, for who only looks; pure. The arguments are
    those of `ending_key`.
    """
    return _part_keys(ending_key(tail, parent), 1)[0]


def _part_keys(key: bytes, count: int) -> list[bytes]:
    digests = [number.to_bytes(KEY_BYTES, "little") for number in range(count)]
    return derive_keys(digests, key)
