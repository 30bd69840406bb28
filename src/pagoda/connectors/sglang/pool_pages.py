"""The pages of one host pool of SGLang: planes over their bytes, and their format.

SGLang gives a storage only the address of each piece of a page. In all its formats the pieces of
page n are n times a fixed distance after those of page 0, so they form planes of pages, which
`PagesKV` copies.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from pagoda.base.errors import ConfigError
from pagoda.layout import KVLayout
from pagoda.transfer.base import Bytes, Ids
from pagoda.transfer.pages_kv import PagesKV


class PoolPages:
    """The pages of one pool, which this object keeps alive. Immutable and thread-safe, like
    `PagesKV`.

    `page_tokens`: the tokens of a page of the engine; a pool of states has one slot per page.
    `facts`: everything else that decides the bytes of a page. Raises ConfigError for a pool without
    pages of a fixed size at regular addresses.
    """

    def __init__(
        self, name: str, pool: Any, page_tokens: int, facts: dict[str, object]
    ) -> None:
        self._pool = pool
        self._memory = getattr(pool, "kv_buffer", None)
        self._slots_per_page = int(pool.page_size)
        count = int(pool.page_num)
        places = [
            self._places(name, page)
            for page in sorted({0, min(1, count - 1), count - 1})
        ]
        firsts, sizes = places[0]
        strides = sizes
        if count > 1:
            strides = [b - a for a, b in zip(firsts, places[1][0], strict=True)]
        lasts = [
            first + stride * (count - 1)
            for first, stride in zip(firsts, strides, strict=True)
        ]
        if lasts != places[-1][0] or any(
            stride < size for stride, size in zip(strides, sizes, strict=True)
        ):
            raise ConfigError(
                f"the host pool {name!r} of SGLang ({type(pool).__name__}) has no regular pages: "
                f"choose another --hicache-mem-layout than {pool.layout!r}"
            )
        described = {
            **facts,
            "pool": name,
            "class": type(pool).__name__,
            "layout": str(pool.layout),
            "dtype": str(pool.dtype),
            "shape": {field: getattr(pool, field, None) for field in _SHAPE},
            "pieces": sizes,
        }
        self.layout = KVLayout.opaque(
            page_tokens,
            sum(sizes),
            json.dumps(described, sort_keys=True, default=str),
        )
        planes = [
            _plane(*place, count)
            for place in zip(firsts, strides, sizes, strict=True)
        ]
        self._kv = PagesKV(
            planes, self.layout, block_tokens=page_tokens, block_table=[]
        )

    def _places(self, name: str, page: int) -> tuple[list[int], list[int]]:
        """Return address and length of each piece of a page. Raises ConfigError if SGLang does not
        know them.
        """
        import torch

        first = page * self._slots_per_page
        try:
            found = self._pool.get_page_buffer_meta(
                torch.arange(first, first + self._slots_per_page)
            )
        except (AttributeError, NotImplementedError, ValueError) as unknown:
            raise ConfigError(
                f"the host pool {name!r} of SGLang: {unknown}; choose another --hicache-mem-layout"
            ) from None
        if not found or not found[0]:
            raise ConfigError(
                f"the host pool {name!r} of SGLang has no bytes: models with such pools are not "
                "supported"
            )
        return [int(address) for address in found[0]], [
            int(size) for size in found[1]
        ]

    def kv(self, host_indices: Any, first: int, pages: int) -> PagesKV:
        """Return the transfer of so many pages of a prompt, from page `first` on.

        `host_indices`: SGLang's numbers of slots in the pool, a tensor. Raises ValueError if they
        are not these pages.
        """
        each = self._slots_per_page
        slots: Ids = np.asarray(
            host_indices.cpu() if host_indices.is_cuda else host_indices,
            dtype=np.int64,
        )
        if slots.size != pages * each:
            raise ValueError(
                f"{slots.size} slots are not those of {pages} pages of {each}"
            )
        rows = slots.reshape(pages, each)
        numbers, odd = np.divmod(rows[:, 0], each)
        if odd.any() or (rows != rows[:, :1] + np.arange(each)).any():
            raise ValueError("the slots of a page are not adjacent in the pool")
        return self._kv.with_table(
            cast("Sequence[int]", np.concatenate([np.full(first, -1), numbers]))
        )


# attributes of pools that decide the meaning of a page's bytes; a pool may lack some of them
_SHAPE = (
    "page_size",
    "layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "head_group_num",
    "num_mamba_layers",
    "temporal_dtype",
    "conv_dtype",
    "temporal_state_shape",
    "conv_state_shapes",
    "storage_format_tag",
)


def _plane(address: int, stride: int, size: int, count: int) -> Bytes:
    """Return `count` pages of `size` bytes, `stride` bytes apart, from `address` on; the caller
    owns the memory.
    """
    memory = (ctypes.c_uint8 * (stride * (count - 1) + size)).from_address(
        address
    )
    return np.lib.stride_tricks.as_strided(
        np.frombuffer(memoryview(memory), np.uint8), (count, size), (stride, 1)
    )
