"""A directory for states that is full: what is said names it, nothing is lost, and it passes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Unpack

import pytest

from pagoda.base.errors import StoreError
from pagoda.base.file_space import size_in_words
from pagoda.base.metrics import Reason
from pagoda.cache.call import CallOptions
from pagoda.cache.results import Hit
from pagoda.connectors.llamacpp.state_rows import StateChunks
from pagoda.keys import TokenIds
from pagoda.transfer import Transfer
from testbed.llama_servers import BUILDS, LlamaServer, llama_server
from testbed.tiny_gguf import write_model
from tests.llamacpp.kit import erase, on_disk, opened, prompt_of

LARGE = 16 << 20  # state_bytes that are no limit


class SmallDirectory:
    """The directory of a server, on a file system of 1 MiB."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._filler = path / "filler"

    def fill(self, free_bytes: int = 0) -> None:
        """Leave so many bytes, in steps of a page."""
        with (
            pytest.raises(OSError, match="No space left"),
            open(self._filler, "ab", buffering=0) as file,
        ):
            while file.write(bytes(4096)):
                pass
        with open(self._filler, "ab") as file:
            file.truncate(file.tell() - free_bytes)

    def empty(self) -> None:
        self._filler.unlink()


@contextmanager
def small_directory(server: LlamaServer) -> Iterator[SmallDirectory]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none"]
    done = subprocess.run([*mount, server.states], check=False)
    if done.returncode:
        pytest.skip("needs root to mount a file system")
    try:
        yield SmallDirectory(server.states)
    finally:
        subprocess.run(["umount", "--lazy", server.states], check=True)


@pytest.fixture(scope="module", params=BUILDS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaServer]:
    model = write_model(tmp_path_factory.mktemp("model"), "llama", seed=1)
    with llama_server(model, request.param) as server:
        yield server


def test_a_full_directory_is_told_and_passes(
    server: LlamaServer, tmp_path: Path
) -> None:
    tokens = prompt_of(1)
    longer = [*tokens, *prompt_of(2, 100)]
    with (
        small_directory(server) as directory,
        opened(server, **on_disk(tmp_path), state_bytes=LARGE) as states,
    ):
        server.complete(tokens)
        stored = states.store(tokens, 0).num_tokens
        assert stored >= 576
        for free_bytes in (100 << 10, 0):
            directory.fill(free_bytes)
            erase(server)
            loaded = states.load(tokens, 0)
            server.complete(longer)
            kept = states.store(longer, 0)
            directory.empty()
            for refused in (loaded, kept):
                assert refused.reason is Reason.IO_ERROR
                assert f"{server.states} has no room for a state of" in (
                    refused.detail
                )
                assert f"({size_in_words(free_bytes)} are free)" in refused.detail
                assert "--slot-save-path" in refused.detail
        assert states.store(longer, 0).num_tokens > stored
        erase(server)
        assert states.load(tokens, 0).num_tokens == stored


def test_a_directory_that_is_filled_while_a_state_is_written(
    server: LlamaServer, tmp_path: Path
) -> None:
    """Then the chunks are there, and are not said to have disappeared."""
    tokens = prompt_of(1)
    with (
        small_directory(server) as directory,
        opened(server, **on_disk(tmp_path), state_bytes=LARGE) as states,
    ):
        server.complete(tokens)
        stored = states.store(tokens, 0).num_tokens
        erase(server)
        retrieve = states.cache.retrieve

        def filled_before(
            ids: TokenIds, target: Transfer, **options: Unpack[CallOptions]
        ) -> Hit:
            # not before the ending, which goes to memory
            if isinstance(target, StateChunks):
                directory.fill()
            return retrieve(ids, target, **options)

        states.cache.retrieve = filled_before  # type: ignore[assignment,method-assign]
        loaded = states.load(tokens, 0)
        del states.cache.retrieve
        directory.empty()
        assert "No space left on device" in loaded.detail
        assert f"{server.states} has no room for a state of" in loaded.detail
        assert states.load(tokens, 0).num_tokens == stored


def test_the_start_in_a_full_directory_is_told(
    server: LlamaServer, tmp_path: Path
) -> None:
    with small_directory(server) as directory:
        for free_bytes in (0, 20 << 10):
            directory.fill(free_bytes)
            with pytest.raises(StoreError, match="has no room for a state"):
                opened(server, **on_disk(tmp_path), state_bytes=LARGE)
            directory.empty()
