"""What is found again after the end of a process or of all processes, or the loss of the host tier
or the ledger.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagoda.ledger import admin, rebuild
from tests.faults.support import (
    LAYOUT,
    Store,
    disk,
    environment,
    keys,
    load_from,
    python,
    save_to,
    succeeded,
)

PROMPT = keys(range(20))

WRITER = """
import sys, time
from pathlib import Path
from support import *
tier = disk(Path(sys.argv[1]), slots=4000)  # more than is stored before the end
turn = 0
while True:
    prompt = [key(int(sys.argv[2]) * 100000 + turn * 10 + n) for n in range(10)]
    if save_to(tier, prompt) == 10:
        print(*(one.hex() for one in prompt), flush=True)
    turn += 1
"""


def test_the_host_tier_is_warm_for_a_new_process(shm_root: Path) -> None:
    succeeded(
        python(
            "import sys; from pathlib import Path; from support import *\n"
            "store = Store(Path(sys.argv[1])); assert store.save(keys(range(20))) == 20; "
            "store.close()",
            shm_root,
        )
    )
    store = Store(shm_root)
    assert store.load(PROMPT) == 20
    admin.check(store.ledger)
    store.close()


def test_the_host_tier_is_warm_after_its_only_process_was_killed(
    shm_root: Path,
) -> None:
    done = python(
        "import os, signal, sys; from pathlib import Path; from support import *\n"
        "store = Store(Path(sys.argv[1])); assert store.save(keys(range(20))) == 20\n"
        "store.ledger.reserve(keys([50]), namespace=NAMESPACE); os.kill(os.getpid(), "
        "signal.SIGKILL)",
        shm_root,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    store = Store(shm_root)
    assert store.load(PROMPT) == 20
    admin.reap(store.ledger)
    gauges = admin.gauges(store.ledger)
    assert gauges["reserved"] == 0
    assert gauges["members"] == 1
    admin.check(store.ledger)
    store.close()


@pytest.mark.slow
def test_the_disk_tier_is_warm_after_the_host_tier_was_wiped(
    shm_root: Path, tmp_path: Path
) -> None:
    succeeded(
        python(
            "import sys; from pathlib import Path; from support import *\n"
            "store, tier = Store(Path(sys.argv[1])), disk(Path(sys.argv[2]))\n"
            "assert store.save(keys(range(20))) == 20 and save_to(tier, keys(range(20))) == 20\n"
            "tier.close(); store.close()",
            shm_root / "host",
            tmp_path / "disk",
        )
    )
    shutil.rmtree(shm_root / "host")
    store = Store(shm_root / "host")
    tier = disk(tmp_path / "disk")
    assert store.load(PROMPT) == 0
    assert load_from(tier, PROMPT) == PROMPT
    tier.close()
    store.close()


@pytest.mark.slow
def test_the_disk_tier_is_warm_after_all_processes_were_killed(
    tmp_path: Path,
) -> None:
    root = tmp_path / "disk"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(root), str(n)],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(1, 4)
    ]
    # each has stored something
    said = [writer.stdout.readline() for writer in writers if writer.stdout]
    time.sleep(0.3)
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
    reports = [
        line.split()
        for first, w in zip(said, writers, strict=True)
        for line in (first + w.communicate()[0]).splitlines()
    ]
    last = [
        bytes.fromhex(word)
        for words in reports[-1:]
        for word in words
        if len(word) == 64
    ]
    tier = disk(root, slots=4000)
    assert not len(rebuild.unscanned(tier.ledger)), (
        "a kill is not a power cut: the ledger is trusted"
    )
    assert load_from(tier, last) == last
    for words in reports:
        load_from(
            tier, [bytes.fromhex(word) for word in words if len(word) == 64]
        )
    admin.reap(tier.ledger)
    gauges = admin.gauges(tier.ledger)
    assert gauges["reserved"] == 0
    assert gauges["members"] == 1
    admin.check(tier.ledger)
    tier.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data.mdb", "columns"])
def test_the_disk_tier_is_warm_after_its_ledger_was_deleted(
    tmp_path: Path, name: str
) -> None:
    root = tmp_path / "disk"
    succeeded(
        python(
            "import sys; from pathlib import Path; from support import *\n"
            "tier = disk(Path(sys.argv[1])); assert save_to(tier, keys(range(20))) == 20; "
            "tier.close()",
            root,
        )
    )
    (root / LAYOUT.fingerprint / name).unlink()
    tier = disk(root)
    assert tier.wait_ready(60)
    assert load_from(tier, PROMPT) == PROMPT
    admin.check(tier.ledger)
    assert save_to(tier, keys(range(100, 140))) == 40
    admin.check(tier.ledger)
    tier.close()


@pytest.mark.slow
def test_many_processes_find_a_rebuilt_ledger_and_scan_it_once(
    tmp_path: Path,
) -> None:
    root = tmp_path / "disk"
    tier = disk(root)
    assert save_to(tier, PROMPT) == 20
    tier.close()
    (root / LAYOUT.fingerprint / "data.mdb").unlink()
    code = """
import sys
from pathlib import Path
from pagoda.ledger import admin
from support import *
tier = disk(Path(sys.argv[1]))
assert tier.wait_ready(60)
assert load_from(tier, keys(range(20))) == keys(range(20))
admin.check(tier.ledger)
tier.close()
"""
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(root)], env=environment()
        )
        for _ in range(4)
    ]
    assert [reader.wait(120) for reader in readers] == [0] * 4


def test_a_killed_scanner_is_followed_by_another(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    tier = disk(root, slots=200)
    assert save_to(tier, PROMPT) == 20
    tier.close()
    (root / LAYOUT.fingerprint / "data.mdb").unlink()
    done = python(
        "import os, signal, sys; from pathlib import Path; from support import *\n"
        "import pagoda.tiers.header_scan\n"
        "real = pagoda.tiers.header_scan.HeaderScan._read\n"
        "def die(scan, first, count):\n"
        "    if first >= 64: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(scan, first, count)\n"
        "pagoda.tiers.header_scan.HeaderScan._read = die\n"
        "disk(Path(sys.argv[1]), slots=200).wait_ready(60)",
        root,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    tier = disk(root, slots=200)
    assert tier.wait_ready(60)
    assert load_from(tier, PROMPT) == PROMPT
    admin.check(tier.ledger)
    tier.close()
