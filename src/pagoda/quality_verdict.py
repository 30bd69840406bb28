"""The verdict of `pagoda quality`: whether an approximate feature may start for a model, and why not.

Blending and lossy codecs change what a model computes. They start only with a verdict that was measured on the same
weights with the same settings and kept its bounds, or with the option `unchecked`, which `stats` then shows.

Written by `pagoda quality` (`pagoda.quality.write_verdict`); read by what has such a feature (`require_quality`), when
it starts. In the lowest layer, because a connector and a tier of a cache both call it. A verdict is a JSON file:

    format, version, model, weights[], pagoda    what it is about; `weights` are names of the same weights
    results[]                                    for each setting: bounds, figures, controls, whether it passed
    checksum                                     of all the rest

The checksum detects damage and careless edits, not forgery: who may write the file may also set `unchecked`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec
from blake3 import blake3

from pagoda.errors import ConfigError

__all__ = [
    "FORMAT", "VERSION", "Bounds", "Figures", "Interval", "QualityState", "Result", "Setting", "Verdict",
    "default_directory", "objections", "read_verdict", "require_quality", "weights_name",
]  # fmt: skip

FORMAT = "pagoda quality verdict"
VERSION = 1  # raised when figures or bounds change their meaning: older verdicts are then refused
Option: TypeAlias = str | int | float | bool

_MOST_BYTES = 16 << 20
_MOST_FILES = 1000  # of a directory that are looked at
_BY_POSITION = {"blend": ("policy", "recompute"), "codec": ("codec",)}  # options that need no name in text
_CHUNK = "chunk_tokens"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An approximate feature and all its options that change the values of KV. Two that are equal compute the same.

    `feature` is "blend" or "codec". `options` includes the feature's own "version", which is raised when the same
    options begin to compute something else.
    """

    feature: str
    options: dict[str, Option]

    def __str__(self) -> str:
        return " ".join([self.feature, *(f"{name}={_text(value)}" for name, value in self._named())])

    @property
    def flag(self) -> str:
        """The option of `pagoda quality` that measures this setting, such as "--blend deviation:0.15"."""
        plain = _BY_POSITION.get(self.feature, ())
        first = [_text(self.options[name]) for name in plain if name in self.options]
        rest = [(name, _text(value)) for name, value in self._named() if name not in plain]
        named = [f"{name}={value}" for name, value in rest if name != _CHUNK]
        chunk = [f" --chunk-tokens {value}" for name, value in rest if name == _CHUNK]
        return f"--{self.feature} {':'.join([*first, *named])}{''.join(chunk)}"

    def is_same(self, other: Setting) -> bool:
        """Return whether both compute the same. Numbers are compared in six decimals."""
        return self.feature == other.feature and _rounded(self.options) == _rounded(other.options)

    def _named(self) -> list[tuple[str, Option]]:
        return sorted((name, value) for name, value in self.options.items() if name != "version")


