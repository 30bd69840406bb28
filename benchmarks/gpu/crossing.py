"""Race chunks across the link, all entrants in turns.

Each timed call has random blocks. Its destination is overwritten before the call and compared
completely after it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.gpu.entrants import CHOSEN, Entrant, Ours
from benchmarks.gpu.room import Room
from benchmarks.gpu.stock import Bytes, Stock, Turn
from benchmarks.limits_cuda import Direction, Link, settle

SLOW_SECONDS = 0.4  # an entrant that takes longer for a call has only two rounds


class WrongBytes(RuntimeError):
    """A measured copy has wrong bytes."""


@dataclass
class Lap:
    """The wall time of one entrant, call by call, from the call to its return."""

    nbytes: int = 0  # of one call
    chunks: int = 0
    seconds: list[float] = field(default_factory=list)
    # before the call: transfer, views, buffers
    made_seconds: list[float] = field(default_factory=list)
    # speed as a share of the link's, within the round
    ratio: list[float] = field(default_factory=list)

    def json(self) -> dict[str, object]:
        """Return the values for the JSON."""
        return {
            "chunks": self.chunks,
            "gb_per_second": [
                round(self.nbytes / each / 1e9, 3) for each in self.seconds
            ],
            "ratio": [round(each, 4) for each in self.ratio],
            "seconds": [round(each, 7) for each in self.seconds],
            "made_seconds": [round(each, 7) for each in self.made_seconds],
        }


@dataclass(frozen=True)
class Field:
    """One cell of the table: the chunks and their number, the direction, and the memory on both
    sides.
    """

    stock: Stock
    room: Room
    link: Link
    direction: Direction
    chunks: int
    rounds: int

    def turn(self, number: int, chunks: int) -> Turn:
        """Return the work of a call: new random blocks, and the slots after those of the previous
        call.
        """
        slots = self.room.slots(self.stock.layout.slot_bytes)
        first = number * chunks % (len(slots) - chunks + 1)
        return Turn(self.stock.table(chunks), slots[first : first + chunks])

    def spoil(self, turn: Turn) -> None:
        """Overwrite the destination."""
        if self.direction == "down":
            self.stock.spoil_slots(turn.slots)
        else:
            self.stock.spoil_blocks(turn)


def crossing(
    place: Field, racers: Sequence[Entrant], ours: Ours
) -> dict[str, object]:
    """Race the entrants and the link, and return the results. Changes pools and slots.

    A first round, which does not count, compiles, measures and warms up. Raise WrongBytes where a
    copy is not exact.
    """
    shape = place.stock.shape
    if place.direction == "up":
        place.stock.fill_slots(_all_slots(place))
    laps = {each.name: Lap() for each in racers}
    events: list[float] = []
    walls: list[float] = []
    nbytes = place.chunks * shape.chunk_bytes
    for number in range(1 + place.rounds):
        spent = place.link.spend(place.direction, nbytes)
        if number:
            events.append(spent.event)
            walls.append(spent.wall)
        shift = number % len(racers)
        for racer in [*racers[shift:], *racers[:shift]]:
            lap = laps[racer.name]
            if len(lap.seconds) >= 2 and lap.seconds[-1] > SLOW_SECONDS:
                continue
            made, seconds, chunks = _go(place, racer, number)
            if not number:
                continue
            lap.chunks = chunks
            lap.nbytes = chunks * shape.chunk_bytes
            lap.seconds.append(seconds)
            lap.made_seconds.append(made)
            lap.ratio.append(lap.nbytes / seconds / (nbytes / spent.event))
    return {
        "shape": shape.key,
        "form": place.stock.form,
        "run_bytes": place.stock.run_bytes,
        "registered": place.room.registered_bytes == place.room.nbytes,
        "chunks": place.chunks,
        "direction": place.direction,
        "nbytes": nbytes,
        "chosen": ours.chosen(place.stock, place.direction),
        "link": {
            "gb_per_second": [round(nbytes / each / 1e9, 3) for each in events],
            "wall_gb_per_second": [
                round(nbytes / each / 1e9, 3) for each in walls
            ],
        },
        "entrants": {name: lap.json() for name, lap in laps.items()},
    }


def median_ratio(cell: dict[str, object], name: str = CHOSEN) -> float:
    """Return an entrant's median share of the link's speed."""
    laps = cell["entrants"]
    assert isinstance(laps, dict)
    return statistics.median(laps[name]["ratio"])


def _go(place: Field, racer: Entrant, number: int) -> tuple[float, float, int]:
    """Make one call; return the seconds of its preparation, its seconds, and its chunks."""
    chunks = min(place.chunks, racer.most_chunks)
    turn = place.turn(number, chunks)
    place.spoil(turn)
    # our copies wait for everything that was launched before them
    settle(place.stock.device)
    began = time.perf_counter()
    move = racer.prepare(place.stock, turn, place.direction)
    made = time.perf_counter()
    move()
    ended = time.perf_counter()
    if not place.stock.same(turn):
        raise WrongBytes(
            f"{racer.name}, {place.stock.shape.name} {place.stock.form} {place.direction}"
        )
    return made - began, ended - made, chunks


def _all_slots(place: Field) -> list[Bytes]:
    """Return the slots that the turns of this cell use."""
    slots = place.room.slots(place.stock.layout.slot_bytes)
    return slots[: place.chunks * (place.rounds + 2)]
