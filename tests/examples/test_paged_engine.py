"""The example engine: whatever its blocks go through, its answers are those of plain greedy
`generate`.
"""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch

from examples.paged_engine.attention import (
    NAME,
    KVPool,
    Part,
    batch_of,
    next_tokens,
    paged_model,
)
from examples.paged_engine.engine import Sequence
from pagoda.connectors.transformers import CachedModel, layout_of
from tests.e2e.tiny import generated, llama, prompt
from tests.examples.kit import (
    BLOCK,
    BLOCKS,
    NEW,
    House,
    Served,
    closed,
    converse,
    engine_of,
    model_of,
    serve,
    talks_of,
)


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_paged_logits_are_those_of_the_plain_model(name: str) -> None:
    model = model_of(name)
    dice = random.Random(0)
    plain_attention = model.config._attn_implementation
    paged = paged_model(model)
    pool = KVPool(layout_of(model, BLOCK), 64)
    assert model.config._attn_implementation == plain_attention
    assert paged.config._attn_implementation == NAME
    for a, b in zip(model.parameters(), paged.parameters(), strict=True):
        assert a is b
    prompts = [
        prompt(length, seed=length)[0].tolist() for length in (50, 37, 1, 64)
    ]
    want = [model(torch.tensor([ids])).logits[0] for ids in prompts]
    blocks = dice.sample(range(64), 64)
    done = [0] * 4
    tables = [blocks[9 * number : 9 * number + 9] for number in range(4)]
    while any(at < len(ids) for at, ids in zip(done, prompts, strict=True)):
        counts = {
            number: min(dice.randint(0, 20), len(prompts[number]) - done[number])
            for number in range(4)
        }
        work = sorted(
            (count, number) for number, count in counts.items() if count
        )
        parts = [
            Part(
                prompts[number][done[number] :][:count],
                range(done[number], done[number] + count),
                tables[number],
            )
            for count, number in work
        ]
        if not parts:
            continue
        batch = batch_of(parts, pool)
        with torch.inference_mode():
            out = paged(
                input_ids=batch.ids,
                position_ids=batch.positions,
                use_cache=False,
                paged=batch,
            )
        logits = out.logits[0].split([count for count, _ in work])
        for (count, number), got in zip(work, logits, strict=True):
            torch.testing.assert_close(
                got, want[number][done[number] :][:count], atol=1e-4, rtol=1e-4
            )
            done[number] += count
        assert next_tokens(paged, batch) == [
            int(got[-1].argmax()) for got in logits
        ]
    assert (
        generated(model, prompt(20), 4)
        == generated(llama(num_hidden_layers=2), prompt(20), 4)
        or name == "qwen"
    )


