"""`pagoda record`: runs an engine and records its requests, as a trace for `pagoda replay` and
`pagoda size`.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from pagoda_tools.cli import FailedError, UsageError, printing

_VARIABLE = "PAGODA_RECORD"
_FORWARDED = (signal.SIGTERM, signal.SIGHUP)


def record(
    out: Annotated[Path, Argument(metavar="TRACE")],
    command: Annotated[list[str], Argument(metavar="-- COMMAND")],
    append: Annotated[bool, Option("--append")] = False,
) -> int:
    """Run COMMAND and record the requests of every cache in it: hashed ids and lengths, no text.

    It sets PAGODA_RECORD for COMMAND. Its exit code is that of COMMAND.

    Args:
        out: The file to write.
        command: The command to run, such as: pagoda vllm serve MODEL
        append: Add to the lines of the file.
    """
    command = command[1:] if command[:1] == ["--"] else command
    if not command:
        raise UsageError(
            "the command is missing; write: pagoda record TRACE -- COMMAND..."
        )
    for word in (str(out), command[0]):
        if word.startswith("-"):
            raise UsageError(
                f"{word}: write options first: pagoda record [--append] TRACE -- COMMAND..."
            )
    was_there = os.path.lexists(out)
    before = _opened(out, append)
    try:
        code = _ran(command, {**os.environ, _VARIABLE: str(out.absolute())})
    except FailedError:
        if not was_there:
            # no command has run that could have written into it
            out.unlink(missing_ok=True)
        raise
    _tell(out, before, command)
    return code


def _opened(out: Path, append: bool) -> int:
    """Create the file, and return how many lines it already has. Raises UsageError, ConfigError."""
    from pagoda.cache.append_lines import append_lines
    from pagoda.cache.recording import require_trace

    if out.is_dir():
        raise UsageError(f"{out} is a directory: name a file")
    if out.exists() and not out.is_file():
        raise UsageError(
            f"{out} is no file: name one, whose lines can be counted"
        )
    if not append and out.exists() and out.stat().st_size:
        raise UsageError(f"{out} exists: name another file, or --append to it")
    require_trace(out)
    _, trouble = append_lines(out, [])
    if trouble is not None:
        raise UsageError(f"{out} cannot be written: {trouble.strerror}")
    with out.open("rb") as lines:
        return sum(1 for _ in lines)


def _ran(command: Sequence[str], environ: dict[str, str]) -> int:
    """Run the command to its end. It gets all signals (Ctrl-C from the terminal) and decides how to
    end.
    """
    process: subprocess.Popen[bytes] | None = None
    # signals that came before the process was known here; it gets them later
    early: list[int] = []

    def forward(number: int, _: object) -> None:
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    with handling(
        {signal.SIGINT: lambda *_: None, **dict.fromkeys(_FORWARDED, forward)}
    ):
        try:
            process = subprocess.Popen(command, env=environ)
        except OSError as trouble:
            raise FailedError(
                f"{command[0]} cannot be run: {trouble.strerror}"
            ) from None
        for number in early:
            process.send_signal(number)
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def handling(
    handlers: Mapping[signal.Signals, Callable[[int, object], object]],
) -> Iterator[None]:
    """Handle these signals with these functions inside the context. For the main thread."""
    before = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(out: Path, before: int, command: Sequence[str]) -> None:
    """Print what was recorded, and how to use it."""
    from pagoda.cache.append_lines import append_lines
    from pagoda.cache.request_trace import read_trace

    append_lines(out, [])  # a killed process may have left half a line
    requests = chunks = 0
    for request in islice(read_trace(out), before, None):
        requests += 1
        chunks += len(request.hash_ids)
    if requests:
        printing.note(
            f"recorded {requests:,} requests for {chunks:,} chunks in {out}"
        )
        printing.note(
            f"to simulate other sizes: pagoda replay {shlex.quote(str(out))} --curve"
        )
    else:
        printing.note(
            f"nothing was recorded: {command[0]} requested no whole chunk, or its cache does not "
            "read its options from "
            "the environment"
        )
