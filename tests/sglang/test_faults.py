"""What dies, spoils or is full: the pages that are found are right, and SGLang goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ledger.support import gate_taken
from tests.sglang.engines import PAGE, Engine, storage_config
from tests.vllm.stores import stores

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300.0  # for one worker; on a quiet machine 15
pytestmark = pytest.mark.timeout(1000)


@contextmanager
def worker(**plan: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a worker; it is killed at the end."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.sglang.worker",
        json.dumps(plan),
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    timer = threading.Timer(SECONDS, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        process.kill()
        process.wait()


def lines(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """What a worker prints."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def ended(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Wait until a worker has done all, and return what it found; all of it is right."""
    *outcomes, last = list(lines(process))
    assert last == {"ended": True}
    wrong = [line for outcome in outcomes for line in outcome["wrong"]]
    assert not wrong, wrong[:5]
    return outcomes


def tokens(seed: int, pages: int = 20) -> list[int]:
    """A prompt."""
    return [(seed * 7919 + i * i) % 30_000 for i in range(pages * PAGE)]


@pytest.mark.parametrize(
    ("where", "disk"), [("to_slots", False), ("from_slots", True)]
)
def test_kill_9_within_a_set_or_a_get(
    shm_root: Path, tmp_path: Path, where: str, disk: bool
) -> None:
    """Half a copy is made when the engine is killed: the next engine finds only what is whole, and
    fills the rest.
    """
    options = (
        {"disk_path": str(tmp_path / "disk"), "disk_size": "16MiB"}
        if disk
        else {}
    )
    extra = storage_config(shm_root, **options)
    with worker(
        extra=extra, seed=1, requests=25, stop_in=where, stop_at=4
    ) as process:
        assert any("stopped" in line for line in lines(process))
        process.send_signal(signal.SIGKILL)
        process.wait()
    with worker(extra=extra, seed=1, requests=25) as process:
        outcomes = ended(process)
    assert sum(outcome["stored"] for outcome in outcomes) > 20 * PAGE


def test_engines_in_parallel_one_of_which_is_killed(
    shm_root: Path, tmp_path: Path
) -> None:
    """Two engines work on the same documents while others come and are killed."""
    extra = storage_config(
        shm_root,
        host_size="2MiB",
        disk_path=str(tmp_path / "disk"),
        disk_size="8MiB",
    )
    with (
        worker(extra=extra, seed=2, requests=60) as one,
        worker(extra=extra, seed=2, stream=1, requests=60) as other,
    ):
        found: dict[str, list[dict[str, Any]]] = {}
        waits = [
            threading.Thread(
                target=lambda n=name, p=process: found.update({n: ended(p)})
            )
            for name, process in (("one", one), ("other", other))
        ]
        for wait in waits:
            wait.start()
        with worker(extra=extra, seed=2, stream=2, requests=1000) as third:
            for number, _ in enumerate(lines(third)):
                if number == 10:
                    break
        for wait in waits:
            wait.join(SECONDS)
    assert set(found) == {"one", "other"}
    assert (
        sum(
            outcome["stored"]
            for outcomes in found.values()
            for outcome in outcomes
        )
        > 100 * PAGE
    )


def test_spoilt_bytes_on_disk_are_misses(shm_root: Path, tmp_path: Path) -> None:
    """Every page on the disk is damaged in one byte; none is served, and the reason is counted."""
    extra = storage_config(
        shm_root, disk_path=str(tmp_path / "disk"), disk_size="16MiB"
    )
    with Engine(extra) as engine:
        engine.request(tokens(1))
        engine.settle()
    for file in (
        path
        for store in stores(tmp_path / "disk")
        for path in store.iterdir()
        if path.name == "slab"
    ):
        _spoil(file)
    with Engine({**extra, "host_path": str(shm_root / "another")}) as engine:
        outcome = engine.request(tokens(1))
        assert outcome.stored == 0
        assert outcome.computed == 20 * PAGE
        assert outcome.wrong == []
        assert (
            engine.storage._pools["kv"].cache.stats()["tiers"]["disk"][
                "miss_failed_check"
            ]
            > 0
        )


def _spoil(file: Path) -> None:
    """Change one byte in each 4 KiB that are not all zeros."""
    with open(file, "r+b") as slab:
        size = os.fstat(slab.fileno()).st_size
        for at in range(0, size, 4096):
            slab.seek(at)
            block = bytearray(slab.read(4096))
            if any(block):
                block[2048] ^= 0x40
                slab.seek(at)
                slab.write(block)


