"""Chunks behind a hole: stored KV of a prompt behind its first missing chunk.

    tokens   | a prefix  | missing | stored | missing | stored | the last ones |
    load     | blocks    |         | beside |         | beside |
    compute  |           |  x x x  |        |  x x x  |        |  x x          |   in one pass, over all that is before each

The key of a chunk names its whole prefix, so its KV is right wherever it is stored. The block
manager finds the leading blocks only; this loads the others, into memory beside the pool, while
other requests compute. `engine` calls it. A token looks at all positions before its own, so what is
missing is computed in one pass with gaps.
"""  # noqa: E501, W505

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

from pagoda import Cache, Hit
from pagoda.transfer import DenseKV

from .attention import KVPool
from .blend import Span

if TYPE_CHECKING:
    from .engine import Sequence as Request


class Found(NamedTuple):
    """What was loaded of a prompt, at its positions: [layers, 2, kv_heads, tokens, head_dim]."""

    hit: Hit
    kv: torch.Tensor


class Holes:
    """Loads what the tiers have behind the leading blocks of requests. Not thread-safe."""

    def __init__(
        self, pool: KVPool, cache: Cache, patience_seconds: float
    ) -> None:
        """`patience_seconds`: the longest that one request waits for its chunks."""
        self._pool = pool
        self._cache = cache
        self._patience_seconds = patience_seconds
        self._loader = ThreadPoolExecutor(1, "behind")

    def close(self) -> None:
        """Wait for loads that are running."""
        self._loader.shutdown()

    def load(self, seq: Request) -> Future[Found | None] | None:
        """Begin to look for chunks behind those that a request was admitted with, and to load them;
        None if no whole chunk is missing. Blocks are not touched: the request may lose its own.
        """
        size = self._pool.block_tokens
        tokens = seq.tokens[:-1]  # the last one is always computed
        start = seq.computed // size * size
        if len(tokens) - start < size:
            return None
        until = time.monotonic() + self._patience_seconds
        return self._loader.submit(self._load, tokens, start, seq.salt, until)

    def _load(
        self, tokens: list[int], start: int, salt: str | None, until: float
    ) -> Found | None:
        # it may have waited for another request's load
        patience = max(0.0, until - time.monotonic())
        hit = self._cache.lookup(
            tokens,
            pieces=True,
            counted=False,
            start_tokens=start,
            salt=salt,
            deadline_seconds=patience,
        )
        runs = hit.runs()
        if not runs:
            return None
        layers = self._cache.layout.layers
        heads, dim, _ = self._cache.layout.planes[0]
        kv = torch.empty(
            (layers, 2, heads, runs[-1][1], dim),
            dtype=self._pool.kv.dtype,
            device=self._pool.kv.device,
        )
        hit = self._cache.retrieve(
            tokens[: runs[-1][1]],
            DenseKV([list(layer) for layer in kv], self._cache.layout),
            pieces=True,
            counted=False,
            start_tokens=start,
            salt=salt,
            deadline_seconds=max(0.0, until - time.monotonic()),
        )
        return Found(hit, kv)

    def fill(self, seq: Request, found: Found) -> Iterator[Span]:
        """Put what was loaded into the blocks of a request; yield what is left to compute."""
        runs = [
            (max(start, seq.computed), stop)
            for start, stop in found.hit.runs()
            if stop > seq.computed
        ]
        for start, stop in runs:
            self._pool.write(
                seq.table, range(start, stop), found.kv[..., start:stop, :]
            )
        if not seq.output:  # else it was preempted, and counted before
            loaded = Counter(seq.hits)
            for start, stop, tier in found.hit.pieces:
                loaded[tier] += max(0, stop - max(start, seq.computed))
            seq.hits = dict(loaded)
        begins = [seq.computed, *(stop for _, stop in runs)]
        ends = [*(start for start, _ in runs), len(seq.tokens)]
        missing = map(range, begins, ends)
        yield Span(list(chain.from_iterable(missing)))
