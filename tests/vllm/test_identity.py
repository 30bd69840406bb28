"""What names an engine's KV: other weights have another name, the same weights the same name everywhere."""

from __future__ import annotations

import copy
import enum
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda.connectors.vllm.adapters import Adapters
from pagoda.connectors.vllm.checkpoint import WHOLE_BYTES, file_digest, files_digest
from pagoda.connectors.vllm.facts import plain
from pagoda.connectors.vllm.identity import lora_name, namespace_of, weights_digest
from pagoda.connectors.vllm.options import read_options
from tests.vllm import models
from tests.vllm.configs import allocate, engine_config, make_layers


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Path:
    """The Llama in a directory of the test's own."""
    return Path(shutil.copytree(llama, tmp_path / "llama"))


def digest(model: Path, **options: Any) -> str:
    return weights_digest(engine_config(model, **options))


def edit_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def flip(path: Path, at: int, count: int = 1) -> None:
    """Turn bits of that many bytes; the size stays."""
    with open(path, "r+b") as file:
        file.seek(at)
        there = file.read(count)
        file.seek(at)
        file.write(there.translate(bytes(byte ^ 0x55 for byte in range(256))))


# ---- one checkpoint


def test_another_process_says_the_same_of_a_copy(llama: Path, model: Path, tmp_path: Path) -> None:
    """Weights, adapters and memory are named alike by a process that started later, of a copy elsewhere."""
    from pagoda.connectors.vllm.seen import see_kv_caches

    adapter = models.make_lora(tmp_path / "adapter", 5)
    copied = Path(shutil.copytree(adapter, tmp_path / "copy"))
    config = engine_config(llama)
    here = [weights_digest(config), name_of(adapter)]
    cache_config, kv_caches = allocate(config, make_layers(config))
    here += [see_kv_caches(kv_caches, config, cache_config).description, weights_digest(config)]
    assert here[0] == here[3], "what vLLM does to its config on the way must not rename the weights"
    program = (
        "import json, sys; from tests.vllm.configs import *; from tests.vllm.test_identity import *;"
        "from pagoda.connectors.vllm.seen import see_kv_caches;"
        "config = engine_config(Path(sys.argv[1]));"
        "said = [weights_digest(config), name_of(Path(sys.argv[2]))];"
        "cache_config, kv = allocate(config, make_layers(config), 11);"
        "said.append(see_kv_caches(kv, config, cache_config).description);"
        "print('said', json.dumps(said))"
    )
    env = os.environ | {"PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", program, str(model), str(copied)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=env)
    assert f"said {json.dumps(here[:3])}\n" in ran.stdout, ran.stderr[-2000:]


def test_one_byte_of_a_small_checkpoint_is_another_name(model: Path) -> None:
    before = digest(model)
    file = next(model.glob("*.safetensors"))
    flip(file, file.stat().st_size // 2)
    changed = digest(model)
    flip(file, file.stat().st_size // 2)
    assert digest(model) == before != changed


CHANGES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "the rotary base": lambda model: edit_config(
        model, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}) or {},
    "a norm's epsilon": lambda model: edit_config(model, rms_norm_eps=1e-5) or {},
    "overrides of the config": lambda model: {"hf_overrides": {"rms_norm_eps": 1e-3}},
    "a function that overrides the config": lambda model: {"hf_overrides": _other_epsilon},
    "the dtype": lambda model: {"dtype": "float32"},
    "the KV's dtype": lambda model: {"kv_cache_dtype": "fp8_e5m2"},
    "another implementation": lambda model: {"model_impl": "transformers"},
    "code of the checkpoint": lambda model: (model / "modeling_x.py").write_text("x = 1") and {
        "trust_remote_code": True},
    "a rotary embedding that stretches": lambda model: edit_config(
        model, rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4,
                                "original_max_position_embeddings": 4096}) or {},
}  # fmt: skip


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
    assert digest(model) == overridden, "the same config by another way is the same model"


SAME: dict[str, Callable[[Path], dict[str, Any]]] = {
    "the context": lambda model: {"max_model_len": 2048},
    "the block size": lambda model: {"block_size": 64},
    "how many at once": lambda model: {"max_num_seqs": 3, "max_num_batched_tokens": 4096},
    "a seed, of read weights": lambda model: {"seed": 9},
    "how files are read": lambda model: {"load_format": "safetensors"},
    "a name for users": lambda model: {"served_model_name": "our-model"},
    "the version that wrote the config": lambda model: edit_config(model, transformers_version="4.0.0") or {},
    "a tokenizer, a card, sampling defaults": lambda model: [
        (model / name).write_text("{}") for name in ("README.md", "generation_config.json", "x.py")] and {},
    "state of a training": lambda model: [
        (model / name).write_bytes(b"1") for name in ("optimizer.bin", "training_args.bin")] and {},
    "an older format beside": lambda model: (model / "pytorch_model.bin").write_bytes(b"1") and {},
    "the compiler": lambda model: {"enforce_eager": False},
}  # fmt: skip


