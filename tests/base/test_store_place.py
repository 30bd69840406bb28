"""Enough free space, and a place that may hold a store."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from pathlib import Path

import pytest

from pagoda import Cache, KVLayout, Namespace
from pagoda.base import store_place
from pagoda.base.cgroup_memory import CgroupRoom
from pagoda.base.errors import NoRoomError, StoreError
from pagoda.base.file_space import allocate, allocate_range, opened
from pagoda.base.file_systems import filesystem
from pagoda.base.store_place import (
    free_bytes,
    require_free,
    require_local,
    require_locks,
    require_own,
    require_place,
)
from pagoda.config.sizes import auto_bytes
from pagoda.ledger import Ledger, StoreSpec
from tests import seccomp
from tests.children import in_child

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
    monkeypatch.setattr(
        store_place, "_machine_free_bytes", lambda directory: 10240
    )
    assert (
        free_bytes(shm_root, in_memory=True)
        == 10240
        < free_bytes(shm_root, in_memory=False)
    )
    require_free(shm_root, 10240, in_memory=True)
    require_free(shm_root, 10241, in_memory=False)
    with pytest.raises(NoRoomError, match="memory left"):
        require_free(shm_root, 10241, in_memory=True)


@pytest.mark.parametrize(
    "text", ["", "MemAvailable: many kB\n", "MemFree: 1 kB\n"]
)
def test_a_machine_that_reports_no_limit_limits_nothing(
    shm_root: Path, tmp_path: Path, text: str
) -> None:
    (tmp_path / "meminfo").write_text(text)
    assert store_place._machine_free_bytes(shm_root, tmp_path / "meminfo") is None
    assert store_place._machine_free_bytes(shm_root, tmp_path / "none") is None


def test_more_than_the_file_system_has_is_refused_with_the_remedy(
    tmp_path: Path,
) -> None:
    with pytest.raises(NoRoomError, match="free some space"):
        require_free(tmp_path, 1 << 60, in_memory=False)
    with pytest.raises(NoRoomError, match="shm-size"):
        require_free(Path("/dev/shm"), 1 << 60, in_memory=True)


@pytest.mark.parametrize("chunk_tokens", [16, 256])
def test_the_size_that_the_error_proposes_can_be_opened(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch, chunk_tokens: int
) -> None:
    """Small slots need more tables beside them: 30 % more than was asked for."""
    monkeypatch.setattr(store_place, "cgroup_free_bytes", lambda: 100 * MIB + 5)
    layout = KVLayout.dense(2, 2, 8, "float16", chunk_tokens)
    space = {"namespace": Namespace("m"), "layout": layout, "host_path": shm_root}
    with pytest.raises(
        NoRoomError, match=r"may use 100\.0 MiB more .* needed"
    ) as no:
        Cache(**space, host_size="1GiB")
    found = re.search(r'"(\d+MiB)" would fit', str(no.value))
    assert found is not None, no.value
    Cache(**space, host_size=found[1]).close()


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_the_error_names_the_option_and_a_size_that_fits(
    shm_root: Path, tmp_path: Path, kind: str
) -> None:
    place = shm_root if kind == "host" else tmp_path
    size = 1 << 60
    with pytest.raises(NoRoomError) as no:
        require_free(place, size, in_memory=kind == "host", size_bytes=size)
    assert re.search(rf'{kind}_size = "\d+[GM]iB" would fit', str(no.value))
    with pytest.raises(NoRoomError, match=f"ask for a smaller {kind}_size"):
        require_free(place, size, in_memory=kind == "host")


def test_a_file_without_space_is_told_in_units(shm_root: Path) -> None:
    with pytest.raises(
        NoRoomError, match=r"1024\.0 TiB .* size \(host_size, disk"
    ):
        allocate(shm_root / "file", 1 << 50)


def test_private_memory_that_the_process_does_not_get_has_a_size_that_fits() -> (
    None
):
    layout = KVLayout.opaque(256, 4 << 30, "large")
    space = {"namespace": Namespace("m"), "layout": layout, "host_shared": False}
    with pytest.raises(
        NoRoomError, match=r"iB free, 200\.0 TiB are needed .* fit"
    ) as no:
        Cache(**space, host_size="200TiB")
    found = re.search(r'host_size = "(\d+[GM]iB)" would fit', str(no.value))
    assert found is not None, no.value


def test_sizes_in_errors_are_readable(tmp_path: Path) -> None:
    with pytest.raises(
        NoRoomError, match=r"\d GiB free, 1048576\.0 TiB are needed"
    ):
        require_free(tmp_path, 1 << 60, in_memory=False)


def test_a_place_without_stores_needs_all_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert status.st_size == 5 * 4096 <= status.st_blocks * 512
    assert status.st_mode & 0o777 == 0o600
    with pytest.raises(NoRoomError, match="smaller size"):
        allocate(shm_root / "file", 1 << 60)


@pytest.mark.parametrize("error", [errno.EPERM, errno.EINVAL, errno.ENOSYS])
def test_without_the_call_blocks_are_written_and_what_the_file_has_stays(
    shm_root: Path, error: int
) -> None:
    (shm_root / "file").write_bytes(b"x" * 4096 + bytes(4096) + b"\0\0y")

    def inside() -> None:
        seccomp.refuse("fallocate", error)
        allocate(shm_root / "file", 5 * 4096 - 7)
        with opened(shm_root / "file", os.O_RDWR) as fd:
            os.ftruncate(fd, 9 * 4096)
            assert allocate_range(fd, 6 * 4096, 2 * 4096)

    in_child(inside)
    content = (shm_root / "file").read_bytes()
    assert content == (b"x" * 4096 + bytes(4096) + b"\0\0y").ljust(
        9 * 4096, b"\0"
    )
    assert (shm_root / "file").stat().st_blocks * 512 == 7 * 4096


def test_what_belongs_to_another_user_is_refused(tmp_path: Path) -> None:
    require_own(tmp_path)
    if os.geteuid() != 0:
        pytest.skip("needs root to give a directory away")
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(StoreError, match="12345"):
        require_own(tmp_path)
    os.chown(tmp_path, 0, 0)


def mounts(monkeypatch: pytest.MonkeyPatch, *lines: tuple[int, str, str]) -> None:
    """Let these be the mounts: for each its number, its point and its type of file system."""
    text = "".join(
        f"{number} 2 0:3 / {point} rw shared:5 - {kind} src rw\n"
        for number, point, kind in lines
    )
    real = Path.read_text

    def read(path: Path, *more: str, **options: str) -> str:
        return (
            text
            if str(path) == "/proc/self/mountinfo"
            else real(path, *more, **options)
        )  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", read)


def mount_of(path: Path) -> int:
    """Return the number of the mount that an open of this path reaches."""
    fd = os.open(path, os.O_RDONLY)
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    finally:
        os.close(fd)
    return int(dict(line.split(":\t", 1) for line in lines)["mnt_id"])


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "ceph", "lustre", "9p"]
)
def test_a_network_file_system_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    mounts(monkeypatch, (0, "/", "ext4"), (mount_of(tmp_path), "/anywhere", kind))
    with pytest.raises(StoreError, match="local disk"):
        require_local(tmp_path / "deep" / "below")


def test_a_mount_that_a_later_one_hides_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hidden one has the longer path, and is not what an open reaches."""
    mounts(
        monkeypatch,
        (0, str(tmp_path / "a" / "b"), "fuse"),
        (mount_of(tmp_path), str(tmp_path), "tmpfs"),
    )
    (tmp_path / "a" / "b").mkdir(parents=True)
    require_local(tmp_path / "a" / "b")


