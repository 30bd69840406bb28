"""What the page is made of: figures from the counters of real caches, and the one sampling for all
readers.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from blake3 import blake3

from pagoda import Cache, Namespace
from pagoda.base.errors import StoreError
from pagoda.base.metrics import Reason
from pagoda.ledger import Ledger
from pagoda.ledger.stores_under_root import remove_store
from pagoda_tools.serve import history, live_feed
from pagoda_tools.serve.blocking_calls import BlockingCallPool
from pagoda_tools.serve.history import machine_seconds
from pagoda_tools.serve.live_feed import LiveFeed
from pagoda_tools.serve.overview import (
    MOST_NAMESPACES,
    MOST_PINS,
    MOST_REQUESTS,
    Overview,
)
from testbed.patience import wait_until
from tests.remote.chunks import PATIENT_SECONDS
from tests.serve.kit import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    SECONDS,
    dense_kv,
    tokens_of,
)


@pytest.fixture(autouse=True)
def _short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two looks make a span, however soon one follows the other."""
    monkeypatch.setattr(history, "SHORTEST_SPAN_SECONDS", 0.0)


def opened(root: Path, namespace: Namespace = NAMESPACE) -> Cache:
    return Cache(
        namespace=namespace,
        layout=LAYOUT,
        chunk_tokens=CHUNK,
        host_path=str(root),
        host_size="4MiB",
        deadline_seconds=30.0,
    )


def ledgers_of(cache: Cache) -> list[Ledger]:
    return [ledger for _, ledger in cache._tiers.ledgers()]


def test_what_was_saved_is_counted_at_the_speed_that_engines_report(
    shm_root: Path,
) -> None:
    with opened(shm_root) as cache:
        overview = Overview(lambda: ledgers_of(cache), gpu_price=3600.0)
        unknown = overview.take()["saved"]
        assert isinstance(unknown, dict)
        assert unknown["engine_seconds"] is None
        assert unknown["money"] is None
        assert unknown["engine_words"] == "nothing has hit yet"
        cache.store(tokens_of(1, 4), dense_kv(1, 4))
        assert (
            cache.retrieve(tokens_of(1, 4), dense_kv(2, 4)).num_tokens
            == 4 * CHUNK
        )
        unknown = overview.take()["saved"]
        assert isinstance(unknown, dict)
        assert unknown["engine_seconds"] is None
        assert "observe_prefill" in str(unknown["engine_words"])
        cache.observe_prefill(1000, 2.0)
        known = overview.take()["saved"]
        assert isinstance(known, dict)
        assert (
            known["engine_seconds"]
            == known["money"]
            == pytest.approx(4 * CHUNK / 500)
        )
        (model,) = overview.take()["models"]  # type: ignore[misc, attr-defined]
        assert model["model"] == NAMESPACE.model
        assert model["loaded_tokens"] == 4 * CHUNK
        assert model["saved_seconds"] == pytest.approx(
            known["first_token_seconds"], abs=1e-5
        )
        (tenant,) = overview.take()["tenants"]  # type: ignore[misc, attr-defined]
        assert tenant["tenant"] == "none"
        # the time to load
        assert 0 < known["engine_seconds"] - known["first_token_seconds"] < 1.0


def test_every_reason_is_shown(shm_root: Path) -> None:
    with opened(shm_root) as cache:
        ledgers_of(cache)[0].count(
            {
                f"{kind}_{reason}": 1
                for kind in ("miss", "drop")
                for reason in Reason
            }
        )
        shown = Overview(lambda: ledgers_of(cache)).take()
        assert (
            shown["misses"]
            == shown["drops"]
            == dict.fromkeys(map(str, Reason), 1)
        )


def test_a_sample_has_what_happened_between_two_looks(shm_root: Path) -> None:
    with opened(shm_root) as cache:
        overview = Overview(lambda: ledgers_of(cache))
        assert overview.take()["sample"] is None
        cache.store(tokens_of(1, 2), dense_kv(1, 2))
        cache.lookup(tokens_of(1, 3))
        sample = overview.take()["sample"]
        assert isinstance(sample, dict)
        assert sample["seconds"] > 0
        assert sample["hit_tokens"] == {"host": 2 * CHUNK, "disk": 0, "remote": 0}
        assert sample["stored_bytes"] == 2 * LAYOUT.chunk_bytes
        assert sample["lookups"] == 1


