"""The Transfer protocol, and what all transfers share: slots as bytes, an engine's arrays as words.

Called by `cache` (the protocol) and by every view.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

# else the first `np.unique` imports it, and a child that is forked meanwhile waits forever
import numpy.ma
import numpy.typing as npt

from pagoda.layout import KVLayout, itemsize

if TYPE_CHECKING:
    import torch

Bytes: TypeAlias = npt.NDArray[np.uint8]
# elements as integers of the same width
Words: TypeAlias = npt.NDArray[np.unsignedinteger]
Ids: TypeAlias = npt.NDArray[np.int64]
Array: TypeAlias = "npt.NDArray[np.generic] | torch.Tensor"


class Transfer(Protocol):
    """The KV of one sequence in an engine, as chunks. Made for one call of the cache and then
    dropped.

    Both calls copy [start, start + layout.chunk_tokens) of the sequence for each start, and nothing
    else. Slots are 1-D uint8 of at least `layout.chunk_bytes` bytes; bytes after those are not
    changed. Thread-safe if the ranges and the slots of calls that overlap in time are disjoint.
    Raises ValueError, before anything is copied, if a start or a slot does not fit.
    """

    layout: KVLayout

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy chunks of the engine's KV into slots; changes only the slots."""

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy slots into the engine's KV; changes only the KV of those chunks."""


class Copier(Protocol):
    """Copies runs of an engine's KV, which have ids."""

    def copy(self, ids: Ids, slots: Sequence[Bytes], *, into_slots: bool) -> None:
        """Copy the runs of each chunk, [chunks, count], into its slot or, unless their id is below
        0, out of it; changes nothing else.
        """


class RunTransfer:
    """A `Transfer` that copies the runs of its chunks with a `Copier`."""

    layout: KVLayout
    num_tokens: int
    _copier: Copier
    # why nothing can be copied out of slots, see `no_loads`
    _no_loads = ""

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy the chunks that begin at `starts` into `slots`; changes only the slots."""
        self._copy(starts, slots, into_slots=True)

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy `slots` into the chunks that begin at `starts`; changes only those tokens, and none
        whose block is -1.
        """
        self._copy(starts, slots, into_slots=False)

    def _copy(
        self, starts: Sequence[int], slots: Sequence[Bytes], *, into_slots: bool
    ) -> None:
        if self._no_loads and not into_slots:
            raise ValueError(self._no_loads)
        checked = checked_slots(
            self.layout, self.num_tokens, starts, slots, into_slots=into_slots
        )
        ids = self._run_ids(starts, into_slots=into_slots)
        self._copier.copy(ids, checked, into_slots=into_slots)

    def _run_ids(self, starts: Sequence[int], *, into_slots: bool) -> Ids:
        """Return the ids of the runs of each chunk, [chunks, count]. Raises ValueError for starts
        where no chunk begins.
        """
        raise NotImplementedError


def checked_slots(
    layout: KVLayout,
    tokens: int,
    starts: Sequence[int],
    slots: Sequence[Bytes],
    *,
    into_slots: bool,
) -> list[Bytes]:
    """Return the slots of chunks, cut to chunk_bytes; starts and slots are checked. Changes
    nothing.

    Raises ValueError if a chunk is not within `tokens` tokens, or a slot is too short or not bytes.
    """
    if len(starts) != len(slots):
        raise ValueError(
            f"starts and slots must be of one length, got {len(starts)} and {len(slots)}"
        )
    check_starts(layout, tokens, starts)
    nbytes = layout.chunk_bytes
    for slot in slots:
        if (
            slot.dtype != np.uint8
            or slot.ndim != 1
            or not slot.flags.c_contiguous
        ):
            raise ValueError(
                f"slots must be contiguous 1-D uint8, got {slot.ndim}-D {slot.dtype}"
            )
        if slot.size < nbytes:
            raise ValueError(
                f"slots: one has {slot.size} bytes, a chunk needs {nbytes}"
            )
        if into_slots and not slot.flags.writeable:
            raise ValueError("slots: one is read-only")
    return [slot[:nbytes] for slot in slots]


def check_starts(layout: KVLayout, tokens: int, starts: Sequence[int]) -> None:
    """Raise ValueError if a chunk is not within `tokens` tokens."""
    for start in starts:
        if start < 0 or start + layout.chunk_tokens > tokens:
            raise ValueError(
                f"starts: the chunk [{start}, {start + layout.chunk_tokens}) is not in the "
                f"{tokens} tokens"
            )


