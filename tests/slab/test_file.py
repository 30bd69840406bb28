from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagoda.base.errors import StoreError
from pagoda.slab import PAGE_BYTES, FileSlab, aligned
from tests import seccomp
from tests.children import in_child

SLOTS = 6
SLOT_BYTES = 4 * PAGE_BYTES


def make_file(path: Path, nbytes: int = SLOTS * SLOT_BYTES) -> Path:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    return path


@pytest.fixture(params=[None, False], ids=["direct", "buffered"])
def slab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileSlab]:
    slab = FileSlab(
        make_file(tmp_path / "slab"), SLOTS, SLOT_BYTES, direct=request.param
    )
    yield slab
    slab.close()


def filled(nbytes: int, seed: int) -> np.ndarray:
    buffer = aligned(nbytes)
    buffer[:] = np.random.default_rng(seed).integers(
        0, 256, nbytes, dtype=np.uint8
    )
    return buffer


class Halting(FileSlab):
    """Moves at most `most` bytes a call (under O_DIRECT the page that the last of them is in)."""

    most = SLOT_BYTES

    def _readv(self, views: Sequence[memoryview], offset: int) -> int:
        return min(super()._readv(self._leading(views), offset), self.most)

    def _writev(self, views: Sequence[memoryview], offset: int) -> int:
        return min(super()._writev(self._leading(views), offset), self.most)

    def _leading(self, views: Sequence[memoryview]) -> list[memoryview]:
        left = (
            -(-max(self.most, 1) // PAGE_BYTES) * PAGE_BYTES
            if self.direct
            else max(self.most, 1)
        )
        leading = []
        for view in views:
            leading.append(view[:left])
            left -= len(leading[-1])
            if not left:
                break
        return leading


def test_round_trip_of_header_and_payload(slab: FileSlab) -> None:
    for slot in range(SLOTS):
        slab.write(
            slot, [filled(PAGE_BYTES, slot), filled(3 * PAGE_BYTES, 100 + slot)]
        )
    for slot in reversed(range(SLOTS)):
        header = aligned(PAGE_BYTES)
        payload = aligned(3 * PAGE_BYTES)
        slab.read(slot, [header, payload])
        assert (header == filled(PAGE_BYTES, slot)).all()
        assert (payload == filled(3 * PAGE_BYTES, 100 + slot)).all()


def test_slots_do_not_touch_each_other(slab: FileSlab) -> None:
    slab.write(2, [filled(SLOT_BYTES, 1)])
    for slot in (1, 3):
        buffer = filled(SLOT_BYTES, 2)
        slab.read(slot, [buffer])
        assert not buffer.any()


def test_headers_are_the_first_pages(slab: FileSlab) -> None:
    for slot in range(SLOTS):
        slab.write(slot, [filled(PAGE_BYTES, slot)])
    headers = slab.read_headers(2, 3)
    assert [bytes(h) for h in headers] == [
        filled(PAGE_BYTES, slot).tobytes() for slot in (2, 3, 4)
    ]
    assert slab.read_headers(0, 0) == []


def test_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    count = 1100
    path = make_file(tmp_path / "slab", count * PAGE_BYTES)
    slab = FileSlab(path, 1, count * PAGE_BYTES)
    out = [filled(PAGE_BYTES, seed) for seed in range(count)]
    slab.write(0, out)
    back = [aligned(PAGE_BYTES) for _ in range(count)]
    slab.read(0, back)
    for a, b in zip(out, back, strict=True):
        assert (a == b).all()
    slab.close()


@pytest.mark.parametrize("direct", [None, False])
@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    most=st.integers(1, SLOT_BYTES), cuts=st.lists(st.integers(1, 3), max_size=3)
)
def test_short_calls_lose_nothing(
    tmp_path: Path, direct: bool | None, most: int, cuts: list[int]
) -> None:
    slab = Halting(make_file(tmp_path / "slab"), SLOTS, SLOT_BYTES, direct=direct)
    slab.most = max(most, PAGE_BYTES) if slab.direct else max(most, 100)
    pages = sorted({0, 4, *cuts})
    sizes = [(b - a) * PAGE_BYTES for a, b in itertools.pairwise(pages)]
    out = [filled(size, seed) for seed, size in enumerate(sizes)]
    back = [aligned(size) for size in sizes]
    for room in back:
        # new memory may be old memory with the very bytes that are expected
        room[:] = 0xEE
    slab.write(1, out)
    slab.read(1, back)
    for a, b in zip(out, back, strict=True):
        assert (a == b).all()
    slab.close()


