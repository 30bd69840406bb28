"""Documents when weights or adapters change: nothing of before is used, no verdict of before
counts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pagoda.base.errors import ConfigError
from pagoda.base.quality_verdict import weights_name
from pagoda.config import Config
from pagoda.connectors.transformers import CachedModel
from pagoda.connectors.transformers.model_identity import adapters_digest
from tests.e2e.house import CHUNK, House
from tests.e2e.test_blending import (
    GREEDY,
    WhileComputing,
    error_of,
    pieces,
    verdict,
    whole,
)
from tests.e2e.tiny import llama


def opened(house: House, model: torch.nn.Module, is_private: bool) -> CachedModel:
    """With private memory alone there is no file from which another cache learns of new weights."""
    if not is_private:
        return house.open(model, unchecked=True)
    config = Config(
        chunk_tokens=CHUNK,
        host_size="8MiB",
        host_shared=False,
        worth_it=False,
        unchecked=True,
    )
    return CachedModel(model, config)


def train(model: torch.nn.Module) -> None:
    """Write to a weight as trainers do: PyTorch does not count it, so the model's user has to
    report it.
    """
    model.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)


@pytest.mark.parametrize(
    "version", ["", "run 7, step 1"], ids=["unnamed", "named"]
)
@pytest.mark.parametrize("is_private", [False, True], ids=["shared", "private"])
def test_documents_of_the_old_weights_are_not_found(
    is_private: bool, version: str, house: House
) -> None:
    """The cache of the prompts gets the new weights; that of the documents is another one."""
    model = llama()
    (documents, question) = pieces()
    cached = opened(house, model, is_private)
    cached.blend(documents, question)
    train(model)
    cached.cache.weights_changed(version)
    found = cached.blend(documents, question, recompute=1.0)
    assert found.hit.num_tokens == 0
    assert error_of(model, found) <= 1e-4
    again = cached.blend(documents, question, recompute=1.0)
    assert again.hit.num_tokens == sum(map(len, documents))
    assert error_of(model, again) <= 1e-4
    if is_private:
        cached.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "version", ["", "run 7, step 1"], ids=["unnamed", "named"]
)
def test_a_verdict_of_the_old_weights_does_not_count(
    version: str,
    house: House,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = llama()
    (documents, question) = pieces()
    cached = house.open(model, quality_verdicts=str(tmp_path))
    weights = cached.cache.namespace.weights
    verdict(tmp_path, weights)
    assert cached.blend(documents, question).blend.state.checked == "loosened"
    train(model)
    cached.cache.weights_changed(version)
    # an engine that runs is not stopped
    found = cached.blend(documents, question)
    assert found.blend.state.checked == "exact"
    assert error_of(model, found) <= 1e-4
    assert "documents are computed in full" in caplog.text
    assert [one["checked"] for one in cached.stats()["approximate"]] == ["exact"]
    with pytest.raises(ConfigError):
        cached.blend(documents, question, recompute=0.3)  # it never began
    # they were read again
    assert cached.cache.namespace.weights != weights
    weights = cached.cache.namespace.weights
    verdict(
        tmp_path,
        json.dumps([weights, version]) if version else weights_name(weights, 1),
    )
    cached.cache.weights_changed(version)
    assert cached.blend(documents, question).blend.state.checked == (
        "loosened" if version else "exact"
    )


@pytest.mark.slow
def test_what_the_old_weights_compute_at_that_moment_is_not_stored(
    house: House,
) -> None:
    model = llama()
    (documents, question) = pieces()
    cached = house.open(model, unchecked=True)
    ids = whole(documents, question)
    cached.blend([documents[0]], question, store=False)  # the model is probed
    for call in (
        lambda **options: cached.generate(
            documents=documents, question=question, **GREEDY, **options
        ),
        lambda **options: cached.generate(ids, **GREEDY, **options),
    ):
        WhileComputing(model, cached.cache.weights_changed)
        call()
        call(store=False)
        assert cached.last.hit.num_tokens == 0


def test_a_verdict_is_about_the_adapters_that_were_active(
    house: House,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = llama()
    (documents, question) = pieces()
    adapted = model.model.layers[0].mlp
    cached = house.open(model, quality_verdicts=str(tmp_path))
    verdict(tmp_path, cached.cache.namespace.weights)
    adapted.active_adapters = ["style"]
    adapted.scaling = {"style": 2.0}
    style = weights_name(
        cached.cache.namespace.weights, adapters=adapters_digest(model)
    )
    with pytest.raises(
        ConfigError,
        match=r"--weights .*\+adapters .*has the adapter merged into it",
    ):
        cached.blend(documents, question)
    del adapted.active_adapters
    assert cached.blend(documents, question).blend.state.checked == "loosened"
    adapted.active_adapters = ["style"]
    # it began without the adapter, and goes on
    found = cached.blend(documents, question)
    assert found.blend.state.checked == "exact"
    assert "documents are computed in full" in caplog.text
    verdict(tmp_path, style)
    assert (
        house.open(model, quality_verdicts=str(tmp_path))
        .blend(documents, question)
        .blend.reused_tokens
    )
    adapted.scaling = {"style": 1.0}
    with pytest.raises(ConfigError, match="nothing says that it is good enough"):
        house.open(model, quality_verdicts=str(tmp_path)).blend(
            documents, question
        )
