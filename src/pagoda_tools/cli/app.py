"""The commands and their names. These modules are cheap to import; a command imports the rest when
it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from pagoda_tools.cli import config, sglang, vllm
from pagoda_tools.cli.bench import bench
from pagoda_tools.cli.check import check
from pagoda_tools.cli.clear import clear
from pagoda_tools.cli.demo.demo_command import demo
from pagoda_tools.cli.docstring_help import (
    HELP_OPTIONS,
    documented,
    show_as_written,
)
from pagoda_tools.cli.explain import explain
from pagoda_tools.cli.llama_server import (
    CONTEXT_SETTINGS,
    ServerCommand,
    llama_server,
)
from pagoda_tools.cli.ls import ls
from pagoda_tools.cli.models import models
from pagoda_tools.cli.pin import pin, unpin
from pagoda_tools.cli.quality import quality
from pagoda_tools.cli.record import record
from pagoda_tools.cli.remove import remove
from pagoda_tools.cli.replay import replay
from pagoda_tools.cli.serve import serve
from pagoda_tools.cli.size import size
from pagoda_tools.cli.stats import stats
from pagoda_tools.cli.top import top
from pagoda_tools.cli.warm import warm

app = typer.Typer(
    name="pagoda",
    help="PagodaKV: a KV cache in tiers, so that no prompt prefix is computed twice.",
    add_completion=True,
    context_settings={"help_option_names": HELP_OPTIONS},
    pretty_exceptions_enable=False,
)
for command in (
    stats,
    top,
    ls,
    check,
    clear,
    remove,
    pin,
    unpin,
    explain,
    bench,
    replay,
    size,
    serve,
    warm,
    quality,
    models,
):
    app.command()(documented(command))
app.command(
    context_settings={
        "allow_interspersed_args": False,
        "ignore_unknown_options": True,
    }
)(documented(record))
app.command()(documented(demo))
app.add_typer(config.app, name="config")
app.add_typer(vllm.app, name="vllm")
app.add_typer(sglang.app, name="sglang")
app.command(cls=ServerCommand, context_settings=CONTEXT_SETTINGS)(llama_server)


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


# made once: it takes longer than some commands
program = typer.main.get_command(app)
show_as_written(program)
