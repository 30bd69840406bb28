"""Admission by the policy of a disk tier, of runs that are queried in parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda.base.metrics import Reason
from pagoda.ledger import admin
from pagoda.testing import FakeClock
from pagoda.tiers import DiskTier
from tests.ledger.support import keys as single_keys
from tests.ledger.support import put, teach
from tests.tiers.tools import ROOT, keys_of, open_disk

SLOTS = 32
RUN = keys_of(12)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    """Return a disk tier that is full of chunks with a higher value than a new one."""
    clock = FakeClock()
    tier = open_disk(tmp_path, SLOTS, policy="hindsight", clock=clock)
    teach(tier.ledger, clock)
    assert (
        len(put(tier.ledger, single_keys(*range(SLOTS)), ROOT, chained=False))
        == SLOTS
    )
    clock.advance(9)
    yield tier
    tier.close()


def remembered(tier: DiskTier) -> int:
    """Return of how many chunks of the run the policy has seen a request."""
    return sum(
        tier.ledger.explain_miss(key).reason is Reason.NOT_ADMITTED for key in RUN
    )


@pytest.mark.parametrize("first", [1, 5])
def test_a_run_that_is_kept_out_is_remembered_to_its_end(
    tier: DiskTier, first: int
) -> None:
    """One thread queries the head, which is in host slots; another one the tail, which passes
    through buffers.
    """
    stamp = tier.ledger.stamp()
    for at, end in ((0, first), (first, 12), (0, 12), (3, 12)):
        assert tier.admit(RUN[at:end], namespace=ROOT, start=at, stamp=stamp) == (
            0,
            True,
        )
    assert remembered(tier) == 12
    assert admin.counters(tier.ledger)["drop_not_admitted"] == 12


def test_what_was_let_in_once_stays_let_in(tier: DiskTier) -> None:
    removed = single_keys(*range(4))
    assert admin.remove(tier.ledger, removed) == 4
    stamp = tier.ledger.stamp()
    assert tier.admit(RUN[:4], namespace=ROOT, start=0, stamp=stamp) == (4, False)
    assert tier.admit(RUN, namespace=ROOT, start=0, stamp=stamp) == (4, False)
    put(tier.ledger, removed, ROOT, chained=False)
    assert tier.admit(RUN[4:], namespace=ROOT, start=4, stamp=stamp) == (0, True)
    assert tier.admit(RUN[2:], namespace=ROOT, start=2, stamp=stamp) == (2, True)
    assert remembered(tier) == 8


def test_each_run_is_judged_for_itself(tier: DiskTier) -> None:
    assert tier.admit(
        RUN[:2], namespace=ROOT, start=0, stamp=tier.ledger.stamp()
    ) == (0, True)
    assert admin.remove(tier.ledger, single_keys(*range(SLOTS))) == SLOTS
    assert tier.admit(
        RUN, namespace=ROOT, start=0, stamp=tier.ledger.stamp()
    ) == (12, False)


def test_of_many_runs_only_the_last_are_remembered(tier: DiskTier) -> None:
    for _ in range(300):
        tier.admit(RUN[:1], namespace=ROOT, start=0, stamp=tier.ledger.stamp())
    assert len(tier._store.admissions) == 256
