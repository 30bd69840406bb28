"""A power cut: old and new pages mixed in the ledger, slab writes missing or torn. Rebuilt, never
wrong.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import struct
from pathlib import Path

import pytest

from pagoda.ledger import Reserved, admin, rebuild
from pagoda.tiers.disk import DiskTier
from tests.faults.support import (
    LAYOUT,
    STRIDE,
    TENANT,
    AfterReboot,
    apart,
    disk,
    keys,
    load_from,
    python,
    save_to,
    succeeded,
)

OLD = keys(range(25))
NEW = keys(range(100, 140))
PAGE = 4096

BEFORE = """
import shutil, sys
from pathlib import Path
from support import *
root, old = Path(sys.argv[1]), Path(sys.argv[2])
tier = disk(root)
assert save_to(tier, keys(range(25))) == 25
tier.close()
shutil.copytree(root, old)
"""
UNTIL = """
import os, shutil, signal, sys
from pathlib import Path
from support import *
root, new = Path(sys.argv[1]), Path(sys.argv[2])
tier = disk(root)
assert load_from(tier, keys(range(25))) == keys(range(25))
assert save_to(tier, keys(range(100, 140))) == 40
assert save_to(tier, keys(range(200, 210)), OTHER_TENANT) == 10
tier.clear(OTHER_TENANT.root)
shutil.copytree(root, new, ignore=shutil.ignore_patterns(".namespaces-*"))  # which another thread writes
os.kill(os.getpid(), signal.SIGKILL)
"""  # noqa: E501
AFTER = """
import sys
from pathlib import Path
from pagoda.ledger import admin
from support import *
for root in map(Path, sys.argv[1:]):
    tier = disk(root, clock=AfterReboot())
    save_to(tier, keys(range(300, 305)))
    load_from(tier, keys(range(140)))
    assert tier.wait_ready(60)
    found = load_from(tier, keys(range(140)))
    assert not load_from(tier, keys(range(200, 210)), OTHER_TENANT), "cleared chunks came back"
    admin.check(tier.ledger)
    assert save_to(tier, keys(range(400, 420))) == 20 and len(load_from(tier, keys(range(400, 420)))) == 20
    admin.check(tier.ledger)
    gauges = admin.gauges(tier.ledger)
    assert gauges["reserved"] == 0 and gauges["free"] + gauges["ready"] == gauges["slots"], gauges
    tier.close()
    print("found", len(found))
"""  # noqa: E501


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The store in its last clean state, and in its state at the power failure."""
    base = tmp_path_factory.mktemp("images")
    succeeded(python(BEFORE, base / "root", base / "old"))
    done = python(UNTIL, base / "root", base / "new")
    assert done.returncode == -signal.SIGKILL, done.stderr
    return base / "old", base / "new"


def mixed(
    old: Path, new: Path, unit: int, dice: random.Random, old_share: float
) -> None:
    """Puts back the old content of some units of a file."""
    with old.open("rb") as before, new.open("r+b") as after:
        size = min(os.stat(old).st_size, os.stat(new).st_size)
        for at in range(0, size, unit):
            if dice.random() < old_share:
                before.seek(at)
                after.seek(at)
                after.write(before.read(unit))


def copied(root: Path, to: Path) -> Path:
    """Copy stores that are open; a file that a thread writes before it renames it may be gone at
    any moment.
    """
    return Path(
        shutil.copytree(root, to, ignore=shutil.ignore_patterns(".namespaces-*"))
    )


def cut(images: tuple[Path, Path], to: Path, seed: int) -> Path:
    """One image of what a power cut may leave: any mixture of old and new pages, any write missing
    or torn.
    """
    old, new = images
    dice = random.Random(seed)
    shutil.copytree(new, to)
    name = LAYOUT.fingerprint
    mixed(
        old / name / "data.mdb", to / name / "data.mdb", PAGE, dice, dice.random()
    )
    mixed(
        old / name / "columns", to / name / "columns", PAGE, dice, dice.random()
    )
    # writes that are missing as a whole
    mixed(old / name / "slab", to / name / "slab", STRIDE, dice, 0.3)
    # torn ones
    mixed(
        old / name / "slab",
        to / name / "slab",
        dice.choice([512, PAGE]),
        dice,
        0.1,
    )
    return to


@pytest.mark.slow
def test_mixtures_of_old_and_new_pages_are_rebuilt_and_never_serve_wrong_bytes(
    images: tuple[Path, Path], tmp_path: Path
) -> None:
    roots = [cut(images, tmp_path / str(seed), seed) for seed in range(24)]
    found = [
        int(line.split()[1])
        for line in succeeded(python(AFTER, *roots, seconds=200)).splitlines()
    ]
    assert len(found) == len(roots) and max(found) >= 10, found


@pytest.mark.slow
def test_a_whole_slab_is_found_again_whatever_the_ledger_looks_like(
    images: tuple[Path, Path], tmp_path: Path
) -> None:
    roots = [shutil.copytree(images[1], tmp_path / str(n)) for n in range(3)]
    for root, harm in zip(
        roots, ("nothing", "garbage", "other size"), strict=True
    ):
        file = root / LAYOUT.fingerprint / "data.mdb"
        size = file.stat().st_size
        if harm != "nothing":
            file.write_bytes(
                random.Random(1).randbytes(
                    size if harm == "garbage" else size // 3 // PAGE * PAGE
                )
            )
    tier_before = 30  # 40 slots, of which 10 were cleared last
    for line in succeeded(python(AFTER, *roots)).splitlines():
        # five were evicted for chunks stored during the scan
        assert int(line.split()[1]) >= tier_before - 5, line


