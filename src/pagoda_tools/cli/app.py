"""The commands and their names. A command is imported and made when it is asked for: to make all of
them takes longer than most of them run.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, cast

import typer
from typer.core import TyperGroup

from pagoda_tools.cli.docstring_help import (
    HELP_OPTIONS,
    documented,
    show_as_written,
)

if TYPE_CHECKING:
    from typer._click import Command

_ROOM = "pagoda_tools.cli"


class CommandTable(UserDict[str, "Command"]):
    """The commands by name, in the order of the help. Not thread-safe."""

    def __init__(self, makers: dict[str, Callable[[], Command]]) -> None:
        """`makers`: each makes one command, when it is first asked for."""
        super().__init__()
        self._makers = makers
        # a command takes the place of its maker
        self.data.update(dict.fromkeys(makers))  # type: ignore[arg-type]

    def __getitem__(self, name: str) -> Command:
        """Return a command; KeyError if there is none of that name."""
        if self.data[name] is None:
            made = self._makers[name]()
            made.name = name
            show_as_written(made)
            self.data[name] = made
        return self.data[name]


def _command(name: str) -> Command:
    """Make the command of a function that has the same name."""
    room = _PLACES.get(name, name)
    function = getattr(import_module(f"{_ROOM}.{room}"), name)
    return _made_of(documented(function))


def _made_of(function: Callable[..., object], **settings: object) -> Command:
    alone = typer.Typer(add_completion=False)
    alone.command(**settings)(function)  # type: ignore[arg-type]
    return typer.main.get_command(alone)


def _group(room: str) -> Command:
    """Make the commands of a room that has several."""
    app = import_module(f"{_ROOM}.{room}").app
    return cast("Command", typer.main.get_group(app))


def _record() -> Command:
    from pagoda_tools.cli.record import record

    settings = {
        "allow_interspersed_args": False,
        "ignore_unknown_options": True,
    }
    return _made_of(documented(record), context_settings=settings)


def _llama_server() -> Command:
    from pagoda_tools.cli.llama_server import (
        CONTEXT_SETTINGS,
        ServerCommand,
        llama_server,
    )

    return _made_of(
        llama_server, cls=ServerCommand, context_settings=CONTEXT_SETTINGS
    )


# the modules of commands, where they have another name
_PLACES = {"unpin": "pin", "demo": "demo.demo_command"}
# those that are made in another way than of a function
_MAKERS: dict[str, Callable[[], Command]] = {
    "record": _record,
    "llama-server": _llama_server,
    "config": partial(_group, "config"),
    "vllm": partial(_group, "vllm"),
    "sglang": partial(_group, "sglang"),
}
# in the order of the help
_NAMES = (
    "stats",
    "top",
    "ls",
    "check",
    "clear",
    "remove",
    "pin",
    "unpin",
    "explain",
    "bench",
    "replay",
    "size",
    "serve",
    "warm",
    "quality",
    "models",
    "record",
    "demo",
    "llama-server",
    "config",
    "vllm",
    "sglang",
)

app = typer.Typer(
    name="pagoda",
    help="PagodaKV: a KV cache in tiers, so that no prompt prefix is computed twice.",
    add_completion=True,
    context_settings={"help_option_names": HELP_OPTIONS},
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.")
    ] = False,
) -> None:
    from pagoda import __version__

    if version:
        print(f"pagoda {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


program = typer.main.get_command(app)
assert isinstance(program, TyperGroup)
show_as_written(program)
program.commands = CommandTable(
    {name: _MAKERS.get(name, partial(_command, name)) for name in _NAMES}
)
