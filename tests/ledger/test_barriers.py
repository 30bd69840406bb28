"""Where a memory barrier stands between a write and a read, which no test on x86 can see fail.

Around each of these there are locks and system calls by chance, and each of those is a barrier on
x86. So these tests look at the order of the steps only: the barrier comes after what this process
wrote, and before it reads what others wrote.
"""

from __future__ import annotations

import numpy as np
import pytest

from pagoda.ledger import Ledger, slots_in_use
from pagoda.ledger import ledger as ledger_module
from pagoda.ledger.columns import Columns
from pagoda.ledger.slots_in_use import PageGuards
from tests.ledger.support import keys, places, put


class Watched:
    """A part of a store whose reads and writes are noted in the order in which they come."""

    def __init__(self, part: object, name: str, steps: list[str]) -> None:
        self._part = part
        self._name = name
        self._steps = steps

    def __getattr__(self, name: str) -> object:
        self._steps.append(f"read {name}")
        return getattr(self._part, name)

    def __getitem__(self, at: object) -> object:
        self._steps.append(f"read {self._name}")
        return self._part[at]  # type: ignore[index]

    def __setitem__(self, at: object, value: object) -> None:
        self._steps.append(f"write {self._name}")
        self._part[at] = value  # type: ignore[index]

    def __enter__(self) -> None:
        self._steps.append("barrier")

    def __exit__(self, *_: object) -> None:
        return


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of steps, in which the barriers of the ledger are noted."""
    noted: list[str] = []
    for module in (ledger_module, slots_in_use):
        monkeypatch.setattr(module, "barrier", lambda: noted.append("barrier"))
    return noted


def guards_of(ledger: Ledger) -> PageGuards:
    assert ledger.page_guards is not None
    return ledger.page_guards


def test_a_generation_is_compared_after_a_barrier(
    ledger: Ledger, steps: list[str]
) -> None:
    slots, generations = places(put(ledger, keys(1)))
    columns: Columns = ledger.columns
    ledger.columns = Watched(columns, "columns", steps)  # type: ignore[assignment]
    steps.clear()
    assert ledger.still_valid(slots, generations).all()
    assert steps == ["barrier", "read generation"]
    steps.clear()
    assert ledger.is_valid(int(slots[0]), int(generations[0]))
    assert steps == ["barrier", "read cells"]
    ledger.columns = columns


def test_marks_of_others_are_read_after_a_barrier(
    ledger: Ledger, steps: list[str]
) -> None:
    guards = guards_of(ledger)
    guards._rows = Watched(guards._rows, "marks", steps)  # type: ignore[assignment]
    assert guards.untouched([1], [0], 0.0) == [1]
    assert steps[:2] == ["barrier", "read marks"]


def test_a_generation_is_read_after_the_mark_and_a_barrier(
    ledger: Ledger, steps: list[str]
) -> None:
    guards = guards_of(ledger)
    marks = guards.marks.row
    guards.marks.row = Watched(marks, "mark", steps)  # type: ignore[assignment]
    guards.marks.fence = Watched(guards.marks.fence, "fence", steps)  # type: ignore[assignment]
    guards._generation = Watched(guards._generation, "generation", steps)  # type: ignore[assignment]
    base = np.zeros(8, np.uint8)
    assert guards.lend([1], base) == []
    guards.marks.row = marks
    assert steps == ["write mark", "barrier", "read generation"]
