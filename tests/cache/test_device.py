"""KV on a GPU: the slots are registered before the first copy, and stay reserved for a grace period
after a process.

The tests run processes that find a stand-in for NVIDIA's driver library; each process has separate
state.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from pagoda.base.clock import Clock
from pagoda.base.metrics import Reason
from pagoda.cache import Cache
from pagoda.ledger import admin
from pagoda.ledger.members import DEVICE_GRACE_NS
from pagoda.slab.cuda_driver import LIBRARY
from pagoda.slab.memory import MemorySlab
from pagoda.slab.pinned import device_address
from pagoda.tiers import HostTier
from pagoda.transfer import Transfer
from testbed.patience import wait_until
from tests.cache.kit import (
    LAYOUT,
    NAMESPACE,
    SPAWN,
    blank,
    cache_at,
    config_of,
    hit_of,
    kv_of,
    prompt,
    reserved_for,
    run_all,
    slots_of,
    stored,
)
from tests.cache.test_retrieve_call import Watching
from tests.children import in_child
from tests.slab.libcuda import OUT_OF_MEMORY, Stub, called


class OnDevice(Watching):
    """A transfer of KV on a GPU; `each` sees the state before each copy."""

    def __init__(
        self, kv: Transfer, each: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(kv)
        self.device_index: int | None = 1
        self.before = each  # type: ignore[method-assign]


class Ahead(Clock):
    """The machine's clock plus an offset."""

    def __init__(self) -> None:
        super().__init__()
        self.added_ns = 0

    def monotonic_ns(self) -> int:
        return super().monotonic_ns() + self.added_ns


def slab_of(cache: Cache) -> MemorySlab:
    return host_of(cache).slab


def host_of(cache: Cache) -> HostTier:
    host = cache._tiers.host
    assert host is not None
    return host


def pinned_bytes(cache: Cache) -> object:
    return cache.stats()["pinned_bytes"]


def wait_pinned(cache: Cache) -> None:
    wait_until(lambda: pinned_bytes(cache) == slab_of(cache).nbytes)


