"""Which ranges of a file have data, and space that is reserved beside other writers."""

from __future__ import annotations

import os
from pathlib import Path

from pagoda.base.file_space import data_ranges, opened, reserve_in_place

KIB = 1 << 10


def test_ranges_with_data_end_where_they_are_asked_to_end(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(1024 * KIB)
        file.seek(256 * KIB)
        file.write(bytes([1]) * (256 * KIB))
        # the data goes on behind that
        found = data_ranges(file.fileno(), 0, 384 * KIB)
        assert found == [(256 * KIB, 384 * KIB)]
        assert data_ranges(file.fileno(), 0, 1024 * KIB) == [
            (256 * KIB, 512 * KIB)
        ]
        assert data_ranges(file.fileno(), 600 * KIB, 1024 * KIB) == []


def test_a_reservation_in_place_that_fails_frees_nothing(shm_root: Path) -> None:
    """Others may be writing to that part of the file."""
    path = shm_root / "file"
    path.write_bytes(b"x" * 8192)
    with opened(path, os.O_RDWR) as fd:
        assert not reserve_in_place(fd, 0, 1 << 50)
        assert os.pread(fd, 8192, 0) == b"x" * 8192
        assert reserve_in_place(fd, 4096, 8192)
        assert os.fstat(fd).st_blocks * 512 >= 12288
        assert os.pread(fd, 8192, 0) == b"x" * 8192
