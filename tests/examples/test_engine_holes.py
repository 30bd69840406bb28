"""The example engine with prompts of which chunks are missing before stored ones: it computes only
those.
"""

from __future__ import annotations

import random

import pytest

from examples.paged_engine.engine import Engine, Sequence
from pagoda import Cache
from pagoda.testing import Fault
from testbed.patience import Patience
from tests.examples.kit import (
    BLOCK,
    NEW,
    House,
    closed,
    engine_of,
    serve,
    talks_of,
)

TOKENS, ANSWER = talks_of("llama")[1][-1]
CHUNKS = (len(TOKENS) - 1) // BLOCK
WHOLE = CHUNKS * BLOCK
GONE: list[set[int]] = [
    {0},
    {CHUNKS - 1},
    set(range(CHUNKS)) - {5},
    set(range(0, CHUNKS, 2)),
    set(range(1, CHUNKS, 2)),
]
RANDOM = [
    set(random.Random(seed).sample(range(CHUNKS), 1 + seed % CHUNKS))
    for seed in range(12)
]


def warm(house: House, **options) -> Cache:
    """A cache with the KV of the prompt."""
    cache = house.cache(slots=512, **options)
    engine = engine_of(cache)
    # nothing goes down before it is evicted: `finish` writes it back
    serve(engine, [(Sequence("first", list(TOKENS), NEW), ANSWER)])
    closed(engine)
    assert cache.flush(60.0)
    assert cache.lookup(TOKENS[:-1], counted=False).num_tokens == WHOLE
    return cache


def remove(cache: Cache, gone: set[int], tiers: str = "host disk") -> None:
    keys = [key for _, _, key in cache.keys(TOKENS)]
    for tier in cache._tiers.all:
        if tier.name in tiers:
            for at in gone:
                tier.remove(keys[at])


def asked(engine: Engine, others: int = 0) -> Sequence:
    """Serve the prompt, beside others; return its request."""
    seq = Sequence("again", list(TOKENS), NEW)
    requests = [(seq, ANSWER)]
    for talk in range(others):
        tokens, answer = talks_of("llama")[talk][0]
        requests.append((Sequence(f"o{talk}", list(tokens), NEW), answer))
    serve(engine, requests)
    return seq


@pytest.mark.parametrize(
    "gone",
    [*GONE, *(pytest.param(one, marks=pytest.mark.slow) for one in RANDOM)],
    ids=str,
)
def test_only_missing_chunks_are_computed(gone: set[int], house: House) -> None:
    cache = warm(house)
    remove(cache, gone)
    for left in (len(gone), 0):
        # a new engine each time: its device has nothing
        engine = engine_of(cache, step_tokens=30)
        seq = asked(engine)
        computed = len(TOKENS) - WHOLE + left * BLOCK
        assert engine.prompt_tokens_computed == computed
        assert seq.hits.get("host", 0) == WHOLE - left * BLOCK
        closed(engine)
        assert cache.flush(60.0)


def test_holes_in_two_tiers_beside_other_requests(house: House) -> None:
    cache = warm(house)
    remove(cache, set(range(1, CHUNKS, 2)), "host")
    remove(cache, set(range(0, CHUNKS, 2)), "disk")
    remove(cache, {0, 7, 8})
    engine = engine_of(cache, step_tokens=30)
    seq = asked(engine, others=4)
    assert sum(seq.hits.values()) == WHOLE - 3 * BLOCK
    assert seq.hits["host"] > 0
    assert seq.hits["disk"] > 0
    closed(engine)


def test_what_is_loaded_behind_a_hole_is_used(house: House) -> None:
    """A control of the tests above: wrong KV there changes the answer."""
    cache = warm(house)
    remove(cache, {2}, "host disk")
    host = cache._tiers.host
    keys = [key for _, _, key in cache.keys(TOKENS)]
    found = host.ledger.match_prefix(keys[3:CHUNKS], start=3)
    for view in host.slab.views(found.slots.tolist()):
        view[:] = 0
    engine = engine_of(cache)
    seq = Sequence("wrong", list(TOKENS), NEW)
    engine.add(seq)
    while engine.busy:
        engine.step()
    assert seq.output != ANSWER
    closed(engine)


def test_a_disk_that_hangs_is_waited_for_within_bounds(house: House) -> None:
    """Nothing of the prompt can be prefetched, and what is behind the hole does not come."""
    remove(warm(house), {0})
    house.shut(wipe_host=True)
    cache = house.cache(deadline_seconds=60.0)
    house.slab.fail_next("read", Fault.HANG, times=1000)
    engine = engine_of(cache, patience_seconds=0.3)
    patience = Patience(10)
    seq = asked(engine)
    assert house.slab.hanging.is_set()
    assert not patience.ended, patience.said()
    assert not sum(seq.hits.values())
    assert engine.prompt_tokens_computed == len(TOKENS)
    house.slab.heal()
    closed(engine)


@pytest.mark.slow
def test_preempted_and_aborted_requests_with_holes(house: House) -> None:
    dice = random.Random(0)
    cache = warm(house)
    preemptions = 0
    for turn in range(6):
        remove(cache, set(dice.sample(range(CHUNKS), 9)))
        # so few blocks that requests lose theirs
        engine = engine_of(cache, step_tokens=20, blocks=CHUNKS + 5)
        requests = [Sequence(f"{turn}.{n}", list(TOKENS), NEW) for n in range(4)]
        for seq in requests:
            engine.add(seq)
        gone = None
        while engine.busy:
            for seq in engine.step():
                assert seq.output == ANSWER
            if gone is None and dice.random() < 0.2:
                gone = dice.choice([*engine.running, *engine.waiting])
                engine.abort(gone)
            engine.manager.check()
        preemptions += sum(seq.preemptions for seq in requests)
        closed(engine)
        assert cache.flush(60.0)
    assert preemptions > 0
