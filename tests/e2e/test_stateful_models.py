"""Models with sliding windows and states: the same text as without the cache, and a hit only where
an ending was kept.
"""

from __future__ import annotations

import copy
import re
import time
from functools import partial

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from pagoda import Config
from pagoda.base.metrics import Reason
from pagoda.connectors.transformers import CachedModel, layout_of, namespace_of
from pagoda.connectors.transformers.cache_shape import (
    is_at,
    read_ending,
    shape_of,
)
from pagoda.connectors.transformers.model_checks import kv_argument
from pagoda.connectors.transformers.prefill_cuts import choose_cuts, pass_over
from pagoda.connectors.transformers.stateful_probe import empty_cache
from testbed.patience import wait_until
from tests.e2e.house import CHUNK, House
from tests.e2e.slow_device import SlowDevice, engine_over
from tests.e2e.stateful_models import (
    FEW,
    SERVED,
    UNCACHED,
    WINDOW,
    WINDOWS,
    stateful,
)
from tests.e2e.tiny import generated, llama, prompt

LENGTH = 90
# of a prompt of 90 tokens: its last whole chunk, and its last token but one
CUTS = [80, 89]
# the largest difference to the model alone with the same split, of the largest logit
SAME = 1e-5
# what a wrong ending must change at least, or the case shows nothing
SEEN = 1000 * SAME


def of_every_type(function):
    """Run a test with one model of each kind, and with all of them in `make soak`."""
    marks = [
        kind if kind in FEW else pytest.param(kind, marks=pytest.mark.soak)
        for kind in SERVED
    ]
    return pytest.mark.parametrize("kind", marks)(function)


def text(cached, ids: torch.Tensor, new: int = 12, **kwargs) -> list[list[int]]:
    return generated(cached, ids, new, **kwargs)


# ---- the same text


@pytest.mark.slow
@of_every_type
def test_the_same_text_cold_from_host_and_from_disk(
    kind: str, house: House
) -> None:
    model = stateful(kind)
    ids = prompt(LENGTH)
    want = generated(model, ids, 12)
    assert len(set(want[0])) >= 3
    cached = house.open(model, strict=True)
    assert text(cached, ids) == want
    assert cached.last.hit.reason is Reason.ABSENT
    assert text(cached, ids) == want
    assert cached.last.hit.by_tier == {"host": CUTS[-1]}
    house.shut(wipe_host=True)
    cached = house.open(stateful(kind))
    assert text(cached, ids) == want
    assert cached.last.hit.by_tier == {"disk": CUTS[-1]}
    assert cached.last.columns == CUTS[-1]
    assert text(cached, ids) == want
    assert cached.last.hit.by_tier == {"host": CUTS[-1]}


def first_logits(model, cache, ids: torch.Tensor, held: int) -> torch.Tensor:
    """Return the logits of the first token behind what a cache holds."""
    ones = torch.ones_like(ids)
    return pass_over(model, ids, ones, held, held + 1, cache)[0, -1].float()


def handed_over(model, ids: torch.Tensor, cuts: list[int]):
    """Return a cache that the model has filled in the same pieces."""
    cache = empty_cache(model)
    begin = 0
    for cut in cuts:
        pass_over(model, ids, torch.ones_like(ids), begin, cut, cache)
        begin = cut
    return cache


def values_of(cache, kinds: tuple[str, ...]) -> list[torch.Tensor]:
    """Return the values of windows or states."""
    values = []
    for layer in cache.layers:
        if "window" in kinds and getattr(layer, "is_sliding", False):
            values += [layer.keys, layer.values]
        for kind in kinds:
            values += [
                state
                for state in getattr(layer, kind, {}).values()
                if state is not None
            ]
    return values


