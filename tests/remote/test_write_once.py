"""Eight processes and one prompt: machines that compute it send it once; one machine loads it once for all of them."""

from __future__ import annotations

import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from pagoda.cache import Cache
from pagoda.layout import KVLayout
from pagoda.tiers.remote.redis import RedisClient
from testbed.servers import need, redis_server
from tests.cache.kit import LAYOUT, NAMESPACE, config_of, prompt, run_all, served, stored
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


def retrieve(url: str, memory: Path, gate: Barrier) -> None:
    """Retrieve the prompt with all other processes of the machine."""
    config = config_of(memory, None, remote=f"{url}?deadline=30s&look=30s")
    with Cache(config, namespace=NAMESPACE, layout=LAYOUT) as cache:
        gate.wait(PATIENT_SECONDS)
        assert served(cache, prompt(CHUNKS))[0].num_tokens == len(prompt(CHUNKS))


@pytest.mark.slow
def test_eight_processes_of_one_machine_load_each_chunk_once(shm_root: Path) -> None:
    gate = SPAWN.Barrier(MACHINES)
    with redis_server() as server, redis.Redis.from_url(server.url) as client:
        with Cache(
            config_of(shm_root / "other", None, remote=server.url), namespace=NAMESPACE, layout=LAYOUT
        ) as cache:
            stored(cache, prompt(CHUNKS))
        assert client.dbsize() == CHUNKS
        client.config_resetstat()
        run_all([SPAWN.Process(target=retrieve, args=(server.url, shm_root, gate)) for _ in range(MACHINES)])
        fields = 5  # are asked for with each load: the header page and four pieces
        assert client.info("commandstats")["cmdstat_hget"]["calls"] <= 1.1 * fields * CHUNKS
