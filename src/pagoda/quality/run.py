"""A run of `pagoda quality` on a model that is loaded: which approaches there are, and the rows of the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from pagoda.quality.prompt_lines import QualityPrompt, Tokenizer, prompts_digest

if TYPE_CHECKING:
    import torch

    from pagoda.blend.blend_policies import SelectionPolicy
    from pagoda.connectors.transformers import CachedModel
    from pagoda.quality.judge import Judged
    from pagoda.quality_bounds import Bounds

_SPARE_BYTES = 16 << 20  # of the memory for the documents of a prompt: tables


class QualityRun(NamedTuple):
    """The rows of the report, and what names the weights, with their active adapters."""

    rows: list[Judged]
    weights: str


def measure_quality(
    model: torch.nn.Module,
    prompts: Sequence[QualityPrompt],
    *,
    blends: Sequence[tuple[SelectionPolicy, float] | tuple[SelectionPolicy, float, int]] = (),
    codecs: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    chunk_tokens: int = 256,
    new_tokens: int = 16,
    bounds: Mapping[str, Bounds] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    step: Callable[[str, int], None] = lambda name, total: None,
) -> QualityRun:
    """Measure what approximate KV does to the answers of a model. Changes nothing; writes no verdict.

    With blends, plain reuse is measured too. Two controls always are: KV that is surely wrong must break the bounds.

    Args:
        model: a causal model of Transformers, on its device.
        prompts: what `read_prompts` returns; all with documents if there are blends.
        blends: policies, shares to compute again, and if not 0 the least tokens of a document that is reused.
        codecs: names of lossy codecs.
        tokenizer: needed if an expected answer is text.
        chunk_tokens: tokens of a chunk, as in the engine; codecs depend on it.
        new_tokens: most tokens of an answer of which none is expected.
        bounds: by feature, "blend" and "codec"; default: `quality_bounds.DEFAULT_BOUNDS`.
        confidence: of the intervals, below 1.
        seed: of the bootstrap.
        step: called before each approach on each prompt, with its name and how often it will be called in all.

    Raises:
        ValueError: prompts that do not go with what is asked; a model, a codec or a policy that cannot be used; bounds
            that say nothing; or the model gives no expected answer at all, so that answers tell nothing.
    """
    from pagoda.blend.blend_policies import Deviation
    from pagoda.connectors.transformers.model_identity import adapters_digest, weights_digest
    from pagoda.connectors.transformers.supported_models import check_model, probe_model
    from pagoda.quality.approaches import CONTROLS, Approach, Blend, Codec
    from pagoda.quality.judge import judged
    from pagoda.quality.measure import measured
    from pagoda.quality_bounds import DEFAULT_BOUNDS, too_loose
    from pagoda.quality_verdict import weights_name

    bounds = DEFAULT_BOUNDS if bounds is None else bounds
    if wrong := [text for one in bounds.values() for text in too_loose(one, confidence)]:
        raise ValueError(wrong[0])
    _check_prompts(prompts, bool(blends), chunk_tokens if codecs else 0)
    check_model(model)
    probed, weights = probe_model(model, chunk_tokens), weights_digest(model)
    with ExitStack() as opened:
        features: list[Approach] = [Codec(name, model, probed) for name in dict.fromkeys(codecs)]
        if blends:
            token_bytes = probed.layout.chunk_bytes // chunk_tokens
            cached = opened.enter_context(
                _documents_cache(model, prompts, chunk_tokens, token_bytes, weights)
            )
            asked = [(Deviation(), 0.0), *(one for one in blends if any(one[1:]))]
            named = {blend.name: blend for blend in (Blend(cached, *one) for one in asked)}
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
            f"with exact KV the model gives none of the {len(prompts)} expected answers, so they tell nothing: "
            "correct them, or leave them out"
        )
    rows = judged(
        samples,
        {one.name: one.setting for one in features if one.setting is not None},
        [control.name for control in CONTROLS],
        bounds=bounds,
        has_answers=has_answers,
        digest=prompts_digest(prompts),
        new_tokens=new_tokens,
        confidence=confidence,
        seed=seed,
        made=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
    return QualityRun(rows, weights_name(weights, adapters=adapters_digest(model)))


def _check_prompts(prompts: Sequence[QualityPrompt], need_documents: bool, chunk_tokens: int) -> None:
    if not prompts:
        raise ValueError("there are no prompts to measure on")
    answers = [prompt for prompt in prompts if prompt.expected]
    if answers and len(answers) < len(prompts):
        missing = next(prompt for prompt in prompts if not prompt.expected)
        raise ValueError(f"line {missing.line} has no answer and others have: give all of them or none")
    for prompt in prompts:
        if need_documents and not prompt.documents:
            raise ValueError(f"line {prompt.line} has no documents: blending needs some")
        if len(prompt.tokens) <= chunk_tokens:
            raise ValueError(
                f"line {prompt.line} has {len(prompt.tokens)} tokens, no whole chunk of {chunk_tokens} and one more: "
                "nothing of it would be stored; give longer prompts, or the chunk_tokens of your engine"
            )


def _documents_cache(
    model: torch.nn.Module,
    prompts: Sequence[QualityPrompt],
    chunk_tokens: int,
    token_bytes: int,
    weights: str,
) -> CachedModel:
    """Return the model with private memory that holds the documents of the longest prompt, twice."""
    from pagoda.config import Config
    from pagoda.connectors.transformers import CachedModel

    chunks = max(
        sum(-(-len(document) // chunk_tokens) for document in prompt.documents) for prompt in prompts
    )
    config = Config(
        chunk_tokens=chunk_tokens,
        host_size=2 * (chunks + 1) * (chunk_tokens * token_bytes + 4096) + _SPARE_BYTES,
        host_shared=False,
        prompt_log=False,
        worth_it=False,  # what is measured is reuse, also where it is slow
        deadline_seconds=60.0,
    )
    return CachedModel(model, config, weights=weights)
