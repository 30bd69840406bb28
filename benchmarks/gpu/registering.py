"""The cost of registering host memory with the device: ours against one cudaHostRegister, in
turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.gpu.room import Room

Undo = Callable[[], None]
# registers all of a room and returns the function that undoes it
Register = Callable[[], Undo]


def registering(
    room: Room, ways: dict[str, Register], rounds: int
) -> dict[str, object]:
    """Register and unregister all of a room with each method, in turns. Return the results."""
    register: dict[str, list[float]] = {name: [] for name in ways}
    unregister: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(1 + rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = time.perf_counter()
            undo = ways[name]()
            made = time.perf_counter()
            undo()
            if number:
                register[name].append(made - began)
                unregister[name].append(time.perf_counter() - made)
    return {
        "memory": room.kind,
        "nbytes": room.nbytes,
        "register_gb_per_second": _speeds(register, room.nbytes),
        "unregister_gb_per_second": _speeds(unregister, room.nbytes),
    }


def _speeds(spent: dict[str, list[float]], nbytes: int) -> dict[str, list[float]]:
    return {
        name: [round(nbytes / each / 1e9, 3) for each in seconds]
        for name, seconds in spent.items()
    }
