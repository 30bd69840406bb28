"""Whether to load is faster than to compute, by what this server and these tiers have shown."""

from __future__ import annotations

from collections import deque

LEAST_TOKENS = 32  # of a measurement: fewer say nothing
_SHARE = 0.3  # of a new measurement
# loads that are remembered: the fastest counts, because the others have also waited for each other
# or for what the server computed
_LOADS = 8
# a load that seems too slow is tried again: it may have been a bad moment
_REFUSED_IN_A_ROW = 16


class LoadWorth:
    """What both have taken lately. For the event loop."""

    def __init__(self, *, is_asked: bool) -> None:
        """`is_asked`: whether speeds decide at all (`worth_it` of the configuration)."""
        self._is_asked = is_asked
        self._compute_seconds: float | None = None  # of a token
        self._load_seconds = deque[float](maxlen=_LOADS)
        self._refused = 0

    def computed(self, tokens: int, seconds: float) -> None:
        """Account for a prompt that the server has computed."""
        if seconds > 0:
            self._compute_seconds = _mean(self._compute_seconds, seconds / tokens)

    def loaded(self, tokens: int, seconds: float) -> None:
        """Account for a load."""
        self._refused = 0
        if tokens >= LEAST_TOKENS:
            self._load_seconds.append(seconds / tokens)

    def failed(self) -> None:
        """Account for a load that gave nothing: it says nothing about speeds, and is a try."""
        self._refused = 0

    def refused(self) -> None:
        """Account for a prompt that was computed because loading seemed slower."""
        self._refused += 1

    def compute_seconds(self, tokens: int) -> float:
        """Return how long the server would take to compute so many tokens; 0: that is not known."""
        return (self._compute_seconds or 0.0) * tokens

    def is_worth(self, loaded_tokens: int, saved_tokens: int) -> bool:
        """Return whether to load so many tokens is faster than to compute so many of them; changes
        nothing.
        """
        compute = self._compute_seconds
        if not self._is_asked or compute is None or not self._load_seconds:
            return True
        if self._refused >= _REFUSED_IN_A_ROW:
            return True
        load = min(self._load_seconds)
        return load * loaded_tokens <= compute * saved_tokens


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + _SHARE * (now - before)
