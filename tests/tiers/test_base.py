"""What all tiers share: runs of chunks, futures of moving bytes, and buffers that are checked."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from pagoda.layout import KVLayout
from pagoda.tiers import HostTier, Tier
from pagoda.tiers.base import (
    OLD_VERBS,
    Chunk,
    check_sizes,
    confirm_each,
    flat_bytes,
    follows,
    running_future,
    runs,
)
from tests.tiers.tools import always


def test_runs_are_cut_where_nothing_follows_and_at_the_limit() -> None:
    assert list(runs([1, 2, 3, 7, 8, 1], 2, lambda b, a: b == a + 1)) == [
        [1, 2],
        [3],
        [7, 8],
        [1],
    ]
    assert list(runs([], 2, lambda b, a: True)) == []


def test_a_chunk_follows_its_parent_only() -> None:
    payload = np.zeros(1, np.uint8)
    first = Chunk(b"a", 3, 4, payload, None, always)
    assert follows(Chunk(b"b", 4, 4, payload, b"a", always), first)
    assert follows(Chunk(b"b", 4, 4, payload, None, always), first)
    assert not follows(Chunk(b"b", 4, 4, payload, b"x", always), first)
    assert not follows(Chunk(b"b", 5, 4, payload, b"a", always), first)


def test_a_future_of_moving_bytes_cannot_be_cancelled() -> None:
    assert running_future().cancel() is False


def test_flat_bytes_copies_only_what_is_not_contiguous() -> None:
    array = np.arange(8, dtype=np.float32).reshape(2, 4)
    assert np.shares_memory(flat_bytes(array), array)
    assert flat_bytes(array.T).tobytes() == array.T.tobytes()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(9, np.uint8),
        np.zeros(40, np.float32),
        np.zeros((10, 10), np.uint8),
    ],
)
def test_a_buffer_that_cannot_hold_a_chunk_is_a_value_error(
    array: np.ndarray,
) -> None:
    with pytest.raises(ValueError, match="buffer"):
        check_sizes("buffer", [array], 10)


@pytest.mark.parametrize("seed", range(20))
def test_each_key_that_is_there_is_confirmed(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randrange(40)
    perhaps = [chance.random() < 0.7 for _ in range(count)]
    there = [chance.random() < 0.7 for _ in range(count)]
    asked: list[int] = []

    def find(begin: int, stop: int, seconds: float | None) -> int:
        assert seconds is None
        assert all(perhaps[begin:stop])
        assert stop == count or not perhaps[stop]
        found = [*there[begin:stop], False].index(False)
        asked.extend(range(begin, min(begin + found + 1, stop)))
        return found

    want = [a and b for a, b in zip(perhaps, there, strict=True)]
    assert confirm_each(perhaps, find, None) == want
    assert asked == [at for at in range(count) if perhaps[at]]


class CountedReads(Sequence[bool]):
    """A sequence of True and False in turn, which counts the items that are read."""

    def __init__(self, length: int, step: int) -> None:
        self.reads = 0
        self._length = length
        self._step = step

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at):
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(self._length))]
        self.reads += 1
        return self._step == 1 or at % self._step == 0

    def __iter__(self) -> Iterator[bool]:
        return (self[i] for i in range(self._length))


@pytest.mark.parametrize("step", [1, 2])
def test_many_holes_take_no_more_than_a_few_looks_at_each_key(
    step: int,
) -> None:
    """A prompt of 65,536 chunks, of which every other one is gone, took seconds."""
    perhaps = CountedReads(1_000, step)
    here = confirm_each(perhaps, lambda begin, stop, _: begin % 2 == 0, None)
    assert here == [at % 2 == 0 for at in range(1_000)]
    assert perhaps.reads <= 4_000


def test_the_verbs_of_before_are_told(shm_root: Path) -> None:
    layout = KVLayout.opaque(16, 4096, "verbs")
    with closing(HostTier.open(layout, shm_root, 64 << 10)) as tier:
        for old, new in OLD_VERBS.items():
            with pytest.raises(AttributeError, match=rf"call it {new}$"):
                getattr(tier, old)
        with pytest.raises(AttributeError, match=r"no attribute 'other'$"):
            getattr(tier, "other")  # noqa: B009
    with pytest.raises(TypeError, match=r"Mine\.find: name it match_prefix"):

        class Mine(Tier):
            def find(self, keys: object) -> int:
                return 0
