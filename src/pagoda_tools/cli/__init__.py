"""The command `pagoda`. To import this package is cheap; a command imports what it needs when it
runs.

Exit codes: 0 success, 1 failure (damage was found, or a store cannot be used), 2 wrong use (one
line on stderr says what is wrong), 130 interrupted.

    app, docstring_help    the commands and their names; the help of their options
    stats, top, ls, check  show what is stored and what hits; list chunks; find damage:
                           `headline`, `top_view`, `live_screen`
    explain                says why a prompt misses: `prompt_source`, `prompt_explanation`,
                           `nearest_prompt`, `prompt_keys`
    clear, pin, remove     change what is stored
    warm                   fills the host tier of a machine that has just started
    serve                  sends chunks to other machines, and shows the page: `web_page_options`
    config                 shows and checks options, and imports those of LMCache
    vllm, sglang           start an engine with its connector: `engine_start`
    llama_server           starts llama.cpp's server behind the proxy of `llama_proxy`
    bench                  measures the tiers: `bench_tiers`, `load_speeds`
    quality                measures what approximate KV costs in quality: `quality_report`,
                           `quality_plot`
    models                 says which types of Transformers models are served
    record, replay, size   record and replay traces: `replay_inputs`, `replay_tiers`,
                           `replay_fleet`, `hit_rate_plot`, `trace_pool`, `known_models`
    demo                   answers one prompt in three processes
    stores, remote_stores  find the stores and remote tiers of a command, and ask the latter
    printing, text_tables  how commands print
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import cast

from pagoda_tools.cli.text_tables import printable

FAILED = 1
USAGE = 2
INTERRUPTED = 130
# of `mallopt`
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MAPPED_BYTES = 1 << 20


class UsageError(Exception):
    """Wrong use of a command. The message is the one line that the user sees."""


class FailedError(Exception):
    """A command failed. The message is the one line that the user sees."""


def require_transformers(what: str) -> None:
    """Raise UsageError unless torch and Transformers are installed. `what` needs them."""
    if missing := [
        name for name in ("torch", "transformers") if find_spec(name) is None
    ]:
        raise UsageError(
            f"{what} needs {' and '.join(missing)}: pip install torch 'pagodakv[transformers]'"
        )


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. An error is one line on stderr, never a
    traceback.
    """
    if sys.platform != "linux":
        return _complain(f"PagodaKV runs on Linux, this is {sys.platform}", USAGE)
    if sys.stdout is None:  # closed by the caller, who gets only the exit code
        sys.stdout = io.StringIO()
    if sys.stderr is None:  # else `print` would write remarks to stdout
        sys.stderr = io.StringIO()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # some locales cannot write all names
        sys.stdout.reconfigure(errors="backslashreplace")
    if args is None:  # the process is this command's own
        _map_large_buffers()
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
        # an error without a file name is an error of the output
        where, code = (
            (f"{trouble.filename}: ", USAGE) if trouble.filename else ("", FAILED)
        )
        return _complain(f"{where}{trouble.strerror or trouble}", code)


def _map_large_buffers() -> None:
    """Let glibc map what is larger than a megabyte. Nothing with another C library.

    By itself it takes LMDB's buffers, 3 MiB of each open store, from the heap as soon as something
    as large was freed there, and clears them; mapped they take only what is used.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        # else it keeps 128 KiB only: what it chooses by itself is this too
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _MAPPED_BYTES)


def _flushed() -> bool:
    """Write the buffered output; return whether that worked."""
    try:
        sys.stdout.flush()
    except OSError:
        return False
    return True


def _drop_output() -> None:
    """Discard the buffered output: otherwise it raises again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(args: Sequence[str]) -> int:
    import logging

    import typer

    # errors are raised and printed as one line, so the library's log is not shown
    logging.getLogger("pagoda").addHandler(logging.NullHandler())
    from pagoda.base.errors import (
        ConfigError,
        MissingLibraryError,
        PagodaError,
    )
    from pagoda_tools.cli.app import program
    from pagoda_tools.cli.printing import left_out_files_noted

    # the base class of typer's errors: click's own, or that of the click inside typer
    refusal = cast("type[Exception]", typer.BadParameter.__mro__[2])
    try:
        with left_out_files_noted():
            code = program.main(
                args=list(args), prog_name="pagoda", standalone_mode=False
            )
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.Abort:
        return _complain("interrupted", INTERRUPTED)
    except (UsageError, ConfigError, MissingLibraryError) as trouble:
        return _complain(str(trouble), USAGE)
    except RecursionError:  # of a reader of JSON, TOML or YAML
        return _complain("the input is nested too deeply", USAGE)
    except (FailedError, PagodaError) as trouble:
        return _complain(str(trouble), FAILED)
    except refusal as trouble:
        said: str = getattr(trouble, "format_message", trouble.__str__)()
        return _complain(said.removeprefix("Invalid value for "), USAGE)


def _complain(message: str, code: int) -> int:
    print(f"pagoda: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code
