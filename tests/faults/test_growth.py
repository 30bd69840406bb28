"""A host tier that grows as it fills, where there is no memory for its next piece: the piece is
refused and asked for again, nothing is lost, and no process is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.patience import wait_until
from tests.faults.growth_steps import (
    CHUNK_BYTES,
    FILLED_MIB,
    GHOST_POINTS,
    MIB,
    POINTS,
)
from tests.faults.support import ROOT, own_mounts, source_of

STEPS = Path(__file__).with_name("growth_steps.py")
_ON_OWN_TMPFS = 'mount -t tmpfs -o "size=$0" tmpfs "$1" && shift && exec "$@"'
SMALL_BYTES = 4096
_ALL_THERE = {
    "found": 16,
    "wrong": 0,
    "lost": 0,
    "missing": 0,
    "evicted": 0,
    "unbacked": 0,
}
pytestmark = pytest.mark.timeout(300)


def run(
    *arguments: object,
    before: tuple[str, ...] = (),
    tree: Path = ROOT,
    chunk_bytes: int = CHUNK_BYTES,
) -> subprocess.CompletedProcess[str]:
    """Run one process to its end."""
    return subprocess.run(
        [*before, sys.executable, STEPS, *map(str, arguments)],
        env=_environment(tree, chunk_bytes),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def _environment(tree: Path, chunk_bytes: int) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{tree / 'src'}:{ROOT}",
        "CHUNK_BYTES": str(chunk_bytes),
    }


def ended(
    *arguments: object,
    before: tuple[str, ...] = (),
    code: int = 0,
    tree: Path = ROOT,
    chunk_bytes: int = CHUNK_BYTES,
) -> dict[str, int]:
    """Run one process to its end; return the last line that it printed."""
    done = run(*arguments, before=before, tree=tree, chunk_bytes=chunk_bytes)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr[-3000:]}"
    answer: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return answer


def on_own_tmpfs(place: Path, size: str) -> tuple[str, ...]:
    """Return the words before a command that mount a tmpfs of that size there, for it alone."""
    return (*own_mounts(), "sh", "-c", _ON_OWN_TMPFS, size, str(place))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk_bytes", "rounds"),
    [
        (CHUNK_BYTES, 2),
        (SMALL_BYTES, 1),
        pytest.param(CHUNK_BYTES, 50, marks=pytest.mark.soak),
    ],
)
def test_on_a_file_system_that_others_fill_it_grows_when_there_is_room_again(
    tmp_path: Path, chunk_bytes: int, rounds: int
) -> None:
    answer = ended(
        "full",
        tmp_path,
        rounds,
        before=on_own_tmpfs(tmp_path, "128m"),
        chunk_bytes=chunk_bytes,
    )
    assert answer["wrong"] == 0
    assert answer["found"] > 0
    assert answer["refused"] == answer["grown"] == rounds


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_piece_inside_which_its_process_was_killed_is_no_loss(
    shm_root: Path, point: str
) -> None:
    assert ended("filled", shm_root, point, code=-9) == 16
    assert ended("after", shm_root) == _ALL_THERE


@pytest.mark.slow
@pytest.mark.parametrize("point", GHOST_POINTS)
def test_a_doubling_inside_which_its_process_was_killed_is_no_loss(
    shm_root: Path, point: str
) -> None:
    ended("filled", shm_root, point, code=-9, chunk_bytes=SMALL_BYTES)
    answer = ended("after", shm_root, chunk_bytes=SMALL_BYTES)
    assert answer == _ALL_THERE


@pytest.mark.slow
def test_a_file_system_that_is_full_at_a_doubling_refuses_it(
    tmp_path: Path,
) -> None:
    answer = ended(
        "ghosts",
        tmp_path,
        before=on_own_tmpfs(tmp_path, "128m"),
        chunk_bytes=SMALL_BYTES,
    )
    assert answer["doubled"] >= 2
    assert answer["refused"] == 4 * answer["doubled"]
    assert answer["taken"] == 0
    assert answer["stored"] == 1000


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A cgroup with 640 MiB; skips the test where none can be made."""
    own = Path("/proc/self/cgroup").read_text().splitlines()
    places = [Path("/sys/fs/cgroup")]
    for line in own:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            places.insert(0, Path("/sys/fs/cgroup/memory") / path.lstrip("/"))
    for place in places:
        group = place / f"pagoda-growth-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        limits = (group / "memory.limit_in_bytes", group / "memory.max")
        try:
            [limit] = filter(Path.exists, limits)
            limit.write_text(str(640 * MIB))
        except (OSError, ValueError):
            group.rmdir()
            continue
        yield group
        with contextlib.suppress(OSError):
            group.rmdir()
        return
    pytest.skip("needs root and a memory controller, to make a cgroup")