def test_a_link_to_a_network_file_system_is_followed(
    tmp_path: Path, shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shm_root / "link").symlink_to(tmp_path)
    mounts(
        monkeypatch,
        (mount_of(tmp_path), str(tmp_path), "nfs"),
        (mount_of(shm_root), "/dev/shm", "tmpfs"),
    )
    if mount_of(tmp_path) == mount_of(shm_root):
        pytest.skip("the temporary directory is in shared memory")
    with pytest.raises(StoreError):
        require_local(shm_root / "link")
    require_local(shm_root)


def test_without_proc_the_kernel_is_asked_about_the_directory(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path, *_: str, **__: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", read)
    assert filesystem(shm_root) == "tmpfs"
    store_place.require_umask()  # nothing to be read, so nothing is refused


def mounted(kind: str, options: str, at: Path) -> None:
    """Mount a file system; skip the test where that is not possible."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    at.mkdir(exist_ok=True)
    command = [
        "mount",
        "-t",
        kind,
        *(["-o", options] if options else []),
        "none",
        str(at),
    ]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"cannot mount {kind} here")


def test_a_store_on_hugetlbfs_is_refused_with_the_reason(tmp_path: Path) -> None:
    mounted("hugetlbfs", "", tmp_path / "huge")
    try:
        with pytest.raises(StoreError, match=r"mapped but not written.*/dev/shm"):
            require_place(tmp_path / "huge" / "root", MIB, in_memory=True)
    finally:
        subprocess.run(["umount", str(tmp_path / "huge")], check=True)


def test_a_tmpfs_without_a_size_has_the_machines_memory(tmp_path: Path) -> None:
    """It says 0 bytes of 0."""
    mounted("tmpfs", "size=0", tmp_path / "free")
    try:
        assert os.statvfs(tmp_path / "free").f_blocks == 0
        assert free_bytes(tmp_path / "free", in_memory=True) > MIB
        assert free_bytes(tmp_path / "free", in_memory=False) > MIB
        assert auto_bytes(tmp_path / "free") == auto_bytes(None) > MIB
    finally:
        subprocess.run(["umount", str(tmp_path / "free")], check=True)


def test_a_sandbox_without_locks_is_refused_with_the_reason(
    shm_root: Path, tmp_path: Path
) -> None:
    require_locks(shm_root)

    def inside() -> None:
        seccomp.refuse("fcntl", errno.EINVAL, 1, seccomp.OFD_LOCKS)
        for root in (shm_root, tmp_path):
            with pytest.raises(
                StoreError, match=r"lock an open file .*Invalid argument.*sandbox"
            ):
                Ledger.open(
                    StoreSpec(
                        root=root,
                        name="store",
                        kind="memory",
                        slots=4,
                        slot_bytes=4096,
                    )
                )

    in_child(inside)


def test_this_machines_memory_may_hold_a_store(shm_root: Path) -> None:
    require_local(shm_root)


@pytest.mark.parametrize(
    ("limit_mib", "free_mib", "room_mib"),
    [
        (1024, 1024, 768),  # the least margin is 256 MiB
        (1024, 200, 0),
        (20_000, 20_000, 19_000),  # a twentieth
    ],
)
def test_growth_leaves_a_margin_of_the_cgroup(
    shm_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit_mib: int,
    free_mib: int,
    room_mib: int,
) -> None:
    mib = 1 << 20
    rooms = [CgroupRoom(limit_mib * mib, free_mib * mib)]
    monkeypatch.setattr(store_place, "cgroup_rooms", lambda: rooms)
    monkeypatch.setattr(store_place, "_machine_free_bytes", lambda _: None)
    status = os.statvfs(shm_root)
    of_files = status.f_bavail * status.f_frsize
    of_files -= int(status.f_blocks * status.f_frsize * 0.05)
    found = store_place.growth_room(shm_root)
    if room_mib * mib <= of_files - mib:
        assert found == (room_mib * mib, "cgroup")
    else:
        assert found.bound == "filesystem"


def test_growth_leaves_a_margin_of_the_machine(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_place, "cgroup_rooms", list)
    monkeypatch.setattr(store_place, "_machine_free_bytes", lambda _: 300 << 20)
    found = store_place.growth_room(shm_root)
    assert found.bound == "machine"
    assert found.nbytes <= 44 << 20
