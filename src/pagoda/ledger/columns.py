"""The columns of a ledger: one row a slot, mapped, shared by all processes; hints that may be lost or torn.

Only `generation` and `key` are more than hints: they are the published copy of what the tables say, and are compared
with it. They are assigned under the gate, after the commit of the transaction that decided them, and before the
first byte of the slot is written.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pagoda.ledger.ghosts import PER_SLOT, WIDTHS, GhostTable
from pagoda.policy import Ghosts

NOT_READY = np.iinfo(np.int64).max  # `last_use` of a slot that holds nothing to evict
NO_PARENT = -1
BARE = 1 << 63  # in the published generation of a slot that has no pages
FEW = 4  # so few rows are cheaper one by one than by array operations, above all when caches are cold
_ALIGN = 4096

Rows = NDArray[np.int64]
D = TypeVar("D", bound=np.generic)


class Columns:
    """Numpy views of the mapped file, each of length `slots`. Writers follow the rule in the module's docstring.

    generation uint64 · keys uint64 (slots, 4) · last_use int64 (recency stamp) · lease_until int64 (ns, monotonic) ·
    parent_slot int64 · parent_generation uint64 · hits uint32 · position uint32.
    """

    def __init__(self, path: Path | None, slots: int) -> None:
        """Map the file; None: memory of this object's own, zeroed."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC) if path is not None else -1
        try:
            self._map = mmap.mmap(fd, columns_bytes(slots), mmap.MAP_SHARED)
        finally:
            if path is not None:
                os.close(fd)
        ghosts = PER_SLOT * slots
        self.slots = self.capacity = slots
        self._offset = 0
        self.generation: NDArray[np.uint64] = self._view(np.uint64, slots)
        self.keys: NDArray[np.uint64] = self._view(np.uint64, slots * 4).reshape(slots, 4)
        self.last_use: NDArray[np.int64] = self._view(np.int64, slots)
        self.lease_until: NDArray[np.int64] = self._view(np.int64, slots)
        self.parent_slot: NDArray[np.int64] = self._view(np.int64, slots)
        self.parent_generation: NDArray[np.uint64] = self._view(np.uint64, slots)
        self.hits: NDArray[np.uint32] = self._view(np.uint32, slots)
        self.position: NDArray[np.uint32] = self._view(np.uint32, slots)
        self.table = GhostTable(
            self._view(np.uint64, ghosts),
            self._view(np.int64, ghosts),
            self._view(np.int64, ghosts),
            self._view(np.uint16, ghosts),
            self._view(np.uint8, ghosts),
        )

    @property
    def ghosts(self) -> Ghosts:
        """What policies read of the ghosts."""
        return self.table.columns

    def forgotten(self) -> Iterator[tuple[NDArray[np.uint32], Rows]]:
        """Take the ghosts that gave way to others since the last call, in this process: hits and age (ns) of each."""
        return self.table.forgotten()

    def _view(self, dtype: type[D], count: int) -> NDArray[D]:
        view: NDArray[D] = np.frombuffer(self._map, dtype, count, self._offset)
        self._offset += _aligned(view.nbytes)
        return view

    def reset(self) -> None:
        """Write the columns of a store that holds nothing."""
        self.last_use[:] = NOT_READY
        self.parent_slot[:] = NO_PARENT

    def copy_from(self, other: Columns) -> None:
        """Take over the rows that both have (after a resize), and the ghosts."""
        both = min(self.slots, other.slots)
        for name in (
            "generation",
            "keys",
            "last_use",
            "lease_until",
            "parent_slot",
            "parent_generation",
            "hits",
            "position",
        ):
            getattr(self, name)[:both] = getattr(other, name)[:both]
        self.parent_slot[self.parent_slot >= self.slots] = NO_PARENT
        self.table.copy_from(other.table)

    def key_of(self, slot: int) -> bytes:
        """The published key of a slot."""
        return bytes(self.keys[slot].tobytes())

    def names(self, slots: Rows, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Which of these slots are published under these keys."""
        asked = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 4)
        return np.asarray((self.keys[slots] == asked).all(axis=1))

    def flush(self) -> None:
        """Write the columns to the disk."""
        self._map.flush()


def columns_bytes(slots: int) -> int:
    """Size of the file of columns."""
    per_slot = (8, 32, 8, 8, 8, 8, 4, 4)
    columns = sum(_aligned(width * slots) for width in per_slot)
    return columns + sum(_aligned(width * PER_SLOT * slots) for width in WIDTHS)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
