"""The copy engine over streams that are late: a wait that is missing shows as wrong bytes, without
a GPU.
"""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from weakref import ref

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagoda.base import signal_safe_threads
from pagoda.transfer.gpu import autotune
from pagoda.transfer.gpu.copy_engine import WAYS, CopyEngine
from pagoda.transfer.gpu.layer_events import LayerEvents
from pagoda.transfer.run_table import RunTable
from tests.transfer.kernels_kit import interpreted
from tests.transfer.late_device import Failure, LateDevice, LateEvent

POISON = 0xA5
ALL_WAYS = [*WAYS, None]
SLOTS = ["registered", "plain", "mixed"]
BOTH = ["down", "up"]


@pytest.fixture(autouse=True)
def _little_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by run in Python a megabyte takes a second, and 10,000 waits on a device that failed half
    a second.
    """
    monkeypatch.setattr(autotune, "_SCRATCH_BYTES", 300)
    monkeypatch.setattr(signal_safe_threads, "_ATTEMPTS", 100)


Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]


class Scene(NamedTuple):
    """A table over `memory`, some chunks of it, and where their slots are in `room` (which is
    larger).
    """

    table: RunTable
    memory: Bytes
    ids: Ids
    room: Bytes
    begins: list[int]
    slot_bytes: int

    @property
    def slots(self) -> list[Bytes]:
        return [
            self.room[begin : begin + self.slot_bytes] for begin in self.begins
        ]

    def moves(
        self, begin: int = 0, end: int | None = None
    ) -> list[tuple[int, int, int]]:
        """Return (place in memory, place in room, bytes) of each run in rows [begin, end), computed
        simply.
        """
        table = self.table
        base = self.memory.ctypes.data
        found = []
        for chunk, slot in enumerate(self.begins):
            for row in range(begin, len(table.address) if end is None else end):
                for number in range(table.count):
                    one = int(self.ids[chunk, number])
                    size = int(table.nbytes[row])
                    if one >= 0:
                        inside = (one // table.group) * int(
                            table.stride[row]
                        ) + one % table.group * size
                        where = slot + int(table.offset[row]) + number * size
                        found.append(
                            (int(table.address[row]) - base + inside, where, size)
                        )
        return found

    def stored(self, memory: Bytes) -> Bytes:
        """Return `room` after `memory` was stored into poisoned slots."""
        room = np.full_like(self.room, POISON)
        for own, slot, size in self.moves():
            room[slot : slot + size] = memory[own : own + size]
        return room

    def loaded(self, memory: Bytes) -> Bytes:
        """Return `memory` after `room` was loaded into it."""
        after = memory.copy()
        for own, slot, size in self.moves():
            after[own : own + size] = self.room[slot : slot + size]
        return after


def scene(
    seed: int,
    *,
    rows: int = 5,
    count: int = 3,
    chunks: int = 4,
    grain: int = 8,
    group: int = 1,
    outermost: bool = False,
    twice: bool = False,
    skipped: float = 0.2,
    odd: int = 0,
) -> Scene:
    """A random scene; `grain` divides all lengths and places but those of slots, which begin `odd`
    bytes later.
    """
    random = np.random.default_rng(seed)
    blocks = -(-chunks * count // group) + 3
    nbytes = random.integers(1, 6, rows) * grain
    each = nbytes * group + (
        0 if outermost else random.integers(0, 2, rows) * grain
    )
    stride = np.full(rows, each.sum() + grain) if outermost else each
    gap = 2 * grain
    ahead = (
        np.cumsum(each) - each
        if outermost
        else np.cumsum(each * blocks + gap) - each * blocks
    )
    memory = _aligned(
        int((stride * blocks).max() + ahead.max() + each.max() + gap)
    )
    memory[:] = random.integers(0, 256, memory.size)
    begin = int(random.integers(0, 3)) * grain  # what other parts have
    offset = begin + np.cumsum(nbytes * count) - nbytes * count
    cuts = (
        np.sort(
            random.choice(np.arange(1, rows), min(2, rows - 1), replace=False)
        )
        if rows > 1
        else []
    )
    table = RunTable(
        memory.ctypes.data + ahead,
        np.asarray(stride, np.int64),
        nbytes.astype(np.int64),
        offset.astype(np.int64),
        count,
        group,
        np.array([0, *cuts, rows], np.int64),
    )
    there = blocks * group
    ids = random.permutation(there)[: chunks * count].reshape(chunks, count)
    if twice:
        ids = random.integers(0, there, (chunks, count))
    ids[random.random(ids.shape) < skipped] = -1
    slot_bytes = int(table.ends[-1]) + int(random.integers(0, 3)) * grain
    apart = -(-slot_bytes // 64) * 64
    room = _aligned(chunks * apart + 64)
    room[:] = random.integers(0, 256, room.size)
    return Scene(
        table,
        memory,
        ids.astype(np.int64),
        room,
        [odd + apart * i for i in range(chunks)][::-1],
        slot_bytes,
    )


def _aligned(nbytes: int) -> Bytes:
    room = np.empty(nbytes + 64, np.uint8)
    skip = -room.ctypes.data % 64
    return room[skip : skip + nbytes]


def device_of(
    it: Scene, slots: str = "registered", seed: int = 0, **options: object
) -> LateDevice:
    device = LateDevice(seed, **options)  # type: ignore[arg-type]
    device.device_memory(it.memory)
    declare(device, it, slots)
    return device


def declare(device: LateDevice, it: Scene, slots: str) -> None:
    """Register the slots; of mixed ones every other."""
    if slots == "registered":
        device.register(it.room)
    elif slots == "mixed":
        device.register(*it.slots[::2])
        device.pageable(*it.slots[1::2])
    else:
        device.pageable(it.room)


def store(engine: CopyEngine, device: LateDevice, it: Scene) -> None:
    """The producer is still writing when the store is asked for; what must be right is."""
    real = it.memory.copy()
    it.memory[:] = 0xEE
    it.room[:] = POISON
    device.current_stream().launch(partial(np.copyto, it.memory, real))
    engine.store(it.table, it.ids, it.slots, device.current_event())
    device.check()
    assert (it.memory == real).all()
    assert (it.room == it.stored(real)).all()


def load(engine: CopyEngine, device: LateDevice, it: Scene) -> None:
    """What the engine still reads of the blocks is what was in them before."""
    before = it.memory.copy()
    want = it.loaded(it.memory)
    room = it.room.copy()
    seen = np.zeros_like(it.memory)
    device.current_stream().launch(partial(np.copyto, seen, it.memory))
    engine.load(it.table, it.ids, it.slots, device.current_event())
    device.check()
    assert (it.memory == want).all()
    assert (it.room == room).all()
    assert (seen == before).all()


MOVES = {"down": store, "up": load}


@pytest.mark.slow
@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("staging_bytes", [1 << 16, 256, 1])
def test_every_way_is_right_on_a_late_device(
    way: str | None, direction: str, slots: str, staging_bytes: int
) -> None:
    for seed in range(6):
        it = scene(
            seed,
            outermost=seed % 2 == 1,
            group=1 + seed % 3,
            skipped=0.3 * (seed // 3) * (direction == "up"),
            twice=direction == "down",
        )
        device = device_of(it, slots, seed)
        engine = CopyEngine(device, way=way, staging_bytes=staging_bytes)
        for _ in range(2):
            MOVES[direction](engine, device, it)


@pytest.mark.slow
@given(data=st.data())
def test_any_table_is_copied_right_on_a_late_device(data: st.DataObject) -> None:
    direction = data.draw(st.sampled_from(BOTH))
    it = scene(
        data.draw(st.integers(0, 2**32)),
        rows=data.draw(st.integers(1, 9)),
        count=data.draw(st.integers(1, 5)),
        chunks=data.draw(st.integers(1, 6)),
        grain=data.draw(st.sampled_from([1, 2, 4, 8, 16])),
        group=data.draw(st.integers(1, 4)),
        outermost=data.draw(st.booleans()),
        twice=direction == "down" and data.draw(st.booleans()),
        skipped=data.draw(st.sampled_from([0.0, 0.3, 1.0]))
        if direction == "up"
        else 0.0,
        odd=data.draw(st.sampled_from([0, 0, 1, 2, 4, 8])),
    )
    device = device_of(
        it,
        data.draw(st.sampled_from(SLOTS)),
        data.draw(st.integers(0, 2**32)),
        kernels=data.draw(st.sampled_from(["plain", "plain", None])),
        host=data.draw(st.sampled_from([True, True, False])),
    )
    way = data.draw(st.sampled_from(ALL_WAYS))
    if device.kernels is None and way in ("direct", "staged"):
        way = None
    engine = CopyEngine(
        device,
        way=way,
        staging_bytes=data.draw(st.sampled_from([1, 100, 1000, 1 << 16])),
    )
    for _ in range(data.draw(st.integers(1, 2))):
        MOVES[direction](engine, device, it)


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("staging_bytes", [1 << 16, 100])
def test_a_layer_is_there_when_it_was_waited_for(
    way: str | None, slots: str, staging_bytes: int
) -> None:
    for seed in range(6):
        it = scene(seed, rows=8)
        device = device_of(it, slots, seed)
        want = it.loaded(it.memory)
        layers = len(it.table.layers) - 1
        layer_events = LayerEvents(layers, len(it.ids))
        seen = [np.zeros_like(it.memory) for _ in range(layers)]
        engine = CopyEngine(device, way=way, staging_bytes=staging_bytes)
        with ThreadPoolExecutor(1) as thread:
            load = thread.submit(
                engine.load,
                it.table,
                it.ids,
                it.slots,
                device.current_event(),
                layer_events,
            )
            for layer in range(layers):
                assert layer_events.wait_layer(layer, device, 60.0)
                device.current_stream().launch(
                    partial(np.copyto, seen[layer], it.memory)
                )
            device.current_stream().record_event().synchronize()
            load.result(60)
        device.check()
        for layer, then in enumerate(seen):
            for own, _, size in it.moves(*it.table.layers[layer : layer + 2]):
                assert (then[own : own + size] == want[own : own + size]).all()
        assert (it.memory == want).all()


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("slots", SLOTS)
def test_nothing_goes_on_after_an_error(
    way: str | None, direction: str, slots: str
) -> None:
    """A copy or a kernel cannot be launched, in the middle: then all writes end, and the next call
    works.
    """
    raised = 0
    for seed in range(8):
        it = scene(seed, skipped=0)
        device = device_of(it, slots, seed)
        engine = CopyEngine(device, way=way, staging_bytes=200)
        MOVES[direction](engine, device, it)
        assert device.kernels is not None
        device.fail_at = device.copies + 1 + seed % 7
        device.kernels.fail_at = device.kernels.launches + 1 + seed % 3
        try:
            (engine.store if direction == "down" else engine.load)(
                it.table, it.ids, it.slots, device.current_event()
            )
        except Failure:
            raised += 1
        device.check()
        # the slots are reassigned now
        it.room[:] = 0x11
        it.memory[:] = 0x22
        device.current_stream().record_event().synchronize()
        assert (it.room == 0x11).all()
        assert (it.memory == 0x22).all()
        device.fail_at = device.kernels.fail_at = None
        it.memory[:] = np.random.default_rng(seed).integers(
            0, 256, it.memory.size
        )
        MOVES[direction](engine, device, it)
    assert raised >= 2


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("slots", SLOTS)
def test_what_failed_on_the_device_is_raised(
    way: str | None, direction: str, slots: str
) -> None:
    """As in CUDA: the error is reported later, by any next call."""
    for seed in range(8):
        it = scene(seed, skipped=0)
        device = device_of(it, slots, seed)
        engine = CopyEngine(device, way=way, staging_bytes=200)
        MOVES[direction](engine, device, it)
        assert device.kernels is not None
        device.fail_late_at = device.copies + 1 + seed % 2
        device.kernels.fail_late_at = device.kernels.launches + 1
        for _ in range(2):
            with pytest.raises(Failure):
                (engine.store if direction == "down" else engine.load)(
                    it.table, it.ids, it.slots, None
                )
        assert device.idle()


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("slots", SLOTS)
def test_a_device_that_has_little_memory_left(
    way: str | None, direction: str, slots: str
) -> None:
    """The ring is as large as it can be; with less than four rows what needs one raises, and the
    next call works.
    """
    for seed in range(4):
        it = scene(seed, skipped=0)
        device = device_of(it, slots, seed)
        device.most_bytes = 700
        engine = CopyEngine(device, way=way, staging_bytes=1 << 16)
        MOVES[direction](engine, device, it)
        engine = CopyEngine(device, way=way, staging_bytes=1 << 16)
        device.most_bytes = 8
        if slots == "registered" and way in ("direct", "runs", None):
            MOVES[direction](engine, device, it)
            continue
        with pytest.raises(torch.OutOfMemoryError):
            (engine.store if direction == "down" else engine.load)(
                it.table, it.ids, it.slots, None
            )
        device.check()
        device.most_bytes = None
        MOVES[direction](engine, device, it)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["direct", "staged"])
@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("slots", SLOTS)
def test_with_the_real_kernels(way: str, direction: str, slots: str) -> None:
    """Those of the project, in Triton's interpreter; a place is then an address."""
    for seed in range(2):
        it = scene(
            seed,
            grain=4 + 4 * seed,
            group=1 + seed,
            outermost=seed == 0,
            skipped=0.3 * (direction == "up"),
        )
        device = device_of(it, slots, seed, kernels=interpreted(), shift=0)
        MOVES[direction](
            CopyEngine(device, way=way, staging_bytes=500), device, it
        )


