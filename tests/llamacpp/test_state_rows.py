"""State files written by a second, simple model of their form: bytes joined one after the other."""

from __future__ import annotations

import os
import random
import resource
import signal
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pagoda.connectors.llamacpp.state_file import (
    TYPES,
    UnknownState,
    read_state,
    read_unknown_state,
)
from pagoda.connectors.llamacpp.state_rows import (
    EndingShape,
    StateChunks,
    StateWriter,
    layout_of,
    possible_endings,
    read_ending,
)

KINDS = ("attention", "latent", "window", "hybrid", "recurrent")
CHUNK = 16
WINDOW = 10


@dataclass
class PlaneModel:
    """One layer's K or V: its type, the bytes of a row, and the row of each position."""

    kind: int
    row_bytes: int
    element_bytes: int  # 0: not transposed
    rows: npt.NDArray[np.uint8]

    def encode(self, positions: list[int]) -> bytes:
        rows = self.rows[positions]
        if not self.element_bytes:
            return struct.pack("<iQ", self.kind, self.row_bytes) + rows.tobytes()
        width = self.row_bytes // self.element_bytes
        head = struct.pack("<iII", self.kind, self.element_bytes, width)
        columns = rows.reshape(len(positions), width, self.element_bytes)
        return head + columns.transpose(1, 0, 2).tobytes()


@dataclass
class StateModel:
    """A state as plain values, and the file that it makes."""

    kind: str
    version: int
    streams: int
    stream: int  # the one that has cells
    is_transposed: bool
    tokens: list[int]
    full: list[PlaneModel] = field(default_factory=list)
    window: list[PlaneModel] = field(default_factory=list)
    recurrent: list[bytes] = field(default_factory=list)  # one for each position
    checkpoints: list[int] = field(default_factory=list)
    is_shuffled: bool = False

    def encode(self) -> bytes:
        count = len(self.tokens)
        ids = [-1, 1, count, *self.tokens, 0]
        parts = [
            struct.pack(
                f"<III{len(ids)}i", 0x67677371, self.version, len(ids), *ids
            )
        ]
        if self.full:
            parts.append(self._cache(self.full, list(range(count))))
        if self.window:
            parts.append(self._cache(self.window, self._kept(count)))
        if self.recurrent:
            parts.append(self._state(count))
        if self.checkpoints:
            parts.append(b"SCKP" + struct.pack("<II", 1, len(self.checkpoints)))
        for point in self.checkpoints:
            inner = bytes(8)
            if self.window:
                inner += self._cache(self.window, self._kept(point))
            if self.recurrent:
                inner += self._state(point)
            first = max(0, point - WINDOW)
            parts.append(
                struct.pack("<QiiQ", point, first, point - 1, len(inner))
            )
            parts.append(inner + bytes(16))
        return b"".join(parts)

    def _kept(self, count: int) -> list[int]:
        return list(range(max(0, count - WINDOW), count))

    def _state(self, count: int) -> bytes:
        head = struct.pack("<IiIII", 1, count - 1, 0, 0, 1)
        body = self.recurrent[count - 1]
        return head + struct.pack("<iQ", 0, len(body)) + body

    def _cache(self, planes: list[PlaneModel], positions: list[int]) -> bytes:
        if self.is_shuffled:
            positions = random.Random(len(positions)).sample(
                positions, len(positions)
            )
        out = [struct.pack("<I", self.streams)]
        for stream in range(self.streams):
            if stream != self.stream:
                out.append(struct.pack("<I", 0))
                continue
            out.append(struct.pack("<I", len(positions)))
            out += [struct.pack("<iIi", position, 1, 0) for position in positions]
            layers = len(planes) if self.kind == "latent" else len(planes) // 2
            out.append(struct.pack("<II", self.is_transposed, layers))
            if self.version == 4:
                out.append(struct.pack("<II", 64, 0))
            out += [plane.encode(positions) for plane in planes]
        return b"".join(out)


