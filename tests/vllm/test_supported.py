"""Every refusal: real configs of vLLM, one thing changed, one sentence with the remedy."""

from __future__ import annotations

import copy
import inspect
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm.configs import BLOCK, allocate, engine_config, make_layers


@pytest.fixture(scope="module")
def engine(llama: Path) -> tuple[Any, Any]:
    """The configs of a plain engine."""
    config = engine_config(llama)
    bare = copy.deepcopy(config)
    return bare, allocate(config, make_layers(config))[0]


@pytest.fixture
def configs(engine: tuple[Any, Any]) -> tuple[Any, Any]:
    """The same, to be changed."""
    return copy.deepcopy(engine[0]), copy.deepcopy(engine[1])


def check(configs: tuple[Any, Any], hybrid: bool = False) -> None:
    """Check this engine; `hybrid`: as that of a model that has Mamba layers, too."""
    from pagoda.connectors.vllm.supported_engines import check_engine

    config, cache_config = configs
    if hybrid:
        groups = cache_config.kv_cache_groups
        mamba = replace(groups[0], kv_cache_spec=_specs()["MambaSpec"])
        cache_config = replace(cache_config, kv_cache_groups=[*groups, mamba])
    check_engine(config, cache_config)


def test_a_plain_engine_is_supported(configs: tuple[Any, Any]) -> None:
    check(configs)
    check(configs, hybrid=True)


def test_so_are_mla_and_layers_of_uniform_kind(configs: tuple[Any, Any]) -> None:
    import torch
    from vllm.v1.kv_cache_interface import (
        MLAAttentionSpec,
        UniformTypeKVCacheSpecs,
    )

    group = configs[1].kv_cache_groups[0]
    mla = MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
    )
    group.kv_cache_spec = mla
    check(configs)
    other = replace(mla, head_size=128)
    group.kv_cache_spec = UniformTypeKVCacheSpecs(
        block_size=BLOCK, kv_cache_specs={"a": mla, "b": other}
    )
    check(configs)


def _set(path: str, value: object) -> Callable[[Any, Any], None]:
    *owners, name = path.split(".")

    def change(config: Any, cache_config: Any) -> None:
        owner = config
        for each in owners:
            owner = getattr(owner, each)
        object.__setattr__(owner, name, value)

    return change


ALWAYS = [
    (
        "parallel_config.pipeline_parallel_size",
        2,
        "pipeline_parallel_size: 2: .*set it to 1",
    ),
    (
        "parallel_config.decode_context_parallel_size",
        2,
        "decode_context_parallel_size: 2: .*set it to 1",
    ),
    (
        "parallel_config.prefill_context_parallel_size",
        2,
        "prefill_context_parallel_size: 2: .*set it to 1",
    ),
    (
        "parallel_config.enable_elastic_ep",
        True,
        "enable_elastic_ep: .*leave it out",
    ),
    (
        "parallel_config.distributed_executor_backend",
        "ray",
        "'ray'.*--distributed-executor-backend mp",
    ),
    (
        "parallel_config.distributed_executor_backend",
        "external_launcher",
        "--distributed-executor-backend mp",
    ),
    ("parallel_config.nnodes", 2, "share a machine's memory; set --nnodes to 1"),
    (
        "cache_config.calculate_kv_scales",
        True,
        "calculate_kv_scales: .*set it to false",
    ),
    (
        "cache_config.prefix_caching_hash_algo",
        "xxhash",
        "'xxhash'.*--prefix-caching-hash-algo sha256",
    ),
    (
        "cache_config.prefix_caching_hash_algo",
        "xxhash_cbor",
        "--prefix-caching-hash-algo sha256",
    ),
    ("model_config.is_encoder_decoder", True, "an encoder and a decoder"),
    ("diffusion_config", SimpleNamespace(), "diffusion"),
    ("attention_config.use_non_causal", True, "use_non_causal.*what follows it"),
    (
        "attention_config.hisparse_config",
        SimpleNamespace(),
        "hisparse_config.*leave it out",
    ),
    (
        "speculative_config",
        SimpleNamespace(method="extract_hidden_states"),
        "extract_hidden_states.*choose another",
    ),
    (
        "speculative_config",
        SimpleNamespace(method="custom_class"),
        "custom_class.*choose another",
    ),
]


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(("path", "value", "says"), ALWAYS)
def test_settings_that_are_refused(
    configs: tuple[Any, Any], path: str, value: object, says: str, hybrid: bool
) -> None:
    _set(path, value)(*configs)
    with pytest.raises(ValueError, match=says):
        check(configs, hybrid)


