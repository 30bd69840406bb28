"""Loading only what is expected to be faster than computing it."""

from __future__ import annotations

from pathlib import Path

from pagoda.cache.load_cost import LoadCost
from pagoda.metrics import Reason
from pagoda.testing import FakeClock
from tests.cache.kit import CHUNK, cache_at, prompt, served, stored

MB = 1_000_000


def test_nothing_is_refused_before_both_rates_are_known() -> None:
    load_cost = LoadCost(MB, 256, FakeClock())
    assert load_cost.is_worth_loading("disk")
    load_cost.record_load("disk", MB, 10.0)
    assert load_cost.is_worth_loading("disk")
    other = LoadCost(MB, 256, FakeClock())
    other.record_prefill(256, 0.001)
    assert other.is_worth_loading("disk")


def test_the_faster_way_is_taken() -> None:
    load_cost = LoadCost(MB, 256, FakeClock())
    for _ in range(3):
        load_cost.record_load("disk", MB, 0.1)
        load_cost.record_load("host", MB, 0.001)
    load_cost.record_prefill(256, 0.05)
    assert load_cost.is_worth_loading("host") and not load_cost.is_worth_loading("disk")
    for _ in range(20):
        load_cost.record_prefill(256, 0.5)
    assert load_cost.is_worth_loading("disk")
    assert load_cost.rates()["disk_bytes_per_second"] == 10 * MB


def test_a_slow_tier_is_tried_again_soon_and_later_if_it_stays_slow() -> None:
    clock = FakeClock()
    load_cost = LoadCost(MB, 256, clock)
    load_cost.record_prefill(256, 0.001)
    for _ in range(3):
        assert load_cost.is_worth_loading("disk")
        load_cost.record_load("disk", MB, 10.0)
    for seconds in (1, 2, 4, 8, 16, 32, 60, 60):
        assert not load_cost.is_worth_loading("disk")
        clock.advance(seconds - 0.1)
        assert not load_cost.is_worth_loading("disk")
        clock.advance(0.2)
        assert load_cost.is_worth_loading("disk")
        load_cost.record_load("disk", MB, 10.0)
    clock.advance(61)
    for _ in range(3):
        load_cost.record_load("disk", MB, 0.0001)
        clock.advance(1.1)
        assert load_cost.is_worth_loading("disk")
    load_cost.record_load("disk", MB, 0.0001)
    assert load_cost.is_worth_loading("disk")


def test_one_copy_that_was_paused_says_nothing_of_a_tier() -> None:
    load_cost = LoadCost(MB, 256, FakeClock())
    load_cost.record_prefill(256, 0.001)
    load_cost.record_load("host", MB, 10.0)
    assert load_cost.is_worth_loading("host")
    for _ in range(5):
        load_cost.record_load("host", MB, 0.0001)
    for _ in range(2):
        load_cost.record_load("host", MB, 10.0)
        assert load_cost.is_worth_loading("host")
    load_cost.record_load("host", MB, 10.0)
    assert not load_cost.is_worth_loading("host")


def test_it_can_be_switched_off() -> None:
    load_cost = LoadCost(MB, 256, FakeClock(), enabled=False)
    load_cost.record_load("disk", MB, 10.0)
    load_cost.record_prefill(256, 0.001)
    assert load_cost.is_worth_loading("disk")


def test_senseless_measurements_are_ignored() -> None:
    load_cost = LoadCost(MB, 256, FakeClock())
    load_cost.record_load("disk", 0, 1.0)
    load_cost.record_load("disk", 5, 0.0)
    load_cost.record_prefill(0, 1.0)
    assert load_cost.rates() == {"prefill_tokens_per_second": 0.0}


def test_a_run_that_is_cheaper_to_compute_is_left_alone(shm_root: Path, tmp_path: Path) -> None:
    tokens = prompt(10)
    with cache_at(shm_root / "before", tmp_path) as cache:
        stored(cache, tokens)
    clock = FakeClock()  # does not advance: a second later a slow tier would be tried again
    with cache_at(shm_root / "after", tmp_path, clock=clock, worth_it=True) as cache:
        cache.observe_prefill(1_000_000, 0.0001)  # absurdly fast
        assert served(cache, tokens[: 2 * CHUNK])[0].num_tokens == 32  # the disk has not been measured yet
        for _ in range(2):
            cache._resources.load_cost.record_load("disk", 8192, 1.0)
        hit, _ = served(cache, tokens, start_tokens=2 * CHUNK)
        assert (hit.num_tokens, hit.reason) == (0, Reason.NOT_WORTH_IT)
        assert cache.lookup(tokens).reason is Reason.NOT_WORTH_IT
        assert cache.stats()["misses"] == {"not_worth_it": 2}


def test_host_chunks_are_served_where_only_the_disk_is_too_slow(shm_root: Path, tmp_path: Path) -> None:
    tokens = prompt(10)
    with cache_at(shm_root / "before", tmp_path) as cache:
        stored(cache, tokens)
    clock = FakeClock()  # does not advance: a second later a slow tier would be tried again
    with cache_at(shm_root / "after", tmp_path, clock=clock, worth_it=True) as cache:
        stored(cache, tokens[: 4 * CHUNK])
        load_cost = cache._resources.load_cost
        for _ in range(3):
            load_cost.record_load("disk", 8192, 10.0)
        cache.observe_prefill(CHUNK, 1.0)
        expected = (64, {"host": 64}, Reason.NOT_WORTH_IT)
        looked = cache.lookup(tokens)
        assert (looked.num_tokens, looked.by_tier, looked.reason) == expected
        hit, _ = served(cache, tokens)
        assert (hit.num_tokens, hit.by_tier, hit.reason) == expected


def test_a_hit_of_just_the_minimum_is_loaded(shm_root: Path, tmp_path: Path) -> None:
    tokens = prompt(4)
    with cache_at(shm_root, tmp_path, min_hit_tokens=len(tokens)) as cache:
        stored(cache, tokens)
        assert cache.lookup(tokens).num_tokens == len(tokens)
        assert served(cache, tokens)[0].num_tokens == len(tokens)
        assert served(cache, tokens, tiers=["disk"])[0].num_tokens == len(tokens)
        longer = prompt(5)
        assert cache.lookup(longer).num_tokens == len(tokens)
        assert served(cache, longer)[0].num_tokens == len(tokens)


def test_a_hit_below_the_minimum_is_not_loaded(shm_root: Path) -> None:
    tokens, other = prompt(10), prompt(10, 1)
    with cache_at(shm_root, None, min_hit_tokens=100) as cache:
        stored(cache, tokens[: 3 * CHUNK])
        stored(cache, other)
        hit, kv = served(cache, tokens)
        assert (hit.num_tokens, hit.reason) == (0, Reason.BELOW_MINIMUM) and not kv.blocks.any()
        assert "48 of 100 tokens" in hit.detail
        assert cache.lookup(tokens).reason is Reason.BELOW_MINIMUM
        assert served(cache, tokens[: 3 * CHUNK])[0].reason is Reason.BELOW_MINIMUM
        assert served(cache, other)[0].num_tokens == 160
        assert served(cache, other, start_tokens=128)[0].reason is Reason.BELOW_MINIMUM
