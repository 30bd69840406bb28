"""Takes the help of a command's arguments from its docstring. `app` applies it to all commands."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated, TypeVar, get_type_hints

from typer import Option

_Function = TypeVar("_Function", bound=Callable[..., object])
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
