"""Request hints: what a caller knows of a request and its cache does not, such as its session.

`Cache` takes them with its calls; `CallerHints` passes them to the ledgers of the local tiers,
counts what became of each, and notes it in the recorded trace. No call fails because of a hint.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum, auto
from typing import Literal, NamedTuple

from pagoda.base.clock import Deadline
from pagoda.base.log import guarded_logger
from pagoda.cache.counters import CacheCounters
from pagoda.cache.recording import SaidOfRequest
from pagoda.config.option_values import HintMode
from pagoda.ledger import Ledger
from pagoda.ledger.request_contexts import Asked, HintedChunks
from pagoda.ledger.retained_chunks import RETAINED_SHARE
from pagoda.ledger.session_numbers import digest
from pagoda.policy.reuse_context import Ending

log = guarded_logger("pagoda.cache")

EndingName = Literal["", "tool_call", "turn", "other"]

MOST_SECONDS = 86_400.0
"""The longest time for which a hint retains a prompt."""

_LONGEST_NAME = 256
_ENDINGS = {
    "": Ending.UNKNOWN,
    "tool_call": Ending.TOOL_CALL,
    "turn": Ending.TURN,
    "other": Ending.OTHER,
}
# as servers of OpenAI's API name them: what `pagoda replay` reads
_STOPS = {"tool_call": "tool_calls", "turn": "stop", "other": "length"}
_PATIENCE_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class RequestHints:
    """What a caller knows of one request. Immutable.

    A hint is information, not an order: the policy learns what chunks of such requests are worth,
    so a wrong one costs little. It moves only chunks of the request's own prompt and session, which
    other tenants cannot name. None prevents a store.

    Args:
        session: which conversation the request belongs to, at most 256 characters. The same name of
            another tenant is another session.
        agent: which agent of the session asks, if each has a conversation of its own.
        ending: how the answer ended: "tool_call", "turn" (the user is next), "other"; empty: not
            known. A session is asked again soon after a tool call, later after a turn.
        session_end: nothing more will be asked in the session. Its chunks go first, except those
            that another session used.
        drop: this prompt will not be asked for again. Its chunks go first, except those that
            another session used.
        retain_seconds: evict the chunks of this prompt after all others for so long. At most a
            day, and for all requests together at most 1/64 of a tier.

    Raises ValueError for values that make no sense.

    Example:
        >>> from pagoda import RequestHints
        >>> RequestHints(session="a1", ending="tool_call").names
        ('session', 'ending')
    """

    session: str = ""
    agent: str = ""
    ending: EndingName = ""
    session_end: bool = False
    drop: bool = False
    retain_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("session", "agent"):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) > _LONGEST_NAME:
                raise ValueError(
                    f"{name} = {str(value)[:40]!r}: write a name of at most "
                    f"{_LONGEST_NAME} characters"
                )
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError(
                    f"{name} = {value[:40]!r}: write a name without lone surrogates"
                ) from None
        if not isinstance(self.ending, str) or self.ending not in _ENDINGS:
            raise ValueError(
                f"ending = {self.ending!r}: write one of {', '.join(_STOPS)}, or leave it out"
            )
        for name in ("session_end", "drop"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"{name} = {getattr(self, name)!r}: write True or False"
                )
        seconds = self.retain_seconds
        if (
            isinstance(seconds, bool)
            or not isinstance(seconds, (int, float))
            or not math.isfinite(seconds)
            or seconds < 0
        ):
            raise ValueError(
                f"retain_seconds = {seconds!r}: write a number of seconds, 0 or more"
            )
        if self.session_end and not self.session:
            raise ValueError("session_end without a session: name the session")
        if self.agent and not self.session:
            raise ValueError("agent without a session: name the session")
        if self.drop and seconds:
            raise ValueError(
                "drop and retain_seconds say the opposite: write one of them"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The hints that are given."""
        return tuple(one.name for one in fields(self) if getattr(self, one.name))


LATER = RequestHints()
"""In place of the hints of a store that is a part of a request: `Cache.note_answer` follows."""


class HintAnswer(StrEnum):
    """What became of a hint."""

    ACCEPTED = auto()
    CLIPPED = auto()
    REFUSED = auto()


class HintResult(NamedTuple):
    """What became of one hint of a request. Immutable.

    Attributes:
        hint: which one, as in `RequestHints`.
        answer: accepted, clipped or refused.
        why: the limit that clipped it, or why it was refused; empty if it was accepted.
    """

    hint: str
    answer: HintAnswer
    why: str = ""

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"{self.hint} {self.answer}{why}"


class HintedRequest(NamedTuple):
    """A request, as far as hints are concerned: whose it is, the keys of its prompt, of which
    `first` are not known, and the deadline of its call.
    """

    root: bytes
    keys: Sequence[bytes]
    deadline: Deadline
    first: int = 0

    def patience_seconds(self) -> float:
        """Return how long a tier is waited for."""
        return min(_PATIENCE_SECONDS, self.deadline.remaining())


