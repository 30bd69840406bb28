"""Reads the saved state of one slot of llama.cpp's server: where its tokens, rows and checkpoints
are. Reads heads only; the rows stay in the file.

    | magic, version, head: -1, 1, count, tokens, 0 images | caches | checkpoints |

An attention cache: streams; of each its cells, and of the one that has some: the position and
sequence of every cell, then K of each layer as rows [cells][row], then V. Without flash attention V
is transposed: [width][cells]. A recurrent cache has one cell, whose rows are the state.

The file does not say which caches it has. `read_unknown_state` tries every known combination on the
file of the probe, which must fit exactly one; from then on `read_state` accepts this shape only.
Whatever is not understood raises `UnknownState`. Versions 2 and 4 are known.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAGIC = 0x67677371
CHECKPOINTS = b"SCKP"
# version -> whether an attention cache says how K and V are rotated; the same builds may save
# checkpoints
VERSIONS = {2: False, 4: True}
# ggml's types that a cache may have: name, elements of a block, bytes of a block
TYPES = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    20: ("iq4_nl", 32, 18),
    30: ("bf16", 1, 2),
}
CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
CHECKPOINT_HEAD_BYTES = 8  # before the cache inside a checkpoint

_MOST_STREAMS = 256
_MOST_LAYERS = 4096
_MOST_ROW_BYTES = 1 << 24
_MOST_CHECKPOINTS = 4096

Positions = npt.NDArray[np.int64]


class UnknownState(Exception):
    """A state file that cannot be used. The message says what is wrong with it."""


class StatePlane(NamedTuple):
    """K, V or a recurrent state of one layer: ggml's type and the bytes of one cell.

    `element_bytes` is above 0 if the plane is transposed: [row_bytes / element_bytes][cells].
    """

    kind: int
    row_bytes: int
    element_bytes: int = 0


class AttentionShape(NamedTuple):
    """What all states of one server have in common, of one cache."""

    layers: int
    transposed: int
    rotations: tuple[int, ...]
    planes: tuple[StatePlane, ...]  # K of each layer, then V of each layer

    @property
    def row_bytes(self) -> int:
        """The bytes of one token."""
        return sum(plane.row_bytes for plane in self.planes)


class RecurrentShape(NamedTuple):
    """A cache that has one state instead of rows."""

    layers: int
    transposed: int
    planes: tuple[StatePlane, ...]

    @property
    def state_bytes(self) -> int:
        """The bytes of the whole cache in a file: heads and state."""
        return 20 + sum(12 + plane.row_bytes for plane in self.planes)


class StateShape(NamedTuple):
    """The caches of a state, in the order of the file."""

    version: int
    full: AttentionShape | None  # has the rows of all tokens
    window: AttentionShape | None  # has the rows of the last tokens only
    recurrent: RecurrentShape | None

    @property
    def has_checkpoints(self) -> bool:
        """Whether builds that write this version keep checkpoints in their files."""
        return VERSIONS[self.version]

    @property
    def kind(self) -> str:
        """What the model is: attention, window, hybrid or recurrent."""
        if self.full is None:
            return "recurrent"
        if self.window is not None:
            return "window"
        return "attention" if self.recurrent is None else "hybrid"

    def describe(self) -> str:
        """Return the shape as text that is the same for equal bytes of a row."""
        return repr((self.full, self.window, self.recurrent))

    def kv_types(self) -> str:
        """Return the types of the rows, such as "f16" or "q8_0/f16"."""
        shapes = [
            shape for shape in (self.full, self.window, self.recurrent) if shape
        ]
        names = [
            TYPES[plane.kind][0] for shape in shapes for plane in shape.planes
        ]
        return "/".join(dict.fromkeys(names))


class AttentionRows(NamedTuple):
    """Where the rows of an attention cache are in a file."""

    shape: AttentionShape
    streams: int
    positions: Positions  # of the cells, in the order of the file
    offsets: tuple[int, ...]  # the byte at which each plane begins


class RecurrentState(NamedTuple):
    """Where a recurrent cache is in a file: its bytes, and the position of its last token."""

    shape: RecurrentShape
    position: int
    start: int
    offsets: tuple[int, ...]


class Checkpoint(NamedTuple):
    """A state that the server kept on the way. It has the rows that a later state has lost."""

    tokens: int
    window: AttentionRows | None
    recurrent: RecurrentState | None


@dataclass(frozen=True)
class StateFile:
    """A state file that was understood. It reads `fd`, which the caller keeps open."""

    fd: int
    size: int
    shape: StateShape
    tokens: npt.NDArray[np.int32]
    full: AttentionRows | None
    window: AttentionRows | None
    recurrent: RecurrentState | None
    checkpoints: tuple[Checkpoint, ...]

    @property
    def streams(self) -> int:
        """How many streams the server's caches have: 1, or the number of its slots."""
        if self.full is not None:
            return self.full.streams
        return 1


