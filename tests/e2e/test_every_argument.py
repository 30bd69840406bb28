"""Every argument of `generate` and of the forward passes of all types of models: the right text, or no cache and why.

For each argument and value that Transformers itself accepts, on KV of its own: a call with it gives the text of
Transformers, whether the cache has the prompt or not; and a plain call afterwards gives the plain text.
"""

from __future__ import annotations

import inspect
import logging
import random
import warnings
from collections.abc import Iterator

import pytest
import torch
import transformers
from transformers.utils.generic import TransformersKwargs

from pagoda.connectors.transformers import CachedModel, call_arguments
from pagoda.metrics import Reason
from tests.e2e.house import House
from tests.e2e.tiny import llama
from tests.e2e.tiny_models import model_types, tiny_model

SEED = 20261128
TOKENS = 40
NEW = 6
SAMPLED_CASES = 10
# given by the walk itself, or it would end the process, wait for others, or reach for the network
LEFT_OUT = {
    "attention_mask",
    "args",
    "custom_generate",
    "do_sample",
    "input_ids",
    "kwargs",
    "max_length",
    "max_new_tokens",
    "max_time",
    "self",
    "synced_gpus",
    "trust_remote_code",
}
Case = tuple[str, object]


def values(generator: torch.Generator) -> list[object]:
    """Return values of every kind that an argument may have."""
    return [
        True,
        False,
        0,
        1,
        3,
        0.5,
        "eager",
        [1, 2],
        [[1, 2]],
        {"image": torch.ones(1, 4)},
        torch.arange(5, 5 + TOKENS)[None],
        torch.zeros(1, TOKENS, dtype=torch.long),
        torch.ones(1, TOKENS, dtype=torch.long),
        torch.tensor([[1] * 20 + [0] * 20]),
        torch.rand(1, TOKENS, generator=generator) > 0.5,
        torch.randn(1, 1, TOKENS, TOKENS, generator=generator),
        torch.randn(1, 3, 28, 28, generator=generator),
        torch.randn(1, TOKENS, 32, generator=generator),
    ]


def arguments_of(model) -> list[str]:
    """Return the names of all arguments that `generate` and the forward pass of a model take."""
    names = {*TransformersKwargs.__optional_keys__, "mm_encoder_outputs", "debug_io", "tokenizer"}
    for function in (model.forward, model.prepare_inputs_for_generation, model.generate):
        names |= set(inspect.signature(function).parameters)
    fields = vars(transformers.GenerationConfig())
    names |= {name for name in fields if not name.startswith("_")}
    return sorted(names - LEFT_OUT)


def cases_of(model) -> list[Case]:
    return [
        (name, value) for name in arguments_of(model) for value in values(torch.Generator().manual_seed(1))
    ]


def text(model, ids, **more) -> list[int] | str:
    """Return the generated tokens, or the kind of error that came instead."""
    torch.manual_seed(0)
    try:
        out = model.generate(ids, max_new_tokens=NEW, do_sample=False, **more)
    except Exception as error:  # noqa: BLE001  # whatever a model raises
        return type(error).__name__
    sequences = getattr(out, "sequences", out)
    return sequences[:, ids.shape[1] :].flatten().tolist()


def wrong_after(cached: CachedModel, cases: list[Case], ids) -> Iterator[str]:
    """Yield a sentence for each case after or in which a text is wrong."""
    model = cached.model
    plain = text(model, ids)
    text(cached, ids, salt="stored")
    for number, (name, value) in enumerate(cases):
        theirs = text(model, ids, **{name: value})
        if isinstance(theirs, str):
            if not isinstance(text(cached, ids, salt=f"case {number}", **{name: value}), str):
                yield f"{name}={value}: Transformers raises {theirs}"
            continue
        for salt in (f"case {number}", "stored"):
            found = text(cached, ids, salt=salt, **{name: value})
            if found != theirs:
                yield f"{name}={value}: {found} instead of {theirs}, hit {cached.last.hit}"
            if cached.last.hit.reason is Reason.NOT_CACHEABLE and not cached.last.hit.detail:
                yield f"{name}={value}: no reason"
        if text(cached, ids, salt=f"case {number}") != plain:
            yield f"{name}={value}: the plain text afterwards is wrong"


def prompt_of(model) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, 490, (1, TOKENS), generator=generator)


def opened(house: House, model) -> CachedModel:
    return house.open(model, host_size="64MiB")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("part", range(4))
def test_a_sample_of_arguments(part: int, house: House) -> None:
    chance = random.Random(SEED + part)
    kind = chance.choice(["llama", "gpt2", "phi", "qwen3_moe", "mpt", "bloom", "llava", "olmo2"])
    model = tiny_model(kind)
    cases = chance.sample(cases_of(model), SAMPLED_CASES)
    assert list(wrong_after(opened(house, model), cases, prompt_of(model))) == []


@pytest.mark.soak
def test_every_argument_of_one_type(house: House) -> None:
    model = llama(seed=7, initializer_range=0.3)
    assert list(wrong_after(opened(house, model), cases_of(model), prompt_of(model))) == []


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", model_types())
def test_every_argument_of_every_type(kind: str, house: House) -> None:
    try:
        model = tiny_model(kind)
    except ValueError as trouble:
        pytest.skip(f"cannot be built tiny, or has no KV that can be cut: {trouble}")
    ids = prompt_of(model)
    if isinstance(text(model, ids), str):
        pytest.skip(f"Transformers itself generates nothing from token ids alone: {text(model, ids)}")
    assert list(wrong_after(opened(house, model), cases_of(model), ids)) == []


def test_the_walk_sees_a_poisoned_key(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: if two arguments that change the KV were let through, the walk would say so."""
    model = llama(seed=7, initializer_range=0.3)
    let_through = {"is_causal", "position_ids"}
    monkeypatch.setattr(call_arguments, "_HARMLESS", call_arguments._HARMLESS | let_through)
    cases: list[Case] = [("is_causal", False), ("position_ids", 3 * torch.arange(TOKENS)[None] + 5)]
    wrong = list(wrong_after(opened(house, model), cases, prompt_of(model)))
    assert [name for name, _ in cases if any(one.startswith(name) for one in wrong)] == [
        "is_causal",
        "position_ids",
    ]
    assert any("afterwards" in one for one in wrong)
