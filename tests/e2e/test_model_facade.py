"""A `CachedModel` is a model to its callers: a pipeline, and code that reads, writes, moves it."""

from __future__ import annotations

import copy

import pytest
import tokenizers
import torch
import transformers

from pagoda.connectors.transformers import CachedModel
from tests.e2e.house import House
from tests.e2e.tiny import llama, prompt


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the bytes; nothing is downloaded."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: at for at, letter in enumerate(letters)}
    plain = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=[])
    )
    plain.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    plain.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain)


def test_a_pipeline_hits_and_says_what_the_model_says(house: House) -> None:
    model = llama()
    cached = house.open(model)
    text = "A pagoda has several tiers, one above the other. " * 3
    tokenizer = byte_tokenizer()
    options = {"tokenizer": tokenizer, "max_new_tokens": 8, "do_sample": False}
    plain = transformers.pipeline("text-generation", model=model, **options)(text)
    through = transformers.pipeline("text-generation", model=cached, **options)
    assert through(text) == plain
    assert cached.last.hit.num_tokens == 0
    assert through(text) == plain
    assert cached.last.hit.num_tokens > 0


def test_what_the_cache_does_not_have_is_the_models(house: House) -> None:
    model = llama()
    cached = house.open(model)
    assert cached.config is model.config
    assert cached.device == model.device
    assert cached.generation_config is model.generation_config
    assert cached.can_generate()
    assert {"config", "generate", "stats", "forward"} <= set(dir(cached))
    ids = prompt(30)
    assert torch.equal(cached(ids).logits, model(ids).logits)
    with pytest.raises(AttributeError, match="no_such_thing"):
        cached.no_such_thing  # noqa: B018


def test_a_chained_call_keeps_the_cache(house: House) -> None:
    cached = house.open(llama())
    assert cached.eval() is cached
    assert cached.to("cpu") is cached
    assert cached.to(torch.float32) is cached
    assert cached.requires_grad_(False) is cached


def test_what_is_written_reaches_the_model(house: House) -> None:
    model = llama()
    cached = house.open(model)
    wanted = copy.deepcopy(model.generation_config)
    wanted.max_new_tokens = 3
    cached.generation_config = wanted
    assert model.generation_config is wanted
    ids = prompt(40)
    assert cached.generate(ids).shape[1] == ids.shape[1] + 3
    cached.note_of_the_user = "mine"
    assert model.note_of_the_user == "mine"
    assert cached.note_of_the_user == "mine"


def test_a_model_that_was_not_opened_has_no_attributes() -> None:
    """Copies and errors inside `__init__` look at an object that has no model yet."""
    empty = object.__new__(CachedModel)
    assert not hasattr(empty, "config")
    assert repr(empty) == "CachedModel(not opened)"
