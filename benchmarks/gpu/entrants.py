"""Who moves the chunks: our three ways and the one they choose, torch as one would write it, and a copy a block."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch

from benchmarks.gpu.stock import Stock, Turn
from benchmarks.limits_cuda import Direction, settle
from pagoda.transfer.gpu.copy_engine import WAYS, CopyEngine
from pagoda.transfer.gpu.device import CudaDevice, Device
from pagoda.transfer.pages import page_plane
from pagoda.transfer.run_table import page_run_table

Move = Callable[[], None]

CHOSEN = "chosen"
BLOCK_CHUNKS = 8  # a copy a block is timed on so many chunks at most: 64 of 80 layers are 164,000 calls


class Ours:
    """Our copy engines of one device, by way and number of programs, each made once. One thread at a time."""

    def __init__(self, device_of: Callable[[int | None], Device]) -> None:
        self.device = device_of(None)
        self.programs = inspect.signature(CudaDevice.__init__).parameters["programs"].default
        self._devices = cache(
            lambda programs: self.device if programs == self.programs else device_of(programs)
        )
        self._made: dict[tuple[str, int], CopyEngine] = {}

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways that this machine has; without Triton there is one."""
        return WAYS if self.device.kernels is not None else ("runs",)

    def engine(self, way: str, programs: int | None = None) -> CopyEngine:
        """Return the copies of one way, or of `CHOSEN`: what a user gets who says nothing."""
        kind = (way, self.programs if programs is None else programs)
        if kind not in self._made:
            self._made[kind] = CopyEngine(self._devices(kind[1]), way=None if way == CHOSEN else way)
        return self._made[kind]

    def chosen(self, stock: Stock, direction: Direction) -> str:
        """The way that is taken for such a stock; measured if it has not been."""
        planes = [page_plane(plane.view(torch.uint8), "planes") for plane in stock.planes]
        table = page_run_table(planes, stock.shape.blocks_a_chunk, 0)
        return self.engine(CHOSEN).way_of(table, direction == "down")


class Entrant(Protocol):
    """Somebody who moves chunks."""

    name: str
    most_chunks: int

    def prepare(self, stock: Stock, turn: Turn, direction: Direction) -> Move:
        """Return what is timed: a call that moves the chunks of a turn and returns when all are there."""
        ...


class OurWay:
    """One of ours: the transfer is made as for one call of the cache, then does its one call."""

    most_chunks = 1 << 20

    def __init__(self, name: str, engine: CopyEngine) -> None:
        self.name, self._engine = name, engine

    def prepare(self, stock: Stock, turn: Turn, direction: Direction) -> Move:
        kv = stock.kv(turn.table, self._engine)
        starts = turn.starts(stock.shape.chunk_tokens)
        if direction == "down":
            return lambda: kv.to_slots(starts, turn.slots)
        return lambda: kv.from_slots(starts, turn.slots)


class TorchSelect:
    """torch: a chunk is gathered by an index_select a plane into a device buffer, which crosses by one pinned copy.

    Up the other way round, by index_copy. Two buffers take turns; all is queued on one stream and waited for once.
    """

    name = "torch"
    most_chunks = 1 << 20

    def prepare(self, stock: Stock, turn: Turn, direction: Direction) -> Move:
        buffers = torch.empty((2, stock.shape.chunk_bytes), dtype=torch.uint8, device=stock.device)
        parts = [stock.parts(buffer) for buffer in buffers]
        ids, slots = stock.ids(turn), [stock.host(slot) for slot in turn.slots]
        settle(stock.device)

        def down() -> None:
            for number, (which, slot) in enumerate(zip(ids, slots, strict=True)):
                stock.gather(which, parts[number % 2])
                slot.copy_(buffers[number % 2], non_blocking=True)
            settle(stock.device)

        def up() -> None:
            for number, (which, slot) in enumerate(zip(ids, slots, strict=True)):
                buffers[number % 2].copy_(slot, non_blocking=True)
                stock.scatter(which, parts[number % 2])
            settle(stock.device)

        return down if direction == "down" else up


class BlockLoop:
    """A pinned copy a block of every plane, queued on one stream and waited for once. The views are made before."""

    name = "per block"
    most_chunks = BLOCK_CHUNKS

    def prepare(self, stock: Stock, turn: Turn, direction: Direction) -> Move:
        count = stock.shape.blocks_a_chunk
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, slot in enumerate(turn.slots):
            blocks = turn.table[number * count : (number + 1) * count].tolist()
            for plane, part in zip(stock.planes, stock.parts(stock.host(slot)), strict=True):
                pairs += zip(part.unbind(0), [plane[block] for block in blocks], strict=True)
        if direction == "up":
            pairs = [(there, here) for here, there in pairs]
        settle(stock.device)

        def move() -> None:
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            settle(stock.device)

        return move


def entrants(ours: Ours) -> list[Entrant]:
    """All that race against each other."""
    ways: list[Entrant] = [OurWay(way, ours.engine(way)) for way in (CHOSEN, *ours.ways)]
    return [*ways, TorchSelect(), BlockLoop()]
