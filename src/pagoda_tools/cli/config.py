"""`pagoda config`: shows every option, its value and its origin; checks them; translates those of
LMCache.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from typer import Argument, Option

from pagoda.base.trusted_files import (
    FOUND_NAME,
    FOUND_OPTIONS,
    FileClass,
    one_line,
)
from pagoda_tools.cli import FailedError, UsageError, printing
from pagoda_tools.cli.docstring_help import documented
from pagoda_tools.cli.stores import AsJson, ConfigFile, configured

if TYPE_CHECKING:
    from pagoda.config import Config, RemoteSpec

app = typer.Typer(
    help="Show, check, allow, describe or import the configuration."
)
File = Annotated[
    Path | None,
    Argument(
        metavar="FILE", help="Configuration file instead of the usual ones."
    ),
]


@app.callback(invoke_without_command=True)
def root(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command("show")
def show_values(as_json: AsJson = False, config: ConfigFile = None) -> int:
    """Show each option, its value and the origin of the value; and each file that is read, with its
    class.

    A file is named (--config, PAGODA_CONFIG), your own (~/.config/pagoda/config.toml), allowed
    (pagoda config allow) or only found (./pagoda.toml), which sets sizes and limits only.
    """
    from pagoda.config.sources import files_of, load

    loaded = load(file=config)
    read = files_of(config)
    shown = {
        name: [spec.redacted for spec in specs]
        for name, specs in _servers(loaded.config).items()
    }
    values = {
        **asdict(loaded.config),
        **shown,
        "lookup": "".join(shown["lookup"]),
    }
    if as_json:
        options = {
            name: {"value": value, "origin": loaded.origins[name]}
            for name, value in values.items()
        }
        known = [{"file": one.path, "class": str(one.kind)} for one in read.files]
        left_out = (
            None
            if read.left_out is None
            else {"file": read.left_out.path, "why": read.left_out.why}
        )
        shown_files = {"files": known, "left_out": left_out}
        printing.print_json(
            {
                "options": options,
                "host_bytes": loaded.config.host_bytes,
                **shown_files,
            }
        )
        return 0
    files = {
        origin for origin in loaded.origins.values() if origin.startswith("file ")
    }
    origins = {
        name: "file" if origin in files else origin
        for name, origin in loaded.origins.items()
    }
    rows = [
        (name, origins[name], _worded(name, loaded.config)) for name in values
    ]
    printing.print_table("", ("option", "from", "value"), rows)
    for one in read.files:
        print(f"file {one_line(one.path)}")  # a path may be longer than a line
        limit = (
            "sizes and limits only"
            if one.kind is FileClass.FOUND
            else "every option"
        )
        print(f"  {one.kind}: may set {limit}")
    return 0


@app.command()
@documented
def allow(
    file: Annotated[Path, Argument(metavar="FILE")] = Path(FOUND_NAME),
    revoke: Annotated[bool, Option("--revoke")] = False,
    as_json: AsJson = False,
) -> int:
    """Let the pagoda.toml of a directory set every option, until it changes; show what that
    permits.

    Its path and a digest of its content are noted in your configuration directory.
    After an edit the file must be allowed again.
    Without this, a file that is only found in the working directory sets sizes and limits only.

    Args:
        file: The pagoda.toml of a directory; default: that of the working directory.
        revoke: End the permission.
    """
    from pagoda.base import trusted_files
    from pagoda.config.sources import options_in

    if revoke:
        path = trusted_files.place_of(file)
        if not trusted_files.revoke(path):
            raise UsageError(f"{one_line(path)}: was not allowed")
        if as_json:
            printing.print_json({"file": path, "allowed": False})
        else:
            print(f"{one_line(path)} is no longer allowed")
        return 0
    read = trusted_files.read_to_allow(file)
    options = {
        name: _without_secrets(name, value)
        for name, value in options_in(read).items()
    }
    trusted_files.allow(read)
    if as_json:
        printing.print_json(
            {"file": read.path, "allowed": True, "options": options}
        )
        return 0
    rows = [
        (name, "always" if name in FOUND_OPTIONS else "now", _listed(name, value))
        for name, value in options.items()
    ]
    if rows:
        printing.print_table("", ("option", "permitted", "value"), rows)
    print(f"{one_line(read.path)} is allowed until it changes")
    return 0


@app.command()
def check(file: File = None, as_json: AsJson = False) -> int:
    """Check the configuration: its values, its directories and whether remote tiers answer."""
    from pagoda_tools.cli.engine_start import require_extras
    from pagoda_tools.cli.remote_stores import pinged, require_libraries

    config = configured(file)
    servers = [spec for specs in _servers(config).values() for spec in specs]
    require_libraries(servers)
    require_extras(config)
    asked = pinged(servers)
    troubles = [
        *_troubles(config),
        *(each.trouble for each in asked if each.trouble),
    ]
    # a server without chunks may have other settings
    stores = {spec.name for spec in config.remotes()}
    warnings = [
        text for each in asked if each.tier in stores for text in each.warnings
    ]
    if as_json:
        printing.print_json(
            {"ok": not troubles, "troubles": troubles, "warnings": warnings}
        )
    else:
        for text in warnings:
            printing.note(text)
    if troubles:
        raise FailedError("; ".join(troubles))
    if not as_json:
        print("the configuration is right")
    return 0


@app.command()
def schema() -> int:
    """Print the JSON schema of pagoda.toml."""
    from pagoda.config.sources import schema as described

    printing.print_json(described())
    return 0


@app.command("import")
@documented
def import_lmcache(
    file: Annotated[Path | None, Argument(metavar="FILE")] = None,
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="FILE")
    ] = None,
    workers: Annotated[int, Option(min=1)] = 1,
    peers: Annotated[str | None, Option(metavar="URL,...")] = None,
    force: Annotated[bool, Option("--force")] = False,
    as_json: AsJson = False,
) -> int:
    """Translate LMCache's configuration into a pagoda.toml, and name all fields that have no
    counterpart.

    Args:
        file: LMCache's YAML file; default: the one in LMCache's variables, or these.
        output: Write a new file instead of printing it.
        workers: Workers (ranks) on one machine: LMCache's sizes are per worker.
        peers: URLs of the neighbours' pagoda serve, for enable_p2p.
        force: Leave out fields that are not supported.
    """
    from pagoda.config.remote_urls import split
    from pagoda_tools.migrate import lmcache
    from pagoda_tools.migrate.lmcache_fields import FieldVerdict
    from pagoda_tools.migrate.lmcache_loader import VARIABLES, load

    named = file or (
        Path(name)
        if (name := os.environ.get(f"{VARIABLES}CONFIG_FILE"))
        else None
    )
    variables = lmcache.variables_in(os.environ)
    if named is None and not variables:
        raise UsageError(f"name LMCache's file, or set its {VARIABLES} variables")
    loaded = load(lmcache.read(named) if named else None, variables)
    made = lmcache.translate(loaded, workers, split(peers or ""))
    toml = made.toml(str(named) if named else f"{VARIABLES} variables")
    ok = force or not made.refused
    if as_json:
        fields = [finding._asdict() for finding in made.findings]
        printing.print_json(
            {"ok": ok, "options": made.options, "fields": fields, "toml": toml}
        )
    if not ok:
        refused = "; ".join(f"{one.field}: {one.text}" for one in made.refused)
        raise UsageError(f"{refused} (--force leaves out what is not supported)")
    for one in made.findings:
        if one.verdict not in (FieldVerdict.MAPPED, FieldVerdict.SAME):
            printing.note(f"{one.field}: {one.verdict}: {one.text}")
    if output:
        _write_new(output, toml)
        if output.name == FOUND_NAME and not made.options.keys() <= FOUND_OPTIONS:
            printing.note(
                f"{output}: is refused where it is only found: name it (--config FILE or "
                "PAGODA_CONFIG), or "
                f"pagoda config allow {output}"
            )
    elif not as_json:
        print(toml, end="")
    return 0


def _write_new(file: Path, text: str) -> None:
    """Write a file that only its owner can read: it may contain a password. Raises UsageError if it
    exists.
    """
    try:
        with open(
            file, "x", encoding="utf-8", opener=partial(os.open, mode=0o600)
        ) as stream:
            stream.write(text)
    except FileExistsError:
        raise UsageError(f"{file}: exists already; name a new file") from None
    except OSError as trouble:
        raise UsageError(
            f"{file}: cannot be written: {trouble.strerror}"
        ) from None


def _servers(config: Config) -> dict[str, Sequence[RemoteSpec]]:
    """Return the values of the options that are URLs of servers, which may contain secrets."""
    return {
        "remote": config.remotes(),
        "peers": config.peer_servers(),
        "lookup": config.lookup_server(),
    }


def _worded(name: str, config: Config) -> str:
    """Return a value in the form in which people write it; "auto" has its size on this machine."""
    value = getattr(config, name)
    if name == "host_size" and value == "auto":
        return f"auto ({printing.size(config.host_bytes)})"
    if name in ("host_size", "disk_size"):
        return printing.size(value) if value else "0 (off)"
    if name in (servers := _servers(config)):
        return "\n".join(spec.redacted for spec in servers[name]) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "auto" if value is None else str(value) or "none"


def _without_secrets(name: str, value: object) -> object:
    """Return the value of an option as it may be shown."""
    from pagoda.config.remote_urls import redacted

    if name == "lookup":
        return redacted(str(value))
    if name in ("remote", "peers"):
        return [redacted(url) for url in cast("tuple[str, ...]", value)]
    return value


def _listed(name: str, value: object) -> str:
    """Return the value of an option for a table: those of a list are on a line each."""
    if name in ("host_size", "disk_size") and isinstance(value, int) and value:
        return printing.size(value)
    if isinstance(value, list):
        return "\n".join(map(one_line, value)) or "none"
    return one_line(str(value).lower() if isinstance(value, bool) else str(value))


def _troubles(config: Config) -> list[str]:
    """Return why this configuration cannot work on this machine. Changes nothing."""
    from pagoda.base import store_place
    from pagoda.base.cgroup_memory import memory_limit_bytes
    from pagoda.base.errors import StoreError
    from pagoda.base.file_systems import nearest

    found = []
    shown = printing.size
    for tier, root in config.roots().items():
        place = nearest(root)
        if not os.access(place, os.W_OK):
            found.append(
                f"{tier}_path = {root}: {place} cannot be written; choose another directory"
            )
        try:
            store_place.require_local(place)
            if tier == "host":
                store_place.require_memory(root)
        except StoreError as refusal:
            found.append(f"{tier}_path: {refusal}")
        room = os.statvfs(place)
        wanted = getattr(config, f"{tier}_bytes")
        held = room.f_blocks * room.f_frsize
        if wanted > held > 0:  # a tmpfs without a limit says 0
            text = (
                f"{tier}_size = {shown(wanted)}: {place} holds only {shown(held)}; write a "
                "smaller size"
            )
            found.append(text)
    if config.host_bytes > (limit := memory_limit_bytes()):
        found.append(
            f"host_size = {shown(config.host_bytes)}: this process may use {shown(limit)}"
        )
    return found
