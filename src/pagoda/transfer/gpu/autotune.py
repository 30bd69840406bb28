"""Which way across the link is fastest: tried with scratch memory, run by run as long as in the table that asks."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pagoda.transfer.base import Bytes, Ids
from pagoda.transfer.gpu.device import Port
from pagoda.transfer.run_table import RunTable

if TYPE_CHECKING:
    import torch

__all__ = ["fastest"]

log = logging.getLogger("pagoda.transfer")

_SCRATCH_BYTES = 16 << 20  # a third of a millisecond on PCIe 5
_MOST_CHUNKS = 64  # of tiny ones there would be a million, run by run
_ROUNDS = 3
_EQUAL = 1.03  # as fast as the fastest: then the way that takes less of the device's cores

Try = Callable[[str, RunTable, Ids, list[Bytes]], None]


def fastest(like: RunTable, port: Port, ways: Sequence[str], attempt: Try) -> str:
    """Return the fastest of `ways`, given from the one that uses most of the device's cores to the one that uses none.

    Takes some tens of milliseconds, once it is compiled. Nothing is tried without pinned memory: then it is the second
    way; or without memory on the device: the first, which needs none.
    """
    length, count = like.run_bytes, like.count
    rows = max(1, min(like.rows, _SCRATCH_BYTES // (length * count)))
    chunk_bytes = rows * count * length
    chunks = max(1, min(_MOST_CHUNKS, _SCRATCH_BYTES // chunk_bytes))
    if (host := port.host_memory(chunks * chunk_bytes)) is None:
        return ways[1]
    try:
        device = _own_memory(port, 2 * chunk_bytes)
    except RuntimeError as trouble:  # torch.OutOfMemoryError is one
        log.warning("%s has no memory left to measure with, %s is used: %s", port.device, ways[0], trouble)
        return ways[0]
    slots = list(host.numpy().reshape(chunks, chunk_bytes))
    table = _scattered(device.data_ptr(), length, count, rows)
    ids: Ids = np.tile(np.arange(2 * count, dtype=np.int64)[::-2], (chunks, 1))
    seconds = {}
    for way in ways:
        tries = [_seconds(attempt, way, table, ids, slots) for _ in range(1 + _ROUNDS)]
        seconds[way] = min(tries[1:])  # the first compiles
    best = min(seconds.values())
    chosen = next(way for way in reversed(ways) if seconds[way] <= best * _EQUAL)
    speeds = ", ".join(f"{way} {chunks * chunk_bytes / took / 1e9:.1f}" for way, took in seconds.items())
    log.info("runs of %d bytes on %s: %s GB/s; %s is used", length, port.device, speeds, chosen)
    return chosen


def _own_memory(port: Port, nbytes: int) -> torch.Tensor:
    """Device memory that the allocator has for a lane of ours: what it has for others they may still be using."""
    made: list[torch.Tensor] = []
    (lane,) = port.lanes(1)
    lane.run(lambda: made.append(port.memory(nbytes)))
    lane.mark().wait()
    return made[0]


def _scattered(address: int, length: int, count: int, rows: int) -> RunTable:
    """A table over scratch memory with room for twice as many runs, so that none need be neighbours."""
    numbers = np.arange(rows, dtype=np.int64)
    each = np.full(rows, length, dtype=np.int64)
    return RunTable(
        address=address + numbers * 2 * count * length,
        stride=each,
        nbytes=each,
        offset=numbers * count * length,
        count=count,
        group=1,
        layers=np.array([0, rows]),
    )


def _seconds(attempt: Try, way: str, table: RunTable, ids: Ids, slots: list[Bytes]) -> float:
    """How long a way takes; for ever if it cannot be gone."""
    began = time.perf_counter()
    try:
        attempt(way, table, ids, slots)
    except RuntimeError as trouble:
        log.warning("%s cannot be used: %s", way, trouble)
        return math.inf
    return time.perf_counter() - began
