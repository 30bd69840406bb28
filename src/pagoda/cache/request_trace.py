"""Traces: recorded requests, one JSON object per line, as in the Mooncake FAST'25 release; hashed
ids only, no text.

`timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids` (one per chunk of the
prompt, each naming the whole prefix up to it) and our own `chunk_tokens` (512 if it is absent).
"""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Iterable, Iterator
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import msgspec
from msgspec import UNSET, UnsetType

_GZIP = b"\x1f\x8b"
_LARGEST_ID = (1 << 64) - 1
_CHUNK_TOKENS = 512
_LATEST_MS = 7.5e12  # the year 2207: a larger number is not in milliseconds

Natural = Annotated[int, msgspec.Meta(ge=0)]


class Request(
    msgspec.Struct, frozen=True, gc=False, rename={"timestamp_ms": "timestamp"}
):
    """One prompt: its time, the lengths of the prompt and its answer (tokens), and the ids of its
    chunks.

    Some traces also say to which session it belongs and to which agent in it, why its answer ended
    (`stop`, as a server names it), whether it is the last of its session, whether its prompt is
    dropped or retained, and what became of its hints (`said_hints`).
    """

    timestamp_ms: Annotated[float, msgspec.Meta(ge=0, le=_LATEST_MS)]
    input_length: Natural
    output_length: Natural
    hash_ids: tuple[Natural, ...]
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1)] = _CHUNK_TOKENS
    # left out of a line that does not have them
    session: int | str | UnsetType | None = UNSET
    stop: str | UnsetType | None = UNSET
    last: bool | UnsetType | None = UNSET
    agent: str | UnsetType | None = UNSET
    drop: bool | UnsetType | None = UNSET
    retain_seconds: Annotated[float, msgspec.Meta(ge=0)] | UnsetType | None = (
        UNSET
    )
    said_hints: str | UnsetType | None = UNSET


def read_trace(path: Path | str) -> Iterator[Request]:
    """Read requests one by one, gzipped or not; `-` is the standard input. Their times never
    decrease.

    OSError if it cannot be read; ValueError with the number of the bad line ("PATH:17: ...").
    """
    name = str(path)
    if name == "-":
        yield from _requests(name, sys.stdin.buffer)
    else:
        with open(path, "rb") as file:
            yield from _requests(name, file)


def with_shared_ids(requests: Iterable[Request]) -> Iterator[Request]:
    """Yield the same requests with one object for equal ids: a chunk that is asked for again then
    takes 8 bytes, not 40.
    """
    known: dict[int, int] = {}
    for request in requests:
        ids = tuple([known.setdefault(each, each) for each in request.hash_ids])
        yield msgspec.structs.replace(request, hash_ids=ids)


def format_request(request: Request) -> str:
    """Return one line, without line end, that `read_trace` reads as this request."""
    return msgspec.json.encode(request).decode()


def _requests(name: str, file: BinaryIO) -> Iterator[Request]:
    decode = msgspec.json.Decoder(Request).decode
    latest = 0.0
    number = 0
    try:
        for text in _unpacked(file):
            number += 1
            if text.isspace():
                continue
            request = decode(text)
            if max(request.hash_ids, default=0) > _LARGEST_ID:
                raise ValueError("an id in `hash_ids` has more than 64 bits")
            latest = max(latest, request.timestamp_ms)
            yield msgspec.structs.replace(request, timestamp_ms=latest)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{name}:{number + 1}: what was packed is damaged: {error}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{name}:{number}: {error}") from error


def _unpacked(file: BinaryIO) -> Iterable[bytes]:
    """Return the lines of a file that may be gzipped."""
    buffered = (
        file
        if isinstance(file, BufferedReader)
        else BufferedReader(cast("RawIOBase", file))
    )
    return (
        gzip.GzipFile(fileobj=buffered)
        if buffered.peek(2)[:2] == _GZIP
        else buffered
    )
