"""What the tests of remote tiers share: one S3 server, which takes seconds to start, and stores of
objects.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testbed.servers import Server, emptied_s3, moto_s3, nginx_dav
from tests.remote.object_stores import KINDS, Store


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    """An S3 server for all tests: they leave it running, and begin with `emptied_s3`."""
    with moto_s3() as server:
        yield server


@pytest.fixture(scope="module", params=KINDS)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """An empty store of each kind, for one module."""
    if request.param.startswith("s3"):
        yield Store(request.param, emptied_s3(request.getfixturevalue("moto")))
    else:
        with nginx_dav() as server:
            yield Store(request.param, server)