def test_what_does_not_change_the_kv_keeps_the_name(model: Path) -> None:
    before = digest(model)
    named = {what: digest(model, **change(model)) for what, change in SAME.items()}
    assert {what: name for what, name in named.items() if name != before} == {}


def test_another_transformers_keeps_the_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import configuration_utils

    before = digest(model)
    monkeypatch.setattr(configuration_utils, "__version__", "99.0.0")
    config = engine_config(model)
    assert config.model_config.hf_config.to_dict()["transformers_version"] == "99.0.0"
    assert weights_digest(config) == before


@pytest.mark.parametrize("rope", [
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 32, "long_factor": [2.0] * 32,
     "original_max_position_embeddings": 2048, "factor": 4.0},
])  # fmt: skip
def test_where_the_context_bends_positions_it_is_in_the_name(model: Path, rope: dict[str, Any]) -> None:
    edit_config(model, rope_parameters=rope)
    assert digest(model, max_model_len=2048) != digest(model, max_model_len=4096)


def test_weights_from_nowhere_are_named_by_hand(model: Path) -> None:
    """An engine that is given its weights later would share chunks with one that was given others."""
    config = engine_config(model, load_format="dummy")
    with pytest.raises(ValueError, match="give them a name of their own"):
        weights_digest(config)
    assert weights_digest(config, "run 1") != weights_digest(config, "run 2")


def test_weights_given_by_hand_stand_for_the_files_only(model: Path) -> None:
    config = engine_config(model)
    given = weights_digest(config, "v1")
    assert len({given, weights_digest(config, "v2"), weights_digest(config)}) == 3
    flip(next(model.glob("*.safetensors")), 4000)
    assert weights_digest(engine_config(model), "v1") == given
    assert weights_digest(engine_config(model, dtype="float32"), "v1") != given


def test_a_draft_model_is_named_too(llama: Path, model: Path, tmp_path: Path) -> None:
    def with_draft(draft: Path) -> str:
        speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
        return digest(llama, speculative_config=speculative)

    ngram = digest(
        llama, speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    )
    assert ngram == digest(llama), "no model, no KV"
    one = with_draft(model)
    flip(next(model.glob("*.safetensors")), 100_000)
    assert len({digest(llama), one, with_draft(model)}) == 3


@pytest.mark.parametrize("load_format", ["tensorizer", "runai_streamer", "runai_streamer_sharded", "modelexpress",
                                         "ipc_cache", "somebodys_plugin"])  # fmt: skip
def test_weights_from_elsewhere_are_refused_unless_named(llama: Path, load_format: str) -> None:
    config = engine_config(llama)
    config.load_config.load_format = load_format
    with pytest.raises(ValueError, match=f"'{load_format}'.*give the checkpoint's hash as `weights`"):
        weights_digest(config)
    assert weights_digest(config, "sha256:1234")


