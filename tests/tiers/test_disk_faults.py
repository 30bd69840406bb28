"""The disk tier on a disk that fails: a miss or a drop with its reason, never wrong bytes, no
leaks.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from pagoda import codec
from pagoda.base.metrics import Reason
from pagoda.codec import HEADER_BYTES
from pagoda.testing import FakeClock, Fault
from pagoda.tiers import DiskTier, Done
from tests.children import child, wait
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
    right,
    room,
    store,
)


@pytest.fixture(params=[None, False], ids=["direct", "buffered"])
def direct(request: pytest.FixtureRequest) -> bool | None:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("fault", [Fault.SHORT, Fault.DELAY])
def test_short_and_late_io_is_finished(
    tmp_path: Path, fault: Fault, direct: bool | None
) -> None:
    tier, slab = open_faulty(tmp_path, direct=direct)
    keys = keys_of(3)
    slab.fail_next("write", fault, times=3)
    store(tier, keys)
    slab.fail_next("read", fault, times=3)
    for key in keys:
        assert right(tier, key)
    assert slab.struck[fault] == 6
    tier.close()


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.ENOSPC, Fault.TORN])
def test_a_write_that_fails_is_not_stored(
    tmp_path: Path, fault: Fault, direct: bool | None
) -> None:
    tier, slab = open_faulty(tmp_path, direct=direct)
    keys = keys_of(3)
    slab.fail_next("write", fault, skip=1)
    assert ends(tier.store(chunks_of(keys), ROOT)) == [
        Done(True, None),
        Done(False, Reason.IO_ERROR),
        Done(True, None),
    ]
    assert tier.match_prefix(keys) == 1
    assert not right(tier, keys[1])
    assert tier.stats()["drop_io_error"] == 1
    assert tier.stats()["stored_chunks"] == 2
    assert check(tier)["free"] == 30
    store(tier, keys)
    for key in keys:
        assert right(tier, key)
    tier.close()


@pytest.mark.parametrize("fault", [Fault.BIT_FLIP, Fault.LOST])
def test_a_write_that_lies_is_found_out_when_it_is_read(
    tmp_path: Path, fault: Fault, direct: bool | None
) -> None:
    tier, slab = open_faulty(tmp_path, direct=direct)
    keys = keys_of(1)
    slab.fail_next(
        "write", fault, at=HEADER_BYTES + 77 if fault is Fault.BIT_FLIP else None
    )
    store(tier, keys)
    assert ends(tier.load(keys, [room()], namespace=ROOT)) == [
        Done(False, Reason.FAILED_CHECK)
    ]
    assert not tier.contains(keys[0])
    assert tier.stats()["failed_checks"] == 1
    assert tier.stats()["miss_failed_check"] == 1
    assert check(tier)["free"] == 32
    tier.close()


@pytest.mark.parametrize(
    "at",
    [
        0,
        100,
        HEADER_BYTES - 1,
        HEADER_BYTES,
        HEADER_BYTES + LAYOUT.chunk_bytes - 1,
    ],
)
def test_one_flipped_bit_anywhere_is_a_miss(tmp_path: Path, at: int) -> None:
    tier, slab = open_faulty(tmp_path)
    keys = keys_of(1)
    store(tier, keys)
    slab.fail_next("read", Fault.BIT_FLIP, at=at)
    assert ends(tier.load(keys, [room()], namespace=ROOT)) == [
        Done(False, Reason.FAILED_CHECK)
    ]
    assert tier.match_prefix(keys) == 0
    tier.close()


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.TORN])
def test_a_read_that_fails_is_a_miss_and_the_entry_goes(
    tmp_path: Path, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    tier, slab = open_faulty(tmp_path)
    keys = keys_of(2)
    store(tier, keys)
    match = tier.ledger.match_prefix(keys)
    slab.fail_next("read", fault)
    assert ends(tier.load(keys, [room(), room()], namespace=ROOT)) == [
        Done(False, Reason.IO_ERROR),
        Done(True, None),
    ]
    assert not tier.contains(keys[0])
    assert tier.stats()["miss_io_error"] == 1
    # the removal is published like any other
    places = zip(match.slots.tolist(), match.generations.tolist(), strict=True)
    assert tier.ledger.are_published(list(places)) == [False, True]
    assert tier.ledger.explain_miss(keys[0]).reason is Reason.FAILED_CHECK
    assert "ValueError" not in caplog.text
    check(tier)
    tier.close()


def test_a_damaged_chunk_fails_alone_among_its_neighbours(
    tmp_path: Path,
) -> None:
    """Each chunk of a run is verified by itself: its header, its checksum and its generation."""
    tier = open_disk(tmp_path, slots=512, direct=False)
    keys = keys_of(8)
    store(tier, keys)
    match = tier.ledger.match_prefix(keys)
    slots = match.slots.tolist()
    assert slots == list(range(slots[0], slots[0] + 8))
    file = slot_file(tier)
    file[slots[1], HEADER_BYTES + 77] ^= 1  # its payload
    file[slots[3]] = file[slots[2]]  # its neighbour's chunk
    file[slots[5], 100] ^= 1  # its header
    buffers = [room() for _ in keys]
    done = ends(tier.load(keys, buffers, namespace=ROOT))
    failed = Done(False, Reason.FAILED_CHECK)
    assert done == [failed if n in (1, 3, 5) else Done(True) for n in range(8)]
    for n in (0, 2, 4, 6, 7):
        assert is_right(keys[n], buffers[n])
    assert [tier.contains(key) for key in keys] == [one.ok for one in done]
    assert tier.stats()["failed_checks"] == 3
    check(tier)
    tier.close()


def test_neighbours_of_a_bad_sector_are_read(tmp_path: Path) -> None:
    tier, slab = open_faulty(tmp_path, slots=512)
    keys = keys_of(8)
    store(tier, keys)
    slab.fail_next("read", Fault.EIO, skip=3)
    buffers = [room() for _ in keys]
    done = ends(tier.load(keys, buffers, namespace=ROOT))
    assert done == [
        Done(False, Reason.IO_ERROR) if n == 3 else Done(True) for n in range(8)
    ]
    for n in range(8):
        if n != 3:
            assert is_right(keys[n], buffers[n])
    assert tier.stats()["miss_io_error"] == 1
    check(tier)
    tier.close()


@pytest.mark.parametrize("what", ["clear", "remove", "reuse"])
def test_what_goes_while_a_run_is_read_is_not_served(
    tmp_path: Path, what: str
) -> None:
    """The tables are asked after the last chunk of the run was read."""
    tier, slab = open_faulty(tmp_path, slots=64, io_threads=2)
    assert tier._store.run_chunks >= 4
    keys = keys_of(4)
    store(tier, keys)
    # the last read of the run; the chunks before it have been read
    slab.fail_next("read", Fault.HANG, skip=3)
    loading = tier.load(keys, [room() for _ in keys], namespace=ROOT)
    assert slab.hanging.wait(SECONDS)
    if what == "clear":
        tier.clear(ROOT)
    else:
        assert tier.remove(keys[1])
    if what == "reuse":
        store(tier, keys_of(61, chain=5))
    slab.release()
    done = [one.ok for one in ends(loading)]
    assert done == [what != "clear" and n != 1 for n in range(4)]
    assert tier.stats()["failed_checks"] == 0
    tier.close()


def test_a_clear_while_a_batch_is_written_is_heeded(tmp_path: Path) -> None:
    """What waits in buffers is asked for together: before, after the checksums, after the write."""
    tier, slab = open_faulty(tmp_path, slots=512)
    keys = keys_of(6)
    for asked_before in range(4):
        answers = iter([True] * asked_before + [False])
        writes = slab.calls["write"]
        saving = tier.store(
            chunks_of(keys, still_valid=lambda a=answers: next(a)),  # type: ignore[misc]
            ROOT,
        )
        if asked_before == 3:
            assert all(oks(saving))  # the commit has decided
            break
        assert ends(saving) == [Done(False, Reason.STALE)] * 6
        assert slab.calls["write"] == writes + 6 * (asked_before == 2)
        assert tier.match_prefix(keys) == 0
        assert check(tier)["free"] == tier.ledger.slots
    tier.close()


def test_trouble_is_one_log_line_not_one_a_chunk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier, slab = open_faulty(tmp_path)
    slab.fail_next("write", Fault.EIO, times=3)
    with caplog.at_level(logging.WARNING, "pagoda.tiers"):
        assert not any(oks(tier.store(chunks_of(keys_of(3)), ROOT)))
    assert (
        len(
            [
                record
                for record in caplog.records
                if record.name == "pagoda.tiers.disk"
            ]
        )
        == 1
    )
    assert "io_error" in caplog.text
    tier.close()


def test_a_source_that_goes_between_checksum_and_write(tmp_path: Path) -> None:
    tier, slab = open_faulty(tmp_path)
    keys = keys_of(1)
    answers = iter([True, False])  # before the reservation, after the checksum
    assert ends(
        tier.store(chunks_of(keys, still_valid=lambda: next(answers)), ROOT)
    ) == [Done(False, Reason.STALE)]
    assert slab.calls["write"] == 0
    assert not tier.contains(keys[0])
    check(tier)
    tier.close()


def test_a_source_that_goes_during_the_write(tmp_path: Path) -> None:
    tier, slab = open_faulty(tmp_path)
    keys = keys_of(1)
    answers = iter([True, True, False])
    assert ends(
        tier.store(chunks_of(keys, still_valid=lambda: next(answers)), ROOT)
    ) == [Done(False, Reason.STALE)]
    assert slab.calls["write"] == 1
    assert not tier.contains(keys[0])
    assert check(tier)["free"] == 32
    tier.close()


def test_a_source_that_raises_is_a_drop(tmp_path: Path) -> None:
    tier, _ = open_faulty(tmp_path)

    def raises() -> bool:
        raise RuntimeError("the source broke")

    keys = keys_of(2)
    bad = tier.store(chunks_of(keys[:1], still_valid=raises), ROOT)
    assert ends(bad) == [Done(False, Reason.IO_ERROR)]
    store(tier, keys)
    check(tier)
    tier.close()


def slot_file(tier: DiskTier) -> np.memmap[tuple[int, int], np.dtype[np.uint8]]:
    """The slab's bytes, (slots, stride), through the page cache."""
    shape = (tier.ledger.slots, STRIDE)
    return np.memmap(tier.ledger.slab_path, np.uint8, "r+", shape=shape)


