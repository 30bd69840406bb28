"""Everything except the tokens that a Transformers model's KV depends on: weights, config, active
adapters.

Weights are named by their bytes: xxh3_128 of every parameter and buffer, blake3 over names, shapes,
dtypes and those digests. All weights are read once (5 to 10 GB/s a core); afterwards addresses and
version counters show whether one was written to. xxh3 detects accidents, not forgeries: an attacker
who can replace the weights of a model can do worse than share a cache.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from blake3 import blake3

from pagoda.connectors.identity.plain_values import VOLATILE
from pagoda.connectors.transformers.foreign_state import (
    is_foreign,
    state_of,
    state_of_tensor,
)
from pagoda.connectors.transformers.model_walk import (
    ModelWalk,
    inner_tensors,
    mark_of,
    merged_into,
    registered_in,
    walk_over,
)
from pagoda.connectors.transformers.numerics import numerics_of
from pagoda.keys import Namespace
from pagoda.layout import KVLayout

Stamp = tuple[tuple[Any, ...], ...]

_PIECE_BYTES = 256 << 20  # how much is copied from a device to the CPU at a time


def namespace_of(
    model: Any,
    layout: KVLayout,
    *,
    revision: str = "",
    weights: str | None = None,
    salt: str = "",
) -> Namespace:
    """Return the namespace of a model: reads all its weights unless `weights` names them. Changes
    nothing.

    Settings of this moment that change numbers, such as `torch.autocast`, are part of it: see
    `numerics`.
    """
    name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return Namespace(
        model=name.rstrip("/").rsplit("/", 1)[-1],
        revision=revision,
        weights=weights_digest(model) if weights is None else weights,
        # a model that has no KV of every token has states, which the layout names
        kv_dtype=layout.planes[0].dtype if layout.planes else "",
        layout=layout.fingerprint,
        salt=salt,
        numerics=numerics_of(model).text,
    )


def weights_digest(model: Any) -> str:
    """Return 32 hex characters that name the weights, the config and the code version of `model`;
    changes nothing.

    Raises ValueError if a weight has no bytes here (meta device, offloaded).
    """
    import transformers

    found = blake3(derive_key_context="PagodaKV weights of a Transformers model")
    # a release may change what a cache layer holds
    release = ".".join(transformers.__version__.split(".")[:2])
    left_out = (*VOLATILE, "architectures")
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in left_out
    }
    found.update(
        json.dumps(
            [type(model).__qualname__, release, config],
            sort_keys=True,
            default=str,
        ).encode()
    )
    for name, tensor in _tensors(model):
        described = [
            name,
            list(tensor.shape),
            str(tensor.dtype),
            _bytes_digest(name, tensor),
        ]
        found.update(json.dumps(described).encode())
    registered = None
    for name, module in model.named_modules():
        if not is_foreign(type(module)):
            continue
        registered = registered or registered_in(model)
        kind = type(module)
        described = [
            name,
            f"{kind.__module__}.{kind.__qualname__}",
            state_of(module, registered, named_tensor),
        ]
        found.update(json.dumps(described, default=str).encode())
    return str(found.hexdigest(16))


def named_tensor(tensor: Any) -> list[Any]:
    """Return what names a tensor: its shape, dtype and content. Changes nothing. Raises ValueError
    if it has no bytes here.
    """
    return [
        list(tensor.shape),
        str(tensor.dtype),
        _bytes_digest("a tensor of a module", tensor),
    ]


def stamp_of(model: Any) -> Stamp:
    """Return the mark of each tensor, and which adapters are merged: they change when a weight is
    replaced or written to in place.
    """
    marks = [mark_of(tensor) for _, tensor in _tensors(model)]
    merged = [merged_into(module) for module in model.modules()]
    return (*marks, *filter(None, merged))


def adapters_digest(model: Any, walk: ModelWalk | None = None) -> str:
    """Return a name for the adapters (LoRA and the like) that are active in `model`, "" if there
    are none.

    `walk`: that of this moment, if there is one.

    Their weights are parameters of the model and so part of `weights_digest`; this name says which
    of them are active, and how strongly. Raises ValueError for adapters that put virtual tokens
    before the prompt.
    """
    configs = getattr(model, "peft_config", None)
    if isinstance(configs, dict) and any(
        getattr(one, "is_prompt_learning", False) for one in configs.values()
    ):
        raise ValueError(
            "prompt and prefix tuning put virtual tokens into the KV: not supported, switch them "
            "off"
        )
    at_work = []
    present = set()
    for name, module in (walk or walk_over(model)).adapted:
        merged = list(getattr(module, "merged_adapters", ()) or ())
        off = getattr(module, "disable_adapters", False)
        active = [] if off else _names(getattr(module, "active_adapters", ()))
        if merged or active:
            scaling = getattr(module, "scaling", {})
            scales: object = str(scaling)
            if isinstance(scaling, dict):
                scales = {key: scaling.get(key) for key in (*active, *merged)}
            at_work.append([name, active, merged, scales])
            present.update(active)
    for name, config in dict(configs or {}).items():
        if name in present and getattr(config, "alora_invocation_tokens", None):
            raise ValueError(
                f"adapter {name} is an activated LoRA: which tokens it changes depends on what the "
                "prompt says later"
            )
    if not at_work:
        return ""
    return str(
        blake3(
            json.dumps(at_work, sort_keys=True, default=str).encode()
        ).hexdigest(16)
    )


def _names(active: Any) -> list[str]:
    # a method of whole models; the layers below them have a property
    if callable(active):
        return []
    return [active] if isinstance(active, str) else list(active or ())


def _tensors(model: Any) -> list[tuple[str, Any]]:
    """Return parameters and buffers, including those that are not saved (rotary frequencies)."""
    return sorted(
        [*model.named_parameters(), *model.named_buffers()],
        key=lambda named: named[0],
    )


def _bytes_digest(name: str, tensor: Any) -> str:
    if tensor.device.type == "meta":
        raise ValueError(
            f"{name} has no data here (meta device or offloaded): load the whole model, or pass "
            "weights=..."
        )
    found = xxhash.xxh3_128()
    if not _is_plain(tensor):
        return _other_digest(name, tensor)
    resolved = tensor.detach().resolve_conj().resolve_neg()
    flat = resolved.contiguous().flatten()
    step = max(_PIECE_BYTES // max(flat.element_size(), 1), 1)
    for start in range(0, flat.numel(), step):
        found.update(_as_bytes(flat[start : start + step].cpu()))
    return found.hexdigest()


def _is_plain(tensor: Any) -> bool:
    """Return whether a tensor's bytes are all that it holds."""
    import torch

    plain = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return (
        type(tensor) in plain
        and not tensor.is_quantized
        and tensor.layout is torch.strided
    )


