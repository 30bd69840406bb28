"""Every format of KV memory by plain indexing: the places of a chunk's elements, and their order in
a slot.

A form makes views of one flat tensor of integers. The same views of a tensor that counts from 0
give the place of each element of a chunk, so the expected result of a load in all of the memory is
known without any transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagoda.layout import KVLayout, itemsize
from pagoda.transfer import DenseKV, PagedKV, merged
from pagoda.transfer.base import Transfer
from pagoda.transfer.gpu.copy_engine import CopyEngine
from pagoda.transfer.gpu.device_pages_kv import DevicePagesKV
from pagoda.transfer.gpu.layer_events import LayerEvents

Views = list[list[torch.Tensor]]  # by layer, by plane


class Size(NamedTuple):
    """A model's KV, and the amount of it that a test moves."""

    layers: int
    heads: int
    dim: int
    block: int  # tokens
    chunk: int  # tokens
    chunks: int = 3
    spare: int = 5  # blocks that no chunk has

    @property
    def blocks(self) -> int:
        return self.chunks * self.chunk // self.block + self.spare

    @property
    def token_elements(self) -> int:
        return self.heads * self.dim


LLAMA_8B = Size(32, 8, 128, 16, 256)
SHORT = Size(4, 8, 128, 16, 256)
ODD = Size(3, 3, 5, 3, 9, chunks=4)
ONE_TOKEN = Size(2, 1, 7, 1, 1, chunks=6)
TINY = Size(2, 2, 8, 4, 16)


@dataclass(frozen=True)
class Form:
    """One format. `views(flat)` are the pools; `chunk(views, ids)` the elements of a chunk in the
    slot's order.
    """

    name: str
    planes: int
    views: Callable[[Size, torch.Tensor], Views]
    chunk: Callable[[Size, Views, torch.Tensor], torch.Tensor]
    kv: Callable[..., Transfer]
    layout: Callable[[Size, str], KVLayout]
    dense: bool = False

    def elements(self, size: Size) -> int:
        """Of the flat tensor."""
        return (
            size.layers
            * self.planes
            * size.blocks
            * size.block
            * size.token_elements
        )


def _dense(size: Size, dtype: str, order: str = "tokens_first") -> KVLayout:
    return KVLayout.dense(
        size.layers, size.heads, size.dim, dtype, size.chunk, token_order=order
    )  # type: ignore[arg-type]


def _mla(size: Size, dtype: str) -> KVLayout:
    return KVLayout.mla(size.layers, size.token_elements, dtype, size.chunk)


def _opaque(size: Size, dtype: str) -> KVLayout:
    nbytes = size.layers * 2 * size.chunk * size.token_elements * itemsize(dtype)
    return KVLayout.opaque(size.chunk, nbytes, "tests of the gpu")


def _opaque_mla(size: Size, dtype: str) -> KVLayout:
    nbytes = size.layers * size.chunk * size.token_elements * itemsize(dtype)
    return KVLayout.opaque(size.chunk, nbytes, "tests of the gpu, one plane")


# ---- the pools as views of a flat tensor


def _planes_first(size: Size, flat: torch.Tensor) -> Views:
    shape = (size.layers, 2, size.blocks, size.block, size.heads, size.dim)
    return [[layer] for layer in flat.view(shape)]


def _blocks_first(size: Size, flat: torch.Tensor) -> Views:
    shape = (size.layers, size.blocks, 2, size.block, size.heads, size.dim)
    return [[layer] for layer in flat.view(shape)]


def _outermost(size: Size, flat: torch.Tensor) -> Views:
    return [
        [flat.view(size.blocks, size.layers, 2, size.block, size.heads, size.dim)]
    ]


def _plane_pools(size: Size, flat: torch.Tensor) -> Views:
    shape = (size.layers, 2, size.blocks, size.block, size.heads, size.dim)
    return [[layer[0], layer[1]] for layer in flat.view(shape)]


def _mla_pools(size: Size, flat: torch.Tensor) -> Views:
    return [
        [layer]
        for layer in flat.view(
            size.layers, size.blocks, size.block, size.token_elements
        )
    ]


def _heads_first(size: Size, flat: torch.Tensor) -> Views:
    shape = (size.layers, 2, size.heads, size.blocks * size.block, size.dim)
    return [[layer[0], layer[1]] for layer in flat.view(shape)]


def _tokens_first(size: Size, flat: torch.Tensor) -> Views:
    shape = (size.layers, 2, size.blocks * size.block, size.heads, size.dim)
    return [[layer[0], layer[1]] for layer in flat.view(shape)]


def _pages(size: Size, flat: torch.Tensor) -> Views:
    """[blocks, elements of a page], one plane per layer, each in separate memory."""
    return [[layer] for layer in flat.view(size.layers, size.blocks, -1)]


