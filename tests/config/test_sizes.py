from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagoda.base.cgroup_memory import memory_limit_bytes
from pagoda.config.sizes import auto_bytes, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("64GiB", 64 * 2**30),
        ("1.5TB", 1_500_000_000_000),
        (" 10 mib ", 10 * 2**20),
        (".5GB", 500_000_000),
        ("8192", 8192),
        ("4096B", 4096),
        (65536, 65536),
        (0, 0),
        ("0", 0),
        ("AUTO", "auto"),
        ("auto", "auto"),
    ],
)
def test_sizes_as_people_write_them(
    text: int | str, size_bytes: int | str
) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("64G", "64GiB"),
        ("64", "unit missing"),
        ("12.5", "unit is missing"),
        ("12 apples", "not a unit"),
        ("", "'64GiB'"),
        ("-1GiB", "'64GiB'"),
        (-1, "negative"),
        (True, "number of bytes"),
        ("1e9", "'64GiB'"),
        ("9999999PiB", "more than any file"),
        ("nan", "'64GiB'"),
    ],
)
def test_a_bad_size_says_what_to_write(text: int | str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_size(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_large_sizes_are_exact() -> None:
    assert parse_size("4611686018427387904") == 2**62
    assert parse_size("9007199254740993B") == 9007199254740993


def test_auto_is_the_same_whatever_is_free_today(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    size_bytes = auto_bytes(tmp_path / "not" / "yet" / "there")
    assert size_bytes % 2**20 == 0
    assert size_bytes <= memory_limit_bytes() * 0.25
    assert size_bytes <= room.f_blocks * room.f_frsize
    assert auto_bytes(None) >= size_bytes


def test_sizes_are_shown_in_the_largest_fitting_unit() -> None:
    assert format_size(0) == "0 B"
    assert format_size(1536) == "1.50 KiB"
    assert format_size(64 * 2**30) == "64.00 GiB"
