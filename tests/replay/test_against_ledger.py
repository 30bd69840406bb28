"""The simulated tier and a real ledger, side by side: the same chunks in the same slots after each
request.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pagoda.base.metrics import Reason
from pagoda.cache.lookup_call import LEASE_SECONDS
from pagoda.ledger import Ledger, Refused, Reserved, admin
from pagoda.ledger.request_contexts import Asked
from pagoda.ledger.upkeep_thread import UpkeepThread
from pagoda.policy.prefill_cost import PrefillCost
from pagoda.policy.reuse_context import Ending
from pagoda.testing.fake_clock import FakeClock
from pagoda_tools.replay import Request, Simulation, TierSpec
from pagoda_tools.replay.simulate import _ENDINGS
from pagoda_tools.replay.simulated_tier import marks_of_ids
from tests.ledger.support import PATIENT_SECONDS, TENANT, spec
from tests.replay.traces import chained, request, sample

POLICIES = ("lru", "hindsight")
COLUMNS = ("last_use", "hits", "position", "parent_slot")


class Real:
    """A ledger that serves one request after the other and learns at the same times as the
    simulator.
    """

    def __init__(
        self,
        root: Path,
        slots: int,
        policy: str,
        with_hints: bool = False,
        cost: PrefillCost | None = None,
    ) -> None:
        self._clock = FakeClock()
        self._policy = policy
        self.ledger = Ledger.open(
            spec(root, slots), policy, self._clock, cost=cost
        )
        if with_hints:
            assert self.ledger.contexts.keep()
        self.ledger.namespaces.register(TENANT, {"model": "test"})
        self._begun = self._clock.monotonic_ns()
        self._shared = self._prepared = -(10**9)

    def request(self, asked: Request) -> int:
        now = self._begun + round(asked.timestamp_ms * 1e6)
        self._clock.advance((now - self._clock.monotonic_ns()) / 1e9)
        self._upkeep(now)
        keys = [
            mark.tobytes() + bytes(24) for mark in marks_of_ids(asked.hash_ids)
        ]
        stamp = self.ledger.stamp()
        contexts = self.ledger.contexts
        said = said_of(asked, keys)
        slots = self.ledger.match_prefix(
            keys,
            stamp=stamp,
            # as in a look-up; see `SimulatedTier`
            lease_seconds=0.0 if self._policy == "lru" else LEASE_SECONDS,
            deadline_seconds=PATIENT_SECONDS,
        ).slots
        have = len(slots)
        context = contexts.arriving(said, int(slots[-1]) if have else None, stamp)
        self._store(keys, have, stamp, context)
        contexts.note_answer(
            keys,
            said,
            retain_seconds=asked.retain_seconds or 0.0,
            context=context,
            deadline_seconds=PATIENT_SECONDS,
        )
        return have

    def _store(
        self, keys: Sequence[bytes], have: int, stamp: int, context: int
    ) -> None:
        """Store the rest in windows, as `StoreCall` does."""
        window = self.ledger.window
        for at in range(have, len(keys), window):
            end = min(at + window, len(keys))
            outcomes = self.ledger.reserve(
                keys[at:end],
                namespace=TENANT,
                start=at,
                parent=keys[at - 1] if at else None,
                stamp=stamp,
                context=context,
                deadline_seconds=PATIENT_SECONDS,
            )
            self.ledger.commit(
                [item for item in outcomes if isinstance(item, Reserved)],
                deadline_seconds=PATIENT_SECONDS,
            )
            refused = [item for item in outcomes if isinstance(item, Refused)]
            if refused:
                if refused[0].reason is Reason.NOT_ADMITTED:
                    self.ledger.refuse(
                        keys[end:], start=end, stamp=stamp, context=context
                    )
                return

    def _upkeep(self, now: int) -> None:
        learnt = self.ledger.upkeep_thread.learned
        if learnt is not None and now - self._shared >= 10**9:
            self._shared = now
            self.ledger.evictor.share(learnt)
        if learnt is not None and now - self._prepared >= 10**8:
            self._prepared = now
            self.ledger.upkeep_thread._prepare()


def said_of(asked: Request, keys: Sequence[bytes]) -> Asked:
    """Return what a request says of itself, as the ledger takes it."""
    first = keys[0] if keys else b""
    drop = asked.drop is True
    if not isinstance(asked.session, int | str):
        return Asked(TENANT, first, drop=drop)
    return Asked(
        TENANT,
        first,
        str(asked.session),
        str(asked.agent or ""),
        _ENDINGS.get(str(asked.stop), Ending.OTHER),
        asked.last is True,
        drop,
    )


def compare(
    slots: int,
    policy: str,
    requests: Sequence[Request],
    every: int = 1,
    with_hints: bool = False,
    cost: PrefillCost | None = None,
) -> Simulation:
    """Play the requests to both; they must agree after each (or so many) in all that a policy
    reads.
    """
    tier = TierSpec("tier", slots, policy, cost)
    simulation = Simulation([tier], with_hints=with_hints)
    root = Path(tempfile.mkdtemp(prefix="pagoda-test-", dir="/dev/shm"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UpkeepThread, "wake", lambda *_, **__: None)
        try:
            real = Real(root, slots, policy, with_hints, cost)
            begun_ms = requests[0].timestamp_ms if requests else 0.0
            for number, asked in enumerate(requests):
                asked = replace(asked, timestamp_ms=asked.timestamp_ms - begun_ms)
                assert simulation.request(asked)[0] == real.request(asked), number
                if number % every == 0:
                    agree(simulation, real.ledger)
            agree(simulation, real.ledger)
            real.ledger.close()
        finally:
            shutil.rmtree(root, ignore_errors=True)
    return simulation


def agree(simulation: Simulation, ledger: Ledger) -> None:
    tier = simulation._tiers[0]
    rows = tier.residents()
    keys = [mark.tobytes() + bytes(24) for mark in marks_of_ids(tuple(rows))]
    assert {row.key: row.slot for row in admin.list_chunks(ledger)} == dict(
        zip(keys, rows.values(), strict=True)
    )
    there = np.array(sorted(rows.values()), np.int64)
    for name in COLUMNS:
        simulated = getattr(tier._columns, name)[there]
        real = getattr(ledger.columns, name)[there]
        assert simulated.tolist() == real.tolist(), name
    kept = tier._columns.contexts_of(there)
    if kept is not None:
        real_contexts = ledger.columns.contexts_of(there)
        assert real_contexts is not None
        assert real_contexts.tolist() == kept.tolist()
    ages = [
        columns.generation[there].argsort().tolist()
        for columns in (tier._columns, ledger.columns)
    ]
    assert ages[0] == ages[1]
    assert sorted(tier._columns.ghosts.last_use.tolist()) == sorted(
        ledger.columns.ghosts.last_use.tolist()
    )


def stream(seed: int, count: int, longest: int, talks: int) -> list[Request]:
    """Conversations that continue, some more often than others, and prompts that never return."""
    random = np.random.default_rng(seed)
    requests = []
    ms = 0
    for number in range(count):
        talk = int(random.zipf(1.3)) % (2 * talks)
        length = int(random.integers(1, longest + 1))
        shared = (
            min(length, int(random.integers(1, longest + 1)))
            if talk < talks
            else 0
        )
        ids = [10_000 * (talk + 1) + i for i in range(shared)]
        ids += [10**7 + 1000 * number + i for i in range(length - shared)]
        ms += int(random.choice([0, 1, 60, 400, 1500, 20_000]))
        requests.append(request(*ids, ms=ms))
    return requests


@pytest.mark.slow
@settings(max_examples=15)
@given(
    st.integers(0, 2**32), st.sampled_from([32, 40]), st.sampled_from(POLICIES)
)
def test_short_requests_hit_and_evict_as_in_the_ledger(
    seed: int, slots: int, policy: str
) -> None:
    tier = compare(slots, policy, stream(seed, 80, 4, 12)).outcome().tiers[0]
    assert tier.hits
    assert tier.evicted


@pytest.mark.parametrize("with_hints", [False, True])
def test_prompts_longer_than_a_window_are_stored_as_in_the_ledger(
    with_hints: bool,
) -> None:
    """Each window is ready before the next one needs a victim: then LRU's oldest chunk is found."""
    requests = stream(5, 120, 40, 6)
    if with_hints:
        requests = hinted(requests, 5)
    tier = compare(64, "hindsight", requests, 10, with_hints).outcome().tiers[0]
    assert tier.refused


