"""From samples to figures, and from figures to verdicts. Called by `pagoda quality`; calls `bootstrap`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pagoda.quality.approaches import PLAIN_REUSE
from pagoda.quality.bootstrap import difference_interval, ratio_interval
from pagoda.quality.measure import QualitySample
from pagoda.quality_bounds import Bounds, Figures, Interval, is_surely_noticed, objections
from pagoda.quality_verdict import Result, Setting


class Judged(NamedTuple):
    """One row of the report. A setting has a result; exact KV and controls have none."""

    name: str
    figures: Figures
    seconds: float  # to the first token, a prompt
    result: Result | None = None
    over_reuse: Interval | None = None  # nats a token by which it is nearer to exact KV than plain reuse


def judged(
    samples: Mapping[str, Sequence[QualitySample]],
    settings: Mapping[str, Setting],
    controls: Sequence[str],
    *,
    bounds: Mapping[str, Bounds],
    has_answers: bool,
    digest: str,
    new_tokens: int,
    confidence: float,
    seed: int,
    made: str,
) -> list[Judged]:
    """Return the rows of the report: exact KV, each setting with its verdict, the controls.

    A control that may keep the bounds of a setting fails the setting: then these prompts do not show that KV is wrong.

    Args:
        samples: of each approach, by its name, and of "exact".
        settings: of the approaches that are settings.
        controls: the names of the approaches that must fail.
        bounds: by feature.
        has_answers: whether all prompts have an expected answer.
        digest: names the prompts.
        new_tokens: most tokens of an answer of which none was expected.
        confidence: of the intervals.
        seed: of the bootstrap.
        made: when.
    """
    exact = samples["exact"]
    figures = {name: figures_of(mine, exact, has_answers, confidence, seed) for name, mine in samples.items()}
    rows = [Judged("exact", figures["exact"], _seconds(exact))]
    for name, setting in settings.items():
        limit, prompts = bounds[setting.feature], len(exact)
        noticed = {control: is_surely_noticed(figures[control], limit) for control in controls}
        reasons = objections(figures[name], limit, noticed, prompts, confidence)
        result = Result(
            setting, limit, figures[name], noticed, prompts, digest, new_tokens, confidence, seed, made,
            not reasons, reasons,
        )  # fmt: skip
        over = None
        if setting.feature == "blend" and PLAIN_REUSE in samples and name != PLAIN_REUSE:
            over = _difference(samples[PLAIN_REUSE], samples[name], confidence, seed)
        rows.append(Judged(name, figures[name], _seconds(samples[name]), result, over))
    return [*rows, *(Judged(name, figures[name], _seconds(samples[name])) for name in controls)]


def figures_of(
    samples: Sequence[QualitySample],
    exact: Sequence[QualitySample],
    has_answers: bool,
    confidence: float,
    seed: int,
) -> Figures:
    """Return what samples show beside those with exact KV of the same prompts."""

    def share(parts: Sequence[float], wholes: Sequence[float]) -> Interval:
        return ratio_interval(parts, wholes, confidence=confidence, seed=seed)

    tokens = [one.tokens for one in samples]
    return Figures(
        kl=share([one.kl for one in samples], tokens),
        top1=share([one.same_tokens for one in samples], tokens),
        same_text=share([one.same_text for one in samples], np.ones(len(samples)).tolist()),
        answers=share([one.right for one in samples], [one.right for one in exact]) if has_answers else None,
        ttft=share([one.seconds for one in samples], [one.seconds for one in exact]),
        bytes=sum(one.stored_bytes for one in samples) / sum(one.exact_bytes for one in samples),
    )


def _difference(
    reuse: Sequence[QualitySample], samples: Sequence[QualitySample], confidence: float, seed: int
) -> Interval:
    return difference_interval(
        [one.kl for one in reuse], [one.kl for one in samples], [one.tokens for one in samples],
        confidence=confidence, seed=seed,
    )  # fmt: skip


def _seconds(samples: Sequence[QualitySample]) -> float:
    return sum(one.seconds for one in samples) / len(samples)
