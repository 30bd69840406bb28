"""What the commands that start an engine have in common: the options of `Config`, and checks before
a slow start.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import (
    Annotated,
    NamedTuple,
    NoReturn,
    TypeAlias,
    TypeVar,
    get_type_hints,
)

import typer
from typer import Option

from pagoda.base.errors import ConfigError, StoreError
from pagoda.config import Config
from pagoda_tools.cli import FailedError, UsageError

_Function = TypeVar("_Function", bound=Callable[..., object])
_SIZES = ("host_size", "disk_size")
_PANELS: dict[str, dict[str, str]] = {
    "Host memory": {"host_size": "SIZE", "host_path": "PATH", "host_shared": ""},
    "Disk": {
        "disk_size": "SIZE",
        "disk_path": "PATH",
        "disk_direct": "BOOL",
        "disk_codec": "NAME",
        "durable": "",
        "io_threads": "N",
    },
    "Other machines": {
        "remote": "URL",
        "peers": "URL",
        "lookup": "URL",
        "weights_epoch": "N",
    },
    "What is stored, loaded and evicted": {
        "chunk_tokens": "N",
        "policy": "NAME",
        "objective": "NAME",
        "hints": "WHEN",
        "write_policy": "NAME",
        "selective_hits": "N",
        "min_hit_tokens": "N",
        "worth_it": "",
        "deadline_seconds": "N",
        "queue_chunks": "N",
        "start_without": "NAME",
    },
    "Approximate KV": {
        "blend_recompute": "SHARE",
        "blend_min_tokens": "N",
        "quality_verdicts": "PATH",
        "unchecked": "",
    },
    "Seeing what happens": {
        "record": "FILE",
        "prompt_log": "",
        "log_format": "NAME",
        "profile": "",
        "otel": "",
    },
}
"""The options of `Config` as the help shows them: those of one panel together, and what stands for
their values (a switch has none).
"""

ENGINE_PANEL = "What the engine shares"
"""The help's panel of the options that only a connector has."""

PrintOnly: TypeAlias = Annotated[
    bool, Option("--print", help="Print the command instead of running it.")
]
Weights: TypeAlias = Annotated[
    str | None,
    Option(
        help="A name for the weights, instead of a digest of the checkpoint's files.",
        metavar="NAME",
        rich_help_panel=ENGINE_PANEL,
    ),
]
Salt: TypeAlias = Annotated[
    str | None,
    Option(
        help="Only engines with the same salt share what is stored.",
        metavar="TEXT",
        rich_help_panel=ENGINE_PANEL,
    ),
]


def with_config_options(function: _Function) -> _Function:
    """Replace a command's last parameter `**options` by one option for each option of Config, in
    panels. Changes `function`.
    """
    hints = get_type_hints(Config)
    helps = {option.name: option.metadata["help"] for option in fields(Config)}
    own = inspect.signature(function, eval_str=True)
    keyword = partial(
        inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY, default=None
    )
    added = []
    for panel, names in _PANELS.items():
        for name, metavar in names.items():
            shown = Option(
                help=helps.pop(name), rich_help_panel=panel, metavar=metavar
            )
            kind = bool | None if hints[name] is bool else str | None
            added.append(keyword(name, annotation=Annotated[kind, shown]))
    if helps:
        raise AssertionError(f"options without a panel: {', '.join(helps)}")
    parameters = [*list(own.parameters.values())[:-1], *added]
    function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {
        parameter.name: parameter.annotation for parameter in parameters
    }
    return function


def serve_command(
    app: typer.Typer, engine: str
) -> Callable[[_Function], _Function]:
    """Return the decorator of `serve`, which passes all its arguments to an engine."""
    return app.command(
        "serve",
        context_settings={
            "ignore_unknown_options": True,
            "allow_extra_args": True,
            "allow_interspersed_args": False,
            "help_option_names": [],
        },
        add_help_option=False,
        options_metavar=f"MODEL [{engine}'S OWN FLAGS]",
    )


def refuse_own_flag(name: str) -> None:
    """Raise UsageError for one of PagodaKV's flags among the engine's arguments."""
    if name == "--print" or name in (
        "--" + option.name.replace("_", "-") for option in fields(Config)
    ):
        raise UsageError(f"{name} is an option of pagoda: write it before serve")


def become(command: Sequence[str]) -> NoReturn:
    """Replace this process by another program, with the same environment. Raises FailedError if it
    cannot be run.
    """
    sys.stdout.flush()
    try:
        os.execv(command[0], list(command))
    except OSError as trouble:
        raise FailedError(
            f"{command[0]} cannot be run: {trouble.strerror}"
        ) from None


