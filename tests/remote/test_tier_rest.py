"""A remote tier that is skipped: no call of the cache waits for it, and it is soon used again."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from statistics import median

import pytest

from pagoda.base.metrics import Reason
from pagoda.cache import Cache
from pagoda.tiers import HostTier
from pagoda.tiers.remote.redis import RedisClient
from pagoda.tiers.remote.remote_tier import RemoteTier
from testbed.patience import Patience, wait_until
from testbed.servers import Server
from tests.cache.kit import (
    LAYOUT,
    NAMESPACE,
    PATIENT_SECONDS,
    blank,
    config_of,
    hit_of,
    prompt,
    served,
    stored,
)
from tests.remote.chunks import (
    fresh_prefix,
)
from tests.remote.proxy import STALLED, Proxy

PROBE_SECONDS = 1.0  # between two looks at whether an engine is back


def cache_on(proxy: Proxy, host: Path) -> tuple[Cache, RemoteTier]:
    """A cache with a host tier over a remote one, with real time."""
    config = config_of(host, None)
    top = HostTier.open(
        LAYOUT,
        Path(config.host_path),
        config.host_bytes,
        deadline_seconds=PATIENT_SECONDS,
    )
    remote = RemoteTier(
        LAYOUT,
        RedisClient(f"redis://127.0.0.1:{proxy.port}", prefix=fresh_prefix()),
        deadline_seconds=0.3,
    )
    return Cache(
        config, namespace=NAMESPACE, layout=LAYOUT, tiers=[top, remote]
    ), remote


def rests(cache: Cache, remote: RemoteTier) -> None:
    """Ask until the tier is left out."""
    for seed in range(100, 200):
        if remote.resting:
            return
        served(cache, prompt(2, seed))
        time.sleep(0.02)
    raise AssertionError("it never rested")


@pytest.mark.slow
def test_nothing_is_asked_of_an_engine_that_is_away(
    shm_root: Path, proxy: Proxy
) -> None:
    cache, remote = cache_on(proxy, shm_root)
    with cache:
        stored(cache, prompt(4))
        proxy.both(STALLED)
        rests(cache, remote)
        time.sleep(0.5)  # what was under way has ended
        before = proxy.traffic
        began = time.monotonic()
        asked = 0
        while time.monotonic() - began < 2.5:
            assert hit_of(cache, prompt(4)).by_tier == {"host": 64}
            assert hit_of(cache, prompt(3, 1)).num_tokens == 0
            assert cache.lookup(prompt(3, 2)).num_tokens == 0
            asked += 3
        probes = (time.monotonic() - began) / PROBE_SECONDS + 1
        assert asked > 20 * probes
        assert proxy.connections - before[0] <= 2 * probes
        assert (
            proxy.up_bytes - before[1] <= 2000 * probes
        )  # a greeting and a ping, not a question about a chunk
        assert remote.stats()["resting"] == 1
        proxy.heal()
        wait_until(lambda: not remote.resting)
        wait_until(
            lambda: hit_of(cache, prompt(4), tiers=["redis"]).num_tokens == 64
        )


@pytest.mark.slow
def test_only_threads_of_the_tier_use_its_sockets(
    shm_root: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the engine is well or away: the thread that calls `retrieve` opens no connection."""
    me = threading.current_thread()
    connects = list[threading.Thread]()
    connect = socket.socket.connect

    def noted(self: socket.socket, address: object) -> None:
        connects.append(threading.current_thread())
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", noted)
    cache, remote = cache_on(proxy, shm_root)
    with cache:
        stored(cache, prompt(4))
        served(cache, prompt(4, 1))
        proxy.both(STALLED)
        rests(cache, remote)
        for _ in range(10):
            served(cache, prompt(3, 2))
    assert connects
    assert me not in connects


@pytest.mark.slow
def test_a_retrieve_takes_no_longer_while_the_engine_is_away(
    shm_root: Path, server: Server, proxy: Proxy
) -> None:
    cache, remote = cache_on(proxy, shm_root)

    def seconds(tokens_seed: int) -> float:
        tokens = prompt(4, tokens_seed)
        times = list[float]()
        for _ in range(100):
            kv = blank(tokens)
            began = time.perf_counter()
            cache.retrieve(tokens, kv.transfer)
            times.append(time.perf_counter() - began)
        return median(times)

    alone = Cache(
        config_of(shm_root / "alone", None), namespace=NAMESPACE, layout=LAYOUT
    )
    with cache, alone:
        stored(cache, prompt(4))
        proxy.both(STALLED)
        rests(cache, remote)
        away = seconds(0), seconds(1)
        assert remote.resting
        cache = alone
        _ = stored(alone, prompt(4))
        without = seconds(0), seconds(1)
    for mine, theirs in zip(away, without, strict=True):
        # a wait for the engine would be 50 ms at least
        assert mine < 3 * theirs + 0.02


def test_stores_do_not_wait_for_an_engine_that_is_away(
    shm_root: Path, proxy: Proxy
) -> None:
    cache, remote = cache_on(proxy, shm_root)
    with cache:
        proxy.both(STALLED)
        rests(cache, remote)
        patience = Patience(10.0)
        stored(cache, prompt(20, 3))  # a flush has nothing to wait for
        assert not patience.ended, patience.said()
        assert hit_of(cache, prompt(20, 3)).by_tier == {"host": 320}
        assert remote.stats()[f"drop_{Reason.TIER_SKIPPED}"] >= 20
        assert cache.stats()["waiting_chunks"] == 0


def test_a_slow_engine_costs_a_retrieve_a_moment_only(
    shm_root: Path, proxy: Proxy
) -> None:
    """Before the failure is known, a look-up waits for the answer only `look_seconds`."""
    cache, _remote = cache_on(proxy, shm_root)
    with cache:
        stored(cache, prompt(4))
        proxy.both(STALLED)
        patience = Patience(1.0)  # 50 ms of it for the engine
        hit, _ = served(cache, prompt(4, 1))
        assert hit.num_tokens == 0
        assert not patience.ended, patience.said()
        assert hit_of(cache, prompt(4)).by_tier == {"host": 64}
