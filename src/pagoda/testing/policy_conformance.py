"""The conformance suite of policies: every policy must pass it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagoda.ledger.columns import NO_PARENT, NOT_READY, Columns, columns_bytes
from pagoda.policy import Hints, Newcomers, Policy

Rows = NDArray[np.int64]
_NOW = 10**12
_MINUTE = 60 * 10**9
_NEWEST = 10**15


class PolicyConformance:
    """Subclass it in a test module, as `class TestMine(PolicyConformance)`, and write
    `make_policy`.

    The columns are real ones, `slots` rows long; a row is ready unless `last_use` is NOT_READY.
    """

    slots = 400

    def make_policy(self, hints: Hints) -> Policy:
        """Return a new policy over these columns."""
        raise NotImplementedError

    def columns(self, tmp_path: Path) -> Columns:
        """Return new columns of an empty store."""
        path = tmp_path / "columns"
        path.write_bytes(bytes(columns_bytes(self.slots)))
        columns = Columns(path, self.slots)
        columns.reset()
        return columns

    def fill(
        self, columns: Columns, seed: int, share: float = 0.8, leased: float = 0.1
    ) -> Rows:
        """Make a random share of the rows ready, some of them leased; returns the ready rows."""
        rng = np.random.default_rng(seed)
        rows = np.flatnonzero(rng.random(self.slots) < share).astype(np.int64)
        self.make_ready(columns, rows, rng.integers(1, 10**6, len(rows)))
        columns.hits[rows] = rng.integers(0, 5, len(rows))
        held = rows[rng.random(len(rows)) < leased]
        columns.lease_until[held] = _NOW + rng.integers(1, _MINUTE, len(held))
        return rows

    def filled(
        self, tmp_path: Path, seed: int, leased: float = 0.1
    ) -> tuple[Columns, Rows, Policy]:
        """Return new columns, the rows that `fill` made ready, and a policy over them."""
        columns = self.columns(tmp_path)
        ready = self.fill(columns, seed, leased=leased)
        return columns, ready, self.make_policy(columns)

    def make_ready(self, columns: Columns, rows: Rows, last_use: Rows) -> None:
        """Put heads of chains into these rows, as a commit does."""
        columns.generation[rows] += np.uint64(1)
        columns.last_use[rows] = last_use
        columns.lease_until[rows] = 0
        columns.hits[rows] = 0
        columns.position[rows] = 0
        columns.parent_slot[rows] = NO_PARENT

    def evict(self, columns: Columns, rows: Rows) -> None:
        """Empty these rows, as the ledger does."""
        columns.generation[rows] += np.uint64(1)
        columns.last_use[rows] = NOT_READY
        columns.lease_until[rows] = 0
        columns.hits[rows] = 0

    def test_nothing_ready_nothing_to_evict(self, tmp_path: Path) -> None:
        policy = self.make_policy(self.columns(tmp_path))
        assert len(policy.victims(10, _NEWEST, _NOW)) == 0

    def test_victims_are_distinct_ready_and_no_more_than_asked(
        self, tmp_path: Path
    ) -> None:
        for seed in range(10):
            _, ready, policy = self.filled(tmp_path, seed)
            for count in (0, 1, 7, len(ready), self.slots * 2):
                victims = policy.victims(count, _NEWEST, _NOW)
                assert victims.ndim == 1
                assert victims.dtype.kind == "i"
                assert len(victims) <= count
                assert len(np.unique(victims)) == len(victims)
                assert np.isin(victims, ready).all()

    def test_enough_victims_if_there_are_enough(self, tmp_path: Path) -> None:
        columns = self.columns(tmp_path)
        ready = self.fill(columns, 1, leased=0.0)
        for count in (1, 5, len(ready)):
            assert (
                len(self.make_policy(columns).victims(count, _NEWEST, _NOW))
                == count
            )

    def test_leased_slots_come_last_and_the_soonest_to_end_first(
        self, tmp_path: Path
    ) -> None:
        columns, ready, policy = self.filled(tmp_path, 2, leased=0.3)
        free = int((columns.lease_until[ready] <= _NOW).sum())
        assert (
            columns.lease_until[policy.victims(free, _NEWEST, _NOW)] <= _NOW
        ).all()
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
        assert sorted(
            self.make_policy(columns).victims(4, _NEWEST, _NOW).tolist()
        ) == [0, 1, 2, 3]

    def test_a_newcomer_older_than_all_that_is_kept_evicts_nobody(
        self, tmp_path: Path
    ) -> None:
        columns, ready, policy = self.filled(tmp_path, 3)
        oldest = int(columns.last_use[ready].min())
        assert len(policy.victims(10, oldest, _NOW)) == 0

    def test_no_victim_is_as_young_as_the_newcomer(self, tmp_path: Path) -> None:
        columns, ready, policy = self.filled(tmp_path, 4)
        stamp = int(np.median(columns.last_use[ready]))
        for count in (3, self.slots):
            assert (
                columns.last_use[policy.victims(count, stamp, _NOW)] < stamp
            ).all()

    def test_asked_again_it_answers_the_same(self, tmp_path: Path) -> None:
        _, _, policy = self.filled(tmp_path, 5)
        first = policy.victims(20, _NEWEST, _NOW)
        assert policy.victims(20, _NEWEST, _NOW).tolist() == first.tolist()

    def test_touched_slots_are_young(self, tmp_path: Path) -> None:
        _, _, policy = self.filled(tmp_path, 6, leased=0.0)
        saved = policy.victims(5, _NEWEST, _NOW)
        policy.touch(saved, np.full(5, 2 * 10**6, dtype=np.int64))
        others = policy.victims(self.slots, 2 * 10**6, _NOW)
        assert len(others) > 0
        assert not np.isin(saved, others).any()

    def test_an_older_touch_makes_nothing_older(self, tmp_path: Path) -> None:
        columns = self.columns(tmp_path)
        rows = np.arange(3, dtype=np.int64)
        self.make_ready(columns, rows, np.array([50, 60, 70], dtype=np.int64))
        self.make_policy(columns).touch(
            rows, np.array([10, 60, 90], dtype=np.int64)
        )
        assert columns.last_use[rows].tolist() == [50, 60, 90]

    def test_all_can_be_evicted_and_none_twice(self, tmp_path: Path) -> None:
        columns, ready, policy = self.filled(tmp_path, 7)
        gone: list[int] = []
        while len(victims := policy.victims(13, _NEWEST, _NOW)):
            gone += victims.tolist()
            self.evict(columns, victims)
            assert len(gone) <= len(ready)
        assert sorted(gone) == ready.tolist()

    def test_a_slot_used_again_is_not_taken_for_what_it_held(
        self, tmp_path: Path
    ) -> None:
        columns = self.columns(tmp_path)
        rows = np.arange(20, dtype=np.int64)
        self.make_ready(columns, rows, rows + 100)
        policy = self.make_policy(columns)
        first = policy.victims(5, 1000, _NOW)
        self.evict(columns, first)
        self.make_ready(columns, first, np.full(5, 2000, dtype=np.int64))
        again = policy.victims(self.slots, 1000, _NOW)
        assert not np.isin(again, first).any()
        assert len(again) == 15

    def newcomers(self, seed: int, count: int, stamp: int) -> Newcomers:
        """Return the next chunks of one chain; half of them have ghosts."""
        rng = np.random.default_rng(seed)
        known = rng.random(count) < 0.5
        hits = rng.integers(0, 9, count) * known
        last_use = rng.integers(1, 10**6, count) * known
        return Newcomers(
            stamp - np.arange(count), hits.astype(np.uint32), last_use
        )

    def random_tree(self, columns: Columns, seed: int) -> Rows:
        """Make branching chains, some with older parents, some leased, some unreachable; returns
        ready rows.
        """
        rng = np.random.default_rng(seed)
        rows = np.flatnonzero(rng.random(self.slots) < 0.8).astype(np.int64)
        self.make_ready(columns, rows, rng.integers(1, 10**6, len(rows)))
        columns.hits[rows] = rng.integers(0, 5, len(rows))
        parents = rows[
            np.maximum(np.arange(len(rows)) - rng.integers(1, 9, len(rows)), 0)
        ]
        for i in (1 + np.flatnonzero(rng.random(len(rows) - 1) < 0.9)).tolist():
            self.put_behind(columns, int(rows[i]), int(parents[i]))
        columns.lease_until[rows[rng.random(len(rows)) < 0.1]] = (
            _NOW + rng.integers(1, _MINUTE)
        )
        gone = rng.random(len(rows)) < 0.03
        self.evict(columns, rows[gone])
        return rows[~gone]

    def branching(
        self, tmp_path: Path, seed: int
    ) -> tuple[Columns, Rows, Policy]:
        """Return new columns, the ready rows of a `random_tree` in them, and a policy over them."""
        columns = self.columns(tmp_path)
        ready = self.random_tree(columns, seed)
        return columns, ready, self.make_policy(columns)

    def put_behind(self, columns: Columns, row: int, parent: int) -> None:
        """Put into a row the chunk that follows another row's chunk in a prompt."""
        columns.parent_slot[row], columns.parent_generation[row] = (
            parent,
            columns.generation[parent],
        )
        columns.position[row] = columns.position[parent] + 1

    def check_leaf_first(self, columns: Columns, victims: Rows) -> None:
        """Check that no victim has a child in the store, unless the child is evicted before it."""
        # those that stay are later than all victims
        turn = np.full(self.slots, self.slots)
        turn[victims] = np.arange(len(victims))
        children = np.flatnonzero(
            (columns.last_use != NOT_READY) & (columns.parent_slot >= 0)
        )
        parents = columns.parent_slot[children]
        is_there = (
            columns.generation[parents] == columns.parent_generation[children]
        )
        wrong = (
            is_there
            & (turn[parents] < self.slots)
            & (turn[children] >= turn[parents])
        )
        assert len(np.unique(victims)) == len(victims) and not wrong.any(), (
            children[wrong].tolist()
        )

    def test_no_parent_goes_before_its_child(self, tmp_path: Path) -> None:
        for seed in range(20):
            columns, ready, policy = self.branching(tmp_path, seed)
            for count, stamp in (
                (1, _NEWEST),
                (17, _NEWEST),
                (17, 5 * 10**5),
                (self.slots, _NEWEST),
            ):
                victims = policy.victims(count, stamp, _NOW)
                self.check_leaf_first(columns, victims)
            assert sorted(victims.tolist()) == ready.tolist()

    def test_nor_when_some_are_touched_or_leased_after_it_was_looked_up(
        self, tmp_path: Path
    ) -> None:
        for seed in range(10):
            columns, ready, policy = self.branching(tmp_path, seed)
            rng = np.random.default_rng(seed)
            stamp = 10**6
            for _ in range(100):
                some = np.unique(ready[rng.integers(0, len(ready), 2)])
                some = some[columns.last_use[some] != NOT_READY]
                stamp += 10**3
                if rng.random() < 0.7:
                    asked = bool(rng.random() < 0.5)
                    policy.touch(some, np.full(len(some), stamp), asked)
                    columns.hits[some] += np.uint32(asked)
                else:
                    columns.lease_until[some] = _NOW + int(rng.integers(-50, 50))
                victims = policy.victims(
                    int(rng.integers(1, 12)),
                    stamp,
                    _NOW + int(rng.integers(0, 20)),
                )
                self.check_leaf_first(columns, victims)
                self.evict(columns, victims[: int(rng.integers(0, 4))])

    def test_nor_when_another_process_evicted_what_was_leased(
        self, tmp_path: Path
    ) -> None:
        for seed in range(5):
            columns, ready, policy = self.branching(tmp_path, seed)
            other = self.make_policy(columns)
            rng = np.random.default_rng(seed)
            columns.lease_until[ready[rng.random(len(ready)) < 0.2]] = (
                _NOW + _MINUTE
            )
            for turn in range(self.slots):
                victims = (policy, other)[turn % 2].victims(
                    int(rng.integers(1, 12)), _NEWEST, _NOW
                )
                self.check_leaf_first(columns, victims)
                self.evict(columns, victims)
                if (columns.last_use == NOT_READY).all():
                    break
            assert (columns.last_use == NOT_READY).all()

    def test_what_is_out_of_reach_goes_first(self, tmp_path: Path) -> None:
        columns = self.columns(tmp_path)
        rows = np.arange(40, dtype=np.int64)
        self.make_ready(columns, rows, 1000 + rows)
        for row in range(21, 40):
            self.put_behind(columns, row, row - 1)
        self.evict(columns, np.array([20]))
        assert self.make_policy(columns).victims(
            19, _NEWEST, _NOW
        ).tolist() == list(range(39, 20, -1))

    def test_admit_takes_a_leading_part_and_all_for_whom_there_is_room(
        self, tmp_path: Path
    ) -> None:
        _, _, policy = self.branching(tmp_path, 9)
        assert policy.admit(self.newcomers(0, 0, 10**6), 0, _NOW) == 0
        for seed, count in enumerate((1, 2, 7, 64)):
            for room in (0, 1, 3, 64, 100):
                admitted = policy.admit(
                    self.newcomers(seed, count, 10**6 + 100 * seed), room, _NOW
                )
                assert isinstance(admitted, int)
                assert min(room, count) <= admitted <= count

    def test_prepare_and_share_change_no_contract(self, tmp_path: Path) -> None:
        columns, ready, policy = self.branching(tmp_path, 10)
        values = np.zeros(policy.shared_values)
        gone: list[int] = []
        for turn in range(self.slots):
            stamp = _NEWEST + turn * 10**10
            policy.share(values)
            policy.prepare(stamp, _NOW)
            policy.admit(self.newcomers(turn, 3, stamp), 0, _NOW)
            policy.prepare(stamp, _NOW)
            victims = policy.victims(9, stamp, _NOW)
            assert policy.victims(9, stamp, _NOW).tolist() == victims.tolist()
            self.check_leaf_first(columns, victims)
            self.evict(columns, victims)
            gone += victims.tolist()
            if not len(victims):
                break
        assert sorted(gone) == ready.tolist()

    def test_prepare_beside_the_other_calls(self, tmp_path: Path) -> None:
        columns, _, policy = self.branching(tmp_path, 11)
        end = threading.Event()

        def prepare() -> None:
            stamp = _NEWEST
            while not end.is_set():
                stamp += 10**12
                policy.prepare(stamp, _NOW)

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(prepare)
            try:
                for turn in range(50):
                    policy.admit(self.newcomers(turn, 3, _NEWEST + turn), 0, _NOW)
                    victims = policy.victims(5, _NEWEST, _NOW)
                    self.check_leaf_first(columns, victims)
                    self.evict(columns, victims)
                    policy.share(np.zeros(policy.shared_values))
            finally:
                end.set()
            running.result()

    def test_damaged_shared_values_do_no_harm(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(12)
        for damage in (np.nan, np.inf, -np.inf, -1.0, 1e308, 1e18, 0.5, None):
            columns, _, policy = self.branching(tmp_path, 12)
            count = policy.shared_values
            values = rng.normal(0, 10.0 ** rng.integers(-9, 300)) * rng.random(
                count
            )
            if damage is not None:
                values = np.zeros(count)
                values[rng.random(count) < 0.5] = damage
                values[:1] = damage
            with np.errstate(all="raise", under="ignore"):
                for turn in range(3):
                    policy.share(values)
                    policy.prepare(_NEWEST + turn * 10**10, _NOW)
                    policy.admit(
                        self.newcomers(turn, 5, _NEWEST + turn * 10**10), 2, _NOW
                    )
                    self.check_leaf_first(
                        columns, policy.victims(9, _NEWEST, _NOW)
                    )
            assert np.isfinite(values).all()

    def test_two_processes_over_the_same_columns(self, tmp_path: Path) -> None:
        columns = self.columns(tmp_path)
        other_columns = Columns(tmp_path / "columns", self.slots)
        ready = self.random_tree(columns, 13)
        ours = self.make_policy(columns)
        theirs = self.make_policy(other_columns)
        values = np.zeros(ours.shared_values)
        rng = np.random.default_rng(13)
        stamp = 10**6
        gone: list[int] = []
        while len(gone) < len(ready):
            stamp += 10**9
            for policy in (ours, theirs):
                policy.share(values)
                policy.prepare(stamp, _NOW)
                some = ready[rng.integers(0, len(ready), 3)]
                some = np.unique(some[columns.last_use[some] != NOT_READY])
                policy.touch(some, np.full(len(some), stamp - 10))
                columns.hits[some] += np.uint32(1)
                victims = policy.victims(7, stamp, _NOW)
                assert not np.isin(victims, gone).any()
                self.check_leaf_first(other_columns, victims)
                self.evict(columns, victims)
                gone += victims.tolist()
        assert sorted(gone) == ready.tolist()

    def test_the_same_calls_have_the_same_answers(self, tmp_path: Path) -> None:
        answers = []
        for _ in range(2):
            columns, ready, policy = self.branching(tmp_path, 14)
            stamp = _NEWEST
            values = np.zeros(policy.shared_values)
            said: list[object] = []
            for turn in range(30):
                stamp += 10**9
                some = ready[turn : turn + 3]
                some = some[columns.last_use[some] != NOT_READY]
                policy.touch(some, np.full(len(some), stamp))
                columns.hits[some] += np.uint32(1)
                said.append(policy.admit(self.newcomers(turn, 6, stamp), 1, _NOW))
                victims = policy.victims(5, stamp, _NOW)
                said.append(victims.tolist())
                self.evict(columns, victims[:2])
                policy.share(values)
                policy.prepare(stamp, _NOW)
            answers.append((said, values.tolist()))
        assert answers[0] == answers[1]

    def test_lost_columns_do_no_harm(self, tmp_path: Path) -> None:
        columns, _, policy = self.filled(tmp_path, 8)
        policy.victims(5, _NEWEST, _NOW)
        for column in (
            columns.last_use,
            columns.generation,
            columns.parent_slot,
            columns.parent_generation,
        ):
            column[:] = 0  # what is read from a page that never reached the disk
        victims = policy.victims(self.slots * 2, _NEWEST, _NOW)
        assert len(np.unique(victims)) == len(victims)
        assert ((victims >= 0) & (victims < self.slots)).all()
