"""Sizes as people write them ("64GiB", "1.5TB", "auto"), and the size that "auto" is on this
machine.

Every size is for the whole machine and shared by all its processes, never one rank's share.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pagoda.base.cgroup_memory import memory_limit_bytes
from pagoda.base.file_systems import nearest

UNITS: dict[str, int] = {
    "B": 1,
    **{
        f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", start=1)
    },
    **{
        f"{letter}iB": 1024**power
        for power, letter in enumerate("KMGTP", start=1)
    },
}
AUTO = "auto"
AUTO_SHARE = 0.25
"""The share of the memory limit that "auto" is."""
FILESYSTEM_SHARE = 0.9
"""The largest share of its file system that "auto" is: the ledger's own files and other programs
need the rest.
"""
SMALLEST_BYTES = 4096

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*")
_EXACT = {unit.lower(): factor for unit, factor in UNITS.items()}


def parse_size(value: int | str) -> int | str:
    """Return `value` in bytes, or "auto". Changes nothing.

    Raises:
        ValueError: not a size; the message says what to write instead.
    """
    if isinstance(value, bool):
        raise ValueError(
            "a size is a number of bytes, text such as '64GiB', or 'auto'"
        )
    if isinstance(value, int):
        return _checked(value)
    if value.strip().lower() == AUTO:
        return AUTO
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ValueError(
            "write a size as '64GiB', '1.5TB', a number of bytes, or 'auto'"
        )
    return _checked(_scaled(match[1], match[2]))


def _scaled(number: str, unit: str) -> int:
    if not unit:
        if "." in number:
            raise ValueError("a part of a byte; a unit is missing, such as GiB")
        return int(number)
    factor = _EXACT.get(unit.lower())
    if factor is not None:
        return (
            round(float(number) * factor)
            if "." in number
            else int(number) * factor
        )
    if unit.lower() in ("k", "m", "g", "t", "p"):
        letter = unit.upper()
        raise ValueError(
            f"'{unit}' may mean two sizes: write {number}{letter}iB (1024s) or {number}{letter}B "
            "(1000s)"
        )
    raise ValueError(f"'{unit}' is not a unit; the units are {', '.join(UNITS)}")


def _checked(size_bytes: int) -> int:
    if size_bytes < 0:
        raise ValueError("a size cannot be negative; 0 turns the tier off")
    if 0 < size_bytes < SMALLEST_BYTES:
        raise ValueError(
            f"{size_bytes} bytes hold nothing; is a unit missing, as in {size_bytes}GiB?"
        )
    if size_bytes >= 2**63:
        raise ValueError("more than any file can hold")
    return size_bytes


def format_size(size_bytes: float) -> str:
    """Return `size_bytes` in the largest binary unit that keeps it above one, such as "1.50 GiB".
    Pure.
    """
    value = float(size_bytes)
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


def auto_bytes(directory: Path | None) -> int:
    """Return the size that "auto" is here: a share of the memory limit, never more than the file
    system can hold.

    `directory` is where the memory is (it need not exist yet); None for private memory. The whole
    size of the file system counts, not what is free today, so that the answer is the same from one
    start to the next.
    """
    size_bytes = int(memory_limit_bytes() * AUTO_SHARE)
    if directory is not None:
        room = os.statvfs(nearest(directory))
        if room.f_blocks:  # a tmpfs without a size limit says 0
            size_bytes = min(
                size_bytes, int(room.f_blocks * room.f_frsize * FILESYSTEM_SHARE)
            )
    return size_bytes // 2**20 * 2**20
