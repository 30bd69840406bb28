"""Paged attention for a Transformers model: its KV is in blocks of one pool, found through block
tables.

The pool is one tensor, block first, so that the KV of `block_tokens` tokens in all layers is one
contiguous run of bytes; moving a block to host memory and back is one copy. A sequence does not own
contiguous memory but a *table*:

    tokens   0 1 2 3 | 4 5 6 7 | 8 9          table [7, 2, 5]: block 7, then 2, then 5, whose second half is empty

The model is not forked. Transformers accepts a registered attention function, which every layer
calls with the new tokens' Q, K and V; its other inputs (where to write, what to read) pass through
the model as keyword argument `paged`. The model's own cache stays off.
"""  # noqa: E501, W505

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, PreTrainedModel

from pagoda import KVLayout

NAME = "pagoda_paged"


class KVPool:
    """All the KV on the device: [blocks, layers, 2 (K, V), kv_heads, block_tokens, head_dim],
    zeroed.

    Not thread-safe, but blocks are independent: another thread may copy a block that is not used in
    a computation.
    """

    def __init__(
        self, layout: KVLayout, blocks: int, device: torch.device | str = "cpu"
    ) -> None:
        if len(layout.planes) != 2 or layout.planes[0] != layout.planes[1]:
            raise ValueError(
                f"this example keeps K and V of one shape, the model has {layout.planes}"
            )
        heads, dim, dtype = layout.planes[0]
        shape = (blocks, layout.layers, 2, heads, layout.chunk_tokens, dim)
        # zeros, because tails of blocks are read and masked, and 0 * NaN would be NaN
        self.kv = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        self.block_tokens = layout.chunk_tokens
        self._bytes = self.kv.view(blocks, -1).view(torch.uint8)

    def to_slot(self, block: int, slot: npt.NDArray[np.uint8]) -> None:
        """Copy a block down to host memory; changes the slot only."""
        torch.from_numpy(slot)[: self._bytes.shape[1]].copy_(self._bytes[block])

    def from_slot(self, block: int, slot: npt.NDArray[np.uint8]) -> None:
        """Copy a block up from host memory; changes the block only."""
        self._bytes[block].copy_(torch.from_numpy(slot)[: self._bytes.shape[1]])

    def read(self, table: list[int], positions: range) -> torch.Tensor:
        """Return a copy of the KV of some tokens, wherever they are in blocks: [layers, 2,
        kv_heads, tokens, dim].
        """
        blocks, offsets = self._where(table, positions)
        return self.kv[blocks, :, :, :, offsets].permute(1, 2, 3, 0, 4)

    def write(self, table: list[int], positions: range, kv: torch.Tensor) -> None:
        """Put the KV of some tokens, as `read` returns it, into their blocks."""
        blocks, offsets = self._where(table, positions)
        self.kv[blocks, :, :, :, offsets] = kv.permute(3, 0, 1, 2, 4)

    def _where(
        self, table: list[int], positions: range
    ) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.arange(positions.start, positions.stop, device=self.kv.device)
        return torch.tensor(table, device=self.kv.device)[
            at // self.block_tokens
        ], at % self.block_tokens


class Part(NamedTuple):
    """What one sequence computes in a step: the KV and logits of the tokens at these positions.

    A token looks at all positions up to its own, computed in this step or before. With an `origin`
    it looks at those from there on only, and its rotary position counts from there: so the KV is
    that of a prompt that begins there.
    """

    tokens: list[int]
    positions: Sequence[int]  # ascending; with gaps where KV is reused
    table: list[int]
    origin: int = 0


class Batch(NamedTuple):
    """A step of all sequences, flattened: no padding among the tokens."""

    ids: torch.Tensor  # [1, tokens]
    positions: torch.Tensor  # [1, tokens], those of the rotary embedding
    blocks: torch.Tensor  # [tokens], where each token's KV goes
    offsets: torch.Tensor  # [tokens], and where in the block
    last: torch.Tensor  # [sequences], the last token of each
    groups: list[Group]
    pool: KVPool
    last_layer: int | None = None  # where to stop, see `deviation`


# Sequences with the same number of new tokens: their attention is one call. (All decoding ones are
# one group.)
#   first token in the batch, new tokens each,
#   tables [sequences, longest], shorter ones padded with block 0,
#   mask [sequences, 1, new tokens, longest * block_tokens], True where a token may look
Group: TypeAlias = tuple[int, int, torch.Tensor, torch.Tensor]


