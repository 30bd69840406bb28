"""What names a LoRA adapter: the content of its files, whatever its name, number and path."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda.connectors.identity.lora_adapters import Adapters, lora_name
from pagoda.connectors.identity.weight_digests import file_digest
from tests.vllm import models
from tests.vllm.configs import flip

# ---- adapters


def request_of(
    path: Path | str, number: int = 1, name: str = "adapter", **more: Any
) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(path), **more)


def name_of(path: Path) -> str | None:
    """What a process that meets this adapter first calls it."""
    return Adapters().name(request_of(path))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return models.make_lora(tmp_path / "adapter", 1)


def test_adapters_are_named_by_content(adapter: Path, tmp_path: Path) -> None:
    met = Adapters()
    copied = shutil.copytree(adapter, tmp_path / "elsewhere")
    other = models.make_lora(tmp_path / "other", 2)
    name = met.name(request_of(adapter))
    assert name
    assert met.name(request_of(adapter)) == name
    assert met.name(request_of(copied, 2, "another name")) == name
    assert met.name(request_of(other, 3)) not in (name, None)
    assert met.name(request_of(adapter, 4, is_3d_lora_weight=True)) != name
    assert met.name(None) == ""
    config = json.loads((copied / "adapter_config.json").read_text())
    (copied / "adapter_config.json").write_text(
        json.dumps(config | {"lora_alpha": 1})
    )
    assert name_of(copied) not in (name, None), (
        "the same matrices, scaled otherwise"
    )


def test_an_adapter_that_cannot_be_read_has_no_name(
    adapter: Path, tmp_path: Path
) -> None:
    assert name_of(tmp_path / "nowhere") is None
    assert Adapters().name(request_of("org/on-no-disk")) is None
    assert (
        Adapters().name(SimpleNamespace(lora_int_id=1, lora_name="in memory"))
        is None
    )
    (adapter / "adapter_model.safetensors").rename(
        adapter / "weights.safetensors"
    )
    assert name_of(adapter) is None
    (adapter / "weights.safetensors").rename(adapter / "adapter_model.pt")
    assert name_of(adapter) is not None
    (adapter / "adapter_config.json").unlink()
    assert name_of(adapter) is None


def test_an_adapter_whose_files_change_is_not_named_again(
    adapter: Path, tmp_path: Path
) -> None:
    """vLLM may hold the old weights or the new ones: it is unknown which, so nothing is stored."""
    met = Adapters()
    name = met.name(request_of(adapter))
    kept = shutil.copytree(adapter, tmp_path / "kept")
    shutil.copy(
        models.make_lora(tmp_path / "new", 2) / "adapter_model.safetensors",
        adapter,
    )
    assert met.name(request_of(adapter)) is None
    assert met.name(request_of(adapter, 2)) not in (name, None), (
        "a new number is loaded anew"
    )
    assert met.name(request_of(kept, 1)) is None, (
        "the number stands for the first files"
    )
    assert met.name(request_of(kept, 3)) == name


def test_a_changed_file_with_the_old_time_is_noticed(adapter: Path) -> None:
    met = Adapters()
    assert met.name(request_of(adapter))
    file = adapter / "adapter_model.safetensors"
    stat = file.stat()
    other = adapter / "new"
    shutil.copy(file, other)
    flip(other, 5000)
    other.rename(file)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert met.name(request_of(adapter)) is None


def test_a_link_that_moves_on_does_not_take_its_number_along(
    adapter: Path, tmp_path: Path
) -> None:
    other = models.make_lora(tmp_path / "other", 2)
    link = tmp_path / "latest"
    link.symlink_to(adapter)
    met = Adapters()
    assert met.name(request_of(link)) == name_of(adapter)
    link.unlink()
    link.symlink_to(other)
    assert met.name(request_of(link)) is None
    assert met.name(request_of(link, 2)) == name_of(other)


def test_files_are_read_once(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagoda.connectors.identity import lora_adapters

    read: list[Path] = []
    monkeypatch.setattr(
        lora_adapters,
        "file_digest",
        lambda path: read.append(path) or file_digest(path),
    )
    met = Adapters()
    names = {met.name(request_of(adapter, number)) for number in (1, 1, 2, 2)}
    assert len(names) == 1
    assert len(read) == 2


def test_many_threads_ask_at_once(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    paths = [models.make_lora(tmp_path / f"{seed}", seed) for seed in range(1, 5)]
    with ThreadPoolExecutor(8) as threads:
        asked = [
            (path, threads.submit(lora_name, request_of(path, 1000 + i)))
            for i, path in enumerate(paths)
        ] * 4
        found = {(path, future.result()) for path, future in asked}
    assert len(found) == len({name for _, name in found}) == 4
    assert None not in {name for _, name in found}
