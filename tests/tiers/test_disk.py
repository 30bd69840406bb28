"""The disk tier (what every tier does is in tests/conformance)."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.metrics import Reason
from pagoda.ledger import Ledger, admin
from pagoda.ledger.clears_and_labels import read_labels
from pagoda.slab import FileSlab
from pagoda.testing import Fault
from pagoda.tiers import DiskTier, Done, disk
from pagoda.tiers.io_queue import ReadRequest, WriteRequest
from testbed.patience import Patience
from tests.children import in_child
from tests.ledger.support import gate_taken
from tests.tiers.tools import (
    LAYOUT,
    ROOT,
    SECONDS,
    STRIDE,
    check,
    chunks_of,
    ends,
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

WORKER = Path(__file__).with_name("worker.py")


def worker(*args: object) -> str:
    """Run a script in another process; return its output."""
    command = [sys.executable, "-m", "tests.tiers.worker", *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=90, check=True
    ).stdout


def test_a_find_behind_queued_writes_ends_at_its_own_deadline(
    tmp_path: Path,
) -> None:
    keys = keys_of(4)
    tier = open_disk(tmp_path)
    tier.deadline_seconds = 20.0
    with gate_taken(tier.ledger):
        saving = tier.store(chunks_of(keys[:2]), ROOT)
        patience = Patience(20.0)
        assert tier.match_prefix(keys, namespace=ROOT, deadline_seconds=0.05) == 2
        assert not patience.ended, patience.said()
    assert all(oks(saving))
    tier.close()


@pytest.mark.parametrize("direct", [None, False])
def test_restart_in_the_same_process(tmp_path: Path, direct: bool | None) -> None:
    keys = keys_of(12)
    tier = open_disk(tmp_path, direct=direct)
    store(tier, keys)
    tier.close()
    again = open_disk(tmp_path, direct=direct)
    assert again.match_prefix(keys) == 12
    for key in keys:
        assert right(again, key)
    check(again)
    again.close()


@pytest.mark.slow
def test_restart_by_other_processes(tmp_path: Path) -> None:
    assert worker("store", tmp_path, 32, 12).split() == ["12"]
    assert worker("read", tmp_path, 32, 12).split() == ["12"]
    tier = open_disk(tmp_path)
    for key in keys_of(12):
        assert right(tier, key)
    tier.close()


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("spare", [0, 1])
def test_any_buffer_will_do(
    tmp_path: Path, direct: bool | None, spare: int
) -> None:
    """Payloads and buffers that O_DIRECT cannot use are copied on the way."""
    tier, _ = open_faulty(tmp_path, direct=direct)
    keys = keys_of(6)
    sources, buffers = (
        [np.empty(LAYOUT.chunk_bytes + spare, np.uint8)[spare:] for _ in keys]
        for _ in range(2)
    )
    for source, key in zip(sources, keys, strict=True):
        source[:] = payload_of(key)[: LAYOUT.chunk_bytes]
    chunks = [
        chunk._replace(payload=source)
        for chunk, source in zip(chunks_of(keys), sources, strict=True)
    ]
    assert all(oks(tier.store(chunks, ROOT)))
    assert all(oks(tier.load(keys, buffers, namespace=ROOT)))
    for key, buffer in zip(keys, buffers, strict=True):
        assert is_right(key, buffer)
    tier.close()


def test_what_is_queued_is_found_and_read(tmp_path: Path) -> None:
    tier, slab = open_faulty(tmp_path)
    keys = keys_of(6)
    slab.fail_next("write", Fault.HANG)
    saving = tier.store(chunks_of(keys), ROOT)
    assert slab.hanging.wait(SECONDS)
    assert tier.match_prefix(keys) == 6
    for key in keys:
        assert tier.in_flight(key)
        assert tier.contains(key)
    buffers = [room() for _ in keys]
    loading = tier.load(keys, buffers, namespace=ROOT)
    slab.release()
    assert all(oks(loading))
    for key, buffer in zip(keys, buffers, strict=True):
        assert is_right(key, buffer)
    assert all(oks(saving))
    assert slab.calls["read"] == 0
    tier.close()


def test_a_read_of_a_queued_chunk_does_not_outlive_its_write(
    tmp_path: Path,
) -> None:
    """When a save has ended its payload belongs to the caller again, who fills it with another
    chunk.
    """
    tier, _ = open_faulty(tmp_path)
    (key,) = keys_of(1)
    write = WriteRequest(*chunks_of([key]), ROOT, 1)
    # it found the chunk in the queue ...
    read = ReadRequest(key, 0, ROOT, room(), write)
    assert all(oks(tier.store([write.chunk], ROOT)))
    write.future.set_result(Done(True))
    write.chunk.payload.fill(0xEE)
    tier._pool.queue.add_reads([read])  # ... and has its turn only now
    assert read.future.result(SECONDS).ok
    assert is_right(key, read.buffer)
    tier.close()


def test_what_is_queued_is_there_when_it_is_touched(tmp_path: Path) -> None:
    """Else the write-back would write it again."""
    tier, slab = open_faulty(tmp_path)
    keys = keys_of(4)
    store(tier, keys[:1])
    slab.fail_next("write", Fault.HANG)
    saving = tier.store(chunks_of(keys[1:3], 1), ROOT)
    assert slab.hanging.wait(SECONDS)
    assert tier.touch(keys, namespace=ROOT) == [True, True, True, False]
    slab.release()
    assert all(oks(saving))
    tier.close()


def test_what_is_queued_and_goes_stale_is_not_served(tmp_path: Path) -> None:
    tier, slab = open_faulty(tmp_path)
    valid = threading.Event()
    valid.set()
    first, second = keys_of(2)
    slab.fail_next("write", Fault.HANG)
    saving = tier.store(chunks_of([first]), ROOT)
    assert slab.hanging.wait(SECONDS)
    saving += tier.store(chunks_of([second], 1, still_valid=valid.is_set), ROOT)
    loading = tier.load([second], [room()], start=1, namespace=ROOT)
    assert tier.contains(second)
    valid.clear()
    assert not tier.contains(second)
    slab.release()
    assert ends(loading) == [Done(False, Reason.ABSENT)], "it never was in a slot"
    assert oks(saving) == [True, False]
    assert tier.stats()["drop_stale"] == 1
    check(tier)
    tier.close()


def test_a_mixed_run_of_stored_and_queued_is_one_run(tmp_path: Path) -> None:
    tier, slab = open_faulty(tmp_path)
    keys = keys_of(9)
    store(tier, keys[:3])
    store(tier, keys[5:7], 5)
    slab.fail_next("write", Fault.HANG)
    saving = tier.store(chunks_of(keys[3:5], 3), ROOT)
    assert slab.hanging.wait(SECONDS)
    assert tier.match_prefix(keys) == 7
    buffers = [room() for _ in keys]
    loading = tier.load(keys, buffers, namespace=ROOT)
    slab.release()
    assert oks(loading) == [True] * 7 + [False] * 2
    for key, buffer in zip(keys[:7], buffers, strict=False):
        assert is_right(key, buffer)
    assert all(oks(saving))
    tier.close()


def test_two_loads_of_one_chunk_read_it_once(tmp_path: Path) -> None:
    tier, slab = open_faulty(tmp_path, io_threads=2)
    (key,) = keys_of(1)
    store(tier, [key])
    slab.fail_next("read", Fault.HANG)
    buffers = [room(), room(), room()]
    loading = [
        tier.load([key], [buffer], namespace=ROOT)[0] for buffer in buffers
    ]
    assert slab.hanging.wait(SECONDS)
    followers = [
        len(leader.followers) for leader in tier._pool.queue._leaders.values()
    ]
    slab.release()
    assert followers == [2]
    assert all(oks(loading))
    for buffer in buffers:
        assert is_right(key, buffer)
    assert slab.calls["read"] == 1
    tier.close()


def test_reads_go_before_the_writes_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # each chunk in a call of its own, as those of 4 MiB are
    monkeypatch.setattr(disk, "_CALL_BYTES", 1)
    tier, slab = open_faulty(tmp_path, queue_chunks=16, slots=128)
    first, *others = keys_of(10)
    store(tier, [first])
    writes = slab.calls["write"]
    slab.fail_next("write", Fault.HANG)
    saving = tier.store(chunks_of(others, 1), ROOT)
    assert slab.hanging.wait(SECONDS)
    (loading,) = tier.load([first], [room()], namespace=ROOT)
    written: list[int] = []  # writes that had begun before the end of the read
    loading.add_done_callback(
        lambda _: written.append(slab.calls["write"] - writes)
    )
    slab.release()
    assert loading.result(SECONDS).ok
    assert all(oks(saving))
    assert written == [1]  # the hanging one
    tier.close()


def test_small_chunks_are_written_many_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one batch, so with two transactions, and to adjacent slots in one call: that is most of
    what they cost.
    """
    calls = list[int]()
    batches = list[int]()
    save = disk.DiskWorker.save
    move = FileSlab._writev

    def counted_save(
        self: disk.DiskWorker, writes: Sequence[WriteRequest]
    ) -> None:
        batches.append(len(writes))
        save(self, writes)

    def counted_move(
        self: FileSlab, views: Sequence[memoryview], offset: int
    ) -> int:
        calls.append(len(views))
        return move(self, views, offset)

    monkeypatch.setattr(disk.DiskWorker, "save", counted_save)
    monkeypatch.setattr(FileSlab, "_writev", counted_move)
    tier = open_disk(tmp_path, slots=512, io_threads=2, queue_chunks=16)
    keys = keys_of(12)
    store(tier, keys)
    assert batches == [12]
    assert calls == [24]
    for key in keys:
        assert right(tier, key)
    tier.close()


