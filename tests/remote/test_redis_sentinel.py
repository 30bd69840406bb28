"""A Redis that Sentinels watch: its master is asked for, and followed after a failover. Passwords
that change.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import redis as client

from pagoda.base.errors import ConfigError
from pagoda.config.remote_urls import parse
from pagoda.tiers.remote.redis import RedisClient
from pagoda.tiers.remote.redis_pool import RedisPoolClient
from pagoda.tiers.remote.store_client import RefusedError
from testbed.patience import wait_until
from testbed.servers import free_port, redis_sentinel, redis_server
from tests.remote.chunks import (
    PATIENT_SECONDS,
    TROUBLE,
    fresh_prefix,
    keys_of,
    load,
    save,
    stores,
    tier_on,
    under_load,
)
from tests.remote.evil import LyingRedis
from tests.remote.redis_kit import redis_client

# a handshake over TLS takes processor time, which a busy machine gives late
PATIENT = {
    "deadline_seconds": PATIENT_SECONDS,
    "look_seconds": PATIENT_SECONDS,
}


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
                    connection.open(time.monotonic() + PATIENT_SECONDS)
                connection.close()
                RedisClient(
                    f"{url},127.0.0.1:{sentinel.port}/kv"
                ).connection().open(time.monotonic() + PATIENT_SECONDS).close()
        finally:
            liar.close()


@pytest.mark.slow
def test_after_a_failover_the_new_master_is_used() -> None:
    quick = ("--repl-diskless-sync-delay", "0")
    with (
        redis_server(*quick) as first,
        redis_server(
            *quick, "--replicaof", "127.0.0.1", str(first.port)
        ) as second,
        redis_sentinel(first, "kv") as one,
        redis_sentinel(first, "kv") as two,
        redis_sentinel(first, "kv") as three,
    ):
        with redis_client(one) as asked:
            wait_until(
                lambda: asked.sentinel_master("kv")["num-other-sentinels"] == 2
            )
            wait_until(lambda: asked.sentinel_master("kv")["num-slaves"] == 1)
        wait_until(lambda: "master_link_status:up" in second.call("INFO"))
        gone = free_port()  # of a Sentinel that is not there
        hosts = ",".join(
            f"127.0.0.1:{port}" for port in (gone, one.port, two.port, three.port)
        )
        prefix = fresh_prefix()
        keys = keys_of(10)
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
            wait_until(
                lambda: (
                    {end.ok for end in save(tier, keys_of(10, chain=1))} == {True}
                )
            )
            assert "role:master" in second.call("INFO")
            assert tier.stats()["failed_checks"] == 0


def test_what_a_sentinel_says_is_shown_without_its_password(
    tmp_path: Path,
) -> None:
    (tmp_path / "password").write_text("geheim")
    with redis_server() as server:
        liar = LyingRedis(server.port)
        liar.lies[b"AUTH"] = lambda said: [b"-ERR what is " + said[-1] + b"?\r\n"]
        url = f"redis+sentinel://127.0.0.1:{liar.port}/kv?sentinel_password_file={tmp_path}/password"
        connection = RedisClient(url).connection()
        with pytest.raises(OSError, match=r"what is \*\*\*\?"):
            connection.open(time.monotonic() + PATIENT_SECONDS)
        connection.close()
        liar.close()


def test_without_a_sentinel_or_a_service_it_is_said() -> None:
    with redis_server() as server, redis_sentinel(server, "kv") as sentinel:
        for place, service in ((free_port(), "kv"), (sentinel.port, "other")):
            connection = RedisClient(
                f"redis+sentinel://127.0.0.1:{place}/{service}"
            ).connection()
            with pytest.raises(OSError, match="no Sentinel names a master"):
                connection.open(time.monotonic() + PATIENT_SECONDS)
            connection.close()
        connection = RedisClient(
            f"redis+sentinel://127.0.0.1:{sentinel.port}/kv/3"
        ).connection()
        connection.open(time.monotonic() + PATIENT_SECONDS).ping(
            time.monotonic() + PATIENT_SECONDS
        )
        connection.close()


@pytest.mark.slow
def test_sentinels_and_their_master_over_tls_with_passwords(
    tmp_path: Path,
) -> None:
    with (
        redis_server(tls=True, password="geheim") as server,
        redis_sentinel(
            server, "kv", quorum=1, password="geheim", tls=True
        ) as sentinel,
    ):
        (tmp_path / "password").write_text("geheim\n")
        hosts = f"127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}"
        options = f"ssl_ca_certs={server.ca}&look=5s"
        own = f"sentinel_password_file={tmp_path}/password"
        spec = parse(f"rediss+sentinel://:geheim@{hosts}/kv?{own}&{options}")
        assert "geheim" not in spec.redacted
        assert own in spec.redacted
        keys = keys_of(10)
        with tier_on(
            spec.engine(),
        ) as tier:
            stores(tier, keys)
            wait_until(lambda: load(tier, keys) == [None] * 10)
        for url, trouble in (
            (f"rediss+sentinel://:geheim@{hosts}/kv?{options}", "NOAUTH"),
            # the master's
            (f"rediss+sentinel://{hosts}/kv?{own}&{options}", "NOAUTH"),
            (
                f"rediss+sentinel://:geheim@{hosts}/kv?{own}&sentinel_username=x&{options}",
                "WRONGPASS",
            ),
            (
                f"rediss+sentinel://:geheim@{hosts}/kv?{own}",
                "certificate verify failed",
            ),
            (
                f"redis+sentinel://:geheim@{hosts}/kv?{own}",
                "no Sentinel names a master",
            ),
        ):
            connection = parse(url).engine().connection()
            with pytest.raises((OSError, RefusedError), match=trouble):
                connection.open(time.monotonic() + PATIENT_SECONDS)
            connection.close()


PROVIDER = """
import json, pathlib
FILE = pathlib.Path(__file__).with_suffix(".json")

