"""Which boot this is where the kernel's id is hidden or false, and one clock for containers with
their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pagoda.base import boot_identity
from pagoda.base.boot_identity import (
    kernel_boot_id,
    monotonic_offset_ns,
    stand_in,
)
from testbed.programs import need

KERNELS = Path("/proc/sys/kernel/random/boot_id")


def test_the_kernels_id_is_used_and_a_file_in_its_place_is_not(
    tmp_path: Path,
) -> None:
    assert kernel_boot_id(KERNELS) == KERNELS.read_text().strip()
    for text in (
        KERNELS.read_text(),
        "",
        "00000000-0000-0000-0000-000000000000\n",
        "\xff\xff",
    ):
        (tmp_path / "boot_id").write_text(text)
        assert kernel_boot_id(tmp_path / "boot_id") is None
    assert kernel_boot_id(tmp_path / "none") is None
    assert kernel_boot_id(Path("/proc/version")) is None


def test_a_stand_in_is_the_same_for_all_and_a_copy_of_it_is_not(
    shm_root: Path,
) -> None:
    first = stand_in(shm_root / "mine")
    assert first is not None
    assert first == stand_in(shm_root / "mine")
    shutil.copytree(
        shm_root / "mine", shm_root / "copy", copy_function=shutil.copy2
    )
    copied = stand_in(shm_root / "copy")
    assert copied is not None
    assert copied != first
    # by a cleaner: then it is another boot
    (shm_root / "mine" / ".boot").unlink()
    assert stand_in(shm_root / "mine") not in (None, first, copied)


@pytest.mark.parametrize("text", ["", "0" * 31, "x" * 32 + "\n", "0" * 64])
def test_a_damaged_stand_in_is_replaced(shm_root: Path, text: str) -> None:
    (shm_root / ".boot").write_text(text)
    found = stand_in(shm_root)
    assert found is not None
    assert found == stand_in(shm_root)


def test_a_stand_in_that_outlives_a_reboot_or_is_anothers_does_not_count(
    tmp_path: Path, shm_root: Path
) -> None:
    assert stand_in(tmp_path / "on-a-disk") is None
    (shm_root / "link").symlink_to(shm_root)
    assert stand_in(shm_root / "link") is None
    (shm_root / "open").mkdir()
    (shm_root / "open").chmod(0o777)
    assert stand_in(shm_root / "open") is None
    if os.geteuid() == 0:
        (shm_root / "theirs").mkdir()
        os.chown(shm_root / "theirs", 12345, 12345)
        assert stand_in(shm_root / "theirs") is None


def test_two_processes_that_begin_together_make_one_stand_in(
    shm_root: Path,
) -> None:
    code = (
        "import sys; from pathlib import Path; from pagoda.base.boot_identity import stand_in;"
        "print(stand_in(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(shm_root / "mine")]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    identities = {process.communicate()[0] for process in started}
    assert len(identities) == 1
    assert None not in identities


def test_without_any_identity_each_process_is_a_boot_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(boot_identity, "_BOOT_ID", tmp_path / "none")
    monkeypatch.setattr(boot_identity, "_MEMORY", tmp_path)
    names = {boot_identity.boot_id.__wrapped__() for _ in range(2)}
    assert len(names) == 2
    assert "starts cold" in caplog.text


def test_the_offset_of_a_containers_clock_is_read(tmp_path: Path) -> None:
    (tmp_path / "offsets").write_text(
        "monotonic    -3    500\nboottime   7   9\n"
    )
    assert monotonic_offset_ns(tmp_path / "offsets") == -2_999_999_500
    assert monotonic_offset_ns(tmp_path / "none") == 0
    assert monotonic_offset_ns() == 0


SAME_CLOCK = "from pagoda.base.clock import Clock; print(Clock().monotonic_ns())"


def test_a_container_with_a_clock_of_its_own_has_the_machines_times() -> None:
    need("unshare")
    if os.geteuid() != 0:
        pytest.skip("needs root for namespaces of its own")
    inside = [
        "unshare",
        "--time",
        "--monotonic",
        "100000",
        "--fork",
        sys.executable,
        "-c",
        SAME_CLOCK,
    ]
    ended = subprocess.run(inside, capture_output=True, text=True, check=False)
    if "unshare" in ended.stderr:
        pytest.skip(ended.stderr)
    outside = subprocess.run(
        [sys.executable, "-c", SAME_CLOCK],
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0 < int(outside.stdout) - int(ended.stdout) < 100_000 * 10**9


HIDDEN_PROC = """
import sys
from pathlib import Path
from pagoda.base.clock import Clock
from pagoda.ledger import Ledger, StoreSpec
spec = StoreSpec(root=Path(sys.argv[1]), name="store", kind="memory", slots=4, slot_bytes=4096)
ledger = Ledger.open(spec)
print(ledger.store_id.hex())
ledger.close()
"""


def test_host_memory_stays_warm_where_proc_is_hidden(shm_root: Path) -> None:
    """As systemd does with ProcSubset=pid. Before, no store could be opened."""
    need("unshare")
    if os.geteuid() != 0:
        pytest.skip("needs root for namespaces of its own")
    command = (
        f"mount -t proc -o subset=pid proc /proc && exec {sys.executable} -c '{HIDDEN_PROC}' "
        f"{shm_root}"
    )
    inside = ["unshare", "--mount", "--pid", "--fork", "bash", "-c", command]
    identities = []
    for _ in range(2):
        ended = subprocess.run(
            inside, capture_output=True, text=True, check=False
        )
        if "mount:" in ended.stderr:
            pytest.skip(ended.stderr)
        assert ended.returncode == 0, ended.stderr
        identities.append(ended.stdout)
    assert identities[0] == identities[1] != ""
