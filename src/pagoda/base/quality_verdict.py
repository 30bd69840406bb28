"""The verdict of `pagoda quality`: whether an approximate feature may start for a model, and why
not.

Blending and lossy codecs change what a model computes. They start only with a verdict that was
measured on the same weights with the same settings and kept its bounds, or with the option
`unchecked`, which `stats` then shows.

Written by `pagoda quality` (`pagoda_tools.quality.write_verdict`); read by the code of such a
feature (`require_quality`), when it starts: `Cache` for its tiers with a lossy codec,
`blend.BlendGate` for documents. It is in the lowest layer, because both call it. A verdict is a
JSON file:

    format, version, model, weights[], pagoda    the subject; `weights` are several names of the
                                                 same weights
    results[]                                    for each setting: bounds, figures, controls,
                                                 whether it passed
    checksum                                     a hash of everything else

The checksum detects damage and careless edits, not forgery: a user who may write the file may also
set `unchecked`. So a file that others than its owner could have written is refused. (Its owner may
be another user, who measured for
all: whoever names his file believes him.)
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec
from blake3 import blake3

from pagoda.base.errors import ConfigError
from pagoda.base.log import guarded_logger
from pagoda.base.quality_bounds import (
    DEFAULT_BOUNDS,
    Bounds,
    Figures,
    loosened,
    objections,
)
from pagoda.base.trusted_files import user_config_directory, writable_by_others

_log = guarded_logger("pagoda.quality")

FORMAT = "pagoda quality verdict"
# raised when figures or bounds change their meaning: older verdicts are then refused
VERSION = 1
Option: TypeAlias = str | int | float | bool

_MOST_BYTES = 16 << 20
_MOST_FILES = 1000  # the most files of a directory that are read
# options that need no name in text
_BY_POSITION = {"blend": ("policy", "recompute"), "codec": ("codec",)}
_CHUNK = "chunk_tokens"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An approximate feature and all its options that change the values of KV. Equal settings
    compute the same.

    `feature` is "blend" or "codec". `options` includes the feature's own "version", which is raised
    when the same options begin to compute something else.
    """

    feature: str
    options: dict[str, Option]

    def __str__(self) -> str:
        return " ".join(
            [
                self.feature,
                *(f"{name}={_text(value)}" for name, value in self._named()),
            ]
        )

    @property
    def flag(self) -> str:
        """The option of `pagoda quality` that measures this setting, such as "--blend
        deviation:0.15".
        """
        plain = _BY_POSITION.get(self.feature, ())
        first = [
            _text(self.options[name]) for name in plain if name in self.options
        ]
        rest = [
            (name, _text(value))
            for name, value in self._named()
            if name not in plain
        ]
        named = [f"{name}={value}" for name, value in rest if name != _CHUNK]
        chunk = [
            f" --chunk-tokens {value}" for name, value in rest if name == _CHUNK
        ]
        return f"--{self.feature} {':'.join([*first, *named])}{''.join(chunk)}"

    def is_same(self, other: Setting) -> bool:
        """Return whether both compute the same. Numbers are compared in six decimals."""
        return self.feature == other.feature and _rounded(
            self.options
        ) == _rounded(other.options)

    def _named(self) -> list[tuple[str, Option]]:
        return sorted(
            (name, value)
            for name, value in self.options.items()
            if name != "version"
        )


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One setting, measured. `passed` and `reasons` follow from the other fields: see
    `quality_bounds.objections`.
    """

    setting: Setting
    bounds: Bounds
    figures: Figures
    # for each control (KV that is surely wrong): whether it was detected
    controls: dict[str, bool]
    prompts: int
    prompts_digest: str
    new_tokens: int  # of each answer, at most
    confidence: float  # confidence of the intervals, such as 0.95
    seed: int
    made: str  # the time of the measurement, in UTC
    passed: bool
    reasons: list[str]

    @property
    def loosened(self) -> str:
        """Which bounds are looser than the usual ones, in plain words; empty if none are."""
        if (usual := DEFAULT_BOUNDS.get(self.setting.feature)) is None:
            return ""
        answers = self.figures.answers is not None
        return loosened(
            self.bounds, usual, self.prompts, self.confidence, has_answers=answers
        )


class VerdictHead(msgspec.Struct):
    """What every version of a verdict file has."""

    format: str = ""
    version: int = 0


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
        """Return the right `checksum`: a hash of everything else."""
        content = msgspec.json.encode(
            msgspec.structs.replace(self, checksum=""), order="sorted"
        )
        return str(
            blake3(
                content, derive_key_context="PagodaKV quality verdict"
            ).hexdigest()
        )

    @staticmethod
    def file_name(name: str) -> str:
        """Return the name of the file, in a directory of verdicts, for weights of that name."""
        if not _PLAIN_NAME.fullmatch(name):
            name = blake3(
                name.encode(errors="surrogatepass"),
                derive_key_context="PagodaKV verdict file name",
            ).hexdigest(16)
        return f"{name}.json"


class QualityState(NamedTuple):
    """Why a feature runs with a setting, or no longer does; `stats` shows it."""

    setting: Setting
    # "loosened": the setting passed bounds that are looser than the usual ones
    # "exact": these options change nothing that the model computes, as the feature itself says
    # "left out": the feature started with other weights, and is not used with the present ones
    checked: Literal["passed", "loosened", "unchecked", "exact", "left out"]
    detail: str

    def as_stats(self) -> dict[str, object]:
        """Return it as an entry of `stats()["approximate"]`."""
        return {
            "setting": str(self.setting),
            "checked": self.checked,
            "detail": self.detail,
        }


class _Refusal(NamedTuple):
    """Why a file does not allow a setting; the highest `rank` is the most informative."""

    rank: int
    why: str


class _Passed(NamedTuple):
    """A file that has a passing result, and which of its bounds are looser than the usual ones."""

    where: str
    loosened: str


_FAILED = 4  # the rank of a setting that was measured and failed


def require_quality(
    setting: Setting,
    *,
    weights: str,
    weights_epoch: int = 0,
    adapters: str = "",
    verdicts: str | Path,
    unchecked: bool = False,
) -> QualityState:
    """Return why a feature may start with these settings, or raise what is missing. Changes
    nothing.

    Reads one small file, or the files of a directory, so callers should keep the answer. Call it
    again when the weights change. In a directory a failed result counts even if another result
    passed. A start with loosened bounds is logged. Thread-safe.

    Args:
        setting: the feature and its options.
        weights: the name of the weights, `Namespace.weights`.
        weights_epoch: the number of updates in place, `Namespace.weights_epoch`.
        adapters: the name of the active adapters, `Namespace.lora`; results without them do not
            apply to them.
        verdicts: a verdict file or a directory of them, `Config.quality_verdicts`; empty:
            `default_directory()`.
        unchecked: start without a passing verdict, `Config.unchecked`.

    Raises:
        ConfigError: there is no passing verdict; one sentence with the reason and the command to
            run.
    """
    name = weights_name(weights, weights_epoch, adapters)
    found: _Passed | _Refusal = _Refusal(
        0, "the namespace does not name the weights"
    )
    if name:
        found = _looked_up(setting, name, Path(verdicts or default_directory()))
    if isinstance(found, _Passed):
        if not found.loosened:
            return QualityState(setting, "passed", f"measured: {found.where}")
        said = (
            f"passed loosened bounds: {found.loosened}; measured: {found.where}"
        )
        _log.warning("%s %s", setting, said)
        return QualityState(setting, "loosened", said)
    if unchecked:
        return QualityState(
            setting, "unchecked", f"used without a passing verdict: {found.why}"
        )
    raise ConfigError(
        f"{setting} changes what the model computes, and nothing says that it is good enough: "
        f"{found.why}; "
        f"{_remedy(setting, name, adapters)}; or set unchecked = true to use it anyway"
    )


def _remedy(setting: Setting, name: str, adapters: str) -> str:
    if not name:
        return "name them (Namespace.weights)"
    command = f"pagoda quality MODEL PROMPTS.jsonl {setting.flag}"
    named = f"--weights {shlex.quote(name)}"
    if adapters:
        return (
            f"run: {command} {named}, where MODEL has the adapter merged into it"
        )
    return f"run: {command} (with {named} if the engine is not Transformers)"


def default_directory() -> Path:
    """Return the directory for this user's verdicts. Changes nothing; the directory need not exist.

    Without a home it is one that cannot exist.
    """
    return (user_config_directory() or Path(os.devnull)) / "quality"


def weights_name(weights: str, weights_epoch: int = 0, adapters: str = "") -> str:
    """Return the name of weights in a verdict: updated in place or with adapters, they have another
    name. Pure.
    """
    if not weights:
        return ""
    epoch = f"+epoch{weights_epoch}" if weights_epoch else ""
    return f"{weights}{epoch}{'+adapters ' if adapters else ''}{adapters}"


def read_verdict(path: str | Path) -> Verdict:
    """Return the verdict in a file, after all checks. Changes nothing.

    Raises:
        ConfigError: it cannot be read, is not a verdict, is of another version, was damaged, or
            contradicts itself.
    """
    content = _content(path)
    try:
        head = msgspec.json.decode(content, type=VerdictHead)
        if head.format != FORMAT:
            raise ConfigError(f"{path}: is not a verdict of pagoda quality")
        if head.version != VERSION:
            age = "an older" if head.version < VERSION else "a newer"
            raise ConfigError(
                f"{path}: is of {age} version ({head.version}; this release reads {VERSION})"
            )
        verdict = msgspec.json.decode(content, type=Verdict)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as trouble:
        raise ConfigError(
            f"{path}: is not a verdict of pagoda quality: {trouble}"
        ) from None
    if verdict.checksum != verdict.digest():
        raise ConfigError(
            f"{path}: its checksum is not that of its content: it was damaged or edited"
        )
    for number, result in enumerate(verdict.results):
        reasons = objections(
            result.figures,
            result.bounds,
            result.controls,
            result.prompts,
            result.confidence,
        )
        if result.passed == bool(reasons):
            raise ConfigError(
                f"{path}: contradicts itself: {result.setting} does not follow from its figures"
            )
        if any(
            result.setting.is_same(other.setting)
            for other in verdict.results[:number]
        ):
            raise ConfigError(
                f"{path}: contradicts itself: it has two results for {result.setting}"
            )
    return verdict


def _content(path: str | Path) -> bytes:
    """Return the content of a file that is not too large for a verdict. Never waits for a pipe.
    Raises ConfigError.
    """
    try:
        with open(
            path,
            "rb",
            opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK),
        ) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
                raise ConfigError(
                    f"{path}: is not a verdict of pagoda quality: not a file, or too large"
                )
            if why := writable_by_others(status, file.fileno(), any_owner=True):
                raise ConfigError(
                    f"{path}: is refused, because others could have written it: {why}"
                )
            return file.read(_MOST_BYTES)
    except (OSError, ValueError) as trouble:
        said = trouble.strerror if isinstance(trouble, OSError) else trouble
        raise ConfigError(f"{path}: cannot be read: {said}") from None


# ---- looking up


def _looked_up(setting: Setting, name: str, place: Path) -> _Passed | _Refusal:
    """Return the file with a passing result, if no other file has a failed one; else the most
    informative refusal.
    """
    passed = None
    worst = _Refusal(0, f"there is no verdict for the weights {name} in {place}")
    try:
        for path, is_asked in _candidates(place, name):
            answer = _judged(setting, name, path, is_asked)
            if isinstance(answer, _Passed):
                passed = passed or answer
            else:
                worst = max(worst, answer, key=lambda refusal: refusal.rank)
    except OSError as trouble:
        if trouble.errno != errno.ENOENT:
            worst = _Refusal(
                0, f"{worst.why}, which cannot be read: {trouble.strerror}"
            )
    return worst if passed is None or worst.rank == _FAILED else passed


def _candidates(place: Path, name: str) -> Iterator[tuple[Path, bool]]:
    """Yield the files to look at, and whether each one is named for these weights; others may be
    for other weights.

    Raises OSError: the directory cannot be read.
    """
    if os.path.isfile(place):
        yield place, True
        return
    own = Verdict.file_name(name)
    found = sorted(file for file in os.listdir(place) if file.endswith(".json"))
    if own in found:
        yield place / own, True
    for file in found[:_MOST_FILES]:
        if file != own:
            yield place / file, False


def _judged(
    setting: Setting, name: str, path: Path, is_asked: bool
) -> _Passed | _Refusal:
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
                return _Passed(f"{path}, {result.made}", result.loosened)
            return _Refusal(
                _FAILED,
                f"it was measured and FAILED ({path}): {'; '.join(result.reasons)}",
            )
    return _Refusal(
        3, f"{path} is about other settings: {_listed(verdict.results, setting)}"
    )


def _listed(results: Sequence[Result], setting: Setting) -> str:
    """Return the settings that were measured; of those that look the same, the version too."""
    named = []
    for other in (result.setting for result in results):
        version = (
            f" version {other.options.get('version')}"
            if str(other) == str(setting)
            else ""
        )
        named.append(f"{other}{version}")
    return ", ".join(named) or "none"


# ---- the file


def _rounded(options: dict[str, Option]) -> dict[str, tuple[str, Option]]:
    """Return options in a form that compares correctly: 1 equals 1.0, but 1 does not equal True."""
    rounded: dict[str, tuple[str, Option]] = {}
    for name, value in options.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            rounded[name] = ("number", round(float(value), 6))
        else:
            rounded[name] = (type(value).__name__, value)
    return rounded


def _text(value: Option) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
