"""Enough free space, and a place that may hold a store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagoda import store_place
from pagoda.errors import NoRoomError, StoreError
from pagoda.file_space import allocate
from pagoda.store_place import free_bytes, require_free, require_local, require_own, require_place

MIB = 1 << 20


def test_more_than_the_group_has_left_is_refused_in_memory_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_place, "cgroup_free_bytes", lambda: 1000)
    require_free(tmp_path, 2000, in_memory=False)
    require_free(tmp_path, 1000, in_memory=True)
    with pytest.raises(NoRoomError, match="cgroup"):
        require_free(tmp_path, 1001, in_memory=True)


def test_more_than_the_machine_has_left_is_refused_in_memory_only(
    tmp_path: Path, shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A /dev/shm may be larger than the memory: what is allocated beyond that ends processes."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  24 kB\nMemAvailable:        10 kB\n")
    assert store_place._machine_free_bytes(shm_root, meminfo) == 10240
    assert store_place._machine_free_bytes(Path("/proc"), meminfo) is None
    monkeypatch.setattr(store_place, "_machine_free_bytes", lambda directory: 10240)
    assert free_bytes(shm_root, in_memory=True) == 10240 < free_bytes(shm_root, in_memory=False)
    require_free(shm_root, 10240, in_memory=True)
    require_free(shm_root, 10241, in_memory=False)
    with pytest.raises(NoRoomError, match="memory left"):
        require_free(shm_root, 10241, in_memory=True)


@pytest.mark.parametrize("text", ["", "MemAvailable: many kB\n", "MemFree: 1 kB\n"])
def test_a_machine_that_does_not_tell_limits_nothing(shm_root: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "meminfo").write_text(text)
    assert store_place._machine_free_bytes(shm_root, tmp_path / "meminfo") is None
    assert store_place._machine_free_bytes(shm_root, tmp_path / "none") is None


def test_more_than_the_file_system_has_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(NoRoomError, match="free some space"):
        require_free(tmp_path, 1 << 60, in_memory=False)
    with pytest.raises(NoRoomError, match="shm-size"):
        require_free(Path("/dev/shm"), 1 << 60, in_memory=True)


def test_a_place_without_stores_needs_all_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier with existing stores works with their space, whatever size was requested."""
    monkeypatch.setattr(store_place, "cgroup_free_bytes", lambda: MIB)
    store = tmp_path / "root" / "layout"
    for _ in range(2):
        require_place(store.parent, MIB, in_memory=True)
        with pytest.raises(NoRoomError, match="cgroup"):
            require_place(store.parent, MIB + 1, in_memory=True)
        if not store.exists():  # looking makes nothing
            store.mkdir(parents=True)
    allocate(store / "slab", 4096)
    require_place(store.parent, 9 * MIB, in_memory=True)


def test_a_place_where_no_store_can_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file", tmp_path / "file" / "deep" / "below"):
        with pytest.raises(StoreError, match="choose another path"):
            require_place(wrong, MIB, in_memory=False)


def test_an_allocated_file_has_its_blocks(shm_root: Path) -> None:
    allocate(shm_root / "file", 5 * 4096)
    status = (shm_root / "file").stat()
    assert status.st_size == 5 * 4096 <= status.st_blocks * 512 and status.st_mode & 0o777 == 0o600
    with pytest.raises(NoRoomError, match="smaller size"):
        allocate(shm_root / "file", 1 << 60)


def test_what_belongs_to_another_user_is_refused(tmp_path: Path) -> None:
    require_own(tmp_path)
    if os.geteuid() != 0:
        pytest.skip("needs root to give a directory away")
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(StoreError, match="12345"):
        require_own(tmp_path)
    os.chown(tmp_path, 0, 0)


def mounts(monkeypatch: pytest.MonkeyPatch, *lines: tuple[str, str]) -> None:
    """Let these be the mount points and their types of file system."""
    text = "".join(f"1 2 0:3 / {point} rw shared:5 - {kind} source rw\n" for point, kind in lines)
    real = Path.read_text

    def read(path: Path, *more: str, **options: str) -> str:
        return text if str(path) == "/proc/self/mountinfo" else real(path, *more, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", read)


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "ceph", "lustre", "9p"])
def test_a_network_file_system_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    mounts(monkeypatch, ("/", "ext4"), (str(tmp_path), kind))
    with pytest.raises(StoreError, match="local disk"):
        require_local(tmp_path / "deep" / "below")
    require_local(tmp_path.parent)


def test_the_latest_of_two_mounts_on_one_point_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts(monkeypatch, (str(tmp_path), "nfs"), ("/", "ext4"), (str(tmp_path), "xfs"))
    require_local(tmp_path)


def test_mount_points_with_blanks_and_accents_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, written in (("two words", "two\\040words"), ("données", "données")):
        mounts(monkeypatch, ("/", "ext4"), (f"{tmp_path}/{written}", "nfs"))
        with pytest.raises(StoreError):
            require_local(tmp_path / name)


def test_a_link_to_a_network_file_system_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far")
    mounts(monkeypatch, ("/", "ext4"), (f"{tmp_path}/far", "nfs"))
    with pytest.raises(StoreError):
        require_local(tmp_path / "link")


def test_this_machines_memory_may_hold_a_store(shm_root: Path) -> None:
    require_local(shm_root)
