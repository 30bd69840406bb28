"""With the objective "compute" a chunk counts for what computing it costs, which grows with its
position.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagoda import Cache, KVLayout, Namespace
from pagoda.ledger.columns import Columns
from pagoda.policy import Newcomers, make
from pagoda.policy.hindsight import Hindsight, ShadowLru, WeighedLru
from pagoda.policy.prefill_cost import (
    EVEN_TOKENS,
    PrefillCost,
    cost_of,
    objective_of,
)
from pagoda_tools.replay import TierSpec, simulate
from tests.policy.test_hindsight import (
    SECOND,
    SLOTS,
    START,
    columns_of,
    learn,
    new_values,
)
from tests.policy.test_shadow_lru import columns_of as columns_of_shadow
from tests.replay.test_against_ledger import hinted, stream
from tests.replay.traces import request, sample

COST = PrefillCost(10.0)


def operations(layers: int, width: int, tokens: int) -> int:
    """Count the operations of a prompt token by token: a model of 12 layers width^2 parameters."""
    linear = 2 * 12 * layers * width**2
    return sum(linear + 4 * layers * width * at for at in range(tokens))


@pytest.mark.parametrize("chunk_tokens", [64, 256])
def test_costs_are_proportional_to_the_operations(chunk_tokens: int) -> None:
    cost = PrefillCost.of_chunks(chunk_tokens)
    layers, width = 2, EVEN_TOKENS // 6
    one = 2 * 12 * layers * width**2 * chunk_tokens
    for chunks in (1, 7, 20):
        counted = operations(layers, width, chunks * chunk_tokens) / one
        assert cost.of_prompt(chunks) == pytest.approx(counted, rel=1e-3)
        each = cost.of(np.arange(chunks))
        assert each.sum() == pytest.approx(cost.of_prompt(chunks))
        assert cost.mean(np.array([chunks - 1]))[0] == pytest.approx(each.mean())


def test_at_even_tokens_attention_doubles_the_cost() -> None:
    cost = PrefillCost.of_chunks(256)
    at = np.array([0, EVEN_TOKENS // 256])
    assert cost.of(at) == pytest.approx([1, 2], abs=0.01)


def test_a_position_that_no_prompt_has_does_not_keep_a_chunk_for_ever() -> None:
    torn = np.array([2**32 - 1], np.uint32)
    assert COST.mean(torn)[0] == COST.mean(np.array([1 << 16]))[0]


def test_objectives_have_names() -> None:
    assert cost_of("chunks", 256) is None
    cost = cost_of("compute", 256)
    assert cost == PrefillCost.of_chunks(256)
    assert [objective_of(None), objective_of(cost)] == ["chunks", "compute"]
    with pytest.raises(ValueError, match="choose one of chunks, compute"):
        cost_of("tokens", 256)


def test_a_policy_with_one_order_weighs_nothing(tmp_path: Path) -> None:
    columns = Columns(None, 8)
    with pytest.raises(ValueError, match="set policy = 'hindsight'"):
        make("lru", columns, COST)


def taught(columns: Columns, cost: PrefillCost | None) -> Hindsight:
    """Return a policy that knows that half of all chunks return after a minute."""
    policy = Hindsight(columns, cost)
    values = new_values()
    for _ in range(20):
        stamps = START - np.arange(64)
        ghosts = Newcomers(
            stamps,
            np.zeros(64, np.uint32),
            stamps - 60 * SECOND,
            stamp=START,
        )
        policy.admit(ghosts, 64, START)
    learn(policy, values, START)
    return policy


def test_of_equal_chunks_those_of_long_prompts_outlive_those_of_short_ones() -> (
    None
):
    columns = columns_of()
    columns.hits[:] = 0
    columns.last_use[:] = START - 50 * SECOND
    # one chunk of a prompt each; every second is deep in a long one
    columns.position[1::2] = 40
    # the younger ones are of short prompts
    columns.last_use[::2] += 10
    weighed = taught(columns, COST).victims(SLOTS // 2, START, START)
    assert not (weighed % 2).any()
    plain = taught(columns, None).victims(SLOTS // 2, START, START)
    assert (plain % 2).all()


def test_computation_and_not_chunks_says_whether_lru_would_have_saved_more() -> (
    None
):
    columns = columns_of_shadow()
    shadow = ShadowLru(columns)
    shadow.look()
    weighed = WeighedLru(shadow, COST)
    values = np.zeros(ShadowLru.shared_values)

    def asked(count: int, position: int, served: bool, by_lru: bool) -> None:
        uses = np.full(count, 1060 if by_lru else 0)
        shadow.count(uses, count * served)
        weighed.count(uses, np.full(count, position), served)

    # many chunks at starts are served, and few deep ones are not
    asked(1000, 0, served=True, by_lru=False)
    asked(500, 90, served=False, by_lru=True)
    shadow.share(values, 10**6)
    weighed.decide(10**6)
    assert not shadow.wins
    assert weighed.wins
    asked(900, 90, served=True, by_lru=True)
    asked(900, 90, served=True, by_lru=False)
    weighed.decide(10**6)
    assert not weighed.wins


def test_the_order_follows_the_rival_that_counts_computation() -> None:
    columns = columns_of()
    columns.hits[:] = 0
    columns.last_use[:] = START - 50 * SECOND
    columns.position[1::2] = 40
    columns.last_use[::2] += 10
    policy = taught(columns, COST)
    assert policy._weighed is not None
    policy._weighed.wins = True
    # least recently used: by recency alone
    oldest = policy.victims(SLOTS // 2, START, START)
    assert (oldest % 2).all()


def test_old_counts_are_halved() -> None:
    columns = columns_of_shadow()
    shadow = ShadowLru(columns)
    shadow.look()
    weighed = WeighedLru(shadow, COST)
    for _ in range(50):
        weighed.count(np.full(100, 1060), np.arange(100), served=True)
        weighed.decide(1000)
    assert weighed._counts[3] <= 1000
    assert weighed._counts[0] == pytest.approx(weighed._counts[1])


def test_what_the_default_does_is_as_it_was() -> None:
    """Before there were objectives: chunks served, written, evicted and refused."""
    found = []
    for slots in (500, 2000):
        outcome = simulate(sample(), [TierSpec("tier", slots, "hindsight")])
        found.append((outcome.hits, *outcome.tiers[0][4:]))
    talks = hinted(stream(5, 500, 12, 40), 5)
    tier = [TierSpec("tier", 64, "hindsight")]
    for with_hints in (False, True):
        outcome = simulate(talks, tier, with_hints=with_hints)
        found.append((outcome.hits, *outcome.tiers[0][4:]))
    assert found == [
        (2933, 17407, 16907, 34219),
        (5011, 20691, 18691, 28857),
        (1047, 1109, 1045, 1095),
        (782, 1744, 1680, 725),
    ]


def test_what_is_saved_is_counted_for_every_policy() -> None:
    prompts = [request(*range(20), ms=1000.0 * i) for i in range(4)]
    even = EVEN_TOKENS / prompts[0].chunk_tokens
    for policy in ("lru", "hindsight"):
        outcome = simulate(prompts, [TierSpec("tier", 10, policy)])
        served, all_of_it = (
            chunks + chunks**2 / (2 * even) for chunks in (10, 20)
        )
        assert outcome.saved_rate == pytest.approx(3 * served / (4 * all_of_it))


def test_a_cache_says_its_objective_and_what_came_too_late(
    shm_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = KVLayout.opaque(4, 32, "objectives")
    root = shm_root / "host"
    first, second = (
        Cache(
            namespace=Namespace("objectives"),
            layout=layout,
            host_path=root,
            host_size="1MiB",
            objective=objective,
        )
        for objective in ("compute", "chunks")
    )
    with first, second:
        # one ledger for both
        assert first.stats()["objective"] == "compute"
        assert second.stats()["objective"] == "compute"
        assert "has objective compute" in caplog.text
    with Cache(
        namespace=Namespace("objectives"),
        layout=layout,
        host_path=root,
        host_size="1MiB",
    ) as plain:
        assert "objective" not in plain.stats()
