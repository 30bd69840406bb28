"""Every reason of a miss, provoked in real tiers; retrieve, lookup and explain report the same
reason.
"""

from __future__ import annotations

import re
import signal
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from pagoda.base.metrics import Reason
from pagoda.cache import Cache, Hit, miss_explainer
from pagoda.keys import Namespace
from pagoda.ledger import Ledger
from pagoda.testing import FakeClock, Fault
from testbed.patience import Patience
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    SPAWN,
    cache_at,
    hit_of,
    keys_of,
    kv_of,
    prompt,
    put,
    served,
    stored,
)
from tests.cache.test_retrieve_call import faulty_cache, on_disk


@pytest.fixture(autouse=True)
def _time_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's call compares namespaces for only a millisecond, which may end before the first
    comparison.
    """
    monkeypatch.setattr(miss_explainer, "_BUDGET_NS", 60 * 10**9)
    monkeypatch.setattr(miss_explainer, "_LIST_SECONDS", 60.0)


def _explained(
    cache: Cache, chunks: float, reason: Reason, detail: str = "", seed: int = 0
) -> Hit:
    """Check that all three calls have the same reason and explain counts nothing. `detail` is a
    pattern.
    """
    tokens = prompt(chunks, seed)
    before = cache.stats()["counters"]
    explained = cache.explain(tokens)
    assert cache.stats()["counters"] == before
    for hit in (explained, cache.lookup(tokens), hit_of(cache, tokens)):
        assert hit.reason is reason, hit
        assert re.search(detail, hit.detail), hit.detail
    counters = cache.stats()["counters"]
    assert isinstance(counters, dict)
    assert isinstance(before, dict)
    assert counters[f"miss_{reason}"] == before[f"miss_{reason}"] + 2
    return explained


def test_what_was_never_stored_is_absent(shm_root: Path, tmp_path: Path) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        assert _explained(cache, 4, Reason.ABSENT, "never stored").num_tokens == 0
        stored(cache, prompt(4))
        hit = cache.explain(prompt(4))
        assert hit.num_tokens == 64
        assert hit.reason is None


def test_evicted_says_when(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        for seed in range(8):
            stored(cache, prompt(16, seed))
        assert (
            _explained(
                cache, 16, Reason.EVICTED, r"evicted \d+ s ago \(host\)"
            ).num_tokens
            == 0
        )


def test_what_the_policy_kept_out_is_absent_and_the_detail_says_why(
    shm_root: Path,
) -> None:
    with cache_at(shm_root, None) as cache:
        ledger, keys = (
            cache._tiers.host.ledger,
            keys_of(cache, prompt(4)),
        )  # type: ignore[union-attr]
        ledger.refuse(keys, start=0, stamp=ledger.stamp())
        _explained(cache, 4, Reason.ABSENT, r"not admitted \d+ s ago \(host\)")


def test_what_was_cleared_is_cleared(shm_root: Path, tmp_path: Path) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, prompt(4))
        cache.clear()
        _explained(cache, 4, Reason.CLEARED, r"cleared \d+ s ago")


def test_what_was_removed_is_removed(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        stored(cache, prompt(4))
        cache._tiers.host.remove(cache.keys(prompt(4))[2][2])  # type: ignore[union-attr]
        assert _explained(cache, 4, Reason.REMOVED).num_tokens == 32


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (NAMESPACE.with_(lora="an-adapter"), "lora"),
        (NAMESPACE.with_(salt="a-tenant"), "salt"),
        (NAMESPACE.with_(kv_dtype="float16"), "kv_dtype"),
        (NAMESPACE.with_(revision="2", weights="abc"), "revision, weights"),
        (Namespace("another-model"), "model"),
    ],
)
def test_other_namespace_names_the_field(
    shm_root: Path, other: Namespace, field: str
) -> None:
    with cache_at(shm_root, None, other) as cache:
        stored(cache, prompt(4))
    with cache_at(shm_root, None) as cache:
        hit = _explained(cache, 4, Reason.OTHER_NAMESPACE, f"another {field}")
        assert "a-tenant" not in hit.detail


def test_another_namespace_is_only_named_for_a_prompt_that_is_there(
    shm_root: Path,
) -> None:
    with cache_at(shm_root, None, NAMESPACE.with_(lora="x")) as cache:
        stored(cache, prompt(4))
    with cache_at(shm_root, None) as cache:
        _explained(cache, 4, Reason.ABSENT, seed=1)


@pytest.mark.slow
def test_what_is_being_stored_is_busy(shm_root: Path) -> None:
    with cache_at(shm_root, None, deadline_seconds=1.5) as cache:
        stored(cache, prompt(2))
        tokens = prompt(4)
        keys = keys_of(cache, tokens)
        ledger = cache._tiers.host.ledger  # type: ignore[union-attr]
        ledger.reserve(
            keys[2:],
            namespace=cache._weights.scope()[0].root,
            start=2,
            parent=keys[1],
        )
        assert cache.explain(tokens).reason is Reason.BUSY
        assert _explained(cache, 4, Reason.BUSY).num_tokens == 32


def test_a_prompt_shorter_than_a_chunk_is_a_short_prompt(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        stored(cache, prompt(1))
        _explained(cache, 0.9, Reason.SHORT_PROMPT, "14 tokens, a chunk has 16")
        assert put(cache, prompt(0.9)) == (
            0,
            0,
            0,
            0,
            None,
        )


def test_what_only_a_tier_that_was_not_asked_has_is_tier_skipped(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root / "before", tmp_path) as cache:
        stored(cache, prompt(3))
    with cache_at(shm_root / "after", tmp_path) as cache:
        hit = cache.lookup(prompt(3), tiers=["host"])
        assert hit.reason is Reason.TIER_SKIPPED
        assert "disk has the chunk" in hit.detail
        assert cache.lookup(prompt(3, 1), tiers=["host"]).reason is Reason.ABSENT


@pytest.mark.slow
def test_a_disk_that_keeps_failing_is_left_out_and_says_so(
    shm_root: Path, tmp_path: Path
) -> None:
    for seed in range(6):
        on_disk(shm_root, tmp_path, 3, seed)
    cache, slab = faulty_cache(shm_root, tmp_path, disk_clock=FakeClock())
    with cache:
        slab.fail_next("read", Fault.EIO, times=100)
        reasons = [hit_of(cache, prompt(3, seed)).reason for seed in range(6)]
        assert reasons[0] is Reason.IO_ERROR
        assert reasons[-1] is Reason.TIER_SKIPPED
        assert "failed repeatedly" in cache.explain(prompt(3, 5)).detail
        stored(cache, prompt(3, 9), tiers=["host"])  # and the host tier continues
        assert hit_of(cache, prompt(3, 9)).num_tokens == 48


def test_what_loads_too_slowly_is_a_missed_deadline(
    shm_root: Path, tmp_path: Path
) -> None:
    on_disk(shm_root, tmp_path, 3)
    cache, slab = faulty_cache(shm_root, tmp_path)
    with cache:
        # loaded chunks are served even if they are late
        slab.fail_next("read", Fault.HANG, times=3)
        hit, _ = served(cache, prompt(3), deadline_seconds=0.0)
        assert hit.num_tokens == 0
        assert hit.reason in (Reason.DEADLINE, Reason.LEDGER_BUSY)
        slab.heal()


def _stand_in_the_gate(directory: Path, inside: Event) -> None:
    ledger = Ledger.attach(directory)
    ledger.session.gate.run(
        lambda: (inside.set(), time.sleep(100)), 60, exclusive=True
    )


@pytest.mark.slow
def test_a_ledger_that_another_process_locks_is_ledger_busy(
    shm_root: Path,
) -> None:
    with cache_at(shm_root, None) as cache:
        stored(cache, prompt(3))
        ledger = cache._tiers.host.ledger  # type: ignore[union-attr]
        inside = SPAWN.Event()
        process = SPAWN.Process(
            target=_stand_in_the_gate,
            args=(ledger.directory, inside),
            daemon=True,
        )
        process.start()
        assert inside.wait(60)
        assert process.pid is not None
        patience = Patience(25)
        hit, _ = served(cache, prompt(3), deadline_seconds=0.2)
        assert hit.num_tokens == 0
        assert hit.reason == Reason.LEDGER_BUSY
        assert (
            cache.lookup(prompt(3), deadline_seconds=0.2).reason
            is Reason.LEDGER_BUSY
        )
        other = kv_of(prompt(3, 1)).transfer
        assert (
            cache.store(prompt(3, 1), other, deadline_seconds=0.2).reason
            is Reason.LEDGER_BUSY
        )
        assert not patience.ended, patience.said()
        process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert hit_of(cache, prompt(3)).num_tokens == 48
        counters = cache.stats()["counters"]
        assert isinstance(counters, dict)
        assert counters["miss_ledger_busy"] >= 2


def test_the_reason_is_about_the_first_chunk_not_served(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        stored(cache, prompt(6)[: 4 * CHUNK])
        hit = _explained(cache, 6, Reason.ABSENT)
        assert hit.num_tokens == 64


def test_explain_touches_nothing(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        stored(cache, prompt(4))
        ledger = cache._tiers.host.ledger  # type: ignore[union-attr]
        before = (
            ledger.columns.last_use.copy(),
            ledger.columns.hits.copy(),
            ledger.columns.lease_until.copy(),
        )
        cache.explain(prompt(4))
        after = (
            ledger.columns.last_use,
            ledger.columns.hits,
            ledger.columns.lease_until,
        )
        for a, b in zip(before, after, strict=True):
            assert (a == b).all()


def test_keys_alone_have_reasons_too(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        keys = cache.keys(prompt(3))
        assert cache.explain(None, keys=keys).reason is Reason.ABSENT
        assert cache.layout is LAYOUT
