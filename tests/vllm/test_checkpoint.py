"""Large weight files are named by samples that look at every tensor."""

from __future__ import annotations

import json
import os
import shutil
import struct
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagoda.connectors.identity.checkpoint_files import checkpoint_files
from pagoda.connectors.identity.weight_digests import (
    WHOLE_BYTES,
    file_digest,
    files_digest,
)
from pagoda.connectors.vllm.identity.engine_namespace import weights_digest
from tests.vllm.configs import engine_config, flip

# ---- large files


TENSORS = {
    "embed": 40 << 20,
    "norm": 512,
    "scale": 4,
    "q_proj": 30 << 20,
    "bias": 9000,
    "empty": 0,
    "o_proj": 3 << 20,
}


@pytest.fixture(scope="module")
def large(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, tuple[int, int]]]:
    """A safetensors file too large to be read completely, and where each tensor is in it."""
    header = {}
    at = 0
    for name, size in TENSORS.items():
        header[name] = {
            "dtype": "U8",
            "shape": [size],
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header).encode()
    path = tmp_path_factory.mktemp("large") / "model.safetensors"
    with open(path, "wb") as file:
        file.write(
            struct.pack("<Q", len(text))
            + text
            + os.urandom(1 << 20) * (at >> 20)
            + os.urandom(at % (1 << 20))
        )
    assert path.stat().st_size > WHOLE_BYTES
    body = 8 + len(text)
    return path, {
        n: (body + each["data_offsets"][0], body + each["data_offsets"][1])
        for n, each in header.items()
    }


def test_of_a_large_file_no_tensor_changes_unseen(
    large: tuple[Path, dict[str, tuple[int, int]]],
) -> None:
    path, places = large
    before = file_digest(path)
    assert file_digest(path) == before
    for name, (start, end) in places.items():
        if start < end:
            flip(path, start, end - start)
            assert file_digest(path) != before, name
            flip(path, start, end - start)
    # a half of each: rows of a matrix, some experts of a block
    for name, (start, end) in places.items():
        if end - start > 1:
            flip(path, start + (end - start) // 2, (end - start) // 2)
            assert file_digest(path) != before, name
            flip(path, start + (end - start) // 2, (end - start) // 2)
    flip(path, 8)
    with pytest.raises(OSError, match="header cannot be read"):
        file_digest(path)
    flip(path, 8)
    assert file_digest(path) == before


def test_a_large_file_is_not_read_whole(
    large: tuple[Path, dict[str, tuple[int, int]]],
) -> None:
    from pagoda.connectors.identity.weight_digests import _ranges

    path = large[0]
    with open(path, "rb") as file:
        ranges = _ranges(path, file.fileno(), path.stat().st_size, 1 << 20)
    assert sum(end - start for start, end in ranges) < 8 << 20
    assert ranges == sorted(ranges)
    for a, b in pairwise(ranges):
        assert a[1] < b[0]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == path.stat().st_size


def test_a_large_file_of_another_kind_is_sampled(
    large: tuple[Path, object], tmp_path: Path
) -> None:
    path = Path(shutil.copy(large[0], tmp_path / "model.bin"))
    before = file_digest(path)
    size = path.stat().st_size
    flip(path, size // 2, 1 << 20)
    assert file_digest(path) != before
    flip(path, size // 2, 1 << 20)
    flip(path, size - 1)
    assert file_digest(path) != before
    os.truncate(path, size - 1)
    assert file_digest(path) != before


def test_a_file_that_was_cut_is_refused(
    large: tuple[Path, object], llama: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(llama, tmp_path / "cut"))
    config = engine_config(model)
    shutil.copy(large[0], model / "model.safetensors")
    os.truncate(model / "model.safetensors", large[0].stat().st_size - (5 << 20))
    with pytest.raises(
        ValueError, match=r"was cut: .*give the checkpoint's hash as `weights`"
    ):
        weights_digest(config)


def test_names_and_order_of_files_count(tmp_path: Path) -> None:
    for name, text in (("a", "one"), ("b", "two"), ("c", "one")):
        (tmp_path / name).write_text(text)
    assert files_digest(tmp_path, ["a", "b"]) != files_digest(
        tmp_path, ["b", "c"]
    )
    assert files_digest(tmp_path, ["a"]) != files_digest(tmp_path, ["c"])


def test_how_media_become_input_is_part_of_the_name(
    llama: Path, tmp_path: Path
) -> None:
    """The hash of an image is of its own bytes: other means, sizes or frames are other KV under the
    same hash.
    """
    model = Path(shutil.copytree(llama, tmp_path / "media"))
    config = engine_config(model)
    text, media = (
        SimpleNamespace(multimodal_config=one, trust_remote_code=False)
        for one in (None, object())
    )

    def name(model_config: object) -> str:
        return files_digest(
            model, checkpoint_files(model, model_config, config.load_config)
        )

    names = {"nothing": name(media)}
    assert names["nothing"] == name(text)
    for file in (
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    ):
        (model / file).write_text('{"image_mean": [0.5, 0.5, 0.5]}')
        names[file] = name(media)
        (model / file).write_text('{"image_mean": [0.4, 0.5, 0.5]}')
        names[f"{file} is another"] = name(media)
    assert len(set(names.values())) == 7
    assert name(text) == names["nothing"]