def _pages_in_blocks(size: Size, flat: torch.Tensor) -> Views:
    """The layers of a block are adjacent."""
    each = flat.view(size.blocks, size.layers, -1)
    return [[each[:, layer]] for layer in range(size.layers)]


# ---- the elements of one chunk, in the order of a slot


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def _of_planes_first(size: Size, views: Views, ids: torch.Tensor) -> torch.Tensor:
    return _cat([pool[:, ids] for (pool,) in views])


def _of_blocks_first(size: Size, views: Views, ids: torch.Tensor) -> torch.Tensor:
    return _cat([pool[ids].transpose(0, 1) for (pool,) in views])


def _of_outermost(size: Size, views: Views, ids: torch.Tensor) -> torch.Tensor:
    return _cat([views[0][0][ids].permute(1, 2, 0, 3, 4, 5)])


def _of_whole_blocks(size: Size, views: Views, ids: torch.Tensor) -> torch.Tensor:
    return _cat([views[0][0][ids]])


def _of_pools(size: Size, views: Views, ids: torch.Tensor) -> torch.Tensor:
    return _cat([pool[ids] for layer in views for pool in layer])


def _tokens(size: Size, ids: torch.Tensor) -> slice:
    first = int(ids[0]) * size.block
    return slice(first, first + size.chunk)


def _of_heads_first(size: Size, views: Views, ids: torch.Tensor) -> torch.Tensor:
    return _cat(
        [plane[:, _tokens(size, ids)] for layer in views for plane in layer]
    )


def _of_tokens_first(size: Size, views: Views, ids: torch.Tensor) -> torch.Tensor:
    return _cat([plane[_tokens(size, ids)] for layer in views for plane in layer])


def _of_merged_pages(size: Size, views: Views, ids: torch.Tensor) -> torch.Tensor:
    return _cat([torch.cat([pool[ids] for (pool,) in views], 1)])


# ---- the transfers


def _paged(pool_format: str, pairs: bool = False) -> Callable[..., Transfer]:
    def make(
        size: Size,
        views: Views,
        layout: KVLayout,
        table: Sequence[int],
        engine: CopyEngine,
        **options: object,
    ) -> Transfer:
        pools: object = [tuple(layer) if pairs else layer[0] for layer in views]
        if pool_format == "blocks_outermost":
            pools = views[0][0]
        return PagedKV(
            pools,  # type: ignore[arg-type]
            layout,
            pool_format=pool_format,  # type: ignore[arg-type]
            block_size=size.block,
            block_table=list(table),
            copy_engine=engine,
            **options,  # type: ignore[arg-type]
        )

    return make


def _by_pages(merge: bool) -> Callable[..., Transfer]:
    def make(
        size: Size,
        views: Views,
        layout: KVLayout,
        table: Sequence[int],
        engine: CopyEngine,
        **options: object,
    ) -> Transfer:
        planes = [layer[0].view(torch.uint8) for layer in views]
        return DevicePagesKV(
            merged(planes) if merge else planes,  # type: ignore[arg-type]
            layout,
            block_tokens=size.block,
            block_table=list(table),
            copy_engine=engine,
            **options,  # type: ignore[arg-type]
        )

    return make


def _dense_kv(
    size: Size,
    views: Views,
    layout: KVLayout,
    table: Sequence[int],
    engine: CopyEngine,
    layer_events: LayerEvents | None = None,
) -> Transfer:
    return DenseKV(views, layout, copy_engine=engine, layer_events=layer_events)


def _heads(size: Size, dtype: str) -> KVLayout:
    return _dense(size, dtype, "heads_first")


FORMS = [
    Form("planes_first", 2, _planes_first, _of_planes_first, _paged("planes_first"), _dense),
    Form("blocks_first", 2, _blocks_first, _of_blocks_first, _paged("blocks_first"), _dense),
    Form("blocks_outermost", 2, _outermost, _of_outermost, _paged("blocks_outermost"), _dense),
    Form("opaque_blocks", 2, _outermost, _of_whole_blocks, _paged("blocks_outermost"), _opaque),
    Form("plane_pools", 2, _plane_pools, _of_pools, _paged("plane_pools", pairs=True), _dense),
    Form("mla", 1, _mla_pools, _of_pools, _paged("plane_pools"), _mla),
    Form("pages", 1, _pages, _of_pools, _by_pages(merge=False), _opaque_mla),
    Form("pages_in_blocks", 1, _pages_in_blocks, _of_pools, _by_pages(merge=False), _opaque_mla),
    Form("merged_pages", 1, _pages_in_blocks, _of_merged_pages, _by_pages(merge=True), _opaque_mla),
    Form("heads_first", 2, _heads_first, _of_heads_first, _dense_kv, _heads, dense=True),
    Form("tokens_first", 2, _tokens_first, _of_tokens_first, _dense_kv, _dense, dense=True),
]  # fmt: skip
BY_NAME = {form.name: form for form in FORMS}
