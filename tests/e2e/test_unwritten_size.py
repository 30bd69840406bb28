"""A `CachedModel` without sizes takes what a laptop can spare, and says so in one line."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda.base.store_place import free_bytes
from pagoda.config import Config
from pagoda.config.sizes import auto_bytes
from pagoda.connectors.transformers import CachedModel
from pagoda.connectors.transformers.unwritten_size import UnwrittenSize
from tests.e2e.house import CHUNK
from tests.e2e.tiny import llama, prompt

GIB = 1 << 30
MIB = 1 << 20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory of 256 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256m", "none", str(path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING
        and record.getMessage().startswith("KV is kept")
    ]


def opened(where: Path, *, config: Config | None = None, **options: object):
    settings = {
        "host_path": str(where / "host"),
        "chunk_tokens": CHUNK,
        "worth_it": False,
        "deadline_seconds": 20.0,
    }
    return CachedModel(llama(), config, **{**settings, **options})


def test_without_sizes_it_takes_an_eighth_of_what_is_free_and_says_so(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = free_bytes(small, in_memory=True)
    cached = opened(small)
    taken = cached.cache.stats()["tiers"]["host"]
    assert cached.cache.config.host_size == "auto"
    assert cached.cache.config.disk_bytes == 0
    size = taken["slots"] * cached.layout.slot_bytes
    assert before // 8 - 2 * MIB < size <= before // 8
    (line,) = said(caplog)
    assert f"{taken['slots'] * CHUNK:,} tokens" in line
    assert "pagoda remove" in line
    assert "no disk" in line
    tokens = prompt(5 * CHUNK)
    cached.generate(tokens, max_new_tokens=2, do_sample=False)
    cached.generate(tokens, max_new_tokens=2, do_sample=False)
    assert cached.last.hit.num_tokens > 0
    cached.close()


@pytest.mark.slow
def test_a_later_start_keeps_what_is_stored_when_less_is_free(
    small: Path,
) -> None:
    tokens = prompt(40 * CHUNK)
    with_size = opened(small, host_size="64MiB")
    with_size.generate(tokens, max_new_tokens=1, do_sample=False)
    assert with_size.cache.flush(60.0)
    held = with_size.cache.config.host_bytes
    with_size.close()
    (small / "others").write_bytes(bytes(140 * MIB))
    cached = opened(small)
    assert held - MIB < cached.cache.config.host_bytes <= held
    cached.generate(tokens, max_new_tokens=1, do_sample=False)
    assert cached.last.hit.num_tokens == 39 * CHUNK
    cached.close()


def test_two_at_once_have_one_limit_whatever_is_free(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = opened(small)
    (small / "others").write_bytes(bytes(40 * MIB))
    second = opened(small)
    assert second.cache.config.host_bytes == first.cache.config.host_bytes
    tokens = prompt(5 * CHUNK)
    first.generate(tokens, max_new_tokens=1, do_sample=False)
    second.generate(tokens, max_new_tokens=1, do_sample=False)
    assert second.last.hit.num_tokens == 4 * CHUNK
    assert len(said(caplog)) == 2
    assert "not the" not in caplog.text  # nobody asked for a size
    second.close()
    first.close()


@pytest.mark.parametrize("shared", [True, False])
def test_it_is_never_more_than_1_gib_or_auto(
    shm_root: Path, shared: bool
) -> None:
    found = UnwrittenSize(host_path=str(shm_root / "host"), host_shared=shared)
    assert found.host_size == "auto"
    assert 0 < found.host_bytes <= GIB
    whole = auto_bytes(shm_root if shared else None)
    assert found.host_bytes <= whole
    free = free_bytes(shm_root, in_memory=True)
    assert found.host_bytes <= max(free // 4, MIB)


@pytest.mark.parametrize(
    "source", ["argument", "auto", "environment", "file", "config"]
)
def test_a_size_that_somebody_wrote_is_taken_as_it_is(
    source: str,
    shm_root: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, object] = {}
    if source == "argument":
        options["host_size"] = "2MiB"
    elif source == "auto":
        monkeypatch.setenv("PAGODA_HOST_SHARED", "false")
        options["host_size"] = "auto"
    elif source == "environment":
        monkeypatch.setenv("PAGODA_HOST_SIZE", "2MiB")
    elif source == "file":
        file = tmp_path / "own.toml"
        file.write_text('host_size = "2MiB"\n')
        monkeypatch.setenv("PAGODA_CONFIG", str(file))
    else:
        options["config"] = Config(host_size="2MiB")
    wanted = auto_bytes(None) if source == "auto" else 2 * MIB
    if source == "auto":
        # opening a quarter of the machine's memory would take it from other tests
        from pagoda.connectors.transformers.cached_model import _configured

        assert _configured(None, {"host_size": "auto"}).host_bytes == wanted
        return
    cached = opened(shm_root, **options)
    assert cached.cache.config.host_bytes == wanted
    assert not said(caplog)
    cached.close()


@pytest.mark.slow
def test_where_not_one_chunk_fits_it_runs_without_memory_and_says_why(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (small / "others").write_bytes(bytes(254 * MIB))
    cached = opened(small)
    cached.generate(prompt(3 * CHUNK), max_new_tokens=1, do_sample=False)
    cached.close()
    assert "so there is no host tier" in caplog.text
    assert "an eighth of what is free" in caplog.text
