"""Several runs in one reserve: what each would get alone, with one transaction for all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagoda.base.metrics import Reason
from pagoda.ledger import (
    Busy,
    Ledger,
    Outcome,
    Present,
    Refused,
    Reserved,
    RunToReserve,
    admin,
)
from tests.interrupts import Interrupted
from tests.ledger.support import (
    PATIENT_SECONDS,
    TENANT,
    gauge,
    keys,
    opened,
    put,
    put_alone,
    reserved,
    shut_to_threads,
)


def run_of(
    ledger: Ledger,
    wanted: Sequence[bytes],
    start: int = 0,
    parent: bytes | None = None,
) -> RunToReserve:
    """A run of one request."""
    return RunToReserve(wanted, TENANT, start, parent, ledger.stamp())


def reserve(
    ledger: Ledger, runs: Sequence[RunToReserve], seconds: float = PATIENT_SECONDS
) -> list[list[Outcome]]:
    return ledger.reserve_runs(runs, tokens=16, deadline_seconds=seconds)


def kinds(outcomes: Sequence[Outcome]) -> list[type]:
    return [type(one) for one in outcomes]


def test_each_run_gets_its_own_answers(ledger: Ledger) -> None:
    [stored] = put(ledger, keys(1))
    first = run_of(ledger, keys(1, 2))
    second = run_of(ledger, keys(11, 2))
    third = run_of(ledger, keys(21))
    found, busy, new = reserve(ledger, [first, second, third])
    assert found[0] == Present(*stored)
    assert kinds(found) == [Present, Reserved]
    assert kinds(busy) == [Reserved, Busy]
    assert kinds(new) == [Reserved]
    made = reserved([*found, *busy, *new])
    assert len({one.slot for one in made}) == 3
    assert ledger.commit(made) == [True] * 3


def test_the_chunks_of_a_run_are_linked_to_their_parents(ledger: Ledger) -> None:
    """So that a head is never evicted before what follows it."""
    heads = put(ledger, keys(1)), put(ledger, keys(11))
    runs = [
        run_of(ledger, keys(2, 3), 1, keys(1)[0]),
        run_of(ledger, keys(12), 1, keys(11)[0]),
    ]
    made = [reserved(each) for each in reserve(ledger, runs)]
    ledger.commit([*made[0], *made[1]])
    parents = ledger.columns.parent_slot
    assert parents[made[0][0].slot] == heads[0][0].slot
    assert parents[made[0][1].slot] == made[0][0].slot
    assert parents[made[1][0].slot] == heads[1][0].slot


def test_many_short_runs_take_one_transaction(ledger: Ledger) -> None:
    def transactions() -> int:
        return ledger.session.read(lambda txn, _: txn.id(), PATIENT_SECONDS)

    runs = [run_of(ledger, keys(10 * n)) for n in range(ledger.window)]
    before = transactions()
    outcomes = reserve(ledger, runs)
    assert transactions() == before + 1
    assert [kinds(each) for each in outcomes] == [[Reserved]] * len(runs)


def test_a_full_store_evicts_for_all_runs_and_nothing_that_one_of_them_has(
    ledger: Ledger,
) -> None:
    old = put_alone(ledger, range(100, 100 + ledger.slots))
    kept = [one.key for one in old[:2]]  # the coldest
    runs = [
        run_of(ledger, keys(1, 2)),
        run_of(ledger, kept),
    ]
    new, there = reserve(ledger, runs)
    assert kinds(new) == [Reserved, Reserved]
    assert kinds(there) == [Present, Present]
    ledger.commit(reserved(new))
    assert len(ledger.match_prefix(kept[:1]).slots) == 1
    assert len(ledger.match_prefix(kept[1:], start=0).slots) == 1


def test_where_there_is_no_slot_for_all_the_first_runs_have_theirs(
    ledger: Ledger,
) -> None:
    put_alone(ledger, range(100, 100 + ledger.slots))
    quota = max(ledger.slots // 4, ledger.window)  # of one member
    runs = [run_of(ledger, keys(n)) for n in range(quota + 3)]
    outcomes = [one for each in reserve(ledger, runs) for one in each]
    assert kinds(outcomes) == [Reserved] * quota + [Refused] * 3
    assert outcomes[-1] == Refused(keys(quota + 2)[0], Reason.FULL)


def test_a_run_that_is_longer_than_a_window_ends_with_it(ledger: Ledger) -> None:
    long = run_of(ledger, keys(*range(ledger.window + 2)))
    short = run_of(ledger, keys(900))
    first, second = reserve(ledger, [long, short])
    assert kinds(first) == [Reserved] * ledger.window + [Refused] * 2
    assert kinds(second) == [Reserved]


def test_no_runs_and_no_keys(ledger: Ledger) -> None:
    assert reserve(ledger, []) == []
    assert reserve(ledger, [run_of(ledger, []), run_of(ledger, keys(1))])[0] == []
    with pytest.raises(ValueError, match="32"):
        reserve(ledger, [run_of(ledger, keys(5)), run_of(ledger, [b"short"])])
    with pytest.raises(ValueError, match="part"):
        ledger.reserve_runs([run_of(ledger, keys(6))], parts=0)
    assert gauge(ledger, "reserved") == 1


def test_without_time_every_run_is_told_so_and_nothing_is_kept(
    ledger: Ledger,
) -> None:
    runs = [run_of(ledger, keys(1, 2)), run_of(ledger, keys(11))]
    with shut_to_threads(ledger), ThreadPoolExecutor(1) as pool:
        outcomes = pool.submit(reserve, ledger, runs, 0.01).result()
    assert outcomes == [
        [Refused(key, Reason.LEDGER_BUSY) for key in run.keys] for run in runs
    ]
    assert not gauge(ledger, "reserved")


def test_an_interrupted_call_keeps_no_slot(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller never learns of them."""

    def interrupted(*_: object) -> None:
        raise Interrupted

    runs = [run_of(ledger, keys(1, 2)), run_of(ledger, keys(11))]
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_note_reserved", interrupted)
        with pytest.raises(Interrupted):
            reserve(ledger, runs)
    assert not gauge(ledger, "reserved")
    assert [kinds(each) for each in reserve(ledger, runs)] == [
        [Reserved, Reserved],
        [Reserved],
    ]


