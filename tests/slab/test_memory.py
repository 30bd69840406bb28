from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.errors import ClosedError, StoreError
from pagoda.base.file_space import lengthen
from pagoda.slab import PAGE_BYTES, MemorySlab, address, aligned
from pagoda.slab.linux_mmap import populate
from testbed.patience import Patience
from tests.huge_pages import huge_bytes


def make_file(path: Path, nbytes: int) -> Path:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(fd, 0, nbytes)
    os.close(fd)
    return path


def test_private_memory_is_page_aligned_and_zero() -> None:
    slab = MemorySlab(None, 3, 2 * PAGE_BYTES)
    assert slab.array.shape == (3, 2 * PAGE_BYTES)
    assert slab.array.ctypes.data % mmap.PAGESIZE == 0
    assert not slab.array.any()
    slab.close()


def test_view_is_no_copy() -> None:
    slab = MemorySlab(None, 4, PAGE_BYTES)
    slab.view(2)[:] = 7
    assert (slab.array[2] == 7).all()
    assert not slab.array[1].any()
    assert not slab.array[3].any()
    for slot in (-1, 4):
        with pytest.raises(IndexError):
            slab.view(slot)


def test_file_is_shared_between_mappings(shm_root: Path) -> None:
    path = make_file(shm_root / "slab", 4 * PAGE_BYTES)
    one = MemorySlab(path, 4, PAGE_BYTES)
    two = MemorySlab(path, 4, PAGE_BYTES)
    one.view(3)[:5] = (1, 2, 3, 4, 5)
    assert two.view(3)[:6].tolist() == [1, 2, 3, 4, 5, 0]
    one.close()
    assert two.view(3)[0] == 1


def test_memory_is_shared_with_a_forked_process(shm_root: Path) -> None:
    slab = MemorySlab(make_file(shm_root / "slab", 2 * PAGE_BYTES), 2, PAGE_BYTES)
    child = os.fork()
    if child == 0:
        slab.view(1)[:] = 9
        os._exit(0)
    os.waitpid(child, 0)
    assert (slab.view(1) == 9).all()


def test_private_memory_is_shared_with_a_forked_process_too() -> None:
    """The ledger of a private tier is: both must be, or a child commits bytes that its parent
    cannot see.
    """
    slab = MemorySlab(None, 2, PAGE_BYTES)
    child = os.fork()
    if child == 0:
        slab.view(1)[:] = 7
        os._exit(0)
    os.waitpid(child, 0)
    assert (slab.view(1) == 7).all()


def test_short_or_missing_file_is_a_store_error(tmp_path: Path) -> None:
    path = make_file(tmp_path / "slab", PAGE_BYTES)
    with pytest.raises(StoreError, match="are needed"):
        MemorySlab(path, 2, PAGE_BYTES)
    with pytest.raises(StoreError, match="cannot open"):
        MemorySlab(tmp_path / "absent", 1, PAGE_BYTES)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 4096), (1, 0), (-1, 4096)])
def test_sizes_that_are_no_pages_are_refused(slots: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError):
        MemorySlab(None, slots, slot_bytes)


def resident_pages(slab: MemorySlab) -> int:
    start = slab.array.ctypes.data
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(start // mmap.PAGESIZE * 8)
        entries = np.frombuffer(
            pagemap.read(slab.nbytes // mmap.PAGESIZE * 8), dtype=np.uint64
        )
    # in memory, or swapped out since
    return int(((entries >> np.uint64(62)) != 0).sum())


def test_populate_faults_all_pages_and_keeps_content(shm_root: Path) -> None:
    slots = 70  # more than one piece
    slab = MemorySlab(make_file(shm_root / "slab", slots << 20), slots, 1 << 20)
    slab.view(69)[-1] = 42
    slab.populate(threads=2, background=False)
    if not populate(slab.array.ctypes.data, mmap.PAGESIZE):
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    assert resident_pages(slab) == slab.nbytes // mmap.PAGESIZE
    assert slab.view(69)[-1] == 42
    assert not slab.view(0).any()
    slab.close()


def test_populate_gives_huge_pages_where_the_kernel_can(shm_root: Path) -> None:
    slab = MemorySlab(make_file(shm_root / "slab", 16 << 20), 16, 1 << 20)
    slab.array[:] = 7
    slab.populate(background=False)
    assert (slab.array == 7).all()
    assert slab.path is not None
    huge = huge_bytes(slab.path)
    if not huge:
        pytest.skip("this kernel gives no huge pages here")
    # it may not have had enough of them for all
    assert huge <= 16 << 20
    assert huge % (2 << 20) == 0
    slab.close()


def test_huge_pages_are_allocated_only_within_the_slots(shm_root: Path) -> None:
    path = shm_root / "slab"
    lengthen(path, 16 << 20)
    slab = MemorySlab(path, 16, 1 << 20)
    with open(path, "r+b") as file:
        # slots 3 to 8 have two whole huge pages, and half of one at each end
        assert not slab.allocate_huge(file.fileno(), range(3, 9))
        taken = os.fstat(file.fileno()).st_blocks * 512
        if taken < 4 << 20:
            pytest.skip("this kernel gives no huge pages here")
        assert taken == 4 << 20
        assert not slab.allocate_huge(file.fileno(), range(15, 16))
        assert slab.allocate_huge(file.fileno(), range(10, 14))
        assert os.fstat(file.fileno()).st_blocks * 512 == 8 << 20
    assert not slab.array[4:8].any()
    assert not slab.array[10:14].any()
    assert huge_bytes(path) == 8 << 20
    slab.close()


def test_close_is_bounded_while_populating_and_idempotent() -> None:
    slab = MemorySlab(None, 256, 1 << 20)
    slab.populate()
    slab.populate()
    patience = Patience(30)
    slab.close()
    slab.close()
    assert not patience.ended, patience.said()
    with pytest.raises(ClosedError):
        slab.view(0)
    with pytest.raises(ClosedError):
        slab.populate()


def test_views_outlive_close() -> None:
    slab = MemorySlab(None, 2, PAGE_BYTES)
    view = slab.view(1)
    view[:] = 5
    slab.close()
    assert (view == 5).all()


def test_close_lets_go_of_the_memory() -> None:
    slab = MemorySlab(None, 2, PAGE_BYTES)
    array = weakref.ref(slab.array)
    slab.close()
    assert array() is None


@pytest.mark.parametrize("nbytes", [1, 4096, 12288, 5000])
def test_aligned_buffers_begin_with_a_page(nbytes: int) -> None:
    buffer = aligned(nbytes)
    assert buffer.shape == (nbytes,)
    assert buffer.dtype == np.uint8
    assert buffer.ctypes.data % PAGE_BYTES == 0


def test_the_address_of_any_buffer() -> None:
    whole = aligned(8192)
    view = whole.view()
    view.flags.writeable = False
    for buffer in (whole, whole[100:], whole[::2], view[8:], whole[5:5]):
        assert address(buffer) == buffer.ctypes.data
