"""Prompts with images: the text of the model alone, hits that end before an image that they do not
cover whole, and no vision tower for images that they cover.
"""

from __future__ import annotations

import pytest
import torch

from pagoda.base.metrics import Reason
from pagoda.connectors.transformers import cached_model, media_items
from pagoda.connectors.transformers.media_items import media_of
from pagoda.connectors.transformers.model_checks import kv_argument
from tests.e2e import tiny_vision
from tests.e2e.house import CHUNK, House
from tests.e2e.tiny import prompt
from tests.e2e.tiny_vision import (
    IMAGE_TOKEN,
    KINDS,
    image_tokens,
    shown,
    with_images,
)

# others show the same, and take some seconds
SOME = ["llava", "qwen2_vl"]
OTHERS = [
    pytest.param(kind, marks=pytest.mark.slow)
    for kind in KINDS
    if kind not in SOME
]
NEW = 10
TEXT = 60
PLACE = 20  # of the first image


def text(model, ids, **more) -> list[list[int]]:
    out = model.generate(
        ids, **{"max_new_tokens": NEW, "do_sample": False, **more}
    )
    return out[:, ids.shape[1] :].tolist()


def answer(model, kind: str, ids, seeds: list[int], **more) -> list[list[int]]:
    """Return the text to a prompt that shows these images."""
    images = shown(kind, ids, seeds)
    return text(model, ids, **images, **more)


def one_image(kind: str) -> torch.Tensor:
    return with_images(prompt(TEXT), [PLACE], image_tokens(kind))


def images_computed(model) -> list[int]:
    """Return a list that grows by each call of the vision tower."""
    calls: list[int] = []
    tiny_vision.vision_tower(model).register_forward_hook(
        lambda *_: calls.append(1)
    )
    return calls


def chunks_before(tokens: int) -> int:
    return tokens - tokens % CHUNK


def most_of(ids: torch.Tensor) -> int:
    """Return how much of a prompt may hit: its last token is always computed."""
    return chunks_before(ids.shape[1] - 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*SOME, *OTHERS])
def test_a_prompt_with_an_image_hits(kind: str, house: House) -> None:
    ids = one_image(kind)
    alone = KINDS[kind]()
    theirs = answer(alone, kind, ids, [1])
    others = answer(alone, kind, ids, [2])
    assert theirs != others
    cached = house.open(KINDS[kind]())
    calls = images_computed(cached.model)
    assert answer(cached, kind, ids, [1]) == theirs
    assert cached.last_stored[0].num_tokens == chunks_before(ids.shape[1])
    del calls[:]
    # whole: all chunks, and no image is computed
    assert answer(cached, kind, ids, [1]) == theirs
    assert cached.last.columns == most_of(ids)
    assert calls == []
    # another image of the same shape: only the text before it
    assert answer(cached, kind, ids, [2]) == others
    assert cached.last.columns == chunks_before(PLACE)
    assert calls == [1]
    # from the disk, by another process
    house.shut(wipe_host=True)
    again = house.open(KINDS[kind]())
    calls = images_computed(again.model)
    assert answer(again, kind, ids, [1]) == theirs
    assert again.last.hit.by_tier == {"disk": most_of(ids)}
    assert calls == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*SOME, *OTHERS])
def test_a_text_and_a_prompt_with_an_image_share_the_text_before_it(
    kind: str, house: House
) -> None:
    ids = one_image(kind)
    alone = KINDS[kind]()
    cached = house.open(KINDS[kind]())
    answer(cached, kind, ids, [1])
    plain = prompt(TEXT)
    assert text(cached, plain) == text(alone, plain)
    assert cached.last.columns == chunks_before(PLACE)
    # as processors hand it over
    assert answer(cached, kind, plain, []) == text(alone, plain)
    assert answer(cached, kind, plain, []) == text(alone, plain)
    assert cached.last.columns == chunks_before(TEXT - 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*SOME, *OTHERS])