def read_unknown_state(fd: int) -> StateFile:
    """Return the state in `fd`, whose shape is not known; changes nothing.

    Raises UnknownState unless exactly one combination of caches explains every byte.
    """
    size = os.fstat(fd).st_size
    _read_head(_Reader(fd, 0, size))
    found = []
    # how far each attempt got, and what was wrong there
    troubles = []
    for combination in _COMBINATIONS:
        reader = _Reader(fd, 0, size)
        try:
            found.append(_read(reader, combination))
        except UnknownState as error:
            troubles.append((reader.at, str(error)))
    if len(found) != 1:
        _, furthest = max(troubles, default=(0, ""))
        raise UnknownState(
            f"its bytes fit {len(found)} of the {len(_COMBINATIONS)} known combinations of "
            f"caches ({furthest})"
        )
    return found[0]


def read_state(fd: int, shape: StateShape) -> StateFile:
    """Return the state in `fd`; changes nothing. Raises UnknownState if anything differs from
    `shape`, or cannot be the state of its tokens.
    """
    combination = _Combination(
        None
        if shape.full is None
        else len(shape.full.planes) > shape.full.layers,
        None
        if shape.window is None
        else len(shape.window.planes) > shape.window.layers,
        shape.recurrent is not None,
    )
    state = _read(_Reader(fd, 0, os.fstat(fd).st_size), combination)
    if state.shape != shape:
        raise UnknownState(
            f"its caches are {state.shape.describe()}, those of this server {shape.describe()}"
        )
    return state


class _Combination(NamedTuple):
    """Which caches a file may have. None: no such cache; else whether it has V beside K."""

    full: bool | None
    window: bool | None
    recurrent: bool


_COMBINATIONS = (
    _Combination(True, None, False),
    _Combination(False, None, False),
    _Combination(True, True, False),
    _Combination(False, False, False),
    _Combination(True, None, True),
    _Combination(False, None, True),
    _Combination(None, None, True),
)


class _Reader:
    """Reads heads from a range of a file and steps over the rest."""

    def __init__(self, fd: int, at: int, end: int) -> None:
        self.fd = fd
        self.at = at
        self.end = end

    def skip(self, length: int) -> int:
        """Step over `length` bytes; return where they begin."""
        if not 0 <= length <= self.end - self.at:
            raise UnknownState(
                f"it is cut short: {length} bytes at {self.at}, but {self.end} in all"
            )
        self.at += length
        return self.at - length

    def take(self, length: int) -> bytes:
        start = self.skip(length)
        data = os.pread(self.fd, length, start)
        if len(data) != length:
            raise UnknownState(f"it became shorter than {self.at} bytes")
        return data

    def numbers(self, form: str) -> tuple[int, ...]:
        return struct.unpack(form, self.take(struct.calcsize(form)))


