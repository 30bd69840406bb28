"""Known mistakes of such caches, which must not occur again. Each test names the mistake that it
pins.
"""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.metrics import Reason
from pagoda.cache import Cache
from pagoda.keys import Namespace
from pagoda.ledger import admin
from pagoda.testing import FakeClock, Fault
from testbed.patience import Patience, wait_until
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    SPAWN,
    blank,
    cache_at,
    config_of,
    hit_of,
    keys_of,
    kv_of,
    prompt,
    put,
    run_all,
    served,
    stored,
)
from tests.cache.test_retrieve_call import Watching, faulty_cache, on_disk


def _counter(cache: Cache, name: str, tier: str = "disk") -> int:
    number = cache.stats()["tiers"][tier][name]  # type: ignore[index]
    assert isinstance(number, int)
    return number


@pytest.mark.parametrize(
    "seconds",
    [float("inf"), float("-inf"), float("nan"), "1", b"1", [1], object()],
)
def test_a_time_that_is_no_finite_number_is_refused_with_its_name(
    shm_root: Path, seconds: object
) -> None:
    tokens = prompt(4)
    with cache_at(shm_root, None) as cache:
        stored(cache, tokens)
        for name in ("deadline_seconds", "limit_seconds"):
            for call in (cache.store, cache.retrieve, cache.prefetch):
                with pytest.raises(
                    ValueError, match=f"{name} = .*a finite number of seconds"
                ):
                    call(
                        tokens,
                        *(
                            (blank(tokens).transfer,)
                            if call != cache.prefetch
                            else ()
                        ),
                        **{name: seconds},
                    )  # type: ignore[operator]
        with pytest.raises(ValueError, match="deadline_seconds = "):
            cache.lookup(tokens, deadline_seconds=seconds)  # type: ignore[arg-type]
        for finish in (cache.flush, cache.close):
            with pytest.raises(
                ValueError, match=r"timeout = .*a finite number of seconds"
            ):
                finish(seconds)  # type: ignore[arg-type]
        assert hit_of(cache, tokens).num_tokens == 64  # nothing was closed


@pytest.mark.parametrize(
    "seconds", [1e300, 1e10, 3600, np.float32(2), np.int64(2), True]
)
def test_any_finite_number_is_a_time(shm_root: Path, seconds: float) -> None:
    tokens = prompt(4)
    with cache_at(shm_root, None) as cache:
        put(cache, tokens, deadline_seconds=seconds)
        assert hit_of(cache, tokens, deadline_seconds=seconds).num_tokens == 64
        assert cache.lookup(tokens, deadline_seconds=seconds).num_tokens == 64
        assert cache.flush(seconds)


def test_the_keys_of_another_tenant_are_a_miss_and_stay(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path, write_policy="write_through") as cache:
        tokens = prompt(4)
        stored(cache, tokens, salt="alice")
        keys = cache.keys(tokens, salt="alice")
        for tiers in (None, ["disk"]):
            kv = blank(tokens)
            hit = cache.retrieve(
                None, kv.transfer, keys=keys, salt="mallory", tiers=tiers
            )
            assert hit.num_tokens == 0
            assert not kv.blocks.any()
            assert tiers is not None or hit.reason is Reason.OTHER_NAMESPACE
            assert (
                cache.lookup(
                    None, keys=keys, salt="mallory", tiers=tiers
                ).num_tokens
                == 0
            )
            assert (
                cache.lookup(tokens, salt="alice", tiers=tiers).num_tokens == 64
            )
        answer = cache.store(
            None, kv_of(prompt(4, seed=9)).transfer, keys=keys, salt="mallory"
        )
        assert answer.reason is Reason.OTHER_NAMESPACE
        assert cache.flush(100)
        assert cache.lookup(None, keys=keys, salt="mallory").num_tokens == 0
        assert hit_of(cache, tokens, salt="alice").num_tokens == 64
        shifted = [(begin + CHUNK, end + CHUNK, key) for begin, end, key in keys]
        assert (
            cache.retrieve(
                None, blank(prompt(5)).transfer, keys=shifted, salt="alice"
            ).num_tokens
            == 0
        )
        assert cache.lookup(tokens, salt="alice", tiers=["disk"]).num_tokens == 64
        assert not _counter(cache, "failed_checks")
        assert not _counter(cache, "failed_checks", "host")


