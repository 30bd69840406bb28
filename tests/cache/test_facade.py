"""Cache: store, lookup, retrieve, prefetch over real tiers."""

from __future__ import annotations

import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.errors import ConfigError, StoreError
from pagoda.base.metrics import Reason
from pagoda.cache import Cache, miss_explainer
from pagoda.cache.lookup_call import match_tiers
from pagoda.keys import Item, Namespace, chunk_keys
from pagoda.layout import KVLayout
from pagoda.ledger import admin
from pagoda.ledger.request_ring import NAMESPACE_BYTES
from pagoda.tiers import HostTier
from pagoda.transfer import BlockKV
from testbed.patience import wait_until
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    blank,
    cache_at,
    config_of,
    counters_of,
    hit_of,
    keys_of,
    kv_of,
    prompt,
    put,
    served,
    stored,
)


@pytest.fixture
def cache(shm_root: Path, tmp_path: Path) -> Iterator[Cache]:
    with cache_at(shm_root, tmp_path) as opened:
        yield opened


def test_what_is_stored_is_served_from_host_memory(cache: Cache) -> None:
    tokens = prompt(10.5)
    answer = put(cache, tokens)
    assert answer == (10, 160, 0, 0, None)
    hit, _ = served(cache, tokens)
    assert hit.num_tokens == 160
    assert hit.by_tier == {"host": 160}
    assert hit.reason is None
    assert hit.mask.shape == (168,)
    assert hit.mask[:160].all()
    assert not hit.mask[160:].any()


def test_the_disk_serves_what_the_host_tier_has_lost(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(10)
    with cache_at(shm_root / "before", tmp_path) as cache:
        stored(cache, tokens)
    with cache_at(shm_root / "after", tmp_path) as cache:
        assert cache.lookup(tokens).by_tier == {"disk": 160}
        assert hit_of(cache, tokens).by_tier == {"disk": 160}
        # it was loaded during the call
        assert hit_of(cache, tokens).by_tier == {"host": 160}


def test_one_run_may_come_from_two_tiers(shm_root: Path, tmp_path: Path) -> None:
    tokens = prompt(12)
    with cache_at(shm_root / "before", tmp_path) as cache:
        stored(cache, tokens)
    with cache_at(shm_root / "after", tmp_path) as cache:
        head = tokens[: 4 * CHUNK]
        put(cache, head)
        assert cache.lookup(tokens).by_tier == {"host": 64, "disk": 128}
        assert hit_of(cache, tokens).by_tier == {"host": 64, "disk": 128}


def test_a_run_may_change_tiers_more_than_once(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(12)
    with cache_at(shm_root / "before", tmp_path) as cache:
        stored(cache, tokens)
    with cache_at(shm_root / "after", tmp_path) as cache:
        put(cache, tokens, tiers=["host"])
        keys = keys_of(cache, tokens)
        admin.remove(cache._tiers.host.ledger, keys[3:5])  # type: ignore[union-attr]
        hit, _ = served(cache, tokens)
        assert hit.num_tokens == 192
        assert hit.by_tier == {"host": 160, "disk": 32}


def test_only_the_named_tiers_are_asked(cache: Cache) -> None:
    tokens = prompt(6)
    stored(cache, tokens)
    assert cache.lookup(tokens, tiers=["disk"]).by_tier == {"disk": 96}
    assert cache.lookup(tokens, tiers="host").by_tier == {"host": 96}
    assert hit_of(cache, tokens, tiers=["disk"]).by_tier == {"disk": 96}
    assert cache.lookup(tokens, tiers=[]).num_tokens == 0
    for call in (cache.lookup, cache.prefetch, cache.explain):
        with pytest.raises(ValueError, match=r"no tier 'tape'.*host, disk"):
            call(tokens, tiers=["tape"])


def test_a_store_to_chosen_tiers_stays_there(cache: Cache) -> None:
    only_host = prompt(3, 1)
    only_disk = prompt(3, 2)
    stored(cache, only_host, tiers=["host"])
    stored(cache, only_disk, tiers=["disk"])
    assert cache.lookup(only_host).by_tier == {"host": 48}
    assert cache.lookup(only_disk).by_tier == {"disk": 48}
    served(cache, only_disk)


def test_storing_again_stores_nothing(cache: Cache) -> None:
    tokens = prompt(8)
    stored(cache, tokens[: 5 * CHUNK])
    assert put(cache, tokens) == (3, 48, 5, 0, None)
    assert put(cache, tokens) == (0, 0, 8, 0, None)


def test_start_tokens_skips_what_the_engine_has(cache: Cache) -> None:
    tokens = prompt(10)
    stored(cache, tokens)
    hit, kv = served(cache, tokens, start_tokens=3 * CHUNK)
    assert hit.start_tokens == 48
    assert hit.num_tokens == 112
    assert hit.stop_tokens == 160
    assert not hit.mask[:48].any()
    assert hit.mask[48:].all()
    assert not kv.blocks[:3].any()  # never written


def test_a_store_may_skip_a_prefix(cache: Cache) -> None:
    tokens = prompt(10)
    answer = put(cache, tokens, start_tokens=4 * CHUNK)
    assert answer.num_chunks == 6
    assert cache.lookup(tokens).num_tokens == 0
    assert hit_of(cache, tokens, start_tokens=4 * CHUNK).num_tokens == 96


def test_a_mask_says_the_same_as_a_start(cache: Cache) -> None:
    tokens = prompt(10.5)
    stored(cache, tokens)
    mask = np.arange(len(tokens)) >= 3 * CHUNK
    hit, _ = served(cache, tokens, mask=mask)
    assert hit.start_tokens == 48
    assert hit.num_tokens == 112
    assert hit_of(cache, tokens, mask=[True] * len(tokens)).num_tokens == 160
    nothing = np.zeros(160, bool)
    assert cache.lookup(tokens[:160], mask=nothing).num_tokens == 0


@pytest.mark.parametrize("start", [1, 15, 17, -16, 176])
def test_a_start_within_a_chunk_or_past_the_end_is_refused(
    cache: Cache, start: int
) -> None:
    tokens = prompt(10)
    with pytest.raises(
        ValueError, match=r"multiple of the chunk|past the 160 tokens"
    ):
        cache.retrieve(tokens, blank(tokens).transfer, start_tokens=start)
    with pytest.raises(
        ValueError, match=r"multiple of the chunk|past the 160 tokens"
    ):
        cache.store(tokens, blank(tokens).transfer, start_tokens=start)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([True] * 16 + [False] * 16 + [True] * 128, "False after a True"),
        ([False] * 5 + [True] * 155, "multiple of the chunk"),
        ([True] * 159, "one bool per token"),
        ([1] * 160, "one bool per token"),
        (np.ones((2, 160), bool), "one bool per token"),
    ],
)
def test_a_bad_mask_is_refused(cache: Cache, mask: object, message: str) -> None:
    tokens = prompt(10)
    for call in (cache.lookup, cache.prefetch):
        with pytest.raises(ValueError, match=message):
            call(tokens, mask=mask)  # type: ignore[arg-type]


