"""The entrants: our three copy methods and the chosen one, torch in plain use, and one copy per
block.
"""

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
from pagoda.transfer.pages_kv import page_plane
from pagoda.transfer.run_table import page_run_table

Move = Callable[[], None]

CHOSEN = "chosen"
# most chunks for one copy per block: 64 chunks of 80 layers are 164,000 calls
BLOCK_CHUNKS = 8


class Ours:
    """Our copy engines of one device, by method and number of programs, each created once. One
    thread at a time.
    """

    def __init__(self, device_of: Callable[[int | None], Device]) -> None:
        self.device = device_of(None)
        self.programs = (
            inspect.signature(CudaDevice.__init__).parameters["programs"].default
        )
        self._devices = cache(
            lambda programs: (
                self.device if programs == self.programs else device_of(programs)
            )
        )
        self._made: dict[tuple[str, int], CopyEngine] = {}

    @property
    def ways(self) -> tuple[str, ...]:
        """Return the methods that this machine supports; without Triton only one."""
        return WAYS if self.device.kernels is not None else ("runs",)

    def engine(self, way: str, programs: int | None = None) -> CopyEngine:
        """Return the copy engine of one method, or of `CHOSEN`, the default."""
        kind = (way, self.programs if programs is None else programs)
        if kind not in self._made:
            self._made[kind] = CopyEngine(
                self._devices(kind[1]), way=None if way == CHOSEN else way
            )
        return self._made[kind]

    def chosen(self, stock: Stock, direction: Direction) -> str:
        """Return the method that is chosen for such a stock; measure first if necessary."""
        planes = [
            page_plane(plane.view(torch.uint8), "planes")
            for plane in stock.planes
        ]
        table = page_run_table(planes, stock.shape.blocks_a_chunk, 0)
        return self.engine(CHOSEN).way_of(table, direction == "down")


class Entrant(Protocol):
    """A method to move chunks."""

    name: str
    most_chunks: int

    def prepare(self, stock: Stock, turn: Turn, direction: Direction) -> Move:
        """Return the timed call, which moves the chunks of a turn and returns when all are
        complete.
        """
        ...


class OurWay:
    """One of our methods, with a new transfer object for each call, as in the cache."""

    most_chunks = 1 << 20

    def __init__(self, name: str, engine: CopyEngine) -> None:
        self.name = name
        self._engine = engine

    def prepare(self, stock: Stock, turn: Turn, direction: Direction) -> Move:
        kv = stock.kv(turn.table, self._engine)
        starts = turn.starts(stock.shape.chunk_tokens)
        if direction == "down":
            return lambda: kv.to_slots(starts, turn.slots)
        return lambda: kv.from_slots(starts, turn.slots)


class TorchSelect:
    """torch: one index_select per plane gathers a chunk into a device buffer, and one pinned copy
    moves the buffer.

    The way up is the reverse, with index_copy. Two buffers alternate; one stream has all of it,
    with a single wait.
    """

    name = "torch"
    most_chunks = 1 << 20

    def prepare(self, stock: Stock, turn: Turn, direction: Direction) -> Move:
        buffers = torch.empty(
            (2, stock.shape.chunk_bytes), dtype=torch.uint8, device=stock.device
        )
        parts = [stock.parts(buffer) for buffer in buffers]
        ids = stock.ids(turn)
        slots = [stock.host(slot) for slot in turn.slots]
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
    """One pinned copy per block of each plane, queued on one stream with a single wait. The views
    exist before.
    """

    name = "per block"
    most_chunks = BLOCK_CHUNKS

    def prepare(self, stock: Stock, turn: Turn, direction: Direction) -> Move:
        count = stock.shape.blocks_a_chunk
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, slot in enumerate(turn.slots):
            blocks = turn.table[number * count : (number + 1) * count].tolist()
            for plane, part in zip(
                stock.planes, stock.parts(stock.host(slot)), strict=True
            ):
                pairs += zip(
                    part.unbind(0),
                    [plane[block] for block in blocks],
                    strict=True,
                )
        if direction == "up":
            pairs = [(there, here) for here, there in pairs]
        settle(stock.device)

        def move() -> None:
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            settle(stock.device)

        return move


def entrants(ours: Ours) -> list[Entrant]:
    """Return all entrants of the race."""
    ways: list[Entrant] = [
        OurWay(way, ours.engine(way)) for way in (CHOSEN, *ours.ways)
    ]
    return [*ways, TorchSelect(), BlockLoop()]
