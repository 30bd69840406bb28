"""Real host pools of SGLang, without a radix cache: all formats, hybrids by the v2 calls, ranks,
identity, options.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagoda.base.errors import ConfigError
from pagoda.config import option_names
from pagoda.connectors.sglang import engine_facts as facts
from pagoda.connectors.sglang import storage_options
from tests.ledger.support import gate_taken
from tests.sglang.engines import Shape, storage_config

from sglang.srt.arg_groups.arg_utils import record_fields  # isort: skip

# isort: skip
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo

from sglang.srt.mem_cache.hicache_storage import (  # isort: skip
    HiCacheFile,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)

# isort: skip
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # isort: skip
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # isort: skip
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # isort: skip
from sglang.srt.runtime_context import get_context  # isort: skip
from sglang.srt.server_args import ServerArgs  # isort: skip

from pagoda.connectors.sglang import PagodaHiCache  # isort: skip

PAGE = 16
PAGES = 24
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
KEYS = [f"{number:064x}" for number in range(PAGES)]


@pytest.fixture(autouse=True)
def _server_args() -> Iterator[None]:
    with get_context().override_server_args(device="cpu"):
        yield


def mha(
    layout: str,
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 2,
    page: int = PAGE,
) -> Any:
    """A host pool of K and V."""
    device = MHATokenToKVPool(
        size=8 * page,
        page_size=page,
        dtype=dtype,
        head_num=heads,
        head_dim=32,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    return MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        0.0,
        0,
        page,
        layout,
        pin_memory=False,
        device_capacity_tokens=8 * page,
        start_layer=0,
        end_layer=3,
        host_token_capacity=PAGES * page,
    )


def mla(layout: str) -> Any:
    """A host pool of latent attention."""
    device = MLATokenToKVPool(
        size=8 * PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    return MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        0.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=8 * PAGE,
        start_layer=0,
        end_layer=3,
        target_layer_num=3,
        host_token_capacity=PAGES * PAGE,
    )


def mamba() -> Any:
    """A host pool of recurrent states: one slot a page."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(2, 12, 4, 8, dtype=torch.float32),
        conv=(torch.zeros(2, 12, 24, 3, dtype=torch.bfloat16),),
    )
    return MambaPoolHost(
        info, 2.0, 0, device_capacity=12, pin_memory=False, layout="page_first"
    )


def config(extra: dict[str, Any], **facts: Any) -> HiCacheStorageConfig:
    """What SGLang's controller gives a storage."""
    plain: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "model_name": "a-model",
    }
    return HiCacheStorageConfig(**{**plain, **facts}, extra_config=dict(extra))


@contextmanager
def storage(
    extra: dict[str, Any], pools: dict[str, Any], **facts: Any
) -> Iterator[Any]:
    """A storage over these pools; the first is that of the KV."""
    made = PagodaHiCache(config(extra, **facts), {})
    made.register_mem_pool_host(pools["kv"])
    for name, pool in pools.items():
        made.register_mem_host_pool_v2(pool, PoolName(name))
    made.on_host_pools_registered()
    try:
        yield made
    finally:
        made.close()


def fill(pool: Any, seed: int = 0) -> list[torch.Tensor]:
    """Write random bytes into all of a pool; return a copy of them."""
    draw = torch.Generator().manual_seed(seed)
    for buffer in _buffers(pool):
        flat = buffer.view(torch.uint8) if buffer.is_contiguous() else buffer
        flat.copy_(
            torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=draw)
        )
    return [buffer.clone() for buffer in _buffers(pool)]


def same(pool: Any, before: list[torch.Tensor]) -> bool:
    """Whether a pool has these bytes."""
    return all(
        equal(now, then) for now, then in zip(_buffers(pool), before, strict=True)
    )


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bytes, those that are no numbers too."""
    return torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def _buffers(pool: Any) -> list[torch.Tensor]:
    return (
        list(pool.kv_buffer)
        if isinstance(pool.kv_buffer, list)
        else [pool.kv_buffer]
    )


def slots(pool: Any, pages: range | list[int]) -> torch.Tensor:
    """SGLang's indices of these pages."""
    size = pool.page_size
    return torch.cat(
        [torch.arange(page * size, (page + 1) * size) for page in pages]
    )


# ---- formats


