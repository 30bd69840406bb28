from __future__ import annotations

import copy
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from pagoda import codec
from pagoda.base.quality_bounds import DEFAULT_BOUNDS
from pagoda.base.quality_verdict import Result, weights_name
from pagoda.blend.blend_policies import Deviation, FirstK, blend_setting
from pagoda.connectors.transformers.model_checks import kv_argument, probe_model
from pagoda.connectors.transformers.model_identity import (
    adapters_digest,
    weights_digest,
)
from pagoda_tools.quality import measure_quality
from pagoda_tools.quality.approaches import (
    CONTROLS,
    Codec,
    KVCache,
    Prepared,
    Spoiled,
)
from pagoda_tools.quality.judge import RunFacts, figures_of, judged
from pagoda_tools.quality.measure import QualitySample, measured
from pagoda_tools.quality.prompt_lines import (
    ExpectedAnswer,
    QualityPrompt,
    prompts_digest,
)
from pagoda_tools.quality.run import QualityRun
from tests.quality.tiny import CHUNK, prompts, tiny_llama

FEW = {
    feature: msgspec.structs.replace(bounds, prompts=4)
    for feature, bounds in DEFAULT_BOUNDS.items()
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def run(model: LlamaForCausalLM) -> QualityRun:
    return measure_quality(
        model,
        prompts(8),
        blends=[(FirstK(), 0.3), (Deviation(), 1.0)],
        codecs=["q8", "q4"],
        chunk_tokens=CHUNK,
        new_tokens=3,
        bounds=FEW,
    )


def results(run: QualityRun) -> dict[str, Result]:
    return {row.name: row.result for row in run.rows if row.result is not None}


def exact_kv(model: LlamaForCausalLM, tokens: list[int]) -> KVCache:
    kv = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([tokens]), **kv_argument(model, kv))
    return kv


@pytest.mark.slow
def test_each_method_and_control_has_a_row(
    model: LlamaForCausalLM, run: QualityRun
) -> None:
    assert [row.name for row in run.rows] == [
        "exact",
        "plain reuse",
        "first_k:0.3",
        "deviation:1",
        "q8",
        "q4",
        "zeroed KV",
        "swapped values",
    ]
    assert run.weights == weights_digest(model)
    exact = run.rows[0].figures
    assert exact.kl.value == 0
    assert exact.top1.value == 1
    assert exact.same_text.value == 1
    assert exact.ttft.value == 1
    assert exact.answers is None
    for row in run.rows:
        assert row.seconds > 0
        assert (
            row.figures.ttft.low
            <= row.figures.ttft.value
            <= row.figures.ttft.high
        )


def test_the_name_of_the_weights_has_the_active_adapters(
    model: LlamaForCausalLM,
) -> None:
    adapted = model.model.layers[0].mlp
    adapted.active_adapters = ["style"]
    try:
        run = measure_quality(
            model,
            prompts(1),
            codecs=["q8"],
            chunk_tokens=CHUNK,
            new_tokens=1,
            bounds=FEW,
        )
        assert run.weights == weights_name(
            weights_digest(model), adapters=adapters_digest(model)
        )
        assert "+adapters " in run.weights
    finally:
        del adapted.active_adapters


def test_computing_everything_again_is_exact_and_passes(run: QualityRun) -> None:
    everything = results(run)["deviation:1"]
    assert everything.figures.kl.high < 1e-4
    assert (
        everything.figures.top1.value == everything.figures.same_text.value == 1
    )
    assert everything.passed
    assert everything.reasons == []
    assert everything.prompts_digest == prompts_digest(prompts(8))


@pytest.mark.slow
def test_least_tokens_of_a_document_are_measured_as_asked(
    model: LlamaForCausalLM,
) -> None:
    """All documents but the first have 9 and 14 tokens."""
    asked = [(FirstK(), 0.0), (FirstK(), 0.0, 10), (FirstK(), 0.0, 15)]
    run = measure_quality(
        model,
        prompts(4),
        blends=asked,
        chunk_tokens=CHUNK,
        new_tokens=2,
        bounds=FEW,
    )
    kl = {name: one.figures.kl.value for name, one in results(run).items()}
    assert list(kl) == [
        "plain reuse",
        "first_k:0:min_tokens=10",
        "first_k:0:min_tokens=15",
    ]
    assert (
        kl["plain reuse"]
        > kl["first_k:0:min_tokens=10"]
        > 1e-3
        > kl["first_k:0:min_tokens=15"]
    )