def test_bytes_of_another_chunk_under_a_right_key(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, direct=False)
    one, two = keys_of(2)
    store(tier, [one, two])
    slots = tier.ledger.match_prefix([one, two]).slots
    file = slot_file(tier)
    file[slots[0]] = file[slots[1]]
    assert tier.get(one) is None
    assert right(tier, two)
    assert not tier.contains(one)
    tier.close()


CHANGES = {
    "another store": {"store_id": b"x" * 16},
    "another slot": {"slot": 31},
    "another namespace": {"namespace": b"n" * 32},
    "another key": {"key": b"k" * 32},
    "another position": {"position": 3},
    "another length": {"length": 4096},
    "another layout": {"fingerprint": "0123456789abcdef"},
    "an older write": {"sequence": 1},
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_well_sealed_header_that_is_not_the_one_asked_for(
    tmp_path: Path, what: str
) -> None:
    """A slab file of another store, or an older copy of this one, replaces ours."""
    tier = open_disk(tmp_path, direct=False)
    (key,) = keys_of(1)
    store(tier, [key])
    slot = int(tier.ledger.match_prefix([key]).slots[0])
    page = slot_file(tier)[slot]
    header = codec.parse(page[:HEADER_BYTES].tobytes())
    assert header is not None
    changed = header._replace(**CHANGES[what])
    page[:HEADER_BYTES] = codec.seal(changed, page[HEADER_BYTES:])
    assert ends(tier.load([key], [room()], namespace=ROOT)) == [
        Done(False, Reason.FAILED_CHECK)
    ]
    assert not tier.contains(key)
    tier.close()


def test_an_evicted_chunk_is_no_failed_check(tmp_path: Path) -> None:
    """The slot is reassigned to another chunk between the match and the read."""
    tier, slab = open_faulty(tmp_path, slots=16, io_threads=2)
    (key,) = keys_of(1)
    store(tier, [key])
    slab.fail_next("read", Fault.HANG)
    (loading,) = tier.load([key], [room()], namespace=ROOT)
    assert slab.hanging.wait(SECONDS)
    assert tier.remove(key)
    store(tier, keys_of(16, chain=5))
    slab.release()
    done = loading.result(SECONDS)
    assert done.ok is False
    assert done.reason is Reason.EVICTED
    assert tier.stats()["failed_checks"] == 0
    tier.close()


def test_a_disk_that_keeps_failing_is_left_out_and_tried_again(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    tier, slab = open_faulty(tmp_path, clock=clock)
    kept, *others = keys_of(8)
    store(tier, [kept])
    slab.fail_next("write", Fault.EIO, times=99)
    failed = [
        ends(tier.store(chunks_of([key], n), ROOT))[0].reason
        for n, key in enumerate(others)
    ]
    assert failed[0] is Reason.IO_ERROR
    assert failed[-1] is Reason.TIER_SKIPPED
    assert tier.match_prefix([kept]) == 0
    assert tier.get(kept) is None
    assert tier.stats()["resting"] == 1
    assert tier.stats()["drop_tier_skipped"] >= 1
    slab.heal()
    clock.advance(60)
    assert tier.match_prefix([kept]) == 1
    assert right(tier, kept)
    store(tier, others)
    assert tier.stats()["resting"] == 0
    tier.close()


def test_a_read_that_succeeds_ends_a_row_of_failures(tmp_path: Path) -> None:
    tier, slab = open_faulty(tmp_path, clock=FakeClock())
    kept, *others = keys_of(8)
    store(tier, [kept])
    for n, key in enumerate(others):
        slab.fail_next("write", Fault.EIO)
        assert (
            ends(tier.store(chunks_of([key], n), ROOT))[0].reason
            is Reason.IO_ERROR
        )
        assert right(tier, kept)
    assert tier.stats()["resting"] == 0
    tier.close()


def test_a_queue_whose_disk_begins_to_fail_ends_quickly(tmp_path: Path) -> None:
    # the other reads have not ended
    tier, slab = open_faulty(tmp_path, slots=128, clock=FakeClock())
    slab.fail_next("write", Fault.EIO, times=99)
    reasons = [
        done.reason for done in ends(tier.store(chunks_of(keys_of(30)), ROOT))
    ]
    assert reasons.count(Reason.IO_ERROR) == 4
    assert reasons.count(Reason.TIER_SKIPPED) == 26
    assert slab.calls["write"] == 4
    check(tier)
    tier.close()


@pytest.mark.parametrize("call", ["read", "write"])
def test_an_error_of_the_slab_tests_the_tables(tmp_path: Path, call: str) -> None:
    """The whole file system has stopped: a read of a page of the tables that is gone would be a
    signal.
    """

    def stops() -> None:
        tier, slab = open_faulty(tmp_path)
        keys = keys_of(4)
        store(tier, keys[:3])

        def fails(*_: object) -> None:
            # a page in the middle: the last one, which is read before each transaction, still
            # answers
            tier.ledger.session._pages.load = fails
            raise OSError(errno.EIO, "the device is gone")

        setattr(slab, call, fails)
        if call == "read":
            assert ends(tier.load(keys[:1], [room()], namespace=ROOT)) == [
                Done(False, Reason.IO_ERROR)
            ]
        else:
            assert ends(tier.store(chunks_of(keys[3:]), ROOT)) == [
                Done(False, Reason.IO_ERROR)
            ]
        assert tier.resting
        assert not tier.match_prefix(keys)
        os._exit(0)

    assert wait(child(stops)) == 0
