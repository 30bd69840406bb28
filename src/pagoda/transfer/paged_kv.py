"""The KV of one sequence in an engine's paged pools, located by a block table or a slot mapping.

Calls `run_table`, and copies by `cpu_copy` or by `gpu.copy_engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from pagoda.layout import KVLayout
from pagoda.transfer.base import (
    Array,
    Bytes,
    Ids,
    RunTransfer,
    Words,
    as_words,
    device_of,
    no_loads,
)
from pagoda.transfer.cpu_copy import CpuCopy, KvRows
from pagoda.transfer.gpu.copy_engine import GpuCopy, copy_engine_of
from pagoda.transfer.run_table import run_table

if TYPE_CHECKING:
    import torch

    from pagoda.transfer.gpu.copy_engine import CopyEngine
    from pagoda.transfer.gpu.layer_events import LayerEvents

PoolFormat: TypeAlias = Literal[
    "planes_first", "blocks_first", "blocks_outermost", "plane_pools"
]
Pools: TypeAlias = "Array | Sequence[Array | Sequence[Array]]"


class PagedKV(RunTransfer):
    """The KV of one sequence in paged pools. Tokens are in blocks of `block_size`; a chunk is whole
    blocks.

    | pool_format        | pools                                                                     |
    | ------------------ | ------------------------------------------------------------------------- |
    | "planes_first"     | per layer [2, blocks, block_size, heads, dim]                             |
    | "blocks_first"     | per layer [blocks, 2, block_size, heads, dim]                             |
    | "blocks_outermost" | one tensor [blocks, layers, 2, block_size, heads, dim]                    |
    | "plane_pools"      | per layer a pool per plane, [blocks, block_size, heads, dim]: K, V may    |
    |                    | differ; one plane (MLA): per layer [blocks, block_size, dim] itself       |

    The tokens are located by `block_table`, the block ids of the sequence in order, or by
    `slot_mapping`, block * block_size + offset of each token. A leading -1 in either means that the
    engine already has that part of the prefix: `from_slots` never writes there, and storing it is a
    ValueError. A mapping that is not made of whole blocks is copied by token.

    The slot's bytes are those of dense KV with tokens first (or one head), so each finds the
    other's chunks; with "blocks_outermost" the layout may be opaque, and then a slot holds whole
    blocks in order. Runs of `run_bytes` are gathered by one np.take per pool. Pools that are not
    contiguous work too, run by run.

    Pools on a CUDA device are copied while the engine computes (see `GpuCopy`), by `copy_engine` or
    the device's default one; `layer_events` records each loaded layer. `threads` are for CPU
    memory; None: as many as there are idle cores.

    Thread-safe as `Transfer` says. Raises ValueError that names what does not match.
    """  # noqa: E501, W505

    def __init__(
        self,
        pools: Pools,
        layout: KVLayout,
        *,
        pool_format: PoolFormat,
        block_size: int,
        block_table: Array | Sequence[int] | None = None,
        slot_mapping: Array | Sequence[int] | None = None,
        threads: int | None = None,
        copy_engine: CopyEngine | None = None,
        layer_events: LayerEvents | None = None,
    ) -> None:
        if block_size < 1 or layout.chunk_tokens % block_size:
            raise ValueError(
                f"chunk_tokens ({layout.chunk_tokens}) must be a multiple of block_size "
                f"({block_size})"
            )
        self.layout = layout
        # a thread waits layer by layer, so all chunks should be loaded by one call
        self.at_once = layer_events is not None
        device = device_of(pools)
        copy_engine = copy_engine or copy_engine_of(device)
        rows, blocks = _pool_rows(pools, layout, pool_format, block_size, device)
        if block_table is not None and slot_mapping is None:
            self._runs = _block_table_runs(block_table, blocks, block_size)
        elif slot_mapping is not None and block_table is None:
            self._runs = _slot_mapping_runs(slot_mapping, blocks, block_size)
        else:
            raise ValueError("give either block_table or slot_mapping")
        self.num_tokens = self._runs.num_tokens
        self._no_loads = next(
            filter(None, [no_loads(row.array, "pools") for row in rows]), ""
        )
        if self._runs.tokens != block_size:
            if not layout.planes:
                raise ValueError(
                    "slot_mapping must be made of whole blocks where the layout is opaque"
                )
            rows = [_rows_by_token(pool, block_size) for pool in rows]
        self._count = layout.chunk_tokens // self._runs.tokens
        # the shortest contiguous run of a copy, which decides its speed; for benchmarks
        self.run_bytes: int = min(
            row.array.itemsize * row.array.shape[-1] for row in rows
        )
        self._copier: CpuCopy | GpuCopy = CpuCopy(
            rows, self._count, threads=threads
        )
        if copy_engine is not None:
            table = run_table(rows, layout, self._count)
            self._copier = GpuCopy(copy_engine, table, pools, layer_events)
        # a CUDA device; None for CPU memory
        self.device_index: int | None = self._copier.device_index

    def _copy(
        self, starts: Sequence[int], slots: Sequence[Bytes], *, into_slots: bool
    ) -> None:
        tokens = self._runs.tokens
        skipped = self._runs.skip * tokens
        if into_slots and any(start < skipped for start in starts):
            raise ValueError(
                f"starts: the first {skipped} tokens are -1 and have no KV to store"
            )
        odd = [start for start in starts if start % tokens]
        if odd:
            raise ValueError(
                f"starts must be multiples of block_size ({tokens}), got {odd[0]}"
            )
        super()._copy(starts, slots, into_slots=into_slots)

    def _run_ids(self, starts: Sequence[int], *, into_slots: bool) -> Ids:
        firsts = np.array(starts, dtype=np.int64) // self._runs.tokens
        found: Ids = self._runs.ids[firsts[:, None] + np.arange(self._count)]
        return found


# -- pools, block tables and slot mappings ---------------------------------------------------------


class _SequenceRuns(NamedTuple):
    """The runs of a sequence: run i has tokens [i * tokens, (i + 1) * tokens); the first `skip` ids
    are -1.
    """

    ids: Ids
    tokens: int
    skip: int
    num_tokens: int


def _pool_rows(
    pools: Pools,
    layout: KVLayout,
    form: PoolFormat,
    block_size: int,
    on: torch.device | None = None,
) -> tuple[list[KvRows], int]:
    """Return the rows of all pools and their number of blocks. Raises ValueError naming what is
    wrong.

    `on`: the GPU of the pools, None for CPU memory.
    """
    if form not in get_args(PoolFormat):
        raise ValueError(
            f"pool_format must be one of {', '.join(get_args(PoolFormat))}, got {form!r}"
        )
    if form == "blocks_outermost":
        found = _outermost(pools, layout, block_size, on)
    else:
        _check_layout(layout)
        if len(pools) != layout.layers:
            raise ValueError(
                f"pools: {len(pools)} layers were given, the layout has {layout.layers}"
            )
        see = _plane_pools if form == "plane_pools" else _paired
        found = [
            rows
            for layer, pool in enumerate(pools)
            for rows in see(pool, layer, layout, form, block_size, on)
        ]
    blocks = {pool.array.shape[1] for pool in found}
    if len(blocks) != 1:
        raise ValueError(
            f"pools must all have the same number of blocks, got {sorted(blocks)}"
        )
    return found, blocks.pop()


def _rows_by_token(pool: KvRows, block_size: int) -> KvRows:
    """Return the same pool with one token per run. Raises ValueError if it is not contiguous."""
    array = pool.array
    if not (array.flags.c_contiguous or array.swapaxes(0, 1).flags.c_contiguous):
        raise ValueError(
            "slot_mapping is not made of whole blocks: that needs contiguous pools"
        )
    return KvRows(
        array.reshape(*array.shape[:2], block_size, -1), pool.offset, block_size
    )


def _block_table_runs(
    block_table: Array | Sequence[int], blocks: int, block_size: int
) -> _SequenceRuns:
    """Return the runs of a block table. Raises ValueError naming it."""
    ids, skip = _checked_ids(block_table, "block_table", blocks)
    return _SequenceRuns(ids, block_size, skip, len(ids) * block_size)


def _slot_mapping_runs(
    slot_mapping: Array | Sequence[int], blocks: int, block_size: int
) -> _SequenceRuns:
    """Return the runs of a slot mapping: blocks if it consists of whole blocks, else tokens. Raises
    ValueError.
    """
    slots, skip = _checked_ids(slot_mapping, "slot_mapping", blocks * block_size)
    whole = len(slots) // block_size * block_size
    by_block = slots[:whole].reshape(-1, block_size)
    used = by_block[skip // block_size :]
    if (
        skip % block_size == 0
        and np.all(used[:, 0] % block_size == 0)
        and np.all(np.diff(used) == 1)
    ):
        ids = np.where(by_block[:, 0] < 0, -1, by_block[:, 0] // block_size)
        return _SequenceRuns(ids, block_size, skip // block_size, len(slots))
    return _SequenceRuns(slots, 1, skip, len(slots))


def _checked_ids(
    given: Array | Sequence[int], argument: str, limit: int
) -> tuple[Ids, int]:
    """Return the ids and the number of leading -1."""
    try:
        array = np.asarray(given)
    except (TypeError, RuntimeError) as error:  # a tensor on a GPU
        raise ValueError(
            f"{argument} must be readable by the CPU: {error}"
        ) from None
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(
            f"{argument} must be 1-D integers, got {array.ndim}-D {array.dtype}"
        )
    ids: Ids = array.astype(np.int64)
    there = np.flatnonzero(ids != -1)
    skip = int(there[0]) if there.size else len(ids)
    rest = ids[skip:]
    bad = rest[(rest < 0) | (rest >= limit)]
    if bad.size:
        raise ValueError(
            f"{argument}: {bad[0]} is not in [0, {limit}), and -1 is allowed only at the beginning"
        )
    if len(np.unique(rest)) != len(rest):
        raise ValueError(f"{argument} names the same place twice")
    return ids, skip


def _check_layout(layout: KVLayout) -> None:
    if not layout.planes:
        raise ValueError(
            "layout is opaque: only pool_format 'blocks_outermost' can be stored without planes"
        )
    if layout.token_order != "tokens_first" and any(
        plane.heads != 1 for plane in layout.planes
    ):
        raise ValueError(
            "layout must have token_order 'tokens_first': a paged pool keeps tokens before heads"
        )


def _paired(
    pool: object,
    layer: int,
    layout: KVLayout,
    form: PoolFormat,
    size: int,
    on: torch.device | None,
) -> list[KvRows]:
    """Return the rows of K and V of a layer in one pool, planes first or blocks first."""
    heads, dim, dtype = layout.planes[0]
    if len(layout.planes) != 2 or layout.planes[1] != layout.planes[0]:
        raise ValueError(
            f"pool_format {form!r} holds two equal planes, the layout has {layout.planes}"
        )
    array = as_words(pool, f"pools[{layer}]", dtype, on)
    axis = 0 if form == "planes_first" else 1
    blocks = array.shape[1 - axis] if array.ndim == 5 else 0
    lead = (2, blocks) if axis == 0 else (blocks, 2)
    _check_shape(array, f"pools[{layer}]", (*lead, size, heads, dim))
    return [
        _rows(
            array.swapaxes(0, axis),
            f"pools[{layer}]",
            layout.plane_offset(layer, 0),
        )
    ]


def _plane_pools(
    pool: object,
    layer: int,
    layout: KVLayout,
    form: PoolFormat,
    size: int,
    on: torch.device | None,
) -> list[KvRows]:
    """Return the rows of a layer whose planes each have a separate pool."""
    planes = list(pool) if isinstance(pool, list | tuple) else [pool]
    if len(planes) != len(layout.planes):
        raise ValueError(
            f"pools[{layer}] has {len(planes)} planes, the layout has {len(layout.planes)}"
        )
    found = []
    for number, (given, (heads, dim, dtype)) in enumerate(
        zip(planes, layout.planes, strict=True)
    ):
        name = f"pools[{layer}][{number}]"
        array = as_words(given, name, dtype, on)
        if array.ndim == 3 and heads == 1:
            array = array[:, :, None]
        _check_shape(array, name, (len(array), size, heads, dim))
        found.append(_rows(array[None], name, layout.plane_offset(layer, number)))
    return found


def _outermost(
    pools: object, layout: KVLayout, size: int, on: torch.device | None
) -> list[KvRows]:
    """Return the rows of one pool for all layers, block by block."""
    array = as_words(
        pools, "pools", layout.planes[0].dtype if layout.planes else None, on
    )
    if not layout.planes:
        return [
            _rows(
                array[None],
                "pools",
                0,
                layout.chunk_bytes * size // layout.chunk_tokens,
            )
        ]
    _check_layout(layout)
    count = len(layout.planes)
    (heads, dim, _) = layout.planes[0]
    if any(plane != layout.planes[0] for plane in layout.planes):
        raise ValueError(
            f"pool_format 'blocks_outermost' holds equal planes, the layout has {layout.planes}"
        )
    _check_shape(
        array, "pools", (len(array), layout.layers, count, size, heads, dim)
    )
    if not array[:1].flags.c_contiguous:
        raise ValueError(
            f"pools: blocks must be contiguous, got strides {array.strides}"
        )
    planes = array.reshape(len(array), layout.layers * count, size, heads, dim)
    return [_rows(planes.swapaxes(0, 1), "pools", 0)]


def _rows(
    array: Words, argument: str, offset: int, run_bytes: int | None = None
) -> KvRows:
    """Return [planes, blocks, ...] as rows: each block of a plane is contiguous, at any
    distance.
    """
    if array.ndim < 3 or not array[:1, :1].flags.c_contiguous:
        raise ValueError(
            f"{argument}: blocks must be contiguous, got shape {array.shape[1:]} strides "
            f"{array.strides[1:]}"
        )
    nbytes = array[:1, :1].nbytes
    if run_bytes is not None and nbytes != run_bytes:
        raise ValueError(
            f"{argument}: a block has {nbytes} bytes, the layout says {run_bytes}"
        )
    return KvRows(array.reshape(*array.shape[:2], -1), offset)


def _check_shape(array: Words, argument: str, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(
            f"{argument} must have the shape {list(shape)}, got {list(array.shape)}"
        )
