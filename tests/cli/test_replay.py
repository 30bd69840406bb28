"""`pagoda replay` and `pagoda size` on the shipped sample and on traces small enough to count by
hand.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import cast

import pytest

from pagoda.policy import DEFAULT
from pagoda_tools import replay as pagoda_replay
from pagoda_tools.cli import main
from testbed.patience import Patience
from tests.cli.shelf import answer, done_here, one_line, pagoda, refused
from tests.cli.traces import written

Run = dict[str, float]


def runs(found: dict[str, object]) -> list[Run]:
    """Return the runs of an answer."""
    return cast("list[Run]", found["runs"])


def test_one_tier_has_the_keys_that_programs_ask_for(trace: Path) -> None:
    found = answer("replay", trace, "--capacity-chunks", 4, "--policy", "lru")
    assert found["policy"] == "lru"
    assert found["capacity_chunks"] == 4
    assert found["accesses"] == 10
    assert found["distinct_chunks"] == 6
    assert found["infinite"] == 0.4
    assert found["hit_rate"] == 0.4 == found["optimum"]
    assert found["chunks_written"] == 6
    assert answer("replay", trace, "--capacity-chunks", 4)["policy"] == DEFAULT
    configured = answer(
        "replay", trace, "--capacity-chunks", 4, PAGODA_POLICY="lru"
    )
    assert configured["policy"] == "lru"


def test_each_objective_is_a_run_with_what_it_saves(trace: Path) -> None:
    size = ("--capacity-chunks", 4)
    both = ("--objective", "chunks", "--objective", "compute")
    policies = ("--policy", "hindsight", "--policy", "lru")
    found = answer("replay", trace, *size, *policies, *both)["runs"]
    named = [(run["policy"], run["objective"]) for run in found]
    assert named == [
        ("hindsight", "chunks"),
        ("hindsight", "compute"),
        ("lru", "chunks"),
    ]
    assert all(0 < run["prefill_saved"] < 1 for run in found)
    configured = answer("replay", trace, *size, PAGODA_OBJECTIVE="compute")
    assert configured["objective"] == "compute"
    tiers = ("--host", "16KiB", "--disk", "64KiB", "--bytes-per-token", 1)
    told = answer("replay", trace, *tiers, *both)["runs"]
    assert [run["objective"] for run in told] == ["chunks", "compute"]
    assert all("prefill_saved" in run for run in told)


@pytest.mark.slow
def test_the_sample_is_what_is_replayed_if_no_trace_is_named() -> None:
    assert (
        "Apache"
        in (files("pagoda_tools.replay") / "sample.NOTICE.txt").read_text()
    )
    found = answer("replay", "--capacity-chunks", 2000, "--policy", "lru")
    assert found["trace"] == "sample"
    assert found["requests"] == 2000
    assert found["accesses"] == 54559
    rates = [
        cast("float", found[name]) for name in ("hit_rate", "optimum", "infinite")
    ]
    assert 0 < rates[0] < rates[1] < rates[2]
    assert abs(rates[2] - 0.2890632) < 1e-6
    shown = pagoda(
        "replay", "sample", "--capacity-chunks", 2000, "--policy", "lru"
    ).stdout
    assert f"{100 * rates[0]:.1f} %" in shown
    assert f"{100 * rates[1]:.1f} %" in shown


@pytest.mark.slow
def test_several_policies_and_sizes_in_processes_are_what_each_is_alone(
    trace: Path,
) -> None:
    options = (
        "--policy",
        "lru",
        "--policy",
        "hindsight",
        "--capacity-chunks",
        2,
        "--capacity-chunks",
        3,
    )
    together = runs(answer("replay", trace, *options, "--jobs", 2))
    asked = [f"{run['policy']} {run['capacity_chunks']}" for run in together]
    assert asked == ["lru 2", "hindsight 2", "lru 3", "hindsight 3"]
    for run in together:
        alone = answer(
            "replay",
            trace,
            "--policy",
            run["policy"],
            "--capacity-chunks",
            run["capacity_chunks"],
        )
        assert run == {name: alone[name] for name in run}


def test_what_the_trace_cannot_fill_costs_nothing(trace: Path) -> None:
    found = answer(
        "replay", trace, "--capacity-chunks", 10**15, "--policy", DEFAULT
    )
    assert found["hit_rate"] == found["infinite"] == found["optimum"]
    assert found["capacity_chunks"] == 10**15


def test_a_trace_may_come_from_a_pipe_and_bytes_from_a_model(trace: Path) -> None:
    found = answer(
        "replay",
        "-",
        "--capacity-chunks",
        4,
        "--policy",
        "lru",
        "--model",
        "llama-3-8b",
        stdin=trace.read_text(),
    )
    assert found["hit_rate"] == 0.4
    chunk_bytes = 512 * 2 * 32 * 8 * 128 * 2
    assert found["capacity_bytes"] == 4 * chunk_bytes
    assert found["bytes_written"] == 6 * chunk_bytes
    eight_bits = ("--model", "llama-3-8b", "--kv-dtype", "float8_e4m3fn")
    halved = answer(
        "replay", trace, "--capacity-chunks", 4, "--policy", "lru", *eight_bits
    )
    assert halved["capacity_bytes"] == 2 * chunk_bytes
    plain = done_here(
        "replay", trace, "--capacity-chunks", 4, "--bytes-per-token", 2**20
    ).stdout
    assert "2.00 GiB" in plain


@pytest.mark.slow
def test_the_curve_is_a_table_and_a_png(tmp_path: Path) -> None:
    png = tmp_path / "curve.png"
    options = (
        "--capacity-chunks",
        300,
        "--capacity-chunks",
        1500,
        "--policy",
        "hindsight",
        "--curve",
        "--png",
        png,
    )
    done = done_here("replay", *options, "--model", "llama-3-8b")
    assert done.returncode == 0, done.stderr
    for word in ("hindsight", "lru", "optimum", "300", "1,500", "GiB", str(png)):
        assert word in done.stdout
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_curve_chooses_its_sizes_and_never_passes_the_optimum(
    trace: Path, tmp_path: Path
) -> None:
    found = answer(
        "replay", trace, "--curve", "--png", tmp_path / "x.png", "--points", 4
    )
    sizes = sorted({run["capacity_chunks"] for run in runs(found)})
    assert sizes[-1] == 6
    assert len(sizes) == 4
    assert {str(run["policy"]) for run in runs(found)} == {DEFAULT, "lru"}
    for run in runs(found):
        assert run["hit_rate"] <= run["optimum"] + 1e-9
    assert found["png"] == str(tmp_path / "x.png")


@pytest.mark.slow
def test_without_matplotlib_the_remedy_is_said(
    trace: Path, tmp_path: Path
) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'matplotlib' else find(name, *rest)\n"
    )
    hidden = {
        "PYTHONPATH": f"{tmp_path / 'hidden'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    }
    asked = pagoda(
        "replay", trace, "--curve", "--png", tmp_path / "x.png", **hidden
    )
    assert "pip install 'pagodakv[plot]'" in one_line(
        asked.returncode, asked.stdout, asked.stderr
    )
    usual = pagoda("replay", trace, "--curve", **hidden)
    assert usual.returncode == 0
    assert "optimum" in usual.stdout
    assert "pip install 'pagodakv[plot]'" in usual.stderr


@pytest.mark.slow
def test_size_is_the_smallest_that_was_seen_to_do(tmp_path: Path) -> None:
    part = tmp_path / "part.jsonl"
    with gzip.open(
        str(files("pagoda_tools.replay") / "sample.jsonl.gz")
    ) as sample:
        part.write_bytes(b"".join(islice(sample, 500)))
    found = answer(
        "size", part, "--percent", 50, "--policy", "lru", "--model", "deepseek-v3"
    )
    chunks = cast("int", found["chunks"])
    target = cast("float", found["target_hit_rate"])
    assert cast("float", found["hit_rate"]) >= target
    assert found["bytes"] == chunks * 512 * 61 * 576 * 2
    assert cast("int", found["optimum_chunks"]) < chunks
    smaller = answer(
        "replay", part, "--capacity-chunks", int(chunks * 0.98), "--policy", "lru"
    )
    assert cast("float", smaller["hit_rate"]) < target


@pytest.mark.slow
def test_size_of_a_small_trace_by_hand(trace: Path) -> None:
    found = answer(
        "size",
        trace,
        "--percent",
        100,
        "--policy",
        "lru",
        "--policy",
        "hindsight",
        "--jobs",
        3,
    )
    sizes = {
        str(entry["policy"]): entry["chunks"]
        for entry in cast("list[Run]", found["sizes"])
    }
    assert sizes["optimum"] == 2 == found["optimum_chunks"]
    assert sizes["lru"] == 4
    shown = done_here("size", trace, "--percent", 100, "--policy", "lru").stdout
    assert "100.0 %" in shown
    assert "optimum" in shown


@pytest.mark.slow
def test_size_of_what_is_never_asked_again(tmp_path: Path) -> None:
    done = pagoda("size", written(tmp_path / "unique.jsonl", [(1, 2), (3,)]))
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "nothing can be served" in done.stderr


def test_bad_traces_are_one_line(trace: Path, tmp_path: Path) -> None:
    some = ("--capacity-chunks", 5)
    assert "no such file" in refused("replay", tmp_path / "none", *some).lower()
    assert "is a directory" in refused("size", tmp_path).lower()
    empty = tmp_path / "empty"
    empty.write_text("")
    assert "no request" in refused("size", empty)
    lines = trace.read_text().splitlines(keepends=True)
    broken = tmp_path / "broken"
    broken.write_text("".join([*lines[:3], '{"timestamp": 1}\n']))
    assert f"{broken}:4: " in refused("replay", broken, *some)
    mixed = tmp_path / "mixed"
    mixed.write_text(
        trace.read_text() + written(tmp_path / "other", [(7,)], 256).read_text()
    )
    assert "256 and 512" in refused("replay", mixed, *some)


def test_wrong_use_is_one_line(trace: Path, tmp_path: Path) -> None:
    some = ("--capacity-chunks", 5)
    assert "--capacity-chunks" in refused("replay", trace)
    assert "--capacity-chunks" in refused("replay", trace, "--capacity-chunks", 0)
    assert "did you mean lru?" in refused(
        "replay", trace, *some, "--policy", "lur"
    )
    assert DEFAULT in refused("replay", trace, *some, "--policy", "xyz")
    assert "did you mean llama-3-8b?" in refused(
        "size", trace, "--model", "llama-3-9b"
    )
    assert "--bytes-per-token" in refused("size", trace, "--model", "xyz")
    assert "--kv-dtype" in refused(
        "size", trace, "--model", "llama-3-8b", "--kv-dtype", "fp9"
    )
    assert "--percent" in refused("size", trace, "--percent", 101)
    assert "--percent was given 2 times (50, 90): give it once" in refused(
        "size", trace, "--percent", 50, "--percent", 90
    )
    assert "arc: was removed; write hindsight" in refused(
        "replay", trace, *some, "--policy", "arc"
    )
    assert "did you mean compute?" in refused(
        "replay", trace, *some, "--objective", "computing"
    )
    assert "lru has one order for all; use --policy hindsight" in refused(
        "replay", trace, *some, "--policy", "lru", "--objective", "compute"
    )
    assert "--png needs --curve" in refused(
        "replay", trace, *some, "--png", "x.png"
    )
    assert "no such directory" in refused(
        "replay", trace, "--curve", "--png", tmp_path / "no" / "x.png"
    )
    assert "leave out" in refused(
        "replay", trace, *some, "--host", "1GiB", "--model", "llama-3-8b"
    )
    assert "--jobs" in refused("replay", trace, *some, "--jobs", 0)


@pytest.mark.slow
def test_interrupted_is_130_and_no_process_stays(tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    line = json.dumps(
        {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": []}
    )
    with long.open("w") as file:
        for number in range(60_000):
            file.write(
                line.replace("[]", str([2 * number, 2 * number + 1])) + "\n"
            )
    code = "import sys; from pagoda_tools.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = [
        "replay",
        str(long),
        "--capacity-chunks",
        "500",
        "--capacity-chunks",
        "700",
        "--jobs",
        "2",
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while len(_members(process.pid)) < 3 and process.poll() is None:
        time.sleep(0.05)
    # what a terminal does: all of them get the signal
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert out == ""
    assert "Traceback" not in err
    assert err.count("\n") <= 1
    patience = Patience(10)
    while _members(process.pid) and not patience.ended:
        time.sleep(0.05)
    assert not _members(process.pid)


def _members(group: int) -> list[str]:
    """Return the processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(") ")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(stat.parent.name)
    return found


README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    re.findall(r"^pagoda ((?:replay|size) [^#\n]*\S) +#", README, re.MULTILINE),
)
def test_the_commands_of_the_readme_run(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On the head of the sample, which another test reads as a whole."""
    whole = pagoda_replay.read_trace
    monkeypatch.setattr(
        pagoda_replay, "read_trace", lambda source: islice(whole(source), 400)
    )
    monkeypatch.chdir(tmp_path)
    code = main(command.split())
    said = capsys.readouterr()
    assert code == 0 and "hit rate" in said.out, said.err
    assert [path.name for path in tmp_path.iterdir()] == ["pagoda-curve.png"] * (
        "--curve" in command
    )
