"""Chunks that are hot on one machine stay in the shared store, and are stored again after a
loss.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from pagoda.cache import Cache
from pagoda.testing import FakeClock
from testbed.patience import wait_until
from testbed.servers import BUCKET, Server, emptied_s3, redis_server
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    config_of,
    counters_of,
    hit_of,
    keys_of,
    on_disk,
    prompt,
    put,
    stored,
)
from tests.remote.redis_kit import redis_client

HOT = prompt(20, 1)
PATIENT = "deadline=30s&look=30s"


@contextmanager
def machine(
    url: str,
    memory: Path,
    clock: FakeClock,
    disk: Path | None = None,
    **options: object,
) -> Iterator[Cache]:
    """A machine's cache: host memory, perhaps a disk, and the store that it shares with others."""
    config = config_of(
        memory,
        disk,
        remote=f"{url}{'&' if '?' in url else '?'}{PATIENT}",
        **options,
    )
    with Cache(config, namespace=NAMESPACE, layout=LAYOUT, clock=clock) as cache:
        yield cache


def found_by_another(url: str, memory: Path) -> int:
    """How many chunks of the hot prompt a machine that begins with empty memory gets from the
    store.
    """
    with machine(url, memory, FakeClock()) as cache:
        return hit_of(cache, HOT).by_tier.get("redis", 0) // CHUNK


def use(cache: Cache, clock: FakeClock, seconds: float = 3.0) -> None:
    """Serve the hot prompt from host memory, some time later."""
    clock.advance(seconds)
    assert hit_of(cache, HOT).by_tier == {"host": 20 * CHUNK}
    assert cache.flush(100)


def test_hot_chunks_are_stored_again_after_flushall(shm_root: Path) -> None:
    clock = FakeClock()
    with (
        redis_server() as redis,
        machine(redis.url, shm_root / "a", clock) as cache,
    ):
        stored(cache, HOT)
        redis_client(redis).flushall()
        use(cache, clock)
        assert found_by_another(redis.url, shm_root / "b") == 20


def test_after_it_went_on_as_an_empty_server(shm_root: Path) -> None:
    """As after a restart, or a failover to a replica that had nothing."""
    clock = FakeClock()
    with (
        redis_server() as redis,
        machine(redis.url, shm_root / "a", clock) as cache,
    ):
        stored(cache, HOT)
        redis.restart()
        for _ in range(3):  # the first meets a connection that was cut
            use(cache, clock)
        assert found_by_another(redis.url, shm_root / "b") == 20


def test_after_a_store_of_what_is_here_already(shm_root: Path) -> None:
    clock = FakeClock()
    with (
        redis_server() as redis,
        machine(redis.url, shm_root / "a", clock) as cache,
    ):
        stored(cache, HOT)
        redis_client(redis).flushall()
        clock.advance(3)
        assert put(cache, HOT).present == 20
        assert cache.flush(100)
        assert found_by_another(redis.url, shm_root / "b") == 20


@pytest.mark.slow
def test_while_others_fill_the_server(shm_root: Path) -> None:
    clock = FakeClock()
    limits = (
        "--maxmemory",
        "12mb",
        "--maxmemory-policy",
        "allkeys-lru",
        "--maxmemory-samples",
        "10",
    )
    with redis_server(*limits) as redis:
        # each takes up to a MiB of the server's memory
        url = f"{redis.url}?connections=1"
        with machine(url, shm_root / "a", clock) as cache:
            stored(cache, HOT)
            with machine(url, shm_root / "others", FakeClock()) as others:
                for seed in range(30):  # 15 MB
                    stored(others, prompt(40, 100 + seed))
                    use(cache, clock)
            truth = redis_client(redis)
            assert truth.info("stats")["evicted_keys"] > 100
            fresh = (shm_root / f"fresh{number}" for number in count())

            # a new connection costs the server memory: it may evict some of them once more
            def is_served() -> bool:
                use(cache, clock)
                return found_by_another(url, next(fresh)) == 20

            # Redis counts idleness in seconds, and chooses among a few
            wait_until(is_served)


@pytest.mark.parametrize("from_below", [False, True])
def test_with_an_end_that_use_puts_off(shm_root: Path, from_below: bool) -> None:
    clock = FakeClock()
    with (
        redis_server() as redis,
        machine(f"{redis.url}?ttl=1h", shm_root / "a", clock) as cache,
    ):
        stored(cache, HOT)
        truth = redis_client(redis)
        names = list(truth.scan_iter("pagoda:1:*"))
        assert len(names) == 20
        for name in names:
            assert truth.pexpire(name, 60_000)  # as if most of the hour were over
        clock.advance(1800)
        if from_below:
            assert hit_of(cache, HOT, tiers=["redis"]).by_tier == {
                "redis": 20 * CHUNK
            }
            assert cache.flush(100)
        else:
            use(cache, clock)
        assert min(truth.pttl(name) for name in names) > 3_000_000


