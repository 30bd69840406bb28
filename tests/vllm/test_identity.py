"""What names an engine's KV: other weights have another name, the same weights the same name
everywhere.
"""

from __future__ import annotations

import copy
import enum
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pagoda.connectors.identity.plain_values import plain
from pagoda.connectors.vllm.identity.engine_namespace import (
    namespace_of,
    weights_digest,
)
from pagoda.connectors.vllm.options import read_options
from tests.vllm import models
from tests.vllm.configs import allocate, engine_config, flip, make_layers
from tests.vllm.test_adapters import name_of


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Path:
    """The Llama in a directory of the test's own."""
    return Path(shutil.copytree(llama, tmp_path / "llama"))


def digest(model: Path, **options: Any) -> str:
    return weights_digest(engine_config(model, **options))


def edit_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ---- one checkpoint


@pytest.mark.slow
def test_another_process_says_the_same_of_a_copy(
    llama: Path, model: Path, tmp_path: Path
) -> None:
    """Weights, adapters and memory are named alike by a process that started later, of a copy
    elsewhere.
    """
    from pagoda.connectors.vllm.kv_memory import inspect_kv_caches

    adapter = models.make_lora(tmp_path / "adapter", 5)
    copied = Path(shutil.copytree(adapter, tmp_path / "copy"))
    config = engine_config(llama)
    here = [weights_digest(config), name_of(adapter)]
    cache_config, kv_caches = allocate(config, make_layers(config))
    here += [
        inspect_kv_caches(kv_caches, config, cache_config).description,
        weights_digest(config),
    ]
    assert here[0] == here[3], (
        "what vLLM does to its config on the way must not rename the weights"
    )
    program = (
        "import json, sys; from pathlib import Path; from tests.vllm.configs import *;"
        "from pagoda.connectors.vllm.identity.engine_namespace import weights_digest;"
        "from tests.vllm.test_adapters import name_of;"
        "from pagoda.connectors.vllm.kv_memory import inspect_kv_caches;"
        "config = engine_config(Path(sys.argv[1]));"
        "said = [weights_digest(config), name_of(Path(sys.argv[2]))];"
        "cache_config, kv = allocate(config, make_layers(config), 11);"
        "said.append(inspect_kv_caches(kv, config, cache_config).description);"
        "print('said', json.dumps(said))"
    )
    env = os.environ | {"PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", program, str(model), str(copied)]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=env
    )
    assert f"said {json.dumps(here[:3])}\n" in ran.stdout, ran.stderr[-2000:]


def test_one_byte_of_a_small_checkpoint_is_another_name(model: Path) -> None:
    before = digest(model)
    file = next(model.glob("*.safetensors"))
    flip(file, file.stat().st_size // 2)
    changed = digest(model)
    flip(file, file.stat().st_size // 2)
    assert digest(model) == before != changed


CHANGES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "the rotary base": lambda model: (
        edit_config(
            model, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}
        )
        or {}
    ),
    "a norm's epsilon": lambda model: edit_config(model, rms_norm_eps=1e-5) or {},
    "overrides of the config": lambda model: {
        "hf_overrides": {"rms_norm_eps": 1e-3}
    },
    "a function that overrides the config": lambda model: {
        "hf_overrides": _other_epsilon
    },
    "the dtype": lambda model: {"dtype": "float32"},
    "the KV's dtype": lambda model: {"kv_cache_dtype": "fp8_e5m2"},
    "another implementation": lambda model: {"model_impl": "transformers"},
    "code of the checkpoint": lambda model: (
        (model / "modeling_x.py").write_text("x = 1")
        and {"trust_remote_code": True}
    ),
    "a rotary embedding that stretches": lambda model: (
        edit_config(
            model,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 2.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 4096,
            },
        )
        or {}
    ),
}


def _other_epsilon(config: Any) -> Any:
    config.rms_norm_eps = 1e-4
    return config


def test_whatever_changes_the_kv_is_another_name(model: Path) -> None:
    names = {"as it is": digest(model)}
    original = (model / "config.json").read_text()
    for what, change in CHANGES.items():
        names[what] = digest(model, **change(model))
        (model / "config.json").write_text(original)
    assert len(set(names.values())) == len(names), names
    overridden = digest(model, hf_overrides={"rms_norm_eps": 1e-5})
    edit_config(model, rms_norm_eps=1e-5)
    assert digest(model) == overridden, (
        "the same config by another way is the same model"
    )


@pytest.mark.parametrize(
    ("variable", "usual", "other"),
    [
        ("VLLM_CPU_INT4_W4A8", "1", "0"),
        ("VLLM_B12X_MOE_FP4_FORCE_A16", "0", "1"),
        ("VLLM_DEEPEPLL_NVFP4_DISPATCH", "0", "1"),
    ],
)
def test_another_precision_of_activations_is_another_name(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    usual: str,
    other: str,
) -> None:
    monkeypatch.delenv(variable, raising=False)
    before = digest(model)
    monkeypatch.setenv(variable, usual)
    assert digest(model) == before
    monkeypatch.setenv(variable, other)
    assert digest(model) != before