@pytest.mark.slow
def test_a_ledger_that_is_not_trusted_is_deleted_unopened(
    images: tuple[Path, Path], tmp_path: Path
) -> None:
    root = shutil.copytree(images[1], tmp_path / "root")
    watch = OpenWatch(root / LAYOUT.fingerprint / "data.mdb")
    tier = disk(root, clock=AfterReboot())
    assert watch.events() == ["deleted"]
    tier.close()


def test_a_ledger_in_its_place_is_not_trusted_after_a_power_cut(
    tmp_path: Path,
) -> None:
    """All files are those that they were: only the boot says that what was not synced may be
    lost.
    """
    apart(lambda: save_to(disk(tmp_path), keys(range(8))))  # it is not closed
    watch = OpenWatch(tmp_path / LAYOUT.fingerprint / "data.mdb")
    tier = disk(tmp_path, clock=AfterReboot())
    assert watch.events() == ["deleted"]
    tier.close()


def test_a_clean_ledger_is_trusted_after_a_reboot_and_is_clean_no_more_while_open(
    images: tuple[Path, Path], tmp_path: Path
) -> None:
    root = shutil.copytree(images[0], tmp_path / "root")
    watch = OpenWatch(root / LAYOUT.fingerprint / "data.mdb")
    tier = disk(root, clock=AfterReboot())
    assert "opened" in watch.events()
    assert not len(rebuild.unscanned(tier.ledger))
    assert load_from(tier, OLD) == OLD
    crashed = copied(root, tmp_path / "crashed")
    tier.close()
    watch = OpenWatch(crashed / LAYOUT.fingerprint / "data.mdb")
    tier = disk(crashed, clock=AfterReboot("a third boot"))
    assert watch.events() == ["deleted"]
    assert tier.wait_ready(60)
    assert load_from(tier, OLD) == OLD
    tier.close()


def again_elsewhere(tier: DiskTier, key: bytes) -> None:
    """Stores a chunk, removes it and stores it in another slot: the header of the first stays in
    the slab.
    """
    assert save_to(tier, [key]) == 1
    before = tier.ledger.match_prefix([key]).slots.tolist()
    tier.remove(key)
    [room] = tier.ledger.reserve([b"in the way".ljust(32)], namespace=TENANT.root)
    assert isinstance(room, Reserved)
    assert [room.slot] == before
    assert save_to(tier, [key]) == 1
    tier.ledger.abort([room])
    assert tier.ledger.match_prefix([key]).slots.tolist() != before


def test_of_one_key_the_highest_sequence_stands(tmp_path: Path) -> None:
    tier = disk(tmp_path / "root", slots=8)
    [key, other] = keys([1, 2])
    again_elsewhere(tier, key)  # the newer one in the later slot
    again_elsewhere(tier, other)
    tier.remove(other)
    assert save_to(tier, [other]) == 1
    places = {
        one: tier.ledger.match_prefix([one]).slots.tolist()
        for one in (key, other)
    }
    crashed = copied(tmp_path / "root", tmp_path / "crashed")
    tier.close()
    again = disk(crashed, slots=8, clock=AfterReboot())
    assert again.wait_ready(60)
    assert {
        one: again.ledger.match_prefix([one]).slots.tolist()
        for one in (key, other)
    } == places
    assert load_from(again, [key, other]) == [key, other]
    admin.check(again.ledger)
    again.close()


def test_what_was_cleared_has_no_entry_after_a_rebuild(
    images: tuple[Path, Path], tmp_path: Path
) -> None:
    tier = disk(
        shutil.copytree(images[1], tmp_path / "root"), clock=AfterReboot()
    )
    assert tier.wait_ready(60)
    cleared = keys(range(200, 210))
    assert not {row.key for row in admin.list_chunks(tier.ledger)} & set(cleared)
    assert tier.match_prefix(cleared) == 0
    tier.close()


def test_generations_of_a_rebuilt_ledger_never_meet_those_of_the_old_one(
    tmp_path: Path,
) -> None:
    tier = disk(tmp_path / "root", slots=8)
    save_to(tier, keys(range(8)))
    before = {row.generation for row in admin.list_chunks(tier.ledger)}
    crashed = copied(tmp_path / "root", tmp_path / "crashed")
    tier.close()
    again = disk(crashed, slots=8, clock=AfterReboot())
    assert again.wait_ready(60)
    again.clear()
    save_to(again, keys(range(20, 28)))
    assert before.isdisjoint(
        row.generation for row in admin.list_chunks(again.ledger)
    )
    again.close()


class OpenWatch:
    """Reports whether a file was opened or deleted since (inotify). Not thread-safe."""

    _OPENED = 0x20
    _DELETED = 0x400
    _EVENT = struct.Struct("iIII")

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._fd >= 0
        assert (
            libc.inotify_add_watch(
                self._fd, os.fsencode(path), self._OPENED | self._DELETED
            )
            >= 0
        )

    def events(self) -> list[str]:
        """What happened, in order."""
        said = os.read(self._fd, 65536)
        found = []
        while said:
            _, mask, _, length = self._EVENT.unpack_from(said)
            found += [
                name
                for bit, name in (
                    (self._OPENED, "opened"),
                    (self._DELETED, "deleted"),
                )
                if mask & bit
            ]
            said = said[self._EVENT.size + length :]
        return found
