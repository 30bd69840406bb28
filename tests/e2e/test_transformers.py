"""Transformers models served from the cache: the same tokens as without it, and a sentence for what
cannot be.
"""

from __future__ import annotations

import re

import pytest
import torch
import transformers

from pagoda import Cache
from pagoda.base.metrics import Reason
from pagoda.connectors.transformers import CachedModel, layout_of, namespace_of
from pagoda.connectors.transformers.model_checks import kv_argument
from testbed.patience import wait_until
from tests.e2e.house import CHUNK, House
from tests.e2e.tiny import VOCABULARY, deepseek, generated, llama, prompt, qwen
from tests.kv_events.router import Router

GREEDY = {"max_new_tokens": 48, "do_sample": False}
MODELS = {"llama": llama, "qwen": qwen, "deepseek": deepseek}


def text(cached: CachedModel, ids, **kwargs) -> list[list[int]]:
    return cached.generate(ids, **GREEDY, **kwargs)[:, ids.shape[1] :].tolist()


def served(cached: CachedModel) -> dict[str, int]:
    return cached.last.hit.by_tier


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens_cold_from_host_and_from_disk(
    name: str, house: House
) -> None:
    model = MODELS[name]()
    ids = prompt(100)
    want = generated(model, ids)
    assert len(set(want[0])) >= 20
    cached = house.open(model)
    assert text(cached, ids) == want
    assert served(cached) == {}
    assert cached.last.hit.reason is Reason.ABSENT
    assert text(cached, ids) == want
    assert served(cached) == {"host": 96}
    assert cached.last_stored[0].present == 6
    house.shut(wipe_host=True)
    cached = house.open(MODELS[name]())
    assert text(cached, ids) == want
    assert served(cached) == {"disk": 96}
    assert text(cached, ids) == want
    assert served(cached) == {"host": 96}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_controls_zeroed_kv_and_another_prompts_kv_change_the_text(
    name: str, house: House
) -> None:
    """If they did not, the tests above would prove nothing."""
    model = MODELS[name]()
    ids = prompt(100)
    cached = house.open(model)
    want = text(cached, ids)
    text(cached, prompt(100, seed=2))
    with cached.prefix(ids) as right, cached.prefix(prompt(100, seed=2)) as other:
        assert right.columns == other.columns == 96
        assert (
            generated(model, ids, **kv_argument(model, other.past_key_values))
            != want
        )
        zeroed = cached.prefix(ids).past_key_values
        for layer in zeroed.layers:
            layer.keys.zero_()
            layer.values.zero_()
        assert generated(model, ids, **kv_argument(model, zeroed)) != want
        assert (
            generated(model, ids, **kv_argument(model, right.past_key_values))
            == want
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shared", [0, 15, 16, 50, 79])
def test_a_partial_hit_gives_the_same_text(
    name: str, shared: int, house: House
) -> None:
    model = MODELS[name]()
    cached = house.open(model)
    cached.generate(prompt(80), max_new_tokens=1, do_sample=False)
    ids = torch.cat([prompt(80)[:, :shared], prompt(85 - shared, seed=9)], 1)
    out = cached.generate(ids, max_new_tokens=16, do_sample=False)
    assert out[:, 85:].tolist() == generated(model, ids, new=16)
    assert cached.last.columns == shared // CHUNK * CHUNK


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 96])
def test_the_last_token_is_always_left_to_compute(
    length: int, house: House
) -> None:
    """With a full hit `generate` would silently continue from another position."""
    model = llama()
    ids = prompt(length)
    cached = house.open(model)
    want = generated(model, ids)
    for _ in range(2):
        assert text(cached, ids) == want
    assert cached.last.columns == (length - 1) // CHUNK * CHUNK
    assert cached.last.columns < length


