"""Many threads on a small disk tier whose disk fails at random: every byte served is a function of
its key.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pagoda.testing import Fault, FaultySlab
from pagoda.tiers import DiskTier
from tests.tiers.tools import (
    LAYOUT,
    ROOT,
    SECONDS,
    check,
    chunks_of,
    is_right,
    keys_of,
    open_faulty,
    payload_of,
    right,
    room,
)

FAULTS = [
    Fault.SHORT,
    Fault.TORN,
    Fault.EIO,
    Fault.BIT_FLIP,
    Fault.LOST,
    Fault.DELAY,
]


def act(tier: DiskTier, dice: random.Random) -> None:
    """Do one operation on a random chain."""
    keys = keys_of(dice.randint(1, 8), chain=dice.randrange(12))
    match dice.randrange(8):
        case 0 | 1:
            tier.store(chunks_of(keys), ROOT)
        case 2:
            valid = threading.Event()
            valid.set()
            futures = tier.store(chunks_of(keys, still_valid=valid.is_set), ROOT)
            time.sleep(dice.random() / 500)
            valid.clear()
            for future in futures:
                assert future.result(SECONDS)
        case 3 | 4:
            buffers = [room() for _ in keys]
            for key, buffer, future in zip(
                keys,
                buffers,
                tier.load(keys, buffers, namespace=ROOT),
                strict=True,
            ):
                assert not future.result(SECONDS).ok or is_right(key, buffer), (
                    "wrong bytes were served"
                )
        case 5:
            tier.put(
                keys[0],
                payload_of(keys[0])[: LAYOUT.chunk_bytes],
                namespace=ROOT,
                block=dice.random() < 0.5,
            )
            right(tier, keys[0])
        case 6:
            tier.remove(dice.choice(keys))
        case _:
            assert tier.match_prefix(keys) <= len(keys)
            if dice.random() < 0.05:
                tier.clear(ROOT)


def trouble(
    slab: FaultySlab, dice: random.Random, enough: Callable[[], bool]
) -> None:
    """Let calls fail at random."""
    slab.delay_seconds = 0.005
    while not enough():
        slab.fail_next(
            dice.choice(["read", "write"]),
            dice.choice(FAULTS),
            skip=dice.randrange(6),
        )
        time.sleep(0.004)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_wrong_bytes_no_leaks_no_hangs(tmp_path: Path, seed: int) -> None:
    tier, slab = open_faulty(tmp_path, slots=48, io_threads=3, queue_chunks=24)
    begin = time.monotonic()
    errors: list[BaseException] = []
    over = threading.Event()

    def enough() -> bool:
        """Return whether the time is up and enough has happened: a busy machine takes longer."""
        seconds = time.monotonic() - begin
        happened = (
            sum(slab.struck.values()) > 20 and tier.stats()["loaded_chunks"] > 20
        )
        return seconds > 60 or bool(errors) or (seconds > 1.5 and happened)

    def work(number: int) -> None:
        dice = random.Random(seed * 100 + number)
        try:
            while not over.is_set():
                act(tier, dice)
        except BaseException as error:  # noqa: BLE001
            # raised again by the test itself
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(number,), daemon=True)
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    trouble(slab, random.Random(seed), enough)
    over.set()
    for thread in threads:
        thread.join(60)
    for thread in threads:
        assert not thread.is_alive()
    assert errors == []
    slab.heal()
    assert tier.flush(SECONDS)
    check(tier)
    assert sum(slab.struck.values()) > 20
    assert tier.stats()["loaded_chunks"] > 20
    tier.close()
