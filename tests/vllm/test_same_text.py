"""With PagodaKV an engine gives the same answers as without, from all tiers, and the expected hits
occur.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import stores
from tests.vllm.conftest import Plain, Same, Tiers
from tests.vllm.engines import BLOCK, CHUNK, Engine, loadable
from tests.vllm.inside import ObservedEngine
from tests.vllm.models import prompt


@pytest.mark.slow
def test_prompts_of_all_lengths_give_the_same_text(
    pagoda: Engine, same: Same, stored: Callable[..., None]
) -> None:
    """Prompts that end with a chunk, with a block, a token before and after either; and shorter
    ones.
    """
    lengths = [
        10 * CHUNK,
        10 * CHUNK + BLOCK,
        10 * CHUNK + 1,
        10 * CHUNK - 1,
        CHUNK,
        CHUNK - 1,
        CHUNK + 1,
        5,
    ]
    prompts = [prompt(100 + length, length) for length in lengths]
    stored(*prompts)
    for one in prompts:
        (answer,) = same(pagoda, one)
        assert answer.local == 0
        assert answer.external == loadable(len(one))
        (answer,) = same(pagoda, one)
        assert answer.local == (len(one) - 1) // BLOCK * BLOCK
        assert answer.external == 0


def test_a_batch_of_stored_and_new_prompts_gives_the_same_text(
    pagoda: Engine, same: Same, stored: Callable[..., None]
) -> None:
    """Prompts with common beginnings and the same prompt twice, some of them stored, in one
    batch.
    """
    base = prompt(200, 9 * CHUNK)
    stored(base, prompt(201, 5 * CHUNK + 3))
    branches = [base[: 4 * CHUNK] + prompt(210 + i, 200) for i in range(3)]
    answers = same(
        pagoda,
        base,
        base,
        *branches,
        prompt(201, 5 * CHUNK + 3),
        prompt(220, 300),
    )
    assert answers[0].local + answers[0].external == loadable(len(base))
    for answer in answers[2:5]:
        assert answer.local + answer.external == 4 * CHUNK
    assert answers[5].external == 5 * CHUNK
    assert answers[6].external == 0


def test_longer_than_a_step(
    pagoda: Engine, same: Same, stored: Callable[..., None]
) -> None:
    """A prompt that vLLM computes in several steps, and one that continues where the hit ends."""
    long = prompt(300, 1900)
    stored(long)
    (answer,) = same(pagoda, long)
    assert answer.local == 0
    assert answer.external == loadable(1900)
    pagoda.reset()
    (answer,) = same(pagoda, long + prompt(301, 1400))
    assert answer.local == 0
    assert answer.external == 1900 // CHUNK * CHUNK


@pytest.mark.parametrize("local_blocks", [1, 2, 3])
def test_behind_a_local_hit(
    pagoda: Engine, same: Same, stored: Callable[..., None], local_blocks: int
) -> None:
    """The device has the first blocks, and ends within a chunk or with one; the rest is loaded."""
    one = prompt(400 + local_blocks, 8 * CHUNK + 7)
    stored(one)
    same(pagoda, one[: local_blocks * BLOCK + 1])
    (answer,) = same(pagoda, one)
    local = local_blocks * BLOCK
    assert answer.local == local
    assert answer.external == loadable(len(one)) - local


def test_beginnings_of_what_was_loaded(
    pagoda: Engine, same: Same, stored: Callable[..., None]
) -> None:
    """Each block that was loaded holds its own tokens: prompts that share only some of them find
    those.

    (A prompt that attends to all of them does not show in what order they lie.)
    """
    one = prompt(450, 6 * CHUNK + 7)
    stored(one)
    same(pagoda, one)
    for blocks in range(1, len(one) // BLOCK):
        (answer,) = same(pagoda, one[: blocks * BLOCK] + prompt(460 + blocks, 20))
        assert answer.local == blocks * BLOCK
        assert answer.external == 0


def test_what_the_model_wrote(
    pagoda: Engine, plain: Plain, same: Same, stored: Callable[..., None]
) -> None:
    """The next turn of a conversation finds the answer of the last one."""
    first = prompt(500, 200)
    stored(first, max_tokens=150)
    ((written,),) = plain.says(first, max_tokens=150)
    second = first + list(written) + prompt(501, 60)
    (answer,) = same(pagoda, second)
    assert answer.local == 0
    assert answer.external == (200 + 149) // CHUNK * CHUNK


@pytest.mark.slow
def test_preempted_requests_give_the_same_text(
    pagoda: Engine, same: Same, stored: Callable[..., None]
) -> None:
    """More requests than the device has blocks for: some lose theirs in between, and load again
    what they had.
    """
    prompts = [prompt(600 + i, 330) for i in range(12)]
    stored(*prompts)
    before = pagoda.call(preemptions)
    answers = same(pagoda, *prompts, max_tokens=120)
    assert [answer.external for answer in answers] == [320] * 12
    assert pagoda.call(preemptions) > before


def preemptions(observed: ObservedEngine) -> int:
    """How often a request lost its blocks."""
    return observed.preemptions


def test_several_samples_share_what_was_loaded(
    pagoda: Engine, same: Same, stored: Callable[..., None]
) -> None:
    """Several samples of one prompt share what was loaded."""
    one = prompt(700, 6 * CHUNK)
    stored(one)
    (answer,) = same(pagoda, one, n=3, seed=7)
    assert len(set(answer.tokens)) == 3
    assert answer.external >= loadable(len(one))


def test_what_an_adapter_computed_is_for_that_adapter_only(
    pagoda: Engine,
    same: Same,
    stored: Callable[..., None],
    adapters: list[tuple[str, int, str]],
) -> None:
    """What an adapter computed is for that adapter only."""
    one = prompt(800, 5 * CHUNK + 9)
    (first, second) = adapters
    stored(one, lora=first)
    (with_first,) = same(pagoda, one, lora=first)
    assert with_first.external == loadable(len(one))
    said = {with_first.tokens}
    for other in (second, None):
        pagoda.reset()
        (answer,) = same(pagoda, one, lora=other)
        assert answer.external == 0
        said.add(answer.tokens)
    assert len(said) == 3


def test_adapter_with_new_files(
    pagoda: Engine, plain: Plain, tiers: Tiers, stored: Callable[..., None],
    adapters: list[tuple[str, int, str]], tmp_path: Path,
) -> None:  # fmt: skip
    """An adapter is trained on and put in the same place by the same name: it gets nothing of what
    it was.
    """
    one = prompt(850, 5 * CHUNK + 9)
    place = tmp_path / "adapter"
    (first, second) = adapters
    shutil.copytree(first[2], place)
    (before,) = pagoda.generate(one, lora=("trained", 11, str(place)))
    assert [before.tokens] == plain.says(one, lora=first)
    stores.wait_ready(tiers.host, 5)
    pagoda.reset()
    (hit,) = pagoda.generate(one, lora=("trained", 11, str(place)))
    assert hit.external == loadable(len(one))
    assert hit.tokens == before.tokens
    shutil.rmtree(place)
    shutil.copytree(second[2], place)
    pagoda.reset()
    (after,) = pagoda.generate(one, lora=("trained", 12, str(place)))
    assert after.external == 0
    assert [after.tokens] == plain.says(one, lora=second)


def test_adapter_whose_files_change_before_its_first_request(
    pagoda: Engine, plain: Plain, tiers: Tiers, stored: Callable[..., None],
    adapters: list[tuple[str, int, str]], tmp_path: Path,
) -> None:  # fmt: skip
    """A server loads it, training goes on and writes the next one in its place, and only then a
    request comes.
    """
    one = prompt(860, 5 * CHUNK + 9)
    place = tmp_path / "adapter"
    (first, second) = adapters
    shutil.copytree(first[2], place)
    assert pagoda.call(load_adapter, ("early", 21, str(place)))
    shutil.rmtree(place)
    shutil.copytree(second[2], place)
    (early,) = pagoda.generate(one, lora=("early", 21, str(place)))
    assert [early.tokens] == plain.says(one, lora=first)
    pagoda.reset()
    (late,) = pagoda.generate(one, lora=("early", 22, str(place)))
    assert [late.tokens] == plain.says(one, lora=second)
    assert late.external == 0
    stores.wait_ready(tiers.host, 5)


def load_adapter(observed: ObservedEngine, adapter: tuple[str, int, str]) -> bool:
    """Load an adapter as a server does, before any request asks for it."""
    from vllm.lora.request import LoRARequest

    return bool(observed.llm.llm_engine.add_lora(LoRARequest(*adapter)))


def test_what_one_tenant_stored_is_for_that_tenant_only(
    pagoda: Engine, same: Same, stored: Callable[..., None]
) -> None:
    """What one tenant stored is for that tenant only."""
    one = prompt(900, 5 * CHUNK + 9)
    stored(one, salt="one tenant")
    (answer,) = same(pagoda, one, salt="one tenant")
    assert answer.external == loadable(len(one))
    for other in ("another tenant", None):
        pagoda.reset()
        (answer,) = same(pagoda, one, salt=other)
        assert answer.external == 0


def test_a_request_for_prompt_logprobs_computes_every_token(
    pagoda: Engine, same: Same, stored: Callable[..., None]
) -> None:
    """A request that wants something of every token of its prompt has every token computed."""
    one = prompt(950, 5 * CHUNK + 9)
    stored(one)
    (answer,) = same(pagoda, one, prompt_logprobs=1)
    assert answer.local == 0
    assert answer.external == 0


def test_these_tests_can_fail(
    pagoda: Engine, plain: Plain, stored: Callable[..., None]
) -> None:
    """Were other bytes loaded than those stored, another text would come out."""
    one = prompt(1000, 8 * CHUNK + 5)
    stored(one, salt="zeros")
    pagoda.call(load_zeros, True)
    try:
        (answer,) = pagoda.generate(one, salt="zeros")
    finally:
        pagoda.call(load_zeros, False)
        pagoda.reset()
    assert answer.external == loadable(len(one))
    assert [answer.tokens] != plain.says(one, salt="zeros")


def load_zeros(observed: ObservedEngine, zeros: bool) -> None:
    """Make every load write zeros instead of the stored bytes, or stop doing so."""
    import numpy as np

    from pagoda.transfer.pages_kv import PagesKV

    if not zeros:
        PagesKV.from_slots = observed.kept.pop("from_slots")
        return
    from_slots = observed.kept["from_slots"] = PagesKV.from_slots

    def wrong(self: PagesKV, starts: Any, slots: Any) -> None:
        from_slots(
            self, starts, [np.zeros_like(np.asarray(slot)) for slot in slots]
        )

    PagesKV.from_slots = wrong