@pytest.mark.slow
def test_mistake_1_staging_memory_that_leaks_until_close_hangs(
    shm_root: Path, tmp_path: Path
) -> None:
    on_disk(shm_root, tmp_path, 40)
    with cache_at(None, tmp_path) as cache:
        tokens = prompt(40)

        class Failing(Watching):
            def before(self) -> None:
                raise RuntimeError("no")

        # more calls than buffers, on every path that ends early
        for _ in range(50):
            cache.retrieve(tokens, Failing(blank(tokens).transfer))
            cache.store(prompt(2, 9), Failing(kv_of(prompt(2, 9)).transfer))
            cache.retrieve(tokens, blank(tokens).transfer, deadline_seconds=0.0)
        wait_until(lambda: cache.stats()["staging_buffers"] == 0)
        assert hit_of(cache, tokens).num_tokens == 40 * CHUNK
        patience = Patience(25)
        assert cache.close(timeout=60.0)
        assert not patience.ended, patience.said()


def test_mistake_2_locks_held_across_copies(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, prompt(4))
        goes_on = threading.Event()
        inside = threading.Barrier(3)

        class Slow(Watching):
            def before(self) -> None:
                inside.wait(60)
                assert goes_on.wait(60)

        futures = [
            cache.store_future(prompt(4, 1), Slow(kv_of(prompt(4, 1)).transfer)),
            cache.retrieve_future(prompt(4), Slow(blank(prompt(4)).transfer)),
        ]
        # one copy down and one copy up are blocked, and all other calls continue:
        inside.wait(60)
        assert hit_of(cache, prompt(4)).num_tokens == 64
        stored(cache, prompt(4, 2))
        assert cache.clear(salt="somebody else").ok
        assert cache.stats()["hit_rate"]
        goes_on.set()
        assert [future.result(60) is not None for future in futures] == [
            True,
            True,
        ]


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.ENOSPC, Fault.TORN])
def test_mistake_3_failed_saves_that_count_as_present(
    shm_root: Path, tmp_path: Path, fault: Fault
) -> None:
    cache, slab = faulty_cache(shm_root, tmp_path)
    with cache:
        slab.fail_next("write", fault, times=3)
        put(cache, prompt(3))
        assert cache.flush(100)
        assert slab.struck[fault] == 3
        assert cache.lookup(prompt(3), tiers=["disk"]).num_tokens == 0
        assert _counter(cache, "ready") == 0
        assert _counter(cache, "reserved") == 0
        assert _counter(cache, "stored_chunks") == 0
        assert _counter(cache, "drop_io_error") == 3


def test_mistake_4_half_written_chunks_that_are_found_and_rooms_that_are_lost(
    shm_root: Path, tmp_path: Path
) -> None:
    cache, slab = faulty_cache(shm_root, tmp_path)
    with cache:
        for seed in range(30):
            slab.fail_next("write", Fault.TORN, skip=seed % 3)
            put(cache, prompt(4, seed))
            assert cache.flush(100)
            slab.heal()
        gauges = admin.check(cache._tiers.ledgers()[1][1]).gauges
        assert gauges["free"] + gauges["ready"] == gauges["slots"]
    with cache_at(
        shm_root / "after", tmp_path
    ) as again:  # chunks that are found after a restart are complete
        for seed in range(30):
            served(again, prompt(4, seed))


