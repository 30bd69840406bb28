"""Prompts of which chunks are missing before stored ones: the same text as cold, and only what is
missing is computed.
"""

from __future__ import annotations

import os
import random
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from pagoda import Cache, Hit
from pagoda.base.metrics import Reason
from pagoda.connectors.transformers import CachedModel, layout_of, namespace_of
from pagoda.connectors.transformers.holes import least_piece
from pagoda.tiers import DiskTier
from testbed.servers import redis_server
from tests.e2e.house import CHUNK, House
from tests.e2e.slow_device import SlowDevice, engine_over
from tests.e2e.stateful_models import FEW, stateful
from tests.e2e.tiny import deepseek, generated, llama, prompt, qwen
from tests.e2e.tiny_vision import qwen2_vl
from tests.remote.chunks import fresh_prefix

CHUNKS = 32
TAIL = 5
NEW = 16
IDS = prompt(CHUNKS * CHUNK + TAIL)
EDGES: list[set[int]] = [
    {0},
    {CHUNKS - 1},
    set(range(CHUNKS)) - {7},
    set(range(CHUNKS)) - {CHUNKS - 1},
    set(range(0, CHUNKS, 2)),
    set(range(1, CHUNKS, 2)),
    {3, 4, 5, 20},
]
RANDOM = [
    set(random.Random(seed).sample(range(CHUNKS), 1 + seed % (CHUNKS - 1)))
    for seed in range(40)
]
REMOTE_ONLY = {
    "host_size": 0,
    "disk_size": 0,
    "disk_path": "",
}
# rope, soft-maxes and sums in another order: far below what other KV changes
ROUNDING = 2e-3


def text(cached: CachedModel, ids=IDS, **kwargs) -> list[list[int]]:
    options = {"max_new_tokens": NEW, "do_sample": False, **kwargs}
    return cached.generate(ids, **options)[:, ids.shape[1] :].tolist()


