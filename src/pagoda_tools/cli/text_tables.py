"""Formats tables as lines of text, for `printing` and `pagoda top`. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

_GAP = "  "
_WIDEST_PROSE = 100  # longer lines are hard to read
_UNBROKEN = "\0"  # a space at which no line ends, while lines are made


class RightAligned(str):
    """Text that is aligned to the right, like a number."""


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[object]], width: int
) -> list[str]:
    """Return a table as lines, the heading first, for a terminal of `width` columns. Pure."""
    from rich.cells import cell_len

    def aligned(cells: Sequence[str]) -> str:
        padded = []
        for text, cells_wide, to_right in zip(cells, widths, right, strict=True):
            space = " " * (cells_wide - cell_len(text))
            padded.append(space + text if to_right else text + space)
        return _GAP.join(padded)

    right = [
        bool(rows)
        and all(isinstance(row[n], int | float | RightAligned) for row in rows)
        for n in range(len(columns))
    ]
    texts = [[cell(value) for value in row] for row in rows]
    widths = [
        max(cell_len(text) for text in each)
        for each in zip(columns, *texts, strict=True)
    ]
    if not right[-1]:  # long text, which may be below its row
        widths[-1] = cell_len(columns[-1])
    heading = aligned(columns).rstrip()
    if cell_len(heading) > width and not right[-1]:
        heading = aligned(
            [*columns[:-1], ""]
        ).rstrip()  # its values are below, too
    lines = [heading]
    for *cells, last in texts:
        if right[-1]:
            lines.append(aligned([*cells, last]))
            continue
        row = aligned([*cells, ""]).rstrip()
        (first, *more) = last.split("\n")
        start = sum(widths[:-1]) + len(_GAP) * len(cells)
        if start + max(map(cell_len, (first, *more))) <= width:
            lines += [
                row + " " * (start - cell_len(row)) * bool(first) + first,
                *(" " * start + text for text in more),
            ]
        else:
            lines += [row, *(_GAP + text for text in (first, *more))]
    return lines


def printable(text: str) -> str:
    r"""Return text that is safe for a terminal: control characters other than line ends become
    \xNN.

    Otherwise a model's name or a server's answer could move the cursor or rename the window.
    """
    return "".join(
        one if one.isprintable() or one == "\n" else repr(one)[1:-1]
        for one in text
    )


def wrapped(text: str, width: int) -> list[str]:
    """Return sentences as lines, broken between words, never before a per cent sign. Pure."""
    lines = textwrap.wrap(
        printable(text).replace(" %", f"{_UNBROKEN}%"),
        max(1, min(width, _WIDEST_PROSE)),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_UNBROKEN, " ") for line in lines]


def cell(value: object) -> str:
    """Return the text of one cell: integers with thousands separators, floats with four digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, RightAligned):
        return value
    return "" if value is None else printable(str(value))
