"""`pagoda bench` measures separate tiers next to the configured ones."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from tests.cli.shelf import LLAMA, answer, host, put, refused


@pytest.mark.slow
def test_figures_of_both_tiers_and_nothing_left_behind(
    shm_root: Path, tmp_path: Path, register_of_tiers: Path
) -> None:
    ledger = host(shm_root / "host")
    keys = put(ledger, LLAMA, range(64))
    where = {
        "PAGODA_HOST_PATH": str(shm_root / "host"),
        "PAGODA_DISK_PATH": str(tmp_path / "disk"),
        "PAGODA_DISK_SIZE": "1GiB",
    }
    found = answer("bench", "--seconds", 1, "--chunk-size", "1MiB", **where)
    for name in ("host_write", "host_read", "disk_write", "disk_read"):
        figure = cast("dict[str, float]", found[name])
        assert figure["gb_per_second"] > 0
        assert figure["limit_gb_per_second"] > 0
        assert figure["ratio"] > 0
        assert figure["turns"] >= 3
    assert len(ledger.match_prefix(keys).slots) == 4
    assert [path.name for path in shm_root.iterdir()] == ["host"]
    assert list(tmp_path.iterdir()) == []
    assert not list(register_of_tiers.rglob("*.json"))


def test_wrong_use_is_one_line() -> None:
    assert "32MiB" in refused("bench", "--chunk-size", "32M")
    assert "1GiB" in refused("bench", "--chunk-size", "100GiB")
    assert "4096" in refused("bench", "--chunk-size", "5000")
    assert "--seconds" in refused("bench", "--seconds", "0")
    assert "a tier to measure" in refused("bench", PAGODA_HOST_SIZE="0")
