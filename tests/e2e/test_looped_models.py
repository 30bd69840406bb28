"""Models that compute layers several times: served only if their KV is that of one pass."""

from __future__ import annotations

import pytest
import torch

from pagoda.base.metrics import Reason
from tests.e2e.house import House
from tests.e2e.tiny_models import class_of, configured
from tests.e2e.tiny_settings import SMALL

FULL = ["full_attention"] * 3
MIXED = ["sliding_attention", "full_attention", "full_attention"]


def dory(layer_types: list[str], mode: str):
    """One layer before, one that is computed twice, and one after."""
    model_class = class_of("dory")
    settings = {**SMALL, "recurrent_kv_cache_mode": mode}
    config = configured(model_class, "dory", settings)
    config.layer_types = layer_types
    torch.manual_seed(0)
    return model_class(config).eval()


@pytest.mark.parametrize("layer_types", [FULL, MIXED], ids=["full", "mixed"])
@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("per_loop", "DoryForCausalLM: its cache grows from 3 to 4 layers"),
        # the earlier loop reads what the last one wrote, if there is any
        ("last_loop", "computes"),
    ],
)
def test_a_layer_that_is_computed_twice(
    layer_types: list[str], mode: str, why: str, house: House
) -> None:
    model = dory(layer_types, mode)
    cached = house.open(model)
    ids = torch.arange(3, 93)[None]
    theirs = model.generate(ids, max_new_tokens=6, do_sample=False)
    for _ in range(2):
        ours = cached.generate(ids, max_new_tokens=6, do_sample=False)
        assert ours.tolist() == theirs.tolist()
    assert cached.last.hit.reason is Reason.NOT_CACHEABLE
    assert why in cached.last.hit.detail
