"""Registering memory piece by piece, and unregistering it, on a stub of NVIDIA's driver."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.errors import ClosedError
from pagoda.slab import PAGE_BYTES, MemorySlab, aligned, pinned
from pagoda.slab.cuda_driver import Driver
from pagoda.slab.linux_mmap import populate
from pagoda.slab.memory import _piece_bytes
from pagoda.slab.pinned import check, copying, device_address, pin
from testbed.patience import Patience, wait_until
from tests.children import in_child
from tests.slab.libcuda import NOT_SUPPORTED, OUT_OF_MEMORY, Stub

PAGE = mmap.PAGESIZE
SHIFT = 1 << 44


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    stub = Stub(tmp_path)
    stub.library.stub_shift(SHIFT, 0)
    yield stub
    assert stub.fault == ""
    check()


def pinned_now(
    array: pinned.Bytes, driver: Driver, piece_bytes: int = pinned.PIECE_BYTES
) -> pinned.PinnedMemory:
    """Register an array, and return when all is in or refused."""
    found = pin(
        array, 0, driver=driver, piece_bytes=piece_bytes, background=False
    )
    assert found is not None
    check()
    return found


@pytest.mark.parametrize(
    ("nbytes", "piece_bytes", "sizes"),
    [
        (PAGE, PAGE, [PAGE]),
        (1, PAGE, [1]),
        (4 * PAGE, 2 * PAGE, [2 * PAGE, 2 * PAGE]),
        (5 * PAGE + 17, 2 * PAGE, [2 * PAGE, 2 * PAGE, PAGE + 17]),
        (3 * PAGE - 1, PAGE, [PAGE, PAGE, PAGE - 1]),
        (4 * PAGE, 2 * PAGE + 5, [2 * PAGE, 2 * PAGE]),  # whole pages
        (2 * PAGE, 1, [PAGE, PAGE]),  # at least one
        (3 * PAGE, 1 << 62, [3 * PAGE]),
    ],
)
def test_pieces_cover_the_array_once(
    stub: Stub, nbytes: int, piece_bytes: int, sizes: list[int]
) -> None:
    array = aligned(nbytes)
    base = array.ctypes.data
    held = pinned_now(array, stub.begin(), piece_bytes)
    assert [size for _, size in stub.pieces] == sizes
    assert held.nbytes == stub.registered == nbytes
    assert held.trouble == ""
    assert device_address(base, nbytes) == base + SHIFT
    assert device_address(base + nbytes - 1, 1) == base + SHIFT + nbytes - 1
    assert device_address(base, nbytes + 1) is None
    assert device_address(base - 1, 2) is None
    assert held.close()
    assert stub.registered == held.nbytes == 0
    assert device_address(base, 1) is None


def test_no_piece_is_larger_than_nvidia_takes(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pinned.MAX_PIECE_BYTES == 64 << 30
    monkeypatch.setattr(pinned, "MAX_PIECE_BYTES", 2 * PAGE)
    held = pinned_now(aligned(5 * PAGE), stub.begin(), 1 << 40)
    assert [size for _, size in stub.pieces] == [2 * PAGE, 2 * PAGE, PAGE]
    held.close()


def test_a_range_over_pieces_that_lie_apart_on_the_device_has_no_place(
    stub: Stub,
) -> None:
    stub.library.stub_shift(SHIFT, 1 << 30)
    array = aligned(4 * PAGE)
    base = array.ctypes.data
    held = pinned_now(array, stub.begin(), 2 * PAGE)
    assert device_address(base, 2 * PAGE) == base + SHIFT
    assert device_address(
        base + 2 * PAGE, 2 * PAGE
    ) == base + 2 * PAGE + SHIFT + (1 << 30)
    assert device_address(base + 2 * PAGE - 1, 2) is None
    held.close()


def test_what_was_registered_before_a_refusal_stays_usable(
    stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    array = aligned(8 * PAGE)
    base = array.ctypes.data
    stub.library.stub_refuse(4, OUT_OF_MEMORY)
    with caplog.at_level(logging.INFO, "pagoda.slab"):
        held = pinned_now(array, stub.begin(), PAGE)
    assert held.nbytes == stub.registered == 3 * PAGE
    assert "CUDA_ERROR_OUT_OF_MEMORY (2)" in held.trouble
    (line,) = caplog.messages
    assert "ulimit -l" in line
    assert "memlock" in line
    assert f"{3 * PAGE} of {8 * PAGE} bytes" in line
    assert caplog.records[0].levelno == logging.WARNING
    assert device_address(base, 3 * PAGE) == base + SHIFT
    assert device_address(base + 3 * PAGE - 1, 2) is None
    # it is not asked again and again
    assert stub.library.stub_registrations() == 4
    assert held.close()
    assert stub.registered == 0


def test_a_limit_of_locked_memory(stub: Stub) -> None:
    stub.library.stub_limit(5 * PAGE)
    held = pinned_now(aligned(8 * PAGE), stub.begin(), 2 * PAGE)
    assert stub.registered == 4 * PAGE
    assert "ulimit" in held.trouble
    held.close()


def test_confidential_computing_is_named(stub: Stub) -> None:
    stub.library.stub_refuse(1, NOT_SUPPORTED)
    held = pinned_now(aligned(PAGE), stub.begin())
    assert "confidential" in held.trouble
    assert "ulimit" not in held.trouble
    assert held.nbytes == 0
    held.close()


def test_a_wrong_device_is_trouble(stub: Stub) -> None:
    held = pin(aligned(PAGE), 9, driver=stub.begin(), background=False)
    assert held is not None
    assert "CUDA_ERROR_INVALID_DEVICE" in held.trouble
    assert held.close()


def test_one_line_says_that_all_is_in(
    stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pagoda.slab"):
        held = pinned_now(aligned(2 * PAGE), stub.begin(), PAGE)
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert str(2 * PAGE) in caplog.messages[0]
    held.close()


def test_what_cannot_be_registered_is_a_value_error(stub: Stub) -> None:
    whole = aligned(4 * PAGE)
    for array in (
        whole[1:],
        whole[:0],
        whole[::2],
        whole[: 2 * PAGE].view(np.uint16),
    ):
        with pytest.raises(ValueError):
            pin(array, 0, driver=stub.begin())


def test_without_a_driver_there_is_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    if Driver.load() is not None:
        pytest.skip("this machine has a GPU")
    assert pin(aligned(PAGE), 0) is None
    assert "libcuda" in caplog.text


# -- the end


def test_close_is_bounded_while_pieces_are_being_registered(stub: Stub) -> None:
    array = aligned(400 * PAGE)
    stub.library.stub_delay(50_000)  # 20 s in all
    held = pin(array, 0, driver=stub.begin(), piece_bytes=PAGE)
    assert held is not None
    assert not held.wait(0.2)
    patience = Patience(10)
    assert held.close(60)
    # one piece, as slow as a busy machine makes it
    assert not patience.ended, patience.said()
    assert stub.registered == 0
    assert device_address(array.ctypes.data, 1) is None
    assert held.wait(0)
    assert held.close(0)


def test_a_close_that_has_no_time_goes_on_behind_the_scenes(stub: Stub) -> None:
    stub.library.stub_delay(300_000)
    held = pin(aligned(4 * PAGE), 0, driver=stub.begin(), piece_bytes=PAGE)
    assert held is not None
    wait_until(lambda: stub.library.stub_registrations() > 0)
    patience = Patience(5)
    assert not held.close(0.01)
    assert not patience.ended, patience.said()
    assert held.close(60)
    assert stub.registered == 0


def test_close_is_idempotent_from_any_thread(stub: Stub) -> None:
    held = pinned_now(aligned(8 * PAGE), stub.begin(), PAGE)
    threads = [threading.Thread(target=held.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert held.close()
    assert stub.registered == 0


def test_close_waits_for_a_copy(stub: Stub) -> None:
    array = aligned(2 * PAGE)
    held = pinned_now(array, stub.begin(), PAGE)
    with copying():
        closing = threading.Thread(target=held.close, args=(60,))
        closing.start()
        wait_until(lambda: device_address(array.ctypes.data, 1) is None)
        time.sleep(0.05)
        assert stub.registered == 2 * PAGE  # though no new copy finds it
    closing.join(60)
    assert not closing.is_alive()
    assert stub.registered == 0


def test_a_copy_that_began_later_is_not_waited_for(stub: Stub) -> None:
    array = aligned(PAGE)
    held = pinned_now(array, stub.begin())
    with copying():
        held.stop()
        wait_until(lambda: device_address(array.ctypes.data, 1) is None)
        late = copying()
        late.__enter__()
    assert held.close(60)
    assert stub.registered == 0
    late.__exit__(None, None, None)


def test_a_copy_that_does_not_end_keeps_memory_registered_and_mapped(
    stub: Stub,
) -> None:
    array = aligned(PAGE)
    base = array.ctypes.data
    alive = weakref.ref(array.base)
    held = pinned_now(array, stub.begin())
    with copying():
        held.close(0.05)
        held._thread.join(60)
    assert stub.registered == PAGE
    assert device_address(base, 1) is None
    del array, held
    gc.collect()
    assert alive() is not None
    pinned._kept.clear()


@pytest.mark.slow
def test_nothing_is_under_way_when_the_process_and_the_driver_end(
    stub: Stub,
) -> None:
    code = f"""
