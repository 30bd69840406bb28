"""Which ranges are registered, against a model that knows it of every byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pagoda.slab.pinned import RegisteredRanges

ROOM = 48


def test_pieces_that_go_on_are_one() -> None:
    places = RegisteredRanges()
    places.add(200, 50, 1200)
    places.add(100, 50, 1100)
    assert places.find(140, 20) is None
    places.add(150, 50, 1150)
    assert places.find(100, 150) == 1100
    assert places.find(140, 100) == 1140
    assert places.find(99, 2) is None
    assert places.find(249, 2) is None
    assert places.nbytes == 150
    places.check()


def test_pieces_that_lie_apart_on_the_device_are_two() -> None:
    places = RegisteredRanges()
    places.add(100, 50, 1100)
    places.add(150, 50, 2150)
    assert places.find(100, 50) == 1100
    assert places.find(150, 50) == 2150
    assert places.find(149, 2) is None
    places.check()


def test_what_overlaps_is_refused_and_changes_nothing() -> None:
    places = RegisteredRanges()
    places.add(100, 50, 1100)
    for address, nbytes in ((100, 50), (149, 1), (90, 11), (90, 100), (120, 5)):
        with pytest.raises(ValueError, match="registered already"):
            places.add(address, nbytes, 0)
    assert places.find(100, 50) == 1100
    assert places.nbytes == 50
    places.check()


class Model(RuleBasedStateMachine):
    """Bytes 0..ROOM, each with the place it is seen at, or None."""

    def __init__(self) -> None:
        super().__init__()
        self.places = RegisteredRanges()
        self.seen: list[int | None] = [None] * ROOM
        self.pieces: dict[int, int] = {}

    @rule(
        address=st.integers(0, ROOM - 1),
        nbytes=st.integers(1, 12),
        shift=st.sampled_from([0, 100, 1000, -7]),
    )
    def add(self, address: int, nbytes: int, shift: int) -> None:
        nbytes = min(nbytes, ROOM - address)
        if any(
            place is not None for place in self.seen[address : address + nbytes]
        ):
            with pytest.raises(ValueError):
                self.places.add(address, nbytes, address + shift)
            return
        self.places.add(address, nbytes, address + shift)
        self.pieces[address] = nbytes
        self.seen[address : address + nbytes] = range(
            address + shift, address + shift + nbytes
        )

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = data.draw(
            st.lists(st.sampled_from([*self.pieces, ROOM]), unique=True)
        )
        self.places.remove(gone)
        for address in gone:
            nbytes = self.pieces.pop(address, 0)
            self.seen[address : address + nbytes] = [None] * nbytes

    @rule(address=st.integers(-3, ROOM + 3), nbytes=st.integers(1, ROOM))
    def find(self, address: int, nbytes: int) -> None:
        assert self.places.find(address, nbytes) == self.expected(address, nbytes)

    def expected(self, address: int, nbytes: int) -> int | None:
        if address < 0 or address + nbytes > ROOM:
            return None
        first = self.seen[address]
        if first is None or self.seen[address : address + nbytes] != [
            first + i for i in range(nbytes)
        ]:
            return None
        return first

    @invariant()
    def whole(self) -> None:
        self.places.check()
        assert self.places.nbytes == sum(place is not None for place in self.seen)


TestModel = Model.TestCase


@given(st.permutations(range(9)))
def test_any_order_of_pieces_ends_in_one_span(order: list[int]) -> None:
    places = RegisteredRanges()
    for n in order:
        places.add(100 * n, 100, 5000 + 100 * n)
        places.check()
    assert places.find(0, 900) == 5000