class Provider:
    asked = 0

    def get_credentials(self):
        Provider.asked += 1
        return tuple(json.loads(FILE.read_text()))

class Nothing:
    pass

class Broken:
    def __init__(self):
        raise RuntimeError("no role")
"""


@pytest.mark.parametrize("scheme", ["redis", "redis+pool", "redis+sentinel"])
def test_a_credential_provider_is_asked_for_each_connection(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    scheme: str,
) -> None:
    """As of an IAM, whose tokens are good for some minutes."""
    name = f"iam_{scheme.replace('+', '_')}"
    (tmp_path / f"{name}.py").write_text(PROVIDER)
    secrets = tmp_path / f"{name}.json"
    secrets.write_text('["kv", "first"]')
    monkeypatch.syspath_prepend(tmp_path)
    with (
        redis_server() as server,
        redis_sentinel(server, "kv", quorum=1) as sentinel,
        redis_client(server) as truth,
    ):
        truth.acl_setuser(
            "kv",
            enabled=True,
            passwords=["+first"],
            keys=["*"],
            commands=["+@all"],
        )
        truth.acl_setuser(
            "default", enabled=True, reset_passwords=True, passwords=["+admin"]
        )
        truth = client.Redis(port=server.port, password="admin")
        place = (
            f"127.0.0.1:{sentinel.port}/kv"
            if "sentinel" in scheme
            else f"127.0.0.1:{server.port}"
        )
        spec = parse(f"{scheme}://{place}?credential_provider={name}:Provider")
        assert spec.redacted.endswith(f"?credential_provider={name}:Provider")
        assert not spec.lacks_secret
        with tier_on(
            spec.engine(),
        ) as tier:
            keys = keys_of(4)
            stores(tier, keys)
            wait_until(lambda: load(tier, keys) == [None] * 4)
            truth.acl_setuser(
                "kv", enabled=True, reset_passwords=True, passwords=["+second"]
            )
            secrets.write_text('["kv", "second"]')
            truth.execute_command("CLIENT", "KILL", "USER", "kv")
            wait_until(lambda: load(tier, keys) == [None] * 4)
            secrets.write_text("no JSON")
            truth.execute_command("CLIENT", "KILL", "USER", "kv")
            wait_until(
                lambda: (
                    set(load(tier, keys)) <= TROUBLE
                    and "JSONDecodeError" in caplog.text
                )
            )
            secrets.write_text('["second"]')
            truth.acl_setuser(
                "default",
                enabled=True,
                reset_passwords=True,
                passwords=["+second"],
            )
            wait_until(lambda: load(tier, keys) == [None] * 4)
            assert "second" not in caplog.text
        secrets.write_text('["kv", 2]')
        connection = spec.engine().connection()
        with pytest.raises(
            OSError, match=r"neither \(password,\) nor|no node answers"
        ):
            connection.open(time.monotonic() + PATIENT_SECONDS)
            connection.ping(time.monotonic() + PATIENT_SECONDS)
        connection.close()
        assert sys.modules[name].Provider.asked >= 4


def test_a_credential_provider_that_cannot_be_used_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "iam_useless.py").write_text(PROVIDER)
    monkeypatch.syspath_prepend(tmp_path)
    for name, said in (
        ("no_such_module:Provider", "ModuleNotFoundError"),
        ("iam_useless:Missing", "AttributeError"),
        ("iam_useless:Nothing", "AttributeError"),
        ("iam_useless:Broken", "no role"),
    ):
        for scheme in ("redis", "redis+pool", "redis+cluster"):
            with pytest.raises(
                ConfigError,
                match=f"credential_provider={name}: cannot be used: .*{said}",
            ):
                parse(f"{scheme}://host?credential_provider={name}").engine()


@pytest.mark.parametrize("is_pool", [False, True])
def test_a_password_file_is_read_again(tmp_path: Path, is_pool: bool) -> None:
    """A user of ACL, whose password is changed while the tier is open."""
    file = tmp_path / "password"
    file.write_text("first@/:\n")
    with redis_server() as server, redis_client(server) as truth:
        truth.acl_setuser(
            "kv",
            enabled=True,
            passwords=["+first@/:"],
            keys=["*"],
            commands=["+@all"],
        )
        truth.acl_setuser(
            "default", enabled=True, reset_passwords=True, passwords=["+admin"]
        )
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
            truth.acl_setuser(
                "kv", enabled=True, reset_passwords=True, passwords=["+second"]
            )
            truth.execute_command("CLIENT", "KILL", "USER", "kv")
            file.write_text("second\n")
            wait_until(lambda: load(tier, keys) == [None] * 4)
        file.unlink()
        with pytest.raises(ConfigError, match="password_file"):
            engine(f"{scheme}://{place}", password_file=str(file))
