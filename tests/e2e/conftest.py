"""Fixtures of the tests with whole models."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def house(shm_root: Path, tmp_path: Path):
    # late: the other tests of this folder need no torch
    from tests.e2e.house import House

    house = House(shm_root, tmp_path)
    yield house
    house.shut()
