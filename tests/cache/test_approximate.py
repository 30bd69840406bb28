"""Caches with a lossy codec: keys of their own, answers that say so, and no start without a verdict
or `unchecked`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.errors import ConfigError
from pagoda.base.metrics import Reason
from pagoda.base.quality_bounds import Bounds, Figures, Interval, objections
from pagoda.base.quality_verdict import Result
from pagoda.cache import Cache, Hit
from pagoda.codec import approximated, codec_setting
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.transfer import BlockKV
from pagoda_tools.quality.write_verdict import write_verdict
from testbed.servers import Server, redis_server
from tests.cache.kit import CHUNK, KV, config_of, prompt
from tests.remote.chunks import fresh_prefix

LAYOUT = KVLayout.dense(2, 2, 32, "float16", CHUNK)
NAMESPACE = Namespace("a-model", weights="w1")
TOKENS = prompt(6)
PATIENT = "deadline=30s&look=30s"


@pytest.fixture(scope="module")
def redis() -> Iterator[Server]:
    with redis_server() as running:
        yield running


@pytest.fixture
def url(redis: Server) -> str:
    return f"{redis.url}/0?prefix={fresh_prefix()}&{PATIENT}"


def kv_of(seed: int = 0) -> KV:
    draw = np.random.default_rng(seed)
    blocks = (
        draw.standard_normal((6, LAYOUT.chunk_bytes // 2))
        .astype("<f2")
        .view(np.uint8)
    )
    return KV(blocks, BlockKV(blocks, LAYOUT))


def blank() -> KV:
    blocks = np.zeros((6, LAYOUT.chunk_bytes), np.uint8)
    return KV(blocks, BlockKV(blocks, LAYOUT))


@contextmanager
def cache_over(
    host: Path | None,
    disk: Path | None = None,
    namespace: Namespace = NAMESPACE,
    **options: object,
) -> Iterator[Cache]:
    with Cache(
        config_of(host, disk, **options), namespace=namespace, layout=LAYOUT
    ) as cache:
        yield cache


def store(cache: Cache) -> KV:
    kv = kv_of()
    assert cache.store(TOKENS, kv.transfer).refused == 0
    assert cache.flush(60)
    return kv


def retrieve(cache: Cache) -> tuple[Hit, KV]:
    kv = blank()
    return cache.retrieve(TOKENS, kv.transfer), kv


def after(codec: str, kv: KV) -> np.ndarray:
    return np.stack(
        [approximated(codec, block, LAYOUT)[0] for block in kv.blocks]
    )


# ---- keys


def test_approximate_kv_is_never_found_under_an_exact_key(
    shm_root: Path, url: str
) -> None:
    """Neither in the store, nor in the host memory to which it came up; and exact KV is not found
    the other way.
    """
    with cache_over(shm_root, remote=f"{url}&codec=q4", unchecked=True) as lossy:
        store(lossy)
        lossy._tiers.host.clear()  # type: ignore[union-attr]
        assert retrieve(lossy)[0].by_tier == {"redis": 96}
        # the decoded bytes are there now
        assert retrieve(lossy)[0].by_tier == {"host": 96}
        with cache_over(shm_root, remote=url) as exact:
            hit, kv = retrieve(exact)
            assert hit.num_tokens == 0
            assert not kv.blocks.any()
            assert not {key for *_, key in lossy.keys(TOKENS)} & {
                key for *_, key in exact.keys(TOKENS)
            }
            computed = store(exact)
            hit, kv = retrieve(exact)
            assert hit.num_tokens == 96
            assert kv.same(computed)
        hit, kv = retrieve(lossy)
        assert np.array_equal(kv.blocks, after("q4", computed))


def test_a_lossy_disk_is_approximate_too(shm_root: Path, tmp_path: Path) -> None:
    with cache_over(shm_root, tmp_path, disk_codec="q8", unchecked=True) as lossy:
        kv = store(lossy)
        lossy._tiers.host.clear()  # type: ignore[union-attr]
        hit, found = retrieve(lossy)
        assert hit.by_tier == {"disk": 96}
        assert np.array_equal(found.blocks, after("q8", kv))
        assert hit.approximate == "q8"
        assert hit.exact_tokens == 0
    with cache_over(shm_root, tmp_path) as exact:
        assert retrieve(exact)[0].num_tokens == 0


def test_each_set_of_codecs_has_keys_of_its_own(url: str, tmp_path: Path) -> None:
    names = []
    roots = set()
    for options in (
        {"remote": url}, {"remote": f"{url}&codec=zstd"}, {"remote": f"{url}&codec=q4"},
        {"remote": f"{url}&codec=q8"}, {"remote": f"{url}&codec=qzstd"},
        {"remote": f"{url}&codec=q8", "disk_codec": "q4"}, {"remote": url, "disk_codec": "q4"},
    ):  # fmt: skip
        with cache_over(None, tmp_path, unchecked=True, **options) as cache:
            names.append(cache.namespace.approximate)
            roots.add(cache.namespace.root)
    assert names == ["", "", "q4", "q8", "qzstd", "q4,q8", "q4"]
    assert len(roots) == 5


def test_a_namespace_that_is_approximate_already_stays_so(url: str) -> None:
    blended = NAMESPACE.with_(approximate="blend")
    with cache_over(
        None, namespace=blended, remote=f"{url}&codec=q4", unchecked=True
    ) as cache:
        assert cache.namespace.approximate == "blend,q4"
    with cache_over(None, namespace=blended, remote=url) as cache:
        assert cache.namespace.approximate == "blend"


def test_tiers_that_are_handed_over_count_too(tmp_path: Path) -> None:
    from pagoda.tiers import DiskTier

    tier = DiskTier.open(LAYOUT, tmp_path, 1 << 20, codec_name="q4")
    config = config_of(None, None, unchecked=True)
    with Cache(config, namespace=NAMESPACE, layout=LAYOUT, tiers=[tier]) as cache:
        assert cache.namespace.approximate == "q4"
        assert cache.stats()["approximate"][0]["checked"] == "unchecked"
    tier = DiskTier.open(LAYOUT, tmp_path, 1 << 20, codec_name="q4")
    with pytest.raises(ConfigError, match="pagoda quality"):
        Cache(
            config_of(None, None),
            namespace=NAMESPACE,
            layout=LAYOUT,
            tiers=[tier],
        )
    tier.close()


def test_an_exact_tier_takes_no_lossy_chunk(url: str) -> None:
    """Also under one key: a lossless tier of an approximate cache meets what another machine's
    lossy tier wrote.
    """
    blended = NAMESPACE.with_(approximate="q4")
    with cache_over(None, remote=f"{url}&codec=q4", unchecked=True) as lossy:
        store(lossy)
        with cache_over(None, namespace=blended, remote=url) as other:
            assert other.namespace.root == lossy.namespace.root
            hit, kv = retrieve(other)
            assert hit.num_tokens == 0
            assert not kv.blocks.any()
        assert retrieve(lossy)[0].num_tokens == 96  # it stayed


# ---- answers


def test_answers_say_which_tokens_are_exact(shm_root: Path, url: str) -> None:
    with cache_over(shm_root, remote=f"{url}&codec=q4", unchecked=True) as lossy:
        kv = store(lossy)
        for hit in (
            lossy.lookup(TOKENS),
            retrieve(lossy)[0],
            lossy.prefetch(TOKENS).result(60),
            lossy.explain(TOKENS),
        ):
            assert hit.approximate == "q4"
            assert hit.num_tokens == 96
            assert hit.exact_tokens == 0
            assert not hit.exact.any()
            assert hit.mask.all()
        # host memory has the bytes that were stored, but no answer relies on that
        assert retrieve(lossy)[1].same(kv)
        counters = lossy.stats()["counters"]
        assert counters["approximate_hit_tokens"] == counters["hit_tokens"] == 288
        assert lossy.lookup(prompt(6, seed=9)).approximate == "q4"
    with cache_over(shm_root, remote=url) as exact:
        store(exact)
        hit = retrieve(exact)[0]
        assert hit.approximate == ""
        assert hit.exact_tokens == 96
        assert np.array_equal(hit.exact, hit.mask)
        assert (
            exact.stats()["counters"]["approximate_hit_tokens"] == 288
        )  # of all processes that share the host tier
        assert "approximate" not in exact.stats()


# ---- the gate


def verdict(
    place: Path,
    codec: str,
    weights: str = "w1",
    top1: float = 0.995,
    chunk_tokens: int = CHUNK,
) -> None:
    found = Figures(
        kl=Interval(0.001, 0.0, 0.002),
        top1=Interval(top1, top1 - 0.001, top1 + 0.001),
        same_text=Interval(0.9, 0.8, 1.0),
        answers=None,
        ttft=Interval(0.4, 0.3, 0.5),
        bytes=0.26,
    )
    bounds = Bounds(kl=0.01, top1=0.99, answers=0.9, prompts=50)
    controls = {"zeroed KV": True}
    reasons = objections(found, bounds, controls, 60, 0.95)
    result = Result(
        codec_setting(codec, chunk_tokens),
        bounds,
        found,
        controls,
        60,
        "ab" * 16,
        16,
        0.95,
        0,
        "2026-01-02T03:04:05Z",
        not reasons,
        reasons,
    )
    write_verdict(
        place,
        model="a model",
        weights=[weights],
        pagoda="0.1.0",
        results=[result],
    )


def test_it_starts_with_a_passing_verdict_only(url: str, tmp_path: Path) -> None:
    remote = f"{url}&codec=q4"
    with (
        pytest.raises(ConfigError, match="pagoda quality"),
        cache_over(None, remote=remote, quality_verdicts=tmp_path),
    ):
        pass
    with cache_over(
        None, remote=remote, quality_verdicts=tmp_path, unchecked=True
    ) as cache:
        (state,) = cache.stats()["approximate"]
        assert state["checked"] == "unchecked"
        assert "q4" in str(state["setting"])
    wrong = {
        "codec": {"codec": "q8"},
        "chunk": {"codec": "q4", "chunk_tokens": 256},
        "bounds": {"codec": "q4", "top1": 0.9},
        "weights": {"codec": "q4", "weights": "w2"},
    }
    for place, options in wrong.items():
        (tmp_path / place).mkdir()
        verdict(tmp_path / place, **options)  # type: ignore[arg-type]
        with (
            pytest.raises(ConfigError),
            cache_over(None, remote=remote, quality_verdicts=tmp_path / place),
        ):
            pass
    (tmp_path / "good").mkdir()
    verdict(tmp_path / "good", "q4")
    with cache_over(
        None, remote=remote, quality_verdicts=tmp_path / "good"
    ) as cache:
        assert [state["checked"] for state in cache.stats()["approximate"]] == [
            "passed"
        ]
        store(cache)
        assert retrieve(cache)[0].num_tokens == 96


def test_every_codec_in_use_needs_its_verdict(url: str, tmp_path: Path) -> None:
    verdict(tmp_path, "q4")
    options = {
        "remote": f"{url}&codec=q4",
        "disk_codec": "q8",
        "quality_verdicts": tmp_path,
    }
    with (
        pytest.raises(ConfigError, match="q8"),
        cache_over(None, tmp_path, **options),
    ):
        pass
    verdict(tmp_path, "q8")
    with cache_over(None, tmp_path, **options) as cache:
        assert [state["checked"] for state in cache.stats()["approximate"]] == [
            "passed",
            "passed",
        ]


def test_lossy_tiers_are_left_out_after_the_weights_have_changed(
    shm_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No verdict is about the new weights. The cache goes on, exact, and the engine gets no
    exception.
    """
    (tmp_path / "verdicts").mkdir()
    verdict(tmp_path / "verdicts", "q4")
    options = {"disk_codec": "q4", "quality_verdicts": tmp_path / "verdicts"}
    with cache_over(shm_root, tmp_path, **options) as cache:
        store(cache)
        assert cache.lookup(TOKENS, tiers=["disk"]).num_tokens == 96
        with caplog.at_level(logging.WARNING):
            cache.weights_changed()
            kv = store(cache)
            hit, found = retrieve(cache)
            assert hit.by_tier == {"host": 96}
            assert found.same(kv)
            assert cache.lookup(TOKENS, tiers=["disk"]).num_tokens == 0
        assert sum("left out" in record.message for record in caplog.records) == 1
    with cache_over(shm_root, tmp_path, disk_codec="q4", unchecked=True) as cache:
        cache.weights_changed()
        store(cache)
        assert cache.lookup(TOKENS, tiers=["disk"]).num_tokens == 96


def test_new_weights_without_a_verdict_find_nothing_that_others_brought_up(
    shm_root: Path, tmp_path: Path
) -> None:
    """Host memory is shared with a cache that is `unchecked`: it has what came up from a lossy
    disk.
    """
    (tmp_path / "verdicts").mkdir()
    verdict(tmp_path / "verdicts", "q4")
    with (
        cache_over(
            shm_root, tmp_path, disk_codec="q4", unchecked=True
        ) as unchecked,
        cache_over(
            shm_root,
            tmp_path,
            disk_codec="q4",
            quality_verdicts=tmp_path / "verdicts",
        ) as measured,
    ):
        unchecked.weights_changed()
        store(unchecked)
        unchecked._tiers.host.clear()  # type: ignore[union-attr]
        assert retrieve(unchecked)[0].by_tier == {"disk": 96}
        assert retrieve(unchecked)[0].by_tier == {"host": 96}
        assert retrieve(measured)[0].num_tokens == 0
        kv = store(measured)
        hit, found = retrieve(measured)
        assert hit.by_tier == {"host": 96}
        assert found.same(kv)


def test_lossy_tiers_are_left_out_for_an_adapter_without_a_verdict(
    shm_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was measured without an adapter says nothing about the KV that it computes."""
    (tmp_path / "verdicts").mkdir()
    verdict(tmp_path / "verdicts", "q4")
    options = {"disk_codec": "q4", "quality_verdicts": tmp_path / "verdicts"}
    with cache_over(shm_root, tmp_path, **options) as cache:
        kv = kv_of()
        for lora, on_disk in ((None, 96), ("style", 0)):
            assert cache.store(TOKENS, kv.transfer, lora=lora).refused == 0
            assert cache.flush(60)
            assert (
                cache.lookup(TOKENS, tiers=["host"], lora=lora).num_tokens == 96
            )
            assert (
                cache.lookup(TOKENS, tiers=["disk"], lora=lora).num_tokens
                == on_disk
            )
        assert [state["checked"] for state in cache.stats()["approximate"]] == [
            "passed",
            "left out",
        ]
        assert sum("left out" in record.message for record in caplog.records) == 1
    verdict(tmp_path / "verdicts", "q4", weights="w1+adapters style")
    with cache_over(shm_root, tmp_path, **options) as cache:
        assert cache.store(TOKENS, kv.transfer, lora="style").refused == 0
        assert cache.flush(60)
        assert cache.lookup(TOKENS, tiers=["disk"], lora="style").num_tokens == 96
        assert [state["checked"] for state in cache.stats()["approximate"]] == [
            "passed"
        ]
    with (
        pytest.raises(ConfigError, match="other"),
        cache_over(
            None, tmp_path, namespace=NAMESPACE.with_(lora="other"), **options
        ),
    ):
        pass


def test_stats_are_about_the_present_weights(tmp_path: Path) -> None:
    """A verdict of the weights before is no verdict of these, also where it need not be one."""
    (tmp_path / "verdicts").mkdir()
    verdict(tmp_path / "verdicts", "q4")
    for unchecked, after in ((False, "left out"), (True, "unchecked")):
        options = {
            "disk_codec": "q4",
            "quality_verdicts": tmp_path / "verdicts",
            "unchecked": unchecked,
        }
        with cache_over(None, tmp_path, **options) as cache:
            assert [
                state["checked"] for state in cache.stats()["approximate"]
            ] == ["passed"]
            cache.weights_changed("step 2")
            (state,) = cache.stats()["approximate"]
            assert state["checked"] == after
            assert "step 2" in str(state["detail"])


def test_a_verdict_of_an_adapter_is_for_it_and_for_the_weights_that_it_names(
    shm_root: Path, tmp_path: Path
) -> None:
    (tmp_path / "verdicts").mkdir()
    verdict(tmp_path / "verdicts", "q4")
    present = NAMESPACE.of_version("step 2").weights
    verdict(tmp_path / "verdicts", "q4", weights=f"{present}+adapters style")
    options = {"disk_codec": "q4", "quality_verdicts": tmp_path / "verdicts"}
    with cache_over(shm_root, tmp_path, **options) as cache:
        for version, expected in (
            ("", {"style": 0, "": 96}),
            ("step 2", {"style": 96, "": 0}),
        ):
            if version:
                cache.weights_changed(version)
            # the adapter is the first to be asked about
            for lora, on_disk in expected.items():
                assert (
                    cache.store(TOKENS, kv_of().transfer, lora=lora).refused == 0
                )
                assert cache.flush(60)
                assert (
                    cache.lookup(TOKENS, tiers=["disk"], lora=lora).num_tokens
                    == on_disk
                )
        verdict(
            tmp_path / "verdicts",
            "q4",
            weights=NAMESPACE.of_version("step 3").weights,
        )
        # nothing is known of adapters with these weights
        cache.weights_changed("step 3")
        assert [state["checked"] for state in cache.stats()["approximate"]] == [
            "passed"
        ]


def test_a_verdict_of_weights_with_an_epoch(tmp_path: Path) -> None:
    """The cache begins with the weights that the gate was asked about."""
    (tmp_path / "verdicts").mkdir()
    verdict(tmp_path / "verdicts", "q4", weights="w1+epoch3")
    namespace = NAMESPACE.with_(weights_epoch=3)
    options = {"disk_codec": "q4", "quality_verdicts": tmp_path / "verdicts"}
    with cache_over(None, tmp_path, namespace=namespace, **options) as cache:
        store(cache)
        assert retrieve(cache)[0].by_tier == {"disk": 96}


def test_opaque_pages_are_refused_before_anything_is_opened(
    url: str, tmp_path: Path
) -> None:
    pages = KVLayout.opaque(CHUNK, 8192, "pages")
    for options in ({"remote": f"{url}&codec=q4"}, {"disk_codec": "q8"}):
        config = config_of(None, tmp_path, unchecked=True, **options)
        with pytest.raises(
            ConfigError, match="the pages of this layout are opaque"
        ):
            Cache(config, namespace=NAMESPACE, layout=pages)
    assert not list(tmp_path.iterdir())


def test_the_host_tier_has_no_codec() -> None:
    from pagoda.config import option_names

    assert [name for name in option_names() if "codec" in name] == ["disk_codec"]


# ---- what was not lost


def test_chunks_that_are_not_finite_come_back_as_they_were(url: str) -> None:
    with cache_over(None, remote=f"{url}&codec=q4", unchecked=True) as cache:
        kv = kv_of()
        kv.blocks.view("<f2")[2, 5] = np.inf
        assert cache.store(TOKENS, kv.transfer).refused == 0
        assert cache.flush(60)
        hit, found = retrieve(cache)
        assert hit.num_tokens == 96
        assert np.array_equal(found.blocks[2], kv.blocks[2])
        assert np.array_equal(
            np.delete(found.blocks, 2, 0), np.delete(after("q4", kv), 2, 0)
        )


def test_damaged_bytes_in_the_store_are_a_miss(url: str, redis: Server) -> None:
    import redis as client

    with cache_over(None, remote=f"{url}&codec=qzstd", unchecked=True) as cache:
        store(cache)
        server = client.Redis(port=redis.port)
        prefix = url.partition("prefix=")[2].partition("&")[0]
        name = next(
            name
            for name in server.scan_iter(f"{prefix}*")
            if cache.keys(TOKENS)[3][2].hex().encode() in name
        )
        field, value = max(
            server.hgetall(name).items(), key=lambda item: len(item[1])
        )
        server.hset(
            name, field, value[:200] + bytes([value[200] ^ 1]) + value[201:]
        )
        hit, _ = retrieve(cache)
        assert hit.num_tokens == 48
        assert hit.reason is Reason.FAILED_CHECK
