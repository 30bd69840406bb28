"""Documents reused at any place of a prompt: what is exact, what is not, and that it never happens
unasked.
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from pagoda.base.errors import ConfigError
from pagoda.base.metrics import Reason
from pagoda.base.quality_bounds import Bounds, Figures, Interval
from pagoda.base.quality_verdict import Result
from pagoda.connectors.transformers import (
    Deviation,
    FirstK,
    blend_setting,
    layout_of,
    policy_named,
    rotary_of,
)
from pagoda.connectors.transformers.model_checks import kv_argument
from pagoda_tools.quality import measure_quality
from pagoda_tools.quality.prompt_lines import QualityPrompt
from pagoda_tools.quality.write_verdict import write_verdict
from tests.e2e.house import CHUNK, House
from tests.e2e.tiny import _SIZE, _built, deepseek, generated, llama, prompt, qwen

GREEDY = {"max_new_tokens": 24, "do_sample": False}
RATIOS = (0.0, 0.05, 0.15, 0.3, 0.6, 1.0)
LENGTHS = (40, 32, 53, 7)  # whole chunks, parts of chunks, less than a chunk


def qwen2(**changes: object):
    config = transformers.Qwen2Config(**{**_SIZE, **changes})
    return _built(transformers.Qwen2ForCausalLM, config, 0, "float32")


def mistral(**changes: object):
    config = transformers.MistralConfig(
        **{**_SIZE, "sliding_window": None, **changes}
    )
    return _built(transformers.MistralForCausalLM, config, 0, "float32")


MODELS = {"llama": llama, "qwen2": qwen2, "qwen3": qwen, "mistral": mistral}


def pieces(
    seed: int = 1, lengths: tuple[int, ...] = LENGTHS
) -> tuple[list[list[int]], list[int]]:
    """Documents and a question."""
    documents = [
        prompt(length, seed * 100 + number)[0].tolist()
        for number, length in enumerate(lengths)
    ]
    return documents, prompt(9, seed * 100 + 50)[0].tolist()


def whole(documents: list[list[int]], question: list[int]) -> torch.Tensor:
    return torch.tensor(
        [[token for piece in (*documents, question) for token in piece]]
    )


@torch.no_grad()
def logits_after(model, found) -> torch.Tensor:
    """The logits of the last token of a prompt that was blended."""
    last = torch.from_numpy(found.blend.tokens[-1:]).long()[None]
    return model(last, **kv_argument(model, found.past_key_values)).logits[0, -1]


@torch.no_grad()
def error_of(model, found) -> float:
    """The largest difference of the last logits to those of a full prefill."""
    want = model(torch.from_numpy(found.blend.tokens).long()[None]).logits[0, -1]
    return float((logits_after(model, found) - want).abs().max())


@torch.no_grad()
def full_prefill(model, tokens: torch.Tensor) -> torch.Tensor:
    """Log probabilities of the next token."""
    return model(tokens).logits[0, -1].double().log_softmax(-1)


def divergence(model, found, want: torch.Tensor) -> float:
    """KL of the next token, to a full prefill."""
    got = logits_after(model, found).double().log_softmax(-1)
    return float((want.exp() * (want - got)).sum())


def verdict(place: Path, weights: str) -> None:
    """Write a verdict that the default setting is good enough with these weights."""
    one = Interval(1.0, 1.0, 1.0)
    none = Interval(0.0, 0.0, 0.0)
    result = Result(
        setting=blend_setting(),
        bounds=Bounds(kl=1.0, top1=0.5, answers=0.5, prompts=50),
        figures=Figures(
            kl=none, top1=one, same_text=one, answers=one, ttft=one, bytes=1.0
        ),
        controls={"zeroed KV": True},
        prompts=50,
        prompts_digest="00",
        new_tokens=8,
        confidence=0.95,
        seed=0,
        made="2026-01-01T00:00:00Z",
        passed=True,
        reasons=[],
    )
    write_verdict(
        place, model="llama", weights=[weights], pagoda="0", results=[result]
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["first_k", "deviation"])
@pytest.mark.parametrize("name", MODELS)
def test_computing_everything_again_is_a_full_prefill(
    name: str, policy: str, house: House
) -> None:
    model = MODELS[name]()
    cached = house.open(model)
    for seed in (1, 2):
        documents, question = pieces(seed)
        for order in (documents, documents[:1] + documents[:0:-1]):
            want = generated(model, whole(order, question), 24)[0]
            options = {"recompute": 1.0, "policy": policy}
            out = cached.generate(
                documents=order, question=question, **options, **GREEDY
            )
            assert out[0].tolist() == [*whole(order, question)[0].tolist(), *want]
            assert cached.last.blend.state.checked == "exact"
            assert cached.last.blend.exact.all()
            assert (
                error_of(model, cached.blend(order, question, **options)) <= 1e-4
            )


@pytest.mark.parametrize("recompute", RATIOS)
@pytest.mark.parametrize("name", MODELS)
def test_one_layer_has_no_context_so_every_share_is_exact(
    name: str, recompute: float, house: House
) -> None:
    """K and V of the first layer depend on the token and its place alone: this shows that K is
    moved right, and that chosen tokens replace the right ones."""
    model = MODELS[name](num_hidden_layers=1)
    cached = house.open(model, unchecked=True)
    documents, question = pieces()
    for order in permutations(documents[:3]):
        found = cached.blend(
            [*order, documents[3]],
            question,
            recompute=recompute,
            policy="first_k",
        )
        assert error_of(model, found) <= 1e-4


@pytest.mark.parametrize("recompute", RATIOS[1:])
@pytest.mark.parametrize("name", MODELS)
def test_two_layers_are_exact_once_k_of_the_second_was_looked_at(
    name: str,
    recompute: float,
    house: House,
) -> None:
    """Then K and V of both are exact; chosen tokens are computed again over them: this shows what
    each of them sees.
    """
    model = MODELS[name](num_hidden_layers=2)
    found = house.open(model, unchecked=True).blend(
        *pieces(), recompute=recompute, policy="deviation"
    )
    assert error_of(model, found) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["first_k", "deviation"])
def test_divergence_falls_with_the_share(policy: str, house: House) -> None:
    model = llama()
    cached = house.open(model, unchecked=True)
    mean = []
    prompts = [pieces(seed, (24, 33, 40, 29)) for seed in range(1, 25)]
    wanted = [full_prefill(model, whole(*each)) for each in prompts]
    for recompute in RATIOS:
        found = [
            cached.blend(documents, question, recompute=recompute, policy=policy)
            for documents, question in prompts
        ]
        mean.append(
            float(
                np.mean(
                    [
                        divergence(model, *each)
                        for each in zip(found, wanted, strict=True)
                    ]
                )
            )
        )
    assert mean == sorted(mean, reverse=True), mean
    assert len(set(mean)) == len(RATIOS), mean
    assert mean[0] > 0.05
    assert mean[-1] < 1e-6


def test_controls_wrong_documents_and_k_that_was_not_moved_are_noticed(
    house: House,
) -> None:
    model = llama(num_hidden_layers=1)
    cached = house.open(model, unchecked=True)
    documents, question = pieces()
    right = cached.blend(documents, question, recompute=0.0)
    want = logits_after(model, right)
    swapped = cached.blend(
        [documents[0], documents[2], documents[1], documents[3]],
        question,
        recompute=0.0,
    )
    assert (logits_after(model, swapped) - want).abs().max() > 0.01
    unmoved = cached.blend(documents, question, recompute=0.0)
    mover = rotary_of(model, layout_of(model, CHUNK))
    for start, stop in zip(
        unmoved.blend.starts[1:], [*unmoved.blend.starts[2:]], strict=False
    ):
        for layer in unmoved.past_key_values.layers:
            mover.move(layer.keys[:, :, start:stop], -start)
    assert (logits_after(model, unmoved) - want).abs().max() > 0.01


@pytest.mark.parametrize("policy", ["first_k", "deviation"])
def test_every_token_is_exact_recomputed_or_reused(
    policy: str, house: House
) -> None:
    model = llama()
    cached = house.open(model, unchecked=True)
    documents, question = pieces()
    total = sum(map(len, documents)) + len(question)
    later = sum(map(len, documents[1:]))
    cached.blend(documents, question, recompute=0.15, policy=policy)
    found = cached.blend(documents, question, recompute=0.15, policy=policy)
    blend = found.blend
    assert (
        (blend.exact.astype(int) + blend.recomputed + blend.reused) == 1
    ).all()
    assert blend.starts == [0, 40, 72, 125, 132]
    assert blend.tokens.tolist() == whole(documents, question)[0].tolist()
    assert blend.exact[:40].all()  # a true prefix
    assert blend.exact[: blend.exact_tokens].all()  # leading tokens only
    assert not blend.exact[132:].any()  # the question reads approximate KV
    assert abs((later - blend.reused_tokens) - 0.15 * later) <= len(documents)
    assert blend.computed_tokens == later - blend.reused_tokens + len(question)
    assert found.columns == total - 1
    assert found.hit.by_tier == {"host": total - len(question)}
    assert found.hit.mask.sum() == found.hit.num_tokens == total - len(question)
    assert found.hit.exact.nonzero()[0].tolist() == list(range(40))
    assert found.hit.exact_tokens == 40
    assert [hit.num_tokens for hit in blend.documents] == list(LENGTHS)
    nothing = cached.blend(
        documents, question, recompute=0.0, policy=policy
    ).blend
    assert nothing.exact_tokens == 40
    assert nothing.reused_tokens == later


def test_exact_tokens_are_those_of_a_full_prefill_and_others_are_not(
    house: House,
) -> None:
    model = llama()
    cached = house.open(model, unchecked=True)
    documents, question = pieces()
    full = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(whole(documents, question), **kv_argument(model, full))
    for policy in ("first_k", "deviation"):
        found = cached.blend(documents, question, recompute=0.3, policy=policy)
        end = found.blend.exact_tokens
        assert end > 40 or policy == "deviation"
        reused = torch.from_numpy(np.flatnonzero(found.blend.reused))
        for layer, want in zip(
            found.past_key_values.layers, full.layers, strict=True
        ):
            assert (
                layer.keys[:, :, :end] - want.keys[:, :, :end]
            ).abs().max() < 1e-4
            assert (
                layer.values[:, :, :end] - want.values[:, :, :end]
            ).abs().max() < 1e-4
        assert (layer.values - want.values[:, :, :-1])[:, :, reused].abs().amax(
            (0, 1, 3)
        ).min() > 1e-3


@pytest.mark.slow
def test_the_answer_does_not_depend_on_what_is_cached(house: House) -> None:
    model = llama()
    documents, question = pieces()
    cached = house.open(model, unchecked=True)
    cold = cached.blend(documents, question)
    assert cold.hit.reason is Reason.ABSENT
    assert cold.hit.detail.startswith("documents[0]: ")
    assert cold.blend.computed_tokens > sum(LENGTHS)
    want = logits_after(model, cold)
    assert torch.equal(
        logits_after(model, cached.blend(documents, question)), want
    )
    house.shut()
    again = house.open(model, unchecked=True)
    warm = again.blend(documents, question)
    assert warm.hit.by_tier == {"host": sum(LENGTHS)}
    assert warm.blend.seconds["alone"] == 0.0
    assert torch.equal(logits_after(model, warm), want)
    house.shut(wipe_host=True)
    third = house.open(model, unchecked=True)
    found = third.blend(documents, question)
    assert found.hit.by_tier == {"disk": sum(LENGTHS)}
    assert torch.equal(logits_after(model, found), want)
    # some stored, some not; and a document that the prompts' own chain has, too
    mixed = [documents[2], pieces(3)[0][1], documents[0]]
    half = logits_after(model, third.blend(mixed, question))
    assert torch.allclose(
        half, logits_after(model, third.blend(mixed, question)), atol=1e-5
    )


@pytest.mark.slow
def test_prompts_never_find_documents(house: House) -> None:
    model = llama()
    cached = house.open(model, unchecked=True)
    documents, question = pieces(1, (48, 64))
    cached.generate(documents=documents, question=question, **GREEDY)
    assert cached.last.blend.reused_tokens
    assert cached.last_stored == []
    assert cached.stats()["tiers"]["host"]["ready"] == 0
    assert cached.stats()["documents"]["tiers"]["host"]["ready"] == 7
    for ids in (
        whole(documents, question),
        *(torch.tensor([[*one, 1]]) for one in documents),
    ):
        with cached.prefix(ids) as prefix:
            assert prefix.hit.num_tokens == 0
    ids = whole(documents, question)
    assert cached.generate(ids, **GREEDY)[
        :, ids.shape[1] :
    ].tolist() == generated(model, ids, 24)
    assert cached.last.hit.num_tokens == 0


@pytest.mark.slow
def test_what_was_blended_cannot_be_stored_as_a_prompt(house: House) -> None:
    model = llama()
    (documents, question) = pieces()
    cached = house.open(model, unchecked=True)
    ids = whole(documents, question)
    first = len(documents[0])
    for beams in (1, 2):
        out = cached.generate(
            documents=documents,
            question=question,
            recompute=0.0,
            policy="first_k",
            return_dict_in_generate=True,
            num_beams=beams,
            **GREEDY,
        )
        with pytest.raises(
            ValueError, match=f"only its first {first} tokens are exact"
        ):
            cached.store(out.sequences, out.past_key_values)
    with cached.blend(documents, question, recompute=0.0) as found:
        with pytest.raises(ValueError, match="was blended"):
            cached.store(ids, found.past_key_values)
        cached.store(ids[:, :first], found.past_key_values)  # a true prefix
    cached.generate(ids, store=False, **GREEDY)
    assert cached.last.hit.num_tokens == first // CHUNK * CHUNK
    documents, question = pieces(2)
    ids = whole(documents, question)
    # all of it is exact
    with cached.blend(documents, question, recompute=1.0) as found:
        cached.store(ids, found.past_key_values)
    assert (
        cached.generate(ids, **GREEDY)[0, ids.shape[1] :].tolist()
        == generated(model, ids, 24)[0]
    )
    assert cached.last.hit.num_tokens == (ids.shape[1] - 1) // CHUNK * CHUNK


def test_only_the_first_document_may_hit_the_chain_of_prompts(
    house: House,
) -> None:
    model = llama()
    cached = house.open(model, unchecked=True)
    documents, question = pieces(1, (48, 64))
    cached.generate(
        whole(documents, question), **GREEDY
    )  # exact; its second document is one in this prompt only
    found = cached.blend(documents, question, store=False)
    assert [hit.num_tokens for hit in found.blend.documents] == [48, 0]
    assert found.blend.exact[:48].all()
    alone = cached.blend([documents[1]], question, recompute=1.0)
    assert alone.blend.documents[0].num_tokens == 0
    assert error_of(model, alone) <= 1e-4


def test_a_document_is_found_by_its_own_tokens_alone(house: House) -> None:
    """A partial chunk is padded: neither a longer document, nor one that has the padding as tokens,
    is the same.
    """
    model = llama(num_hidden_layers=1)
    cached = house.open(model, unchecked=True)
    first = prompt(20, 7)[0].tolist()
    short = prompt(21, 8)[0].tolist()
    question = [3, 4, 5]
    cached.blend([first, short], question, policy="first_k")
    for other in ([*short, 0], [*short, *[0] * 11], [*short, 9], short[:-1]):
        found = cached.blend(
            [first, other], question, policy="first_k", store=False
        )
        assert found.blend.documents[1].num_tokens == 16, other
        assert error_of(model, found) <= 1e-4
    again = cached.blend([first, short], question, policy="first_k")
    assert again.blend.documents[1].num_tokens == 21


def test_tenants_and_weights_keep_documents_apart(house: House) -> None:
    model = llama()
    cached = house.open(model, unchecked=True)
    documents, question = pieces()
    cached.blend(documents, question, salt="a")
    assert cached.blend(documents, question, salt="a").hit.num_tokens == sum(
        LENGTHS
    )
    assert (
        cached.blend(documents, question, salt="b", store=False).hit.num_tokens
        == 0
    )
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    assert (
        cached.blend(documents, question, salt="a", store=False).hit.num_tokens
        == 0
    )
    assert (
        error_of(model, cached.blend(documents, question, recompute=1.0)) <= 1e-4
    )


@pytest.mark.slow
def test_without_a_verdict_it_runs_only_unchecked_and_stats_say_so(
    house: House, tmp_path
) -> None:
    cached = house.open(llama(), quality_verdicts=str(tmp_path))
    documents, question = pieces()
    assert "approximate" not in cached.stats()
    with pytest.raises(
        ConfigError, match=r"pagoda quality .*--blend deviation:0\.15"
    ):
        cached.generate(documents=documents, question=question, **GREEDY)
    assert "host" not in cached.stats().get("documents", {}).get("counters", {})
    cached.generate(
        documents=documents, question=question, unchecked=True, **GREEDY
    )
    assert cached.last.blend.state.checked == "unchecked"
    stats = cached.stats()["approximate"]
    assert [one["checked"] for one in stats] == ["unchecked"]
    assert "deviation" in str(stats[0]["setting"])
    # not allowed for good
    with pytest.raises(ConfigError, match="pagoda quality"):
        cached.generate(documents=documents, question=question, **GREEDY)


def test_the_configuration_gives_the_share_and_the_least_tokens_and_an_argument_wins(
    house: House,
    tmp_path,
) -> None:
    cached = house.open(
        llama(),
        quality_verdicts=str(tmp_path),
        blend_recompute=0.3,
        blend_min_tokens=40,
    )
    documents, question = pieces()
    with pytest.raises(
        ConfigError, match=r"--blend deviation:0\.3:min_tokens=40"
    ):
        cached.generate(documents=documents, question=question, **GREEDY)
    with pytest.raises(ConfigError, match=r"--blend deviation:0\.1 "):
        cached.generate(
            documents=documents,
            question=question,
            recompute=0.1,
            min_tokens=0,
            **GREEDY,
        )
    cached.generate(
        documents=documents, question=question, unchecked=True, **GREEDY
    )
    assert cached.last.blend.state.setting == blend_setting(Deviation(), 0.3, 40)


@pytest.mark.parametrize("policy", ["first_k", "deviation"])
def test_documents_of_few_tokens_are_computed_in_the_prompt(
    policy: str, house: House
) -> None:
    model = llama()
    cached = house.open(model, unchecked=True)
    documents, question = pieces()  # of 40, 32, 53 and 7 tokens
    for _ in range(2):
        found = cached.blend(documents, question, policy=policy, min_tokens=33)
        blend = found.blend
        assert [hit.reason for hit in blend.documents][1::2] == [
            Reason.BELOW_MINIMUM
        ] * 2
        assert not blend.reused[40:72].any()
        assert not blend.reused[125:].any()
        # nothing before the third document is reused
        assert blend.exact_tokens >= 72
        assert blend.reused_tokens == 53 - round(0.15 * 53)
        assert (
            blend.recomputed.sum() + blend.exact.sum() + blend.reused_tokens
            == len(blend.tokens)
        )
    assert [hit.num_tokens for hit in blend.documents] == [40, 0, 53, 0]
    assert found.hit.reason is Reason.BELOW_MINIMUM
    assert found.hit.detail.startswith(
        "documents[1]: its 32 tokens are fewer than min_tokens = 33"
    )
    assert blend.computed_tokens == len(blend.tokens) - 40 - blend.reused_tokens
    nothing = cached.blend(documents, question, policy=policy, min_tokens=54)
    assert nothing.blend.exact.all()
    assert error_of(model, nothing) <= 1e-4
    # a prefix of any length is exact
    assert [hit.num_tokens for hit in nothing.blend.documents] == [40, 0, 0, 0]
    plain = cached.blend(
        documents, question, policy=policy, min_tokens=33, recompute=0.0
    )
    assert plain.blend.reused_tokens == 53


@pytest.mark.parametrize("min_tokens", [-1, 1.5, True, "8"])
def test_least_tokens_are_a_whole_number(
    min_tokens: object, house: House
) -> None:
    with pytest.raises(ValueError, match="min_tokens is"):
        house.open(llama(), unchecked=True).blend(
            *pieces(), min_tokens=min_tokens
        )


def test_after_new_weights_without_a_verdict_everything_is_computed(
    house: House, tmp_path, caplog
) -> None:
    model = llama()
    cached = house.open(model, quality_verdicts=str(tmp_path))
    verdict(tmp_path, cached.cache.namespace.weights)
    documents, question = pieces()
    assert cached.blend(documents, question).blend.state.checked == "loosened"
    assert "passed loosened bounds: KL at most 1 instead of 0.095" in caplog.text
    with pytest.raises(ConfigError):
        # another setting than the one that was measured
        cached.blend(documents, question, recompute=0.3)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    # an engine that runs is not stopped
    found = cached.blend(documents, question)
    assert found.blend.state.checked == "exact"
    assert error_of(model, found) <= 1e-4
    assert "documents are computed in full" in caplog.text


@pytest.mark.slow
def test_a_verdict_is_about_the_adapters_that_were_active(
    house: House, tmp_path
) -> None:
    model = llama()
    cached = house.open(model, quality_verdicts=str(tmp_path))
    measured = measure_quality(
        model,
        [QualityPrompt(1, *pieces(1, (12, 9)), None)] * 4,
        blends=[(Deviation(), 0.99)],
        chunk_tokens=CHUNK,
        bounds={"blend": Bounds(kl=1.0, top1=0.5, answers=0.5, prompts=4)},
    )
    results = [row.result for row in measured.rows if row.result is not None]
    write_verdict(
        tmp_path,
        model="llama",
        weights=[measured.weights],
        pagoda="0",
        results=results,
    )
    options = {"recompute": 0.99, "policy": "deviation"}
    assert cached.blend(*pieces(), **options).blend.state.checked == "loosened"
    model.model.layers[0].mlp.active_adapters = ["one"]
    # it began, and goes on
    assert cached.blend(*pieces(), **options).blend.state.checked == "exact"
    with pytest.raises(
        ConfigError, match=r"no verdict for the weights .*adapters "
    ):
        house.open(model, quality_verdicts=str(tmp_path)).blend(
            *pieces(), **options
        )


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: deepseek(), "two halves|no rotated K"),
        (
            lambda: _built(
                transformers.CohereForCausalLM,
                transformers.CohereConfig(**_SIZE, use_qk_norm=False),
                0,
                "float32",
            ),
            "two halves",
        ),
        (
            lambda: _built(
                transformers.GPT2LMHeadModel,
                transformers.GPT2Config(
                    vocab_size=500, n_embd=48, n_layer=2, n_head=2
                ),
                0,
                "float32",
            ),
            "0 rotary embeddings",
        ),
    ],
    ids=["latents", "interleaved", "absolute"],
)
def test_models_whose_k_cannot_be_moved_are_refused_with_a_sentence(
    model, said: str, house: House
) -> None:
    cached = house.open(model(), unchecked=True)
    documents, question = pieces()
    with pytest.raises(ValueError, match=said) as error:
        cached.blend(documents, question)
    assert "\n" not in str(error.value)
    ids = whole(documents, question)
    cached.generate(ids, **GREEDY)  # prefixes are cached as before


def test_an_attention_that_takes_no_mask_is_refused(house: House) -> None:
    model = llama()
    cached = house.open(model, unchecked=True)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="takes no mask"):
        cached.blend(*pieces())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sliding_window": 32}, "windows or states"),
        (
            {
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                }
            },
            "length of the prompt",
        ),
    ],
)
def test_windows_and_dynamic_rope_are_not_blended(
    changes: dict, said: str, house: House
) -> None:
    """Their prompts are still cached as far as that is possible."""
    cached = house.open(mistral(**changes), unchecked=True)
    with pytest.raises(ValueError, match=said):
        cached.blend(*pieces())


@pytest.mark.slow
def test_scaled_rope_moves_k_without_scaling_it_twice(house: House) -> None:
    for kind in (
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    ):
        model = llama(num_hidden_layers=1, rope_parameters=kind)
        found = house.open(model, unchecked=True).blend(*pieces(), recompute=0.0)
        assert error_of(model, found) <= 1e-4


def test_half_precision_is_close_to_a_whole_prefill(house: House) -> None:
    model = llama(dtype="bfloat16", num_hidden_layers=1)
    cached = house.open(model, unchecked=True)
    documents, question = pieces()
    cached.blend(documents, question, recompute=0.0)
    found = cached.blend(documents, question, recompute=0.0)
    with torch.no_grad():
        want = model(whole(documents, question)).logits[0, -1].float()
    got = logits_after(model, found).float()
    assert found.past_key_values.layers[0].keys.dtype is torch.bfloat16
    assert (got - want).abs().max() < 0.05 * want.abs().max()


def test_layouts_of_documents_name_the_rotary_embedding(house: House) -> None:
    one = llama()
    other = llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    layouts = []
    for model in (one, other):
        layout = layout_of(model, CHUNK)
        rotary = rotary_of(model, layout).rotary
        assert rotary.dims == 16
        layouts.append(layout.with_rotary(rotary))
    assert layouts[0].rotary.theta == 1e4
    assert layouts[1].rotary.theta == 5e5
    assert (
        len(
            {
                layouts[0].fingerprint,
                layouts[1].fingerprint,
                layout_of(one, CHUNK).fingerprint,
            }
        )
        == 3
    )


def test_wrong_arguments_are_refused(house: House) -> None:
    cached = house.open(llama(), unchecked=True)
    documents, question = pieces()
    for wrong, said in (
        ({"documents": []}, "at least one document"),
        ({"documents": "text"}, "at least one document"),
        ({"documents": (one for one in documents)}, "at least one document"),
        ({"documents": {"name": [1, 2]}}, "at least one document"),
        ({"documents": 5}, "at least one document"),
        ({"documents": ["text"]}, r"documents\[0\] is text"),
        ({"documents": [[]]}, r"documents\[0\] has no tokens"),
        ({"question": None}, "question is missing"),
        ({"recompute": 1.5}, "from 0 to 1"),
        ({"recompute": True}, "from 0 to 1"),
        ({"policy": "best"}, "one of first_k, deviation"),
        ({"policy": Deviation(layer=3)}, "has 3"),
        ({"input_ids": prompt(9)}, "without input_ids"),
        ({"store_output": True}, "without input_ids"),
    ):
        with pytest.raises(ValueError, match=said):
            cached.generate(
                **{"documents": documents, "question": question, **wrong},
                **GREEDY,
            )
    with pytest.raises(ValueError, match="at least 1"):
        Deviation(layer=0)


class OnePick(FirstK):
    """A policy of a user's own."""

    name = "one_pick"
    picked = (45,)

    def choose(self, candidates):
        assert candidates.positions.tolist() == list(range(40, 132))
        return np.array(self.picked)


