"""Decides which models can be cached, and how. All others are refused with a reason, so that no
text is wrong.

    `is_stateful`     whether some layer keeps something else than K and V of every token
    `check_model`     models of which every layer keeps just that, and
    `probe_model`     the layout of their chunks
    `check_whole`     what is asked of both kinds; `stateful_probe` probes the others
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pagoda.connectors.identity.plain_values import rope_types
from pagoda.connectors.transformers.positions import generating_module
from pagoda.layout import KVLayout, Plane

if TYPE_CHECKING:
    from pagoda.connectors.transformers.cache_shape import CacheShape
    from pagoda.transfer.gpu.copy_engine import CopyEngine

_WHY = {
    "DynamicSlidingWindowLayer": "a sliding window forgets tokens, so its KV cannot be cut at a chunk",  # noqa: E501
    "DynamicIndexedLayer": "it keeps an index beside K and V that is not stored yet",
    "LinearAttentionLayer": "a recurrent state cannot be cut at a chunk",
    "LinearAttentionAndFullAttentionLayer": "a recurrent state cannot be cut at a chunk",
    "LinearAttentionAndSlidingWindowAttentionLayer": "a recurrent state cannot be cut at a chunk",
    "DummyLayer": "layers that share the KV of others are not supported yet",
}
# of the largest value of a layer: float32 rounds to 1e-6, bfloat16 to 1e-2
_MOST_ROUNDING = {"fine": 2e-3, "coarse": 0.05}
_PROBE_TOKENS = 4
_HELD_TOKENS = 2
# rotary frequencies that depend on the length of the prompt
_LENGTH_ROPES = ("dynamic", "longrope")


class ProbedModel(NamedTuple):
    """The result of probing a model."""

    layout: KVLayout
    devices: list[Any]  # where each layer keeps its KV
    copy_engine: CopyEngine | None = None  # None: the CPU copies
    # of a model that has windows or states: the layout is that of its other layers
    shape: CacheShape | None = None


def check_model(model: Any) -> None:
    """Raise ValueError if the KV of a prefix cannot be cut out of this model's cache, or depends on
    what follows it.
    """
    from transformers import DynamicCache

    config = model.config
    if config.is_encoder_decoder or getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{type(model).__name__} keeps a state that is not KV of its tokens: it cannot be "
            "cached"
        )
    check_whole(model)
    for layer in DynamicCache(config=config).layers:
        kind = type(layer).__name__
        if kind != "DynamicLayer":
            raise ValueError(
                f"{type(model).__name__} has a layer of kind {kind}: "
                f"{_WHY.get(kind, 'it cannot be cut')}"
            )


def check_whole(model: Any) -> None:
    """Raise ValueError for a model that does not generate as Transformers does, that is spread over
    processes, or whose K depends on the length of the prompt.
    """
    config = model.config
    if not hasattr(model, "prepare_inputs_for_generation"):
        raise ValueError(f"{type(model).__name__}: it cannot generate")
    if getattr(model, "tp_size", None) or any(
        type(weight).__name__ == "DTensor" for weight in model.parameters()
    ):
        raise ValueError(
            "the weights are spread over processes (tensor parallel, FSDP): each would store its "
            "share under one key"
        )
    ropes = rope_types(config.get_text_config(decoder=True).to_dict())
    if by_length := [rope for rope in _LENGTH_ROPES if rope in ropes]:
        raise ValueError(
            f"rope type {by_length[0]!r}: K depends on the length of the prompt"
        )


def is_stateful(model: Any) -> bool:
    """Whether some layer of the model's cache keeps something else than K and V of every token.
    Pure. Raises ValueError if no cache can be made for the model.
    """
    from transformers import DynamicCache

    if model.config.is_encoder_decoder:
        return False
    try:
        cache = DynamicCache(config=model.config)
    except Exception as trouble:  # whatever a configuration raises
        raise ValueError(
            f"{type(model).__name__} has a configuration of which no cache can be made: "
            f"{type(trouble).__name__}: {trouble}"
        ) from trouble
    kinds = {type(layer).__name__ for layer in cache.layers}
    return bool(kinds - {"DynamicLayer"})


def probe_model(model: Any, chunk_tokens: int) -> ProbedModel:
    """Return the layout of the model's KV, by running it on four tokens; changes nothing.

    Raises ValueError if layers differ, if the cache is not K and V of each token, if the KV of a
    token depends on tokens after it, or if the model cannot compute several tokens after those
    whose KV it is given.
    """
    try:
        return _probed(model, chunk_tokens, told=True)
    except ValueError:
        # it may take positions in another form only, in which `generate` knows them
        return _probed(model, chunk_tokens, told=False)


def _probed(model: Any, chunk_tokens: int, told: bool) -> ProbedModel:
    name = type(model).__name__
    whole = probed_kv(model, _PROBE_TOKENS, told=told)
    planes = {tuple(_plane(tensor) for tensor in layer) for layer in whole}
    if len(planes) != 1:
        raise ValueError(
            f"{name} has layers of different shapes {sorted(planes)}: not supported yet"
        )
    parts = probed_kv(model, _PROBE_TOKENS, held=_HELD_TOKENS, told=told)
    most = _most_rounding(model, whole)
    if not _is_like(parts, whole, slice(0, _HELD_TOKENS), most):
        raise ValueError(
            f"{name}: the KV of a token depends on what comes after it"
        )
    if not _is_like(parts, whole, slice(_HELD_TOKENS, _PROBE_TOKENS), most):
        raise ValueError(
            f"{name} computes other KV if it is given that of the tokens before: it cannot be "
            "cached"
        )
    layout = KVLayout.of(len(whole), planes.pop(), chunk_tokens)
    return ProbedModel(layout, [layer[0].device for layer in whole])


def _most_rounding(model: Any, layers: list[tuple[Any, Any]]) -> float:
    """Return how far two computations of the same KV may differ, of the largest value."""
    import torch

    dtypes = {weight.dtype for weight in model.parameters()}
    dtypes |= {plane.dtype for layer in layers for plane in layer}
    kinds = {plane.device.type for layer in layers for plane in layer}
    is_fine = (
        dtypes <= {torch.float32, torch.float64}
        and torch.get_float32_matmul_precision() == "highest"
        and not any(torch.is_autocast_enabled(kind) for kind in kinds)
    )
    return _MOST_ROUNDING["fine" if is_fine else "coarse"]


def _is_like(
    ours: list[tuple[Any, Any]],
    theirs: list[tuple[Any, Any]],
    tokens: slice,
    most: float,
) -> bool:
    """Return whether KV of some tokens that was computed in two ways is the same, up to rounding of
    `most` of the largest value.
    """
    for our_layer, their_layer in zip(ours, theirs, strict=True):
        for our_plane, their_plane in zip(our_layer, their_layer, strict=True):
            difference = (
                our_plane[..., tokens, :].float()
                - their_plane[..., tokens, :].float()
            )
            if difference.abs().max() > most * their_plane.float().abs().max():
                return False
    return True


def forms_of(model: Any) -> tuple[tuple[Any, Any], ...]:
    """Return the device and dtype of each weight: they decide the device and the layout of the
    KV.
    """
    return tuple((weight.device, weight.dtype) for weight in model.parameters())


def is_compiled(model: Any) -> bool:
    """Whether part of the model's forward pass was compiled: then code between its layers may not
    run at each pass.
    """
    return any(_is_compiled(module) for module in model.modules())


def _is_compiled(module: Any) -> bool:
    own = vars(module)  # `getattr` of a missing attribute is slow on a module
    forward = own.get("forward", type(module).forward)
    return (
        own.get("_compiled_call_impl") is not None
        or "_orig_mod" in module._modules
        or hasattr(forward, "_torchdynamo_orig_callable")
    )


def kv_argument(model: Any, kv: Any) -> dict[str, Any]:
    """Return `kv` as the keyword argument that a call of the model, or of its `generate`, takes.
    Pure.

    Transformers 5.24 renamed `past_key_values` to `cache`.
    """
    return {"cache" if "cache" in parameters_of(model) else "past_key_values": kv}


def parameters_of(model: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the model's forward pass, also if a compiled shell hides them.
    Pure.
    """
    forward = generating_module(model).forward
    return inspect.signature(forward).parameters


