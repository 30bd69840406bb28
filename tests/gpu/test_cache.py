"""A whole cache on a GPU: what is evicted during a load is a miss; two processes share one slab;
one is killed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pagoda.ledger import admin
from tests.cache.kit import SPAWN
from tests.gpu.rig import Rig, open_rig
from tests.gpu.shelf import CHUNK, EACH, Shelf, prompt


@pytest.fixture
def shelf(rig: Rig, shm_root: Path) -> Iterator[Shelf]:
    shelf = Shelf(rig, shm_root, slots=32)
    yield shelf
    shelf.close()


def test_stored_and_served(shelf: Shelf, seed: int) -> None:
    tokens = prompt(6, seed % 10**6)
    planes = shelf.memory()
    table = list(range(6 * EACH))
    shelf.compute(planes, table, tokens)
    assert shelf.cache.store(tokens, shelf.kv(planes, table)).refused == 0
    others = shelf.memory()
    elsewhere = list(range(100, 100 + 6 * EACH))[::-1]
    hit = shelf.cache.retrieve(tokens, shelf.kv(others, elsewhere))
    assert hit.num_tokens == 6 * CHUNK
    assert not shelf.wrong_chunks(others, elsewhere, tokens, hit)
    untouched = sorted(set(range(shelf.blocks)) - set(elsewhere))
    for plane in others:
        assert bool((plane[untouched] == 0xA5).all())


def test_the_slab_gets_registered(shelf: Shelf, seed: int) -> None:
    """In the background, from the first transfer on; then slots are the device's to reach."""
    if shelf.rig.small:
        pytest.skip("there is nothing to register with")
    tokens = prompt(2, seed % 10**6)
    planes = shelf.memory()
    table = list(range(2 * EACH))
    shelf.cache.store(tokens, shelf.kv(planes, table))
    until = time.monotonic() + 30
    while (
        shelf.slab.pinned_bytes < shelf.slab.nbytes and time.monotonic() < until
    ):
        time.sleep(0.01)
    assert shelf.slab.pinned_bytes == shelf.slab.nbytes
    address = shelf.slab.array.ctypes.data
    nbytes = shelf.slab.nbytes
    assert shelf.rig.gpu.device_address(address, nbytes) is not None
    shelf.close()
    while (
        shelf.rig.gpu.device_address(address, 1) is not None
        and time.monotonic() < until
    ):
        time.sleep(0.01)
    assert shelf.rig.gpu.device_address(address, 1) is None


def test_a_slot_that_is_evicted_during_a_load_is_a_miss(
    shelf: Shelf, seed: int
) -> None:
    """One thread loads, others store other prompts into the same few slots and clear: never wrong
    bytes.
    """
    seconds = 2.0 if shelf.rig.small else 10.0
    until = time.monotonic() + seconds
    tokens = prompt(8, 1)
    trouble = list[BaseException]()
    lengths = list[int]()
    stop = threading.Event()

    def others() -> None:
        random = np.random.default_rng(seed)
        planes = shelf.memory()
        table = list(range(8 * EACH))
        number = 0
        try:
            while not stop.is_set():
                number += 1
                own = (
                    tokens
                    if number % 3 == 0
                    else prompt(8, int(random.integers(2, 10**6)))
                )
                shelf.compute(planes, table, own)
                shelf.cache.store(own, shelf.kv(planes, table))
                if number % 20 == 0:
                    shelf.cache.clear()
        except BaseException as error:  # noqa: BLE001
            trouble.append(error)

    thread = threading.Thread(target=others)
    thread.start()
    planes = shelf.memory()
    table = list(range(64, 64 + 8 * EACH))
    try:
        while time.monotonic() < until or (
            not any(lengths) and time.monotonic() < until + 60
        ):
            for plane in planes:
                plane.fill_(0xA5)
            hit = shelf.cache.retrieve(tokens, shelf.kv(planes, table))
            wrong = shelf.wrong_chunks(planes, table, tokens, hit)
            assert not wrong, (
                f"chunks {wrong} of a hit of {hit.num_tokens} tokens are wrong"
            )
            lengths.append(hit.num_tokens // CHUNK)
    finally:
        stop.set()
        thread.join(60)
    if trouble:
        raise trouble[0]
    print(
        f"{len(lengths)} loads: {np.bincount(lengths, minlength=9).tolist()} of 0 to 8 chunks"
    )
    assert max(lengths) > 0


# ---- processes


def _stores(root: Path, numbers: range, forever: bool, began: object) -> None:
    with open_rig() as rig:
        shelf = Shelf(rig, root, slots=96)
        planes = shelf.memory()
        table = list(range(4 * EACH))
        turn = 0
        while forever or not turn:
            turn += 1
            for number in numbers:
                tokens = prompt(4, number)
                shelf.compute(planes, table, tokens)
                shelf.cache.store(tokens, shelf.kv(planes, table))
                began.set()  # type: ignore[attr-defined]
            if forever:
                shelf.cache.clear()
        shelf.close()


def test_one_process_stores_and_another_loads(rig: Rig, shm_root: Path) -> None:
    began = SPAWN.Event()
    other = SPAWN.Process(
        target=_stores, args=(shm_root, range(1, 9), False, began)
    )
    other.start()
    other.join(240)
    assert other.exitcode == 0
    shelf = Shelf(rig, shm_root, slots=96)
    try:
        planes = shelf.memory()
        table = list(range(50, 50 + 4 * EACH))
        for number in range(1, 9):
            hit = shelf.cache.retrieve(prompt(4, number), shelf.kv(planes, table))
            assert hit.num_tokens == 4 * CHUNK
            assert not shelf.wrong_chunks(planes, table, prompt(4, number), hit)
    finally:
        shelf.close()


def test_a_process_that_is_killed_as_it_stores(
    rig: Rig, shm_root: Path, seed: int
) -> None:
    """The other process continues and sees right bytes only, and no slot of the dead one stays
    reserved.
    """
    shelf = Shelf(rig, shm_root, slots=96)
    random = np.random.default_rng(seed)
    try:
        planes = shelf.memory()
        table = list(range(4 * EACH))
        for _ in range(2 if rig.small else 4):
            began = SPAWN.Event()
            other = SPAWN.Process(
                target=_stores,
                args=(shm_root, range(1, 30), True, began),
                daemon=True,
            )
            other.start()
            assert began.wait(240)
            until = time.monotonic() + 1.0 + float(random.random())
            while time.monotonic() < until:
                tokens = prompt(4, int(random.integers(1, 40)))
                hit = shelf.cache.retrieve(tokens, shelf.kv(planes, table))
                assert not shelf.wrong_chunks(planes, table, tokens, hit)
                if not hit.num_tokens:
                    shelf.compute(planes, table, tokens)
                    shelf.cache.store(tokens, shelf.kv(planes, table))
            assert other.pid is not None
            os.kill(other.pid, signal.SIGKILL)
            other.join(60)
            assert other.exitcode == -signal.SIGKILL
        for _, ledger in shelf.cache._tiers.ledgers():
            admin.reap(ledger)
            admin.check(ledger)
        for number in range(1, 40):
            tokens = prompt(4, number)
            shelf.compute(planes, table, tokens)
            shelf.cache.store(tokens, shelf.kv(planes, table))
            hit = shelf.cache.retrieve(tokens, shelf.kv(planes, table))
            assert not shelf.wrong_chunks(planes, table, tokens, hit)
    finally:
        shelf.close()
