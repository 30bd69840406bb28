"""benchmarks/gpu without a GPU: the reason of the skip, every measuring function, tables equal to
the JSON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import limits_cuda
from benchmarks.gpu import ready, table, transfer
from benchmarks.gpu.crossing import Field, WrongBytes, crossing
from benchmarks.gpu.entrants import (
    BlockLoop,
    Entrant,
    Move,
    Ours,
    OurWay,
    TorchSelect,
)
from benchmarks.gpu.plan import FULL, QUICK, TINY
from benchmarks.gpu.room import Room
from benchmarks.gpu.stock import FORMS, POISON, Form, Stock, Turn
from benchmarks.limits_cuda import Direction, Link
from pagoda.transfer.gpu.device import CpuDevice

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
DIRECTIONS: tuple[Direction, ...] = ("down", "up")
no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU: nothing is skipped"
)


def run(*arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, [path, os.environ["PYTHONPATH"]]))
    environment = dict(os.environ, PYTHONPATH=paths)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


# ---- where there is no GPU


@no_gpu
def test_it_says_in_one_line_why_it_skips(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert transfer.main([]) == 0
    assert re.fullmatch(
        r"skipped: torch \S+ .+ ; on a machine with an NVIDIA GPU: make bench-gpu\n",
        capsys.readouterr().out,
    )


@no_gpu
def test_the_json_says_why_it_skips(capsys: pytest.CaptureFixture[str]) -> None:
    assert transfer.main(["--json", "--quick"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["skipped"] in found["line"]
    assert table.tables(found).startswith("Skipped: torch ")


def test_without_torch_it_skips() -> None:
    done = run("-S", "benchmarks/gpu/transfer.py")
    assert done.returncode == 0
    assert "skipped: torch cannot be imported" in done.stdout


def torch_with_a_gpu(directory: Path) -> str:
    """A package that says what torch says on a machine with a GPU, for a Python that has nothing
    else.
    """
    package = directory / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(
        "class cuda:\n is_available = staticmethod(lambda: True)\n"
        "class version:\n cuda = '13.0'\n__version__ = '2.11.0'\n"
    )
    return str(directory)


def test_what_is_missing_beside_a_gpu_is_named_with_the_remedy(
    tmp_path: Path,
) -> None:
    done = run(
        "-S", "benchmarks/gpu/transfer.py", path=torch_with_a_gpu(tmp_path)
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith(" -m pip install triton numpy blake3 msgspec")
    assert not done.stdout


@pytest.mark.slow
def test_it_needs_no_more_than_is_named_and_the_limits_nothing_of_pagoda() -> (
    None
):
    others = {"lmdb", "pydantic", "rich", "typer", "xxhash", *ready.BENCHMARK}
    code = (
        "import sys, benchmarks.limits_cuda\n"
        "assert not any(name.startswith('pagoda') for name in sys.modules)\n"
        "import benchmarks.gpu.bench, pagoda.transfer.gpu.kernels\n"
        f"print(*[name for name in {sorted(others)} if name in sys.modules])"
    )
    done = run("-c", code)
    assert done.stdout.split() == sorted(ready.BENCHMARK), done.stderr


def test_what_the_tests_need_is_named() -> None:
    done = run("-S", "benchmarks/gpu/ready.py", "pytest")
    assert done.returncode == 2
    assert done.stderr.endswith(
        " -m pip install pytest triton numpy blake3 msgspec lmdb xxhash\n"
    )
    assert run("benchmarks/gpu/ready.py", "pytest").returncode == 0


# ---- every measuring function, on a CPU


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    done = run(
        "tests/benchmarks/tiny_gpu.py",
        "--json",
        "--seed",
        "7",
        "--record",
        str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["errors"]
    assert not found["left_out"]
    assert found["seed"] == 7
    shapes = {"8b", "mla"}
    ways = {"chosen", "direct", "staged", "runs"}
    raced = [
        each for each in found["crossing"] if "per block" in each["entrants"]
    ]
    assert len(raced) == len(shapes) * len(FORMS) * len(TINY.chunks) * len(
        DIRECTIONS
    )
    assert {each["shape"] for each in raced} == shapes
    for each in raced:
        assert set(each["entrants"]) == {*ways, "torch", "per block"}
        for lap in each["entrants"].values():
            assert len(lap["ratio"]) == TINY.rounds
        assert (
            f"{each['direction']}_{each['shape']}_{each['form']}_{each['chunks']}"
            in found["targets"]
        )
    assert {each["way"] for each in found["beside"]} == ways
    assert {each["way"] for each in found["layers"]} == ways
    assert len(found["register"]) == 2
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "gpu-cpu-tiny.json",
        "gpu.md",
    ]
    for title in (
        "Across the link",
        "Beside a stream",
        "Layer by layer",
        "Registering host memory",
    ):
        assert f"### {title}" in (tmp_path / "gpu.md").read_text()


def test_only_takes_parts_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        transfer.main(["--device", "cpu", "--tiny", "--only", "beside,wings"])
        == 2
    )
    said = capsys.readouterr().err
    assert "not wings" in said
    assert "cross_8b" in said


def test_when_time_is_over_the_rest_is_named() -> None:
    from benchmarks.gpu.bench import Bench

    bench = Bench(
        replace(TINY, budget_seconds=-1.0), CPU, lambda _: CpuDevice(), 1, None
    )
    bench.parts["cross_8b"]()
    assert len(bench.left_out) == len(FORMS) * len(TINY.chunks) * len(DIRECTIONS)
    assert not bench.found["crossing"]


@pytest.mark.parametrize("plan", [FULL, QUICK])
def test_plans_name_shapes_that_they_have(plan: object) -> None:
    assert plan in (FULL, QUICK)
    for key, _ in FULL.layers:
        assert FULL.shape(key) is not None
    for shape in FULL.shapes:
        assert shape.run_bytes % 8 == 0


class Broken:
    """Moves a turn and then spoils one byte of it, somewhere."""

    name = "broken"
    most_chunks = 1 << 20

    def prepare(self, stock: Stock, turn: Turn, direction: Direction) -> Move:
        move = TorchSelect().prepare(stock, turn, direction)

        def broken() -> None:
            move()
            turn.slots[-1][stock.shape.chunk_bytes - 1] ^= 1

        return broken


class Idle(Broken):
    """Moves nothing."""

    def prepare(self, stock: Stock, turn: Turn, direction: Direction) -> Move:
        return lambda: None


def field(form: Form, direction: Direction, shape: int = 0) -> tuple[Field, Ours]:
    kind = TINY.shapes[shape]
    room = Room(CPU, 4 * 4096, shm=None)
    return Field(
        Stock(kind, form, 32, CPU, 3),
        room,
        Link(CPU, TINY.link_bytes),
        direction,
        2,
        1,
    ), Ours(lambda _: CpuDevice())


@pytest.mark.parametrize("racer", [Broken(), Idle()])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_a_copy_that_is_not_bit_for_bit_is_not_measured(
    form: Form, direction: Direction, racer: Entrant
) -> None:
    place, ours = field(form, direction)
    with pytest.raises(WrongBytes, match=racer.name):
        crossing(place, [racer], ours)


@pytest.mark.parametrize("shape", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_all_entrants_move_the_same_bytes(form: Form, shape: int) -> None:
    """Slots are [layer][plane][block], blocks are where the table says: computed here with numpy,
    apart from all.
    """
    place, ours = field(form, "down", shape)
    stock = place.stock
    turn = place.turn(1, 2)
    count = stock.shape.blocks_a_chunk
    planes = [plane.numpy().view(np.uint8) for plane in stock.planes]
    wanted = [
        np.concatenate(
            [
                plane[turn.table[chunk * count : (chunk + 1) * count]].ravel()
                for plane in planes
            ]
        )
        for chunk in range(2)
    ]
    for racer in (
        OurWay("chosen", ours.engine("chosen")),
        TorchSelect(),
        BlockLoop(),
    ):
        stock.spoil_slots(turn.slots)
        for slot in turn.slots:
            assert (slot[: stock.shape.chunk_bytes] == POISON).all()
        racer.prepare(stock, turn, "down")()
        for slot, bytes_wanted in zip(turn.slots, wanted, strict=True):
            assert (slot[: stock.shape.chunk_bytes] == bytes_wanted).all(), (
                racer.name
            )
        stock.spoil_blocks(turn)
        assert not stock.same(turn)
        racer.prepare(stock, turn, "up")()
        for chunk, slot in enumerate(turn.slots):
            ids = turn.table[chunk * count : (chunk + 1) * count]
            there = np.concatenate([plane[ids].ravel() for plane in planes])
            assert (there == slot[: stock.shape.chunk_bytes]).all(), racer.name


def test_tables_are_random_and_name_no_block_twice() -> None:
    stock = Stock(TINY.shapes[0], "blocks", 32, CPU, 3)
    first = stock.table(8)
    second = stock.table(8)
    assert (
        len(set(first.tolist())) == len(first) == 8 * stock.shape.blocks_a_chunk
    )
    assert (first != second).any()
    assert (np.diff(first) != 1).any()


def test_what_nvidia_smi_says_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program.write_text(
        '#!/bin/sh\necho "$@" >&2\necho "580.1, 5, 5, 16, 16, 1980 MHz, 1980 MHz, 700.00 W, 31, '
        'Disabled"\n'
    )
    program.chmod(0o700)
    found = limits_cuda._smi("1b-2c")
    assert found["driver_version"] == "580.1"
    assert found["mig_mode_current"] == "Disabled"
    assert found["pcie_link_gen_current"] == "5"
    assert found["pcie_link_width_current"] == "16"
    for bad in ("exit 9", "echo '[N/A]'", "true"):
        program.write_text(f"#!/bin/sh\n{bad}\n")
        assert limits_cuda._smi("") == {}


# ---- tables


def document() -> dict[str, object]:
    lap = {"gb_per_second": [50.0, 52.0, 51.0], "ratio": [0.91, 0.95, 0.93]}
    slow = {"gb_per_second": [10.0], "ratio": [0.18]}
    cell = {
        "shape": "8b",
        "form": "pools",
        "run_bytes": 32768,
        "registered": True,
        "chunks": 8,
        "direction": "down",
        "chosen": "staged",
        "link": {"gb_per_second": [55.0, 54.0, 56.0]},
        "entrants": {"chosen": lap, "torch": slow},
    }
    return {
        "plan": "full",
        "date": "2026-01-02",
        "seconds": 1.5,
        "machine": {"cpu": "a processor", "cores": 3},
        "gpu": {
            "name": "NVIDIA H200",
            "driver_version": "1.2",
            "pcie_link_gen_current": "5",
            "sms": 132,
            "pcie_link_width_current": "16",
        },
        "host_memory": [
            {
                "kind": "private memory",
                "nbytes": 8,
                "registered_bytes": 4,
                "trouble": "limit",
            }
        ],
        "crossing": [cell, cell | {"registered": False}],
        "beside": [],
        "layers": [],
        "register": [],
        "left_out": [{"cell": "up 70b", "why": "time"}],
        "errors": [],
        "down_8b_pools_8": 0.93,
        "up_8b_pools_8": 0.5,
        "notes": {"up_8b_pools_8": "half of it"},
        "targets": {
            "down_8b_pools_8": {"target": 0.9, "ok": True},
            "up_8b_pools_8": {"target": 0.9, "ok": False},
        },
    }


def test_a_table_says_what_the_json_says() -> None:
    text = table.tables(document())
    assert "## NVIDIA H200, 2026-01-02" in text
    assert "driver 1.2, PCIe generation and width 5 x16" in text
    assert "private memory, not registered (limit)" in text
    row = (
        "| 8b | a pool a layer, runs of 32 KiB | 8 | device -> host | 55.00 | 51.00 | 0.930 "
        "| >= 0.90 ok | staged |"
    )
    assert row in text
    assert "| a bounce buffer |  |  |  | 10.00 |" in text
    assert "- `up_8b_pools_8`: 0.500 (half of it)" in text
    assert "- up 70b: time" in text
    assert "### Failed" not in text
    assert "### Layer by layer" not in text


def test_a_heading_says_what_kind_of_run_it_was() -> None:
    text = table.tables(
        document()
        | {"plan": "quick", "parts": ["beside", "layers"], "complete": False}
    )
    assert (
        "## NVIDIA H200, 2026-01-02, quick run, only beside, layers, stopped before its end\n"
        in text
    )


def test_the_page_of_nothing_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table.main([]) == 0
    assert table.NOTHING in capsys.readouterr().out
    assert table.main([str(tmp_path / "missing.json")]) == 2
    (tmp_path / "gpu-one.json").write_text(json.dumps(document()))
    assert (
        table.main(
            [str(tmp_path / "gpu-one.json"), "--write", str(tmp_path / "page.md")]
        )
        == 0
    )
    table.write(tmp_path)
    assert (tmp_path / "page.md").read_text() == (tmp_path / "gpu.md").read_text()


def test_the_page_in_the_docs_is_what_its_json_makes() -> None:
    directory = ROOT / "docs" / "design" / "benchmarks"
    recorded = table.read(directory.glob("gpu-*.json"))
    assert (directory / "gpu.md").read_text(encoding="utf-8") == table.page(
        recorded
    )
