"""What the plots of `pagoda replay` and `pagoda quality` show, read from the figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pagoda.base.quality_bounds import Bounds, Figures, Interval
from pagoda.base.quality_verdict import Result, Setting
from pagoda.config import Config
from pagoda_tools.cli import hit_rate_plot, quality_plot
from pagoda_tools.cli.replay import configured_sizes
from pagoda_tools.cli.replay_inputs import OPTIMUM, Cell
from pagoda_tools.quality.judge import Judged

GIB = 2**30


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    """The figures that were saved; they are saved all the same."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: object, **options: object) -> None:
        figures.append(figure)
        save(figure, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def texts(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


def curve(
    tmp_path: Path, sizes: list[int], chunk_bytes: int | None, **marked: int
) -> None:
    cells = [
        Cell(name, size, number / 10)
        for name in ("lru", OPTIMUM)
        for number, size in enumerate(sizes)
    ]
    hit_rate_plot.save_png(
        tmp_path / "x.png", cells, 0.9, "title", chunk_bytes, marked
    )


def test_sizes_have_their_units_and_the_configured_ones_are_lines(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    sizes = [8, 64, 1024, 3072]
    curve(tmp_path, sizes, GIB, host_size=64 * GIB, disk_size=2048 * GIB)
    (axes,) = drawn[0].axes
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["8 GiB", "64 GiB", "1 TiB", "3 TiB"]
    assert {"host_size = 64 GiB", "disk_size = 2 TiB"} <= set(texts(axes))
    lines = [
        line.get_xdata()[0]
        for line in axes.lines
        if "_size" in str(line.get_label())
    ]
    assert lines == [64 * GIB, 2048 * GIB]


def test_a_configured_size_that_is_far_away_does_not_press_the_curve(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    curve(tmp_path, [8, 64], GIB, host_size=GIB // 100, disk_size=10**6 * GIB)
    (axes,) = drawn[0].axes
    low, high = axes.get_xlim()
    assert low > 4 * GIB
    assert high < 128 * GIB
    said = texts(axes)
    assert any("host_size" in text and "below all" in text for text in said)
    assert any("disk_size" in text and "above all" in text for text in said)


def test_sizes_in_chunks_have_no_mark(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    curve(tmp_path, [8, 6400], None, host_size=64 * GIB)
    (axes,) = drawn[0].axes
    assert axes.get_xlabel() == "chunks"
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "8",
        "6,400",
    ]
    for text in texts(axes):
        assert "host_size" not in text


def test_configured_sizes_are_those_of_the_tiers(tmp_path: Path) -> None:
    both = Config(host_size="64GiB", disk_path=str(tmp_path), disk_size="1TiB")
    assert configured_sizes(both) == {
        "host_size": 64 * GIB,
        "disk_size": 1024 * GIB,
    }
    assert configured_sizes(Config(host_size=0)) == {}
    assert list(configured_sizes(Config())) == ["host_size (auto)"]


def judged(name: str, kl: float, passed: bool, feature: str = "codec") -> Judged:
    def exactly(value: float) -> Interval:
        return Interval(value, value / 2, value * 2)

    figures = Figures(
        kl=exactly(kl),
        top1=exactly(0.9),
        same_text=exactly(0.9),
        answers=None,
        ttft=exactly(0.4),
        bytes=0.25,
    )
    result = Result(
        setting=Setting(feature, {}),
        bounds=Bounds(0.05, 0.9, 0.9, 5),
        figures=figures,
        controls={},
        prompts=5,
        prompts_digest="",
        new_tokens=5,
        confidence=0.95,
        seed=0,
        made="",
        passed=passed,
        reasons=[],
    )
    return Judged(name, figures, 1.0, result)


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["codec", "blend"])
def test_quality_is_logarithmic_and_says_pass_or_fail(
    tmp_path: Path, drawn: list[Figure], feature: str
) -> None:
    rows = [
        judged("q8", 0.0004, True, feature),
        judged("q4", 0.02, True, feature),
        judged("q2", 3.0, False, feature),
        judged("zstd", 0.0, True, feature),
    ]
    quality_plot.save_png(tmp_path / "x.png", rows, "title")
    (axes,) = drawn[0].axes
    assert axes.get_yscale() == "log"
    said = {text.get_text() for text in axes.texts}
    assert said == {"q8 PASS", "q4 PASS", "q2 FAIL", "zstd PASS, KL 0"}
    low, high = axes.get_ylim()
    assert 0 < low <= 0.0004
    assert high >= 6.0
    markers = {line.get_marker() for line in axes.lines}
    assert {"o", "X"} <= markers, "verdicts differ without colours, too"
