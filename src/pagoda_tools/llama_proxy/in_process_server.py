"""Runs the server inside the package `xllamacpp`, as a process of its own, where no llama-server is
on the PATH: `python -m pagoda_tools.llama_proxy.in_process_server -m MODEL.gguf --port 8080`.

It understands those options of llama-server that most people use, under the same names; with
another one it ends and names it. The key comes from the environment (LLAMA_API_KEY), nothing else
does.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from pagoda.base.errors import ConfigError
from pagoda_tools.llama_proxy.server_arguments import KEY_VARIABLE

_USAGE = 2
_FAILED = 1
# of llama-server; the package itself has only one slot
_SLOTS = 4

_SWITCHES = ("on", "enabled", "true", "1"), ("off", "disabled", "false", "0")
_FLASH = {"auto": -1, "off": 0, "on": 1}
_SPLIT_MODES = ("none", "layer", "row", "tensor")
_ROPE_SCALING = ("none", "linear", "yarn")
_REASONING = ("none", "auto", "deepseek", "deepseek-legacy")


class _Valued(NamedTuple):
    """An option with a value. `parameter`: dotted, of xllamacpp's CommonParams."""

    parameter: str
    # from the text to what the parameter takes
    convert: Callable[[str], object]


class _Switch(NamedTuple):
    """An option without a value."""

    parameter: str
    value: object


def _gpu_layers(text: str) -> object:
    # as llama-server: auto is -1, all is less than that
    return {"auto": -1, "all": -2}.get(text) or int(text)


def _seed(text: str) -> object:
    # -1 is a random one
    return int(text) % (1 << 32)


def _one_of(choices: Iterable[str]) -> Callable[[str], object]:
    allowed = tuple(choices)

    def convert(text: str) -> object:
        if text not in allowed:
            raise ValueError(f"write one of {', '.join(allowed)}")
        return text

    return convert


def _list(text: str) -> object:
    return [part for part in text.split(",") if part]


def _scaled(text: str) -> object:
    """Return pairs of "PATH:SCALE,PATH:SCALE"."""
    pairs = []
    for part in text.split(","):
        path, colon, scale = part.rpartition(":")
        if not colon:
            raise ValueError("write FILE:SCALE")
        pairs.append((path, float(scale)))
    return pairs


def _unscaled(text: str) -> object:
    return [(path, 1.0) for path in text.split(",")]


def _file(path: str) -> object:
    with open(path) as file:
        return file.read()


def _switch(text: str) -> object:
    for value, words in zip((True, False), _SWITCHES, strict=True):
        if text in words:
            return value
    raise ValueError("write on or off")


