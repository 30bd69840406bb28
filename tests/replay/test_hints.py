"""Replays with what traces say of sessions and answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from pagoda.cache.request_trace import Request, format_request
from pagoda.ledger.retained_chunks import RETAINED_SHARE
from pagoda_tools.replay import TierSpec, simulate
from pagoda_tools.replay.simulate import simulate_each
from tests.replay.traces import request, sample

TIER = [TierSpec("host", 20, "hindsight")]
Stream = list[Request]


def asked(
    seconds: float,
    first: int,
    session: str,
    stop: str = "tool_use",
    last: bool = False,
) -> Request:
    ids = range(first, first + 10)
    plain = request(*ids, ms=1e3 * seconds)
    return replace(plain, session=session, stop=stop, last=last)


def bare(stream: Sequence[Request]) -> Stream:
    return [
        replace(
            each,
            session=UNSET,
            stop=UNSET,
            last=UNSET,
            agent=UNSET,
            drop=UNSET,
            retain_seconds=UNSET,
        )
        for each in stream
    ]


def test_a_session_that_is_over_makes_room_for_one_that_is_not() -> None:
    stream = [
        asked(0, 0, "idle", "end_turn"),
        asked(10, 100, "over"),
        asked(20, 100, "over", "end_turn", last=True),
        asked(30, 200, "new"),
        asked(40, 0, "idle"),
    ]
    told = simulate(stream, TIER, with_hints=True)
    assert told.hits == 20
    # controls: nobody listens, or nobody has said it
    assert simulate(stream, TIER).hits == 10
    silent = [replace(each, last=False) for each in stream]
    assert simulate(silent, TIER, with_hints=True).hits == 10


def test_all_agents_of_a_session_are_over_with_it() -> None:
    stream = [
        asked(0, 0, "idle", "end_turn"),
        replace(asked(10, 100, "over"), agent="helper"),
        replace(asked(20, 200, "over", last=True), agent=""),
    ]
    tier = [TierSpec("host", 30, "hindsight")]
    stream += [asked(30, 300, "new"), asked(31, 400, "new too")]
    stream += [asked(40, 0, "idle")]
    assert simulate(stream, tier, with_hints=True).hits == 10
    # and neither of the two is there any more
    gone = [*stream, asked(41, 100, "over"), asked(42, 200, "over")]
    assert simulate(gone, tier, with_hints=True).hits == 10


def test_who_does_not_listen_does_as_ever() -> None:
    stream = [
        replace(each, session=at % 7, stop="tool_use", last=at % 50 == 0)
        for at, each in enumerate(sample()[:200])
    ]
    tier = [TierSpec("host", 300, "hindsight")]
    assert simulate(stream, tier) == simulate(bare(stream), tier)


def test_lines_without_hints_are_as_they_were() -> None:
    line = format_request(request(1, 2, ms=3.0))
    assert line == (
        '{"timestamp":3.0,"input_length":1024,"output_length":1,'
        '"hash_ids":[1,2],"chunk_tokens":512}'
    )


def random_hints(stream: Stream) -> Stream:
    choose = random.Random(1)
    stops = ["tool_use", "end_turn", "length"]
    return [
        replace(
            each,
            session=choose.randrange(20),
            stop=choose.choice(stops),
            last=choose.random() < 0.2,
        )
        for each in stream
    ]


def one_session(stream: Stream) -> Stream:
    return [replace(each, session=1, stop="tool_use") for each in stream]


def always_over(stream: Stream) -> Stream:
    return [
        replace(each, session=at, stop="end_turn", last=True)
        for at, each in enumerate(stream)
    ]


def the_opposite(stream: Stream) -> Stream:
    """Say of each request that continues that its session is over, and of each that does not that
    a tool is running.
    """
    firsts = [each.hash_ids[:1] for each in stream]
    last = {first: at for at, first in enumerate(firsts)}
    return [
        replace(
            each,
            session=str(firsts[at]),
            stop="tool_use",
            last=last[firsts[at]] != at,
        )
        for at, each in enumerate(stream)
    ]


@pytest.mark.slow
def test_what_is_retained_for_nothing_costs_little() -> None:
    """As if the budget of retained chunks were not there."""
    stream = sample()
    for chunks in (500, 5_000):
        hit_rates = [
            simulate(stream, [TierSpec("host", size, "lru")]).hit_rate
            for size in (chunks, chunks - chunks // RETAINED_SHARE)
        ]
        assert hit_rates[1] > hit_rates[0] - 0.006


@pytest.mark.slow
@pytest.mark.parametrize(
    "hostile", [random_hints, one_session, always_over, the_opposite]
)
def test_wrong_hints_cost_little(hostile: Callable[[Stream], Stream]) -> None:
    stream = sample()
    for chunks in (500, 5_000):
        tier = [TierSpec("host", chunks, "hindsight")]
        least = simulate(stream, [TierSpec("host", chunks, "lru")]).hit_rate
        told = simulate(hostile(stream), tier, with_hints=True).hit_rate
        assert told > least - 0.006


@pytest.mark.slow
@pytest.mark.parametrize("said", [{"retain_seconds": 86_400.0}, {"drop": True}])
def test_a_hostile_tenant_costs_the_others_little(
    said: dict[str, object],
) -> None:
    """One request of four is its own: no other asks for their chunks but for the first one."""
    stream: Stream = []
    others: list[bool] = []
    for each in sample():
        talk = max(each.hash_ids[1:2], default=0)
        others.append(talk % 4 != 0)
        told = {} if others[-1] else said
        stream.append(replace(each, session=str(talk), **told))
    for chunks in (500, 5_000):
        served: dict[str, int] = {}
        for policy in ("lru", "hindsight"):
            tier = [TierSpec("host", chunks, policy)]
            _, hits = simulate_each(
                stream, tier, with_hints=policy == "hindsight"
            )
            served[policy] = sum(
                count
                for (count,), is_other in zip(hits, others, strict=True)
                if is_other
            )
        asked = sum(
            len(each.hash_ids)
            for each, is_other in zip(stream, others, strict=True)
            if is_other
        )
        assert served["hindsight"] > served["lru"] - 0.006 * asked


@pytest.mark.parametrize("dropped", [0, 100])
def test_a_dropped_prompt_makes_room(dropped: int) -> None:
    stream = [
        asked(0, 0, "a", "end_turn"),
        asked(10, 100, "b", "end_turn"),
    ]
    stream = [replace(each, drop=each.hash_ids[0] == dropped) for each in stream]
    stream += [asked(20, 200, "c"), asked(30, 100 - dropped, "d")]
    assert simulate(stream, TIER, with_hints=True).hits == 10
    stream[-1] = asked(30, dropped, "d")
    assert simulate(stream, TIER, with_hints=True).hits == 0


def test_of_a_retained_prompt_the_first_chunks_stay() -> None:
    stream = [asked(10 * n, 100 * n, str(n), "end_turn") for n in range(4)]
    stream[0] = replace(stream[0], retain_seconds=600.0)
    stream.append(asked(40, 0, "0"))
    tier = [TierSpec("host", 20, "lru")]
    # one chunk of twenty is within the budget
    assert simulate(stream, tier, with_hints=True).hits == 1
    assert simulate(bare(stream), tier, with_hints=True).hits == 0
