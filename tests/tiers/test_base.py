"""What all tiers share: runs of chunks, futures of moving bytes, and buffers that are checked."""

from __future__ import annotations

import numpy as np
import pytest

from pagoda.tiers.base import (
    Chunk,
    check_sizes,
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
