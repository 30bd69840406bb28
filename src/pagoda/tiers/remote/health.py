"""Whether a remote store, a node of it or a neighbour is used now.

`remote_tier` knows it of its store, `redis_nodes` of each node, `peers` of each neighbour and of
their directory.
"""

from __future__ import annotations

from pagoda.base.clock import Clock
from pagoda.base.metrics import Reason
from pagoda.tiers.breaker import CircuitBreaker

# failures in a row, after which it is only asked whether it is back
_FAILURES = 2
# refusals in a row, after which nothing is written to it for a while: it is full or read-only
_REFUSALS = 4
_REFUSED_SECONDS = 5.0


def answering(clock: Clock, rest_seconds: float = 1.0) -> CircuitBreaker:
    """Return the breaker of something that answers or does not."""
    return CircuitBreaker(clock, _FAILURES, rest_seconds)


class Health:
    """Whether a store or a node answers, and whether it takes writes. Thread-safe."""

    trusted_since: float
    """Connections that were made before are replaced before their next use (time.monotonic())."""

    def __init__(self, clock: Clock, rest_seconds: float = 1.0) -> None:
        """`rest_seconds`: how long it is left alone after failures."""
        self.breaker = answering(clock, rest_seconds)
        self.write_breaker = CircuitBreaker(clock, _REFUSALS, _REFUSED_SECONDS)
        self.last_refusal = Reason.IO_ERROR

    @property
    def write_refusal(self) -> Reason | None:
        """Why nothing is written to it now; None: it takes writes."""
        return self.last_refusal if self.write_breaker.resting else None