def test_a_conversation_in_which_each_turn_shows_an_image(
    kind: str, house: House
) -> None:
    count = image_tokens(kind)
    first = with_images(prompt(TEXT), [PLACE], count)
    both = with_images(prompt(TEXT + 40), [PLACE, TEXT + 10], count)
    alone = KINDS[kind]()
    theirs = answer(alone, kind, both, [1, 2])
    swapped = answer(alone, kind, both, [2, 1])
    cached = house.open(KINDS[kind]())
    answer(cached, kind, first, [1])
    answer(cached, kind, both, [3, 4])
    if kind == "qwen2_vl":  # several images are another form
        assert cached.last.columns == 0
        assert "to try whether" in cached.last.hit.detail
    assert answer(cached, kind, both, [1, 2]) == theirs
    # one by one only where it is certain which pixels belong to which tokens
    certain = kind != "idefics3"
    begin = chunks_before(first.shape[1]) if certain else chunks_before(PLACE)
    assert cached.last.columns == begin
    assert answer(cached, kind, both, [1, 2]) == theirs
    assert cached.last.columns == most_of(both)
    assert answer(cached, kind, both, [2, 1]) == swapped
    assert cached.last.columns == chunks_before(PLACE)


@pytest.mark.parametrize("kind", [*SOME, *OTHERS])
def test_kv_within_an_image_is_used_up_to_its_begin(
    kind: str, house: House
) -> None:
    """Of a prompt whose end is an image, a part of it is found: the last token is always
    computed.
    """
    count = image_tokens(kind)
    ids = with_images(prompt(47), [47], count)
    alone = KINDS[kind]()
    theirs = answer(alone, kind, ids, [1])
    longer = torch.cat([ids, prompt(40)], dim=1)
    cached = house.open(KINDS[kind]())
    answer(cached, kind, longer, [1])
    calls = images_computed(cached.model)
    assert answer(cached, kind, ids, [1]) == theirs
    found = most_of(ids)
    assert cached.last.columns == min(47, found)
    assert cached.last.hit.num_tokens == cached.last.columns
    if found > 47:
        assert "not covered whole" in cached.last.hit.detail
    assert calls == [1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME)
def test_beams_samples_and_output_with_images(kind: str, house: House) -> None:
    count = image_tokens(kind)
    both = with_images(prompt(TEXT + 40), [PLACE, TEXT + 10], count)
    ways: list[dict[str, object]] = [
        {"num_beams": 3},
        {"num_return_sequences": 2, "do_sample": True},
        {"store_output": True},
    ]
    alone = KINDS[kind]()
    cached = house.open(KINDS[kind]())
    first = with_images(prompt(TEXT), [PLACE], count)
    answer(cached, kind, first, [1])
    for way in ways:
        plainly = {name: way[name] for name in way if name != "store_output"}
        torch.manual_seed(0)
        theirs = answer(alone, kind, both, [1, 2], **plainly)
        for _ in range(2):
            torch.manual_seed(0)
            ours = answer(cached, kind, both, [1, 2], **way)
            assert ours == theirs
        assert cached.last.columns == most_of(both)


def test_a_text_after_an_image_is_not_moved_by_it(house: House) -> None:
    """The model remembers the positions of its latest prompt."""
    ids = prompt(TEXT)
    cached = house.open(tiny_vision.qwen2_vl())
    plain = text(cached, ids)
    seen = one_image("qwen2_vl")
    for _ in range(2):
        answer(cached.model, "qwen2_vl", seen, [1])
        assert text(cached, ids) == plain
        assert cached.last.hit.num_tokens == 48
    answer(cached.model, "qwen2_vl", seen, [1])
    with cached.prefix(ids) as prefix:
        assert prefix.columns == 48
        kv = kv_argument(cached.model, prefix.past_key_values)
        assert text(cached.model, ids, **kv) == plain


@pytest.mark.slow
def test_a_reader_that_stores_nothing_hits_too(house: House) -> None:
    ids = one_image("llava")
    writer = house.open(tiny_vision.llava())
    answer(writer, "llava", ids, [1])
    theirs = answer(tiny_vision.llava(), "llava", ids, [2])
    reader = house.open(tiny_vision.llava())
    for columns in (0, chunks_before(PLACE)):
        ours = answer(reader, "llava", ids, [2], store=False)
        assert ours == theirs
        assert reader.last.columns == columns
        assert reader.last_stored == []