def kills(group: Path) -> int:
    """Return how many processes the kernel has killed in a cgroup."""
    for name in ("memory.oom_control", "memory.events"):
        with contextlib.suppress(OSError):
            lines = (group / name).read_text().splitlines()
            return int(dict(line.split() for line in lines)["oom_kill"])
    return 0


@pytest.mark.slow
def test_in_a_cgroup_with_less_than_its_size_it_stops_before_a_process_is_killed(
    small_group: Path, shm_root: Path
) -> None:
    answer = ended("cgroup", shm_root, small_group, 512)
    assert answer["refused"] >= 1
    assert answer["unbacked"] > 0
    assert answer["wrong"] == 0
    assert answer["found"] >= 100
    assert answer["grown"] == 1, "it goes on when the cgroup has more"
    assert kills(small_group) == 0


# The last version that allocates each store in full: its host stores are this version's. Versions
# of other tables have other directories: see `test_three_versions`.
_OLDER = "1afea866"


@pytest.fixture(scope="module")
def older_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of a version that knows no growth."""
    place = tmp_path_factory.mktemp("older")
    source_of(_OLDER, place)
    return place


@pytest.mark.slow
def test_a_version_that_knows_no_growth_opens_a_store_that_is_half_grown(
    shm_root: Path, older_tree: Path
) -> None:
    ended("filled", shm_root, "listed", code=-9)
    answer = ended("older", shm_root, tree=older_tree)
    assert answer == {
        "found": 16,
        "wrong": 0,
        "lost": 0,
        "missing": 0,
        "unbacked": 0,
    }
    assert ended("after", shm_root)["wrong"] == 0


@pytest.mark.slow
def test_a_version_that_knows_no_growth_fills_the_store_beside_one_that_grows(
    shm_root: Path, tmp_path: Path, older_tree: Path
) -> None:
    ready = tmp_path / "ready"
    go = tmp_path / "go"
    process = subprocess.Popen(
        [sys.executable, STEPS, "beside", shm_root, ready, go],
        env=_environment(ROOT, CHUNK_BYTES),
        stdout=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 120
    while not ready.exists() and time.monotonic() < until:
        time.sleep(0.01)
    answer = ended("older", shm_root, tree=older_tree)
    go.touch()
    out, _ = process.communicate(timeout=200)
    here = json.loads(out.splitlines()[-1])
    slots = FILLED_MIB * MIB // CHUNK_BYTES
    assert answer["found"] == 16
    assert answer["wrong"] == answer["lost"] == answer["missing"] == 0
    assert here == {
        "found": slots,
        "wrong": 0,
        "stored": 1,
        "half": True,
    }


@pytest.mark.slow
def test_a_version_that_knows_no_ghosts_apart_refuses_the_store_then_replaces_it(
    shm_root: Path, tmp_path: Path, older_tree: Path
) -> None:
    """It would touch ghosts that have no pages."""
    ready = tmp_path / "ready"
    go = tmp_path / "go"
    process = subprocess.Popen(
        [sys.executable, STEPS, "beside", shm_root, ready, go],
        env=_environment(ROOT, SMALL_BYTES),
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_until(ready.exists)
    refused = run("older", shm_root, tree=older_tree, chunk_bytes=SMALL_BYTES)
    go.touch()
    out, _ = process.communicate(timeout=200)
    here = json.loads(out.splitlines()[-1])
    assert refused.returncode == 1
    assert "while other processes have it open: stop them first" in refused.stderr
    assert "columns has" in refused.stderr
    assert here["found"] == 16
    assert here["wrong"] == 0
    assert here["stored"] == 1
    replaced = ended("older", shm_root, tree=older_tree, chunk_bytes=SMALL_BYTES)
    assert replaced == {
        "found": 0,
        "wrong": 0,
        "lost": 0,
        "missing": 0,
        "unbacked": 0,
    }
    # and its store is this version's
    after = ended("after", shm_root, chunk_bytes=SMALL_BYTES)
    assert after["wrong"] == after["unbacked"] == 0
