"""What a transaction decides it counts itself, whoever asked for it: chunks, bytes and commits that
came too late.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pagoda.ledger import CommitResult, Ledger, StoreSpec, admin
from pagoda.ledger.transaction import Transaction
from pagoda.testing import FakeClock
from tests.interrupts import Interrupted
from tests.ledger.support import (
    TENANT,
    gate_taken,
    keys,
    put,
    reserved,
    small_store,
)

CHUNK_BYTES = 4000  # of a slot of 4096


@pytest.fixture
def store_spec(shm_root: Path) -> StoreSpec:
    """A store whose slots are larger than its chunks."""
    return replace(small_store(shm_root), chunk_bytes=CHUNK_BYTES)


def counted(ledger: Ledger, *names: str) -> list[int]:
    counters = admin.counters(ledger)
    return [counters[name] for name in names]


def test_a_commit_counts_chunks_and_bytes(ledger: Ledger) -> None:
    put(ledger, keys(1, 2, 3))
    assert counted(ledger, "stored_chunks", "stored_bytes") == [
        3,
        3 * CHUNK_BYTES,
    ]


def test_a_commit_that_is_done_later_is_counted_then(ledger: Ledger) -> None:
    rooms = reserved(ledger.reserve(keys(1, 2), namespace=TENANT))
    with gate_taken(ledger):
        assert (
            ledger.commit(rooms, deadline_seconds=0.01) == [CommitResult.LOST] * 2
        )
    put(ledger, keys(3))
    assert counted(ledger, "stored_chunks", "stored_bytes") == [
        3,
        3 * CHUNK_BYTES,
    ]
    assert counted(ledger, "drop_ledger_busy", "drop_superseded") == [2, 0]


def test_a_chunk_of_two_parts_counts_once_and_whole(ledger: Ledger) -> None:
    rooms = reserved(ledger.reserve(keys(1), namespace=TENANT, parts=2))
    assert ledger.commit(rooms, part=0) == [CommitResult.PART]
    assert counted(ledger, "stored_chunks", "stored_bytes") == [0, 0]
    assert ledger.commit(rooms, part=1) == [CommitResult.WHOLE]
    assert counted(ledger, "stored_chunks", "stored_bytes") == [1, CHUNK_BYTES]


def test_a_commit_that_came_too_late_is_a_counted_drop(
    ledger: Ledger, clock: FakeClock
) -> None:
    slow = reserved(ledger.reserve(keys(1), namespace=TENANT))
    clock.advance(11)
    put(ledger, keys(1))
    assert ledger.commit(slow) == [CommitResult.LOST]
    assert counted(
        ledger, "stored_chunks", "stored_bytes", "drop_superseded"
    ) == [1, CHUNK_BYTES, 1]


def test_a_chunk_of_two_parts_that_came_too_late_is_one_drop(
    ledger: Ledger, clock: FakeClock
) -> None:
    slow = reserved(ledger.reserve(keys(1), namespace=TENANT, parts=2))
    clock.advance(11)
    put(ledger, keys(1))
    assert (
        ledger.commit(slow, part=0)
        == ledger.commit(slow, part=1)
        == [CommitResult.LOST]
    )
    assert counted(ledger, "drop_superseded") == [1]


def test_a_commit_whose_answer_a_signal_handler_loses_is_counted(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Transaction.publish

    def interrupted(transaction: Transaction, *arguments: object) -> None:
        publish(transaction, *arguments)  # type: ignore[arg-type]
        if transaction.ready:
            monkeypatch.undo()
            raise Interrupted

    rooms = reserved(ledger.reserve(keys(1), namespace=TENANT))
    monkeypatch.setattr(Transaction, "publish", interrupted)
    with pytest.raises(Interrupted):
        ledger.commit(rooms)
    assert admin.gauges(ledger)["ready"] == 1
    assert counted(ledger, "stored_chunks", "stored_bytes") == [1, CHUNK_BYTES]
