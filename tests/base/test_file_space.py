"""Which ranges of a file have data."""

from __future__ import annotations

from pathlib import Path

from pagoda.base.file_space import data_ranges

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
