"""Another process is stopped inside a tier's ledger: every call ends within its deadline, with a
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from pagoda.base.metrics import Reason
from pagoda.cache import Cache
from testbed.patience import Patience
from tests.cache.kit import (
    blank,
    cache_at,
    counters_of,
    prompt,
    put,
    stored,
)
from tests.ledger.support import gate_taken

T = TypeVar("T")
# deadlines of a call, and of the tiers: a call that waits for the tiers' deadline is late on any
# machine
SHORT = 0.05
LONG = 20.0


@contextmanager
def busy(shm_root: Path, tmp_path: Path, tier: str) -> Iterator[Cache]:
    with cache_at(shm_root, tmp_path, deadline_seconds=LONG) as cache:
        stored(cache, prompt(4))
        ledger = dict(cache._tiers.ledgers())[tier]
        with gate_taken(ledger):
            yield cache


def soon(call: Callable[[], T]) -> T:
    """Return the result of a call, which must end before the tiers' deadline."""
    patience = Patience(LONG)
    answer = call()
    assert not patience.ended, patience.said()
    return answer


def test_what_the_disk_did_not_say_in_time_is_not_called_absent(
    shm_root: Path, tmp_path: Path
) -> None:
    with busy(shm_root, tmp_path, "disk") as cache:
        looked = soon(lambda: cache.lookup(prompt(4, 1), deadline_seconds=SHORT))
        assert looked.num_tokens == 0
        assert looked.reason == Reason.DEADLINE
        hit = soon(
            lambda: cache.retrieve(
                prompt(4, 1), blank(prompt(4, 1)).transfer, deadline_seconds=SHORT
            )
        )
        assert hit.num_tokens == 0
        assert hit.reason == Reason.DEADLINE
        assert "disk" in hit.detail
        assert (
            soon(
                lambda: cache.explain(prompt(4, 1), deadline_seconds=SHORT)
            ).reason
            is Reason.DEADLINE
        )
        only = soon(
            lambda: cache.lookup(
                prompt(4, 1), tiers=["host"], deadline_seconds=SHORT
            )
        )
        # the store that could explain the miss is busy, and the call does not wait for it
        assert only.num_tokens == 0
        assert soon(lambda: cache.lookup(prompt(4))).num_tokens == 64
        assert soon(lambda: put(cache, prompt(4, 2))).num_chunks == 4


def test_a_store_without_a_host_tier_does_not_wait_for_the_disk(
    tmp_path: Path,
) -> None:
    with cache_at(None, tmp_path, deadline_seconds=LONG) as cache:
        stored(cache, prompt(4))
        with gate_taken(cache._tiers.ledgers()[0][1]):
            soon(lambda: put(cache, prompt(4), deadline_seconds=SHORT))


def test_calls_that_the_host_keeps_waiting_end_in_time(
    shm_root: Path, tmp_path: Path
) -> None:
    with busy(shm_root, tmp_path, "host") as cache:
        looked = soon(lambda: cache.lookup(prompt(4, 1), deadline_seconds=SHORT))
        assert looked.reason is Reason.LEDGER_BUSY
        hit = soon(
            lambda: cache.retrieve(
                prompt(4), blank(prompt(4)).transfer, deadline_seconds=SHORT
            )
        )
        assert hit.reason is not None
        new = prompt(4, 2)
        kept = soon(lambda: put(cache, new, deadline_seconds=SHORT))
        assert kept.num_chunks == 0
        assert kept.reason == Reason.LEDGER_BUSY


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_stats_show_what_can_be_shown_and_say_what_is_missing(
    shm_root: Path, tmp_path: Path, tier: str
) -> None:
    with cache_at(shm_root, tmp_path, deadline_seconds=5.0) as cache:
        # otherwise the write-back thread would use both ledgers
        stored(cache, prompt(4))
        cache.lookup(prompt(4))
        ledgers = dict(cache._tiers.ledgers())
        whole = cache.stats()
        assert whole["failed"] == {}
        with gate_taken(ledgers[tier]):
            stats = cache.stats()
        assert list(stats["failed"]) == [tier]  # type: ignore[call-overload]
        assert "ledger_busy" in stats["failed"][tier]  # type: ignore[index]
        tiers: dict[str, dict[str, int]] = stats["tiers"]  # type: ignore[assignment]
        assert tiers.pop(tier) == {}
        assert all(tiers.values())
        assert stats["counters"]["lookups"] == 1 == counters_of(cache)["lookups"]  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_clear_ends_soon_and_names_what_it_could_not_clear(
    shm_root: Path, tmp_path: Path, tier: str
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, prompt(4))
        with gate_taken(dict(cache._tiers.ledgers())[tier]):
            patience = Patience(25)
            cleared = cache.clear()
            assert not patience.ended, patience.said()
        other = "disk" if tier == "host" else "host"
        assert list(cleared.failed) == [tier]
        assert cleared.chunks == {tier: 0, other: 4}
        assert cache.clear().chunks == {tier: 4, other: 0}
