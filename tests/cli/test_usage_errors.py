"""Wrong use is said in one line that fits on a terminal."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda_tools import cli
from pagoda_tools.cli import main

COLUMNS = 80


def fixed_text(node: ast.expr) -> str:
    """What a message has in any case, without the values that are put into it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(fixed_text, node.values))
    return str(node.value) if isinstance(node, ast.Constant) else ""


def messages() -> Iterator[tuple[str, str]]:
    """All messages of wrong use in the sources of the command, and where each is."""
    for file in sorted(Path(cli.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "UsageError"
            ):
                yield f"{file.name}:{node.lineno}", fixed_text(node.args[0])


def test_what_a_message_has_in_any_case_fits_in_a_line() -> None:
    found = dict(messages())
    assert len(found) > 50
    wide = {
        where: text
        for where, text in found.items()
        if len(f"pagoda: {text}") > COLUMNS
    }
    assert not wide


@pytest.mark.parametrize(
    "line",
    [
        "explain",
        "pin",
        "replay",
        "replay --capacity-chunks -3",
        "explain --tokens FILE --chunk-tokens 0",
        "explain --tokens FILE --text TEXT",
        "explain --text TEXT",
        "top --interval 0",
        "ls --limit -1",
        "ls --by place",
        "size --percent 101",
        "stats --nope",
        "nope",
        "warm",
        "warm --bytes 0",
        "remove nowhere",
        "record",
        "serve --listen somewhere",
        "config show --nope",
    ],
)
def test_wrong_use_fits_in_a_line(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("pagoda: ")
        and said.count("\n") == 1
        and len(said) <= COLUMNS + 1
    ), said
