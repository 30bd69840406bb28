"""Every argument of `generate` and of the forward passes of all types of models: the right text, or
no cache and why.

For each argument and value that Transformers itself accepts, on KV of its own: a call with it gives
the text of Transformers, whether the cache has the prompt or not; and a plain call afterwards gives
the plain text.
"""

from __future__ import annotations

import inspect
import logging
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers
from transformers.utils.generic import TransformersKwargs

from pagoda.base.metrics import Reason
from pagoda.connectors.transformers import CachedModel, call_arguments
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
# arguments of the forward passes of nearly all types
WIDESPREAD = {
    "attention_mask",
    "cache_position",
    "inputs_embeds",
    "is_first_iteration",
    "labels",
    "logits_to_keep",
    "next_sequence_length",
    "output_attentions",
    "output_hidden_states",
    "past_key_values",
    "pixel_values",
    "position_ids",
    "return_dict",
    "token_type_ids",
    "use_cache",
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


def own_arguments_of(model) -> list[str]:
    """Return the names of the arguments that the type of a model itself handles."""
    functions = [model.forward, model.prepare_inputs_for_generation]
    if type(model).generate is not transformers.GenerationMixin.generate:
        functions.append(model.generate)
    names: set[str] = set()
    for function in functions:
        names |= set(inspect.signature(function).parameters)
    return sorted(names - LEFT_OUT)


def common_arguments() -> list[str]:
    """Return the names of the arguments that Transformers handles in one place for all types."""
    names = {
        *TransformersKwargs.__optional_keys__,
        "mm_encoder_outputs",
        "debug_io",
        "tokenizer",
    }
    names |= set(
        inspect.signature(transformers.GenerationMixin.generate).parameters
    )
    fields = vars(transformers.GenerationConfig())
    names |= {name for name in fields if not name.startswith("_")}
    return sorted(names - LEFT_OUT)


def cases_with(names: list[str]) -> list[Case]:
    return [
        (name, value)
        for name in names
        for value in values(torch.Generator().manual_seed(1))
    ]


def cases_of(model) -> list[Case]:
    return cases_with(sorted({*own_arguments_of(model), *common_arguments()}))


def cases_of_type(kind: str, model) -> list[Case]:
    """Return all values of the arguments that few types have, and a sample of the others, another
    one for each type.

    What is decided by name is decided alike for all types: there the sample is enough.
    """
    chance = random.Random(f"{SEED} {kind}")
    own = own_arguments_of(model)
    cases = cases_with([name for name in own if name not in WIDESPREAD])
    for name in own:
        if name in WIDESPREAD:
            cases += chance.sample(cases_with([name]), 4)
    others = [name for name in common_arguments() if name not in own]
    for name in chance.sample(others, 15):
        cases.append(chance.choice(cases_with([name])))
    return cases


def text(model, ids, **more) -> list[int] | str:
    """Return the generated tokens, or the kind of error that came instead."""
    torch.manual_seed(0)
    try:
        out = model.generate(ids, max_new_tokens=NEW, do_sample=False, **more)
    except Exception as error:  # whatever a model raises  # noqa: BLE001
        return type(error).__name__
    sequences = getattr(out, "sequences", out)
    return sequences[:, ids.shape[1] :].flatten().tolist()


@dataclass
class Walked:
    """What a walk over cases saw."""

    plain_hit: int  # tokens of the prompt that a second plain call found
    refused: int = 0  # cases that Transformers itself raises for
    uncached: int = 0
    hits: int = 0  # cases with a hit of KV that a plain call had stored
    wrong: list[str] = field(
        default_factory=list
    )  # a sentence for each case after or in which a text is wrong


def walked(cached: CachedModel, cases: list[Case], ids) -> Walked:
    """Call a model with each case, with and without KV in the cache, and compare with Transformers
    alone.
    """
    model = cached.model
    plain = text(model, ids)
    text(cached, ids, salt="stored")
    text(cached, ids, salt="stored")
    seen = Walked(plain_hit=cached.last.hit.num_tokens)
    for number, (name, value) in enumerate(cases):
        theirs = text(model, ids, **{name: value})
        if isinstance(theirs, str):
            seen.refused += 1
            if not isinstance(
                text(cached, ids, salt=f"case {number}", **{name: value}), str
            ):
                seen.wrong.append(f"{name}={value}: Transformers raises {theirs}")
            continue
        for salt in (f"case {number}", "stored"):
            found = text(cached, ids, salt=salt, **{name: value})
            hit = cached.last.hit
            if found != theirs:
                seen.wrong.append(
                    f"{name}={value}: {found} instead of {theirs}, hit {hit}"
                )
            if hit.reason is Reason.NOT_CACHEABLE and not hit.detail:
                seen.wrong.append(f"{name}={value}: no reason")
        seen.uncached += hit.reason is Reason.NOT_CACHEABLE
        seen.hits += hit.num_tokens > 0
        if text(cached, ids, salt=f"case {number}") != plain:
            seen.wrong.append(
                f"{name}={value}: the plain text afterwards is wrong"
            )
    return seen


def assert_right(seen: Walked) -> None:
    assert seen.wrong == []
    assert seen.plain_hit > 0, (
        "nothing was tried: even the plain prompt does not hit"
    )


def built(kind: str):
    """Return a tiny model of this type that keeps KV. ValueError: it cannot be built, or not be
    cached.
    """
    model = tiny_model(kind)
    # MPT and Evolla have False: no call would be cached
    model.generation_config.use_cache = True
    return model


def prompt_of(model) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, 490, (1, TOKENS), generator=generator)


def opened(house: House, model) -> CachedModel:
    return house.open(model, host_size="64MiB")


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # debug_io writes files into the working directory
    monkeypatch.chdir(tmp_path)
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_sample_of_arguments(part: int, house: House) -> None:
    chance = random.Random(SEED + part)
    kind = chance.choice(
        ["llama", "gpt2", "phi", "qwen3_moe", "mpt", "bloom", "llava", "olmo2"]
    )
    model = built(kind)
    cases = chance.sample(cases_of(model), SAMPLED_CASES)
    assert_right(walked(opened(house, model), cases, prompt_of(model)))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_every_argument_of_one_type(house: House) -> None:
    model = llama(seed=7, initializer_range=0.3)
    assert_right(walked(opened(house, model), cases_of(model), prompt_of(model)))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", model_types())
def test_every_argument_of_every_type(kind: str, house: House) -> None:
    try:
        model = built(kind)
    except ValueError as trouble:
        pytest.skip(
            f"cannot be built tiny, or has no KV that can be cut: {trouble}"
        )
    ids = prompt_of(model)
    if isinstance(text(model, ids), str):
        pytest.skip(
            f"Transformers itself generates nothing from token ids alone: {text(model, ids)}"
        )
    assert_right(walked(opened(house, model), cases_of_type(kind, model), ids))


@pytest.mark.slow
def test_the_walk_sees_a_poisoned_key(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: if two arguments that change the KV were let through, the walk would say so."""
    model = llama(seed=7, initializer_range=0.3)
    let_through = {"is_causal", "position_ids"}
    monkeypatch.setattr(
        call_arguments, "_HARMLESS", call_arguments._HARMLESS | let_through
    )
    cases: list[Case] = [
        ("is_causal", False),
        ("position_ids", 3 * torch.arange(TOKENS)[None] + 5),
    ]
    wrong = walked(opened(house, model), cases, prompt_of(model)).wrong
    assert [
        name for name, _ in cases if any(one.startswith(name) for one in wrong)
    ] == [
        "is_causal",
        "position_ids",
    ]
    assert any("afterwards" in one for one in wrong)
