"""Recorded traces for the tests, and small chains of chunks for tests that need no trace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import strategies as st

import pagoda_tools.replay
from pagoda_tools.replay import Request, read_trace

ROOT = Path(__file__).parents[2]
SAMPLE = Path(pagoda_tools.replay.__file__).with_name("sample.jsonl.gz")


@cache
def sample() -> Sequence[Request]:
    """Return the shipped sample: the first 2,000 requests of the conversation trace."""
    return list(read_trace(SAMPLE))


@cache
def mooncake(name: str) -> Sequence[Request]:
    """Return a complete trace of the Mooncake FAST'25 release; skip the test where it is not
    available.
    """
    directory = Path(
        os.environ.get("MOONCAKE_TRACES", ROOT.parent / "shared" / "traces")
    )
    path = directory / f"mooncake_{name}.jsonl"
    if not path.exists():
        pytest.skip(
            f"{path} is not here: MOONCAKE_TRACES names the directory of the traces; the sample "
            "is tested instead"
        )
    return list(read_trace(path))


def request(*ids: int, ms: float = 0.0, tokens: int = 512) -> Request:
    """Return a request for these chunks, all full."""
    return Request(ms, len(ids) * tokens, 1, ids, tokens)


@st.composite
def chained(
    draw: st.DrawFn, depth: int = 6, most: int = 12, gaps_ms: int = 3000
) -> list[Request]:
    """Generate requests whose ids name whole prefixes: paths in a tree in which each chunk has
    three successors.
    """
    paths = st.lists(st.integers(0, 2), min_size=1, max_size=depth)
    requests = []
    ms = 0
    for path in draw(st.lists(paths, min_size=1, max_size=most)):
        ids = []
        node = 0
        for turn in path:
            node = 3 * node + turn + 1
            ids.append(node)
        ms += draw(st.sampled_from([0, 1, gaps_ms // 30, gaps_ms]))
        requests.append(request(*ids, ms=ms))
    return requests