def _other_digest(name: str, tensor: Any) -> str:
    """Return what names a tensor of another class, or one that has scales: by the tensors of which
    it is made, and its attributes.
    """
    import torch

    try:
        parts = list(inner_tensors(tensor))
        scales = ""
        if tensor.is_quantized:
            parts = [tensor.int_repr()]
            scales = _scales_of(tensor)
        elif tensor.layout is not torch.strided:
            parts = [tensor.to_dense()]
        elif not parts:
            parts = [tensor.detach().as_subclass(torch.Tensor)]
        kind = type(tensor)
        described = [
            f"{kind.__module__}.{kind.__qualname__}",
            scales,
            [named_tensor(part) for part in parts],
            state_of_tensor(tensor, named_tensor),
        ]
    except Exception as trouble:  # whatever a class raises
        raise ValueError(
            f"{name} is a {type(tensor).__qualname__}, whose content cannot be read "
            f"({type(trouble).__name__}: {trouble}): pass weights=..."
        ) from trouble
    return str(blake3(json.dumps(described, default=str).encode()).hexdigest(16))


def _scales_of(tensor: Any) -> str:
    """Return the scales and zero points of a quantised tensor, as text."""
    import torch

    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return repr((tensor.q_scale(), tensor.q_zero_point()))
    return repr(
        (
            tensor.q_per_channel_scales().tolist(),
            tensor.q_per_channel_zero_points().tolist(),
            tensor.q_per_channel_axis(),
        )
    )


def _as_bytes(flat: Any) -> memoryview:
    import torch

    array: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array.data
