"""Every call that people use, through a `CachedModel`: the text of the model alone, and either a
hit or a reason why not. Nothing raises that the model alone does not raise.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
import transformers

from pagoda.base.metrics import Reason
from pagoda.connectors.transformers import CachedModel, cached_model
from tests.e2e.house import House
from tests.e2e.test_model_facade import byte_tokenizer
from tests.e2e.tiny import llama, prompt

# sharp attention, so that wrong KV changes the text
SETTINGS = {"initializer_range": 0.3}
NEW = 16
TOKENS = 96
HIT = 80  # whole chunks of 16 tokens, less the last token


def ids_of(out) -> list[list[int]]:
    return getattr(out, "sequences", out).tolist()


def greedy(model, ids=None, **more) -> list[list[int]]:
    ids = prompt(TOKENS) if ids is None else ids
    return ids_of(
        model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False, **more})
    )


def sampled(model, **more) -> list[list[int]]:
    torch.manual_seed(5)
    return greedy(model, do_sample=True, **more)


def repetitive() -> torch.Tensor:
    """A prompt in which a look-up finds candidates that are right for a while."""
    return prompt(24).repeat(1, 4)


# ---- those that hit


class Streamed(transformers.generation.BaseStreamer):
    """Keeps what a streamer gets."""

    def __init__(self) -> None:
        self.got: list[list[int]] = []

    def put(self, value) -> None:
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        self.got.append([])


def streaming(model):
    streamer = Streamed()
    return greedy(model, streamer=streamer), streamer.got


def streaming_from_a_thread(model):
    tokenizer = byte_tokenizer()
    streamer = transformers.TextIteratorStreamer(tokenizer, timeout=120.0)
    ids = prompt(TOKENS) % 256
    arguments = {"max_new_tokens": NEW, "do_sample": False, "streamer": streamer}
    worker = threading.Thread(
        target=model.generate, args=(ids,), kwargs=arguments
    )
    worker.start()
    text = list(streamer)
    worker.join()
    return text


def left_padded(model):
    ids = torch.cat([prompt(TOKENS), prompt(TOKENS, seed=2)])
    ids[0, :7] = 0
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    return greedy(model, ids, attention_mask=mask)


def pipeline(model):
    text = "A pagoda has several tiers, one above the other. " * 3
    options = {
        "tokenizer": byte_tokenizer(),
        "max_new_tokens": 8,
        "do_sample": False,
    }
    return transformers.pipeline("text-generation", model=model, **options)(text)


def by_position(model):
    config = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False)
    return ids_of(model.generate(prompt(TOKENS), config))


def by_position_with_a_mask(model):
    config = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False)
    ids = prompt(TOKENS)
    mask = torch.ones_like(ids)
    return ids_of(model.generate(ids, config, attention_mask=mask))


def as_inputs(model):
    return ids_of(
        model.generate(inputs=prompt(TOKENS), max_new_tokens=NEW, do_sample=False)
    )


def in_inference_mode(model):
    with torch.inference_mode():
        return greedy(model)


def lookup_with_scores(model):
    out = model.generate(
        repetitive(),
        max_new_tokens=NEW,
        do_sample=False,
        prompt_lookup_num_tokens=4,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return ids_of(out), len(out.scores)


def after_moving(model):
    assert model.to("cpu") is model
    assert model.eval() is model
    return greedy(model)


def with_a_default_cache(model):
    model.generation_config.cache_implementation = "dynamic"
    return greedy(model)


HITS: dict[str, Callable] = {
    "greedy": greedy,
    "sampling": sampled,
    "streaming": streaming,
    "streaming from a thread": streaming_from_a_thread,
    "beam search": lambda model: greedy(model, num_beams=3),
    "beam sampling": lambda model: sampled(model, num_beams=3),
    "several beams returned": lambda model: greedy(
        model, num_beams=3, num_return_sequences=2
    ),
    "num_return_sequences": lambda model: sampled(model, num_return_sequences=3),
    "left padding": left_padded,
    "prefill in chunks": lambda model: greedy(model, prefill_chunk_size=32),
    "assistant_model": lambda model: greedy(
        model, assistant_model=llama(seed=4, **SETTINGS)
    ),
    "the same model as assistant": lambda model: greedy(
        model, assistant_model=llama(seed=7, **SETTINGS)
    ),
    "sampling with an assistant": lambda model: sampled(
        model, assistant_model=llama(seed=4, **SETTINGS)
    ),
    "beams with an assistant": lambda model: greedy(
        model, num_beams=2, assistant_model=llama(seed=4, **SETTINGS)
    ),
    "prompt_lookup_num_tokens": lambda model: greedy(
        model, repetitive(), prompt_lookup_num_tokens=4
    ),
    "prompt lookup, one token": lambda model: greedy(
        model, repetitive(), prompt_lookup_num_tokens=4, max_new_tokens=1
    ),
    "prompt lookup, sampled": lambda model: sampled(
        model, ids=repetitive(), prompt_lookup_num_tokens=4
    ),
    "prompt lookup, scores": lookup_with_scores,
    "pipeline": pipeline,
    "generation config by position": by_position,
    "mask and config": by_position_with_a_mask,
    "inputs=": as_inputs,
    "inference mode": in_inference_mode,
    "negative prompt": lambda model: greedy(
        model, guidance_scale=1.5, negative_prompt_ids=prompt(9, seed=3)
    ),
    "to and eval": after_moving,
    "dynamic cache": lambda model: greedy(model, cache_implementation="dynamic"),
    "dynamic cache by default": with_a_default_cache,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HITS)
def test_calls_that_hit(name: str, house: House) -> None:
    call = HITS[name]
    theirs = call(llama(seed=7, **SETTINGS))
    cached = house.open(llama(seed=7, **SETTINGS))
    assert call(cached) == theirs
    assert cached.last.hit.num_tokens == 0
    assert cached.last_stored[0].num_chunks > 0
    assert call(cached) == theirs
    assert cached.last.hit.num_tokens >= HIT
    assert cached.last.hit.reason is not Reason.NOT_CACHEABLE


# ---- those that go on without the cache, and say so


def right_padded(model):
    ids = prompt(TOKENS)
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    return greedy(model, ids, attention_mask=mask)


def hidden_states(model):
    out = model.generate(
        prompt(TOKENS),
        max_new_tokens=2,
        do_sample=False,
        output_hidden_states=True,
        return_dict_in_generate=True,
    )
    return ids_of(out), out.hidden_states[0][0].shape


def paged(model):
    out = model.generate_batch(
        [prompt(40)[0].tolist()],
        generation_config=transformers.GenerationConfig(
            max_new_tokens=4, do_sample=False, eos_token_id=-1
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            block_size=32, num_blocks=8, max_batch_tokens=64
        ),
        progress_bar=False,
    )
    return [one.generated_tokens for one in out.values()]


def training(model):
    model.train()
    return greedy(model)


DECLINES: dict[str, tuple[Callable, str]] = {
    "right padding": (right_padded, "masked inside or on the right"),
    "output_hidden_states": (hidden_states, "output_hidden_states"),
    "static cache": (
        lambda model: greedy(model, cache_implementation="static"),
        "cache_implementation 'static'",
    ),
    "early exit": (
        lambda model: greedy(model, assistant_early_exit=1),
        "assistant_early_exit",
    ),
    "training mode": (training, "is in training mode"),
    "embeddings": (
        lambda model: ids_of(
            model.generate(
                inputs_embeds=model.get_input_embeddings()(prompt(40)).detach(),
                max_new_tokens=4,
                do_sample=False,
            )
        ),
        "inputs_embeds",
    ),
    "generate_batch": (paged, "generate_batch fills a cache of its own"),
}


@pytest.mark.parametrize("name", DECLINES)
def test_calls_that_say_why_they_are_not_cached(
    name: str, house: House, caplog: pytest.LogCaptureFixture
) -> None:
    call, why = DECLINES[name]
    theirs = call(llama(seed=7, **SETTINGS))
    cached = house.open(llama(seed=7, **SETTINGS))
    caplog.set_level(logging.WARNING, "pagoda")
    assert call(cached) == theirs
    assert cached.last.hit.reason is Reason.NOT_CACHEABLE
    assert why in cached.last.hit.detail
    assert cached.last_stored == []
    lines = [one for one in caplog.records if why in one.message]
    assert len(lines) == 1


def failure(call: Callable, model) -> str:
    try:
        call(model)
    except Exception as error:  # noqa: BLE001
        # whatever Transformers raises
        return type(error).__name__
    return ""


RAISE: dict[str, Callable] = {
    "quantized cache": lambda model: greedy(
        model, cache_implementation="quantized"
    ),
    "offloaded cache": lambda model: greedy(
        model, cache_implementation="offloaded"
    ),
    "a batch with an assistant": lambda model: greedy(
        model, prompt(TOKENS).repeat(2, 1), prompt_lookup_num_tokens=4
    ),
    "one dimension": lambda model: greedy(model, prompt(TOKENS)[0]),
    "no tokens": lambda model: greedy(model, prompt(TOKENS)[:, :0]),
    "no prompt": lambda model: model.generate(max_new_tokens=1),
    "a wrong argument": lambda model: greedy(model, no_such_argument=1),
    "a prompt twice": lambda model: greedy(model, inputs=prompt(TOKENS)),
    "a mask twice": lambda model: model.generate(
        prompt(TOKENS), None, generation_config=transformers.GenerationConfig()
    ),
}


@pytest.mark.parametrize("name", RAISE)
def test_only_what_raises_without_the_cache_raises_with_it(
    name: str, house: House
) -> None:
    call = RAISE[name]
    theirs = failure(call, llama(seed=7, **SETTINGS))
    ours = failure(call, house.open(llama(seed=7, **SETTINGS)))
    assert bool(ours) == bool(theirs), (theirs, ours)


def test_a_wrong_text_of_assisted_decoding_would_be_seen(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without the cut of the first pass the text is another one, or none."""
    call = HITS["prompt_lookup_num_tokens"]
    theirs = call(llama(seed=7, **SETTINGS))
    cached = house.open(llama(seed=7, **SETTINGS))
    call(cached)
    monkeypatch.setattr(
        cached_model, "first_pass_cut", lambda *_: contextlib.nullcontext()
    )
    # shapes that do not fit
    with contextlib.suppress(RuntimeError, ValueError, IndexError):
        assert call(cached) != theirs
    assert cached.last.hit.num_tokens >= HIT


