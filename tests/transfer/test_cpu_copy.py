"""The CPU's copier: how many calls a chunk takes, which threads help and when, and what becomes of
them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pagoda import Cache, Config, Namespace
from pagoda.layout import KVLayout
from pagoda.transfer import BlockKV, DenseKV, PagedKV, PagesKV, Transfer, cpu_copy
from pagoda.transfer.cpu_copy import end_helpers, in_threads
from testbed.patience import Patience
from tests.children import in_child

CHUNK = 8


@pytest.fixture(autouse=True)
def helpers_end() -> Iterator[None]:
    end_helpers()
    yield
    end_helpers()


# ---- calls of numpy


def dense(order: str) -> Transfer:
    layout = KVLayout.dense(3, 2, 4, "float32", CHUNK, token_order=order)  # type: ignore[arg-type]
    shape = (2, 64, 4) if order == "heads_first" else (64, 2, 4)
    return DenseKV(
        [(np.ones(shape, "f4"), np.ones(shape, "f4")) for _ in range(3)],
        layout,
        threads=1,
    )


def paged(form: str, table: Sequence[int]) -> Transfer:
    layout = KVLayout.dense(3, 2, 4, "float32", CHUNK, token_order="tokens_first")
    shapes = {"planes_first": (2, 16, 4, 2, 4), "blocks_first": (16, 2, 4, 2, 4)}
    pools = [np.ones(shapes[form], "f4") for _ in range(3)]
    return PagedKV(
        pools,
        layout,
        pool_format=form,
        block_size=4,
        block_table=table,
        threads=1,
    )  # type: ignore[arg-type]


def pages(table: Sequence[int]) -> Transfer:
    layout = KVLayout.opaque(CHUNK, 3 * 2 * 16, "pages")
    planes = [np.ones((16, 16), np.uint8) for _ in range(3)]
    return PagesKV(planes, layout, block_tokens=4, block_table=table, threads=1)


def blocks() -> Transfer:
    return BlockKV(
        np.ones((4, 64), np.uint8),
        KVLayout.opaque(CHUNK, 64, "blocks"),
        threads=1,
    )


SCATTERED = [9, 4, 1, 7, 3, 12, 0, 2]


@pytest.mark.parametrize(
    ("kv", "one", "four_stored", "four_loaded"),
    [
        # one for each plane of each layer, for adjacent chunks together
        (dense("heads_first"), 6, 6, 6),
        (dense("tokens_first"), 6, 6, 6),
        (paged("planes_first", range(8)), 3, 3, 3),
        # np.take needs a contiguous target
        (paged("planes_first", SCATTERED), 3, 12, 3),
        (paged("blocks_first", SCATTERED), 3, 12, 3),
        (pages(range(8)), 3, 3, 3),
        (pages(SCATTERED), 3, 12, 3),
    ],
)
def test_a_chunk_takes_few_calls(
    kv: Transfer,
    one: int,
    four_stored: int,
    four_loaded: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []
    real = cpu_copy.CpuCopy._calls

    def noted(*given: object) -> Iterator[object]:
        for call in real(*given):  # type: ignore[arg-type]
            calls.append(call)
            yield call

    monkeypatch.setattr(cpu_copy.CpuCopy, "_calls", noted)
    slots = list(np.zeros((4, 4096), np.uint8))

    def count(way: str, chunks: int) -> int:
        calls.clear()
        getattr(kv, way)([CHUNK * i for i in range(chunks)], slots[:chunks])
        return len(calls)

    assert count("to_slots", 1) == one
    assert count("from_slots", 1) == one
    assert count("to_slots", 4) == four_stored
    assert count("from_slots", 4) == four_loaded


def mapped_at(address: int) -> np.ndarray:
    """Return a page of memory near an address, for as long as the process lives."""
    map_memory = ctypes.CDLL(None).mmap
    map_memory.restype = ctypes.c_void_p
    map_memory.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        *[ctypes.c_int] * 3,
        ctypes.c_long,
    ]
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    found = map_memory(
        address, 4096, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0
    )
    return np.frombuffer((ctypes.c_uint8 * 4096).from_address(found), np.uint8)


def test_slots_of_separate_memories_are_copied_one_by_one() -> None:
    """An array over both would span the heap, where each temporary array of numpy would overlap it
    again.
    """
    layout = KVLayout.dense(1, 2, 8, "float16", 4)
    planes = [
        np.random.default_rng(0).integers(0, 99, (2, 42, 8), np.int16)
        for _ in "KV"
    ]
    kv = DenseKV([planes], layout, threads=1)
    slots = [mapped_at(1 << 28), mapped_at(0x7F00_0000_0000)]

    def there_and_back() -> None:
        kv.to_slots([0, 4], slots)
        kv.from_slots([8, 12], slots)
        for plane in planes:
            assert (plane[:, 8:16] == plane[:, :8]).all()

    in_child(there_and_back)


def test_slots_that_own_their_memory_are_copied_one_by_one() -> None:
    ids = np.array([[0], [1]])
    assert (
        len(
            list(
                cpu_copy._joined(
                    ids, [np.zeros(4096, np.uint8) for _ in range(2)]
                )
            )
        )
        == 2
    )
    assert (
        len(list(cpu_copy._joined(ids, list(np.zeros((2, 4096), np.uint8))))) == 1
    )


# ---- threads


def large() -> tuple[BlockKV, list[np.ndarray]]:
    content = np.random.default_rng(0).integers(
        0, 256, (2, 8 << 20), dtype=np.uint8
    )
    return BlockKV(content, KVLayout.opaque(CHUNK, 8 << 20, "large")), list(
        np.zeros_like(content)
    )


def copying_threads() -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("pagoda-copy")
    ]


def check_large() -> None:
    kv, slots = large()
    kv.to_slots([0, CHUNK], slots)
    assert (np.stack(slots) == kv._blocks).all()


def test_idle_cores_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))
    monkeypatch.setattr(cpu_copy, "_running_threads", lambda: 1)
    check_large()
    assert 1 <= len(copying_threads()) <= 2


@pytest.mark.parametrize(("cores", "running"), [(1, 1), (4, 4), (4, 40)])
def test_busy_cores_are_left_alone(
    cores: int, running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(cpu_copy, "_running_threads", lambda: running)
    check_large()
    assert not copying_threads()


def test_a_small_copy_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cpu_copy, "_running_threads", lambda: pytest.fail("the load was read")
    )
    assert cpu_copy._idle_threads(cpu_copy._LEAST_BYTES - 1) == 1


def test_calls_that_copy_at_once_share_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))
    monkeypatch.setattr(cpu_copy, "_running_threads", lambda: 1)
    release = threading.Event()
    busy = [cpu_copy._helper_pool().submit(release.wait) for _ in range(2)]
    try:
        assert cpu_copy._idle_threads(1 << 30) == 1
    finally:
        release.set()
    for future in busy:
        assert future.result()
    assert cpu_copy._idle_threads(1 << 30) > 1


def test_the_load_that_cannot_be_read_is_a_high_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert cpu_copy._running_threads() >= 1

    def fails(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", fails)
    assert cpu_copy._running_threads() > cpu_copy._MOST_HELPERS


def test_whoever_is_free_takes_the_next_job() -> None:
    done: list[int] = []
    begun = threading.Event()
    release = threading.Event()

    def slow() -> None:
        begun.set()
        assert release.wait(30)

    def last() -> None:
        assert begun.wait(30)
        release.set()

    in_threads([slow, *(lambda n=n: done.append(n) for n in range(20)), last], 2)  # type: ignore[misc]
    assert sorted(done) == list(range(20))


@pytest.mark.parametrize("error", [ValueError, IndexError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["here", "helper"])
def test_an_error_is_raised_and_nothing_goes_on_after_it(
    error: type[BaseException], where: str
) -> None:
    caller = threading.get_ident()
    ended = list[int]()
    met = threading.Barrier(2)

    def job() -> None:
        met.wait(30)  # one on each thread
        if (threading.get_ident() == caller) == (where == "here"):
            raise error
        time.sleep(0.05)
        ended.append(1)

    with pytest.raises(error):
        in_threads([job, job, *(lambda: time.sleep(0.01) for _ in range(500))], 2)
    assert ended == [1]


class Signal(BaseException):
    """Raised by the signal handlers of a test."""


@contextmanager
def raising(*numbers: signal.Signals) -> Iterator[None]:
    def handler(*_: object) -> None:
        raise Signal

    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, old in before.items():
            signal.signal(number, old)


@pytest.mark.timeout(120, method="thread")
def test_signals_that_come_again_and_again_do_not_end_the_wait_for_a_helper() -> (
    None
):
    """Otherwise it would write into slots that others have reserved since."""
    caller = threading.get_ident()
    ended = list[int]()
    met = threading.Barrier(2)

    def job() -> None:
        met.wait(30)
        if threading.get_ident() == caller:
            signal.setitimer(signal.ITIMER_REAL, 0.01, 0.02)
        time.sleep(0.5)
        ended.append(1)

    with raising(signal.SIGALRM), pytest.raises(Signal):
        try:
            in_threads([job, job], 2)
        finally:
            seen = len(ended)
            signal.setitimer(signal.ITIMER_REAL, 0)
    assert seen == 1  # that of the helper; the caller's was broken off


@pytest.mark.timeout(120, method="thread")
def test_a_child_that_a_signal_handler_forks_during_a_copy_does_not_wait_for_helpers_that_it_lacks() -> (  # noqa: E501
    None
):
    caller = threading.get_ident()
    met = threading.Barrier(2)
    release = threading.Event()
    forked: list[int] = []

    def job() -> None:
        met.wait(30)
        if threading.get_ident() != caller:
            assert release.wait(30)
        else:
            # by then this thread waits for the other
            signal.setitimer(signal.ITIMER_REAL, 0.2)

    def fork(*_: object) -> None:
        forked.append(os.fork())
        if forked[0] == 0:
            signal.alarm(0)
            faulthandler.cancel_dump_traceback_later()
        else:
            release.set()

    before = signal.signal(signal.SIGALRM, fork)
    try:
        in_threads([job, job], 2)
    except RuntimeError as error:
        if forked == [0]:
            os._exit(0 if "forked child" in str(error) else 1)
        raise
    finally:
        if forked == [0]:
            os._exit(2)
        signal.signal(signal.SIGALRM, before)
    patience = Patience(10)
    while (ended := os.waitpid(forked[0], os.WNOHANG)) == (0, 0):
        if patience.ended:
            os.kill(forked[0], signal.SIGKILL)
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0


def test_a_forked_child_copies_with_threads_of_its_own() -> None:
    in_threads([lambda: None] * 4, 2)

    def work() -> None:
        met = threading.Barrier(2)
        in_threads([lambda: met.wait(60)] * 2, 2)  # type: ignore[list-item]

    in_child(work)


def test_the_helpers_end_with_the_cache(shm_root: Path) -> None:
    layout = KVLayout.opaque(CHUNK, 64, "ends")
    config = Config(
        chunk_tokens=CHUNK, host_size=1 << 20, host_path=str(shm_root)
    )
    cache = Cache(config, namespace=Namespace(model="m"), layout=layout)
    met = threading.Barrier(2)
    in_threads([lambda: met.wait(60)] * 2, 2)  # type: ignore[list-item]
    assert copying_threads()
    cache.close()
    patience = Patience(20)
    while copying_threads():
        assert not patience.ended
        time.sleep(0.01)
    met = threading.Barrier(2)
    in_threads([lambda: met.wait(60)] * 2, 2)  # type: ignore[list-item]


# ---- what is copied


def test_a_large_copy_is_cut_without_a_remainder() -> None:
    # a number of pieces that does not divide it
    shape = (3, 7 * (cpu_copy._PIECE_BYTES // 8) // 3 + 1)
    source = np.random.default_rng(0).random(shape)
    to = np.zeros(shape)
    pieces = list(cpu_copy._pieces(to, source))
    assert len(pieces) > 3
    assert sum(size for _, size in pieces) == source.nbytes
    for job, _ in pieces:
        job()
    assert (to == source).all()


@pytest.mark.parametrize(
    "order",
    [[0, 0, 1], [0, 1, 1], [1, 1, 1], [1, 0, 0], [2, 1, 0, 1], [0, 2, 1, 3, 3]],
)
def test_slots_in_any_order_and_the_same_one_twice(order: list[int]) -> None:
    layout = KVLayout.opaque(CHUNK, 3 * 2 * 16, "pages")
    random = np.random.default_rng(1)
    memory = random.integers(0, 256, (4, 96), dtype=np.uint8)
    planes = [np.zeros((2 * len(order), 16), np.uint8) for _ in range(3)]
    kv = PagesKV(
        planes,
        layout,
        block_tokens=4,
        block_table=range(2 * len(order)),
        threads=1,
    )
    kv.from_slots(
        [CHUNK * at for at in range(len(order))], [memory[slot] for slot in order]
    )
    for at, slot in enumerate(order):
        want = memory[slot].reshape(3, 2, 16)
        for p, plane in enumerate(planes):
            assert (plane[2 * at : 2 * at + 2] == want[p]).all()


def test_as_many_threads_as_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        cpu_copy, "_idle_threads", lambda _: pytest.fail("a number was asked for")
    )
    content = np.random.default_rng(0).integers(
        0, 256, (2, 8 << 20), dtype=np.uint8
    )
    planes = [plane.reshape(2, -1) for plane in content]
    used: list[int] = []
    real = cpu_copy.in_threads
    monkeypatch.setattr(
        cpu_copy, "in_threads", lambda jobs, n: (used.append(n), real(jobs, n))
    )
    for threads in (1, 3):
        layout = KVLayout.opaque(CHUNK, 16 << 20, "large")
        kv = PagesKV(
            planes, layout, block_tokens=4, block_table=range(2), threads=threads
        )
        slot = np.zeros(16 << 20, np.uint8)
        kv.to_slots([0], [slot])
        assert (slot == content.reshape(-1)).all()
    assert used == [3]


def test_what_has_not_begun_is_dropped_after_an_error() -> None:
    ran: list[int] = []

    def fail() -> None:
        raise ValueError

    todo = deque([fail, partial(ran.append, 1), partial(ran.append, 2)])
    with pytest.raises(ValueError):
        cpu_copy._drain(todo)
    assert not todo
    assert not ran