@pytest.mark.slow
@given(chained(depth=4, most=40), st.sampled_from(POLICIES))
def test_prefix_trees_hit_as_in_the_ledger(
    requests: list[Request], policy: str
) -> None:
    compare(32, policy, requests)


@pytest.mark.slow
@given(
    st.lists(st.lists(st.integers(0, 60), max_size=4, unique=True), max_size=40),
    st.sampled_from(POLICIES),
)
@example([[1, 2, 3, 4], [2], [5, 2, 6], [3, 9, 2, 5]] * 3, "lru")
def test_what_is_no_chain(paths: list[list[int]], policy: str) -> None:
    compare(
        32, policy, [request(*ids, ms=700.0 * i) for i, ids in enumerate(paths)]
    )


@pytest.mark.slow
@settings(max_examples=5)
@given(st.integers(0, 2**32))
def test_what_is_no_chain_in_a_full_tier(seed: int) -> None:
    random = np.random.default_rng(seed)
    paths = [
        random.permutation(60)[: random.integers(1, 5)].tolist()
        for _ in range(80)
    ]
    for policy in POLICIES:
        compare(
            32,
            policy,
            [request(*ids, ms=100.0 * i) for i, ids in enumerate(paths)],
        )


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_recorded_requests_hit_and_evict_as_in_the_ledger(policy: str) -> None:
    requests = [
        replace(asked, hash_ids=asked.hash_ids[:128]) for asked in sample()[:600]
    ]
    tier = compare(1024, policy, requests, every=20).outcome().tiers[0]
    assert tier.evicted
    assert (tier.refused > 0) == (policy == "hindsight")


