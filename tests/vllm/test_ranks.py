"""Two ranks of one engine: a chunk is one slot with both ranks' pages in it, or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.vllm import models, stores
from tests.vllm.conftest import Same
from tests.vllm.engines import BLOCK, CHUNK, Engine, connector, loadable, options
from tests.vllm.models import prompt

CHUNK_BYTES = CHUNK * models.LAYERS * models.KV_HEADS * 2 * models.HEAD_DIM * 4  # keys and values in float32


class Ranks(NamedTuple):
    """The engine of two ranks and its tiers."""

    engine: Engine
    host: Path
    disk: Path


@pytest.fixture(scope="module")
def ranks(
    llama: Path, logs: Path, session_shm: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    """Starts it."""
    host, disk = session_shm / "ranks", tmp_path_factory.mktemp("ranks") / "disk"
    how = options(llama, tensor_parallel_size=2) | connector(host, disk)
    engine = Engine("ranks", logs / "ranks.log", **how)
    yield Ranks(engine.wait_up(), host, disk)
    engine.stop()


def test_both_ranks(ranks: Ranks, same: Same) -> None:
    """Chunks of two ranks are loaded from host memory and from the disk; the text equals that of one rank."""
    prompts = [prompt(4000 + i, 9 * CHUNK + 40 * i) for i in range(3)]
    for one in prompts:
        (answer,) = same(ranks.engine, one)
        assert answer.external == 0
    chunks = sum((len(one) + 7) // CHUNK for one in prompts)
    for tier in (ranks.host, ranks.disk):
        stores.wait_ready(tier, chunks)
        gauges = stores.check(tier)
        assert (gauges["ready"], gauges["reserved"]) == (chunks, 0)
    with stores.ledger_of(ranks.host) as ledger:
        assert ledger.slot_bytes == CHUNK_BYTES
    for cleared in (False, True):
        if cleared:
            stores.clear(ranks.host)
        ranks.engine.reset()
        for one in prompts:
            (answer,) = same(ranks.engine, one)
            assert (answer.local, answer.external) == (0, loadable(len(one)))


def test_behind_a_local_hit(ranks: Ranks, same: Same) -> None:
    """The device has the first half of a chunk, of which both ranks load the other half."""
    one = prompt(4100, 6 * CHUNK)
    before = stores.ready(ranks.host)
    same(ranks.engine, one, max_tokens=1)
    stores.wait_ready(ranks.host, before + 6)
    ranks.engine.reset()
    same(ranks.engine, one[: BLOCK + 1])
    (answer,) = same(ranks.engine, one)
    assert (answer.local, answer.external) == (BLOCK, loadable(len(one)) - BLOCK)
    for blocks in range(1, len(one) // BLOCK - 1):  # each block that was loaded holds its own tokens
        (answer,) = same(ranks.engine, one[: blocks * BLOCK] + prompt(4110 + blocks, 20))
        assert (answer.local, answer.external) == (blocks * BLOCK, 0)


def test_one_spoilt_part(ranks: Ranks, same: Same) -> None:
    """A chunk that is damaged on the disk is served to neither rank."""
    one = prompt(4200, 6 * CHUNK + 9)
    keys = stores.keys(ranks.disk)
    same(ranks.engine, one, max_tokens=1)
    stores.wait_ready(ranks.disk, len(keys) + 6)
    stores.clear(ranks.host)
    assert stores.spoil(ranks.disk, stores.keys(ranks.disk) - keys, position=2) == 1
    ranks.engine.reset()
    same(ranks.engine, one)
    stores.wait_ready(ranks.host, 6)
    ranks.engine.reset()
    (answer,) = same(ranks.engine, one)
    assert answer.external == loadable(len(one))


def test_nothing_is_left_over(ranks: Ranks) -> None:
    """No slot waits for a part that is never written."""
    for tier in (ranks.host, ranks.disk):
        stores.wait_until(lambda tier=tier: stores.check(tier)["reserved"] == 0, "nothing reserved")
    assert stores.ready(ranks.host) > 0