def test_hits_are_of_the_tier_that_served_and_a_store_that_was_made_again_takes_none_back(
    shm_root: Path,
) -> None:
    ledgers: list[Ledger] = []
    overview = Overview(lambda: ledgers)
    with opened(shm_root) as cache:
        ledgers[:] = ledgers_of(cache)
        ledgers[0].count(
            {"hit_tokens": 9, "hit_tokens_host": 5, "hit_tokens_disk": 4}
        )
        found = overview.take()
        assert found["tiers"][0]["hit_tokens"] == 5  # type: ignore[index]
    remove_store(ledgers[0].directory)
    with opened(shm_root) as cache:
        ledgers[:] = ledgers_of(cache)
        sample = overview.take()["sample"]
        assert isinstance(sample, dict)
        assert set(sample["hit_tokens"].values()) == {0}


def test_of_many_namespaces_the_largest_are_shown_and_the_rest_is_counted(
    shm_root: Path,
) -> None:
    with opened(shm_root) as cache:
        (ledger,) = ledgers_of(cache)
        for number in range(MOST_NAMESPACES + 9):
            ledger.namespaces.register(
                blake3(b"%d" % number).digest(), {"model": f"empty {number}"}
            )
        cache.store(tokens_of(1, 1), dense_kv(1, 1))
        found = Overview(lambda: [ledger]).take()
        rows = found["namespaces"]
        assert isinstance(rows, list)
        assert len(rows) == MOST_NAMESPACES
        assert found["more_namespaces"] == 10
        assert rows[0]["fields"]["model"] == "served"
        assert rows[0]["chunks"] == {"host": 1}


def test_the_last_requests_of_all_stores_have_their_model_and_the_reason(
    shm_root: Path,
) -> None:
    other = Namespace("another", salt="a secret")
    with (
        opened(shm_root / "one") as cache,
        opened(shm_root / "two", other) as neighbour,
    ):
        cache.store(tokens_of(1, 2), dense_kv(1, 2))
        cache.lookup(tokens_of(1, 3))
        neighbour.lookup(tokens_of(1, 1))
        overview = Overview(lambda: [*ledgers_of(cache), *ledgers_of(neighbour)])
        requests = overview.take()["requests"]
        assert isinstance(requests, list)
        last, first = requests
        assert first["asked_tokens"] == 3 * CHUNK
        assert first["reason"] == "absent"
        assert first["pid"] == os.getpid()
        assert first["hit_tokens"] == {"host": 2 * CHUNK, "disk": 0, "remote": 0}
        assert cache.namespace.root.hex().startswith(first["namespace"])
        assert first["fields"]["model"] == "served"
        assert last["fields"]["model"] == "another"
        assert "a secret" not in json.dumps(requests)
        for _ in range(2 * MOST_REQUESTS):
            neighbour.lookup(tokens_of(1, 1))
        requests = overview.take()["requests"]
        assert isinstance(requests, list)
        assert len(requests) == MOST_REQUESTS
        # the last ones, not some of each
        assert {one["fields"]["model"] for one in requests} == {"another"}


def test_however_many_own_pins_some_are_shown_and_the_rest_is_counted(
    shm_root: Path,
) -> None:
    with opened(shm_root) as cache:
        cache.store(tokens_of(1, 4), dense_kv(1, 4))
        for number in range(MOST_PINS + 7):
            cache.pin(tokens_of(1, 1), owner=f"owner {number}")
        cache.pin(tokens_of(1, 4), owner="the largest")
        found = Overview(lambda: ledgers_of(cache)).take()
        pins = found["pins"]
        assert isinstance(pins, list)
        assert len(pins) == MOST_PINS
        assert found["more_pins"] == 8
        assert pins[0] == {"tier": "host", "owner": "the largest", "chunks": 4}


def test_a_store_that_cannot_be_read_is_named_and_the_others_are_shown(
    shm_root: Path,
) -> None:
    with opened(shm_root / "good") as cache:
        other = opened(shm_root / "other")
        broken = ledgers_of(other)[0]
        other.close()
        found = Overview(lambda: [*ledgers_of(cache), broken]).take()
        assert len(found["tiers"]) == 1  # type: ignore[arg-type]
        assert len(found["troubles"]) == 1  # type: ignore[arg-type]


