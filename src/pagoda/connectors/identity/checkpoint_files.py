"""The files of a checkpoint that engines load, and where they are on this machine. Changes and
downloads nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SAFETENSORS = (
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "mistral",
    "sharded_state",
)
_PICKLED = {
    "auto": (".bin", ".pt"),
    "hf": (".bin", ".pt"),
    "npcache": (".bin",),
    "pt": (".pt",),
}
_FORMATS = {*_SAFETENSORS, *_PICKLED}
_SUFFIXES = (".safetensors", ".bin", ".pt")
_NO_WEIGHTS = (
    "training_args.bin",
    "optimizer.bin",
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
)
# settings of how media become a model's input
_PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_INDEX = ".safetensors.index.json"
_REMEDY = "give the checkpoint's hash as `weights`, an option of the connector"


def checkpoint_directory(model_config: Any, load_config: Any) -> Path:
    """Return the directory that vLLM loads the weights from.

    Raises ValueError, which says what to do, for weights that are not local files.
    """
    model = model_config.model
    load_format = str(load_config.load_format)
    if load_format not in _FORMATS or model_config.model_weights:
        raise ValueError(
            f"load_format {load_format!r}: the weights of {model} are not local files; {_REMEDY}"
        )
    directory = snapshot(model, model_config.revision, load_config.download_dir)
    if directory is None:
        raise ValueError(
            f"{model}: no directory and no snapshot in the hub's cache here; {_REMEDY}"
        )
    return directory


def snapshot(
    name: str, revision: str | None = None, cache_dir: str | None = None
) -> Path | None:
    """Return the local directory of a path or of a hub id; None if it is not on this machine."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=cache_dir,
                local_files_only=True,
            )
        ).resolve()
    except (LocalEntryNotFoundError, HFValidationError, OSError, ValueError):
        return None


def checkpoint_files(
    directory: Path, model_config: Any, load_config: Any
) -> list[str]:
    """Return the names of all files that decide the weights, sorted, relative to `directory`.

    These are the files that vLLM picks for the load format, by its order of preference, so that a
    complete snapshot and one with only vLLM's downloads get the same name. For multimodal models
    the weights in subdirectories (encoders) and the processors' settings are included, and with
    trust_remote_code the model's own code. Raises ValueError, which says what to do, if there are
    none.
    """
    load_format = str(load_config.load_format)
    here = sorted(path.name for path in directory.iterdir() if path.is_file())
    names = (
        _safetensors(directory, here, load_format)
        if load_format in _SAFETENSORS
        else []
    )
    for suffix in _PICKLED.get(load_format, ()):
        names = names or [
            name
            for name in here
            if name.endswith(suffix) and name not in _NO_WEIGHTS
        ]
    if not names:
        raise ValueError(
            f"{directory}: no weight files for load_format {load_format!r}; {_REMEDY}"
        )
    if getattr(model_config, "multimodal_config", None) is not None:
        names += _below(directory, _SUFFIXES) + [
            name for name in here if name in _PROCESSORS
        ]
    if model_config.trust_remote_code:
        names += [name for name in here if name.endswith(".py")] + _below(
            directory, (".py",)
        )
    return sorted(set(names))


def _safetensors(directory: Path, here: list[str], load_format: str) -> list[str]:
    names = [name for name in here if name.endswith(".safetensors")]
    whole = [name for name in names if name.startswith("consolidated")]
    if load_format == "sharded_state":
        return names
    if load_format == "mistral" or (load_format == "auto" and whole):
        return _indexed(directory, whole, "consolidated" + _INDEX)
    return _indexed(directory, names, "model" + _INDEX)


def _indexed(directory: Path, names: list[str], index: str) -> list[str]:
    """Return those of `names` that the index lists, and the index itself, which maps tensors to
    files.
    """
    path = directory / index
    if not path.is_file():
        return names
    try:
        listed = set(json.loads(path.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(
            f"{path} cannot be read as an index of weights; {_REMEDY}"
        ) from None
    return [*(name for name in names if name in listed), index]


def _below(directory: Path, suffixes: tuple[str, ...]) -> list[str]:
    """Return files in subdirectories, except hidden ones and `original/`, which vLLM does not
    load.
    """
    files = (
        path
        for path in directory.rglob("*")
        if path.suffix in suffixes and path.is_file()
    )
    below = (
        path.relative_to(directory).parts
        for path in files
        if path.parent != directory
    )
    shown = (
        parts
        for parts in below
        if not any(part.startswith(".") for part in parts)
    )
    return ["/".join(parts) for parts in shown if parts[0] != "original"]