def test_another_precision_of_attention_is_another_name(model: Path) -> None:
    flags = (
        "disable_flashinfer_q_quantization",
        "indexer_sparse_logits",
        "use_prefill_query_quantization",
    )
    names = {"none": weights_digest(engine_config(model))}
    for flag in flags:
        config = engine_config(model)
        setattr(config.attention_config, flag, True)
        names[flag] = weights_digest(config)
    assert len(set(names.values())) == 1 + len(flags)


SAME: dict[str, Callable[[Path], dict[str, Any]]] = {
    "the context": lambda model: {"max_model_len": 2048},
    "the block size": lambda model: {"block_size": 64},
    "how many at once": lambda model: {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 4096,
    },
    "a seed, of read weights": lambda model: {"seed": 9},
    "how files are read": lambda model: {"load_format": "safetensors"},
    "a name for users": lambda model: {"served_model_name": "our-model"},
    "the version that wrote the config": lambda model: (
        edit_config(model, transformers_version="4.0.0") or {}
    ),
    "a tokenizer, a card, sampling defaults": lambda model: (
        [
            (model / name).write_text("{}")
            for name in ("README.md", "generation_config.json", "x.py")
        ]
        and {}
    ),
    "state of a training": lambda model: (
        [
            (model / name).write_bytes(b"1")
            for name in ("optimizer.bin", "training_args.bin")
        ]
        and {}
    ),
    "an older format beside": lambda model: (
        (model / "pytorch_model.bin").write_bytes(b"1") and {}
    ),
    "the compiler": lambda model: {"enforce_eager": False},
}


def test_what_does_not_change_the_kv_keeps_the_name(model: Path) -> None:
    before = digest(model)
    named = {
        what: digest(model, **change(model)) for what, change in SAME.items()
    }
    assert {what: name for what, name in named.items() if name != before} == {}


def test_another_transformers_keeps_the_name(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import configuration_utils

    before = digest(model)
    monkeypatch.setattr(configuration_utils, "__version__", "99.0.0")
    config = engine_config(model)
    assert (
        config.model_config.hf_config.to_dict()["transformers_version"]
        == "99.0.0"
    )
    assert weights_digest(config) == before


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 32,
            "long_factor": [2.0] * 32,
            "original_max_position_embeddings": 2048,
            "factor": 4.0,
        },
    ],
)
def test_where_the_context_bends_positions_it_is_in_the_name(
    model: Path, rope: dict[str, Any]
) -> None:
    edit_config(model, rope_parameters=rope)
    assert digest(model, max_model_len=2048) != digest(model, max_model_len=4096)


def test_weights_from_nowhere_are_named_by_hand(model: Path) -> None:
    """An engine that is given its weights later would share chunks with one that was given
    others.
    """
    config = engine_config(model, load_format="dummy")
    with pytest.raises(ValueError, match="give them a separate name"):
        weights_digest(config)
    assert weights_digest(config, "run 1") != weights_digest(config, "run 2")


def test_weights_given_by_hand_stand_for_the_files_only(model: Path) -> None:
    config = engine_config(model)
    given = weights_digest(config, "v1")
    assert len({given, weights_digest(config, "v2"), weights_digest(config)}) == 3
    flip(next(model.glob("*.safetensors")), 4000)
    assert weights_digest(engine_config(model), "v1") == given
    assert weights_digest(engine_config(model, dtype="float32"), "v1") != given


def test_a_draft_model_is_named_too(
    llama: Path, model: Path, tmp_path: Path
) -> None:
    def with_draft(draft: Path) -> str:
        speculative = {
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": 2,
        }
        return digest(llama, speculative_config=speculative)

    ngram = digest(
        llama,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_max": 3,
        },
    )
    assert ngram == digest(llama), "no model, no KV"
    one = with_draft(model)
    flip(next(model.glob("*.safetensors")), 100_000)
    assert len({digest(llama), one, with_draft(model)}) == 3


@pytest.mark.parametrize(
    "load_format",
    [
        "tensorizer",
        "runai_streamer",
        "runai_streamer_sharded",
        "modelexpress",
        "ipc_cache",
        "somebodys_plugin",
    ],
)
def test_weights_from_elsewhere_are_refused_unless_named(
    llama: Path, load_format: str
) -> None:
    config = engine_config(llama)
    config.load_config.load_format = load_format
    with pytest.raises(
        ValueError,
        match=f"'{load_format}'.*give the checkpoint's hash as `weights`",
    ):
        weights_digest(config)
    assert weights_digest(config, "sha256:1234")


def test_a_checkpoint_without_weights_is_refused(model: Path) -> None:
    config = engine_config(model)
    next(model.glob("*.safetensors")).unlink()
    with pytest.raises(
        ValueError,
        match="no weight files for load_format 'auto'; give the checkpoint's hash",
    ):
        weights_digest(config)
    config.model_config.model = "nobody/has-this"
    with pytest.raises(
        ValueError, match="no directory and no snapshot in the hub's cache here"
    ):
        weights_digest(config)