def _read(reader: _Reader, combination: _Combination) -> StateFile:
    version, tokens = _read_head(reader)
    full = window = recurrent = None
    if combination.full is not None:
        full = _read_attention(reader, version, combination.full)
    if combination.window is not None:
        window = _read_attention(reader, version, combination.window)
    if combination.recurrent:
        recurrent = _read_recurrent(reader)
    shape = StateShape(
        version,
        None if full is None else full.shape,
        None if window is None else window.shape,
        None if recurrent is None else recurrent.shape,
    )
    checkpoints = tuple(_read_checkpoints(reader, shape, len(tokens)))
    if reader.at != reader.end:
        raise UnknownState(f"{reader.end - reader.at} bytes follow its end")
    if full is not None:
        _require_run(full.positions, len(tokens), len(tokens))
    if window is not None:
        _require_run(window.positions, len(tokens))
        if full is not None and window.streams != full.streams:
            raise UnknownState("its caches have different numbers of streams")
    if recurrent is not None and recurrent.position != len(tokens) - 1:
        raise UnknownState(
            f"its recurrent state is of position {recurrent.position}, its tokens are "
            f"{len(tokens)}"
        )
    return StateFile(
        reader.fd, reader.end, shape, tokens, full, window, recurrent, checkpoints
    )


def _read_head(reader: _Reader) -> tuple[int, npt.NDArray[np.int32]]:
    magic, version, length = reader.numbers("<III")
    if magic != MAGIC:
        raise UnknownState(f"it begins with {magic:#x}: not a slot of llama.cpp")
    if version not in VERSIONS:
        known = ", ".join(map(str, VERSIONS))
        raise UnknownState(
            f"it has version {version}; this release knows {known}"
        )
    head = np.frombuffer(reader.take(4 * length), "<i4")
    if length < 4 or head[0] != -1 or head[1] != 1 or head[2] != length - 4:
        raise UnknownState(
            "its list of tokens has another form, or it has images"
        )
    if head[-1] != 0:
        raise UnknownState("it has images")
    tokens = head[3:-1].astype(np.int32)
    if not len(tokens) or tokens.min() < 0:
        raise UnknownState("it has no tokens, or negative ones")
    return version, tokens


def _read_attention(reader: _Reader, version: int, has_v: bool) -> AttentionRows:
    (streams,) = reader.numbers("<I")
    if not 1 <= streams <= _MOST_STREAMS:
        raise UnknownState(f"a cache has {streams} streams")
    found = None
    for _ in range(streams):
        (cells,) = reader.numbers("<I")
        if cells and found is not None:
            raise UnknownState("two streams of a cache have cells")
        if cells:
            found = _read_stream(reader, version, has_v, streams, cells)
    if found is None:
        raise UnknownState("a cache is empty")
    return found


def _read_stream(
    reader: _Reader, version: int, has_v: bool, streams: int, cells: int
) -> AttentionRows:
    if cells > (reader.end - reader.at) // CELL.itemsize:
        raise UnknownState(f"a cache has {cells} cells")
    meta = np.frombuffer(reader.take(cells * CELL.itemsize), CELL)
    if (meta["sequences"] != 1).any():
        raise UnknownState(
            "a cell belongs to several sequences, or has several positions"
        )
    transposed, layers = reader.numbers("<II")
    rotations = reader.numbers("<II") if VERSIONS[version] else ()
    if transposed > 1 or not 1 <= layers <= _MOST_LAYERS:
        raise UnknownState(
            f"a cache has {layers} layers, transposed {transposed}"
        )
    planes: list[StatePlane] = []
    offsets: list[int] = []
    for _ in range(layers):
        plane = _row_plane(reader)
        planes.append(plane)
        offsets.append(reader.skip(plane.row_bytes * cells))
    for _ in range(layers if has_v else 0):
        plane = _column_plane(reader) if transposed else _row_plane(reader)
        planes.append(plane)
        offsets.append(reader.skip(plane.row_bytes * cells))
    shape = AttentionShape(layers, transposed, rotations, tuple(planes))
    positions = meta["position"].astype(np.int64)
    return AttentionRows(shape, streams, positions, tuple(offsets))


def _row_plane(reader: _Reader, least_bytes: int = 1) -> StatePlane:
    kind, row_bytes = reader.numbers("<iQ")
    _check_row(kind, row_bytes, least_bytes)
    return StatePlane(kind, row_bytes)


def _column_plane(reader: _Reader) -> StatePlane:
    kind, element_bytes, width = reader.numbers("<iII")
    _check_row(kind, element_bytes * width)
    if TYPES[kind][1:] != (1, element_bytes):
        raise UnknownState(
            f"a transposed plane has elements of {element_bytes} bytes and type {kind}"
        )
    return StatePlane(kind, element_bytes * width, element_bytes)


