"""The benchmark of GPU transfers: its parts, the device, the measurements, and the skipped cells
with the reason.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.beside import Stream, beside, turns
from benchmarks.gpu.crossing import Field, crossing, median_ratio
from benchmarks.gpu.entrants import (
    CHOSEN,
    Entrant,
    Ours,
    OurWay,
    TorchSelect,
    entrants,
)
from benchmarks.gpu.layers import layered
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.registering import Register, registering
from benchmarks.gpu.room import Room
from benchmarks.gpu.stock import FORMS, Form, Shape, Stock
from benchmarks.harness import Figure, say
from benchmarks.limits_cuda import (
    Direction,
    Link,
    Products,
    about,
    register_by_runtime,
)
from pagoda.slab.pinned import pin
from pagoda.transfer.gpu.device import Device

Cell = dict[str, object]

LINK_TARGET: Mapping[Form, float] = {"pools": 0.90, "blocks": 0.95}
BESIDE_TARGET = 1.05
LAYER_TARGET = 0.10
DIRECTIONS: tuple[Direction, ...] = ("down", "up")
_SPARE = 1.25  # blocks of a stock, as a multiple of those that one call moves


class Bench:
    """One run on one device. `figures` and `found` grow part by part. One thread at a time."""

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        device_of: Callable[[int | None], Device],
        seed: int,
        shm: Path | None,
    ) -> None:
        self.plan = plan
        self.device = device
        self.seed = seed
        self.shm = shm
        self.ours = Ours(device_of)
        self.figures: list[Figure] = []
        self.found: dict[str, list[Cell]] = {
            "crossing": [],
            "beside": [],
            "layers": [],
            "register": [],
        }
        self.left_out: list[Cell] = []
        self.errors: list[Cell] = []
        self.wanted: list[str] = []  # parts; empty: all
        self.complete = False
        self._began = time.monotonic()
        self._link: Link | None = None
        self._about: Cell = about(device)
        self._rooms: list[Cell] = []

    @property
    def over(self) -> bool:
        """Return whether the time budget is used up."""
        return time.monotonic() - self._began > self.plan.budget_seconds

    def leave_out(self, name: str) -> None:
        """Note that a cell or a part was skipped because the time was used up."""
        self.left_out.append(
            {"cell": name, "why": f"{self.plan.budget_seconds:.0f} s were over"}
        )

    @property
    def parts(self) -> dict[str, Callable[[], None]]:
        """Return the parts by name, the most important first."""
        *first, last = self.plan.shapes
        found = {
            f"cross_{shape.key}": self._crossing_of(shape) for shape in first
        }
        found["beside"] = self._beside
        found["layers"] = self._layers
        found["register"] = self._register
        found["bounce"] = self._bounce
        found[f"cross_{last.key}"] = self._crossing_of(last)
        return found

    def extra(self) -> Cell:
        """Return the fields of the JSON beside the figures."""
        return {
            "plan": self.plan.name,
            "parts": self.wanted,
            "complete": self.complete,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "seed": self.seed,
            "seconds": round(time.monotonic() - self._began, 1),
            "gpu": self._about
            | {"triton": _triton_version(), "programs": self.ours.programs},
            "host_memory": self._rooms,
            **self.found,
            "left_out": self.left_out,
            "errors": self.errors,
        }

    def close(self) -> None:
        """Raise RuntimeError if the limit's own copies are wrong."""
        if self._link is not None and not self._link.same():
            raise RuntimeError(
                "the limit's own copies differ between the two sides"
            )

    # ---- the parts

    def _crossing_of(self, shape: Shape) -> Callable[[], None]:
        def part() -> None:
            with self._room(shape, self.plan.most_chunks) as room:
                for form in FORMS:
                    stock = self._stock(shape, form, self.plan.most_chunks)
                    for chunks in self.plan.chunks:
                        for direction in DIRECTIONS:
                            field = Field(
                                stock,
                                room,
                                self._limit(),
                                direction,
                                chunks,
                                self.plan.rounds,
                            )
                            name = f"{direction} {shape.key} {form} {chunks}"
                            self._cell(
                                "crossing", name, partial(self._cross, field)
                            )

        return part

    def _cross(self, field: Field) -> Cell:
        cell = crossing(field, entrants(self.ours), self.ours)
        if not self.found["crossing"]:
            # again, because an idle link may run slower
            self._about = about(self.device)
        key = f"{field.direction}_{field.stock.shape.key}_{field.stock.form}_{field.chunks}"
        note = f"{_speed(cell, CHOSEN)} of {_link_speed(cell)} GB/s by {cell['chosen']}, 1 thread"
        self.figures.append(
            Figure(
                key,
                median_ratio(cell),
                LINK_TARGET[field.stock.form],
                "ratio",
                {"rounds": _laps(cell)[CHOSEN]["ratio"]},
                note,
            )
        )
        return cell

    def _beside(self) -> None:
        shape = self.plan.shapes[0]
        products = Products(
            self.device, self.plan.product_size, self.plan.product_seconds
        )
        ways = [(CHOSEN, self.ours.programs)]
        for way in self.ours.ways:
            caps = (self.ours.programs,) if way == "runs" else self.plan.programs
            ways += [(way, programs) for programs in caps]
        with self._room(shape, 2 * self.plan.beside_chunks) as room:
            for form in FORMS:
                stock = self._stock(shape, form, 2 * self.plan.beside_chunks)
                for direction in DIRECTIONS:
                    for way, programs in ways if form == "pools" else ways[:1]:
                        name = f"beside {direction} {shape.key} {form} {way} {programs}"
                        work = partial(
                            self._stream,
                            stock,
                            room,
                            direction,
                            way,
                            programs,
                            products,
                        )
                        self._cell("beside", name, work)

    def _stream(
        self,
        stock: Stock,
        room: Room,
        direction: Direction,
        way: str,
        programs: int,
        products: Products,
    ) -> Cell:
        racer = OurWay(way, self.ours.engine(way, programs))
        stream = Stream(
            stock, turns(stock, room, self.plan.beside_chunks), racer, direction
        )
        cell = beside(
            stream, products, self.plan.beside_rounds, self.plan.alone_calls
        )
        cell |= {
            "way": way,
            "programs": programs,
            "took": self.ours.chosen(stock, direction) if way == CHOSEN else way,
        }
        times = cell["times"]
        assert isinstance(times, list)
        key = f"beside_{direction}_{stock.shape.key}_{stock.form}_{way}"
        key += "" if way in (CHOSEN, "runs") else f"_{programs}"
        speed = statistics.median(_floats(cell["gb_per_second_beside"]))
        note = f"{cell['teraflops_alone']} TFLOP/s alone; {speed:.1f} GB/s beside"
        target = BESIDE_TARGET if way == CHOSEN else None
        self.figures.append(
            Figure(
                key,
                statistics.median(times),
                target,
                "times",
                {"times": times},
                note,
            )
        )
        return cell

    def _layers(self) -> None:
        for key, chunks in self.plan.layers:
            shape = self.plan.shape(key)
            if shape is None:
                continue
            stock = self._stock(shape, "pools", chunks)
            with self._room(shape, 2 * chunks) as room:
                for way in (CHOSEN, *self.ours.ways):
                    field = Field(
                        stock, room, self._limit(), "up", chunks, self.plan.rounds
                    )
                    self._cell(
                        "layers",
                        f"layers {key} {chunks} {way}",
                        partial(self._layered, field, way),
                    )

    def _layered(self, field: Field, way: str) -> Cell:
        cell = layered(field, way, self.ours.engine(way), self.ours.device)
        shares = _floats(cell["share"])
        key = f"layer0_{field.stock.shape.key}_{field.chunks}_{way}"
        first, whole = (
            statistics.median(_floats(cell[name])) * 1e3
            for name in ("first_seconds", "whole_seconds")
        )
        target = LAYER_TARGET if way == CHOSEN else None
        note = f"{first:.3f} of {whole:.3f} ms"
        self.figures.append(
            Figure(
                key,
                statistics.median(shares),
                target,
                "times",
                {"share": shares},
                note,
            )
        )
        return cell

    def _register(self) -> None:
        for shm in dict.fromkeys((self.shm, None)):
            room = Room(
                self.device, self.plan.register_bytes, shm=shm, registered=False
            )
            try:
                if shm is None or room.kind != "private memory":
                    self._cell(
                        "register",
                        f"register {room.kind}",
                        partial(self._registered, room),
                    )
            finally:
                room.close()

    def _registered(self, room: Room) -> Cell:
        array = room.array
        index = self.device.index or 0

        def ours() -> Callable[[], None]:
            pinned = pin(array, index, background=False)
            if pinned is None or pinned.nbytes < array.nbytes:
                raise RuntimeError(
                    f"not registered: {'no driver' if pinned is None else pinned.trouble}"
                )

            def undo() -> None:
                if not pinned.close(30.0):
                    raise RuntimeError(
                        f"not unregistered in 30 s: {pinned.trouble}"
                    )

            return undo

        def runtime() -> Callable[[], None]:
            return register_by_runtime(array.ctypes.data, array.nbytes)

        nothing: Register = lambda: lambda: None  # noqa: E731
        on_gpu = self.device.type == "cuda"
        ways = (
            {"pagoda": ours, "cudaHostRegister": runtime}
            if on_gpu
            else {"pagoda": nothing}
        )
        return registering(room, ways, min(3, self.plan.rounds))

    def _bounce(self) -> None:
        """Measure slots that are not registered, as on a machine that refuses to register
        memory.
        """
        shape = self.plan.shapes[0]
        chunks = min(8, self.plan.most_chunks)
        stock = self._stock(shape, "pools", chunks)
        with self._room(shape, chunks, registered=False) as room:
            for direction in DIRECTIONS:
                field = Field(
                    stock,
                    room,
                    self._limit(),
                    direction,
                    chunks,
                    self.plan.rounds,
                )
                racers: list[Entrant] = [
                    OurWay(CHOSEN, self.ours.engine(CHOSEN)),
                    TorchSelect(),
                ]
                name = f"bounce {direction} {shape.key} {chunks}"
                self._cell(
                    "crossing", name, partial(crossing, field, racers, self.ours)
                )

    # ---- common parts

    def _cell(self, kind: str, name: str, work: Callable[[], Cell]) -> None:
        """Measure one cell; quote its exception and continue with the other cells."""
        if self.over:
            self.leave_out(name)
            return
        say(f"{name} ... ({time.monotonic() - self._began:.0f} s)")
        try:
            self.found[kind].append(work())
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            self.errors.append(
                {"cell": name, "error": f"{type(error).__name__}: {error}"}
            )

    def _limit(self) -> Link:
        if self._link is None:
            self._link = Link(self.device, self.plan.link_bytes)
        return self._link

    def _stock(self, shape: Shape, form: Form, chunks: int) -> Stock:
        """Return a stock with more blocks than `chunks` need, so that tables have random blocks."""
        return Stock(
            shape,
            form,
            int(chunks * shape.blocks_a_chunk * _SPARE) + 1,
            self.device,
            self.seed,
        )

    @contextmanager
    def _room(
        self, shape: Shape, chunks: int, registered: bool = True
    ) -> Iterator[Room]:
        slot_bytes = -(-shape.chunk_bytes // 4096) * 4096
        room = Room(
            self.device, chunks * slot_bytes, shm=self.shm, registered=registered
        )
        self._rooms.append(room.about())
        try:
            yield room
        finally:
            room.close()


def _laps(cell: Cell) -> dict[str, Cell]:
    laps = cell["entrants"]
    assert isinstance(laps, dict)
    return laps


def _floats(values: object) -> list[float]:
    assert isinstance(values, list)
    return values


def _speed(cell: Cell, name: str) -> str:
    return f"{statistics.median(_floats(_laps(cell)[name]['gb_per_second'])):.2f}"


def _link_speed(cell: Cell) -> str:
    link = cell["link"]
    assert isinstance(link, dict)
    return f"{statistics.median(link['gb_per_second']):.2f}"


def _triton_version() -> str:
    import triton

    return str(triton.__version__)
