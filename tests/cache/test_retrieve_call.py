"""Loads of runs: windows, staging, busy chunks, holes, eviction during the load."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.clock import Clock
from pagoda.base.metrics import Reason
from pagoda.cache import Cache
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger, Reserved, StoreSpec, admin
from pagoda.testing import FakeClock, Fault, FaultySlab
from pagoda.tiers import DiskTier, HostTier
from pagoda.transfer import Transfer
from testbed.patience import Patience, wait_until
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    PATIENT_SECONDS,
    Bytes,
    blank,
    cache_at,
    config_of,
    keys_of,
    kv_of,
    prompt,
    put,
    served,
    stored,
)

SLOT = LAYOUT.slot_bytes


class Watching:
    """A transfer with a hook before or after each copy."""

    def __init__(self, kv: Transfer) -> None:
        self.layout: KVLayout = kv.layout
        self.kv = kv
        self.calls: list[int] = []

    def before(self) -> None:
        """Do nothing before a copy."""

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        self.before()
        self.calls.append(len(starts))
        self.kv.to_slots(starts, slots)

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        self.before()
        self.calls.append(len(starts))
        self.kv.from_slots(starts, slots)


def faulty_cache(
    shm_root: Path,
    tmp_path: Path,
    *,
    disk_clock: Clock | None = None,
    **options: object,
) -> tuple[Cache, FaultySlab]:
    """Open a cache whose disk fails on demand; `disk_clock` determines how long a failing one is
    skipped.
    """
    ledger = Ledger.open(
        StoreSpec(tmp_path / "disk", LAYOUT.fingerprint, "file", 256, SLOT + 4096)
    )
    faulty = FaultySlab(ledger.slab_path, ledger.slots, SLOT + 4096)
    disk = DiskTier(
        LAYOUT, ledger, faulty, deadline_seconds=PATIENT_SECONDS, clock=disk_clock
    )
    config = config_of(shm_root, None, **options)
    host = HostTier.open(
        LAYOUT,
        Path(config.host_path),
        config.host_bytes,
        deadline_seconds=PATIENT_SECONDS,
    )
    return Cache(
        config, namespace=NAMESPACE, layout=LAYOUT, tiers=[host, disk]
    ), faulty


def on_disk(shm_root: Path, tmp_path: Path, chunks: int, seed: int = 0) -> None:
    """Leave a prompt on the disk, and nowhere else."""
    with cache_at(
        shm_root / "elsewhere", tmp_path, host_size=512 * SLOT
    ) as cache:
        stored(cache, prompt(chunks, seed))


def test_a_run_longer_than_the_host_tier_passes_through_it(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(200)
    on_disk(shm_root, tmp_path, 200)
    with cache_at(shm_root, tmp_path, host_size=16 * SLOT) as cache:
        hit, _ = served(cache, tokens)
        assert hit.num_tokens == 200 * CHUNK
        assert hit.by_tier == {"disk": 200 * CHUNK}
        again, _ = served(cache, tokens)
        assert again.num_tokens == 200 * CHUNK
        assert again.by_tier["host"] > 0
        gauges = admin.gauges(cache._tiers.host.ledger)  # type: ignore[union-attr]
        assert gauges["reserved"] == 0
        assert cache.stats()["staging_buffers"] == 0


def test_without_a_host_tier_chunks_pass_through_a_few_buffers(
    tmp_path: Path,
) -> None:
    tokens = prompt(100)
    with cache_at(None, tmp_path) as cache:
        assert cache.tiers == ("disk",)
        assert put(cache, tokens).num_chunks == 100
        assert cache.flush(100)
        hit, _ = served(cache, tokens)
        assert hit.by_tier == {"disk": 1600}
        assert cache.stats()["staging_buffers"] == 0
        assert put(cache, tokens) == (0, 0, 100, 0, None)


def test_what_is_queued_is_read_from_the_queue(
    shm_root: Path, tmp_path: Path
) -> None:
    cache, slab = faulty_cache(shm_root, tmp_path)
    tokens = prompt(6)
    slab.fail_next("write", Fault.HANG)
    with cache:
        put(cache, tokens)
        assert slab.hanging.wait(30)
        assert not cache.flush(0.05)
        assert served(cache, tokens)[0].by_tier == {"host": 96}
        hit, _ = served(cache, tokens, tiers=["disk"])
        assert hit.by_tier == {"disk": 96}  # still in the queue, not in the file
        slab.heal()
        assert cache.flush(100)


def test_a_slot_evicted_during_the_copy_is_a_miss(shm_root: Path) -> None:
    tokens = prompt(8)
    with cache_at(shm_root, None) as cache:
        stored(cache, tokens)
        ledger = cache._tiers.host.ledger  # type: ignore[union-attr]
        keys = keys_of(cache, tokens)

        class Evicting(Watching):
            def before(self) -> None:
                admin.remove(ledger, keys[5:])
                other = prompt(50, 9)
                # overwrites the slots while they are copied
                put(cache, other)

        kv = blank(tokens)
        hit = cache.retrieve(tokens, Evicting(kv.transfer))
        assert hit.num_tokens == 5 * CHUNK
        assert hit.reason == Reason.REMOVED
        assert kv.same(kv_of(tokens), 0, 5)


def test_chunks_cleared_while_they_come_up_from_the_disk_are_a_miss(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(8)
    on_disk(shm_root, tmp_path, 8)
    with cache_at(shm_root, tmp_path) as cache:

        class Clearing(Watching):
            def before(self) -> None:
                if not self.calls:
                    cache.clear()

        hit = cache.retrieve(tokens, Clearing(blank(tokens).transfer))
        assert hit.num_tokens < 8 * CHUNK
        assert hit.reason is Reason.CLEARED
        assert cache.lookup(tokens).num_tokens == 0


def test_large_runs_are_copied_many_chunks_a_call(shm_root: Path) -> None:
    tokens = prompt(40)
    with cache_at(shm_root, None) as cache:
        down = Watching(kv_of(tokens).transfer)
        cache.store(tokens, down)
        assert down.calls == [8, 8, 8, 8, 8]  # an eighth of the slots a window
        up = Watching(blank(tokens).transfer)
        cache.retrieve(tokens, up)
        assert up.calls == [40]


def test_a_chunk_that_is_being_stored_is_waited_for(shm_root: Path) -> None:
    tokens = prompt(4)
    with cache_at(shm_root, None) as cache:
        began = threading.Event()
        goes_on = threading.Event()

        class Slow(Watching):
            def before(self) -> None:
                began.set()
                assert goes_on.wait(30)

        future = cache.store_future(tokens, Slow(kv_of(tokens).transfer))
        assert began.wait(30)
        waiting = cache.retrieve_future(tokens, blank(tokens).transfer)
        time.sleep(0.1)
        assert not waiting.done()
        goes_on.set()
        assert future.result(60).num_chunks == 4
        assert waiting.result(60).num_tokens == 64


def test_a_chunk_that_stays_busy_is_a_miss_after_the_deadline(
    shm_root: Path,
) -> None:
    tokens = prompt(4)
    with cache_at(shm_root, None) as cache:
        ledger = cache._tiers.host.ledger  # type: ignore[union-attr]
        keys = keys_of(cache, tokens)
        reserved = ledger.reserve(
            keys, namespace=cache.namespace.root, tokens=CHUNK
        )
        patience = Patience(8)
        hit, _ = served(cache, tokens, deadline_seconds=0.2)
        assert hit.num_tokens == 0
        assert hit.reason == Reason.BUSY
        assert patience.waited >= 0.15
        assert not patience.ended, patience.said()
        # another call does it
        assert put(cache, tokens) == (0, 0, 4, 0, None)
        ledger.abort([item for item in reserved if isinstance(item, Reserved)])
        assert put(cache, tokens).num_chunks == 4


@pytest.mark.slow
def test_a_chunk_that_stays_busy_is_read_past_its_owner(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(4)
    on_disk(shm_root, tmp_path, 4)
    with cache_at(shm_root, tmp_path) as cache:
        ledger = cache._tiers.host.ledger  # type: ignore[union-attr]
        keys = keys_of(cache, tokens)
        ledger.reserve(
            keys[1:2],
            namespace=cache.namespace.root,
            tokens=CHUNK,
            start=1,
            parent=keys[0],
        )
        hit, _ = served(cache, tokens, deadline_seconds=4.0)
        assert hit.num_tokens == 64
        assert hit.by_tier == {"disk": 64}
        assert cache.stats()["staging_buffers"] == 0


@pytest.mark.slow
def test_a_disk_that_hangs_costs_one_deadline_and_leaves_nothing_behind(
    shm_root: Path, tmp_path: Path
) -> None:
    on_disk(shm_root, tmp_path, 8)
    cache, slab = faulty_cache(shm_root, tmp_path)
    tokens = prompt(8)
    with cache:
        slab.fail_next("read", Fault.HANG, times=8)
        patience = Patience(20)
        hit, _ = served(cache, tokens, deadline_seconds=1.5)
        assert hit.num_tokens == 0
        assert hit.reason == Reason.DEADLINE
        assert "disk" in hit.detail
        assert not patience.ended, patience.said()
        ledger = cache._tiers.host.ledger  # type: ignore[union-attr]
        # a slot is not released while I/O may still write into it
        assert admin.gauges(ledger)["reserved"] > 0
        slab.heal()
        wait_until(lambda: admin.gauges(ledger)["reserved"] == 0)
        hit, _ = served(cache, tokens)
        assert hit.num_tokens == 128


@pytest.mark.parametrize(
    "fault", [Fault.BIT_FLIP, Fault.EIO, Fault.TORN, Fault.LOST]
)
def test_a_chunk_that_cannot_be_read_ends_the_run_and_can_be_stored_again(
    shm_root: Path, tmp_path: Path, fault: Fault
) -> None:
    on_disk(shm_root, tmp_path, 8)
    cache, slab = faulty_cache(shm_root, tmp_path)
    tokens = prompt(8)
    with cache:
        slab.fail_next("read", fault, skip=3)
        hit, _ = served(cache, tokens)
        assert hit.num_tokens < 128
        assert hit.reason in (Reason.FAILED_CHECK, Reason.IO_ERROR)
        slab.heal()
        stored(cache, tokens)
        assert served(cache, tokens)[0].num_tokens == 128
        cache._tiers.host.clear()  # type: ignore[union-attr]
        assert served(cache, tokens)[0].by_tier == {"disk": 128}


def test_bytes_that_rotted_on_the_disk_are_a_miss(
    shm_root: Path, tmp_path: Path
) -> None:
    on_disk(shm_root, tmp_path, 6)
    tokens = prompt(6)
    with cache_at(shm_root, tmp_path) as cache:
        disk = cache._tiers.lower[0]
        assert isinstance(disk, DiskTier)
        # slot 2 begins with a header page
        with open(disk.ledger.slab_path, "r+b") as file:
            file.seek(2 * (SLOT + 4096) + 4096 + 77)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        hit, _ = served(cache, tokens)
        assert hit.num_tokens == 32
        assert hit.reason == Reason.FAILED_CHECK
        assert cache.stats()["misses"] == {"failed_check": 1}
        assert cache.stats()["tiers"]["disk"]["failed_checks"] == 1  # type: ignore[index]
        assert disk.ledger.requests.newest() == []  # the host tier counts
        (remembered,) = cache._tiers.host.ledger.requests.newest()  # type: ignore[union-attr]
        assert remembered.hit_tokens["disk"] == 32
        assert remembered.reason == "failed_check"
        assert cache.lookup(tokens).num_tokens == 32
        stored(cache, tokens)
        cache._tiers.host.clear()  # type: ignore[union-attr]
        assert served(cache, tokens)[0].by_tier == {"disk": 96}


def test_an_exception_of_a_tier_is_a_miss(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(3)
    with cache_at(shm_root, None) as cache:
        ledger = cache._tiers.host.ledger  # type: ignore[union-attr]

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("torn from the wall")

        monkeypatch.setattr(ledger, "match_prefix", broken)
        hit = cache.retrieve(tokens, blank(tokens).transfer)
        assert hit.num_tokens == 0
        assert hit.reason == Reason.IO_ERROR
        assert "torn" in hit.detail
        assert put(cache, tokens).reason is Reason.IO_ERROR
        monkeypatch.undo()
        assert cache.stats()["misses"] == {"io_error": 2}


def test_reads_are_in_the_air_while_chunks_are_copied_out(
    shm_root: Path, tmp_path: Path
) -> None:
    on_disk(shm_root, tmp_path, 24)
    cache, slab = faulty_cache(shm_root, tmp_path)
    tokens = prompt(24)
    reads_at_first_copy: list[int] = []

    class Looking(Watching):
        def before(self) -> None:
            if not reads_at_first_copy:
                # they continue without this thread
                wait_until(lambda: slab.calls["read"] >= 4)
                reads_at_first_copy.append(slab.calls["read"])

    with cache:
        hit = cache.retrieve(tokens, Looking(blank(tokens).transfer))
        assert hit.num_tokens == 24 * CHUNK
        assert reads_at_first_copy[0] >= 4


def test_the_rest_of_a_hit_is_undefined_but_never_claimed(
    shm_root: Path, tmp_path: Path
) -> None:
    on_disk(shm_root, tmp_path, 8)
    cache, slab = faulty_cache(shm_root, tmp_path)
    with cache:
        slab.fail_next("read", Fault.EIO, skip=2, times=1)
        hit, _ = served(cache, prompt(8))
        assert int(np.count_nonzero(hit.mask)) == hit.num_tokens < 128


def test_chunks_that_arrive_after_their_call_has_failed_count_with_their_bytes(
    shm_root: Path, tmp_path: Path
) -> None:
    on_disk(shm_root, tmp_path, 24)
    with cache_at(shm_root, tmp_path) as cache:

        class Failing(Watching):
            def before(self) -> None:
                raise RuntimeError("the engine's memory is gone")

        assert (
            cache.retrieve(
                prompt(24), Failing(blank(prompt(24)).transfer)
            ).num_tokens
            == 0
        )
        wait_until(lambda: cache.stats()["tiers"]["host"]["reserved"] == 0)  # type: ignore[index]
        host = cache.stats()["tiers"]["host"]  # type: ignore[index]
        assert host["stored_chunks"] == host["ready"] > 0
        assert host["stored_bytes"] == host["stored_chunks"] * LAYOUT.chunk_bytes


@pytest.mark.parametrize("host_slots", [0, 16, 512])
def test_on_the_disk_too_the_tail_of_a_run_stays_older_than_its_head(
    shm_root: Path, tmp_path: Path, host_slots: int
) -> None:
    on_disk(shm_root, tmp_path, 100)
    tokens = prompt(100)
    host = shm_root if host_slots else None
    with cache_at(host, tmp_path, host_size=host_slots * SLOT) as cache:
        assert served(cache, tokens)[0].num_tokens == 100 * CHUNK
        ledger = cache._tiers.lower[0].ledger  # type: ignore[attr-defined]
        slots = ledger.match_prefix(keys_of(cache, tokens), touch=False).slots
        uses = ledger.columns.last_use[slots]
        assert len(uses) == 100
        assert (np.diff(uses) < 0).all()


def test_a_long_store_is_not_cut_by_the_patience_of_one_wait(
    shm_root: Path,
) -> None:
    tokens = prompt(40)
    clock = FakeClock()
    config = config_of(shm_root, None, deadline_seconds=100.0)
    with Cache(config, namespace=NAMESPACE, layout=LAYOUT, clock=clock) as cache:

        class Slow(Watching):
            def before(self) -> None:
                clock.advance(40.0)

        assert cache.store(tokens, Slow(kv_of(tokens).transfer)).num_chunks == 40
        shorter = cache.store(
            prompt(40, 1),
            Slow(kv_of(prompt(40, 1)).transfer),
            deadline_seconds=100.0,
        )
        assert shorter.num_chunks == 24
        assert shorter.reason is Reason.DEADLINE
