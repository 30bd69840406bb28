"""Who ranks the slots of a large store, and how long a call waits for another one that does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pagoda.base.metrics import Reason
from pagoda.base.signal_safe_threads import start_thread
from pagoda.ledger import Ledger, Refused, StoreSpec, admin
from pagoda.policy.eviction_queue import RANKED_AT_ONCE, EvictionQueue
from testbed.patience import wait_until
from tests.children import child, wait
from tests.ledger.support import (
    PATIENT_SECONDS,
    TENANT,
    keys,
    matched,
    opened,
    put,
    put_alone,
)

SLOTS = 2 * RANKED_AT_ONCE


def large(root: Path, policy: str = "lru", slots: int = SLOTS) -> Ledger:
    """Open a large store whose slots take no memory."""
    return Ledger.open(StoreSpec(root, "store", "memory", slots, 0), policy)


def filled(root: Path, policy: str = "lru") -> Ledger:
    ledger = large(root, policy)
    for at in range(0, SLOTS, 64):
        put(ledger, keys(*range(at, at + 64)))
    return ledger


def ranked_by(ledger: Ledger, seen: list[tuple[str, int]]) -> None:
    """Add to `seen` the thread and the number of slots of each ranking."""
    queue: EvictionQueue = ledger.evictor._policy._queue  # type: ignore[attr-defined]
    rank = queue._rank

    def noted(*chosen: object) -> object:
        ranks = rank(*chosen)  # type: ignore[arg-type]
        seen.append((threading.current_thread().name, len(ranks)))
        return ranks

    queue._rank = noted  # type: ignore[assignment]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "hindsight"])
def test_only_the_upkeep_thread_ranks_all_slots(
    shm_root: Path, policy: str
) -> None:
    filled(shm_root, policy).close()
    ledger = large(shm_root, policy)
    seen: list[tuple[str, int]] = []
    ranked_by(ledger, seen)
    new = iter(range(10**6, 10**7))
    for _ in range(5):
        put(ledger, keys(*(next(new) for _ in range(16))))
    wait_until(lambda: ("pagoda-upkeep", SLOTS) in seen)
    wait_until(lambda: not ledger.evictor.is_low)
    for _ in range(SLOTS // 16):
        put(ledger, keys(*(next(new) for _ in range(16))))
    own = [count for name, count in seen if name != "pagoda-upkeep"]
    assert max(own, default=0) < SLOTS // 2
    ledger.close()


@pytest.mark.slow
def test_a_thread_ranks_again_before_the_ranked_slots_are_used_up(
    shm_root: Path,
) -> None:
    ledger = filled(shm_root)
    wait_until(lambda: not ledger.evictor.is_low)
    queue: EvictionQueue = ledger.evictor._policy._queue  # type: ignore[attr-defined]
    batch = queue._ranked
    new = iter(range(10**6, 10**7))
    while not ledger.evictor.is_low and queue._ranked is batch:
        put(ledger, keys(*(next(new) for _ in range(16))))
    left = len(batch.rows) - batch.next
    assert 0 < left <= len(batch.rows) // 3
    wait_until(lambda: queue._ranked is not batch)
    ledger.close()


@contextmanager
def policy_kept(ledger: Ledger) -> Iterator[None]:
    """Keep the policy of a ledger, as a thread that was descheduled in the middle of it does."""
    kept = threading.Event()
    end = threading.Event()

    def keep() -> None:
        with ledger.evictor._lock:
            kept.set()
            end.wait()

    thread = start_thread(keep, "keeps")
    assert thread is not None
    assert kept.wait(PATIENT_SECONDS)
    try:
        yield
    finally:
        end.set()
        thread.join()


def within_its_deadline(call: Callable[[], object]) -> object:
    """Return what a call returns that must not wait for the policy."""
    answer: list[object] = []
    thread = start_thread(lambda: answer.append(call()), "calls")
    assert thread is not None
    thread.join(PATIENT_SECONDS)
    assert answer, "the call waits for the policy"
    return answer[0]


def test_a_look_up_finds_its_chunks_while_another_thread_keeps_the_policy(
    shm_root: Path,
) -> None:
    ledger = opened(shm_root)
    put(ledger, keys(1, 2, 3))
    before = ledger.columns.last_use.copy()
    with policy_kept(ledger):
        found = within_its_deadline(
            lambda: ledger.match_prefix(keys(1, 2, 3), deadline_seconds=0.02)
        )
        assert len(found.slots) == 3  # type: ignore[attr-defined]
        touched = within_its_deadline(
            lambda: ledger.touch(keys(1, 2, 4), deadline_seconds=0.02)
        )
        assert touched == [True, True, False]
    assert (ledger.columns.last_use == before).all()
    ledger.close()


def test_a_store_is_refused_in_time_while_another_thread_keeps_the_policy(
    shm_root: Path,
) -> None:
    ledger = opened(shm_root)
    put_alone(ledger, range(ledger.slots))
    with policy_kept(ledger):
        refused = within_its_deadline(
            lambda: ledger.reserve(
                keys(100, 101), namespace=TENANT, deadline_seconds=0.05
            )
        )
    assert [
        one.reason
        for one in refused  # type: ignore[attr-defined]
        if isinstance(one, Refused)
    ] == [Reason.LEDGER_BUSY] * 2
    assert ledger.session.own_counters()["drop_ledger_busy"] == 2
    ledger.close()


def test_what_processes_learn_is_not_waited_for_inside_the_gate(
    shm_root: Path,
) -> None:
    ledger = Ledger.open(
        StoreSpec(shm_root, "store", "memory", 32, 0), "hindsight"
    )
    with policy_kept(ledger):
        within_its_deadline(lambda: ledger.upkeep_thread.run_once() or True)
        assert within_its_deadline(lambda: ledger.last_change()) is not None
    ledger.close()


def test_a_call_in_the_middle_of_the_policys_work_does_not_wait_for_itself(
    shm_root: Path,
) -> None:
    ledger = opened(shm_root)
    put(ledger, keys(1, 2))
    with ledger.evictor._lock:
        assert matched(ledger, keys(1, 2)) == 2
        outcomes = ledger.reserve(keys(3), namespace=TENANT)
    for one in outcomes:
        assert isinstance(one, Refused)
    ledger.close()


@pytest.mark.slow
def test_a_forked_child_and_its_parent_evict_from_one_large_store(
    shm_root: Path,
) -> None:
    ledger = filled(shm_root)

    def store(first: int) -> None:
        for number in range(first, first + 640, 64):
            assert len(put(ledger, keys(*range(number, number + 64)))) == 64

    pid = child(lambda: store(2 * 10**6))
    store(10**6)
    assert wait(pid) == 0
    admin.check(ledger)
    newest = keys(*range(10**6 + 576, 10**6 + 640))
    assert matched(ledger, newest) == 64
    ledger.close()
