"""The threads of a disk tier: how it ends, is forgotten, and is forked."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from pagoda.base.metrics import Reason
from pagoda.ledger import admin
from pagoda.testing import Fault
from pagoda.tiers import Done
from testbed.patience import Patience
from tests.children import in_child
from tests.tiers.tools import (
    ROOT,
    SECONDS,
    check,
    chunks_of,
    ends,
    io_threads,
    keys_of,
    oks,
    open_disk,
    open_faulty,
    right,
    room,
    store,
)


def gone(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(SECONDS)
    return not any(thread.is_alive() for thread in threads)


def test_close_leaves_nothing_running(tmp_path: Path) -> None:
    before = threading.enumerate()
    tier = open_disk(tmp_path)
    threads = io_threads(before)
    of_pool = [each for each in threads if each.name.startswith("pagoda-disk")]
    assert of_pool
    store(tier, keys_of(4))
    tier.close(timeout=60.0)
    for thread in of_pool:
        assert not thread.is_alive()
    # nobody waits for those of the ledger, which were only told to end
    assert gone(threads)
    tier.close()


def test_close_drops_what_is_queued_and_counts_it(tmp_path: Path) -> None:
    tier, slab = open_faulty(tmp_path)
    # the same store, to read its counters afterwards
    keep, _ = open_faulty(tmp_path)
    keys = keys_of(6)
    slab.fail_next("write", Fault.HANG)
    (begun,) = tier.store(chunks_of(keys[:1]), ROOT)
    assert slab.hanging.wait(SECONDS)
    waiting = tier.store(chunks_of(keys[1:], 1), ROOT)
    (loading,) = tier.load(keys[2:3], [room()], start=2, namespace=ROOT)
    patience = Patience(30)  # the write hangs for 60 s
    tier.close(timeout=0.2)
    assert not patience.ended, patience.said()
    assert ends(waiting) == [Done(False, Reason.CLOSED)] * 5
    assert loading.result(0) == Done(False, Reason.CLOSED)
    assert keep.stats()["drop_closed"] == 5
    assert not begun.done()  # its I/O hangs: it is unknown whether it is stored
    slab.release()
    begun.result(SECONDS)
    keep.close()


def test_a_write_that_hangs_keeps_the_store_open_until_it_ends(
    tmp_path: Path,
) -> None:
    before = threading.enumerate()
    tier, slab = open_faulty(tmp_path)
    threads = io_threads(before)
    keys = keys_of(1)
    slab.fail_next("write", Fault.HANG)
    saving = tier.store(chunks_of(keys), ROOT)
    assert slab.hanging.wait(SECONDS)
    tier.close(timeout=0.1)
    slab.release()
    assert all(oks(saving))
    assert gone(threads)
    again = open_disk(tmp_path)
    assert right(again, keys[0])
    check(again)
    again.close()


def test_a_tier_that_nobody_holds_ends_its_threads(tmp_path: Path) -> None:
    before = threading.enumerate()
    tier = open_disk(tmp_path)
    threads = io_threads(before)
    store(tier, keys_of(2))
    held = weakref.ref(tier)
    del tier
    gc.collect()
    assert held() is None
    assert gone(threads)
    again = open_disk(tmp_path)
    assert again.match_prefix(keys_of(2)) == 2
    again.close()


def test_a_payload_is_let_go_once_it_is_written(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    chunks = chunks_of(keys_of(3))
    payloads = [weakref.ref(chunk.payload) for chunk in chunks]
    saving = tier.store(chunks, ROOT)
    assert all(oks(saving))
    del chunks, saving
    patience = Patience(SECONDS)
    while (
        any(payload() is not None for payload in payloads) and not patience.ended
    ):
        time.sleep(0.01)
    for payload in payloads:
        assert payload() is None
    tier.close()


@pytest.mark.slow
def test_a_process_that_forgets_to_close_ends(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from tests.tiers.tools import *
tier = open_disk(Path({str(tmp_path)!r}))
store(tier, keys_of(4))
tier.store(chunks_of(keys_of(4, chain=2)), ROOT)
print("end")
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    assert run.stdout == "end\n"
    assert all(
        line.startswith("made a disk tier") for line in run.stderr.splitlines()
    ), run.stderr
    tier = open_disk(tmp_path)
    for key in keys_of(4):
        assert right(tier, key)
    check(tier)
    tier.close()


def test_a_forked_child_has_threads_of_its_own(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    mine = keys_of(4)
    childs = keys_of(4, chain=1)
    store(tier, mine)

    def work() -> None:
        store(tier, childs)
        for key in [*mine, *childs]:
            assert right(tier, key)
        tier.close()

    in_child(work)
    for key in [*mine, *childs]:
        assert right(tier, key)
    store(tier, keys_of(4, chain=2))
    check(tier)
    tier.close()


def test_a_fork_while_writes_are_queued(tmp_path: Path) -> None:
    tier, slab = open_faulty(tmp_path)
    keys = keys_of(4)
    slab.fail_next("write", Fault.HANG)
    saving = tier.store(chunks_of(keys), ROOT)
    assert slab.hanging.wait(SECONDS)

    def work() -> None:
        slab.release()
        assert tier.match_prefix(keys) == 0 and not tier.in_flight(keys[0]), (
            "something is queued"
        )
        store(tier, keys_of(3, chain=1))

    in_child(work)
    slab.release()
    assert all(oks(saving))
    for key in [*keys, *keys_of(3, chain=1)]:
        assert right(tier, key)
    admin.reap(tier.ledger)
    check(tier)
    tier.close()


@pytest.mark.slow
def test_forks_in_the_middle_of_io(tmp_path: Path) -> None:
    tier = open_disk(tmp_path, slots=200, queue_chunks=128)
    for chain in range(1, 13):
        saving = tier.store(chunks_of(keys_of(8, chain)), ROOT)
        in_child(lambda chain=chain: store(tier, keys_of(2, 100 + chain)))  # type: ignore[misc]
        assert all(oks(saving))
        for key in keys_of(2, 100 + chain):
            assert right(tier, key)
    admin.reap(tier.ledger)
    check(tier)
    tier.close()


def test_a_fork_while_a_thread_holds_the_locks_of_the_store(
    tmp_path: Path,
) -> None:
    """I/O threads take these locks for each chunk, and do not exist in the child to release
    them.
    """
    tier = open_disk(tmp_path)
    keys = keys_of(3)
    store(tier, keys)
    disk_store = tier._store

    def work() -> None:
        disk_store.record_error(OSError("logged once"), "a test")
        assert tier.match_prefix(keys) == 3
        for key in keys:
            assert right(tier, key)

    with disk_store.breaker._lock, disk_store.log._lock:
        in_child(work)
    for key in keys:
        assert right(tier, key)
    tier.close()
