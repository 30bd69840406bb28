"""The header scan of a disk tier whose ledger was lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagoda.ledger import Ledger, admin, rebuild
from pagoda.testing import Fault, FaultySlab
from pagoda.tiers import DiskTier
from tests.tiers.tools import (
    LAYOUT,
    ROOT,
    SECONDS,
    STRIDE,
    check,
    chunks_of,
    disk_spec,
    keys_of,
    oks,
    open_disk,
    right,
    store,
)


def lose_the_ledger(root: Path) -> None:
    (tables,) = root.rglob("data.mdb")
    tables.unlink()


def reopened(root: Path, slots: int = 32) -> DiskTier:
    tier = open_disk(root, slots)
    assert tier.wait_ready(SECONDS)
    assert len(rebuild.unscanned(tier.ledger)) == 0
    return tier


def test_all_chunks_are_found_again(tmp_path: Path) -> None:
    keys = keys_of(20)
    tier = open_disk(tmp_path)
    store(tier, keys)
    tier.close()
    lose_the_ledger(tmp_path)
    again = reopened(tmp_path)
    assert again.match_prefix(keys) == 20
    for key in keys:
        assert right(again, key)
    assert check(again)["ready"] == 20
    store(again, keys_of(12, chain=1))
    again.close()


def test_more_slots_than_a_batch(tmp_path: Path) -> None:
    keys = keys_of(150)
    tier = open_disk(tmp_path, slots=200, queue_chunks=200)
    store(tier, keys)
    tier.close()
    lose_the_ledger(tmp_path)
    again = reopened(tmp_path, 200)
    assert again.match_prefix(keys) == 150
    for key in keys[::10]:
        assert right(again, key)
    again.close()


def test_what_was_cleared_does_not_come_back(tmp_path: Path) -> None:
    before = keys_of(5)
    after = keys_of(3, chain=1)
    tier = open_disk(tmp_path)
    store(tier, before)
    tier.clear(ROOT)
    store(tier, after)
    tier.close()
    lose_the_ledger(tmp_path)
    again = reopened(tmp_path)
    assert again.match_prefix(before) == 0
    assert again.match_prefix(after) == 3
    for key in after:
        assert right(again, key)
    again.close()


def test_a_damaged_header_costs_its_chunk_only(tmp_path: Path) -> None:
    keys = keys_of(4)
    tier = open_disk(tmp_path, direct=False)
    store(tier, keys)
    slot = int(tier.ledger.match_prefix(keys).slots[1])
    path = tier.ledger.slab_path
    tier.close()
    with path.open("r+b") as file:
        file.seek(slot * STRIDE + 40)
        file.write(b"\xff\xff")
    lose_the_ledger(tmp_path)
    again = reopened(tmp_path)
    assert [again.contains(key) for key in keys] == [True, False, True, True]
    again.close()


def test_a_damaged_payload_is_found_by_the_read(tmp_path: Path) -> None:
    keys = keys_of(2)
    tier = open_disk(tmp_path, direct=False)
    store(tier, keys)
    slot = int(tier.ledger.match_prefix(keys).slots[0])
    path = tier.ledger.slab_path
    tier.close()
    with path.open("r+b") as file:
        file.seek(slot * STRIDE + 5000)
        file.write(b"\xff\xfe\xff")
    lose_the_ledger(tmp_path)
    again = reopened(tmp_path)
    assert again.match_prefix(keys) == 2
    assert [right(again, key) for key in keys] == [False, True]
    again.close()


def test_headers_of_another_store_are_not_ours(tmp_path: Path) -> None:
    """The slab file of another store is put under this one's ledger."""
    theirs = open_disk(tmp_path / "theirs")
    store(theirs, keys_of(4))
    stolen = theirs.ledger.slab_path
    theirs.close()
    ours = open_disk(tmp_path / "ours")
    place = ours.ledger.slab_path
    ours.close()
    place.write_bytes(stolen.read_bytes())
    lose_the_ledger(tmp_path / "ours")
    again = reopened(tmp_path / "ours")
    for key in keys_of(4):
        assert not again.contains(key)
    assert check(again)["free"] == 32
    again.close()