def test_a_mask_and_another_start_are_refused(cache: Cache) -> None:
    tokens = prompt(10)
    with pytest.raises(ValueError, match="pass one of them"):
        cache.lookup(tokens, mask=np.arange(160) >= 32, start_tokens=16)


def test_keys_are_public_and_stand_in_for_tokens(cache: Cache) -> None:
    tokens = prompt(10.5)
    triples = cache.keys(tokens)
    assert [triple[:2] for triple in triples] == [
        (i * 16, i * 16 + 16) for i in range(10)
    ]
    root = NAMESPACE.with_(layout=LAYOUT.fingerprint).root
    keys = [key for _, _, key in triples]
    assert keys == chunk_keys(tokens, root, CHUNK)
    assert cache.keys(tokens, 48) == triples[3:]
    cache.store(None, kv_of(tokens).transfer, keys=keys)
    assert cache.lookup(tokens).num_tokens == 160
    assert cache.lookup(None, keys=keys).num_tokens == 160
    assert cache.lookup(tokens, keys=triples).num_tokens == 160
    assert hit_of(cache, tokens, keys=keys[:7]).num_tokens == 112
    hit = cache.lookup(tokens, keys=triples[4:])
    assert hit.start_tokens == 64
    assert hit.num_tokens == 96


def test_many_keys_are_asked_for_at_once_also_after_holes(cache: Cache) -> None:
    stored = prompt(6)
    keys = keys_of(cache, stored)
    put(cache, stored)
    absent = [bytes([number]) * 32 for number in range(200)]
    asked = [*absent[:70], keys[5], *absent[70:], keys[0], keys[3]]
    found = cache.which(asked)
    assert [key for key, here in zip(asked, found, strict=True) if here] == [
        keys[5],
        keys[0],
        keys[3],
    ]
    assert cache.which([]) == []
    cache.close()
    assert cache.which(asked) == [False] * len(asked)


