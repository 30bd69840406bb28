"""Each chunk is a separate request: hits and misses equal those of libCacheSim under the same
policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import resources
from itertools import islice

import libcachesim
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.cache.request_trace import Request, read_trace
from pagoda_tools.replay.simulate import Simulation, TierSpec

THEIRS = {"lru": libcachesim.LRU}
policies = pytest.mark.parametrize("policy", THEIRS)


def our_hits(policy: str, chunks: int, stream: Sequence[int]) -> list[bool]:
    simulation = Simulation([TierSpec("host", chunks, policy)])
    return [
        simulation.request(Request(i * 1000.0, 512, 0, (one,)))[0] > 0
        for i, one in enumerate(stream)
    ]


def their_hits(policy: str, chunks: int, stream: Sequence[int]) -> list[bool]:
    cache = THEIRS[policy](chunks, hashpower=12)
    request = libcachesim.Request()
    hits = []
    request.obj_size = 1
    for one in stream:
        request.obj_id = one
        hits.append(bool(cache.get(request)))
    return hits


def zipf(rng: np.random.Generator) -> list[int]:
    return [int(one) for one in rng.zipf(1.2, 1000) % 400]


def loop(rng: np.random.Generator) -> list[int]:
    return list(range(int(rng.integers(10, 150)))) * 8


def scans(rng: np.random.Generator) -> list[int]:
    """Request popular chunks repeatedly, and sometimes a long run of chunks that are requested
    once.
    """
    stream = []
    new = 1000
    for _ in range(5):
        stream += zipf(rng)[:300]
        stream += range(new, new + 300)
        new += 300
    return stream


def shifts(rng: np.random.Generator) -> list[int]:
    return [one + 100 * turn for turn in range(5) for one in zipf(rng)[:300]]


@pytest.mark.slow
@policies
@pytest.mark.parametrize("chunks", [7, 50])
@pytest.mark.parametrize("make", [zipf, loop, scans, shifts])
def test_made_up_streams_hit_as_in_libcachesim(
    policy: str, chunks: int, make: Callable[[np.random.Generator], list[int]]
) -> None:
    stream = make(np.random.default_rng(chunks))
    assert our_hits(policy, chunks, stream) == their_hits(policy, chunks, stream)


@policies
@given(
    stream=st.lists(st.integers(1, 12), max_size=150), chunks=st.integers(2, 8)
)
@settings(max_examples=50, deadline=None)
def test_random_streams_hit_as_in_libcachesim(
    policy: str, stream: list[int], chunks: int
) -> None:
    assert our_hits(policy, chunks, stream) == their_hits(policy, chunks, stream)


@pytest.mark.slow
@policies
@pytest.mark.parametrize("chunks", [50, 500, 2000])
def test_a_real_stream_hits_as_in_libcachesim(policy: str, chunks: int) -> None:
    sample = resources.files("pagoda_tools.replay") / "sample.jsonl.gz"
    with resources.as_file(sample) as path:
        stream = [
            one
            for request in islice(read_trace(path), 250)
            for one in request.hash_ids
        ]
    assert our_hits(policy, chunks, stream) == their_hits(policy, chunks, stream)