@pytest.mark.slow
def test_output_tokens_are_kept_if_asked(house: House) -> None:
    model = qwen()
    ids = prompt(40)
    cached = house.open(model)
    out = cached.generate(
        ids, store_output=True, return_dict_in_generate=True, **GREEDY
    ).sequences
    assert (
        sum(stored.num_chunks for stored in cached.last_stored) == 87 // CHUNK
    )  # of the last token there is no KV
    longer = torch.cat([out, prompt(9, seed=4)], 1)
    assert text(cached, longer) == generated(model, longer)
    assert served(cached) == {"host": 80}
    cached.generate(prompt(40, seed=5), store=False, **GREEDY)
    text(cached, prompt(40, seed=5))
    assert cached.last.columns == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_batch_uses_what_all_rows_have(name: str, house: House) -> None:
    model = MODELS[name]()
    cached = house.open(model)
    text(cached, prompt(70))
    first = torch.cat([prompt(70), prompt(10, seed=5)], 1)
    second = torch.cat([prompt(70)[:, :40], prompt(40, seed=6)], 1)
    batch = torch.cat([first, second])
    want = generated(model, batch)
    assert text(cached, batch) == want
    assert cached.last.columns == 32
    assert cached.last.num_tokens == [32, 32]
    assert text(cached, batch) == want
    assert cached.last.columns == 64 + CHUNK - CHUNK * (80 % CHUNK == 0)
    assert generated(model, first) == want[:1]


@pytest.mark.slow
def test_a_left_padded_batch_gives_the_same_text(house: House) -> None:
    model = llama(pad_token_id=0)
    cached = house.open(model)
    lengths = [90, 61, 33]
    batch = torch.zeros(3, 90, dtype=torch.long)
    mask = torch.zeros(3, 90, dtype=torch.long)
    for row, length in enumerate(lengths):
        batch[row, 90 - length :] = prompt(length, seed=row)
        mask[row, 90 - length :] = 1
    want = [
        generated(model, prompt(length, seed=row))[0]
        for row, length in enumerate(lengths)
    ]
    assert text(cached, batch, attention_mask=mask) == want
    assert [stored.num_chunks for stored in cached.last_stored] == [5, 3, 2]
    assert text(cached, batch) == want  # pad_token_id says where the padding is
    assert cached.last.columns == 77  # 29 of padding and 48 of the second row
    assert cached.last.num_tokens == [77, 48, 20]
    alone = prompt(61, seed=1)
    assert text(cached, alone) == want[1:2]
    assert served(cached) == {"host": 48}


def test_a_row_of_padding_only_in_the_common_columns(house: House) -> None:
    model = llama(pad_token_id=0)
    cached = house.open(model)
    text(cached, prompt(60))
    batch = torch.cat(
        [
            prompt(60),
            torch.cat(
                [torch.zeros(1, 50, dtype=torch.long), prompt(10, seed=3)], 1
            ),
        ]
    )
    want = generated(model, prompt(60)) + generated(model, prompt(10, seed=3))
    assert text(cached, batch) == want
    assert cached.last.columns == 48


def test_samples_and_beams_of_one_prompt(house: House) -> None:
    model = llama()
    ids = torch.cat([prompt(50), prompt(50, seed=2)])
    cached = house.open(model)
    beams = {
        "max_new_tokens": 12,
        "do_sample": False,
        "num_beams": 3,
        "num_return_sequences": 2,
    }
    want = model.generate(ids, **beams)
    for columns in (0, 48):
        assert torch.equal(cached.generate(ids, **beams), want)
        assert cached.last.columns == columns
    as_config = {"generation_config": transformers.GenerationConfig(**beams)}
    assert torch.equal(cached.generate(ids, **as_config), want)
    with pytest.raises(ValueError, match="beams change rows"):
        cached.generate(ids, store_output=True, **beams)
    torch.manual_seed(0)
    samples = model.generate(
        ids, max_new_tokens=12, do_sample=True, num_return_sequences=2
    )
    torch.manual_seed(0)
    again = cached.generate(
        ids,
        max_new_tokens=12,
        do_sample=True,
        num_return_sequences=2,
        store_output=True,
    )
    assert torch.equal(again, samples)
    text(cached, again[3:])
    assert cached.last.columns == 48