def test_a_header_that_cannot_be_read_is_a_free_slot(tmp_path: Path) -> None:
    keys = keys_of(4)
    tier = open_disk(tmp_path)
    store(tier, keys)
    tier.close()
    lose_the_ledger(tmp_path)
    ledger = Ledger.open(disk_spec(tmp_path, 32))
    slab = FaultySlab(ledger.slab_path, ledger.slots, STRIDE)
    # the batch, then its first header alone
    slab.fail_next("read_headers", Fault.EIO, times=2)
    again = DiskTier(LAYOUT, ledger, slab)
    assert again.wait_ready(SECONDS)
    assert sum(again.contains(key) for key in keys) == 3
    assert check(again)["ready"] == 3
    again.close()


def test_the_tier_works_while_it_is_scanned(tmp_path: Path) -> None:
    keys = keys_of(8)
    tier = open_disk(tmp_path, slots=200)
    store(tier, keys)
    tier.close()
    lose_the_ledger(tmp_path)
    ledger = Ledger.open(disk_spec(tmp_path, 200))
    slab = FaultySlab(ledger.slab_path, ledger.slots, STRIDE)
    slab.fail_next("read_headers", Fault.HANG)
    again = DiskTier(LAYOUT, ledger, slab)
    assert slab.hanging.wait(SECONDS)
    assert not again.wait_ready(0.01)
    assert again.match_prefix(keys) == 0
    # no slot is known to be free yet
    assert not again.store(chunks_of(keys), ROOT)[0].result(SECONDS).ok
    slab.release()
    assert again.wait_ready(SECONDS)
    assert again.match_prefix(keys) == 8
    again.close()


def test_two_tiers_of_one_process_scan_once(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, slots=200, queue_chunks=200)
    keys = keys_of(100)
    store(tier, keys)
    tier.close()
    lose_the_ledger(tmp_path)
    tiers = [open_disk(tmp_path, slots=200) for _ in range(3)]
    for each in tiers:
        assert each.wait_ready(SECONDS)
    for each in tiers:
        assert each.match_prefix(keys) == 100
    check(tiers[0])
    for each in tiers:
        each.close()


def test_a_scan_that_is_closed_in_the_middle_goes_on_at_the_next_open(
    tmp_path: Path,
) -> None:
    keys = keys_of(8)
    tier = open_disk(tmp_path, slots=200)
    store(tier, keys)
    tier.close()
    lose_the_ledger(tmp_path)
    ledger = Ledger.open(disk_spec(tmp_path, 200))
    slab = FaultySlab(ledger.slab_path, ledger.slots, STRIDE)
    slab.delay_seconds = 0.3
    slab.fail_next("read_headers", Fault.DELAY, times=9)
    DiskTier(LAYOUT, ledger, slab).close()
    again = reopened(tmp_path, 200)
    assert again.match_prefix(keys) == 8
    check(again)
    again.close()


def kill_while_storing(root: Path, slots: int, per_chain: int) -> int:
    """Return the last chain that a process reported as stored before it was killed."""
    command = [
        sys.executable,
        "-m",
        "tests.tiers.worker",
        "for-ever",
        str(root),
        str(slots),
        str(per_chain),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(5):
            process.stdout.readline()
        time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        return max([5, *(int(line.split()[0]) for line in process.stdout)])


@pytest.mark.slow
def test_after_a_kill_all_that_is_found_is_right(tmp_path: Path) -> None:
    last = kill_while_storing(tmp_path, 40, 6)
    tier = open_disk(tmp_path, 40)
    admin.reap(tier.ledger)
    check(tier)
    found = sum(
        right(tier, key)
        for chain in range(1, last + 2)
        for key in keys_of(6, chain)
    )
    assert found >= 24
    assert tier.match_prefix(keys_of(6, last)) == 6
    store(tier, keys_of(6, chain=900_000))
    check(tier)
    tier.close()


def test_after_a_kill_and_a_lost_ledger_all_that_is_found_is_right(
    tmp_path: Path,
) -> None:
    last = kill_while_storing(tmp_path, 40, 6)
    lose_the_ledger(tmp_path)
    tier = reopened(tmp_path, 40)
    check(tier)
    found = sum(
        right(tier, key)
        for chain in range(1, last + 2)
        for key in keys_of(6, chain)
    )
    assert found >= 24
    assert tier.match_prefix(keys_of(6, last)) == 6
    assert all(oks(tier.store(chunks_of(keys_of(6, chain=900_000)), ROOT)))
    check(tier)
    tier.close()
