"""A run of `pagoda quality` on a loaded model: chooses the approaches and returns the rows of the
report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import NamedTuple

import torch

from pagoda.base.quality_bounds import DEFAULT_BOUNDS, Bounds, too_loose
from pagoda.base.quality_verdict import weights_name
from pagoda.blend.blend_policies import Deviation, SelectionPolicy
from pagoda.config import Config
from pagoda.connectors.transformers import CachedModel
from pagoda.connectors.transformers.model_checks import check_model, probe_model
from pagoda.connectors.transformers.model_identity import (
    adapters_digest,
    weights_digest,
)
from pagoda.layout import KVLayout
from pagoda_tools.quality.approaches import CONTROLS, Approach, Blend, Codec
from pagoda_tools.quality.judge import Judged, RunFacts, judged
from pagoda_tools.quality.measure import measured
from pagoda_tools.quality.prompt_lines import (
    QualityPrompt,
    Tokenizer,
    prompts_digest,
)

_SPARE_BYTES = 16 << 20  # extra memory for documents, for the tables of the store


class QualityRun(NamedTuple):
    """The rows of the report, and the name of the weights with their active adapters."""

    rows: list[Judged]
    weights: str


def measure_quality(
    model: torch.nn.Module,
    prompts: Sequence[QualityPrompt],
    *,
    blends: Sequence[
        tuple[SelectionPolicy, float] | tuple[SelectionPolicy, float, int]
    ] = (),
    codecs: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    chunk_tokens: int = 256,
    new_tokens: int = 16,
    bounds: Mapping[str, Bounds] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    step: Callable[[str, int], None] = lambda name, total: None,
) -> QualityRun:
    """Measure what approximate KV does to the answers of a model. Changes nothing; writes no
    verdict.

    With blends, plain reuse is measured too. Two controls are always measured: KV that is certainly
    wrong must break the bounds.

    Args:
        model: a causal model of Transformers, on its device.
        prompts: what `read_prompts` returns; all with documents if there are blends.
        blends: for each blend the policy, the share to compute again, and the least tokens of a
            document that is reused (or 0).
        codecs: names of lossy codecs.
        tokenizer: needed if an expected answer is text.
        chunk_tokens: tokens of a chunk, as in the engine; codecs depend on it.
        new_tokens: the most tokens of an answer for a prompt without an expected answer.
        bounds: by feature, "blend" and "codec"; default: `quality_bounds.DEFAULT_BOUNDS`.
        confidence: that of the intervals, below 1.
        seed: the seed of the bootstrap.
        step: called before each approach on each prompt, with its name and the total number of
            calls.

    Raises:
        ValueError: prompts that do not fit the request; a model, a codec or a policy that cannot be
            used; bounds that exclude nothing; or the model gives none of the expected answers, so
            that answers show nothing.
    """
    bounds = DEFAULT_BOUNDS if bounds is None else bounds
    if wrong := [
        text for one in bounds.values() for text in too_loose(one, confidence)
    ]:
        raise ValueError(wrong[0])
    _check_prompts(prompts, bool(blends), chunk_tokens if codecs else 0)
    check_model(model)
    probed = probe_model(model, chunk_tokens)
    weights = weights_digest(model)
    with ExitStack() as opened:
        features: list[Approach] = [
            Codec(name, model, probed) for name in dict.fromkeys(codecs)
        ]
        if blends:
            cached = opened.enter_context(
                _documents_cache(model, prompts, probed.layout, weights)
            )
            asked = [(Deviation(), 0.0), *(one for one in blends if any(one[1:]))]
            named = {
                blend.name: blend
                for blend in (Blend(cached, *one) for one in asked)
            }
            features = [*named.values(), *features]
        total = (1 + len(features) + len(CONTROLS)) * (1 + len(prompts))
        samples = measured(
            model,
            prompts,
            [*features, *CONTROLS],
            tokenizer=tokenizer,
            new_tokens=new_tokens,
            step=lambda name: step(name, total),
        )
    has_answers = all(prompt.expected for prompt in prompts)
    if has_answers and not any(sample.right for sample in samples["exact"]):
        raise ValueError(
            f"with exact KV the model gives none of the {len(prompts)} expected answers, so they "
            "show nothing: "
            "correct them, or leave them out"
        )
    settings = {
        one.name: one.setting for one in features if one.setting is not None
    }
    made = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    facts = RunFacts(prompts_digest(prompts), new_tokens, confidence, seed, made)
    rows = judged(
        samples,
        settings,
        [one.name for one in CONTROLS],
        bounds,
        has_answers,
        facts,
    )
    return QualityRun(
        rows, weights_name(weights, adapters=adapters_digest(model))
    )


def _check_prompts(
    prompts: Sequence[QualityPrompt], need_documents: bool, chunk_tokens: int
) -> None:
    if not prompts:
        raise ValueError("there are no prompts to measure on")
    answers = [prompt for prompt in prompts if prompt.expected]
    if answers and len(answers) < len(prompts):
        missing = next(prompt for prompt in prompts if not prompt.expected)
        raise ValueError(
            f"line {missing.line} has no answer and others have: give all of them or none"
        )
    for prompt in prompts:
        if need_documents and not prompt.documents:
            raise ValueError(
                f"line {prompt.line} has no documents: blending needs some"
            )
        if len(prompt.tokens) <= chunk_tokens:
            raise ValueError(
                f"line {prompt.line} has {len(prompt.tokens)} tokens, no whole chunk of "
                f"{chunk_tokens} and one more: "
                "nothing of it would be stored; give longer prompts, or the chunk_tokens of your "
                "engine"
            )


def _documents_cache(
    model: torch.nn.Module,
    prompts: Sequence[QualityPrompt],
    layout: KVLayout,
    weights: str,
) -> CachedModel:
    """Return the model with private memory that holds the documents of the longest prompt,
    twice.
    """
    size = layout.chunk_tokens
    chunks = max(
        sum(-(-len(document) // size) for document in prompt.documents)
        for prompt in prompts
    )
    config = Config(
        chunk_tokens=size,
        host_size=2 * (chunks + 1) * (layout.chunk_bytes + 4096) + _SPARE_BYTES,
        host_shared=False,
        prompt_log=False,
        worth_it=False,  # the measurement needs reuse even where it is slow
        deadline_seconds=60.0,
    )
    return CachedModel(model, config, weights=weights)