def test_a_block_is_one_run_of_bytes_in_the_order_of_the_layout() -> None:
    layout = layout_of(model_of("llama"), BLOCK)
    pool = KVPool(layout, 4)
    other = KVPool(layout, 4)
    pool.kv.normal_()
    slot = np.zeros(layout.slot_bytes, np.uint8)
    pool.to_slot(2, slot)
    other.from_slot(1, slot)
    assert torch.equal(other.kv[1], pool.kv[2])
    assert not other.kv[[0, 2, 3]].any()
    at = layout.plane_offset(1, 1)
    plane = torch.from_numpy(slot[at : at + layout.plane_bytes(1)].copy()).view(
        torch.float32
    )
    assert torch.equal(plane.view(layout.plane_shape(1)), pool.kv[2, 1, 1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen"])
@pytest.mark.parametrize("chunk", [None, 24])
def test_blocks_go_to_host_and_disk_and_come_back(
    name: str, chunk: int | None, house: House
) -> None:
    engine = engine_of(house.cache(name), name, step_tokens=chunk)
    found = converse(engine, name)
    assert (
        min(found[what] for what in ("device", "host", "disk", "preemptions")) > 0
    ), found
    assert found["computed"] < found["asked"] - found["host"]
    closed(engine)


@pytest.mark.slow
def test_without_a_cache_and_without_anything() -> None:
    engine = engine_of(None)
    found = converse(engine)
    assert found["device"] > 0
    assert found["preemptions"] > 0
    assert found["host"] == found["disk"] == 0
    closed(engine)
    engine = engine_of(None, prefix_caching=False, step_tokens=50)
    found = converse(engine)
    assert found["device"] == 0
    assert found["preemptions"] > 0
    assert found["computed"] >= found["asked"]
    closed(engine)
    assert engine.manager.free == engine.manager.total == BLOCKS


@pytest.mark.slow
def test_tenants_share_nothing(house: House) -> None:
    engine = engine_of(house.cache(slots=512), blocks=200)
    tokens, answer = talks_of("llama")[1][0]

    def ask(salt: str | None) -> dict[str, int]:
        seq = Sequence(
            f"{salt} {time.monotonic_ns()}", list(tokens), NEW, salt=salt
        )
        serve(engine, [(seq, answer)])
        return seq.hits

    whole = (len(tokens) - 1) // BLOCK * BLOCK
    for salt in ("a", "b", None):
        assert sum(ask(salt).values()) == 0
        assert ask(salt) == {"device": whole}
    mixed = [
        (Sequence(f"{salt}", list(tokens), NEW, salt=salt), answer)
        for salt in ("a", "c", "b", "d")
    ]
    assert serve(engine, mixed) == Served(device=2 * whole)
    closed(engine)


@pytest.mark.slow
def test_tenants_with_a_small_pool(house: House) -> None:
    engine = engine_of(house.cache(slots=96), step_tokens=40)
    found = converse(engine, salt="a") + converse(engine, salt="b")
    assert (
        min(found[what] for what in ("device", "host", "disk", "preemptions")) > 0
    ), found
    closed(engine)


@pytest.mark.slow
def test_what_one_engine_demotes_another_promotes(house: House) -> None:
    first = engine_of(house.cache(slots=512))
    second = engine_of(house.cache(slots=512))
    tokens, answer = talks_of("llama")[1][-1]
    whole = (len(tokens) - 1) // BLOCK * BLOCK
    serve(first, [(Sequence("a", list(tokens), NEW), answer)])
    closed(first)  # its last blocks are in the host tier then
    seq = Sequence("b", list(tokens), NEW)
    serve(second, [(seq, answer)])
    assert seq.hits == {"host": whole}
    closed(second)


def test_chunks_of_the_transformers_connector_are_hit(house: House) -> None:
    model = model_of("llama")
    (tokens, answer) = talks_of("llama")[1][-1]
    whole = (len(tokens) - 1) // BLOCK * BLOCK
    cache = house.cache(slots=512)
    cached = CachedModel(model, cache=cache)
    ids = torch.tensor([tokens])
    cached.generate(ids, max_new_tokens=NEW, do_sample=False)
    engine = engine_of(cache)
    seq = Sequence("a", list(tokens), NEW)
    serve(engine, [(seq, answer)])
    assert seq.hits == {"host": whole}
    engine.add(Sequence("b", tokens + answer[:-1], 1))
    while engine.busy:
        engine.step()
    closed(engine)
    out = cached.generate(
        torch.tensor([tokens + answer[:-1]]), max_new_tokens=1, do_sample=False
    )
    assert out[0, -1] == answer[-1]
    # what the engine generated too
    assert cached.last.columns == (len(tokens) + NEW - 2) // BLOCK * BLOCK


@pytest.mark.slow
def test_after_a_restart_and_a_wiped_host_the_disk_has_it(house: House) -> None:
    engine = engine_of(house.cache())
    converse(engine)
    closed(engine)
    house.shut(wipe_host=True)
    engine = engine_of(house.cache())
    tokens, answer = talks_of("llama")[1][0]
    seq = Sequence("again", list(tokens), NEW)
    serve(engine, [(seq, answer)])
    assert seq.hits.get("disk", 0) > 0
    assert set(seq.hits) == {"disk"}
    assert converse(engine)["disk"] > 0
    closed(engine)


@pytest.mark.slow
def test_requests_are_aborted_wherever_they_are(house: House) -> None:
    engine = engine_of(house.cache(), step_tokens=30)
    dice = random.Random(0)
    converse(engine)
    for turn in (0, 3):
        going = [
            Sequence(f"x{talk}.{turn}", list(turns[turn][0]), NEW)
            for talk, turns in enumerate(talks_of("llama"))
        ]
        for seq in going:
            engine.add(seq)
        while engine.busy:
            engine.step()
            alive = [*engine.running, *engine.waiting]
            if alive and dice.random() < 0.3:
                engine.abort(dice.choice(alive))
            engine.manager.check()
    converse(engine, salt="after")
    engine.add(Sequence("last", list(range(1, 30)), NEW))
    engine.step()
    closed(engine)


def test_requests_that_cannot_be_are_refused_at_once() -> None:
    engine = engine_of(None)
    for tokens, new in (([], 4), ([1], 0), ([1] * BLOCK * BLOCKS, 1)):
        with pytest.raises(ValueError, match="at least 1 \\+ 1, at most 288"):
            engine.add(Sequence("a", tokens, new))
    assert not engine.busy
    serve(
        engine,
        [
            (
                seq := Sequence(
                    "a", prompt(BLOCK * BLOCKS - NEW)[0].tolist(), NEW
                ),
                generated(model_of("llama"), torch.tensor([seq.tokens]), NEW)[0],
            )
        ],
    )
    closed(engine)
