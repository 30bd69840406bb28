"""The help of an option is what the docstring of its command says of the argument."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer import Option

from pagoda_tools.cli.app import program
from pagoda_tools.cli.docstring_help import documented


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


def test_no_summary_of_a_command_is_cut_where_its_source_is() -> None:
    for name, command in program.commands.items():
        summary = (command.help or "").split("\n\n")[0]
        assert "\n" not in summary, name