@pytest.fixture
def with_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let processes that are started from now on find the driver."""
    path = Stub(tmp_path).path
    monkeypatch.setenv("LD_LIBRARY_PATH", str(path.parent))
    return path


def _stores_and_loads(shm_root: Path) -> None:
    library = called(LIBRARY)
    seen = list[bool]()
    with cache_at(shm_root, None) as cache:
        slab = slab_of(cache)

        def begun() -> None:
            seen.append(slab._pinned is not None)

        stored(cache, prompt(2))
        # a CPU's KV needs no driver
        assert pinned_bytes(cache) == 0
        assert slab._pinned is None
        tokens = prompt(4, 1)
        assert (
            cache.store(
                tokens, OnDevice(kv_of(tokens).transfer, begun)
            ).num_chunks
            == 4
        )
        kv = blank(tokens)
        assert cache.retrieve(
            tokens, OnDevice(kv.transfer, begun)
        ).num_tokens == len(tokens)
        assert kv.same(kv_of(tokens))
        assert seen == [True, True]
        wait_pinned(cache)
        assert library.stub_registered() == slab.nbytes
        assert library.stub_retained() == 1
        address = slab.view(5).ctypes.data
        assert device_address(address, slab.slot_bytes) == address
        for _ in range(3):
            assert (
                cache.store(
                    prompt(1, 2), OnDevice(kv_of(prompt(1, 2)).transfer)
                ).refused
                == 0
            )
        assert library.stub_registrations() == 1
        gone = slots_of(cache)
    assert library.stub_registered() == 0
    assert library.stub_fault() == b""
    gone.use_device(0)  # a closed cache reports nothing
    assert library.stub_registrations() == 1


@pytest.mark.slow
def test_kv_on_a_gpu_registers_the_slots_before_its_first_copy(
    shm_root: Path, with_driver: Path
) -> None:
    run_all([SPAWN.Process(target=_stores_and_loads, args=(shm_root,))])


def _loads(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        kv = blank(prompt(4))
        begun = list[bool]()
        there = OnDevice(
            kv.transfer, lambda: begun.append(slab_of(cache)._pinned is not None)
        )
        assert cache.retrieve(prompt(4), there).num_tokens == len(prompt(4))
        assert kv.same(kv_of(prompt(4)))
        assert begun == [True]


@pytest.mark.slow
def test_a_load_alone_registers_them_too(
    shm_root: Path, with_driver: Path
) -> None:
    with cache_at(shm_root, None) as cache:
        stored(cache, prompt(4))
        run_all([SPAWN.Process(target=_loads, args=(shm_root,))])


def _copies_by_itself(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        slots_of(cache).use_device(0)
        wait_pinned(cache)


@pytest.mark.slow
def test_who_copies_by_itself_says_so(shm_root: Path, with_driver: Path) -> None:
    run_all([SPAWN.Process(target=_copies_by_itself, args=(shm_root,))])


def _is_refused(shm_root: Path) -> None:
    called(LIBRARY).stub_refuse(1, OUT_OF_MEMORY)
    with cache_at(shm_root, None) as cache:
        for seed in range(3):
            tokens = prompt(4, seed)
            assert (
                cache.store(tokens, OnDevice(kv_of(tokens).transfer)).num_chunks
                == 4
            )
            kv = blank(tokens)
            assert cache.retrieve(
                tokens, OnDevice(kv.transfer)
            ).num_tokens == len(tokens)
            assert kv.same(kv_of(tokens))
        held = slab_of(cache)._pinned
        assert held is not None
        assert held.wait(60)
        assert "OUT_OF_MEMORY" in held.trouble
        assert pinned_bytes(cache) == 0


@pytest.mark.slow
def test_refused_registration_costs_no_chunk(
    shm_root: Path, with_driver: Path
) -> None:
    run_all([SPAWN.Process(target=_is_refused, args=(shm_root,))])


def _has_no_driver(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        tokens = prompt(4)
        assert (
            cache.store(tokens, OnDevice(kv_of(tokens).transfer)).num_chunks == 4
        )
        assert hit_of(cache, tokens).num_tokens == len(tokens)
        assert pinned_bytes(cache) == 0


@pytest.mark.slow
def test_without_a_driver_all_goes_on(shm_root: Path, with_driver: Path) -> None:
    # this process has it mapped: overwriting it would cause a bus error
    with_driver.unlink()
    with_driver.write_text("not a library")
    run_all([SPAWN.Process(target=_has_no_driver, args=(shm_root,))])


def _forks(shm_root: Path) -> None:
    library = called(LIBRARY)
    with cache_at(shm_root, None) as cache:
        slots_of(cache).use_device(0)
        wait_pinned(cache)

        def work() -> None:
            assert pinned_bytes(cache) == 0
            tokens = prompt(3)
            assert (
                cache.store(tokens, OnDevice(kv_of(tokens).transfer)).num_chunks
                == 3
            )
            assert hit_of(cache, tokens).num_tokens == len(tokens)
            cache.close()
            assert library.stub_fault() == b""

        in_child(work)
        assert pinned_bytes(cache) == slab_of(cache).nbytes
        assert hit_of(cache, prompt(3)).num_tokens == len(prompt(3))
    assert library.stub_registered() == 0
    assert library.stub_fault() == b""


@pytest.mark.slow
def test_a_forked_child_calls_no_driver(
    shm_root: Path, with_driver: Path
) -> None:
    run_all([SPAWN.Process(target=_forks, args=(shm_root,))])


def _begins_to_write(shm_root: Path, uses_device: bool, began: Event) -> None:
    with cache_at(shm_root, None) as cache:
        if uses_device:
            slots_of(cache).use_device(0)
            wait_pinned(cache)
        reserved_for(cache, prompt(4))
        began.set()
        time.sleep(100)


@pytest.mark.slow
@pytest.mark.parametrize("uses_device", [True, False])
def test_slots_that_a_gpu_may_still_write_outlive_their_process(
    shm_root: Path, with_driver: Path, uses_device: bool
) -> None:
    clock = Ahead()
    with Cache(
        config_of(shm_root, None), namespace=NAMESPACE, layout=LAYOUT, clock=clock
    ) as cache:
        began = SPAWN.Event()
        ledger = host_of(cache).ledger
        process = SPAWN.Process(
            target=_begins_to_write,
            args=(shm_root, uses_device, began),
            daemon=True,
        )
        process.start()
        assert began.wait(60)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join(60)
        assert hit_of(cache, prompt(4)).reason is Reason.ABSENT
        admin.reap(ledger)
        assert admin.gauges(ledger)["reserved"] == (4 if uses_device else 0)
        stored(cache, prompt(4))  # its keys can be reserved at once
        assert admin.gauges(ledger)["reserved"] == (4 if uses_device else 0)
        clock.added_ns = DEVICE_GRACE_NS + 10**8
        admin.reap(ledger)
        assert admin.gauges(ledger)["reserved"] == 0
        assert hit_of(cache, prompt(4)).num_tokens == len(prompt(4))
        admin.check(ledger)