def random_state(rng: random.Random, kind: str | None = None) -> StateModel:
    """Return a state of any kind, version, types and size."""
    kind = kind or rng.choice(KINDS)
    count = rng.randint(1, 90)
    streams = rng.choice((1, 1, 2, 4)) if kind != "recurrent" else 1
    state = StateModel(
        kind,
        rng.choice((2, 4)),
        streams,
        rng.randrange(streams),
        rng.random() < 0.4 and kind != "latent",
        [rng.randrange(1000) for _ in range(count)],
        is_shuffled=rng.random() < 0.3,
    )
    if kind != "recurrent":
        state.full = random_planes(rng, state, count)
    if kind == "window":
        state.window = random_planes(rng, state, count)
    if kind in ("hybrid", "recurrent"):
        size = 4 * rng.randint(1, 40)
        state.recurrent = [rng.randbytes(size) for _ in range(count)]
    if kind in ("window", "hybrid", "recurrent") and rng.random() < 0.7:
        points = rng.sample(range(1, count + 1), min(count, rng.randint(1, 3)))
        state.checkpoints = sorted(points)
    return state


def random_planes(
    rng: random.Random, state: StateModel, count: int
) -> list[PlaneModel]:
    layers = rng.randint(1, 3)
    planes = []
    for is_v in (False, True) if state.kind != "latent" else (False,):
        for _ in range(layers):
            kind = rng.choice(
                (0, 1, 30) if is_v and state.is_transposed else list(TYPES)
            )
            block = TYPES[kind][2]
            row_bytes = block * rng.randint(1, 5)
            element_bytes = block if is_v and state.is_transposed else 0
            values = np.frombuffer(rng.randbytes(row_bytes * count), np.uint8)
            planes.append(
                PlaneModel(
                    kind,
                    row_bytes,
                    element_bytes,
                    values.reshape(count, row_bytes),
                )
            )
    return planes


