"""A slice of the run in which a process outlives its files, its locks, its exceptions and its
threads.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tests.stress_outlives import run

OPERATIONS = 600


@pytest.mark.slow
@pytest.mark.timeout(290)  # it takes ten seconds on two quiet cores
def test_caches_in_trouble_of_every_kind(shm_root: Path) -> None:
    outcome = run(shm_root, OPERATIONS, seed=1, limit_seconds=200, killed=0.1)
    assert not outcome.violations, "\n".join([str(outcome), *outcome.violations])
    assert outcome.counts["operations"] >= OPERATIONS
    assert outcome.counts["served"] > 50
    assert outcome.counts["interrupted"] > 50
    assert outcome.counts["killed"]
    assert outcome.counts["forks"]
    assert outcome.counts["removed"]
    assert outcome.counts["spoiled"]
    if outcome.full_disk:
        warnings.warn(
            f"the disk was never full, for none can be mounted: {outcome.full_disk}",
            stacklevel=1,
        )
    else:
        assert outcome.counts["full disks"]
