"""What `pagoda serve` and one open page cost an engine: its CPU seconds a token, with and without
them beside it.

An engine (a `Cache` in a process) stores and retrieves prompts and measures its own CPU time, in
pairs of phases: one with a server and a reader of its stream of events, one without, the order
changing from pair to pair. The engine computes nothing between its calls, so the share of what the
server costs is the largest that it can be.

    python benchmarks/serve_beside.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import Figure, report, say

TOKEN = "a-token-of-this-benchmark"
TARGET = 1.02

_ENGINE = """
import sys, time
import numpy as np
from pagoda import Cache, KVLayout, Namespace
from pagoda.transfer import BlockKV
CHUNKS, PROMPTS = 16, 24
layout = KVLayout.opaque(256, 128 << 10, "serve beside")
blocks = np.zeros((CHUNKS, layout.chunk_bytes), np.uint8)
kv = BlockKV(blocks, layout)
options = {"host_path": sys.argv[1], "host_size": "64MiB", "policy": "lru"}
with Cache(namespace=Namespace("beside"), layout=layout, chunk_tokens=256, **options) as cache:
    number = 0
    print("ready", flush=True)
    for line in sys.stdin:
        began, tokens = time.process_time(), 0
        for _ in range(int(line)):
            number += 1
            prompt = np.arange(CHUNKS * 256, dtype=np.int32) + 5000 * (number // 4)
            hit = cache.retrieve(prompt, kv)
            if hit.num_tokens < len(prompt):
                cache.store(prompt, kv)
            tokens += len(prompt)
        print((time.process_time() - began) / tokens, flush=True)
"""


class Engine:
    """The engine's process."""

    def __init__(self, root: Path) -> None:
        """Start it."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _ENGINE, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, prompts: int) -> float:
        """Return the CPU seconds a token of this many prompts."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{prompts}\n")
        self.process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


@contextmanager
def watched(root: Path) -> Iterator[list[int]]:
    """Run `pagoda serve` and read its events on a thread; yields the list that the size of each
    event is added to.
    """
    code = "import sys; from pagoda_tools.cli import main; sys.exit(main())"
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            code,
            "serve",
            str(root),
            "--listen",
            "127.0.0.1:0",
            "--json",
        ],
        env={**os.environ, "PAGODA_SERVE_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["url"].removeprefix(
            "http://"
        )
        connection = http.client.HTTPConnection(address, timeout=30)
        connection.request(
            "GET", "/events", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        stream = connection.getresponse()
        events = list[int]()
        assert stream.status == 200

        def read() -> None:
            try:
                while line := stream.readline():
                    if line.startswith(b"data: "):
                        events.append(len(line))
            except (OSError, http.client.HTTPException):
                pass  # the server ended

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        yield events
    finally:
        process.terminate()
        process.wait(30)
        reader.join(10)


def measure(pairs: int, prompts: int) -> Figure:
    """Return the median ratio of all pairs."""
    without = list[float]()
    beside = list[float]()
    seen = 0
    with tempfile.TemporaryDirectory(
        prefix="pagoda-bench-", dir="/dev/shm"
    ) as root:
        engine = Engine(Path(root))
        engine.run(prompts)  # warm
        for pair in range(pairs):
            for watch in (False, True) if pair % 2 == 0 else (True, False):
                if not watch:
                    without.append(engine.run(prompts))
                    continue
                with watched(Path(root)) as events:
                    time.sleep(0.2)
                    beside.append(engine.run(prompts))
                    seen += len(events)
            say(f"pair {pair + 1}: {beside[-1] / without[-1]:.3f}")
        engine.close()
    ratios = [b / w for b, w in zip(beside, without, strict=True)]
    runs = {
        "ratios": ratios,
        "without_microseconds": [1e6 * one for one in without],
        "beside_microseconds": [1e6 * one for one in beside],
    }
    note = f"{seen} events were read meanwhile"
    return Figure(
        "serve_beside_cpu", statistics.median(ratios), TARGET, "times", runs, note
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument(
        "--quick", action="store_true", help="few and short pairs: that it runs"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    report(
        [measure(2, 200) if given.quick else measure(10, 8000)],
        as_json=given.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
