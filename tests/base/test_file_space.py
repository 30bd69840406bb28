"""Names of files that something else has, ranges of a file with data, and space that is reserved
beside other writers.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from threading import Thread

import pytest

from pagoda.base.errors import is_gone
from pagoda.base.file_space import (
    data_ranges,
    open_file,
    opened,
    read_file,
    reserve_in_place,
)
from testbed.patience import wait_until
from tests.children import in_child

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


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
def test_what_is_no_file_is_refused_and_never_waited_for(
    tmp_path: Path, flags: int
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    (tmp_path / "directory").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "device").symlink_to("/dev/zero")

    def work() -> None:
        found: dict[str, bool] = {}

        def open_all() -> None:
            for path in tmp_path.iterdir():
                try:
                    os.close(open_file(path, flags))
                except OSError as trouble:
                    found[path.name] = is_gone(trouble)

        Thread(target=open_all, daemon=True).start()
        wait_until(lambda: len(found) == 5, 5.0)
        assert all(found.values()), found

    in_child(work)


def test_a_file_is_read_up_to_its_size_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    assert read_file(path, 7) == b"content"
    with pytest.raises(OSError, match="more than 6 bytes"):
        read_file(path, 6)
    # sparse: to read it would take all memory
    os.truncate(path, 1 << 40)
    with pytest.raises(OSError, match="more than 1,048,576 bytes"):
        read_file(path, 1 << 20)
