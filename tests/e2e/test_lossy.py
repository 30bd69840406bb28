"""Transformers over tiers with a lossy codec: what the model gets, and what happens when its
weights change.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from pagoda.base.errors import ConfigError
from pagoda.base.quality_bounds import Bounds, Figures, Interval
from pagoda.base.quality_verdict import Result
from pagoda.cache import Cache
from pagoda.codec import codec_setting
from pagoda.config import Config
from pagoda.connectors.transformers import CachedModel, layout_of, namespace_of
from pagoda.connectors.transformers.model_checks import kv_argument
from pagoda_tools.quality.write_verdict import write_verdict
from tests.e2e.tiny import VOCABULARY, llama

CHUNK = 32
PATIENT_SECONDS = 60.0


def config_of(host: Path, disk: Path, **options: object) -> Config:
    wanted = {
        "chunk_tokens": CHUNK,
        "host_path": str(host / "host"),
        "host_size": "4MiB",
        "disk_path": str(disk / "disk"),
        "disk_size": "16MiB",
        "worth_it": False,
        "policy": "lru",
        "deadline_seconds": PATIENT_SECONDS,
        **options,
    }
    return Config(**wanted)  # type: ignore[arg-type]


def prompt(tokens: int) -> torch.Tensor:
    return torch.randint(
        1, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(7)
    )


def logits(model: torch.nn.Module, ids: torch.Tensor, kv: object) -> torch.Tensor:
    with torch.no_grad():
        return model(ids[:, -1:], **kv_argument(model, kv)).logits[0, -1]


def verdict(place: Path, codec: str, weights: str) -> None:
    found = Figures(
        kl=Interval(0.001, 0.0, 0.002),
        top1=Interval(0.995, 0.99, 1.0),
        same_text=Interval(0.9, 0.8, 1.0),
        answers=None,
        ttft=Interval(0.4, 0.3, 0.5),
        bytes=0.26,
    )
    result = Result(
        codec_setting(codec, CHUNK),
        Bounds(kl=0.01, top1=0.98, answers=0.9, prompts=50),
        found,
        {"zeroed KV": True},
        60,
        "ab" * 16,
        16,
        0.95,
        0,
        "2026-01-02T03:04:05Z",
        True,
        [],
    )
    write_verdict(
        place, model="tiny", weights=[weights], pagoda="0.1.0", results=[result]
    )


@pytest.mark.parametrize(("codec", "most"), [("q8", 0.05), ("q4", 0.4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_reads_nearly_what_it_computed(
    shm_root: Path, tmp_path: Path, codec: str, most: float, dtype: str
) -> None:
    model = llama(dtype=dtype)
    ids = prompt(129)
    with torch.no_grad():
        exact = model(ids).logits[0, -1].float()
    with CachedModel(
        model, config_of(shm_root, tmp_path, disk_codec=codec, unchecked=True)
    ) as cached:
        cached.generate(ids, max_new_tokens=1, do_sample=False)
        assert cached.cache.flush(PATIENT_SECONDS)
        cached.cache._tiers.host.clear()  # type: ignore[union-attr]
        prefix = cached.prefix(ids)
        assert prefix.columns == 128
        assert prefix.hit.by_tier == {"disk": 128}
        assert prefix.hit.approximate == codec
        assert prefix.hit.exact_tokens == 0
        found = logits(model, ids, prefix.past_key_values).float()
    change = float((found - exact).norm() / (exact - exact.mean()).norm())
    assert 0 < change < most + (0.05 if dtype == "bfloat16" else 0)


def test_a_cache_that_was_made_for_the_model(
    shm_root: Path, tmp_path: Path
) -> None:
    model = llama()
    layout = layout_of(model, CHUNK)
    config = config_of(shm_root, tmp_path, disk_codec="q4", unchecked=True)
    with Cache(
        config, namespace=namespace_of(model, layout), layout=layout
    ) as cache:
        assert CachedModel(model, cache=cache).cache.namespace.approximate == "q4"


def test_new_weights_without_a_verdict_leave_the_lossy_tier_out(
    shm_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine goes on, exact; it gets no exception."""
    model = llama()
    ids = prompt(129)
    weights = namespace_of(model, layout_of(model, CHUNK)).weights
    config = config_of(
        shm_root, tmp_path, disk_codec="q4", quality_verdicts=tmp_path
    )
    with pytest.raises(ConfigError, match="pagoda quality"):
        CachedModel(model, config)
    verdict(tmp_path, "q4", weights)
    with CachedModel(model, config) as cached:
        assert cached.cache.tiers == ("host", "disk")
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                out = cached.generate(ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(
            out, model.generate(ids, max_new_tokens=4, do_sample=False)
        )
        assert cached.cache.tiers == ("host",)
        assert cached.last is not None
        assert cached.last.hit.by_tier == {"host": 128}
        assert cached.last.hit.exact_tokens == 128
        assert sum("left out" in record.message for record in caplog.records) == 1
