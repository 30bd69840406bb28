"""The rows of a batch as prompts: their tokens and their padding."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class BatchRow(NamedTuple):
    """One prompt of a batch: columns [pad, pad + len(tokens)) of the row; the columns before are padding."""

    tokens: npt.NDArray[np.int32]
    pad: int


def mask_of(model: Any, input_ids: Any, attention_mask: Any | None) -> Any:
    """Return the attention mask [batch, tokens] that `generate` would use; changes nothing.

    Without a mask, `generate` treats every pad token as padding; so does this. Raises ValueError for another shape.
    """
    import torch

    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError("input_ids must be a tensor [batch, tokens] with at least one token")
    if attention_mask is None:
        config = model.generation_config
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        if config.pad_token_id is None or config.pad_token_id in ends:
            return torch.ones_like(input_ids)
        return (input_ids != config.pad_token_id).long()
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must be [batch, tokens] like input_ids, {list(input_ids.shape)}, "
            f"got {list(attention_mask.shape)}"
        )
    return attention_mask


def rows_of(input_ids: Any, attention_mask: Any) -> list[BatchRow]:
    """Return the prompts of a batch. Raises ValueError unless the padding, if any, is on the left of each row."""
    ids = input_ids.cpu().numpy().astype(np.int32)
    seen = attention_mask.cpu().numpy() != 0
    rows = []
    for number, (tokens, mask) in enumerate(zip(ids, seen, strict=True)):
        pad = int(mask.argmax())
        if not mask[pad:].all() or not mask.any():
            raise ValueError(
                f"row {number} is masked inside or on the right: pad on the left, and pass an attention_mask "
                "if a pad token is part of the prompt"
            )
        rows.append(BatchRow(tokens[pad:], pad))
    return rows


def grown_mask(attention_mask: Any, input_ids: Any) -> Any:
    """Return a prompt's mask with ones for the generated tokens, all of which `generate` attends to."""
    import torch

    more = input_ids.shape[1] - attention_mask.shape[1]
    ones = torch.ones(len(attention_mask), more, dtype=attention_mask.dtype, device=attention_mask.device)
    return torch.cat([attention_mask, ones], dim=1)
