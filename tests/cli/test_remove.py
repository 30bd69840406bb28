"""`pagoda remove` frees memory and disk; stores in use, or of others, stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagoda.base import recorded_tiers
from pagoda.ledger.store_state import LOCKS
from pagoda.tiers import DiskTier
from tests.base.test_recorded_tiers import LAYOUT
from tests.cli.shelf import (
    LLAMA,
    answer,
    disk,
    done_here,
    host,
    pagoda,
    put,
    refused,
    save,
)


def filled(shm_root: Path, tmp_path: Path) -> None:
    """Make a store in memory and one on the disk, in no configuration, only in the register."""
    ledger = host(shm_root / "host")
    put(ledger, LLAMA, range(64))
    ledger.close()
    with disk(tmp_path / "disk") as tier:
        save(tier, LLAMA, range(48))
    recorded_tiers.add("host", shm_root / "host")
    recorded_tiers.add("disk", tmp_path / "disk")


@pytest.mark.slow
def test_one_tier_then_all(shm_root: Path, tmp_path: Path) -> None:
    filled(shm_root, tmp_path)
    taken = sum(
        file.stat().st_blocks * 512
        for file in (shm_root / "host" / "layout").iterdir()
    )
    found = answer("remove", "host", "--yes")
    assert found["removed_bytes"] == taken > 1 << 20
    assert found["failed"] == {}
    assert not (shm_root / "host" / "layout").exists()
    assert list((tmp_path / "disk").glob("*/slab"))
    done = pagoda("remove", "--yes")
    assert done.returncode == 0
    assert "disk" in done.stdout
    assert not list((tmp_path / "disk").glob("*/slab"))
    assert recorded_tiers.entries() == []
    assert "no local tier" in done_here("remove", "--yes").stderr


def test_with_a_configuration_file_only_its_tiers(
    shm_root: Path, tmp_path: Path
) -> None:
    filled(shm_root, tmp_path)
    file = tmp_path / "mine.toml"
    file.write_text(f'host_path = "{shm_root / "host"}"\n')
    found = answer("remove", "--yes", "--config", file)
    assert [store["tier"] for store in found["stores"]] == ["host"]  # type: ignore[attr-defined]
    assert found["failed"] == {}
    assert list((tmp_path / "disk").glob("*/slab"))


def test_a_path_is_a_root_or_a_store(shm_root: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        host(shm_root, name=name).close()
    assert [
        store["directory"]
        for store in answer("remove", shm_root / "one", "-y")["stores"]
    ] == [  # type: ignore[attr-defined]
        str(shm_root / "one")
    ]
    assert len(answer("remove", shm_root, "-y")["stores"]) == 1  # type: ignore[arg-type]


def test_a_store_in_use_stays(shm_root: Path) -> None:
    ledger = host(shm_root, name="used")
    keys = put(ledger, LLAMA, range(64))
    host(shm_root, name="idle").close()
    found = answer("remove", shm_root, "--yes", code=1)
    assert [Path(store["directory"]).name for store in found["stores"]] == [
        "idle"
    ]  # type: ignore[attr-defined]
    assert f"pid {os.getpid()} " in next(iter(found["failed"].values()))  # type: ignore[attr-defined]
    assert "stop it first" in next(iter(found["failed"].values()))  # type: ignore[attr-defined]
    assert len(ledger.match_prefix(keys).slots) == 4


def test_what_is_not_ours_stays(shm_root: Path, tmp_path: Path) -> None:
    host(shm_root, name="ours").close()
    mine = tmp_path / "mine"
    (mine / "sub").mkdir(parents=True)
    (mine / "sub" / "locks").touch()
    (mine / "sub" / "letter").write_text("dear")
    assert "has no store" in refused("remove", mine, "--yes")
    (shm_root / "ours" / "photos").mkdir()
    assert "has no store" in refused("remove", shm_root, "--yes")
    assert (mine / "sub" / "letter").exists()
    assert (shm_root / "ours" / "photos").exists()


def test_what_the_system_refuses_is_said_with_the_store(shm_root: Path) -> None:
    host(shm_root).close()
    (shm_root / LOCKS).unlink()
    # it cannot be opened, as on a file system that may only be read
    (shm_root / LOCKS).mkdir()
    done = done_here("remove", shm_root, "--yes")
    said = f"pagoda: {shm_root / 'layout'}: cannot be removed: Is a directory\n"
    assert done.returncode == 1, done.stderr
    assert done.stderr == said


def test_damaged_stores_go_too(shm_root: Path) -> None:
    host(shm_root, name="bad").close()
    (shm_root / "bad" / "state").write_bytes(b"{")
    assert len(answer("remove", shm_root, "-y")["stores"]) == 1  # type: ignore[arg-type]


def test_it_asks_and_refuses_in_one_line(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(shm_root).close()
    assert "--yes" in refused("remove", shm_root)
    assert "no such directory" in refused("remove", tmp_path / "nowhere", "-y")
    (tmp_path / "file").touch()
    assert "file: not a directory" in refused("remove", tmp_path / "file", "-y")
    monkeypatch.chdir(shm_root)
    assert "'': no such directory" in refused("remove", "", "-y")
    assert "not a remote tier" in refused("remove", "redis://h/0")
    assert (shm_root / "layout").exists()


def test_a_place_that_cannot_be_reached_is_one_sentence(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(shm_root).close()
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "no such directory" in refused("remove", loop, "-y")
    done = done_here("remove", "-y", PAGODA_HOST_PATH=str(loop))
    said = f"pagoda: {loop}: cannot be read: Too many levels of symbolic links\n"
    assert (done.returncode, done.stderr) == (1, said)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert ".: cannot be read: No such file" in refused("remove", ".", "-y")
    assert "nowhere: no such directory" in refused("remove", "nowhere", "-y")
    # an absolute path needs no working directory
    assert done_here("remove", shm_root, "-y").returncode == 0


def test_who_has_a_store_open_is_said_beside_a_loop_of_links(
    shm_root: Path,
) -> None:
    ledger = host(shm_root)
    (ledger.directory / "link").symlink_to("link")
    done = done_here("remove", shm_root, "-y")
    assert f"is open in a process (pid {os.getpid()} " in done.stderr
    ledger.close()


def test_a_remote_tier_is_only_forgotten(register_of_tiers: Path) -> None:
    recorded_tiers.add("remote", "redis://:***@h/0")
    assert done_here("remove", "redis://:secret@h/0").returncode == 0
    assert recorded_tiers.entries() == []


def test_the_message_of_a_new_tier_names_a_command_that_works(
    tmp_path: Path,
) -> None:
    DiskTier.open(LAYOUT, tmp_path / "disk", 1 << 20).close()
    assert done_here("remove", "disk", "--yes").returncode == 0
    assert os.listdir(tmp_path / "disk") == ["locks"]
