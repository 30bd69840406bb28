"""What a transfer is, and what all share: slots as bytes, an engine's arrays as words, copies in threads."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pagoda.layout import KVLayout, itemsize
from pagoda.threads import Pool, wait

if TYPE_CHECKING:
    import torch

__all__ = [
    "Array",
    "Bytes",
    "Pair",
    "Transfer",
    "Words",
    "check_starts",
    "copy_pairs",
    "in_threads",
    "pieces",
    "word_dtype",
    "words",
]

Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.unsignedinteger]  # elements as integers of the same width: only bits move
Array: TypeAlias = "npt.NDArray[np.generic] | torch.Tensor"

_SPLIT_BYTES = 1 << 20  # a smaller share costs more to hand to a thread than to copy


class Transfer(Protocol):
    """The KV of one sequence in an engine, seen as chunks. Built for one call of the cache, then thrown away.

    Both calls copy [start, start + layout.chunk_tokens) of the sequence for each start, and only that. Slots
    are 1-D uint8 of at least `layout.chunk_bytes` bytes; what lies behind those bytes is left alone.
    Thread-safe as far as the ranges and the slots of calls that overlap in time are disjoint.
    Raises ValueError, before anything is copied, if a start or a slot does not fit.
    """

    layout: KVLayout

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy chunks of the engine's KV into slots; changes the slots only."""
        ...

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy slots into the engine's KV; changes the KV of those chunks only."""
        ...


class Pair(NamedTuple):
    """One copy: two arrays of the same shape and dtype that share no memory."""

    to: npt.NDArray[np.generic]
    source: npt.NDArray[np.generic]


def pieces(
    layout: KVLayout, tokens: int, starts: Sequence[int], slots: Sequence[Bytes], *, into_slots: bool
) -> Iterator[tuple[int, Bytes]]:
    """Return (start, slot cut to chunk_bytes) of each chunk, all checked. Changes nothing.

    Raises ValueError if a chunk does not lie within `tokens` tokens, or a slot is too short or not bytes.
    """
    if len(starts) != len(slots):
        raise ValueError(f"starts and slots must be of one length, got {len(starts)} and {len(slots)}")
    check_starts(layout, tokens, starts)
    for slot in slots:
        if slot.dtype != np.uint8 or slot.ndim != 1 or not slot.flags.c_contiguous:
            raise ValueError(f"slots must be contiguous 1-D uint8, got {slot.ndim}-D {slot.dtype}")
        if slot.size < layout.chunk_bytes:
            raise ValueError(f"slots: one has {slot.size} bytes, a chunk needs {layout.chunk_bytes}")
        if into_slots and not slot.flags.writeable:
            raise ValueError("slots: one is read-only")
    return ((int(start), slot[: layout.chunk_bytes]) for start, slot in zip(starts, slots, strict=True))


def check_starts(layout: KVLayout, tokens: int, starts: Sequence[int]) -> None:
    """Raise ValueError if a chunk does not lie within `tokens` tokens."""
    for start in starts:
        if start < 0 or start + layout.chunk_tokens > tokens:
            raise ValueError(
                f"starts: the chunk [{start}, {start + layout.chunk_tokens}) is not in the {tokens} tokens"
            )


def word_dtype(dtype: str) -> np.dtype[np.unsignedinteger]:
    """Return the unsigned integer type as wide as one element of `dtype` ("bfloat16" -> uint16)."""
    return np.dtype(f"u{itemsize(dtype)}")


def words(value: object, argument: str, dtype: str | None, on: torch.device | None = None) -> Words:
    """Return a tensor or numpy array as unsigned words over the same memory, detached; copies nothing.

    `dtype` is what it has to be, None for any. numpy has no bfloat16 and no fp8: an array of integers as wide
    stands for them. `on`: the GPU that it has to be on, None for CPU memory. Of a GPU's tensor what is returned has the
    address, the shape and the strides, and must never be read or written. Raises ValueError that names `argument` for
    anything else.
    """
    torch = sys.modules.get("torch")  # nobody has a tensor before torch was imported
    if torch is not None and isinstance(value, torch.Tensor):
        return _tensor_words(value, argument, dtype, on)
    if on is not None:
        raise ValueError(f"{argument} must be a tensor on {on} like the others, got {type(value).__name__}")
    if not isinstance(value, np.ndarray):
        raise ValueError(f"{argument} must be a tensor or a numpy array, got {type(value).__name__}")
    width = value.dtype.itemsize
    same = (
        dtype is None or value.dtype.name == dtype or (value.dtype.kind in "iu" and width == itemsize(dtype))
    )
    if not same:
        raise ValueError(f"{argument} is {value.dtype.name}, the layout says {dtype}")
    if value.dtype.kind not in "iuf" or width not in (1, 2, 4, 8):
        raise ValueError(f"{argument}: {value.dtype} is not an element type of KV")
    found: Words = value.view(f"u{width}")
    return found