def test_remote_tiers_are_asked_now_and_then_only(shm_root: Path) -> None:
    from pagoda_tools.serve.overview import RemoteUsage

    asked = []

    def remotes() -> list[RemoteUsage]:
        asked.append(1)
        return [
            RemoteUsage("redis", "redis://a", 5, 10, ""),
            RemoteUsage("s3", "s3://b", None, None, "refused"),
        ]

    overview = Overview(list, remotes)
    first = overview.take()["tiers"]
    second = overview.take()["tiers"]
    ages = [
        [tier.pop("answered_seconds_ago") for tier in tiers]  # type: ignore[attr-defined]
        for tiers in (first, second)
    ]
    assert first == second
    assert 0 <= ages[0][0] < ages[1][0]
    assert len(asked) == 1
    redis, s3 = first  # type: ignore[misc]
    assert redis["used_bytes"] == 5
    assert redis["size_bytes"] == 10
    assert redis["hit_tokens"] is None
    assert s3["trouble"] == "refused"


def test_a_remote_that_does_not_answer_delays_and_changes_nothing_of_the_rest(
    shm_root: Path,
) -> None:
    from pagoda_tools.serve.overview import RemoteUsage

    answering = threading.Event()

    def remotes() -> list[RemoteUsage]:
        answering.wait(30)
        return [RemoteUsage("redis", "redis://a", 5, 10, "")]

    with opened(shm_root) as cache:
        overview = Overview(lambda: ledgers_of(cache), remotes)
        for _ in range(2):
            found = overview.take()
            assert not answering.is_set()
            assert not found["troubles"]
            assert [tier["kind"] for tier in found["tiers"]] == ["host"]  # type: ignore[attr-defined]
        answering.set()
        wait_until(lambda: len(overview.take()["tiers"]) == 2)  # type: ignore[arg-type]


def test_while_nobody_looks_only_counters_are_read_and_the_history_has_no_hole(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_feed, "PERIOD_SECONDS", 0.01)
    with opened(shm_root) as cache:
        overview = Overview(lambda: ledgers_of(cache))
        taken: list[int] = []
        take = overview.take

        def counted_take() -> dict[str, object]:
            taken.append(1)
            return take()

        overview.take = counted_take  # type: ignore[method-assign]

        async def look() -> None:
            calls = BlockingCallPool()
            feed = LiveFeed(overview, calls)
            feed.start()
            async with asyncio.timeout(SECONDS / 3):
                while len(overview.history.seconds) < 5:
                    await asyncio.sleep(0.01)
                assert not taken
                cache.store(tokens_of(1, 1), dense_kv(1, 1))
                while not overview.history.recent(machine_seconds()).counts[
                    "stored_bytes"
                ]:
                    await asyncio.sleep(0.01)
            async with feed.reader() as queue:
                event = await queue.get()
                assert event is not None
                spans = json.loads(event.partition(b"data: ")[2])["history"]
                assert sum(one["stored_bytes"] for one in spans) == (
                    LAYOUT.chunk_bytes
                )
                for _ in range(3):
                    await queue.get()
            for before, after in pairwise(overview.history.seconds):
                assert after.begin == pytest.approx(before.end, abs=1e-6)
            feed.close()
            calls.close()

        asyncio.run(look())


