"""The commands and their names. A command is imported and made when it is asked for: to make all of
them takes longer than most of them run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
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


class CommandTable(MutableMapping[str, "Command"]):
    """The commands by name, in the order of the help. Not thread-safe."""

    def __init__(self, makers: dict[str, Callable[[], Command]]) -> None:
        """`makers`: each makes one command, when it is first asked for."""
        self._makers = makers
        self._made: dict[str, Command] = {}

    def __getitem__(self, name: str) -> Command:
        """Return a command; KeyError if there is none of that name."""
        if name not in self._made:
            made = self._makers[name]()
            made.name = name
            show_as_written(made)
            self._made[name] = made
        return self._made[name]

    def __setitem__(self, name: str, command: Command) -> None:
        """Add or replace a command."""
        self._makers[name] = lambda: command
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        """Remove a command; KeyError if there is none of that name."""
        del self._makers[name]
        self._made.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names; makes no command."""
        return iter(self._makers)

    def __len__(self) -> int:
        """Return how many commands there are."""
        return len(self._makers)

    def __contains__(self, name: object) -> bool:
        """Return whether there is a command of that name; makes none."""
        return name in self._makers


def _command(room: str, name: str) -> Command:
    """Make the command of a function that has the same name."""
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


_COMMANDS: dict[str, Callable[[], Command]] = {
    "stats": partial(_command, "stats", "stats"),
    "top": partial(_command, "top", "top"),
    "ls": partial(_command, "ls", "ls"),
    "check": partial(_command, "check", "check"),
    "clear": partial(_command, "clear", "clear"),
    "remove": partial(_command, "remove", "remove"),
    "pin": partial(_command, "pin", "pin"),
    "unpin": partial(_command, "pin", "unpin"),
    "explain": partial(_command, "explain", "explain"),
    "bench": partial(_command, "bench", "bench"),
    "replay": partial(_command, "replay", "replay"),
    "size": partial(_command, "size", "size"),
    "serve": partial(_command, "serve", "serve"),
    "warm": partial(_command, "warm", "warm"),
    "quality": partial(_command, "quality", "quality"),
    "models": partial(_command, "models", "models"),
    "record": _record,
    "demo": partial(_command, "demo.demo_command", "demo"),
    "llama-server": _llama_server,
    "config": partial(_group, "config"),
    "vllm": partial(_group, "vllm"),
    "sglang": partial(_group, "sglang"),
}

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
program.commands = CommandTable(_COMMANDS)
