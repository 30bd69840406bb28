"""What Prometheus reads: the names, which are an interface, the help of each, and the numbers of
real stores.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pagoda.base.clock import Clock
from pagoda.base.metrics import COUNTERS, LOAD_BUCKETS, TIER_KINDS, Reason
from pagoda.cache.counters import CacheCounters
from pagoda.keys import Namespace
from pagoda.ledger import Ledger, NamespaceRow, admin
from pagoda.ledger.request_meters import METER_FIELDS, MOST_SHOWN, Meter
from pagoda.ledger.store_stats import StoreStats
from pagoda.tiers.remote.store_client import Usage
from pagoda_tools.serve.exposition import (
    COUNTED,
    FAMILIES,
    MOST_NAMESPACES,
    MOST_PAIRS,
    Exposition,
    exposition,
)
from tests.cache.kit import CHUNK, cache_at, prompt, served, stored
from tests.cli.shelf import LLAMA, QWEN, RUN, host, put

STORE = "tier store"
PAIR = "store model tenant"
# Dashboards and alert rules name these: to rename one or its labels breaks them without a word. New
# ones may be added.
INTERFACE = {
    "pagoda_lookups": f"counter {STORE}",
    "pagoda_hits": f"counter {STORE}",
    "pagoda_asked_tokens": f"counter {STORE}",
    "pagoda_hit_tokens": f"counter {STORE}",
    "pagoda_approximate_hit_tokens": f"counter {STORE}",
    "pagoda_hit_tokens_by_tier": f"counter {STORE}",
    "pagoda_found_tokens": f"counter {STORE}",
    "pagoda_stored_chunks": f"counter {STORE}",
    "pagoda_stored_bytes": f"counter {STORE}",
    "pagoda_loaded_chunks": f"counter {STORE}",
    "pagoda_loaded_bytes": f"counter {STORE}",
    "pagoda_evicted_chunks": f"counter {STORE}",
    "pagoda_removed_chunks": f"counter {STORE}",
    "pagoda_reaped_chunks": f"counter {STORE}",
    "pagoda_failed_checks": f"counter {STORE}",
    "pagoda_hint_write_failures": f"counter {STORE}",
    "pagoda_growth_refused_filesystem": f"counter {STORE}",
    "pagoda_growth_refused_cgroup": f"counter {STORE}",
    "pagoda_growth_refused_machine": f"counter {STORE}",
    "pagoda_growth_failures": f"counter {STORE}",
    "pagoda_hints_accepted": f"counter {STORE}",
    "pagoda_hints_clipped": f"counter {STORE}",
    "pagoda_hints_refused": f"counter {STORE}",
    "pagoda_misses": f"counter {STORE} reason",
    "pagoda_drops": f"counter {STORE} reason",
    "pagoda_load_seconds": f"histogram {STORE}",
    "pagoda_prefill_tokens": f"counter {STORE}",
    "pagoda_prefill_seconds": f"counter {STORE}",
    "pagoda_slots": f"gauge {STORE}",
    "pagoda_free": f"gauge {STORE}",
    "pagoda_reserved": f"gauge {STORE}",
    "pagoda_ready": f"gauge {STORE}",
    "pagoda_unscanned": f"gauge {STORE}",
    "pagoda_unbacked": f"gauge {STORE}",
    "pagoda_members": f"gauge {STORE}",
    "pagoda_pinned": f"gauge {STORE}",
    "pagoda_leased": f"gauge {STORE}",
    "pagoda_waiting_chunks": f"gauge {STORE}",
    "pagoda_allocated_bytes": f"gauge {STORE}",
    "pagoda_most_bytes": f"gauge {STORE}",
    "pagoda_grown_bytes": f"gauge {STORE}",
    "pagoda_hint_bytes": f"gauge {STORE}",
    "pagoda_locked_bytes": f"gauge {STORE}",
    "pagoda_slot_bytes": f"gauge {STORE}",
    "pagoda_namespace_chunks": f"gauge {STORE} namespace model",
    "pagoda_usage_lookups": f"counter {PAIR}",
    "pagoda_usage_hits": f"counter {PAIR}",
    "pagoda_usage_asked_tokens": f"counter {PAIR}",
    "pagoda_usage_found_tokens": f"counter {PAIR} tier",
    "pagoda_usage_loaded_tokens": f"counter {PAIR}",
    "pagoda_usage_load_seconds": f"counter {PAIR}",
    "pagoda_usage_prefill_tokens": f"counter {PAIR}",
    "pagoda_usage_prefill_seconds": f"counter {PAIR}",
    "pagoda_usage_saved_seconds": f"gauge {PAIR}",
    "pagoda_store_readable": "gauge store",
    "pagoda_remote_reachable": "gauge tier",
    "pagoda_remote_used_bytes": "gauge tier",
    "pagoda_remote_limit_bytes": "gauge tier",
    "pagoda_serve_events": "counter event",
    "pagoda_serve_sent_bytes": "counter ",
}


def samples(found: Exposition) -> dict[str, list[Sample]]:
    """The samples of each name, as Prometheus' own parser reads the text."""
    named: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(exposition(found)[0].decode()):
        assert len(family.documentation) > 10, family.name
        for sample in family.samples:
            named.setdefault(sample.name, []).append(sample)
    return named