def test_a_checkpoint_without_weights_is_refused(model: Path) -> None:
    config = engine_config(model)
    next(model.glob("*.safetensors")).unlink()
    with pytest.raises(
        ValueError, match="no weight files for load_format 'auto'; give the checkpoint's hash"
    ):
        weights_digest(config)
    config.model_config.model = "nobody/has-this"
    with pytest.raises(ValueError, match="no directory and no snapshot in the hub's cache here"):
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
    weight_map = {f"w{number}": f"model-{number}.safetensors" for number in range(listed)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


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
    assert weights_digest(config) not in (before, changed), "the same bytes under each other's names"
    (model / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="cannot be read as an index"):
        weights_digest(config)


def test_mistrals_own_files_come_first(model: Path) -> None:
    config = engine_config(model)
    shutil.copy(next(model.glob("*.safetensors")), model / "consolidated.safetensors")
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


def test_a_hubs_model_is_found_and_named_alike_on_and_offline(llama: Path, hub: Path) -> None:
    """Offline vLLM puts the snapshot's path in place of the id; both must be one namespace."""
    options = read_options({}, 32)
    offline = engine_config(hub)
    online = copy.deepcopy(offline)
    online.model_config.model = "org/tiny-llama"
    online.load_config.download_dir = str(hub.parents[2])
    assert namespace_of(online, "bfloat16", 1, options) == namespace_of(offline, "bfloat16", 1, options)
    assert namespace_of(offline, "bfloat16", 1, options).model == "tiny-llama"
    assert weights_digest(online) == digest(llama)
    online.model_config.revision = "b" * 40
    with pytest.raises(ValueError, match="no directory and no snapshot"):
        weights_digest(online)


def test_the_namespace(llama: Path) -> None:
    config = engine_config(llama)
    namespace = namespace_of(config, "fp8", 4, read_options({"salt": "s"}, 32))
    assert (namespace.model, namespace.kv_dtype, namespace.world_size, namespace.salt) == (
        "llama",
        "fp8",
        4,
        "s",
    )
    assert namespace.weights == weights_digest(config) and (namespace.layout, namespace.lora) == ("", "")
    config.model_config.revision = "v2"
    assert namespace_of(config, "fp8", 4, read_options({"salt": "s"}, 32)) == namespace
    given = namespace_of(config, "fp8", 4, read_options({"weights": "w"}, 32))
    assert given.revision == "v2" and given.weights == weights_digest(config, "w")


# ---- large files


TENSORS = {
    "embed": 40 << 20,
    "norm": 512,
    "scale": 4,
    "q_proj": 30 << 20,
    "bias": 9000,
    "empty": 0,
    "o_proj": 3 << 20,
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[int, int]]]:
    """A safetensors file too large to be read whole, and where each tensor lies in it."""
    header, at = {}, 0
    for name, size in TENSORS.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path = tmp_path_factory.mktemp("large") / "model.safetensors"
    with open(path, "wb") as file:
        file.write(
            struct.pack("<Q", len(text))
            + text
            + os.urandom(1 << 20) * (at >> 20)
            + os.urandom(at % (1 << 20))
        )
    assert path.stat().st_size > WHOLE_BYTES
    body = 8 + len(text)
    return path, {
        n: (body + each["data_offsets"][0], body + each["data_offsets"][1]) for n, each in header.items()
    }


