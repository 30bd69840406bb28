"""A library that is not installed: exit code 2, and one line with what to type."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.shelf import done_here, host, one_line

REMOTES = {
    "redis": ("redis://127.0.0.1:1", "redis"),
    "obstore": ("s3://bucket", "objects"),
    "mooncake": ("mooncake://127.0.0.1:1", "mooncake"),
}
COMMANDS = {
    "stats": "stats",
    "top": "top --once",
    "ls": "ls",
    "check": "check",
    "config check": "config check",
    "clear": "clear --yes",
    "explain": "explain --tokens 1,2,3",
}


def hide(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    """Let an import of this library fail, as where it is not installed."""
    for name in list(sys.modules):
        if name == library or name.startswith(f"{library}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("library", REMOTES)
def test_a_configured_store_whose_library_is_missing(
    library: str,
    command: str,
    shm_root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hide(monkeypatch, library)
    url, extra = REMOTES[library]
    done = done_here(
        *command.split(), PAGODA_HOST_PATH=str(shm_root), PAGODA_REMOTE=url
    )
    said = one_line(done.returncode, done.stdout, done.stderr)
    assert f"pip install 'pagodakv[{extra}]'" in said
    assert url in said


def test_what_frees_memory_needs_no_library(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "redis")
    where = {
        "PAGODA_HOST_PATH": str(shm_root),
        "PAGODA_REMOTE": "redis://127.0.0.1:1",
    }
    host(shm_root).close()
    for command in ("clear --local --yes", "remove --yes"):
        done = done_here(*command.split(), **where)
        assert done.returncode == 0, done.stderr


def test_an_engine_is_not_started_without_a_library(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagoda_tools.cli import engine_start

    hide(monkeypatch, "redis")
    # as where vLLM is installed
    monkeypatch.setattr(engine_start, "find_spec", lambda name: object())
    done = done_here(
        "vllm",
        "serve",
        "m",
        PAGODA_HOST_PATH=str(shm_root),
        PAGODA_REMOTE="redis://h",
    )
    said = one_line(done.returncode, done.stdout, done.stderr)
    assert "pip install 'pagodakv[redis]'" in said


@pytest.mark.parametrize(
    "url", ["foo://x", "FOO://x", "file:///x", "foo://user:hidden@x"]
)
def test_a_store_of_another_kind_is_unknown(url: str) -> None:
    done = done_here("config", "show", PAGODA_REMOTE=url)
    said = one_line(done.returncode, done.stdout, done.stderr)
    assert f"unknown store {url.partition('://')[0]}://" in said
    assert "redis://" in said and "s3://" in said
    assert "hidden" not in said
