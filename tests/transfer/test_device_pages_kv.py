"""DevicePagesKV on CPU tensors: bit for bit what PagesKV does; a snapshot is what was there when it
was taken.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagoda.transfer import PagesKV, merged
from pagoda.transfer.gpu.copy_engine import CopyEngine
from pagoda.transfer.gpu.device import CpuDevice
from pagoda.transfer.gpu.device_pages_kv import DevicePagesKV
from tests.transfer.late_device import LateDevice
from tests.transfer.pages_kit import (
    BLOCK_TOKENS,
    BLOCKS,
    Case,
    Memory,
    case_of,
    expected_blocks,
    expected_slot,
    layout_of,
    poisoned,
    poisoned_slots,
    views,
)

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def device_kv(
    case: Case, wholes: list[torch.Tensor], engine: CopyEngine | None = None
) -> DevicePagesKV:
    """The transfer over planes at the front of the rows of `wholes`."""
    planes = []
    for whole, page in zip(wholes, case.pages, strict=True):
        planes.append(whole[:, :page])
    return DevicePagesKV(
        planes,
        case.layout,
        block_tokens=BLOCK_TOKENS,
        block_table=case.table,
        part=case.part,
        parts=case.parts,
        copy_engine=engine,
    )


def on(device: str, planes: list[Memory]) -> list[torch.Tensor]:
    return [torch.from_numpy(plane.whole).to(device) for plane in planes]


def bytes_on(wholes: list[torch.Tensor]) -> list[bytes]:
    return [whole.cpu().numpy().tobytes() for whole in wholes]


def contents(slots: Sequence[np.ndarray]) -> list[bytes]:
    return [slot.tobytes() for slot in slots]


def expected_slots(
    case: Case, planes: list[Memory], starts: Sequence[int]
) -> list[bytes]:
    """Return the expected contents of the slots of these chunks."""
    found = []
    for start in starts:
        slot = expected_slot(case, views(planes), start)
        found.append(slot)
    return found


def check(case: Case, device: str = "cpu") -> None:
    """Both ways and by a snapshot: every byte that must change did, and no other."""
    source = case.planes(seed=1)
    wholes = on(device, source)
    kv = device_kv(case, wholes)
    before = bytes_on(wholes)
    stored = [start for start in case.starts if -1 not in case.ids(start)]
    want = expected_slots(case, source, stored)
    ways = [
        kv.to_slots,
        lambda starts, slots: kv.snapshot(starts).to_slots(slots),
        case.kv(PagesKV, source).to_slots,
    ]
    for way in ways:
        slots = poisoned_slots(case.layout, len(stored), case.slot_offset)
        way(stored, slots)
        assert contents(slots) == want
    assert bytes_on(wholes) == before

    target = case.planes(seed=2)
    filled = case.filled_slots()
    blocks = expected_blocks(case, target, filled)
    wholes = on(device, target)
    kv = device_kv(case, wholes)
    kv.from_slots(case.starts, filled)
    assert bytes_on(wholes) == blocks


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("apart", [0, 8, 5])
@pytest.mark.parametrize("pages", [[64], [24, 7, 16], [1], [4096, 512], [12, 20]])
@pytest.mark.parametrize("table", [[7, 3, 15, 0, 9, 2], [4, 5, 6, 7, 8, 9]])
def test_as_on_the_cpu(
    pages: list[int], table: list[int], apart: int, device: str
) -> None:
    case = case_of(pages, table, apart=apart)
    check(case, device)


@given(data=st.data())
def test_any_table_and_any_planes(data: st.DataObject) -> None:
    pages = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))
    blocks = data.draw(st.permutations(range(BLOCKS)))
    count = data.draw(st.integers(0, BLOCKS))
    table = list(blocks[:count])
    skipped = data.draw(st.sets(st.integers(0, BLOCKS)))
    for place in skipped:
        if place < count:
            table[place] = -1
    parts = data.draw(st.integers(1, 3))
    case = case_of(
        pages,
        table,
        blocks_a_chunk=data.draw(st.integers(1, 4)),
        parts=parts,
        part=data.draw(st.integers(0, parts - 1)),
        apart=data.draw(st.sampled_from([0, 0, 1, 8])),
        slot_offset=data.draw(st.sampled_from([0, 1, 4])),
    )
    check(case)


@pytest.mark.parametrize("device", DEVICES)
def test_a_snapshot_is_what_was_there_when_it_was_taken(device: str) -> None:
    case = case_of([64, 32], [7, 3, 15, 0])
    source = case.planes(1)
    want = expected_slots(case, source, case.starts)
    copied = [Memory(plane.whole.copy(), plane.view) for plane in source]
    wholes = on(device, copied)
    kv = device_kv(case, wholes)
    snapshot = kv.snapshot(case.starts)
    assert snapshot.nbytes == 2 * case.layout.chunk_bytes
    for whole in wholes:
        whole.zero_()  # the engine continues
    slots = poisoned_slots(case.layout, len(case.starts))
    with ThreadPoolExecutor(1) as thread:
        copies = thread.submit(snapshot.to_slots, slots)
        copies.result(60)
    assert contents(slots) == want
    with pytest.raises(ValueError, match="of one length"):
        snapshot.to_slots(slots[:1])
    with pytest.raises(ValueError, match="read-only"):
        frozen = poisoned(case.layout)
        frozen.flags.writeable = False
        snapshot.to_slots([frozen, frozen])


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_launched_before_it_is_waited_for(device: str) -> None:
    """On a device: a long queue of work precedes the copies in both directions."""
    layout = layout_of([4096], 2)
    table = [5, 2]
    work = torch.ones((1024, 1024), device=device)
    plane = torch.zeros((BLOCKS, 4096), dtype=torch.uint8, device=device)
    for _ in range(200 if device == "cuda" else 1):
        work = work @ work * 1e-3
    plane.fill_(7)
    kv = DevicePagesKV(
        [plane], layout, block_tokens=BLOCK_TOKENS, block_table=table
    )
    slot = np.zeros(layout.slot_bytes, np.uint8)
    other = np.full(layout.slot_bytes, 9, np.uint8)
    with ThreadPoolExecutor(1) as thread:
        stored = thread.submit(kv.to_slots, [0], [slot])
        stored.result(60)
        assert (slot == 7).all()
        loaded = thread.submit(kv.from_slots, [0], [other])
        loaded.result(60)
    written = 2 * 9 * 4096
    left_alone = (BLOCKS - 2) * 7 * 4096
    assert plane.sum(dtype=torch.int64).item() == written + left_alone


@pytest.mark.parametrize("device", DEVICES)
def test_another_table_of_the_same_planes(device: str) -> None:
    case = case_of([24, 64], [7, 3, 4, 5])
    other = case_of([24, 64], [1, 2])
    source = case.planes(seed=1)
    wholes = on(device, source)
    first = device_kv(other, wholes)
    kv = first.with_table(case.table)
    for one, its in (
        (kv, case),
        (first, other),
        (first.with_table(other.table), other),
    ):
        slots = poisoned_slots(case.layout, len(its.starts))
        one.to_slots(its.starts, slots)
        want = expected_slots(its, source, its.starts)
        assert contents(slots) == want
        assert one.num_tokens == len(its.table) * BLOCK_TOKENS
    with pytest.raises(ValueError, match="is not in"):
        first.with_table([10_000])


def test_memory_made_in_inference_mode_is_written_on_any_thread() -> None:
    with torch.inference_mode():
        planes = [torch.zeros((BLOCKS, 64), dtype=torch.int8) for _ in range(2)]
    layout = layout_of([64, 64], 2)
    kv = DevicePagesKV(
        planes, layout, block_tokens=BLOCK_TOKENS, block_table=[5, 2, 3, 9]
    )
    slots = [np.full(layout.slot_bytes, n, np.uint8) for n in (1, 2)]
    again = [np.zeros(layout.slot_bytes, np.uint8) for _ in slots]
    with ThreadPoolExecutor(1) as thread:
        loaded = thread.submit(kv.from_slots, [0, 8], slots)
        loaded.result(60)
        stored = thread.submit(kv.to_slots, [0, 8], again)
        stored.result(60)
    written = planes[1][[5, 2, 3, 9], 0]
    assert written.tolist() == [1, 1, 2, 2]
    for slot, copied in zip(slots, again, strict=True):
        want = slot[: layout.chunk_bytes].tolist()
        got = copied[: layout.chunk_bytes].tolist()
        assert got == want


def test_merged_planes_and_read_only_slots() -> None:
    whole = torch.randint(0, 256, (BLOCKS, 64), dtype=torch.uint8)
    wide = merged([whole[:, :32], whole[:, 32:]])
    layout = layout_of([64], 2)
    before = whole.clone()
    slot = np.arange(layout.slot_bytes).astype(np.uint8)
    slot.flags.writeable = False
    kv = DevicePagesKV(
        wide, layout, block_tokens=BLOCK_TOKENS, block_table=[3, 1]
    )
    kv.from_slots([0], [slot])
    before[[3, 1]] = torch.arange(128, dtype=torch.uint8).reshape(2, 64)
    assert torch.equal(whole, before)


def test_what_does_not_fit_is_named() -> None:
    layout = layout_of([16], 2)
    plane = torch.zeros((BLOCKS, 16), dtype=torch.uint8)

    def make(planes: object, table: Sequence[int] = (1, 2)) -> DevicePagesKV:
        return DevicePagesKV(
            planes, layout, block_tokens=BLOCK_TOKENS, block_table=table
        )  # type: ignore[arg-type]

    for planes in ([plane.numpy()], [plane, plane.to("meta")]):
        with pytest.raises(
            ValueError, match=r"planes\[\d\] must be a tensor on one device"
        ):
            make(planes)
    with pytest.raises(ValueError, match="KV is on meta"):
        make([plane.to("meta")])
    with pytest.raises(ValueError, match="got no plane"):
        make([])
    with pytest.raises(
        ValueError, match=r"planes\[0\] must be \[num_blocks, page_bytes\]"
    ):
        make([plane.to(torch.int16)])
    with pytest.raises(ValueError, match="a block that is -1"):
        make([plane], [-1, 2]).snapshot([0])
    with pytest.raises(ValueError, match="starts: the chunk"):
        make([plane]).snapshot([8])
    with pytest.raises(ValueError, match="names a block twice"):
        make([plane], [2, 2]).from_slots([0], [poisoned(layout)])


def test_torch_is_imported_when_it_is_needed() -> None:
    script = (
        "import sys, pagoda.transfer.gpu.device_pages_kv, pagoda.transfer; sys.exit('torch' "
        "in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", script], check=False, timeout=60
        ).returncode
        == 0
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_snapshot_is_awaited_before_it_is_copied_out(seed: int) -> None:
    """On a device that does all work as late as possible, after the engine's work when the transfer
    was made.
    """
    case = case_of([64, 32], [7, 3, 15, 0])
    source = case.planes(1)
    wholes = [torch.zeros_like(torch.from_numpy(plane.whole)) for plane in source]
    device = LateDevice(seed)
    device.device_memory(*wholes)
    slots = poisoned_slots(case.layout, len(case.starts))
    device.register(*slots)

    def computed() -> None:
        for whole, plane in zip(wholes, source, strict=True):
            whole.copy_(torch.from_numpy(plane.whole))

    device.current_stream().launch(computed)
    engine = CopyEngine(device, way="direct")
    kv = device_kv(case, wholes, engine)
    snapshot = kv.snapshot(case.starts)
    device.current_stream().launch(lambda: [whole.zero_() for whole in wholes])
    snapshot.to_slots(slots)
    want = expected_slots(case, source, case.starts)
    assert contents(slots) == want


@pytest.mark.parametrize("seed", range(8))
def test_snapshots_take_turns_in_memory_that_was_taken_before(seed: int) -> None:
    """A row is another's as soon as it was copied out, on a device that is late with everything."""
    case = case_of([64, 32], [7, 3, 15, 0])
    device = LateDevice(seed)
    wholes = [torch.from_numpy(plane.whole.copy()) for plane in case.planes(1)]
    device.device_memory(*wholes)
    engine = CopyEngine(device, way="direct", staging_bytes=4096)
    kv = device_kv(case, wholes, engine)
    staging, taken = kv.preallocate(3 * case.layout.chunk_bytes)
    # and four rings
    assert staging.free == 3
    assert taken == 3 * case.layout.chunk_bytes + 4 * 4096
    first = kv.snapshot(case.starts[:1], staging)
    for number in range(4):
        source = case.planes(number)
        want = expected_slots(case, source, case.starts)

        def computed(source: list[Memory] = source) -> None:
            for whole, plane in zip(wholes, source, strict=True):
                whole.copy_(torch.from_numpy(plane.whole))

        device.current_stream().launch(computed)
        other = kv.with_table(case.table)
        snapshot = other.snapshot(case.starts, staging)
        assert staging.free == 0
        slots = poisoned_slots(case.layout, len(case.starts))
        device.register(*slots)
        snapshot.to_slots(slots)
        assert contents(slots) == want
        for _ in range(2):
            snapshot.release()
        assert staging.free == 2
    with pytest.raises(
        ValueError, match="room for 2 chunks is left on the device, 3 are needed"
    ):
        kv.snapshot([case.starts[0]] * 3, staging)
    assert staging.free == 2
    first.release()


class LittleDevice(CpuDevice):
    """A device with little memory left."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes > 600:
            raise RuntimeError("out of memory")
        return super().allocate(nbytes)


def test_where_less_is_left_less_is_taken() -> None:
    case = case_of([64, 32], [7, 3, 15, 0])
    wholes = [torch.from_numpy(plane.whole) for plane in case.planes(1)]
    engine = CopyEngine(LittleDevice())
    kv = device_kv(case, wholes, engine)
    staging, taken = kv.preallocate(8 * case.layout.chunk_bytes)
    assert 1 <= staging.free == taken // case.layout.chunk_bytes < 8
    least, _ = kv.preallocate(0)
    assert least.free == 1