@pytest.mark.slow
def test_a_reader_gets_every_span_although_others_ask_for_figures_too(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poller of /stats.json, and a second page."""
    monkeypatch.setattr(live_feed, "PERIOD_SECONDS", 0.1)
    monkeypatch.setattr(live_feed, "_FRESH_SECONDS", 0.01)

    async def polled(feed: LiveFeed) -> None:
        while True:
            await feed.latest()
            await asyncio.sleep(0.01)

    async def look() -> None:
        calls = BlockingCallPool()
        overview = Overview(lambda: ledgers_of(cache))
        feed = LiveFeed(overview, calls)
        feed.start()
        poller = asyncio.create_task(polled(feed))
        spans = []
        async with asyncio.timeout(SECONDS), feed.reader() as queue:
            for _ in range(10):
                event = await queue.get()
                assert event is not None
                said = json.loads(event.partition(b"data: ")[2])
                spans += said["history"] if "history" in said else said["spans"]
        # the first may be sent twice: in the history, and after it
        ends = sorted({one["end"] for one in spans})
        taken = [one.end for one in overview.history.seconds]
        assert ends == taken[: len(ends)]
        assert len(ends) > 10
        poller.cancel()
        feed.close()
        calls.close()

    with opened(shm_root) as cache:
        asyncio.run(look())


def test_the_first_event_of_every_reader_is_the_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of one that comes while the stores are read for others."""
    monkeypatch.setattr(live_feed, "PERIOD_SECONDS", 0.01)

    def slow() -> list[Ledger]:
        time.sleep(0.05)
        return []

    async def look() -> None:
        calls = BlockingCallPool()
        feed = LiveFeed(Overview(slow), calls)
        feed.start()
        for _ in range(10):
            # in the middle of a reading
            await asyncio.sleep(0.03)
            async with feed.reader() as queue:
                event = await queue.get()
                assert event is not None
                assert b'"history":' in event
        async with feed.reader() as last:
            feed.close()
        async with feed.reader() as late:
            assert late.get_nowait() is not None
            assert late.get_nowait() is None
        assert last.get_nowait() is None
        calls.close()

    asyncio.run(look())


@pytest.mark.slow
def test_events_come_every_second_however_long_the_stores_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The page takes figures of three seconds ago for old ones."""
    monkeypatch.setattr(live_feed, "PERIOD_SECONDS", 0.5)
    begun: list[float] = []

    def slow() -> list[Ledger]:
        begun.append(machine_seconds())
        time.sleep(0.5)  # as long as locks are waited for
        return []

    async def look() -> None:
        calls = BlockingCallPool()
        feed = LiveFeed(Overview(slow), calls)
        async with feed.reader() as queue:
            await queue.get()
            feed.start()
            for _ in range(4):
                await queue.get()
        feed.close()
        calls.close()

    asyncio.run(look())
    # the first one waits for the period
    pauses = [after - before for before, after in pairwise(begun[1:])]
    assert min(pauses) < 0.9


def test_slow_readers_are_dropped(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_feed, "PERIOD_SECONDS", 0.01)
    with opened(shm_root) as cache:

        async def look() -> None:
            calls = BlockingCallPool()
            feed = LiveFeed(Overview(lambda: ledgers_of(cache)), calls)
            feed.start()
            async with feed.reader() as slow, feed.reader() as quick:
                events = 0
                # until the feed has given it up
                while slow.qsize() or events < 2:
                    event = await asyncio.wait_for(quick.get(), 10)
                    assert event is not None
                    assert event.startswith(b"event: snapshot\ndata: {")
                    events += 1
                    assert events < 200, "it is never given up"
                    if slow.qsize() == 1 and slow._queue[0] is None:  # type: ignore[attr-defined]
                        break
                assert await slow.get() is None
                assert events >= 4
            feed.close()
            calls.close()

        asyncio.run(look())


def test_stores_that_do_not_answer_are_said_to_the_readers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_feed, "PERIOD_SECONDS", 0.01)
    hanging = threading.Event()
    free = threading.Event()

    def ledgers() -> list[Ledger]:
        if hanging.is_set():
            free.wait(100)
        return []

    async def look() -> None:
        calls = BlockingCallPool()
        feed = LiveFeed(Overview(ledgers), calls)
        feed.start()
        async with feed.reader() as queue:
            await queue.get()
            monkeypatch.setattr(live_feed, "_PATIENCE_SECONDS", 0.1)
            hanging.set()
            while b"look for a stopped process" not in (
                await asyncio.wait_for(queue.get(), 60) or b""
            ):
                pass
            # a busy machine looks longer than that at stores that answer
            monkeypatch.setattr(live_feed, "_PATIENCE_SECONDS", 60.0)
            hanging.clear()
            free.set()
            while b"look for a stopped process" in (
                await asyncio.wait_for(queue.get(), 60) or b""
            ):
                pass
        feed.close()
        calls.close()

    asyncio.run(look())


def test_a_feed_ends_whenever_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in the moment in which its stores have answered."""
    monkeypatch.setattr(live_feed, "PERIOD_SECONDS", 0.0)
    steps = random.Random(1)

    async def closed(calls: BlockingCallPool) -> None:
        feed = LiveFeed(Overview(list), calls)
        feed.start()
        for _ in range(steps.randrange(1, 40)):
            await asyncio.sleep(0)
        feed.close()
        sampler = feed._sampler
        assert sampler is not None
        await asyncio.wait([sampler], timeout=PATIENT_SECONDS)
        assert sampler.cancelled()

    async def many() -> None:
        calls = BlockingCallPool()
        try:
            for _ in range(400):
                await closed(calls)
        finally:
            calls.close()

    asyncio.run(many())


def test_a_server_that_has_no_thread_left_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_feed, "PERIOD_SECONDS", 0.01)
    free = threading.Event()

    async def look() -> None:
        calls = BlockingCallPool(threads=1, most_waiting=0)
        feed = LiveFeed(Overview(list), calls)
        feed.start()
        async with feed.reader() as queue:
            await queue.get()
            held = asyncio.ensure_future(calls.run(free.wait, 60))
            while b"too many requests wait" not in (
                await asyncio.wait_for(queue.get(), 60) or b""
            ):
                pass
            free.set()
            await held
        feed.close()
        calls.close()

    asyncio.run(look())


