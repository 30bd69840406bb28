"""A disk that turns read-only under a running engine, as ext4 does after an error, and a start on
it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.programs import need
from tests.faults.support import own_mounts, python, succeeded

pytestmark = pytest.mark.timeout(300)

TURNS_READ_ONLY = """
import logging, subprocess, sys
from pathlib import Path

from pagoda.base.errors import StoreError
from support import disk, keys, load_from, save_to


class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())


lines = []
logging.getLogger("pagoda").addHandler(Lines(logging.WARNING))
image, where = Path(sys.argv[1]) / "image", Path(sys.argv[1]) / "mount"
where.mkdir()
with image.open("wb") as file:
    file.truncate(64 << 20)
subprocess.run([sys.argv[2], "-qF", image], check=True)
subprocess.run(["mount", "-o", "loop", image, where], check=True)
before, after = keys(range(10)), keys(range(100, 110))
tier = disk(where / "root")
assert save_to(tier, before) == 10
subprocess.run(["mount", "-o", "remount,abort", where], check=True)
assert len(load_from(tier, before)) == 10, "nothing was written yet, so all of it can be read"
assert save_to(tier, after) == 0
assert tier.resting and load_from(tier, before) == []
logged = [line for line in lines if "Read-only file system" in line]
assert len([line for line in logged if "cannot be opened" in line]) == 1 and len(logged) <= 3, lines
try:
    tier.clear()
    raise AssertionError("the clear did not say that it could not be done")
except StoreError:
    pass
tier.close()
try:
    disk(where / "root")
    raise AssertionError("a store on a read-only disk was opened")
except StoreError as error:
    assert "Read-only file system" in str(error), error
subprocess.run(["umount", where], check=True)
"""


@pytest.mark.slow
def test_a_disk_that_turns_read_only_rests_and_is_logged_once(
    tmp_path: Path,
) -> None:
    """Misses then say that the tier is left out, and not that the chunks were evicted or never
    stored.
    """
    mkfs = need("mkfs.ext4")
    succeeded(python(TURNS_READ_ONLY, tmp_path, mkfs, before=own_mounts()))