class Opened:
    """A file with a state."""

    def __init__(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)
        self.fd = os.open(path, os.O_RDWR)

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def cut_of(fd: int) -> EndingShape:
    shape = read_unknown_state(fd).shape
    return EndingShape(shape, CHUNK, WINDOW if shape.window is not None else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_cut_and_composed_is_what_the_model_writes(
    kind: str, tmp_path: Path
) -> None:
    """Take states apart into chunks and endings, and compose prefixes that they have."""
    for seed in range(40):
        check_state(random.Random(f"{kind} {seed}"), kind, tmp_path)


def check_state(rng: random.Random, kind: str, tmp_path: Path) -> None:
    model = random_state(rng, kind)
    with Opened(tmp_path / "state", model.encode()) as fd:
        cut = cut_of(fd)
        state = read_state(fd, cut.state)
        layout = layout_of(cut.state, CHUNK)
        assert state.tokens.tolist() == model.tokens
        assert state.streams == model.streams
        chunks = read_chunks(rng, fd, state, layout)
        streams = rng.choice((1, 3)) if model.kind != "recurrent" else 1
        for count in lengths(rng, model, state, cut):
            ending = read_ending(state, cut, count)
            assert ending.size == cut.payload_bytes(count)
            with Opened(tmp_path / "composed", b"") as composed:
                tokens = state.tokens[:count]
                writer = StateWriter(composed, cut, streams, tokens)
                writer.put_ending(ending)
                target = writer.chunks(layout)
                for group in grouped(rng, list(range(count // CHUNK))):
                    starts = [number * CHUNK for number in group]
                    target.from_slots(
                        starts, [chunks[number] for number in group]
                    )
                assert writer.size == os.fstat(composed).st_size
                assert cut.file_bytes(count, streams) >= writer.size
                found = os.pread(composed, writer.size, 0)
                assert found == expected(model, cut, count, streams)
                assert read_state(composed, cut.state).shape == cut.state


def read_chunks(
    rng: random.Random, fd: int, state: object, layout: object
) -> list[npt.NDArray[np.uint8]]:
    source = StateChunks(fd, state.full, state.tokens, layout)  # type: ignore[attr-defined, arg-type]
    whole = len(state.tokens) // CHUNK  # type: ignore[attr-defined]
    size = layout.chunk_bytes  # type: ignore[attr-defined]
    slots = [np.full(size + 3, 7, np.uint8) for _ in range(whole)]
    for group in grouped(rng, list(range(whole))):
        source.to_slots([n * CHUNK for n in group], [slots[n] for n in group])
    for slot in slots:
        assert (slot[size:] == 7).all()
    return slots


def grouped(rng: random.Random, numbers: list[int]) -> Iterator[list[int]]:
    """Yield the numbers in calls of any size; some of them not consecutive."""
    if rng.random() < 0.3:
        rng.shuffle(numbers)
    while numbers:
        size = rng.randint(1, len(numbers))
        yield numbers[:size]
        numbers = numbers[size:]


def lengths(
    rng: random.Random, model: StateModel, state: object, cut: EndingShape
) -> list[int]:
    """Return how many tokens are tried: where a state may be cut."""
    if model.kind in ("attention", "latent"):
        return [rng.randint(1, len(model.tokens)) for _ in range(4)]
    possible = possible_endings(state, cut)  # type: ignore[arg-type]
    return [rng.randint(lowest, highest) for lowest, highest in possible]


def expected(
    model: StateModel, cut: EndingShape, count: int, streams: int
) -> bytes:
    """Return the file that the model would write of its first `count` tokens."""
    short = StateModel(
        model.kind,
        model.version,
        streams,
        0,
        model.is_transposed,
        model.tokens[:count],
        model.full,
        model.window,
        model.recurrent,
    )
    if model.window:
        kept = cut.window_rows()
        short._kept = lambda n: list(range(n - kept, n))  # type: ignore[method-assign]
    return short.encode()


def test_a_window_is_cut_only_where_its_rows_are_at_hand() -> None:
    rng = random.Random(1)
    model = random_state(rng, "window")
    while len(model.tokens) < 60 or model.is_shuffled:
        model = random_state(rng, "window")
    model.checkpoints = [len(model.tokens) - 4, 20]
    model.checkpoints.sort()
    path = Path(f"/dev/shm/pagoda-test-llama-{os.getpid()}")
    try:
        with Opened(path, model.encode()) as fd:
            cut = cut_of(fd)
            state = read_state(fd, cut.state)
            count = len(model.tokens)
            # the checkpoint's rows and those of the end are joined; 10 rows alone are too few
            assert possible_endings(state, cut) == [(count - 2, count)]
            with pytest.raises(ValueError, match="windowed row"):
                read_ending(state, cut, 20)
    finally:
        path.unlink()


# ---- what is refused


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_was_cut_short_or_goes_on_is_refused(
    kind: str, tmp_path: Path
) -> None:
    rng = random.Random(kind)
    model = random_state(rng, kind)
    data = model.encode()
    with Opened(tmp_path / "state", data) as fd:
        shape = read_unknown_state(fd).shape
    for length in sorted(rng.sample(range(len(data)), 40)):
        with Opened(tmp_path / "short", data[:length]) as fd:
            # the checkpoints are a part that a state may not have
            if model.checkpoints and length == data.index(b"SCKP"):
                continue
            with pytest.raises(UnknownState):
                read_state(fd, shape)
    with (
        Opened(tmp_path / "long", data + b"\0") as fd,
        pytest.raises(UnknownState),
    ):
        read_state(fd, shape)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_with_a_changed_byte_is_refused_or_reads_the_same(
    kind: str, tmp_path: Path
) -> None:
    """No byte that is changed leads to an error of another kind, or to a huge allocation."""
    rng = random.Random(kind)
    for _ in range(12):
        check_changed(rng, random_state(rng, kind), tmp_path)


def check_changed(rng: random.Random, model: StateModel, tmp_path: Path) -> None:
    data = bytearray(model.encode())
    with Opened(tmp_path / "state", bytes(data)) as fd:
        shape = read_unknown_state(fd).shape
    for _ in range(30):
        changed = bytearray(data)
        at = rng.randrange(len(data))
        changed[at] ^= 1 << rng.randrange(8)
        with Opened(tmp_path / "changed", bytes(changed)) as fd:
            try:
                state = read_state(fd, shape)
            except UnknownState:
                continue
            assert len(state.tokens) == len(model.tokens)
            assert state.shape == shape


def first_cell(data: bytes, tokens: int) -> int:
    """Return the byte of the first cell of a state with one stream."""
    return 12 + 4 * (tokens + 4) + 8


@pytest.mark.parametrize(
    ("value", "offset", "message"),
    [
        (5, 0, "out of order"),  # twice the position 5
        (-1, 0, "out of order"),
        (2, 4, "several"),  # of two sequences
    ],
)
def test_cells_that_are_not_those_of_the_tokens_are_refused(
    value: int, offset: int, message: str, tmp_path: Path
) -> None:
    model = random_state(random.Random(3), "attention")
    assert len(model.tokens) >= 8
    model.streams = 1
    model.stream = 0
    model.is_shuffled = False
    data = bytearray(model.encode())
    with Opened(tmp_path / "state", bytes(data)) as fd:
        shape = read_unknown_state(fd).shape
    at = first_cell(data, len(model.tokens)) + offset
    data[at : at + 4] = struct.pack("<i", value)
    with (
        Opened(tmp_path / "state", bytes(data)) as fd,
        pytest.raises(UnknownState, match=message),
    ):
        read_state(fd, shape)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, 1, "not a slot"),
        (4, 3, "version 3; this release knows 2, 4"),
        (12, 5, "another form"),
    ],
)
def test_an_unknown_head_is_refused_with_the_reason(
    at: int, value: int, message: str, tmp_path: Path
) -> None:
    data = bytearray(random_state(random.Random(1), "attention").encode())
    data[at : at + 4] = struct.pack("<i", value)
    with (
        Opened(tmp_path / "state", bytes(data)) as fd,
        pytest.raises(UnknownState, match=message),
    ):
        read_unknown_state(fd)


def test_images_are_refused(tmp_path: Path) -> None:
    model = random_state(random.Random(1), "attention")
    data = bytearray(model.encode())
    at = 12 + 4 * (len(model.tokens) + 3)
    data[at : at + 4] = struct.pack("<i", 1)
    with (
        Opened(tmp_path / "state", bytes(data)) as fd,
        pytest.raises(UnknownState, match="images"),
    ):
        read_unknown_state(fd)


def test_a_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    one = random_state(random.Random(1), "attention")
    other = random_state(random.Random(2), "attention")
    with Opened(tmp_path / "one", one.encode()) as fd:
        shape = read_unknown_state(fd).shape
    with (
        Opened(tmp_path / "other", other.encode()) as fd,
        pytest.raises(UnknownState),
    ):
        read_state(fd, shape)


def test_a_full_directory_is_an_error_of_the_write(tmp_path: Path) -> None:
    """A write through a mapping would end the process instead."""
    model = random_state(random.Random(5), "attention")
    with Opened(tmp_path / "state", model.encode()) as fd:
        cut = cut_of(fd)
        ending = read_ending(read_state(fd, cut.state), cut, 8)
    with Opened(tmp_path / "composed", b"") as composed:
        writer = StateWriter(composed, cut, 1, np.arange(8, dtype=np.int32))
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handled = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (writer.size // 2, before[1]))
        try:
            with pytest.raises(OSError):
                writer.put_ending(ending)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handled)
