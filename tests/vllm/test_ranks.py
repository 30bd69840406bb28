"""Several ranks of one engine: a chunk is one slot with the pages of all ranks in it, or none."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pagoda.ledger.request_meters import read_meters
from tests.vllm import models, stores
from tests.vllm.conftest import Same
from tests.vllm.engines import BLOCK, CHUNK, Engine, connector, loadable, options
from tests.vllm.inside import ObservedEngine
from tests.vllm.models import prompt

# keys and values in float32
CHUNK_BYTES = CHUNK * models.LAYERS * models.KV_HEADS * 2 * models.HEAD_DIM * 4


class Ranks(NamedTuple):
    """The engine of two ranks and its tiers."""

    engine: Engine
    host: Path
    disk: Path


@pytest.fixture(scope="module")
def ranks(
    llama: Path,
    logs: Path,
    session_shm: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Ranks]:
    """Starts it."""
    host = session_shm / "ranks"
    disk = tmp_path_factory.mktemp("ranks") / "disk"
    how = options(llama, tensor_parallel_size=2) | connector(host, disk)
    engine = Engine("ranks", logs / "ranks.log", **how)
    yield Ranks(engine.wait_up(), host, disk)
    engine.stop()


def test_two_ranks_load_from_all_tiers_and_give_the_text_of_one(
    ranks: Ranks, same: Same
) -> None:
    """Chunks of two ranks are loaded from host memory and from the disk; the text equals that of
    one rank.
    """
    prompts = [prompt(4000 + i, 9 * CHUNK + 40 * i) for i in range(3)]
    for one in prompts:
        (answer,) = same(ranks.engine, one)
        assert answer.external == 0
    chunks = sum((len(one) + 7) // CHUNK for one in prompts)
    for tier in (ranks.host, ranks.disk):
        stores.wait_ready(tier, chunks)
        gauges = stores.check(tier)
        assert gauges["ready"] == chunks
        assert gauges["reserved"] == 0
    with stores.ledger_of(ranks.host) as ledger:
        assert ledger.slot_bytes == CHUNK_BYTES
    for cleared in (False, True):
        if cleared:
            stores.clear(ranks.host)
        ranks.engine.reset()
        for one in prompts:
            (answer,) = same(ranks.engine, one)
            assert answer.local == 0
            assert answer.external == loadable(len(one))
    counts = Counter[str]()
    for file in ranks.host.glob("*/meters"):
        for meter in read_meters(file):
            assert meter.tenant == "none"
            counts.update(meter.counts)
    found = 2 * sum(loadable(len(one)) for one in prompts)
    assert counts["hit_tokens"] == found
    # whole chunks, by one of the two ranks; the time and the speed are known, too
    assert found <= counts["loaded_tokens"] < 1.5 * found
    assert counts["load_microseconds"]
    assert counts["prefill_tokens"]
    assert counts["prefill_microseconds"]


def test_behind_a_local_hit(ranks: Ranks, same: Same) -> None:
    """The device has the first half of a chunk, of which both ranks load the other half."""
    one = prompt(4100, 6 * CHUNK)
    before = stores.ready(ranks.host)
    same(ranks.engine, one, max_tokens=1)
    stores.wait_ready(ranks.host, before + 6)
    ranks.engine.reset()
    same(ranks.engine, one[: BLOCK + 1])
    (answer,) = same(ranks.engine, one)
    assert answer.local == BLOCK
    assert answer.external == loadable(len(one)) - BLOCK
    # each block that was loaded holds its own tokens
    for blocks in range(1, len(one) // BLOCK - 1):
        (answer,) = same(
            ranks.engine, one[: blocks * BLOCK] + prompt(4110 + blocks, 20)
        )
        assert answer.local == blocks * BLOCK
        assert answer.external == 0


def test_a_chunk_with_one_damaged_part_is_served_to_neither_rank(
    ranks: Ranks, same: Same
) -> None:
    """A chunk that is damaged on the disk is served to neither rank."""
    one = prompt(4200, 6 * CHUNK + 9)
    keys = stores.keys(ranks.disk)
    same(ranks.engine, one, max_tokens=1)
    stores.wait_ready(ranks.disk, len(keys) + 6)
    stores.clear(ranks.host)
    assert (
        stores.spoil(ranks.disk, stores.keys(ranks.disk) - keys, position=2) == 1
    )
    ranks.engine.reset()
    same(ranks.engine, one)
    stores.wait_ready(ranks.host, 6)
    ranks.engine.reset()
    (answer,) = same(ranks.engine, one)
    assert answer.external == loadable(len(one))


def test_computing_is_faster_than_a_slow_disk(ranks: Ranks, same: Same) -> None:
    """The scheduler's process decides by what the ranks, in theirs, have measured; the miss has its
    reason.
    """
    one = prompt(4300, 8 * CHUNK + 9)
    before = stores.ready(ranks.disk)
    same(ranks.engine, one, max_tokens=1)
    stores.wait_ready(ranks.disk, before + 8)
    speeds = ranks.engine.call(rates)
    assert speeds["prefill_tokens_per_second"] > 0
    assert speeds["disk_bytes_per_second"] > 0
    for slow in (True, False):
        stores.clear(ranks.host)
        ranks.engine.reset()
        refused = stores.counters(ranks.host)["miss_not_worth_it"]
        ranks.engine.call(judge, slow)
        (answer,) = same(ranks.engine, one)
        assert answer.external == (0 if slow else loadable(len(one)))
        assert stores.counters(ranks.host)["miss_not_worth_it"] == refused + slow
    ranks.engine.call(judge, None)


def rates(observed: ObservedEngine) -> dict[str, float]:
    """What the scheduler's half knows of speeds."""
    found: dict[str, float] = (
        observed.scheduler.connector._scheduling._cache.stats()["rates"]
    )
    return found


