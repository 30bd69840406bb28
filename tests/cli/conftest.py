"""Inputs of commands that several test modules use: a small trace, and a Redis server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.servers import Server, redis_server
from tests.cli.traces import PROMPTS, written


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of five prompts of two chunks in four seconds."""
    return written(tmp_path / "small.jsonl", PROMPTS)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A Redis server for the tests of one module."""
    with redis_server() as running:
        yield running