@pytest.mark.slow
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("kernels", ["plain", None])
def test_what_was_taken_is_what_was_there(
    kernels: str | None, prepared: bool
) -> None:
    """The engine writes to the blocks, and drops everything, before any of it has happened."""
    for seed in range(12):
        it = scene(seed, skipped=0, twice=True)
        device = device_of(it, seed=seed, kernels=kernels)
        engine = CopyEngine(device, staging_bytes=200)
        real = it.memory.copy()
        it.memory[:] = 0xEE
        it.room[:] = POISON
        (producer,) = device.new_streams(1)  # another stream of the engine's
        producer.launch(partial(np.copyto, it.memory, real))
        table = replace(it.table)
        if prepared:
            engine.prepare(table)
        staging, taken = engine.gather(table, it.ids, producer.record_event())
        device.current_stream().launch(partial(it.memory.fill, 0xDD))
        del table
        gc.collect()
        taken.synchronize()
        begin, end = it.table.span(0, it.table.rows)
        for own, slot in zip(staging.numpy(), it.slots, strict=True):
            slot[begin:end] = own
        assert (it.room == it.stored(real)).all()
        device.current_stream().record_event().synchronize()
        assert (it.memory == 0xDD).all()
        device.check()


def test_rings_that_are_taken_at_the_start_are_those_of_all_calls() -> None:
    it = scene(0, skipped=0)
    device = device_of(it, kernels="plain")
    engine = CopyEngine(device, way="staged", staging_bytes=4096)
    assert engine.allocate_rings(it.table) == 4 * 4096
    rings = [
        workspace._ring.data_ptr()
        for workspace in engine._workspaces
        if workspace._ring is not None
    ]
    assert len(set(rings)) == 4
    engine.store(it.table, it.ids, it.slots)
    assert sorted(
        workspace._ring.data_ptr() for workspace in engine._workspaces
    ) == sorted(rings)  # type: ignore[union-attr]
    assert CopyEngine(device_of(it, kernels=None)).allocate_rings(it.table) == 0