def test_of_a_large_file_no_tensor_changes_unseen(large: tuple[Path, dict[str, tuple[int, int]]]) -> None:
    path, places = large
    before = file_digest(path)
    assert file_digest(path) == before
    for name, (start, end) in places.items():
        if start < end:
            flip(path, start, end - start)
            assert file_digest(path) != before, name
            flip(path, start, end - start)
    for name, (start, end) in places.items():  # a half of each: rows of a matrix, some experts of a block
        if end - start > 1:
            flip(path, start + (end - start) // 2, (end - start) // 2)
            assert file_digest(path) != before, name
            flip(path, start + (end - start) // 2, (end - start) // 2)
    flip(path, 8)
    with pytest.raises(OSError, match="header cannot be read"):
        file_digest(path)
    flip(path, 8)
    assert file_digest(path) == before


def test_a_large_file_is_not_read_whole(large: tuple[Path, dict[str, tuple[int, int]]]) -> None:
    from pagoda.connectors.vllm.checkpoint import _ranges

    path = large[0]
    with open(path, "rb") as file:
        ranges = _ranges(path, file.fileno(), path.stat().st_size, 1 << 20)
    assert sum(end - start for start, end in ranges) < 8 << 20
    assert ranges == sorted(ranges) and all(a[1] < b[0] for a, b in pairwise(ranges))
    assert ranges[0][0] == 0 and ranges[-1][1] == path.stat().st_size


def test_a_large_file_of_another_kind_is_sampled(large: tuple[Path, object], tmp_path: Path) -> None:
    path = Path(shutil.copy(large[0], tmp_path / "model.bin"))
    before = file_digest(path)
    size = path.stat().st_size
    flip(path, size // 2, 1 << 20)
    assert file_digest(path) != before
    flip(path, size // 2, 1 << 20)
    flip(path, size - 1)
    assert file_digest(path) != before
    os.truncate(path, size - 1)
    assert file_digest(path) != before


def test_a_file_that_was_cut_is_refused(large: tuple[Path, object], llama: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(llama, tmp_path / "cut"))
    config = engine_config(model)
    shutil.copy(large[0], model / "model.safetensors")
    os.truncate(model / "model.safetensors", large[0].stat().st_size - (5 << 20))
    with pytest.raises(ValueError, match=r"was cut: .*give the checkpoint's hash as `weights`"):
        weights_digest(config)


def test_names_and_order_of_files_count(tmp_path: Path) -> None:
    for name, text in (("a", "one"), ("b", "two"), ("c", "one")):
        (tmp_path / name).write_text(text)
    assert files_digest(tmp_path, ["a", "b"]) != files_digest(tmp_path, ["b", "c"])
    assert files_digest(tmp_path, ["a"]) != files_digest(tmp_path, ["c"])


# ---- adapters


def request_of(path: Path | str, number: int = 1, name: str = "adapter", **more: Any) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(path), **more)


def name_of(path: Path) -> str | None:
    """What a process that meets this adapter first calls it."""
    return Adapters().name(request_of(path))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return models.make_lora(tmp_path / "adapter", 1)


def test_adapters_are_named_by_content(adapter: Path, tmp_path: Path) -> None:
    met = Adapters()
    copied = shutil.copytree(adapter, tmp_path / "elsewhere")
    other = models.make_lora(tmp_path / "other", 2)
    name = met.name(request_of(adapter))
    assert name and met.name(request_of(adapter)) == name
    assert met.name(request_of(copied, 2, "another name")) == name
    assert met.name(request_of(other, 3)) not in (name, None)
    assert met.name(request_of(adapter, 4, is_3d_lora_weight=True)) != name
    assert met.name(None) == ""
    config = json.loads((copied / "adapter_config.json").read_text())
    (copied / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 1}))
    assert name_of(copied) not in (name, None), "the same matrices, scaled otherwise"


def test_an_adapter_that_cannot_be_read_has_no_name(adapter: Path, tmp_path: Path) -> None:
    assert name_of(tmp_path / "nowhere") is None
    assert Adapters().name(request_of("org/on-no-disk")) is None
    assert Adapters().name(SimpleNamespace(lora_int_id=1, lora_name="in memory")) is None
    (adapter / "adapter_model.safetensors").rename(adapter / "weights.safetensors")
    assert name_of(adapter) is None
    (adapter / "weights.safetensors").rename(adapter / "adapter_model.pt")
    assert name_of(adapter) is not None
    (adapter / "adapter_config.json").unlink()
    assert name_of(adapter) is None


def test_an_adapter_whose_files_change_is_not_named_again(adapter: Path, tmp_path: Path) -> None:
    """vLLM may hold the old weights or the new ones: nobody can tell, so nothing is stored."""
    met = Adapters()
    name = met.name(request_of(adapter))
    kept = shutil.copytree(adapter, tmp_path / "kept")
    shutil.copy(models.make_lora(tmp_path / "new", 2) / "adapter_model.safetensors", adapter)
    assert met.name(request_of(adapter)) is None
    assert met.name(request_of(adapter, 2)) not in (name, None), "a new number is loaded anew"
    assert met.name(request_of(kept, 1)) is None, "the number stands for the first files"
    assert met.name(request_of(kept, 3)) == name


def test_a_changed_file_with_the_old_time_is_noticed(adapter: Path) -> None:
    met = Adapters()
    assert met.name(request_of(adapter))
    file = adapter / "adapter_model.safetensors"
    stat = file.stat()
    other = adapter / "new"
    shutil.copy(file, other)
    flip(other, 5000)
    other.rename(file)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert met.name(request_of(adapter)) is None


def test_a_link_that_moves_on_does_not_take_its_number_along(adapter: Path, tmp_path: Path) -> None:
    other = models.make_lora(tmp_path / "other", 2)
    link = tmp_path / "latest"
    link.symlink_to(adapter)
    met = Adapters()
    assert met.name(request_of(link)) == name_of(adapter)
    link.unlink()
    link.symlink_to(other)
    assert met.name(request_of(link)) is None
    assert met.name(request_of(link, 2)) == name_of(other)


def test_files_are_read_once(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagoda.connectors.vllm import adapters

    read: list[Path] = []
    monkeypatch.setattr(adapters, "file_digest", lambda path: read.append(path) or file_digest(path))
    met = Adapters()
    names = {met.name(request_of(adapter, number)) for number in (1, 1, 2, 2)}
    assert len(names) == 1 and len(read) == 2


def test_many_threads_ask_at_once(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    paths = [models.make_lora(tmp_path / f"{seed}", seed) for seed in range(1, 5)]
    with ThreadPoolExecutor(8) as threads:
        asked = [
            (path, threads.submit(lora_name, request_of(path, 1000 + i))) for i, path in enumerate(paths)
        ] * 4
        found = {(path, future.result()) for path, future in asked}
    assert len(found) == len({name for _, name in found}) == 4 and None not in {name for _, name in found}


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
        "1": [True, None, 2.5, "inf"], "s": ["a", "b"], "c": "Colour.RED", "d": {"x": 1, "y": [0.5]}, "t": "torch.int8",
    }  # fmt: skip
    assert plain(Spot).endswith(".Spot")
    with pytest.raises(ValueError, match=r"a setting\.deep is a object, which has no stable text"):
        plain({"deep": [object()]})
    with pytest.raises(ValueError, match="which has no stable text"):
        plain(lambda: 1)
