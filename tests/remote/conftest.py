"""Servers for the tests of remote tiers: a Redis for each module, a proxy before it, one S3 server,
which takes seconds to start, and stores of objects.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagoda.tiers.remote.object_store import ObjectStoreConnection
from testbed.servers import (
    Server,
    emptied_s3,
    moto_s3,
    nginx_dav,
    redis_server,
)
from tests.remote.chunks import walk
from tests.remote.object_stores import ENOUGH_SECONDS, KINDS, Store, until
from tests.remote.proxy import Proxy, proxy_to


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A Redis server for the tests of one module."""
    with redis_server() as running:
        yield running


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """A proxy before that server, for one test."""
    with proxy_to(server.port) as running:
        yield running


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    """An S3 server for all tests: they leave it running, and begin with `emptied_s3`."""
    with moto_s3() as server:
        yield server


@pytest.fixture(scope="module")
def s3(moto: Server) -> Server:
    """The S3 server, emptied for the tests of one module."""
    return emptied_s3(moto)


@pytest.fixture(scope="module", params=KINDS)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """An empty store of each kind, for one module."""
    if request.param.startswith("s3"):
        yield Store(request.param, emptied_s3(request.getfixturevalue("moto")))
    else:
        with nginx_dav() as server:
            yield Store(request.param, server)


@pytest.fixture
def connection(store: Store) -> Iterator[ObjectStoreConnection]:
    """A connection to the store, which is cleared after the test."""
    made = store.remote().connection().open(until())
    yield made
    made.clear(None, walk(ENOUGH_SECONDS))
    made.close()
