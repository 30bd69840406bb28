"""Private buffers are bounded, aligned and released."""

from __future__ import annotations

import threading

from pagoda.cache.staging_buffers import StagingPool
from testbed.patience import Patience


def test_there_are_only_so_many() -> None:
    staging = StagingPool(64 << 20)
    taken = [staging.acquire() for _ in range(staging.count)]
    assert staging.count == 4
    for buffer in taken:
        assert buffer is not None
    assert staging.acquire() is None
    assert staging.acquire(0.01) is None
    assert taken[0] is not None
    staging.release(taken[0])
    assert staging.acquire() is taken[0]
    assert staging.in_use == 4


def test_they_are_aligned_and_reused() -> None:
    staging = StagingPool(8192)
    buffer = staging.acquire()
    assert buffer is not None
    assert buffer.nbytes == 8192
    assert buffer.ctypes.data % 4096 == 0
    staging.release(buffer)
    assert staging.acquire() is buffer


def test_a_wait_ends_when_one_comes_back() -> None:
    staging = StagingPool(1 << 30)
    first = staging.acquire()
    second = staging.acquire()
    assert first is not None
    assert second is not None
    threading.Timer(0.05, staging.release, [first]).start()
    patience = Patience(50)
    assert staging.acquire(100) is first
    assert not patience.ended, patience.said()


def test_several_buffers_are_those_that_are_free() -> None:
    staging = StagingPool(64 << 20)
    first = staging.acquire()
    assert first is not None
    some = staging.acquire_some(99, 60.0)
    assert len(some) == staging.count - 1
    assert staging.in_use == staging.count
    assert staging.acquire_some(2, 0.01) == []
    staging.release(first)
    (again,) = staging.acquire_some(2, 60.0)
    assert again is first
    for buffer in (*some, again):
        staging.release(buffer)
    assert staging.in_use == 0
