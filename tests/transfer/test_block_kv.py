"""BlockKV: one contiguous run a chunk, against plain slicing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagoda.layout import KVLayout
from pagoda.transfer import BlockKV, DenseKV

# one block: [layers, planes, heads, tokens, dim]
LAYOUT = KVLayout.dense(3, 2, 8, "bfloat16", 4)


def blocks(count: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    raw = torch.randint(
        0, 256, (count, 3, 2, 2, 4, 16), dtype=torch.uint8, generator=random
    )
    return raw.view(torch.bfloat16)


@pytest.mark.parametrize("table", [None, [5, 0, 3]])
@pytest.mark.parametrize("threads", [1, 2])
def test_round_trip_touches_only_its_blocks(
    table: list[int] | None, threads: int
) -> None:
    pool = blocks(6)
    slots = [np.full(LAYOUT.slot_bytes, 0xA5, np.uint8) for _ in range(2)]
    BlockKV(pool, LAYOUT, table=table, threads=threads).to_slots([8, 0], slots)
    first = (table or [0, 1, 2])[2]
    second = (table or [0, 1, 2])[0]
    for slot, block in zip(slots, (first, second), strict=True):
        assert (
            slot[: LAYOUT.chunk_bytes].tobytes()
            == pool[block].view(torch.uint8).numpy().tobytes()
        )
        assert (slot[LAYOUT.chunk_bytes :] == 0xA5).all()
    target = blocks(6, seed=1)
    untouched = target.clone()
    BlockKV(target, LAYOUT, table=table).from_slots([8, 0], slots)
    for block in range(6):
        want = pool if block in (first, second) else untouched
        assert torch.equal(
            target[block].view(torch.uint8), want[block].view(torch.uint8)
        )


def test_the_bytes_are_those_of_dense_kv() -> None:
    pool = blocks(2)
    dense = [
        [
            torch.cat([pool[0, layer, plane], pool[1, layer, plane]], 1)
            for plane in (0, 1)
        ]
        for layer in (0, 1, 2)
    ]
    ours, theirs = (np.zeros(LAYOUT.slot_bytes, np.uint8) for _ in range(2))
    BlockKV(pool, LAYOUT).to_slots([4], [ours])
    DenseKV(dense, LAYOUT).to_slots([4], [theirs])
    assert ours.tobytes() == theirs.tobytes()


def test_blocks_may_lie_apart() -> None:
    wide = blocks(8)
    kv = BlockKV(wide[::2], LAYOUT)
    slot = np.zeros(LAYOUT.slot_bytes, np.uint8)
    kv.to_slots([4], [slot])
    assert (
        slot[: LAYOUT.chunk_bytes].tobytes()
        == wide[2].view(torch.uint8).numpy().tobytes()
    )
    slot[:] = 7
    before = wide.view(torch.uint8).clone()
    kv.from_slots([8], [slot])
    assert (wide[4].view(torch.uint8) == 7).all()
    before[4] = 7
    assert torch.equal(wide.view(torch.uint8), before)


def test_what_does_not_match_is_named() -> None:
    with pytest.raises(ValueError, match="blocks: one has"):
        BlockKV(blocks(2)[:, :2].contiguous(), LAYOUT)
    with pytest.raises(ValueError, match=r"blocks must be \[blocks"):
        BlockKV(blocks(2).transpose(1, 2), LAYOUT)
    with pytest.raises(ValueError, match="multiples of chunk_tokens"):
        BlockKV(blocks(2), LAYOUT).to_slots(
            [2], [np.zeros(LAYOUT.slot_bytes, np.uint8)]
        )
    for table in ([0, 2], [-1], [0, 0], [[0]]):
        with pytest.raises(ValueError, match="table"):
            BlockKV(blocks(2), LAYOUT, table=table)
    assert BlockKV(blocks(2), LAYOUT).run_bytes == LAYOUT.chunk_bytes


def test_blocks_of_one_address_are_stored_from_but_not_loaded_into() -> None:
    one = blocks(1)
    kv = BlockKV(one.expand(3, *one.shape[1:]), LAYOUT)
    slot = np.zeros(LAYOUT.slot_bytes, np.uint8)
    kv.to_slots([8], [slot])
    want = one.view(torch.uint8).numpy().tobytes()
    assert slot[: LAYOUT.chunk_bytes].tobytes() == want
    slot[:] = 7
    with pytest.raises(ValueError, match="several elements at one address"):
        kv.from_slots([8], [slot])
    assert one.view(torch.uint8).numpy().tobytes() == want