def test_neighbours_are_read_by_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one wake-up, and one question whether they are still there."""
    calls = list[int]()
    asked = list[int]()
    move = FileSlab._readv
    are_valid = Ledger.are_valid

    def counted_move(
        self: FileSlab, views: Sequence[memoryview], offset: int
    ) -> int:
        calls.append(len(views))
        return move(self, views, offset)

    def counted_question(
        self: Ledger, places: Sequence[tuple[int, int]]
    ) -> list[bool]:
        asked.append(len(places))
        return are_valid(self, places)

    tier = open_disk(tmp_path, slots=512, io_threads=2)
    keys = keys_of(12)
    store(tier, keys)
    monkeypatch.setattr(FileSlab, "_readv", counted_move)
    monkeypatch.setattr(Ledger, "are_valid", counted_question)
    buffers = [room() for _ in keys]
    # two cannot be used by the slab
    buffers[3] = np.empty(LAYOUT.chunk_bytes, np.uint8)
    buffers[7] = np.empty(LAYOUT.chunk_bytes, np.uint8)
    assert all(oks(tier.load(keys, buffers, namespace=ROOT)))
    assert all(map(is_right, keys, buffers))
    assert calls == [24]
    assert asked == [12]
    tier.close()


def test_a_run_of_reads_is_not_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_RUN_BYTES", 3 * LAYOUT.slot_bytes)
    tier = open_disk(tmp_path, slots=512, io_threads=2)
    assert tier._store.run_chunks == 3
    keys = keys_of(7)
    store(tier, keys)
    buffers = [room() for _ in keys]
    assert all(oks(tier.load(keys, buffers, namespace=ROOT)))
    assert all(map(is_right, keys, buffers))
    tier.close()


def test_several_reads_are_in_flight(tmp_path: Path) -> None:
    tier, slab = open_faulty(tmp_path, io_threads=4)
    keys = keys_of(8)
    store(tier, keys)
    slab.fail_next("read", Fault.HANG, times=8)
    loading = tier.load(keys, [room() for _ in keys], namespace=ROOT)
    patience = Patience(SECONDS)
    while slab.struck[Fault.HANG] < 4 and not patience.ended:
        time.sleep(0.005)
    assert slab.struck[Fault.HANG] == 4  # as many as there are threads
    slab.release()
    assert all(oks(loading))
    tier.close()


def test_a_full_queue_drops_the_newest_and_says_so(tmp_path: Path) -> None:
    tier, slab = open_faulty(tmp_path, queue_chunks=4)
    keys = keys_of(7)
    slab.fail_next("write", Fault.HANG)
    saving = tier.store(chunks_of(keys), ROOT)
    assert (
        tier.put(
            keys[6], payload_of(keys[6])[: LAYOUT.chunk_bytes], namespace=ROOT
        )
        is False
    )
    slab.release()
    assert (
        ends(saving)
        == [Done(True, None)] * 4 + [Done(False, Reason.QUEUE_FULL)] * 3
    )
    assert tier.stats()["drop_queue_full"] == 4
    assert tier.match_prefix(keys) == 4
    tier.close()


def test_a_chunk_that_is_being_written_is_not_written_twice(
    tmp_path: Path,
) -> None:
    """Both saves end when the one write does."""
    tier, slab = open_faulty(tmp_path)
    chunks = chunks_of(keys_of(1))
    slab.fail_next("write", Fault.HANG)
    first = tier.store(chunks, ROOT)
    second = tier.store(chunks, ROOT)
    assert not second[0].done()
    slab.release()
    assert ends([*first, *second]) == [Done(True, None)] * 2
    assert slab.calls["write"] == 1
    tier.close()


def test_more_reads_than_may_wait_end_too(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    keys = keys_of(1)
    store(tier, keys)
    most = 4096
    wanted = keys * (most + 2)
    buffers = [room()] * len(wanted)
    loading = tier.load(wanted, buffers, start=None, namespace=ROOT)
    assert ends(loading)[most - 1 :] == [
        Done(True, None),
        *[Done(False, Reason.QUEUE_FULL)] * 2,
    ]
    tier.close()


@pytest.mark.parametrize("odd", ["begins within a page", "is short", "has gaps"])
def test_one_buffer_that_the_slab_cannot_use(tmp_path: Path, odd: str) -> None:
    """It is of one batch with buffers that the slab can use."""
    size = LAYOUT.slot_bytes
    if odd == "has gaps":
        third = np.zeros(2 * size, np.uint8)[::2]
    elif odd == "is short":
        third = room()[: LAYOUT.chunk_bytes]
    else:
        third = np.zeros(2 * size, np.uint8)[1 : size + 1]
    tier = open_disk(tmp_path, slots=512)
    keys = keys_of(4)
    chunks = chunks_of(keys)
    third[:] = chunks[2].payload[: len(third)]
    chunks[2] = chunks[2]._replace(payload=third)
    assert all(oks(tier.store(chunks, ROOT)))
    third[:] = 0
    buffers = [room(), room(), third, room()]
    assert all(oks(tier.load(keys, buffers, namespace=ROOT)))
    for key, buffer in zip(keys, buffers, strict=True):
        assert is_right(key, buffer)
    tier.close()


def test_labels_are_written_with_the_first_chunks(tmp_path: Path) -> None:
    """A process that is killed leaves them to those who list what is stored, and to a rebuild."""
    tier = open_disk(tmp_path)
    store(tier, keys_of(1))
    patience = Patience(10)
    while ROOT not in read_labels(tier.ledger.directory):
        assert not patience.ended, "no label was written"
        time.sleep(0.01)
    tier.close()


def test_put_many_does_not_count_what_a_later_chunk_evicted(
    tmp_path: Path,
) -> None:
    tier = open_disk(tmp_path, slots=8)
    keys = [keys_of(1, chain=n)[0] for n in range(20)]
    chunks = [chunk for key in keys for chunk in chunks_of([key])]
    there = tier.put_many(iter(chunks), namespace=ROOT)
    assert there == sum(map(tier.contains, keys))
    assert 0 < there <= 8
    tier.close()


def test_a_put_that_does_not_wait_says_whether_it_was_queued(
    tmp_path: Path,
) -> None:
    tier, slab = open_faulty(tmp_path, queue_chunks=1)
    first, second = keys_of(2)
    slab.fail_next("write", Fault.HANG)
    payload = payload_of(first)[: LAYOUT.chunk_bytes]
    assert tier.put(first, payload, namespace=ROOT, block=False) is True
    assert (
        tier.put(second, payload, namespace=ROOT, position=1, block=False)
        is False
    )
    assert tier.stats()["drop_queue_full"] == 1
    slab.release()
    assert tier.flush(SECONDS)
    assert tier.contains(first)
    assert not tier.contains(second)
    tier.close()


def test_put_many_waits_for_room_in_the_queue(tmp_path: Path) -> None:
    tier, slab = open_faulty(tmp_path, queue_chunks=2)
    slab.fail_next("write", Fault.DELAY, times=3)
    keys = keys_of(8)
    assert tier.put_many(iter(chunks_of(keys)), namespace=ROOT) == 8
    tier.close()


def test_flush_waits_for_all(tmp_path: Path) -> None:
    tier, slab = open_faulty(tmp_path)
    slab.fail_next("write", Fault.HANG)
    saving = tier.store(chunks_of(keys_of(3)), ROOT)
    assert not tier.flush(0.05)
    slab.release()
    assert tier.flush(SECONDS)
    for future in saving:
        assert future.done()
    tier.close()


def test_eviction_keeps_the_newest_and_the_limit(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, slots=16)
    for chain in range(1, 8):
        store(tier, keys_of(8, chain))
    assert tier.match_prefix(keys_of(8, 7)) == 8
    assert tier.match_prefix(keys_of(8, 1)) == 0
    gauges = check(tier)
    assert gauges["ready"] <= gauges["slots"] == 16
    used = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("slab"))
    assert used <= 16 * STRIDE + 65536
    tier.close()


def test_a_run_longer_than_the_tier_keeps_its_head(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, slots=40)
    keys = keys_of(48)
    for _ in range(2):
        ends(tier.store(chunks_of(keys), ROOT))
        assert tier.match_prefix(keys) == 40
    check(tier)
    tier.close()


def test_durable_syncs_before_it_commits(tmp_path: Path) -> None:
    tier, slab = open_faulty(tmp_path, durable=True)
    slab.fail_next("sync", Fault.HANG)
    keys = keys_of(2)
    saving = tier.store(chunks_of(keys), ROOT)
    assert slab.hanging.wait(SECONDS)
    assert len(tier.ledger.match_prefix(keys).slots) == 0
    slab.release()
    assert all(oks(saving))
    assert slab.calls["sync"] >= 1
    tier.close()


def test_durable_stores_nothing_if_the_sync_fails(tmp_path: Path) -> None:
    tier, slab = open_faulty(tmp_path, durable=True)
    slab.fail_next("sync", Fault.EIO)
    keys = keys_of(1)
    assert ends(tier.store(chunks_of(keys), ROOT)) == [
        Done(False, Reason.IO_ERROR)
    ]
    assert tier.match_prefix(keys) == 0
    check(tier)
    tier.close()


def test_durable_syncs_nothing_if_nothing_was_written(tmp_path: Path) -> None:
    tier, slab = open_faulty(tmp_path, durable=True)
    stale = chunks_of(keys_of(2), still_valid=lambda: False)
    assert ends(tier.store(stale, ROOT)) == [Done(False, Reason.STALE)] * 2
    assert slab.calls["sync"] == 0
    tier.close()


def test_a_removed_chunk_that_was_being_written_does_not_appear(
    tmp_path: Path,
) -> None:
    tier, slab = open_faulty(tmp_path)
    keys = keys_of(1)
    slab.fail_next("write", Fault.HANG)
    saving = tier.store(chunks_of(keys), ROOT)
    assert slab.hanging.wait(SECONDS)

    def release_once_removed() -> None:
        patience = Patience(SECONDS)
        while tier.contains(keys[0]) and not patience.ended:
            time.sleep(0.005)
        slab.release()

    threading.Thread(target=release_once_removed, daemon=True).start()
    assert tier.remove(keys[0]) is True
    assert ends(saving) == [Done(False, Reason.REMOVED)]
    assert not tier.contains(keys[0])
    store(tier, keys)
    tier.close()


def test_remove_waits_for_a_write_that_has_begun(tmp_path: Path) -> None:
    """No I/O remains after the return: the caller may reuse the bytes."""
    tier, slab = open_faulty(tmp_path)
    keys = keys_of(1)
    slab.fail_next("write", Fault.HANG)
    saving = tier.store(chunks_of(keys), ROOT)
    assert slab.hanging.wait(SECONDS)
    seen: list[tuple[bool, bool]] = []

    def remove() -> None:
        removed = tier.remove(keys[0])
        seen.append((removed, tier.in_flight(keys[0])))

    removing = threading.Thread(target=remove, daemon=True)
    removing.start()
    removing.join(0.3)
    assert not seen, "it returned in the middle of the write"
    slab.release()
    removing.join(SECONDS)
    assert seen == [(True, False)]
    assert ends(saving) == [Done(False, Reason.REMOVED)]
    tier.close()


@pytest.mark.parametrize("why", [Reason.REMOVED, Reason.CLEARED])
def test_a_chunk_that_is_removed_while_it_is_being_committed_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: Reason
) -> None:
    tier, _ = open_faulty(tmp_path)
    keys = keys_of(2)
    commit = tier.ledger.commit

    def commit_and_lose(*given: object, **more: object) -> list[bool]:
        kept = commit(*given, **more)  # type: ignore[arg-type]
        # like a `remove` or `clear` that cannot wait longer
        tier._cancel_writes(why, key=keys[1])
        return kept

    monkeypatch.setattr(tier.ledger, "commit", commit_and_lose)
    assert ends(tier.store(chunks_of(keys), ROOT)) == [
        Done(True, None),
        Done(False, why),
    ]
    assert tier.contains(keys[0])
    assert not tier.contains(keys[1])
    assert tier.ledger.explain_miss(keys[1]).reason is why
    assert admin.gauges(tier.ledger)["ready"] == 1
    tier.close()


def test_a_cleared_namespace_stays_clear_of_what_was_being_written(
    tmp_path: Path,
) -> None:
    tier, slab = open_faulty(tmp_path)
    keys = keys_of(5)
    store(tier, keys[:2])
    slab.fail_next("write", Fault.HANG)
    saving = tier.store(chunks_of(keys[2:], 2), ROOT)
    assert slab.hanging.wait(SECONDS)
    assert tier.clear(ROOT) == 5
    slab.release()
    assert oks(saving) == [False] * 3
    assert tier.match_prefix(keys) == 0
    check(tier)
    store(tier, keys)
    for key in keys:
        assert right(tier, key)
    tier.close()


@pytest.mark.parametrize("call", ["put", "put_many"])
def test_a_copy_that_waits_to_be_written_is_dropped_when_another_process_clears(
    tmp_path: Path, call: str
) -> None:
    tier, slab = open_faulty(tmp_path)
    written, waiting = chunks_of(keys_of(2))
    slab.fail_next("write", Fault.HANG)
    assert tier.put(
        written.key,
        written.payload[: LAYOUT.chunk_bytes],
        namespace=ROOT,
        block=False,
    )
    assert slab.hanging.wait(SECONDS)
    counts = list[int]()
    thread = threading.Thread(
        target=lambda: counts.append(tier.put_many([waiting], namespace=ROOT)),
        daemon=True,
    )
    if call == "put":
        assert tier.put(
            waiting.key,
            waiting.payload[: LAYOUT.chunk_bytes],
            namespace=ROOT,
            position=1,
            block=False,
        )
    else:
        thread.start()
        patience = Patience(SECONDS)
        while not tier.in_flight(waiting.key) and not patience.ended:
            time.sleep(0.005)
    in_child(lambda: admin.clear(tier.ledger))
    slab.release()
    assert tier.flush(SECONDS)
    if call == "put_many":
        thread.join(SECONDS)
        assert counts == [0]
    assert tier.match_prefix([written.key, waiting.key]) == 0
    assert not tier.contains(waiting.key)
    assert tier.stats()["drop_stale"] == 2  # also the one that was being written
    assert tier.put(
        waiting.key,
        waiting.payload[: LAYOUT.chunk_bytes],
        namespace=ROOT,
        position=1,
    )
    check(tier)
    tier.close()


def test_chunks_of_another_process_are_busy_while_it_writes_them(
    tmp_path: Path,
) -> None:
    """A second tier over the same ledger: the reservation belongs to the other tier."""
    tier, slab = open_faulty(tmp_path)
    other, _ = open_faulty(tmp_path)
    keys = keys_of(1)
    slab.fail_next("write", Fault.HANG)
    saving = tier.store(chunks_of(keys), ROOT)
    assert slab.hanging.wait(SECONDS)
    assert ends(other.store(chunks_of(keys), ROOT)) == [Done(False, Reason.BUSY)]
    slab.release()
    assert all(oks(saving))
    assert all(oks(other.store(chunks_of(keys), ROOT)))
    tier.close()
    other.close()


def test_wrong_numbers_are_value_errors(tmp_path: Path) -> None:
    expected = "a disk tier of 100 bytes has no room .* 16.0 KiB: ask for a larger disk_size"
    with pytest.raises(ValueError, match=expected):
        DiskTier.open(LAYOUT, tmp_path, 100)
    with pytest.raises(ValueError, match="no room for one chunk"):
        DiskTier.open(LAYOUT, tmp_path, STRIDE - 1)
    with pytest.raises(ValueError, match="io_threads"):
        open_disk(tmp_path, io_threads=0)


def test_what_is_stored_is_ok_and_takes_no_place_in_the_queue(
    tmp_path: Path,
) -> None:
    tier, slab = open_faulty(tmp_path, queue_chunks=8)
    keys = keys_of(24)
    for begin in range(0, 16, 8):
        assert all(
            oks(tier.store(chunks_of(keys[begin : begin + 8], begin), ROOT))
        )
    slab.fail_next("write", Fault.HANG)
    futures = tier.store(chunks_of(keys), ROOT)
    for future in futures[:16]:
        assert future.done()
    slab.release()
    assert all(oks(futures))
    assert tier.stats()["drop_queue_full"] == 0
    tier.close()


def test_a_clear_that_a_signal_ends_leaves_no_write_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, slab = open_faulty(tmp_path, queue_chunks=8)
    keys = keys_of(6)
    queue = tier._pool.queue
    slab.fail_next("write", Fault.HANG)
    futures = tier.store(chunks_of(keys[:1]), ROOT)
    assert slab.hanging.wait(SECONDS)
    futures += tier.store(chunks_of(keys[1:], 1), ROOT)
    finish = queue.finish_writes
    times = iter(range(10))

    def interrupted(ends: Sequence[tuple[WriteRequest, Done]]) -> None:
        if next(times) in (1, 2):  # as if a signal came there
            raise KeyboardInterrupt
        finish(ends)

    monkeypatch.setattr(queue, "finish_writes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tier.clear()
    monkeypatch.undo()
    for future in futures[1:]:
        assert future.done()
    slab.release()
    assert tier.flush(SECONDS)
    assert not any(oks(futures))
    assert all(oks(tier.store(chunks_of(keys), ROOT)))
    tier.close()


def test_get_counts_as_a_use(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    keys = keys_of(3)
    store(tier, keys)
    assert tier.contains(keys[0])
    assert tier.get(keys[1], namespace=ROOT) is not None
    assert {row.key: row.hits for row in admin.list_chunks(tier.ledger)} == dict(
        zip(keys, (0, 1, 0), strict=True)
    )
    tier.close()