def test_a_video_is_an_item(house: House) -> None:
    ids = one_image("qwen2_vl").clone()
    ids[ids == IMAGE_TOKEN] = 498

    def video(seed: int) -> dict[str, torch.Tensor]:
        seen = one_image("qwen2_vl")
        pixels = shown("qwen2_vl", seen, [seed])
        return {
            "pixel_values_videos": pixels["pixel_values"],
            "video_grid_thw": pixels["image_grid_thw"],
            "mm_token_type_ids": 2 * (ids == 498).long(),
        }

    alone = tiny_vision.qwen2_vl()
    theirs = text(alone, ids, **video(1))
    others = text(alone, ids, **video(2))
    assert theirs != others
    cached = house.open(tiny_vision.qwen2_vl())
    calls = images_computed(cached.model)
    assert text(cached, ids, **video(1)) == theirs
    del calls[:]
    assert text(cached, ids, **video(1)) == theirs
    assert cached.last.columns == most_of(ids)
    assert calls == []
    assert text(cached, ids, **video(2)) == others


# ---- models with windows


def marks_of(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what the processor of Gemma passes with a text."""
    return {"token_type_ids": torch.zeros_like(ids)}


@pytest.mark.slow
def test_a_text_with_marks_hits_over_windows(house: House) -> None:
    ids = prompt(TEXT)
    longer = torch.cat([ids, prompt(9)], dim=1)
    alone = tiny_vision.gemma3(window=24)
    cached = house.open(tiny_vision.gemma3(window=24))
    for given, columns in [(ids, 0), (ids, TEXT - 1), (longer, TEXT - 1)]:
        theirs = text(alone, given, **marks_of(given))
        assert text(cached, given, **marks_of(given)) == theirs
        assert cached.last.columns == columns
    # with an image there is still no key
    seen = one_image("gemma3")
    theirs = answer(alone, "gemma3", seen, [1])
    assert answer(cached, "gemma3", seen, [1]) == theirs
    assert "not yet over windows" in cached.last.hit.detail


def test_marks_of_zero_that_mean_something_are_found_out(
    house: House,
) -> None:
    """PaliGemma 2 computes a text so marked in both directions."""
    ids = prompt(TEXT)
    alone = tiny_vision.paligemma2(window=24)
    theirs = text(alone, ids, **marks_of(ids))
    plain = text(alone, ids)
    assert theirs != plain
    cached = house.open(tiny_vision.paligemma2(window=24))
    for _ in range(2):
        assert text(cached, ids, **marks_of(ids)) == theirs
        assert cached.last.hit.reason is Reason.NOT_CACHEABLE
        assert "it marks no item" in cached.last.hit.detail
        assert cached.last_stored == []
    for columns in (0, TEXT - 1):
        assert text(cached, ids) == plain
        assert cached.last.columns == columns
    assert text(cached, ids, **marks_of(ids)) == theirs


# ---- what is not certain


def batch(ids: torch.Tensor, pixels: dict[str, torch.Tensor]):
    return ids.repeat(2, 1), {
        name: torch.cat([value, value]) for name, value in pixels.items()
    }


UNCERTAIN = {
    "several prompts": (batch, "items of several prompts at once"),
    "unknown argument": (
        lambda ids, pixels: (ids, {**pixels, "vision_feature_layer": -2}),
        "vision_feature_layer: the KV may depend on it",
    ),
    "marks elsewhere": (
        lambda ids, pixels: (
            ids,
            {**pixels, "mm_token_type_ids": torch.ones_like(ids)},
        ),
        "it does not mark the placeholder tokens",
    ),
    "an assistant": (
        lambda ids, pixels: (ids, {**pixels, "prompt_lookup_num_tokens": 3}),
        "not together with an assistant",
    ),
}


@pytest.mark.parametrize("name", UNCERTAIN)
def test_what_is_not_certain_goes_on_without_the_cache(
    name: str, house: House
) -> None:
    change, why = UNCERTAIN[name]
    plain_ids = one_image("llava")
    images = shown("llava", plain_ids, [1])
    ids, more = change(plain_ids, images)

    def outcome(model):
        try:
            return text(model, ids, **more)
        except (TypeError, ValueError, RuntimeError) as error:
            return type(error)

    cached = house.open(tiny_vision.llava())
    theirs = outcome(tiny_vision.llava())
    assert outcome(cached) == theirs
    assert cached.last.hit.reason is Reason.NOT_CACHEABLE
    assert why in cached.last.hit.detail
    assert cached.last_stored == []


def test_a_model_that_cannot_continue_after_an_image_is_found_out(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here one whose positions after an image are wrong, as of a Transformers that does not tell
    them.
    """
    ids = one_image("qwen2_vl")
    cached = house.open(tiny_vision.qwen2_vl())
    theirs = answer(tiny_vision.qwen2_vl(), "qwen2_vl", ids, [1])

    def counted(model, inputs, mask, given):
        """Over KV, the images before are forgotten."""
        positions = torch.arange(inputs.shape[1]).expand(4, 1, -1)
        if given.get("max_new_tokens") != 1:
            return {}
        return {"position_ids": positions}

    monkeypatch.setattr(cached_model, "positions_of", counted)
    for _ in range(2):
        assert answer(cached, "qwen2_vl", ids, [1]) == theirs
        assert cached.last_stored == []
    assert cached.last.hit.reason is Reason.NOT_CACHEABLE
    assert "what follows has other KV" in cached.last.hit.detail


@pytest.mark.slow
def test_a_prompt_that_ends_with_an_image_shows_nothing(
    house: House,
) -> None:
    """It was once taken as tried, and the next prompts relied on that."""
    model = tiny_vision.llava()
    cached = house.open(model)
    ends = with_images(prompt(32), [32], image_tokens("llava"))
    for _ in range(2):
        theirs = answer(tiny_vision.llava(), "llava", ends, [1])
        assert answer(cached, "llava", ends, [1]) == theirs
        assert cached.last_stored == []
    ids = one_image("llava")
    for _ in range(2):
        theirs = answer(tiny_vision.llava(), "llava", ids, [1])
        assert answer(cached, "llava", ids, [1]) == theirs
    assert cached.last.hit.num_tokens == most_of(ids)


def test_a_form_is_tried_again_with_other_weights(house: House) -> None:
    """What was found out with the old weights was once relied on."""
    model = tiny_vision.llava()
    cached = house.open(model)
    ids = one_image("llava")
    for _ in range(2):
        answer(cached, "llava", ids, [1])
    assert cached.last.hit.num_tokens == most_of(ids)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.01)
    # the text before the image, with the new weights
    text(cached, ids[:, :PLACE])
    assert cached.last_stored[0].num_chunks
    hits = []
    for _ in range(2):
        theirs = answer(model, "llava", ids, [1])
        assert answer(cached, "llava", ids, [1]) == theirs
        hits.append(cached.last.hit)
    assert hits[0].num_tokens == 0
    assert "first prompt of this form" in hits[0].detail
    assert hits[1].num_tokens == most_of(ids)


def test_the_digest_names_the_content_and_how_it_is_given() -> None:
    model = tiny_vision.llava()
    ids = one_image("llava")
    pixels = shown("llava", ids, [1])["pixel_values"]

    def digest(**given) -> bytes:
        media, why = media_of(model, ids, given)
        assert why == ""
        return media.items[0].digest

    changed = pixels.clone()
    changed[0, 0, 0, 0] += 1e-6
    types = (ids == IMAGE_TOKEN).long()
    named = [
        digest(pixel_values=pixels),
        digest(pixel_values=changed),
        digest(pixel_values=pixels.double()),
        digest(pixel_values=pixels.reshape(1, 3, 112, 28)),
        digest(pixel_values=pixels, token_type_ids=types),
        digest(pixel_values=pixels, image_sizes=torch.tensor([[56, 56]])),
    ]
    assert len(set(named)) == len(named)
    assert digest(pixel_values=pixels.clone()) == named[0]
    assert media_items.NOTHING.after(5, {"a": 1}) == {"a": 1}