def test_a_storage_that_is_closed_or_gets_nonsense_says_false(
    shm_root: Path,
) -> None:
    """Nothing is raised into SGLang's threads."""
    import torch

    with Engine(storage_config(shm_root)) as engine:
        engine.request(tokens(1))
        engine.settle()
        storage = engine.storage
        keys = ["ab" * 32, "cd" * 32]
        one = torch.arange(PAGE)
        for indices in (
            one,
            torch.arange(3, 3 + 2 * PAGE),
            torch.arange(2 * PAGE).flip(0),
            torch.arange(2 * PAGE)
            .reshape(2, PAGE)
            .flip(1)[:, [PAGE - 1, *range(PAGE - 1)]]
            .flatten(),
            torch.arange(10**6, 10**6 + 2 * PAGE),
        ):
            assert storage.batch_get_v1(keys, indices) == [False, False]
            assert storage.batch_set_v1(keys, indices) == [False, False]
        assert storage.batch_exists(["short"]) == 0
        assert storage.batch_exists([]) == 0
        assert storage.batch_get_v1([], one[:0]) == []
        assert storage.get("a") is None
        assert storage.set("a", one) is False
        assert storage.exists("a") is False
        storage.close()
        storage.close()
        assert storage.batch_set_v1(keys[:1], one) == [False]
        assert storage.batch_exists(keys) == 0


def test_a_flush_ends_while_the_storage_is_stuck(shm_root: Path) -> None:
    """Another process was stopped inside the host tier's tables. SGLang ends itself if its threads
    go on for 10 s.
    """
    with Engine(storage_config(shm_root, deadline_seconds=4)) as engine:
        engine.request(tokens(1))
        engine.settle()
        ledger = dict(engine.storage._pools["kv"].cache._tiers.ledgers())["host"]
        with gate_taken(ledger):
            engine.request(tokens(2))
            engine._until(lambda: not engine.cache.ongoing_write_through)
            engine.cache.reset()
            engine.allocator.clear()
        assert engine.request(tokens(1)).stored == 20 * PAGE


def test_two_ranks_load_what_both_have(shm_root: Path, tmp_path: Path) -> None:
    """The ranks agree, over gloo, on the minimum of what each has; the second lacks what a lame one
    did not store.
    """
    extra = storage_config(shm_root)

    def both(
        requests: int, group: str, lame: bool = False
    ) -> list[list[dict[str, Any]]]:
        plan: dict[str, Any] = {
            "extra": extra,
            "seed": 4,
            "requests": requests,
            "forget_every": 1,
            "ranks": 2,
            "group": str(tmp_path / group),
        }
        with worker(**plan) as first, worker(**plan, rank=1, lame=lame) as second:
            found: dict[int, list[dict[str, Any]]] = {}
            wait = threading.Thread(
                target=lambda: found.update({1: ended(second)})
            )
            wait.start()
            outcomes = ended(first)
            wait.join(SECONDS)
        return [outcomes, found[1]]

    first, second = both(10, "one", lame=True)
    assert (
        [one["stored"] for one in first]
        == [one["stored"] for one in second]
        == [0] * 10
    )
    first, second = both(10, "two")
    assert [one["stored"] for one in first] == [one["stored"] for one in second]
    # the second rank had to store everything anew
    assert sum(one["stored"] for one in first) < 40 * PAGE
    first, second = both(10, "three")
    assert [one["stored"] for one in first] == [one["stored"] for one in second]
    for one in first + second:
        assert not one["computed"]


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_a_hundred_thousand_pages(shm_root: Path, tmp_path: Path) -> None:
    """Three processes over tiers that evict all the time, one killed and started again and again:
    none is wrong.
    """
    extra = storage_config(
        shm_root,
        host_size="3MiB",
        disk_path=str(tmp_path / "disk"),
        disk_size="24MiB",
    )
    total = [0, 0]
    wrong = list[str]()
    stop = threading.Event()

    def engine(stream: int) -> None:
        while not stop.is_set():
            with worker(
                extra=extra, seed=6, stream=stream, requests=10**6
            ) as process:
                for number, line in enumerate(lines(process)):
                    total[0] += line.get("pages", 0)
                    total[1] += line.get("stored", 0) // PAGE
                    wrong.extend(line.get("wrong", ()))
                    if stop.is_set() or (stream == 2 and number == 400):
                        break

    threads = [
        threading.Thread(target=engine, args=(stream,)) for stream in range(3)
    ]
    for thread in threads:
        thread.start()
    while total[0] < 100_000 and not wrong:
        threads[0].join(0.2)
    stop.set()
    for thread in threads:
        thread.join(SECONDS)
    print(
        f"{total[0]} pages compared, {total[1]} of them from the storage, {len(wrong)} wrong"
    )
    assert not wrong, wrong[:5]
    assert total[1] > 20_000