@pytest.mark.parametrize(
    "pool",
    [
        *(
            (lambda layout=layout: mha(layout))
            for layout in (*LAYOUTS, "page_head")
        ),
        *((lambda layout=layout: mla(layout)) for layout in LAYOUTS),
        lambda: mha("page_first", page=1),
        lambda: mha("layer_first", torch.float32, heads=1),
    ],
)
@pytest.mark.parametrize("disk", [False, True])
def test_every_byte_of_every_format_comes_back(
    shm_root: Path, tmp_path: Path, pool: Any, disk: bool
) -> None:
    """Pages go out in one order of slots and come back in another."""
    extra = (
        storage_config(
            shm_root, disk_path=str(tmp_path / "disk"), disk_size="16MiB"
        )
        if disk
        else storage_config(shm_root)
    )
    kv = pool()
    before = fill(kv)
    with storage(extra, {"kv": kv}) as made:
        assert made.batch_exists(KEYS) == 0
        assert made.batch_set_v1(KEYS, slots(kv, range(PAGES))) == [True] * PAGES
        assert made.batch_exists(KEYS) == PAGES
        assert sum(made.get_stats().backup_pgs) == PAGES
    if disk:
        shutil.rmtree(shm_root / "host")
    with storage(extra, {"kv": kv}) as made:
        fill(kv, seed=1)
        back = list(reversed(range(PAGES)))
        assert made.batch_get_v1(KEYS[::-1], slots(kv, back)) == [True] * PAGES
        assert same(kv, before)
        info = HiCacheStorageExtraInfo(prefix_keys=KEYS[:7])
        assert made.batch_exists(KEYS[7:], info) == PAGES - 7
        fill(kv, seed=1)
        made.batch_get_v1(KEYS[:7], slots(kv, range(7)))
        assert made.batch_get_v1(KEYS[7:], slots(kv, range(7, PAGES)), info) == [
            True
        ] * (PAGES - 7)
        assert same(kv, before)
        assert made.batch_exists([*KEYS[:3], "f" * 64, *KEYS[3:]]) == 3
        assert made.batch_get_v1([*KEYS[:2], "f" * 64], slots(kv, range(3))) == [
            True,
            True,
            False,
        ]


# ---- hybrids


@pytest.mark.parametrize(
    ("name", "side"),
    [("swa", lambda: mha("page_first", heads=1)), ("mamba", mamba)],
)
def test_a_hybrid_comes_back_with_its_windows(
    shm_root: Path, name: str, side: Any
) -> None:
    """The side pool has the last two pages of a span, at two ends; a hit ends where it has its
    window.
    """
    kv = mha("page_first")
    pool = side()
    before = fill(kv)
    beside = fill(pool, seed=2)
    with storage(storage_config(shm_root), {"kv": kv, name: pool}) as made:
        assert all(made.batch_set_v1(KEYS[:12], slots(kv, range(12))))
        for pages in ([4, 5], [8, 9]):
            transfer = PoolTransfer(
                PoolName(name),
                slots(pool, pages),
                keys=[KEYS[page] for page in pages],
            )
            info = HiCacheStorageExtraInfo(prefix_keys=KEYS[: pages[0]])
            assert made.batch_set_v2([transfer], info) == {name: [True, True]}
        asked = PoolTransfer(
            PoolName(name), keys=["", ""], hit_policy=PoolHitPolicy.TRAILING_PAGES
        )
        found = made.batch_exists_v2(KEYS, [asked])
        assert found.kv_hit_pages == 10
        assert found.restorable_prefix_pages == [6, 10]
        assert found.extra_pool_hit_pages == {"kv": 12, name: 10}
        assert made.batch_exists_v2(
            KEYS[:9], [asked]
        ).restorable_prefix_pages == [6]
        everywhere = PoolTransfer(
            PoolName(name), hit_policy=PoolHitPolicy.ALL_PAGES
        )
        assert made.batch_exists_v2(KEYS, [everywhere]).kv_hit_pages == 0
        fill(kv, seed=3)
        fill(pool, seed=4)
        assert made.batch_get_v1(KEYS[:10], slots(kv, range(10))) == [True] * 10
        for pages in ([4, 5], [8, 9]):
            transfer = PoolTransfer(
                PoolName(name),
                slots(pool, pages),
                keys=[KEYS[page] for page in pages],
            )
            assert made.batch_get_v2([transfer]) == {name: [True, True]}
        for page in (4, 5, 8, 9):
            for now, then in zip(_buffers(pool), beside, strict=True):
                if name == "mamba":
                    assert equal(now[page], then[page])
                else:
                    at = slice(page * PAGE, (page + 1) * PAGE)
                    assert equal(now[:, at], then[:, at])
        assert equal(kv.kv_buffer[:, : 10 * PAGE], before[0][:, : 10 * PAGE])


