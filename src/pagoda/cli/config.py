"""`pagoda config`: every option, its value and where it came from."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagoda.cli import FailedError, show
from pagoda.cli.stores import AsJson, ConfigFile

if TYPE_CHECKING:
    from pagoda.config import Config
    from pagoda.config.load import Loaded

app = typer.Typer(help="Show, check or describe the configuration.")
File = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="Configuration file instead of the usual ones.")
]


@app.callback(invoke_without_command=True)
def root(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command("show")
def show_values(as_json: AsJson = False, config: ConfigFile = None) -> int:
    """Show each option, its value and where that came from."""
    loaded = _loaded(config)
    values = asdict(loaded.config)
    if as_json:
        options = {name: {"value": value, "origin": loaded.origins[name]} for name, value in values.items()}
        show.print_json({"options": options, "host_bytes": loaded.config.host_bytes})
        return 0
    rows = [(name, _worded(name, loaded.config), loaded.origins[name]) for name in values]
    show.print_table("", ("option", "value", "from"), rows)
    return 0


@app.command()
def check(file: File = None, as_json: AsJson = False) -> int:
    """Check the configuration and whether its places can be used."""
    config = _loaded(file).config
    troubles = _troubles(config)
    if as_json:
        show.print_json({"ok": not troubles, "troubles": troubles})
    if troubles:
        raise FailedError("; ".join(troubles))
    if not as_json:
        print("the configuration is right")
    return 0


@app.command()
def schema() -> int:
    """Print the JSON schema of pagoda.toml."""
    from pagoda.config import load

    show.print_json(load.schema())
    return 0


def _loaded(file: Path | None) -> Loaded:
    from pagoda.config.load import load

    return load(file=file)


def _worded(name: str, config: Config) -> str:
    """Return a value as people write it; "auto" with what it comes to here."""
    value = getattr(config, name)
    if name == "host_size" and value == "auto":
        return f"auto ({show.size(config.host_bytes)})"
    if name in ("host_size", "disk_size"):
        return show.size(value) if value else "0 (off)"
    if isinstance(value, bool):
        return str(value).lower()
    return "auto" if value is None else str(value)


def _troubles(config: Config) -> list[str]:
    """Return what would keep this configuration from working on this machine; looks, changes nothing."""
    import os

    from pagoda.config.sizes import memory_limit_bytes, nearest_existing

    found = []
    for tier, root in config.roots().items():
        place = nearest_existing(root)
        if not os.access(place, os.W_OK):
            found.append(f"{tier}_path = {root}: {place} cannot be written; choose another directory")
        room = os.statvfs(place)
        wanted = config.host_bytes if tier == "host" else config.disk_bytes
        if wanted > room.f_blocks * room.f_frsize:
            held = show.size(room.f_blocks * room.f_frsize)
            found.append(
                f"{tier}_size = {show.size(wanted)}: {place} holds only {held}; write a smaller size"
            )
    limit = memory_limit_bytes()
    if config.host_bytes > limit:
        found.append(f"host_size = {show.size(config.host_bytes)}: this process may use {show.size(limit)}")
    return found
