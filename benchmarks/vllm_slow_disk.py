"""First tokens of prompts that are on a disk which the kernel slows down: loading must not be
slower than computing.

An engine with its core in a process of its own, whose reads of the disk are limited by a cgroup (as
root, with the controller `blkio`). Each round computes a new prompt, then asks for it again when
only the disk has it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import vllm_engine as inside
from ground import Plan
from harness import Figure, say
from vllm_engine import BLOCK, Engine, connector, options, wait_for_model
from vllm_figures import empty, prompt_of

from pagoda.ledger import Ledger, admin
from pagoda.ledger.store_state import STATE

PROMPT = 1_500
# bytes a second; requests before the disk is known to be slow
SLOW = 50_000_000
LEARNING = 3
_BLKIO = Path("/sys/fs/cgroup/blkio")
# many bytes of KV for little work: at 50 MB/s a chunk is computed in a fraction of the time that it
# is read in
_MODEL = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 8}


def slow_disk_figures(plan: Plan) -> list[Figure]:
    """Measure the second first token against the first, with the disk as it is and with 50 MB/s."""
    if not (_BLKIO / "cgroup.procs").is_file() or os.geteuid() != 0:
        say(
            "slow_disk: left out, it needs root and the controller blkio of cgroups 1"
        )
        return []
    with (
        tempfile.TemporaryDirectory(prefix="pagoda-bench-", dir=plan.shm) as shm,
        tempfile.TemporaryDirectory(
            prefix="pagoda-bench-", dir=plan.disk
        ) as disk,
        _limit(Path(disk)) as limit,
    ):
        at = _Slow(Path(shm), Path(disk), limit)
        try:
            return at.figures(3 if plan.quick else 8)
        finally:
            at.end()


@contextmanager
def _limit(disk: Path) -> Iterator[tuple[Path, str]]:
    """Make a cgroup; yield it and the number of the disk's device."""
    device = os.stat(disk).st_dev
    group = _BLKIO / f"pagoda-bench-{os.getpid()}"
    group.mkdir()
    try:
        yield group, f"{os.major(device)}:{os.minor(device)}"
    finally:
        until = time.monotonic() + 30
        while (group / "cgroup.procs").read_text() and time.monotonic() < until:
            time.sleep(0.1)
        group.rmdir()


class _Slow:
    """One engine after another on the same tiers."""

    def __init__(self, shm: Path, disk: Path, limit: tuple[Path, str]) -> None:
        self._host = shm / "host"
        self._disk = disk / "disk"
        self._limit = limit
        self._log = disk / "log"
        self._model = disk / "model"
        wait_for_model(self._model, **_MODEL)
        self._engine: Engine | None = None

    def end(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def _start(self) -> Engine:
        self.end()
        tiers = {
            "host_path": str(self._host),
            "host_size": "256MiB",
            "disk_path": str(self._disk),
            "disk_size": "2GiB",
            "deadline_seconds": 20.0,
        }
        given = options(self._model, dtype="float32", **connector(**tiers))
        self._engine = engine = Engine(
            "slow", self._log, multiprocessing=True, **given
        )
        # before its children are there
        (self._limit[0] / "cgroup.procs").write_text(str(engine.pid))
        engine.answer()
        engine.call(inside.first_token, prompt_of(PROMPT))
        time.sleep(2.0)  # until what it stored is on the disk
        return engine

    def _slow(self, bytes_per_second: int) -> None:
        group, device = self._limit
        (group / "blkio.throttle.read_bps_device").write_text(
            f"{device} {bytes_per_second}"
        )

    def figures(self, rounds: int) -> list[Figure]:
        self._start()
        fast = self._rounds(rounds)
        self._slow(SLOW)
        slow = self._rounds(LEARNING + rounds)
        self._start()
        next_one = self._rounds(rounds)
        self._slow(0)
        healed = self._rounds(LEARNING + rounds, pause=1.5)
        self.end()
        return [
            _figure("slow_disk_fast", fast, None, "as it is: loaded"),
            _figure(
                "slow_disk_learning",
                slow[:LEARNING],
                None,
                "50 MB/s, not known yet",
            ),
            _figure("slow_disk", slow[LEARNING:], 1.1, "50 MB/s, known"),
            _figure(
                "slow_disk_next_engine",
                next_one,
                1.1,
                "50 MB/s, known from the engine before",
            ),
            _figure(
                "slow_disk_healed",
                healed[-rounds:],
                None,
                "as it is again, some seconds later",
            ),
        ]

    def _rounds(
        self, count: int, pause: float = 0.0
    ) -> list[tuple[float, float, int]]:
        """Return of each round the seconds computed, the seconds again, and how many tokens were a
        hit then.
        """
        engine = self._engine
        found = []
        assert engine is not None
        for _ in range(count):
            prompt = prompt_of(PROMPT)
            time.sleep(pause)
            stored = self._stored()
            first = engine.call(inside.first_token, prompt)
            while self._stored() < stored + PROMPT // BLOCK:
                time.sleep(0.01)
            empty(self._host)
            engine.call(inside.reset)
            again = engine.call(inside.first_token, prompt)
            found.append((first.seconds, again.seconds, again.device))
            say(
                f"  computed in {first.seconds:.3f} s, again in {again.seconds:.3f} s, hit "
                f"{again.device} tokens"
            )
        return found

    def _stored(self) -> int:
        """Return how many chunks the disk has taken so far."""
        (store,) = (
            path for path in self._disk.iterdir() if (path / STATE).is_file()
        )
        ledger = Ledger.attach(store)
        try:
            return admin.counters(ledger)["stored_chunks"]
        finally:
            ledger.close()


def _figure(
    key: str,
    rounds: Sequence[tuple[float, float, int]],
    target: float | None,
    note: str,
) -> Figure:
    """Return the largest of the rounds' seconds again, as a multiple of the median of what was
    computed.
    """
    computed = statistics.median(first for first, _, _ in rounds)
    times = [round(again / computed, 3) for _, again, _ in rounds]
    hits = [hit for _, _, hit in rounds]
    quoted = {
        "times": times,
        "hit_tokens": hits,
        "computed_seconds": [round(first, 4) for first, _, _ in rounds],
    }
    note = (
        f"{note}; median {statistics.median(times):.2f}, hits {min(hits)} to {max(hits)} of "
        f"{PROMPT} tokens"
    )
    return Figure(key, max(times), target, "times", quoted, note)
