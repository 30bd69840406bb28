"""The ring of the last requests: of all processes, whole or left out, and nothing that a store
depends on.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagoda.base.metrics import TIER_KINDS, Reason
from pagoda.ledger import Ledger
from pagoda.ledger.request_ring import (
    MOST_REQUESTS,
    NAMESPACE_BYTES,
    RecentRequest,
    RequestRing,
)
from pagoda.ledger.store_state import REQUESTS
from tests.children import child, wait
from tests.ledger.support import TENANT, opened

NO_HITS = dict.fromkeys(TIER_KINDS, 0)


def numbers(ring: RequestRing) -> list[int]:
    return [request.asked_tokens for request in ring.newest()]


def append(ring: RequestRing, number: int, reason: str = "") -> None:
    ring.append({"asked_tokens": number}, TENANT, reason)


def test_a_request_is_remembered_with_all_that_is_known_of_it(
    tmp_path: Path,
) -> None:
    ring = RequestRing(tmp_path / "ring")
    counts = {
        "lookups": 1,
        "asked_tokens": 700,
        "hit_tokens_host": 256,
        "hit_tokens_remote": 64,
    }
    ring.append(counts, TENANT, Reason.EVICTED)
    append(ring, 5)
    # of another process that maps the same file
    last, first = RequestRing(tmp_path / "ring").newest()
    assert last == RecentRequest(
        last.time, os.getpid(), 5, NO_HITS, TENANT[:NAMESPACE_BYTES], None
    )
    assert first[1:] == (
        os.getpid(),
        700,
        {"host": 256, "disk": 0, "remote": 64},
        TENANT[:NAMESPACE_BYTES],
        "evicted",
    )
    assert first.time <= last.time


def test_the_last_ones_are_kept_the_newest_first(tmp_path: Path) -> None:
    ring = RequestRing(tmp_path / "ring")
    for number in range(3 * MOST_REQUESTS + 5):
        append(ring, number)
    assert numbers(ring) == list(
        range(3 * MOST_REQUESTS + 4, 2 * MOST_REQUESTS + 4, -1)
    )


@pytest.mark.parametrize("reason", [*Reason, ""])
def test_every_reason_has_room(reason: str, tmp_path: Path) -> None:
    ring = RequestRing(tmp_path / "ring")
    append(ring, 1, reason)
    assert ring.newest()[0].reason == (reason or None)


def test_a_torn_record_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    ring = RequestRing(path)
    for number in range(3):
        append(ring, number)
    page = bytearray(path.read_bytes())
    page[2 * 64 + 20] ^= 1
    path.write_bytes(page)
    assert numbers(RequestRing(path)) == [2, 0]
    # also the number of the next record is any
    path.write_bytes(b"\xff" * len(page))
    ring = RequestRing(path)
    assert numbers(ring) == []
    append(ring, 7)
    assert numbers(ring) == [7]


def test_processes_append_at_once_and_no_record_is_a_mixture(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ring"
    ring = RequestRing(path)

    def fill(own: int) -> None:
        for number in range(20_000):
            value = 3 * number + own
            ring.append(
                {
                    "asked_tokens": value,
                    "hit_tokens_host": value,
                    "hit_tokens_remote": value,
                },
                TENANT,
                "",
            )

    children = [child(lambda: fill(0)), child(lambda: fill(1))]
    looks = 0
    while looks < 500:
        found = ring.newest()
        looks += bool(found)
        for request in found:
            hits = request.hit_tokens
            assert request.asked_tokens == hits["host"] == hits["remote"]
            assert not hits["disk"]
            assert request.pid in children
    assert [wait(pid) for pid in children] == [0, 0]
    assert len(ring.newest()) >= MOST_REQUESTS - 1  # one may be torn for good


def test_a_store_opens_with_it_without_it_and_where_it_cannot_be_made(
    tmp_path: Path,
) -> None:
    def requests_of(ledger: Ledger) -> list[int]:
        found = numbers(ledger.requests)
        append(ledger.requests, len(found) + 1)
        ledger.close()
        return found

    assert requests_of(opened(tmp_path, kind="file")) == []
    assert requests_of(opened(tmp_path, kind="file")) == [1]
    assert requests_of(Ledger.attach(tmp_path / "store")) == [2, 1]
    (tmp_path / "store" / REQUESTS).unlink()  # of a version that has none
    assert requests_of(opened(tmp_path, kind="file")) == []
    (tmp_path / "store" / REQUESTS).unlink()
    (tmp_path / "store" / REQUESTS).mkdir()
    assert requests_of(Ledger.attach(tmp_path / "store")) == []


@pytest.mark.parametrize("number", [-1, 1 << 32, 1 << 70])
def test_odd_numbers_fail_no_request(number: int, tmp_path: Path) -> None:
    ring = RequestRing(tmp_path / "ring")
    append(ring, number)
    assert numbers(ring) == [number & 0xFFFFFFFF]