class Interval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure and its confidence interval."""

    value: float
    low: float
    high: float


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a setting must keep. An interval keeps a bound if its worse end does."""

    kl: float  # at most; nats a token: the log of how much the perplexity of the model's own text rises
    top1: float  # at least; share of tokens whose most likely successor is the same
    answers: float  # at least; right answers as a share of those with exact KV. Needs expected answers
    prompts: int  # at least; fewer cannot tell


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured for one setting, beside exact KV."""

    kl: Interval
    top1: Interval
    same_text: Interval  # share of prompts whose greedy text is the same
    answers: (
        Interval | None
    )  # right answers as a share of those with exact KV; None if no answers were expected
    ttft: Interval  # time to first token, as a share of that with exact KV computed
    bytes: float  # of the KV as it is stored, as a share of the exact one


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One setting, measured. `passed` and `reasons` follow from the other fields: see `objections`."""

    setting: Setting
    bounds: Bounds
    figures: Figures
    controls: dict[str, bool]  # KV that is surely wrong, by what was done to it: whether it was found out
    prompts: int
    prompts_digest: str
    new_tokens: int  # of each answer, at most
    confidence: float  # of the intervals, such as 0.95
    seed: int
    made: str  # when, in UTC
    passed: bool
    reasons: list[str]


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A verdict file: all results for one model."""

    model: str
    weights: list[str]
    pagoda: str  # the release that measured
    results: list[Result]
    format: str = FORMAT
    version: int = VERSION
    checksum: str = ""

    def digest(self) -> str:
        """Return what `checksum` must be: a hash of all the rest."""
        content = msgspec.json.encode(msgspec.structs.replace(self, checksum=""), order="sorted")
        return str(blake3(content, derive_key_context="PagodaKV quality verdict").hexdigest())

    @staticmethod
    def file_name(name: str) -> str:
        """Return the name of the file, in a directory of verdicts, for weights of that name."""
        if not _PLAIN_NAME.fullmatch(name):
            name = blake3(
                name.encode(errors="surrogatepass"), derive_key_context="PagodaKV verdict file name"
            ).hexdigest(16)
        return f"{name}.json"


class QualityState(NamedTuple):
    """Why a feature runs with a setting, or no longer does; `stats` shows it."""

    setting: Setting
    # "exact": these options change nothing that the model computes, as the feature itself says
    # "left out": it began with other weights, and is not used with the present ones
    checked: Literal["passed", "unchecked", "exact", "left out"]
    detail: str

    def as_stats(self) -> dict[str, object]:
        """Return it as an entry of `stats()["approximate"]`."""
        return {"setting": str(self.setting), "checked": self.checked, "detail": self.detail}


class _Refusal(NamedTuple):
    """Why a file does not help; the highest `rank` says most."""

    rank: int
    why: str


def require_quality(
    setting: Setting,
    *,
    weights: str,
    weights_epoch: int = 0,
    lora: str = "",
    verdicts: str | Path,
    unchecked: bool = False,
) -> QualityState:
    """Return why a feature may start with these settings, or raise what is missing. Changes nothing.

    Reads one small file, or those of a directory: remember the answer. Call it again when the weights change.
    Thread-safe.

    Args:
        setting: the feature and its options.
        weights: what names the weights, `Namespace.weights`.
        weights_epoch: updates in place since then, `Namespace.weights_epoch`.
        lora: the active adapters, `Namespace.lora`: what was measured without them says nothing about them.
        verdicts: a verdict file or a directory of them, `Config.quality_verdicts`; empty: `default_directory()`.
        unchecked: start without a passing verdict, `Config.unchecked`.

    Raises:
        ConfigError: there is no passing verdict; one sentence with the reason and the command to run.
    """
    name = weights_name(weights, weights_epoch, lora)
    found: str | _Refusal = _Refusal(0, "the namespace does not name the weights")
    if name:
        found = _looked_up(setting, name, Path(verdicts or default_directory()))
    if isinstance(found, str):
        return QualityState(setting, "passed", f"measured: {found}")
    if unchecked:
        return QualityState(setting, "unchecked", f"used without a passing verdict: {found.why}")
    raise ConfigError(
        f"{setting} changes what the model computes, and nothing says that it is good enough: {found.why}; "
        f"{_remedy(setting, name, lora)}; or set unchecked = true to use it all the same"
    )


def _remedy(setting: Setting, name: str, lora: str) -> str:
    if not name:
        return "name them (Namespace.weights)"
    command, named = f"pagoda quality MODEL PROMPTS.jsonl {setting.flag}", f"--weights {shlex.quote(name)}"
    if lora:
        return f"run: {command} {named}, where MODEL has the adapter merged into it"
    return f"run: {command} (with {named} if the engine is not Transformers)"


def default_directory() -> Path:
    """Return where verdicts of this user are. Changes nothing; the directory need not be there."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(home, "pagoda", "quality")


def weights_name(weights: str, weights_epoch: int = 0, lora: str = "") -> str:
    """Return the name of weights in a verdict: updated in place, or with an adapter, they are others. Pure."""
    if not weights:
        return ""
    return weights + (f"+epoch{weights_epoch}" if weights_epoch else "") + (f"+lora:{lora}" if lora else "")


def objections(
    figures: Figures, bounds: Bounds, controls: dict[str, bool], prompts: int, confidence: float
) -> list[str]:
    """Return in plain words why a setting does not pass; empty: it passes. Pure."""
    found = []
    if prompts < bounds.prompts:
        found.append(f"{prompts} prompts are too few to tell: at least {bounds.prompts} are needed")
    if not controls:
        found.append("nothing shows that wrong KV would have been noticed: no control was run")
    found += [
        f"the control was not noticed: {name} keeps the bounds too, so these prompts do not depend on the KV"
        for name, noticed in controls.items()
        if not noticed
    ]
    return found + _broken(figures, bounds, confidence)


def _broken(figures: Figures, bounds: Bounds, confidence: float) -> list[str]:
    """Return which figures break their bounds. A figure that is no number breaks any bound."""
    found, sure = [], f"the {confidence * 100:g} % interval"
    kl, top1, answers = figures.kl, figures.top1, figures.answers
    if not kl.high <= bounds.kl:
        found.append(
            f"the KL divergence is {kl.value:.4f} nats a token, and {sure} reaches {kl.high:.4f}: "
            f"at most {bounds.kl:g} is allowed{_unsure(kl.value <= bounds.kl)}"
        )
    if not top1.low >= bounds.top1:
        found.append(
            f"{_percent(top1.value)} of the tokens are the same, and {sure} begins at {_percent(top1.low)}: "
            f"at least {_percent(bounds.top1)} are needed{_unsure(top1.value >= bounds.top1)}"
        )
    if answers is not None and not answers.low >= bounds.answers:
        found.append(
            f"right answers are {_percent(answers.value)} of those with exact KV, and {sure} begins at "
            f"{_percent(answers.low)}: at least {_percent(bounds.answers)} are needed"
            f"{_unsure(answers.value >= bounds.answers)}"
        )
    return found


