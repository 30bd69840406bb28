"""One retrieve or prefetch: a run of chunks is loaded from its tiers to the engine, or into the
host tier only.

`Cache.retrieve` makes a `RetrieveCall`, which decides whether the load begins, has a `ServeLoop`
serve the run, and answers and counts what was served.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from pagoda.base.clock import Deadline
from pagoda.base.metrics import Reason
from pagoda.cache.call import CacheRequest, CheckedTransfer
from pagoda.cache.lookup_call import (
    expected_hit,
    find_pieces,
    served_by_tier,
)
from pagoda.cache.resources import Resources
from pagoda.cache.results import Hit, Piece, runs_of
from pagoda.cache.serve_loop import Served, ServeLoop
from pagoda.cache.tier_stack import TierStack
from pagoda.ledger.request_meters import TokenLoad


def measure_again(resources: Resources, request: CacheRequest, hit: Hit) -> None:
    """Measure a tier again, in the background, if it was too slow for the lookup or retrieve whose
    answer is `hit`.

    No request waits for the measurement, which loads some of the chunks that the request did not
    get into the host tier.
    """
    lower = request.tiers.lower
    host = resources.tiers.host
    if host is not None:
        at = hit.num_tokens // request.chunk_tokens
        cost = resources.load_cost
        if chunks := next(
            filter(None, (cost.take_probe(tier.name) for tier in lower)), 0
        ):
            few = request._replace(
                tiers=TierStack(host, lower),
                deadline=Deadline(resources.config.deadline_seconds),
                keys=request.keys[at : at + chunks],
                first=request.first + at,
                parent=request.parent_of(at),
            )
            resources.executor.run_in_background(
                RetrieveCall(resources, few, None, False).run
            )


class RetrieveCall:
    """The retrieve of one run into `kv`, or without it (a prefetch) into the host tier only. Used
    by one thread, once.
    """

    def __init__(
        self,
        resources: Resources,
        request: CacheRequest,
        kv: CheckedTransfer | None,
        counted: bool,
        pieces: list[Piece] | None = None,
        behind: int = 0,
    ) -> None:
        """Prepare the call; nothing is loaded yet.

        Args:
            resources: of the cache.
            request: the run.
            kv: where to; None: a prefetch.
            counted: whether it counts as a request, and may leave to the engine what is computed
                sooner.
            pieces: gets what was served, in order.
            behind: if it is not 0, also load what is stored behind the first missing chunk, in runs
                of at least so many tokens; for that it needs `pieces`.
        """
        self._resources = resources
        self._request = request
        self._kv = kv
        self._counted = counted
        # otherwise the caller has chosen, by a lookup or a prefetch
        self._chooses = kv is not None and counted
        self._pieces = pieces
        self._behind = behind

    def run(self) -> Hit:
        """Serve as many leading chunks as the deadline allows."""
        served: Served | None = None
        hit = self._refusal()
        # otherwise a longer piece may follow
        is_refused = hit is not None and hit.reason is not Reason.BELOW_MINIMUM
        if hit is None:
            kv = self._kv
            host = self._request.tiers.host
            loop = ServeLoop(
                self._resources, self._request, kv, self._chooses, self._pieces
            )
            if (
                host is not None
                and kv is not None
                and kv.device_index is not None
            ):
                host.use_device(kv.device_index)  # before the first copy
            with nullcontext() if host is None else host.copying():
                served = loop.run()
            hit = self._answer(served)
        if self._behind and self._pieces is not None and not is_refused:
            leading = served.chunks if served is not None else 0
            hit = self._with_pieces(hit, leading, self._pieces)
        self._count(hit, served)
        if hit.reason is Reason.NOT_WORTH_IT:
            measure_again(self._resources, self._request, hit)
        return hit

    def _refusal(self) -> Hit | None:
        """Return the answer of a retrieve that need not begin; None if it must begin."""
        request = self._request
        resources = self._resources
        host = request.tiers.host
        if not request.keys:
            return request.hit_without_chunks()
        if resources.closed:
            return request.miss(Reason.CLOSED, "the cache is closed")
        if self._kv is None and host is None:
            return request.miss(
                Reason.TIER_SKIPPED, "there is no host tier to prefetch into"
            )
        load_cost = resources.load_cost
        if (
            host is not None
            and self._chooses
            and not load_cost.is_worth_loading(host.name)
        ):
            return request.miss(Reason.NOT_WORTH_IT, load_cost.refusal(host.name))
        minimum = resources.config.min_hit_tokens
        if minimum > len(request.keys) * request.chunk_tokens:
            return request.miss(
                Reason.BELOW_MINIMUM, f"at least {minimum} tokens"
            )
        if minimum:
            expected = expected_hit(resources, request)
            if expected.reason is Reason.BELOW_MINIMUM:
                return expected
        return None

    def _answer(self, served: Served) -> Hit:
        reason = served.end.reason
        detail = served.end.detail
        if reason is Reason.ABSENT:
            reason, detail = self._resources.explainer.explain(
                self._request, served.chunks, served.host_reason
            )
        return self._request.hit(served.by_tier, reason, detail)

    def _with_pieces(self, hit: Hit, leading: int, pieces: list[Piece]) -> Hit:
        """Load what is stored behind the first missing chunk, `leading`, and return the hit with
        all pieces.

        Each run is a load of its own, within the same deadline. What was promised and does not
        arrive is left out.
        """
        request = self._request
        if leading < len(request.keys) and not self._is_over():
            found = find_pieces(
                self._resources,
                request,
                leading,
                self._behind,
                hit.reason,
                self._chooses,
            )
            for start, stop in runs_of(found):
                if self._is_over():
                    break
                begin = start // request.chunk_tokens - request.first
                end = stop // request.chunk_tokens - request.first
                part = request._replace(
                    keys=request.keys[begin:end],
                    first=request.first + begin,
                    parent=request.parent_of(begin),
                )
                RetrieveCall(self._resources, part, self._kv, False, pieces).run()
        loaded = sum(piece.stop - piece.start for piece in pieces)
        return replace(
            hit, pieces=tuple(pieces), behind_tokens=loaded - hit.num_tokens
        )

    def _is_over(self) -> bool:
        deadline = self._request.deadline
        return deadline.passed or deadline.cancelled

    def _count(self, hit: Hit, served: Served | None) -> None:
        """Count the call, and what it loaded."""
        request = self._request
        counters = self._resources.counters
        loads: dict[str, int] = {}
        load: TokenLoad | None = None
        if served is not None:
            loads = self._load_counts(served)
            if self._kv is not None:
                seconds = sum(served.load_seconds.values())
                load = TokenLoad(hit.num_tokens, int(seconds * 1e6))
        if self._counted:
            counters.count_request(
                len(hit.mask) - hit.start_tokens,
                served_by_tier(hit) if hit.behind_tokens else hit.by_tier,
                hit.reason,
                request.namespace,
                miss_counted=served is not None and served.end.miss_counted,
                more=loads,
                load=load,
            )
        elif load is not None:
            counters.count_load(request.namespace, load, loads)
        else:
            counters.add(loads)

    def _load_counts(self, served: Served) -> dict[str, int]:
        """Return the counters of what was copied out of host slots, and of the load times."""
        chunks = 0
        host = self._request.tiers.host
        if host is not None and self._kv is not None:
            chunks = served.by_tier[host.name]
        nbytes = chunks * self._resources.layout.chunk_bytes
        return self._resources.counters.load_counts(
            chunks, nbytes, served.load_seconds
        )
