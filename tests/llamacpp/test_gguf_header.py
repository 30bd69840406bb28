"""The header of GGUF files, and the digest of a model."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from pagoda.connectors.identity import weight_digests
from pagoda.connectors.identity.gguf_header import read_gguf_header, shards_of
from pagoda.connectors.identity.weight_digests import file_digest
from testbed.tiny_gguf import WINDOW, write_gguf, write_model


def test_values_and_tensors_are_found(models: Path) -> None:
    path = write_model(models, "gemma3")
    header = read_gguf_header(path)
    assert header.values["general.architecture"] == "gemma3"
    assert header.values["gemma3.attention.sliding_window"] == WINDOW
    assert header.spans[0][0] == header.body
    assert header.spans[-1][1] == path.stat().st_size
    for start, stop in header.spans:
        assert start < stop


def test_every_tensor_of_a_large_file_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_digests, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(weight_digests, "_EDGE_BYTES", 100)
    names = [f"blk.{number}.weight" for number in range(20)]
    tensors = {name: np.ones((64, 64), np.float32) for name in names}
    digests = set()
    for changed in (None, *names):
        path = tmp_path / f"{changed}.gguf"
        values = {
            name: tensor * (2 if name == changed else 1)
            for name, tensor in tensors.items()
        }
        write_gguf(path, {"general.architecture": "llama"}, values)
        digests.add(file_digest(path))
    assert len(digests) == len(names) + 1


def test_a_file_that_was_cut_or_is_none_is_an_error(
    models: Path, tmp_path: Path
) -> None:
    data = write_model(models).read_bytes()
    for length in (3, 30, 500, 5000, 20000):
        short = tmp_path / "short.gguf"
        short.write_bytes(data[:length])
        with pytest.raises(OSError):
            read_gguf_header(short)
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + bytes(100))
    with pytest.raises(OSError, match="version 1"):
        read_gguf_header(other)
    other.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + bytes(100))
    with pytest.raises(OSError, match="entries"):
        read_gguf_header(other)


def test_shards_are_found_by_their_names() -> None:
    first = Path("/models/big-00001-of-00003.gguf")
    found = [path.name for path in shards_of(first, {"split.count": 3})]
    assert found == [f"big-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    assert shards_of(first, {}) == [first]
    renamed = Path("/models/big.gguf")
    assert shards_of(renamed, {"split.count": 3}) == [renamed]