@pytest.mark.parametrize("error", [ValueError, StoreError, OSError, MemoryError])
def test_a_stream_goes_on_whatever_is_wrong_with_a_store(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    monkeypatch.setattr(live_feed, "PERIOD_SECONDS", 0.01)
    damaged = threading.Event()

    def ledgers() -> list[Ledger]:
        if damaged.is_set():
            raise error("a damaged label")
        return []

    async def look() -> None:
        calls = BlockingCallPool()
        feed = LiveFeed(Overview(ledgers), calls)
        feed.start()
        async with feed.reader() as queue:
            await queue.get()
            damaged.set()
            while b"a damaged label" not in (
                await asyncio.wait_for(queue.get(), 60) or b""
            ):
                pass
            damaged.clear()
            while b"a damaged label" in (
                await asyncio.wait_for(queue.get(), 60) or b""
            ):
                pass
        feed.close()
        calls.close()

    asyncio.run(look())


def test_beside_every_sum_of_several_stores_is_the_fullest_one(
    shm_root: Path,
) -> None:
    with (
        opened(shm_root / "idle", Namespace("idle")) as idle,
        opened(shm_root / "busy", Namespace("busy")) as busy,
    ):
        ledgers = [*ledgers_of(idle), *ledgers_of(busy)]
        overview = Overview(lambda: ledgers)
        overview.take()
        slots = ledgers[1].slots
        for number in range(slots // 4 + 3):
            busy.store(tokens_of(number, 4), dense_kv(1, 4))
        (tier,) = overview.take()["tiers"]  # type: ignore[misc]
        fullest, other = tier["stores"]
        assert fullest["directory"] == str(ledgers[1].directory)
        # the same layout under two roots
        short = fullest["name"].rpartition("/")[2]
        assert (
            fullest["name"] == f"host:{ledgers[1].directory.parent.name}/{short}"
        )
        assert ledgers[1].directory.name.startswith(short)
        assert fullest["models"] == ["busy"]
        assert fullest["used_bytes"] > 0.9 * fullest["size_bytes"]
        assert fullest["evicted_per_second"] > 0
        assert other["directory"] == str(ledgers[0].directory)
        assert other["used_bytes"] == 0
        assert other["evicted_per_second"] == 0
        assert tier["used_bytes"] == fullest["used_bytes"]
        assert tier["size_bytes"] == fullest["size_bytes"] + other["size_bytes"]
        assert tier["most_bytes"] == fullest["most_bytes"] + other["most_bytes"]
        # neither grows
        assert tier["most_bytes"] == tier["size_bytes"]


def test_a_store_that_cannot_be_read_now_keeps_its_figures_and_says_how_old_they_are(
    shm_root: Path,
) -> None:
    with opened(shm_root / "one") as cache, opened(shm_root / "two") as other:
        ledgers = [*ledgers_of(cache), *ledgers_of(other)]
        overview = Overview(lambda: ledgers)
        other.store(tokens_of(1, 3), dense_kv(1, 3))
        other.lookup(tokens_of(1, 3))
        before = overview.take()
        other.close()
        after = overview.take()
        assert after["totals"] == before["totals"]
        (tier,) = after["tiers"]  # type: ignore[misc]
        assert tier["chunks"] == 3
        assert tier["stores"][0]["read_seconds_ago"] > 0
        assert tier["stores"][1]["read_seconds_ago"] is None
        (trouble,) = after["troubles"]  # type: ignore[misc]
        assert trouble.endswith("s old")
        del ledgers[1]
        assert overview.take()["tiers"][0]["chunks"] == 0  # type: ignore[index]


def test_a_store_that_cannot_be_opened_is_named() -> None:
    overview = Overview(list, unopened=lambda: {Path("/one"): "too new"})
    assert overview.take()["troubles"] == ["/one: in no figure: too new"]