def test_sha256_cbor_and_speculation_with_a_model_are_not_refused(
    configs: tuple[Any, Any],
) -> None:
    _set("cache_config.prefix_caching_hash_algo", "sha256_cbor")(*configs)
    _set("speculative_config", SimpleNamespace(method="eagle3"))(*configs)
    check(configs)


def test_failed_loads_must_be_recomputed(configs: tuple[Any, Any]) -> None:
    _set("kv_transfer_config.kv_load_failure_policy", "fail")(*configs)
    with pytest.raises(ValueError, match='"kv_load_failure_policy": "recompute"'):
        check(configs)
    # there what is promised is held, and a load fails only with its process
    check(configs, hybrid=True)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_hybrid_model_stores_and_loads(
    configs: tuple[Any, Any], role: str
) -> None:
    _set("kv_transfer_config.kv_role", role)(*configs)
    check(configs)
    with pytest.raises(ValueError, match=r"kv_role.*kv_both"):
        check(configs, hybrid=True)


def test_adapters_need_the_connector_that_knows_their_content(
    configs: tuple[Any, Any],
) -> None:
    _set("lora_config", SimpleNamespace())(*configs)
    check(configs)
    with pytest.raises(ValueError, match="by name and path only"):
        check(configs, hybrid=True)


def _specs() -> dict[str, Any]:
    import torch
    from vllm.v1 import kv_cache_interface as kinds

    heads = {
        "block_size": BLOCK,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": torch.bfloat16,
    }
    return {
        "SlidingWindowSpec": kinds.SlidingWindowSpec(**heads, sliding_window=64),
        "ChunkedLocalAttentionSpec": kinds.ChunkedLocalAttentionSpec(
            **heads, attention_chunk_size=64
        ),
        "SlidingWindowMLASpec": kinds.SlidingWindowMLASpec(
            **heads, sliding_window=64
        ),
        "MambaSpec": kinds.MambaSpec(
            BLOCK, shapes=((4, 4),), dtypes=(torch.float32,)
        ),
        "CrossAttentionSpec": kinds.CrossAttentionSpec(**heads),
        "EncoderOnlyAttentionSpec": kinds.EncoderOnlyAttentionSpec(**heads),
        "SinkFullAttentionSpec": kinds.SinkFullAttentionSpec(**heads, sink_len=4),
        "RSWASpec": kinds.RSWASpec(**heads, rswa_window=64),
        "HiddenStateCacheSpec": kinds.HiddenStateCacheSpec(**heads),
        "CircularBufferSpec": kinds.CircularBufferSpec(**heads),
    }


OF_HYBRIDS = (
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
    "SlidingWindowMLASpec",
    "MambaSpec",
)


@pytest.mark.parametrize(
    "kind",
    [
        *OF_HYBRIDS,
        "CrossAttentionSpec",
        "EncoderOnlyAttentionSpec",
        "SinkFullAttentionSpec",
        "RSWASpec",
        "HiddenStateCacheSpec",
        "CircularBufferSpec",
    ],
)
def test_layers_whose_blocks_are_not_the_kv_of_their_tokens(
    configs: tuple[Any, Any], kind: str
) -> None:
    from pagoda.connectors.vllm.supported_engines import is_hybrid

    assert not is_hybrid(configs[1])
    configs[1].kv_cache_groups[0].kv_cache_spec = _specs()[kind]
    assert is_hybrid(configs[1]) is (kind in OF_HYBRIDS)
    if kind in OF_HYBRIDS:
        check(configs)
        check(configs, hybrid=True)
    else:
        for hybrid in (False, True):
            with pytest.raises(
                ValueError, match=f"{kind} .*leave the connector out"
            ):
                check(configs, hybrid)


