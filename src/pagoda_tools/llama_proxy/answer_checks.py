"""The account, for each route, of answers that reused other tokens than were restored.

A restored slot is used only as far as we know what is in it: the server says how many tokens it
reused before the client sees a token of the answer. If these are more than were restored, the slot
is emptied and the server is asked again. Fewer are no fault of the text. After some of either in a
row nothing is loaded for that route for a while.
"""

from __future__ import annotations

import time
from collections import Counter

from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda_tools.llama_proxy.request_turn import Turn

# of answers in a row that reused other tokens than were restored: then that route loads no more for
# a while. One that comes after it is enough for the next while.
_MOST_DIFFERENCES = 3
_OFF_SECONDS = 300.0

_logger = guarded_logger("pagoda.llamacpp")
_log = RateLimitedLog()


class ReusedMoreError(Exception):
    """The server reused more tokens than were restored."""


class AnswerChecks:
    """What the routes of one proxy have shown. For the event loop."""

    def __init__(self, counts: Counter[str]) -> None:
        """`counts`: of the proxy."""
        self._counts = counts
        self._differences: Counter[str] = Counter()
        # routes for which nothing is loaded: why, and until when
        self._off: dict[str, tuple[str, float]] = {}

    def check(self, turn: Turn, reused: int | None) -> None:
        """Compare what the server reused with what was restored. Raises ReusedMoreError.

        `reused`: None: the server does not say it.
        """
        if not turn.loaded:
            return
        route = turn.question.route
        if reused is None:
            self._counts["unchecked"] += 1
            self.count_difference(route, "the server does not say what it reused")
            return
        if reused > turn.expected:
            raise ReusedMoreError(f"{reused} of {turn.expected} were reused")
        if reused < turn.expected:
            self._counts["reused_less"] += 1
            self.count_difference(
                route,
                f"the server reused {reused} of {turn.expected} restored tokens",
            )
            return
        self._differences[route] = 0

    def count_difference(self, route: str, why: str) -> None:
        """Account for an answer that reused other tokens than were restored."""
        self._differences[route] += 1
        if self._differences[route] < _MOST_DIFFERENCES:
            _log.warn(_logger, Reason.FAILED_CHECK, f"{route}: {why}")
            return
        self._off[route] = (why, time.monotonic() + _OFF_SECONDS)
        _logger.warning(
            "nothing is loaded for %s for %.0f s: %d answers in a row: %s",
            route,
            _OFF_SECONDS,
            self._differences[route],
            why,
        )

    def why_off(self, route: str) -> str:
        """Return why nothing is loaded for a route now; empty: it is."""
        why, until = self._off.get(route, ("", 0.0))
        return why if time.monotonic() < until else ""

    def all_off(self) -> dict[str, str]:
        """Return the routes for which nothing is loaded now, and why."""
        return {route: why for route in self._off if (why := self.why_off(route))}
