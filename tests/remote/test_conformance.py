"""A remote tier is a tier, over every engine."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis as client

from pagoda.base.errors import StoreError
from pagoda.codec import parse
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger, admin
from pagoda.slab import aligned
from pagoda.testing import TierConformance
from pagoda.testing.tier_conformance import ONE, keys_of
from pagoda.tiers.base import Bytes, Tier
from pagoda.tiers.remote.indexed_store import IndexedStoreClient
from pagoda.tiers.remote.mooncake import MooncakeClient
from pagoda.tiers.remote.object_store import ObjectStoreClient
from pagoda.tiers.remote.open_client import url_with_password
from pagoda.tiers.remote.pagoda_server import PagodaServerClient
from pagoda.tiers.remote.redis import RedisClient
from pagoda.tiers.remote.redis_cluster import RedisClusterClient
from pagoda.tiers.remote.redis_pool import RedisPoolClient
from pagoda.tiers.remote.remote_tier import RemoteTier
from pagoda.tiers.remote.store_client import StoreClient
from testbed.servers import (
    BUCKET,
    Server,
    mooncake_master,
    mooncake_peer,
    nginx_dav,
    pagoda_server,
    redis_cluster,
    redis_sentinel,
    redis_server,
)
from tests.remote.chunks import (
    PATIENT_SECONDS,
    QUANTISABLE,
    fresh_prefix,
    unchanged_by_codecs,
)

LAYOUT = KVLayout.opaque(4, 5000, "conformance")


@pytest.fixture(scope="module")
def more_redis() -> Iterator[tuple[Server, Server]]:
    with redis_server() as second, redis_server() as third:
        yield second, third


@pytest.fixture(scope="module")
def cluster() -> Iterator[Server]:
    with redis_cluster() as servers:
        yield servers[-1]


@pytest.fixture(scope="module")
def sentinel(server: Server) -> Iterator[Server]:
    with redis_sentinel(server, "kv", quorum=1) as running:
        yield running


@pytest.fixture(scope="module")
def dav() -> Iterator[Server]:
    with nginx_dav() as server:
        yield server


@pytest.fixture(scope="class")  # its processes are never idle
def pool() -> Iterator[Server]:
    with mooncake_master() as master, mooncake_peer(master):
        yield master


@pytest.fixture(scope="module")
def machine() -> Iterator[tuple[Server, Path]]:
    """Another machine: its server makes host stores."""
    root = Path(tempfile.mkdtemp(prefix="pagoda-test-", dir="/dev/shm"))
    try:
        with pagoda_server(
            root, "--host-size", "1MiB", PAGODA_POLICY="lru"
        ) as server:
            yield server, root
    finally:
        shutil.rmtree(root, ignore_errors=True)


class Remotely(TierConformance):
    """The suite on tiers over `self.server`, each with a separate prefix."""

    overfull_chunks = 40  # that are never full: most stores have no limit here
    codec = "raw"
    connections = 4
    layout = LAYOUT
    server: Server
    prefix: str  # of the latest tier

    def remote(self) -> StoreClient:
        """The engine."""
        return RedisClient(self.server.url, prefix=self.prefix)

    def make_tier(self, tmp_path: Path) -> Tier:
        """A new empty tier that has time."""
        self.prefix = fresh_prefix()
        return RemoteTier(
            self.layout,
            self.remote(),
            codec=self.codec,
            connections=self.connections,
            deadline_seconds=PATIENT_SECONDS,
            look_seconds=PATIENT_SECONDS,
        )


class TestRedis(Remotely):
    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self.server = server


class TestQ4OnRedis(TestRedis):
    """The suite compares bytes, so its chunks are some that the codec does not change."""

    codec = "q4"
    layout = QUANTISABLE

    def payload(self, tier: Tier, key: bytes) -> Bytes:
        return unchanged_by_codecs(self.layout, key)[: tier.chunk_bytes]

    def test_it_is_a_lossy_chunk_that_is_stored(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            self.saved(tier, keys_of(ONE, 1))
            (name,) = client.Redis(port=self.server.port).scan_iter(
                f"{self.prefix}*"
            )
            found = [
                parse(value)
                for value in client.Redis(port=self.server.port).hvals(name)
            ]
            (header,) = [each for each in found if each is not None]
            assert header.codec == self.codec
            assert header.stored_bytes < header.length / 2


class TestQuantisedAndZstdOnRedis(TestQ4OnRedis):
    codec = "qzstd"


class TestRedisPool(Remotely):
    @pytest.fixture(autouse=True)
    def _servers(self, server: Server, more_redis: tuple[Server, Server]) -> None:
        self.servers = (server, *more_redis)

    def remote(self) -> StoreClient:
        places = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        return RedisPoolClient(
            f"redis+pool://{places}",
            prefix=self.prefix,
            look_seconds=PATIENT_SECONDS,
        )


class TestRedisCluster(Remotely):
    @pytest.fixture(autouse=True)
    def _servers(self, cluster: Server) -> None:
        self.server = cluster

    def remote(self) -> StoreClient:
        url = f"redis+cluster://127.0.0.1:{self.server.port}"
        return RedisClusterClient(
            url, prefix=self.prefix, look_seconds=PATIENT_SECONDS
        )


class TestRedisSentinel(Remotely):
    @pytest.fixture(autouse=True)
    def _servers(self, sentinel: Server) -> None:
        self.server = sentinel

    def remote(self) -> StoreClient:
        return RedisClient(
            f"redis+sentinel://127.0.0.1:{self.server.port}/kv",
            prefix=self.prefix,
        )


class TestCompressedRedis(TestRedis):
    codec = "zstd"

    def payload(self, tier: Tier, key: bytes) -> Bytes:
        """Bytes that can be made smaller, as those of KV."""
        buffer = aligned(tier.chunk_bytes)
        rng = np.random.default_rng(int.from_bytes(key[:8], "little"))
        words = (
            rng.standard_normal(tier.chunk_bytes // 2, np.float32).view(np.uint32)
            >> 16
        )
        buffer[:] = words.astype(np.uint16).view(np.uint8)
        return buffer

    def test_it_takes_less_room(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as tier:
            self.saved(tier, keys_of(ONE, 1))
        (name,) = client.Redis(port=self.server.port).scan_iter(
            f"{self.prefix}:*"
        )
        page, stored = client.Redis(port=self.server.port).hmget(name, "h", "0")
        header = parse(page)
        assert header is not None
        assert header.codec == "zstd"
        assert header.stored_bytes == len(stored)
        assert len(stored) < 0.9 * LAYOUT.chunk_bytes


class TestS3(Remotely):
    @pytest.fixture(autouse=True)
    def _server(self, s3: Server) -> None:
        self.server = s3

    def remote(self) -> StoreClient:
        options = {
            "endpoint": self.server.url,
            "region": "us-east-1",
            "access_key_id": "any",
            "secret_access_key": "any",
        }
        return ObjectStoreClient(
            f"s3://{BUCKET}", prefix=self.prefix, options=options
        )


class TestIndexedS3(TestS3):
    @pytest.fixture(autouse=True)
    def _index(self, server: Server) -> None:
        self.index = server

    def remote(self) -> StoreClient:
        return IndexedStoreClient(
            super().remote(), RedisClient(self.index.url, prefix=self.prefix)
        )


class TestPagodaServer(Remotely):
    overfull_chunks = 160  # of a store of 128

    @pytest.fixture(autouse=True)
    def _server(self, machine: tuple[Server, Path]) -> None:
        self.server, self.stores = machine

    def remote(self) -> StoreClient:
        return PagodaServerClient(
            url_with_password(self.server.url, str(self.server.root / "token"))
        )

    def make_tier(self, tmp_path: Path) -> Tier:
        """A new tier over the server, whose stores were emptied: it has no prefixes."""
        for store in self.stores.glob("*/state"):
            with contextlib.closing(Ledger.attach(store.parent)) as ledger:
                admin.clear(ledger)
        return super().make_tier(tmp_path)

    def test_clear_of_one_namespace_leaves_the_other(
        self, tmp_path: Path
    ) -> None:
        """What is stored there is that machine's: it is cleared there."""
        with self.opened(tmp_path) as tier:
            keys = self.saved(tier, keys_of(ONE, 4))
            with pytest.raises(StoreError, match="run pagoda clear there"):
                tier.clear(ONE.root)
            assert tier.match_prefix(keys, namespace=ONE.root) == 4

    def test_clear_reaches_what_is_on_its_way(self, tmp_path: Path) -> None:
        """As above."""


class TestQ4OnPagodaServer(TestPagodaServer):
    """The server decodes what it is sent, and keeps it in its host memory under the same root."""

    codec = "q4"
    layout = QUANTISABLE

    def payload(self, tier: Tier, key: bytes) -> Bytes:
        return unchanged_by_codecs(self.layout, key)[: tier.chunk_bytes]


class TestWebDav(Remotely):
    @pytest.fixture(autouse=True)
    def _server(self, dav: Server) -> None:
        self.server = dav

    def remote(self) -> StoreClient:
        return ObjectStoreClient(f"{self.server.url}/", prefix=self.prefix)


class TestMooncake(Remotely):
    connections = 2  # each is a process

    @pytest.fixture(autouse=True)
    def _server(self, pool: Server) -> None:
        self.server = pool

    def remote(self) -> StoreClient:
        return MooncakeClient(self.server.url, prefix=self.prefix)