@pytest.mark.parametrize("seed", range(12))
def test_usable_prefixes_are_those_of_the_definition(
    shm_root: Path, tmp_path: Path, seed: int
) -> None:
    """Random pages of two side pools, with holes: the prefix that is reported is that of the
    definition and of SGLang's own storage.
    """
    draw = random.Random(seed)
    pools = {
        "kv": mha("page_first"),
        "swa": mha("page_first", heads=1),
        "mamba": mamba(),
    }
    sparse = {
        name: {page for page in range(12) if draw.random() < 0.6}
        for name in ("swa", "mamba")
    }
    full = draw.randrange(4, 13)
    asked = [
        PoolTransfer(
            PoolName.SWA,
            keys=[""] * draw.randrange(1, 4),
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        ),
        PoolTransfer(
            PoolName.MAMBA,
            keys=[""],
            hit_policy=draw.choice(list(PoolHitPolicy)[:2]),
        ),
    ]
    theirs = HiCacheFile(config({}), file_path=str(tmp_path))
    with storage(storage_config(shm_root), pools) as made:
        made.batch_set_v1(KEYS[:full], slots(pools["kv"], range(full)))
        for page in range(full):
            theirs.set(KEYS[page], torch.zeros(1))
        for name, pages in sparse.items():
            for page in pages:
                theirs.set(f"{KEYS[page]}.{name}", torch.zeros(1))
                made.batch_set_v2(
                    [
                        PoolTransfer(
                            PoolName(name),
                            slots(pools[name], [page]),
                            keys=[KEYS[page]],
                        )
                    ]
                )

        def has(transfer: PoolTransfer, end: int) -> bool:
            window = (
                len(transfer.keys or ())
                if transfer.hit_policy is PoolHitPolicy.TRAILING_PAGES
                else end
            )
            return (
                set(range(max(0, end - window), end))
                <= sparse[str(transfer.name)]
            )

        usable = [
            end
            for end in range(1, full + 1)
            if all(has(transfer, end) for transfer in asked)
        ]
        for transfers in (asked, asked[::-1]):
            found = made.batch_exists_v2(KEYS[:12], transfers)
            assert found.restorable_prefix_pages == usable
            assert found.kv_hit_pages == max(usable, default=0)
            assert found == theirs.batch_exists_v2(KEYS[:12], transfers)


def test_a_window_of_many_pages_is_found(shm_root: Path) -> None:
    """A window of 4,096 tokens has 256 pages of 16 tokens, and 4,096 of one: too many for a look at
    each.
    """
    pools = {
        "kv": mha("page_first", page=1),
        "swa": mha("page_first", heads=1, page=1),
    }
    keys = [f"{number:064x}" for number in range(700)]
    hole = 300
    with storage(storage_config(shm_root), pools) as made:
        for at in range(0, len(keys), PAGES):
            few = keys[at : at + PAGES]
            assert all(
                made.batch_set_v1(few, slots(pools["kv"], range(len(few))))
            )
            some = [key for key in few if key != keys[hole]]
            one = PoolTransfer(
                PoolName.SWA, slots(pools["swa"], range(len(some))), keys=some
            )
            assert all(made.batch_set_v2([one])["swa"])
        asked = PoolTransfer(
            PoolName.SWA, keys=[""] * 350, hit_policy=PoolHitPolicy.TRAILING_PAGES
        )
        ends = made.batch_exists_v2(keys, [asked]).restorable_prefix_pages
        assert ends == [*range(1, hole + 1), *range(hole + 351, 701)]


def test_a_pool_that_comes_late_is_stored_or_said_not_to_be(
    shm_root: Path,
) -> None:
    """SGLang registers pools of drafts later; one without fixed pages must not end the engine."""
    kv = mha("page_first")
    draft = mha("page_first", heads=1)
    with storage(storage_config(shm_root), {"kv": kv}) as made:
        made.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        made.register_mem_host_pool_v2(
            SimpleNamespace(
                page_size=PAGE, page_num=4, layout="odd", dtype="odd"
            ),
            PoolName.INDEXER,
        )
        good = PoolTransfer(PoolName.DRAFT, slots(draft, range(2)), keys=KEYS[:2])
        bad = PoolTransfer(
            PoolName.INDEXER, slots(draft, range(2)), keys=KEYS[:2]
        )
        assert made.batch_set_v2([good, bad]) == {
            "draft": [True, True],
            "indexer": [False, False],
        }


