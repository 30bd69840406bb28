"""What approximate KV costs in quality, on a user's own model and prompts.

`pagoda quality` calls it; `measure_quality` does the same for a model that is already loaded. It
calls `CachedModel` of `pagoda.connectors.transformers`, and `pagoda.codec`.

    prompt_lines   the file of prompts
    approaches     the ways to get the KV of a prompt: computed, reused, blended, through a codec,
                   or spoiled on purpose
    measure        runs each approach on each prompt, and exact KV for comparison
    bootstrap      confidence intervals
    judge          figures, bounds and verdicts
    write_verdict  the file of a verdict
    run            the whole measurement for one model
"""

from __future__ import annotations

from pagoda_tools.quality.run import measure_quality

__all__ = ["measure_quality"]
