"""A load layer by layer: the time until layer 0 is usable, against the time until all layers
are.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from benchmarks.gpu.crossing import Field, WrongBytes
from benchmarks.gpu.stock import Stock, Turn
from benchmarks.limits_cuda import Stopwatch, settle
from pagoda.transfer.gpu.copy_engine import CopyEngine
from pagoda.transfer.gpu.device import Device
from pagoda.transfer.gpu.layer_events import LayerEvents

PATIENCE_SECONDS = 30.0


class Load(NamedTuple):
    """Seconds of one load, from its call until layer 0 and the middle layer are usable, and until
    its end.
    """

    first: float
    middle: float
    whole: float


def layered(
    place: Field, way: str, engine: CopyEngine, device: Device
) -> dict[str, object]:
    """Race loads with and without a gate. Return the results; raise WrongBytes where layer 0 was
    wrong.

    One thread loads and another one waits, as in an engine. "Usable" means: the waiting stream,
    which the gate made wait, has passed that point.
    """
    loads: list[Load] = []
    plain: list[float] = []
    place.stock.fill_slots(
        place.room.slots(place.stock.layout.slot_bytes)[: place.chunks * 2]
    )
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        for number in range(1 + place.rounds):
            turn = place.turn(number % 2, place.chunks)
            load = _load(place, turn, engine, device, pool)
            bare = _plain(
                place, place.turn(number % 2, place.chunks), engine, pool
            )
            if number:
                loads.append(load)
                plain.append(bare)
    whole = statistics.median(load.whole for load in loads)
    return {
        "shape": place.stock.shape.key,
        "form": place.stock.form,
        "chunks": place.chunks,
        "way": way,
        "nbytes": place.chunks * place.stock.shape.chunk_bytes,
        "first_seconds": [round(load.first, 7) for load in loads],
        "middle_seconds": [round(load.middle, 7) for load in loads],
        "whole_seconds": [round(load.whole, 7) for load in loads],
        "without_gate_seconds": [round(each, 7) for each in plain],
        "share": [round(load.first / load.whole, 4) for load in loads],
        "gate_costs": round(whole / statistics.median(plain), 4),
    }


def _load(
    place: Field,
    turn: Turn,
    engine: CopyEngine,
    device: Device,
    pool: ThreadPoolExecutor,
) -> Load:
    stock = place.stock
    place.spoil(turn)
    layer_events = LayerEvents(stock.shape.layers, place.chunks)
    kv = stock.kv(turn.table, engine, layer_events)
    copy = torch.empty(
        (place.chunks, stock.shape.chunk_bytes),
        dtype=torch.uint8,
        device=stock.device,
    )
    ids = stock.ids(turn)
    parts = [stock.parts(room)[: stock.shape.planes] for room in copy]
    settle(stock.device)
    began = time.perf_counter()
    running = pool.submit(
        kv.from_slots, turn.starts(stock.shape.chunk_tokens), turn.slots
    )
    first = _usable(layer_events, 0, device, began)
    # what attention would read, as early as possible
    for which, part in zip(ids, parts, strict=True):
        for plane, room in zip(stock.planes, part, strict=False):
            torch.index_select(plane, 0, which, out=room)
    middle = _usable(layer_events, stock.shape.layers // 2, device, began)
    running.result()
    whole = time.perf_counter() - began
    settle(stock.device)
    if not (_early(stock, turn, copy) and stock.same(turn)):
        raise WrongBytes(f"a load layer by layer, {stock.shape.name}")
    return Load(first, middle, whole)


def _early(stock: Stock, turn: Turn, copy: torch.Tensor) -> bool:
    """Return whether the data that was read after the gate was layer 0."""
    size = stock.shape.chunk_bytes // stock.shape.layers
    there = copy[:, :size].cpu()
    return all(
        torch.equal(own, stock.host(slot)[:size])
        for own, slot in zip(there, turn.slots, strict=True)
    )


def _usable(
    layer_events: LayerEvents, layer: int, device: Device, began: float
) -> float:
    """Return the seconds from `began` until this thread's current stream has waited for a layer."""
    if not layer_events.wait_layer(layer, device, PATIENCE_SECONDS):
        raise RuntimeError(
            f"layer {layer} was not loaded within {PATIENCE_SECONDS:.0f} s"
        )
    behind = Stopwatch(device.torch_device)
    behind.start()
    behind.stop()
    behind.seconds()
    return time.perf_counter() - began


def _plain(
    place: Field, turn: Turn, engine: CopyEngine, pool: ThreadPoolExecutor
) -> float:
    kv = place.stock.kv(turn.table, engine)
    settle(place.stock.device)
    began = time.perf_counter()
    pool.submit(
        kv.from_slots, turn.starts(place.stock.shape.chunk_tokens), turn.slots
    ).result()
    return time.perf_counter() - began
