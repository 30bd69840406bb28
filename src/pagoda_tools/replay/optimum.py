"""The upper bounds on the hit rate of any cache."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pagoda.cache.request_trace import Request

_AT_ONCE = 1 << 16


def optimum(requests: Sequence[Request], chunks: int) -> float:
    """Return the hit rate of a cache that knows the future: Belady's algorithm, which also may
    refuse to store a chunk.

    The evicted chunks are asked for again later than all kept ones. A chunk is asked for before the
    chunks after it in the prompt, so the kept chunks are whole prefixes, and counting chunks counts
    leading runs.
    """
    if chunks < 1:
        raise ValueError(f"a cache has room for at least one chunk, not {chunks}")
    total = sum(len(request.hash_ids) for request in requests)
    following = _next_accesses(requests, total)
    # by the next access, for which the chunk is kept
    kept = bytearray(total + 1)
    # the same accesses, negated, so that the last one is first
    latest: list[int] = []
    hits = stored = 0
    for access, next_access in enumerate(_whole_numbers(following)):
        if kept[access]:
            hits += 1
            stored -= 1
        if next_access == total:
            continue
        if stored == chunks:
            if -latest[0] <= next_access:
                continue
            kept[-heapq.heappop(latest)] = 0
        else:
            stored += 1
        heapq.heappush(latest, -next_access)
        kept[next_access] = 1
    return hits / total if total else 0.0


def _next_accesses(requests: Sequence[Request], total: int) -> NDArray[np.int64]:
    """Return for each access the number of the next access to the same chunk; `total` if there is
    none.
    """
    accesses = chain.from_iterable(request.hash_ids for request in requests)
    ids = np.fromiter(accesses, np.uint64, total)
    order = np.argsort(ids, kind="stable")  # sorted by chunk, then by time
    ids = ids[order]
    again = ids[1:] == ids[:-1]
    del ids  # a long trace has little memory to spare
    following = np.full(total, total)
    following[order[:-1][again]] = order[1:][again]
    return following


def _whole_numbers(values: NDArray[np.int64]) -> Iterator[int]:
    """Yield the values as int, which takes four times their memory, some at a time."""
    for begin in range(0, len(values), _AT_ONCE):
        yield from values[begin : begin + _AT_ONCE].tolist()


def infinite(requests: Iterable[Request]) -> float:
    """Return the hit rate of an unlimited cache: each request hits the leading run that was asked
    for before.
    """
    seen: set[int] = set()
    hits = accesses = 0
    for request in requests:
        for chunk in request.hash_ids:
            if chunk not in seen:
                break
            hits += 1
        accesses += len(request.hash_ids)
        seen.update(request.hash_ids)
    return hits / accesses if accesses else 0.0
