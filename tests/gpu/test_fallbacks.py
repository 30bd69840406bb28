"""Where registration is refused, in part or in full, Triton is missing, or there is no pinned
memory at all.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from pagoda.slab.cuda_driver import Driver, DriverError
from pagoda.slab.memory import aligned
from pagoda.slab.pinned import PinnedMemory, pin
from pagoda.transfer.gpu.copy_engine import WAYS
from tests.gpu.forms import BY_NAME, FORMS, SHORT, TINY
from tests.gpu.moves import Memory, check_load, check_store
from tests.gpu.rig import POISON, Rig

ALL_WAYS = [*WAYS, None]
OUT_OF_MEMORY = 2
ROOT = Path(__file__).parents[2]


class Sparing(Driver):
    """The machine's driver, which registers that many pieces and then answers as if out of
    memory.
    """

    def __init__(self, inner: Driver | None, pieces: int) -> None:
        self._inner = inner
        self._left = pieces

    def use(self, device_index: int) -> None:
        if self._inner is not None:
            self._inner.use(device_index)

    def register(self, address: int, nbytes: int) -> int:
        if self._left == 0:
            raise DriverError(
                "cuMemHostRegister", OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"
            )
        self._left -= 1
        return (
            address
            if self._inner is None
            else self._inner.register(address, nbytes)
        )

    def unregister(self, address: int) -> None:
        if self._inner is not None:
            self._inner.unregister(address)

    def relaxed_capture(self) -> AbstractContextManager[None]:
        return (
            nullcontext()
            if self._inner is None
            else self._inner.relaxed_capture()
        )


def held(
    rig: Rig, array: np.ndarray, pieces: int, piece_bytes: int
) -> PinnedMemory:
    """Register the first pieces of an array."""
    inner = None if rig.small else Driver.load()
    assert rig.small or inner is not None
    index = rig.device.index or 0
    found = pin(
        array,
        index,
        driver=Sparing(inner, pieces),
        background=False,
        piece_bytes=piece_bytes,
    )
    assert found is not None
    rig.reaches(array[: found.nbytes])
    rig.unreachable(array[found.nbytes :])
    return found


@pytest.mark.parametrize("pieces", [0, 1, 2])
@pytest.mark.parametrize("way", [*ALL_WAYS, "no kernels"])
@pytest.mark.parametrize("name", ["pages", "planes_first"])
def test_slots_whose_registration_is_refused_are_copied_right(
    rig: Rig, seed: int, name: str, way: str | None, pieces: int
) -> None:
    """Of three pieces none, one or two are registered; slots are in both kinds, and across the
    border.
    """
    memory = Memory.of(
        rig, BY_NAME[name], TINY if rig.small else SHORT, "bfloat16", seed
    )
    layout = memory.layout
    count = memory.size.chunks
    piece_bytes = -(-count * layout.slot_bytes // 3 // 4096) * 4096 + 4096
    array = aligned(3 * piece_bytes)
    array[:] = POISON
    pinned = held(rig, array, pieces, piece_bytes)
    try:
        assert pinned.nbytes == pieces * piece_bytes
        assert pinned.trouble
        begins = [
            piece_bytes // 3 + number * layout.slot_bytes
            for number in range(count)
        ]
        slots = [array[begin : begin + layout.slot_bytes] for begin in begins]
        engine = (
            rig.engine(kernels=False) if way == "no kernels" else rig.engine(way)
        )
        starts = memory.starts(seed)
        memory.kv(engine).to_slots(starts, slots)
        for start, slot in zip(starts, slots, strict=True):
            memory.holds(start, slot)
        other = Memory.of(rig, BY_NAME[name], memory.size, "bfloat16", seed + 1)
        want = other.loaded(starts, slots)
        other.kv(engine).from_slots(starts, slots)
        assert torch.equal(other.flat, want)
    finally:
        assert pinned.close(30.0)


@pytest.mark.parametrize("way", ALL_WAYS)
def test_slots_that_lie_in_two_pieces_of_registration(
    rig: Rig, seed: int, way: str | None
) -> None:
    """The driver knows two registrations; what crosses from one to the other is one slot."""
    memory = Memory.of(
        rig, BY_NAME["pages"], TINY if rig.small else SHORT, "bfloat16", seed
    )
    layout = memory.layout
    count = memory.size.chunks
    array = aligned(-(-count * layout.slot_bytes // 4096) * 4096)
    array[:] = POISON
    pinned = held(rig, array, -1, 4096 if rig.small else 1 << 20)
    try:
        assert pinned.nbytes == array.nbytes
        assert not pinned.trouble
        slots = [
            array[n * layout.slot_bytes : (n + 1) * layout.slot_bytes]
            for n in range(count)
        ]
        engine = rig.engine(way)
        starts = memory.starts(seed)
        memory.kv(engine).to_slots(starts, slots)
        for start, slot in zip(starts, slots, strict=True):
            memory.holds(start, slot)
        other = Memory.of(
            rig, BY_NAME["pages"], memory.size, "bfloat16", seed + 1
        )
        want = other.loaded(starts, slots)
        other.kv(engine).from_slots(starts, slots)
        assert torch.equal(other.flat, want)
    finally:
        assert pinned.close(30.0)


@pytest.mark.parametrize("way", ALL_WAYS)
def test_no_pinned_memory_for_a_bounce_buffer(
    rig: Rig, seed: int, way: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots are pageable memory, and the driver's own slow copies are all there is."""
    engine = rig.engine(way)
    monkeypatch.setattr(engine.device, "allocate_host", lambda nbytes: None)
    for form in FORMS:
        size = TINY if rig.small else SHORT
        check_store(
            Memory.of(rig, form, size, "bfloat16", seed), engine, "mixed", seed
        )
        check_load(
            Memory.of(rig, form, size, "bfloat16", seed + 1),
            engine,
            "mixed",
            seed,
        )


def test_copies_are_right_without_triton(seed: int) -> None:
    """In a process that has none."""
    command = [sys.executable, "-m", "tests.gpu.without_triton", str(seed)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        check=False,
        timeout=280,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "right without Triton" in done.stdout
