"""Types with a `generate` of their own, or none: what they do without the cache, they do with it.

Some take an image first, and the prompt later: each way to call them gives the text of the model.
"""

from __future__ import annotations

import pytest
import torch

from pagoda.base.metrics import Reason
from tests.e2e.house import House
from tests.e2e.tiny_models import any_tiny_model, untried_model
from tests.e2e.tiny_settings import call_of

KINDS = ("blip", "blip-2", "instructblip", "instructblipvideo", "kosmos-2")
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def ways(call: dict[str, object]) -> list[tuple[list, dict[str, object]]]:
    """Return a call with all by keyword, the image by position, and all by position."""
    names = list(call)
    return [
        ([], call),
        ([call[names[0]]], {name: call[name] for name in names[1:]}),
        (list(call.values()), {}),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_first_is_not_taken_for_the_prompt(
    kind: str, house: House
) -> None:
    model = any_tiny_model(kind)
    ids = torch.arange(3, 43)[None]
    call = call_of(kind, ids)
    if kind.startswith("instructblip"):
        # its second parameter
        call["qformer_attention_mask"] = torch.ones_like(
            call["qformer_input_ids"]
        )
        call["input_ids"] = call.pop("input_ids")
    cached = house.open(model)
    for given, named in ways(call):
        want = model.generate(*given, **named, **GREEDY)
        assert (
            cached.generate(*given, **named, **GREEDY).tolist() == want.tolist()
        )
        assert cached.last.hit.reason is Reason.NOT_CACHEABLE
        assert cached.last.hit.detail


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_prompt_may_not_be_given_twice(kind: str, house: House) -> None:
    cached = house.open(any_tiny_model(kind))
    call = call_of(kind, torch.arange(3, 43)[None])
    pixels = call["pixel_values"]
    with pytest.raises(TypeError, match="pixel_values twice"):
        cached.generate(pixels, **call)


@pytest.mark.slow
def test_a_model_that_does_not_write_one_token_after_another(
    house: House,
) -> None:
    model = any_tiny_model("diffusion_gemma")
    cached = house.open(model)
    ids = torch.arange(3, 43)[None]
    texts = []
    for each in (model, cached, cached):
        torch.manual_seed(5)
        texts.append(each.generate(ids, max_new_tokens=6).sequences.tolist())
    assert texts[1:] == texts[:1] * 2
    assert cached.last.hit.reason is Reason.NOT_CACHEABLE
    assert cached.last.hit.detail


def test_a_model_that_does_not_generate_goes_on_without_the_cache(
    house: House,
) -> None:
    model = untried_model("pi0")
    assert not hasattr(model, "generate")
    cached = house.open(model)
    # as the model does
    with pytest.raises(AttributeError):
        cached.generate(torch.arange(3, 43)[None])
    assert cached.config is model.config
