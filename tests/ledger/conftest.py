"""A small ledger for each test. A module that needs another store or clock has its own fixture of
the same name: `store_spec` or `clock`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda.base.clock import Clock
from pagoda.ledger import Ledger, StoreSpec, admin
from pagoda.testing import FakeClock
from tests.ledger.support import TENANT, small_store


@pytest.fixture
def clock() -> Clock:
    """A clock that only the test advances."""
    return FakeClock()


@pytest.fixture
def store_spec(shm_root: Path) -> StoreSpec:
    """The store that `ledger` opens: in memory, with 32 slots."""
    return small_store(shm_root)


@pytest.fixture
def unchecked_ledger(store_spec: StoreSpec, clock: Clock) -> Iterator[Ledger]:
    """An open ledger with one tenant, which the test may damage or close."""
    opened_here = Ledger.open(store_spec, clock=clock)
    opened_here.namespaces.register(TENANT, {"model": "test"})
    yield opened_here
    opened_here.close()


@pytest.fixture
def ledger(unchecked_ledger: Ledger) -> Iterator[Ledger]:
    """An open ledger with one tenant; its numbers must be right at the end of the test."""
    yield unchecked_ledger
    admin.check(unchecked_ledger)
