"""File systems in loop devices that stop, or are full and copy on write, under a cache with a disk
tier. Needs root.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pagoda.cache import Cache
from pagoda.config import Config
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.transfer import BlockKV
from testbed.programs import need
from tests.disk_stops import SAFE, measured

pytestmark = pytest.mark.soak
LAYOUT = KVLayout.opaque(4, 16384, "stops")
CHUNKS = 8


@pytest.fixture(params=["btrfs", "xfs copied"])
def full_later(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system that copies on write."""
    kind = request.param.split()[0]
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a file system")
    mkfs = need(f"mkfs.{kind}")
    image = tmp_path / "image"
    image.touch()
    os.truncate(image, 400 << 20)
    subprocess.run([mkfs, "-q", image], check=True)
    mount = tmp_path / request.param.replace(" ", "-")
    mount.mkdir()
    subprocess.run(["mount", "-o", "loop", image, mount], check=True)
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


def fill(directory: Path) -> None:
    """Take all space that is left."""
    with open(directory / "others", "wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    os.sync()


@pytest.mark.parametrize("kind", SAFE)
def test_no_process_dies_when_its_file_system_stops(kind: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a file system")
    need("mkfs.xfs")
    assert measured(kind, 3)[1:] == (0, 0, [])


def test_a_full_file_system_that_copies_on_write_harms_nothing(
    full_later: Path, shm_root: Path
) -> None:
    config = Config(
        chunk_tokens=4,
        worth_it=False,
        host_size=40 * LAYOUT.slot_bytes,
        host_path=str(shm_root),
        disk_path=str(full_later / "disk"),
        disk_size=2000 * (LAYOUT.slot_bytes + 4096),
    )

    def served(cache: Cache) -> int:
        found = 0
        for number in range(60):
            pages = np.zeros((CHUNKS, LAYOUT.chunk_bytes), np.uint8)
            hit = (
                cache.retrieve(tokens(number), BlockKV(pages, LAYOUT)).num_tokens
                // 4
            )
            assert (pages[:hit] == number + 1).all()
            found += hit
        return found

    def tokens(number: int) -> list[int]:
        return [1000 * number + at for at in range(4 * CHUNKS)]

    def stored(cache: Cache, number: int) -> None:
        pages = np.full((CHUNKS, LAYOUT.chunk_bytes), number + 1, np.uint8)
        cache.store(tokens(number), BlockKV(pages, LAYOUT))
        assert cache.flush(60)

    with Cache(config, namespace=Namespace("m"), layout=LAYOUT) as cache:
        for number in range(60):
            stored(cache, number)
        if full_later.name == "xfs-copied":
            subprocess.run(
                [
                    "cp",
                    "-a",
                    "--reflink=always",
                    full_later / "disk",
                    full_later / "backup",
                ],
                check=True,
            )
        fill(full_later)
        for step in range(3):
            assert served(cache) == 60 * CHUNKS
            stored(cache, 100 + step)
    if full_later.name == "btrfs":  # its files are written in place
        with Cache(config, namespace=Namespace("m"), layout=LAYOUT) as cache:
            assert served(cache) == 60 * CHUNKS