def snapshot(root: Path, **changes: object) -> StoreStats:
    """An empty store, with these changes."""
    gauges = {family.name.removeprefix("pagoda_"): 0 for family in FAMILIES}
    empty = StoreStats(
        root,
        "host",
        "memory",
        4096,
        gauges,
        dict.fromkeys(COUNTERS, 0),
        {},
        [],
        [],
    )
    return empty._replace(**changes)  # type: ignore[arg-type]


def test_the_names_types_and_labels_are_an_interface() -> None:
    assert {
        f.name: f"{f.kind} {' '.join(f.labels)}" for f in FAMILIES
    } == INTERFACE
    for family in FAMILIES:
        assert len(family.help) > 10
        assert "`" not in family.help


def test_every_counter_is_explained_and_shown(tmp_path: Path) -> None:
    grouped = (
        "miss_",
        "drop_",
        "loads_",
        "load_microseconds_",
        "prefill_microseconds",
    )
    assert set(COUNTED) == {
        name for name in COUNTERS if not name.startswith(grouped)
    }
    counters = {name: number for number, name in enumerate(COUNTERS, 1)}
    named = samples(Exposition([snapshot(tmp_path, counters=counters)]))
    (seconds,) = named["pagoda_prefill_seconds_total"]
    assert seconds.value == counters.pop("prefill_microseconds") / 1e6
    shown = {
        s.value
        for each in named.values()
        for s in each
        if not s.name.startswith("pagoda_load_seconds")
    }
    assert {
        n for name, n in counters.items() if not name.startswith("load")
    } <= shown
    assert (
        len(named["pagoda_misses_total"])
        == len(named["pagoda_drops_total"])
        == len(Reason)
    )


def test_a_family_that_no_store_has_is_left_out() -> None:
    assert exposition(Exposition([]))[0] == b""


def meter(model: str, tenant: str, **counts: int) -> Meter:
    return Meter(model, tenant, dict.fromkeys(METER_FIELDS, 0) | counts)


def test_models_and_tenants_have_series_and_saved_time_where_speeds_are_known(
    tmp_path: Path,
) -> None:
    """The speed of a model is that of its engines in all stores."""
    one = [
        meter("m", "a", asked_tokens=90, hit_tokens_disk=30, loaded_tokens=20),
        meter("m", "b", asked_tokens=10, load_microseconds=500_000),
        meter("quiet", "a", loaded_tokens=9),
    ]
    two = [meter("m", "none", prefill_tokens=10, prefill_microseconds=5_000_000)]
    named = samples(
        Exposition(
            [
                snapshot(tmp_path / "1", meters=one),
                snapshot(tmp_path / "2", meters=two),
            ]
        )
    )
    found = {
        tuple(s.labels.values()): s.value
        for s in named["pagoda_usage_found_tokens_total"]
    }
    assert sum(found.values()) == 30
    (saved,) = named["pagoda_usage_saved_seconds"]
    assert saved.value == 10
    assert saved.labels["tenant"] == "a"
    loads = named["pagoda_usage_load_seconds_total"]
    assert [s.value for s in loads if s.labels["tenant"] == "b"] == [0.5]


