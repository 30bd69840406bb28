"""All tests that need an NVIDIA GPU. Without one, a single test reports it and nothing else is
imported.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.gpu.ready import missing, why_not

if TYPE_CHECKING:
    from tests.gpu.rig import Rig

# all but test_device.py, which says why
collect_ignore_glob = (
    ["test_[!d]*.py", "test_d[!e]*.py"] if why_not() or missing() else []
)


@pytest.fixture(scope="session")
def _one_rig() -> Iterator[Rig]:
    from tests.gpu.rig import open_rig

    with open_rig() as rig:
        yield rig


@pytest.fixture
def rig(_one_rig: Rig) -> Iterator[Rig]:
    """The device; afterwards all that was launched is done, and nothing was wrong."""
    yield _one_rig
    _one_rig.check()


@pytest.fixture
def seed() -> int:
    """Return another seed each time; pytest shows it with a failure."""
    found = secrets.randbelow(2**31)
    print(f"seed {found}")
    return found


@pytest.fixture
def shm_root() -> Iterator[Path]:
    """Create a directory in shared memory for this test, and remove it afterwards."""
    root = Path(tempfile.mkdtemp(prefix="pagoda-gpu-", dir="/dev/shm"))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)
