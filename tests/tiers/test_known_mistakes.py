"""Mistakes that caches of this kind have made, each pinned here for the local tiers.

1. A sweeper that tests an event object instead of its state: staging memory leaks, then a spin
  hangs queue and close.
3. Exceptions of background saves that nobody reads: the index says present, the file is partial.
4. No publishing step, no checksum, no recovery; orphan bytes that count against no limit.
5. Evicting a key whose save is in flight; accounting that drifts until every write is refused.
6. Unbounded queues; silent drops counted as stored.
7. Threads started before the fields they use exist; a close that waits for a disk that hangs.
15. A write that timed out while its slot was reassigned: wrong bytes under a good hash.
18. Short reads and writes reported as success; files truncated at open; one file a chunk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from pagoda.base.errors import StoreError
from pagoda.base.metrics import Reason
from pagoda.ledger import Ledger
from pagoda.slab.file import FileSlab
from pagoda.testing import Fault
from pagoda.tiers import DiskTier, Done, HostTier
from pagoda.tiers.base import Bytes
from testbed.patience import Patience, wait_until
from tests.tiers.tools import (
    LAYOUT,
    ROOT,
    SECONDS,
    STRIDE,
    check,
    chunks_of,
    disk_spec,
    ends,
    io_threads,
    is_right,
    keys_of,
    oks,
    open_disk,
    open_faulty,
    payload_of,
    right,
    room,
    store,
)


def test_mistake_1_an_idle_tier_sleeps_and_close_does_not_wait_for_it(
    tmp_path: Path,
) -> None:
    tier = open_disk(tmp_path)
    store(tier, keys_of(4))
    assert tier.wait_ready(SECONDS)
    used: list[float] = []
    while not used or (
        used[-1] >= 0.1 and len(used) < 20
    ):  # threads of an earlier test may be busy for a while
        before = time.process_time(), time.monotonic()
        time.sleep(0.4)
        used.append(
            (time.process_time() - before[0]) / (time.monotonic() - before[1])
        )
    assert used[-1] < 0.1, used  # no thread spins
    patience = Patience(25)
    tier.close(timeout=60.0)
    assert not patience.ended, patience.said()


def test_mistake_1_staging_memory_does_not_grow(tmp_path: Path) -> None:
    """Copies of payloads that O_DIRECT cannot use are bounded by the queue, and released on every
    path.
    """
    tier, slab = open_faulty(tmp_path, queue_chunks=4)
    slab.fail_next("write", Fault.HANG)
    accepted = [
        tier.put(
            key,
            payload_of(key)[: LAYOUT.chunk_bytes],
            namespace=ROOT,
            position=n,
            block=False,
        )
        for n, key in enumerate(keys_of(20))
    ]
    assert accepted == [True] * 4 + [False] * 16
    slab.release()
    assert tier.flush(SECONDS)
    assert tier.stats()["queued_writes"] == 0
    tier.close()


class _Broken(FileSlab):
    """Raises an exception that no slab should raise."""

    def write(self, slot: int, buffers: Sequence[Bytes]) -> None:
        raise RuntimeError("not even an OSError")

    def read(self, slot: int, buffers: Sequence[Bytes]) -> None:
        raise RuntimeError("not even an OSError")


def test_mistake_3_an_exception_in_the_background_is_the_end_of_its_future(
    tmp_path: Path,
) -> None:
    ledger = Ledger.open(disk_spec(tmp_path, 32))
    tier = DiskTier(
        LAYOUT, ledger, _Broken(ledger.slab_path, 32, STRIDE), io_threads=1
    )
    keys = keys_of(3)
    for _ in range(3):  # and the thread continues
        assert (
            ends(tier.store(chunks_of(keys), ROOT))
            == [Done(False, Reason.IO_ERROR)] * 3
        )
    assert tier.match_prefix(keys) == 0
    assert tier.stats()["drop_io_error"] == 9
    assert tier.stats()["stored_chunks"] == 0
    assert check(tier)["free"] == 32
    good = open_disk(tmp_path)
    store(good, keys)
    assert (
        ends(tier.load(keys, [room() for _ in keys], namespace=ROOT))
        == [Done(False, Reason.IO_ERROR)] * 3
    )
    tier.close()
    good.close()


def test_mistake_4_a_torn_write_is_neither_found_nor_counted_against_the_room(
    tmp_path: Path,
) -> None:
    tier, slab = open_faulty(tmp_path, slots=16)
    slab.fail_next("write", Fault.TORN, times=3)
    assert not any(oks(tier.store(chunks_of(keys_of(2)), ROOT)))
    tier.close()
    again = open_disk(tmp_path, slots=16)
    assert again.match_prefix(keys_of(2)) == 0
    assert check(again)["free"] == 16
    store(again, keys_of(16, chain=1))
    for key in keys_of(16, chain=1):
        assert right(again, key)
    assert sorted(
        path.name
        for path in tmp_path.rglob("*")
        if path.is_file() and path.name.startswith("slab")
    ) == ["slab"]
    again.close()


def test_mistake_5_a_slot_that_is_being_written_is_nobodys_victim(
    tmp_path: Path,
) -> None:
    tier, slab = open_faulty(tmp_path, slots=16)
    other = open_disk(tmp_path, slots=16)
    (key,) = keys_of(1)
    slab.fail_next("write", Fault.HANG)
    saving = tier.store(chunks_of([key]), ROOT)
    assert slab.hanging.wait(SECONDS)
    for chain in range(1, 6):
        store(other, keys_of(12, chain))
    slab.release()
    assert all(oks(saving))
    assert right(tier, key)
    for each in keys_of(12, 5):
        assert right(other, each)
    tier.close()
    other.close()


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_mistake_5_accounting_does_not_drift(
    tmp_path: Path, shm_root: Path, kind: str
) -> None:
    tier: HostTier | DiskTier
    if kind == "host":
        # the default policy refuses newcomers on a machine so busy that a turn takes seconds
        tier = HostTier.open(
            LAYOUT, shm_root, 16 * LAYOUT.slot_bytes, policy="lru"
        )
    else:
        tier = open_disk(tmp_path, slots=16)
    for turn in range(30):
        keys = keys_of(6, chain=1 + turn % 5)
        for _ in range(2):  # stored again
            tier.put(
                keys[0], payload_of(keys[0])[: LAYOUT.chunk_bytes], namespace=ROOT
            )
        store(tier, keys)
        # too large
        tier.put(keys[1], payload_of(keys[1]).repeat(2), namespace=ROOT)
        # given up
        ends(
            tier.store(
                chunks_of(keys_of(1, chain=99), still_valid=lambda: False), ROOT
            )
        )
        tier.remove(keys[turn % 6])
        tier.remove(keys[turn % 6])
        gauges = check(tier)
        assert gauges["free"] + gauges["ready"] == 16
    tier.clear()
    assert check(tier)["free"] == 16
    tier.close()


def test_mistake_6_what_is_dropped_is_never_counted_as_stored(
    tmp_path: Path,
) -> None:
    tier, slab = open_faulty(tmp_path, slots=128, queue_chunks=8)
    slab.fail_next("write", Fault.HANG)
    slab.fail_next("write", Fault.EIO, times=2)
    keys = keys_of(40)
    saving = tier.store(chunks_of(keys), ROOT)
    slab.release()
    done = ends(saving)
    stored = [key for key, end in zip(keys, done, strict=True) if end.ok]
    stats = tier.stats()
    assert len(stored) == 6
    assert stats["stored_chunks"] == 6
    assert stats["stored_bytes"] == 6 * LAYOUT.chunk_bytes
    assert stats["drop_queue_full"] == 32
    assert stats["drop_io_error"] == 2
    assert [tier.contains(key) for key in keys] == [key in stored for key in keys]
    tier.close()


def test_mistake_7_a_tier_that_cannot_be_opened_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    store_path = tmp_path / LAYOUT.fingerprint
    store_path.parent.mkdir(exist_ok=True)
    store_path.write_bytes(b"in the way")
    before = threading.enumerate()
    with pytest.raises(StoreError):
        open_disk(tmp_path)
    # nobody waits for some threads, which were only told to end
    wait_until(lambda: not io_threads(before))
    store_path.unlink()
    tier = open_disk(tmp_path)
    store(tier, keys_of(1))
    tier.close()


@pytest.mark.slow
def test_mistake_7_threads_find_all_fields_however_early_they_run(
    tmp_path: Path,
) -> None:
    for turn in range(20):
        tier = open_disk(tmp_path, io_threads=4)
        keys = keys_of(2, chain=turn)
        assert all(oks(tier.store(chunks_of(keys), ROOT)))
        tier.close()


def test_mistake_7_close_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path,
) -> None:
    tier, slab = open_faulty(tmp_path)
    slab.fail_next("write", Fault.HANG)
    tier.store(chunks_of(keys_of(3)), ROOT)
    assert slab.hanging.wait(SECONDS)
    patience = Patience(30)  # the write hangs for 60 s
    tier.close(timeout=0.3)
    assert not patience.ended, patience.said()
    slab.release()


def test_mistake_15_a_write_past_its_deadline_keeps_its_slot(
    tmp_path: Path,
) -> None:
    """Otherwise its bytes would be written over the next chunk in the slot."""
    tier, slab = open_faulty(tmp_path, slots=16, deadline_seconds=0.2)
    other = open_disk(tmp_path, slots=16)
    (late,) = keys_of(1)
    slab.fail_next("write", Fault.HANG)
    assert (
        tier.put(late, payload_of(late)[: LAYOUT.chunk_bytes], namespace=ROOT)
        is False
    )
    assert slab.hanging.wait(SECONDS)
    keys = keys_of(16, chain=1)
    oks(other.store(chunks_of(keys), ROOT))
    # a late head may have evicted a stored tail
    stored = [key for key in keys if other.contains(key)]
    assert len(stored) == 15  # one slot cannot be reserved
    slab.release()
    assert tier.flush(SECONDS)
    for key in stored:
        assert right(other, key)
    assert right(tier, late) in (True, False)
    check(tier)
    tier.close()
    other.close()


def test_mistake_18_short_io_is_never_a_success(tmp_path: Path) -> None:
    tier, slab = open_faulty(tmp_path)
    keys = keys_of(2)
    slab.fail_next("write", Fault.TORN)
    assert oks(tier.store(chunks_of(keys), ROOT)) == [False, True]
    slab.fail_next("read", Fault.TORN)
    buffer = room()
    assert oks(tier.load(keys[1:], [buffer], start=1, namespace=ROOT)) == [False]
    store(tier, keys)
    slab.fail_next("read", Fault.SHORT)
    assert oks(tier.load(keys[:1], [buffer], namespace=ROOT)) == [True]
    assert is_right(keys[0], buffer)
    tier.close()


def test_mistake_18_opening_truncates_nothing(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    store(tier, keys_of(8))
    path = tier.ledger.slab_path
    size = tier.ledger.slab_path.stat().st_size
    second = open_disk(tmp_path)
    assert path.stat().st_size == size
    tier.close()
    second.close()
    again = open_disk(tmp_path)
    assert path.stat().st_size == size
    for key in keys_of(8):
        assert right(again, key)
    again.close()


def test_mistake_18_a_truncated_slab_is_never_served_from(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    store(tier, keys_of(8))
    path = tier.ledger.slab_path
    size = tier.ledger.slab_path.stat().st_size
    tier.close()
    with path.open("r+b") as file:
        # in the middle of the fifth slot
        file.truncate(size * 9 // (2 * tier.ledger.slots))
    again = open_disk(tmp_path)
    assert again.wait_ready(SECONDS)
    assert sum(right(again, key) for key in keys_of(8)) == 4
    store(again, keys_of(8))
    again.close()


def test_mistake_18_the_number_of_files_does_not_grow(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, slots=64)
    before = sum(1 for _ in tmp_path.rglob("*"))
    for chain in range(1, 9):
        store(tier, keys_of(16, chain))
    assert sum(1 for _ in tmp_path.rglob("*")) <= before + 1
    tier.close()
