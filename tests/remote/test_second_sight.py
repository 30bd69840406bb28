"""write_policy=second_sight: a chunk is sent to the store when a second request, on any machine,
has asked for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pagoda.base.metrics import Reason
from pagoda.cache import Cache
from pagoda.testing import FakeClock
from pagoda.tiers.base import Done
from pagoda.tiers.remote.redis import RedisClient
from pagoda.tiers.remote.redis_pool import RedisPoolClient
from testbed.patience import wait_until
from testbed.programs import need
from testbed.servers import Server, redis_server
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    config_of,
    kv_of,
    prompt,
    served,
)
from tests.remote.chunks import (
    PATIENT_SECONDS,
    ROOT,
    chunks_of,
    ends,
    fresh_prefix,
    keys_of,
    load,
    save,
    tier_on,
    walk,
)

redis = pytest.importorskip("redis")
need("redis-server")

# more than a store without a host tier sends at a time: the first chunks have been refused before
# the last ones are sent
CHUNKS = 48
SEEN = prompt(CHUNKS, 1)
# of tiers on stores that do answer, on a machine that may be busy
PATIENT = {
    "deadline_seconds": PATIENT_SECONDS,
    "look_seconds": PATIENT_SECONDS,
}


@pytest.fixture
def prefix() -> str:
    return fresh_prefix()


@contextmanager
def machine(
    server: Server,
    prefix: str,
    memory: Path | None,
    clock: FakeClock | None = None,
) -> Iterator[Cache]:
    """A machine's cache over the store."""
    url = f"{server.url}/0?prefix={prefix}&write_policy=second_sight&deadline=30s&look=30s"
    config = config_of(memory, None, remote=url)
    with Cache(config, namespace=NAMESPACE, layout=LAYOUT, clock=clock) as cache:
        yield cache


def compute(cache: Cache) -> None:
    """Store the prompt as an engine does that found nothing."""
    cache.store(SEEN, kv_of(SEEN).transfer)
    assert cache.flush(100)


def in_store(server: Server, prefix: str) -> tuple[int, int]:
    """Return how many chunks are in the store, and how many marks that one was asked for."""
    with redis.Redis.from_url(server.url) as client:
        names = client.keys(f"{prefix}:*")
        marks = [name for name in names if name.endswith(b":g")]
        for name in marks:
            assert 0 < client.pttl(name) <= 3_600_000
            assert client.get(name) == b"1"
        return len(names) - len(marks), len(marks)


@pytest.mark.parametrize("has_host", [True, False], ids=["host", "no host"])
def test_the_second_machine_that_computes_it_sends_it(
    server: Server, prefix: str, shm_root: Path, has_host: bool
) -> None:
    places = [shm_root / name if has_host else None for name in "abc"]
    with machine(server, prefix, places[0]) as first:
        compute(first)
        assert in_store(server, prefix) == (0, CHUNKS)
        assert first.stats()["tiers"]["redis"]["drop_not_admitted"] == CHUNKS
    with machine(server, prefix, places[1]) as second:
        assert second.lookup(SEEN).num_tokens == 0
        compute(second)
        assert in_store(server, prefix) == (CHUNKS, CHUNKS)
    with machine(server, prefix, places[2]) as third:
        assert served(third, SEEN)[0].by_tier == {"redis": CHUNKS * CHUNK}


def test_the_second_request_on_the_same_machine_sends_it(
    server: Server, prefix: str, shm_root: Path
) -> None:
    clock = FakeClock()
    with machine(server, prefix, shm_root, clock) as cache:
        compute(cache)
        assert in_store(server, prefix) == (0, CHUNKS)
        clock.advance(3)
        assert served(cache, SEEN)[0].by_tier == {"host": CHUNKS * CHUNK}
        assert cache.flush(100)
        assert in_store(server, prefix) == (CHUNKS, CHUNKS)