@pytest.mark.parametrize("seed", range(4))
def test_random_runs_get_what_single_reserves_get(
    shm_root: Path, seed: int
) -> None:
    """Two stores with the same chunks: one is asked for all runs at once, the other for each."""
    rng = random.Random(seed)
    together = opened(shm_root / "together", slots=64)
    alone = opened(shm_root / "alone", slots=64)
    try:
        for _ in range(40):
            # while both have room, nothing depends on the policy
            has_room = admin.gauges(alone)["ready"] <= 64 - 24
            runs: list[tuple[list[bytes], int, bytes | None]] = []
            for _ in range(rng.randint(1, 6)):
                chain = 100 * rng.randint(0, 12)
                start = rng.randint(0, 3)
                length = rng.randint(0, 4)
                chosen = keys(*range(chain + start, chain + start + length))
                parent = keys(chain + start - 1)[0] if start else None
                runs.append((chosen, start, parent))
            ours = reserve(together, [run_of(together, *run) for run in runs])
            theirs = [
                alone.reserve(
                    chosen,
                    namespace=TENANT,
                    start=start,
                    parent=parent,
                    tokens=16,
                    deadline_seconds=PATIENT_SECONDS,
                )
                for chosen, start, parent in runs
            ]
            if has_room:
                assert [kinds(one) for one in ours] == [
                    kinds(one) for one in theirs
                ]
            for (chosen, _, _), one in zip(runs, ours, strict=True):
                assert [item.key for item in one] == chosen
            lost_keys = [
                key for chosen, *_ in runs for key in chosen if rng.random() < 0.2
            ]
            for ledger, outcomes in ((together, ours), (alone, theirs)):
                made = reserved([item for one in outcomes for item in one])
                given = [item.slot for item in made]
                assert len(set(given)) == len(given)
                lost = [item for item in made if item.key in lost_keys]
                ledger.abort(lost)
                ledger.commit([item for item in made if item not in lost])
        admin.check(together)
        assert not admin.gauges(together)["reserved"]
    finally:
        together.close()
        alone.close()