def test_prefix_and_store_can_be_called_separately(house: House) -> None:
    model = llama()
    ids = prompt(70)
    cached = house.open(model)
    want = generated(model, ids)
    for columns in (0, 64):
        with cached.prefix(ids) as prefix:
            assert (
                prefix.columns
                == columns
                == prefix.past_key_values.get_seq_length()
            )
            assert (
                generated(
                    model, ids, **kv_argument(model, prefix.past_key_values)
                )
                == want
            )
            stored = cached.store(ids, prefix.past_key_values)
        assert prefix.past_key_values is None
    assert stored[0].present == 4
    # grads and all
    forward = model(input_ids=prompt(33, seed=7), use_cache=True).past_key_values
    assert cached.store(prompt(33, seed=7), forward)[0].num_chunks == 2
    with pytest.raises(ValueError, match="DynamicCache of this model"):
        cached.store(ids, transformers.DynamicCache())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kv_bytes_in_half_precision(name: str, dtype: str, house: House) -> None:
    model = MODELS[name](dtype=dtype)
    ids = prompt(70)
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=ids, **kv_argument(model, cache))
    cached = house.open(model)
    assert cached.store(ids, cache)[0].num_chunks == 4
    for wiped in (False, True):
        if wiped:
            house.shut(wipe_host=True)
            cached = house.open(model)
        found = cached.prefix(ids).past_key_values
        for got, computed in zip(found.layers, cache.layers, strict=True):
            for a, b in (
                (got.keys, computed.keys),
                (got.values, computed.values),
            ):
                assert a.dtype == b.dtype
                assert torch.equal(
                    a.view(torch.int16), b[:, :, :64].view(torch.int16)
                )


def test_mla_layout_is_latents_and_rotary_keys() -> None:
    layout = layout_of(deepseek(), CHUNK)
    assert [tuple(plane) for plane in layout.planes] == [
        (1, 40, "float32"),
        (1, 8, "float32"),
    ]
    assert layout.chunk_bytes == 3 * CHUNK * 48 * 4


def test_different_weights_never_share(house: House) -> None:
    one = llama(seed=0)
    two = llama(seed=1)
    ids = prompt(80)
    first = house.open(one)
    second = house.open(two)
    text(first, ids)
    assert text(second, ids) == generated(two, ids)
    assert second.last.columns == 0
    assert house.open(llama(seed=0)).prefix(ids).columns == 64
    assert house.open(llama(seed=0, rope_theta=5000.0)).prefix(ids).columns == 0
    assert house.open(llama(seed=0), revision="b").prefix(ids).columns == 0
    with torch.no_grad():
        two.model.layers[1].mlp.up_proj.weight[3, 5] += 0.5
    assert (
        namespace_of(two, second.layout).weights
        != namespace_of(llama(seed=1), second.layout).weights
    )


@pytest.mark.slow
def test_weights_changed_in_place_are_noticed(house: House) -> None:
    model = llama()
    ids = prompt(80)
    cached = house.open(model)
    text(cached, ids)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    assert text(cached, ids) == generated(model, ids)
    assert cached.last.columns == 0
    assert text(cached, ids) == generated(model, ids)
    assert cached.last.columns == 64
    named = house.open(model, weights="checkpoint 7")
    text(named, ids)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    with pytest.raises(ValueError, match="weights were changed"):
        named.prefix(ids)


def test_kv_of_weights_that_changed_meanwhile_is_not_stored(house: House) -> None:
    model = llama()
    ids = prompt(80)
    cached = house.open(model)

    class Trainer:
        def put(self, value) -> None:
            with torch.no_grad():
                model.model.layers[0].self_attn.v_proj.weight.mul_(1.01)

        def end(self) -> None: ...

    cached.generate(ids, streamer=Trainer(), max_new_tokens=2)
    assert cached.last_stored == []
    assert cached.prefix(ids).columns == 0
    assert text(cached, ids) == generated(model, ids)


def test_active_adapters_are_part_of_the_namespace(house: House) -> None:
    model = llama()
    ids = prompt(80)
    adapted = model.model.layers[0].self_attn.k_proj
    cached = house.open(model)
    text(cached, ids)
    adapted.active_adapters = ["style"]
    adapted.scaling = {"style": 2.0}
    assert cached.prefix(ids).columns == 0
    text(cached, ids)
    assert cached.prefix(ids).columns == 64
    adapted.scaling = {"style": 1.0}
    assert cached.prefix(ids).columns == 0
    adapted.active_adapters = ["other"]
    assert cached.prefix(ids).columns == 0
    adapted.disable_adapters = True
    assert cached.prefix(ids).columns == 64
    model.peft_config = {
        "style": type("Config", (), {"is_prompt_learning": True})()
    }
    assert "virtual tokens" in cached.prefix(ids).hit.detail
    assert cached.prefix(ids).columns == 0


