"""One host tier and one disk for all: what one engine demotes, another promotes, in this process or
in another.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from pagoda.blocks import PrefixMatch
from pagoda.ledger import admin
from testbed.patience import wait_until
from tests.blocks.kit import (
    Engine,
    cache_at,
    ledger_of,
    prompt,
    retrieved,
    stored,
    truth,
    workers_stopped,
)
from tests.cache.kit import SPAWN, run_all

TOKENS = prompt(24)


def _demotes(host: Path, disk: Path) -> None:
    """An engine that runs a prompt, demotes it, and ends."""
    with cache_at(host, disk) as cache:
        engine = Engine(8, cache, write_back=False)
        engine.leave("a", TOKENS)
        assert engine.demoted(6) == 8
        assert cache.flush(60)


def _promotes(host: Path, disk: Path) -> None:
    """Another that computes two tokens of it."""
    with cache_at(host, disk) as cache:
        engine = Engine(16, cache)
        engine.start("keep", prompt(8, 5))  # so that the ids are others
        admitted = engine.start("b", [*TOKENS, 1, 2])
        assert admitted.by_tier == {"host": 24}
        assert admitted.table[0] != 0
        engine.finish("b")


def _demotes_for_ever(host: Path, said: str) -> None:
    """An engine that dies between its copies and their end."""
    with cache_at(host) as cache:
        engine = Engine(8, cache, write_back=False)
        engine.leave("a", TOKENS)
        engine.demoted(3)
        plan = engine.manager.demote(3)
        assert plan is not None
        engine.copy(plan)
        engine.add("b", TOKENS)
        Path(said).write_text("now")
        signal.pause()


@pytest.mark.slow
def test_what_one_process_demotes_another_promotes(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:  # the store outlives both
        for work in (_demotes, _promotes):
            run_all([SPAWN.Process(target=work, args=(shm_root, tmp_path))])
        engine = Engine(8, cache)
        assert engine.start("c", [*TOKENS, 7]).by_tier == {"host": 24}


@pytest.mark.slow
def test_two_processes_that_demote_the_same_at_once(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        run_all(
            [
                SPAWN.Process(target=_demotes, args=(shm_root, tmp_path))
                for _ in range(2)
            ]
        )
        assert retrieved(cache, TOKENS) == (24, True)
        assert admin.check(ledger_of(cache)).gauges["ready"] == 6


@pytest.mark.slow
def test_an_engine_that_dies_in_its_copies_leaves_nothing_half_written(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root) as cache:
        said = tmp_path / "said"
        process = SPAWN.Process(
            target=_demotes_for_ever, args=(shm_root, str(said))
        )
        process.start()
        wait_until(said.exists)
        engine = Engine(8, cache, write_back=False)
        engine.add("b", [*TOKENS, 1])
        # the head is on its way still
        assert engine.manager.match("b") == PrefixMatch(0, 0, 0)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        assert engine.start("c", [*TOKENS, 2]).computed_tokens == 0
        engine.finish("c")
        assert engine.demoted(8) == 8
        assert retrieved(cache, TOKENS) == (24, True)
        engine.resume("b")
        gauges = admin.check(ledger_of(cache)).gauges
        assert gauges["reserved"] == 0


def test_two_managers_share_host_and_disk_but_no_device_ids(
    shm_root: Path, tmp_path: Path
) -> None:
    with (
        cache_at(shm_root, tmp_path) as ours,
        cache_at(shm_root, tmp_path) as theirs,
    ):
        one = Engine(8, ours)
        two = Engine(8, theirs)
        one.start("a", TOKENS)
        two.start("a", prompt(12, 1))
        # the same numbers of other memory
        assert one.manager.table("a")[:3] == two.manager.table("a")[:3]
        one.finish("a")
        two.finish("a")
        assert one.manager.free == 2
        assert two.manager.free == 5
        assert two.places(TOKENS) == ["host"] * 6
        assert one.places(TOKENS) == ["device"] * 6
        assert two.start("b", TOKENS[:13]).by_tier == {"host": 12}
        assert one.start("b", [*prompt(12, 1), 3]).by_tier == {"host": 12}
        one.is_right("b")
        two.is_right("b")


def test_two_managers_that_demote_the_same_write_it_once(shm_root: Path) -> None:
    with cache_at(shm_root) as ours, cache_at(shm_root) as theirs:
        one = Engine(8, ours, write_back=False)
        two = Engine(8, theirs, write_back=False)
        one.leave("a", TOKENS)
        two.leave("a", TOKENS)
        first = one.manager.demote(3)
        assert first is not None
        # another process is writing them
        assert two.manager.demote(3) is None
        assert two.manager.free == 5
        one.end(first)
        assert two.manager.demote(3) is not None
        assert two.places(TOKENS) == ["to_host"] * 3 + ["host"] * 3


def test_the_disk_behind_it_brings_back_what_the_host_has_lost(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        engine = Engine(8, cache)
        engine.leave("a", TOKENS)
        assert cache.flush(60)
    shutil.rmtree(shm_root / "host")  # as a reboot does
    with cache_at(shm_root, tmp_path) as cache:
        engine = Engine(8, cache)
        engine.add("b", [*TOKENS, 1])
        assert engine.manager.match("b") == PrefixMatch(0, 0, 24)
        future = engine.manager.prefetch("b")
        assert future is not None
        assert future.result(60).by_tier["disk"] == 24
        assert engine.manager.match("b") == PrefixMatch(0, 24, 0)
        assert engine.resume("b").by_tier == {"disk": 24}
        assert engine.stat("hit_tokens_storage") == 24


def test_one_prefetch_serves_all_who_want_the_same(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, TOKENS)
    shutil.rmtree(shm_root / "host")
    with cache_at(shm_root, tmp_path) as cache:
        engine = Engine(32, cache)
        # so that the first has not ended when the last asks
        goes_on = workers_stopped(cache)
        futures = []
        for n in range(4):
            engine.add(f"{n}", [*TOKENS, n])
            futures.append(engine.manager.prefetch(f"{n}"))
        goes_on.set()
        for future in futures:
            assert future is not None
            assert future.result(60).num_tokens == 24
        tiers = cache.stats()["tiers"]
        assert tiers["disk"]["loaded_chunks"] == 6  # type: ignore[index]
        assert [len(engine.admit(f"{n}").waits) for n in range(4)] == [1] * 4
        assert engine.manager.in_flight == 1


def test_retrieve_and_lookup_find_what_a_manager_wrote(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        engine = Engine(8, cache)
        engine.leave("a", TOKENS)
        assert engine.keys(TOKENS) == [key for _, _, key in cache.keys(TOKENS)]
        assert cache.lookup(TOKENS).by_tier == {"host": 24}
        assert retrieved(cache, TOKENS) == (24, True)
        assert cache.flush(60)
        assert cache.lookup(TOKENS, tiers=["disk"]).num_tokens == 24


def test_a_manager_finds_what_the_cache_stored(shm_root: Path) -> None:
    with cache_at(shm_root) as cache:
        stored(cache, TOKENS)
        engine = Engine(8, cache)
        engine.add("a", [*TOKENS, 1])
        admitted = engine.admit("a")
        engine.end(admitted.plan)
        assert admitted.by_tier == {"host": 24}
        for block, right in zip(admitted.table, truth(TOKENS), strict=False):
            assert (engine.kv[block] == right).all()


def test_tenants_and_adapters_do_not_share(shm_root: Path) -> None:
    with cache_at(shm_root) as cache:
        engine = Engine(32, cache)
        who: list[dict[str, object]] = [
            {},
            {"salt": "bob"},
            {"lora": "x"},
            {"lora": "x", "salt": "bob"},
        ]
        for n, options in enumerate(who):
            assert (
                engine.start(f"{n}", TOKENS[:13], **options).computed_tokens == 0
            )
            engine.finish(f"{n}")
        for n, options in enumerate(who):
            assert engine.start(f"again {n}", TOKENS[:13], **options).by_tier == {
                "device": 12
            }
            engine.finish(f"again {n}")
        engine.demoted(32)
        for n, options in enumerate(who):
            assert engine.start(f"host {n}", TOKENS[:13], **options).by_tier == {
                "host": 12
            }


def test_new_weights_of_one_process_are_new_for_all(shm_root: Path) -> None:
    with cache_at(shm_root) as ours, cache_at(shm_root) as theirs:
        one = Engine(8, ours)
        two = Engine(8, theirs)
        one.leave("a", TOKENS)
        two.leave("a", TOKENS[:9])
        two.add("b", [*TOKENS, 1])
        one.manager.weights_changed()
        assert two.manager.match("b") == PrefixMatch(0, 0, 0)
        assert two.resume("b").computed_tokens == 0


def test_an_engine_outlives_its_cache(shm_root: Path, tmp_path: Path) -> None:
    """When the cache was closed, every question to it is a miss; the device's own blocks are served
    as before.
    """
    with cache_at(shm_root, tmp_path) as cache:
        engine = Engine(16, cache)
        engine.leave("a", TOKENS[:16])
        engine.demoted(2)
        engine.start("runs", prompt(9, 2))
        engine.add("b", TOKENS[:17])
        up = engine.admit("b").plan
        written = engine.manager.finish("runs")
        assert up is not None
        assert written is not None
    # it is unknown whose slots they were
    assert engine.manager.completed(up.ticket).shortened == {"b": 8}
    assert engine.manager.completed(written.ticket).ended
    engine.manager.check()
    engine.compute("b")
    engine.is_right("b")
    assert engine.manager.finish("b") is None
    engine.add("c", TOKENS[:17])
    assert engine.manager.match("c") == PrefixMatch(16, 0, 0)
    engine.resume("c")
    engine.finish("c")
    # dropped: there is nowhere to go
    assert engine.manager.demote(16) is None
    assert engine.manager.free == 16
    assert engine.places(TOKENS[:16]) == ["freed"] * 4
    engine.manager.check()
