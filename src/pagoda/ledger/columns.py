"""The columns of a ledger: one row a slot, mapped, shared by all processes; hints that may be lost or torn.

Only `generation` and `key` are more than hints: they are the published copy of what the tables say, and are compared
with it. They are assigned under the gate, after the commit of the transaction that decided them, and before the
first byte of the slot is written.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

NOT_READY = np.iinfo(np.int64).max  # `last_use` of a slot that holds nothing to evict
NO_PARENT = -1
FEW = 4  # so few rows are cheaper one by one than by array operations, above all when caches are cold
_ALIGN = 4096
_GHOSTS_PER_SLOT = 2

Rows = NDArray[np.int64]
D = TypeVar("D", bound=np.generic)


class Ghost(NamedTuple):
    """What is remembered of a chunk that went: when (recency stamp) and why (index into the ghost reasons)."""

    stamp: int
    reason: int


class Columns:
    """Numpy views of the mapped file, each of length `slots`. Writers follow the rule in the module's docstring.

    generation uint64 · keys uint64 (slots, 4) · last_use int64 (recency stamp) · lease_until int64 (ns, monotonic) ·
    parent_slot int64 · parent_generation uint64 · hits uint32 · position uint32.
    """

    def __init__(self, path: Path, slots: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, columns_bytes(slots), mmap.MAP_SHARED)
        finally:
            os.close(fd)
        ghosts = _GHOSTS_PER_SLOT * slots
        self.slots = slots
        self._offset = 0
        self.generation: NDArray[np.uint64] = self._view(np.uint64, slots)
        self.keys: NDArray[np.uint64] = self._view(np.uint64, slots * 4).reshape(slots, 4)
        self.last_use: NDArray[np.int64] = self._view(np.int64, slots)
        self.lease_until: NDArray[np.int64] = self._view(np.int64, slots)
        self.parent_slot: NDArray[np.int64] = self._view(np.int64, slots)
        self.parent_generation: NDArray[np.uint64] = self._view(np.uint64, slots)
        self.hits: NDArray[np.uint32] = self._view(np.uint32, slots)
        self.position: NDArray[np.uint32] = self._view(np.uint32, slots)
        self._ghost_key: NDArray[np.uint64] = self._view(np.uint64, ghosts * 2).reshape(ghosts, 2)
        self._ghost_stamp: NDArray[np.int64] = self._view(np.int64, ghosts)
        self._ghost_reason: NDArray[np.uint8] = self._view(np.uint8, ghosts)

    def _view(self, dtype: type[D], count: int) -> NDArray[D]:
        view: NDArray[D] = np.frombuffer(self._map, dtype, count, self._offset)
        self._offset += _aligned(view.nbytes)
        return view

    def reset(self) -> None:
        """Write the columns of a store that holds nothing."""
        self.last_use[:] = NOT_READY
        self.parent_slot[:] = NO_PARENT

    def copy_from(self, other: Columns) -> None:
        """Take over the rows that both have (after a resize); ghosts are forgotten."""
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

    def key_of(self, slot: int) -> bytes:
        """The published key of a slot."""
        return bytes(self.keys[slot].tobytes())

    def names(self, slots: Rows, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Which of these slots are published under these keys."""
        asked = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 4)
        return np.asarray((self.keys[slots] == asked).all(axis=1))

    def remember(self, keys: Sequence[bytes], stamp: int, reason: int) -> None:
        """Leave a ghost for each key; a ghost may be overwritten by another at any time."""
        if len(keys) <= FEW:
            for key in keys:
                part = np.frombuffer(key, np.uint64, 2)
                row = int(part[0]) % len(self._ghost_stamp)
                self._ghost_key[row] = part
                self._ghost_stamp[row] = stamp
                self._ghost_reason[row] = reason
        else:
            parts = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 4)
            rows = parts[:, 0] % np.uint64(len(self._ghost_stamp))
            self._ghost_key[rows] = parts[:, :2]
            self._ghost_stamp[rows] = stamp
            self._ghost_reason[rows] = reason

    def ghost(self, key: bytes) -> Ghost | None:
        """What is remembered of a key, if anything."""
        part = np.frombuffer(key, np.uint64, 2)
        row = int(part[0] % np.uint64(len(self._ghost_stamp)))
        if not (self._ghost_key[row] == part).all() or self._ghost_stamp[row] == 0:
            return None
        return Ghost(int(self._ghost_stamp[row]), int(self._ghost_reason[row]))

    def flush(self) -> None:
        """Write the columns to the disk."""
        self._map.flush()


def columns_bytes(slots: int) -> int:
    """Size of the file of columns."""
    ghosts = _GHOSTS_PER_SLOT * slots
    per_slot = (8, 32, 8, 8, 8, 8, 4, 4)
    return sum(_aligned(width * slots) for width in per_slot) + sum(
        _aligned(width * ghosts) for width in (16, 8, 1)
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
