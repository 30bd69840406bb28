"""Prompts with images: right texts, and hits that end before an image that they do not cover."""

from __future__ import annotations

import torch

from pagoda.connectors.transformers.model_checks import kv_argument
from tests.e2e import tiny_vision
from tests.e2e.house import House
from tests.e2e.tiny import prompt
from tests.e2e.tiny_vision import IMAGE_TOKEN

NEW = 12


def text(model, ids, **more) -> list[list[int]]:
    out = model.generate(ids, max_new_tokens=NEW, do_sample=False, **more)
    return out[:, ids.shape[1] :].tolist()


def image_of(ids: torch.Tensor, seed: int = 5) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": tiny_vision.patches(seed),
        "image_grid_thw": torch.tensor([[1, 8, 8]]),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).long(),
    }


def test_a_text_after_an_image_is_not_moved_by_it(house: House) -> None:
    """The model remembers the positions of its latest prompt."""
    ids = prompt(60)
    cached = house.open(tiny_vision.qwen2_vl())
    plain = text(cached, ids)
    seen = tiny_vision.with_image(ids, 20, 16)
    for _ in range(2):
        text(cached.model, seen, **image_of(seen))
        assert text(cached, ids) == plain
        assert cached.last.hit.num_tokens == 48
    text(cached.model, seen, **image_of(seen))
    with cached.prefix(ids) as prefix:
        assert prefix.columns == 48
        kv = kv_argument(cached.model, prefix.past_key_values)
        assert text(cached.model, ids, **kv) == plain