def test_tables_are_let_go_of() -> None:
    it = scene(0, skipped=0)
    device = device_of(it)
    engine = CopyEngine(device, way="direct")
    table = replace(it.table)
    engine.store(table, it.ids, it.slots)
    gone = ref(table)
    del table
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("slots", SLOTS)
def test_many_threads_with_one_engine(way: str | None, slots: str) -> None:
    scenes = [scene(seed, chunks=3, skipped=0) for seed in range(6)]
    device = LateDevice(3)
    for it in scenes:
        device.device_memory(it.memory)
        declare(device, it, slots)
    engine = CopyEngine(device, way=way, staging_bytes=150)

    def both(it: Scene) -> None:
        for _ in range(4):
            real = it.memory.copy()
            it.room[:] = POISON
            engine.store(it.table, it.ids, it.slots, None)
            assert (it.room == it.stored(real)).all()
            it.room[:] = np.random.default_rng(1).integers(0, 256, it.room.size)
            want = it.loaded(it.memory)
            engine.load(it.table, it.ids, it.slots, None)
            assert (it.memory == want).all()

    with ThreadPoolExecutor(len(scenes)) as threads:
        list(threads.map(both, scenes, timeout=100))
    device.check()


@pytest.mark.parametrize("times", [1, 2, 3, 7])
def test_nothing_is_in_flight_after_a_call_that_signals_ended(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if Ctrl-C was pressed several times while the call waited for the device."""
    real = LateEvent.synchronize
    for seed in range(2):
        it = scene(seed)
        device = device_of(it, "registered", seed)
        engine = CopyEngine(device, staging_bytes=200)
        # what the first call prepares
        engine.load(it.table, it.ids, it.slots, device.current_event())
        left = times

        def pressed(event: LateEvent) -> None:
            nonlocal left
            if left:
                left -= 1
                raise KeyboardInterrupt
            real(event)

        with monkeypatch.context() as patch:
            patch.setattr(LateEvent, "synchronize", pressed)
            with pytest.raises(KeyboardInterrupt):
                engine.load(it.table, it.ids, it.slots, device.current_event())
        waiting = device.world.waiting()
        assert not {name for name in waiting if name != "engine"}, waiting
