"""What waits for what: the producer, the engine's own work, snapshots, layers; and many threads at
once.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from pagoda.transfer.gpu.copy_engine import WAYS, CopyEngine
from pagoda.transfer.gpu.device_pages_kv import DevicePagesKV
from pagoda.transfer.gpu.layer_events import LayerEvents
from tests.gpu.forms import BY_NAME, LLAMA_8B, SHORT, TINY, Size
from tests.gpu.moves import Memory
from tests.gpu.rig import KINDS, Rig

ALL_WAYS = [*WAYS, None]


def large(rig: Rig) -> Size:
    return TINY if rig.small else LLAMA_8B


def short(rig: Rig) -> Size:
    return TINY if rig.small else SHORT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("name", ["pages", "planes_first", "heads_first"])
def test_the_producer_is_still_writing(
    rig: Rig, seed: int, name: str, way: str | None, kind: str
) -> None:
    """A long queue of work precedes the data when the store is called, on another thread."""
    memory = Memory.of(rig, BY_NAME[name], large(rig), "bfloat16", seed)
    engine = rig.engine(way)
    starts = memory.starts(seed)
    engine.prepare(memory_table(memory, engine))
    slots = rig.slots(memory.layout, len(starts), kind)
    real = memory.flat.clone()
    memory.flat.zero_()
    rig.busy()
    rig.launch(lambda: memory.flat.copy_(real))
    with ThreadPoolExecutor(1) as thread:
        thread.submit(memory.kv(engine).to_slots, starts, slots).result(60)
    rig.finish()
    for start, slot in zip(starts, slots, strict=True):
        memory.holds(start, slot)


def memory_table(memory: Memory, engine: CopyEngine):
    kv = memory.kv(engine)
    return kv._copier.table  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ALL_WAYS)
def test_the_engine_still_reads_what_is_overwritten(
    rig: Rig, seed: int, way: str | None, kind: str
) -> None:
    memory = Memory.of(rig, BY_NAME["pages"], large(rig), "bfloat16", seed)
    engine = rig.engine(way)
    starts = memory.starts(seed)
    slots = rig.slots(memory.layout, len(starts), kind, fill=None)
    before = memory.flat.clone()
    seen = torch.zeros_like(memory.flat)
    want = memory.loaded(starts, slots)
    rig.busy()
    rig.launch(lambda: seen.copy_(memory.flat))
    with ThreadPoolExecutor(1) as thread:
        thread.submit(memory.kv(engine).from_slots, starts, slots).result(60)
    after = torch.zeros_like(seen)
    # what is launched after the call sees all of it
    rig.launch(lambda: after.copy_(memory.flat))
    rig.finish()
    assert torch.equal(seen, before)
    assert torch.equal(after, want)


@pytest.mark.parametrize("way", ALL_WAYS)
def test_beside_a_compute_stream(rig: Rig, seed: int, way: str | None) -> None:
    """A loop of matrix products runs all the time, and each result is right."""
    memory = Memory.of(
        rig, BY_NAME["pages_in_blocks"], large(rig), "bfloat16", seed
    )
    other = Memory.of(
        rig, BY_NAME["planes_first"], large(rig), "bfloat16", seed + 1
    )
    engine = rig.engine(way)
    stop = threading.Event()
    side = 64 if rig.small else 4096
    a, b = (
        torch.randn((side, side), device=rig.device).to(torch.bfloat16)
        for _ in range(2)
    )
    want = a @ b
    kv = other.kv(engine)
    store = memory.kv(engine)

    def transfers() -> int:
        rounds = 0
        while not stop.is_set() or not rounds:
            starts = memory.starts(seed + rounds)
            slots = rig.slots(memory.layout, len(starts), "mixed")
            store.to_slots(starts, slots)
            for start, slot in zip(starts, slots, strict=True):
                assert np.array_equal(
                    slot[: memory.layout.chunk_bytes], chunks[start]
                )
            kv.from_slots(starts, slots)
            rounds += 1
        return rounds

    chunks = {
        start: memory.chunk(start).view(torch.uint8).cpu().numpy()
        for start in memory.starts(0)
    }
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(transfers)
        wrong = torch.zeros((), dtype=torch.int64, device=rig.device)
        for _ in range(5 if rig.small else 2000):
            wrong += ((a @ b) != want).sum()
        rig.finish()
        stop.set()
        assert running.result(60) >= 1
    assert wrong.item() == 0


def test_sources_that_are_let_go_of(rig: Rig, seed: int) -> None:
    """Tensors whose owner has dropped them, while the allocator gives the memory to code that
    writes it at once.
    """
    random = np.random.default_rng(seed)
    engine = rig.engine()
    rounds = 4 if rig.small else 60
    size = TINY if rig.small else SHORT

    def stored(
        memory_kv,
        starts: list[int],
        slots: list[np.ndarray],
        want: list[np.ndarray],
    ) -> None:
        memory_kv.to_slots(starts, slots)
        for slot, own in zip(slots, want, strict=True):
            assert np.array_equal(slot[: own.size], own)

    with ThreadPoolExecutor(4) as threads:
        for _ in range(rounds):
            running = []
            rooms = rig.slots(
                BY_NAME["pages"].layout(size, "bfloat16"),
                4 * size.chunks,
                "mixed",
            )
            for number in range(4):
                memory = Memory.of(
                    rig,
                    BY_NAME["pages"],
                    size,
                    "bfloat16",
                    int(random.integers(2**31)),
                )
                starts = memory.starts(number)
                want = [
                    memory.chunk(start).view(torch.uint8).cpu().numpy()
                    for start in starts
                ]
                slots = rooms[number * size.chunks : (number + 1) * size.chunks]
                running.append(
                    threads.submit(stored, memory.kv(engine), starts, slots, want)
                )
                del memory  # only the transfer has it now
            junk = [
                torch.full(
                    (1 << 20,), number, dtype=torch.uint8, device=rig.device
                )
                for number in range(16)
            ]
            del junk
            for one in running:
                one.result(60)


def test_snapshots_that_nobody_wants(rig: Rig, seed: int) -> None:
    """A snapshot, its transfer and its tensors are dropped before the device reached it: nothing
    else is written.
    """
    size = short(rig)
    bystander = torch.full(
        (1 << (12 if rig.small else 26),),
        77,
        dtype=torch.uint8,
        device=rig.device,
    )
    engine = rig.engine()
    for number in range(3 if rig.small else 20):
        memory = Memory.of(rig, BY_NAME["pages"], size, "bfloat16", seed + number)
        kv = memory.kv(engine)
        rig.busy()
        kv.snapshot(memory.starts(0))  # type: ignore[attr-defined]
        del kv, memory
        junk = [
            torch.full((4096,), number, dtype=torch.int64, device=rig.device)
            for _ in range(64)
        ]
    rig.finish()
    del junk
    assert bool((bystander == 77).all())


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_is_what_was_there(
    rig: Rig, seed: int, way: str | None, kind: str
) -> None:
    """The engine overwrites the blocks at once, in the same stream; the bytes leave the device
    later.
    """
    memory = Memory.of(rig, BY_NAME["pages"], large(rig), "bfloat16", seed)
    engine = rig.engine(way)
    starts = memory.starts(seed)
    real = memory.flat.clone()
    memory.flat.zero_()
    rig.busy()
    rig.launch(lambda: memory.flat.copy_(real))
    kv = memory.kv(engine)
    assert isinstance(kv, DevicePagesKV)
    snapshot = kv.snapshot(starts)
    rig.launch(lambda: memory.flat.fill_(-1))
    junk = memory.flat
    slots = rig.slots(memory.layout, len(starts), kind)
    rig.known(snapshot._memory)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(snapshot.to_slots, slots).result(60)
    rig.finish()
    assert bool((junk == -1).all())
    memory.flat = real
    for start, slot in zip(starts, slots, strict=True):
        memory.holds(start, slot)


def test_many_threads_with_one_engine(rig: Rig, seed: int) -> None:
    """Each has separate blocks and slots in the same pools; there are more of them than may run at
    once.
    """
    size = short(rig)._replace(chunks=8, spare=3)
    memory = Memory.of(rig, BY_NAME["pages_in_blocks"], size, "bfloat16", seed)
    engine = rig.engine()
    each = size.chunk // size.block
    slots = rig.slots(memory.layout, size.chunks, "mixed")
    shared = memory.kv(engine)
    assert isinstance(shared, DevicePagesKV)
    chunks = [
        memory.chunk(number * size.chunk).view(torch.uint8).cpu().numpy()
        for number in range(size.chunks)
    ]

    def back_and_forth(number: int) -> None:
        kv = shared.with_table(memory.table[number * each : (number + 1) * each])
        slot = slots[number]
        nbytes = memory.layout.chunk_bytes
        for turn in range(3 if rig.small else 40):
            slot[:] = turn
            kv.to_slots([0], [slot])
            assert np.array_equal(slot[:nbytes], chunks[number]), "a store"
            slot[:nbytes] = chunks[number][::-1]
            kv.from_slots([0], [slot])
            kv.to_slots([0], [slot])
            assert np.array_equal(slot[:nbytes], chunks[number][::-1]), "a load"
            slot[:nbytes] = chunks[number]
            kv.from_slots([0], [slot])

    before = memory.flat.clone()
    with ThreadPoolExecutor(size.chunks) as threads:
        list(threads.map(back_and_forth, range(size.chunks), timeout=200))
    assert torch.equal(memory.flat, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize(
    "name", ["heads_first", "tokens_first", "pages", "pages_in_blocks"]
)
def test_a_layer_can_be_used_when_it_was_waited_for(
    rig: Rig, seed: int, name: str, way: str | None, kind: str
) -> None:
    """This thread's stream computes on each layer at once, while the load is on its way on another
    thread.
    """
    size = large(rig)
    memory = Memory.of(rig, BY_NAME[name], size, "bfloat16", seed)
    engine = rig.engine(way, staging_bytes=2048 if rig.small else 16 << 20)
    starts = memory.starts(seed)
    slots = rig.slots(memory.layout, len(starts), kind, fill=None)
    want = memory.form.views(size, memory.loaded(starts, slots))
    own = memory.form.views(size, memory.flat)
    seen = [[torch.zeros_like(plane) for plane in layer] for layer in own]
    layer_events = LayerEvents(size.layers, len(starts))
    kv = memory.kv(engine, layer_events=layer_events)
    engine.prepare(memory_table(memory, engine))
    with ThreadPoolExecutor(1) as thread:
        load = thread.submit(kv.from_slots, starts, slots)
        for layer in range(size.layers):
            assert layer_events.wait_layer(layer, engine.device, 60.0)
            for to, source in zip(seen[layer], own[layer], strict=True):
                rig.launch(lambda to=to, source=source: to.copy_(source))
        rig.finish()
        load.result(60)
    for got, planes in zip(seen, want, strict=True):
        for one, plane in zip(got, planes, strict=True):
            assert torch.equal(one, plane)


@pytest.mark.parametrize("way", ALL_WAYS)
def test_while_a_graph_is_captured(rig: Rig, seed: int, way: str | None) -> None:
    """Another thread's transfers, the first of them with all that is made at first, spoil no
    capture.
    """
    if rig.small:
        pytest.skip("there are no graphs on a CPU")
    memory = Memory.of(rig, BY_NAME["pages"], short(rig), "bfloat16", seed)
    engine = rig.engine(way)
    starts = memory.starts(seed)
    slots = rig.slots(memory.layout, len(starts), "mixed")
    x = torch.arange(1 << 20, dtype=torch.int32, device=rig.device)
    captured = threading.Event()
    running = threading.Event()
    want = {
        start: memory.chunk(start).view(torch.uint8).cpu().numpy()
        for start in starts
    }

    def transfers() -> int:
        rounds = 0
        while not captured.is_set() or not rounds:
            running.set()
            kv = memory.kv(engine)
            kv.to_slots(starts, slots)
            kv.from_slots(starts, slots)
            rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as thread:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            done = thread.submit(transfers)
            assert running.wait(60)
            for number in range(50):
                x.add_(number)
                time.sleep(0.005)
        captured.set()
        assert done.result(60) >= 1
    graph.replay()
    rig.finish()
    assert torch.equal(
        x,
        torch.arange(1 << 20, dtype=torch.int32, device=rig.device)
        + sum(range(50)),
    )
    for start, slot in zip(starts, slots, strict=True):
        assert np.array_equal(slot[: memory.layout.chunk_bytes], want[start])
