"""`python -m examples.paged_engine`: replays, Ctrl-C, bad input, and its length."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.paged_engine import __main__ as cli
from testbed.patience import Patience
from tests.examples.kit import (
    COMMAND,
    ROOT,
)


@pytest.mark.slow
def test_the_command_replays_and_another_process_hits_the_disk(
    shm_root: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    lines = [
        {
            "id": "a",
            "prompt": "The quick brown fox jumps over the lazy dog. " * 6,
            "max_new_tokens": 24,
        },
        {
            "id": "b",
            "prompt": "And then?",
            "max_new_tokens": 24,
            "after": "a",
            "arrival_seconds": 0.1,
        },
        {
            "id": "c",
            "tokens": list(range(40)),
            "max_new_tokens": 24,
            "salt": "x",
            "arrival_seconds": 0,
        },
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    for number, tier in ((0, None), (1, "disk")):
        args = [
            path,
            "--verify",
            "--json",
            "--host-path",
            shm_root / f"{number}",
            "--disk-path",
            tmp_path / "disk",
        ]
        if number == 0:
            monkeypatch.setattr(sys, "argv", ["paged_engine", *map(str, args)])
            assert cli.main() == 0
            said = capsys.readouterr().out
        else:
            said = subprocess.check_output(
                [*COMMAND, *map(str, args)], cwd=ROOT, text=True, timeout=60
            )
        rows = {row["id"]: row for row in json.loads(said)["requests"]}
        for row in rows.values():
            assert row["identical"] is True
            assert row["first_token_seconds"] > 0
        assert rows["b"]["prompt_tokens"] == rows["a"][
            "prompt_tokens"
        ] + 24 + len("And then?")
        assert rows["b"]["device"] > 256
        assert {
            name: rows["a"][name] > 0 for name in ("device", "host", "disk")
        } == {name: name == tier for name in ("device", "host", "disk")}
        assert (
            len({token for row in rows.values() for token in row["output"]}) >= 20
        )


@pytest.mark.slow
def test_the_command_is_interrupted_cleanly(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(
        json.dumps({"id": "a", "prompt": "x", "arrival_seconds": 600})
    )
    (tmp_path / "temporary").mkdir()
    env = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    running = subprocess.Popen(
        [*COMMAND, str(path)],
        cwd=ROOT,
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    )
    patience = Patience(60)
    while (
        not (made := list((tmp_path / "temporary").glob("paged-*/*/slab")))
        and not patience.ended
    ):
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=30)
    *before, last = said.splitlines()
    assert running.returncode == 130, last
    assert last == "paged_engine: interrupted"
    assert all(line.startswith("made a ") for line in before), (
        "what its tiers take is said when they are made"
    )
    assert made
    assert not made[0].exists()


@pytest.mark.parametrize(
    ("args", "line", "says"),
    [
        (["--blocks", "0"], None, "must be at least 1"),
        (["--host", "3kk"], None, "'kk' is not a unit"),
        (["--host", "4KiB"], None, "no room for one chunk"),
        (["--disk", "1q"], None, "'q' is not a unit"),
        (["--device", "nowhere"], None, "--device nowhere"),
        (["--model", "/nowhere/at/all"], None, "/nowhere/at/all"),
        (["--host-path", "/proc/none"], None, "host memory must be in memory"),
        (
            ["--blocks", "4"],
            {"id": "a", "prompt": "x" * 100},
            "100 + 32 tokens; at least 1 + 1, at most 64",
        ),
        ([], {"id": "a"}, "line 1: "),
        ([], {"id": 1, "tokens": [1]}, "line 1: 'id'"),
        (
            [],
            {"id": "a", "tokens": [1], "documents": [[1]], "question": [1]},
            "line 1: give a prompt, tokens, or doc",
        ),
        ([], {"id": "a", "documents": [[1]]}, "line 1: 'question'"),
        (
            [],
            {"id": "a", "documents": [[1], [256]], "question": [1]},
            "line 1: tokens are numbers from 0 to 255",
        ),
        (
            [],
            {"id": "a", "documents": [[1]], "question": [1], "policy": "best"},
            "one of first_k, deviation",
        ),
        (
            [],
            {"id": "a", "documents": [[1], [1]], "question": [1]},
            "run: pagoda quality",
        ),
        (
            [],
            {"id": "a", "tokens": [256]},
            "line 1: tokens are numbers from 0 to 255",
        ),
        (
            [],
            {"id": "a", "tokens": [1], "table": []},
            "line 1: 'table' is no field",
        ),
        (
            [],
            {"id": "a", "tokens": [1], "after": "b"},
            "line 1: its id was there before, or 'after'",
        ),
        ([], [], "line 1: "),
    ],
)
def test_bad_input_is_one_line(
    args: list[str], line: object, says: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(
        json.dumps(line or {"id": "a", "tokens": [1]}) if line != [] else "[]"
    )
    monkeypatch.setattr(sys, "argv", ["paged_engine", str(path), *args])
    assert cli.main() == 2
    said = capsys.readouterr()
    assert says in said.err
    assert said.err.count("\n") == 1
    assert not said.out


def test_usage_is_shown_without_importing_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *COMMAND[1:], "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "--no-prefix-cache" in done.stdout
    assert "argparse" in done.stderr  # the times of imports are there
    assert "torch" not in done.stderr


@pytest.mark.slow
def test_documents_are_blended_and_the_answer_says_how_much(
    shm_root: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    texts = [
        "You are a helper. ",
        "The first document is this. ",
        "And this is the second one, which is longer. ",
    ]
    line = {
        "id": "a",
        "documents": texts,
        "question": "Why?",
        "max_new_tokens": 8,
        "policy": "first_k",
    }
    path = tmp_path / "requests.jsonl"
    args = ["--verify", "--json", "--host-path", shm_root / "host", "--disk", "0"]
    monkeypatch.setattr(
        sys, "argv", ["paged_engine", *map(str, (path, *args, "--unchecked"))]
    )
    path.write_text(
        json.dumps(line)
        + "\n"
        + json.dumps({**line, "id": "b", "recompute": 1, "after": "a"})
    )
    assert cli.main() == 2
    assert (
        "line 2: give a prompt, tokens, or documents that"
        in capsys.readouterr().err
    )
    path.write_text(
        json.dumps(line) + "\n" + json.dumps({**line, "id": "b", "recompute": 1})
    )
    assert cli.main() == 0
    requests = {
        each["id"]: each
        for each in json.loads(capsys.readouterr().out)["requests"]
    }
    # they end in any order
    first = requests["a"]
    second = requests["b"]
    assert first["identical"] is None
    assert second["identical"] is True
    parts = ("exact", "recomputed", "reused")
    assert (
        sum(first[part] for part in parts)
        == second["exact"]
        == len("".join(texts) + "Why?")
    )
    assert first["exact"] > len(texts[0])
    assert first["reused"] > 50
    assert second["reused"] == 0
    monkeypatch.setattr(sys, "argv", ["paged_engine", *map(str, (path, *args))])
    assert cli.main() == 2
    assert "pagoda quality" in capsys.readouterr().err
