"""Quality against cost as a PNG, for `pagoda quality --png`. Called by the command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pagoda.base.quality_bounds import Interval
from pagoda_tools.cli.hit_rate_plot import save_figure
from pagoda_tools.quality.judge import Judged

# how points are drawn, by verdict: also without colours
_PASSED = ("o", "tab:green")
_FAILED = ("X", "tab:red")


def save_png(path: Path, rows: Sequence[Judged], title: str) -> None:
    """Draw quality against cost: blending by time to first token, codecs by bytes. Raises
    FailedError.
    """
    groups = {
        feature: [
            row
            for row in rows
            if row.result is not None and row.result.setting.feature == feature
        ]
        for feature in ("blend", "codec")
    }
    drawn = {feature: mine for feature, mine in groups.items() if mine}
    figure = Figure(figsize=(7 * len(drawn), 5), dpi=120, layout="constrained")
    for axes, (feature, mine) in zip(
        figure.subplots(1, len(drawn), squeeze=False)[0],
        drawn.items(),
        strict=True,
    ):
        _draw(axes, feature, mine)
    figure.suptitle(title)
    save_figure(figure, path)


def _draw(axes: Axes, feature: str, rows: Sequence[Judged]) -> None:
    """Draw one feature: a point with intervals for each setting, a line for each policy, and the
    bound.
    """
    by_time = feature == "blend"
    bound = next(row.result.bounds.kl for row in rows if row.result is not None)
    widest = 1.15 * max(_cost(row, by_time).high for row in rows)
    floor = _floor([row.figures.kl for row in rows], bound)
    lines: dict[str, list[Judged]] = {}
    for row in rows:
        lines.setdefault(
            row.name.partition(":")[0] if by_time else "codecs", []
        ).append(row)
    for name, mine in lines.items():
        mine = sorted(mine, key=_computed)
        x = [_cost(row, by_time) for row in mine]
        y = [_raised(row.figures.kl, floor) for row in mine]
        axes.errorbar(
            [one.value for one in x],
            [one.value for one in y],
            xerr=_bars(x),
            yerr=_bars(y),
            label=name,
            fmt="-" if by_time else "none",
            capsize=2,
        )
        for row, cost, kl in zip(mine, x, y, strict=True):
            passed = row.result is not None and row.result.passed
            marker, colour = _PASSED if passed else _FAILED
            axes.plot(cost.value, kl.value, marker, color=colour, ms=7, zorder=3)
            # its text would not fit beside it
            is_right = cost.value > 0.6 * widest
            least = ", KL 0" * (row.figures.kl.value <= 0)
            axes.annotate(
                f"{row.name} {'PASS' if passed else 'FAIL'}{least}",
                (cost.value, kl.value),
                xytext=(-5, 4) if is_right else (5, 4),
                ha="right" if is_right else "left",
                textcoords="offset points",
                fontsize=7,
                color=colour,
            )
    axes.axhline(bound, color="gray", ls="--", lw=1, label=f"bound {bound:g}")
    axes.set(
        xlabel="time to first token / that of computing everything"
        if by_time
        else "bytes / exact bytes",
        ylabel="KL divergence, nats per token",
        xlim=(0, widest),
        yscale="log",
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend()


def _floor(intervals: Sequence[Interval], bound: float) -> float:
    """Return what is drawn for 0, and for all that is below it: a logarithmic axis has no 0."""
    least = min((one.value for one in intervals if one.value > 0), default=bound)
    return min(least, bound) / 10


def _raised(interval: Interval, floor: float) -> Interval:
    """Return an interval of which nothing is below the floor."""
    return Interval(
        max(interval.value, floor),
        max(interval.low, floor),
        max(interval.high, floor),
    )


def _computed(row: Judged) -> float:
    """Return the share that a setting of blending computes again; 0 for codecs."""
    assert row.result is not None
    return float(row.result.setting.options.get("recompute", 0))


def _cost(row: Judged, by_time: bool) -> Interval:
    return (
        row.figures.ttft
        if by_time
        else Interval(row.figures.bytes, row.figures.bytes, row.figures.bytes)
    )


def _bars(intervals: Sequence[Interval]) -> list[list[float]]:
    """Return the lengths of error bars, below and above."""
    below = [max(0.0, one.value - one.low) for one in intervals]
    return [below, [max(0.0, one.high - one.value) for one in intervals]]