def test_what_nobody_asked_for_again_in_time_is_new(
    server: Server, prefix: str
) -> None:
    keys = keys_of(6)
    with tier_on(
        RedisClient(server.url, prefix=prefix, second_sight=True), **PATIENT
    ) as tier:
        assert save(tier, keys[:4]) == [Done(False, Reason.NOT_ADMITTED)] * 4
        assert load(tier, keys[:4]) == [Reason.ABSENT] * 4
        with redis.Redis.from_url(server.url) as client:
            client.delete(
                *[
                    name
                    for name in client.keys(f"{prefix}:*")
                    if keys[1].hex().encode() in name
                ]
            )
        # one batch: some for the first time, some for the second
        refused = [not done.ok for done in save(tier, keys)]
        assert refused == [False, True, False, False, True, True]
        assert [done.ok for done in save(tier, keys)] == [True] * 6
        assert load(tier, keys) == [None] * 6


def test_marks_are_no_chunks_and_go_with_them(
    server: Server, prefix: str
) -> None:
    client = RedisClient(server.url, prefix=prefix, second_sight=True)
    with tier_on(client, **PATIENT) as tier:
        save(tier, keys_of(6))
        save(tier, keys_of(2))
        connection = client.connection().open(time.monotonic() + PATIENT_SECONDS)
        assert connection.count_by_namespace(walk(10)) == {ROOT: 2}
        connection.close()
        assert tier.clear(ROOT) == 2
    assert in_store(server, prefix) == (0, 0)


def test_a_pool_stores_at_the_second_sight_too(
    server: Server, prefix: str
) -> None:
    with ExitStack() as stack:
        other = stack.enter_context(redis_server())
        url = f"redis+pool://127.0.0.1:{server.port},127.0.0.1:{other.port}"
        options = {"prefix": prefix, "look_seconds": PATIENT_SECONDS}
        for ok in (False, True):
            pool = RedisPoolClient(url, second_sight=True, **options)  # type: ignore[arg-type]
            tier = stack.enter_context(tier_on(pool, **PATIENT))
            assert [done.ok for done in save(tier, keys_of(12))] == [ok] * 12
        assert load(tier, keys_of(12)) == [None] * 12


def test_a_pool_has_seen_a_chunk_whatever_request_it_was_in(prefix: str) -> None:
    """What one request stores is on one node; so a chunk may have another place in the request that
    asks again.
    """
    with ExitStack() as stack:
        servers = [stack.enter_context(redis_server()) for _ in range(3)]
        nodes = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        pool = RedisPoolClient(
            f"redis+pool://{nodes}",
            prefix=prefix,
            second_sight=True,
            look_seconds=PATIENT_SECONDS,
        )
        tier = stack.enter_context(tier_on(pool, **PATIENT))
        unseen = Done(False, Reason.NOT_ADMITTED)
        stamp = 0
        for chain in range(8):
            keys = keys_of(6, chain=chain)
            chunks = chunks_of(keys)
            # what the first prompt still lacks: it begins with another chunk
            requests = [
                (chunks, [unseen] * 6),
                # another prompt that begins alike
                (chunks[:3], [Done(True)] * 3),
                (
                    chunks[3:],
                    [Done(True)] * 3,
                ),
            ]
            for asked, expected in requests:
                stamp += 1
                assert ends(tier.store(asked, ROOT, stamp=stamp)) == expected, (
                    chain
                )
            assert load(tier, keys) == [None] * 6


def test_a_pool_without_the_node_of_the_marks_admits_its_chunks(
    prefix: str,
) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(redis_server()) for _ in range(3)]
        nodes = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        pool = RedisPoolClient(
            f"redis+pool://{nodes}",
            prefix=prefix,
            second_sight=True,
            look_seconds=PATIENT_SECONDS,
        )
        tier = stack.enter_context(tier_on(pool, **PATIENT))
        save(tier, keys_of(1))
        servers[1].kill()
        wait_until(
            lambda: (
                tier.match_prefix(keys_of(1), namespace=ROOT) == 0
                and len(pool.in_use()) == 2
            )
        )
        keys = keys_of(12, chain=2)
        assert [done.ok for done in save(tier, keys)] == [False] * 12
        assert [done.ok for done in save(tier, keys)] == [True] * 12
        assert load(tier, keys) == [None] * 12
