"""The help of an option is what the docstring of its command says of the argument."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, get_args, get_type_hints

import pytest
import typer
from typer import Option

from pagoda import policy
from pagoda.config import Config
from pagoda_tools.cli import main
from pagoda_tools.cli.app import program
from pagoda_tools.cli.docstring_help import as_written, documented


def options(
    command: object, name: str = "pagoda"
) -> Iterator[tuple[str, str | None]]:
    for parameter in command.params:  # type: ignore[attr-defined]
        yield f"{name} {parameter.name}", getattr(parameter, "help", None)
    for below, each in getattr(command, "commands", {}).items():
        yield from options(each, f"{name} {below}")


def test_every_option_of_every_command_has_its_help() -> None:
    found = dict(options(program))
    assert len(found) > 150
    assert not [name for name, text in found.items() if not text]


def test_a_command_imports_no_other() -> None:
    code = (
        "import sys; from pagoda_tools.cli.app import program; "
        "made = program.commands['stats']; assert 'clear' in program.commands; "
        "print(*list(program.commands)); "
        "print(*[name for name in sys.modules if 'cli' in name])"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    names, modules = told.splitlines()
    assert {"stats", "clear", "llama-server", "config"} <= set(names.split())
    assert "pagoda_tools.cli.stats" in modules.split()
    assert not {
        f"pagoda_tools.cli.{other}"
        for other in ("clear", "serve", "top", "config", "vllm", "llama_server")
    } & set(modules.split())


def test_switches_are_shown_without_a_type(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in ((), ("stats",), ("config", "check"), ("vllm",)):
        main([*command, "--help"])
        assert "<bool>" not in capsys.readouterr().out, command


def test_the_help_is_that_of_the_docstring() -> None:
    @documented
    def command(
        file: Annotated[Path | None, Option(metavar="FILE")] = None,
        quick: bool = False,
        other: Annotated[str, Option(help="Said here.")] = "",
    ) -> None:
        """Do it.

        At once.

        Args:
            file: What to read: a file,
                or none.
            quick: Leave out the rest.
        """

    app = typer.Typer()
    app.command()(command)
    made = typer.main.get_command(app)
    assert made.help == "Do it.\n\nAt once."
    texts = {
        parameter.name: parameter.help
        for parameter in made.params
        if parameter.name in ("file", "quick", "other")
    }
    assert texts == {
        "file": "What to read: a file, or none.",
        "quick": "Leave out the rest.",
        "other": "Said here.",
    }


def test_an_argument_that_a_command_does_not_have_is_an_error() -> None:
    def command(file: str = "") -> None:
        """Do it.

        Args:
            fiel: What to read.
        """

    with pytest.raises(KeyError, match="fiel"):
        documented(command)


@pytest.mark.slow
def test_a_shell_completes_commands_and_options() -> None:
    for words, wanted in (
        ("pagoda rem", "remove"),
        ("pagoda stats --j", "--json"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "pagoda"],
            env={
                **os.environ,
                "_PAGODA_COMPLETE": "complete_bash",
                "COMP_WORDS": words,
                "COMP_CWORD": str(words.count(" ")),
            },
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert wanted in done.stdout.split(), done


def test_the_reference_has_the_options_of_the_command_itself() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
    text = page.read_text()
    assert "`python -m pagoda`" in text
    for option in program.params:
        assert f"`pagoda {max(option.opts, key=len)}`" in text


def test_no_summary_of_a_command_is_cut_where_its_source_is() -> None:
    for name, command in program.commands.items():
        summary = (command.help or "").split("\n\n")[0]
        assert "\n" not in summary, name


def commands(
    command: object, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object]]:
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*words, name))


ENGINE_SERVES = (
    ("vllm", "serve"),
    ("sglang", "serve"),
)  # whose --help is the engine's


@pytest.mark.parametrize(
    ("words", "command"),
    [
        pytest.param(words, command, id=" ".join(words) or "pagoda")
        for words, command in commands(program)
        if words not in ENGINE_SERVES
    ],
)
def test_80_columns_show_the_whole_help(
    words: tuple[str, ...],
    command: object,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*words, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    printed = " ".join(shown.replace("│", " ").split())
    texts = [command.help or ""]  # type: ignore[attr-defined]
    texts += [
        getattr(parameter, "help", None) or ""
        for parameter in command.params  # type: ignore[attr-defined]
    ]
    for text in texts:
        # what is wrapped in its column has at most the type's column between its words
        wanted = r"[^│]{1,20}?".join(map(re.escape, as_written(text).split()))
        assert re.search(wanted, printed), text


def test_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    for engine in ("vllm", "sglang"):
        assert main([engine, "--help"]) == 0
        assert "pagodakv[otel]" in capsys.readouterr().out


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_options_of_an_engine_are_in_panels(
    engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([engine, "--help"]) == 0
    shown = capsys.readouterr().out
    panels = {
        panel.splitlines()[0].strip("─╮ "): panel
        for panel in shown.split("╭─ ")[1:]
    }
    assert list(panels)[:4] == [
        "Options",
        "What the engine shares",
        "Host memory",
        "Disk",
    ]
    assert "--host-size" in panels["Host memory"]
    assert "--disk-path" in panels["Disk"]
    assert max(panel.count("--") for panel in panels.values()) <= 12


def test_the_help_of_an_option_names_its_words() -> None:
    known = {
        name: get_args(kind)
        for name, kind in get_type_hints(Config).items()
        if get_args(kind) and isinstance(get_args(kind)[0], str)
    }
    known["policy"] = policy.NAMES
    assert {"write_policy", "log_format", "disk_codec"} < set(known)
    texts = dict(options(program))
    for name, words in known.items():
        for word in words:
            assert f"'{word}'" in (texts[f"pagoda vllm {name}"] or ""), name