def as_words(
    value: object,
    argument: str,
    dtype: str | None,
    on: torch.device | None = None,
) -> Words:
    """Return a tensor or numpy array as unsigned words over the same memory, detached; copies
    nothing.

    `dtype` is the required type, in the byte order of the machine; None for any. numpy has no
    bfloat16 and no fp8: an array of integers of the same width represents them. `on`: the
    required GPU, None for CPU memory. The result for a GPU's tensor has its address, shape and
    strides, and must never be read or written. Raises ValueError that names `argument` for any
    other value.
    """
    torch = sys.modules.get("torch")  # no tensor exists before torch is imported
    if torch is not None and isinstance(value, torch.Tensor):
        return _tensor_words(value, argument, dtype, on)
    if on is not None:
        raise ValueError(
            f"{argument} must be a tensor on {on} like the others, got {type(value).__name__}"
        )
    if not isinstance(value, np.ndarray):
        raise ValueError(
            f"{argument} must be a tensor or a numpy array, got {type(value).__name__}"
        )
    width = value.dtype.itemsize
    same = (
        dtype is None
        or value.dtype.name == dtype
        or (value.dtype.kind in "iu" and width == itemsize(dtype))
    )
    if not same:
        raise ValueError(
            f"{argument} is {value.dtype.name}, the layout says {dtype}"
        )
    if dtype is not None and not value.dtype.isnative:
        raise ValueError(
            f"{argument} is {value.dtype.str}, in the byte order of other machines: pass "
            "array.astype(array.dtype.newbyteorder('='))"
        )
    if value.dtype.kind not in "iuf" or width not in (1, 2, 4, 8):
        raise ValueError(
            f"{argument}: {value.dtype} is not an element type of KV"
        )
    found: Words = value.view(f"u{width}")
    return found


def _tensor_words(
    tensor: torch.Tensor,
    argument: str,
    dtype: str | None,
    on: torch.device | None,
) -> Words:
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    if dtype is not None and name != dtype:
        raise ValueError(f"{argument} is {name}, the layout says {dtype}")
    if tensor.device != (on or torch.device("cpu")):
        raise ValueError(
            f"{argument} is on {tensor.device}: it must be on {on or 'cpu'} like the others"
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"{argument} must be a plain strided tensor, got {tensor.layout}"
        )
    require_storage(tensor, argument)
    width = itemsize(name)
    if on is not None:
        return np.asarray(_TensorAddress(tensor, width))
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        width
    ]
    found: Words = tensor.detach().view(signed).numpy().view(f"u{width}")
    return found


def no_loads(array: Words, argument: str) -> str:
    """Return why nothing can be copied into an array that `as_words` returned; empty if it can.

    An array that was expanded has one address for several elements, and would keep the last one.
    """
    if not array.flags.writeable:
        return f"{argument} is read-only: KV can be stored from it, not loaded into it"
    # numpy gives an empty array any strides
    if (
        0 in array.strides
        and array.size
        and any(
            stride == 0 and size > 1
            for size, stride in zip(array.shape, array.strides, strict=True)
        )
    ):
        return (
            f"{argument} has several elements at one address (shape {array.shape}, strides "
            f"{array.strides}): KV can be stored from it, not loaded into it; pass a copy"
        )
    return ""


def require_storage(tensor: torch.Tensor, argument: str) -> None:
    """Raise ValueError if the memory of a tensor was given back: its address may be others' now."""
    if not tensor.untyped_storage().nbytes() and tensor.numel():
        raise ValueError(
            f"{argument} has no memory any more: its storage was resized to 0, which engines do "
            "to free it; call the cache before that"
        )


class _TensorAddress:
    """The address, shape and strides of a tensor, as numpy's array interface."""

    def __init__(self, tensor: torch.Tensor, width: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"<u{width}",
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * width for stride in tensor.stride()),
        }


def device_of(*values: object) -> torch.device | None:
    """Return the device of the first of nested tensors if it is not the CPU; None for CPU memory
    and arrays.
    """
    if "torch" not in sys.modules:  # no tensor exists before torch is imported
        return None
    import torch

    for value in values:
        if isinstance(value, list | tuple):
            return device_of(*value)
        if isinstance(value, torch.Tensor):
            return None if value.device.type == "cpu" else value.device
        if value is not None:
            return None
    return None