def test_tenants_do_not_share(house: House) -> None:
    cached = house.open(llama())
    ids = prompt(80)
    text(cached, ids, salt="a")
    assert cached.prefix(ids, salt="b").columns == 0
    assert cached.prefix(ids).columns == 0
    assert cached.prefix(ids, salt="a").columns == 64


def test_a_cache_of_ones_own(house: House) -> None:
    model = llama()
    layout = layout_of(model, CHUNK)
    options = {
        "host_size": "2MiB",
        "host_path": str(house.host / "own"),
        "chunk_tokens": CHUNK,
    }
    options |= {"deadline_seconds": 20.0, "worth_it": False}
    with Cache(
        namespace=namespace_of(model, layout, salt="x"), layout=layout, **options
    ) as cache:
        cached = CachedModel(model, cache=cache)
        assert text(cached, prompt(80)) == generated(model, prompt(80))
        cached.close()  # not ours to close
        assert CachedModel(model, cache=cache).prefix(prompt(80)).columns == 64
        with pytest.raises(ValueError, match=r"made for another model .*weights"):
            CachedModel(llama(seed=3), cache=cache)


@pytest.mark.slow
def test_what_is_stored_is_published_also_after_training(
    house: House,
) -> None:
    cached = house.open(llama())
    ids = prompt(100)
    router = Router(cached.publish_events("tcp://127.0.0.1:*"))
    text(cached, ids)
    wait_until(lambda: router.believes(ids[0].numpy(), "CPU") == 6)
    with torch.no_grad():
        next(cached.model.parameters()).mul_(1.5)
    text(cached, ids)
    published = list(router.tokens)
    wait_until(
        lambda: (
            router.believes(ids[0].numpy(), "CPU") == 6
            and not router.held["CPU"] & {*published[:6]}
        )
    )
    router.close()


@pytest.mark.slow
def test_prefill_speed_is_observed(house: House) -> None:
    cached = house.open(llama())
    cost = cached.cache._resources.load_cost

    def observed() -> list[int]:
        return list(cost._speeds.read(cost._prefill).amounts)

    text(cached, prompt(80))
    assert observed() == [80]
    assert cached.cache.stats()["rates"]["prefill_tokens_per_second"] > 0
    # 16 tokens left to compute: they say nothing of longer prompts
    text(cached, prompt(80))
    assert observed() == [80]
    for seed in range(3):
        text(cached, prompt(80, seed=100 + seed))
    assert observed() == [80] * 4
    assert not cached.model._forward_hooks
    assert not cached.model._forward_pre_hooks


def test_a_prefill_in_pieces_hits_too(house: House) -> None:
    model = llama()
    ids = prompt(90)
    cached = house.open(model)
    want = generated(model, ids)
    for _ in range(2):
        assert text(cached, ids, prefill_chunk_size=20) == want
    assert cached.last.columns == 80


def llama_like(config, kind, **changes):
    size = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    size |= {"vocab_size": 99, "intermediate_size": 32}
    return kind(config(**{**size, **changes})).eval()


REFUSED = {
    "mamba": (
        lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(
                vocab_size=99, hidden_size=32, num_hidden_layers=2
            )
        ),
        "cannot compute several tokens behind a state",
    ),
    "encoder-decoder": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=99,
                d_model=16,
                d_kv=8,
                d_ff=16,
                num_layers=1,
                num_heads=2,
                decoder_start_token_id=0,
            )
        ),
        "not KV of its tokens",
    ),
    "dynamic rope": (
        lambda: llama_like(
            transformers.LlamaConfig,
            transformers.LlamaForCausalLM,
            rope_parameters={
                "rope_type": "dynamic",
                "factor": 2.0,
                "rope_theta": 10000.0,
            },
        ),
        "length of the prompt",
    ),
    "one token at a time": (
        lambda: transformers.ProphetNetForCausalLM(
            transformers.ProphetNetConfig(
                vocab_size=99,
                hidden_size=16,
                decoder_ffn_dim=16,
                num_encoder_layers=1,
                num_decoder_layers=1,
                num_decoder_attention_heads=2,
                max_position_embeddings=64,
                is_decoder=True,
                is_encoder_decoder=False,
                add_cross_attention=False,
            )
        ),
        "cannot compute 2 tokens after 2 whose KV it is given: AssertionError: ",
    ),
    "positions from the new tokens alone": (
        lambda: CountsFromZero(llama().config).eval(),
        "computes other KV if it is given that of the tokens before",
    ),
}


