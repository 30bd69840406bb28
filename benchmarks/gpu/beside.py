"""A compute stream with a concurrent transfer: how much longer its products take, and the
transfer's speed.
"""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass

from benchmarks.gpu.crossing import WrongBytes
from benchmarks.gpu.entrants import Entrant
from benchmarks.gpu.room import Room
from benchmarks.gpu.stock import Stock, Turn
from benchmarks.limits_cuda import Direction, Products, settle


@dataclass(frozen=True)
class Stream:
    """Consecutive calls of one entrant, over two tables and two sets of slots."""

    stock: Stock
    turns: tuple[Turn, Turn]
    racer: Entrant
    direction: Direction

    @property
    def nbytes(self) -> int:
        """Return the bytes of one call."""
        return len(self.turns[0].slots) * self.stock.shape.chunk_bytes

    def call(self, number: int) -> None:
        """Make one call with a new transfer object, as each call of a cache does."""
        self.racer.prepare(self.stock, self.turns[number % 2], self.direction)()

    def check(self) -> None:
        """Raise WrongBytes unless both turns were copied bit for bit."""
        settle(self.stock.device)
        if not all(self.stock.same(turn) for turn in self.turns):
            raise WrongBytes(
                f"{self.racer.name} beside a compute stream, {self.stock.shape.name}"
            )

    def spoil(self) -> None:
        """Overwrite the destinations of both turns."""
        for turn in self.turns:
            if self.direction == "down":
                self.stock.spoil_slots(turn.slots)
            else:
                self.stock.spoil_blocks(turn)
        settle(self.stock.device)


class Mover:
    """A thread that calls a stream again and again from `go` until `stop`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._go = threading.Event()
        self._stop = threading.Event()
        self._ends: list[float] = []
        self._began = 0.0
        self._trouble: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def go(self) -> None:
        """Start the calls."""
        self._go.set()

    def stop(self) -> float:
        """Stop after the current call, at least two calls; return GB/s of all calls. Raise what a
        call raised.
        """
        self._stop.set()
        self._thread.join(60.0)
        if self._thread.is_alive():
            raise RuntimeError("a transfer did not end within a minute")
        if self._trouble is not None:
            raise self._trouble
        return (
            len(self._ends)
            * self._stream.nbytes
            / (self._ends[-1] - self._began)
            / 1e9
        )

    def _run(self) -> None:
        self._go.wait()
        self._began = time.perf_counter()
        try:
            while len(self._ends) < 2 or not self._stop.is_set():
                self._stream.call(len(self._ends))
                self._ends.append(time.perf_counter())
        except BaseException as trouble:  # noqa: BLE001
            self._trouble = trouble


def beside(
    stream: Stream, products: Products, rounds: int, alone_calls: int = 8
) -> dict[str, object]:
    """Race products alone against products with the stream, and measure the stream alone. Return
    the results.
    """
    stream.spoil()
    stream.call(0)
    stream.call(1)
    stream.check()
    stream.spoil()
    began = time.perf_counter()
    for number in range(alone_calls):
        stream.call(number)
    alone_speed = (
        alone_calls * stream.nbytes / (time.perf_counter() - began) / 1e9
    )
    stream.spoil()
    alone: list[float] = []
    busy: list[float] = []
    speeds: list[float] = []
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            if which:
                alone.append(products.spend())
            else:
                _with(stream, products, busy, speeds)
    stream.check()
    return {
        "shape": stream.stock.shape.key,
        "form": stream.stock.form,
        "direction": stream.direction,
        "chunks": len(stream.turns[0].slots),
        "gb_per_second_alone": round(alone_speed, 3),
        "gb_per_second_beside": [round(each, 3) for each in speeds],
        "products": products.count,
        "products_seconds_alone": [round(each, 6) for each in alone],
        "products_seconds_beside": [round(each, 6) for each in busy],
        "teraflops_alone": round(products.teraflops(statistics.median(alone)), 1),
        "times": [
            round(with_us / without, 4)
            for with_us, without in zip(busy, alone, strict=True)
        ],
    }


def _with(
    stream: Stream, products: Products, busy: list[float], speeds: list[float]
) -> None:
    """Run one concurrent round. The products are queued before the transfer begins, so no launch
    delays them.
    """
    mover = Mover(stream)
    try:
        watch = products.queue()
        mover.go()
        busy.append(watch.seconds())
    finally:
        mover.go()
        speeds.append(mover.stop())


def turns(stock: Stock, room: Room, chunks: int) -> tuple[Turn, Turn]:
    """Return two turns that share neither blocks nor slots, filled at random."""
    table = stock.table(2 * chunks)
    slots = room.slots(stock.layout.slot_bytes)
    stock.fill_slots(slots[: 2 * chunks])
    half = len(table) // 2
    return Turn(table[:half], slots[:chunks]), Turn(
        table[half:], slots[chunks : 2 * chunks]
    )