def judge(observed: ObservedEngine, slow: bool | None) -> None:
    """Have the engine load only what is worth it from a disk that was slow or fast; None: load
    everything again.
    """
    load_cost = (
        observed.scheduler.connector._scheduling._cache._resources.load_cost
    )
    load_cost._enabled = slow is not None
    for _ in range(5 if slow is not None else 0):
        load_cost.record_load("disk", CHUNK_BYTES, 1e4 if slow else 1e-9)


def test_nothing_is_left_over(ranks: Ranks) -> None:
    """No slot waits for a part that is never written."""
    for tier in (ranks.host, ranks.disk):
        stores.wait_until(
            lambda tier=tier: stores.check(tier)["reserved"] == 0,
            "nothing reserved",
        )
    assert stores.ready(ranks.host) > 0


# ---- engines of one rank and of two that share


def may_send_functions() -> None:
    """Let vLLM's workers run functions of the tests."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"


@pytest.fixture(scope="module")
def sizes(
    llama: Path,
    logs: Path,
    session_shm: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[int, Engine]]:
    """Starts an engine of one rank and one of two, with one cache."""
    how = connector(session_shm / "sizes", canonical_layout=True)
    engines = {
        ranks: Engine(
            f"sizes-{ranks}",
            logs / f"sizes-{ranks}.log",
            may_send_functions,
            **options(llama, tensor_parallel_size=ranks),
            **how,
        )
        for ranks in (1, 2)
    }
    for engine in engines.values():
        engine.call(on_ranks, watch_blocks)
    yield engines
    for engine in engines.values():
        engine.stop()


def watch_blocks(worker: Any) -> None:
    """Note the blocks that this rank stores from or loads into."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    half = get_kv_transfer_group()._worker  # type: ignore[attr-defined]
    load = half.load
    save = half.save
    half.blocks = []

    def loading(meta: Any) -> None:
        half.blocks += [block for one in meta.loads for block in one.blocks]
        load(meta)

    def saving(meta: Any) -> None:
        half.blocks += [block for one in meta.saves for block in one.blocks]
        save(meta)

    half.load = loading
    half.save = saving


def bytes_of_blocks(worker: Any) -> list[bytes]:
    """Return each head's bytes in these blocks, layer after layer, of vLLM's own tensors [block,
    head, ...].
    """
    import torch
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    blocks = get_kv_transfer_group()._worker.blocks  # type: ignore[attr-defined]
    heads = []
    for head in range(worker.model_runner.kv_caches[0].shape[1]):
        layers = [
            layer[blocks, head].contiguous()
            for layer in worker.model_runner.kv_caches
        ]
        heads.append(torch.stack(layers).view(torch.uint8).numpy().tobytes())
    blocks.clear()
    return heads


def on_ranks(observed: ObservedEngine, function: Any) -> list[Any]:
    """Run a function in each rank's process; return the results in the order of the ranks."""
    return list(observed.llm.collective_rpc(function))


@pytest.mark.parametrize(("stores_it", "loads_it"), [(1, 2), (2, 1)])
def test_each_rank_loads_its_heads_of_what_other_ranks_stored(
    stores_it: int,
    loads_it: int,
    sizes: dict[int, Engine],
    session_shm: Path,
    same: Same,
) -> None:
    """Byte for byte: texts may differ by the order of sums."""
    one = prompt(4300 + stores_it, 6 * CHUNK + 1)
    host = session_shm / "sizes"
    seen = {}
    before = stores.ready(host)
    for ranks in (stores_it, loads_it):
        sizes[ranks].reset()
        (answer,) = same(sizes[ranks], one, max_tokens=1)
        stores.wait_ready(host, before + 6)
        seen[ranks] = sizes[ranks].call(on_ranks, bytes_of_blocks)
    assert answer.external == 6 * CHUNK
    assert stores.ready(host) == before + 6  # nothing was stored again
    (whole,) = seen[1]
    # heads of other ranks are noticed
    assert len(whole) == models.KV_HEADS
    assert len(set(whole)) == models.KV_HEADS
    assert [len(head) for head in whole] == [
        6 * CHUNK_BYTES // models.KV_HEADS
    ] * models.KV_HEADS
    assert [head for rank in seen[2] for head in rank] == whole
    with stores.ledger_of(host) as ledger:
        assert ledger.slot_bytes == CHUNK_BYTES
