"""The command `pagoda`. Importing this imports nothing heavy; a command imports what it needs when it runs.

Exit codes: 0 done, 1 failed (damage found, a store that cannot be used), 2 wrong use (one line on stderr says
what), 130 interrupted.

    app, docstring_help    the commands and their names; the help of their options
    stats, top, ls, check  what is stored and what hits; single chunks; is all of it right
    explain                why a prompt misses: `prompt_source`, `prompt_coverage`, `nearest_prompt`, `key_schemes`
    clear, pin, remove     changes
    warm                   fills the host tier of a machine that has just started
    serve                  chunks for other machines, and the page: `web_page_options`
    config                 options, and the import of LMCache's
    vllm, sglang           start an engine with its connector: `engine_start`
    bench                  how fast the tiers are: `bench_tiers`, `load_speeds`
    quality                what approximate KV costs in quality: `quality_report`, `quality_plot`
    record, replay, size   traces: `replay_inputs`, `replay_tiers`, `replay_fleet`, `hit_rate_plot`,
                           `trace_pool`, `model_sizes`
    demo                   three processes, one text
    stores, remote_stores  which stores and remote tiers a command is about, and whether the latter answer
    printing, text_tables  how commands print
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import cast

from pagoda.cli.text_tables import printable

FAILED, USAGE, INTERRUPTED = 1, 2, 130


class UsageError(Exception):
    """Wrong use of a command; the message is the one line that is shown."""


class FailedError(Exception):
    """A command could not do its work; the message is the one line that is shown."""


def require_transformers(what: str) -> None:
    """Raise UsageError if a command needs Transformers, or torch, and it is not installed."""
    if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        raise UsageError(f"{what} needs {' and '.join(missing)}: pip install torch 'pagodakv[transformers]'")


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; trouble is one line on stderr, never a traceback."""
    if sys.platform != "linux":
        return _complain(f"PagodaKV runs on Linux, this is {sys.platform}", USAGE)
    if sys.stdout is None:  # closed by the caller: the exit code tells
        sys.stdout = io.StringIO()
    if sys.stderr is None:  # else `print` would write remarks to stdout
        sys.stderr = io.StringIO()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # not every locale can write every name
    try:
        return _run(sys.argv[1:] if args is None else args)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:
        _drop_output()
        return FAILED
    except OSError as trouble:
        if not _flushed():
            _drop_output()
        # without a name it is of the output, not of a file that was given
        return _complain(_described(trouble), USAGE if trouble.filename else FAILED)


def _described(trouble: OSError) -> str:
    """Return what the system refused, where, and why."""
    where = f"{trouble.filename}: " if trouble.filename else ""
    return f"{where}{trouble.strerror or trouble}"


def _flushed() -> bool:
    """Write what is buffered of the output; whether that worked."""
    try:
        sys.stdout.flush()
    except OSError:
        return False
    return True


def _drop_output() -> None:
    """Discard what is still buffered of the output, so that it does not raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(args: Sequence[str]) -> int:
    import logging

    import typer

    # what matters is raised and said in one line
    logging.getLogger("pagoda").addHandler(logging.NullHandler())
    from pagoda.cli.app import program
    from pagoda.errors import ConfigError, PagodaError

    # the root of the errors that typer shows: click's own, or that of the click inside typer
    refusal = cast("type[Exception]", typer.BadParameter.__mro__[2])
    try:
        code = program.main(args=list(args), prog_name="pagoda", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.Abort:
        return _complain("interrupted", INTERRUPTED)
    except (UsageError, ConfigError) as trouble:
        return _complain(str(trouble), USAGE)
    except RecursionError:  # of a reader of JSON, TOML or YAML
        return _complain("what was given to read is nested too deeply", USAGE)
    except (FailedError, PagodaError) as trouble:
        return _complain(str(trouble), FAILED)
    except refusal as trouble:
        said: str = getattr(trouble, "format_message", trouble.__str__)()
        return _complain(said.removeprefix("Invalid value for "), USAGE)


def _complain(message: str, code: int) -> int:
    print(f"pagoda: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code
