"""How commands print: tables and sentences for people, one JSON object for programs (`--json`).

Tables fit into 80 columns, in a terminal and in a pipe. Values are complete: they are not shortened
to "..." or folded. A command shows the columns that answer most questions; `--wide` shows all of
them, however wide. If a row does not fit, its last column (a path, an address, a model, a sentence)
is on a separate line below it, in full. In a pipe the same columns come in the same order, without
colours and rules, for 80 columns or COLUMNS; the terminal's width does not matter there. Scripts
read `--json`: its names stay; the form of a table may change.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pagoda.base.log import FIELDS, StderrHandler, log_json
from pagoda.config.sizes import format_size
from pagoda_tools.cli.text_tables import (
    RightAligned,
    printable,
    table_lines,
    wrapped,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def console() -> Console:
    """Return a console on stdout, always with a width: colours on a terminal, plain text in a
    pipe.
    """
    from rich.console import Console

    found = Console(highlight=False)
    # COLUMNS=0 and terminals without a size say 0
    found.width = found.width or 80
    return found


def print_json(value: Mapping[str, object]) -> None:
    """Print one JSON object and nothing else; bytes are printed as hex."""
    print(json.dumps(value, indent=2, default=_plain))


def _plain(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else str(value)


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    """Print a table; columns of numbers are aligned to the right. See the module for long
    values.
    """
    from rich.text import Text

    out = console()
    for text in wrapped(title, out.width) if title else ():
        out.print(
            Text(text, style="bold" if out.is_terminal else ""), soft_wrap=True
        )
    heading, *lines = table_lines(columns, rows, out.width)
    out.print(
        Text(heading, style="bold" if out.is_terminal else ""), soft_wrap=True
    )
    if out.is_terminal:
        out.print(
            "─" * min(out.width, max(map(len, (heading, *lines)))), soft_wrap=True
        )
    for line in lines:
        out.print(Text(line), soft_wrap=True)
    if out.is_terminal:
        out.print()


def print_dicts(
    title: str, rows: Sequence[Mapping[str, object]], without: Container[str] = ()
) -> None:
    """Print a table of rows, which name their columns, except the columns `without`; print nothing
    without rows.
    """
    columns = [name for name in next(iter(rows), ()) if name not in without]
    if columns:
        print_table(
            title, columns, [[row[name] for name in columns] for row in rows]
        )


def print_text(text: str, indent: str = "") -> None:
    """Print sentences, broken between words at the width of the terminal; a longer word stays
    whole.
    """
    width = console().width - len(indent)
    print("\n".join(indent + line for line in wrapped(text, width)))


def size(size_bytes: float | None) -> str:
    """Return bytes as a number with its unit, aligned to the right; an empty text if the number is
    not known.
    """
    return "" if size_bytes is None else RightAligned(format_size(size_bytes))


def age(seconds: float | None) -> str:
    """Return a duration in its largest suitable unit, such as "3.2 min"."""
    if seconds is None:
        return RightAligned("-")
    for limit, divisor, unit in (
        (120.0, 1.0, "s"),
        (7200.0, 60.0, "min"),
        (172800.0, 3600.0, "h"),
    ):
        if seconds < limit:
            return RightAligned(f"{seconds / divisor:.1f} {unit}")
    return RightAligned(f"{seconds / 86400:.1f} days")


def wait(seconds: float) -> str:
    """Return a short duration in milliseconds, a long one like `age`."""
    return (
        RightAligned(f"{seconds * 1e3:,.0f} ms") if seconds < 10 else age(seconds)
    )


def share(part: float, whole: float) -> str:
    """Return a percentage, or "-" if `whole` is 0."""
    return (
        RightAligned(f"{100 * part / whole:.1f} %")
        if whole
        else RightAligned("-")
    )


def count(number: int) -> str:
    """Return a number in at most nine characters; numbers below ten million are complete."""
    for least, unit in ((10**13, "T"), (10**10, "G"), (10**7, "M")):
        if number >= least:
            return RightAligned(f"{number / least * 10:.1f} {unit}")
    return RightAligned(f"{number:,}")


def progress(json_wanted: bool = False) -> Progress:
    """Return a progress bar on stderr (a context); it is silent for JSON, and if stderr is not a
    terminal.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    bars = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
    )
    quiet = json_wanted or not sys.stderr.isatty()
    return Progress(
        *bars, console=Console(stderr=True), transient=True, disable=quiet
    )


NOTHING_STORED = (
    "nothing is stored yet (pagoda config show says where it will be)"
)


def note(message: str) -> None:
    """Print a remark to stderr, so that it is not in a pipe."""
    print(f"pagoda: {printable(message)}", file=sys.stderr)


def show_log(log_format: str) -> None:
    """Show on stderr what a command that serves has to report: errors, one line each.

    `log_format`: "json" for JSON lines.
    """
    if log_format == "json":
        log_json()
    handler = StderrHandler()
    handler.setFormatter(_NamedLines("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler])


class _NamedLines(logging.Formatter):
    """Begins every line with "pagoda: ", as `note` does: beside them are those of a server that the
    command has started.
    """

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).splitlines()
        return "\n".join(f"pagoda: {line}" for line in lines)


@contextmanager
def left_out_files_noted() -> Iterator[None]:
    """Print a remark, once for each text, about each configuration file that is not read inside the
    context.
    """
    logger = logging.getLogger("pagoda.cache")
    handler = _LeftOutFiles(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _LeftOutFiles(logging.Handler):
    """Prints the log lines of `pagoda.config.sources` about files that are not read, and no
    others.
    """

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self._noted: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        from pagoda.config.sources import LEFT_OUT

        text = record.getMessage()
        if LEFT_OUT in getattr(record, FIELDS, {}) and text not in self._noted:
            self._noted.add(text)
            note(text)
