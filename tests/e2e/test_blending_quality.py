"""How good blending is, on a model that must read across documents. Slow: the first test trains it,
if nothing has.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagoda.connectors.transformers import CachedModel
from pagoda.connectors.transformers.model_checks import kv_argument
from testbed.recall_model import VOCABULARY, recall_model, recall_prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

SEEDS = (201, 202)  # of no use elsewhere: no method was tuned on them


@pytest.fixture(scope="module")
def model():
    return recall_model()


@pytest.fixture(scope="module")
def cached(model):
    options = {
        "host_size": "256MiB",
        "host_shared": False,
        "worth_it": False,
        "deadline_seconds": 60.0,
    }
    with CachedModel(model, chunk_tokens=16, unchecked=True, **options) as cached:
        yield cached


@pytest.fixture(scope="module")
def prompts():
    return [prompt for seed in SEEDS for prompt in recall_prompts(seed, 60)]


@pytest.fixture(scope="module")
@torch.no_grad()
def exact(model, prompts) -> torch.Tensor:
    """Log probabilities of the answer, [prompts, tokens], by a full prefill."""
    logits = [
        model(torch.tensor([prompt.tokens])).logits[0, -1] for prompt in prompts
    ]
    return torch.stack(logits).double().log_softmax(-1)


@torch.no_grad()
def blended(
    cached, prompts, recompute: float, policy: str = "deviation", change=None
) -> torch.Tensor:
    """Log probabilities of the answer, by blending; `change` is done to the KV before the last
    token.
    """
    logits = []
    for prompt in prompts:
        found = cached.blend(
            prompt.documents, prompt.question, recompute=recompute, policy=policy
        )
        if change is not None:
            change(found)
        last = torch.tensor([prompt.tokens[-1:]])
        logits.append(
            cached.model(
                last, **kv_argument(cached.model, found.past_key_values)
            ).logits[0, -1]
        )
    return torch.stack(logits).double().log_softmax(-1)


def right(logs: torch.Tensor, prompts) -> np.ndarray:
    return logs.argmax(-1).numpy() == np.array(
        [prompt.answer for prompt in prompts]
    )


def divergence(want: torch.Tensor, got: torch.Tensor) -> float:
    return float((want.exp() * (want - got)).sum(-1).mean())


def test_blending_keeps_what_plain_reuse_loses(cached, prompts, exact) -> None:
    full = right(exact, prompts)
    plain = right(blended(cached, prompts, 0.0), prompts)
    blend = right(blended(cached, prompts, 0.15), prompts)
    assert full.mean() >= 0.95
    assert plain.mean() <= 0.70
    assert blend.mean() >= 0.93 * full.mean()
    difference = blend.astype(float) - plain
    draw = np.random.default_rng(0).integers(
        len(prompts), size=(10_000, len(prompts))
    )
    assert np.percentile(difference[draw].mean(1), 2.5) > 0.0


@pytest.mark.parametrize("policy", ["deviation", "first_k"])
def test_divergence_falls_with_the_share(
    cached, prompts, exact, policy: str
) -> None:
    shares = (0.0, 0.05, 0.15, 0.3, 0.6, 1.0)
    mean = [
        divergence(exact[:60], blended(cached, prompts[:60], share, policy))
        for share in shares
    ]
    assert mean == sorted(mean, reverse=True), mean
    assert mean[0] > 0.5
    assert mean[-1] < 1e-6


def test_wrong_kv_is_noticed(cached, prompts) -> None:
    """The controls: documents of another prompt, and K that was not moved."""
    other = [
        one._replace(documents=two.documents)
        for one, two in zip(prompts, [*prompts[1:], prompts[0]], strict=True)
    ]
    assert right(blended(cached, other, 0.15), prompts).mean() < 0.3

    def shuffle(found) -> None:
        """Put K of each document to the places of another one."""
        end = found.blend.starts[-1]
        for layer in found.past_key_values.layers:
            layer.keys = torch.cat(
                [layer.keys[:, :, :end].roll(37, 2), layer.keys[:, :, end:]], 2
            )

    assert (
        right(blended(cached, prompts, 0.15, change=shuffle), prompts).mean()
        < 0.7
    )


def test_prompts_are_drawn_by_seed_and_say_what_is_asked() -> None:
    prompts = recall_prompts(7, 20)
    assert prompts == recall_prompts(7, 20)
    assert prompts != recall_prompts(8, 20)
    for prompt in prompts:
        for token in prompt.tokens:
            assert 0 <= token < VOCABULARY
        for document in prompt.documents:
            assert 40 <= len(document) <= 56
    assert (
        0.4 < np.mean([prompt.across for prompt in recall_prompts(7, 200)]) < 0.95
    )