class CountsFromZero(transformers.LlamaForCausalLM):
    """A model that does not know how many tokens were computed before, unless it gets their
    positions (`gets_positions`).
    """

    gets_positions = False

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        if position_ids is None or not self.gets_positions:
            position_ids = torch.arange(input_ids.shape[1])[None]
        return super().forward(
            input_ids=input_ids, position_ids=position_ids, **kwargs
        )


def test_a_model_that_gets_its_positions_from_generate_is_cached(
    house: House,
) -> None:
    model = CountsFromZero(llama().config).eval()
    model.gets_positions = True
    cached = house.open(model)
    for hit in (0, 32):
        assert generated(cached, prompt(40)) == generated(model, prompt(40))
        assert cached.last.hit.num_tokens == hit


def test_a_model_whose_own_positions_are_others_than_those_of_generate_is_cached(
    house: House,
) -> None:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    model = transformers.RobertaForCausalLM(
        transformers.RobertaConfig(
            vocab_size=VOCABULARY, is_decoder=True, initializer_range=0.3, **sizes
        )
    ).eval()
    cached = house.open(model)
    for hit in (0, 32):
        assert generated(cached, prompt(40)) == generated(model, prompt(40))
        assert cached.last.hit.num_tokens == hit


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_cannot_be_cut_are_not_cached(
    kind: str, house: House, caplog: pytest.LogCaptureFixture
) -> None:
    build, says = REFUSED[kind]
    model = build().eval()
    with pytest.raises(ValueError, match=says):
        house.open(model, strict=True)
    cached = house.open(model)
    (line,) = [
        one.getMessage()
        for one in caplog.records
        if "is not cached" in one.getMessage()
    ]
    assert re.search(says, line)
    options = {"max_new_tokens": 3, "do_sample": False}
    ids = torch.arange(1, 21)[None]
    out = cached.generate(ids, **options)
    assert out.tolist() == model.generate(ids, **options).tolist()
    assert cached.last.hit.reason is Reason.NOT_CACHEABLE
    assert re.search(says, cached.last.hit.detail)
    assert cached.prefix(ids).columns == 0
    assert cached.cache.stats()["misses"] == {"not_cacheable": 2}
    assert list(house.host.glob("host/*")) == []


def test_a_model_gets_its_kv_by_the_name_that_it_knows() -> None:
    class Older(torch.nn.Module):
        def forward(self, input_ids, past_key_values=None): ...

    class Newer(torch.nn.Module):  # since Transformers 5.24
        def forward(self, input_ids, cache=None): ...

    assert kv_argument(Older(), 1) == {"past_key_values": 1}
    assert kv_argument(Newer(), 1) == {"cache": 1}


def test_models_that_are_spread_over_processes_are_refused(house: House) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import distribute_tensor

    model = llama()
    model._tp_size = 2
    with pytest.raises(ValueError, match="spread over processes"):
        house.open(model, strict=True)
    model._tp_size = None
    distributed.init_process_group(
        "gloo", store=distributed.HashStore(), rank=0, world_size=1
    )
    try:
        share = distribute_tensor(
            model.lm_head.weight.detach(), DeviceMesh("cpu", [0])
        )
        model.lm_head.weight = torch.nn.Parameter(share)
        with pytest.raises(ValueError, match="spread over processes"):
            house.open(model, strict=True)
    finally:
        distributed.destroy_process_group()


def test_training_mode_and_quantised_caches_are_not_cached(house: House) -> None:
    model = llama()
    cached = house.open(model)
    model.generation_config.cache_implementation = "static"
    cached.generate(prompt(20), max_new_tokens=2)
    assert "cache_implementation 'static'" in cached.last.hit.detail
    model.generation_config.cache_implementation = None
    model.train()
    cached.generate(prompt(20), max_new_tokens=2)
    assert "model.eval()" in cached.last.hit.detail
    assert cached.cache.stats()["misses"] == {"not_cacheable": 2}
    with pytest.raises(ValueError, match="input_ids must be"):
        cached.prefix([[1, 2]])
