"""All faults at once, at random: right bytes or a miss, in time, and everything works again
afterwards.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagoda.cache import Cache
from testbed.patience import wait_until
from testbed.servers import Server, redis_server
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    config_of,
    kv_of,
    prompt,
    served,
    stored,
)
from tests.remote.chunks import begun_since, soon
from tests.remote.proxy import STALLED, WELL, Fault, Proxy, proxy_to

SECONDS = 4.0
FAULTS = [
    WELL,
    WELL,
    STALLED,
    Fault(delay_seconds=0.02),
    Fault(bytes_per_second=200_000),
    Fault(cut_at=5_000),
    Fault(cut_at=50_000, reset=True),
    Fault(corrupt=range(3_000, 3_001)),
    Fault(corrupt=range(20_000, 20_004)),
    Fault(lose=range(10_000, 10_001)),
]


def disturb(server: Server, proxy: Proxy, over: threading.Event) -> None:
    """Change the network several times a second, and sometimes the server."""
    chance = random.Random(7)
    while not over.wait(chance.uniform(0.02, 0.25)):
        proxy.up = chance.choice(FAULTS)
        proxy.down = chance.choice(FAULTS)
        match chance.randrange(8):
            case 0:
                server.restart()
            case 1:
                server.stop()
                over.wait(0.2)
                server.cont()
            case 2:
                proxy.cut()
    proxy.heal()


def use(cache: Cache, seed: int, until: float) -> None:
    """Store and retrieve; checks every byte and every call's time."""
    chance = random.Random(seed)
    while time.monotonic() < until:
        tokens = prompt(chance.randrange(1, 8), chance.randrange(12))
        with soon(8.0):
            served(cache, tokens)
            cache.store(tokens, kv_of(tokens).transfer)
        if chance.random() < 0.05:
            cache.clear()


@pytest.mark.slow
def test_right_bytes_or_a_miss_whatever_happens(shm_root: Path) -> None:
    before = threading.enumerate()
    with redis_server() as server, proxy_to(server.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0?deadline=300ms"
        config = config_of(
            shm_root, None, remote=url, host_size=16 * LAYOUT.slot_bytes
        )
        with (
            Cache(config, namespace=NAMESPACE, layout=LAYOUT) as cache,
            ThreadPoolExecutor(4) as threads,
        ):
            over = threading.Event()
            disturbing = threads.submit(disturb, server, proxy, over)
            until = time.monotonic() + SECONDS
            using = [threads.submit(use, cache, seed, until) for seed in range(2)]
            try:
                for future in using:
                    future.result(60)
            finally:
                over.set()
                disturbing.result(60)

            def is_well() -> bool:
                tokens = prompt(4, 100 + len(tried))
                tried.append(tokens)
                stored(cache, tokens)
                return (
                    served(cache, tokens, tiers=["redis"])[0].num_tokens
                    == 4 * CHUNK
                )

            tried: list[object] = []
            wait_until(is_well, 30)
        assert not begun_since(before, "pagoda-redis")
