"""Hit rate against size: which sizes to simulate, and the curve as a PNG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pagoda_tools.cli import FailedError, UsageError
from pagoda_tools.cli.replay_inputs import OPTIMUM

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pagoda_tools.cli.replay_inputs import Cell

_REMEDY = "matplotlib is not installed: pip install 'pagodakv[plot]'"
_FAR = 8  # a configured size is drawn up to this factor from the simulated ones


def sizes_of(distinct: int, count: int) -> list[int]:
    """Return at most `count` sizes, evenly spaced on a logarithmic axis, up to `distinct`, which
    holds all chunks.
    """
    least = max(1.0, distinct / 128)
    steps = max(1, count - 1)
    found = [
        _two_digits(least * (distinct / least) ** (number / steps))
        for number in range(steps)
    ]
    return sorted({*(size for size in found if size < distinct), distinct})


def check_png(path: Path) -> None:
    """Raise UsageError if this file cannot be drawn. Called before a long simulation."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise UsageError(f"--png {path}: {_REMEDY}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(
            f"--png {path}: {'is a directory' if path.is_dir() else 'no such directory'}"
        )


def save_png(
    path: Path,
    cells: Sequence[Cell],
    bound: float,
    title: str,
    chunk_bytes: int | None,
    marked: Mapping[str, int],
) -> None:
    """Draw a line for each policy, from cells in ascending size. Raises FailedError if the file
    cannot be written.

    Args:
        path: the file.
        cells: hit rates by policy and size.
        bound: the hit rate of an unlimited cache.
        title: above the curve.
        chunk_bytes: of one chunk; None: sizes are in chunks, and none is marked.
        marked: the configured sizes by name, in bytes: each is a line, or named in the legend if it
            is far from all simulated ones.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    scale = chunk_bytes or 1
    for name in dict.fromkeys(cell.policy for cell in cells):
        mine = [cell for cell in cells if cell.policy == name]
        bounds = name == OPTIMUM
        x = [cell.chunks * scale for cell in mine]
        y = [100 * cell.hit_rate for cell in mine]
        axes.plot(
            x,
            y,
            "o--" if bounds else "o-",
            c="gray" if bounds else None,
            ms=4,
            label=name,
        )
    axes.axhline(100 * bound, color="lightgray", zorder=0, label="infinite")
    axes.set(
        xscale="log",
        xlabel="size" if chunk_bytes else "chunks",
        ylabel="% of chunks served",
        ylim=(0, None),
        title=title,
    )
    sizes = sorted({cell.chunks * scale for cell in cells})
    if chunk_bytes:
        _mark(axes, marked, sizes)
    # at most ten labels fit, with the largest size
    sizes = sizes[:: -len(sizes) // 10][::-1]
    axes.set_xticks(
        sizes,
        [_short(size) if chunk_bytes else f"{size:,}" for size in sizes],
        fontsize=8,
    )
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def _mark(axes: Axes, marked: Mapping[str, int], sizes: Sequence[int]) -> None:
    """Draw a line at each of these sizes; one that is far from all others would press the curve
    together.
    """
    for (name, nbytes), style in zip(marked.items(), (":", "-."), strict=False):
        label = f"{name} = {_short(nbytes)}"
        if sizes[0] / _FAR <= nbytes <= sizes[-1] * _FAR:
            axes.axvline(nbytes, color="black", ls=style, lw=1.2, label=label)
        else:
            where = "below" if nbytes < sizes[0] else "above"
            label = f"{label}, {where} all of these"
            axes.plot([], [], color="black", ls=style, lw=1.2, label=label)


def _short(nbytes: float) -> str:
    """Return a size with three digits, or all whole ones, and its unit."""
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        # 999.5 would be rounded to four digits
        if nbytes < 999.5 or unit == "PiB":
            break
        nbytes /= 1024
    # `g` writes four digits as 1.21e+03
    return f"{nbytes:,.3g} {unit}" if nbytes < 999.5 else f"{nbytes:,.0f} {unit}"


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG; this needs no display. Raises FailedError if it cannot be written."""
    try:
        figure.savefig(path, format="png")
    except OSError as trouble:
        raise FailedError(
            f"{path}: cannot be written: {trouble.strerror or trouble}"
        ) from None


def _two_digits(value: float) -> int:
    """Round `value` to a whole number with two digits and zeros."""
    power: int = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return max(1, round(value / power) * power)