def next_logits(model, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits behind a prompt, of a whole call."""
    out = model.generate(
        ids,
        max_new_tokens=1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.logits[0][0].float()


@pytest.mark.slow
@of_every_type
def test_logits_cold_from_host_and_from_disk(
    kind: str, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the model alone, which goes on from the same split in memory."""
    model = stateful(kind)
    ids = prompt(LENGTH)
    held = CUTS[-1]
    want = first_logits(model, handed_over(model, ids, CUTS), ids, held)
    found: dict[str, float] = {}

    def call(cached: CachedModel, tier: str) -> None:
        logits = next_logits(cached, ids)
        assert cached.last.hit.by_tier == ({tier: held} if tier else {})
        difference = (logits - want).abs().max() / want.abs().max()
        found[tier or "cold"] = float(difference)

    cached = house.open(model)
    call(cached, "")
    call(cached, "host")
    house.shut(wipe_host=True)
    call(house.open(stateful(kind)), "disk")
    with capsys.disabled():
        print(f"\n{kind}: " + " ".join(f"{k} {v:.1e}" for k, v in found.items()))
    assert max(found.values()) <= SAME


@pytest.mark.slow
@of_every_type
def test_logits_behind_an_ending_and_what_a_wrong_one_changes(
    kind: str, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    model = stateful(kind)
    ids = prompt(LENGTH)
    cached = house.open(model)
    text(cached, ids, 1)
    text(cached, prompt(LENGTH, seed=2), 1)
    held = CUTS[-1]
    want = first_logits(model, handed_over(model, ids, CUTS), ids, held)
    largest = want.abs().max()

    def moved(change=None) -> float:
        with cached.prefix(ids) as found:
            assert found.columns == held
            if change is not None:
                change(found.past_key_values)
            logits = first_logits(model, found.past_key_values, ids, held)
            return float((logits - want).abs().max() / largest)

    other = cached.prefix(prompt(LENGTH, seed=2)).past_key_values
    # one token less
    shifted = handed_over(model, ids, [CUTS[0], held - 1])

    def zero(cache, part: str) -> None:
        for value in values_of(cache, (part,)):
            value.zero_()

    def swap(cache, wrong_cache, part: str) -> None:
        pairs = zip(
            values_of(cache, (part,)),
            values_of(wrong_cache, (part,)),
            strict=True,
        )
        for value, wrong in pairs:
            value.copy_(wrong)

    same = moved()
    wrong: dict[str, float] = {}
    for part in ("window", "conv_states", "recurrent_states"):
        if values_of(other, (part,)):
            ways = {
                "zeroed": partial(zero, part=part),
                "shifted": partial(swap, wrong_cache=shifted, part=part),
                "of another prompt": partial(swap, wrong_cache=other, part=part),
            }
            for way, change in ways.items():
                wrong[f"{part} {way}"] = moved(change)
    with capsys.disabled():
        print(
            f"\n{kind}: {same:.1e}; "
            + ", ".join(f"{name} {value:.1e}" for name, value in wrong.items())
        )
    assert same <= SAME
    assert len(wrong) >= 3
    assert min(wrong.values()) >= SEEN


@pytest.mark.slow
@of_every_type
def test_prompts_that_leave_a_stored_one_anywhere(
    kind: str, house: House
) -> None:
    """One token further than an ending is a miss: the text is right wherever a prompt leaves."""
    model = stateful(kind)
    cached = house.open(model)
    text(cached, prompt(LENGTH), 1)
    for shared in (0, 15, 16, 79, 80, 81, 88, 89, 90):
        ids = torch.cat(
            [prompt(LENGTH)[:, :shared], prompt(100 - shared, seed=9)], 1
        )
        out = text(cached, ids, 6, store=False)
        assert out == generated(model, ids, 6), shared
        best = max([cut for cut in CUTS if cut <= shared], default=0)
        assert cached.last.hit.num_tokens == best


# ---- where a prompt is cut


def test_where_a_prompt_is_cut() -> None:
    assert choose_cuts(15, 16, 0, 0) == []
    assert choose_cuts(16, 16, 0, 0) == []
    # the last token is always computed by `generate`
    assert choose_cuts(17, 16, 0, 0) == [16]
    assert choose_cuts(90, 16, 0, 0) == [80, 89]
    # where it leaves what was stored
    assert choose_cuts(90, 16, 0, 32) == [32, 80, 89]
    assert choose_cuts(90, 16, 32, 32) == [80, 89]
    assert choose_cuts(90, 16, 80, 80) == [89]
    assert choose_cuts(90, 16, 89, 80) == []
    # too close to the last
    assert choose_cuts(84, 16, 0, 0) == [80]
    assert choose_cuts(85, 16, 0, 0) == [80, 84]
    # the whole prompt was stored before
    assert choose_cuts(81, 16, 0, 96) == [80]


@pytest.mark.slow
def test_a_shared_head_is_kept_when_it_is_seen_twice(house: House) -> None:
    model = stateful("olmo_hybrid")
    cached = house.open(model)
    head = prompt(40)
    for seed, hit in ((2, 0), (3, 0), (4, 32), (5, 32)):
        ids = torch.cat([head, prompt(50, seed=seed)], 1)
        assert text(cached, ids, 6) == generated(model, ids, 6)
        assert cached.last.hit.num_tokens == hit
    house.shut()
    # found by a process that knows nothing, though the prompt goes on for long
    cached = house.open(model)
    ids = torch.cat([head, prompt(300, seed=6)], 1)
    assert text(cached, ids, 6) == generated(model, ids, 6)
    assert cached.last.hit.num_tokens == 32
    house.shut()
    # also where two chunks more are stored, which have no ending
    cached = house.open(model)
    ids = torch.cat([head, prompt(50, seed=2)[:, :35], prompt(20, seed=7)], 1)
    assert text(cached, ids, 6, store=False) == generated(model, ids, 6)
    assert cached.last.hit.num_tokens == 32


@pytest.mark.slow
@pytest.mark.parametrize("kind", FEW)
def test_a_conversation_goes_on_after_each_answer(
    kind: str, house: House
) -> None:
    model = stateful(kind)
    cached = house.open(model)
    ids = prompt(30)
    held = 0
    for turn in range(4):
        out = cached.generate(
            ids, max_new_tokens=8, do_sample=False, store_output=True
        )
        assert out[:, ids.shape[1] :].tolist() == generated(model, ids, 8)
        # of the last token of an answer there is no KV
        assert cached.last.hit.num_tokens == held
        held = out.shape[1] - 1
        ids = torch.cat([out, prompt(11, seed=turn + 20)], 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma2", "mamba2"])
def test_an_ending_of_the_whole_prompt_is_not_used(
    kind: str, house: House
) -> None:
    """The last token of a prompt is always computed: its logits are nowhere."""
    model = stateful(kind)
    cached = house.open(model)
    out = cached.generate(
        prompt(40), max_new_tokens=8, do_sample=False, store_output=True
    )
    for length, hit in ((48, 47), (47, 39)):
        ids = out[:, :length]
        assert text(cached, ids, 6, store=False) == generated(model, ids, 6)
        assert cached.last.hit.num_tokens == hit


def test_a_prompt_without_a_whole_chunk_is_not_stored(house: House) -> None:
    model = stateful("mistral")
    cached = house.open(model)
    for _ in range(2):
        assert text(cached, prompt(CHUNK)) == generated(model, prompt(CHUNK), 12)
        assert cached.last.hit.num_tokens == 0
    assert cached.cache.stats()["tiers"]["host"]["ready"] == 0


@pytest.mark.slow
def test_reading_only_computes_a_prompt_in_one_piece(house: House) -> None:
    model = stateful("gemma2")
    cached = house.open(model)
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    text(cached, prompt(LENGTH), 1, store=False)
    assert len(passes) == 1
    text(cached, prompt(LENGTH), 1)
    assert cached.last.hit.num_tokens == 0
    assert len(passes) == 1 + 3


# ---- the calls


@pytest.mark.slow
@pytest.mark.parametrize("kind", FEW)
def test_batches_beams_and_samples(kind: str, house: House) -> None:
    model = stateful(kind)
    cached = house.open(model)
    ids = torch.cat([prompt(LENGTH), prompt(LENGTH, seed=2)])
    want = generated(model, ids, 6)
    text(cached, ids[:1], 1)
    # one row has no ending
    assert text(cached, ids, 6) == want
    assert [hit.num_tokens for hit in cached.last.hits] == [0, 0]
    assert text(cached, ids, 6) == want
    assert [hit.num_tokens for hit in cached.last.hits] == [CUTS[-1]] * 2
    options = {"num_beams": 3, "num_return_sequences": 2}
    want = generated(model, ids, 6, **options)
    assert text(cached, ids, 6, **options) == want
    assert cached.last.columns == CUTS[-1]
    # beams that compute their prompt, too
    other = prompt(LENGTH, seed=3)
    for hit in (0, CUTS[-1]):
        assert text(cached, other, 6, **options) == generated(
            model, other, 6, **options
        )
        assert cached.last.columns == hit
    torch.manual_seed(3)
    sampled = {"do_sample": True, "max_new_tokens": 6}
    want = model.generate(ids, num_return_sequences=2, **sampled).tolist()
    torch.manual_seed(3)
    out = cached.generate(ids, num_return_sequences=2, **sampled).tolist()
    assert out == want


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma2", "mamba2"])
def test_output_of_several_samples_is_kept(kind: str, house: House) -> None:
    model = stateful(kind)
    cached = house.open(model)
    torch.manual_seed(3)
    out = cached.generate(
        prompt(40),
        num_return_sequences=2,
        do_sample=True,
        max_new_tokens=8,
        store_output=True,
    )
    assert out[0].tolist() != out[1].tolist()
    for row in out:
        ids = torch.cat([row[None], prompt(9, seed=4)], 1)
        assert text(cached, ids, 6) == generated(model, ids, 6)
        assert cached.last.hit.num_tokens == 47


def test_rows_with_padding_are_not_cached(house: House) -> None:
    model = stateful("gemma2", pad_token_id=0)
    cached = house.open(model)
    ids = torch.cat([prompt(50), prompt(50, seed=2)])
    ids[1, :10] = 0
    assert text(cached, ids) == generated(model, ids, 12)
    assert cached.last.hit.reason is Reason.NOT_CACHEABLE
    assert "padding" in cached.last.hit.detail
    assert cached.prefix(ids).columns == 0
    cache = handed_over(model, ids, [50])
    assert [one.reason for one in cached.store(ids, cache)] == [
        Reason.NOT_CACHEABLE
    ] * 2


@pytest.mark.parametrize("kind", ["mistral", "olmo_hybrid"])
def test_a_prefill_in_pieces_hits_too(kind: str, house: House) -> None:
    model = stateful(kind)
    cached = house.open(model)
    lengths = []

    def note(_, args, kwargs, out) -> None:
        lengths.append(kwargs["input_ids"].shape[1])

    model.register_forward_hook(note, with_kwargs=True)
    want = generated(model, prompt(LENGTH), 6, prefill_chunk_size=20)
    for hit in (0, CUTS[-1]):
        lengths.clear()
        out = text(cached, prompt(LENGTH), 6, prefill_chunk_size=20)
        assert out == want
        assert cached.last.columns == hit
        assert max(lengths) <= 20


@pytest.mark.parametrize("kind", FEW)
def test_the_two_halves(kind: str, house: House) -> None:
    model = stateful(kind)
    cached = house.open(model)
    ids = prompt(LENGTH)
    want = generated(model, ids, 6)
    with cached.prefix(ids) as found:
        assert found.columns == 0
        given = kv_argument(model, found.past_key_values)
        assert generated(model, ids, 6, **given) == want
    cache = handed_over(model, ids, [70])
    (stored,) = cached.store(ids, cache)
    assert stored.num_chunks == 4
    with cached.prefix(ids) as found:
        assert found.columns == found.hit.num_tokens == 70
        given = kv_argument(model, found.past_key_values)
        assert generated(model, ids, 6, **given) == want
    with pytest.raises(
        ValueError, match="holds 70 tokens, and input_ids have 60"
    ):
        cached.store(ids[:, :60], cache)
    with pytest.raises(ValueError, match="must be the cache of this model"):
        cached.store(ids, empty_cache(model))
    with pytest.raises(ValueError, match=r"must be the cache|get_seq_length"):
        cached.store(ids, DynamicCache(config=model.config))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FEW)
def test_what_a_caller_generated_by_hand_is_stored_where_it_ends(
    kind: str, house: House
) -> None:
    """The states after `generate` once got the key of the tokens that `prefix` had loaded."""
    model = stateful(kind)
    cached = house.open(model)
    ids = prompt(LENGTH)
    want = generated(model, ids, 12)

    def by_hand(salt: str) -> int:
        with cached.prefix(ids) as found:
            cache = found.past_key_values
            given = kv_argument(model, cache)
            out = model.generate(ids, max_new_tokens=12, do_sample=False, **given)
        assert out[:, LENGTH:].tolist() == want
        cached.store(out, cache, salt=salt)
        assert text(cached, out, salt=salt) == generated(model, out, 12)
        assert cached.last.hit.num_tokens == LENGTH + 11
        assert text(cached, ids, salt=salt) == want
        return found.columns

    assert by_hand("cold") == 0
    assert text(cached, ids) == want
    assert by_hand("warm") == CUTS[-1]
    # removed by the thread of finalizers
    wait_until(lambda: not model._forward_hooks)


@pytest.mark.parametrize("kind", [*FEW, "llama"])
def test_a_cache_by_hand_that_is_used_otherwise(kind: str, house: House) -> None:
    """More rows than it has; and another prompt after it was reset."""
    model = llama() if kind == "llama" else stateful(kind)
    cached = house.open(model)
    ids = prompt(LENGTH)
    with cached.prefix(ids) as found:
        given = kv_argument(model, found.past_key_values)
    generated(model, ids, 6, **given)
    text_of_two = torch.cat([prompt(LENGTH + 6)] * 2)
    for every in (1, 2):
        with pytest.raises(ValueError, match="holds 1 rows, and row"):
            cached.store(text_of_two, *given.values(), every=every)
    (cache,) = given.values()
    if kind == "mamba2":
        with pytest.raises(ValueError, match="is a copy"):
            cached.store(prompt(LENGTH + 6), copy.deepcopy(cache))
        cache.reset()
        other = prompt(LENGTH, 7)
        assert generated(model, other, 6, **given) == generated(model, other, 6)


@pytest.mark.slow
def test_passes_over_embeddings_and_in_a_shell_are_counted(house: House) -> None:
    model = stateful("mamba2")
    cached = house.open(model)
    ids = prompt(LENGTH)
    text(cached, ids)
    with cached.prefix(ids) as found:
        cache = found.past_key_values
    embeds = model.get_input_embeddings()(ids[:, CUTS[-1] :])
    with torch.no_grad():
        model(inputs_embeds=embeds, use_cache=True, **kv_argument(model, cache))
    assert cache.held_tokens == LENGTH
    # the shell without what it compiles, which takes half a minute
    with torch.compiler.set_stance("force_eager"):
        shell = house.open(torch.compile(model, backend="eager"), strict=True)
        text(shell, ids)
        with shell.prefix(ids) as found:
            cache = found.past_key_values
            assert found.columns == CUTS[-1]
        generated(shell.model, ids, 6, **kv_argument(model, cache))
    assert cache.held_tokens == LENGTH + 5


def test_documents_are_refused_with_what_to_do(house: House) -> None:
    cached = house.open(stateful("gemma2"))
    with pytest.raises(ValueError, match="give the whole prompt as input_ids"):
        cached.generate(
            documents=[[1, 2, 3], [4, 5]], question=[6], max_new_tokens=2
        )
    cached.generate(prompt(40), max_new_tokens=1)
    assert sum(cached.clear().chunks.values())
    cached.generate(prompt(40), max_new_tokens=1)
    assert cached.last.hit.num_tokens == 0


@pytest.mark.parametrize("kind", ["gemma2", "olmo_hybrid", "mamba2"])
def test_through_a_copy_engine_and_over_poisoned_memory(
    kind: str, house: House
) -> None:
    """What is read before it was written is NaN."""
    model = stateful(kind)
    ids = torch.cat([prompt(LENGTH), prompt(LENGTH, seed=2)])
    want = generated(model, ids, 6)
    cached = house.open(model)
    device = SlowDevice()
    cached._seen = cached._seen._replace(copy_engine=engine_over(device))
    cached._use(cached.cache)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        for hit in (0, CUTS[-1]):
            assert text(cached, ids, 6) == want
            assert cached.last.columns == hit
        assert bool(device.copied) == (kind != "mamba2")
    finally:
        torch.use_deterministic_algorithms(False)
        device.end()


# ---- what is kept


@pytest.mark.slow
@of_every_type
def test_an_ending_is_a_copy_of_its_bytes(kind: str, house: House) -> None:
    """A window that stays a view holds the memory of the whole prompt."""
    model = stateful(kind)
    ids = prompt(300)
    cache = handed_over(model, ids, [290])
    shape = shape_of(model, cache)
    assert is_at(shape, cache, 290)
    payload = read_ending(shape, cache, 0, 290, CHUNK)
    assert payload.base is None
    assert payload.nbytes == shape.ending_bytes(290, CHUNK)
    cached = house.open(model, host_size="8MiB")
    text(cached, ids, 1)
    with cached.prefix(ids) as found:
        assert found.columns == 299
        for value in values_of(
            found.past_key_values, ("window", "conv_states", "recurrent_states")
        ):
            nbytes = value.numel() * value.element_size()
            assert value.untyped_storage().nbytes() <= nbytes


@pytest.mark.parametrize("kind", FEW)
def test_an_ending_is_that_of_what_the_cache_holds(kind: str) -> None:
    model = stateful(kind)
    cache = handed_over(model, prompt(60), [40])
    shape = shape_of(model, cache)
    held = [tokens for tokens in range(30, 50) if is_at(shape, cache, tokens)]
    assert held == [40]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss"])
def test_bytes_of_a_prompt(
    kind: str, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gemma 3 has five layers with windows for each full one, gpt-oss has one."""
    each = {"gemma3_text": 5, "gpt_oss": 1}[kind]
    window = {"gemma3_text": 256, "gpt_oss": 32}[kind]
    kinds = (["sliding_attention"] * each + ["full_attention"]) * 2
    model = stateful(
        kind,
        layer_types=kinds,
        num_hidden_layers=len(kinds),
        sliding_window=window,
        head_dim=16,
    )
    cached = house.open(model, chunk_tokens=64, host_size="64MiB")
    tokens = 940
    text(cached, prompt(tokens), 1)
    cuts = choose_cuts(tokens, 64, 0, 0)
    row = 2 * 2 * 16 * 4
    full = 2 * row * cuts[-1]
    windows = len(cuts) * 2 * each * row * (window - 1)
    stats = cached.cache.stats()["tiers"]["host"]
    kept = stats["ready"] * cached.layout.slot_bytes
    with capsys.disabled():
        print(
            f"\n{kind}: {kept:,} bytes kept of {tokens} tokens with {len(cuts)} endings, "
            f"{kept / (full + windows):.3f} of the rows"
        )
    assert kept <= 1.1 * (full + windows)


# ---- which models, and under which names


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNCACHED)
def test_models_that_compute_something_else_behind_a_state_are_not_cached(
    kind: str, house: House
) -> None:
    model = stateful(kind)
    with pytest.raises(ValueError, match=type(model).__name__):
        house.open(model, strict=True)
    cached = house.open(model)
    for _ in range(2):
        assert text(cached, prompt(40), 3) == generated(model, prompt(40), 3)
        assert cached.last.hit.reason is Reason.NOT_CACHEABLE
    assert re.search(
        "several tokens behind a state|follow a state|cache of its own",
        cached.last.hit.detail,
    )


@pytest.mark.slow
def test_a_long_probe_is_said(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    model = stateful("mistral")
    slow = model.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    with caplog.at_level("INFO", "pagoda.connectors"):
        house.open(model)
    slow.remove()
    said = re.findall(r"it took (\S+) s to probe (\w+)", caplog.text)
    assert [name for _, name in said] == ["MistralForCausalLM"]
    assert float(said[0][0]) > 1


@pytest.mark.slow
def test_another_arrangement_has_other_keys() -> None:
    """A name for the weights says nothing of windows: what is kept must."""
    names = set()
    layouts = set()
    for changes in (
        {},
        {"sliding_window": WINDOW + 1},
        {"layer_types": ["full_attention", "sliding_attention"]},
    ):
        model = stateful("gemma2", **changes)
        layout = layout_of(model, CHUNK)
        layouts.add(layout.fingerprint)
        names.add(namespace_of(model, layout, weights="a").root)
    full = stateful("gemma2", layer_types=["full_attention"] * 2)
    layouts.add(layout_of(full, CHUNK).fingerprint)
    # the dtype of a state alone
    layouts |= {
        layout_of(stateful("mamba2", dtype=dtype), CHUNK).fingerprint
        for dtype in ("float32", "bfloat16")
    }
    assert len(names) == 3
    assert len(layouts) == 6


@pytest.mark.slow
def test_tenants_share_no_endings(house: House) -> None:
    cached = house.open(stateful("mamba2"))
    ids = prompt(LENGTH)
    for salt, hit in (("a", 0), ("b", 0), ("a", 89), (None, 0)):
        cached.generate(ids, max_new_tokens=1, do_sample=False, salt=salt)
        assert cached.last.hit.num_tokens == hit


@pytest.mark.slow
def test_changed_weights_and_settings_use_nothing_old(house: House) -> None:
    model = stateful("lfm2")
    cached = house.open(model)
    ids = prompt(LENGTH)
    text(cached, ids, 1)
    with torch.no_grad():
        model.model.embed_tokens.weight[3] += 1
    assert text(cached, ids, 6) == generated(model, ids, 6)
    assert cached.last.hit.num_tokens == 0
    text(cached, ids, 1)
    assert cached.last.hit.num_tokens == 89
    # other dtypes: probed again, under another name
    model.to(torch.bfloat16)
    assert text(cached, ids, 1) == generated(model, ids, 1)
    assert cached.last.hit.num_tokens == 0
    assert cached.layout.planes[0].dtype == "bfloat16"


@pytest.mark.slow
def test_an_edited_model_has_other_endings(house: House) -> None:
    model = stateful("gemma2")
    cached = house.open(model)
    ids = prompt(LENGTH)
    attention = model.model.layers[0].self_attn
    scaling = attention.scaling
    counts = []
    for value, hit in ((scaling, 0), (2 * scaling, 0), (scaling, 89)):
        attention.scaling = value
        assert text(cached, ids, 6) == generated(model, ids, 6)
        assert cached.last.hit.num_tokens == hit
        counts.append(cached.cache.stats()["tiers"]["host"]["ready"])
    # and they are cleared with their chunks
    attention.scaling = 2 * scaling
    cached.clear()
    left = cached.cache.stats()["tiers"]["host"]["ready"]
    assert left == counts[0] == counts[1] / 2


def test_states_are_never_kept_with_losses(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    model = stateful("gemma2", head_dim=32)
    cached = house.open(model, disk_codec="q4", unchecked=True)
    assert "states of a model are kept exactly" in caplog.text
    assert cached.cache.tiers == ("host",)


def test_a_model_that_is_converted_to_what_cannot_be_cached(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls go on: nobody loses a text because of its KV."""
    model = stateful("gemma2")
    cached = house.open(model)
    text(cached, prompt(LENGTH), 1)
    model.to(torch.bfloat16)
    model.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="keeps a state"):
        layout_of(model)
    monkeypatch.setattr(
        type(model), "generate", lambda *args, **kwargs: args[1], raising=True
    )
    cached.generate(prompt(LENGTH))
    assert cached.last.hit.reason is Reason.NOT_CACHEABLE
    assert "keeps a state" in cached.last.hit.detail


def test_a_minimum_is_that_of_a_prompt(house: House) -> None:
    model = stateful("gemma2")
    cached = house.open(model, min_hit_tokens=85)
    text(cached, prompt(LENGTH), 1)
    text(cached, prompt(LENGTH), 1)
    assert cached.last.hit.num_tokens == 89
    ids = torch.cat([prompt(LENGTH)[:, :84], prompt(20, seed=3)], 1)
    text(cached, ids, 1)
    assert cached.last.hit.reason is Reason.BELOW_MINIMUM
    assert cached.last.columns == 0


@pytest.mark.slow
def test_a_cache_that_the_caller_made(house: House) -> None:
    from pagoda import Cache

    model = stateful("gemma2")
    layout = layout_of(model, CHUNK)
    options = {"chunk_tokens": CHUNK, "host_size": "1MiB", "host_shared": False}
    lossy = {
        "disk_codec": "q4",
        "disk_size": "1MiB",
        "disk_path": str(house.disk),
        "unchecked": True,
    }
    for more, says in (
        ({}, ""),
        ({"min_hit_tokens": 32}, "min_hit_tokens"),
        (lossy, "cannot keep the states"),
    ):
        with Cache(
            Config(**options, **more),
            namespace=namespace_of(model, layout),
            layout=layout,
        ) as cache:
            if says:
                with pytest.raises(ValueError, match=says):
                    CachedModel(model, cache=cache)
                continue
            with CachedModel(model, cache=cache) as cached:
                for hit in (0, 89):
                    text(cached, prompt(LENGTH), 1)
                    assert cached.last.columns == hit


@pytest.mark.slow
def test_an_ending_that_has_no_room_is_said(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    model = stateful("mistral", sliding_window=400)
    house.open(model)
    assert "room for" not in caplog.text
    house.shut(wipe_host=True)
    cached = house.open(model, host_size="64KiB", disk_size=0, disk_path="")
    assert "there is room for 0 endings of this model" in caplog.text
    for _ in range(2):
        assert text(cached, prompt(500), 3) == generated(model, prompt(500), 3)
        assert cached.last.hit.num_tokens == 0
    assert cached.last_stored[0].reason is not None


# ---- conversations


def conversations(model, cached, seed: int, turns: int) -> int:
    """Random prompts that branch from each other; return how many hit. Every text is compared with
    the model's own.
    """
    rng = np.random.default_rng(seed)
    known = [prompt(int(rng.integers(1, 60)), seed=seed)]
    hits = 0
    for turn in range(turns):
        base = known[rng.integers(len(known))]
        if rng.random() < 0.5:
            # an edit or a branch
            base = base[:, : rng.integers(base.shape[1] + 1)]
        more = prompt(int(rng.integers(1, 40)), seed=int(rng.integers(6)))
        ids = torch.cat([base, more], 1)[:, -300:]
        action = rng.random()
        if action < 0.05:
            cached.clear()
        rows = torch.cat([ids, ids]) if action > 0.9 else ids
        out = cached.generate(
            rows,
            max_new_tokens=4,
            do_sample=False,
            store=bool(rng.random() < 0.9),
            store_output=bool(rng.random() < 0.5),
        )
        want = generated(model, rows, 4)
        assert out[:, rows.shape[1] :].tolist() == want, (seed, turn)
        hits += cached.last.hit.num_tokens > 0
        known.append(out[:1] if rng.random() < 0.5 else ids)
        del known[:-12]
    return hits


@pytest.mark.slow
@of_every_type
def test_random_conversations(kind: str, house: House) -> None:
    model = stateful(kind)
    # little room: endings and chunks are evicted all the time
    cached = house.open(model, host_size="256KiB", disk_size="1MiB")
    assert conversations(model, cached, 1, 25) > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize(
    ("chunk_tokens", "window"), [(1, 5), (3, 100), (16, 2), (40, WINDOW)]
)
def test_many_random_conversations(
    kind: str, chunk_tokens: int, window: int, house: House
) -> None:
    changes = {}
    if kind in WINDOWS:
        changes = {"sliding_window": window}
        if kind == "llama4_text":
            changes = {"attention_chunk_size": window}
    model = stateful(kind, **changes)
    for seed, size in ((2, "96KiB"), (3, "1MiB")):
        cached = house.open(
            model,
            chunk_tokens=chunk_tokens,
            host_size=size,
            disk_size=0,
            disk_path="",
            strict=True,
        )
        conversations(model, cached, seed, 20)
        house.shut(wipe_host=True)
