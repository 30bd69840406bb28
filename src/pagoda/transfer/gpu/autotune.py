"""Measure which way of copying is fastest: with scratch memory, and with runs as long as in the
given table.

Called by `copy_engine`, once for each kind of table.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from pagoda.base.log import guarded_logger
from pagoda.transfer.base import Bytes, Ids
from pagoda.transfer.gpu.device import Device
from pagoda.transfer.gpu.staging_ring import Workspace
from pagoda.transfer.run_table import RunTable

log = guarded_logger("pagoda.transfer")

_SCRATCH_BYTES = 16 << 20  # a third of a millisecond on PCIe 5
# otherwise there could be a million tiny chunks, copied run by run
_MOST_CHUNKS = 64
_ROUNDS = 3
# among ways within this factor of the fastest, the one that uses fewest cores of the device is
# taken
_EQUAL = 1.03

Attempt = Callable[[str, RunTable, Ids, list[Bytes]], None]


def fastest_way(
    like: RunTable, device: Device, ways: Sequence[str], attempt: Attempt
) -> str:
    """Return the fastest of `ways`, which are ordered by their use of the device's cores, the
    highest first.

    Takes some tens of milliseconds, once compiled. Without pinned memory it measures nothing and
    returns the second way. Without memory on the device it returns the first way, which needs no
    device memory.
    """
    length = like.run_bytes
    count = like.count
    rows = max(1, min(like.rows, _SCRATCH_BYTES // (length * count)))
    chunk_bytes = rows * count * length
    chunks = max(1, min(_MOST_CHUNKS, _SCRATCH_BYTES // chunk_bytes))
    if (host := device.allocate_host(chunks * chunk_bytes)) is None:
        return ways[1]
    try:
        scratch = Workspace(device).allocate(2 * chunk_bytes)
    except RuntimeError as trouble:  # torch.OutOfMemoryError is one
        log.warning(
            "no memory is left on %s to measure with, %s is used: %s",
            device.torch_device,
            ways[0],
            trouble,
        )
        return ways[0]
    slots = list(host.numpy().reshape(chunks, chunk_bytes))
    table = _scattered(scratch.data_ptr(), length, count, rows)
    ids: Ids = np.tile(np.arange(2 * count, dtype=np.int64)[::-2], (chunks, 1))
    seconds = {}
    for way in ways:
        tries = [
            _seconds(attempt, way, table, ids, slots) for _ in range(1 + _ROUNDS)
        ]
        seconds[way] = min(tries[1:])  # the first try compiles
    best = min(seconds.values())
    chosen = next(way for way in reversed(ways) if seconds[way] <= best * _EQUAL)
    speeds = ", ".join(
        f"{way} {chunks * chunk_bytes / took / 1e9:.1f}"
        for way, took in seconds.items()
    )
    log.info(
        "runs of %d bytes on %s: %s GB/s; %s is used",
        length,
        device.torch_device,
        speeds,
        chosen,
    )
    return chosen


def _scattered(address: int, length: int, count: int, rows: int) -> RunTable:
    """Return a table over scratch memory with room for twice as many runs, so that no two runs are
    adjacent.
    """
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


def _seconds(
    attempt: Attempt, way: str, table: RunTable, ids: Ids, slots: list[Bytes]
) -> float:
    """Return how long a way takes; infinity if it cannot be used."""
    began = time.perf_counter()
    try:
        attempt(way, table, ids, slots)
    except RuntimeError as trouble:
        log.warning("%s cannot be used: %s", way, trouble)
        return math.inf
    return time.perf_counter() - began