def test_series_of_models_and_tenants_are_bounded_and_add_up(
    tmp_path: Path,
) -> None:
    meters = [
        meter(f"m{model}", f"t{tenant}", asked_tokens=1 + model * tenant)
        for model in range(70)
        for tenant in range(30)
    ]
    named = samples(Exposition([snapshot(tmp_path, meters=meters)]))
    asked = named["pagoda_usage_asked_tokens_total"]
    assert len(asked) <= MOST_PAIRS + MOST_SHOWN + 1
    assert len({s.labels["model"] for s in asked}) == MOST_SHOWN + 1
    assert sum(s.value for s in asked) == sum(
        one.counts["asked_tokens"] for one in meters
    )
    of_one = [s.value for s in asked if s.labels["model"] == "m69"]
    assert sum(of_one) == sum(1 + 69 * tenant for tenant in range(30))


def test_the_old_names_of_found_tokens_stay_for_one_release(
    tmp_path: Path,
) -> None:
    counters = dict.fromkeys(COUNTERS, 0) | {
        "hit_tokens": 7,
        "hit_tokens_disk": 5,
        "hit_tokens_remote": 2,
    }
    named = samples(Exposition([snapshot(tmp_path, counters=counters)]))
    new = {s.labels["tier"]: s.value for s in named["pagoda_found_tokens_total"]}
    assert new == {"host": 0, "disk": 5, "remote": 2}
    old = named["pagoda_hit_tokens_by_tier_total"]
    assert {s.labels["tier"]: s.value for s in old} == new
    assert [s.value for s in named["pagoda_hit_tokens_total"]] == [7]
    texts = {family.name: family.help for family in FAMILIES}
    for name in ("hit_tokens", "hit_tokens_by_tier"):
        assert "use pagoda_found_tokens" in texts[f"pagoda_{name}"]


def test_the_stores_of_a_machine_and_those_that_cannot_be_read(
    shm_root: Path,
) -> None:
    a = host(shm_root, name="a")
    b = host(shm_root, name="b")
    put(a, LLAMA, range(64))
    put(b, QWEN, range(32))
    admin.pin(a, put(a, LLAMA, range(16)), "me")
    usage = {"redis": Usage(5, None), "s3": None}
    named = samples(
        Exposition([StoreStats.of(a), StoreStats.of(b)], ["/gone"], usage)
    )
    ready = {
        s.labels["store"]: (s.labels["tier"], s.value)
        for s in named["pagoda_ready"]
    }
    assert ready == {str(a.directory): ("host", 4), str(b.directory): ("host", 2)}
    assert {
        s.labels["model"]: s.value for s in named["pagoda_namespace_chunks"]
    } == {"llama": 4, "qwen": 2}
    assert [s.value for s in named["pagoda_pinned"]] == [1, 0]
    assert {s.labels["store"]: s.value for s in named["pagoda_store_readable"]}[
        "/gone"
    ] == 0
    assert {
        s.labels["tier"]: s.value for s in named["pagoda_remote_reachable"]
    } == {"redis": 1, "s3": 0}
    assert [s.value for s in named["pagoda_remote_used_bytes"]] == [5]
    assert "pagoda_remote_limit_bytes" not in named


def test_labels_are_bounded_and_have_no_salt(tmp_path: Path) -> None:
    rows = [
        NamespaceRow(bytes([n]) * 32, {"model": "m" * 900, "salt": "secret"}, n)
        for n in range(200)
    ]
    named = samples(Exposition([snapshot(tmp_path, namespaces=rows)]))
    found = {s.labels["namespace"]: s for s in named["pagoda_namespace_chunks"]}
    assert len(found) == MOST_NAMESPACES + 1
    assert sum(s.value for s in found.values()) == sum(range(200))
    assert found["other"].value == sum(range(200 - MOST_NAMESPACES))
    assert found["c7" * 6].value == 199
    assert max(len(s.labels["model"]) for s in found.values()) == 80
    assert "secret" not in str(found)


