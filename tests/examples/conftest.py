"""The tiers of one test of the example engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.kit import (
    House,
)


@pytest.fixture
def house(shm_root: Path, tmp_path: Path) -> Iterator[House]:
    house = House(shm_root, tmp_path)
    yield house
    house.shut()