def test_mistake_5_accounting_that_drifts_until_every_write_is_refused(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(
        shm_root, tmp_path, disk_size=32 * (LAYOUT.slot_bytes + 4096)
    ) as cache:
        for seed in range(40):
            tokens = prompt(10, seed % 7)
            # evicted and overwritten while saves are in flight
            put(cache, tokens)
            if seed % 5 == 0:
                cache.clear()
        assert cache.flush(100)
        for _, ledger in cache._tiers.ledgers():
            gauges = admin.check(ledger).gauges
            assert gauges["free"] + gauges["ready"] == gauges["slots"]
            assert not gauges["reserved"]
        stored(cache, prompt(10, 99))
        assert hit_of(cache, prompt(10, 99), tiers=["disk"]).num_tokens == 160


def test_mistake_6_queues_that_keep_the_engine_s_tensors_alive(
    shm_root: Path, tmp_path: Path
) -> None:
    cache, slab = faulty_cache(shm_root, tmp_path)
    with cache:
        slab.fail_next("write", Fault.HANG, times=2)
        kv = kv_of(prompt(8))
        alive = weakref.ref(kv.blocks)
        cache.store(prompt(8), kv.transfer)
        assert slab.hanging.wait(30)
        del kv
        gc.collect()
        assert alive() is None
        # more than the host tier holds: dropped, and not counted as stored
        for seed in range(1, 30):
            put(cache, prompt(8, seed))
        assert cache.stats()["waiting_chunks"] <= 64  # type: ignore[operator]
        slab.heal()
        assert cache.flush(100)
        assert (
            _counter(cache, "stored_chunks") == _counter(cache, "ready") < 30 * 8
        )
        drops = sum(
            _counter(cache, f"drop_{reason}", tier)
            for reason in (Reason.STALE, Reason.QUEUE_FULL)
            for tier in ("host", "disk")
        )
        assert drops >= 30 * 8 - _counter(cache, "ready") - 64


def test_mistake_7_threads_that_keep_the_cache_alive_and_a_close_that_waits(
    shm_root: Path, tmp_path: Path
) -> None:
    before = threading.active_count()
    cache = Cache(
        config_of(shm_root, tmp_path), namespace=NAMESPACE, layout=LAYOUT
    )
    stored(cache, prompt(4))
    alive = weakref.ref(cache)
    del cache
    gc.collect()
    assert alive() is None
    wait_until(lambda: threading.active_count() <= before + 1)
    with cache_at(shm_root, tmp_path) as again:
        stored(again, prompt(4))
        patience = Patience(25)
        again.close(timeout=60.0)
        assert not patience.ended, patience.said()


def test_mistake_15_a_late_write_into_a_slot_that_is_somebody_else_s(
    shm_root: Path, tmp_path: Path
) -> None:
    cache, slab = faulty_cache(shm_root, tmp_path)
    with cache:
        slab.fail_next("write", Fault.HANG)
        put(cache, prompt(1))
        assert slab.hanging.wait(30)
        cache.clear()  # its host slot is reassigned while the write is blocked
        for seed in range(2, 10):
            put(cache, prompt(8, seed))
        slab.heal()
        assert cache.flush(100)
        assert cache.lookup(prompt(1)).num_tokens == 0
        cache._tiers.host.clear()  # type: ignore[union-attr]
        for seed in (0, *range(2, 10)):
            served(cache, prompt(8, seed))  # every byte is checked


def _print_keys(shm_root: Path, path: Path) -> None:
    with cache_at(shm_root, None) as cache:
        path.write_bytes(b"".join(key for _, _, key in cache.keys(prompt(4))))


@pytest.mark.slow
def test_mistake_16_keys_that_leave_something_out_or_differ_between_processes(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, None) as cache:
        mine = b"".join(key for _, _, key in cache.keys(prompt(4)))
        run_all(
            [
                SPAWN.Process(
                    target=_print_keys, args=(shm_root, tmp_path / "keys")
                )
            ]
        )
        assert (tmp_path / "keys").read_bytes() == mine
        stored(cache, prompt(4))
        assert (
            cache.lookup(prompt(4), lora="x").num_tokens
            == cache.lookup(prompt(4), salt="x").num_tokens
            == 0
        )
    others = [
        Namespace("another-model"),
        NAMESPACE.with_(revision="x"),
        NAMESPACE.with_(weights="x"),
        NAMESPACE.with_(weights_epoch=1),
        NAMESPACE.with_(kv_dtype="x"),
        NAMESPACE.with_(world_size=2),
    ]
    for namespace in others:
        with cache_at(shm_root, None, namespace) as cache:
            assert cache.lookup(prompt(4)).num_tokens == 0, namespace


def test_mistake_17_parents_that_go_before_their_children(
    shm_root: Path, tmp_path: Path
) -> None:
    on_disk(shm_root, tmp_path, 30)
    with cache_at(shm_root, tmp_path) as cache:
        cache.prefetch(prompt(30)).result(60)
        for seed in range(1, 8):
            stored(cache, prompt(12, seed))
            for _, ledger in cache._tiers.ledgers():
                assert admin.check(ledger).unreachable == 0


@pytest.mark.parametrize("call", ["read", "write"])
def test_mistake_18_short_reads_and_writes_taken_for_whole(
    shm_root: Path, tmp_path: Path, call: str
) -> None:
    cache, slab = faulty_cache(shm_root, tmp_path)
    with cache:
        slab.fail_next(call, Fault.SHORT, times=8)
        stored(cache, prompt(8))
        cache._tiers.host.clear()  # type: ignore[union-attr]
        assert hit_of(cache, prompt(8)).by_tier == {"disk": 128}
        assert slab.struck[Fault.SHORT] == 8
    size = (tmp_path / "disk" / LAYOUT.fingerprint / "slab").stat().st_size
    # and nothing is truncated at open
    with cache_at(shm_root / "after", tmp_path) as again:
        assert (
            tmp_path / "disk" / LAYOUT.fingerprint / "slab"
        ).stat().st_size == size
        assert hit_of(again, prompt(8)).by_tier == {"disk": 128}


def test_mistake_20_loading_what_is_cheaper_to_compute_and_writing_what_is_never_read(
    shm_root: Path, tmp_path: Path
) -> None:
    # does not advance: a second later a slow tier would be tried again
    clock = FakeClock()
    with cache_at(
        shm_root, tmp_path, clock=clock, worth_it=True, write_policy="selective"
    ) as cache:
        stored(cache, prompt(4))
        assert _counter(cache, "stored_chunks") == 0  # no request for it yet
        for _ in range(3):
            served(cache, prompt(4))
        cache.observe_prefill(10**9, 0.001)
        hit, kv = served(cache, prompt(4))
        assert hit.num_tokens == 0
        assert hit.reason == Reason.NOT_WORTH_IT
        assert not kv.blocks.any()


def test_mistake_21_a_hit_that_leaves_nothing_to_compute(shm_root: Path) -> None:
    tokens = prompt(4)
    with cache_at(shm_root, None) as cache:
        stored(cache, tokens)
        whole, _ = served(cache, tokens)
        assert whole.stop_tokens == len(tokens)  # visible for the caller
        # and the request of a caller that needs a last token
        hit, _ = served(cache, tokens[:-1])
        assert hit.stop_tokens == 48 < len(tokens)


def test_mistake_22_a_clear_of_one_tier_or_of_another_tenant(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, prompt(4), salt="mine")
        stored(cache, prompt(4), salt="yours")
        assert cache.clear(salt="mine").chunks == {"host": 4, "disk": 4}
        for tier in cache.tiers:
            assert (
                cache.lookup(prompt(4), salt="mine", tiers=[tier]).num_tokens == 0
            )
            assert (
                cache.lookup(prompt(4), salt="yours", tiers=[tier]).num_tokens
                == 64
            )


@pytest.mark.slow
def test_mistake_23_metrics_that_reset_themselves(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        keys = keys_of(cache, prompt(1))
        for _ in range(10_100):
            cache.lookup(None, keys=keys)
        counters = cache.stats()["counters"]
        assert isinstance(counters, dict)
        assert counters["lookups"] == counters["miss_absent"] == 10_100
    # nor after all processes have closed it
    with cache_at(shm_root, None) as again:
        counters = again.stats()["counters"]
        assert isinstance(counters, dict)
        assert counters["lookups"] == 10_100


def test_mistake_25_a_removal_that_never_ends_on_a_shared_chain(
    shm_root: Path, tmp_path: Path
) -> None:
    head = prompt(6)
    with cache_at(shm_root, tmp_path) as cache:
        for seed in range(5):
            tokens = np.concatenate([head, prompt(4, seed + 1)])
            stored(cache, tokens)
        keys = keys_of(cache, head)
        patience = Patience(60)
        for tier in cache._tiers.all:
            assert tier.remove(keys[2])
            assert not tier.remove(keys[2])
        assert cache.lookup(head).num_tokens == 32
        stored(cache, head)
        assert (
            cache.lookup(np.concatenate([head, prompt(4, 3)])).num_tokens == 160
        )
        assert cache.clear().chunks == {"host": 26, "disk": 26}
        assert not patience.ended, patience.said()
