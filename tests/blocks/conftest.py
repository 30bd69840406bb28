"""Engines to test: device blocks only, with a host tier, with host and disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.blocks.kit import Engine, cache_at


@pytest.fixture
def bare() -> Engine:
    """Eight device blocks without a lower tier."""
    return Engine(8)


@pytest.fixture
def hosted(shm_root: Path) -> Iterator[Engine]:
    """Eight device blocks over 64 host slots; finished requests are not written back."""
    with cache_at(shm_root) as cache:
        yield Engine(8, cache, write_back=False)


@pytest.fixture
def housed(shm_root: Path, tmp_path: Path) -> Iterator[Engine]:
    """Sixteen device blocks over 64 host slots over a disk; finished requests are written back."""
    with cache_at(shm_root, tmp_path) as cache:
        yield Engine(16, cache)