def _unsure(keeps: bool) -> str:
    return "; it may be good enough, and more prompts would tell" if keeps else ""


def read_verdict(path: str | Path) -> Verdict:
    """Return the verdict in a file, after all checks. Changes nothing.

    Raises:
        ConfigError: it cannot be read, is no verdict or of another version, was damaged, or contradicts itself.
    """
    content = _content(path)
    try:
        head = msgspec.json.decode(content, type=_Head)
        if head.format != FORMAT or len(content) > _MOST_BYTES:
            raise ConfigError(f"{path}: is no verdict of pagoda quality")
        if head.version != VERSION:
            age = "an older" if head.version < VERSION else "a newer"
            raise ConfigError(f"{path}: is of {age} version ({head.version}; this release reads {VERSION})")
        verdict = msgspec.json.decode(content, type=Verdict)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as trouble:
        raise ConfigError(f"{path}: is no verdict of pagoda quality: {trouble}") from None
    if verdict.checksum != verdict.digest():
        raise ConfigError(f"{path}: its checksum is not that of its content: it was damaged or edited")
    for result in verdict.results:
        reasons = objections(
            result.figures, result.bounds, result.controls, result.prompts, result.confidence
        )
        if result.passed == bool(reasons):
            raise ConfigError(
                f"{path}: contradicts itself: {result.setting} does not follow from its figures"
            )
    return verdict


def _content(path: str | Path) -> bytes:
    """Return the first bytes of a file, more than a verdict has. Waits for no pipe. Raises ConfigError."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return file.read(_MOST_BYTES + 1) or b""  # None: a pipe that is empty now
    except (OSError, ValueError) as trouble:
        said = trouble.strerror if isinstance(trouble, OSError) else trouble
        raise ConfigError(f"{path}: cannot be read: {said}") from None


# ---- looking up


def _looked_up(setting: Setting, name: str, place: Path) -> str | _Refusal:
    """Return the file with a passing result, else the refusal that says most."""
    worst = _Refusal(0, f"there is no verdict for the weights {name} in {place}")
    for path, is_asked in _candidates(place, name):
        answer = _judged(setting, name, path, is_asked)
        if isinstance(answer, str):
            return answer
        worst = max(worst, answer, key=lambda refusal: refusal.rank)
    return worst


def _candidates(place: Path, name: str) -> Iterator[tuple[Path, bool]]:
    """Yield the files to look at, and whether each one is named for these weights; other files may be for others."""
    if os.path.isfile(
        place
    ):  # Path.is_file raises where a directory may not be searched, or a name is too long
        yield place, True
        return
    own = place / Verdict.file_name(name)
    if os.path.isfile(own):
        yield own, True
    try:
        others = sorted(path for path in place.glob("*.json") if path != own)
    except OSError:
        return
    for path in others[:_MOST_FILES]:
        yield path, False


def _judged(setting: Setting, name: str, path: Path, is_asked: bool) -> str | _Refusal:
    try:
        verdict = read_verdict(path)
    except ConfigError as trouble:
        return _Refusal(2 if is_asked else 0, str(trouble))
    if name not in verdict.weights:
        return _Refusal(
            1 if is_asked else 0,
            f"{path} is about other weights ({', '.join(verdict.weights[:1])}), not {name}",
        )
    for result in verdict.results:
        if result.setting.is_same(setting):
            if result.passed:
                return f"{path}, {result.made}"
            return _Refusal(4, f"it was measured and FAILED ({path}): {'; '.join(result.reasons)}")
    return _Refusal(3, f"{path} is about other settings: {_listed(verdict.results, setting)}")


def _listed(results: Sequence[Result], setting: Setting) -> str:
    """Return the settings that were measured; of those that look the same, the version too."""
    return (
        ", ".join(
            f"{result.setting} version {result.setting.options.get('version')}"
            if str(result.setting) == str(setting)
            else str(result.setting)
            for result in results
        )
        or "none"
    )


# ---- the file


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


def _rounded(options: dict[str, Option]) -> dict[str, tuple[str, Option]]:
    """Return options so that equal ones are equal: 1 and 1.0 are, 1 and True are not."""
    return {
        name: ("number", round(float(value), 6))
        if isinstance(value, int | float) and not isinstance(value, bool)
        else (type(value).__name__, value)
        for name, value in options.items()
    }


def _text(value: Option) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
