"""Quality against cost as a PNG, for `pagoda quality --png`. Called by the command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pagoda.base.quality_bounds import Interval
from pagoda_tools.cli.hit_rate_plot import save_figure
from pagoda_tools.quality.judge import Judged


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
    lines: dict[str, list[Judged]] = {}
    for row in rows:
        lines.setdefault(
            row.name.partition(":")[0] if by_time else "codecs", []
        ).append(row)
    for name, mine in lines.items():
        mine = sorted(mine, key=_computed)
        x = [_cost(row, by_time) for row in mine]
        y = [row.figures.kl for row in mine]
        axes.errorbar(
            [one.value for one in x],
            [one.value for one in y],
            xerr=_bars(x),
            yerr=_bars(y),
            label=name,
            fmt="o-" if by_time else "o",
            ms=4,
            capsize=2,
        )
        for row, cost in zip(mine, x, strict=True):
            point = cost.value, row.figures.kl.value
            axes.annotate(
                row.name,
                point,
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=7,
            )
    bound = next(row.result.bounds.kl for row in rows if row.result is not None)
    axes.axhline(bound, color="gray", ls="--", lw=1, label=f"bound {bound:g}")
    axes.set(
        xlabel="time to first token / that of computing everything"
        if by_time
        else "bytes / exact bytes",
        ylabel="KL divergence, nats per token",
        xlim=(0, 1.15 * max(_cost(row, by_time).high for row in rows)),
        ylim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.legend()


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
