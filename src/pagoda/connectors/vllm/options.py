"""The options in `kv_connector_extra_config`: all options of `Config`, and a few of this
connector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pagoda.base.errors import ConfigError
from pagoda.config import Config, option_names
from pagoda.config.sources import DEFAULT, load
from pagoda.connectors.extra_options import ExtraOptions

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig

# A hit ends with a chunk: the tokens after the last whole chunk of a prompt are computed again each
# time. On a CPU this is expensive, so a chunk is one block, as in the engine's own cache. On a GPU
# it is cheap; there the processor time of a chunk, 0.1 to 0.4 ms with all tiers, is the scarce
# resource.
_CPU_TOKENS = 32
_GPU_TOKENS = 256
EXTRA = "kv_connector_extra_config"
"""vLLM's name for the options that it passes to a connector."""
_OWN = (
    "weights",
    "weights_run",
    "salt",
    "store_output",
    "canonical_layout",
    "allow_untested_vllm",
)
# keys that vLLM's own OffloadingConnector reads from the same mapping
_OF_VLLM = (
    "block_size",
    "blocks_per_chunk",
    "offload_prompt_only",
    "self_describing_kv_events",
    "spec_module_path",
    "spec_name",
)


@dataclass(frozen=True)
class ConnectorOptions:
    """The options of one connector. Immutable: threads may share it.

    `weights` names the checkpoint instead of the digest of its files; None = read the files.
    `weights_run` names the run that vLLM's weight versions belong to; None = versions are ignored.
    `salt` separates tenants (a secret).
    `store_output`: also store chunks that generated tokens complete. `canonical_layout`: share
    chunks with engines of other tensor-parallel sizes. `allow_untested_vllm`: run with a version of
    vLLM that was not tested.
    """

    config: Config
    weights: str | None = None
    weights_run: str | None = None
    salt: str = field(default="", repr=False)
    store_output: bool = True
    canonical_layout: bool = False
    allow_untested_vllm: bool = False


def read_options(
    extra_config: Mapping[str, Any],
    block_tokens: int,
    chunk: tuple[int, str] | None = None,
) -> ConnectorOptions:
    """Return the options of `kv_connector_extra_config`, of the files and of the environment.
    Changes nothing.

    The chunk is a whole number of the engine's blocks: the configured number, or by default on a
    CPU the smallest with at least 32 tokens, elsewhere the largest with at most 256, and at least
    one block. If vLLM decides it, `chunk` has its tokens and the reason.

    Raises:
        ConfigError: (a ValueError) an unknown key (with the nearest known one), an invalid value,
            or a `chunk_tokens` that is not a multiple of `block_tokens`.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    extra = ExtraOptions(EXTRA, extra_config)
    extra.refuse_unknown((*option_names(), *_OWN), _OF_VLLM)
    given = {
        name: extra_config[name]
        for name in option_names()
        if name in extra_config
    }
    loaded = load(**given)
    config = loaded.for_engine()
    origin = loaded.origins["chunk_tokens"]
    if chunk is not None:
        tokens, decided_by = chunk
        if origin != DEFAULT and config.chunk_tokens != tokens:
            raise ConfigError(
                f"chunk_tokens = {config.chunk_tokens}, but {decided_by} makes chunks of "
                f"{tokens} tokens: leave "
                "chunk_tokens out, or set blocks_per_chunk"
            )
        config = replace(config, chunk_tokens=tokens)
    elif origin == DEFAULT:
        from vllm.platforms import current_platform

        config = replace(
            config, chunk_tokens=chunk_of(block_tokens, current_platform.is_cpu())
        )
    elif config.chunk_tokens % block_tokens:
        raise ConfigError(_uneven(config.chunk_tokens, origin, block_tokens))
    run = extra.text("weights_run")
    # the slash separates the run's name from the version
    if run is not None and "/" in run:
        raise ConfigError(
            f"{EXTRA}: weights_run = {run!r}: write a name without a slash"
        )
    return ConnectorOptions(
        config=config,
        weights=extra.text("weights"),
        weights_run=run,
        salt=extra.text("salt") or "",
        store_output=extra.flag("store_output", True),
        canonical_layout=extra.flag("canonical_layout"),
        allow_untested_vllm=extra.flag("allow_untested_vllm"),
    )


def chunk_options(
    config: OffloadingConfig, states: bool = False
) -> tuple[ConnectorOptions, int]:
    """Return the options of a hybrid model and its blocks per chunk: vLLM's own options precede
    `chunk_tokens`.

    `states`: some layers have a state instead of keys and values. vLLM keeps it at the end of a
    block in which a prompt or a step ends: hardly any longer chunk would have it. So a chunk is one
    block.
    """
    extra = config.extra_config
    blocks = config.cache.blocks_per_chunk
    sizes = sorted({group.tokens_per_block for group in config.groups})
    named = [
        name
        for name in ("block_size", "blocks_per_chunk")
        if extra.get(name) is not None
    ]
    if named or len(sizes) > 1:
        decided_by = (
            f"{named[0]} = {extra[named[0]]}"
            if named
            else f"groups with blocks of {sizes} tokens"
        )
        return read_options(
            extra, sizes[-1], (sizes[-1] * blocks, decided_by)
        ), blocks
    if states:
        return read_options(
            extra,
            sizes[0],
            (sizes[0], "a model with linear attention or Mamba layers"),
        ), 1
    options = read_options(extra, sizes[0])
    return options, options.config.chunk_tokens // sizes[0]


def chunk_of(block_tokens: int, on_cpu: bool) -> int:
    """Return the default number of tokens of a chunk: whole blocks. Pure."""
    blocks = (
        -(-_CPU_TOKENS // block_tokens)
        if on_cpu
        else max(_GPU_TOKENS // block_tokens, 1)
    )
    return blocks * block_tokens


def _uneven(chunk_tokens: int, origin: str, block_tokens: int) -> str:
    below = chunk_tokens // block_tokens * block_tokens
    near = " or ".join(
        str(tokens) for tokens in (below, below + block_tokens) if tokens
    )
    return (
        f"chunk_tokens = {chunk_tokens} ({origin}): vLLM's blocks have {block_tokens} tokens and "
        "a chunk is whole"
        f" blocks; set chunk_tokens to {near}, or leave it out"
    )
