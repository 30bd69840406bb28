"""The rows of a state file as chunks and endings, copied directly between the file and slots.

A chunk has, for each plane of the full cache, the rows of its tokens: [token][row], or where V is
transposed [width][token]. An ending (`pagoda.connectors.endings`) has what a state of exactly so
many tokens has beyond its whole chunks:

    | rows of the tokens after the last whole chunk | rows of the window | recurrent state |
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda.connectors.llamacpp.state_file import (
    CELL,
    MAGIC,
    VERSIONS,
    AttentionRows,
    AttentionShape,
    RecurrentState,
    StateFile,
    StateShape,
)
from pagoda.layout import KVLayout
from pagoda.transfer.base import Bytes, checked_slots

# Rows beyond the window at a cut. The server wants one, and one more if the prompt is as long as
# the state, because then it computes the last token again.
ROWS_BEYOND_WINDOW = 2
RECURRENT_CHUNK_BYTES = 64 << 10
# of a prompt without messages: near its end, and a batch before
_USUAL_CHECKPOINTS = 2
_MOST_BUFFERS = 1024  # of one readv or writev
_SCRATCH_BYTES = 4 << 20


def layout_of(shape: StateShape, chunk_tokens: int) -> KVLayout:
    """Return the layout of the chunks of states of this shape. Pure.

    A model without attention has no rows. Its chunks have the token ids, so that the length of a
    known prefix is found like any other; what is loaded are endings, in parts of this size.
    """
    if shape.full is None:
        token_bytes = 4 * chunk_tokens
        chunk_bytes = max(RECURRENT_CHUNK_BYTES, token_bytes)
    else:
        chunk_bytes = chunk_tokens * shape.full.row_bytes
    description = f"slot of llama.cpp: {shape.describe()}"
    return KVLayout.opaque(chunk_tokens, chunk_bytes, description)


class PlaneRows:
    """Copies rows of the planes of one attention cache, by position."""

    def __init__(self, fd: int, rows: AttentionRows) -> None:
        self._fd = fd
        self.rows = rows
        self._first = int(rows.positions.min())
        order = np.argsort(rows.positions, kind="stable")
        is_ordered = np.array_equal(order, np.arange(len(order)))
        # cell of each position, from the first; None: they are in order
        self._cells: npt.NDArray[np.int64] | None = None if is_ordered else order

    def read(self, plane: int, first: int, parts: Sequence[Bytes]) -> None:
        """Fill `parts` with the rows of consecutive ranges of positions from `first` on."""
        shape = self.rows.shape.planes[plane]
        if shape.element_bytes:
            self._read_columns(plane, first, parts)
            return
        begin = self.rows.offsets[plane]
        if self._cells is None:
            at = begin + (first - self._first) * shape.row_bytes
            _move(os.preadv, self._fd, parts, at)
            return
        for part in parts:
            count = part.size // shape.row_bytes
            cells = self._cells[first - self._first :][:count]
            for start, stop in _runs(cells):
                at = begin + int(cells[start]) * shape.row_bytes
                piece = part[start * shape.row_bytes : stop * shape.row_bytes]
                _move(os.preadv, self._fd, [piece], at)
            first += count

    def write(self, plane: int, first: int, parts: Sequence[Bytes]) -> None:
        """Write `parts` as the rows of consecutive ranges of positions, which are in order."""
        shape = self.rows.shape.planes[plane]
        if shape.element_bytes:
            self._write_columns(plane, first, parts)
            return
        at = self.rows.offsets[plane] + (first - self._first) * shape.row_bytes
        _move(os.pwritev, self._fd, parts, at)

    def _blocks(self, plane: int, tokens: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of columns, each as large as the scratch memory allows."""
        shape = self.rows.shape.planes[plane]
        width = shape.row_bytes // shape.element_bytes
        step = max(1, _SCRATCH_BYTES // (tokens * shape.element_bytes))
        for start in range(0, width, step):
            yield start, min(start + step, width)

    def _columns(self, plane: int, part: Bytes) -> Bytes:
        """Return a part of a transposed plane as [width][token][byte]."""
        shape = self.rows.shape.planes[plane]
        width = shape.row_bytes // shape.element_bytes
        return part.reshape(width, -1, shape.element_bytes)

    def _read_columns(
        self, plane: int, first: int, parts: Sequence[Bytes]
    ) -> None:
        element = self.rows.shape.planes[plane].element_bytes
        cells = len(self.rows.positions)
        views = [self._columns(plane, part) for part in parts]
        for start, stop in self._blocks(plane, cells):
            block = np.empty((stop - start, cells, element), np.uint8)
            at = self.rows.offsets[plane] + start * cells * element
            _move(os.preadv, self._fd, [block.reshape(-1)], at)
            begin = first - self._first
            for view in views:
                end = begin + view.shape[1]
                if self._cells is None:
                    view[start:stop] = block[:, begin:end]
                else:
                    view[start:stop] = block[:, self._cells[begin:end]]
                begin = end

    def _write_columns(
        self, plane: int, first: int, parts: Sequence[Bytes]
    ) -> None:
        element = self.rows.shape.planes[plane].element_bytes
        cells = len(self.rows.positions)
        views = [self._columns(plane, part) for part in parts]
        tokens = sum(view.shape[1] for view in views)
        for start, stop in self._blocks(plane, tokens):
            block = np.concatenate([view[start:stop] for view in views], axis=1)
            for column in range(start, stop):
                place = column * cells + first - self._first
                at = self.rows.offsets[plane] + place * element
                _move(
                    os.pwritev, self._fd, [block[column - start].reshape(-1)], at
                )


class StateChunks:
    """The rows of a state file as whole chunks; a `pagoda.transfer.Transfer`."""

    def __init__(
        self,
        fd: int,
        full: AttentionRows | None,
        tokens: npt.NDArray[np.int32],
        layout: KVLayout,
    ) -> None:
        """`full`: where the rows are; None for a model without attention."""
        self.layout = layout
        self._tokens = tokens
        self._planes = None if full is None else PlaneRows(fd, full)
        # of a write into the file: who moves chunks may only say that they are not there
        self.error: OSError | None = None

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Read chunks from the file into slots; changes only the slots."""
        checked = self._checked(starts, slots, into_slots=True)
        if self._planes is None:
            for start, slot in zip(starts, checked, strict=True):
                ids = self._tokens[start : start + self.layout.chunk_tokens]
                slot[: ids.nbytes] = ids.view(np.uint8)
                slot[ids.nbytes :] = 0
            return
        self._move(self._planes, self._planes.read, starts, checked)

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Write slots into the file; changes only the rows of these chunks."""
        checked = self._checked(starts, slots, into_slots=False)
        if self._planes is None:
            return
        try:
            self._move(self._planes, self._planes.write, starts, checked)
        except OSError as error:
            self.error = error
            raise

    def _checked(
        self, starts: Sequence[int], slots: Sequence[Bytes], *, into_slots: bool
    ) -> list[Bytes]:
        return checked_slots(
            self.layout, len(self._tokens), starts, slots, into_slots=into_slots
        )

    def _move(
        self,
        planes: PlaneRows,
        move: Callable[[int, int, Sequence[Bytes]], None],
        starts: Sequence[int],
        slots: Sequence[Bytes],
    ) -> None:
        """Move runs of consecutive chunks together, plane by plane."""
        chunk_tokens = self.layout.chunk_tokens
        numbers = np.asarray(starts, np.int64) // chunk_tokens
        for start, stop in _runs(numbers):
            offset = 0
            for plane, shape in enumerate(planes.rows.shape.planes):
                length = chunk_tokens * shape.row_bytes
                parts = [
                    slot[offset : offset + length] for slot in slots[start:stop]
                ]
                move(plane, starts[start], parts)
                offset += length


# ---- endings


class EndingShape(NamedTuple):
    """How a model's endings are cut."""

    state: StateShape
    chunk_tokens: int
    window_tokens: int  # of a sliding window; 0 without one

    def window_rows(self) -> int:
        """Return how many rows of the window an ending has."""
        if self.state.window is None:
            return 0
        return self.window_tokens + ROWS_BEYOND_WINDOW

    def payload_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the ending of a state of `num_tokens` tokens."""
        total = 0
        if self.state.full is not None:
            total += num_tokens % self.chunk_tokens * self.state.full.row_bytes
        if self.state.window is not None:
            total += self.window_rows() * self.state.window.row_bytes
        if self.state.recurrent is not None:
            total += self.state.recurrent.state_bytes
        return total

    def file_bytes(self, num_tokens: int, streams: int) -> int:
        """Return the bytes of a state file without checkpoints, to a few per plane."""
        shape = self.state
        total = 4 * num_tokens + 4096
        if shape.full is not None:
            total += num_tokens * (shape.full.row_bytes + CELL.itemsize)
            total += 12 * len(shape.full.planes) + 4 * streams
        if shape.window is not None:
            rows = self.window_rows()
            total += rows * (shape.window.row_bytes + CELL.itemsize)
            total += 12 * len(shape.window.planes) + 4 * streams
        if shape.recurrent is not None:
            total += shape.recurrent.state_bytes
        return total

    def saved_bytes(self, num_tokens: int, streams: int) -> int:
        """Return about how large a file is that the server saves: its checkpoints are not known
        before.
        """
        total = self.file_bytes(num_tokens, streams)
        if self.state.has_checkpoints:
            total += _USUAL_CHECKPOINTS * self.payload_bytes(0)
        return total


def possible_endings(state: StateFile, cut: EndingShape) -> list[tuple[int, int]]:
    """Return the ranges (lowest, highest) of numbers of tokens at which a state can be cut; pure.

    A hybrid model can be cut where its recurrent state was kept, one with windows where all rows of
    the window are at hand.
    """
    if state.shape.recurrent is not None:
        points = {point.tokens for point in state.checkpoints if point.recurrent}
        points.add(len(state.tokens))
        return [(point, point) for point in sorted(points)]
    ranges = []
    for first, stop in _joined(_window_spans(state, cut)):
        # also from the first token on: the server uses no state that is shorter than its window
        lowest = first + cut.window_tokens + ROWS_BEYOND_WINDOW
        if lowest <= stop:
            ranges.append((lowest, stop))
    return ranges


def read_ending(state: StateFile, cut: EndingShape, num_tokens: int) -> Bytes:
    """Return the ending of the first `num_tokens` tokens of a state; changes nothing.

    Raises ValueError if it is not one of `possible_endings`.
    """
    payload = np.empty(cut.payload_bytes(num_tokens), np.uint8)
    at = 0
    if state.full is not None:
        tail = num_tokens % cut.chunk_tokens
        at = _read_rows(
            state.fd, state.full, num_tokens - tail, num_tokens, payload, at
        )
    if state.window is not None:
        rows = cut.window_rows()
        pieces = _covering(state, cut, num_tokens - rows, num_tokens)
        for plane, shape in enumerate(state.window.shape.planes):
            size = rows * shape.row_bytes
            _gather(state.fd, pieces, plane, payload[at : at + size])
            at += size
    if state.shape.recurrent is not None:
        found = _recurrent_at(state, num_tokens)
        size = state.shape.recurrent.state_bytes
        _move(os.preadv, state.fd, [payload[at : at + size]], found.start)
    return payload


def _window_spans(
    state: StateFile, cut: EndingShape
) -> list[tuple[int, int, AttentionRows]]:
    """Return the positions [first, stop) of the windowed rows at hand, and where they are."""
    if state.window is None:
        return []
    spans = [_span(state.window)]
    points = [point.window for point in state.checkpoints]
    # the last ones first: they may prove those before them
    for rows in sorted(
        (rows for rows in points if rows is not None),
        key=lambda rows: _span(rows)[1],
        reverse=True,
    ):
        if _is_of_these_tokens(state.fd, rows, spans, cut.window_tokens):
            spans.append(_span(rows))
    return spans


def _span(rows: AttentionRows) -> tuple[int, int, AttentionRows]:
    first = int(rows.positions.min())
    return first, int(rows.positions.max()) + 1, rows


def _is_of_these_tokens(
    fd: int,
    rows: AttentionRows,
    spans: Sequence[tuple[int, int, AttentionRows]],
    window_tokens: int,
) -> bool:
    """Whether the rows of a checkpoint are of the tokens of the state.

    When a prompt takes the place of another, the server drops the checkpoints that begin less than
    a window before the tokens that both share. It keeps one that begins at the first token, or that
    has more rows than the window, though it may end with rows of the other prompt. Such a one must
    have the same rows as others at the end.
    """
    first, stop, _ = _span(rows)
    if first > 0 and stop - first <= window_tokens:
        return True
    for begin, end, others in spans:
        begin = max(begin, first)
        if begin < stop <= end:
            return _are_equal(fd, rows, others, begin, stop)
    return False


def _are_equal(
    fd: int, left: AttentionRows, right: AttentionRows, first: int, stop: int
) -> bool:
    """Whether two attention caches have the same rows at these positions."""
    planes = (PlaneRows(fd, left), PlaneRows(fd, right))
    for plane, shape in enumerate(left.shape.planes):
        size = (stop - first) * shape.row_bytes
        found = []
        for source in planes:
            values = np.empty(size, np.uint8)
            source.read(plane, first, [values])
            found.append(values)
        if not np.array_equal(found[0], found[1]):
            return False
    return True


def _joined(
    spans: Iterable[tuple[int, int, AttentionRows]],
) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for first, stop in sorted((first, stop) for first, stop, _ in spans):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((first, stop))
    return joined


class _Piece(NamedTuple):
    rows: AttentionRows
    first: int
    stop: int


def _covering(
    state: StateFile, cut: EndingShape, first: int, stop: int
) -> list[_Piece]:
    """Return where the windowed rows of [first, stop) are. ValueError: some are missing."""
    spans = _window_spans(state, cut)
    pieces = []
    while first < stop:
        here = [span for span in spans if span[0] <= first < span[1]]
        if not here:
            raise ValueError(
                f"the windowed row of position {first} is not in the state"
            )
        _, end, rows = max(here, key=lambda span: span[1])
        pieces.append(_Piece(rows, first, min(end, stop)))
        first = pieces[-1].stop
    return pieces


def _gather(fd: int, pieces: Sequence[_Piece], plane: int, target: Bytes) -> None:
    """Read one plane of several pieces into `target`."""
    shape = pieces[0].rows.shape.planes[plane]
    found = []
    for piece in pieces:
        part = np.empty((piece.stop - piece.first) * shape.row_bytes, np.uint8)
        PlaneRows(fd, piece.rows).read(plane, piece.first, [part])
        found.append(part)
    if not shape.element_bytes:
        target[:] = np.concatenate(found)
        return
    width = shape.row_bytes // shape.element_bytes
    columns = [part.reshape(width, -1, shape.element_bytes) for part in found]
    target[:] = np.concatenate(columns, axis=1).reshape(-1)


def _read_rows(
    fd: int, rows: AttentionRows, first: int, stop: int, payload: Bytes, at: int
) -> int:
    """Read the rows [first, stop) of all planes to byte `at` of `payload`; return its end."""
    if first == stop:
        return at
    planes = PlaneRows(fd, rows)
    for plane, shape in enumerate(rows.shape.planes):
        size = (stop - first) * shape.row_bytes
        planes.read(plane, first, [payload[at : at + size]])
        at += size
    return at


def _recurrent_at(state: StateFile, num_tokens: int) -> RecurrentState:
    sources = [state.recurrent, *(point.recurrent for point in state.checkpoints)]
    for found in sources:
        if found is not None and found.position == num_tokens - 1:
            return found
    raise ValueError(f"the state has no recurrent state of {num_tokens} tokens")


# ---- composing


class StateWriter:
    """Lays out a state file of `tokens` in an empty file, and takes its chunks and its ending.

    It has no checkpoints: the next request makes them. `streams`: of the server's caches. Raises
    OSError, as does each write that finds no space.
    """

    def __init__(
        self,
        fd: int,
        cut: EndingShape,
        streams: int,
        tokens: npt.NDArray[np.int32],
    ) -> None:
        self._fd = fd
        self._cut = cut
        self._tokens = tokens
        self._heads: list[tuple[int, bytes]] = []
        self._at = 0
        count = len(tokens)
        ids = np.concatenate(([-1, 1, count], tokens, [0])).astype("<i4")
        shape = cut.state
        self._put(
            struct.pack("<III", MAGIC, shape.version, len(ids)) + ids.tobytes()
        )
        self.full: AttentionRows | None = None
        self._window: AttentionRows | None = None
        self._recurrent_at = 0
        if shape.full is not None:
            self.full = self._attention(shape.full, streams, 0)
        if shape.window is not None:
            first = count - cut.window_rows()
            self._window = self._attention(shape.window, streams, first)
        if shape.recurrent is not None:
            self._recurrent_at = self._at
            self._at += shape.recurrent.state_bytes
        self.size = self._at
        # no page of it is mapped, so a full file system is an error of a write
        os.ftruncate(fd, self.size)
        for at, head in self._heads:
            _move(os.pwritev, fd, [np.frombuffer(head, np.uint8)], at)

    def chunks(self, layout: KVLayout) -> StateChunks:
        """Return the destination of the whole chunks."""
        return StateChunks(self._fd, self.full, self._tokens, layout)

    def put_ending(self, payload: Bytes) -> None:
        """Write the ending of these tokens. Raises ValueError if it has another size."""
        count = len(self._tokens)
        if payload.size != self._cut.payload_bytes(count):
            raise ValueError(
                f"an ending of {payload.size} bytes, {self._cut.payload_bytes(count)} expected"
            )
        at = 0
        if self.full is not None:
            tail = count % self._cut.chunk_tokens
            at = self._put_rows(self.full, count - tail, payload, at)
        if self._window is not None:
            first = count - self._cut.window_rows()
            at = self._put_rows(self._window, first, payload, at)
        if self._cut.state.recurrent is not None:
            _move(os.pwritev, self._fd, [payload[at:]], self._recurrent_at)

    def _put_rows(
        self, rows: AttentionRows, first: int, payload: Bytes, at: int
    ) -> int:
        count = len(self._tokens) - first
        if not count:
            return at
        planes = PlaneRows(self._fd, rows)
        for plane, shape in enumerate(rows.shape.planes):
            size = count * shape.row_bytes
            planes.write(plane, first, [payload[at : at + size]])
            at += size
        return at

    def _put(self, head: bytes) -> None:
        self._heads.append((self._at, head))
        self._at += len(head)

    def _attention(
        self, shape: AttentionShape, streams: int, first: int
    ) -> AttentionRows:
        """Lay out a cache whose cells are in the first of its streams, from `first` on."""
        positions = np.arange(first, len(self._tokens), dtype=np.int64)
        cells = np.zeros(len(positions), CELL)
        cells["position"] = positions
        cells["sequences"] = 1
        self._put(struct.pack("<II", streams, len(cells)) + cells.tobytes())
        self._put(struct.pack("<II", shape.transposed, shape.layers))
        if VERSIONS[self._cut.state.version]:
            self._put(struct.pack("<II", *shape.rotations))
        offsets = []
        for kind, row_bytes, element_bytes in shape.planes:
            if element_bytes:
                width = row_bytes // element_bytes
                self._put(struct.pack("<iII", kind, element_bytes, width))
            else:
                self._put(struct.pack("<iQ", kind, row_bytes))
            offsets.append(self._at)
            self._at += row_bytes * len(cells)
        self._put(struct.pack("<I", 0) * (streams - 1))
        return AttentionRows(shape, streams, positions, tuple(offsets))


def _runs(numbers: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of indices at which numbers rise by one."""
    if not len(numbers):
        return
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    edges = [0, *breaks.tolist(), len(numbers)]
    yield from pairwise(edges)


def _move(
    call: Callable[[int, list[memoryview], int], int],
    fd: int,
    buffers: Sequence[Bytes],
    at: int,
) -> None:
    """Read or write all of `buffers` at byte `at`. Raises OSError if the file ends before them."""
    for first in range(0, len(buffers), _MOST_BUFFERS):
        left = list(buffers[first : first + _MOST_BUFFERS])
        while left:
            moved = call(fd, [buffer.data for buffer in left], at)
            if not moved and any(buffer.size for buffer in left):
                raise OSError("the state file became shorter while it was read")
            at += moved
            while left and moved >= left[0].size:
                moved -= left[0].size
                left.pop(0)
            if left:
                left[0] = left[0][moved:]
