"""benchmarks/peers.py without LMCache: one line and exit code 2; its ratios are of one round
each.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "peers.py"


@pytest.mark.skipif(
    importlib.util.find_spec("lmcache") is not None,
    reason="LMCache is installed here",
)
@pytest.mark.parametrize("options", [[], ["-S"]])
def test_without_lmcache_one_line_says_how_to_get_it(options: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *options, str(SCRIPT), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1
    assert "make bench-peers" in done.stdout


def test_both_sides_take_turns_and_a_ratio_is_of_one_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import peers

    calls: list[str] = []
    line = peers.Line("name", "GB", 1.0)
    peers.race(
        line,
        lambda n: calls.append(f"ours {n}"),
        lambda n: calls.append(f"theirs {n}"),
        3,
    )
    assert calls[:4] == ["theirs 0", "ours 0", "ours 1", "theirs 1"]
    assert calls[4:] == ["theirs 2", "ours 2", "ours 3", "theirs 3"]
    assert len(line.ours) == len(line.theirs) == 3
    drifting = peers.Line("name", "GB", 2.0, [1.0, 2.0, 4.0], [2.0, 4.0, 2.0])
    assert drifting.ratio == 2.0
    assert drifting.speeds == (1.0, 1.0)