def probed_kv(
    model: Any,
    tokens: int,
    first: int | None = None,
    held: int = 0,
    told: bool = False,
) -> list[tuple[Any, Any]]:
    """Return K and V of each layer for so many tokens, at the positions from `first` on if that is
    given.

    `held`: as many of the tokens are computed before, so the model is given their KV, as after a
    hit. `told`: the model is told positions and a mask, if it knows such arguments, as `generate`
    does.

    Raises ValueError if they are not K and V of each token, or if the model cannot compute them.
    """
    import torch
    from transformers import DynamicCache

    cache: Any = DynamicCache(config=model.config)
    layers_made = len(cache.layers)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(1, tokens + 1, device=model.device)[None] % vocabulary
    known = inspect.signature(model.forward).parameters

    def compute(begin: int, end: int) -> None:
        more = {}
        if first is not None:
            more["position_ids"] = torch.arange(
                first + begin, first + end, device=model.device
            )[None]
        if told and "position_ids" in known:
            more["position_ids"] = torch.arange(begin, end, device=model.device)[
                None
            ]
        if told and "attention_mask" in known:
            more["attention_mask"] = torch.ones_like(ids[:, :end])
        with torch.no_grad():
            model(
                input_ids=ids[:, begin:end],
                use_cache=True,
                **kv_argument(model, cache),
                **more,
            )

    what = "a prompt of token ids alone"
    try:
        if held:
            compute(0, held)
            what = f"{tokens - held} tokens after {held} whose KV it is given"
        compute(held, tokens)
    except Exception as trouble:  # whatever a model's code raises
        raise ValueError(
            f"{type(model).__name__} cannot compute {what}: {type(trouble).__name__}: {trouble}"
        ) from trouble
    check_grown(model, layers_made, cache)
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    if any(
        plane is None or plane.ndim != 4 or plane.shape[2] != tokens
        for layer in layers
        for plane in layer
    ):
        raise ValueError(
            f"{type(model).__name__} does not keep K and V [batch, heads, tokens, dim] a layer"
        )
    return layers


class GrownCache(ValueError):
    """A model adds layers to its cache."""


def check_grown(model: Any, made: int, cache: Any) -> None:
    """Raise GrownCache for a model that has added layers to its cache of `made` layers while it
    computed: one that is filled from the tiers has those of the configuration only.
    """
    if len(cache.layers) != made:
        raise GrownCache(
            f"{type(model).__name__}: its cache grows from {made} to {len(cache.layers)} layers "
            "while it computes"
        )


def _plane(tensor: Any) -> Plane:
    _, heads, _, dim = tensor.shape
    return Plane(heads, dim, str(tensor.dtype).removeprefix("torch."))