def test_pickled_weights_are_named(model: Path) -> None:
    config = engine_config(model)
    file = next(model.glob("*.safetensors"))
    file.rename(model / "pytorch_model.bin")
    before = weights_digest(config)
    for name in ("training_args.bin", "optimizer.bin", "scheduler.pt"):
        (model / name).write_bytes(b"of a training")
    assert weights_digest(config) == before
    flip(model / "pytorch_model.bin", 5000)
    assert weights_digest(config) != before


def _shards(model: Path, listed: int) -> None:
    file = next(model.glob("*.safetensors"))
    for number in range(3):
        shutil.copy(file, model / f"model-{number}.safetensors")
    file.unlink()
    weight_map = {
        f"w{number}": f"model-{number}.safetensors" for number in range(listed)
    }
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )


def test_shards_count_as_the_index_says(model: Path) -> None:
    config = engine_config(model)
    _shards(model, listed=2)
    before = weights_digest(config)
    flip(model / "model-2.safetensors", 5000)
    assert weights_digest(config) == before, "vLLM does not read it"
    flip(model / "model-1.safetensors", 5000)
    changed = weights_digest(config)
    assert changed != before
    (
        (model / "model-0.safetensors").rename(model / "x"),
        (model / "model-1.safetensors").rename(model / "model-0.safetensors"),
    )
    (model / "x").rename(model / "model-1.safetensors")
    assert weights_digest(config) not in (before, changed), (
        "the same bytes under each other's names"
    )
    (model / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="cannot be read as an index"):
        weights_digest(config)


def test_mistrals_own_files_come_first(model: Path) -> None:
    config = engine_config(model)
    shutil.copy(
        next(model.glob("*.safetensors")), model / "consolidated.safetensors"
    )
    before = weights_digest(config)
    flip(model / "model.safetensors", 5000)
    assert weights_digest(config) == before
    flip(model / "consolidated.safetensors", 5000)
    assert weights_digest(config) != before


# ---- the hub's cache


@pytest.fixture
def hub(llama: Path, tmp_path: Path) -> Path:
    """A hub's cache with one model in it, as huggingface_hub lays it out."""
    root = tmp_path / "hub" / "models--org--tiny-llama"
    shutil.copytree(llama, root / "blobs")
    snapshot = root / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for file in (root / "blobs").iterdir():
        (snapshot / file.name).symlink_to(os.path.relpath(file, snapshot))
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("a" * 40)
    return snapshot


def test_a_hubs_model_is_found_and_named_alike_on_and_offline(
    llama: Path, hub: Path
) -> None:
    """Offline vLLM puts the snapshot's path in place of the id; both must be one namespace."""
    options = read_options({}, 32)
    offline = engine_config(hub)
    online = copy.deepcopy(offline)
    online.model_config.model = "org/tiny-llama"
    online.load_config.download_dir = str(hub.parents[2])
    assert namespace_of(online, "bfloat16", 1, options) == namespace_of(
        offline, "bfloat16", 1, options
    )
    assert namespace_of(offline, "bfloat16", 1, options).model == "tiny-llama"
    assert weights_digest(online) == digest(llama)
    online.model_config.revision = "b" * 40
    with pytest.raises(ValueError, match="no directory and no snapshot"):
        weights_digest(online)


def test_the_namespace_has_all_that_decides_the_kv(llama: Path) -> None:
    config = engine_config(llama)
    namespace = namespace_of(config, "fp8", 4, read_options({"salt": "s"}, 32))
    assert namespace.model == "llama"
    assert namespace.kv_dtype == "fp8"
    assert namespace.world_size == 4
    assert namespace.salt == "s"
    assert namespace.weights == weights_digest(config)
    assert namespace.layout == ""
    assert namespace.lora == ""
    config.model_config.revision = "v2"
    assert (
        namespace_of(config, "fp8", 4, read_options({"salt": "s"}, 32))
        == namespace
    )
    given = namespace_of(config, "fp8", 4, read_options({"weights": "w"}, 32))
    assert given.revision == "v2"
    assert given.weights == weights_digest(config, "w")


# ---- plain values


class Colour(enum.Enum):
    RED = 1


@dataclass
class Spot:
    x: int
    y: tuple[float, ...]


def test_plain_values_encode_alike_everywhere() -> None:
    import torch

    value = {
        1: (True, None, 2.5, float("inf")),
        "s": {"b", "a"},
        "c": Colour.RED,
        "d": Spot(1, (0.5,)),
        "t": torch.int8,
    }
    assert plain(value) == {
        "1": [True, None, 2.5, "inf"],
        "s": ["a", "b"],
        "c": "Colour.RED",
        "d": {"x": 1, "y": [0.5]},
        "t": "torch.int8",
    }
    assert plain(Spot).endswith(".Spot")
    with pytest.raises(
        ValueError, match=r"a setting\.deep is a object, which has no stable text"
    ):
        plain({"deep": [object()]})
    with pytest.raises(ValueError, match="which has no stable text"):
        plain(lambda: 1)