class Chosen(NamedTuple):
    """The options before `serve`: those of the connector, and the whole configuration."""

    extra: dict[str, object]
    config: Config
    print_only: bool


def choose(
    ctx: typer.Context,
    engine: str,
    options: Mapping[str, object],
    own: Mapping[str, object],
    print_only: bool,
) -> None:
    """Keep the options before `serve` as `ctx.obj`; without a command, print the help.

    `options`: those of `Config`; `own`: those that only the connector has. None: not given. Raises
    ConfigError for an invalid option (given here, in the environment or in the file), UsageError
    for a secret.
    """
    from pagoda.config.sources import load

    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        return
    given = {name: value for name, value in options.items() if value is not None}
    config = load(cli=given).for_engine()
    _refuse_secrets(given, config, engine)
    # the connector gets sizes as they were written
    extra = {
        name: given[name] if name in _SIZES else getattr(config, name)
        for name in given
    }
    extra |= {name: value for name, value in own.items() if value is not None}
    ctx.obj = Chosen(extra, config, print_only)


def _refuse_secrets(
    given: Mapping[str, object], config: Config, engine: str
) -> None:
    """Raise UsageError if the engine's command line and log would show a secret."""
    for name, urls, specs in (
        ("remote", config.remote, config.remotes()),
        ("peers", config.peers, config.peer_servers()),
        ("lookup", filter(None, [config.lookup]), config.lookup_server()),
    ):
        if name in given and any(
            spec.redacted != url for spec, url in zip(specs, urls, strict=True)
        ):
            raise UsageError(
                f"--{name}: {engine} would log the secret in it: write ?password_file=PATH"
            )


def check_tiers(config: Config) -> None:
    """Check that the tiers can be opened, as far as that does not depend on the model. Changes
    nothing.

    A disk tier that was used before, and without which the engine may start, is only named on
    stderr; one that never was is a mistake that its user can correct now. Raises StoreError (a
    directory is another user's, on a network, or has too little room; a library is missing) or
    ConfigError (the password of a remote tier cannot be read, or its codec cannot be used).
    """
    from pagoda.base.store_place import FIRST_PIECE_BYTES, require_place
    from pagoda.config.sizes import AUTO

    host_bytes = config.host_bytes
    if config.host_size == AUTO:  # it grows as it fills
        host_bytes = min(host_bytes, FIRST_PIECE_BYTES)
    require_place(Path(config.host_path), host_bytes, in_memory=True)
    if config.disk_bytes:
        try:
            require_place(
                Path(config.disk_path), config.disk_bytes, in_memory=False
            )
        except (StoreError, OSError) as trouble:
            if config.start_without == "none" or not _was_used(
                Path(config.disk_path)
            ):
                raise
            print(
                f"pagoda: starting without the disk tier: {trouble}",
                file=sys.stderr,
            )
    for server in (*config.peer_servers(), *config.lookup_server()):
        server.url_with_password()
    require_extras(config)
    for spec in config.remotes():
        spec.engine()  # connects to nothing


def require_extras(config: Config) -> None:
    """Check that the libraries are installed that options need, apart from those of remote stores.
    Raises ConfigError.
    """
    if config.otel and find_spec("opentelemetry") is None:
        raise ConfigError(
            "otel = true needs opentelemetry: pip install 'pagodakv[otel]', or leave it out"
        )
    if remotes := config.remotes():
        # with numpy, which takes a quarter of a second
        from pagoda import codec as codecs

        for spec in remotes:
            codecs.require(spec.codec)


def _was_used(root: Path) -> bool:
    """Whether a directory has stores, or cannot be read. Changes nothing."""
    try:
        return root.is_dir() and any(
            (store / "state").exists() for store in root.iterdir()
        )
    except OSError:
        return True


def check_start(
    chosen: Chosen,
    module: str,
    names: Sequence[str],
    missing: str,
    check_version: Callable[[str, bool], None],
) -> None:
    """Check that the engine can start, before it is imported, which takes long. Changes nothing.

    Only the engine can check what depends on the model, such as the size of a chunk.

    Args:
        chosen: The options before `serve`.
        module: The engine's module.
        names: The distributions that have it.
        missing: What to say if it is not installed.
        check_version: Raises an error for a version that was not tested, unless that is allowed.

    Raises UsageError (it is not installed), and the errors of `check_version` and `check_tiers`.
    """
    if find_spec(module) is None:
        raise UsageError(missing)
    if (version := installed_version(*names)) is not None:
        check_version(version, bool(chosen.extra.get(f"allow_untested_{module}")))
    check_tiers(chosen.config)


def installed_version(*names: str) -> str | None:
    """Return the version of the first of these distributions that is installed, or None."""
    from importlib import metadata

    for name in names:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None
