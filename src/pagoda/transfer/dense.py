"""The KV of one sequence as one array a plane and layer: what Transformers' caches hold, or tuples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagoda.layout import KVLayout
from pagoda.transfer.base import Array, Bytes, Ids, Words, device_of, pieces, word_dtype, words
from pagoda.transfer.cpu_copy import Pair, copy_pairs
from pagoda.transfer.gpu.copy_engine import Beside, copies_for
from pagoda.transfer.run_table import dense_runs

if TYPE_CHECKING:
    from pagoda.transfer.gpu.copy_engine import Copies
    from pagoda.transfer.gpu.layer_events import LayerGate

__all__ = ["DenseKV"]


class _Room(NamedTuple):
    """Where one plane of all layers lies in a slot: an array [layers, *shape], one stride between layers."""

    shape: tuple[int, int, int, int]
    dtype: np.dtype[np.unsignedinteger]
    offset: int
    strides: tuple[int, int, int, int]

    def of(self, slot: Bytes) -> Words:
        """Return the plane's view of a slot; copies nothing."""
        return np.ndarray(self.shape, self.dtype, slot, self.offset, self.strides)


class DenseKV:
    """The KV of one sequence: `layers[i] = (K, V)` tensors or arrays [heads, tokens, dim], or tokens first.

    The order of the axes is `layout.token_order`; each layer brings as many planes as the layout has (one for
    MLA, where [tokens, dim] will do; four if scales travel with quantised K and V). None in place of a plane
    that the layout does not have is passed over. All planes hold as many tokens. Nothing is copied here and
    no autograd graph is kept: the memory itself is. Copies are one call a plane and layer, whose inner run is
    `run_bytes`.

    Tensors on a CUDA device are copied beside the engine's work, as `Beside` says, by `copies` or the device's own copy
    engine; `gate` is told of each layer that is loaded. `threads` are for CPU memory.

    Thread-safe as `Transfer` says. Raises ValueError that names what does not match the layout.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Array | None]],
        layout: KVLayout,
        *,
        threads: int = 1,
        copies: Copies | None = None,
        gate: LayerGate | None = None,
    ) -> None:
        if not layout.planes:
            raise ValueError("layout is opaque: per-layer KV needs one with planes, e.g. KVLayout.dense(...)")
        if len(layers) != layout.layers:
            raise ValueError(f"layers: {len(layers)} were given, the layout has {layout.layers}")
        self.layout = layout
        # somebody waits layer by layer: all chunks are best loaded by one call
        self.at_once = gate is not None
        self._threads = threads
        self._token_axis = 1 if layout.token_order == "heads_first" else 0
        self._device = device_of(*layers)
        copies = copies or copies_for(self._device)
        by_layer = [self._planes(number, layer) for number, layer in enumerate(layers)]
        counts = {plane.shape[self._token_axis] for planes in by_layer for plane in planes}
        if len(counts) != 1:
            raise ValueError(f"layers must all hold as many tokens, got {sorted(counts)}")
        self.num_tokens: int = counts.pop()
        self._by_plane = list(zip(*by_layer, strict=True))
        self._rooms = [_room(layout, plane) for plane in range(len(layout.planes))]
        self._beside: Beside | None = None
        if copies is not None:
            self._beside = Beside(copies, dense_runs(by_layer, layout), layers, gate)

    @property
    def device_index(self) -> int | None:
        """The CUDA device that the KV lies on; None for CPU memory."""
        return None if self._beside is None else self._beside.device_index

    @property
    def run_bytes(self) -> int:
        """The shortest contiguous run that a copy meets: what its speed depends on. For benchmarks."""
        return min(_run_bytes(self._cut(array, 0)) for layers in self._by_plane for array in layers)

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy the chunks that begin at `starts` into `slots`; changes the slots only."""
        if self._beside is not None:
            return self._beside.to_slots(*self._of_chunks(starts, slots, into_slots=True))
        pairs = (Pair(slot, own) for own, slot in self._pairs(starts, slots, into_slots=True))
        return copy_pairs(pairs, self._threads)

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy `slots` into the chunks that begin at `starts`; changes those tokens only."""
        if self._beside is not None:
            return self._beside.from_slots(*self._of_chunks(starts, slots, into_slots=False))
        pairs = (Pair(own, slot) for own, slot in self._pairs(starts, slots, into_slots=False))
        return copy_pairs(pairs, self._threads)

    def _of_chunks(
        self, starts: Sequence[int], slots: Sequence[Bytes], *, into_slots: bool
    ) -> tuple[Ids, list[Bytes]]:
        """Return the run numbers [chunks, count] and the slots, all checked."""
        assert self._beside is not None
        checked = list(pieces(self.layout, self.num_tokens, starts, slots, into_slots=into_slots))
        firsts = np.array([start for start, _ in checked], dtype=np.int64)
        return firsts[:, None] + np.arange(self._beside.table.count), [slot for _, slot in checked]

    def _pairs(
        self, starts: Sequence[int], slots: Sequence[Bytes], *, into_slots: bool
    ) -> Iterator[tuple[Words, Words]]:
        """Return (view of the KV, view of the slot) of every copy, chunk by chunk, plane by plane."""
        checked = pieces(self.layout, self.num_tokens, starts, slots, into_slots=into_slots)
        return (
            (self._cut(own, start), room)
            for start, slot in checked
            for plane, arrays in zip(self._rooms, self._by_plane, strict=True)
            for own, room in zip(arrays, plane.of(slot), strict=True)
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
        array = words(value, argument, dtype, self._device)
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


def _room(layout: KVLayout, plane: int) -> _Room:
    a, b, c = layout.plane_shape(plane)
    dtype = word_dtype(layout.planes[plane].dtype)
    width = dtype.itemsize
    strides = (layout.layer_bytes, b * c * width, c * width, width)
    return _Room((layout.layers, a, b, c), dtype, layout.plane_offset(0, plane), strides)


def _run_bytes(array: Words) -> int:
    """The bytes that lie in one piece before a stride jumps."""
    run = array.itemsize
    for size, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if size != 1 and stride != run:
            break
        run *= size
    return run
