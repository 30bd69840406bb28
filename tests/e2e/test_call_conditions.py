"""Everything but the tokens that KV depends on: a call is right with it and after it, or it says
that it is not cached.

The settings of the process, the settings and the code of the model, and the arguments of one call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType

import pytest
import torch
import transformers

from pagoda.base.metrics import Reason
from pagoda.connectors.transformers import (
    CachedModel,
    call_arguments,
    namespace_of,
)
from pagoda.connectors.transformers.model_checks import kv_argument
from pagoda.connectors.transformers.numerics import numerics_of
from tests.e2e.house import House
from tests.e2e.stateful_models import stateful
from tests.e2e.tiny import generated, llama, prompt, qwen

# sharp attention, so that rounding changes the text
SETTINGS = {"initializer_range": 0.3}
NEW = 24


def said(cached: CachedModel) -> tuple[Reason | None, str]:
    return cached.last.hit.reason, cached.last.hit.detail


def counted(cached: CachedModel, kind: str = "miss") -> int:
    return cached.cache.stats()["counters"][f"{kind}_not_cacheable"]


def texts(model, ids, **kwargs) -> list[list[int]]:
    out = model.generate(ids, max_new_tokens=NEW, do_sample=False, **kwargs)
    return getattr(out, "sequences", out)[:, ids.shape[1] :].tolist()


def prefix_of(model, ids):
    """Return the KV of a prompt, as the model computes it."""
    kv = transformers.DynamicCache(config=model.config)
    model.generate(ids, max_new_tokens=2, **kv_argument(model, kv))
    return kv


def autocast(
    dtype: torch.dtype = torch.bfloat16,
) -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=dtype)


# ---- keys of today


def test_with_defaults_keys_are_what_they_always_were(house: House) -> None:
    cached = house.open(llama(), weights="pinned", revision="r1", salt="tenant")
    keys = [key.hex() for _, _, key in cached.cache.keys(torch.arange(1, 40))]
    assert keys == [  # as commit ce45306c computes them
        "709e8005fd64fa269316b5939c3e1061740ea2f9430fb61be5d7d92bb96a72c7",
        "a83b197898aa66876ca0829fd73db4cc992509bc5113346dc5c3ed6c2eccfa65",
    ]
    ready = cached._ready(None)
    assert ready.why_not == ""
    assert ready.space == {"lora": None, "salt": None, "numerics": ""}
    assert "numerics" not in cached.cache.namespace.fields()


# ---- settings of the process


class Precision:
    """The precision of float32 products for a while."""

    def __init__(self, setting: str) -> None:
        self._setting = setting

    def __enter__(self) -> None:
        torch.set_float32_matmul_precision(self._setting)

    def __exit__(self, *_: object) -> None:
        torch.set_float32_matmul_precision("highest")


class Deterministic:
    """Deterministic algorithms for a while."""

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


PROCESS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast(cpu)=bfloat16": autocast,
    "autocast(cpu)=float16": partial(autocast, torch.float16),
    "float32_matmul(cpu)=bf16": partial(Precision, "medium"),
    "float32_matmul(cpu)=tf32": partial(Precision, "high"),
    "math_sdp=False": partial(
        torch.nn.attention.sdpa_kernel,
        torch.nn.attention.SDPBackend.FLASH_ATTENTION,
    ),
    "no_mkldnn": partial(torch.backends.mkldnn.flags, enabled=False),
    "deterministic": Deterministic,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESS)
def test_settings_of_the_process_have_their_own_keys(
    name: str, house: House
) -> None:
    under = PROCESS[name]
    model = llama(seed=7, **SETTINGS)
    ids = prompt(96)
    plain = texts(model, ids)
    with under():
        theirs = texts(model, ids)
        assert name in numerics_of(model).text
        assert (
            name
            in namespace_of(model, house.open(model).layout, weights="x").numerics
        )
    cached = house.open(model)
    assert texts(cached, ids) == plain
    with under():
        assert texts(cached, ids) == theirs
        assert cached.last.hit.num_tokens == 0
        assert texts(cached, ids) == theirs
        in_layout = said(cached)[0] is not Reason.NOT_CACHEABLE
        assert cached.last.hit.num_tokens == (80 if in_layout else 0)
    assert texts(cached, ids) == plain
    assert cached.last.hit.num_tokens == 80


@pytest.mark.slow
def test_a_model_that_is_opened_under_autocast_is_cached_under_it(
    house: House,
) -> None:
    model = llama(seed=7, **SETTINGS)
    ids = prompt(96)
    plain = texts(model, ids)
    with autocast():
        theirs = texts(model, ids)
        cached = house.open(model)
        assert texts(cached, ids) == theirs
        assert texts(cached, ids) == theirs
        assert cached.last.hit.num_tokens == 80
    assert texts(cached, ids) == plain
    assert cached.last.hit.num_tokens == 0


@pytest.mark.slow
def test_a_text_under_autocast_is_never_lost_and_says_why_it_is_not_cached(
    house: House,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = llama(seed=7, **SETTINGS)
    cached = house.open(model)
    with autocast():
        theirs = texts(model, prompt(96))
        assert texts(cached, prompt(96)) == theirs
    reason, detail = said(cached)
    # KV of other dtypes, since Transformers 5.24
    if reason is not None and reason is Reason.NOT_CACHEABLE:
        assert "create the CachedModel under the settings of its calls" in detail
        assert "float32/bfloat16 instead of float32/float32" in detail
        assert [record for record in caplog.records if detail in record.message]
        assert counted(cached) == 1
    else:
        assert cached.last_stored[0].num_chunks == 6


def test_the_two_halves_under_other_settings(house: House) -> None:
    model = llama(seed=7, **SETTINGS)
    ids = prompt(96)
    cached = house.open(model)
    texts(cached, ids)
    with Precision("medium"), cached.prefix(ids) as prefix:
        assert prefix.columns == 0
    with cached.prefix(ids) as prefix:
        assert prefix.columns == 80
    with Precision("medium"):
        (stored,) = cached.store(ids, prefix_of(model, ids))
        assert stored.num_chunks == 6


def test_documents_of_a_call_that_is_not_cached_are_a_prompt(
    house: House,
) -> None:
    model = llama(seed=7, **SETTINGS)
    ids = prompt(96)
    cached = house.open(model)
    documents = {
        "documents": [ids[0, :30], ids[0, 30:60]],
        "question": ids[0, 60:],
    }
    out = cached.generate(
        **documents,
        prompt_lookup_num_tokens=3,
        max_new_tokens=NEW,
        do_sample=False,
    )
    assert out[:, 96:].tolist() == texts(model, ids, prompt_lookup_num_tokens=3)
    assert said(cached)[0] is Reason.NOT_CACHEABLE
    hooked(model)
    with pytest.raises(ValueError, match="changes the KV"):
        cached.blend(**documents, unchecked=True)


# ---- settings and code of the model


def eager(model) -> None:
    model.set_attn_implementation("eager")


def scaled(model) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 0.5


def other_activation(model) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.ReLU()


def bidirectional(model) -> None:
    model.config.is_causal = False
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


def windowed(model) -> None:
    model.config.sliding_window = 8
    model.config.layer_types = [
        "sliding_attention"
    ] * model.config.num_hidden_layers


def partly_training(model) -> None:
    model.model.layers[0].self_attn.attention_dropout = 0.5
    model.model.layers[0].self_attn.train()


def hooked(model) -> None:
    model.model.layers[0].register_forward_hook(
        lambda _module, _args, out: out + 1.0
    )


def pre_hooked(model) -> None:
    model.model.layers[1].register_forward_pre_hook(
        lambda _module, args: (args[0] * 2.0, *args[1:])
    )


def hooked_in_place(model) -> None:
    def change(_module, _args, out) -> None:
        out += 1.0

    model.model.layers[1].register_forward_hook(change)


def wrapped(model) -> None:
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, *args, **kwargs):
        return type(self).forward(self, *args, **kwargs)

    model.forward = MethodType(forward, model)


NAMED = {"eager": eager, "scaled": scaled, "other activation": other_activation}
NAMELESS = {
    "bidirectional": (bidirectional, "depends on what comes after it"),
    "partly training": (partly_training, "is in training mode"),
    "hook": (
        hooked,
        "hooked.<locals>.<lambda> on module model.layers.0 changes the KV",
    ),
    "pre-hook": (
        pre_hooked,
        "pre_hooked.<locals>.<lambda> on module model.layers.1 changes the KV",
    ),
    "hook in place": (
        hooked_in_place,
        "hooked_in_place.<locals>.change on module model.layers.1 changes",
    ),
    "wrapped forward": (wrapped, "forward of the model was replaced by"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_edits_have_their_own_keys(name: str, house: House) -> None:
    model = llama(seed=7, **SETTINGS)
    ids = prompt(96)
    cached = house.open(model)
    plain = texts(cached, ids)
    NAMED[name](model)
    theirs = texts(model, ids)
    assert texts(cached, ids) == theirs
    assert cached.last.hit.num_tokens == 0
    assert texts(cached, ids) == theirs
    assert cached.last.hit.num_tokens == 80
    house.shut()
    assert texts(house.open(llama(seed=7, **SETTINGS)), ids) == plain


@pytest.mark.slow
def test_a_second_edit_has_its_own_key(house: House) -> None:
    model = llama(seed=7, **SETTINGS)
    ids = prompt(96)
    cached = house.open(model)
    scaled(model)
    first = texts(cached, ids)
    for layer in model.model.layers:
        layer.self_attn.scaling *= 0.25
    theirs = texts(model, ids)
    assert first != theirs
    assert texts(cached, ids) == theirs
    assert cached.last.hit.num_tokens == 0


def test_modules_without_chance_may_be_in_training_mode(house: House) -> None:
    """Such as those that an adapter adds."""
    model = llama(seed=7, **SETTINGS)
    cached = house.open(model)
    for layer in model.model.layers:
        layer.train()
    for hit in (0, 80):
        texts(cached, prompt(96))
        assert cached.last.hit.num_tokens == hit


def test_an_edit_that_is_taken_back_has_the_first_keys_again(
    house: House,
) -> None:
    model = llama(seed=7, **SETTINGS)
    cached = house.open(model)
    plain = texts(cached, prompt(96))
    before = getattr(model.config, "sliding_window", None)
    model.config.sliding_window = 8
    texts(cached, prompt(96))
    if before is None:
        del model.config.sliding_window
    else:
        model.config.sliding_window = before
    assert texts(cached, prompt(96)) == plain
    assert cached.last.hit.num_tokens == 80


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMELESS)
def test_what_has_no_name_is_not_cached(name: str, house: House) -> None:
    edit, says = NAMELESS[name]
    model = llama(seed=7, **SETTINGS)
    ids = prompt(96)
    cached = house.open(model)
    plain = texts(cached, ids)
    edit(model)
    torch.manual_seed(0)
    theirs = texts(model, ids)
    torch.manual_seed(0)
    assert texts(cached, ids) == theirs
    reason, detail = said(cached)
    assert reason is Reason.NOT_CACHEABLE
    assert says in detail
    assert cached.last_stored == []
    with cached.prefix(ids) as prefix:
        assert prefix.columns == 0
        assert prefix.hit.reason == Reason.NOT_CACHEABLE
    (stored,) = cached.store(ids, prefix_of(model, ids))
    assert stored.num_chunks == 0
    assert stored.refused == 6
    assert stored.reason == Reason.NOT_CACHEABLE
    house.shut()
    assert texts(house.open(llama(seed=7, **SETTINGS)), ids) == plain


def test_a_model_opened_with_a_hook_is_not_cached(house: House) -> None:
    model = llama(seed=3)
    hooked(model)
    cached = house.open(model)
    assert texts(cached, prompt(96)) == texts(model, prompt(96))
    assert "hook" in said(cached)[1]
    assert cached.last_stored == []


def test_hooks_that_only_observe_do_not_matter(house: House) -> None:
    model = qwen(seed=3)
    cached = house.open(model)
    ids = prompt(96)
    # Transformers leaves its hooks in the model
    shown = cached.generate(
        ids,
        max_new_tokens=2,
        do_sample=False,
        return_dict_in_generate=True,
        output_hidden_states=True,
    )
    # of all tokens, as without the cache
    assert shown.hidden_states[0][0].shape[1] == 96
    assert "output_hidden_states" in said(cached)[1]
    seen: list[object] = []
    model.model.layers[0].register_forward_hook(
        lambda _module, _args, out: seen.append(out.sum().item())
    )
    hooks = hooks_of(model)
    for hit in (0, 80):
        texts(cached, ids)
        assert cached.last.hit.num_tokens == hit
    assert len(seen) == 2 * NEW
    assert hooks_of(model) == hooks  # nothing is left behind
    with cached.prefix(ids) as prefix:  # nobody watches what is computed from it
        assert prefix.columns == 0


def hooks_of(model) -> list[object]:
    return [
        hook
        for module in model.modules()
        for hook in module._forward_hooks.values()
    ]


class Once:
    """A hook that changes the values of one pass only."""

    def __init__(self, passes: int) -> None:
        self._left = passes

    def __call__(self, _module, _args, out):
        self._left -= 1
        return out + 1.0 if self._left == 0 else None


@pytest.mark.slow
@pytest.mark.parametrize("passes", [1, 2, 5])
def test_a_hook_that_changes_something_later_is_not_stored(
    passes: int, house: House
) -> None:
    model = llama(seed=7, **SETTINGS)
    ids = prompt(96)
    plain = texts(model, ids)
    cached = house.open(model)
    hook = model.model.layers[1].register_forward_hook(Once(passes))
    streamer = Streamed()
    texts(cached, ids, streamer=streamer)
    assert [len(one) for one in streamer.got] == [96] + [1] * NEW
    assert cached.last_stored == []
    texts(cached, ids)
    assert said(cached)[0] is Reason.NOT_CACHEABLE
    hook.remove()
    for hit in (0, 80):
        assert texts(cached, ids) == plain
        assert cached.last.hit.num_tokens == hit


MARK = 7  # the token that a hook changes


def marked(_module, args, out):
    """A hook that changes the embedding of one token, in passes that have it."""
    here = args[0] == MARK
    return out + 5.0 * here[..., None] if here.any() else None


@pytest.mark.slow
def test_a_hook_that_changes_a_later_pass_over_the_prompt(
    house: House,
) -> None:
    """A prompt is computed in several passes behind holes, and with `prefill_chunk_size`."""
    model = llama(seed=7, **SETTINGS)
    ids = prompt(325)
    ids[ids == MARK] = MARK + 1
    ids[0, 160:240:2] = MARK
    ids[0, -2] = MARK
    cached = house.open(model)
    texts(cached, ids)
    for gone, options in (
        ({2}, {}),
        ({2, 4, 12}, {}),
        (range(18, 20), {"prefill_chunk_size": 20}),
    ):
        assert cached.cache.flush(60.0)
        keys = [key for _, _, key in cached.cache.keys(ids[0])]
        for tier in cached.cache._tiers.all:
            for at in gone:
                tier.remove(keys[at])
        hook = model.model.embed_tokens.register_forward_hook(marked)
        want = texts(model, ids, **options)
        streamer = Streamed()
        assert texts(cached, ids, streamer=streamer, **options) == want
        assert [len(one) for one in streamer.got] == [325] + [1] * NEW
        assert said(cached)[0] is Reason.NOT_CACHEABLE
        assert cached.last_stored == []
        hook.remove()
        cached._changing.clear()
        texts(cached, ids)  # stores what was removed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mistral", "mamba2", "lfm2"])
def test_a_streamer_gets_the_prompt_of_a_model_with_states_once(
    kind: str, house: House
) -> None:
    """Its prompt is computed up to a cut before `generate` is called."""
    model = stateful(kind)
    ids = prompt(325)
    ids[ids == MARK] = MARK + 1
    cached = house.open(model)
    plain = texts(model, ids)
    for at, store in ((5, True), (-1, True), (5, False)):
        embedding = model.get_input_embeddings()
        hook = embedding.register_forward_hook(marked)
        changed = ids.clone()
        changed[0, at] = MARK
        streamer = Streamed()
        want = texts(model, changed)
        assert texts(cached, changed, streamer=streamer, store=store) == want
        assert [len(one) for one in streamer.got] == [325] + [1] * NEW
        assert said(cached)[0] is Reason.NOT_CACHEABLE
        hook.remove()
        cached._changing.clear()
    watched = embedding.register_forward_hook(lambda *_: None)
    for store in (False, True):
        assert texts(cached, ids, store=store) == plain
        assert said(cached)[0] is Reason.ABSENT
    watched.remove()


class Streamed:
    """Keeps what a streamer gets."""

    def __init__(self) -> None:
        self.got: list[list[int]] = []

    def put(self, value) -> None:
        self.got.append(value.flatten().tolist())

    def end(self) -> None: ...


# ---- arguments of a call

ARGUMENTS = {
    "past_key_values": (
        lambda model: kv_argument(model, transformers.DynamicCache()),
        "it is another cache",
    ),
    "static cache": (
        lambda _: {"cache_implementation": "static"},
        "cache_implementation 'static'",
    ),
    "use_cache": (lambda _: {"use_cache": False}, "use_cache=False leaves no KV"),
    "config without cache": (
        lambda _: {
            "generation_config": transformers.GenerationConfig(use_cache=False)
        },
        "use_cache=False leaves no KV",
    ),
    "early exit": (
        lambda _: {"assistant_early_exit": 1},
        "assistant_early_exit: its candidates are made of the model's states",
    ),
    "is_causal": (
        lambda _: {"is_causal": False},
        "is_causal: the KV may depend on it",
    ),
    "positions": (
        lambda _: {"position_ids": torch.arange(5, 101)[None]},
        "position_ids: the KV may depend",
    ),
    "hole": (
        lambda _: {"attention_mask": torch.tensor([[1] * 40 + [0] + [1] * 55])},
        "masked inside",
    ),
    "right padding": (
        lambda _: {"attention_mask": torch.tensor([[1] * 95 + [0]])},
        "masked inside",
    ),
    "attentions": (
        lambda _: {"output_attentions": True},
        "output_attentions: those of cached tokens",
    ),
    "hidden states": (
        lambda _: {"output_hidden_states": True},
        "output_hidden_states: those of cached",
    ),
    "own loop": (
        lambda _: {"custom_generate": _own_loop},
        "custom_generate: the KV may depend on it",
    ),
}


def _own_loop(model, input_ids, **_kwargs):
    return torch.cat([input_ids, input_ids[:, :NEW]], 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_call_with_more_than_tokens_goes_on_without_the_cache(
    name: str,
    house: House,
    caplog: pytest.LogCaptureFixture,
) -> None:
    arguments, says = ARGUMENTS[name]
    model = llama(seed=7, **SETTINGS)
    ids = prompt(96)
    plain = texts(model, ids)
    theirs = texts(model, ids, **arguments(model))
    cached = house.open(model)
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        assert texts(cached, ids, **arguments(model)) == theirs
        reason, detail = said(cached)
        assert reason is Reason.NOT_CACHEABLE
        assert says in detail
    assert cached.last_stored == []
    assert counted(cached) == 2
    stats = cached.cache.stats()
    assert stats["misses"] == {"not_cacheable": 2}
    assert stats["counters"]["lookups"] == 0
    # rate-limited
    assert (
        len([one for one in caplog.records if "not_cacheable: " in one.message])
        == 1
    )
    assert texts(cached, ids) == plain
    assert cached.last.hit.num_tokens == 0  # nothing was stored
    assert texts(cached, ids, **arguments(model)) == theirs  # nothing is loaded


def test_a_prompt_without_tokens_goes_on_without_the_cache(house: House) -> None:
    model = llama(seed=3)
    cached = house.open(model)
    embeddings = model.get_input_embeddings()(prompt(40)).detach()
    theirs = model.generate(
        inputs_embeds=embeddings, max_new_tokens=4, do_sample=False
    )
    assert torch.equal(
        cached.generate(
            inputs_embeds=embeddings, max_new_tokens=4, do_sample=False
        ),
        theirs,
    )
    assert "inputs_embeds: keys are made of token ids" in said(cached)[1]
    theirs = model.generate(inputs=prompt(40), max_new_tokens=4, do_sample=False)
    assert torch.equal(
        cached.generate(inputs=prompt(40), max_new_tokens=4, do_sample=False),
        theirs,
    )
    with pytest.raises(ValueError, match="input_ids must be"):
        cached.generate([[1, 2]])


@pytest.mark.slow
def test_the_pad_token_of_a_call_is_padding(house: House) -> None:
    model = llama(seed=7, **SETTINGS)
    ids = prompt(96)
    ids[0, :8] = 7
    cached = house.open(model)
    plain = texts(model, ids)
    theirs = texts(model, ids, pad_token_id=7)
    assert plain != theirs
    for _ in range(2):
        assert texts(cached, ids, pad_token_id=7) == theirs
        assert texts(cached, ids, pad_token_id=7, eos_token_id=[7, 9]) == texts(
            model, ids, pad_token_id=7, eos_token_id=[7, 9]
        )
        assert texts(cached, ids) == plain


def test_harmless_arguments_are_cached(house: House) -> None:
    model = llama(seed=3)
    cached = house.open(model)
    harmless = {
        "use_cache": True,
        "logits_to_keep": 1,
        "is_causal": None,
        "repetition_penalty": 1.2,
        "stopping_criteria": transformers.StoppingCriteriaList(),
        "logits_processor": transformers.LogitsProcessorList(),
        "output_scores": True,
        "output_attentions": False,
        "return_dict_in_generate": True,
    }
    theirs = texts(model, prompt(96), **harmless)
    for hit in (0, 80):
        assert texts(cached, prompt(96), **harmless) == theirs
        assert cached.last.hit.num_tokens == hit


def test_a_field_of_a_later_transformers_is_not_cached(house: House) -> None:
    class Later(transformers.GenerationConfig):
        def __init__(self, **kwargs):
            self.rotates = kwargs.pop("rotates", None)
            super().__init__(**kwargs)

    model = llama(seed=3)
    model.generation_config = Later()
    # of the model's own, which no pass reads
    model.generation_config.chat_format = "chatml"
    cached = house.open(model)
    texts(cached, prompt(96))
    assert cached.last_stored[0].num_chunks == 6
    model.generation_config.rotates = True
    texts(cached, prompt(96))
    assert "rotates in the generation config: it is not known" in said(cached)[1]


def test_a_model_whose_config_has_no_cache_says_so_when_it_is_opened(
    house: House,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = transformers.MptConfig(
        d_model=32, n_heads=2, n_layers=2, vocab_size=500, max_seq_len=512
    )
    model = transformers.MptForCausalLM(config).eval()
    if model.generation_config.use_cache is not False:
        model.generation_config.use_cache = False
    cached = house.open(model)
    assert "use_cache=False leaves no KV" in caplog.text
    theirs = texts(model, prompt(96))
    assert texts(cached, prompt(96)) == theirs
    assert said(cached)[0] is Reason.NOT_CACHEABLE
    for hit in (0, 80):
        assert texts(cached, prompt(96), use_cache=True) == theirs
        assert cached.last.hit.num_tokens == hit


# ---- after the text is complete


class Meddling(transformers.LogitsProcessor):
    """Does something in the middle of a generation."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def __call__(self, input_ids, scores):
        self._act()
        return scores