class CallerHints:
    """Takes the hints of one cache's calls. Thread-safe; never raises."""

    def __init__(self, counters: CacheCounters, mode: HintMode) -> None:
        self._counters = counters
        self._mode = mode
        # of the first local tier
        self._ledger: Ledger | None = None
        # what became of hints in this process
        self._answers: Counter[HintResult] = Counter()

    def begin(self, ledgers: Mapping[str, Ledger]) -> None:
        """Note the local tiers, from the top down; keep contexts from the start, if the option says
        so.
        """
        self._ledger = next(iter(ledgers.values()), None)
        if self._mode == "always":
            for ledger in ledgers.values():
                ledger.contexts.keep()

    @property
    def are_heard(self) -> bool:
        """Whether a request without hints matters to those of others. Cheap."""
        ledger = self._ledger
        return ledger is not None and ledger.contexts.are_kept

    def asked(self, request: HintedRequest, hints: RequestHints | None) -> Asked:
        """Return a request as ledgers know it."""
        whole = request.keys and not request.first
        first_key = request.keys[0] if whole else b""
        if hints is None:
            return Asked(request.root, first_key)
        return Asked(
            request.root,
            first_key,
            hints.session,
            hints.agent,
            _ENDINGS[hints.ending],
            hints.session_end,
            hints.drop,
        )

    def note_use(
        self,
        ledgers: Mapping[str, Ledger],
        request: HintedRequest,
        hints: RequestHints | None,
    ) -> None:
        """Note which session asks for a prompt; hints of the answer wait for `note_answer`."""
        if self._mode == "never":
            return
        asked = self.asked(request, hints)
        for ledger in ledgers.values():
            if hints is not None:
                ledger.contexts.keep()
            ledger.contexts.note_use(
                request.keys, asked, request.patience_seconds()
            )

    def note_answer(
        self,
        ledgers: Mapping[str, Ledger],
        request: HintedRequest,
        hints: RequestHints | None,
        context: int | None = None,
    ) -> tuple[HintResult, ...]:
        """Note how a request ended; return what became of each hint. `context`: that of its new
        chunks, if it is known.
        """
        names = () if hints is None else hints.names
        if self._mode == "never" or not ledgers:
            why = "hints = 'never'" if ledgers else "there is no local tier"
            return self._counted(
                [HintResult(name, HintAnswer.REFUSED, why) for name in names]
            )
        asked = self.asked(request, hints)
        seconds = 0.0 if hints is None else hints.retain_seconds
        found: dict[str, HintedChunks] = {}
        uses = False
        for name, ledger in ledgers.items():
            kept = ledger.contexts.are_kept
            if hints is not None and not kept:
                kept = ledger.contexts.keep()
            uses |= kept
            found[name] = ledger.contexts.note_answer(
                request.keys,
                asked,
                min(seconds, MOST_SECONDS),
                context,
                request.patience_seconds(),
            )
        return self._counted(
            [_result(name, seconds, found, uses) for name in names]
        )

    def refuse(self, hint: str, why: str) -> HintResult:
        """Count a hint that no call can take."""
        return self._counted([HintResult(hint, HintAnswer.REFUSED, why)])[0]

    def stats(self) -> dict[str, dict[str, int]]:
        """Return how many hints of this process were accepted, clipped and refused, by hint and
        why.
        """
        counted: dict[str, dict[str, int]] = {}
        for (hint, answer, why), count in list(self._answers.items()):
            told = f"{hint}: {why}" if why else hint
            counted.setdefault(str(answer), {})[told] = count
        return counted

    def _counted(self, results: Sequence[HintResult]) -> tuple[HintResult, ...]:
        self._answers.update(results)
        counts = Counter(f"hints_{one.answer}" for one in results)
        if results:
            self._counters.add(counts)
            log.debug("hints: %s", ", ".join(map(str, results)))
        return tuple(results)


def said(
    root: bytes, hints: RequestHints, results: Sequence[HintResult] = ()
) -> SaidOfRequest:
    """Return what the record of a request says of its hints: hashed names."""
    return SaidOfRequest(
        digest(root, hints.session).hex()[:16] if hints.session else "",
        digest(root, hints.agent).hex()[:16] if hints.agent else "",
        _STOPS.get(hints.ending, ""),
        hints.session_end,
        hints.drop,
        min(hints.retain_seconds, MOST_SECONDS),
        ", ".join(str(one) for one in results),
    )


def _result(
    hint: str, seconds: float, found: Mapping[str, HintedChunks], uses: bool
) -> HintResult:
    """Return what became of a hint, by what it reached in each tier."""
    present = any(one.present for one in found.values())
    if hint in ("drop", "retain_seconds") and not present:
        why = "no chunk of the prompt is stored"
        return HintResult(hint, HintAnswer.REFUSED, why)
    if hint == "retain_seconds":
        return _retained(hint, seconds, found)
    if not uses:
        why = "the policy lru makes no use of it"
        return HintResult(hint, HintAnswer.REFUSED, why)
    if not any(one.noted for one in found.values()):
        return HintResult(hint, HintAnswer.REFUSED, "the ledger is busy")
    return HintResult(hint, HintAnswer.ACCEPTED)


def _retained(
    hint: str, seconds: float, found: Mapping[str, HintedChunks]
) -> HintResult:
    whole = f"retained chunks take at most 1/{RETAINED_SHARE} of a tier"
    if not any(one.retained for one in found.values()):
        return HintResult(hint, HintAnswer.REFUSED, whole)
    if any(one.retained < one.present for one in found.values()):
        return HintResult(hint, HintAnswer.CLIPPED, whole)
    if seconds > MOST_SECONDS:
        why = f"at most {MOST_SECONDS:.0f} s"
        return HintResult(hint, HintAnswer.CLIPPED, why)
    return HintResult(hint, HintAnswer.ACCEPTED)
