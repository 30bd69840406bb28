"""A few rows are used one by one, many by array operations: the columns and what the policy learns
are the same.
"""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from pagoda.ledger import Ledger, queries
from pagoda.ledger import ledger as ledger_module
from pagoda.ledger.columns import NOT_READY, Columns
from pagoda.ledger.eviction_policy import Evictor
from pagoda.ledger.store_state import Kind
from pagoda.policy.reuse_worth import age_of, age_of_one, class_of, class_of_one
from pagoda.testing import FakeClock
from tests.ledger.support import TENANT, keys, put, small_store

NAMES = (
    "last_use",
    "lease_until",
    "parent_slot",
    "hits",
    "generation",
)


@pytest.mark.parametrize("policy", ["lru", "hindsight"])
def test_few_and_many_rows_are_used_alike(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Two stores get the same calls; in one of them every run counts as many rows."""
    chain = keys(*range(1, 9))
    seen = []
    for few in (True, False):
        if not few:
            monkeypatch.setattr(queries, "_FEW_ENTRIES", -1)
            monkeypatch.setattr(ledger_module, "FEW_USED", -1)
        clock = FakeClock()
        place = small_store(shm_root / str(few), 64)
        with closing(Ledger.open(place, policy=policy, clock=clock)) as one:
            one.namespaces.register(TENANT, {"model": "test"})
            put(one, chain)
            for seconds in (0, 2, 3, 0, 100):
                clock.advance(seconds)
                asked = chain[: 3 + seconds % 4] + keys(99)
                match = one.match_prefix(asked, lease_seconds=5.0)
                slots, *_ = one.find_prefix(asked, lease_seconds=5.0)
                assert len(match.slots) == len(slots) == 3 + seconds % 4
            policy_of = one.evictor._policy
            seen.append(
                [
                    *(getattr(one.columns, name).tolist() for name in NAMES),
                    match.slots.tolist(),
                    match.reason,
                    *(
                        getattr(policy_of, name).tolist()
                        for name in ("_asked", "_watched")
                        if policy == "hindsight"
                    ),
                ]
            )
            if policy == "hindsight":
                assert policy_of._asked.sum() > 0  # type: ignore[attr-defined]
            assert (one.columns.lease_until > 0).any()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("gone", [1, 3])
@pytest.mark.parametrize("hinted", [False, True])
def test_chunks_that_are_replaced_before_they_are_used_are_used_by_nobody(
    shm_root: Path, kind: Kind, gone: int, hinted: bool
) -> None:
    """Also where requests say more of themselves, and if no chunk of the run is left."""
    chain = keys(1, 2, 3)
    store = small_store(shm_root, 64, kind)
    with closing(Ledger.open(store, policy="hindsight")) as one:
        one.namespaces.register(TENANT, {"model": "test"})
        slots = [item.slot for item in put(one, chain)]
        if hinted:
            assert one.evictor.keep_contexts()
        found = one.find_prefix(chain, namespace=TENANT, touch=False)
        one.columns.generation[slots[:gone]] += 1
        before = one.columns.hits.tolist()
        one._use(*found[:2], one.stamp(), True, True, 5.0, time.monotonic() + 5)
        used = [
            slot
            for slot, hits in enumerate(one.columns.hits.tolist())
            if hits != before[slot]
        ]
        assert sorted(used) == sorted(slots[gone:])


def test_few_leases_are_bounded_like_many() -> None:
    now = 10**12
    leased = []
    for few in (True, False):
        columns = Columns(None, 64)
        columns.reset()
        for first in range(0, 64, 4):
            rows = np.arange(first, first + 4)
            if few:
                columns.lease_few(rows.tolist(), now, 10**10)
            else:
                columns.lease(rows, now, 10**10)
        leased.append(np.flatnonzero(columns.lease_until > now).tolist())
    assert leased[0] == leased[1]
    assert len(leased[0]) == 32


@pytest.mark.parametrize("policy", ["lru", "hindsight"])
def test_recency_is_never_lowered_nor_that_of_a_slot_that_is_filled(
    policy: str,
) -> None:
    columns = Columns(None, 8)
    columns.reset()
    columns.last_use[:3] = 5, 100, NOT_READY
    Evictor(policy, columns).touch_few([0, 1, 2], [50, 49, 48], asked=True)
    assert columns.last_use[:3].tolist() == [50, 100, NOT_READY]
    assert columns.hits[:4].tolist() == [1, 1, 1, 0]


def test_classes_and_ages_of_one_are_those_of_many() -> None:
    hits = np.arange(3000)
    assert class_of(hits).tolist() == [class_of_one(n) for n in hits.tolist()]
    ages = np.concatenate(
        [np.arange(0, 10**10, 7 * 10**6), 10 ** np.arange(8, 19), [2**62]]
    )
    assert age_of(ages).tolist() == [age_of_one(n) for n in ages.tolist()]
