"""The benchmark of a pool that loses a node, as its documentation starts it, on a short trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.programs import lacking

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "redis_pool.py"
SOURCES = Path(__file__).parents[2] / "src"
CONVERSATIONS = 6
TURNS = 4
CHUNKS = 3
LACKS_REDIS = lacking("redis-server")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # not the folder that testbed is in
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )


def trace(path: Path) -> Path:
    """Write conversations that take turns: each request repeats the one before and adds chunks."""
    lines = []
    for turn in range(1, TURNS + 1):
        for conversation in range(CONVERSATIONS):
            chunks = [
                conversation * 1000 + chunk for chunk in range(turn * CHUNKS)
            ]
            tokens = 512 * len(chunks)
            request = {
                "timestamp": 0,
                "input_length": tokens,
                "output_length": 1,
                "hash_ids": chunks,
            }
            lines.append(json.dumps(request))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
@pytest.mark.skipif(bool(LACKS_REDIS), reason=str(LACKS_REDIS))
def test_what_was_stored_again_hits_when_the_node_is_back(tmp_path: Path) -> None:
    sizes = ("--before", "12", "--away", "6", "--counted", "6")
    done = run(str(trace(tmp_path / "trace")), *sizes, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {
        "runs",
        "places",
        "runs, all prompts share two chunks",
        "places, all prompts share two chunks",
    }
    for figures in found.values():
        assert figures["the same requests again, the node back empty"] == 1.0
        # each conversation was asked for while the node was away: nothing that hits is older than
        # the loss
        assert figures["any placement, the node back empty"] == 1.0
    assert found["runs"]["any placement, a node lost"] == pytest.approx(
        2 / 3, abs=0.01
    )


@pytest.mark.slow
def test_a_trace_that_is_too_short_is_refused(tmp_path: Path) -> None:
    done = run(str(trace(tmp_path / "trace")))
    assert done.returncode != 0
    assert f"has {CONVERSATIONS * TURNS} requests: 1600 are needed" in done.stderr
