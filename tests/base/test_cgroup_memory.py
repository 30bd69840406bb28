"""The cgroups of a process: what they allow, of both versions."""

from __future__ import annotations

import os
from pathlib import Path

from pagoda.base.cgroup_memory import cgroup_free_bytes, memory_limit_bytes

MIB = 1 << 20


def group(path: Path, limit: str, used: int, droppable: int = 0) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{used}\n")
    (path / "memory.stat").write_text(
        f"anon 5\ninactive_file {droppable}\nshmem 7\n"
    )


def test_without_cgroups_nothing_is_limited(tmp_path: Path) -> None:
    assert cgroup_free_bytes(tmp_path) is None


def test_the_tightest_group_above_this_process_counts(tmp_path: Path) -> None:
    process = tmp_path / "cgroup"
    process.write_text("0::/pod/container\n")
    group(tmp_path / "pod/container", "max", 0)
    assert cgroup_free_bytes(tmp_path, process) is None
    group(tmp_path / "pod", str(100 * MIB), 60 * MIB, 10 * MIB)
    assert cgroup_free_bytes(tmp_path, process) == 50 * MIB
    group(tmp_path / "pod/container", str(20 * MIB), 15 * MIB)
    assert cgroup_free_bytes(tmp_path, process) == 5 * MIB
    group(tmp_path, str(MIB), 5 * MIB)
    assert cgroup_free_bytes(tmp_path, process) == 0


def test_the_limit_above_which_processes_are_slowed_counts(
    tmp_path: Path,
) -> None:
    process = tmp_path / "cgroup"
    process.write_text("0::/pod\n")
    group(tmp_path / "pod", str(100 * MIB), 60 * MIB)
    (tmp_path / "pod" / "memory.high").write_text(f"{70 * MIB}\n")
    assert cgroup_free_bytes(tmp_path, process) == 10 * MIB
    assert memory_limit_bytes(tmp_path, process) == 70 * MIB
    (tmp_path / "pod" / "memory.high").write_text("max\n")
    assert cgroup_free_bytes(tmp_path, process) == 40 * MIB


def test_where_the_own_group_is_hidden_the_roots_of_both_versions_count(
    tmp_path: Path,
) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{20 * MIB}\n")
    assert memory_limit_bytes(tmp_path, tmp_path / "none") == 20 * MIB
    group(tmp_path, str(10 * MIB), 0)
    assert memory_limit_bytes(tmp_path, tmp_path / "none") == 10 * MIB


def test_groups_of_version_1_count_as_well(tmp_path: Path) -> None:
    process = tmp_path / "cgroup"
    box = tmp_path / "memory" / "box"
    process.write_text("7:cpu,cpuacct:/x\n5:memory:/box\n")
    box.mkdir(parents=True)
    (box / "memory.limit_in_bytes").write_text(f"{20 * MIB}\n")
    (box / "memory.usage_in_bytes").write_text(f"{15 * MIB}\n")
    (box / "memory.stat").write_text(
        f"inactive_file 7\ntotal_inactive_file {MIB}\n"
    )
    # unlimited
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(
        "9223372036854771712\n"
    )
    assert cgroup_free_bytes(tmp_path, process) == 6 * MIB
    (box / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cgroup_free_bytes(tmp_path, process) is None


def test_cgroup_limit_of_any_parent_counts(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("0::/pods/one/engine\n")
    (tmp_path / "pods" / "one" / "engine").mkdir(parents=True)
    (tmp_path / "pods" / "one" / "engine" / "memory.max").write_text("max\n")
    (tmp_path / "pods" / "one" / "memory.max").write_text("123456789\n")
    assert memory_limit_bytes(tmp_path, proc) == 123456789


def test_cgroup_version_1_and_no_cgroup(tmp_path: Path) -> None:
    ram = memory_limit_bytes(tmp_path, tmp_path / "none")
    assert ram == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    proc = tmp_path / "cgroup"
    proc.write_text("7:cpu,cpuacct:/x\n5:memory:/box\n")
    (tmp_path / "memory" / "box").mkdir(parents=True)
    (tmp_path / "memory" / "box" / "memory.limit_in_bytes").write_text(
        "2000000\n"
    )
    assert memory_limit_bytes(tmp_path, proc) == 2_000_000


def test_a_group_that_cannot_be_read_limits_nothing(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("plenty")
    assert cgroup_free_bytes(tmp_path) is None
