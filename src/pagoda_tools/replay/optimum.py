"""The upper bounds on the hit rate of any cache."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from pagoda.cache.request_trace import Request


def optimum(requests: Sequence[Request], chunks: int) -> float:
    """Return the hit rate of a cache that knows the future: Belady's algorithm, which also may
    refuse to store a chunk.

    The evicted chunks are asked for again later than all kept ones. A chunk is asked for before the
    chunks after it in the prompt, so the kept chunks are whole prefixes, and counting chunks counts
    leading runs.
    """
    if chunks < 1:
        raise ValueError(f"a cache has room for at least one chunk, not {chunks}")
    ids = np.array(
        [chunk for request in requests for chunk in request.hash_ids], np.uint64
    )
    total = len(ids)
    order = np.argsort(ids, kind="stable")  # sorted by chunk, then by time
    following = np.full(total, total)
    again = ids[order[1:]] == ids[order[:-1]]
    following[order[:-1][again]] = order[1:][again]
    # by the next access, for which the chunk is kept
    kept = np.zeros(total + 1, np.bool_).tolist()
    # the same accesses, negated, so that the last one is first
    latest: list[int] = []
    hits = stored = 0
    for access, next_access in enumerate(following.tolist()):
        if kept[access]:
            hits += 1
            stored -= 1
        if next_access == total:
            continue
        if stored == chunks:
            if -latest[0] <= next_access:
                continue
            kept[-heapq.heappop(latest)] = False
        else:
            stored += 1
        heapq.heappush(latest, -next_access)
        kept[next_access] = True
    return hits / total if total else 0.0


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