def batch_of(parts: Sequence[Part], pool: KVPool) -> Batch:
    """Return the batch of `parts`, which must be sorted by their number of tokens. Changes
    nothing.
    """
    size = pool.block_tokens
    tensor = partial(torch.as_tensor, device=pool.kv.device)
    lengths = [len(part.tokens) for part in parts]
    positions = [np.asarray(part.positions) for part in parts]
    origins = np.array([part.origin for part in parts])
    blocks = [
        np.asarray(part.table)[at // size]
        for part, at in zip(parts, positions, strict=True)
    ]
    groups = []
    begin = 0
    first = 0
    for new, members in groupby(lengths):
        count = len(list(members))
        at = np.stack(positions[first : first + count])  # [sequences, new]
        longest = int(at.max()) // size + 1
        tables = np.zeros((count, longest), np.int64)
        for row, part in zip(tables, parts[first : first + count], strict=True):
            row[: len(part.table)] = part.table[:longest]
        places = np.arange(longest * size)
        first_seen = origins[first : first + count, None, None, None]
        mask = (first_seen <= places) & (places <= at[:, None, :, None])
        groups.append((begin, new, tensor(tables), tensor(mask)))
        begin = begin + count * new
        first = first + count
    flat = np.concatenate(positions)
    ids = np.array([token for part in parts for token in part.tokens])
    where = (np.concatenate(blocks), flat % size, np.cumsum(lengths) - 1)
    rotary = flat - np.repeat(origins, lengths)
    return Batch(
        tensor(ids[None]), tensor(rotary[None]), *map(tensor, where), groups, pool
    )


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, tokens, dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, dim]
    value: torch.Tensor,
    # Transformers makes no mask for an attention function that it does not know
    mask: None,
    *,
    paged: Batch,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Write the new tokens' K and V into their blocks, then let each token look at its sequence's
    blocks.
    """
    # [blocks, 2, kv_heads, block_tokens, dim]
    kv = paged.pool.kv[:, module.layer_idx]
    reused = (
        kv[paged.blocks, 0, :, paged.offsets]
        if module.layer_idx == paged.last_layer
        else None
    )
    kv[paged.blocks, 0, :, paged.offsets] = key[0].transpose(0, 1)
    kv[paged.blocks, 1, :, paged.offsets] = value[0].transpose(0, 1)
    if reused is not None:
        raise Reached(
            (key[0].transpose(0, 1).float() - reused.float()).square().sum((1, 2))
        )
    outs = []
    for begin, new, tables, mask in paged.groups:
        count = len(tables)
        q = (
            query[0, :, begin : begin + count * new]
            .unflatten(1, (count, new))
            .transpose(0, 1)
        )
        # gather [sequences, longest, 2, kv_heads, block_tokens, dim], then tokens side by side
        k, v = kv[tables].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True
        )
        # [sequences * new, heads, dim]
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)[None], None


def paged_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a paged model over the same weights; `model` itself does not change.

    Everything is copied except the tensors. Above all the config: it selects the attention, and
    every model that shares the config would switch too.
    """
    AttentionInterface.register(NAME, paged_attention)
    shared = {
        id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())
    }
    twin = copy.deepcopy(model, shared)
    twin.set_attn_implementation(NAME)
    return twin


@torch.inference_mode()
def next_tokens(model: PreTrainedModel, batch: Batch) -> list[int]:
    """Run the model over a batch and put its KV into the pool. Returns the likeliest next token of
    each sequence.
    """
    own = {"use_cache": False, "logits_to_keep": batch.last, "paged": batch}
    return (
        model(input_ids=batch.ids, position_ids=batch.positions, **own)
        .logits[0]
        .argmax(-1)
        .tolist()
    )


class Reached(Exception):
    """Ends a forward pass at `last_layer`; its argument is how far K moved there: [tokens]."""


@torch.inference_mode()
def deviation(
    model: PreTrainedModel, batch: Batch, layer: int
) -> npt.NDArray[np.float32]:
    """Compute a batch up to K and V of one layer, which replace those in the pool; return how far K
    moved.
    """
    try:
        model.base_model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            use_cache=False,
            paged=batch._replace(last_layer=layer),
        )
    except Reached as reached:
        return reached.args[0].cpu().numpy()
    raise ValueError(f"the model has no layer {layer}")