def test_plain_reuse_of_documents_fails(run: QualityRun) -> None:
    reuse = results(run)["plain reuse"]
    assert not reuse.passed
    assert "KL divergence" in reuse.reasons[0]
    (everything,) = (row for row in run.rows if row.name == "deviation:1")
    assert everything.over_reuse is not None
    assert everything.over_reuse.low > 0


def test_controls_fail_the_gate(run: QualityRun) -> None:
    for result in results(run).values():
        assert result.controls == {"zeroed KV": True, "swapped values": True}
    kl = {row.name: row.figures.kl.low for row in run.rows}
    assert min(kl["zeroed KV"], kl["swapped values"]) > FEW["blend"].kl


@pytest.mark.parametrize("spoiled", CONTROLS)
def test_a_feature_that_spoils_the_kv_fails(
    model: LlamaForCausalLM, spoiled: Spoiled
) -> None:
    """As if blending put documents in a wrong order, or lost them."""

    class Broken:
        name = "broken"
        setting = blend_setting(Deviation(), 0.15)
        prepare = spoiled.prepare

    found = measured(model, prompts(8), [Broken(), CONTROLS[0]], new_tokens=3)
    row = judged_rows(found, {"broken": Broken.setting})["broken"]
    assert not row.passed
    assert any("KL divergence" in reason for reason in row.reasons)


def judged_rows(
    found: dict[str, list[QualitySample]], settings: dict
) -> dict[str, Result]:
    rows = judged(
        found,
        settings,
        ["zeroed KV"],
        FEW,
        False,
        RunFacts("", 3, confidence=0.95, seed=0, made=""),
    )
    return {row.name: row.result for row in rows if row.result is not None}


def test_prompts_that_do_not_depend_on_the_kv_fail_everything() -> None:
    deaf = tiny_llama()
    with torch.no_grad():
        for layer in deaf.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    run = measure_quality(
        deaf,
        prompts(5),
        codecs=["q8"],
        chunk_tokens=CHUNK,
        new_tokens=2,
        bounds=FEW,
    )
    (result,) = results(run).values()
    assert result.figures.kl.high < 1e-6
    assert not result.passed
    assert len(result.reasons) == 2
    for reason in result.reasons:
        assert "do not depend on the KV" in reason


def test_a_codec_costs_what_it_stores(
    model: LlamaForCausalLM, run: QualityRun
) -> None:
    layout = probe_model(model, CHUNK).layout
    found = results(run)
    assert found["q8"].figures.kl.value < found["q4"].figures.kl.value
    assert found["q4"].figures.bytes < found["q8"].figures.bytes < 1
    assert found["q8"].setting == codec.codec_setting("q8", layout.chunk_tokens)


def test_a_codec_gives_back_whole_chunks_as_a_tier_would(
    model: LlamaForCausalLM,
) -> None:
    prompt = prompts(1)[0]
    probed = probe_model(model, CHUNK)
    kv = exact_kv(model, prompt.tokens[:-1])
    before = copy.deepcopy(kv)
    prepared = Codec("q8", model, probed).prepare(prompt, kv)
    lossy = prepared.fill()
    tokens = (len(prompt.tokens) - 1) // CHUNK * CHUNK
    assert lossy.get_seq_length() == tokens
    assert prepared.exact_bytes == tokens // CHUNK * probed.layout.chunk_bytes
    for layer, exact, was in zip(
        lossy.layers, kv.layers, before.layers, strict=True
    ):
        for plane in ("keys", "values"):
            mine = getattr(layer, plane)
            theirs = getattr(exact, plane)[:, :, :tokens]
            assert not torch.equal(mine, theirs)
            assert (mine - theirs).abs().max() < 0.02 * theirs.abs().max()
            assert torch.equal(getattr(exact, plane), getattr(was, plane))
    again = prepared.fill()
    assert torch.equal(again.layers[0].keys, lossy.layers[0].keys)


class Kept:
    """An approach: KV that was made before."""

    name = "kept"
    setting = None

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv

    def prepare(self, prompt: QualityPrompt, exact_kv: KVCache) -> Prepared:
        return Prepared(lambda: copy.deepcopy(self.kv))


def greedy(
    model: LlamaForCausalLM, tokens: list[int], kv: KVCache, count: int
) -> list[int]:
    found: list[int] = []
    with torch.no_grad():
        ids = tokens[kv.get_seq_length() :]
        for _ in range(count):
            found.append(
                int(
                    model(torch.tensor([ids]), **kv_argument(model, kv))
                    .logits[0, -1]
                    .argmax()
                )
            )
            ids = found[-1:]
    return found