def _tensor_words(tensor: torch.Tensor, argument: str, dtype: str | None, on: torch.device | None) -> Words:
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    if dtype is not None and name != dtype:
        raise ValueError(f"{argument} is {name}, the layout says {dtype}")
    if tensor.device != (on or torch.device("cpu")):
        raise ValueError(f"{argument} lies on {tensor.device}: it has to be on {on or 'cpu'} like the others")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(f"{argument} must be a plain strided tensor, got {tensor.layout}")
    width = itemsize(name)
    if on is not None:
        return np.asarray(_Lies(tensor, width))
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    found: Words = tensor.detach().view(signed).numpy().view(f"u{width}")
    return found


class _Lies:
    """Where a tensor lies, as numpy asks for it."""

    def __init__(self, tensor: torch.Tensor, width: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"<u{width}",
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * width for stride in tensor.stride()),
        }


def copy_pairs(pairs: Iterable[Pair], threads: int = 1) -> None:
    """Do the copies; changes what they point to. Returns when all are done, in any order.

    np.copyto drops the GIL, and where the inner run is contiguous on both sides it is a memmove a run. More
    than one thread pays only where one core cannot fill the memory bus, and never below a megabyte a thread.
    """
    if threads > 1:
        pairs = list(pairs)
        threads = min(threads, sum(pair.to.nbytes for pair in pairs) // _SPLIT_BYTES)
    if threads <= 1:
        _copy(pairs)
        return
    cut = [piece for pair in pairs for piece in _split(pair, threads)]
    in_threads([partial(_copy, share) for share in _shares(cut, threads)], threads)


def in_threads(jobs: Sequence[Callable[[], None]], threads: int) -> None:
    """Run `jobs`, the last one on this thread. Returns when all have ended; raises what one raised."""
    if threads <= 1:
        for job in jobs:
            job()
        return
    waiting, mine = list[Future[None]](), list(jobs)
    try:
        with contextlib.suppress(RuntimeError):  # no thread can be had: the rest is done here
            while len(mine) > 1:
                waiting.append(_pool(threads).submit(mine[0]))
                del mine[0]
        for job in mine:
            job()
        wait(waiting)
    except BaseException:
        wait(waiting)  # nothing may still write into a slot after this ends
        raise
    for future in waiting:
        future.result()


def _copy(pairs: Iterable[Pair]) -> None:
    for to, source in pairs:
        np.copyto(to, source)


def _split(pair: Pair, parts: int) -> list[Pair]:
    """Cut a large copy along its first axis, so that every thread gets some of it."""
    rows = pair.to.shape[0]
    if pair.to.nbytes < _SPLIT_BYTES or rows < parts:
        return [pair]
    cuts = [rows * part // parts for part in range(parts + 1)]
    return [Pair(pair.to[a:b], pair.source[a:b]) for a, b in pairwise(cuts)]


def _shares(pairs: list[Pair], threads: int) -> list[list[Pair]]:
    """Deal the copies out so that each share has about as many bytes; neighbours stay together."""
    shares: list[list[Pair]] = [[] for _ in range(threads)]
    each, done = sum(pair.to.nbytes for pair in pairs) / threads, 0
    for pair in pairs:
        shares[min(int(done / each), threads - 1)].append(pair)
        done += pair.to.nbytes
    return shares


@lru_cache(maxsize=4)
def _pool(threads: int) -> Pool:
    """The threads that help with copies; made once a process and count."""
    return Pool(threads - 1, "pagoda-copy")


if hasattr(os, "register_at_fork"):  # a child has none of the parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
