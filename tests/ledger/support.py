"""Shared by the tests of the ledger's parts: small stores, keys by number, and other processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from blake3 import blake3

from pagoda.base.clock import Clock
from pagoda.ledger import Ledger, Outcome, Reserved, StoreSpec, admin, rebuild
from pagoda.ledger.locks import BEYOND, GATE, INTENT, LockFile
from pagoda.ledger.store_state import STATE, Kind
from pagoda.policy.hindsight import _SharedValues
from pagoda.testing import FakeClock
from testbed.patience import Patience
from tests.children import child

TENANT = blake3(b"tenant").digest()
OTHER = blake3(b"other tenant").digest()
SLOTS = 32
SLOT_BYTES = 4096
# for a call that must succeed: a busy machine may pause for a while
PATIENT_SECONDS = 30.0


def keys(*numbers: int) -> list[bytes]:
    """Return keys by number."""
    return [blake3(b"%d" % number).digest() for number in numbers]


def spec(
    root: Path,
    slots: int = SLOTS,
    name: str = "store",
    kind: Kind = "memory",
    limit_bytes: int | None = None,
    private: bool = False,
    slot_bytes: int = SLOT_BYTES,
) -> StoreSpec:
    """A small store."""
    return StoreSpec(root, name, kind, slots, slot_bytes, limit_bytes, private)


def small_store(
    root: Path, slots: int = SLOTS, kind: Kind = "memory"
) -> StoreSpec:
    """The spec of a small store that is as large as its root allows."""
    return spec(root, slots, kind=kind, limit_bytes=slots * SLOT_BYTES)


def opened(
    root: Path,
    slots: int = SLOTS,
    clock: Clock | None = None,
    kind: Kind = "memory",
) -> Ledger:
    """A ledger of a small store with one tenant."""
    ledger = Ledger.open(small_store(root, slots, kind), clock=clock)
    ledger.namespaces.register(TENANT, {"model": "test"})
    return ledger


def teach(ledger: Ledger, clock: FakeClock) -> None:
    """Teach that chunks are requested again at an age of 10 to 50 s, so one of 9 s is worth more
    than a new one.
    """
    learnt = _SharedValues.of(ledger.upkeep_thread.learned)  # type: ignore[arg-type]
    learnt.asked[:, 20:27] = learnt.watched[:, 20:27] = 100
    for _ in range(2):
        ledger.upkeep_thread.run_once()
        clock.advance(6)
    ledger.upkeep_thread.run_once()


def reserved(outcomes: Sequence[Outcome]) -> list[Reserved]:
    """Return the outcomes that got a slot."""
    return [one for one in outcomes if isinstance(one, Reserved)]


def put_alone(ledger: Ledger, numbers: Iterable[int]) -> list[Reserved]:
    """Store chunks by number, each the first of its own chain."""
    return put(ledger, keys(*numbers), chained=False)


def matched(ledger: Ledger, wanted: Sequence[bytes]) -> int:
    """Return how many leading chunks are there."""
    match = ledger.match_prefix(wanted)
    return len(match.slots)


def rooms_for(
    ledger: Ledger, wanted: Sequence[bytes], **how: int
) -> list[Reserved]:
    """Reserve slots for chunks of one tenant; return those that there were."""
    outcomes = ledger.reserve(wanted, namespace=TENANT, **how)
    return reserved(outcomes)


def gauge(ledger: Ledger, name: str) -> int:
    """Return one number of what is in a ledger."""
    return admin.gauges(ledger)[name]


def put(
    ledger: Ledger,
    wanted: Sequence[bytes],
    namespace: bytes = TENANT,
    chained: bool = True,
) -> list[Reserved]:
    """Store a chain from its start, or single chunks, each the first of its own chain."""
    stored: list[Reserved] = []
    step = min(ledger.window, 64) if chained else 1
    stamp = ledger.stamp()
    for at in range(0, len(wanted), step):
        start = at if chained else 0
        rooms = reserved(
            ledger.reserve(
                wanted[at : at + step],
                namespace=namespace,
                start=start,
                parent=wanted[at - 1] if start else None,
                tokens=16,
                stamp=stamp if chained else None,
                deadline_seconds=PATIENT_SECONDS,
            )
        )
        assert all(ledger.commit(rooms, deadline_seconds=PATIENT_SECONDS))
        stored += rooms
    return stored


def present(ledger: Ledger, wanted: Sequence[bytes]) -> list[bool]:
    """Return which of these keys are stored."""
    found = {row.key for row in admin.list_chunks(ledger)}
    return [key in found for key in wanted]


def places(stored: Sequence[Reserved]) -> tuple[np.ndarray, np.ndarray]:
    """Slots and generations as arrays."""
    return (
        np.array([one.slot for one in stored], np.int64),
        np.array([one.generation for one in stored], np.uint64),
    )


class Other:
    """Another process that did `work`, reported its result (`said`), and waits; killed at the end
    of the block.
    """

    def __init__(self, work: Callable[[], bytes | None]) -> None:
        receive, send = os.pipe()

        def act() -> None:
            os.write(send, b"y" + (work() or b""))
            time.sleep(300)

        self.pid = child(act)
        os.close(send)
        with os.fdopen(receive, "rb", buffering=0) as pipe:
            answer = pipe.read(65536)
        assert answer[:1] == b"y", "the other process failed"
        self.said = answer[1:]

    def __enter__(self) -> Other:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Kill it and wait for its end."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


def holding(path: Path, byte: int, exclusive: bool = True) -> Other:
    """Let another process hold this byte of the lock file at `path`; threads of this process may
    hold it briefly.
    """
    file = LockFile(
        path, first=BEYOND if path.name == STATE else 0
    )  # the child has it until its end; its locks are separate

    with contextlib.closing(file):
        return Other(
            lambda: must(file.lock(byte, exclusive, time.monotonic() + 60.0))
        )


def must(succeeded: bool) -> None:
    """Check what another process did, which then reports a failure."""
    assert succeeded


def gate_taken(ledger: Ledger) -> Other:
    """Let another process hold the gate of this ledger."""
    return holding(ledger.directory / STATE, GATE)


def others_get_in(ledger: Ledger) -> bool:
    """Return whether this process releases all transaction locks: its upkeep threads hold one for a
    moment.
    """
    patience = Patience(20.0)
    with contextlib.closing(
        LockFile(ledger.directory / STATE, first=BEYOND)
    ) as other:
        while other.held_by_other(GATE) or other.held_by_other(INTENT):
            if patience.ended:
                return False
            time.sleep(0.001)
    return True


@contextlib.contextmanager
def shut_to_threads(ledger: Ledger) -> Iterator[None]:
    """Hold the gate of a ledger in this thread: the other threads of this process wait."""
    assert ledger.session.gate.hold(60)
    try:
        yield
    finally:
        ledger.session.gate.let_go()


def open_once(root: Path, **more: object) -> None:
    """Open a store and leave it open."""
    Ledger.open(spec(root, **more))  # type: ignore[arg-type]


def rebuilt(root: Path, slots: int) -> Ledger:
    """Return a ledger on disk without any entries."""
    opened(root, slots, kind="file").close()
    (root / "store" / "data.mdb").unlink()
    ledger = opened(root, slots, kind="file")
    assert rebuild.unscanned(ledger) == range(slots)
    return ledger


def absorb_nothing(ledger: Ledger) -> None:
    """End a scan that found nothing."""
    while len(left := rebuild.unscanned(ledger)):
        rebuild.absorb(ledger, left[0], [None] * min(64, len(left)))
