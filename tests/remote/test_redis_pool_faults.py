"""A pool of one Redis is a Redis: what its server does wrong, and what one that lies says, costs
the same misses.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import ModuleType

import pytest

from pagoda.tiers.remote.redis_pool import RedisPoolClient
from testbed.servers import Server
from tests.remote import test_tier_evil, test_tier_faults
from tests.remote.chunks import PATIENT_SECONDS, QuickClock
from tests.remote.proxy import Proxy

# the fixtures of the second replace those of the first
SUITES = (test_tier_evil, test_tier_faults)


def on(
    server: Server | Proxy | int, prefix: str = "p", **options: object
) -> RedisPoolClient:
    """The pool at a server's port."""
    port = server if isinstance(server, int) else server.port
    return RedisPoolClient(
        f"redis+pool://127.0.0.1:{port}",
        prefix=prefix,
        **{"look_seconds": PATIENT_SECONDS, "clock": QuickClock()} | options,  # type: ignore[arg-type]
    )


@pytest.fixture(autouse=True)
def _over_a_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for suite in SUITES:
        monkeypatch.setattr(suite, "on", on)
    yield
    gc.collect()  # the threads of a pool end with it


def _tests_of(suite: ModuleType) -> dict[str, object]:
    """Return the tests of a module, and its fixtures."""
    fixtures = ("shared", "server", "proxy", "liar")
    return {
        name: each
        for name, each in vars(suite).items()
        if name.startswith("test_") or name in fixtures
    }


for _suite in SUITES:
    globals().update(_tests_of(_suite))