def test_a_kind_nobody_has_looked_at_is_refused(configs: tuple[Any, Any]) -> None:
    """A subclass of full attention too: vLLM adds them, and each keeps something else in its
    blocks.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    class NewAttentionSpec(FullAttentionSpec):
        pass

    group = configs[1].kv_cache_groups[0]
    group.kv_cache_spec = NewAttentionSpec(
        **{
            name: getattr(group.kv_cache_spec, name)
            for name in ("block_size", "num_kv_heads", "head_size", "dtype")
        }
    )
    for hybrid in (False, True):
        with pytest.raises(
            ValueError, match=r"NewAttentionSpec are not known here"
        ):
            check(configs, hybrid)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("non_causal", True, "attend to later tokens"),
        ("tokens_per_state", 4, "one state for several tokens"),
    ],
)
def test_full_attention_that_is_not(
    configs: tuple[Any, Any], name: str, value: object, says: str
) -> None:
    group = configs[1].kv_cache_groups[0]
    group.kv_cache_spec = replace(group.kv_cache_spec, **{name: value})
    with pytest.raises(ValueError, match=says):
        check(configs)


def test_unsupported_groups_are_refused(configs: tuple[Any, Any]) -> None:
    from vllm.v1.kv_cache_interface import KVCacheGroupRole

    config, cache_config = configs
    group = cache_config.kv_cache_groups[0]
    two = replace(
        cache_config,
        kv_cache_groups=[
            group,
            replace(group, kv_cache_spec=_specs()["MambaSpec"]),
        ],
    )
    check((config, two))
    with pytest.raises(ValueError, match="keeps no KV cache"):
        check((config, replace(cache_config, kv_cache_groups=[])))
    for change in (
        {"host_resident": True},
        {"role": KVCacheGroupRole.HISPARSE_SOURCE},
        {"enable_kv_transfer": False},
    ):
        with pytest.raises(ValueError, match="HiSparse"):
            check(
                (
                    config,
                    replace(
                        cache_config, kv_cache_groups=[replace(group, **change)]
                    ),
                )
            )
    with pytest.raises(ValueError, match="HiSparse"):
        check((config, replace(cache_config, hisparse_host_num_blocks=4)))


def test_every_kind_that_vllm_knows_is_decided() -> None:
    """A kind that a new vLLM adds is refused until it is listed; this fails so that a developer
    checks it.
    """
    from vllm.v1 import kv_cache_interface as kinds

    from pagoda.connectors.vllm import supported_engines

    ours = {*supported_engines.HYBRID, *supported_engines.WHY}
    abstract = {"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs"}
    theirs = {
        name
        for name, kind in vars(kinds).items()
        if inspect.isclass(kind) and issubclass(kind, kinds.KVCacheSpec)
    }
    assert theirs - abstract - ours == {
        "HiSparseHotSpec",
        "HiSparseResidentSpec",
    }, "refused as not known"
    assert ours <= theirs


@pytest.mark.parametrize(
    ("version", "allowed", "says"),
    [
        ("0.32.0", False, None),
        ("0.32.3.dev1+g123", False, None),
        ("0.33.0", False, None),
        ("0.33.1rc2", False, None),
        ("0.34.0", False, 'not tested.*0.33 was.*"allow_untested_vllm": true'),
        ("0.34.0", True, None),
        ("1.0.0rc1", False, "not tested"),
        ("1.0.0", True, None),
        ("0.31.2", False, "older than 0.32"),
        ("0.31.2", True, "older than 0.32"),
        ("0.9.1", True, "older than 0.32"),
        ("dev", False, "not tested"),
        ("dev", True, None),
    ],
)
def test_untested_versions_are_refused_unless_allowed(
    version: str, allowed: bool, says: str | None
) -> None:
    from pagoda.connectors.vllm.supported_engines import check_version

    if says is None:
        check_version(version, allowed)
    else:
        with pytest.raises(ValueError, match=says):
            check_version(version, allowed)


def test_a_plain_installation_brings_a_version_that_is_accepted() -> None:
    from packaging.requirements import Requirement

    from pagoda.connectors.vllm.supported_engines import TESTED

    project = tomllib.loads(
        (Path(__file__).parents[2] / "pyproject.toml").read_text()
    )["project"]
    (needed,) = map(Requirement, project["optional-dependencies"]["vllm"])
    page = (
        Path(__file__).parents[2] / "docs/reference/vllm-versions.md"
    ).read_text()
    for major, minor in TESTED:
        assert f"\n| {major}.{minor} | " in page
        assert needed.specifier.contains(f"{major}.{minor}.0")
        assert needed.specifier.contains(f"{major}.{minor}.7")
    (oldest_major, oldest), (major, newest) = min(TESTED), max(TESTED)
    assert not needed.specifier.contains(f"{major}.{newest + 1}.0")
    assert not needed.specifier.contains(f"{oldest_major}.{oldest - 1}.9")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("drops", [True, False])
def test_what_the_scheduler_learns_of_the_engine(
    configs: tuple[Any, Any], drops: bool, ranks: int
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from pagoda.connectors.vllm.connector import PagodaConnector

    config, cache_config = configs
    speculative = SimpleNamespace(
        method="eagle", use_eagle_block_drop=lambda: drops
    )
    object.__setattr__(config, "speculative_config", speculative)
    config.parallel_config.data_parallel_size = ranks
    half = PagodaConnector(
        config, KVConnectorRole.SCHEDULER, cache_config
    )._scheduling
    assert half._drops_last_block is drops
    assert half._in_lockstep is (ranks > 1)


def test_the_host_tier_is_needed() -> None:
    from pagoda.connectors.vllm.options import read_options
    from pagoda.connectors.vllm.supported_engines import check_vllm

    check_vllm(read_options({"host_size": "64MiB"}, BLOCK))
    with pytest.raises(ValueError, match=r"host_size = 0: .*set host_size"):
        check_vllm(read_options({"host_size": 0}, BLOCK))
    with pytest.raises(
        ValueError, match=r"host_shared = false: .*leave host_shared at true"
    ):
        check_vllm(read_options({"host_shared": False}, BLOCK))


@pytest.mark.parametrize("kinds", [["MambaSpec"], ["SlidingWindowSpec"], []])
def test_the_connector_of_a_model_is_that_for_its_kinds_of_kv(
    configs: tuple[Any, Any],
    kinds: list[str],
    host: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By the groups that vLLM has made: whatever flags and files they come from. The log has one
    line about it.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import (
        KVConnectorFactory,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from pagoda.connectors.vllm import connector
    from pagoda.connectors.vllm.offloading.hybrid_connector import (
        PagodaHybridConnector,
    )

    config, cache_config = configs
    config.kv_transfer_config.kv_connector_extra_config = {
        "host_path": str(host),
        "store_output": True,
    }
    groups = cache_config.kv_cache_groups
    more = [
        replace(groups[0], layer_names=[kind], kv_cache_spec=_specs()[kind])
        for kind in kinds
    ]
    cache_config = replace(cache_config, kv_cache_groups=[*groups, *more])
    assert KVConnectorFactory.supports_hma_config(config.kv_transfer_config)
    with caplog.at_level("INFO", logger="pagoda"):
        made = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, cache_config
        )
    assert type(made) is (
        PagodaHybridConnector if kinds else connector.PagodaConnector
    )
    assert type(made).__name__ == "PagodaConnector"
    made.shutdown()
    extra = config.kv_transfer_config.kv_connector_extra_config
    assert extra.get("offload_prompt_only") is (False if kinds else None)
    assert extra.get("store_output") is (None if kinds else True)


def test_how_a_model_is_cached_and_why_is_logged(
    configs: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    from pagoda.connectors.vllm.supported_engines import log_choices

    config, cache_config = configs
    with caplog.at_level("INFO", logger="pagoda.vllm"):
        log_choices(config, cache_config)
        groups = cache_config.kv_cache_groups
        window = replace(groups[0], kv_cache_spec=_specs()["SlidingWindowSpec"])
        log_choices(
            config, replace(cache_config, kv_cache_groups=[*groups, window])
        )
    assert caplog.messages == [
        "the model's KV is FullAttentionSpec in 1 group(s): the KV of all tokens is kept",
        "the model's KV is FullAttentionSpec and SlidingWindowSpec in 2 group(s): a hybrid "
        "model, vLLM's offloading "
        "selects the chunks of each kind",
    ]
