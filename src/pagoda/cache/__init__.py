"""The cache: the facade of PagodaKV, and the only place that knows several tiers.

Modules, in the order in which a call reaches them:

    cache            Cache, what an engine calls; the caches of a process by name
    weights_epoch    the weights epoch of a model on this machine; namespace and tiers under the
                     present weights
    call             a checked request for the chunks of a prompt; the boundary: an error inside a
                     call is a miss
    executor         threads for calls that do not block their caller
    store_call       one store
    lookup_call      one lookup
    retrieve_call    one retrieve or prefetch
    serve_loop       the chunks of one run, in order from whatever tier has the next one
    load_pipeline    the chunks of one lower tier, read while earlier ones are copied
    load_destinations  what they are read into: host slots or staging buffers
    staging_buffers  buffers for chunks without a host slot
    writeback        the queues and threads that write to the lower tiers
    caller_hints     what callers say of their requests, and what became of it
    miss_explainer   the reason of a miss
    request_events   what requests report of their chunks, for routers
    prompt_log       the prompts that were stored lately, with their tokens
    results          the answers: Hit, Stored, Cleared, CacheStats
    host_slots       the slots of the host tier, for engines that copy themselves
    resources        what all calls share, and how it is closed
    open_tiers       opens the configured tiers
    late_tier        a tier that was left out at the start, and takes part later
    tier_stack       the tiers, from the top down
    counters         counting and rate-limited logging
    call_log         the log lines at the opening of a cache and for each call
    load_cost        whether loading is faster than computing
    otel_spans       OpenTelemetry spans of the calls
    recording        records live traffic as a trace
    request_trace    recorded requests, as in the Mooncake FAST'25 release
    append_lines     appends whole lines to a file that processes share
"""

from __future__ import annotations

from pagoda.cache.cache import Cache
from pagoda.cache.caller_hints import HintAnswer, HintResult, RequestHints
from pagoda.cache.results import Cleared, Hit, Stored
from pagoda.cache.writeback import ChunkRef

__all__ = [
    "Cache",
    "ChunkRef",
    "Cleared",
    "HintAnswer",
    "HintResult",
    "Hit",
    "RequestHints",
    "Stored",
]
