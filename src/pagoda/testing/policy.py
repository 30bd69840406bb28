"""What a policy is: a suite that every policy passes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagoda.ledger.columns import NO_PARENT, NOT_READY, Columns, columns_bytes
from pagoda.policy import Hints, Policy

Rows = NDArray[np.int64]
_NOW = 10**12
_MINUTE = 60 * 10**9
_NEWEST = 10**15


class PolicyConformance:
    """Subclass it in a test module, as `class TestMine(PolicyConformance)`, and write `make_policy`.

    The columns are real ones, `slots` rows long; a row is ready unless `last_use` is NOT_READY.
    """

    slots = 400

    def make_policy(self, hints: Hints) -> Policy:
        """A new policy over these columns."""
        raise NotImplementedError

    def columns(self, tmp_path: Path) -> Columns:
        """New columns of a store that holds nothing."""
        path = tmp_path / "columns"
        path.write_bytes(bytes(columns_bytes(self.slots)))
        columns = Columns(path, self.slots)
        columns.reset()
        return columns

    def fill(self, columns: Columns, seed: int, share: float = 0.8, leased: float = 0.1) -> Rows:
        """Make a random share of the rows ready, some of them leased; returns the ready ones."""
        rng = np.random.default_rng(seed)
        rows = np.flatnonzero(rng.random(self.slots) < share).astype(np.int64)
        self.make_ready(columns, rows, rng.integers(1, 10**6, len(rows)))
        columns.hits[rows] = rng.integers(0, 5, len(rows))
        held = rows[rng.random(len(rows)) < leased]
        columns.lease_until[held] = _NOW + rng.integers(1, _MINUTE, len(held))
        return rows

    def make_ready(self, columns: Columns, rows: Rows, last_use: Rows) -> None:
        """Let these rows hold heads of chains, as a commit does."""
        columns.generation[rows] += np.uint64(1)
        columns.last_use[rows] = last_use
        columns.lease_until[rows] = 0
        columns.hits[rows] = 0
        columns.position[rows] = 0
        columns.parent_slot[rows] = NO_PARENT

    def evict(self, columns: Columns, policy: Policy, rows: Rows) -> None:
        """Empty these rows, as the ledger does, and tell the policy."""
        columns.generation[rows] += np.uint64(1)
        columns.last_use[rows] = NOT_READY
        columns.lease_until[rows] = 0
        policy.evicted(rows)

    def test_nothing_ready_nothing_to_evict(self, tmp_path: Path) -> None:
        policy = self.make_policy(self.columns(tmp_path))
        assert len(policy.victims(10, _NEWEST, _NOW)) == 0

    def test_victims_are_distinct_ready_and_no_more_than_asked(self, tmp_path: Path) -> None:
        for seed in range(10):
            columns = self.columns(tmp_path)
            ready = self.fill(columns, seed)
            policy = self.make_policy(columns)
            for count in (0, 1, 7, len(ready), self.slots * 2):
                victims = policy.victims(count, _NEWEST, _NOW)
                assert victims.ndim == 1 and victims.dtype.kind == "i"
                assert len(victims) <= count
                assert len(np.unique(victims)) == len(victims)
                assert np.isin(victims, ready).all()

    def test_enough_victims_if_there_are_enough(self, tmp_path: Path) -> None:
        columns = self.columns(tmp_path)
        ready = self.fill(columns, 1, leased=0.0)
        for count in (1, 5, len(ready)):
            assert len(self.make_policy(columns).victims(count, _NEWEST, _NOW)) == count

    def test_leased_slots_come_last_and_the_soonest_to_end_first(self, tmp_path: Path) -> None:
        columns = self.columns(tmp_path)
        ready = self.fill(columns, 2, leased=0.3)
        free = int((columns.lease_until[ready] <= _NOW).sum())
        policy = self.make_policy(columns)
        assert (columns.lease_until[policy.victims(free, _NEWEST, _NOW)] <= _NOW).all()
        victims = policy.victims(self.slots, _NEWEST, _NOW)
        leases = columns.lease_until[victims]
        assert (leases[:free] <= _NOW).all()
        assert (leases[free:] > _NOW).all()
        assert (np.diff(leases[free:]) >= 0).all()

    def test_a_lease_that_ended_protects_nothing(self, tmp_path: Path) -> None:
        columns = self.columns(tmp_path)
        rows = np.arange(4, dtype=np.int64)
        self.make_ready(columns, rows, rows + 1)
        columns.lease_until[rows] = _NOW
        assert sorted(self.make_policy(columns).victims(4, _NEWEST, _NOW).tolist()) == [0, 1, 2, 3]

    def test_a_newcomer_older_than_all_that_is_kept_evicts_nobody(self, tmp_path: Path) -> None:
        columns = self.columns(tmp_path)
        ready = self.fill(columns, 3)
        oldest = int(columns.last_use[ready].min())
        assert len(self.make_policy(columns).victims(10, oldest, _NOW)) == 0

    def test_no_victim_is_as_young_as_the_newcomer(self, tmp_path: Path) -> None:
        columns = self.columns(tmp_path)
        ready = self.fill(columns, 4)
        stamp = int(np.median(columns.last_use[ready]))
        policy = self.make_policy(columns)
        for count in (3, self.slots):
            assert (columns.last_use[policy.victims(count, stamp, _NOW)] < stamp).all()

    def test_asked_again_it_answers_the_same(self, tmp_path: Path) -> None:
        columns = self.columns(tmp_path)
        self.fill(columns, 5)
        policy = self.make_policy(columns)
        first = policy.victims(20, _NEWEST, _NOW)
        assert policy.victims(20, _NEWEST, _NOW).tolist() == first.tolist()

    def test_touched_slots_are_young(self, tmp_path: Path) -> None:
        columns = self.columns(tmp_path)
        self.fill(columns, 6, leased=0.0)
        policy = self.make_policy(columns)
        saved = policy.victims(5, _NEWEST, _NOW)
        policy.touch(saved, np.full(5, 2 * 10**6, dtype=np.int64))
        others = policy.victims(self.slots, 2 * 10**6, _NOW)
        assert len(others) > 0
        assert not np.isin(saved, others).any()

    def test_an_older_touch_makes_nothing_older(self, tmp_path: Path) -> None:
        columns = self.columns(tmp_path)
        rows = np.arange(3, dtype=np.int64)
        self.make_ready(columns, rows, np.array([50, 60, 70], dtype=np.int64))
        self.make_policy(columns).touch(rows, np.array([10, 60, 90], dtype=np.int64))
        assert columns.last_use[rows].tolist() == [50, 60, 90]

    def test_all_can_be_evicted_and_none_twice(self, tmp_path: Path) -> None:
        columns = self.columns(tmp_path)
        ready = self.fill(columns, 7)
        policy = self.make_policy(columns)
        gone: list[int] = []
        while len(victims := policy.victims(13, _NEWEST, _NOW)):
            gone += victims.tolist()
            self.evict(columns, policy, victims)
            assert len(gone) <= len(ready)
        assert sorted(gone) == ready.tolist()

    def test_a_slot_used_again_is_not_taken_for_what_it_held(self, tmp_path: Path) -> None:
        columns = self.columns(tmp_path)
        rows = np.arange(20, dtype=np.int64)
        self.make_ready(columns, rows, rows + 100)
        policy = self.make_policy(columns)
        first = policy.victims(5, 1000, _NOW)
        self.evict(columns, policy, first)
        self.make_ready(columns, first, np.full(5, 2000, dtype=np.int64))
        again = policy.victims(self.slots, 1000, _NOW)
        assert not np.isin(again, first).any()
        assert len(again) == 15

    def test_admit_says_one_word_a_key(self, tmp_path: Path) -> None:
        policy = self.make_policy(self.columns(tmp_path))
        assert policy.admit([]) == []
        words = policy.admit([bytes([i]) * 32 for i in range(5)])
        assert len(words) == 5
        assert all(isinstance(word, bool) for word in words)

    def test_lost_columns_do_no_harm(self, tmp_path: Path) -> None:
        columns = self.columns(tmp_path)
        self.fill(columns, 8)
        policy = self.make_policy(columns)
        policy.victims(5, _NEWEST, _NOW)
        for column in (columns.last_use, columns.generation, columns.parent_slot, columns.parent_generation):
            column[:] = 0  # what a page that never reached the disk reads as
        victims = policy.victims(self.slots * 2, _NEWEST, _NOW)
        assert len(np.unique(victims)) == len(victims)
        assert ((victims >= 0) & (victims < self.slots)).all()
