"""Digests of weight files: of all bytes, or for large files of samples from every tensor."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from pagoda.base.file_space import open_regular
from pagoda.base.signal_safe_threads import Pool
from pagoda.connectors.identity.gguf_header import (
    MAGIC,
    read_gguf_header,
    read_pieces,
)

WHOLE_BYTES = 64 << 20  # a file up to this size is read whole
_EDGE_BYTES = 1 << 20
# evenly spaced pieces of a large file, in addition to those of each tensor
_PIECES = 256
_MOST_PIECE_BYTES = 64 << 10
_LEAST_PIECE_BYTES = 4 << 10
_FILE_BYTES = 16 << 20  # about what is read of one large file ...
_ALL_BYTES = 512 << 20  # ... and of all of them
_MOST_HEADER_BYTES = 256 << 20
_THREADS = 8


def files_digest(directory: Path, names: Sequence[str]) -> str:
    """Return 64 hex characters that name the files `names` of `directory`, by name, size and
    content.

    Files are read by several threads. Changes nothing. Raises OSError if one cannot be read.
    """
    budget_bytes = min(_FILE_BYTES, _ALL_BYTES // max(len(names), 1))
    with Pool(min(_THREADS, max(len(names), 1)), "pagoda-weights") as threads:
        digests = list(
            threads.map(
                lambda name: file_digest(directory / name, budget_bytes), names
            )
        )
    found = blake3(derive_key_context="PagodaKV weight files")
    found.update(
        json.dumps(
            [[name, digest] for name, digest in zip(names, digests, strict=True)]
        ).encode()
    )
    return str(found.hexdigest())


def file_digest(path: Path, budget_bytes: int = _FILE_BYTES) -> str:
    """Return 64 hex characters that name one file, by its size and content; changes nothing.

    A file up to 64 MiB is read completely. Of a larger one: the first and the last MiB, and pieces
    at even distances; in a safetensors or GGUF file also the whole header and pieces of *every*
    tensor (all bytes of small ones). So every tensor that was trained, scaled or replaced changes
    the digest. An edit of a few numbers inside a tensor of a large file may not change it: no
    training does that; after such an edit, set `weights` to a new name.
    """
    found = blake3(derive_key_context="PagodaKV one weight file")
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        found.update(size.to_bytes(8, "little"))
        for start, end in _ranges(path, file.fileno(), size, budget_bytes):
            found.update(struct.pack("<QQ", start, end))
            for piece in read_pieces(file.fileno(), start, end):
                found.update(piece)
    return str(found.hexdigest())


def _ranges(
    path: Path, file: int, size: int, budget_bytes: int
) -> list[tuple[int, int]]:
    """Return the half-open ranges of bytes to be read, in order and without overlap."""
    if size <= WHOLE_BYTES:
        return [(0, size)]
    body = 0
    spans = [(0, size)]
    if path.suffix == ".safetensors":
        body, spans = _tensors(path, file, size)
    elif os.pread(file, len(MAGIC), 0) == MAGIC:
        # by its content: some stores of models name their files by digest
        header = read_gguf_header(path)
        body = header.body
        spans = header.spans or spans
    step = max((size - body) // _PIECES, _MOST_PIECE_BYTES)
    counts = [1 + (end - start) // step for start, end in spans]
    piece = min(
        max(budget_bytes // sum(counts), _LEAST_PIECE_BYTES), _MOST_PIECE_BYTES
    )
    wanted = [(0, max(body, _EDGE_BYTES)), (size - _EDGE_BYTES, size)]
    for (start, end), count in zip(spans, counts, strict=True):
        for number in range(count):
            at = start + max(end - start - piece, 0) * number // max(count - 1, 1)
            wanted.append((at, min(at + piece, end)))
    return _joined(wanted)


def _tensors(
    path: Path, file: int, size: int
) -> tuple[int, list[tuple[int, int]]]:
    """Return where the data of a safetensors file begins, and the range of each tensor that is not
    empty.
    """
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    body = 8 + length
    if length > _MOST_HEADER_BYTES or body > size:
        raise OSError(
            f"{path} is not a safetensors file, or was cut: its header would be {length} bytes"
        )
    try:
        header = json.loads(b"".join(read_pieces(file, 8, body)))
        offsets = [
            entry["data_offsets"]
            for name, entry in header.items()
            if name != "__metadata__"
        ]
        spans = sorted(
            (body + int(start), body + int(end)) for start, end in offsets
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        raise OSError(
            f"{path} is not a safetensors file: its header cannot be read"
        ) from None
    if any(not body <= start <= end <= size for start, end in spans):
        raise OSError(
            f"{path} was cut: its header has tensors beyond its {size} bytes"
        )
    return body, [(start, end) for start, end in spans if start < end] or [
        (body, size)
    ]


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined
