"""The namespace: everything except tokens and layout that vLLM's KV depends on: weights, config,
adapters.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from pagoda.connectors.identity.checkpoint_files import (
    checkpoint_directory,
    checkpoint_files,
)
from pagoda.connectors.identity.plain_values import plain
from pagoda.connectors.identity.weight_digests import files_digest
from pagoda.connectors.vllm.identity.engine_settings import (
    config_facts,
    draft_config,
)
from pagoda.keys import Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from pagoda.connectors.vllm.options import ConnectorOptions

# a path in the hub's cache, as vLLM finds it offline
_SNAPSHOT = re.compile(r"models--(?P<name>[^/]+)/snapshots/[^/]+/?$")


def namespace_of(
    vllm_config: VllmConfig,
    kv_dtype: str,
    world_size: int,
    options: ConnectorOptions,
) -> Namespace:
    """Return the namespace of this engine's KV, without the layout and the adapter. Reads the
    weight files.

    `world_size` is the number of parts of a chunk, 1 if chunks are the same for any number. The
    revision is included only if `weights` is given explicitly: a digest of the files is more exact,
    and the same revision has many names. Raises ValueError, which says what to do, if the weights
    cannot be named.
    """
    revision = (
        str(vllm_config.model_config.revision or "") if options.weights else ""
    )
    return Namespace(
        model=model_name(vllm_config.model_config.model),
        revision=revision,
        weights=weights_digest(vllm_config, options.weights),
        kv_dtype=kv_dtype,
        world_size=world_size,
        salt=options.salt,
    )


def salt_of(engine: str, request: str | None) -> str | None:
    """Return the salt of an engine's tenant and a request's tenant; None if the request has
    none.
    """
    return json.dumps([engine, request, ""]) if request else None


def weights_digest(vllm_config: VllmConfig, weights: str | None = None) -> str:
    """Return 32 hex characters that name everything that the values of KV depend on; changes
    nothing.

    They are the same on every machine, in every process and after a restart. They depend on the
    weight files (see `weight_digests.file_digest` for the parts of large files that are read), the
    resolved config of the model, and the settings of the engine that change what is computed; the
    same for a draft model whose KV is kept beside the model's. `weights` names the checkpoints
    instead of their files.

    Raises ValueError, which says what to do, if weights are not files of this machine.
    """
    found = blake3(derive_key_context="PagodaKV weights of a vLLM engine")
    parts: list[object] = [config_facts(vllm_config)]
    for role, model_config, load_config in _checkpoints(vllm_config):
        parts.append([role, _named(model_config, load_config, weights)])
    found.update(json.dumps(plain(parts), sort_keys=True).encode())
    return str(found.hexdigest(16))


def _checkpoints(vllm_config: VllmConfig) -> list[tuple[str, Any, Any]]:
    """Return role, ModelConfig and LoadConfig of every checkpoint that KV is computed from."""
    model = vllm_config.model_config
    load_config = vllm_config.load_config
    listed = [("model", model, load_config)]
    draft = draft_config(vllm_config)
    if draft is not None and (draft.model, draft.revision) != (
        model.model,
        model.revision,
    ):
        listed.append(
            (
                "draft",
                draft,
                vllm_config.speculative_config.draft_load_config or load_config,
            )
        )
    return listed


def _named(model_config: Any, load_config: Any, weights: str | None) -> object:
    if weights is not None:
        return [
            "given",
            weights,
            model_name(model_config.model),
            model_config.revision,
        ]
    if load_config.load_format == "dummy":
        raise ValueError(
            'load_format "dummy": these weights are placeholders, and the weights that replace '
            "them are unknown;"
            " give them a separate name, a new one for each run, as `weights` in"
            " kv_connector_extra_config"
        )
    directory = checkpoint_directory(model_config, load_config)
    names = checkpoint_files(directory, model_config, load_config)
    try:
        return ["files", files_digest(directory, names)]
    except OSError as trouble:
        raise ValueError(
            f"{model_config.model}: its weights cannot be named: {trouble}; give the "
            "checkpoint's hash as `weights` in"
            " kv_connector_extra_config"
        ) from None


def model_name(model: str) -> str:
    """Return the last part of a model's id or path; for a snapshot in a hub's cache, the model's
    name online.
    """
    snapshot = _SNAPSHOT.search(model)
    if snapshot:
        return snapshot["name"].split("--")[-1]
    return Path(model).name or model
