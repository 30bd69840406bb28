"""Reading traces: what is a request, what is not, and where."""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pagoda_tools.replay import Request, format_request, read_trace
from tests.replay.traces import SAMPLE, mooncake, sample

GOOD = (
    '{"timestamp": 27, "input_length": 700, "output_length": 5, "hash_ids": [3, '
    "18446744073709551615]}"
)
REQUEST = Request(27.0, 700, 5, (3, 2**64 - 1), 512)

requests = st.builds(
    Request,
    st.floats(0, 1e12),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.lists(st.integers(0, 2**64 - 1)).map(tuple),
    st.integers(1, 4096),
)


def written(directory: Path, *lines: str, name: str = "trace.jsonl") -> Path:
    path = directory / name
    path.write_text("\n".join(lines))
    return path


class Stdin:
    def __init__(self, content: bytes) -> None:
        self.buffer = io.BytesIO(content)


def test_a_line_is_a_request(tmp_path: Path) -> None:
    more = GOOD.replace("}", ', "chunk_tokens": 16, "who": "else"}')
    assert list(read_trace(written(tmp_path, GOOD, "", more, ""))) == [
        REQUEST,
        replace(REQUEST, chunk_tokens=16),
    ]


def test_an_empty_trace_has_no_requests(tmp_path: Path) -> None:
    assert list(read_trace(written(tmp_path))) == []


@given(st.lists(requests))
def test_what_is_written_is_read(tmp_path: Path, wanted: list[Request]) -> None:
    wanted.sort(key=lambda request: request.timestamp_ms)
    lines = [format_request(request) for request in wanted]
    for line in lines:
        assert "\n" not in line
    assert list(read_trace(written(tmp_path, *lines))) == wanted


def test_time_never_goes_back(tmp_path: Path) -> None:
    lines = [
        format_request(replace(REQUEST, timestamp_ms=ms))
        for ms in (5.0, 3.5, 6.25)
    ]
    assert [
        request.timestamp_ms for request in read_trace(written(tmp_path, *lines))
    ] == [5.0, 5.0, 6.25]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "truncated"),
        ("[1]", "Expected `object`"),
        (GOOD.replace("27", "-1"), r"timestamp"),
        (GOOD.replace("27", "1e300"), r"timestamp"),
        (GOOD.replace("27", '"noon"'), r"timestamp"),
        (GOOD.replace("[3,", "[-3,"), r"hash_ids"),
        (GOOD.replace("[3,", "[3.5,"), r"hash_ids"),
        (
            GOOD.replace("18446744073709551615", "18446744073709551616"),
            r"hash_ids",
        ),
        (GOOD.replace("700", "-700"), r"input_length"),
        (GOOD.replace('"input_length": 700, ', ""), r"input_length"),
        (GOOD.replace("}", ', "chunk_tokens": 0}'), r"chunk_tokens"),
        ("\udcff", ""),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_no_request_is_reported_with_its_line(
    tmp_path: Path, line: str, reason: str, packed: bool
) -> None:
    path = tmp_path / "trace.jsonl"
    content = "\n".join([GOOD, "", line, GOOD]).encode(errors="surrogateescape")
    path.write_bytes(gzip.compress(content) if packed else content)
    reading = read_trace(path)
    assert next(reading) == REQUEST
    with pytest.raises(ValueError, match=rf"trace\.jsonl:3: .*{reason}"):
        next(reading)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        next(read_trace(tmp_path / "nowhere"))


def test_packed_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(f"{GOOD}\n{GOOD}\n".encode()))
    assert list(read_trace(str(path))) == [REQUEST] * 2


@pytest.mark.parametrize(
    "damage",
    [lambda packed: packed[:-12], lambda packed: packed[:30] + b"?" * 40],
)
def test_a_damaged_gzip_is_an_error_with_its_line(
    tmp_path: Path, damage: object
) -> None:
    assert callable(damage)
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(damage(gzip.compress("\n".join([GOOD] * 1000).encode(), 1)))
    with pytest.raises(
        ValueError, match=r"trace\.jsonl\.gz:\d+: what was packed is damaged"
    ):
        list(read_trace(path))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_trace_is_read_from_standard_input_packed_or_not(
    monkeypatch: pytest.MonkeyPatch, pack: object
) -> None:
    assert callable(pack)
    monkeypatch.setattr(sys, "stdin", Stdin(pack(f"{GOOD}\nnothing\n".encode())))
    reading = read_trace("-")
    assert next(reading) == REQUEST
    with pytest.raises(ValueError, match="-:2: "):
        next(reading)


def test_is_read_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request is there before the last is written."""
    read = []

    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
            read.append(1)
            line = f"{GOOD}\n".encode()
            buffer[: len(line)] = line
            return len(line)

    stdin = Stdin(b"")
    monkeypatch.setattr(stdin, "buffer", io.BufferedReader(Endless()))  # type: ignore[type-var]
    monkeypatch.setattr(sys, "stdin", stdin)
    reading: Iterator[Request] = read_trace("-")
    assert [next(reading) for _ in range(5)] == [REQUEST] * 5
    assert len(read) < 10


def test_the_sample_has_the_requests_it_had() -> None:
    first = sample()[0]
    assert len(sample()) == 2000
    assert first.timestamp_ms == 0.0
    assert first.input_length == 6758
    assert first.output_length == 500
    assert first.hash_ids == tuple(range(14))


def test_the_sample_is_the_beginning_of_the_conversation() -> None:
    assert list(sample()) == list(mooncake("conversation")[:2000])
    assert SAMPLE.stat().st_size < 200_000
