"""How commands print: tables for people, plain tables for pipes, one JSON object for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING

from pagoda.config.sizes import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_PIPE_WIDTH = 10_000  # a pipe has no edge: columns are never cut or folded there


def console() -> Console:
    """Return a console on stdout: colours and boxes on a terminal, plain wide text in a pipe."""
    from rich.console import Console

    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=_PIPE_WIDTH, soft_wrap=True)


def print_json(value: Mapping[str, object]) -> None:
    """Print one JSON object and nothing else; bytes are shown as hex."""
    print(json.dumps(value, indent=2, default=_plain))


def _plain(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else str(value)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; a column whose cells are all numbers is aligned to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = console()
    style = box.SIMPLE_HEAD if out.is_terminal else None
    table = Table(title=None, box=style, pad_edge=False, header_style="bold" if out.is_terminal else "")
    cells = [[cell(value) for value in row] for row in rows]
    for number, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[number], int | float | _Right) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", no_wrap=not out.is_terminal)
    for row in cells:
        table.add_row(*(Text(text) for text in row))
    if title:
        out.print(Text(title, style="bold" if out.is_terminal else ""))
    out.print(table)


def print_dicts(title: str, rows: Sequence[Mapping[str, object]], without: Container[str] = ()) -> None:
    """Print a table of rows by the names of their columns, but for the columns `without`; nothing without a row."""
    columns = [name for name in next(iter(rows), ()) if name not in without]
    if columns:
        print_table(title, columns, [[row[name] for name in columns] for row in rows])


def print_lines(lines: Sequence[str]) -> None:
    """Print lines of text as they are, without marks or colours."""
    print("\n".join(lines))


class _Right(str):
    """Text that is aligned to the right like a number."""


def size(size_bytes: float | None) -> str:
    """Return bytes as a number with its unit, aligned to the right; an empty text if they are not known."""
    return "" if size_bytes is None else _Right(format_size(size_bytes))


def age(seconds: float | None) -> str:
    """Return a time span in its largest fitting unit, such as "3.2 min"."""
    if seconds is None:
        return "-"
    for limit, divisor, unit in ((120.0, 1.0, "s"), (7200.0, 60.0, "min"), (172800.0, 3600.0, "h")):
        if seconds < limit:
            return _Right(f"{seconds / divisor:.1f} {unit}")
    return _Right(f"{seconds / 86400:.1f} days")


def wait(seconds: float) -> str:
    """Return a short time in milliseconds, a long one as `age` does."""
    return _Right(f"{seconds * 1e3:,.0f} ms") if seconds < 10 else age(seconds)


def share(part: float, whole: float) -> str:
    """Return a percentage, or "-" of nothing."""
    return _Right(f"{100 * part / whole:.1f} %") if whole else _Right("-")


def cell(value: object) -> str:
    """Return the text of one cell: integers with thousands separated, floats short, the rest as it is."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def progress(json_wanted: bool = False) -> Progress:
    """Return a progress bar on stderr, silent if that is no terminal or JSON is wanted. A context."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    bars = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    quiet = json_wanted or not sys.stderr.isatty()
    return Progress(*bars, console=Console(stderr=True), transient=True, disable=quiet)


def note(message: str) -> None:
    """Print a remark to stderr, out of the way of what is piped."""
    print(f"pagoda: {message}", file=sys.stderr)