_Entry = _Valued | _Switch
_TABLE: dict[tuple[str, ...], _Entry] = {
    ("-m", "--model"): _Valued("model.path", str),
    ("-c", "--ctx-size"): _Valued("n_ctx", int),
    ("-n", "--predict", "--n-predict"): _Valued("n_predict", int),
    ("-np", "--parallel"): _Valued("n_parallel", int),
    ("-t", "--threads"): _Valued("cpuparams.n_threads", int),
    ("-tb", "--threads-batch"): _Valued("cpuparams_batch.n_threads", int),
    ("-b", "--batch-size"): _Valued("n_batch", int),
    ("-ub", "--ubatch-size"): _Valued("n_ubatch", int),
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): _Valued(
        "n_gpu_layers", _gpu_layers
    ),
    ("-mg", "--main-gpu"): _Valued("main_gpu", int),
    ("-sm", "--split-mode"): _Valued("split_mode", _one_of(_SPLIT_MODES)),
    ("-fa", "--flash-attn"): _Valued("flash_attn_type", _one_of(_FLASH)),
    ("-ctk", "--cache-type-k"): _Valued("cache_type_k", str),
    ("-ctv", "--cache-type-v"): _Valued("cache_type_v", str),
    ("-kvu", "--kv-unified"): _Switch("kv_unified", True),
    ("-no-kvu", "--no-kv-unified"): _Switch("kv_unified", False),
    ("-nkvo", "--no-kv-offload"): _Switch("no_kv_offload", True),
    ("-kvo", "--kv-offload"): _Switch("no_kv_offload", False),
    ("-fit", "--fit"): _Valued("fit_params", _switch),
    ("--rope-scaling",): _Valued("rope_scaling_type", _one_of(_ROPE_SCALING)),
    ("--rope-scale",): _Valued("rope_freq_scale", lambda text: 1 / float(text)),
    ("--rope-freq-base",): _Valued("rope_freq_base", float),
    ("--rope-freq-scale",): _Valued("rope_freq_scale", float),
    ("--yarn-orig-ctx",): _Valued("yarn_orig_ctx", int),
    ("--yarn-ext-factor",): _Valued("yarn_ext_factor", float),
    ("--yarn-attn-factor",): _Valued("yarn_attn_factor", float),
    ("--yarn-beta-slow",): _Valued("yarn_beta_slow", float),
    ("--yarn-beta-fast",): _Valued("yarn_beta_fast", float),
    ("--lora",): _Valued("lora_adapters", _unscaled),
    ("--lora-scaled",): _Valued("lora_adapters", _scaled),
    ("--lora-init-without-apply",): _Switch("lora_init_without_apply", True),
    ("-mm", "--mmproj"): _Valued("mmproj.path", str),
    ("--jinja",): _Switch("use_jinja", True),
    ("--no-jinja",): _Switch("use_jinja", False),
    ("--chat-template",): _Valued("chat_template", str),
    ("--chat-template-file",): _Valued("chat_template", _file),
    ("--reasoning-format",): _Valued("reasoning_format", _one_of(_REASONING)),
    ("-a", "--alias"): _Valued("model_alias", _list),
    ("--warmup",): _Switch("warmup", True),
    ("--no-warmup",): _Switch("warmup", False),
    ("-s", "--seed"): _Valued("sampling.seed", _seed),
    ("--temp", "--temperature"): _Valued("sampling.temp", float),
    ("--top-k",): _Valued("sampling.top_k", int),
    ("--top-p",): _Valued("sampling.top_p", float),
    ("--min-p",): _Valued("sampling.min_p", float),
    ("--metrics",): _Switch("endpoint_metrics", True),
    ("--props",): _Switch("endpoint_props", True),
    ("--slots",): _Switch("endpoint_slots", True),
    ("--ui", "--webui"): _Switch("ui", True),
    ("--no-ui", "--no-webui"): _Switch("ui", False),
    ("--host",): _Valued("hostnames", _list),
    ("--port",): _Valued("port", int),
    ("--slot-save-path",): _Valued(
        "slot_save_path", lambda text: text.rstrip("/") + "/"
    ),
    ("-sps", "--slot-prompt-similarity"): _Valued(
        "slot_prompt_similarity", float
    ),
    ("-cram", "--cache-ram"): _Valued("cache_ram_mib", int),
    ("--cache-prompt",): _Switch("cache_prompt", True),
    ("--cache-reuse",): _Valued("n_cache_reuse", int),
    ("--no-cache-idle-slots",): _Switch("cache_idle_slots", False),
    ("--no-context-shift",): _Switch("ctx_shift", False),
    ("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"): _Valued(
        "n_ctx_checkpoints", int
    ),
    ("--threads-http",): _Valued("n_threads_http", int),
    ("--offline",): _Switch("offline", True),
    ("-lv", "--verbosity", "--log-verbosity"): _Valued("verbosity", int),
}
_NAMED = {name: entry for names, entry in _TABLE.items() for name in names}
KNOWN = frozenset(_NAMED)