def test_the_first_pass_of_assisted_decoding_is_short(house: House) -> None:
    cached = house.open(llama(seed=7, **SETTINGS))
    call = HITS["prompt_lookup_num_tokens"]
    call(cached)
    widths = []
    cached.model.model.register_forward_pre_hook(
        lambda _module, _args, kwargs: widths.append(
            kwargs[
                "inputs_embeds" if kwargs["input_ids"] is None else "input_ids"
            ].shape[1]
        ),
        with_kwargs=True,
    )
    call(cached)
    assert cached.last.hit.num_tokens >= HIT
    assert max(widths) <= TOKENS - HIT + 4


# ---- an object like the model


def test_writes_and_deletions_reach_the_model(house: House) -> None:
    model = llama(seed=7, **SETTINGS)
    cached = house.open(model)
    cached.later = torch.nn.Linear(2, 2)
    assert isinstance(model.later, torch.nn.Linear)
    del cached.later
    assert not hasattr(model, "later")
    cached._mine = 3
    assert model._mine == 3
    with pytest.raises(AttributeError):
        del cached.no_such_thing
    cached.last = None
    assert "last" not in vars(model)


@pytest.mark.slow
def test_what_is_saved_is_the_model(house: House, tmp_path) -> None:
    model = llama(seed=7, **SETTINGS)
    cached = house.open(model)
    theirs = greedy(cached)
    cached.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert greedy(again.eval()) == theirs


