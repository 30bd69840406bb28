"""Hints of requests whose KV is of several kinds: finds the chunks that they are about.

    full attention      the chunks of the whole prompt
    windows and states  what a request that goes on needs: the end of the prompt, and the last ends
                        that vLLM offered or loaded, which may be within a chunk

So the session leaves what is before its windows, which nobody needs who goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagoda.base.signal_safe_threads import Pool
from pagoda.cache import Cache, RequestHints
from pagoda.connectors.vllm.identity.media_names import MediaNames
from pagoda.connectors.vllm.offloading.chunk_finder import Group
from pagoda.connectors.vllm.request_hints import HintReader, of_tenant
from pagoda.keys import derive_keys

# the most running calls with which an answer is still noted
_MOST_NOTES = 64


@dataclass
class _HintedRequest:
    """One request, from its arrival to its end."""

    source: Any
    hints: RequestHints | None
    has_ended: bool = False
    # what it offered or loaded of windows and states, and within chunks: vLLM's name -> the index
    # of its group, and the token at its end
    ends: dict[bytes, tuple[int, int]] = field(default_factory=dict)


class HintedRequests:
    """The requests of one engine, and what is said of them. For the scheduler's thread.

    Args:
        cache: that of the engine.
        groups: by the number that they have in vLLM's keys.
        reader: reads what is said.
        media: names chunks with media.
        hash_tokens: the tokens of one of vLLM's block hashes.
    """

    def __init__(
        self,
        cache: Cache,
        groups: dict[int, Group],
        reader: HintReader,
        media: MediaNames,
        hash_tokens: int,
    ) -> None:
        assert cache.slots is not None
        self._cache = cache
        self._slots = cache.slots
        self._numbers = tuple(groups)
        self._groups = tuple(groups.values())
        # the first one names the workload
        self._order = sorted(
            range(len(groups)),
            key=lambda index: self._groups[index].window is not None,
        )
        self._reader = reader
        self._media = media
        self._hash_tokens = hash_tokens
        self._requests: dict[str, _HintedRequest] = {}

    def arrived(self, request: Any) -> None:
        """Read what a request's client says of it."""
        hints = self._reader.arrived(request, self._slots)
        hints = of_tenant(hints, request.cache_salt)
        self._requests[request.request_id] = _HintedRequest(request, hints)

    def used(self, req_id: str, name: bytes, group: int, end: int) -> None:
        """Note a chunk that vLLM offers or loads, which ends at this token."""
        request = self._requests.get(req_id)
        kind = self._groups[group]
        if request is not None and (
            kind.window is not None or end % kind.chunk_tokens
        ):
            request.ends[name] = group, end

    def context_of(self, req_id: str, root: bytes) -> int | None:
        """Return the context of a request's new chunks, for `reserve`; None: nobody keeps
        contexts.
        """
        request = self._requests.get(req_id)
        if request is None or not self._slots.hears_hints:
            return None
        index = self._order[0]
        names = self._chunk_names(request.source.block_hashes, index, 0, 1)
        shared = self._media.shared_tokens(request.source)
        keys = derive_keys(self._digests(names, index, 0, shared), root)
        return self._slots.context_of(keys[0]) if keys else None

    def ended(self, request: Any) -> None:
        """Note how a request ended; vLLM offers its last chunks after this."""
        known = self._requests.get(request.request_id)
        if known is not None:
            known.has_ended = True
            heard = self._slots.hears_hints
            known.hints = self._reader.ended(request, known.hints, heard)

    def finished(
        self,
        req_id: str,
        most_named: int | None,
        version: str,
        thread: Pool,
        is_stored: bool,
    ) -> None:
        """Tell the cache, on a thread, how a request ended whose last chunks have been offered.

        `most_named`: leading tokens that vLLM's hashes name. `version`: of the weights.
        `is_stored`: False if its KV is not under its keys.
        """
        request = self._requests.pop(req_id, None)
        if request is None or not request.has_ended:
            return
        hints = request.hints
        if hints is None and not self._slots.hears_hints:
            return
        if is_stored and thread.under_way < _MOST_NOTES:
            tokens = request.source.num_tokens
            if most_named is not None:
                tokens = min(tokens, most_named)
            shared = self._media.shared_tokens(request.source)
            thread.later(self._note, request, tokens, shared, version)
            return
        why = (
            "too many requests at once"
            if is_stored
            else "nothing of it is stored"
        )
        for name in () if hints is None else hints.names:
            self._slots.refuse_hint(name, why)

    def _note(
        self,
        request: _HintedRequest,
        tokens: int,
        shared: int | None,
        version: str,
    ) -> None:
        root = self._slots.namespace(weights_version=version)
        digests = dict.fromkeys(
            digest
            for index in self._order
            for digest in self._of_group(request, index, tokens, shared)
        )
        self._cache.note_answer(
            None,
            keys=derive_keys(list(digests), root),
            weights_version=version,
            hints=request.hints,
        )

    def _of_group(
        self,
        request: _HintedRequest,
        index: int,
        tokens: int,
        shared: int | None,
    ) -> Iterator[bytes]:
        """Yield the digests of one group's chunks that a request with these tokens is about."""
        size, window = self._groups[index]
        ends = {
            name: end
            for name, (group, end) in request.ends.items()
            if group == index and end <= tokens
        }
        first = 0
        last = max(ends.values(), default=0)
        if window is not None:
            first = max(0, (tokens - window) // size - 1)
            last -= window + size
        hashes = request.source.block_hashes
        names = self._chunk_names(hashes, index, first, tokens // size)
        yield from self._digests(names, index, first, shared)
        for name, end in ends.items():
            if end >= last:
                at = -(-end // size) - 1
                yield from self._digests([name], index, at, shared)

    def _chunk_names(
        self, hashes: Sequence[Any], index: int, first: int, stop: int
    ) -> list[bytes]:
        """Return vLLM's names of chunks [first, stop) of a group, as far as they have hashes."""
        step = self._groups[index].chunk_tokens // self._hash_tokens
        tail = self._numbers[index].to_bytes(4, "big")
        ends = range(first * step + step - 1, min(stop * step, len(hashes)), step)
        return [bytes(hashes[at]) + tail for at in ends]

    def _digests(
        self,
        names: Sequence[bytes],
        index: int,
        first: int,
        shared: int | None,
    ) -> list[bytes]:
        size = self._groups[index].chunk_tokens
        return self._media.key_digests(names, first, size, shared)