def test_no_progress_ends_in_eio(slab: FileSlab) -> None:
    stuck = Halting(slab.path, SLOTS, SLOT_BYTES, direct=slab.direct)
    stuck.most = 0
    for call in (stuck.read, stuck.write):
        with pytest.raises(OSError) as caught:
            call(0, [aligned(PAGE_BYTES)])
        assert caught.value.errno == errno.EIO
    if stuck.direct:
        stuck.most = 10  # never a whole page
        with pytest.raises(OSError) as caught:
            stuck.read(0, [aligned(2 * PAGE_BYTES)])
        assert caught.value.errno == errno.EIO
    stuck.close()


def test_end_of_file_is_eio(slab: FileSlab) -> None:
    os.truncate(slab.path, (SLOTS - 1) * SLOT_BYTES + PAGE_BYTES)
    with pytest.raises(OSError) as caught:
        slab.read(SLOTS - 1, [aligned(SLOT_BYTES)])
    assert caught.value.errno == errno.EIO
    slab.read(SLOTS - 2, [aligned(SLOT_BYTES)])
    os.truncate(slab.path, 0)
    with pytest.raises(OSError):
        slab.read_headers(0, 1)


def test_unaligned_buffers_are_refused_only_where_direct(slab: FileSlab) -> None:
    crooked = aligned(2 * PAGE_BYTES)[1 : PAGE_BYTES + 1]
    if slab.direct:
        with pytest.raises(ValueError, match="whole pages"):
            slab.read(0, [crooked])
        with pytest.raises(ValueError, match="whole pages"):
            slab.write(0, [aligned(100)])
    else:
        slab.write(0, [filled(100, 3)])
        slab.read(0, [crooked])
        assert (crooked[:100] == filled(100, 3)).all()


def test_wrong_slots_and_sizes_are_refused(slab: FileSlab) -> None:
    for slot in (-1, SLOTS):
        with pytest.raises(ValueError, match="outside"):
            slab.read(slot, [aligned(PAGE_BYTES)])
    with pytest.raises(ValueError, match="do not fit"):
        slab.write(0, [aligned(SLOT_BYTES), aligned(PAGE_BYTES)])
    with pytest.raises(ValueError):
        slab.read_headers(SLOTS - 1, 2)
    with pytest.raises(ValueError, match="whole pages"):
        FileSlab(slab.path, 1, PAGE_BYTES + 1)


def test_short_or_missing_file_is_a_store_error(tmp_path: Path) -> None:
    path = make_file(tmp_path / "slab")
    for direct in (None, False):
        with pytest.raises(StoreError, match="are needed"):
            FileSlab(path, SLOTS + 1, SLOT_BYTES, direct=direct)
        with pytest.raises(StoreError, match="cannot open"):
            FileSlab(tmp_path / "absent", 1, PAGE_BYTES, direct=direct)
    left = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # others come and go
            left.append(os.readlink(f"/proc/self/fd/{fd}"))
    assert str(path) not in left


def test_direct_is_what_the_filesystem_can(shm_root: Path) -> None:
    path = make_file(shm_root / "slab")
    slab = FileSlab(path, SLOTS, SLOT_BYTES)
    slab.write(0, [filled(SLOT_BYTES, 4)])
    back = aligned(SLOT_BYTES)
    slab.read(0, [back])
    assert (back == filled(SLOT_BYTES, 4)).all()
    if not slab.direct:
        with pytest.raises(StoreError, match="O_DIRECT"):
            FileSlab(path, SLOTS, SLOT_BYTES, direct=True)
    slab.close()
    with FileSlab(path, SLOTS, SLOT_BYTES, direct=False)._open_fd() as fd:
        assert os.pread(fd, 1, 0)


class Picky(FileSlab):
    """Reads one page directly and refuses more, as a file system whose blocks are larger than a
    page.
    """

    def _readv(self, views: Sequence[memoryview], offset: int) -> int:
        self._refuse(views)
        return super()._readv(views, offset)

    def _writev(self, views: Sequence[memoryview], offset: int) -> int:
        self._refuse(views)
        return super()._writev(views, offset)

    def _refuse(self, views: Sequence[memoryview]) -> None:
        direct = fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_DIRECT
        if direct and sum(view.nbytes for view in views) > PAGE_BYTES:
            raise OSError(errno.EINVAL, "Invalid argument")


