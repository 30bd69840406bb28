"""Finds and names the rotary embedding of a model, which moves K to another position; proves it by
a forward pass.

`blending` and engines over Transformers' models call this; it calls `pagoda.blend.rotary_move`.
"""

from __future__ import annotations

import json
from typing import Any

from blake3 import blake3

from pagoda.blend.rotary_move import RotaryMove
from pagoda.connectors.transformers.model_checks import probed_kv
from pagoda.layout import KVLayout, Rotary

_PROBE_TOKENS = 5
_PROBE_SHIFT = 37
# of the largest |K|
_TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}


def rotary_of(model: Any, layout: KVLayout) -> RotaryMove:
    """Return the function that moves a model's K. Runs the model on a few tokens at two positions;
    changes nothing.

    `layout` is that of the model's KV, from `layout_of`. The result's `rotary` is for the layout of
    documents.

    Raises ValueError, in one sentence, if K cannot be moved: no rotary embedding or several, pairs
    of adjacent dims, latents (MLA), positions that V depends on, an attention that takes no mask.
    """
    check_attention(model)
    name = type(model).__name__
    advice = "leave out documents=, and only prefixes of its prompts are reused, exactly"
    parts = [
        part
        for part in model.modules()
        if getattr(part, "inv_freq", None) is not None
    ]
    if len(parts) != 1:
        raise ValueError(
            f"{name} has {len(parts)} rotary embeddings, and K can be moved by one only: {advice}"
        )
    frequencies = parts[0].inv_freq.detach().float().cpu()
    found = RotaryMove(_named(model, frequencies), frequencies)
    if layout.planes[0].dim < found.rotary.dims or len(layout.planes) != 2:
        raise ValueError(
            f"{name} caches no rotated K of each head, so documents cannot be moved: {advice}"
        )
    error = _error(model, found)
    if not error <= _TOLERANCE.get(layout.planes[0].dtype, 0.0):
        raise ValueError(
            f"{name} rotates K in another way than in two halves by one embedding (moved K is "
            f"wrong by {error:.2g} of "
            f"its size), so documents cannot be moved: {advice}"
        )
    return found


def check_attention(model: Any) -> None:
    """Raise ValueError if attention takes no mask of chosen tokens. It may be changed at any time:
    ask each time.
    """
    attention = getattr(model.config, "_attn_implementation", None)
    if attention not in ("sdpa", "eager"):
        raise ValueError(
            f"{type(model).__name__} computes attention by {attention!r}, which takes no mask of "
            "chosen tokens: load "
            "it with attn_implementation='sdpa'"
        )


def _named(model: Any, frequencies: Any) -> Rotary:
    config = model.config.get_text_config(decoder=True)
    parameters = dict(
        getattr(config, "rope_parameters", None)
        or getattr(config, "rope_scaling", None)
        or {}
    )
    theta = float(
        parameters.pop("rope_theta", None)
        or getattr(config, "rope_theta", None)
        or 0.0
    )
    digest = blake3(frequencies.numpy().tobytes()).hexdigest(8)
    scaling = json.dumps([parameters, digest], sort_keys=True, default=str)
    return Rotary(theta, 2 * len(frequencies), scaling)


def _error(model: Any, mover: RotaryMove) -> float:
    """Return the largest error of moved K, and of V, against those computed at the other position;
    relative.
    """
    import torch

    here, there = (
        probed_kv(model, _PROBE_TOKENS, first) for first in (0, _PROBE_SHIFT)
    )
    worst = 0.0
    for (keys, values), (wanted, same) in zip(here, there, strict=True):
        mover.move(keys, _PROBE_SHIFT)
        for got, want in ((keys, wanted), (values, same)):
            error = (
                got.float() - want.float()
            ).abs().max() / want.float().abs().max().clamp_min(1e-12)
            worst = max(worst, float(torch.nan_to_num(error, nan=torch.inf)))
    return worst