def read_options(
    words: Sequence[str], environment: Mapping[str, str]
) -> dict[str, object]:
    """Return the parameters of CommonParams that these arguments set, by dotted name.

    `environment`: of the server. Raises ConfigError for an option that it does not understand, also
    if a variable of llama-server names it.
    """
    for name in environment:
        if name.startswith("LLAMA_ARG_"):
            raise ConfigError(
                f"{name}: the server of xllamacpp reads no variables: write the option itself, or "
                "put llama-server on the PATH"
            )
    found: dict[str, object] = {
        "n_parallel": -1,
        "hostnames": ["127.0.0.1"],
        "port": 8080,
    }
    rest = iter(words)
    for word in rest:
        name = word.replace("_", "-") if word.startswith("--") else word
        entry = _NAMED.get(name)
        if entry is None:
            raise ConfigError(
                f"{word}: the server of xllamacpp has no such option here: put llama-server on the "
                "PATH, which has all"
            )
        if isinstance(entry, _Switch):
            found[entry.parameter] = entry.value
            continue
        text = next(rest, None)
        if text is None:
            raise ConfigError(f"{word} needs a value")
        try:
            value = entry.convert(text)
        except (ValueError, ZeroDivisionError, OSError) as error:
            raise ConfigError(f"{word} {text}: {error}") from None
        before = found.get(entry.parameter)
        if entry.parameter == "lora_adapters" and isinstance(before, list):
            assert isinstance(value, list)
            value = [*before, *value]
        found[entry.parameter] = value
    if not found.get("model.path"):
        raise ConfigError(
            "write -m MODEL.gguf: the server of xllamacpp needs a file"
        )
    # as llama-server with a number of slots that nobody gave
    if found["n_parallel"] == -1:
        found["n_parallel"] = _SLOTS
        found.setdefault("kv_unified", True)
    found.setdefault(
        "cpuparams_batch.n_threads", found.get("cpuparams.n_threads", -1)
    )
    return found


def main(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the server until this process is ended; return an exit code if it does not start."""
    if "-h" in words or "--help" in words:
        print("The server of xllamacpp, with these options of llama-server:")
        for names, entry in _TABLE.items():
            metavar = " VALUE" if isinstance(entry, _Valued) else ""
            print(f"{', '.join(names)}{metavar}")
        return 0
    try:
        options = read_options(words, environment)
    except ConfigError as error:
        print(f"pagoda: {error}", file=sys.stderr)
        return _USAGE
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    options["api_keys"] = [
        key for key in environment.get(KEY_VARIABLE, "").split(",") if key
    ]
    for name, value in options.items():
        *owners, last = name.split(".")
        target: object = parameters
        for owner in owners:
            target = getattr(target, owner)
        try:
            setattr(target, last, _for_xllamacpp(last, value))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            print(
                f"pagoda: this xllamacpp does not take {value!r} for {name}",
                file=sys.stderr,
            )
            return _USAGE
    # it ends at once, also while it loads: its slots were saved by the proxy
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        server = xllamacpp.Server(parameters)
    except (RuntimeError, ValueError) as error:
        print(f"pagoda: xllamacpp: {error}", file=sys.stderr)
        return _FAILED
    print(f"xllamacpp's server listens at {server.listening_address}", flush=True)
    while True:
        signal.pause()


def _for_xllamacpp(name: str, value: object) -> object:
    """Return a value as xllamacpp takes it. AttributeError: it has no such value."""
    import xllamacpp

    text = str(value).upper().replace("-", "_")
    if name.startswith("cache_type_"):
        return getattr(xllamacpp.ggml_type, f"GGML_TYPE_{text}")
    if name == "flash_attn_type":
        return xllamacpp.llama_flash_attn_type(_FLASH[str(value)])
    if name == "split_mode":
        return getattr(xllamacpp.llama_split_mode, f"LLAMA_SPLIT_MODE_{text}")
    if name == "rope_scaling_type":
        kinds = xllamacpp.llama_rope_scaling_type
        return getattr(kinds, f"LLAMA_ROPE_SCALING_TYPE_{text}")
    if name == "reasoning_format":
        kinds = xllamacpp.common_reasoning_format
        return getattr(kinds, f"COMMON_REASONING_FORMAT_{text}")
    if name == "model_alias" and isinstance(value, list):
        return set(value)
    if name == "lora_adapters" and isinstance(value, list):
        return [_adapter(path, scale) for path, scale in value]
    return value


def _adapter(path: str, scale: float) -> object:
    import xllamacpp

    adapter = xllamacpp.CommonAdapterLoraInfo()
    adapter.path = path
    adapter.scale = scale
    return adapter


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
