"""Hit rate, tokens and saved time by model and by tenant, over all processes of a store."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from multiprocessing.synchronize import Event as EventType
from pathlib import Path

import pytest

from pagoda.cache import Cache
from pagoda.keys import Namespace
from pagoda.ledger.store_stats import StoreStats
from tests.cache.kit import (
    CHUNK,
    NAMESPACE,
    SPAWN,
    blank,
    cache_at,
    prompt,
    run_all,
    served,
    slots_of,
    stored,
)
from tests.children import kill_self

SALT = "a secret of the tenant"
TENANT = Namespace("m", salt=SALT).fields()["salt"][:12]


def rows(cache: Cache, by: str) -> dict[str, dict[str, object]]:
    """Return the figures by name of the model, or of the tenant."""
    shown = cache.stats()["models" if by == "model" else "tenants"]
    return {str(row[by]): row for row in shown}


def asked(cache: Cache, by: str = "tenant") -> dict[str, object]:
    return {name: row["asked_tokens"] for name, row in rows(cache, by).items()}


def adds_up(cache: Cache) -> None:
    """Check that the models, and the tenants, have together what the cache counted."""
    stats = cache.stats()
    for name in ("lookups", "hits", "asked_tokens", "hit_tokens"):
        total = stats["counters"][name]
        for shown in (stats["models"], stats["tenants"]):
            assert sum(int(str(row[name])) for row in shown) == total, name


@pytest.mark.parametrize("shared", [True, False])
def test_models_and_tenants_are_counted(shm_root: Path, shared: bool) -> None:
    place = shm_root if shared else None
    more = {} if shared else {"host_size": "16MiB", "host_shared": False}
    with cache_at(place, None, **more) as cache:
        stored(cache, prompt(5), salt=SALT)
        served(cache, prompt(5), salt=SALT)
        served(cache, prompt(3))
        cache.observe_prefill(1000, 2.0)
        tenants = rows(cache, "tenant")
        assert tenants[TENANT]["hit_rate"] == 1.0
        assert tenants[TENANT]["hit_tokens_host"] == 80
        assert tenants[TENANT]["loaded_tokens"] == 80
        assert 0 < float(str(tenants[TENANT]["saved_seconds"])) < 0.16
        assert tenants["none"]["hit_rate"] == 0.0
        assert tenants["none"]["saved_seconds"] is None
        model = rows(cache, "model")[NAMESPACE.model]
        assert model["asked_tokens"] == 128
        adds_up(cache)
        assert SALT not in json.dumps(cache.stats(), default=str)


def test_without_a_tier_it_counts_in_this_process(shm_root: Path) -> None:
    with cache_at(None, None) as cache:
        served(cache, prompt(5), salt=SALT)
        assert asked(cache) == {TENANT: 80}
        adds_up(cache)


def test_a_salt_is_nowhere_in_the_files_of_a_store(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        served(cache, prompt(5), salt=SALT)
        for file in (shm_root / "host").rglob("*"):
            assert file.is_dir() or SALT.encode() not in file.read_bytes()


def test_a_look_up_is_counted_and_loads_nothing(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        stored(cache, prompt(5))
        cache.lookup(prompt(5), salt=SALT)
        cache.lookup(prompt(5))
        cache.prefetch(prompt(5)).result(60)
        tenants = rows(cache, "tenant")
        assert tenants["none"]["hit_tokens"] == 80
        assert tenants["none"]["loaded_tokens"] == 0
        assert tenants["none"]["load_seconds"] == 0
        adds_up(cache)


def test_an_uncounted_retrieve_is_a_load(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        stored(cache, prompt(5))
        cache.lookup(prompt(5))
        cache.retrieve(prompt(5), blank(prompt(5)).transfer, counted=False)
        tenant = rows(cache, "tenant")["none"]
        assert tenant["lookups"] == 1
        assert tenant["loaded_tokens"] == 80
        assert float(str(tenant["load_seconds"])) > 0


def test_of_several_ranks_one_counts_the_loads(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        stored(cache, prompt(5))
        slots_of(cache).leave_loads_to_another_rank()
        cache.retrieve(prompt(5), blank(prompt(5)).transfer, counted=False)
        served(cache, prompt(5))
        slots_of(cache).count_load(NAMESPACE.root, 80, 1.0)
        tenant = rows(cache, "tenant")["none"]
        assert tenant["hit_tokens"] == 80
        assert tenant["loaded_tokens"] == 0
        assert tenant["load_seconds"] == 0
        assert cache.stats()["counters"]["loaded_chunks"] == 10


def test_requests_that_come_with_a_root_are_of_their_tenant(
    shm_root: Path,
) -> None:
    with cache_at(shm_root, None) as cache:
        slots = slots_of(cache)
        root = slots.namespace(salt=SALT)
        slots.count_request(160, {"host": 80, "peers": 16}, None, root)
        slots.count_load(root, 96, 0.5)
        slots.count_request(16, {}, None)
        slots.count_request(16, {}, None, bytes(32))
        tenants = rows(cache, "tenant")
        assert asked(cache) == {TENANT: 160, "other": 32}
        assert tenants[TENANT]["hit_tokens_remote"] == 16
        assert tenants[TENANT]["loaded_tokens"] == 96
        assert tenants[TENANT]["load_seconds"] == 0.5
        assert asked(cache, "model") == {NAMESPACE.model: 192}
        adds_up(cache)


def test_weights_that_changed_are_the_same_model(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        served(cache, prompt(5))
        cache.weights_changed()
        served(cache, prompt(5))
        assert asked(cache, "model") == {NAMESPACE.model: 160}


def test_two_models_in_one_store(shm_root: Path) -> None:
    with (
        cache_at(shm_root, None) as one,
        cache_at(shm_root, None, Namespace("another")) as two,
    ):
        served(one, prompt(5))
        served(two, prompt(3))
        for cache in (one, two):
            assert asked(cache, "model") == {"a-model": 80, "another": 48}
            adds_up(cache)


def _ask(shm_root: Path, salt: str, end: str) -> None:
    with cache_at(shm_root, None) as cache:
        served(cache, prompt(5), salt=salt)
        if end == "kill":
            kill_self()


@pytest.mark.slow
def test_other_processes_count_too_and_a_kill_loses_nothing(
    shm_root: Path,
) -> None:
    with cache_at(shm_root, None) as cache:
        for end in ("close", "kill", "close"):
            other = SPAWN.Process(target=_ask, args=(shm_root, SALT, end))
            other.start()
            other.join(120)
            assert other.exitcode == (-9 if end == "kill" else 0)
        served(cache, prompt(2))
        assert asked(cache) == {TENANT: 240, "none": 32}
        adds_up(cache)
    with cache_at(shm_root, None) as cache:
        assert asked(cache) == {TENANT: 240, "none": 32}


def _ask_in_child(cache: Cache) -> None:
    served(cache, prompt(5), salt=SALT)


def test_a_forked_child_counts_for_itself(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        served(cache, prompt(5), salt=SALT)
        run_all(
            [
                multiprocessing.get_context("fork").Process(
                    target=_ask_in_child, args=(cache,)
                )
                for _ in range(3)
            ]
        )
        served(cache, prompt(5))
        assert asked(cache) == {TENANT: 320, "none": 80}
        adds_up(cache)


def _ask_at_once(cache: Cache, go: EventType) -> None:
    go.wait(60)
    for _ in range(40):
        cache.lookup(prompt(1), salt=SALT)


def test_a_forked_child_has_a_page_of_its_own(shm_root: Path) -> None:
    """It counts before its first transaction, with the parent at the same time."""
    with cache_at(shm_root, None) as cache:
        cache.lookup(prompt(1), salt=SALT)
        (store,) = (ledger.directory for ledger in cache.slots.ledgers.values())  # type: ignore[union-attr]
        before = (store / "meters").stat().st_blocks
        fork = multiprocessing.get_context("fork")
        go = fork.Event()
        children = [
            fork.Process(target=_ask_at_once, args=(cache, go)) for _ in range(2)
        ]
        for child in children:
            child.start()
        go.set()
        for _ in range(40):
            cache.lookup(prompt(1), salt=SALT)
        for child in children:
            child.join(60)
            assert child.exitcode == 0
        assert asked(cache) == {TENANT: 121 * CHUNK}
        assert (store / "meters").stat().st_blocks > before
        adds_up(cache)


def test_what_a_disk_store_counted_outlives_its_processes(tmp_path: Path) -> None:
    for turn in range(1, 4):
        with cache_at(None, tmp_path) as cache:
            served(cache, prompt(5), salt=SALT)
            assert asked(cache) == {TENANT: turn * 80}
            adds_up(cache)


def test_tables_that_are_made_anew_begin_all_counters_anew(
    tmp_path: Path,
) -> None:
    with cache_at(None, tmp_path) as cache:
        served(cache, prompt(5), salt=SALT)
        (store,) = (ledger.directory for ledger in _ledgers(cache))
    (store / "data.mdb").unlink()
    with cache_at(None, tmp_path) as cache:
        assert asked(cache) == {}
        served(cache, prompt(5))
        adds_up(cache)


def _ledgers(cache: Cache) -> list[object]:
    return [ledger for _, ledger in cache._tiers.ledgers()]


@pytest.mark.parametrize("what", ["gone", "a directory", "of another size"])
def test_a_store_whose_meters_were_damaged_serves_on(
    shm_root: Path, what: str
) -> None:
    with cache_at(shm_root, None) as cache:
        stored(cache, prompt(5))
        served(cache, prompt(5))
        (file,) = (shm_root / "host").glob("*/meters")
        file.unlink()
        if what == "a directory":
            file.mkdir()
        elif what == "of another size":
            file.write_bytes(b"x" * 5000)
        assert served(cache, prompt(5))[0].num_tokens == 80
        adds_up(cache)
    if file.is_dir():
        shutil.rmtree(file)
    with cache_at(shm_root, None) as cache:
        assert served(cache, prompt(5))[0].num_tokens == 80


def test_the_statistics_of_a_store_have_its_meters(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        served(cache, prompt(5), salt=SALT)
        ledger = cache._tiers.host.ledger  # type: ignore[union-attr]
        found = StoreStats.of(ledger)
        (meter,) = found.meters
        assert meter.model == NAMESPACE.model
        assert meter.tenant == TENANT
        assert (
            json.loads(json.dumps(found.as_json()["meters"]))[0]["tenant"]
            == TENANT
        )
