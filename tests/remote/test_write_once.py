"""Eight processes and one prompt: machines that compute it send it once; one machine loads it once
for all of them.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from pagoda.cache import Cache
from pagoda.layout import KVLayout
from pagoda.tiers.remote.redis import RedisClient
from testbed.programs import need
from testbed.servers import redis_server
from tests.cache.kit import (
    LAYOUT,
    NAMESPACE,
    config_of,
    prompt,
    run_all,
    served,
    stored,
)
from tests.children import in_light_process
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

# in a light process: eight others would import everything again
FORK = multiprocessing.get_context("fork")
MACHINES = 8
CHUNKS = 48


def all_machines(work: Callable[..., None], *arguments: object) -> None:
    """Do this in eight processes at once."""
    gate = FORK.Barrier(MACHINES)
    run_all(
        [
            FORK.Process(target=work, args=(*arguments, gate))
            for _ in range(MACHINES)
        ]
    )


def store(url: str, layout: KVLayout, gate: Barrier) -> None:
    """Store the prompt when all machines are ready; end when the store has it."""
    chunks = chunks_of(keys_of(CHUNKS), layout)
    with tier_on(RedisClient(url), layout) as tier:
        gate.wait(PATIENT_SECONDS)
        for end in ends(tier.store(chunks, ROOT), 2 * PATIENT_SECONDS):
            assert end.ok


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "commands"), [(SMALL, 1), (LARGE, 4)], ids=["small", "large"]
)
def test_eight_processes_send_each_chunk_once(
    layout: KVLayout, commands: int
) -> None:
    """`commands`: how many HSET move one chunk."""
    with redis_server() as server, redis.Redis.from_url(server.url) as client:
        in_light_process(all_machines, store, server.url, layout)
        assert (
            client.info("commandstats")["cmdstat_hset"]["calls"]
            <= 1.1 * commands * CHUNKS
        )
        assert client.dbsize() == CHUNKS, "no claim or draft is left"
        with tier_on(RedisClient(server.url), layout) as tier:
            assert (
                load(tier, keys_of(CHUNKS), layout, PATIENT_SECONDS)
                == [None] * CHUNKS
            )


def retrieve(url: str, memory: Path, gate: Barrier) -> None:
    """Retrieve the prompt with all other processes of the machine."""
    config = config_of(memory, None, remote=f"{url}?deadline=30s&look=30s")
    with Cache(config, namespace=NAMESPACE, layout=LAYOUT) as cache:
        gate.wait(PATIENT_SECONDS)
        assert served(cache, prompt(CHUNKS))[0].num_tokens == len(prompt(CHUNKS))


@pytest.mark.slow
def test_eight_processes_of_one_machine_load_each_chunk_once(
    shm_root: Path,
) -> None:
    with redis_server() as server, redis.Redis.from_url(server.url) as client:
        with Cache(
            config_of(shm_root / "other", None, remote=server.url),
            namespace=NAMESPACE,
            layout=LAYOUT,
        ) as cache:
            stored(cache, prompt(CHUNKS))
        assert client.dbsize() == CHUNKS
        client.config_resetstat()
        in_light_process(all_machines, retrieve, server.url, shm_root)
        # are asked for with each load: the header page and four pieces
        fields = 5
        assert (
            client.info("commandstats")["cmdstat_hget"]["calls"]
            <= 1.1 * fields * CHUNKS
        )
