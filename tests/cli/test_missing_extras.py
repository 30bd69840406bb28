"""A library that is not installed: exit code 2, and one line with what to type."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.shelf import LLAMA, done_here, host, one_line, put

REMOTES = {
    "redis": ("redis://127.0.0.1:1", "redis"),
    "obstore": ("s3://bucket", "objects"),
    "mooncake": ("mooncake://127.0.0.1:1", "mooncake"),
}
# these change something, or are about the configuration
REFUSED = ("config check", "clear --yes")
LOOKING = ("stats", "top --once", "ls", "check", "explain --tokens 1,2,3")


def hide(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    """Let an import of this library fail, as where it is not installed."""
    for name in list(sys.modules):
        if name == library or name.startswith(f"{library}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)


@pytest.mark.parametrize("command", LOOKING)
def test_what_looks_shows_what_it_has_and_names_the_library(
    command: str, shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "redis")
    put(host(shm_root), LLAMA, range(16))
    url = "redis://127.0.0.1:1"
    here = {"PAGODA_HOST_PATH": str(shm_root), "PAGODA_REMOTE": url}
    done = done_here(*command.split(), **here)
    assert done.returncode == 2
    assert "host" in done.stdout
    told = " ".join((done.stdout + done.stderr).split())
    assert "pip install 'pagodakv[redis]'" in told
    assert url in told
    # for programs
    shown = json.loads(done_here(*command.split(), "--json", **here).stdout)
    assert "pip install 'pagodakv[redis]'" in json.dumps(shown)


def test_a_library_that_the_lookup_server_or_warm_needs(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "redis")
    url = "redis://127.0.0.1:1"
    host(shm_root).close()
    for command, option in (
        ("config check", "PAGODA_LOOKUP"),
        ("explain --tokens 1,2,3", "PAGODA_LOOKUP"),
        ("warm", "PAGODA_REMOTE"),
    ):
        where = {"PAGODA_HOST_PATH": str(shm_root), option: url}
        done = done_here(*command.split(), **where)
        assert done.returncode == 2, (command, done.stderr)
        assert "pip install 'pagodakv[redis]'" in done.stderr


def test_the_page_is_served_without_a_library(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagoda_tools.cli.web_page_options import page_options

    hide(monkeypatch, "redis")
    monkeypatch.setenv("PAGODA_HOST_PATH", str(shm_root))
    monkeypatch.setenv("PAGODA_REMOTE", "redis://127.0.0.1:1")
    (remote,) = page_options(None, None, None, None).remotes()
    assert "pip install 'pagodakv[redis]'" in remote.error


@pytest.mark.parametrize("command", REFUSED)
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
    "command", ["config check", "llama-server -- llama-server -m x.gguf"]
)
@pytest.mark.parametrize(
    ("library", "extra", "option", "value"),
    [
        ("opentelemetry", "otel", "PAGODA_OTEL", "1"),
        ("zstandard", "zstd", "PAGODA_REMOTE", "redis://127.0.0.1:1?codec=zstd"),
    ],
)
def test_a_library_that_an_option_needs_is_missed_before_the_start(
    library: str,
    extra: str,
    option: str,
    value: str,
    command: str,
    shm_root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hide(monkeypatch, library)
    where = {"PAGODA_HOST_PATH": str(shm_root), option: value}
    done = done_here(*command.split(), **where)
    said = one_line(done.returncode, done.stdout, done.stderr)
    assert f"pip install 'pagodakv[{extra}]'" in said


@pytest.mark.parametrize("command", ["stats", "ls", "check", "clear --yes"])
def test_a_url_is_no_directory(command: str) -> None:
    for url in ("foo://x/y", "redis://user:hidden@x:1"):
        done = done_here(*command.split(), url)
        said = one_line(done.returncode, done.stdout, done.stderr)
        assert "no directory" in said
        assert "remote" in said
        assert "hidden" not in said
        assert ("unknown store foo://" in said) == url.startswith("foo")


@pytest.mark.parametrize(
    "url", ["foo://x", "FOO://x", "file:///x", "foo://user:hidden@x"]
)
def test_a_store_of_another_kind_is_unknown(url: str) -> None:
    done = done_here("config", "show", PAGODA_REMOTE=url)
    said = one_line(done.returncode, done.stdout, done.stderr)
    assert f"unknown store {url.partition('://')[0]}://" in said
    assert "redis://" in said
    assert "s3://" in said
    assert "hidden" not in said
