"""The output of `pagoda quality`. Called by the command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import to_builtins

from pagoda.base.quality_bounds import Interval
from pagoda_tools.cli import printing
from pagoda_tools.cli.text_tables import RightAligned
from pagoda_tools.quality.judge import Judged
from pagoda_tools.quality.run import QualityRun


def print_report(model: str, prompts: Path, rows: Sequence[Judged]) -> None:
    """Print the table, and its meaning in plain words."""
    result = next(row.result for row in rows if row.result is not None)
    title = (
        f"{model}, {result.prompts} prompts of {prompts.name}, compared with exact KV; in "
        "brackets the worse end of "
        f"the {result.confidence * 100:g} % interval, which decides"
    )
    answers = [] if result.figures.answers is None else ["answers %"]
    columns = ["", "KL", "top-1 %", *answers, "TTFT", "bytes", "verdict"]
    printing.print_table(
        title, columns, [_cells(row, bool(answers)) for row in rows]
    )
    for row in rows:
        if row.result is not None:
            printing.print_text(f"{row.name} {_sentence(row)}")


def as_json(
    model: str, run: QualityRun, verdict: Path, png: Path | None
) -> dict[str, object]:
    """Return the whole report for programs."""
    rows = []
    for row in run.rows:
        entry: dict[str, object] = {
            "name": row.name,
            "seconds": row.seconds,
            **to_builtins(row.figures),
        }
        if row.result is not None:
            entry |= {
                "setting": to_builtins(row.result.setting),
                "bounds": to_builtins(row.result.bounds),
                "loosened": row.result.loosened,
                "controls_noticed": row.result.controls,
                "passed": row.result.passed,
                "reasons": row.result.reasons,
                "notes": _notes(row),
            }
        if row.over_reuse is not None:
            entry["kl_below_plain_reuse"] = to_builtins(row.over_reuse)
        rows.append(entry)
    results = [row.result for row in run.rows if row.result is not None]
    return {
        "model": model,
        "weights": run.weights,
        "prompts": results[0].prompts,
        "confidence": results[0].confidence,
        "seed": results[0].seed,
        "rows": rows,
        "verdict": str(verdict),
        "png": None if png is None else str(png),
    }


def _cells(row: Judged, has_answers: bool) -> list[object]:
    figures = row.figures
    verdict = "control"
    if row.result is not None:
        verdict = "PASS" if row.result.passed else "FAIL"
    if row.name == "exact":
        first = printing.wait(row.seconds)
        return [
            "exact",
            "",
            "",
            *[""] * has_answers,
            first,
            RightAligned("100 %"),
            "",
        ]
    answers = [] if figures.answers is None else [_share(figures.answers)]
    return [
        row.name,
        RightAligned(f"{figures.kl.value:.3f} ({figures.kl.high:.3f})"),
        _share(figures.top1),
        *answers,
        RightAligned("" if row.result is None else f"{figures.ttft.value:.2f}x"),
        RightAligned(
            "" if row.result is None else f"{100 * figures.bytes:.0f} %"
        ),
        verdict,
    ]


def _share(interval: Interval) -> str:
    return RightAligned(f"{_percent(interval.value)} ({_percent(interval.low)})")


def _percent(share: float) -> str:
    """Return a percentage with three digits; it is not rounded up to 100."""
    return f"{100 * share:.0f}" if share >= 1 else f"{min(100 * share, 99.9):.1f}"


def _sentence(row: Judged) -> str:
    """Return the verdict on a setting in plain words."""
    assert row.result is not None
    loose = row.result.loosened
    bounds = f"loosened bounds ({loose})" if loose else "all bounds"
    said = f"PASS: it keeps {bounds}, and these prompts detect wrong KV"
    if not row.result.passed:
        said = f"FAIL: {'; '.join(row.result.reasons)}"
    return ". ".join([said, *_notes(row)]) + "."


def _notes(row: Judged) -> list[str]:
    """Return what a user should know in addition to the verdict."""
    notes = []
    if row.over_reuse is not None and not row.over_reuse.low > 0:
        notes.append(
            "It is perhaps no nearer to exact KV than plain reuse, which computes less"
        )
    if (
        row.result is not None
        and row.result.setting.feature == "blend"
        and row.figures.ttft.low >= 1
    ):
        notes.append(
            "It is not faster than computing everything, for prompts of this length on this machine"
        )
    return notes
