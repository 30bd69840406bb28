"""A transfer's half on a device: which runs, behind what, and who is told of layers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pagoda.transfer.base import Bytes
from pagoda.transfer.cuda import Copies, copies_of
from pagoda.transfer.gate import LayerGate
from pagoda.transfer.runs import RunTable

if TYPE_CHECKING:
    import torch

__all__ = ["Beside", "copies_for", "device_of"]

Ids = npt.NDArray[np.int64]


class Beside:
    """The copies of one transfer. They happen on streams beside the engine's, behind all that this thread's current
    stream had been given when this object was made; each call returns when its copies are complete. What is being
    copied is kept alive until then.

    Thread-safe.
    """

    def __init__(self, copies: Copies, table: RunTable, keep: object, gate: LayerGate | None = None) -> None:
        self.copies = copies
        self.table = table
        self._keep = keep
        self._gate = gate
        self.made = copies.port.here()

    def renewed(self) -> Beside:
        """Return one that comes behind what has been launched until now."""
        other = copy(self)
        other.made = self.copies.port.here()
        return other

    @property
    def device_index(self) -> int | None:
        """The number of the CUDA device; None for CPU memory."""
        device = self.copies.port.device
        return device.index if device.type == "cuda" else None

    def to_slots(self, ids: Ids, slots: Sequence[Bytes]) -> None:
        """Copy runs into slots; changes nothing else."""
        self.copies.down(self.table, ids, slots, self.made)

    def from_slots(self, ids: Ids, slots: Sequence[Bytes]) -> None:
        """Copy slots into runs, none whose id is below 0; changes nothing else."""
        self.copies.up(self.table, ids, slots, self.made, self._gate)


def device_of(*values: object) -> torch.device | None:
    """Return the device of the first of nested tensors if it is not the CPU; None for CPU memory and arrays."""
    if "torch" not in sys.modules:  # nobody has a tensor before torch was imported
        return None
    import torch

    for value in values:
        if isinstance(value, list | tuple):
            return device_of(*value)
        if isinstance(value, torch.Tensor):
            return None if value.device.type == "cpu" else value.device
        if value is not None:
            return None
    return None


def copies_for(device: torch.device | None) -> Copies | None:
    """Return the copy engine for memory on a device; None for CPU memory. Raises ValueError for any other device."""
    if device is None:
        return None
    if device.type != "cuda":
        raise ValueError(f"KV lies on {device}: only NVIDIA GPUs and CPU memory can be copied")
    return copies_of(device)
