"""Read and damage the tiers of a test from outside the engines that use them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pagoda.ledger import Ledger, admin
from pagoda.ledger.locks import BEYOND
from pagoda.ledger.store_state import STATE

PATIENT_SECONDS = 30.0
_ROOT = Path(__file__).resolve().parents[2]


def wait_until(
    condition: Callable[[], object], what: str, seconds: float = PATIENT_SECONDS
) -> None:
    """Wait for a condition that must become true; AssertionError if it does not."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"never came: {what}"
        time.sleep(0.02)


def stores(root: Path) -> list[Path]:
    """Return the stores under a tier's root: one for each layout."""
    if not root.is_dir():
        return []
    return sorted(
        path
        for path in root.iterdir()
        if path.name[0] != "." and (path / STATE).is_file()
    )


@contextmanager
def ledger_of(root: Path) -> Iterator[Ledger]:
    """Open the ledger of the only store under a tier's root, shared with all processes that have it
    open.
    """
    (store,) = stores(root)
    ledger = Ledger.attach(store)
    try:
        yield ledger
    finally:
        ledger.close()


def ready(root: Path) -> int:
    """Return how many chunks a tier has."""
    if not stores(root):
        return 0
    with ledger_of(root) as ledger:
        return admin.gauges(ledger)["ready"]


def keys(root: Path) -> set[bytes]:
    """Return which chunks a tier has."""
    with ledger_of(root) as ledger:
        return {row.key for row in admin.list_chunks(ledger)}


def wait_ready(root: Path, chunks: int) -> None:
    """Wait until a tier has that many chunks: an engine's chunks become visible a little after its
    answer.
    """
    wait_until(
        lambda: ready(root) >= chunks,
        f"expected {chunks} chunks in {root}, found {ready(root)}",
    )


def check(root: Path) -> dict[str, int]:
    """Check the ledger's numbers; return its gauges."""
    with ledger_of(root) as ledger:
        return dict(admin.check(ledger).gauges)


def counters(root: Path) -> dict[str, int]:
    """Return what all processes have counted in a tier."""
    with ledger_of(root) as ledger:
        return admin.counters(ledger)


def clear(root: Path) -> None:
    """Remove all chunks of a tier, as another process would."""
    with ledger_of(root) as ledger:
        admin.clear(ledger, None)


def wipe(root: Path) -> None:
    """Remove a tier as a reboot does: no process may have it open."""
    shutil.rmtree(root)


def remove(root: Path, position: int) -> None:
    """Remove the chunks at that position of their prompts."""
    with ledger_of(root) as ledger:
        admin.remove(
            ledger,
            [
                row.key
                for row in admin.list_chunks(ledger)
                if row.position == position
            ],
        )


def spoil(root: Path, keys: set[bytes], position: int | None = None) -> int:
    """Flip bytes in the middle of chunks in a tier's slab file (at one place of their prompts, or
    all); how many.
    """
    with ledger_of(root) as ledger, open(ledger.slab_path, "r+b") as slab:
        rows = [
            row
            for row in admin.list_chunks(ledger)
            if row.key in keys and position in (None, row.position)
        ]
        for row in rows:
            at = row.slot * ledger.slot_bytes + ledger.slot_bytes // 2
            slab.seek(at)
            flipped = bytes(byte ^ 0xFF for byte in slab.read(64))
            slab.seek(at)
            slab.write(flipped)
    return len(rows)


def elsewhere(call: str) -> None:
    """Do something of this module in a separate process, such as "clear(Path('...'))"."""
    code = f"from pathlib import Path; from tests.vllm.stores import *; {call}"
    subprocess.run(
        [sys.executable, "-c", code], cwd=_ROOT, check=True, timeout=60
    )


@contextmanager
def busy(root: Path) -> Iterator[None]:
    """Have another process hold the gate of a tier's ledger, as if it was stopped there."""
    (store,) = stores(root)
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'r+b')\n"
        f"for byte in (1, 0): fcntl.lockf(file, fcntl.LOCK_EX, 1, {BEYOND} + byte)\n"
        "print('in', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(store / STATE)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"in\n"
        try:
            yield
        finally:
            other.kill()
