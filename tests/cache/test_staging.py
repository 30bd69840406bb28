"""Private buffers are bounded, aligned and come back."""

from __future__ import annotations

import threading
import time

from pagoda.cache.staging import Staging


def test_there_are_only_so_many() -> None:
    staging = Staging(64 << 20)
    taken = [staging.take() for _ in range(staging.count)]
    assert staging.count == 4 and all(buffer is not None for buffer in taken)
    assert staging.take() is None and staging.take(0.01) is None
    assert taken[0] is not None
    staging.give(taken[0])
    assert staging.take() is taken[0]
    assert staging.out == 4


def test_they_are_aligned_and_reused() -> None:
    staging = Staging(8192)
    buffer = staging.take()
    assert buffer is not None and buffer.nbytes == 8192 and buffer.ctypes.data % 4096 == 0
    staging.give(buffer)
    assert staging.take() is buffer


def test_a_wait_ends_when_one_comes_back() -> None:
    staging = Staging(1 << 30)
    first, second = staging.take(), staging.take()
    assert first is not None and second is not None
    threading.Timer(0.05, staging.give, [first]).start()
    began = time.monotonic()
    assert staging.take(100) is first
    assert time.monotonic() - began < 50
