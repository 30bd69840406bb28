"""The example engine with faults in host and disk: everything still identical, only slower."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from examples.paged_engine.engine import Sequence
from pagoda.testing import Fault
from testbed.patience import Patience
from tests.examples.kit import (
    NEW,
    House,
    closed,
    converse,
    engine_of,
    every,
    fault_copies,
    serve,
    talks_of,
)


@pytest.mark.slow
def test_a_faulty_disk_gives_no_wrong_answer(house: House) -> None:
    cache = house.cache(deadline_seconds=0.5)
    dice = random.Random(0)
    slab = house.slab
    slab.delay_seconds = 0.005
    faults = [
        Fault.EIO,
        Fault.TORN,
        Fault.BIT_FLIP,
        Fault.LOST,
        Fault.SHORT,
        Fault.DELAY,
        Fault.ENOSPC,
    ]

    def trouble() -> None:
        slab.fail_next(
            dice.choice(["read", "write"]),
            dice.choice(faults),
            skip=dice.randint(0, 3),
        )

    engine = engine_of(cache, step_tokens=40)
    found = converse(engine, between=trouble)
    assert found["host"] > 0
    assert sum(slab.struck.values()) > 20
    assert len(slab.struck) > 4
    closed(engine)


@pytest.mark.slow
def test_a_disk_that_hangs_is_waited_for_within_bounds(house: House) -> None:
    cache = house.cache(slots=512)
    tokens, answer = talks_of("llama")[1][-1]
    engine = engine_of(cache)
    serve(engine, [(Sequence("a", list(tokens), NEW), answer)])
    closed(engine)
    house.shut(wipe_host=True)
    cache = house.cache(deadline_seconds=30.0)
    house.slab.fail_next("read", Fault.HANG, times=1000)
    engine = engine_of(cache, patience_seconds=0.3)
    patience = Patience(10)
    found = serve(engine, [(Sequence("a", list(tokens), NEW), answer)])
    assert house.slab.hanging.is_set()
    assert not patience.ended, patience.said()
    assert found["disk"] == 0
    house.slab.heal()
    closed(engine)


@pytest.mark.slow
def test_host_chunks_go_while_they_are_used(house: House) -> None:
    cache = house.cache()
    dice = random.Random(1)
    host = cache._tiers.host
    removed = Counter[str]()
    keys = [
        key
        for turns in talks_of("llama")
        for tokens, answer in turns[-1:]
        for _, _, key in cache.keys(tokens + answer)
    ]

    def trouble() -> None:
        for key in dice.sample(keys, 12):
            removed["chunks"] += host.remove(key)
        if dice.random() < 0.02:
            removed["clears"] += 1
            cache.clear()

    engine = engine_of(cache)
    found = converse(engine, between=trouble)
    assert (
        removed["chunks"] > 20
        and removed["clears"] > 0
        and found["host"] + found["disk"] > 0
    ), (
        removed,
        found,
    )
    closed(engine)


@pytest.mark.slow
@pytest.mark.parametrize(("up", "down"), [(6, 30), (4, 9)])
def test_copies_that_fail_give_no_wrong_answer(
    up: int, down: int, house: House
) -> None:
    engine = engine_of(house.cache())
    fails = every(up, down)
    faulty = [True]
    seen = fault_copies(engine, lambda name: faulty[0] and fails(name))
    converse(engine)
    assert seen["down"] > 2 and seen["up"] > 2 and seen["shortened"] > 0, seen
    # with every fourth copy failing, whether a chain comes up whole is a matter of chance
    faulty[0] = False
    found = converse(engine)
    assert found["host"] + found["disk"] > 100
    closed(engine)


@pytest.mark.slow
def test_requests_that_wait_for_the_same_failing_copy(house: House) -> None:
    cache = house.cache(slots=512)
    tokens, answer = talks_of("llama")[1][0]
    engine = engine_of(cache)
    serve(engine, [(Sequence("a", list(tokens), NEW), answer)])
    closed(engine)
    engine = engine_of(cache, patience_seconds=0)  # all are admitted in one step
    first = iter([True])
    seen = fault_copies(engine, lambda _: next(first, False))
    shared = [Sequence(f"{number}", list(tokens), NEW) for number in range(3)]
    found = serve(engine, [(seq, answer) for seq in shared])
    assert seen == Counter(up=1, shortened=1, again=2)
    assert shared[0].hits == {"device": 0, "host": 0}
    assert found["host"] > 0
    closed(engine)


@pytest.mark.slow
def test_all_faults_at_once_give_no_wrong_answer(house: House) -> None:
    cache = house.cache(deadline_seconds=0.5)
    dice = random.Random(3)
    slab = house.slab
    host = cache._tiers.host
    keys = [
        key
        for turns in talks_of("llama")
        for _, _, key in cache.keys(turns[-1][0])
    ]

    def trouble() -> None:
        host.remove(dice.choice(keys))
        slab.fail_next(
            dice.choice(["read", "write"]),
            dice.choice([Fault.EIO, Fault.BIT_FLIP, Fault.TORN]),
        )

    engine = engine_of(cache, step_tokens=24)
    seen = fault_copies(engine, every(6, 30))
    converse(engine, between=trouble)
    assert min(seen["down"], seen["up"], sum(slab.struck.values())) > 2
    closed(engine)


@pytest.mark.slow
def test_the_cache_is_closed_under_way(house: House) -> None:
    cache = house.cache()
    engine = engine_of(cache)
    steps = Counter[str]()

    def trouble() -> None:
        steps["done"] += 1
        if steps["done"] == 90:
            # slots are not to be copied into after the close
            engine._copier.submit(int).result()
            assert cache.close()

    found = converse(engine, between=trouble)
    assert steps["done"] > 150
    assert found["host"] > 0
    found = converse(engine, salt="after")
    assert found["device"] > 0
    assert found["host"] == found["disk"] == 0
    closed(engine)
