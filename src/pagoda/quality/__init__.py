"""What approximate KV costs in quality, on a user's own model and prompts.

`pagoda quality` calls it; `measure_quality` is the same for a model that is loaded already. It calls `CachedModel` of
`pagoda.connectors.transformers`, and `pagoda.codec`.

    prompt_lines   the file of prompts
    approaches     how the KV of a prompt is come by: computed, reused, blended, through a codec, or spoiled on purpose
    measure        each approach on each prompt, beside exact KV
    bootstrap      confidence intervals
    judge          figures, bounds and verdicts
    write_verdict  the file of a verdict
    run            all of it, for one model
"""

from __future__ import annotations

from pagoda.quality.run import measure_quality

__all__ = ["measure_quality"]
