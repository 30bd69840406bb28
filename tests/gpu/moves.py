"""A store and a load of any form, and the checks afterwards: exactly the expected bytes have
changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagoda.layout import KVLayout, itemsize
from pagoda.transfer.base import Transfer
from pagoda.transfer.gpu.copy_engine import CopyEngine
from tests.gpu.forms import Form, Size
from tests.gpu.rig import POISON, Bytes, Rig


@dataclass
class Memory:
    """KV memory of a form, filled with random bits, and chunks of it in a random order of
    blocks.
    """

    rig: Rig
    form: Form
    size: Size
    dtype: str
    flat: torch.Tensor
    table: list[int]

    @classmethod
    def of(
        cls, rig: Rig, form: Form, size: Size, dtype: str, seed: int
    ) -> Memory:
        """Create memory with a table for all its chunks."""
        random = np.random.default_rng(seed)
        flat = rig.random(form.elements(size), itemsize(dtype), seed)
        count = size.chunks * size.chunk // size.block
        table = (
            list(range(count))
            if form.dense
            else random.permutation(size.blocks)[:count].tolist()
        )
        return cls(rig, form, size, dtype, flat, table)

    @property
    def layout(self) -> KVLayout:
        return self.form.layout(self.size, self.dtype)

    def starts(self, seed: int) -> list[int]:
        """The first tokens of all chunks, in any order."""
        order = np.random.default_rng(seed).permutation(self.size.chunks)
        return [int(number) * self.size.chunk for number in order]

    def kv(self, engine: CopyEngine, **options: object) -> Transfer:
        """The transfer over this memory."""
        views = self.form.views(
            self.size, self.flat.view(getattr(torch, self.dtype))
        )
        return self.form.kv(
            self.size, views, self.layout, self.table, engine, **options
        )

    def ids(self, start: int) -> torch.Tensor:
        """The blocks of the chunk at `start`, on the device."""
        first = start // self.size.block
        blocks = self.table[first : first + self.size.chunk // self.size.block]
        return torch.tensor(blocks, device=self.flat.device)

    def chunk(self, start: int, flat: torch.Tensor | None = None) -> torch.Tensor:
        """The elements of a chunk, as integers, in the order of a slot."""
        views = self.form.views(self.size, self.flat if flat is None else flat)
        return self.form.chunk(self.size, views, self.ids(start))

    def holds(self, start: int, slot: Bytes) -> None:
        """Fail unless the slot has the chunk at `start`, and poison after it."""
        nbytes = self.layout.chunk_bytes
        got = torch.tensor(slot[:nbytes]).to(self.flat.device)
        assert torch.equal(got, self.chunk(start).view(torch.uint8)), (
            f"the chunk at {start} has other elements"
        )
        assert (slot[nbytes:] == POISON).all(), (
            "bytes after the chunk have changed"
        )

    def loaded(
        self, starts: Sequence[int], slots: Sequence[Bytes]
    ) -> torch.Tensor:
        """Return all of the memory after `slots` were loaded into the chunks; blocks that are -1
        are skipped.
        """
        want = self.flat.clone()
        nbytes = self.layout.chunk_bytes
        where = torch.arange(self.flat.numel(), device=self.flat.device)
        spare = next(
            block for block in range(self.size.blocks) if block not in self.table
        )
        there = Memory(
            self.rig,
            self.form,
            self.size,
            self.dtype,
            where,
            [spare if b < 0 else b for b in self.table],
        )
        for start, slot in zip(starts, slots, strict=True):
            bits = (
                torch.tensor(slot[:nbytes])
                .to(self.flat.device)
                .view(self.flat.dtype)
            )
            want[there.chunk(start)] = bits
        there.table = [spare] * len(self.table)
        if -1 in self.table:
            own = there.chunk(0)
            want[own] = self.flat[own]
        return want


def check_store(
    memory: Memory, engine: CopyEngine, kind: str, seed: int, odd: int = 0
) -> list[Bytes]:
    """Store all chunks of the memory; return the slots, in the order of `memory.starts(seed)`."""
    starts = memory.starts(seed)
    before = memory.flat.clone()
    slots = memory.rig.slots(memory.layout, len(starts), kind, odd=odd)
    memory.kv(engine).to_slots(starts, slots)
    for start, slot in zip(starts, slots, strict=True):
        memory.holds(start, slot)
    assert torch.equal(memory.flat, before), (
        "a store changed the memory that it reads"
    )
    return slots


def check_load(
    memory: Memory, engine: CopyEngine, kind: str, seed: int, odd: int = 0
) -> None:
    """Load random slots into the memory."""
    starts = memory.starts(seed)
    slots = memory.rig.slots(memory.layout, len(starts), kind, fill=None, odd=odd)
    before = [slot.copy() for slot in slots]
    want = memory.loaded(starts, slots)
    memory.kv(engine).from_slots(starts, slots)
    assert torch.equal(memory.flat, want), (
        "the memory differs from the expected result of the load"
    )
    assert all(
        (slot == own).all() for slot, own in zip(slots, before, strict=True)
    ), "a load changed a slot"