def hinted(requests: Sequence[Request], seed: int) -> list[Request]:
    """Say of each request to which of a few sessions it belongs, and how it ends."""
    random = np.random.default_rng(seed)
    return [
        replace(
            asked,
            session=str(asked.hash_ids[0] // 10_000 % 40),
            stop=str(random.choice(["tool_use", "end_turn", "length"])),
            last=bool(random.random() < 0.2),
            drop=bool(random.random() < 0.1),
            retain_seconds=float(random.choice([0, 0, 0, 0, 7, 2000])),
        )
        if random.random() < 0.9
        else replace(asked, drop=bool(random.random() < 0.1))
        for asked in requests
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_hinted_requests_hit_and_evict_as_in_the_ledger(seed: int) -> None:
    requests = hinted(stream(seed, 500, 6, 40), seed)
    told = compare(64, "hindsight", requests, 25, with_hints=True).outcome()
    assert told.tiers[0].evicted
    # the control: without hints other chunks are served
    plain = Simulation([TierSpec("tier", 64, "hindsight")])
    for asked in requests:
        plain.request(asked)
    assert told.hits != plain.outcome().hits


@pytest.mark.slow
@pytest.mark.parametrize("with_hints", [False, True])
def test_computation_is_weighed_as_in_the_ledger(with_hints: bool) -> None:
    cost = PrefillCost(4.0)
    requests = stream(5, 500, 12, 40)
    if with_hints:
        requests = hinted(requests, 5)
    told = compare(
        64, "hindsight", requests, 25, with_hints=with_hints, cost=cost
    ).outcome()
    assert told.tiers[0].evicted
    # the control: other chunks are served without the weights
    plain = Simulation([TierSpec("tier", 64, "hindsight")], with_hints=with_hints)
    for asked in requests:
        plain.request(asked)
    assert told.hits != plain.outcome().hits