COPIES: dict[str, Callable] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda cached: pickle.loads(pickle.dumps(cached)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_has_the_same_store(name: str, house: House) -> None:
    cached = house.open(llama(seed=7, **SETTINGS), salt="tenant")
    theirs = greedy(cached)
    with COPIES[name](cached) as another:
        assert isinstance(another, CachedModel)
        assert (another.model is cached.model) is (name == "copy")
        assert greedy(another) == theirs
        assert another.last.hit.num_tokens == HIT
    # each has its own cache: closing one does not close the other
    assert greedy(cached) == theirs
    assert cached.last.hit.num_tokens == HIT


def test_a_copy_of_a_model_with_a_cache_of_the_users(house: House) -> None:
    first = house.open(llama(seed=7, **SETTINGS), salt="tenant")
    lent = CachedModel(llama(seed=7, **SETTINGS), cache=first.cache)
    greedy(lent)
    with pickle.loads(pickle.dumps(lent)) as another:
        greedy(another)
        assert another.last.hit.num_tokens == HIT


@pytest.mark.slow
def test_a_compiled_model_hits(house: House) -> None:
    plain = greedy(llama(seed=7, **SETTINGS))
    cached = house.open(llama(seed=7, **SETTINGS))
    cached.compile(backend="eager")
    for hit in (0, HIT):
        assert greedy(cached) == plain
        assert cached.last.hit.num_tokens == hit


def test_isinstance_says_that_it_is_not_the_model(house: House) -> None:
    cached = house.open(llama(seed=7, **SETTINGS))
    assert not isinstance(cached, transformers.PreTrainedModel)
    assert isinstance(cached.model, transformers.PreTrainedModel)


@pytest.mark.slow
def test_a_cached_model_as_assistant(house: House) -> None:
    model = llama(seed=7, **SETTINGS)
    helper = llama(seed=4, **SETTINGS)
    theirs = greedy(model, assistant_model=helper)
    assistant = house.open(helper)
    for _ in range(2):
        assert greedy(model, assistant_model=assistant) == theirs
