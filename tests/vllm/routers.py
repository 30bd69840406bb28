"""Routers of requests, as far as tests need them: services of Dynamo, and what is kept for routers
beside a store.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagoda.ledger.chunk_notes import ChunkNotes
from testbed.servers import free_port
from tests.vllm import stores
from tests.vllm.engines import BLOCK

# for a credit on a busy machine; an engine at rest needs some 0.2 s
SECONDS = 20.0


class Service:
    """A service of Dynamo, in a process."""

    def __init__(self, log: Path, module: str, *options: str) -> None:
        self._port = free_port()
        self._log = log
        command = [
            sys.executable,
            "-m",
            module,
            "--port",
            str(self._port),
            *options,
        ]
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)
        stores.wait_until(
            lambda: self.ask("/workers") is not None, module, SECONDS
        )

    def ask(self, path: str, body: object = None) -> Any:
        """Return its answer; None if there is none."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            data,
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return json.load(answer)
        except OSError:
            return None


class Indexer(Service):
    """Dynamo's indexer, with some engines by their numbers."""

    def __init__(
        self, log: Path, engines: dict[int, int], block: int = BLOCK
    ) -> None:
        """`engines`: the port of each one's events; `block`: tokens of a block."""
        workers = ",".join(
            f"{number}=tcp://127.0.0.1:{port}" for number, port in engines.items()
        )
        options = (
            "--block-size",
            str(block),
            "--model-name",
            "model",
            "--workers",
            workers,
        )
        super().__init__(log, "dynamo.indexer", *options)

    def credit(self, engine: int, tokens: Sequence[int]) -> dict[str, int]:
        """How many of these tokens the indexer believes an engine to have, in host memory and on
        the disk or above.
        """
        found = (
            self.ask("/query", {"token_ids": list(tokens), "model_name": "model"})
            or {}
        )
        of = found.get("instances", {}).get(str(engine), {})
        return {name: of.get(name, 0) for name in ("cpu", "disk")}

    def wait(self, engine: int, tokens: Sequence[int], **credit: int) -> None:
        """Wait until the indexer credits an engine with just that."""
        until = time.monotonic() + SECONDS
        while {
            name: self.credit(engine, tokens)[name] for name in credit
        } != credit:
            assert time.monotonic() < until, (
                self.credit(engine, tokens),
                credit,
                self._log.read_text()[-2000:],
            )
            time.sleep(0.05)


def events_at(port: int) -> dict[str, Any]:
    """The option of an engine that publishes its events on a port."""
    endpoint = f"tcp://*:{port}"
    return {
        "kv_events_config": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
        }
    }


def notes_in(store: Path) -> int:
    """How many chunks of a store have a note. Notes on a disk are written within a second after the
    chunks.
    """
    return len(list(ChunkNotes(store).places()))
