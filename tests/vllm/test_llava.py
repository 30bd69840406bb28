"""A whole LLaVA with images, in a real engine: the same text from host memory, from the disk, after
a restart.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.vllm import hybrid, models, stores
from tests.vllm.conftest import Tiers
from tests.vllm.engines import CHUNK, Engine, connector, loadable, options
from tests.vllm.inside import Answer, ObservedEngine
from tests.vllm.models import IMAGE, IMAGE_PIXELS, IMAGE_TOKENS, prompt

TOKENS = 6
BEFORE = 2 * CHUNK + 10  # tokens before the first image


class Ask(NamedTuple):
    """A prompt with images, each by the seed of its pixels. `names`: what a client calls them."""

    tokens: list[int]
    images: list[int]
    names: list[str] | None = None


ONE = [*prompt(9200, BEFORE), IMAGE, *prompt(9201, 150)]
TWO = [*prompt(9202, BEFORE), IMAGE, *prompt(9203, 50), IMAGE, *prompt(9204, 60)]
ASKS = {
    "an image": Ask(ONE, [1]),
    "another image": Ask(ONE, [2]),
    "two images": Ask(TWO, [1, 2]),
    "in another order": Ask(TWO, [2, 1]),
    "no image": Ask(prompt(9205, 300), []),
}
# before these are asked for, the others have stored their common beginning
SHARED = {
    "another image": BEFORE // CHUNK * CHUNK,
    "in another order": BEFORE // CHUNK * CHUNK,
}
NAMED = Ask(
    [*prompt(9206, BEFORE), IMAGE, *prompt(9207, 150)], [3], ["the-client-says"]
)


class Seeing(NamedTuple):
    """The engine with the connector, and what one without it says to each prompt."""

    engine: Engine
    given: dict[str, Any]
    tiers: Tiers
    right: dict[str, Answer]

    def says(self, name: str) -> Answer:
        """Ask with nothing on the device, and assert that the text is right."""
        (answer,) = self.engine.call(see, [ASKS[name]])
        assert answer.tokens == self.right[name].tokens
        return answer


@pytest.fixture(scope="module")
def seeing(
    tmp_path_factory: pytest.TempPathFactory, session_shm: Path, logs: Path
) -> Iterator[Seeing]:
    """The engine: first without the connector, then with it. It has stored each prompt."""
    home = tmp_path_factory.mktemp("llava")
    plain = options(
        models.make_llava(home / "model"),
        max_model_len=1024,
        limit_mm_per_prompt={"image": 2},
    )
    tiers = Tiers(session_shm / "llava", home / "disk")
    ours = plain | connector(*tiers)
    engine = Engine("llava", logs / "llava.log", do_without_torchvision, **plain)
    try:
        right = dict(
            zip(ASKS, engine.call(see, list(ASKS.values())), strict=True)
        )
        engine.call(hybrid.restart, ours, within=120.0)
        found = Seeing(engine, ours, tiers, right)
        for name in ASKS:
            assert found.says(name).external == SHARED.get(name, 0), name
        yield found
    finally:
        engine.stop()


def test_the_text_depends_on_the_image(seeing: Seeing) -> None:
    assert len({answer.tokens for answer in seeing.right.values()}) == len(ASKS)
    assert seeing.right["an image"].prompt_tokens == len(ONE) - 1 + IMAGE_TOKENS


@pytest.mark.parametrize("name", ASKS)
def test_the_same_text_from_host_memory(seeing: Seeing, name: str) -> None:
    answer = seeing.says(name)
    assert answer.external == loadable(answer.prompt_tokens)
    assert not answer.local


def test_the_same_text_from_the_disk_after_a_restart(seeing: Seeing) -> None:
    """By the digests of the images, which are the same in every engine."""
    stores.wait_until(
        lambda: stores.keys(seeing.tiers.disk) >= stores.keys(seeing.tiers.host),
        "the disk",
    )
    seeing.engine.call(hybrid.restart, seeing.given, within=120.0)
    stores.clear(seeing.tiers.host)
    for name in ASKS:
        answer = seeing.says(name)
        assert answer.external == loadable(answer.prompt_tokens)


def test_a_name_of_the_client_s_is_one_of_this_engine(seeing: Seeing) -> None:
    """The restarted engine may get another image under the same name."""
    (first,) = seeing.engine.call(see, [NAMED])
    (again,) = seeing.engine.call(see, [NAMED])
    assert first.tokens == again.tokens
    assert again.external == loadable(again.prompt_tokens)
    seeing.engine.call(hybrid.restart, seeing.given, within=120.0)
    other = NAMED._replace(images=[4])
    (answer,) = seeing.engine.call(see, [other])
    assert answer.external == BEFORE // CHUNK * CHUNK
    assert answer.tokens != first.tokens


# ---- inside the engine's process


def do_without_torchvision() -> None:
    """Let vLLM import its LLaVA: of a processor that needs torchvision it uses one function, which
    another has, too.
    """
    processors = "transformers.models.pixtral.image_processing"
    sys.modules[f"{processors}_pixtral"] = importlib.import_module(
        f"{processors}_pil_pixtral"
    )
    from vllm import ModelRegistry
    from vllm.model_executor.models.llava import LlavaForConditionalGeneration

    # otherwise vLLM imports it once more in a process of its own
    ModelRegistry.register_model(
        "LlavaForConditionalGeneration", LlavaForConditionalGeneration
    )


def see(observed: ObservedEngine, asks: list[Ask]) -> list[Answer]:
    """Generate for each prompt alone, with nothing on the device."""
    from vllm import SamplingParams

    answers = []
    for ask in asks:
        assert observed.llm.reset_prefix_cache()
        one: dict[str, Any] = {"prompt_token_ids": ask.tokens}
        if ask.images:
            one["multi_modal_data"] = {
                "image": [picture(seed) for seed in ask.images]
            }
        if ask.names:
            one["multi_modal_uuids"] = {"image": ask.names}
        params = SamplingParams(
            temperature=0.0, max_tokens=TOKENS, ignore_eos=True
        )
        (output,) = observed.llm.generate([one], params, use_tqdm=False)
        answers.append(observed._answer(output))
    return answers


def picture(seed: int) -> Any:
    """Return an image of random pixels."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(
        0, 255, (IMAGE_PIXELS, IMAGE_PIXELS, 3), dtype=np.uint8
    )
    return Image.fromarray(pixels)
