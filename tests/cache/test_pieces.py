"""Chunks behind a missing one: a key names the whole prefix, so they are as right as the leading
ones.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.metrics import Reason
from pagoda.cache import Cache, Hit
from pagoda.cache.results import Piece
from pagoda.testing import FakeClock
from pagoda.tiers import DiskTier, HostTier
from pagoda.tiers.base import Bytes, Done, running_future
from testbed.patience import within
from tests.cache.kit import (
    CHUNK,
    KV,
    LAYOUT,
    NAMESPACE,
    Prompt,
    blank,
    cache_at,
    config_of,
    counters_of,
    keys_of,
    kv_of,
    prompt,
    stored,
)

CHUNKS = 32
SUBSETS: list[set[int]] = [
    set(),
    {0},
    {CHUNKS - 1},
    set(range(CHUNKS)) - {7},
    set(range(CHUNKS)),
    set(range(0, CHUNKS, 2)),
    set(range(1, CHUNKS, 2)),
    *(
        set(random.Random(seed).sample(range(CHUNKS), seed * 3))
        for seed in range(1, 10)
    ),
]


@pytest.fixture
def cache(shm_root: Path, tmp_path: Path) -> Iterator[Cache]:
    with cache_at(shm_root, tmp_path) as cache:
        yield cache


def remove(
    cache: Cache, tokens: Prompt, gone: set[int], tiers: str = "host disk"
) -> None:
    keys = keys_of(cache, tokens)
    for tier in cache._tiers.all:
        if tier.name in tiers:
            for at in gone:
                tier.remove(keys[at])


def pieces_of(here: Sequence[str]) -> tuple[Piece, ...]:
    """The pieces of a prompt of which each chunk is in the tier named, "" for none."""
    found: list[Piece] = []
    for at, tier in enumerate(here):
        start = at * CHUNK
        if found and tier == found[-1].tier and found[-1].stop == start:
            start = found.pop().start
        if tier:
            found.append(Piece(start, (at + 1) * CHUNK, tier))
    return tuple(found)


def loaded(
    cache: Cache, tokens: Prompt, here: Sequence[str], **options: object
) -> Hit:
    """Retrieve with pieces; check which arrived, and every byte of them."""
    kv = blank(tokens)
    hit = cache.retrieve(tokens, kv.transfer, pieces=True, **options)  # type: ignore[arg-type]
    assert hit.pieces == pieces_of(here)
    check_bytes(kv, tokens, hit)
    assert hit.loaded == CHUNK * sum(map(bool, here))
    leading = [*map(bool, here), False].index(False)
    assert hit.num_tokens == leading * CHUNK == int(hit.mask.sum())
    assert hit.num_tokens == sum(hit.by_tier.values())
    return hit


def check_bytes(kv: KV, tokens: Prompt, hit: Hit) -> None:
    right = kv_of(tokens)
    for start, stop in hit.runs():
        assert kv.same(right, start // CHUNK, stop // CHUNK)


@pytest.mark.parametrize("gone", SUBSETS, ids=str)
def test_all_that_is_stored_is_found_and_loaded(
    cache: Cache, gone: set[int]
) -> None:
    tokens = prompt(CHUNKS)
    stored(cache, tokens)
    remove(cache, tokens, gone)
    here = ["" if at in gone else "host" for at in range(CHUNKS)]
    hit = cache.lookup(tokens, pieces=True)
    assert hit.pieces == pieces_of(here)
    plain = cache.lookup(tokens)
    assert hit.num_tokens == plain.num_tokens
    assert hit.by_tier == plain.by_tier
    assert plain.pieces == ()
    assert plain.loaded == plain.num_tokens
    loaded(cache, tokens, here)


def test_each_piece_may_be_loaded_by_itself(cache: Cache) -> None:
    tokens = prompt(8)
    stored(cache, tokens)
    remove(cache, tokens, {2, 5, 6})
    hit = cache.lookup(tokens, pieces=True)
    assert hit.runs() == [(0, 32), (48, 80), (112, 128)]
    assert hit.loaded == 5 * CHUNK
    kv = blank(tokens)
    for start, stop in hit.runs():
        part = cache.retrieve(
            tokens[:stop], kv.transfer, start_tokens=start, counted=False
        )
        assert part.num_tokens == stop - start
        assert part.reason is None
    check_bytes(kv, tokens, hit)
    counters = counters_of(cache)
    assert counters["lookups"] == 1
    assert counters["hits"] == 1
    assert counters["hit_tokens"] == 5 * CHUNK


def test_pieces_come_from_the_tier_that_has_them(cache: Cache) -> None:
    tokens = prompt(12)
    stored(cache, tokens)
    remove(cache, tokens, {0, 3, 4, 9}, "disk")
    remove(cache, tokens, {0, 1, 4, 6, 9, 10}, "host")
    here = [
        *("", "disk", "host", "host", "", "host"),
        *("disk", "host", "host", "", "disk", "host"),
    ]
    assert cache.lookup(tokens, pieces=True).pieces == pieces_of(here)
    loaded(cache, tokens, here)
    # and now the host tier has those of the disk too
    loaded(cache, tokens, ["host" if tier else "" for tier in here])
    assert not cache.lookup(tokens, tiers=["disk"]).num_tokens


def test_a_request_with_pieces_is_counted_once(cache: Cache) -> None:
    tokens = prompt(8)
    stored(cache, tokens)
    remove(cache, tokens, {0, 5})
    before = counters_of(cache)
    loaded(cache, tokens, ["", *["host"] * 4, "", *["host"] * 2])
    after = counters_of(cache)
    counted = {
        name: after[name] - before[name]
        for name in after
        if after[name] != before[name] and "seconds" not in name
    }
    assert counted.pop("miss_removed") == 1
    assert {
        name: number
        for name, number in counted.items()
        if not name.startswith("loads_")
    } == {
        "lookups": 1,
        "asked_tokens": 8 * CHUNK,
        "hits": 1,
        "hit_tokens": 6 * CHUNK,
        "hit_tokens_host": 6 * CHUNK,
        "loaded_chunks": 6,
        "loaded_bytes": 6 * LAYOUT.chunk_bytes,
    }


def test_pieces_are_kept_from_eviction_until_they_are_loaded(
    shm_root: Path,
) -> None:
    with cache_at(shm_root, None) as cache:
        tokens = prompt(8)
        stored(cache, tokens)
        remove(cache, tokens, {2})
        assert cache.lookup(tokens, pieces=True).loaded == 7 * CHUNK
        for seed in range(1, 9):  # twice what the host tier holds
            cache.store(prompt(16, seed), kv_of(prompt(16, seed)).transfer)
        loaded(cache, tokens, ["host"] * 2 + [""] + ["host"] * 5)


def test_pieces_below_the_minimum_are_left_out(shm_root: Path) -> None:
    with cache_at(shm_root, None, min_hit_tokens=2 * CHUNK) as cache:
        tokens = prompt(10)
        stored(cache, tokens)
        remove(cache, tokens, {2, 4, 7})
        here = ["host"] * 2 + ["", "", "", "host", "host", "", "host", "host"]
        assert cache.lookup(tokens, pieces=True).pieces == pieces_of(here)
        loaded(cache, tokens, here)


def test_pieces_of_a_tier_that_is_too_slow_are_computed(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(10)
    # does not advance: a second later a slow tier would be tried again
    with cache_at(shm_root, tmp_path, clock=FakeClock(), worth_it=True) as cache:
        stored(cache, tokens)
        remove(cache, tokens, {0, 6}, "disk host")
        remove(cache, tokens, {1, 4, 5}, "host")
        cache.observe_prefill(100_000, 1.0)
        for _ in range(3):
            cache._resources.load_cost.record_load("disk", 8192, 1.0)
            cache._resources.load_cost.record_load("host", 1 << 40, 1.0)
        here = ["", "", "host", "host", "", "", "", "host", "host", "host"]
        assert cache.lookup(tokens, pieces=True).pieces == pieces_of(here)
        loaded(cache, tokens, here)
        # but a look-up may have promised them
        kv = blank(tokens)
        told = cache.retrieve(tokens, kv.transfer, pieces=True, counted=False)
        assert told.loaded == 8 * CHUNK
        check_bytes(kv, tokens, told)
        remove(cache, tokens, {1, 4, 5}, "host")
        # also where it has the leading part
        rest = cache.lookup(tokens, pieces=True, start_tokens=CHUNK)
        assert rest.reason is Reason.NOT_WORTH_IT
        assert rest.pieces == pieces_of(here)
        assert rest.num_tokens == 0
        assert rest.loaded == 5 * CHUNK


def test_a_slow_tier_between_two_parts_of_a_fast_one_is_a_hole(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(8)
    with cache_at(shm_root, tmp_path, clock=FakeClock(), worth_it=True) as cache:
        stored(cache, tokens)
        remove(cache, tokens, {3}, "host")
        remove(cache, tokens, {4, 5, 6, 7}, "disk")
        cache.observe_prefill(100_000, 1.0)
        for _ in range(3):
            cache._resources.load_cost.record_load("disk", 8192, 1.0)
            cache._resources.load_cost.record_load("host", 1 << 40, 1.0)
        hit = cache.lookup(tokens, pieces=True)
        assert hit.pieces == pieces_of(["host"] * 3 + [""] + ["host"] * 4)
        assert hit.num_tokens == 3 * CHUNK
        assert hit.loaded == 7 * CHUNK
        assert hit.by_tier == {"host": 3 * CHUNK}
        assert hit.mask.sum() == 3 * CHUNK
        assert hit.reason is Reason.NOT_WORTH_IT


def test_another_tenants_chunk_is_no_piece(cache: Cache) -> None:
    tokens = prompt(4)
    stored(cache, tokens)
    remove(cache, tokens, {1})
    assert not cache.lookup(tokens, pieces=True, salt="other").pieces
    assert not loaded(cache, tokens, [""] * 4, salt="other").loaded


def test_a_shortened_hit_has_no_pieces_behind_it(cache: Cache) -> None:
    tokens = prompt(6)
    stored(cache, tokens)
    remove(cache, tokens, {3})
    hit = cache.lookup(
        tokens,
        pieces=True,
        usable=lambda hit: hit.shortened(2 * CHUNK, Reason.BELOW_MINIMUM),
    )
    assert hit.pieces == (Piece(0, 2 * CHUNK, "host"),)
    assert hit.loaded == hit.num_tokens == 2 * CHUNK


class AskedDisk(DiskTier):
    """A real disk tier that notes how often it is asked, and may stop delivering."""

    asked = 0
    loads = 0
    stops = False

    def match_each(self, *given: object, **named: object) -> list[bool]:
        self.asked += 1
        return super().match_each(*given, **named)  # type: ignore[arg-type]

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[Bytes], **named: object
    ) -> list[Future[Done]]:  # type: ignore[override]
        self.loads += 1
        if self.stops:
            return [running_future() for _ in keys]
        return super().load(keys, buffers, **named)  # type: ignore[arg-type]


@pytest.fixture
def asked(shm_root: Path, tmp_path: Path) -> Iterator[tuple[Cache, AskedDisk]]:
    config = config_of(shm_root, tmp_path, deadline_seconds=1.0)
    assert config.host_path
    assert config.disk_path
    host = HostTier.open(
        LAYOUT, Path(config.host_path), config.host_size, policy="lru"
    )
    disk = AskedDisk.open(LAYOUT, Path(config.disk_path), config.disk_size)
    with Cache(
        config, namespace=NAMESPACE, layout=LAYOUT, tiers=[host, disk]
    ) as cache:
        yield cache, disk  # type: ignore[misc]


def test_a_tier_is_asked_once_and_only_if_something_is_missing(
    asked: tuple[Cache, AskedDisk],
) -> None:
    cache, disk = asked
    tokens = prompt(8)
    stored(cache, tokens)
    cache.lookup(tokens, pieces=True)
    cache.retrieve(tokens, blank(tokens).transfer, pieces=True)
    assert disk.asked == 0
    remove(cache, tokens, {1, 3, 5, 7})
    cache.lookup(tokens)
    cache.retrieve(tokens, blank(tokens).transfer)
    assert disk.asked == 0
    cache.lookup(tokens, pieces=True)
    assert disk.asked == 1
    cache.retrieve(tokens, blank(tokens).transfer, pieces=True)
    assert disk.asked == 2


@pytest.mark.slow
def test_a_tier_that_stops_is_waited_for_once(
    asked: tuple[Cache, AskedDisk],
) -> None:
    """All pieces have one deadline: eight that do not come take no longer than one."""
    cache, disk = asked
    tokens = prompt(17)
    stored(cache, tokens)
    remove(cache, tokens, set(range(17)), "host")
    remove(cache, tokens, set(range(0, 17, 2)), "disk")
    disk.stops = True
    kv = blank(tokens)
    with within(30.0):
        hit = cache.retrieve(tokens, kv.transfer, pieces=True)
    assert hit.loaded == 0
    assert hit.pieces == ()
    assert disk.loads == 1
    assert not kv.blocks.any()


def test_a_piece_that_goes_after_it_was_found_is_not_in_the_hit(
    cache: Cache,
) -> None:
    """What is found and then evicted is validated after the copy, as every chunk."""
    tokens = prompt(6)
    stored(cache, tokens)
    remove(cache, tokens, {1})
    found = cache.lookup(tokens, pieces=True)
    assert found.runs()[1] == (32, 96)
    remove(cache, tokens, {4})
    kv = blank(tokens)
    start, stop = found.runs()[1]
    part = cache.retrieve(
        tokens[:stop], kv.transfer, start_tokens=start, counted=False
    )
    assert part.start_tokens == 32
    assert part.stop_tokens == 64
    assert part.reason is Reason.REMOVED


def test_pieces_of_the_middle_of_a_prompt(cache: Cache) -> None:
    tokens = prompt(8)
    stored(cache, tokens)
    remove(cache, tokens, {1, 4, 6})
    hit = cache.lookup(tokens, pieces=True, start_tokens=3 * CHUNK)
    assert hit.num_tokens == CHUNK
    assert hit.start_tokens == 3 * CHUNK
    assert hit.runs() == [(48, 64), (80, 96), (112, 128)]
    keys = keys_of(cache, tokens)
    by_key = cache.lookup(None, pieces=True, keys=keys)
    assert by_key.pieces == cache.lookup(tokens, pieces=True).pieces


def test_futures_and_awaited_calls_have_pieces_too(cache: Cache) -> None:
    tokens = prompt(6)
    stored(cache, tokens)
    remove(cache, tokens, {2})
    want = cache.lookup(tokens, pieces=True).pieces
    kv = blank(tokens)
    assert cache.lookup_future(tokens, pieces=True).result(30).pieces == want
    loading = cache.retrieve_future(tokens, kv.transfer, pieces=True)
    assert loading.result(30).pieces == want
    check_bytes(kv, tokens, loading.result())

    async def both() -> list[Hit]:
        found = await cache.alookup(tokens, pieces=True)
        return [
            found,
            await cache.aretrieve(tokens, kv.transfer, pieces=True),
        ]

    assert [hit.pieces for hit in asyncio.run(both())] == [want, want]


def test_a_number_leaves_shorter_runs_out(cache: Cache) -> None:
    tokens = prompt(8)
    stored(cache, tokens)
    remove(cache, tokens, {1, 3, 6})
    here = ["host", "", "", "", "host", "host", "", ""]
    hit = cache.lookup(tokens, pieces=2 * CHUNK)
    assert hit.pieces == pieces_of(here)


def test_nothing_is_asked_of_a_closed_cache(cache: Cache) -> None:
    tokens = prompt(4)
    stored(cache, tokens)
    cache.close()
    assert cache.lookup(tokens, pieces=True).pieces == ()
    hit = cache.retrieve(tokens, blank(tokens).transfer, pieces=True)
    assert hit.pieces == ()
    assert hit.reason == Reason.CLOSED


def test_a_call_that_is_cancelled_loads_no_further_piece(
    asked: tuple[Cache, AskedDisk],
) -> None:
    cache, disk = asked
    tokens = prompt(9)
    stored(cache, tokens)
    remove(cache, tokens, set(range(9)), "host")
    remove(cache, tokens, set(range(0, 9, 2)), "disk")
    disk.stops = True
    call = cache._retrieve_call(
        tokens, blank(tokens).transfer, True, {}, pieces=True
    )
    threading.Timer(0.05, call.cancel).start()
    assert call.run().loaded == 0
    assert disk.loads == 1


@pytest.mark.parametrize("wrong", [-1, 1.5, "16", None, [16], float("nan")])
def test_a_wrong_number_of_tokens_is_refused(wrong: object, cache: Cache) -> None:
    tokens = prompt(3)
    kv = blank(tokens).transfer
    said = "pass True for all, or the fewest tokens of a piece"
    with pytest.raises(ValueError, match=said):
        cache.lookup(tokens, pieces=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=said):
        cache.retrieve(tokens, kv, pieces=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=said):
        cache.retrieve_future(tokens, kv, pieces=wrong)  # type: ignore[arg-type]
    assert counters_of(cache)["lookups"] == 0


def test_a_number_may_be_of_any_kind_of_integer(cache: Cache) -> None:
    tokens = prompt(5)
    stored(cache, tokens)
    remove(cache, tokens, {1})
    assert cache.lookup(tokens, pieces=np.int64(32)).loaded == 4 * CHUNK
    assert cache.lookup(tokens, pieces=np.int64(64)).loaded == CHUNK


@pytest.mark.parametrize("leading", [0, 1, 2, 3])
def test_a_leading_part_below_the_minimum_does_not_hide_pieces(
    leading: int, shm_root: Path
) -> None:
    tokens = prompt(12)
    with cache_at(shm_root, None, min_hit_tokens=3 * CHUNK) as cache:
        stored(cache, tokens)
        remove(cache, tokens, {leading, 9})
        here = [leading == 3] * leading + [False] + [True] * (8 - leading)
        want = pieces_of(["host" if at else "" for at in [*here, False]])
        hit = cache.lookup(tokens, pieces=True)
        assert hit.pieces == want
        kv = blank(tokens)
        loaded = cache.retrieve(tokens, kv.transfer, pieces=True)
        assert loaded.pieces == want
        check_bytes(kv, tokens, loaded)
        for each in (hit, loaded):
            assert each.num_tokens == (3 * CHUNK if leading == 3 else 0)
            assert each.loaded == sum(here) * CHUNK
            below = each.reason is Reason.BELOW_MINIMUM
            assert below == (leading in (1, 2))
        counters = counters_of(cache)
        assert counters["lookups"] == 2
        assert counters["hit_tokens"] == hit.loaded + loaded.loaded
