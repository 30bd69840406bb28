"""Four processes at random on one host slab, and on a disk, with kill -9 and SIGSTOP: nothing
wrong, leaked or late.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stress import Summary, run

OPERATIONS = 12_000
# other processes use this machine too, so only a hang counts as late. `make soak` is stricter
SLACK_SECONDS = 20.0


def judge(summary: Summary) -> None:
    """All promises held, and the run was one in which they could have been broken."""
    assert not summary.violations, "\n".join(summary.violations[:20])
    counts = summary.counts
    assert counts["wrong"] == counts["late"] == counts["errors"] == 0
    assert summary.kills >= 2
    assert summary.stops >= 2
    assert counts["forks"] >= 10
    assert counts["overtaken"] > 0, "a run without any race shows little"


@pytest.mark.slow
def test_twelve_thousand_operations_of_four_processes_on_one_host_slab(
    shm_root: Path, tmp_path: Path
) -> None:
    summary = run(
        tmp_path / "run",
        shm_root,
        OPERATIONS,
        seed=1,
        limit_seconds=200,
        slack_seconds=SLACK_SECONDS,
    )
    judge(summary)
    assert summary.counts["ops"] >= OPERATIONS
    # about twice as many as operations, but clears are by chance
    assert summary.counts["checked"] > OPERATIONS // 10


@pytest.mark.slow
def test_four_processes_with_a_disk_below(shm_root: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    summary = run(
        tmp_path / "run",
        shm_root,
        OPERATIONS // 2,
        2,
        200,
        disk=disk,
        slack_seconds=SLACK_SECONDS,
    )
    judge(summary)
    # a slow disk takes less
    assert summary.counts["disk_saved"] > 20
    assert summary.counts["disk_hits"] > 20