@pytest.mark.slow
def test_answers_are_those_that_the_model_would_write_over_that_kv(
    model: LlamaForCausalLM,
) -> None:
    """From the first other token on, the answer is the approach's own."""
    different = 0
    for prompt in prompts(8, seed=3):
        spoiled = exact_kv(model, prompt.tokens[:-1])
        for layer in spoiled.layers:
            layer.values += 0.2 * layer.values.roll(1, dims=2)
        theirs = greedy(model, prompt.tokens, copy.deepcopy(spoiled), 8)
        ours = greedy(
            model, prompt.tokens, exact_kv(model, prompt.tokens[:-1]), 8
        )
        for answer, is_theirs in ((theirs, True), (ours, ours == theirs)):
            asked = prompt._replace(expected=ExpectedAnswer(answer, "", 8))
            found = measured(model, [asked], [Kept(spoiled)])
            assert found["kept"][0].right is is_theirs
            assert found["exact"][0].right is (answer == ours)
            assert found["kept"][0].same_text is (ours == theirs)
        different += ours != theirs and ours[0] == theirs[0]
    assert different  # else the test shows nothing


@pytest.mark.slow
def test_answers_are_judged_beside_exact_kv(model: LlamaForCausalLM) -> None:
    asked = [
        prompt._replace(
            expected=ExpectedAnswer(
                greedy(
                    model, prompt.tokens, exact_kv(model, prompt.tokens[:-1]), 2
                ),
                "",
                2,
            )
        )
        for prompt in prompts(6)
    ]
    # wrong also with exact KV
    asked[0] = asked[0]._replace(expected=ExpectedAnswer([0, 0], "", 2))
    run = measure_quality(
        model, asked, blends=[(Deviation(), 1.0)], chunk_tokens=CHUNK, bounds=FEW
    )
    found = results(run)
    assert found["deviation:1"].figures.answers == run.rows[0].figures.answers
    assert run.rows[0].figures.answers is not None
    assert run.rows[0].figures.answers.value == 1
    assert any(
        "right answers are" in reason for reason in found["plain reuse"].reasons
    )


def test_kl_is_what_torch_says(model: LlamaForCausalLM) -> None:
    prompt = prompts(1)[0]
    kv = exact_kv(model, prompt.tokens[:-1])
    for layer in kv.layers:
        layer.keys *= 1.1
    sample = measured(model, [prompt], [Kept(kv)], new_tokens=1)["kept"][0]
    with torch.no_grad():
        exact = model(torch.tensor([prompt.tokens])).logits[0, -1].log_softmax(-1)
        other = (
            model(torch.tensor([prompt.tokens[-1:]]), **kv_argument(model, kv))
            .logits[0, -1]
            .log_softmax(-1)
        )
    wanted = torch.nn.functional.kl_div(
        other, exact, reduction="sum", log_target=True
    )
    assert sample.kl == pytest.approx(float(wanted), rel=1e-3)
    assert sample.kl > 1e-3


def test_kv_that_makes_no_numbers_fails(model: LlamaForCausalLM) -> None:
    kv = exact_kv(model, prompts(1)[0].tokens[:-1])
    kv.layers[0].keys.fill_(np.nan)
    found = measured(model, prompts(1), [Kept(kv)], new_tokens=2)
    figures = figures_of(
        found["kept"], found["exact"], False, RunFacts("", 3, 0.95, 0, "")
    )
    assert figures.kl.value == 1000
    assert figures.top1.value < 1


@pytest.mark.parametrize(
    ("asked", "options", "said"),
    [
        ([], {}, "no prompts"),
        (
            [QualityPrompt(7, [], [1] * 20, None)],
            {"blends": [(FirstK(), 0.1)]},
            "line 7 has no documents",
        ),
        (
            [QualityPrompt(7, [], [1] * CHUNK, None)],
            {"codecs": ["q8"]},
            "line 7 has 8 tokens, no whole chunk of 8",
        ),
        (
            [*prompts(2), prompts(1, expected=ExpectedAnswer([1], "", 1))[0]],
            {"codecs": ["q8"]},
            "line 1 has no answer and others have",
        ),
        (
            prompts(2, expected=ExpectedAnswer([0] * 9, "", 9)),
            {"codecs": ["q8"]},
            "none of the 2 expected answers",
        ),
        (prompts(1), {"codecs": ["q9"]}, "q9"),
        (
            prompts(1),
            {"bounds": {"codec": msgspec.structs.replace(FEW["codec"], kl=2.0)}},
            "says nothing of a model",
        ),
        (prompts(1), {"confidence": 0.1}, "intervals of 10.0 %"),
    ],
)
def test_what_cannot_be_measured(
    model: LlamaForCausalLM, asked: list[QualityPrompt], options: dict, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        measure_quality(model, asked, chunk_tokens=CHUNK, **options)