def test_keys_that_do_not_fit_are_refused(cache: Cache) -> None:
    tokens = prompt(4)
    triples = cache.keys(tokens)
    with pytest.raises(ValueError, match="both of one prompt"):
        cache.lookup(tokens[:40], keys=triples)
    with pytest.raises(ValueError, match="32 bytes"):
        cache.lookup(tokens, keys=[b"short"])
    with pytest.raises(ValueError, match="one run"):
        cache.lookup(tokens, keys=[triples[0], triples[2]])
    with pytest.raises(ValueError, match="earlier keys"):
        cache.lookup(tokens, keys=triples[2:], start_tokens=16)
    with pytest.raises(ValueError, match="pass tokens, or keys"):
        cache.lookup(None)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_caller_may_not_know_the_position_of_its_keys(
    cache: Cache, tier: str
) -> None:
    """Then only the keys say what is meant; a tenant's salt is compared nevertheless."""
    tokens = prompt(10)
    kv = blank(prompt(7))
    keys = keys_of(cache, tokens)
    stored(cache, tokens)
    if tier == "disk":
        with cache_at(None, Path(cache.config.disk_path).parent) as below:
            assert below.retrieve(
                None, kv.transfer, keys=keys[3:], any_position=True
            ).by_tier == {"disk": 112}
    assert cache.lookup(None, keys=keys[3:]).num_tokens == 0
    assert cache.lookup(None, keys=keys[3:], any_position=True).num_tokens == 112
    assert cache.retrieve(None, kv.transfer, keys=keys[3:]).num_tokens == 0
    assert (
        cache.retrieve(
            None, kv.transfer, keys=keys[3:], any_position=True
        ).num_tokens
        == 112
    )
    assert (kv.blocks == kv_of(tokens).blocks[3:]).all()
    assert (
        cache.lookup(
            None, keys=keys[3:], any_position=True, salt="mallory"
        ).num_tokens
        == 0
    )


def test_tokens_of_any_kind_mean_the_same(cache: Cache) -> None:
    tokens = prompt(4)
    stored(cache, tokens)
    for same in (
        tokens.tolist(),
        tokens.astype(np.int64),
        array.array("i", tokens.tolist()),
        memoryview(tokens),
    ):
        assert cache.lookup(same).num_tokens == 64


def test_multimodal_items_are_part_of_the_keys(cache: Cache) -> None:
    tokens = prompt(4)
    image = Item(20, 30, b"i" * 32)
    other = Item(20, 30, b"o" * 32)
    stored(cache, tokens, items=[image])
    assert cache.lookup(tokens, items=[image]).num_tokens == 64
    assert cache.lookup(tokens, items=[other]).num_tokens == 16
    assert cache.lookup(tokens).num_tokens == 16


def test_items_are_read_once_and_may_be_tuples(cache: Cache) -> None:
    tokens = prompt(4)
    image = Item(20, 30, b"i" * 32)
    stored(cache, tokens, items=iter([image]))
    for same in (iter([image]), [tuple(image)], {image}):
        assert cache.lookup(tokens, items=same).num_tokens == 64
    # what is logged and published of a prompt depends on whether it has items
    assert cache._checked(tokens, {"items": iter([image])}).items == (image,)
    none = cache.lookup(prompt(4, seed=1), items=[tuple(image)])
    assert none.reason is Reason.ABSENT, none


@pytest.mark.parametrize("start", [16.0, "16", None, [16]])
def test_a_start_that_is_no_whole_number_is_refused(
    cache: Cache, start: object
) -> None:
    with pytest.raises(ValueError, match=r"start_tokens = .*whole number"):
        cache.lookup(prompt(4), start_tokens=start)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "items", [None, [None], "abc", [(0, 5)], [(0.5, 5, b"i" * 32)], 3]
)
def test_what_is_no_item_is_refused(cache: Cache, items: object) -> None:
    with pytest.raises(ValueError, match="items: each is an Item"):
        cache.lookup(prompt(4), items=items)  # type: ignore[arg-type]


