"""Makes figures from samples, and verdicts from figures. Called by `pagoda quality`; calls
`bootstrap`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pagoda.base.quality_bounds import (
    Bounds,
    Figures,
    Interval,
    is_surely_noticed,
    objections,
)
from pagoda.base.quality_verdict import Result, Setting
from pagoda_tools.quality.approaches import PLAIN_REUSE
from pagoda_tools.quality.bootstrap import difference_interval, ratio_interval
from pagoda_tools.quality.measure import QualitySample


class RunFacts(NamedTuple):
    """What a result says of the run that it is from, as `Result` has it."""

    prompts_digest: str
    new_tokens: int
    confidence: float
    seed: int
    made: str


class Judged(NamedTuple):
    """One row of the report. A setting has a result; exact KV and controls do not."""

    name: str
    figures: Figures
    seconds: float  # to the first token, a prompt
    result: Result | None = None
    # nats per token by which it is nearer to exact KV than plain reuse
    over_reuse: Interval | None = None


def judged(
    samples: Mapping[str, Sequence[QualitySample]],
    settings: Mapping[str, Setting],
    controls: Sequence[str],
    bounds: Mapping[str, Bounds],
    has_answers: bool,
    facts: RunFacts,
) -> list[Judged]:
    """Return the rows of the report: exact KV, each setting with its verdict, the controls.

    If a control may keep the bounds of a setting, the setting fails, because these prompts do not
    detect wrong KV.

    Args:
        samples: the samples of each approach, by its name, and of "exact".
        settings: the settings, by the name of their approach.
        controls: the names of the approaches that must fail.
        bounds: the bounds of each feature.
        has_answers: whether all prompts have an expected answer.
        facts: of the run; its confidence and its seed make the intervals.
    """
    exact = samples["exact"]
    figures = {
        name: figures_of(mine, exact, has_answers, facts)
        for name, mine in samples.items()
    }
    rows = [Judged("exact", figures["exact"], _seconds(exact))]
    for name, setting in settings.items():
        limit = bounds[setting.feature]
        prompts = len(exact)
        noticed = {
            control: is_surely_noticed(figures[control], limit)
            for control in controls
        }
        reasons = objections(
            figures[name], limit, noticed, prompts, facts.confidence
        )
        result = Result(
            setting,
            limit,
            figures[name],
            noticed,
            prompts,
            *facts,
            not reasons,
            reasons,
        )
        over = None
        if (
            setting.feature == "blend"
            and PLAIN_REUSE in samples
            and name != PLAIN_REUSE
        ):
            reuse, mine = (
                [one.kl for one in samples[each]] for each in (PLAIN_REUSE, name)
            )
            tokens = [one.tokens for one in samples[name]]
            over = difference_interval(
                reuse, mine, tokens, confidence=facts.confidence, seed=facts.seed
            )
        rows.append(
            Judged(name, figures[name], _seconds(samples[name]), result, over)
        )
    return [
        *rows,
        *(
            Judged(name, figures[name], _seconds(samples[name]))
            for name in controls
        ),
    ]


def figures_of(
    samples: Sequence[QualitySample],
    exact: Sequence[QualitySample],
    has_answers: bool,
    facts: RunFacts,
) -> Figures:
    """Return the figures of samples, compared with the samples of exact KV on the same prompts."""

    def share(parts: Sequence[float], wholes: Sequence[float]) -> Interval:
        return ratio_interval(
            parts, wholes, confidence=facts.confidence, seed=facts.seed
        )

    tokens = [one.tokens for one in samples]
    return Figures(
        kl=share([one.kl for one in samples], tokens),
        top1=share([one.same_tokens for one in samples], tokens),
        same_text=share(
            [one.same_text for one in samples], np.ones(len(samples)).tolist()
        ),
        answers=share(
            [one.right for one in samples], [one.right for one in exact]
        )
        if has_answers
        else None,
        ttft=share(
            [one.seconds for one in samples], [one.seconds for one in exact]
        ),
        bytes=sum(one.stored_bytes for one in samples)
        / sum(one.exact_bytes for one in samples),
    )


def _seconds(samples: Sequence[QualitySample]) -> float:
    return sum(one.seconds for one in samples) / len(samples)
