"""Planes of pages in an accelerator's memory: gathered and scattered there, beside the engine's own work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from pagoda.layout import KVLayout
from pagoda.transfer.base import Bytes
from pagoda.transfer.pages import WORD_BYTES, Places, Plane, Span, see_plane

if TYPE_CHECKING:
    import torch

__all__ = ["DevicePagesKV", "Snapshot"]


class DevicePagesKV:
    """The KV of one sequence in planes of pages on a CUDA (or ROCm) device, or in CPU memory; else as `PagesKV`.

    A chunk's share is one run of device memory of its own, `Places.part_bytes` long: pages are gathered into it, or
    scattered from it, by the device, and it crosses the bus by one copy. What is asked for on any thread happens on a
    stream beside the engine's, behind all that the engine had launched on the stream that was current where and when
    this object was made; each call returns when its copies are complete, so that slots may be validated then, and what
    the engine launches afterwards sees them. Nothing here orders the engine's later work behind a call that has not
    returned: until then the engine must leave the blocks alone. (`snapshot` is for those that it will not.)

    Thread-safe as `Transfer` says. Raises ValueError that names what does not match, before anything is copied.
    So far this has been run on CPU tensors only, where all that has to do with streams is left out.
    """

    def __init__(
        self,
        planes: Sequence[torch.Tensor],
        layout: KVLayout,
        *,
        block_tokens: int,
        block_table: Sequence[int],
        part: int = 0,
        parts: int = 1,
    ) -> None:
        import torch

        for number, plane in enumerate(planes):
            if not isinstance(plane, torch.Tensor) or plane.device != planes[0].device:
                raise ValueError(f"planes[{number}] must be a tensor on one device with the others")
        seen = [see_plane(plane, f"planes[{number}]") for number, plane in enumerate(planes)]
        self._places = Places(seen, layout, block_tokens, block_table, part, parts)
        self._device = planes[0].device
        if self._device.type not in ("cpu", "cuda"):
            raise ValueError(f"planes lie on {self._device}: only CUDA, ROCm and CPU memory can be copied")
        self.layout = layout
        with torch.inference_mode():
            self._rows = list(_rows(planes, seen, self._places))
        self._set()

    def _set(self) -> None:
        """Send the table to the device; what is done from now on waits for all that was launched before."""
        import torch

        self.num_tokens = self._places.num_tokens
        with torch.inference_mode():
            self._ids = _sent(torch.from_numpy(self._places.ids), self._device)
            self._made = _now_on(self._device)

    def with_table(self, block_table: Sequence[int]) -> DevicePagesKV:
        """Return one for another sequence in the same planes, which are not looked at again; changes nothing.

        It waits for what this thread has launched until now, as one made anew does. Raises ValueError if the
        table names a block that is not there.
        """
        other = copy(self)
        other._places = self._places.with_table(block_table)
        other._set()
        return other

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy the chunks that begin at `starts` into this part of `slots`; changes nothing else."""
        shares = self._places.shares(starts, slots, into_slots=True)
        with _beside(self._device, self._made, "down"):
            staging = self._staging(1)[0]
            for spans, room in shares:
                self._gather(spans, staging)
                _host(room).copy_(staging)

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy this part of `slots` into the blocks of `starts`; changes those blocks only, none that is -1."""
        shares = self._places.shares(starts, slots, into_slots=False)
        with _beside(self._device, self._made, "up"):
            staging = self._staging(1)[0]
            for spans, room in shares:
                staging.copy_(_host(room))
                self._scatter(spans, staging)

    def snapshot(self, starts: Sequence[int]) -> Snapshot:
        """Copy the chunks that begin at `starts` within the device, in the current stream's order; waits for nothing.

        What the engine launches on that stream afterwards may overwrite the blocks. Raises torch's own error where
        the device has no memory left for `len(starts)` shares.
        """
        import torch

        found = self._places.spans(starts, into_slots=True)
        with torch.inference_mode():
            if self._made is not None:
                torch.cuda.current_stream(self._device).wait_event(self._made)
            staging = self._staging(len(starts))
            for spans, own in zip(found, staging, strict=True):
                self._gather(spans, own)
            return Snapshot(self, self._places, starts, staging, _now_on(self._device))

    def _staging(self, chunks: int) -> torch.Tensor:
        """Return memory of the current stream's for that many shares."""
        import torch

        return torch.empty((chunks, self._places.part_bytes), dtype=torch.uint8, device=self._device)

    def _gather(self, spans: Sequence[Span], staging: torch.Tensor) -> None:
        import torch

        for rows, room in self._rooms(staging):
            for span in spans:
                end = span.begin + len(span.ids)
                torch.index_select(rows, 0, self._ids_of(span), out=room[span.begin : end])

    def _scatter(self, spans: Sequence[Span], staging: torch.Tensor) -> None:
        for rows, room in self._rooms(staging):
            for span in spans:
                end = span.begin + len(span.ids)
                rows.index_copy_(0, self._ids_of(span), room[span.begin : end])

    def _ids_of(self, span: Span) -> torch.Tensor:
        return self._ids[span.at : span.at + len(span.ids)]

    def _rooms(self, staging: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each plane's rows, and its [blocks, page] of a share, in words of one width."""
        offset, blocks = 0, self._places.blocks
        for rows in self._rows:
            nbytes = blocks * rows.shape[1] * rows.element_size()
            yield rows, staging[offset : offset + nbytes].view(rows.dtype).view(blocks, -1)
            offset += nbytes


class Snapshot:
    """Chunks as they were at one moment of a stream, in device memory of their own until this object goes.

    `to_slots` is for one thread, any thread.
    """

    def __init__(
        self,
        kv: DevicePagesKV,
        places: Places,
        starts: Sequence[int],
        staging: torch.Tensor,
        taken: torch.cuda.Event | None,
    ) -> None:
        self._kv = kv  # its block ids are read until `taken`
        self._places, self._starts = places, list(starts)
        self._staging, self._taken = staging, taken

    @property
    def nbytes(self) -> int:
        """The device memory that it takes."""
        return self._staging.nbytes

    def to_slots(self, slots: Sequence[Bytes]) -> None:
        """Copy the chunks into this part of `slots`, in the order of the starts; returns when they are complete."""
        shares = self._places.shares(self._starts, slots, into_slots=True)
        with _beside(self._staging.device, self._taken, "down"):
            for (_, room), own in zip(shares, self._staging, strict=True):
                _host(room).copy_(own)


@contextmanager
def _beside(device: torch.device, after: torch.cuda.Event | None, way: str) -> Iterator[None]:
    """Have what is done inside happen on a side stream, behind `after`; leave when all of it is complete.

    Nothing that is used inside may be freed before: its memory is the allocator's to give away at once. Inference mode,
    because an engine's KV memory may have been made in it, and only in it can be written.
    """
    import torch

    with torch.inference_mode():
        if after is None:
            yield
            return
        stream, done = _side_stream(device, way), torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                done.record(stream)
                done.synchronize()


@lru_cache(maxsize=64)
def _side_stream(device: torch.device, way: str) -> torch.cuda.Stream:
    """The stream of a device for one way, shared by all: each stream keeps staging memory of its own."""
    import torch

    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _now_on(device: torch.device) -> torch.cuda.Event | None:
    """An event behind all that was launched on the current stream; None where there are no streams."""
    if device.type == "cpu":
        return None
    import torch

    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _sent(ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the ids on the device, without waiting for what runs there: from pinned memory, in stream order."""
    if device.type == "cpu":
        return ids
    return ids.pin_memory().to(device, non_blocking=True)


def _host(room: Bytes) -> torch.Tensor:
    """Return a slot's bytes as a tensor over the same memory."""
    import torch

    return torch.from_numpy(
        room if room.flags.writeable else np.array(room)
    )  # torch has no read-only tensors


def _rows(planes: Sequence[torch.Tensor], seen: Sequence[Plane], places: Places) -> Iterator[torch.Tensor]:
    """Each plane in the widest words that fit it and its place in a share: the device moves element by element."""
    import torch

    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    offset = 0
    for plane, lies in zip(planes, seen, strict=True):
        numbers = (
            lies.address,
            plane.storage_offset(),
            plane.stride(0),
            lies.page_bytes,
            offset,
            places.part_bytes,
        )
        width = next(width for width in WORD_BYTES if not any(number % width for number in numbers))
        yield plane.detach().view(kinds[width])
        offset += places.blocks * lies.page_bytes
