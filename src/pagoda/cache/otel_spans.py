"""OpenTelemetry spans of the calls of a cache, switched on by `Config.otel`. `Call` makes and calls
a `SpanRecorder`.

A span is made when its call has ended, so that a call costs nothing while spans are off. Its parent
is the span of the thread that ran the call. No span has a token of a prompt, a key or a salt.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pagoda.base.errors import ConfigError
from pagoda.base.log import guarded_logger
from pagoda.cache.results import Hit, Stored

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.util.types import AttributeValue

log = guarded_logger("pagoda.cache")


class SpanRecorder:
    """Makes spans by the tracer provider of this process. Thread-safe; never raises after it was
    made.
    """

    def __init__(self) -> None:
        """Raises ConfigError where opentelemetry-api is not installed."""
        try:
            from opentelemetry import trace
        except ImportError as missing:
            raise ConfigError(
                f"otel = true: {missing}; pip install 'pagodakv[otel]', or leave it out"
            ) from None
        self._tracer = trace.get_tracer("pagoda")
        self._fails = False

    def record(self, name: str, answer: object, seconds: float) -> None:
        """Make the span of a call that has just ended, if its answer is a hit or what was
        stored.
        """
        attributes = _attributes(answer)
        if attributes is None or self._fails:
            return
        end_ns = time.time_ns()
        try:
            span = self._tracer.start_span(
                f"pagoda.{name}",
                attributes=attributes,
                start_time=end_ns - int(seconds * 1e9),
            )
            span.end(end_ns)
        except Exception as error:  # noqa: BLE001
            # a boundary: the tracer provider is the program's
            self._fails = True
            log.warning(
                "no more OpenTelemetry spans are made: %s: %s",
                type(error).__name__,
                error,
            )


def _attributes(answer: object) -> Mapping[str, AttributeValue] | None:
    found: dict[str, AttributeValue]
    if isinstance(answer, Hit):
        found = {
            "pagoda.tokens": len(answer.mask) - answer.start_tokens,
            "pagoda.hit_tokens": answer.num_tokens,
        }
        found |= {"pagoda.tiers": list(answer.by_tier)}
        if answer.behind_tokens:
            found |= {"pagoda.behind_tokens": answer.behind_tokens}
    elif isinstance(answer, Stored):
        found = {
            "pagoda.stored_tokens": answer.num_tokens,
            "pagoda.refused_chunks": answer.refused,
        }
    else:
        return None
    return (
        found
        if answer.reason is None
        else found | {"pagoda.reason": answer.reason.value}
    )
