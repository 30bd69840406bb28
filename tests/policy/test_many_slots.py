"""What a policy does in a store of many slots: calls look at a sample of fixed size, `rank` and
`prepare` at all slots.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from pagoda.ledger.columns import NO_PARENT, NOT_READY, Columns
from pagoda.policy import NAMES, Ghosts, Newcomers, Policy, make
from pagoda.policy.eviction_queue import (
    RANKED_AT_ONCE,
    SAMPLE,
    EvictionQueue,
    sampled_slots,
)

SLOTS = 65_536
CHAIN = 100  # chunks of a prompt
STEP = 1 << 16
BEGIN = 10**15
NOW = 10**12
# of a sample
MOST_ROWS = 16_384

Rows = NDArray[np.int64]


def full_columns(
    slots: int = SLOTS, seed: int = 0, chain: int = CHAIN
) -> Columns:
    """Return columns of a full store: prompts of `chain` chunks in neighbouring slots, used in
    random order.
    """
    columns = Columns(None, slots)
    columns.reset()
    rng = np.random.default_rng(seed)
    rows = np.arange(slots)
    prompts = rows // chain
    position = rows % chain
    columns.generation[:] = rows + 1
    columns.position[:] = position
    columns.last_use[:] = (
        BEGIN + rng.permutation(prompts.max() + 1)[prompts] * STEP - position
    )
    columns.parent_slot[:] = np.where(position > 0, rows - 1, NO_PARENT)
    columns.parent_generation[:] = np.where(position > 0, rows, 0)
    columns.hits[:] = rng.integers(0, 3, slots)
    return columns


def stamp_of(columns: Columns) -> int:
    """Return the recency of a request after all others."""
    return int(columns.last_use[columns.last_use != NOT_READY].max()) + STEP


def empty(columns: Columns, rows: Rows) -> None:
    """Empty these rows, as the ledger does."""
    columns.generation[rows] = columns.generation.max() + np.uint64(1)
    columns.last_use[rows] = NOT_READY


def has_child(columns: Columns, rows: Rows) -> NDArray[np.bool_]:
    """Return for each row whether a chunk that is not among these rows follows it."""
    there = np.flatnonzero(
        (columns.last_use != NOT_READY) & (columns.parent_slot >= 0)
    )
    there = there[~np.isin(there, rows)]
    parents = columns.parent_slot[there]
    linked = columns.generation[parents] == columns.parent_generation[there]
    return np.isin(rows, parents[linked])


class Watched(np.ndarray):  # type: ignore[type-arg]
    """A column that records how many of its values are read at once."""

    read: Callable[[int], None]

    def __getitem__(self, key: object) -> object:
        found = self.view(np.ndarray)[key]
        self.read(np.size(found))
        return found

    def __array_ufunc__(
        self, ufunc: object, method: str, *inputs: object, **options: object
    ) -> object:
        self.read(self.size)
        plain = [np.asarray(each) for each in inputs]
        return getattr(ufunc, method)(*plain, **options)

    def __array_function__(
        self, function: object, types: object, args: object, options: object
    ) -> object:
        self.read(self.size)
        return super().__array_function__(function, types, args, options)

    def copy(self, *options: object) -> object:
        self.read(self.size)
        return np.array(self)

    def astype(self, *options: object, **more: object) -> object:
        self.read(self.size)
        return np.asarray(self).astype(*options, **more)


class WatchedHints:
    """Columns that record the largest number of values that is read at once."""

    def __init__(self, columns: Columns) -> None:
        self.slots = columns.slots
        self.capacity = columns.capacity
        self.backed = columns.backed
        self.most = 0
        for name in (
            "generation",
            "last_use",
            "lease_until",
            "parent_slot",
            "parent_generation",
            "hits",
            "position",
        ):
            setattr(self, name, self._watched(getattr(columns, name)))
        self.ghosts = Ghosts(
            self._watched(columns.ghosts.last_use),
            self._watched(columns.ghosts.hits),
        )
        self.forgotten = columns.forgotten
        self.contexts = None

    def _watched(self, column: NDArray[np.generic]) -> Watched:
        watched = column.view(Watched)
        watched.read = self._read
        return watched

    def _read(self, count: int) -> None:
        self.most = max(self.most, count)


def newcomers(stamp: int, known: bool) -> Newcomers:
    count = 16
    return Newcomers(
        stamp - np.arange(count),
        np.full(count, known, np.uint32),
        np.full(count, BEGIN * known),
    )


@pytest.mark.parametrize("name", NAMES)
def test_no_call_reads_all_slots(name: str) -> None:
    columns = full_columns()
    hints = WatchedHints(columns)
    policy = make(name, hints)  # type: ignore[arg-type]
    policy.share(np.zeros(policy.shared_values))
    stamp = stamp_of(columns)
    hints.most = 0
    for turn in range(20):
        stamp += STEP
        policy.admit(newcomers(stamp, known=turn % 2 > 0), 0, NOW)
        rows = policy.victims(16, stamp, NOW)
        assert len(rows) == 16
        policy.touch(rows[:4], np.full(4, stamp))
        empty(columns, rows[4:])
        if turn == 10:
            seen = hints.most
            policy.rank(0, stamp, NOW)
            hints.most = seen
    assert 0 < hints.most <= MOST_ROWS < SLOTS


@pytest.mark.parametrize("name", NAMES)
def test_a_call_ranks_no_more_than_a_sample(name: str) -> None:
    columns = full_columns()
    policy = make(name, columns)
    ranked: list[int] = []
    for queue in vars(policy).values():
        if isinstance(queue, EvictionQueue):
            count_ranks(queue, ranked)
    stamp = stamp_of(columns)
    for _ in range(20):
        rows = policy.victims(16, stamp, NOW)
        empty(columns, rows)
    assert ranked
    assert max(ranked) <= SAMPLE


def count_ranks(queue: EvictionQueue, ranked: list[int]) -> None:
    """Add to `ranked` how many slots the queue ranks, each time."""
    rank = queue._rank

    def counting(*chosen: object) -> object:
        ranks = rank(*chosen)
        ranked.append(len(ranks))
        return ranks

    queue._rank = counting


def ages_of(columns: Columns, rows: Rows) -> NDArray[np.float64]:
    """Return for each row which share of all chunks is older."""
    uses = np.sort(columns.last_use[columns.last_use != NOT_READY])
    return np.searchsorted(uses, columns.last_use[rows]) / len(uses)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_without_the_upkeep_thread_a_sample_gives_victims(name: str) -> None:
    columns = full_columns()
    columns.hits[:] = 0
    policy = make(name, columns)
    columns.lease_until[CHAIN - 1 :: 7 * CHAIN] = NOW + 10
    stamp = stamp_of(columns)
    ages: list[float] = []
    for _ in range(300):
        rows = policy.victims(16, stamp, NOW)
        assert len(rows) == 16 == len(set(rows.tolist()))
        assert (columns.last_use[rows] < stamp).all()
        assert (columns.lease_until[rows] <= NOW).all()
        ages += ages_of(columns, rows).tolist()
        empty(columns, rows)
    assert np.mean(ages) < 0.2, np.mean(ages)


@pytest.mark.parametrize("name", NAMES)
def test_of_prompts_in_neighbouring_slots_a_sample_names_tails_first(
    name: str,
) -> None:
    columns = full_columns()
    policy = make(name, columns)
    stamp = stamp_of(columns)
    for _ in range(100):
        rows = policy.victims(16, stamp, NOW)
        assert not has_child(columns, rows).any()
        empty(columns, rows)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_ranked_is_checked_before_it_is_named(name: str) -> None:
    columns = full_columns()
    policy = make(name, columns)
    stamp = stamp_of(columns)
    policy.rank(0, stamp, NOW)
    first = policy.victims(64, stamp, NOW)
    touched = first[:8]
    leased = first[8:16]
    gone = first[16:24]
    columns.last_use[touched] = stamp
    columns.lease_until[leased] = NOW + 1
    empty(columns, gone)
    again = policy.victims(64, stamp, NOW)
    assert len(again) == 64
    assert not np.isin(again, np.concatenate([touched, leased, gone])).any()


@pytest.mark.parametrize("name", ["lru", "hindsight"])
def test_ranked_slots_are_evicted_in_the_order_of_the_whole_store(
    name: str,
) -> None:
    columns = full_columns()
    policy = make(name, columns)
    stamp = stamp_of(columns)
    oldest = np.sort(columns.last_use)
    policy.rank(0, stamp, NOW)
    gone: list[int] = []
    for _ in range(SLOTS // 16 // 64):
        rows = policy.victims(64, stamp, NOW)
        gone += columns.last_use[rows].tolist()
        empty(columns, rows)
    if name == "lru":
        assert gone == oldest[: len(gone)].tolist()
    assert len(gone) == SLOTS // 16


@pytest.mark.parametrize("name", NAMES)
def test_few_are_left_when_a_quarter_of_the_ranked_is(name: str) -> None:
    columns = full_columns()
    policy = make(name, columns)
    stamp = stamp_of(columns)
    assert policy.is_low
    policy.rank(0, stamp, NOW)
    assert not policy.is_low
    consumed = 0
    while not policy.is_low:
        rows = policy.victims(64, stamp, NOW)
        consumed += len(rows)
        empty(columns, rows)
        assert consumed <= 2 * SLOTS // 16
    assert consumed >= SLOTS // 16 // 2
    policy.prepare(stamp, NOW)
    assert not policy.is_low


@pytest.mark.parametrize("name", NAMES)
def test_a_store_of_few_slots_needs_no_thread(name: str) -> None:
    columns = full_columns(RANKED_AT_ONCE)
    policy = make(name, columns)
    assert not policy.is_low
    assert len(policy.victims(16, stamp_of(columns), NOW)) == 16
    assert not policy.is_low


@pytest.mark.parametrize("name", NAMES)
def test_leased_slots_of_a_sample_are_named_only_where_it_has_no_others(
    name: str,
) -> None:
    columns = full_columns()
    policy: Policy = make(name, columns)
    columns.lease_until[:] = NOW + 10
    stamp = stamp_of(columns)
    assert len(policy.victims(16, stamp, NOW)) == 16
    # the tails of some prompts: nearly every sample has some of them
    columns.lease_until[CHAIN - 10 :: CHAIN] = 0
    for tail in range(1, 10):
        columns.lease_until[CHAIN - 10 + tail :: CHAIN] = 0
    rows = policy.victims(16, stamp, NOW)
    assert (columns.lease_until[rows] <= NOW).all()


def test_nothing_is_ranked_again_for_a_prompt_that_is_longer_than_the_store() -> (
    None
):
    columns = full_columns()
    policy = make("lru", columns)
    stamp = int(columns.last_use.min())
    policy.rank(0, stamp, NOW)
    ranked: list[int] = []
    count_ranks(policy._queue, ranked)  # type: ignore[attr-defined]
    assert not len(policy.victims(16, stamp, NOW))
    assert not ranked


@pytest.mark.parametrize("slots", [8193, 65_536, 1_000_003])
def test_a_sample_is_of_distinct_slots_in_order(slots: int) -> None:
    seen = np.zeros(slots, np.bool_)
    for number in range(400):
        rows = sampled_slots(slots, SAMPLE, number)
        assert (np.diff(rows) > 0).all()
        assert 0 <= rows[0] <= rows[-1] < slots
        assert SAMPLE * 0.7 < len(rows) <= SAMPLE
        seen[rows] = True
    assert seen.mean() > 0.4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chain", [64, 96, 128])
def test_prompts_of_a_regular_length_give_tails_in_each_sample(
    name: str, chain: int
) -> None:
    columns = full_columns(chain=chain)
    stamp = stamp_of(columns)
    for turn in range(30):
        # a new process each time
        rows = make(name, columns).victims(16, stamp + turn * STEP, NOW)
        assert len(rows) == 16
        assert not has_child(columns, rows).any()


@pytest.mark.parametrize("name", NAMES)
def test_of_one_prompt_that_fills_the_store_a_sample_gives_victims(
    name: str,
) -> None:
    columns = full_columns(chain=SLOTS)
    policy = make(name, columns)
    stamp = stamp_of(columns)
    for _ in range(20):
        rows = policy.victims(16, stamp, NOW)
        assert len(rows) == 16
        empty(columns, rows)