def test_hot_chunks_are_stored_again_after_their_end(shm_root: Path) -> None:
    clock = FakeClock()
    with (
        redis_server() as redis,
        machine(f"{redis.url}?ttl=1h", shm_root / "a", clock) as cache,
    ):
        stored(cache, HOT)
        truth = redis_client(redis)
        for name in truth.scan_iter("pagoda:1:*"):
            truth.pexpire(name, 1)
        while truth.dbsize():
            pass
        use(cache, clock, 4000)
        assert truth.dbsize() == 20
        assert found_by_another(redis.url, shm_root / "b") == 20


ACL = (
    "-@all +select +exists +set +hset +hget +hlen +pexpire +persist +renamenx +unlink +multi "
    "+exec +discard +scan"
)
ACL += " +info +object|idletime +object|freq"
READ_ONLY = "-@all +select +exists +hget +info"


@pytest.mark.parametrize("ttl", ["", "ttl=1h"])
def test_the_rule_of_the_documentation_is_enough(
    shm_root: Path, caplog: pytest.LogCaptureFixture, ttl: str
) -> None:
    clock = FakeClock()
    with redis_server() as redis:
        truth = redis_client(redis)
        truth.execute_command(
            "ACL",
            "SETUSER",
            "user",
            "on",
            ">secret",
            "resetkeys",
            "~pagoda:1:*",
            "resetchannels",
            *ACL.split(),
        )
        url = f"redis://user:secret@127.0.0.1:{redis.port}/0?{ttl}"
        with (
            machine(url, shm_root / "a", clock) as cache,
            caplog.at_level(logging.WARNING),
        ):
            stored(cache, HOT)
            idle = [
                truth.object("idletime", name)
                for name in truth.scan_iter("pagoda:1:*")
            ]
            assert len(idle) == 20
            truth.flushdb()
            use(cache, clock)
            assert truth.dbsize() == 20
            assert not [
                record
                for record in caplog.records
                if record.name == "pagoda.tiers.remote"
            ]
            assert counters_of(cache)["miss_io_error"] == 0


def test_who_may_only_read_gets_one_warning_and_reads_on(
    shm_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    with redis_server() as redis:
        with machine(redis.url, shm_root / "a", FakeClock()) as writer:
            stored(writer, HOT)
        truth = redis_client(redis)
        truth.execute_command(
            "ACL",
            "SETUSER",
            "reader",
            "on",
            ">secret",
            "resetkeys",
            "~pagoda:1:*",
            "resetchannels",
            *READ_ONLY.split(),
        )
        url = f"redis://reader:secret@127.0.0.1:{redis.port}/0"
        with (
            machine(url, shm_root / "b", clock) as cache,
            caplog.at_level(logging.WARNING),
        ):
            assert hit_of(cache, HOT).by_tier == {"redis": 20 * CHUNK}
            for _ in range(10):
                use(cache, clock)
                clock.advance(3)
                assert hit_of(cache, HOT, tiers=["redis"]).by_tier == {
                    "redis": 20 * CHUNK
                }
            assert (
                len(
                    [
                        record
                        for record in caplog.records
                        if "touching" in record.message
                    ]
                )
                == 1
            )


@pytest.mark.slow
def test_objects_are_looked_for_again_once_in_a_while(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch, moto: Server
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    clock = FakeClock()
    url = f"s3://{BUCKET}/?endpoint={emptied_s3(moto).url}&region=us-east-1"
    with machine(url, shm_root / "a", clock) as cache:
        stored(cache, HOT)
        tier = cache._tiers.lower[0]
        keys = keys_of(cache, HOT)
        for key in keys[4:12]:
            assert tier.remove(key)
        use(cache, clock, 60)  # too soon for a request that is paid for
        assert tier.match_prefix(keys, namespace=cache.namespace.root) == 4
        use(cache, clock, 600)
        assert tier.touch(keys, namespace=cache.namespace.root) == [True] * 20


def test_what_only_the_disk_served_is_kept_alive_further_down(
    shm_root: Path, tmp_path: Path
) -> None:
    clock = FakeClock()
    with redis_server() as redis:
        with machine(redis.url, shm_root / "a", clock, tmp_path) as cache:
            stored(cache, HOT)
        truth = redis_client(redis)
        truth.flushall()
        with machine(
            redis.url, shm_root / "after a boot", clock, tmp_path
        ) as cache:
            assert on_disk(cache, HOT) == 20
            assert hit_of(cache, HOT).by_tier == {"disk": 20 * CHUNK}
            assert cache.flush(100)
        assert truth.dbsize() == 20