def test_a_policy_of_ones_own(house: House) -> None:
    cached = house.open(llama(), unchecked=True)
    documents, question = pieces()
    blend = cached.blend(documents, question, policy=OnePick()).blend
    assert blend.recomputed.nonzero()[0].tolist() == [45, *range(132, 141)]
    for wrong in ((39,), (132,), (50, 49), (50, 50)):
        policy = OnePick()
        policy.picked = wrong
        with pytest.raises(ValueError, match="one_pick"):
            cached.blend(documents, question, policy=policy)
    assert (
        str(blend_setting(policy_named("first_k"), 0.3))
        == "blend policy=first_k recompute=0.3"
    )
    assert blend_setting(Deviation(layer=2)).options["layer"] == 2


def test_text_is_tokenized_piece_by_piece(house: House) -> None:
    def tokenizer(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {
            "input_ids": [7] * add_special_tokens
            + [ord(letter) for letter in text]
        }

    cached = house.open(llama(), unchecked=True)
    found = cached.blend(
        ["a first text", "another text"], "why?", tokenizer=tokenizer
    )
    assert found.blend.tokens.tolist() == [
        7,
        *map(ord, "a first textanother textwhy?"),
    ]
    assert found.blend.starts == [0, 13, 25]


@pytest.mark.slow
def test_several_samples_and_beams_begin_from_documents(house: House) -> None:
    model = llama()
    cached = house.open(model)
    documents, question = pieces()
    ids = whole(documents, question)
    for options in (
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
    ):
        want = model.generate(ids, max_new_tokens=8, do_sample=False, **options)
        got = cached.generate(
            documents=documents,
            question=question,
            recompute=1.0,
            max_new_tokens=8,
            do_sample=False,
            **options,
        )
        assert torch.equal(got, want)


@pytest.mark.slow
def test_an_attention_chosen_later_that_takes_no_mask_is_refused_too(
    house: House,
) -> None:
    model = llama()
    cached = house.open(model, unchecked=True)
    documents, question = pieces()
    cached.blend(documents, question)
    # as set_attn_implementation does
    model.config._attn_implementation = "no_mask"
    with pytest.raises(ValueError, match="takes no mask"):
        cached.blend(documents, question)
    model.config._attn_implementation = "eager"
    assert (
        error_of(model, cached.blend(documents, question, recompute=1.0)) <= 1e-4
    )


class WhileComputing:
    """Does something to the model when it computes documents."""

    def __init__(self, model, change) -> None:
        self._change = change
        self._hook = model.model.layers[-1].register_forward_hook(self)

    def __call__(self, *args: object) -> None:
        self._hook.remove()
        self._change()


@pytest.mark.slow
def test_what_an_adapter_computed_is_not_stored_once_another_is_active(
    house: House,
) -> None:
    model = llama()
    cached = house.open(model, unchecked=True)
    documents, question = pieces()
    cached.blend([documents[0]], question, store=False)  # the model is probed
    adapted = model.model.layers[0].mlp
    adapted.active_adapters = ["one"]
    WhileComputing(model, lambda: setattr(adapted, "active_adapters", ["two"]))
    cached.blend([documents[0]], question)
    adapted.active_adapters = ["one"]
    assert cached.blend([documents[0]], question, store=False).hit.num_tokens == 0


class ThenOnce:
    """A reentrant lock that lets another thread in when it is free again for the first time."""

    def __init__(self, lock, other) -> None:
        self._lock = lock
        self._other = [other]
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        self._lock.release()
        while self._other and not self._depth:
            self._other.pop()()


@pytest.mark.slow
def test_weights_changed_by_another_thread_at_the_first_use_get_their_own_name(
    house: House,
) -> None:
    """The change comes when the call has looked at the weights: nothing may be stored under the old
    name.
    """
    model = llama()
    cached = house.open(model, unchecked=True)
    documents, question = pieces()

    def change() -> None:
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        cached.prefix(whole(documents, question))

    cached._lock = ThenOnce(cached._lock, change)
    cached.blend(documents, question)
    cached.blend(documents, question)
    assert (
        cached._blender.cache.namespace.weights == cached.cache.namespace.weights
    )
    before = llama()
    found = house.open(before, unchecked=True).blend(
        documents, question, recompute=1.0
    )
    assert found.hit.num_tokens == 0
    assert error_of(before, found) <= 1e-4


@pytest.mark.slow
def test_a_closed_model_computes_documents_and_opens_nothing(
    house: House,
) -> None:
    model = llama()
    documents, question = pieces()
    for used_before in (True, False):
        cached = house.open(model, unchecked=True)
        if used_before:
            cached.blend(documents, question)
        cached.close()
        found = cached.blend(documents, question, recompute=1.0)
        assert found.hit.num_tokens == 0
        assert found.hit.reason is Reason.CLOSED
        assert error_of(model, found) <= 1e-4
    house._open.clear()  # these are closed, and their caches cannot be flushed


@pytest.mark.slow
def test_policies_that_misbehave_are_refused(house: House) -> None:
    cached = house.open(llama(), unchecked=True)
    documents, question = pieces()
    for wrong in (
        np.array([60, 50], np.uint32),
        np.array([50, 135, 60], np.uint32),
        np.array([50, 2**63 + 9], np.uint64),
        np.array([50.0]),
        None,
        [[50], [60]],
        [[50], [60, 61]],
        np.ones(92, bool),
        50,
        ["50"],
    ):
        policy = OnePick()
        policy.picked = wrong
        policy.choose = lambda candidates, wrong=wrong: wrong
        with pytest.raises(ValueError, match=r"one_pick.*ascending candidates"):
            cached.blend(documents, question, policy=policy)
    for right in ((), [50, 60], np.array([50, 60], np.uint64)):
        policy.choose = lambda candidates, right=right: right
        blend = cached.blend(documents, question, policy=policy).blend
        assert blend.recomputed.nonzero()[0].tolist() == [
            *right,
            *range(132, 141),
        ]


def test_only_objects_that_are_policies_are_taken_and_none_has_the_name_of_another() -> (
    None
):
    class Mine(FirstK):
        """It forgot to change its name, so a verdict for first_k would cover it."""

    with pytest.raises(ValueError, match="'first_k' of another one"):
        policy_named(Mine())
    for wrong in (None, 5, object(), FirstK, Deviation):
        with pytest.raises(
            ValueError, match="an object with name, layer and choose"
        ):
            policy_named(wrong)
    for layer in (-1, 1.0, True, None):
        policy = OnePick()
        policy.layer = layer
        with pytest.raises(ValueError, match="layer of policy 'one_pick'"):
            policy_named(policy)


@pytest.mark.slow
def test_documents_from_a_lossy_tier_are_nowhere_exact(house: House) -> None:
    model = llama()
    documents, question = pieces()
    cached = house.open(model, unchecked=True, disk_codec="q8")
    # computed here
    assert (
        cached.blend(documents, question, recompute=0.0).blend.exact_tokens == 40
    )
    house.shut(wipe_host=True)
    found = house.open(model, unchecked=True, disk_codec="q8").blend(
        documents, question, recompute=1.0
    )
    assert found.hit.by_tier == {"disk": sum(LENGTHS)}
    assert found.hit.approximate == "q8"
    assert found.hit.exact_tokens == 0
    assert not found.blend.exact.any()
    assert found.blend.reused.nonzero()[0].tolist() == list(range(40))
    assert 1e-6 < error_of(model, found) < 1.0


@pytest.mark.slow
def test_clear_removes_the_prompts_and_the_documents_of_a_tenant(
    house: House,
) -> None:
    """Those of another tenant stay; also in a process that has not blended yet."""
    model = llama()
    (documents, question) = pieces()
    ids = prompt(3 * CHUNK + 1)
    cached = house.open(model, unchecked=True)
    for salt in ("one", "two"):
        cached.blend(documents, question, salt=salt)
        cached.generate(ids, salt=salt, **GREEDY)
    house.shut()
    cached = house.open(model, unchecked=True)
    cleared = cached.clear(salt="one")
    assert cleared.ok
    assert set(cleared.chunks) == {"host", "disk"}
    assert min(cleared.chunks.values()) > 0
    found = {
        salt: cached.blend(documents, question, salt=salt, store=False).hit
        for salt in ("one", "two")
    }
    assert found["one"].num_tokens == 0
    assert found["two"].num_tokens == sum(map(len, documents))
    hits = {
        salt: cached.prefix(ids, salt=salt).hits[0].num_tokens
        for salt in ("one", "two")
    }
    assert hits["one"] == 0
    assert hits["two"] >= 2 * CHUNK


def test_clear_of_a_model_that_cannot_be_blended(house: House) -> None:
    model = deepseek()
    ids = prompt(3 * CHUNK + 1)
    cached = house.open(model)
    cached.generate(ids, max_new_tokens=2)
    assert cached.clear().chunks["host"] >= 2
    assert cached.prefix(ids).hits[0].num_tokens == 0
