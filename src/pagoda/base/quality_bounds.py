"""The bounds that a setting of an approximate feature must keep, and the reasons why it does not
pass. Pure.

Called by `pagoda quality`, which measures, and by `quality_verdict`, which reads the results.

The usual bounds, and what each one limits:

    kl        nats per token; the perplexity of the model's own text rises by exp(kl). Blending: 10
              %. Codecs: 1 %
    top1      tokens that stay the same. Codecs: 99 %, the bar that papers on KV quantisation set.
              Blending: 93 %
    answers   right answers, compared with exact KV. Blending: 93 %, as measured for CacheBlend.
              Codecs: 99 %
    prompts   50: if none of n prompts fails, 3 / n may still fail (the rule of three, 95 %): 6 % of
              50

Users may loosen them; a start then logs that. Beyond `LOOSEST` nothing passes, because such bounds
exclude nothing.
"""

from __future__ import annotations

import msgspec


class Interval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure and its confidence interval."""

    value: float
    low: float
    high: float


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bounds that a setting must keep. An interval keeps a bound if its worse end does."""

    # at most; nats per token: the log of the factor by which the perplexity of the model's own text
    # rises
    kl: float
    # at least; share of tokens whose most likely successor is the same
    top1: float
    # at least; right answers as a share of those with exact KV. Needs expected answers
    answers: float
    prompts: int  # at least; fewer prompts show nothing


DEFAULT_BOUNDS = {
    "blend": Bounds(kl=0.095, top1=0.93, answers=0.93, prompts=50),
    "codec": Bounds(kl=0.01, top1=0.99, answers=0.99, prompts=50),
}
# even if none of 3 prompts fails, all others may
LOOSEST = Bounds(kl=1.0, top1=0.5, answers=0.5, prompts=4)
_CONFIDENCE = 0.95
_LEAST_CONFIDENCE = 0.5


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured figures of one setting, compared with exact KV."""

    kl: Interval
    top1: Interval
    same_text: Interval  # share of prompts whose greedy text is the same
    # right answers as a share of those with exact KV; None if no answers were expected
    answers: Interval | None
    # time to first token, as a share of the time with computed exact KV
    ttft: Interval
    bytes: float  # bytes of the stored KV, as a share of exact KV


def objections(
    figures: Figures,
    bounds: Bounds,
    controls: dict[str, bool],
    prompts: int,
    confidence: float,
) -> list[str]:
    """Return in plain words why a setting does not pass; empty: it passes. Pure."""
    found = too_loose(bounds, confidence)
    if prompts < bounds.prompts:
        found.append(
            f"{prompts} prompts are too few to tell: at least {bounds.prompts} are needed"
        )
    if not controls:
        found.append(
            "nothing shows that wrong KV would have been noticed: no control was run"
        )
    found += [
        (
            f"the control was not noticed: {name} keeps the bounds too, so these prompts do not "
            "depend on the KV"
        )
        for name, noticed in controls.items()
        if not noticed
    ]
    return found + _broken(figures, bounds, confidence)


def too_loose(bounds: Bounds, confidence: float) -> list[str]:
    """Return in plain words which bounds exclude nothing, including bounds that are not numbers.
    Pure.
    """
    limits = {
        f"a KL divergence of {bounds.kl:g} nats a token, at most {LOOSEST.kl:g}": bounds.kl
        <= LOOSEST.kl,
        f"{_percent(bounds.top1)} same tokens, at least {_percent(LOOSEST.top1)}": bounds.top1
        >= LOOSEST.top1,
        f"{_percent(bounds.answers)} right answers, at least {_percent(LOOSEST.answers)}": (
            bounds.answers >= LOOSEST.answers
        ),
        f"{bounds.prompts} prompts, at least {LOOSEST.prompts}": bounds.prompts
        >= LOOSEST.prompts,
        f"intervals of {_percent(confidence)}, at least {_percent(_LEAST_CONFIDENCE)}": (
            confidence >= _LEAST_CONFIDENCE
        ),
    }
    return [
        f"a bound is so loose that it says nothing of a model: {said} can be asked for"
        for said, holds in limits.items()
        if not holds
    ]


def loosened(
    mine: Bounds,
    usual: Bounds,
    prompts: int,
    confidence: float,
    *,
    has_answers: bool,
) -> str:
    """Return which bounds are looser than the usual ones, in plain words; empty if none are. Pure.

    Args:
        mine: the bounds of a result.
        usual: the usual bounds of its feature.
        prompts: the number of prompts.
        confidence: that of the intervals.
        has_answers: whether answers were expected.
    """
    looser = {
        f"KL at most {mine.kl:g} instead of {usual.kl:g}": mine.kl > usual.kl,
        f"same tokens at least {_percent(mine.top1)} instead of {_percent(usual.top1)}": mine.top1
        < usual.top1,
        f"right answers at least {_percent(mine.answers)} instead of {_percent(usual.answers)}": (
            has_answers and mine.answers < usual.answers
        ),
        f"{prompts} prompts instead of {usual.prompts}": max(
            mine.prompts, prompts
        )
        < usual.prompts,
        f"intervals of {_percent(confidence)} instead of {_percent(_CONFIDENCE)}": confidence
        < _CONFIDENCE,
    }
    return ", ".join(said for said, holds in looser.items() if holds)


def is_surely_noticed(control: Figures, bounds: Bounds) -> bool:
    """Return whether a control surely breaks a bound, that is, with the better end of an interval.
    Pure.
    """
    return (
        control.kl.low > bounds.kl
        or control.top1.high < bounds.top1
        or (control.answers is not None and control.answers.high < bounds.answers)
    )


def _broken(figures: Figures, bounds: Bounds, confidence: float) -> list[str]:
    """Return which figures break their bounds. A figure that is not a number breaks any bound."""
    found = []
    sure = f"the {confidence * 100:g} % interval"
    kl = figures.kl
    top1 = figures.top1
    answers = figures.answers
    if not kl.high <= bounds.kl:
        found.append(
            f"the KL divergence is {kl.value:.4f} nats a token, and {sure} reaches {kl.high:.4f}: "
            f"at most {bounds.kl:g} is allowed{_unsure(kl.value <= bounds.kl)}"
        )
    if not top1.low >= bounds.top1:
        found.append(
            f"{_percent(top1.value)} of the tokens are the same, and {sure} begins at "
            f"{_percent(top1.low)}: "
            f"at least {_percent(bounds.top1)} are needed{_unsure(top1.value >= bounds.top1)}"
        )
    if answers is not None and not answers.low >= bounds.answers:
        found.append(
            f"right answers are {_percent(answers.value)} of those with exact KV, and {sure} "
            "begins at "
            f"{_percent(answers.low)}: at least {_percent(bounds.answers)} are needed"
            f"{_unsure(answers.value >= bounds.answers)}"
        )
    return found


def _unsure(keeps: bool) -> str:
    return "; it may be good enough, and more prompts would tell" if keeps else ""


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
