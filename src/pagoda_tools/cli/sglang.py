"""`pagoda sglang`: starts SGLang with PagodaKV as the storage of its HiCache.

It does not import SGLang: it adds three flags to SGLang's own command line, and becomes that
command.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer import Option

from pagoda_tools.cli import UsageError, engine_start
from pagoda_tools.cli.docstring_help import documented

BACKEND = "--hicache-storage-backend"
EXTRA = "--hicache-storage-backend-extra-config"
STORAGE = {
    "backend_name": "pagoda",
    "module_path": "pagoda.connectors.sglang",
    "class_name": "PagodaHiCache",
    # without it, the common beginning of many prompts is evicted first
    "hicache_storage_pass_prefix_keys": True,
}

_ENABLE = "--enable-hierarchical-cache"
_SERVER = ("-m", "sglang.launch_server")

app = typer.Typer(
    help="Start SGLang with PagodaKV as the storage of its HiCache."
)


@app.callback(invoke_without_command=True)
@engine_start.with_config_options
@documented
def root(
    ctx: typer.Context,
    print_only: engine_start.PrintOnly = False,
    weights: engine_start.Weights = None,
    salt: engine_start.Salt = None,
    allow_untested_sglang: Annotated[
        bool, Option("--allow-untested-sglang")
    ] = False,
    **options: str | bool | None,
) -> None:
    """Start SGLang with PagodaKV as the storage of its HiCache.

    Options that are not given come from the environment and the configuration files.

    Args:
        allow_untested_sglang: Start with a version of SGLang that was not tested.
    """
    from pagoda.connectors.sglang.storage_options import check_config

    own = {
        "weights": weights,
        "salt": salt,
        "allow_untested_sglang": allow_untested_sglang or None,
    }
    engine_start.choose(ctx, "SGLang", options, own, print_only)
    if ctx.obj is not None:
        if "chunk_tokens" in ctx.obj.extra:
            raise UsageError(
                "--chunk-tokens: chunks are SGLang's pages; write --page-size after serve"
            )
        check_config(ctx.obj.config)


@engine_start.serve_command(app, "SGLANG")
def serve(ctx: typer.Context) -> None:
    """Become `python -m sglang.launch_server --model-path MODEL ...` with the flags that name
    PagodaKV.
    """
    chosen: engine_start.Chosen = ctx.obj
    arguments = list(ctx.args)
    _refuse(arguments)
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--model-path", *arguments]
    arguments += [] if _ENABLE in arguments else [_ENABLE]
    arguments += [
        BACKEND,
        "dynamic",
        EXTRA,
        json.dumps({**STORAGE, **chosen.extra}),
    ]
    if chosen.print_only:
        print(shlex.join(["python", *_SERVER, *arguments]))
        return
    from pagoda.connectors.sglang.storage_options import check_version

    missing = (
        "SGLang is not installed beside PagodaKV: pip install 'pagodakv[sglang]'"
    )
    engine_start.check_start(chosen, "sglang", ["sglang"], missing, check_version)
    engine_start.become([sys.executable, *_SERVER, *arguments])


def _refuse(arguments: Sequence[str]) -> None:
    """Raise UsageError if SGLang's arguments conflict with the flags of this command."""
    for argument in arguments:
        name = argument.split("=")[0]
        # SGLang accepts any unique beginning of a flag
        if name.startswith("--hicache-storage-b") and EXTRA.startswith(name):
            raise UsageError(f"{name} is set by this command: leave it out")
        if name == "--disable-radix-cache":
            raise UsageError(
                f"{name}: without SGLang's radix cache nothing is stored; leave it out"
            )
        engine_start.refuse_own_flag(name)
