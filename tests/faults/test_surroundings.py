"""The surroundings fail: each file of a store and of its root is removed, older, cut or of another
boot.

Never wrong bytes, chunks of other weights, cleared chunks, an end of the process, or a start that
fails. A few cases that a seed chooses in a run of the tests; all of them, on every kind of file
system that can be made, in `make soak`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testbed.programs import need
from tests.faults.surroundings import KINDS, Kind

pytestmark = pytest.mark.timeout(1500)

ROOT = Path(__file__).resolve().parents[2]
QUICK_CASES = 4  # of each kind, of which each takes half a second of processor
SEED = int(os.environ.get("SURROUNDINGS_SEED", "32"))
IMAGE_BYTES = 512 << 20  # sparse; xfs wants 300 MB
SYSTEMS = (
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "tmpfs",
    "overlay",
)  # a store on FUSE is refused: `require_local`


def run(root: Path, kind: Kind, *options: str, seconds: float) -> None:
    """Run cases in a light process of its own; AssertionError with every case that went wrong."""
    command = [
        sys.executable,
        "-m",
        "tests.faults.surroundings",
        str(root),
        "--kind",
        kind,
        *options,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = [
        f"{one['case']}: {one['violations']}"
        for one in results
        if one["violations"]
    ]
    assert results and not wrong and done.returncode == 0, "\n".join(
        [*wrong, done.stderr[-2000:]]
    )


def places(kind: Kind, shm_root: Path, tmp_path: Path) -> Path:
    """Return where a tier of that kind is usually kept."""
    return shm_root if kind == "host" else tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_untouched_store_hits_all_and_a_few_harms_break_no_promise(
    kind: Kind, shm_root: Path, tmp_path: Path
) -> None:
    run(
        places(kind, shm_root, tmp_path),
        kind,
        "--cases",
        str(QUICK_CASES),
        "--seed",
        str(SEED),
        seconds=1200,
    )


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_every_harm_breaks_no_promise(
    kind: Kind, shm_root: Path, tmp_path: Path
) -> None:
    run(places(kind, shm_root, tmp_path), kind, seconds=7000)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that mounts a file system of a kind and returns its directory; skips where
    that cannot be.
    """
    made: list[Path] = []

    def mount(system: str) -> Path:
        where = tmp_path / "mounted"
        where.mkdir()
        words = _mount_words(system, tmp_path, where)
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(
                f"no {system} here: {done.stderr.strip() or done.stdout.strip()}"
            )
        made.append(where)
        root = where / "root"
        root.mkdir(mode=0o700)
        return root

    yield mount
    for where in made:
        subprocess.run(["umount", where], check=True)


def _mount_words(system: str, work: Path, where: Path) -> list[str | Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a file system")
    if system == "tmpfs":
        return [
            "mount",
            "-t",
            "tmpfs",
            "-o",
            f"size={IMAGE_BYTES},mode=0700",
            "tmpfs",
            where,
        ]
    if system == "overlay":
        for name in ("lower", "upper", "work"):
            (work / name).mkdir()
        layers = f"lowerdir={work / 'lower'},upperdir={work / 'upper'},workdir={work / 'work'}"
        return ["mount", "-t", "overlay", "-o", layers, "overlay", where]
    mkfs = need(f"mkfs.{system}")
    image = work / "image"
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    quiet = ["-q"] if system in ("xfs", "btrfs") else ["-qF"]
    subprocess.run([mkfs, *quiet, image], check=True, capture_output=True)
    return ["mount", "-o", "loop", image, where]


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_harm_breaks_no_promise_on_every_file_system(
    system: str, mounted: Callable[[str], Path]
) -> None:
    root = mounted(system)
    for kind in KINDS if system == "tmpfs" else KINDS[1:]:
        run(root, kind, seconds=7000)
