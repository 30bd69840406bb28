"""How much of a file this process has mapped in huge pages."""

from __future__ import annotations

from pathlib import Path


def huge_bytes(path: Path) -> int:
    """Return the bytes of a mapped file that are in huge pages here."""
    maps = Path("/proc/self/smaps").read_text().split("VmFlags")
    mine = next(each for each in maps if str(path) in each)
    lines = [line for line in mine.splitlines() if "PmdMapped" in line]
    return 1024 * sum(int(line.split()[1]) for line in lines)
