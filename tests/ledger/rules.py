"""Shared by the tests of the ledger's rules: keys, chains, children and another process that
continues.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from blake3 import blake3

from pagoda.ledger import Ledger, Reserved, StoreSpec, admin

SLOTS = 32
TENANT = blake3(b"tenant").digest()
OTHER = blake3(b"other tenant").digest()


def keys(*numbers: int) -> list[bytes]:
    """Return keys by number."""
    return [blake3(b"%d" % number).digest() for number in numbers]


def spec(root: Path, slots: int = SLOTS) -> StoreSpec:
    """Return the spec of a store in memory."""
    return StoreSpec(
        root=root, name="rules", kind="memory", slots=slots, slot_bytes=4096
    )


def put(
    ledger: Ledger,
    wanted: Sequence[bytes],
    namespace: bytes = TENANT,
    chained: bool = True,
) -> list[Reserved]:
    """Store a chain from its start (or single chunks, each the first of a separate chain)."""
    stored: list[Reserved] = []
    stamp = ledger.stamp()
    step = ledger.window if chained else 1
    for start in range(0, len(wanted), step):
        first = start if chained else 0
        parent = wanted[start - 1] if first else None
        outcomes = ledger.reserve(
            wanted[start : start + step],
            namespace=namespace,
            start=first,
            parent=parent,
            stamp=stamp,
            deadline_seconds=30.0,
        )
        reserved = [one for one in outcomes if isinstance(one, Reserved)]
        assert all(ledger.commit(reserved, deadline_seconds=30.0))
        stored += reserved
        stamp = stamp if chained else ledger.stamp()
    return stored


def reserved(outcomes: Sequence[object]) -> list[Reserved]:
    """Return the outcomes that got a slot."""
    return [one for one in outcomes if isinstance(one, Reserved)]


def places(stored: Sequence[Reserved]) -> tuple[np.ndarray, np.ndarray]:
    """Slots and generations as arrays."""
    return np.array([one.slot for one in stored], np.int64), np.array(
        [one.generation for one in stored], np.uint64
    )


def present(ledger: Ledger, wanted: Sequence[bytes]) -> list[bool]:
    """Return which of these keys are stored."""
    there = {row.key for row in admin.list_chunks(ledger)}
    return [key in there for key in wanted]


class Peer:
    """Another process that does `work`, reports whether it succeeded, and continues until it is
    ended.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        receive, send = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.write(send, b"y" if work() else b"n")
                time.sleep(300)
            finally:
                os._exit(1)
        os.close(send)
        said = os.read(receive, 1)
        os.close(receive)
        if said != b"y":
            self.end()
            raise AssertionError("the work of the other process failed")

    def end(self) -> None:
        """Kill it and wait for its end."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
