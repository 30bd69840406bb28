"""The KV of one sequence as one array per plane and layer, as in Transformers' caches.

Calls `cpu_copy` for CPU memory, `gpu.copy_engine` for GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pagoda.layout import KVLayout
from pagoda.transfer.base import (
    Array,
    Ids,
    RunTransfer,
    Words,
    as_words,
    device_of,
    no_loads,
)
from pagoda.transfer.cpu_copy import CpuCopy, KvRows
from pagoda.transfer.gpu.copy_engine import GpuCopy, copy_engine_of
from pagoda.transfer.run_table import dense_run_table

if TYPE_CHECKING:
    from pagoda.transfer.gpu.copy_engine import CopyEngine
    from pagoda.transfer.gpu.layer_events import LayerEvents


class DenseKV(RunTransfer):
    """The KV of one sequence: `layers[i] = (K, V)` tensors or arrays [heads, tokens, dim], or
    tokens first.

    The order of the axes is `layout.token_order`; each layer has as many planes as the layout (one
    for MLA, where [tokens, dim] is enough; four if scales come with quantised K and V). None in
    place of a plane that the layout does not have is skipped. All planes hold the same number of
    tokens. Nothing is copied here and no autograd graph is kept, only the memory itself. A copy is
    one call per plane and layer, for adjacent chunks together; its inner run is `run_bytes`. Memory
    that is read-only or expanded (several elements at one address) is only for stores.

    Tensors on a CUDA device are copied while the engine computes (see `GpuCopy`), by `copy_engine`
    or the device's default one; `layer_events` records each loaded layer. `threads` are for CPU
    memory; None: as many as there are idle cores.

    Thread-safe as `Transfer` says. Raises ValueError that names what does not match the layout.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Array | None]],
        layout: KVLayout,
        *,
        threads: int | None = None,
        copy_engine: CopyEngine | None = None,
        layer_events: LayerEvents | None = None,
    ) -> None:
        if not layout.planes:
            raise ValueError(
                "layout is opaque: per-layer KV needs one with planes, e.g. KVLayout.dense(...)"
            )
        if len(layers) != layout.layers:
            raise ValueError(
                f"layers: {len(layers)} were given, the layout has {layout.layers}"
            )
        self.layout = layout
        # a thread waits layer by layer, so all chunks should be loaded by one call
        self.at_once = layer_events is not None
        self._token_axis = 1 if layout.token_order == "heads_first" else 0
        self._device = device_of(*layers)
        copy_engine = copy_engine or copy_engine_of(self._device)
        by_layer = [
            self._planes(number, layer) for number, layer in enumerate(layers)
        ]
        counts = {
            plane.shape[self._token_axis]
            for planes in by_layer
            for plane in planes
        }
        if len(counts) != 1:
            raise ValueError(
                f"layers must all hold the same number of tokens, got {sorted(counts)}"
            )
        self.num_tokens: int = counts.pop()
        rows = list[KvRows]()
        offset = 0
        for planes in by_layer:
            for plane in planes:
                rows.append(
                    KvRows(plane if self._token_axis else plane[None], offset)
                )
                heads = plane.shape[1 - self._token_axis]
                dim = plane.shape[2]
                offset += heads * dim * layout.chunk_tokens * plane.itemsize
        self._rows = rows
        # ids of the runs of a chunk, relative to its first token
        self._ids_of_chunk = np.zeros(1, np.int64)
        self._copier: CpuCopy | GpuCopy = CpuCopy(
            rows, 1, units=layout.chunk_tokens, threads=threads
        )
        if copy_engine is not None:
            table = dense_run_table(rows, layout)
            self._ids_of_chunk = np.arange(table.count)
            self._copier = GpuCopy(copy_engine, table, layers, layer_events)
        # a CUDA device; None for CPU memory
        self.device_index: int | None = self._copier.device_index

    @property
    def run_bytes(self) -> int:
        """The shortest contiguous run of a copy, in bytes, which decides its speed. For
        benchmarks.
        """
        return min(
            _run_bytes(row.array[:, : self.layout.chunk_tokens])
            for row in self._rows
        )

    def _run_ids(self, starts: Sequence[int], *, into_slots: bool) -> Ids:
        return np.array(starts, dtype=np.int64)[:, None] + self._ids_of_chunk

    def _planes(self, number: int, layer: Sequence[Array | None]) -> list[Words]:
        given = [plane for plane in layer if plane is not None]
        if len(given) != len(self.layout.planes):
            raise ValueError(
                f"layers[{number}] has {len(given)} planes, the layout has "
                f"{len(self.layout.planes)}"
            )
        return [
            self._plane(f"layers[{number}][{plane}]", plane, value)
            for plane, value in enumerate(given)
        ]

    def _plane(self, argument: str, plane: int, value: Array) -> Words:
        heads, dim, dtype = self.layout.planes[plane]
        array = as_words(value, argument, dtype, self._device)
        self._no_loads = self._no_loads or no_loads(array, argument)
        if array.ndim == 4:
            raise ValueError(
                f"{argument} has a batch dimension (shape {array.shape}): pass one sequence, "
                "e.g. k[0]"
            )
        if array.ndim == 2 and heads == 1:
            array = np.expand_dims(array, 1 - self._token_axis)
        elif array.ndim == 2 and dim == 1:
            array = array[:, :, None]
        order = (
            "[heads, tokens, dim]" if self._token_axis else "[tokens, heads, dim]"
        )
        if (
            array.ndim != 3
            or array.shape[1 - self._token_axis] != heads
            or array.shape[2] != dim
        ):
            raise ValueError(
                f"{argument} must be {order} with {heads} heads and dim {dim}, got shape "
                f"{array.shape}"
            )
        return array


def _run_bytes(array: Words) -> int:
    """Return the contiguous bytes before a stride jumps."""
    run = array.itemsize
    for size, stride in zip(
        reversed(array.shape), reversed(array.strides), strict=True
    ):
        if size != 1 and stride != run:
            break
        run *= size
    return run
