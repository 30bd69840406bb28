"""The rows of a batch as prompts: their tokens and their padding."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda.keys import Item


class BatchRow(NamedTuple):
    """One prompt of a batch: columns [pad, pad + len(tokens)) of the row; the columns before are
    padding.
    """

    tokens: npt.NDArray[np.int32]
    pad: int
    items: tuple[Item, ...] = ()  # images and the like, at their tokens

    def items_in(self, tokens: int) -> list[Item]:
        """Return the items that begin in so many leading tokens. Pure."""
        return [item for item in self.items if item.start < tokens]


def check_input_ids(input_ids: Any) -> None:
    """Raise ValueError unless `input_ids` is a tensor of prompts."""
    import torch

    if (
        not isinstance(input_ids, torch.Tensor)
        or input_ids.ndim != 2
        or not input_ids.numel()
    ):
        raise ValueError(
            "input_ids must be a tensor [batch, tokens] with at least one token"
        )


def mask_of(decoding: Any, input_ids: Any, attention_mask: Any | None) -> Any:
    """Return the attention mask [batch, tokens] that `generate` would use; changes nothing.

    Without a mask, `generate` treats every pad token as padding; so does this. `decoding`: the
    generation config of the call, which names the pad token. Raises ValueError for another shape.
    """
    import torch

    check_input_ids(input_ids)
    if attention_mask is None:
        pads = token_ids(decoding.pad_token_id)
        if not pads or pads[0] in token_ids(decoding.eos_token_id):
            return torch.ones_like(input_ids)
        return (input_ids != pads[0]).long()
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must be [batch, tokens] like input_ids, {list(input_ids.shape)}, "
            f"got {list(attention_mask.shape)}"
        )
    return attention_mask


def rows_of(input_ids: Any, attention_mask: Any) -> list[BatchRow]:
    """Return the prompts of a batch, as copies.

    Raises ValueError unless the padding, if any, is on the left of each row, and for ids that are
    not of tokens.
    """
    given = input_ids.cpu().numpy()
    if given.dtype.kind not in "iu" or given.min() < 0:
        raise ValueError(
            "input_ids has values that are not ids of tokens, so they have no keys"
        )
    ids = given.astype(np.int32)
    mask = attention_mask.cpu().numpy()
    seen = mask != 0
    if (mask[seen] != 1).any():
        raise ValueError("attention_mask has values other than 0 and 1")
    rows = []
    for number, (tokens, shown) in enumerate(zip(ids, seen, strict=True)):
        pad = int(shown.argmax())
        if not shown[pad:].all() or not shown.any():
            raise ValueError(
                f"row {number} is masked inside or on the right: pad on the left, and pass an "
                "attention_mask "
                "if a pad token is part of the prompt"
            )
        rows.append(BatchRow(tokens[pad:], pad))
    return rows


def token_ids(given: Any) -> list[int]:
    """Return the ids of a field of a generation config, which may be one, several or none."""
    if given is None:
        return []
    if hasattr(given, "tolist"):  # a tensor
        given = given.tolist()
    return list(given) if isinstance(given, list | tuple) else [given]


def grown_mask(attention_mask: Any, input_ids: Any) -> Any:
    """Return a prompt's mask with ones for the generated tokens, all of which `generate` attends
    to.
    """
    import torch

    more = input_ids.shape[1] - attention_mask.shape[1]
    ones = torch.ones(
        len(attention_mask),
        more,
        dtype=attention_mask.dtype,
        device=attention_mask.device,
    )
    return torch.cat([attention_mask, ones], dim=1)
