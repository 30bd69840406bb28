"""The KV of one sequence as one array per plane and layer, as in Transformers' caches.

Calls `cpu_copy` for CPU memory, `gpu.copy_engine` for GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagoda.layout import KVLayout
from pagoda.transfer.base import Array, Bytes, Ids, Words, as_words, checked_chunks, device_of, word_dtype
from pagoda.transfer.cpu_copy import CopyPair, copy_pairs
from pagoda.transfer.gpu.copy_engine import GpuCopy, copy_engine_of
from pagoda.transfer.run_table import dense_run_table

if TYPE_CHECKING:
    from pagoda.transfer.gpu.copy_engine import CopyEngine
    from pagoda.transfer.gpu.layer_events import LayerEvents

__all__ = ["DenseKV"]


class _SlotPlane(NamedTuple):
    """The place of one plane of all layers in a slot: an array [layers, *shape], one stride between layers."""

    shape: tuple[int, int, int, int]
    dtype: np.dtype[np.unsignedinteger]
    offset: int
    strides: tuple[int, int, int, int]

    def of(self, slot: Bytes) -> Words:
        """Return the plane's view of a slot; copies nothing."""
        return np.ndarray(self.shape, self.dtype, slot, self.offset, self.strides)


class DenseKV:
    """The KV of one sequence: `layers[i] = (K, V)` tensors or arrays [heads, tokens, dim], or tokens first.

    The order of the axes is `layout.token_order`; each layer has as many planes as the layout (one for MLA, where
    [tokens, dim] is enough; four if scales come with quantised K and V). None in place of a plane that the layout does
    not have is skipped. All planes hold the same number of tokens. Nothing is copied here and no autograd graph is
    kept, only the memory itself. A copy is one call per plane and layer, whose inner run is `run_bytes`.

    Tensors on a CUDA device are copied while the engine computes, see `GpuCopy`, by `copy_engine` or the device's
    default one; `layer_events` records each loaded layer. `threads` are for CPU memory.

    Thread-safe as `Transfer` says. Raises ValueError that names what does not match the layout.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Array | None]],
        layout: KVLayout,
        *,
        threads: int = 1,
        copy_engine: CopyEngine | None = None,
        layer_events: LayerEvents | None = None,
    ) -> None:
        if not layout.planes:
            raise ValueError("layout is opaque: per-layer KV needs one with planes, e.g. KVLayout.dense(...)")
        if len(layers) != layout.layers:
            raise ValueError(f"layers: {len(layers)} were given, the layout has {layout.layers}")
        self.layout = layout
        # a thread waits layer by layer: all chunks are best loaded by one call
        self.at_once = layer_events is not None
        self._threads = threads
        self._token_axis = 1 if layout.token_order == "heads_first" else 0
        self._device = device_of(*layers)
        copy_engine = copy_engine or copy_engine_of(self._device)
        by_layer = [self._planes(number, layer) for number, layer in enumerate(layers)]
        counts = {plane.shape[self._token_axis] for planes in by_layer for plane in planes}
        if len(counts) != 1:
            raise ValueError(f"layers must all hold the same number of tokens, got {sorted(counts)}")
        self.num_tokens: int = counts.pop()
        self._by_plane = list(zip(*by_layer, strict=True))
        self._slot_planes = [_slot_plane(layout, plane) for plane in range(len(layout.planes))]
        self._gpu_copy: GpuCopy | None = None
        if copy_engine is not None:
            self._gpu_copy = GpuCopy(copy_engine, dense_run_table(by_layer, layout), layers, layer_events)

    @property
    def device_index(self) -> int | None:
        """The CUDA device of the KV; None for CPU memory."""
        return None if self._gpu_copy is None else self._gpu_copy.device_index

    @property
    def run_bytes(self) -> int:
        """The shortest contiguous run of a copy, in bytes, which decides its speed. For benchmarks."""
        return min(_run_bytes(self._cut(array, 0)) for layers in self._by_plane for array in layers)

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy the chunks that begin at `starts` into `slots`; changes only the slots."""
        if self._gpu_copy is not None:
            return self._gpu_copy.to_slots(*self._of_chunks(starts, slots, into_slots=True))
        pairs = (CopyPair(slot, own) for own, slot in self._pairs(starts, slots, into_slots=True))
        return copy_pairs(pairs, self._threads)

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy `slots` into the chunks that begin at `starts`; changes only those tokens."""
        if self._gpu_copy is not None:
            return self._gpu_copy.from_slots(*self._of_chunks(starts, slots, into_slots=False))
        pairs = (CopyPair(own, slot) for own, slot in self._pairs(starts, slots, into_slots=False))
        return copy_pairs(pairs, self._threads)

    def _of_chunks(
        self, starts: Sequence[int], slots: Sequence[Bytes], *, into_slots: bool
    ) -> tuple[Ids, list[Bytes]]:
        """Return the run numbers [chunks, count] and the slots, all checked."""
        assert self._gpu_copy is not None
        checked = list(checked_chunks(self.layout, self.num_tokens, starts, slots, into_slots=into_slots))
        firsts = np.array([start for start, _ in checked], dtype=np.int64)
        return firsts[:, None] + np.arange(self._gpu_copy.table.count), [slot for _, slot in checked]

    def _pairs(
        self, starts: Sequence[int], slots: Sequence[Bytes], *, into_slots: bool
    ) -> Iterator[tuple[Words, Words]]:
        """Return (view of the KV, view of the slot) of every copy, chunk by chunk, plane by plane."""
        checked = checked_chunks(self.layout, self.num_tokens, starts, slots, into_slots=into_slots)
        return (
            (self._cut(own, start), in_slot)
            for start, slot in checked
            for plane, arrays in zip(self._slot_planes, self._by_plane, strict=True)
            for own, in_slot in zip(arrays, plane.of(slot), strict=True)
        )

    def _cut(self, array: Words, start: int) -> Words:
        stop = start + self.layout.chunk_tokens
        return array[:, start:stop] if self._token_axis else array[start:stop]

    def _planes(self, number: int, layer: Sequence[Array | None]) -> list[Words]:
        given = [plane for plane in layer if plane is not None]
        if len(given) != len(self.layout.planes):
            raise ValueError(
                f"layers[{number}] has {len(given)} planes, the layout has {len(self.layout.planes)}"
            )
        return [self._plane(f"layers[{number}][{plane}]", plane, value) for plane, value in enumerate(given)]

    def _plane(self, argument: str, plane: int, value: Array) -> Words:
        heads, dim, dtype = self.layout.planes[plane]
        array = as_words(value, argument, dtype, self._device)
        if array.ndim == 4:
            raise ValueError(
                f"{argument} has a batch dimension (shape {array.shape}): pass one sequence, e.g. k[0]"
            )
        if array.ndim == 2 and heads == 1:
            array = np.expand_dims(array, 1 - self._token_axis)
        elif array.ndim == 2 and dim == 1:
            array = array[:, :, None]
        order = "[heads, tokens, dim]" if self._token_axis else "[tokens, heads, dim]"
        if array.ndim != 3 or array.shape[1 - self._token_axis] != heads or array.shape[2] != dim:
            raise ValueError(
                f"{argument} must be {order} with {heads} heads and dim {dim}, got shape {array.shape}"
            )
        return array


def _slot_plane(layout: KVLayout, plane: int) -> _SlotPlane:
    a, b, c = layout.plane_shape(plane)
    dtype = word_dtype(layout.planes[plane].dtype)
    width = dtype.itemsize
    strides = (layout.layer_bytes, b * c * width, c * width, width)
    return _SlotPlane((layout.layers, a, b, c), dtype, layout.plane_offset(0, plane), strides)


def _run_bytes(array: Words) -> int:
    """Return the contiguous bytes before a stride jumps."""
    run = array.itemsize
    for size, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if size != 1 and stride != run:
            break
        run *= size
    return run