def test_a_path_with_odd_characters_is_one_label(tmp_path: Path) -> None:
    odd = tmp_path / 'a"\\\n{b}'
    named = samples(Exposition([snapshot(odd)]))
    assert [s.labels["store"] for s in named["pagoda_ready"]] == [str(odd)]


def loads(stats: Mapping[str, int]) -> dict[str, int]:
    """How many loads of each kind of tier were counted, in all buckets."""
    return {
        kind: sum(stats[name] for name in LOAD_BUCKETS[kind].values())
        for kind in TIER_KINDS
    }


def test_loads_are_a_histogram_by_tier(shm_root: Path, tmp_path: Path) -> None:
    """One count for each call and tier, whatever the number of chunks, and the seconds; `le` is
    cumulative.
    """
    tokens = prompt(8)
    with cache_at(shm_root / "a", tmp_path) as cache:
        stored(cache, tokens)
        for _ in range(3):
            assert served(cache, tokens)[0].by_tier["host"] == 8 * CHUNK
        assert loads(cache.stats()["counters"]) == {
            "host": 3,
            "disk": 0,
            "remote": 0,
        }
    # another host tier: the disk has all of it
    with cache_at(shm_root / "b", tmp_path) as cache:
        assert (
            served(cache, tokens, counted=False)[0].by_tier["disk"] == 8 * CHUNK
        )
        assert served(cache, prompt(8, seed=1))[0].num_tokens == 0
        stats = cache.stats()["counters"]
        assert loads(stats) == {"host": 0, "disk": 1, "remote": 0}
        assert 0 < stats["load_microseconds_disk"] < 60e6
        (store,) = (shm_root / "b" / "host").glob("*/state")
        with closing(Ledger.attach(store.parent)) as ledger:
            named = samples(Exposition([StoreStats.of(ledger)]))
    buckets = {
        s.labels["le"]: s.value
        for s in named["pagoda_load_seconds_bucket"]
        if s.labels["tier"] == "disk"
    }
    assert list(buckets) == [
        "0.001",
        "0.003",
        "0.01",
        "0.03",
        "0.1",
        "0.3",
        "1.0",
        "3.0",
        "+Inf",
    ]
    assert list(buckets.values()) == sorted(buckets.values())
    assert buckets["+Inf"] == 1
    (seconds,) = [
        s.value
        for s in named["pagoda_load_seconds_sum"]
        if s.labels["tier"] == "disk"
    ]
    assert seconds == pytest.approx(stats["load_microseconds_disk"] / 1e6)


@pytest.mark.parametrize(
    ("seconds", "edge"),
    [
        (0.0, "0.001"),
        (0.001, "0.001"),
        (0.0011, "0.003"),
        (3.0, "3.0"),
        (3.1, "inf"),
    ],
)
def test_the_edge_of_a_bucket_belongs_to_it(seconds: float, edge: str) -> None:
    counters = CacheCounters(None, Clock(), Namespace(model="m"))
    counters.add(
        counters.load_counts(
            2, 9, {"disk": seconds, "redis": seconds, "s3": seconds}
        )
    )
    found = counters.read(1.0)
    assert found[LOAD_BUCKETS["disk"][edge]] == 1
    assert found[LOAD_BUCKETS["remote"][edge]] == 2
    assert found["load_microseconds_remote"] == pytest.approx(2e6 * seconds)
    assert loads(found) == {"host": 0, "disk": 1, "remote": 2}
    assert found["loaded_chunks"] == 2


@pytest.mark.slow
def test_without_prometheus_client_the_command_says_what_to_install(
    shm_root: Path,
) -> None:
    put(host(shm_root), LLAMA, range(16))
    code = f"import sys; sys.modules['prometheus_client'] = None; {RUN}"
    command = [sys.executable, "-c", code, "stats", shm_root, "--prometheus"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert (
        done.stderr
        == "pagoda: --prometheus needs prometheus-client: pip install 'pagodakv[metrics]'\n"
    )
