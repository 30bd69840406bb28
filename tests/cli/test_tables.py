"""Every command's tables are whole in 80 columns with three tiers that have something, in a
terminal and in a pipe.
"""

from __future__ import annotations

import io
import os
import pty
import re
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from rich.cells import cell_len

from pagoda.keys import Namespace
from pagoda.ledger import admin
from pagoda_tools.cli import main, printing
from pagoda_tools.cli.text_tables import table_lines, wrapped
from testbed.servers import Server
from tests.cli.shelf import disk, host, put, save
from tests.cli.test_remotes import share
from tests.cli.traces import PROMPTS, written

MODEL = Namespace(
    "meta-llama/Llama-3.1-8B-Instruct", kv_dtype="bfloat16", salt="a tenant"
)
PROMPT = list(range(80))
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def machine(
    shm_root: Path,
    tmp_path: Path,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A host tier, a disk tier and a server, each with chunks of a model with a long name, and
    large counters.
    """
    ledger = host(shm_root / "host")
    put(ledger, MODEL, PROMPT[:32])
    admin.pin(ledger, put(ledger, MODEL, PROMPT[:16]), "pagoda")
    ledger.count(
        {
            "lookups": 123_456_789_012,
            "hits": 98_765_432_109,
            "asked_tokens": 10**15,
            "hit_tokens": 9 * 10**14,
            "hit_tokens_host": 6 * 10**14,
            "hit_tokens_disk": 2 * 10**14,
            "hit_tokens_remote": 10**14,
            "stored_chunks": 12_345_678,
            "stored_bytes": 10**15,
            "loaded_chunks": 9_999_999,
            "loaded_bytes": 10**15,
            "evicted_chunks": 12_345_678,
            "miss_other_namespace": 12_345_678,
            "drop_not_admitted": 12_345_678,
        }
    )
    ledger.close()
    with disk(tmp_path / "disk") as tier:
        save(tier, MODEL, PROMPT[:64])
    url = f"{server.url}/0?prefix=t{time.monotonic_ns()}"
    share(url, MODEL, 5)
    written(tmp_path / "trace.jsonl", PROMPTS)
    (tmp_path / "tokens").write_text(" ".join(map(str, PROMPT)))
    (tmp_path / "pagoda.toml").write_text("chunk_tokens = 16\n")
    for name in [name for name in os.environ if name.startswith("PAGODA_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
        "PAGODA_CONFIG": str(tmp_path / "pagoda.toml"),
        "PAGODA_HOST_PATH": str(shm_root / "host"),
        "PAGODA_HOST_SIZE": "64MiB",
        "PAGODA_DISK_PATH": str(tmp_path / "disk"),
        "PAGODA_DISK_SIZE": "1GiB",
        "PAGODA_REMOTE": url,
        "COLUMNS": "80",
        "TERM": "xterm-256color",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def in_pipe(*args: object) -> tuple[int, str]:
    """Run the command; return its code and what it wrote to a stdout that is no terminal."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        code = main([str(argument) for argument in args])
    return code, out.getvalue()


def in_terminal(*args: object) -> tuple[int, str]:
    """Run the command; return its code and what it wrote to a real terminal."""
    ours, theirs = pty.openpty()
    pieces: list[bytes] = []

    def read() -> None:
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other end was closed
                return
            pieces.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with (
            os.fdopen(theirs, "w") as terminal,
            redirect_stdout(terminal),
            redirect_stderr(io.StringIO()),
        ):
            code = main([str(argument) for argument in args])
    finally:
        reader.join(30)
        os.close(ours)
    text = b"".join(pieces).decode()
    assert "\x1b[" in text  # it was taken for a terminal
    return code, ESCAPES.sub("", text).replace("\r\n", "\n")


# what is run, and the headings that must be whole
COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "stats": (
        ["stats"],
        [
            "store ready free pinned members",
            "counted in lookups hits hit tokens from host from disk from remote",
            "store stored bytes loaded bytes evicted damaged",
            "store namespace chunks",
            "tier state used limit address",
            "store chunks owner",
        ],
    ),
    "ls": (["ls"], ["store key position"]),
    "ls --by namespace": (
        ["ls", "--by", "namespace"],
        ["store namespace chunks"],
    ),
    "check": (
        ["check", "--read"],
        ["tier verdict chunks read damaged directory", "tier verdict address"],
    ),
    "explain": (
        ["explain", "--tokens", "{}/tokens"],
        ["tier tokens share why not more"],
    ),
    "pin": (["pin", "--tokens", "{}/tokens"], ["tier tokens model"]),
    "config show": (["config", "show"], ["option from"]),
    "replay": (
        [
            "replay",
            "{}/trace.jsonl",
            "--capacity-chunks",
            "4",
            "--bytes-per-token",
            "4096",
        ],
        ["policy chunks bytes hit rate saved optimum of what is possible"],
    ),
    "replay by tier": (
        [
            "replay",
            "{}/trace.jsonl",
            "--host",
            "64MiB",
            "--disk",
            "1GiB",
            "--bytes-per-token",
            "4096",
            "--prefill",
            "1000",
        ],
        [
            "policy tier size",
            "policy hit rate optimum prefill tokens saved of all saved",
            "p90 p99",
        ],
    ),
    "size": (
        [
            "size",
            "{}/trace.jsonl",
            "--bytes-per-token",
            "4096",
            "--percent",
            "100",
        ],
        ["policy chunks bytes hit rate of what is possible"],
    ),
    "clear": (["clear", "--yes"], ["tier chunks cleared directory"]),
    "remove": (["remove", "--yes"], ["tier freed directory"]),
}


