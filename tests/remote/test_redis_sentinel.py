"""A Redis that Sentinels watch: its master is asked for, and followed after a failover. Passwords that change."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import redis as client

from pagoda.errors import ConfigError
from pagoda.tiers.remote.redis import RedisClient
from pagoda.tiers.remote.redis_nodes import RedisPoolClient
from testbed.servers import free_port, redis_sentinel, redis_server
from tests.remote.chunks import fresh_prefix, keys_of, load, save, stores, tier_on, under_load, wait_until
from tests.remote.evil import LyingRedis


def test_a_lying_sentinel_is_left_for_the_next() -> None:
    lies = (
        b":1",
        b"+OK",
        b"*2\r\n:1\r\n:2",
        b"*2\r\n$1\r\n/\r\n$1\r\n1",
        b"$2000000000\r\nx",
        b"+" + b"x" * 9000,
    )
    with redis_server() as server, redis_sentinel(server, "kv") as sentinel:
        liar = LyingRedis(server.port)
        url = f"redis+sentinel://127.0.0.1:{liar.port}"
        try:
            for lie in lies:
                liar.lies[b"SENTINEL"] = lambda _, lie=lie: [lie + b"\r\n"]
                connection = RedisClient(f"{url}/kv").connection()
                with pytest.raises(OSError, match="no Sentinel names a master"):
                    connection.open(time.monotonic() + 10)
                connection.close()
                RedisClient(f"{url},127.0.0.1:{sentinel.port}/kv").connection().open(
                    time.monotonic() + 10
                ).close()
        finally:
            liar.close()


@pytest.mark.slow
def test_after_a_failover_the_new_master_is_used() -> None:
    quick = ("--repl-diskless-sync-delay", "0")
    with (
        redis_server(*quick) as first,
        redis_server(*quick, "--replicaof", "127.0.0.1", str(first.port)) as second,
        redis_sentinel(first, "kv") as one,
        redis_sentinel(first, "kv") as two,
        redis_sentinel(first, "kv") as three,
    ):
        with client.Redis(port=one.port) as asked:
            wait_until(lambda: asked.sentinel_master("kv")["num-other-sentinels"] == 2)
            wait_until(lambda: asked.sentinel_master("kv")["num-slaves"] == 1)
        wait_until(lambda: "master_link_status:up" in second.call("INFO"))
        gone = free_port()  # of a Sentinel that is not there
        hosts = ",".join(f"127.0.0.1:{port}" for port in (gone, one.port, two.port, three.port))
        prefix, keys = fresh_prefix(), keys_of(10)
        remote = RedisClient(f"redis+sentinel://{hosts}/kv", prefix=prefix)
        assert remote.address == f"redis+sentinel://{hosts}/kv/0"
        with tier_on(remote) as tier:
            stores(tier, keys)
            wait_until(lambda: load(tier, keys) == [None] * 10)
            wait_until(lambda: second.call("DBSIZE") == first.call("DBSIZE"))

            def kill() -> None:
                first.kill()
                began = time.monotonic()
                wait_until(lambda: load(tier, keys) == [None] * 10)
                print(f"misses ended after {time.monotonic() - began:.1f} s")

            under_load(tier, keys, kill)
            wait_until(lambda: {end.ok for end in save(tier, keys_of(10, chain=1))} == {True})
            assert "role:master" in second.call("INFO") and tier.stats()["failed_checks"] == 0


def test_without_a_sentinel_or_a_service_it_is_said() -> None:
    with redis_server() as server, redis_sentinel(server, "kv") as sentinel:
        for place, service in ((free_port(), "kv"), (sentinel.port, "other")):
            connection = RedisClient(f"redis+sentinel://127.0.0.1:{place}/{service}").connection()
            with pytest.raises(OSError, match="no Sentinel names a master"):
                connection.open(time.monotonic() + 10)
            connection.close()
        connection = RedisClient(f"redis+sentinel://127.0.0.1:{sentinel.port}/kv/3").connection()
        connection.open(time.monotonic() + 10).ping(time.monotonic() + 10)
        connection.close()


@pytest.mark.parametrize("is_pool", [False, True])
def test_a_password_file_is_read_again(tmp_path: Path, is_pool: bool) -> None:
    """A user of ACL, whose password is changed while the tier is open."""
    file = tmp_path / "password"
    file.write_text("first@/:\n")
    with redis_server() as server, client.Redis(port=server.port) as truth:
        truth.acl_setuser("kv", enabled=True, passwords=["+first@/:"], keys=["*"], commands=["+@all"])
        truth.acl_setuser("default", enabled=True, reset_passwords=True, passwords=["+admin"])
        truth = client.Redis(port=server.port, password="admin")
        place = f"kv@127.0.0.1:{server.port}"
        engine = RedisPoolClient if is_pool else RedisClient
        scheme = "redis+pool" if is_pool else "redis"
        remote = engine(f"{scheme}://{place}", password_file=str(file))
        assert "first" not in remote.address + repr(remote)
        with tier_on(remote) as tier:
            keys = keys_of(4)
            stores(tier, keys)
            wait_until(lambda: load(tier, keys) == [None] * 4)
            truth.acl_setuser("kv", enabled=True, reset_passwords=True, passwords=["+second"])
            truth.execute_command("CLIENT", "KILL", "USER", "kv")
            file.write_text("second\n")
            wait_until(lambda: load(tier, keys) == [None] * 4)
        file.unlink()
        with pytest.raises(ConfigError, match="password_file"):
            engine(f"{scheme}://{place}", password_file=str(file))
