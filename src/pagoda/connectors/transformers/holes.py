"""Goes on behind a hole: KV of a prompt whose first missing chunk has stored chunks behind it.

A key names the whole prefix, so the KV of a chunk is right although one before it is gone from all
tiers. The missing tokens between two stored pieces are computed by an ordinary forward pass over
the KV that is there so far:

    stored    | 0 1 2 |     | 4 5 |   | 7 |
    pass      |       |  3  |     | 6 |   | 8 ... `generate`

`CachedModel` calls this for a single prompt of a model that keeps K and V of every token. Decision
79 says why it is for no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagoda.connectors.transformers.dynamic_cache import Planes
from pagoda.connectors.transformers.model_checks import ProbedModel
from pagoda.connectors.transformers.positions import has_own_positions
from pagoda.connectors.transformers.prefill_cuts import pass_over, why_no_passes

# A forward pass reads every weight once, however few tokens it computes. In that time about so many
# tokens are computed: a shorter piece costs more than it saves, as it makes two passes of one.
_LEAST_TOKENS = 256
_LEAST_TOKENS_ON_A_CPU = 16


def least_piece(model: Any, devices: Sequence[Any]) -> int:
    """Return the fewest tokens of a piece behind a hole that are worth a forward pass of their own;
    0 if a prompt of this model cannot be computed in runs between pieces. Pure.

    Args:
        model: that computes.
        devices: of its layers.
    """
    # the positions of a run must be those of `generate`, made from the mask alone
    if why_no_passes(model) or has_own_positions(model):
        return 0
    if {device.type for device in devices} == {"cpu"}:
        return _LEAST_TOKENS_ON_A_CPU
    return _LEAST_TOKENS


def fill_behind(
    model: Any,
    seen: ProbedModel,
    kv: Any,
    planes: Planes,
    runs: Sequence[tuple[int, int]],
    input_ids: Any,
    mask: Any,
    most_tokens: int | None,
) -> int:
    """Fill a cache up to the end of the last stored piece; return how many tokens it holds then.

    Raises what the model raises, and ValueError if a pass has not computed what it was given. Then
    `kv` is of no use; `planes` are not changed.

    Args:
        model: that computes what is missing.
        seen: the probed model.
        kv: the DynamicCache of the leading part.
        planes: where the pieces were loaded to, by their positions.
        runs: the stored tokens as [start, stop), ascending.
        input_ids: [1, tokens], without padding.
        mask: ones, of the same shape.
        most_tokens: of one pass; None: all.
    """
    held = kv.get_seq_length()
    for start, stop in runs:
        if stop <= held:
            continue  # of the leading part
        if start > held:
            pass_over(
                model,
                input_ids,
                mask,
                held,
                start,
                kv,
                most_tokens=most_tokens,
            )
        begin = max(start, held)
        if kv.get_seq_length() != begin:
            raise ValueError(
                f"{kv.get_seq_length()} tokens have KV after a pass up to token {begin}"
            )
        _append(seen, kv, planes, begin, stop)
        held = stop
    return int(held)


def _append(
    seen: ProbedModel, kv: Any, planes: Planes, begin: int, stop: int
) -> None:
    """Append columns [begin, stop) of the planes to a cache that holds those before."""
    for layer, (device, pair) in enumerate(
        zip(seen.devices, planes, strict=True)
    ):
        keys, values = (plane[:, :, begin:stop].to(device) for plane in pair)
        kv.update(keys, values, layer)
