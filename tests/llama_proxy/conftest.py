"""A directory for tiny models, written once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for the models of this session."""
    return tmp_path_factory.mktemp("models")