def test_tenants_and_adapters_do_not_share(cache: Cache) -> None:
    tokens = prompt(4)
    stored(cache, tokens, salt="one", lora="a")
    assert cache.lookup(tokens, salt="one", lora="a").num_tokens == 64
    for other in (
        {},
        {"salt": "one"},
        {"lora": "a"},
        {"salt": "two", "lora": "a"},
    ):
        assert cache.lookup(tokens, **other).num_tokens == 0  # type: ignore[arg-type]


def test_prefetch_brings_chunks_up_to_the_host_tier(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(10)
    with cache_at(shm_root / "before", tmp_path) as cache:
        stored(cache, tokens)
    with cache_at(shm_root / "after", tmp_path) as cache:
        assert cache.prefetch(tokens).result(60).by_tier == {"disk": 160}
        assert cache.prefetch(tokens).result(60).by_tier == {"host": 160}
        assert hit_of(cache, tokens).by_tier == {"host": 160}
        assert cache.stats()["tiers"]["disk"]["loaded_chunks"] == 10  # type: ignore[index]
        assert cache.stats()["counters"]["lookups"] == 1  # type: ignore[index]


def test_prefetch_takes_no_more_than_half_of_the_host_tier(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(60)
    with cache_at(shm_root / "before", tmp_path) as cache:
        stored(cache, tokens)
    with cache_at(shm_root / "after", tmp_path) as cache:
        hit = cache.prefetch(tokens).result(60)
        assert hit.num_tokens == 32 * CHUNK
        assert hit.reason == Reason.FULL
        assert hit_of(cache, tokens).num_tokens == 60 * CHUNK


def test_prefetch_without_a_host_tier_is_refused_with_a_reason(
    tmp_path: Path,
) -> None:
    with cache_at(None, tmp_path) as cache:
        tokens = prompt(3)
        stored(cache, tokens)
        assert cache.prefetch(tokens).result(60).reason is Reason.TIER_SKIPPED


def test_holders_names_the_tiers_that_have_a_chunk(cache: Cache) -> None:
    tokens = prompt(2)
    stored(cache, tokens)
    key = cache.keys(tokens)[0][2]
    assert cache.holders(key) == ["host", "disk"]
    assert cache.holders(bytes(32)) == []


def test_stats_add_up(cache: Cache) -> None:
    tokens = prompt(10.5)
    served(cache, tokens)
    stored(cache, tokens)
    served(cache, tokens)
    served(cache, tokens[:10])
    stats = cache.stats()
    counters = stats["counters"]
    assert isinstance(counters, dict)
    assert counters["lookups"] == 3
    assert counters["hits"] == 1
    assert counters["hit_tokens"] == 160
    assert counters["asked_tokens"] == 168 * 2 + 10
    assert counters["hit_tokens_host"] == 160
    assert counters["hit_tokens_disk"] == 0
    assert counters["stored_chunks"] == counters["loaded_chunks"] == 10
    assert (
        counters["stored_bytes"]
        == counters["loaded_bytes"]
        == 10 * LAYOUT.chunk_bytes
    )
    assert stats["misses"] == {"absent": 1, "short_prompt": 1}
    assert stats["hit_rate"] == pytest.approx(160 / 346)
    assert stats["waiting_chunks"] == stats["staging_buffers"] == 0


def test_stats_show_every_reason(cache: Cache) -> None:
    cache._resources.counters.add(
        {f"{kind}_{reason}": 1 for kind in ("miss", "drop") for reason in Reason}
    )
    stats = cache.stats()
    assert stats["misses"] == stats["drops"] == dict.fromkeys(map(str, Reason), 1)


def test_stats_show_what_lower_tiers_dropped(cache: Cache) -> None:
    """A disk or a remote store counts by itself what it drops after the cache handed it over."""
    cache._resources.counters.add({"drop_busy": 1})
    host, disk = cache._tiers.ledgers()
    disk[1].count({"drop_stale": 2, "drop_busy": 3})
    assert host[0] == "host"
    assert disk[0] == "disk"
    assert cache.stats()["drops"] == {"busy": 4, "stale": 2}


def test_single_requests_are_remembered_by_the_store_that_counts_them(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    # an engine's call compares namespaces for only a millisecond
    monkeypatch.setattr(miss_explainer, "_BUDGET_NS", 60 * 10**9)
    monkeypatch.setattr(miss_explainer, "_LIST_SECONDS", 60.0)
    tokens = prompt(3.5)
    stored(cache, tokens[: 2 * CHUNK])
    cache.lookup(tokens)
    cache.lookup(tokens, salt="a tenant")
    served(cache, tokens[: 2 * CHUNK])
    cache.retrieve(tokens[:5], blank(tokens[:5]).transfer)
    cache.lookup(tokens, counted=False)
    (_, host), (_, disk) = cache._tiers.ledgers()
    none = {"host": 0, "disk": 0, "remote": 0}
    found = {"host": 2 * CHUNK, "disk": 0, "remote": 0}
    ours, theirs = (
        cache._weights.scope(None, salt)[0].root[:NAMESPACE_BYTES]
        for salt in (None, "a tenant")
    )
    assert [
        (one.asked_tokens, one.hit_tokens, one.namespace, one.reason)
        for one in host.requests.newest()
    ] == [
        (5, none, ours, "short_prompt"),
        (2 * CHUNK, found, ours, None),
        (len(tokens), none, theirs, "other_namespace"),
        (len(tokens), found, ours, "absent"),
    ]
    assert disk.requests.newest() == []


def test_a_look_up_may_stay_uncounted(cache: Cache) -> None:
    tokens = prompt(2)
    cache.lookup(tokens, counted=False)
    cache.retrieve(tokens, blank(tokens).transfer, counted=False)
    cache.explain(tokens)
    assert cache.stats()["counters"]["lookups"] == 0  # type: ignore[index]


def test_another_layout_is_refused(cache: Cache) -> None:
    other = KVLayout.opaque(CHUNK, 8192, "something else")
    kv = BlockKV(np.zeros((2, 8192), np.uint8), other)
    for call in (cache.store, cache.retrieve):
        with pytest.raises(ValueError, match="build both with one KVLayout"):
            call(prompt(2), kv)


def test_kv_that_is_too_short_for_its_tokens_is_refused_and_leaves_nothing(
    cache: Cache,
) -> None:
    tokens = prompt(6)
    with pytest.raises(ValueError, match=r"is not (in|within) the"):
        cache.store(tokens, blank(tokens[: 3 * CHUNK]).transfer)
    ledger = cache._tiers.host.ledger  # type: ignore[union-attr]
    assert admin.gauges(ledger)["reserved"] == 0
    assert cache.lookup(tokens).num_tokens == 0
    stored(cache, tokens)
    with pytest.raises(ValueError, match=r"is not (in|within) the"):
        cache.retrieve(tokens, blank(tokens[: 3 * CHUNK]).transfer)
    with pytest.raises(ValueError, match=r"is not (in|within) the"):
        cache.retrieve(
            tokens, blank(tokens[: 3 * CHUNK]).transfer, tiers=["disk"]
        )
    assert admin.gauges(ledger)["reserved"] == 0
    # running reads end without a call
    wait_until(lambda: cache.stats()["staging_buffers"] == 0)


def test_a_config_of_another_chunk_length_is_refused(shm_root: Path) -> None:
    with pytest.raises(ConfigError, match="build the layout with"):
        Cache(
            config_of(shm_root, None, chunk_tokens=32),
            namespace=NAMESPACE,
            layout=LAYOUT,
        )


def test_a_namespace_of_another_layout_is_refused(shm_root: Path) -> None:
    with pytest.raises(ValueError, match="leave it out"):
        Cache(
            config_of(shm_root, None),
            namespace=Namespace("m", layout="0" * 16),
            layout=LAYOUT,
        )


def test_without_a_config_the_options_come_from_the_environment(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PAGODA_HOST_PATH", str(shm_root / "here"))
    monkeypatch.setenv("PAGODA_HOST_SIZE", "1MiB")
    with Cache(namespace=NAMESPACE, layout=LAYOUT, min_hit_tokens=7) as cache:
        assert cache.config.chunk_tokens == CHUNK
        assert cache.config.min_hit_tokens == 7
        assert cache.tiers == ("host",)
        assert (shm_root / "here").is_dir()


def test_chunk_tokens_that_contradict_the_layout_are_an_error_wherever_they_stand(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PAGODA_HOST_PATH", str(shm_root / "here"))
    monkeypatch.setenv("PAGODA_HOST_SIZE", "1MiB")
    monkeypatch.setenv("PAGODA_CHUNK_TOKENS", "512")
    with pytest.raises(
        ConfigError, match=r"512 \(environment PAGODA_CHUNK_TOKENS\)"
    ):
        Cache(namespace=NAMESPACE, layout=LAYOUT)
    monkeypatch.delenv("PAGODA_CHUNK_TOKENS")
    (tmp_path / "pagoda.toml").write_text("chunk_tokens = 64")
    with pytest.raises(ConfigError, match=r"64 \(file .*pagoda.toml\)"):
        Cache(namespace=NAMESPACE, layout=LAYOUT)
    with pytest.raises(ConfigError, match=r"32 \(argument chunk_tokens\)"):
        Cache(namespace=NAMESPACE, layout=LAYOUT, chunk_tokens=32)
    Cache(namespace=NAMESPACE, layout=LAYOUT, chunk_tokens=CHUNK).close()


def test_what_is_pinned_outlives_what_is_stored_afterwards(
    shm_root: Path, tmp_path: Path
) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, prompt(8), salt="one")
        assert cache.pin(prompt(9), salt="one", owner="me") == {
            "host": 128,
            "disk": 128,
        }
        assert cache.pin(prompt(8), owner="me") == {"host": 0, "disk": 0}
        for seed in range(1, 12):
            stored(cache, prompt(20, seed))
        assert hit_of(cache, prompt(8), salt="one").by_tier == {"host": 128}
        assert cache.holders(cache.keys(prompt(8), salt="one")[0][2]) == [
            "host",
            "disk",
        ]
        assert cache.unpin(prompt(2), salt="one", owner="me", tiers=["disk"]) == {
            "disk": 2
        }
        assert cache.unpin(owner="me") == {"host": 8, "disk": 6}
        assert cache.unpin() == {"host": 0, "disk": 0}


def test_a_hit_is_true_if_there_is_one(shm_root: Path) -> None:
    with cache_at(shm_root, None) as cache:
        stored(cache, prompt(2))
        assert cache.lookup(prompt(2))
        assert int(cache.lookup(prompt(2))) == 2 * CHUNK
        assert not cache.lookup(prompt(2, 1))
        assert int(cache.lookup(prompt(2, 1))) == 0
        assert not cache.lookup(prompt(0.5))
        assert cache.lookup(prompt(0.5)).reason is Reason.SHORT_PROMPT


def test_a_tier_that_cannot_be_opened_leaves_none_open(
    shm_root: Path, tmp_path: Path
) -> None:
    with pytest.raises(StoreError):
        Cache(
            config_of(shm_root, tmp_path, disk_size=1 << 60),
            namespace=NAMESPACE,
            layout=LAYOUT,
        )
    with cache_at(shm_root, None) as cache:
        assert cache.stats()["tiers"]["host"]["members"] == 1  # type: ignore[index]


def test_given_tiers_take_the_place_of_the_configured(shm_root: Path) -> None:
    tier = HostTier.open(
        LAYOUT, shm_root / "own", 20 * LAYOUT.slot_bytes, shared=False
    )
    with Cache(
        config_of(None, None), namespace=NAMESPACE, layout=LAYOUT, tiers=[tier]
    ) as cache:
        stored(cache, prompt(3))
        assert hit_of(cache, prompt(3)).by_tier == {"host": 48}
    wrong = KVLayout.opaque(CHUNK, 4096, "small")
    tier = HostTier.open(wrong, shm_root / "own", 1 << 20)
    with pytest.raises(ValueError, match="chunks of 4096 bytes"):
        Cache(
            config_of(None, None),
            namespace=NAMESPACE,
            layout=LAYOUT,
            tiers=[tier],
        )
    tier.close()


def test_with_no_tier_at_all_everything_is_a_miss() -> None:
    with Cache(
        config_of(None, None), namespace=NAMESPACE, layout=LAYOUT
    ) as cache:
        tokens = prompt(3)
        assert put(cache, tokens).refused == 3
        assert (
            cache.retrieve(tokens, blank(tokens).transfer).reason is Reason.ABSENT
        )
        assert cache.stats()["misses"] == {"absent": 1}


def test_a_tier_that_cannot_be_closed_leaves_no_other_open(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(
        config_of(shm_root, tmp_path), namespace=NAMESPACE, layout=LAYOUT
    )
    stored(cache, prompt(2))
    host = cache._tiers.host
    [disk] = cache._tiers.lower
    assert host is not None
    close = disk.close

    def fail(timeout: float = 5.0) -> None:
        close(timeout)
        raise OSError("out of order")

    monkeypatch.setattr(disk, "close", fail)
    assert not cache.close(), "the failure is reported"
    for tier in (host, disk):
        assert not tier.match_prefix(cache_keys := keys_of(cache, prompt(2))), (
            cache_keys
        )
    # another process could not open either exclusively
    with cache_at(shm_root, tmp_path) as again:
        assert again._tiers.host is not None
        assert again._tiers.host.ledger is not host.ledger
        assert hit_of(again, prompt(2)).num_tokens == 32


def test_after_close_every_call_is_a_miss(shm_root: Path, tmp_path: Path) -> None:
    with cache_at(shm_root, tmp_path) as cache:
        tokens = prompt(3)
        stored(cache, tokens)
    assert cache.lookup(tokens).reason is Reason.CLOSED
    assert cache.retrieve(tokens, blank(tokens).transfer).reason is Reason.CLOSED
    assert cache.prefetch(tokens).result(60).reason is Reason.CLOSED
    assert put(cache, tokens).reason is Reason.CLOSED
    assert cache.lookup_future(tokens).result(60).reason is Reason.CLOSED
    assert cache.close()


def test_wrong_arguments_are_one_value_error(
    cache: Cache, tmp_path: Path
) -> None:
    tokens = prompt(2)
    for namespace, layout, message in (
        ("a model", LAYOUT, "build one"),
        (NAMESPACE, "dense", "build a KVLayout"),
    ):
        with pytest.raises(ValueError, match=message):
            Cache(
                config_of(tmp_path / "h", None),
                namespace=namespace,
                layout=layout,
            )  # type: ignore[arg-type]
    for wrong in ({"slat": "alice"}, {"start": 5}, {"namespace": "alice"}):
        for call in (cache.lookup, cache.prefetch, cache.explain):
            with pytest.raises(
                ValueError, match=f"{next(iter(wrong))}: no such option; .*salt"
            ):
                call(tokens, **wrong)  # type: ignore[operator]
        with pytest.raises(ValueError, match="no such option"):
            put(cache, tokens, **wrong)  # type: ignore[arg-type]
    stored(cache, tokens)
    for move in (cache.store, cache.retrieve):
        with pytest.raises(
            ValueError, match="kv is of type NoneType: pass a transfer"
        ):
            move(tokens, None)  # type: ignore[operator]


def test_a_run_may_alternate_between_tiers() -> None:
    has = {"host": {1, 3}, "disk": {0, 2}}
    finders = {
        tier: lambda at, tier=tier: (int(at in has[tier]), None) for tier in has
    }
    assert match_tiers(finders, 5) == (4, {"host": 2, "disk": 2}, None)


def test_a_hit_that_the_engine_can_use_in_part_is_counted_in_part(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(6)
    with cache_at(shm_root, tmp_path) as cache:
        stored(cache, tokens[: 2 * CHUNK], tiers=["host"])
        stored(cache, tokens[: 4 * CHUNK], tiers=["disk"])
        assert cache.flush()
        whole = cache.lookup(tokens)
        assert whole.by_tier == {"host": 2 * CHUNK, "disk": 2 * CHUNK}
        part = cache.lookup(
            tokens,
            usable=lambda hit: hit.shortened(3 * CHUNK, Reason.ABSENT, "no more"),
        )
        assert part.by_tier == {"host": 2 * CHUNK, "disk": CHUNK}
        assert part.num_tokens == int(part.mask.sum()) == 3 * CHUNK
        assert part.reason == Reason.ABSENT
        assert part.detail == "no more"
        nothing = cache.lookup(tokens, usable=lambda hit: hit.shortened(0, None))
        assert nothing.num_tokens == 0
        assert nothing.by_tier == {}
        # more than there is
        more = cache.lookup(
            tokens,
            start_tokens=CHUNK,
            usable=lambda hit: hit.shortened(len(tokens), hit.reason),
        )
        assert more.num_tokens == int(more.mask.sum()) == 3 * CHUNK
        counters = counters_of(cache)
        assert counters["lookups"] == 4
        assert counters["hits"] == 3
        assert counters["hit_tokens"] == 10 * CHUNK