# ---- trouble


def test_pages_that_are_lost_between_a_look_up_and_its_load_are_a_miss_that_is_counted(
    shm_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator clears the store; a tier that fails or takes too long ends a load in the same
    way.
    """
    kv = mha("page_first")
    with storage(storage_config(shm_root), {"kv": kv}) as made:
        cache = made._pools["kv"].cache
        assert all(made.batch_set_v1(KEYS, slots(kv, range(PAGES))))
        assert made.batch_exists(KEYS) == PAGES
        assert not cache.stats()["misses"]
        cache.clear()
        assert made.batch_get_v1(KEYS, slots(kv, range(PAGES))) == [False] * PAGES
        assert sum(cache.stats()["misses"].values()) == 1
        assert f"{PAGES} of {PAGES} pages of 'kv' were not loaded" in caplog.text


def test_a_thread_that_asks_all_pools_of_a_stuck_storage_ends_in_time(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks them one after the other, and a flush of SGLang waits until it has ended."""
    monkeypatch.setattr(storage_options, "LIMIT_SECONDS", 0.3)
    pools = {
        "kv": mha("page_first"),
        "swa": mha("page_first", heads=1),
        "mamba": mamba(),
    }
    asked = PoolTransfer(
        PoolName.SWA, keys=["", ""], hit_policy=PoolHitPolicy.TRAILING_PAGES
    )
    with (
        storage(storage_config(shm_root, deadline_seconds=4), pools) as made,
        ExitStack() as stuck,
    ):
        assert all(made.batch_set_v1(KEYS, slots(pools["kv"], range(PAGES))))
        for pool in made._pools.values():
            stuck.enter_context(
                gate_taken(dict(pool.cache._tiers.ledgers())["host"])
            )
        new = ["a" * 64, "b" * 64]
        transfers = [
            PoolTransfer(PoolName(name), slots(pool, range(2)), keys=new)
            for name, pool in pools.items()
        ]
        began = time.monotonic()
        assert made.batch_set_v2(transfers) == {
            name: [False, False] for name in pools
        }
        assert made.batch_exists_v2(KEYS, [asked]).kv_hit_pages == 0
        assert time.monotonic() - began < 4.0  # deadline_seconds of one pool


# ---- ranks and identity


def stores_as(shm_root: Path, pool: Any, **facts: Any) -> Any:
    """Whether a storage with these facts finds what one without them has stored."""
    extra = storage_config(shm_root, **facts.pop("extra", {}))
    with storage(extra, {"kv": pool}, **facts) as made:
        return made.batch_exists(KEYS) == PAGES


def test_ranks_never_find_each_others_pages_but_of_latent_attention(
    shm_root: Path,
) -> None:
    """Each rank has its heads; with latent attention all have the same, and only the first
    writes.
    """
    kv = mha("page_first")
    latent = mla("page_first")
    for pool, more in ((kv, {}), (latent, {"is_mla_model": True})):
        with storage(
            storage_config(shm_root), {"kv": pool}, tp_size=2, **more
        ) as made:
            assert all(made.batch_set_v1(KEYS, slots(pool, range(PAGES))))
    assert stores_as(shm_root, kv, tp_size=2)
    assert stores_as(shm_root, kv, tp_size=2, dp_rank=1)  # it has the same heads
    for others in (
        {"tp_size": 2, "tp_rank": 1},
        {},
        {"tp_size": 2, "pp_size": 2},
        {"tp_size": 2, "attn_cp_size": 2},
    ):
        assert not stores_as(shm_root, kv, **others), others
    assert stores_as(shm_root, latent, is_mla_model=True, tp_size=2, tp_rank=1)


def test_options_of_blending_are_named_once_as_doing_nothing_here(
    shm_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {**storage_config(shm_root), "blend_recompute": 0.15}
    for rank in (0, 1):
        with storage(extra, {"kv": mha("page_first")}, tp_size=2, tp_rank=rank):
            pass
    (line,) = [line for line in caplog.messages if "blended" in line]
    assert line.startswith(
        "blend_recompute (argument blend_recompute): SGLang counts prefixes only"
    )


@pytest.mark.parametrize(
    ("name", "side"), [("mamba", mamba), ("draft", lambda: mha("page_first"))]
)
def test_beside_latent_attention_ranks_have_states_and_drafts_of_their_own(
    shm_root: Path, name: str, side: Any
) -> None:
    """Only the latent KV is the same in all ranks: states and the heads of a draft are not."""
    pools = {"kv": mla("page_first"), name: side()}
    ranks = {"is_mla_model": True, "tp_size": 2}
    few = PoolTransfer(
        PoolName(name), slots(pools[name], range(2)), keys=KEYS[:2]
    )
    with storage(storage_config(shm_root), pools, **ranks) as made:
        assert all(made.batch_set_v1(KEYS[:2], slots(pools["kv"], range(2))))
        assert made.batch_set_v2([few]) == {name: [True, True]}
    with storage(storage_config(shm_root), pools, **ranks, tp_rank=1) as made:
        assert made.batch_exists(KEYS[:2]) == 2
        assert made.batch_get_v2([few]) == {name: [False, False]}


def test_layouts_whose_pieces_have_one_size_never_share(shm_root: Path) -> None:
    """Their bytes have different orders; so do those of two dtypes of one width, and of other
    heads.
    """
    with storage(storage_config(shm_root), {"kv": mha("page_first")}) as made:
        assert all(
            made.batch_set_v1(KEYS, slots(mha("page_first"), range(PAGES)))
        )
    assert stores_as(shm_root, mha("page_first"))
    for other in (
        mha("page_first_direct"),
        mha("page_head"),
        mha("page_first", torch.float16),
    ):
        assert not stores_as(shm_root, other), other.layout


def test_the_weights_are_those_of_the_server(
    shm_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a name for them, the digest of the checkpoint's files; settings of the server count
    too.
    """
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"some weights")
    kv = mha("page_first")
    extra = {"extra": {"weights": None}}
    del extra["extra"]["weights"]

    def found(**args: Any) -> bool:
        settings = {"model_path": str(tmp_path), "device": "cpu", **args}
        plain = storage_config(shm_root)
        name = str(args.get("served_model_name"))
        del plain["weights"]
        with (
            get_context().override_server_args(**settings),
            storage(plain, {"kv": kv}, model_name=name) as made,
        ):
            return bool(
                made.batch_exists(KEYS) == PAGES
                or not made.batch_set_v1(KEYS, slots(kv, range(PAGES)))
            )

    assert not found()
    assert found()
    assert not found(kv_cache_dtype="fp8_e5m2")
    assert not found(json_model_override_args='{"rope_theta": 1}')
    # their output is added a layer later
    assert not found(kt_max_deferred_experts_per_token=2)
    assert not found(cp_strategy="zigzag")
    with monkeypatch.context() as changed:
        changed.setenv(
            "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR", "500"
        )
        assert not found()
        assert found()
        changed.setenv(
            "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR", "900"
        )
        assert not found()
    monkeypatch.setenv("SGLANG_RUN_ID", "of each start another")
    assert found(served_model_name="another name", port=31000)
    for setting in ("speculative_draft_model_path", "lora_paths"):
        beside = tmp_path / setting
        beside.mkdir()
        (beside / "adapter_config.json").write_text("{}")
        (beside / "adapter_model.safetensors").write_bytes(b"one")
        named = {
            setting: [{"lora_path": str(beside)}]
            if setting == "lora_paths"
            else str(beside)
        }
        assert not found(**named)
        assert found(**named)
        (beside / "adapter_model.safetensors").write_bytes(b"other")
        assert not found(**named)
    with monkeypatch.context() as changed:
        changed.setattr(storage_options, "TESTED", ("0.5.24",))
        changed.setattr("sglang.__version__", "0.5.24")
        assert not found()
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert not found()
    assert found()
    (tmp_path / "config.json").write_text('{"rope_theta": 2}')
    assert not found()
    assert found()
    # how images become a model's input
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert not found()
    assert found()
    (tmp_path / "scales.json").write_text("{}")
    scaled = {"quantization_param_path": str(tmp_path / "scales.json")}
    assert not found(**scaled)
    assert found(**scaled)
    (tmp_path / "scales.json").write_text('{"kv_cache": 2}')
    assert not found(**scaled)
    assert found(**scaled)
    experts = tmp_path / "experts"
    experts.mkdir()
    (experts / "0.gguf").write_bytes(b"one")
    assert not found(kt_weight_path=str(experts))
    assert found(kt_weight_path=str(experts))
    (experts / "1.gguf").write_bytes(b"two")
    assert not found(kt_weight_path=str(experts))
    with pytest.raises(ConfigError, match=r"--kt-weight-path .* local file"):
        found(kt_weight_path=str(tmp_path / "nowhere"))


def test_sglang_has_all_settings_that_are_named() -> None:
    """One that it renames would no longer count."""
    known = {field.name for field in record_fields(ServerArgs)}
    assert {*facts._SETTINGS, *facts._FILES} <= known


def test_an_adapter_is_named_by_its_content(tmp_path: Path) -> None:
    """SGLang's keys have the name and the path of an adapter of the command line, whatever is
    there.
    """
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    named = set()
    for weights in (b"one", b"another"):
        (adapter / "adapter_model.safetensors").write_bytes(weights)
        listed = [
            {"lora_path": str(adapter)},
            SimpleNamespace(lora_path=str(adapter)),
        ]
        named |= {facts._adapters(listed[:1]), facts._adapters(listed[1:])}
    assert len(named) == 2
    assert facts._adapters([]) == ""
    with pytest.raises(ConfigError, match="cannot be read"):
        facts._adapters([str(tmp_path / "nothing")])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"host_sise": "1GiB"}, "host_size"),
        ({"chunk_tokens": 256}, "--page-size"),
        ({"host_size": 0}, "host_size = 0"),
        ({"host_size": "many"}, "host_size"),
        ({"min_hit_tokens": 512}, "prefetch_threshold"),
        ({"deadline_seconds": 4.5}, "deadline_seconds = 4.5: SGLang ends itself"),
        ({"salt": 7}, "salt = 7"),
        ({"allow_untested_sglang": "yes"}, "true or false"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(
    shm_root: Path, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PagodaHiCache(config({**storage_config(shm_root), **extra}), {})


def test_what_cannot_work_is_refused_at_the_start(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No weights to name, no room, a pool without bytes, another SGLang."""
    kv = mha("page_first")
    extra = storage_config(shm_root)
    unnamed = {name: value for name, value in extra.items() if name != "weights"}
    with (
        get_context().override_server_args(model_path=str(shm_root / "nothing")),
        pytest.raises(ConfigError, match="weights"),
        storage(unnamed, {"kv": kv}),
    ):
        pass
    with (
        pytest.raises(ValueError, match="no room"),
        storage({**extra, "host_size": 4096}, {"kv": kv}),
    ):
        pass
    empty = SimpleNamespace(
        page_size=PAGE,
        page_num=4,
        layout="page_first",
        dtype="uint8",
        get_page_buffer_meta=lambda _: None,
    )
    with (
        pytest.raises(ConfigError, match="no bytes"),
        storage(extra, {"kv": empty}),
    ):
        pass
    monkeypatch.setattr(storage_options, "TESTED", ("0.4.0",))
    with pytest.raises(ConfigError, match="allow_untested_sglang"):
        PagodaHiCache(config(extra), {})
    PagodaHiCache(config({**extra, "allow_untested_sglang": True}), {})


def test_a_pool_whose_pages_are_not_side_by_side_is_refused(
    shm_root: Path,
) -> None:
    """Its pages would be looked for where others are."""
    kv = mha("page_first")
    for shift in (lambda page: 64 * (page == PAGES - 1), lambda page: -64 * page):

        def moved(
            indices: torch.Tensor, shift: Any = shift
        ) -> tuple[list[int], list[int]]:
            addresses, sizes = type(kv).get_page_buffer_meta(kv, indices)
            return [
                at + shift(int(indices[0]) // PAGE) for at in addresses
            ], sizes

        kv.get_page_buffer_meta = moved
        with (
            pytest.raises(ConfigError, match="no regular pages"),
            storage(storage_config(shm_root), {"kv": kv}),
        ):
            pass


def test_the_storage_asks_for_the_calls_without_a_detour(shm_root: Path) -> None:
    given = config(storage_config(shm_root))
    PagodaHiCache(given, {})
    assert given.extra_config["interface_v1"] == 1
    assert not set(option_names()) & set(storage_options.OF_SGLANG)
    assert Shape().page == PAGE
