"""The replay with time: how long each request waits, which chunks are not stored yet, which are
dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda_tools.replay import (
    Engines,
    Request,
    TierSpec,
    TimedOutcome,
    TimedTier,
    optimum,
    replay_timed,
    simulate,
)
from pagoda_tools.replay.timed_replay import _TimedRun
from tests.replay.traces import chained, request, sample

CHUNK = 100  # tokens; one is computed in 0.1 s
# a chunk has 1000 bytes
ENGINES = Engines(prefill_tokens_per_second=1000.0, token_bytes=10)


def tier(
    chunks: int = 100,
    speed: float = 1e5,
    queue: int | None = None,
    name: str = "host",
) -> TimedTier:
    return TimedTier(TierSpec(name, chunks, "lru"), speed, queue)


def asked(ms: float, *ids: int) -> Request:
    return request(*ids, ms=ms, tokens=CHUNK)


def waits(
    requests: Sequence[Request],
    tiers: Sequence[TimedTier],
    engines: Engines = ENGINES,
) -> list[float]:
    """How long each request waited for its first token."""
    run = _TimedRun(tiers, engines)
    for one in requests:
        run.request(one)
    return run._servers.waits


def test_what_is_there_is_loaded_and_the_rest_computed() -> None:
    first = asked(0, 1, 2, 3)
    second = asked(10_000, 1, 2, 4)
    assert waits([first, second], [tier()]) == pytest.approx(
        [0.3, 2 * 1000 / 1e5 + 0.1]
    )


def test_all_is_there_but_one_token_is_computed() -> None:
    same = [asked(ms, 1, 2) for ms in (0, 10_000)]
    assert waits(same, [tier()]) == pytest.approx([0.2, 0.02 + 0.001])


def test_a_request_without_tokens() -> None:
    assert waits([Request(5.0, 0, 1, ())], [tier()]) == [0.0]


def test_one_engine_computes_one_prompt_after_the_other() -> None:
    done = replay_timed(
        [asked(0, 1, 2), asked(0, 3, 4), asked(100, 5)], [tier()], ENGINES
    )
    assert (*done.ttft, *done.cold_ttft) == pytest.approx((0.4, 0.4, 0.4, 0.4))
    assert done.busy == done.cold_busy == pytest.approx(1.0)


def test_what_is_being_computed_is_not_there() -> None:
    same = [asked(0, 1, 2), asked(0, 1, 2), asked(300, 1, 2)]
    assert waits(same, [tier()], ENGINES._replace(engines=2)) == pytest.approx(
        [0.2, 0.2, 0.021]
    )
    both = replay_timed(same, [tier()], ENGINES._replace(engines=2))
    assert both.loaded == (2,)
    # the second finds at its end that the first has stored them
    assert both.found.tiers[0].chunks_written == 2
    one = replay_timed(same, [tier()], ENGINES)
    assert one.loaded == (4,)


def test_loads_share_the_bandwidth_of_a_tier() -> None:
    requests = [asked(0, 1), asked(0, 2), asked(1000, 1), asked(1000, 2)]
    slow = tier(speed=2e4)  # a chunk in 0.05 s
    assert waits(requests, [slow], ENGINES._replace(engines=2)) == pytest.approx(
        [0.1, 0.1, 0.051, 0.101]
    )


def test_what_loads_more_slowly_than_it_is_computed_is_computed() -> None:
    same = [asked(0, 1, 2), asked(10_000, 1, 2)]
    done = replay_timed(same, [tier(speed=9e3)], ENGINES)
    assert done.loaded == (0,)
    assert done.found.hits == 2
    assert done.hit_rate == 0.0
    assert done.ttft == done.cold_ttft


def test_writes_that_do_not_fit_into_the_queue_are_dropped_tail_first() -> None:
    requests = [asked(0, 1, 2, 3, 4, 5), asked(10_000, 1, 2, 3, 4, 5)]
    done = replay_timed(requests, [tier(queue=3)], ENGINES)
    assert done.dropped_writes == (2,)
    assert done.loaded == (3,)
    # the second time there is space
    assert done.found.tiers[0].chunks_written == 5


def test_the_queue_is_written_when_nothing_is_loaded() -> None:
    """One chunk a second: the queue of two is full, then half full, then empty."""
    slow = [tier(speed=1e3, queue=2)]
    requests = [
        asked(0, 1, 2),
        asked(0, 3, 4),
        asked(1200, 5, 6),
        asked(9000, 7, 8),
    ]
    assert replay_timed(requests[:2], slow, ENGINES).dropped_writes == (2,)
    assert replay_timed(requests[:3], slow, ENGINES).dropped_writes == (2 + 1,)
    assert replay_timed(requests, slow, ENGINES).dropped_writes == (2 + 1,)


def test_loads_go_before_writes() -> None:
    # so that loading is worth it
    fast = ENGINES._replace(prefill_tokens_per_second=10.0)
    requests = [asked(0, 1, 2), asked(21_000, 1, 2), asked(60_000, 9)]
    first, second, _ = waits(requests, [tier(speed=1e3)], fast)
    assert first == pytest.approx(20)
    # one of the two writes is still waiting
    assert second == pytest.approx(2 + 0.1)


def test_below_another_tier_as_many_wait_as_that_one_holds() -> None:
    tiers = [tier(chunks=4), tier(chunks=100, speed=1.0, name="disk")]
    done = replay_timed([asked(0, 1, 2, 3), asked(300, 4, 5, 6)], tiers, ENGINES)
    assert done.dropped_writes == (0, 2)
    assert [one.chunks_written for one in done.found.tiers] == [6, 4]


def test_what_a_prompt_has_no_room_for_above_is_waited_for() -> None:
    """Four chunks wait in slots, two pass through buffers; the waiting ones take slots from the
    next prompt.
    """
    tiers = [tier(chunks=4), tier(chunks=100, speed=1.0, name="disk")]
    first = asked(0, 1, 2, 3, 4, 5, 6)
    done = replay_timed([first], tiers, ENGINES)
    assert done.dropped_writes == (0, 0)
    assert done.found.tiers[1].chunks_written == 6
    done = replay_timed([first, asked(700, 7, 8, 9, 10, 11)], tiers, ENGINES)
    assert done.dropped_writes == (0, 4)
    assert done.found.tiers[1].chunks_written == 7


def test_what_waits_is_written_in_order() -> None:
    """A chunk a second: after 4 s the slots are clean again, though buffers are still written."""
    tiers = [tier(chunks=4), tier(chunks=100, speed=1e3, name="disk")]
    first = asked(0, 1, 2, 3, 4, 5, 6)
    late = [first, asked(4_700, 7, 8, 9, 10)]
    assert replay_timed(late, tiers, ENGINES).dropped_writes == (0, 0)
    early = [first, asked(2_200, 7, 8, 9, 10)]
    assert replay_timed(early, tiers, ENGINES).dropped_writes == (0, 2)


def test_a_lower_tier_serves_and_brings_up() -> None:
    tiers = [tier(chunks=2), tier(chunks=100, speed=2e4, name="disk")]
    requests = [
        asked(0, 1, 2),
        asked(1000, 3, 4),
        asked(2000, 1, 2),
        asked(3000, 1, 2),
    ]
    done = replay_timed(requests, tiers, ENGINES)
    assert done.loaded == (2, 2)
    assert waits(requests, tiers) == pytest.approx([0.2, 0.2, 0.101, 0.021])


@pytest.mark.slow
@settings(max_examples=30)
@given(chained(most=40), st.integers(1, 12), st.integers(1, 30))
def test_with_all_the_time_in_the_world_it_is_what_is_simulated(
    requests: list[Request], host: int, disk: int
) -> None:
    tiers = [tier(host, 1e18), tier(disk, 1e18, 1 << 20, "disk")]
    done = replay_timed(requests, tiers, Engines(1e12, 10))
    apart = simulate(requests, [each.spec for each in tiers])
    assert sum(done.loaded) == done.found.hits
    assert done.found.accesses == apart.accesses
    # nothing that one holds is evicted from below: the same, to the last chunk
    if disk > 20:
        assert done.found.tiers[0].hits == apart.tiers[0].hits


@settings(max_examples=30)
@given(chained(most=40), st.integers(1, 30))
def test_one_engine_is_never_better_than_the_optimum(
    requests: list[Request], chunks: int
) -> None:
    """Several may be: what they compute at the same time they keep beside the tiers."""
    done = replay_timed(requests, [tier(chunks)], ENGINES)
    assert done.hit_rate <= optimum(requests, chunks) + 1e-12
    assert done.ttft.median <= done.ttft.p90


@pytest.mark.slow
def test_the_sample_again_and_again() -> None:
    def play() -> TimedOutcome:
        tiers = [tier(1000, 1e10), tier(5000, 2e9, name="disk")]
        return replay_timed(
            sample()[:700], tiers, Engines(20_000.0, 131_072, engines=4)
        )

    done = play()
    assert done == play()
    assert 0 < done.hit_rate < 0.29
    assert done.ttft.median < done.cold_ttft.median
    assert done.busy < done.cold_busy < 1


def test_a_replay_of_no_requests_is_all_zeros() -> None:
    done = replay_timed([], [tier()], ENGINES)
    assert done.hit_rate == 0.0
    assert done.ttft == (0.0, 0.0)
    assert done.busy == 0.0


@pytest.mark.parametrize(
    ("tiers", "engines", "wrong"),
    [
        ([tier()], ENGINES._replace(engines=0), "engines need"),
        (
            [tier()],
            ENGINES._replace(prefill_tokens_per_second=0.0),
            "engines need",
        ),
        ([tier(speed=0.0)], ENGINES, "a tier needs a bandwidth"),
        ([tier(queue=-1)], ENGINES, "a tier needs a bandwidth"),
        ([], ENGINES, "at least one tier"),
    ],
)
def test_wrong_arguments_are_refused(
    tiers: list[TimedTier], engines: Engines, wrong: str
) -> None:
    with pytest.raises(ValueError, match=wrong):
        replay_timed([], tiers, engines)
