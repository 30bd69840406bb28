"""Eight processes that compute the same prompt at the same time send it to the store once."""

from __future__ import annotations

import multiprocessing
from multiprocessing.synchronize import Barrier

import pytest

from pagoda.layout import KVLayout
from pagoda.tiers.remote.redis import RedisClient
from testbed.servers import need, redis_server
from tests.remote.chunks import (
    LARGE,
    PATIENT_SECONDS,
    ROOT,
    SMALL,
    chunks_of,
    ends,
    keys_of,
    load,
    tier_on,
)

redis = pytest.importorskip("redis")
need("redis-server")

SPAWN = multiprocessing.get_context("spawn")
MACHINES, CHUNKS = 8, 48


def store(url: str, layout: KVLayout, gate: Barrier) -> None:
    """Store the prompt when all machines are ready; end when the store has it."""
    chunks = chunks_of(keys_of(CHUNKS), layout)
    with tier_on(RedisClient(url), layout, deadline_seconds=PATIENT_SECONDS) as tier:
        gate.wait(PATIENT_SECONDS)
        assert all(end.ok for end in ends(tier.save(chunks, ROOT), 2 * PATIENT_SECONDS))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "commands"), [(SMALL, 1), (LARGE, 4)], ids=["small", "large"])
def test_eight_processes_send_each_chunk_once(layout: KVLayout, commands: int) -> None:
    """`commands`: how many HSET move one chunk."""
    gate = SPAWN.Barrier(MACHINES)
    with redis_server() as server, redis.Redis.from_url(server.url) as client:
        children = [SPAWN.Process(target=store, args=(server.url, layout, gate)) for _ in range(MACHINES)]
        for child in children:
            child.start()
        for child in children:
            child.join(4 * PATIENT_SECONDS)
        assert [child.exitcode for child in children] == [0] * MACHINES
        assert client.info("commandstats")["cmdstat_hset"]["calls"] <= 1.1 * commands * CHUNKS
        assert client.dbsize() == CHUNKS, "no claim or draft is left"
        with tier_on(RedisClient(server.url), layout, deadline_seconds=PATIENT_SECONDS) as tier:
            assert load(tier, keys_of(CHUNKS), layout, PATIENT_SECONDS) == [None] * CHUNKS
