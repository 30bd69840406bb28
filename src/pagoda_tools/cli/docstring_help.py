"""The help of commands: taken from their docstrings, and shown as it is written. `app` applies both
to all commands.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated, TypeVar, get_type_hints

from typer import Context, Option
from typer.core import TyperCommand, TyperGroup, TyperOption

_Function = TypeVar("_Function", bound=Callable[..., object])
HELP_OPTIONS = ["-h", "--help"]
_TAG = re.compile(
    r"\[(?=[a-z#/@][^[]*?\])"
)  # what rich takes for markup, such as [otel]
_ARGUMENT = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def documented(function: _Function) -> _Function:
    """Give each argument its help from the `Args` of the docstring, and remove these from it. The
    lines of a paragraph become one, which the terminal wraps. Changes `function`.
    """
    text, _, arguments = cleandoc(function.__doc__ or "").partition("\n\nArgs:\n")
    function.__doc__ = re.sub(r"(?<=\S)\n(?=[\w`(])", " ", text)
    hints = get_type_hints(function, include_extras=True)
    for name, text in _ARGUMENT.findall(arguments):
        if not hasattr(hints[name], "__metadata__"):
            hints[name] = Annotated[hints[name], Option()]
        hints[name].__metadata__[0].help = " ".join(text.split())
    function.__annotations__ = hints
    return function


def show_as_written(command: object) -> None:
    """Prepare all texts of a command, and of those below it, for the help on a terminal: nothing in
    them is taken for markup and left out, and switches have no type. Changes `command`.
    """
    assert isinstance(command, TyperCommand | TyperGroup)
    command.help = _escaped(command.help)
    # this one is otherwise made when the help is shown
    own_help = command.get_help_option(
        Context(command, help_option_names=HELP_OPTIONS)
    )
    for parameter in (*command.params, own_help):
        if isinstance(parameter, TyperOption):
            parameter.help = _escaped(parameter.help)
            if parameter.is_flag and parameter.metavar is None:
                parameter.metavar = ""
    if isinstance(command, TyperGroup):
        for below in command.commands.values():
            show_as_written(below)


def as_written(text: str) -> str:
    """Return a help text without its escapes, for other places than the terminal. Pure."""
    return text.replace("\\[", "[")


def _escaped(text: str | None) -> str | None:
    return None if text is None else _TAG.sub(r"\\[", text)