def test_nothing_is_raised_after_a_text_is_complete(house: House) -> None:
    model = llama(seed=3)
    ids = prompt(96)
    theirs = texts(model, ids)
    cached = house.open(model, weights="a name")  # changed weights are refused

    weight = model.model.layers[0].mlp.up_proj.weight
    kept = []  # so that no later copy gets an address again

    def touch() -> None:
        kept.append(weight.data)
        weight.data = weight.data.clone()

    assert texts(cached, ids, logits_processor=[Meddling(touch)]) == theirs
    assert cached.last_stored == []
    assert counted(cached, "drop") == 1
    with pytest.raises(ValueError, match="the weights were changed"):
        texts(cached, ids)


def test_settings_that_change_meanwhile_are_not_stored(house: House) -> None:
    cached = house.open(llama(seed=3))
    try:
        meddling = Meddling(lambda: torch.set_float32_matmul_precision("medium"))
        texts(cached, prompt(96), logits_processor=[meddling])
        assert cached.last_stored == []
        assert counted(cached, "drop") == 1
    finally:
        torch.set_float32_matmul_precision("highest")


def test_tokens_that_a_processor_overwrites_are_not_those_of_the_key(
    house: House,
) -> None:
    model = llama(seed=7, **SETTINGS)
    ids = prompt(96)
    cached = house.open(model)
    other = ids.clone()
    other[0, :5] = 3
    plain = texts(model, other)

    class Overwriting(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            input_ids[0, :5] = 3
            return scores

    texts(cached, ids.clone(), logits_processor=[Overwriting()])
    assert texts(cached, other) == plain


def test_an_unknown_argument_would_poison_the_cache_if_it_were_let_through(
    house: House,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control of the tests of arguments: they would see wrong KV."""
    model = llama(seed=7, **SETTINGS)
    plain = texts(model, prompt(96))
    monkeypatch.setattr(
        call_arguments, "_HARMLESS", call_arguments._HARMLESS | {"is_causal"}
    )
    cached = house.open(model)
    texts(cached, prompt(96), is_causal=False)
    assert texts(cached, prompt(96)) != plain


@pytest.mark.slow
def test_controls_of_this_file() -> None:
    """Each setting that has a name here changes something that a test can see, or is a choice of
    kernels.
    """
    model = llama(seed=7, **SETTINGS)
    plain = generated(model, prompt(96), NEW)
    for act in (autocast, nullcontext):
        with act():
            assert (generated(model, prompt(96), NEW) == plain) is (
                act is nullcontext
            )
    for edit in (
        scaled,
        other_activation,
        hooked,
        pre_hooked,
        wrapped,
        bidirectional,
    ):
        changed = llama(seed=7, **SETTINGS)
        edit(changed)
        assert generated(changed, prompt(96), NEW) != plain, edit.__name__
