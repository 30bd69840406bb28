"""Writing back: each lower tier has a separate writer thread."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from pagoda.base.clock import Clock
from pagoda.cache import Cache
from pagoda.cache.counters import CacheCounters
from pagoda.ledger import Ledger, StoreSpec, admin
from pagoda.ledger.stores_under_root import stores_in
from pagoda.slab import FileSlab, MemorySlab
from pagoda.testing import Fault, FaultySlab
from pagoda.tiers import DiskTier, HostTier
from testbed.patience import wait_until
from tests.cache.kit import (
    LAYOUT,
    NAMESPACE,
    PATIENT_SECONDS,
    config_of,
    prompt,
    put,
)

STRIDE = LAYOUT.slot_bytes + 4096


class Stack:
    """A host tier over a quick disk tier and one whose slab fails on demand."""

    def __init__(self, shm_root: Path, tmp_path: Path, **options: object) -> None:
        ledger = Ledger.open(
            StoreSpec(
                shm_root, LAYOUT.fingerprint, "memory", 64, LAYOUT.slot_bytes
            )
        )
        host = HostTier(
            LAYOUT, ledger, MemorySlab(ledger.slab_path, 64, LAYOUT.slot_bytes)
        )
        quick = Ledger.open(
            StoreSpec(tmp_path / "quick", LAYOUT.fingerprint, "file", 64, STRIDE)
        )
        slow = Ledger.open(
            StoreSpec(tmp_path / "slow", LAYOUT.fingerprint, "file", 64, STRIDE)
        )
        self.slab = FaultySlab(slow.slab_path, 64, STRIDE)
        self.quick = DiskTier(
            LAYOUT, quick, FileSlab(quick.slab_path, 64, STRIDE)
        )
        self.slow = DiskTier(LAYOUT, slow, self.slab, io_threads=1)
        self.quick.name = "quick"
        self.slow.name = "slow"
        self.cache = Cache(
            config_of(None, None, **options),
            namespace=NAMESPACE,
            layout=LAYOUT,
            tiers=[host, self.slow, self.quick],
        )


@pytest.fixture
def stack(shm_root: Path, tmp_path: Path) -> Stack:
    return Stack(shm_root, tmp_path)


@pytest.mark.parametrize("queue", [1, 4])
def test_a_short_queue_loses_nothing(
    shm_root: Path, tmp_path: Path, queue: int
) -> None:
    """The writer fitted the option `queue_chunks`, which is the disk's, also where a tier has a
    shorter queue.
    """
    ledger = Ledger.open(
        StoreSpec(shm_root, LAYOUT.fingerprint, "memory", 64, LAYOUT.slot_bytes)
    )
    host = HostTier(
        LAYOUT, ledger, MemorySlab(ledger.slab_path, 64, LAYOUT.slot_bytes)
    )
    below = Ledger.open(
        StoreSpec(tmp_path, LAYOUT.fingerprint, "file", 64, STRIDE)
    )
    disk = DiskTier(
        LAYOUT,
        below,
        FileSlab(below.slab_path, 64, STRIDE),
        io_threads=1,
        queue_chunks=queue,
    )
    tokens = prompt(48)
    with Cache(
        config_of(None, None),
        namespace=NAMESPACE,
        layout=LAYOUT,
        tiers=[host, disk],
    ) as cache:
        assert put(cache, tokens).refused == 0
        assert cache.flush(PATIENT_SECONDS)
        assert disk.stats()["ready"] == 48
        assert disk.stats()["drop_queue_full"] == 0


def test_a_tier_that_hangs_keeps_no_other_waiting(stack: Stack) -> None:
    stack.slab.fail_next("write", Fault.HANG)
    for seed in range(6):
        tokens = prompt(4, seed)
        assert put(stack.cache, tokens).refused == 0
    wait_until(lambda: stack.quick.stats()["ready"] == 24, PATIENT_SECONDS)
    assert stack.slab.hanging.is_set()
    assert stack.slow.stats()["ready"] == 0
    stack.slab.release()
    assert stack.cache.flush(PATIENT_SECONDS)
    assert stack.slow.stats()["ready"] == 24
    stack.cache.close()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_others_see_how_many_chunks_wait(
    shm_root: Path, tmp_path: Path, policy: str
) -> None:
    stack = Stack(shm_root, tmp_path, write_policy=policy)
    (store,) = stores_in(shm_root)
    with closing(Ledger.attach(store)) as other:

        def waiting() -> int:
            return admin.numbers(other)["waiting_chunks"]

        assert waiting() == 0
        stack.slab.fail_next("write", Fault.HANG)
        for seed in range(15):
            tokens = prompt(4, seed)
            put(stack.cache, tokens)
        wait_until(
            lambda: waiting() == stack.cache.stats()["waiting_chunks"] > 10,
            PATIENT_SECONDS,
        )
        stack.slab.release()
        assert stack.cache.flush(PATIENT_SECONDS)
        assert waiting() == 0
        stack.cache.close()


def test_two_caches_of_a_process_add_up_what_waits(shm_root: Path) -> None:
    spec = StoreSpec(
        shm_root, LAYOUT.fingerprint, "memory", 64, LAYOUT.slot_bytes
    )
    with closing(Ledger.open(spec)) as ledger:

        def waiting() -> int:
            return admin.numbers(ledger)["waiting_chunks"]

        first = CacheCounters(ledger, Clock(), NAMESPACE)
        second = CacheCounters(ledger, Clock(), NAMESPACE)
        first.set_waiting("disk", 5)
        first.set_waiting("remote", 1)
        second.set_waiting("disk", 3)
        assert waiting() == 9
        first.set_waiting("disk", 4)
        assert waiting() == 8
        first.close()
        assert waiting() == 3
        second.set_waiting("disk", 0)
        assert waiting() == 0


def test_chunks_that_a_tier_breaks_on_are_not_waited_for(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(4)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("torn from the wall")

    monkeypatch.setattr(stack.quick, "store", broken)
    assert put(stack.cache, tokens).refused == 0
    assert stack.cache.flush(10), "nothing is being written any more"
    monkeypatch.undo()
    assert put(stack.cache, tokens).present == 4
    assert stack.cache.flush(PATIENT_SECONDS)
    assert stack.quick.stats()["ready"] == 4
    stack.cache.close()


def test_what_one_tier_lost_is_written_there_again(stack: Stack) -> None:
    tokens = prompt(3)
    stack.slab.fail_next("write", Fault.EIO, times=3)
    assert put(stack.cache, tokens).refused == 0
    assert stack.cache.flush(PATIENT_SECONDS)
    assert stack.quick.stats()["ready"] == 3
    assert stack.slow.stats()["ready"] == 0
    before = stack.quick.stats()["stored_chunks"]
    assert put(stack.cache, tokens).present == 3
    assert stack.cache.flush(PATIENT_SECONDS)
    assert stack.slow.stats()["ready"] == 3
    assert stack.quick.stats()["stored_chunks"] == before
    stack.cache.close()


def test_a_store_that_skips_a_tier_is_not_written_there(stack: Stack) -> None:
    tokens = prompt(4)
    assert put(stack.cache, tokens, tiers=["host", "quick"]).refused == 0
    assert stack.cache.flush(PATIENT_SECONDS)
    assert stack.quick.stats()["ready"] == 4
    assert stack.slow.stats()["ready"] == 0
    stack.cache.close()


def test_a_thread_that_waits_for_notes_sleeps_when_writes_end(
    stack: Stack,
) -> None:
    """To wake it for each chunk would cost as much as to hand the chunk over; a flush is woken."""
    stack.slab.fail_next("write", Fault.HANG)
    tokens = prompt(4)
    assert put(stack.cache, tokens).refused == 0
    (queue,) = (
        each
        for each in stack.cache._resources.writeback
        if each.tier is stack.slow
    )
    wait_until(
        lambda: (
            stack.slab.hanging.is_set()
            and len(queue._noted._changed._waiters) == 1
        ),
        PATIENT_SECONDS,
    )
    (waiting,) = queue._noted._changed._waiters
    stack.slab.release()
    wait_until(lambda: not queue._writing, PATIENT_SECONDS)
    assert list(queue._noted._changed._waiters) == [waiting]
    assert stack.cache.flush(PATIENT_SECONDS)
    stack.cache.close()
