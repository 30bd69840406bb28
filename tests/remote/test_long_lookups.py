"""Look-ups of long prompts: few questions, and what is missing in the middle costs a shorter hit
and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis as client
from hypothesis import given
from hypothesis import strategies as st

from pagoda.base.metrics import Reason
from pagoda.testing import FakeClock
from pagoda.tiers.remote.leading_run import EXACT_KEYS, leading_run
from pagoda.tiers.remote.redis import RedisClient
from pagoda.tiers.remote.redis_pool import RedisPoolClient
from testbed.servers import Server, redis_server
from tests.cache.kit import CHUNK, cache_at, keys_of, prompt, served, stored
from tests.remote.chunks import (
    PATIENT_SECONDS,
    ROOT,
    load,
    name_of,
    save,
    tier_on,
)
from tests.remote.chunks import keys_of as chain_of

LONG = 3 * EXACT_KEYS
HOLE = 700  # between two positions that are asked about


@pytest.fixture
def db(server: Server) -> Iterator[client.Redis]:
    """The same Redis as another client sees it, empty."""
    with client.Redis(port=server.port) as other:
        other.flushall()
        yield other


def present(db: client.Redis, keys: Sequence[bytes]) -> None:
    """Put values where chunks would be."""
    pipeline = db.pipeline(transaction=False)
    for key in keys:
        pipeline.hset(name_of("pagoda", key), "h", b"")
    pipeline.execute()


def asked(db: client.Redis) -> int:
    """How many keys were asked about so far."""
    calls = db.info("commandstats").get("cmdstat_exists", {"calls": 0})["calls"]
    return int(calls)


@given(
    st.integers(0, 3000),
    st.integers(0, 3000),
    st.integers(2, 16),
    st.integers(16, 600),
)
def test_without_holes_it_is_the_leading_run(
    count: int, there: int, probes: int, exact: int
) -> None:
    there = min(count, there)
    questions = list[Sequence[int]]()

    def ask(positions: Sequence[int]) -> list[bool]:
        questions.append(positions)
        return [at < there for at in positions]

    assert leading_run(range(count), ask, probes=probes, exact=exact) == there
    assert all(len(positions) <= max(probes, exact) for positions in questions)
    assert len(questions) <= 1 or count > exact
    assert len({at for positions in questions for at in positions}) == sum(
        map(len, questions)
    ), "asked twice"


@given(st.sets(st.integers(0, 99)), st.integers(2, 8), st.integers(8, 120))
def test_with_holes_it_is_never_less(
    absent: set[int], probes: int, exact: int
) -> None:
    def ask(positions: Sequence[int]) -> list[bool]:
        return [at not in absent for at in positions]

    found = leading_run(range(100), ask, probes=probes, exact=exact)
    assert found >= min(absent, default=100)
    assert found == min(absent, default=100) or exact < 100
    assert found == 100 or found in absent


@pytest.mark.parametrize("there", [0, 1, EXACT_KEYS, LONG - 1, LONG])
def test_a_long_prompt_is_a_few_questions(
    server: Server, db: client.Redis, there: int
) -> None:
    keys = chain_of(LONG)
    present(db, keys[:there])
    with tier_on(RedisClient(server.url)) as tier:
        before = asked(db)
        assert tier.match_prefix(keys, namespace=ROOT) == there
        # with those that a connection begins with
        assert asked(db) - before <= 2 + 16 + LONG // 16


def test_a_short_prompt_is_exact(server: Server, db: client.Redis) -> None:
    keys = chain_of(EXACT_KEYS)
    present(db, [key for at, key in enumerate(keys) if at != 333])
    with tier_on(RedisClient(server.url)) as tier:
        assert tier.match_prefix(keys, namespace=ROOT) == 333


def test_several_nodes_find_a_long_run(server: Server, db: client.Redis) -> None:
    keys = chain_of(2 * LONG)
    with redis_server() as second, client.Redis(port=second.port) as other:
        places = f"127.0.0.1:{server.port},127.0.0.1:{second.port}"
        pool = RedisPoolClient(
            f"redis+pool://{places}", look_seconds=PATIENT_SECONDS
        )
        for node, share in pool.shares(keys).items():
            present(
                db if str(server.port) in node.place else other,
                [keys[at] for at in share if at < LONG + 9],
            )
        with tier_on(pool) as tier:
            assert tier.match_prefix(keys, namespace=ROOT) == LONG + 9


def test_what_was_not_asked_about_is_stored(
    server: Server, db: client.Redis
) -> None:
    """A look-up takes a missing chunk for present; the save that follows must not."""
    keys = chain_of(LONG)
    present(db, [key for at, key in enumerate(keys) if at != HOLE])
    with tier_on(
        RedisClient(server.url),
    ) as tier:
        assert tier.match_prefix(keys, namespace=ROOT) == LONG
        assert save(tier, [keys[HOLE]])[0].ok
        assert db.exists(name_of("pagoda", keys[HOLE]))


def test_a_hole_that_a_load_has_met_is_asked_about(
    server: Server, db: client.Redis
) -> None:
    """However long ago: what is computed for it is stored."""
    keys = chain_of(LONG)
    holes = [HOLE, HOLE + 50]
    present(db, [key for at, key in enumerate(keys) if at not in holes])
    with tier_on(RedisClient(server.url)) as tier:
        presence = tier._store.presence
        assert tier.match_prefix(keys, namespace=ROOT) == LONG
        for hole in holes:
            assert load(tier, [keys[hole]]) == [Reason.ABSENT]
        for hole in holes:
            for _ in range(2):
                presence._known.clear()  # it is too old
                assert tier.match_prefix(keys, namespace=ROOT) == hole
                assert tier.match_prefix(keys[hole:], namespace=ROOT) == 0
            assert save(tier, [keys[hole]])[0].ok
        presence._known.clear()
        assert tier.match_prefix(keys, namespace=ROOT) == LONG
        assert not presence._holes
        # a prompt that was gone, and that another machine has stored again
        for key in keys:
            presence.record_hole(ROOT, key)
        presence._known.clear()
        # few questions
        assert presence.run_to_ask(ROOT, keys, EXACT_KEYS) == EXACT_KEYS
        assert tier.match_prefix(keys, namespace=ROOT) == LONG
        assert not presence._holes


def test_each_of_many_keys_is_asked_about(
    server: Server, db: client.Redis
) -> None:
    """Also behind a look-up that has asked for some of them."""
    keys = chain_of(LONG)
    present(db, [key for at, key in enumerate(keys) if at != HOLE])
    with tier_on(RedisClient(server.url)) as tier:
        assert tier.match_prefix(keys, namespace=ROOT) == LONG
        here = tier.match_each(keys, namespace=ROOT)
        assert [at for at in range(LONG) if not here[at]] == [HOLE]


@pytest.mark.slow
def test_a_hole_is_a_shorter_hit(
    server: Server, db: client.Redis, tmp_path: Path
) -> None:
    """With the right bytes, a reason, and the hole is filled by what is computed then."""
    url = f"{server.url}/0?deadline=30s&look=30s&queue_chunks=4096"
    tokens = prompt(LONG)
    with cache_at(None, None, remote=url) as cache:
        stored(cache, tokens)
        keys = keys_of(cache, tokens)
    with cache_at(None, None, remote=url) as cache:
        (name,) = db.keys(f"*{{{keys[HOLE].hex()}}}")
        db.delete(name)
        assert cache.lookup(tokens).num_tokens == LONG * CHUNK
        hit, _ = served(cache, tokens)
        assert hit.num_tokens == HOLE * CHUNK
        assert hit.reason == Reason.ABSENT
        # while it is computed, what is known of the store becomes too old
        time.sleep(2.5)
        stored(cache, tokens)
        assert served(cache, tokens)[0].num_tokens == LONG * CHUNK


def test_an_absence_explains_a_miss_for_longer_than_it_is_believed(
    db: client.Redis, server: Server
) -> None:
    """Another tier may be asked meanwhile: this one has answered."""
    clock = FakeClock()
    (key,) = chain_of(1)
    with tier_on(RedisClient(server.url), clock=clock) as tier:
        assert not tier.knows(key, ROOT)
        assert tier.match_prefix([key], namespace=ROOT) == 0
        assert tier.knows(key, ROOT)
        before = asked(db)
        clock.advance(0.5)
        assert tier.knows(key, ROOT)
        assert tier.match_prefix([key], namespace=ROOT) == 0
        assert asked(db) == before + 1
        clock.advance(2.0)
        assert not tier.knows(key, ROOT)