def logits(generate, ids=IDS) -> torch.Tensor:
    """The logits behind the prompt."""
    out = generate(
        ids,
        max_new_tokens=1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.logits[0]


def keys_of(cached: CachedModel, ids=IDS) -> list[bytes]:
    return [key for _, _, key in cached.cache.keys(ids[0])]


def remove(cached: CachedModel, gone: set[int], tiers: str = "") -> None:
    """Remove chunks of the prompt from the tiers named, or from all."""
    assert cached.cache.flush(60.0)
    keys = keys_of(cached)
    for tier in cached.cache._tiers.all:
        if not tiers or tier.name in tiers:
            for at in gone:
                tier.remove(keys[at])


@contextmanager
def counted(model):
    """The tokens of each forward pass."""
    passes: list[int] = []

    def note(_, given, kwargs, out):
        passes.append(kwargs["input_ids"].shape[1])

    hook = model.register_forward_hook(note, with_kwargs=True)
    yield passes
    hook.remove()


def check_holes(
    cached: CachedModel, want, gone: set[int], told: bool = True
) -> Hit:
    """Ask twice: what is missing is computed and stored, and then all is there. `told`: a store
    says what was there already, which a remote tier alone says later.
    """
    with counted(cached.model) as passes:
        assert text(cached) == want
    hit = cached.last.hit
    stored = CHUNKS - len(gone)
    assert hit.num_tokens == min(gone, default=CHUNKS) * CHUNK
    assert hit.loaded == stored * CHUNK
    assert sum(piece.stop - piece.start for piece in hit.pieces) == hit.loaded
    prefill = passes[: len(passes) - (NEW - 1)]
    assert sum(prefill) == len(gone) * CHUNK + TAIL
    assert set(passes[len(prefill) :]) == {1}
    assert cached.cache.flush(60.0)
    if told:
        assert cached.last_stored[0].num_chunks == len(gone)
        assert cached.last_stored[0].present == stored
    with counted(cached.model) as passes:
        assert text(cached) == want
    assert passes[0] == TAIL
    assert cached.last.hit.num_tokens == cached.last.hit.loaded == CHUNKS * CHUNK
    if told:
        assert cached.last_stored[0].present == CHUNKS
    return hit


@pytest.mark.slow
@pytest.mark.parametrize("gone", EDGES, ids=str)
def test_only_missing_chunks_are_computed(gone: set[int], house: House) -> None:
    model = llama()
    want = generated(model, IDS, NEW)
    cached = house.open(model)
    assert text(cached) == want
    remove(cached, gone)
    check_holes(cached, want, gone)


@pytest.mark.slow
@pytest.mark.parametrize("build", [llama, qwen, deepseek])
def test_any_chunks_may_be_missing(build, house: House) -> None:
    model = build()
    want = generated(model, IDS, NEW)
    cold = logits(model.generate)
    cached = house.open(model)
    assert text(cached) == want
    for gone in (*EDGES, *RANDOM):
        remove(cached, gone)
        check_holes(cached, want, gone)
        remove(cached, gone)
        ours = logits(cached.generate)
        assert cached.last.hit.loaded == (CHUNKS - len(gone)) * CHUNK
        assert (ours - cold).abs().max() < ROUNDING * cold.abs().max()


def test_what_is_loaded_behind_a_hole_is_used(house: House) -> None:
    """A control of the tests above: wrong KV of one chunk there changes the answer."""
    model = llama()
    cold = logits(model.generate)
    cached = house.open(model, disk_size=0, disk_path="")
    text(cached)
    host = cached.cache._tiers.host
    remove(cached, {2, 9})
    right = logits(cached.generate)
    assert (right - cold).abs().max() < ROUNDING * cold.abs().max()
    remove(cached, {2, 9})
    key = keys_of(cached)[6]
    found = host.ledger.match_prefix([key], start=6)
    (view,) = host.slab.views(found.slots.tolist())
    view[:] = 0
    wrong = logits(cached.generate)
    assert cached.last.hit.loaded == 30 * CHUNK
    assert (wrong - cold).abs().max() > 10 * ROUNDING * cold.abs().max()


def test_holes_in_two_tiers(house: House) -> None:
    model = llama()
    want = generated(model, IDS, NEW)
    cached = house.open(model)
    text(cached)
    gone = {0, 9, 10, 25}
    remove(cached, set(range(1, CHUNKS, 2)), "host")
    remove(cached, set(range(0, CHUNKS, 2)), "disk")
    remove(cached, gone)
    hit = check_holes(cached, want, gone)
    assert {piece.tier for piece in hit.pieces} == {"host", "disk"}
    assert len(hit.pieces) == CHUNKS - len(gone)


@pytest.mark.slow
def test_a_redis_that_lost_some_keys(house: House) -> None:
    model = llama()
    want = generated(model, IDS, NEW)
    gone = {1, 2, 15, 30}
    with redis_server() as server:
        url = f"{server.url}/0?prefix={fresh_prefix()}&deadline=30s&look=30s"
        remote = {**REMOTE_ONLY, "remote": url}
        cached = house.open(model, **remote)
        text(cached)
        remove(cached, gone)
        house.shut()
        cached = house.open(model, **remote)
        hit = check_holes(cached, want, gone, told=False)
        assert hit.by_tier == {"redis": CHUNK}
        assert cached.cache.stats()["counters"]["lookups"] == 2
        house.shut()


def holds(server, key: bytes) -> bool:
    """Whether a Redis has the chunk of this key."""
    return key.hex() in server.call("KEYS", f"*{key.hex()}*")


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_a_node_of_a_pool_that_is_gone(first: bool, house: House) -> None:
    """With the first chunk, or another one."""
    model = llama()
    want = generated(model, IDS, NEW)
    with ExitStack() as running:
        servers = [running.enter_context(redis_server()) for _ in range(3)]
        for server in servers:
            # had values before: chunks of a prompt are not kept together
            server.call("SET", "another:program", "1")
        places = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        url = f"redis+pool://{places}?prefix=p&deadline=30s&look=30s"
        remote = {**REMOTE_ONLY, "remote": url}
        cached = house.open(model, **remote)
        text(cached)
        assert cached.cache.flush(60.0)
        has_first = [holds(server, keys_of(cached)[0]) for server in servers]
        assert any(has_first)
        house.shut()
        servers[has_first.index(first)].kill()
        cached = house.open(model, **remote)
        assert text(cached) == want
        hit = cached.last.hit
        assert (hit.num_tokens == 0) == first
        assert hit.num_tokens < hit.loaded < CHUNKS * CHUNK
        house.shut()


class ComputesLess(LlamaForCausalLM):
    """Computes all but the last token of a part of the prompt."""

    def prepare_inputs_for_generation(self, input_ids, *args, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        if CHUNK < input_ids.shape[1] < IDS.shape[1]:
            for name in ("input_ids", "position_ids"):
                inputs[name] = inputs[name][:, :-1]
        return inputs


@pytest.mark.slow
def test_a_pass_that_computed_less_leaves_the_leading_part(house: House) -> None:
    plain = llama()
    model = ComputesLess(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    model.generation_config = plain.generation_config
    want = generated(model, IDS, NEW)
    cached = house.open(model)
    text(cached)
    remove(cached, {4, 9})
    assert text(cached) == want
    hit = cached.last.hit
    assert hit.num_tokens == 4 * CHUNK
    assert hit.loaded == 4 * CHUNK
    remove(cached, {4})
    assert text(cached) == want
    counters = cached.cache.stats()["counters"]
    assert counters["miss_not_cacheable"] == 1


@pytest.mark.slow
def test_a_pass_that_fails_leaves_the_leading_part(house: House) -> None:
    model = llama()
    want = generated(model, IDS, NEW)
    cached = house.open(model)
    text(cached)
    gone = {4, 9, 20}
    remove(cached, gone)
    passes = 0

    def fail(module, given):
        nonlocal passes
        passes += module is model.model.layers[1]
        if passes == 2:
            passes += 1
            raise RuntimeError("no memory")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    assert text(cached) == want
    hook.remove()
    assert passes > 3
    hit = cached.last.hit
    assert hit.num_tokens == 4 * CHUNK
    assert hit.loaded == 4 * CHUNK
    assert hit.pieces == ((0, 4 * CHUNK, "host"),)
    assert text(cached) == want
    assert cached.last.hit.num_tokens == CHUNKS * CHUNK
    remove(cached, {4})
    assert text(cached) == want
    assert cached.last.hit.loaded == (CHUNKS - 1) * CHUNK


@pytest.mark.slow
def test_a_model_that_computes_no_parts_is_tried_once(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    """Each try would cost a pass."""
    model = InOnePiece(llama().config).eval()
    want = generated(model, IDS, NEW)
    cached = house.open(model)
    text(cached)
    for _ in range(3):
        remove(cached, {4})
        assert text(cached) == want
        assert cached.last.hit.loaded == 4 * CHUNK
    lines = [line for line in caplog.messages if "behind a missing" in line]
    assert len(lines) == 1
    assert "TypeError: no parts (from now on always)" in lines[0]
    counters = cached.cache.stats()["counters"]
    assert counters["miss_not_cacheable"] == 1


class InOnePiece(LlamaForCausalLM):
    """A model of another's code."""

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        if 1 < input_ids.shape[1] < IDS.shape[1]:
            raise TypeError("no parts")
        return super().prepare_inputs_for_generation(input_ids, **kwargs)


def test_an_interrupt_during_a_pass_leaves_nothing_behind(house: House) -> None:
    model = llama()
    want = generated(model, IDS, NEW)
    cached = house.open(model)
    text(cached)
    remove(cached, {4, 9})

    def interrupt(module, given):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        text(cached)
    hook.remove()
    check_holes(cached, want, {4, 9})


class HopefulDisk(DiskTier):
    """A real disk tier that promises every chunk: one that goes before it is loaded."""

    def match_each(self, keys, **_):
        return [True] * len(keys)


def test_a_promised_piece_that_does_not_come_is_computed(
    house: House, tmp_path: Path
) -> None:
    model = llama()
    want = generated(model, IDS, NEW)
    layout = layout_of(model, CHUNK)
    disk = HopefulDisk.open(layout, tmp_path / "hopeful", 4 << 20)
    with Cache(
        namespace=namespace_of(model, layout),
        layout=layout,
        tiers=[disk],
        chunk_tokens=CHUNK,
        worth_it=False,
        deadline_seconds=30.0,
    ) as cache:
        cached = CachedModel(model, cache=cache)
        text(cached)
        gone = {3, 8, 9, 21}
        remove(cached, gone)
        assert text(cached) == want
        hit = cached.last.hit
        assert hit.num_tokens == 3 * CHUNK
        assert hit.loaded < (CHUNKS - len(gone)) * CHUNK
        assert cached.last_stored[0].refused == 0


def test_pieces_that_were_only_promised_are_not_in_the_answer(
    house: House, tmp_path: Path
) -> None:
    """With a copy engine: a look-up before the load."""
    model = llama()
    want = generated(model, IDS, NEW)
    layout = layout_of(model, CHUNK)
    disk = HopefulDisk.open(layout, tmp_path / "hopeful", 4 << 20)
    device = SlowDevice()
    with Cache(
        namespace=namespace_of(model, layout),
        layout=layout,
        tiers=[disk],
        chunk_tokens=CHUNK,
        worth_it=False,
        deadline_seconds=30.0,
    ) as cache:
        cached = CachedModel(model, cache=cache)
        cached._seen = cached._seen._replace(copy_engine=engine_over(device))
        assert text(cached) == want
        hit = cached.last.hit
        assert hit.num_tokens == 0
        assert hit.loaded == 0
        assert hit.pieces == ()
    device.end()


def test_a_damaged_chunk_on_the_disk_is_computed(house: House) -> None:
    model = llama()
    want = generated(model, IDS, NEW)
    cached = house.open(model)
    text(cached)
    remove(cached, {5})
    remove(cached, set(range(CHUNKS)), "host")
    disk = cached.cache._tiers.lower[0]
    found = disk.ledger.match_prefix([keys_of(cached)[12]], start=12)
    stride = os.path.getsize(disk.ledger.slab_path) // disk.ledger.slots
    with open(disk.ledger.slab_path, "r+b") as file:
        file.seek(int(found.slots[0]) * stride)
        file.write(os.urandom(stride))
    assert text(cached) == want
    hit = cached.last.hit
    assert hit.runs() == [(0, 5 * CHUNK), (6 * CHUNK, 12 * CHUNK)]
    assert text(cached) == want
    assert cached.last.hit.num_tokens == CHUNKS * CHUNK


@pytest.mark.slow
def test_beams_samples_and_proposals_begin_behind_holes(house: House) -> None:
    model = llama()
    cached = house.open(model)
    text(cached)
    for options in (
        {"num_beams": 2},
        {"num_beams": 2, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 4},
        {"prefill_chunk_size": 24},
    ):
        want = generated(model, IDS, NEW, **options)
        remove(cached, {1, 7, 8, 30})
        assert text(cached, **options) == want
        assert cached.last.hit.loaded == 28 * CHUNK


def test_a_prefill_in_pieces_stays_one(house: House) -> None:
    model = llama()
    cached = house.open(model)
    text(cached)
    remove(cached, {7, 8, 9})
    with counted(model) as passes:
        text(cached, prefill_chunk_size=20)
    assert passes[:3] == [20, 20, 8]


@pytest.mark.slow
def test_where_holes_are_computed_with_all_behind_them(house: House) -> None:
    """Batches, and padding: the leading part only."""
    model = llama()
    cached = house.open(model)
    ids = torch.cat([IDS, prompt(IDS.shape[1], seed=5)])
    want = generated(model, ids, NEW)
    assert text(cached, ids) == want
    remove(cached, {3})
    assert text(cached, ids) == want
    assert cached.last.hit.loaded == cached.last.hit.num_tokens == 3 * CHUNK
    padded = torch.cat([torch.zeros(1, 3, dtype=IDS.dtype), IDS], 1)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    remove(cached, {3})
    assert text(cached, padded, attention_mask=mask) == generated(
        model, padded, NEW, attention_mask=mask
    )
    assert cached.last.hit.loaded == cached.last.hit.num_tokens == 3 * CHUNK
    remove(cached, {3})
    with cached.prefix(IDS) as prefix:
        assert prefix.columns == prefix.hit.loaded == 3 * CHUNK


@pytest.mark.slow
@pytest.mark.parametrize("kind", FEW)
def test_a_window_or_a_state_behind_a_hole_ends_the_hit(
    kind: str, house: House
) -> None:
    model = stateful(kind)
    cached = house.open(model)
    want = text(cached)
    assert text(cached) == want
    whole = cached.last.hit.num_tokens
    assert whole >= CHUNKS * CHUNK
    remove(cached, {3})
    assert text(cached) == want
    hit = cached.last.hit
    assert hit.num_tokens == hit.loaded <= 3 * CHUNK
    assert hit.pieces == ()
    assert text(cached) == want
    assert cached.last.hit.num_tokens == whole


@pytest.mark.slow
def test_a_hole_on_a_device(house: House) -> None:
    """With a copy engine: a prompt with holes is loaded before it is computed."""
    model = llama()
    want = generated(model, IDS, NEW)
    device = SlowDevice()
    cached = house.open(model)
    cached._seen = cached._seen._replace(copy_engine=engine_over(device))
    text(cached)
    gone = {0, 9, 10, 25}
    remove(cached, gone)
    check_holes(cached, want, gone)
    # a leading part alone would be loaded layer by layer
    remove(cached, {4, 9})
    check_holes(cached, want, {4, 9})
    remove(cached, {CHUNKS - 1})
    check_holes(cached, want, {CHUNKS - 1})
    assert cached.cache.stats()["counters"]["lookups"] == 7
    house.shut()
    device.end()


def test_a_model_with_positions_of_its_own_uses_the_leading_part(
    house: House,
) -> None:
    """A run of them would begin where the model's latest prompt ended."""
    model = qwen2_vl()
    cached = house.open(model)
    want = text(cached)
    remove(cached, {3})
    assert text(cached) == want
    assert cached.last.hit.loaded == cached.last.hit.num_tokens == 3 * CHUNK


def test_positions_that_depend_on_the_length_are_not_cached(
    house: House,
) -> None:
    """K of a chunk behind a hole would be that of a shorter prompt."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = llama(rope_parameters=rope, max_position_embeddings=256)
    cached = house.open(model)
    for _ in range(2):
        text(cached)
        assert cached.last.hit.reason is Reason.NOT_CACHEABLE
        assert cached.last.hit.pieces == ()


@pytest.mark.slow
def test_a_compiled_model_goes_on_behind_holes(house: House) -> None:
    model = llama()
    want = generated(model, IDS, NEW)
    cached = house.open(model)
    cached.compile(backend="eager")
    text(cached)
    remove(cached, {3, 9})
    assert text(cached) == want
    assert cached.last.hit.loaded == (CHUNKS - 2) * CHUNK


def test_a_short_piece_is_computed_with_what_is_around_it(house: House) -> None:
    """Two passes would take longer than one."""
    model = llama()
    cpu = torch.device("cpu")
    assert least_piece(model, [cpu, cpu]) == CHUNK
    assert least_piece(model, [torch.device("cuda:0")]) == 256
    small = house.open(model, chunk_tokens=8)
    want = text(small)
    keys = keys_of(small)
    for at in (1, 3, 6):
        for tier in small.cache._tiers.all:
            tier.remove(keys[at])
    with counted(model) as passes:
        assert text(small) == want
    # chunk 2 alone is too short; 4 and 5 are not
    assert passes[:3] == [24, 8, TAIL]
    hit = small.last.hit
    assert hit.runs() == [(0, 8), (32, 48), (56, CHUNKS * CHUNK)]
    assert hit.reason is Reason.REMOVED