def _check_row(kind: int, row_bytes: int, least_bytes: int = 1) -> None:
    if kind not in TYPES:
        raise UnknownState(f"a plane has the unknown type {kind}")
    if (
        not least_bytes <= row_bytes <= _MOST_ROW_BYTES
        or row_bytes % TYPES[kind][2]
    ):
        raise UnknownState(
            f"a plane of type {TYPES[kind][0]} has rows of {row_bytes} bytes"
        )


def _read_recurrent(reader: _Reader) -> RecurrentState:
    start = reader.at
    cells, position, _, transposed, layers = reader.numbers("<IiIII")
    if cells != 1 or transposed > 1 or not 1 <= layers <= _MOST_LAYERS:
        raise UnknownState(
            f"a recurrent cache has {cells} cells, {layers} layers, transposed {transposed}"
        )
    planes: list[StatePlane] = []
    offsets: list[int] = []
    while reader.end - reader.at >= 12 and len(planes) < 2 * layers:
        if os.pread(reader.fd, 4, reader.at) == CHECKPOINTS:
            break
        plane = _row_plane(reader, least_bytes=0)  # some have no second state
        planes.append(plane)
        offsets.append(reader.skip(plane.row_bytes))
    if not planes:
        raise UnknownState("a recurrent cache has no state")
    shape = RecurrentShape(layers, transposed, tuple(planes))
    return RecurrentState(shape, position, start, tuple(offsets))


def _read_checkpoints(
    reader: _Reader, shape: StateShape, most_tokens: int
) -> Iterator[Checkpoint]:
    if reader.at == reader.end:
        return
    if reader.take(4) != CHECKPOINTS:
        raise UnknownState(f"something unknown is at byte {reader.at - 4}")
    form, count = reader.numbers("<II")
    if form != 1 or count > _MOST_CHECKPOINTS:
        raise UnknownState(f"{count} checkpoints of the unknown form {form}")
    for _ in range(count):
        yield _read_checkpoint(reader, shape, most_tokens)


def _read_checkpoint(
    reader: _Reader, shape: StateShape, most_tokens: int
) -> Checkpoint:
    tokens, _, _, size = reader.numbers("<QiiQ")
    start = reader.skip(size)
    for other in ("draft model", "speculation"):
        (length,) = reader.numbers("<Q")
        if length:
            raise UnknownState(f"a checkpoint has the state of a {other}")
    if not 0 < tokens <= most_tokens:
        raise UnknownState(
            f"a checkpoint is of {tokens} tokens, the state has {most_tokens}"
        )
    inner = _Reader(reader.fd, start, start + size)
    inner.skip(CHECKPOINT_HEAD_BYTES)
    window = recurrent = None
    if shape.window is not None:
        has_v = len(shape.window.planes) > shape.window.layers
        window = _read_attention(inner, shape.version, has_v)
        if window.shape != shape.window:
            raise UnknownState("a checkpoint has another form than its state")
        _require_run(window.positions, tokens)
    if shape.recurrent is not None:
        recurrent = _read_recurrent(inner)
        if recurrent.shape != shape.recurrent or recurrent.position != tokens - 1:
            raise UnknownState("a checkpoint has another form than its state")
    if inner.at != inner.end or (window is None and recurrent is None):
        raise UnknownState("a checkpoint has something unknown")
    return Checkpoint(tokens, window, recurrent)


def _require_run(
    positions: Positions, stop: int, length: int | None = None
) -> None:
    """Raise UnknownState unless the positions are, in any order, the `length` ones before `stop`,
    each once.
    """
    ordered = np.sort(positions)
    count = len(ordered)
    expected = np.arange(stop - count, stop)
    if (
        count > stop
        or (length is not None and count != length)
        or not np.array_equal(ordered, expected)
    ):
        raise UnknownState(
            f"positions are out of order: {count} cells at {ordered[0]}..{ordered[-1]} for the "
            f"tokens before {stop}"
        )
