"""Slots in host memory as in the product: a slab in shared memory, registered with the device."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from pagoda.slab import MemorySlab
from pagoda.slab.pinned import PinnedMemory, pin

Bytes = npt.NDArray[np.uint8]

SHM = Path("/dev/shm")


class Room:
    """Host memory of `nbytes`: a slab over a file in `shm`, or over private memory where `shm`
    lacks the space.

    All pages are populated. `registered`: with the device, as in a host tier. One thread at a time.
    """

    def __init__(
        self,
        device: torch.device,
        nbytes: int,
        *,
        shm: Path | None = SHM,
        registered: bool = True,
    ) -> None:
        self.nbytes = nbytes
        self._directory = _directory(shm, nbytes)
        self.kind = (
            "private memory" if self._directory is None else f"a file in {shm}"
        )
        self._slab = MemorySlab(self._file(), 1, nbytes)
        self._slab.populate(
            threads=min(8, len(os.sched_getaffinity(0))), background=False
        )
        self.array = self._slab.view(0)
        self.array[::4096] = 0  # populates where the kernel cannot
        self._pinned: PinnedMemory | None = None
        if registered and device.type == "cuda":
            self._pinned = pin(self.array, device.index or 0, background=False)

    @property
    def registered_bytes(self) -> int:
        """Return the bytes that are registered with the device."""
        return 0 if self._pinned is None else self._pinned.nbytes

    def about(self) -> dict[str, object]:
        """Describe the kind of memory, and why not all of it is registered."""
        trouble = "" if self._pinned is None else self._pinned.trouble
        return {
            "kind": self.kind,
            "nbytes": self.nbytes,
            "registered_bytes": self.registered_bytes,
            "trouble": trouble,
        }

    def slots(self, slot_bytes: int) -> list[Bytes]:
        """Return as many slots as fit."""
        count = self.nbytes // slot_bytes
        return list(self.array[: count * slot_bytes].reshape(count, slot_bytes))

    def close(self) -> None:
        """Unregister the memory and remove the file."""
        if self._pinned is not None:
            self._pinned.close(30.0)
        self._slab.close()
        if self._directory is not None:
            self._directory.cleanup()

    def _file(self) -> Path | None:
        if self._directory is None:
            return None
        path = Path(self._directory.name) / "slab"
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.nbytes)
        return path


def _directory(
    shm: Path | None, nbytes: int
) -> tempfile.TemporaryDirectory[str] | None:
    """Return a directory for the slab; None where less than 110 % of `nbytes` is free in `shm`."""
    if (
        shm is None
        or not shm.is_dir()
        or shutil.disk_usage(shm).free < nbytes * 1.1
    ):
        return None
    return tempfile.TemporaryDirectory(prefix="pagoda-bench-", dir=shm)