import atexit, ctypes, os, time
library = ctypes.CDLL({str(stub.path)!r})
atexit.register(lambda: library.stub_under_way() and os._exit(70))  # registered before ours: it runs after them
from pagoda.slab import MemorySlab
from pagoda.slab.cuda_driver import Driver
driver = Driver.load({str(stub.path)!r})
library.stub_delay(100_000)
slabs = [MemorySlab(None, 100, 1 << 12) for _ in range(6)]  # that wait for one another in there
for slab in slabs:
    slab.pin(0, driver=driver)
while not library.stub_registrations():
    time.sleep(0.01)
"""  # noqa: E501
    patience = Patience(30)
    assert (
        subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    )
    assert not patience.ended, patience.said()


# -- several


def test_two_arrays_one_after_the_other(stub: Stub) -> None:
    driver = stub.begin()
    one = aligned(3 * PAGE)
    two = aligned(2 * PAGE)
    first = pinned_now(one, driver, PAGE)
    second = pinned_now(two, driver, PAGE)
    assert device_address(one.ctypes.data, one.nbytes)
    assert device_address(two.ctypes.data, two.nbytes)
    first.close()
    assert device_address(one.ctypes.data, 1) is None
    assert device_address(two.ctypes.data, two.nbytes)
    assert stub.registered == second.nbytes == 2 * PAGE
    second.close()
    assert stub.library.stub_retained() == 1


@pytest.mark.slow
def test_threads_that_ask_while_pieces_come_get_right_answers(stub: Stub) -> None:
    array = aligned(32 * PAGE)
    base = array.ctypes.data
    wrong = list[str]()
    over = threading.Event()

    def ask(seed: int) -> None:
        random = np.random.default_rng(seed)
        reached = 0
        while not over.is_set():
            begin = int(random.integers(array.nbytes))
            nbytes = int(random.integers(1, array.nbytes - begin + 1))
            place = device_address(base + begin, nbytes)
            if place is not None:
                reached = max(reached, begin + nbytes)
                if place != base + begin + SHIFT:
                    wrong.append(f"{place} for {begin}")
            elif begin + nbytes <= reached:
                # pieces are registered from the front
                wrong.append(f"[{begin}, {begin + nbytes}) was there")

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    held = pinned_now(array, stub.begin(), PAGE)
    over.set()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert held.nbytes == array.nbytes
    held.close()


def test_the_parts_are_asked_for_before_any_is_registered(stub: Stub) -> None:
    at = list[int]()
    held = pin(
        aligned(PAGE),
        0,
        driver=stub.begin(),
        parts=lambda: at.append(stub.registered) or [(0, PAGE)],
    )
    assert held is not None
    assert held.wait(60)
    assert at == [0]
    assert stub.registered == PAGE
    held.close()

    def fails() -> None:
        raise OSError("the ledger is gone")

    held = pin(
        aligned(PAGE), 0, driver=stub.begin(), parts=fails, background=False
    )
    assert held is not None
    assert held.trouble == "OSError: the ledger is gone"
    assert stub.registered == 0
    assert held.close()


# -- forks


def test_a_forked_child_forgets_everything_and_calls_nothing(stub: Stub) -> None:
    array = aligned(4 * PAGE)
    held = pinned_now(array, stub.begin(), PAGE)
    base = array.ctypes.data

    def work() -> None:
        assert device_address(base, 1) is None
        assert held.nbytes == 0
        assert held.wait(0)
        assert held.close(0)
        held.stop()
        check()
        assert stub.fault == ""
        assert stub.registered == 4 * PAGE

    in_child(work)
    assert device_address(base, 4 * PAGE) == base + SHIFT
    held.close()
    assert stub.registered == 0


def test_a_fork_while_pieces_are_being_registered(stub: Stub) -> None:
    slab = MemorySlab(None, 40, PAGE)
    driver = stub.begin()
    stub.library.stub_delay(5_000)
    held = slab.pin(0, driver=driver)
    assert held is not None

    def work() -> None:
        assert slab.pinned_bytes == 0
        again = slab.pin(0, driver=driver)
        assert again is not None
        assert again.wait(60)
        assert "forked child" in again.trouble
        slab.close(1)
        assert stub.fault == ""

    for _ in range(5):
        in_child(work)
    assert held.wait(60)
    assert slab.pinned_bytes == slab.nbytes
    slab.close()
    assert stub.registered == 0


# -- slabs


def test_a_slab_is_registered_once_in_whole_slots(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "PIECE_BYTES", 8 * PAGE)
    slab = MemorySlab(None, 5, 3 * PAGE)
    driver = stub.begin()
    slab.populate()
    held = slab.pin(0, driver=driver)
    assert held is not None
    assert slab.pin(0, driver=driver) is held
    assert slab.pin(1, driver=driver) is held
    assert held.wait(60)
    assert [size for _, size in stub.pieces] == [6 * PAGE, 6 * PAGE, 3 * PAGE]
    for slot in range(5):
        address = slab.view(slot).ctypes.data
        assert device_address(address, slab.slot_bytes) == address + SHIFT
    assert slab.pinned_bytes == slab.nbytes
    slab.close()
    slab.close()
    assert stub.registered == slab.pinned_bytes == 0
    with pytest.raises(ClosedError):
        slab.pin(0, driver=driver)


def test_memory_is_there_before_the_driver_is_asked(
    stub: Stub, shm_root: Path
) -> None:
    path = shm_root / "slab"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 8 << 20)
    for slab in (MemorySlab(path, 8, 1 << 20), MemorySlab(None, 8, 1 << 20)):
        if not populate(slab.array.ctypes.data, PAGE):
            pytest.skip("this kernel has no MADV_POPULATE_WRITE")
        held = slab.pin(0, driver=stub.begin())
        assert held is not None
        assert held.wait(60)
        assert held.trouble == ""
        assert stub.library.stub_cold() == 0
        slab.close()


@pytest.mark.parametrize(
    "slot_bytes", [1, 5000, PAGE, (1 << 30) + PAGE, (1 << 30) + 1, 100 << 30]
)
def test_pieces_of_any_slot_are_whole_pages_within_the_limit(
    slot_bytes: int,
) -> None:
    piece = _piece_bytes(slot_bytes)
    assert piece % PAGE == 0
    assert 0 < piece <= pinned.MAX_PIECE_BYTES
    if slot_bytes in (1, 5000, PAGE, (1 << 30) + PAGE):
        assert piece % slot_bytes == 0


def test_a_slab_is_unmapped_after_it_was_unregistered(stub: Stub) -> None:
    slab = MemorySlab(None, 4, PAGE_BYTES)
    held = slab.pin(0, driver=stub.begin())
    assert held is not None
    assert held.wait(60)
    array = weakref.ref(slab.array)
    slab.close()
    assert stub.registered == 0
    assert array() is None


def test_a_slab_that_nobody_closes_is_unregistered_all_the_same(
    stub: Stub,
) -> None:
    slab = MemorySlab(None, 4, PAGE_BYTES)
    held = slab.pin(0, driver=stub.begin())
    assert held is not None
    assert held.wait(60)
    array = weakref.ref(slab.array)
    del slab, held
    gc.collect()
    wait_until(lambda: stub.registered == 0 and array() is None)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_opened_and_closed_only_what_is_open_is_registered(
    stub: Stub, seed: int
) -> None:
    """Whatever is opened, registered, refused and closed: what has a place is registered, what is
    closed is not.
    """
    random = np.random.default_rng(seed)
    driver = stub.begin()
    slabs: list[MemorySlab] = []
    for _ in range(60):
        kind = int(random.integers(6))
        if kind == 0 and len(slabs) < 5:
            slabs.append(MemorySlab(None, int(random.integers(1, 9)), PAGE))
        elif kind == 1:
            stub.library.stub_refuse(int(random.integers(1, 4)), OUT_OF_MEMORY)
        elif kind == 2 and slabs:
            slabs.pop(int(random.integers(len(slabs)))).close()
        elif slabs:
            slab = slabs[int(random.integers(len(slabs)))]
            held = slab.pin(int(random.integers(2)), driver=driver)
            assert held is not None
            if kind == 5:
                assert held.wait(60)
        check()
        for slab in slabs:
            base = slab.array.ctypes.data
            nbytes = slab.pinned_bytes
            assert not nbytes or device_address(base, nbytes) == base + SHIFT
    for slab in slabs:
        slab.close()
    assert stub.registered == 0
    assert stub.library.stub_count() == 0
