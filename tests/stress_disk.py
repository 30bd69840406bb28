"""The disk side of a stress worker: chunks stored in host slots are written, and read back
verified, or not at all.
"""

from __future__ import annotations

import contextlib
from collections import deque
from concurrent.futures import Future, TimeoutError
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pagoda.base.errors import StoreError
from pagoda.codec import HEADER_BYTES
from pagoda.layout import KVLayout
from pagoda.slab import aligned
from pagoda.tiers.base import Chunk, Done
from pagoda.tiers.disk import DiskTier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagoda.ledger import Reserved
    from tests.stress_worker import Chain, Plan, Worker

CHUNK_TOKENS = 4
PATIENCE_SECONDS = 6.0  # for a load: reads queue behind each other on a busy disk


def open_disk(plan: Plan, deadline_seconds: float | None = None) -> DiskTier:
    """Open the disk tier of a plan (each process has one, shared by its threads or not)."""
    layout = KVLayout.opaque(CHUNK_TOKENS, plan.payload_bytes, "stress")
    size_bytes = plan.disk_slots * (plan.payload_bytes + HEADER_BYTES)
    patience = (
        plan.deadline_seconds if deadline_seconds is None else deadline_seconds
    )
    return DiskTier.open(
        layout, Path(plan.disk_root), size_bytes, deadline_seconds=patience
    )


class DiskSide:
    """The disk tier as one worker uses it. Not thread-safe."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.tier = open_disk(worker.plan)
        self.saving: deque[Future[Done]] = deque()
        for chain in worker.chains:
            self.tier.register(chain.namespace)

    def save(self, chain: Chain, start: int, stored: Sequence[Reserved]) -> None:
        """Queue chunks directly from their host slots; a chunk may be dropped before it is
        stored.
        """
        positions = {key: index for index, key in enumerate(chain.keys)}
        chunks = [self._chunk(chain, positions[one.key], one) for one in stored]
        self.saving.extend(
            self.worker.timed(
                "save", lambda: self.tier.store(chunks, chain.namespace.root)
            )
        )
        while self.saving and (self.saving[0].done() or len(self.saving) > 200):
            future = self.saving.popleft()
            self.worker.tally.add(
                self.worker.row,
                "disk_saved",
                int(future.done() and future.result().ok),
            )

    def _chunk(self, chain: Chain, position: int, one: Reserved) -> Chunk:
        slots = np.array([one.slot], np.int64)
        generations = np.array([one.generation], np.uint64)
        ledger = self.worker.ledger
        parent = chain.keys[position - 1] if position else None
        valid = lambda: bool(ledger.still_valid(slots, generations)[0])  # noqa: E731
        return Chunk(
            one.key,
            position,
            CHUNK_TOKENS,
            self.worker.slab.view(one.slot),
            parent,
            valid,
        )

    def load(self, chain: Chain, length: int) -> None:
        """Load a run and check the result; a load that never ends is a violation."""
        worker = self.worker
        keys = chain.keys[:length]
        buffers = [aligned(worker.plan.payload_bytes) for _ in keys]
        futures = worker.timed(
            "load",
            lambda: self.tier.load(keys, buffers, namespace=chain.namespace.root),
        )
        for key, buffer, future in zip(keys, buffers, futures, strict=True):
            done = worker.timed(
                "loading", partial(self._wait, future), PATIENCE_SECONDS
            )
            if done is None:
                worker.tally.add(worker.row, "late")
                worker.tally.violation("late: a load did not end")
            elif done.ok:
                worker.judge(key, buffer, "disk")
            worker.tally.add(
                worker.row, "disk_hits" if done and done.ok else "disk_misses"
            )

    def _wait(self, future: Future[Done]) -> Done | None:
        try:
            return future.result(30.0)
        except TimeoutError:
            return None

    def tidy(self, chain: Chain, key: bytes) -> None:
        """Make one of the less frequent calls."""
        roll = self.worker.random.random()
        if roll < 0.5:
            self.worker.timed("disk remove", lambda: self.tier.remove(key))
        elif roll < 0.55:
            self.worker.timed(
                "disk clear", lambda: self.tier.clear(chain.namespace.root)
            )
        elif roll < 0.9:
            self.worker.timed(
                "disk find", lambda: self.tier.match_prefix(chain.keys)
            )
        else:
            self.worker.timed("disk stats", self._stats)

    def _stats(self) -> None:
        """Read the gauges; a process stopped inside the ledger's gate past the deadline prevents
        it.
        """
        with contextlib.suppress(StoreError):
            self.tier.stats()

    def forget(self) -> None:
        """Forget the parent's queue in a forked child."""
        self.saving.clear()

    def close(self) -> None:
        """Leave the disk tier."""
        self.worker.timed("disk close", self.tier.close, 5.0)
