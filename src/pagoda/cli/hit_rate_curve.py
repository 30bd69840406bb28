"""Hit rate against size: which sizes are worth a look, a plot for terminals and pipes, and one as a PNG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pagoda.cli import FailedError, UsageError, show
from pagoda.cli.replay_inputs import OPTIMUM

if TYPE_CHECKING:
    from pagoda.cli.replay_inputs import Cell

_WIDTH, _HEIGHT = 62, 16  # characters of the plot itself
_MARKS = "●○■◆×+"
_COLOURS = ("green", "yellow", "cyan", "magenta", "blue", "red")
_BOUND = "▲", "bright_black"
_REMEDY = "matplotlib is not installed: pip install 'pagodakv[plot]'"


class CurveLine(NamedTuple):
    """One line of the plot: the cells of one policy, smallest size first."""

    name: str
    cells: list[Cell]


def sizes_of(distinct: int, count: int) -> list[int]:
    """Return `count` sizes (fewer if there are no more), evenly spread on a logarithmic axis up to what holds all."""
    least = max(1.0, distinct / 128)
    steps = max(1, count - 1)
    found = [_two_digits(least * (distinct / least) ** (number / steps)) for number in range(steps)]
    return sorted({*(size for size in found if size < distinct), distinct})


def lines_of(cells: Sequence[Cell]) -> list[CurveLine]:
    """Return the cells by policy, the optimum last."""
    names = dict.fromkeys(cell.policy for cell in cells if cell.policy != OPTIMUM)
    return [
        CurveLine(name, sorted((cell for cell in cells if cell.policy == name), key=lambda cell: cell.chunks))
        for name in (*names, OPTIMUM)
    ]


def check_png(path: Path) -> None:
    """Raise UsageError if no PNG can be drawn into that file, before anything long is done."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise UsageError(f"--png {path}: {_REMEDY}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"--png {path}: {'is a directory' if path.is_dir() else 'no such directory'}")


def save_png(
    path: Path, lines: Sequence[CurveLine], bound: float, title: str, chunk_bytes: int | None
) -> None:
    """Draw the lines into a file. Raises FailedError if it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # no display is needed
    axes = figure.subplots()
    scale = chunk_bytes / 2**30 if chunk_bytes else 1
    for line in lines:
        bounds = line.name == OPTIMUM
        x, y = [cell.chunks * scale for cell in line.cells], [100 * cell.hit_rate for cell in line.cells]
        axes.plot(x, y, "o--" if bounds else "o-", c="gray" if bounds else None, ms=4, label=line.name)
    axes.axhline(100 * bound, color="lightgray", zorder=0, label="infinite")
    axes.set(
        xscale="log",
        xlabel="GiB" if chunk_bytes else "chunks",
        ylabel="% of chunks served",
        ylim=(0, None),
        title=title,
    )
    sizes = sorted({cell.chunks * scale for line in lines for cell in line.cells})
    sizes = sizes[:: -len(sizes) // 10][::-1]  # at most ten have room, the largest always
    axes.set_xticks(sizes, [f"{size:,.3g}" if chunk_bytes else f"{size:,}" for size in sizes], fontsize=8)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, format="png")
    except OSError as trouble:
        raise FailedError(f"{path}: cannot be written: {trouble.strerror or trouble}") from None


def print_plot(lines: Sequence[CurveLine], bound: float, chunk_bytes: int | None) -> None:
    """Print the lines as characters: sizes to the right on a logarithmic axis, hit rates upwards."""
    from rich.text import Text

    sizes = sorted({cell.chunks for line in lines for cell in line.cells})
    column = _scale(math.log(sizes[0]), math.log(sizes[-1]), _WIDTH - 1)
    top = max([bound, *(cell.hit_rate for line in lines for cell in line.cells)])
    row = _scale(0.0, top, _HEIGHT - 1)
    field = [[(" ", "")] * _WIDTH for _ in range(_HEIGHT)]
    looks = [
        _BOUND if line.name == OPTIMUM else (_MARKS[at % len(_MARKS)], _COLOURS[at % len(_COLOURS)])
        for at, line in enumerate(lines)
    ]
    drawn = list(zip(lines, looks, strict=True))[::-1]  # what is asked about lies on top
    paths = [
        [(column(math.log(cell.chunks)), row(cell.hit_rate)) for cell in line.cells] for line, _ in drawn
    ]
    for path, (_, (_, colour)) in zip(paths, drawn, strict=True):
        for at in range(path[0][0], path[-1][0]):
            field[_height(path, at)][at] = "·", colour
    for path, (_, look) in zip(paths, drawn, strict=True):
        for at, height in path:
            field[height][at] = look
    out = show.console()
    for height in reversed(range(_HEIGHT)):
        label = f"{100 * top * height / (_HEIGHT - 1):5.1f} %" if height % 3 == 0 else ""
        drawing = Text.assemble(f"{label:>7} │", *field[height])
        drawing.rstrip()
        out.print(drawing)
    out.print(Text(" " * 8 + "└" + "─" * _WIDTH))
    ticks = [(column(math.log(size)), size) for size in sizes]
    out.print(Text(" " * 9 + _ticks(ticks, lambda size: f"{size:,}") + "  chunks"))
    if chunk_bytes:
        from pagoda.config.sizes import format_size

        out.print(Text(" " * 9 + _ticks(ticks, lambda size: format_size(size * chunk_bytes))))
    names = [part for line, look in zip(lines, looks, strict=True) for part in ("   ", look, f" {line.name}")]
    out.print(Text.assemble(" " * 6, *names))


def _scale(least: float, most: float, steps: int) -> Callable[[float], int]:
    """Return what puts a value between `least` and `most` on one of the steps 0 to `steps`."""
    width = most - least
    return lambda value: round((value - least) / width * steps) if width else 0


def _height(path: Sequence[tuple[int, int]], at: int) -> int:
    """Return how high a path is at a column between two of its points."""
    for (left, low), (right, high) in pairwise(path):
        if left <= at < right:
            return round(low + (high - low) * (at - left) / (right - left))
    return path[-1][1]


def _ticks(ticks: Sequence[tuple[int, int]], text: Callable[[int], str]) -> str:
    """Return the sizes under their columns; the last one always, others where there is room."""
    last = text(ticks[-1][1])
    words, end = "", _WIDTH - len(last)
    for at, size in ticks[:-1]:
        word = text(size)
        if (not words or at >= len(words) + 2) and at + len(word) + 2 <= end:
            words = words.ljust(at) + word
    return words.ljust(end) + last


def _two_digits(value: float) -> int:
    """Return a whole number near `value` of which only the first two digits are not zero."""
    power: int = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return max(1, round(value / power) * power)
