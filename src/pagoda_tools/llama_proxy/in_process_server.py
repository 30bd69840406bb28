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


class _InProcessOption(NamedTuple):
    """An option with a value. `parameter`: dotted, of xllamacpp's CommonParams."""

    parameter: str
    # from the text to what the parameter takes
    convert: Callable[[str], object]


class _Flag(NamedTuple):
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


_Entry = _InProcessOption | _Flag
_TABLE: dict[tuple[str, ...], _Entry] = {
    ("-m", "--model"): _InProcessOption("model.path", str),
    ("-c", "--ctx-size"): _InProcessOption("n_ctx", int),
    ("-n", "--predict", "--n-predict"): _InProcessOption("n_predict", int),
    ("-np", "--parallel"): _InProcessOption("n_parallel", int),
    ("-t", "--threads"): _InProcessOption("cpuparams.n_threads", int),
    ("-tb", "--threads-batch"): _InProcessOption(
        "cpuparams_batch.n_threads", int
    ),
    ("-b", "--batch-size"): _InProcessOption("n_batch", int),
    ("-ub", "--ubatch-size"): _InProcessOption("n_ubatch", int),
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): _InProcessOption(
        "n_gpu_layers", _gpu_layers
    ),
    ("-mg", "--main-gpu"): _InProcessOption("main_gpu", int),
    ("-sm", "--split-mode"): _InProcessOption(
        "split_mode", _one_of(_SPLIT_MODES)
    ),
    ("-fa", "--flash-attn"): _InProcessOption("flash_attn_type", _one_of(_FLASH)),
    ("-ctk", "--cache-type-k"): _InProcessOption("cache_type_k", str),
    ("-ctv", "--cache-type-v"): _InProcessOption("cache_type_v", str),
    ("-kvu", "--kv-unified"): _Flag("kv_unified", True),
    ("-no-kvu", "--no-kv-unified"): _Flag("kv_unified", False),
    ("-nkvo", "--no-kv-offload"): _Flag("no_kv_offload", True),
    ("-kvo", "--kv-offload"): _Flag("no_kv_offload", False),
    ("-fit", "--fit"): _InProcessOption("fit_params", _switch),
    ("--rope-scaling",): _InProcessOption(
        "rope_scaling_type", _one_of(_ROPE_SCALING)
    ),
    ("--rope-scale",): _InProcessOption(
        "rope_freq_scale", lambda text: 1 / float(text)
    ),
    ("--rope-freq-base",): _InProcessOption("rope_freq_base", float),
    ("--rope-freq-scale",): _InProcessOption("rope_freq_scale", float),
    ("--yarn-orig-ctx",): _InProcessOption("yarn_orig_ctx", int),
    ("--yarn-ext-factor",): _InProcessOption("yarn_ext_factor", float),
    ("--yarn-attn-factor",): _InProcessOption("yarn_attn_factor", float),
    ("--yarn-beta-slow",): _InProcessOption("yarn_beta_slow", float),
    ("--yarn-beta-fast",): _InProcessOption("yarn_beta_fast", float),
    ("--lora",): _InProcessOption("lora_adapters", _unscaled),
    ("--lora-scaled",): _InProcessOption("lora_adapters", _scaled),
    ("--lora-init-without-apply",): _Flag("lora_init_without_apply", True),
    ("-mm", "--mmproj"): _InProcessOption("mmproj.path", str),
    ("--jinja",): _Flag("use_jinja", True),
    ("--no-jinja",): _Flag("use_jinja", False),
    ("--chat-template",): _InProcessOption("chat_template", str),
    ("--chat-template-file",): _InProcessOption("chat_template", _file),
    ("--reasoning-format",): _InProcessOption(
        "reasoning_format", _one_of(_REASONING)
    ),
    ("-a", "--alias"): _InProcessOption("model_alias", _list),
    ("--warmup",): _Flag("warmup", True),
    ("--no-warmup",): _Flag("warmup", False),
    ("-s", "--seed"): _InProcessOption("sampling.seed", _seed),
    ("--temp", "--temperature"): _InProcessOption("sampling.temp", float),
    ("--top-k",): _InProcessOption("sampling.top_k", int),
    ("--top-p",): _InProcessOption("sampling.top_p", float),
    ("--min-p",): _InProcessOption("sampling.min_p", float),
    ("--metrics",): _Flag("endpoint_metrics", True),
    ("--props",): _Flag("endpoint_props", True),
    ("--slots",): _Flag("endpoint_slots", True),
    ("--ui", "--webui"): _Flag("ui", True),
    ("--no-ui", "--no-webui"): _Flag("ui", False),
    ("--host",): _InProcessOption("hostnames", _list),
    ("--port",): _InProcessOption("port", int),
    ("--slot-save-path",): _InProcessOption(
        "slot_save_path", lambda text: text.rstrip("/") + "/"
    ),
    ("-sps", "--slot-prompt-similarity"): _InProcessOption(
        "slot_prompt_similarity", float
    ),
    ("-cram", "--cache-ram"): _InProcessOption("cache_ram_mib", int),
    ("--cache-prompt",): _Flag("cache_prompt", True),
    ("--cache-reuse",): _InProcessOption("n_cache_reuse", int),
    ("--no-cache-idle-slots",): _Flag("cache_idle_slots", False),
    ("--no-context-shift",): _Flag("ctx_shift", False),
    ("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"): _InProcessOption(
        "n_ctx_checkpoints", int
    ),
    ("--threads-http",): _InProcessOption("n_threads_http", int),
    ("--offline",): _Flag("offline", True),
    ("-lv", "--verbosity", "--log-verbosity"): _InProcessOption("verbosity", int),
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
        if isinstance(entry, _Flag):
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
            metavar = " VALUE" if isinstance(entry, _InProcessOption) else ""
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
