"""Documents at any place of a prompt, in the blocks of the example engine: what is exact, and who
finds it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import wait
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.paged_engine.attention import (
    KVPool,
    Part,
    batch_of,
    deviation,
    paged_model,
)
from examples.paged_engine.engine import Engine, Sequence
from examples.paged_engine.replay import model_of as model_of_the_example
from pagoda import Cache, Config
from pagoda.base.errors import ConfigError
from pagoda.connectors.transformers import CachedModel, layout_of, namespace_of
from pagoda.connectors.transformers.model_checks import kv_argument
from testbed.patience import Patience
from tests.e2e.test_blending import LENGTHS, pieces, verdict, whole
from tests.e2e.tiny import generated, llama, prompt
from tests.examples.kit import BLOCK, NEW, House, closed, engine_of, model_of

RATIOS = (0.0, 0.05, 0.15, 0.3, 0.6, 1.0)
POLICIES = ("first_k", "deviation")
FIRST = LENGTHS[0]


def request(
    documents: list[list[int]],
    question: list[int],
    recompute: float = 0.15,
    **options,
) -> Sequence:
    return Sequence(
        f"r{time.monotonic_ns()}",
        documents=documents,
        question=question,
        recompute=recompute,
        **{"policy": "first_k", "max_new_tokens": NEW, **options},
    )


def steps(engine: Engine, going: Iterable[Sequence], until) -> None:
    """Step until all of these requests are so."""
    patience = Patience(60)
    while not all(until(seq) for seq in going):
        assert not patience.ended, (
            f"{engine.waiting} {engine.running} {engine.manager.stats()}"
        )
        engine.step()
        engine.manager.check()


def answered(engine: Engine, *requests: Sequence) -> list[list[int]]:
    """Serve requests; returns their texts, once all documents are stored."""
    for seq in requests:
        engine.add(seq)
    steps(engine, requests, lambda seq: len(seq.output) == seq.max_new_tokens)
    assert not engine.busy
    wait(list(engine.documents.stores), 60)
    return [seq.output for seq in requests]


@torch.inference_mode()
def logits_of(engine: Engine, *requests: Sequence) -> torch.Tensor:
    """Serve requests up to their first token; return the logits of their last prompt tokens, over
    their blocks.
    """
    for seq in requests:
        seq.max_new_tokens = 200  # none ends before all have begun
        engine.add(seq)
    steps(engine, requests, lambda seq: seq.output)
    wait(list(engine.documents.stores), 60)
    ends = [seq.prompt_tokens - 1 for seq in requests]
    parts = [
        Part([seq.tokens[end]], [end], seq.table)
        for seq, end in zip(requests, ends, strict=True)
    ]
    batch = batch_of(parts, engine.pool)
    out = engine._model(
        input_ids=batch.ids,
        position_ids=batch.positions,
        use_cache=False,
        paged=batch,
    )
    for seq in requests:
        engine.abort(seq)
    return out.logits[0]


@torch.no_grad()
def full_logits(model, *requests: Sequence) -> torch.Tensor:
    """The same by a full prefill of the plain model."""
    return torch.stack(
        [
            model(whole(seq.documents, seq.question)).logits[0, -1]
            for seq in requests
        ]
    )


def error_of(engine: Engine, model, *requests: Sequence) -> float:
    return float(
        (logits_of(engine, *requests) - full_logits(model, *requests)).abs().max()
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llama-3", "qwen-3"])
def test_computing_everything_again_is_a_full_prefill(
    name: str, policy: str, house: House
) -> None:
    model = model_of(name)
    engine = engine_of(
        house.cache(name, slots=512), name, blocks=100, step_tokens=40
    )
    documents, question = pieces(2)
    # stored by the first
    for order in (documents, documents[:1] + documents[:0:-1]):
        seq = request(order, question, 1.0, policy=policy)
        assert answered(engine, seq) == generated(
            model, whole(order, question), NEW
        )
        assert seq.quality.checked == "exact"
        assert seq.blended.exact.all()
        assert (
            error_of(engine, model, request(order, question, 1.0, policy=policy))
            <= 1e-4
        )
    closed(engine)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-1", "qwen-1"])
def test_one_layer_has_no_context_so_every_share_is_exact(
    name: str, house: House
) -> None:
    """K and V of the first layer depend on the token and its place alone: this shows that K is
    moved right, into the right places of the blocks, and that chosen tokens replace the right
    ones."""
    engine = engine_of(
        house.cache(name, slots=512, unchecked=True),
        name,
        blocks=1000,
        step_tokens=100,
        most_running=40,
    )
    documents, question = pieces()
    orders = [[*order, documents[3]] for order in permutations(documents[:3])][
        ::2
    ]
    for _ in range(2):
        asked = [
            request(order, question, share)
            for share in RATIOS
            for order in orders
        ]
        assert error_of(engine, model_of(name), *asked) <= 1e-4
    assert {seq.hits["host"] for seq in asked} >= {
        LENGTHS[1] + LENGTHS[2] + LENGTHS[3]
    }
    closed(engine)


def test_two_layers_are_exact_once_k_of_the_second_was_looked_at(
    house: House,
) -> None:
    """Then K and V of both are exact; chosen tokens are computed again over them: this shows what
    each of them sees.
    """
    engine = engine_of(
        house.cache(slots=512, unchecked=True), blocks=1000, step_tokens=100
    )
    asked = [
        request(*pieces(), share, policy="deviation") for share in RATIOS[1:]
    ]
    assert error_of(engine, model_of("llama"), *asked) <= 1e-4
    closed(engine)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_divergence_falls_with_the_share(policy: str, house: House) -> None:
    model, _ = model_of_the_example(None, "cpu")
    layout = layout_of(model, BLOCK)
    options = {
        "host_path": str(house.host / "host"),
        "host_size": "16MiB",
        "worth_it": False,
        "unchecked": True,
    }
    with Cache(
        Config(chunk_tokens=BLOCK, **options),
        namespace=namespace_of(model, layout),
        layout=layout,
    ) as cache:
        engine = Engine(
            model, layout, blocks=52 * 13, cache=cache, most_running=52
        )
        prompts = [pieces(seed, (9, 15, 20, 13)) for seed in range(1, 53)]
        prompts = [
            ([[token % 256 for token in one] for one in those], asked)
            for those, asked in prompts
        ]
        prompts = [
            (those, [token % 256 for token in asked]) for those, asked in prompts
        ]
        want = (
            full_logits(model, *(request(*one) for one in prompts))
            .double()
            .log_softmax(-1)
        )
        mean = []
        for share in RATIOS:
            got = logits_of(
                engine, *(request(*one, share, policy=policy) for one in prompts)
            )
            got = got.double().log_softmax(-1)
            mean.append(float((want.exp() * (want - got)).sum(-1).mean()))
        closed(engine)
    assert mean == sorted(mean, reverse=True), mean
    assert len(set(mean)) == len(RATIOS), mean
    assert mean[0] > 0.01, mean
    assert mean[-1] < 1e-6, mean


def test_controls_wrong_documents_and_k_that_was_not_moved_are_noticed(
    house: House,
) -> None:
    engine = engine_of(
        house.cache("llama-1", slots=512, unchecked=True), "llama-1", blocks=200
    )
    documents, question = pieces()
    want = full_logits(model_of("llama-1"), request(documents, question))
    assert (
        logits_of(engine, request(documents, question, 0.0)) - want
    ).abs().max() <= 1e-4
    swapped = request(
        [documents[0], documents[2], documents[1], documents[3]], question, 0.0
    )
    assert (logits_of(engine, swapped) - want).abs().max() > 0.01
    engine.documents._rotary.move = lambda keys, shift: None
    assert (
        logits_of(engine, request(documents, question, 0.0)) - want
    ).abs().max() > 0.01
    closed(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_answer_is_that_of_the_transformers_connector_and_each_finds_the_others_documents(
    policy: str, house: House
) -> None:
    model = model_of("llama-3")
    (documents, question) = pieces()
    cache = house.cache("llama-3", slots=512, unchecked=True)
    engine = engine_of(cache, "llama-3", blocks=200)
    cached = CachedModel(model, cache=cache)
    options = {"recompute": 0.3, "policy": policy}
    found = cached.blend(documents, question, **options)
    seq = request(documents, question, **options)
    got = logits_of(engine, seq)
    # the first one is looked for among prompts
    assert seq.hits == {"host": sum(LENGTHS[1:])}
    last = torch.tensor([question[-1:]])
    with torch.no_grad():
        assert (
            model(last, **kv_argument(model, found.past_key_values)).logits[0, -1]
            - got
        ).abs().max() <= 1e-4
    for mask in ("exact", "recomputed", "reused"):
        assert (getattr(seq.blended, mask) == getattr(found.blend, mask)).all()
    assert seq.blended.starts == found.blend.starts
    assert (seq.blended.tokens == found.blend.tokens).all()
    others, question = pieces(2)
    answered(engine, request(others, question, **options))
    closed(engine)  # its first document is in the host tier then
    hits = cached.blend(others, question, **options).blend.documents
    assert [hit.num_tokens for hit in hits] == [FIRST, *LENGTHS[1:]]
    cached.close()


def test_how_far_k_moved_is_not_rounded_to_half_precision() -> None:
    """As in the Transformers connector: rounded, tokens tie or change places, and the two choose
    others.
    """
    model = llama(dtype="bfloat16")
    pool = KVPool(layout_of(model, BLOCK), 4)
    table = [2, 0, 3]
    count = 20
    pool.kv.normal_(generator=torch.Generator().manual_seed(1))
    before = pool.read(table, range(count))[1, 0]
    part = Part(prompt(count)[0].tolist(), range(count), table)
    moved = deviation(paged_model(model), batch_of([part], pool), 1)
    after = pool.read(table, range(count))[1, 0]
    exact = (after.float() - before.float()).square().sum((0, 2)).numpy()
    assert np.allclose(moved, exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_token_is_exact_recomputed_or_reused(
    policy: str, house: House
) -> None:
    engine = engine_of(
        house.cache("llama-3", slots=512, unchecked=True), "llama-3", blocks=200
    )
    later = sum(LENGTHS[1:])
    question = 9
    for number in range(2):
        before = engine.prompt_tokens_computed
        seq = request(*pieces(), 0.15, policy=policy)
        answered(engine, seq)
        blend = seq.blended
        assert (
            (blend.exact.astype(int) + blend.recomputed + blend.reused) == 1
        ).all()
        assert blend.exact[:FIRST].all()
        assert blend.exact[: blend.exact_tokens].all()
        # the question reads approximate KV
        assert not blend.exact[FIRST + later :].any()
        chosen = later - blend.reused_tokens
        assert abs(chosen - 0.15 * later) <= len(LENGTHS)
        computed = engine.prompt_tokens_computed - before
        assert computed == chosen + question + (0 if number else FIRST + later)
    assert seq.hits == {"device": FIRST, "host": later}
    assert answered(engine, request(*pieces(), 0.15, policy=policy)) == [
        seq.output
    ]
    closed(engine)


@pytest.mark.slow
def test_an_exact_request_after_a_blended_one_finds_nothing_approximate(
    house: House,
) -> None:
    model = model_of("llama-3")
    (documents, question) = pieces()
    ids = whole(documents, question)
    for blocks in (100, 24):  # in the second, blocks are evicted to the host
        engine = engine_of(
            house.cache("llama-3", slots=512, unchecked=True),
            "llama-3",
            blocks=blocks,
        )
        # the disk keeps what the first engine has left
        tenant = {"salt": str(blocks)}
        seq = request(documents, question, 0.3, **tenant)
        answered(engine, seq)
        exact = generated(model, ids, NEW)[0]
        assert seq.output != exact  # so what it left would be noticed
        filler = Sequence("filler", prompt(24 * BLOCK - 2, 99)[0].tolist(), 1)
        plain = Sequence("exact", ids[0].tolist(), NEW, **tenant)
        alone = Sequence("alone", [*documents[2], 1], NEW, **tenant)
        more = Sequence(
            "turn", [*ids[0].tolist(), *seq.output, 5, 6], NEW, **tenant
        )
        for one in [*([filler] if blocks == 24 else []), more, plain, alone]:
            (text,) = answered(engine, one)
            expected = FIRST + 96
            if one in (filler, alone):
                expected = 0
            elif one is more:
                expected = FIRST
            assert sum(one.hits.values()) == expected
            assert (
                text
                == generated(
                    model,
                    torch.tensor([one.tokens[: one.prompt_tokens]]),
                    one.max_new_tokens,
                )[0]
            )
        closed(engine)
        house.shut(wipe_host=True)


def test_a_document_that_is_evicted_before_it_is_loaded_is_computed(
    house: House,
) -> None:
    model = model_of("llama-3")
    (documents, question) = pieces()
    engine = engine_of(
        house.cache("llama-3", slots=512, unchecked=True), "llama-3", blocks=100
    )
    (want,) = answered(engine, request(documents, question, 0.3))
    cache = engine.documents.cache
    chains = [one.tokens for one in request_chains(engine, documents, question)]

    def during(change) -> Sequence:
        """Serve the request again; when the look-up of its third document is over, change what is
        stored.
        """
        seq = request(documents, question, 0.3)
        whole_view = engine.documents._transfer

        def transfer(kv: torch.Tensor):
            view = whole_view(kv)
            if kv.shape[3] == len(chains[1]):
                load = view.from_slots

                def from_slots(starts, slots) -> None:
                    load(starts, slots)
                    change()

                view.from_slots = from_slots
            return view

        engine.documents._transfer = transfer
        assert answered(engine, seq) == [want]
        engine.documents._transfer = whole_view
        return seq

    def forget() -> None:
        cache.clear()
        for seed in range(20):  # other KV into the slots that were copied from
            filler = torch.full(
                (layout.layers, 2, 2, len(chains[1]), 16), float(seed)
            )
            cache.store(
                prompt(len(chains[1]), 300 + seed)[0].tolist(),
                engine.documents._transfer(filler),
            )

    layout = cache.layout
    assert during(lambda: None).hits["host"] == sum(LENGTHS[1:])
    assert during(forget).hits.get("host", 0) <= LENGTHS[1] + LENGTHS[3]
    assert during(lambda: None).hits["host"] >= LENGTHS[2]  # stored again
    # evicted between the prefetch and the load
    seq = request(documents, question, 0.3)
    engine.add(seq)
    wait(seq.prefetches, 60)
    cache.clear()
    steps(engine, [seq], lambda seq: len(seq.output) == NEW)
    assert seq.output == want
    assert "host" not in seq.hits
    assert error_of(engine, model, request(documents, question, 1.0)) <= 1e-4
    closed(engine)


@pytest.mark.slow
def test_what_the_old_weights_compute_of_a_document_is_not_stored(
    house: House,
) -> None:
    engine = engine_of(
        house.cache("llama-3", slots=512, unchecked=True),
        "llama-3",
        blocks=100,
        step_tokens=5,
    )
    seq = request(*pieces(), 0.3)
    engine.add(seq)
    # a document alone, in steps
    steps(engine, [seq], lambda seq: seq.span is not None and seq.span.origin)
    engine.manager.weights_changed()
    steps(engine, [seq], lambda seq: len(seq.output) == NEW)
    seq = request(*pieces(), 0.3)
    answered(engine, seq)
    assert seq.hits == {}
    seq = request(*pieces(), 0.3)
    answered(engine, seq)
    assert seq.hits["host"] == sum(LENGTHS[1:])  # of the new weights
    closed(engine)


def test_a_verdict_of_the_old_weights_does_not_count_for_what_waits(
    house: House, tmp_path: Path
) -> None:
    model = model_of("llama-3")
    (documents, question) = pieces()
    cache = house.cache("llama-3", slots=512, quality_verdicts=str(tmp_path))
    verdict(tmp_path, cache.namespace.weights)
    engine = engine_of(cache, "llama-3", blocks=100)
    for checked, exact in (("loosened", False), ("exact", True)):
        seq = request(documents, question, policy="deviation")
        engine.add(seq)
        if exact:
            engine.manager.weights_changed()
        steps(engine, [seq], lambda seq: len(seq.output) == NEW)
        assert seq.quality.checked == checked
        assert seq.blended.exact.all() == exact
    assert seq.output == generated(model, whole(documents, question), NEW)[0]
    closed(engine)


def request_chains(
    engine: Engine, documents: list[list[int]], question: list[int]
):
    seq = request(documents, question)
    engine.documents.prepare(seq)
    return seq.chains


def test_without_a_verdict_it_starts_only_unchecked(
    house: House, tmp_path: Path
) -> None:
    engine = engine_of(
        house.cache("llama-3", quality_verdicts=str(tmp_path)),
        "llama-3",
        blocks=100,
    )
    with pytest.raises(
        ConfigError, match=r"pagoda quality .*--blend first_k:0\.15"
    ):
        engine.add(request(*pieces()))
    assert not engine.busy
    seq = request(*pieces(), unchecked=True)
    answered(engine, seq)
    assert [
        state.checked for state in (seq.quality, *engine.documents.gate.states)
    ] == ["unchecked"] * 2
    # not allowed for good
    with pytest.raises(ConfigError, match="pagoda quality"):
        engine.add(request(*pieces()))
    answered(engine, request(*pieces(), 1.0))  # computes everything
    closed(engine)


@pytest.mark.slow
def test_preempted_requests_are_blended_again(house: House) -> None:
    asked = [pieces(seed, (24, 20, 17)) for seed in range(1, 6)]
    for share in (0.3, 1.0):
        texts = []
        for blocks in (200, 28):
            engine = engine_of(
                house.cache("llama-3", slots=512, unchecked=True),
                "llama-3",
                blocks=blocks,
                step_tokens=20,
            )
            requests = [request(*one, share, max_new_tokens=40) for one in asked]
            plain = Sequence("plain", prompt(50, 7)[0].tolist(), 40)
            texts.append(answered(engine, plain, *requests))
            preempted = sum(seq.preemptions for seq in (plain, *requests))
            assert (preempted > 0) == (blocks == 28), preempted
            closed(engine)
        assert texts[0] == texts[1]


@pytest.mark.slow
def test_requests_are_aborted_wherever_they_are(house: House) -> None:
    engine = engine_of(
        house.cache("llama-3", slots=512, unchecked=True),
        "llama-3",
        blocks=60,
        step_tokens=10,
    )
    documents, question = pieces()
    (want,) = answered(engine, request(documents, question))
    for count in range(0, 40, 3):
        seq = request(*pieces(count + 2) if count % 2 else (documents, question))
        engine.add(seq)
        for _ in range(count):
            engine.step()
        if engine.busy:
            engine.abort(seq)
        engine.manager.check()
    assert answered(engine, request(documents, question)) == [want]
    engine.add(request(documents, question))
    engine.step()
    closed(engine)


def test_tenants_keep_documents_apart(house: House) -> None:
    engine = engine_of(
        house.cache("llama-3", slots=512, unchecked=True), "llama-3", blocks=60
    )
    found = []
    for salt in ("a", "a", "b", None):
        seq = request(*pieces(), salt=salt)
        answered(engine, seq)
        found.append(sum(seq.hits.values()))
    assert found == [0, sum(LENGTHS), 0, 0]
    closed(engine)


@pytest.mark.slow
def test_documents_come_from_the_disk(house: House, tmp_path: Path) -> None:
    disk = {
        "disk_path": str(tmp_path / "documents"),
        "disk_size": "4MiB",
        "unchecked": True,
    }
    texts = []
    for tier in (None, "disk"):
        engine = engine_of(
            house.cache("llama-3", slots=512, **disk), "llama-3", blocks=60
        )
        seq = request(*pieces())
        texts.append(answered(engine, seq))
        brought = [future.result().by_tier for future in seq.prefetches[-3:]]
        if tier:
            for one in brought:
                assert set(one) == {tier}
        else:
            assert not any(brought)
        assert seq.hits.get("host", 0) == (sum(LENGTHS[1:]) if tier else 0)
        assert engine.documents.cache.flush(20.0)
        closed(engine)
        house.shut(wipe_host=True)
    assert texts[0] == texts[1]


def test_wrong_requests_are_refused_and_nothing_remains(house: House) -> None:
    documents, question = pieces()
    engine = engine_of(None)
    with pytest.raises(ValueError, match="make the engine with one"):
        engine.add(request(documents, question))
    engine = engine_of(house.cache("llama-1", unchecked=True), "llama-1")
    for wrong, said in (
        ({"documents": []}, "at least one document"),
        ({"documents": [[]]}, r"documents\[0\] has no tokens"),
        ({"question": None}, "question is missing"),
        ({"recompute": 1.5}, "from 0 to 1"),
        ({"policy": "best"}, "one of first_k, deviation"),
        ({"policy": "deviation"}, "the model has 1"),
        ({"tokens": [1]}, "give tokens, or documents"),
        ({"documents": [prompt(400)[0].tolist()]}, "at least 1 . 1"),
    ):
        with pytest.raises(ValueError, match=said):
            engine.add(
                request(**{"documents": documents, "question": question, **wrong})
            )
    assert not engine.busy
    only = request(documents[:1], question)  # one document alone is a prefix
    assert answered(engine, only) == generated(
        model_of("llama-1"), whole(documents[:1], question), NEW
    )
    assert only.blended.exact.all()
    closed(engine)


def test_a_first_document_from_a_lossy_tier_is_not_exact(
    house: House, tmp_path: Path
) -> None:
    model = model_of("llama-3")
    layout = layout_of(model, BLOCK)
    for number in range(2):
        config = Config(
            chunk_tokens=BLOCK,
            host_path=str(house.host / f"{number}"),
            host_size="4MiB",
            worth_it=False,
            disk_path=str(tmp_path / "disk"),
            disk_size="4MiB",
            disk_codec="q8",
            deadline_seconds=30.0,
            unchecked=True,
        )
        with Cache(
            config, namespace=namespace_of(model, layout), layout=layout
        ) as cache:
            engine = Engine(model, layout, blocks=60, cache=cache)
            seq = request(*pieces(), 1.0)
            answered(engine, seq)
            assert cache.flush(20.0)
            assert engine.documents.cache.flush(20.0)
            closed(engine)
    assert seq.hits == {"disk": FIRST, "host": sum(LENGTHS[1:])}
    assert not seq.blended.exact.any()
    assert np.flatnonzero(seq.blended.reused).tolist() == list(range(FIRST))