@pytest.mark.parametrize("run", [in_pipe, in_terminal])
def test_no_line_is_wider_than_80_and_no_value_is_cut(
    machine: Path, run: Callable[..., tuple[int, str]]
) -> None:
    for name, (command, headings) in COMMANDS.items():
        code, text = run(*(part.format(machine) for part in command))
        assert code == 0, text
        assert "…" not in text
        assert "..." not in text
        for line in text.splitlines():
            # only what is alone on its line may be longer: a path, an address, a model
            assert cell_len(line) <= 80 or re.fullmatch(
                r"(  |file )?\S*[/:]\S*", line
            ), f"{name}: {line}"
        for heading in headings:
            assert heading in re.sub(" +", " ", text), (
                f"{name}: {heading!r} in\n{text}"
            )
        if name in ("stats", "ls", "ls --by namespace", "explain", "pin"):
            assert re.search(
                r"meta-llama/Llama-3.1-8B-Instruct kv_dtype=bfloat16 salt=\S{8,}",
                text,
            ), text


def test_wide_shows_all_columns(machine: Path) -> None:
    for command, more in (
        (["stats"], ["slots", "unbacked", "reserved", "leased", "slot "]),
        (["ls"], ["namespace", "tokens", "flags"]),
        (["ls", "--by", "namespace"], ["tokens", "oldest use"]),
        (["check"], ["unreachable", "stale hints"]),
        (
            ["replay", str(machine / "trace.jsonl"), "--capacity-chunks", "4"],
            ["written"],
        ),
    ):
        usual = in_pipe(*command)[1]
        wide = in_pipe(*command, "--wide")[1]
        for heading in more:
            assert heading in wide, wide
        assert not all(heading in usual for heading in more)


@pytest.mark.slow
def test_bench_is_whole_too(machine: Path) -> None:
    code, text = in_terminal("bench", "--seconds", 1, "--chunk-size", "1MiB")
    assert code == 0
    assert max(map(cell_len, text.splitlines())) <= 80
    assert "GB/s  limit GB/s  ratio  threads  turns" in text


def test_a_wider_terminal_shows_what_is_long_in_its_row(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, text = in_terminal("stats")
    assert code == 0
    assert re.search(
        rf"host:layout .*  {os.environ['PAGODA_HOST_PATH']}/layout\n", text
    ), text


@pytest.mark.parametrize("columns", [0, 1, 2])
def test_a_terminal_of_no_width_is_printed_to(
    machine: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    ids = machine / "prompt"
    ids.write_text(" ".join(map(str, PROMPT)))
    for command in (
        ("stats",),
        ("top", "--once"),
        ("explain", "--tokens", str(ids)),
    ):
        code, text = in_pipe(*command)
        assert code == 0 and "host" in text, text


def test_cells_are_aligned_and_wrapped() -> None:
    assert table_lines(
        ["tier", "chunks", "where"],
        [("host", 12345, "/a"), ("disk", 6, "/b/c")],
        80,
    ) == [
        "tier  chunks  where",
        "host  12,345  /a",
        "disk       6  /b/c",
    ]
    long = [("host", 12345, "/" + "a" * 70), ("disk", 6, "/b/c")]
    assert table_lines(["tier", "chunks", "where"], long, 80)[1:] == [
        "host  12,345",
        "  /" + "a" * 70,
        "disk       6  /b/c",
    ]
    assert table_lines(["wide", "n"], [("日本", 1)], 80) == ["wide  n", "日本  1"]
    assert table_lines(["a", "b"], [("x", "1\n2")], 80) == [
        "a  b",
        "x  1",
        "   2",
    ]
    assert table_lines(["a", "b"], [], 80) == ["a  b"]
    counts = [
        printing.count(n)
        for n in (9_999_999, 10**7, 123_456_789, 10**10, 2 * 10**13)
    ]
    assert counts == ["9,999,999", "10.0 M", "123.5 M", "10.0 G", "20.0 T"]
    for line in wrapped("a b " * 100, 80):
        assert len(line) <= 80


def test_what_is_stored_cannot_steer_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A model's name, or what a server answered, is foreign text."""
    evil = "llama\x1b]0;owned\x07\x9b2J\r"
    printing.print_table("", ("model", "chunks"), [(evil, 1)])
    printing.print_text(evil)
    printing.note(evil)
    assert main(["stats", f"/{evil}"]) == 2
    shown = "".join(capsys.readouterr())
    assert shown.count(r"llama\x1b]0;owned\x07\x9b2J") == 4
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(shown)
