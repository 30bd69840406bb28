"""A host tier of automatic size in a small file system in memory that others have filled. Needs
root to mount one.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda.base.errors import NoRoomError
from pagoda.cache import Cache
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from tests.cache.kit import CHUNK, blank, cache_at, prompt, served, stored

MIB = 1 << 20


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """Return a file system in memory of 64 MiB, as a container gets it."""
    path = tmp_path / "memory"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(path)]
    if (
        os.geteuid() != 0
        or subprocess.run(mount, capture_output=True, check=False).returncode
    ):
        pytest.skip("needs root to mount a file system")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(memory: Path, mib: int) -> None:
    """Let another program take that much memory there."""
    with open(memory / "of-another-program", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, mib * MIB)


def use_all(cache: Cache, memory: Path) -> None:
    """Store prompts until the host tier has grown as far as it can."""
    for seed in range(1, 200):
        stored(cache, prompt(64, seed))
        if free_bytes(memory) < 5 * MIB:
            return


def free_bytes(memory: Path) -> int:
    status = os.statvfs(memory)
    return status.f_bavail * status.f_frsize


def test_the_host_tier_is_as_large_as_what_others_left(memory: Path) -> None:
    fill(memory, 44)
    tokens = prompt(2)
    with cache_at(memory, None, host_size="auto") as cache:
        use_all(cache, memory)
        stored(cache, tokens)
        assert served(cache, tokens)[0].num_tokens == len(tokens)
    assert free_bytes(memory) > MIB  # for others


def test_without_space_for_a_chunk_the_cache_starts_without_the_host_tier(
    memory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(memory, 63)
    tokens = prompt(2)
    with (
        caplog.at_level(logging.WARNING),
        cache_at(memory, tmp_path, host_size="auto") as cache,
    ):
        assert cache.tiers == ("disk",)
        assert "left out" in caplog.text
        stored(cache, tokens)
        assert served(cache, tokens)[0].num_tokens == len(tokens)


def test_a_size_that_was_asked_for_is_not_made_smaller(memory: Path) -> None:
    fill(memory, 44)
    with (
        pytest.raises(NoRoomError, match="shm-size"),
        cache_at(memory, None, host_size=40 * MIB),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("size", ["auto", 50 * MIB])
def test_the_store_of_a_model_that_is_gone_makes_room_for_the_tables_of_the_next(
    memory: Path, size: int | str
) -> None:
    """It took nearly all memory; the tables of a store have no share of their own."""
    tokens = prompt(2)
    with cache_at(memory, None, host_size=size) as cache:
        use_all(cache, memory)
        stored(cache, tokens)
    fill(memory, free_bytes(memory) // MIB - 1)
    other = KVLayout.opaque(CHUNK, 16384, "another model")
    with Cache(
        cache.config,
        namespace=Namespace("another-model"),
        layout=other,
        host_size=size,
    ) as second:
        assert second.store(
            tokens, blank(tokens, other).transfer
        ).num_tokens == len(tokens)
        assert second.lookup(tokens).num_tokens == len(tokens)
    with cache_at(memory, None, host_size=size) as cache:
        # it was the last one that was used
        assert cache.lookup(tokens).num_tokens == len(tokens)