@pytest.mark.parametrize("first", ["read", "write"])
def test_where_only_a_small_read_is_direct_the_page_cache_is_used(
    tmp_path: Path, first: str
) -> None:
    path = make_file(tmp_path / "slab")
    slab = Picky(path, SLOTS, SLOT_BYTES)
    if not slab.direct:
        pytest.skip("the temporary directory has no direct I/O")
    if first == "read":
        slab.read(1, [aligned(SLOT_BYTES)])
    slab.write(1, [filled(SLOT_BYTES, 7)])
    back = aligned(SLOT_BYTES)
    slab.read(1, [back])
    assert (back == filled(SLOT_BYTES, 7)).all()
    assert not slab.direct
    slab.close()
    asked_for = Picky(path, SLOTS, SLOT_BYTES, direct=True)
    with pytest.raises(OSError, match="Invalid argument"):
        asked_for.read(1, [back])
    asked_for.close()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_sandbox_without_the_calls_for_several_buffers_is_no_hindrance(
    tmp_path: Path, call: str
) -> None:
    """It refuses the newer form of the call, which Python uses, or both."""
    path = make_file(tmp_path / "slab")

    def inside() -> None:
        for name in (f"{call}2", call):
            seccomp.refuse(name)
            slab = FileSlab(path, SLOTS, SLOT_BYTES)
            for _ in range(2):
                slab.write(1, [filled(PAGE_BYTES, 1), filled(3 * PAGE_BYTES, 2)])
                back = aligned(PAGE_BYTES), aligned(3 * PAGE_BYTES)
                slab.read(1, back)
                assert (back[0] == filled(PAGE_BYTES, 1)).all()
                assert (back[1] == filled(3 * PAGE_BYTES, 2)).all()
            slab.close()

    in_child(inside)


def test_what_was_synced_is_read_after_a_reopen(slab: FileSlab) -> None:
    slab.write(5, [filled(SLOT_BYTES, 5)])
    slab.sync()
    again = FileSlab(slab.path, SLOTS, SLOT_BYTES, direct=False)
    back = aligned(SLOT_BYTES)
    again.read(5, [back])
    assert (back == filled(SLOT_BYTES, 5)).all()
    again.close()


def test_closed_slab_refuses(slab: FileSlab) -> None:
    slab.close()
    slab.close()
    for call in (
        lambda: slab.read(0, [aligned(PAGE_BYTES)]),
        slab.sync,
        lambda: slab.read_headers(0, 1),
    ):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EBADF


class Gated(FileSlab):
    entered: threading.Event
    gate: threading.Event

    def _writev(self, views: Sequence[memoryview], offset: int) -> int:
        self.entered.set()
        self.gate.wait(30)
        return super()._writev(views, offset)


def test_close_leaves_the_descriptor_to_a_running_call(tmp_path: Path) -> None:
    path = make_file(tmp_path / "slab")
    slab = Gated(path, SLOTS, SLOT_BYTES)
    slab.entered = threading.Event()
    slab.gate = threading.Event()
    fd = slab._fd
    writer = threading.Thread(
        target=slab.write, args=(0, [filled(SLOT_BYTES, 6)])
    )
    writer.start()
    assert slab.entered.wait(30)
    slab.close()
    assert os.readlink(f"/proc/self/fd/{fd}") == str(path)
    slab.gate.set()
    writer.join(30)
    assert not os.path.exists(f"/proc/self/fd/{fd}") or os.readlink(
        f"/proc/self/fd/{fd}"
    ) != str(path)
    assert path.read_bytes()[:SLOT_BYTES] == filled(SLOT_BYTES, 6).tobytes()


def test_threads_read_what_they_wrote(slab: FileSlab) -> None:
    wrong: list[int] = []

    def work(slot: int) -> None:
        back = aligned(SLOT_BYTES)
        for turn in range(20):
            slab.write(slot, [filled(SLOT_BYTES, slot * 100 + turn)])
            slab.read(slot, [back])
            if not (back == filled(SLOT_BYTES, slot * 100 + turn)).all():
                wrong.append(slot)

    threads = [
        threading.Thread(target=work, args=(slot,)) for slot in range(SLOTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_adjacent_slots_are_read_together(slab: FileSlab) -> None:
    pages = [aligned(slab.slot_bytes) for _ in range(3)]
    for n, page in enumerate(pages):
        page[:] = n + 1
    slab.write(1, pages, 3)
    found = [aligned(slab.slot_bytes) for _ in range(3)]
    slab.read(1, found, 3)
    assert [page.tolist() for page in found] == [page.tolist() for page in pages]
    with pytest.raises(ValueError, match="outside"):
        slab.read(slab.slots - 2, found, 3)
