"""The header of a GGUF file: its small values and where each tensor is. Called by `weight_digests`,
by the connector of llama.cpp and by `pagoda explain`.

    | magic, version, tensors, values | values by name | table of tensors | padding | tensors |

Everything is little-endian. Arrays (the vocabulary: many megabytes) are walked over, not kept.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pagoda.base.file_space import open_regular

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FIRST_BYTES = 4 << 20  # most headers fit; each further read doubles it
_MOST_BYTES = 256 << 20
_MOST_ENTRIES = 1 << 20
_ALIGNMENT = "general.alignment"
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING = 8
_ARRAY = 9

Scalar = str | int | float | bool


class GgufHeader(NamedTuple):
    """What the head of a GGUF file says."""

    values: dict[str, Scalar]  # all that are no arrays
    body: int  # the byte at which the tensors begin
    spans: list[tuple[int, int]]  # the bytes of each tensor, with its padding


class _TooShort(Exception):
    """The header is longer than what was read of it."""


def read_gguf_header(path: Path) -> GgufHeader:
    """Return the header of a GGUF file; changes nothing.

    Raises OSError if the file cannot be read, is no GGUF file, or was cut.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = _FIRST_BYTES
        while True:
            head = b"".join(read_pieces(file.fileno(), 0, min(length, size)))
            try:
                return _Parser(path, head).header(size)
            except _TooShort:
                if length >= min(size, _MOST_BYTES):
                    raise OSError(
                        f"{path} is not a GGUF file, or was cut: its header has no end"
                    ) from None
            length *= 2


def namespace_model(path: Path, values: dict[str, Scalar]) -> str:
    """Return what a namespace calls the model of a GGUF file: by its own name, or else that of the
    file; pure.
    """
    return f"gguf {values.get('general.name') or path.stem}"


def may_need_endings(values: dict[str, Scalar]) -> bool:
    """Whether a model seems to have windows or recurrent layers; pure."""
    name = values.get("general.architecture")
    recurrent = (f"{name}.ssm.", f"{name}.shortconv.", f"{name}.wkv.")
    if any(key.startswith(recurrent) for key in values):
        return True
    return bool(values.get(f"{name}.attention.sliding_window"))


def shards_of(path: Path, values: dict[str, Scalar]) -> list[Path]:
    """Return all files of a model whose first file this is, by the names that llama.cpp gives them;
    changes nothing.
    """
    count = values.get("split.count", 1)
    first = f"-00001-of-{count:05d}.gguf" if isinstance(count, int) else ""
    if not isinstance(count, int) or count < 2 or not path.name.endswith(first):
        return [path]
    stem = path.name.removesuffix(first)
    return [
        path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    ]


def read_pieces(file: int, start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes of a range in pieces. Raises OSError if the file ends before it."""
    while start < end:
        piece = os.pread(file, min(end - start, 8 << 20), start)
        if not piece:
            raise OSError("a weight file became shorter while it was read")
        yield piece
        start += len(piece)


class _Parser:
    """Walks over the leading bytes of one file."""

    def __init__(self, path: Path, head: bytes) -> None:
        self._path = path
        self._head = head
        self._at = 0

    def header(self, size: int) -> GgufHeader:
        """Return the header of a file of `size` bytes. Raises OSError, or _TooShort."""
        if self._take(4) != MAGIC:
            raise OSError(f"{self._path} is not a GGUF file")
        version = self._number("<I")
        if version not in _VERSIONS:
            raise OSError(
                f"{self._path} is a GGUF file of version {version}: unknown"
            )
        tensors = self._count()
        entries = self._count()
        values: dict[str, Scalar] = {}
        for _ in range(entries):
            name = self._text()
            value = self._value(self._number("<I"))
            if value is not None:
                values[name] = value
        offsets = [self._tensor_offset() for _ in range(tensors)]
        alignment = values.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise OSError(f"{self._path}: an alignment of {alignment}")
        body = -(-self._at // alignment) * alignment
        starts = sorted({body + offset for offset in offsets})
        if starts and starts[-1] >= size:
            raise OSError(
                f"{self._path} was cut: its header has tensors beyond its {size} bytes"
            )
        ends = [*starts[1:], size]
        return GgufHeader(values, body, list(zip(starts, ends, strict=True)))

    def _tensor_offset(self) -> int:
        self._text()
        dimensions = self._number("<I")
        self._take(8 * dimensions)
        self._number("<I")  # its type
        return self._number("<Q")

    def _value(self, kind: int) -> Scalar | None:
        """Return a value; None for an array, which is only walked over."""
        if kind == _STRING:
            return self._text()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            raise OSError(f"{self._path}: a value of the unknown type {kind}")
        inner = self._number("<I")
        count = self._number("<Q")
        if inner in _SCALARS:
            self._take(struct.calcsize(_SCALARS[inner]) * count)
            return None
        for _ in range(count):
            if inner == _STRING:
                self._take(self._number("<Q"))
            else:
                self._value(inner)
        return None

    def _count(self) -> int:
        count = self._number("<Q")
        if count > _MOST_ENTRIES:
            raise OSError(f"{self._path} is not a GGUF file: {count} entries")
        return count

    def _text(self) -> str:
        return self._take(self._number("<Q")).decode("utf-8", "replace")

    def _number(self, form: str) -> int:
        (value,) = struct.unpack(form, self._take(struct.calcsize(form)))
        found: int = value
        return found

    def _take(self, length: int) -> bytes:
        if length > len(self._head) - self._at:
            raise _TooShort
        self._at += length
        return self._head[self._at - length : self._at]
