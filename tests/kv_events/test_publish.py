"""`Cache.publish_events` over real sockets and tiers: what routers believe is what the ledgers
hold.
"""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
import zmq

from pagoda.base.errors import ClosedError, ConfigError
from pagoda.cache import Cache
from pagoda.cache.request_events import _note_of
from pagoda.keys import Item, Namespace
from pagoda.kv_events.event_types import BlockRemoved
from pagoda.kv_events.publisher import EventPublisher
from pagoda.ledger import admin
from testbed.patience import Patience, wait_until
from testbed.servers import free_port
from tests.cache import kit
from tests.cache.kit import (
    CHUNK,
    LAYOUT,
    NAMESPACE,
    SPAWN,
    cache_at,
    prompt,
    stored,
)
from tests.kv_events.router import MEDIA, Router

ANY = "tcp://127.0.0.1:*"


@pytest.fixture
def cache(shm_root: Path) -> Iterator[Cache]:
    with cache_at(shm_root, None) as cache:
        yield cache


def views(cache: Cache) -> dict[str, set[int]]:
    """Return what the ledgers hold, as events name it."""
    return {
        MEDIA[tier]: {
            int.from_bytes(row.key[-8:], "big")
            for row in admin.list_chunks(ledger)
        }
        for tier, ledger in cache._tiers.ledgers()
    }


def wait_believed(router: Router, tokens: np.ndarray, chunks: int) -> None:
    """Wait until a router believes that host memory has so many chunks."""
    wait_until(lambda: router.believes(tokens, "CPU") == chunks)


def test_what_is_stored_and_cleared_is_published(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(5.5)
    with cache_at(shm_root, tmp_path) as cache:
        router = Router(cache.publish_events(ANY, topic="kv"), "kv")
        stored(cache, tokens)
        for medium in MEDIA.values():
            wait_until(lambda medium=medium: router.believes(tokens, medium) == 5)  # type: ignore[misc]
        assert views(cache) == router.held
        cache.clear()
        wait_until(
            lambda: (
                router.believes(tokens, "CPU")
                == router.believes(tokens, "STORAGE")
                == 0
            )
        )
        assert router.numbers == sorted(set(router.numbers))
        router.close()


@pytest.mark.slow
def test_all_that_is_there_is_published_to_who_comes_later_and_by_a_restarted_engine(
    shm_root: Path, tmp_path: Path
) -> None:
    first = prompt(5, 1)
    second = prompt(3, 2)
    with cache_at(shm_root, tmp_path) as cache:
        early = Router(cache.publish_events(ANY))
        stored(cache, first)
        wait_until(lambda: early.believes(first, "STORAGE") == 5)
        late = Router(cache._resources.events.endpoint)  # type: ignore[union-attr]
        wait_until(
            lambda: (
                late.believes(first, "CPU")
                == late.believes(first, "STORAGE")
                == 5
            )
        )
        last = max(early.numbers)
        early.close(), late.close()
    with cache_at(shm_root, tmp_path) as cache:
        router = Router(cache.publish_events(ANY))
        wait_until(
            lambda: (
                router.believes(first, "CPU")
                == router.believes(first, "STORAGE")
                == 5
            )
        )
        stored(cache, second)
        wait_believed(router, second, 3)
        assert min(router.numbers) > last
        router.close()


def test_chunks_of_other_processes_are_published_once_a_request_has_found_them(
    shm_root: Path,
) -> None:
    tokens = prompt(4)
    with cache_at(shm_root, None) as cache, cache_at(shm_root, None) as other:
        router = Router(cache.publish_events(ANY))
        stored(other, tokens)
        assert cache.lookup(tokens).num_tokens == 4 * CHUNK
        wait_believed(router, tokens, 4)
        other.clear()
        wait_believed(router, tokens, 0)
        router.close()


def live(host: Path, disk: Path, seed: int) -> None:
    """Store, look up and clear prompts that share prefixes, more than the tiers hold."""
    random = Random(seed)
    with cache_at(host, disk) as cache:
        for _ in range(60):
            tokens = prompt(24, random.randrange(12))[
                : random.randrange(1, 25) * CHUNK
            ]
            cache.store(tokens, kit.kv_of(tokens).transfer)
            if random.random() < 0.05:
                cache.clear()
        cache.flush(60)


@pytest.mark.slow
def test_after_random_stores_evictions_and_clears_the_router_has_the_ledgers_view(
    shm_root: Path, tmp_path: Path
) -> None:
    random = Random(7)
    with cache_at(shm_root, tmp_path) as cache:
        router = Router(cache.publish_events(ANY))
        others = [
            SPAWN.Process(target=live, args=(shm_root, tmp_path, seed))
            for seed in range(2)
        ]
        for other in others:
            other.start()
        while any(other.is_alive() for other in others):
            tokens = prompt(24, random.randrange(12))
            cache.lookup(tokens)
            if random.random() < 0.3:
                cache.store(tokens, kit.kv_of(tokens).transfer)
            router.receive()
        assert [other.exitcode for other in others] == [0, 0]
        cache.flush(60)
        # what others stored is published when it is found
        for seed in range(12):
            cache.lookup(prompt(24, seed))
            cache.lookup(prompt(24, seed), tiers=["disk"])

        def same() -> bool:
            router.receive()
            return router.held == views(cache)

        wait_until(same)
        assert sum(map(len, router.held.values())) > 50
        router.close()


def test_of_a_tenant_no_tokens_are_published_and_of_an_adapter_its_name(
    cache: Cache,
) -> None:
    tokens = prompt(3)
    router = Router(cache.publish_events(ANY))
    for options in ({"salt": "a tenant"}, {"lora": "an adapter"}):
        stored(cache, tokens, **options)
    wait_until(lambda: router.receive() or len(router.held["CPU"]) == 6)  # type: ignore[func-returns-value]
    stored_events = [
        event for event in router.events if event["type"] == "BlockStored"
    ]
    assert {
        (bool(event["token_ids"]), event["lora_name"]) for event in stored_events
    } == {
        (False, None),
        (True, "an adapter"),
    }
    notes = b"".join(
        path.read_bytes()
        for path in cache._tiers.ledgers()[0][1].directory.glob("notes*")
    )
    assert tokens[:CHUNK].tobytes() in notes
    assert b"a tenant" not in notes
    router.close()


def test_what_is_removed_or_cleared_leaves_no_tokens_beside_any_tier(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(3, 1)
    tenant = prompt(3, 2)
    with cache_at(shm_root, tmp_path) as cache:
        router = Router(cache.publish_events(ANY))
        stored(cache, tokens)
        stored(cache, tenant, lora="an adapter")

        def kept() -> list[int]:
            """Of which chunks of both prompts the tokens are beside each tier."""
            files = [
                ledger.directory / "notes" for _, ledger in cache._tiers.ledgers()
            ]
            notes = [
                file.read_bytes() if file.exists() else b"" for file in files
            ]
            chunks = [
                one[at : at + CHUNK].tobytes()
                for one in (tokens, tenant)
                for at in (0, CHUNK, 2 * CHUNK)
            ]
            return [sum(chunk in each for each in notes) for chunk in chunks]

        wait_until(lambda: kept() == [2, 2, 2, 2, 2, 2])
        for _, ledger in cache._tiers.ledgers():
            assert admin.remove(ledger, [cache.keys(tokens)[2][-1]]) == 1
        assert kept() == [2, 2, 0, 2, 2, 2]
        wait_until(
            lambda: (
                router.believes(tokens, "CPU")
                == router.believes(tokens, "STORAGE")
                == 2
            )
        )
        cache.clear()
        assert kept() == [0, 0, 0, 2, 2, 2]
        cache.clear(everything=True)
        assert kept() == [0, 0, 0, 0, 0, 0]
        router.close()


def test_each_event_names_the_chunk_before_its_first_one(shm_root: Path) -> None:
    """The first chunk has none; one in the middle names it although another event published it, or
    it was evicted.
    """
    tokens = prompt(6)
    with cache_at(shm_root, None) as cache:
        names = [
            int.from_bytes(key[-8:], "big") for key in kit.keys_of(cache, tokens)
        ]
        router = Router(cache.publish_events(ANY))
        stored(cache, tokens[: 2 * CHUNK])
        wait_believed(router, tokens, 2)
        stored(cache, tokens)
        wait_believed(router, tokens, 6)
        before = dict(zip(names, [None, *names], strict=False))
        assert parents(router).items() <= before.items()
        ((_, ledger),) = cache._tiers.ledgers()
        assert (
            admin.remove(ledger, [kit.keys_of(cache, tokens)[n] for n in (0, 3)])
            == 2
        )
        router.close()
    with cache_at(shm_root, None) as cache:  # what it knows is beside the chunks
        router = Router(cache.publish_events(ANY))
        wait_until(lambda: router.receive() or len(router.held["CPU"]) == 4)  # type: ignore[func-returns-value]
        assert parents(router) == {names[1]: names[0], names[4]: names[3]}
        router.close()


def parents(router: Router) -> dict[object, object]:
    """Return what the events said that is before the first block of each."""
    published = (
        event for event in router.events if event["type"] == "BlockStored"
    )
    return {
        event["block_hashes"][0]: event["parent_block_hash"]
        for event in published
    }  # type: ignore[index]


def test_a_prompt_with_an_image_is_not_published(cache: Cache) -> None:
    tokens = prompt(3)
    router = Router(cache.publish_events(ANY))
    stored(
        cache, tokens, items=[Item(start=CHUNK, stop=CHUNK + 4, digest=b"i" * 32)]
    )
    other = prompt(2, 5)
    stored(cache, other)
    wait_believed(router, other, 2)
    assert router.believes(tokens, "CPU") == 0
    assert len(router.held["CPU"]) == 2
    router.close()


def all_is_taken_back(router: Router, tokens: np.ndarray) -> None:
    """For good, not only until all is published once more to a router that has come."""
    since = time.monotonic()
    until = since + 20.0
    while time.monotonic() < since + 0.5:
        if router.believes(tokens, "CPU"):
            since = time.monotonic()
            assert since < until, "chunks of other weights are still published"
        time.sleep(0.005)


@pytest.mark.slow
def test_other_weights_take_all_back(cache: Cache) -> None:
    tokens = prompt(3)
    router = Router(cache.publish_events(ANY))
    stored(cache, tokens)
    wait_believed(router, tokens, 3)
    cache.weights_changed()
    all_is_taken_back(router, tokens)
    stored(cache, tokens)
    wait_believed(router, tokens, 3)
    router.close()


@pytest.mark.slow
def test_weights_that_another_process_has_changed_take_all_back_without_a_request(
    cache: Cache, shm_root: Path
) -> None:
    tokens = prompt(3)
    router = Router(cache.publish_events(ANY))
    stored(cache, tokens)
    wait_believed(router, tokens, 3)
    with cache_at(shm_root, None) as other:
        other.weights_changed()
    all_is_taken_back(router, tokens)
    router.close()


@pytest.mark.slow
def test_a_store_that_was_replaced_under_the_cache_is_credited_as_it_hits(
    shm_root: Path,
) -> None:
    """A process whose store was replaced leaves it within a second or so: then nothing of it
    hits.
    """
    tokens = prompt(3)
    with cache_at(shm_root, None) as cache:
        router = Router(cache.publish_events(ANY))
        stored(cache, tokens)
        wait_believed(router, tokens, 3)
        ledger = cache._tiers.ledgers()[0][1]
        found = ledger.match_prefix(
            [key for *_, key in cache.keys(tokens)], touch=False
        )
        assert (
            ledger.is_ready(found.slots, found.generations).tolist() == [True] * 3
        )
        shutil.rmtree(shm_root / "host")
        with SPAWN.Pool(1) as pool:
            pool.apply(other_store, (shm_root, 8))
        wait_until(lambda: cache.lookup(tokens).num_tokens == 0)
        assert not ledger.is_ready(found.slots, found.generations).any()
        wait_believed(router, tokens, 0)
        all_is_taken_back(router, tokens)
        router.close()


def other_store(host: Path, chunks: int) -> None:
    with cache_at(host, None) as cache:
        stored(cache, prompt(chunks, 9))


def test_what_was_requested_before_the_weights_changed_is_not_published_afterwards(
    cache: Cache,
) -> None:
    tokens = prompt(3, 1)
    later = prompt(2, 2)
    router = Router(cache.publish_events(ANY))
    stored(cache, tokens)
    wait_believed(router, tokens, 3)
    # by another thread, which goes on after the change
    asked = cache._checked(tokens, {})
    cache.weights_changed()
    assert cache._resources.events is not None
    cache._resources.events.heard(asked, None)
    stored(cache, later)
    wait_believed(router, later, 2)
    assert router.believes(tokens, "CPU") == 0
    router.close()


def test_what_is_noted_after_the_weights_changed_is_not_published(
    cache: Cache,
) -> None:
    """Its namespace was found before, on another thread, and the reporting thread has followed the
    weights since.
    """
    tokens = prompt(3, 1)
    later = prompt(2, 2)
    last = prompt(2, 3)
    router = Router(cache.publish_events(ANY))
    stored(cache, tokens)
    wait_believed(router, tokens, 3)
    events = cache._resources.events
    assert events is not None
    assert events._stored is not None
    asked = cache._checked(tokens, {})
    present = events._scope()[0].root
    cache.weights_changed()
    stored(cache, later)
    wait_until(
        lambda: (
            router.believes(later, "CPU") == 2
            and not router.believes(tokens, "CPU")
        )
    )
    keys = [*asked.head, *asked.keys]
    events._stored.found(
        partial(_note_of, asked, keys), asked.namespace.root, present, 0, keys
    )
    stored(cache, last)
    wait_believed(router, last, 2)
    assert router.believes(tokens, "CPU") == 0
    router.close()


@pytest.mark.slow
def test_what_cannot_work_is_refused_with_its_remedy(
    cache: Cache, shm_root: Path
) -> None:
    endpoint = cache.publish_events(f"tcp://127.0.0.1:{free_port()}")
    with pytest.raises(ValueError, match="already"):
        cache.publish_events(ANY)
    with cache_at(shm_root, None) as other:
        with pytest.raises(ConfigError, match=r"in use.*choose another"):
            other.publish_events(endpoint)
        for wrong in ("5557", "tcp://203.0.113.1:5557", "http://*:1", ""):
            with pytest.raises(ConfigError, match="choose another"):
                other.publish_events(wrong)
        assert other.publish_events(ANY) != endpoint
    without = Cache(
        kit.config_of(None, None), namespace=NAMESPACE, layout=LAYOUT, tiers=[]
    )
    with without, pytest.raises(ConfigError, match="set host_size"):
        without.publish_events(ANY)


def test_the_port_is_free_once_the_cache_is_closed(shm_root: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    for _ in range(3):
        with cache_at(shm_root, None) as cache:
            assert cache.publish_events(endpoint) == endpoint


def test_a_cache_that_is_dropped_or_closed_publishes_nothing_more(
    shm_root: Path,
) -> None:
    cache = Cache(
        kit.config_of(shm_root, None), namespace=NAMESPACE, layout=LAYOUT
    )
    endpoint = cache.publish_events(ANY)
    del cache
    gc.collect()
    with cache_at(shm_root, None) as other:
        assert other.publish_events(endpoint) == endpoint
    with pytest.raises(ClosedError):
        other.publish_events(ANY)


def test_a_forked_child_stores_and_leaves_publishing_to_its_parent(
    cache: Cache,
) -> None:
    first = prompt(3, 1)
    second = prompt(3, 2)
    router = Router(cache.publish_events(ANY))
    stored(cache, first)
    wait_believed(router, first, 3)
    if not (child := os.fork()):
        stored(cache, second)
        cache.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert cache.lookup(second).num_tokens == 3 * CHUNK
    wait_believed(router, second, 3)
    router.close()


def test_a_router_that_reads_nothing_keeps_nobody_waiting(cache: Cache) -> None:
    stuck = zmq.Context.instance().socket(zmq.SUB)
    stuck.setsockopt(zmq.RCVHWM, 1)
    stuck.setsockopt(zmq.LINGER, 0)
    endpoint = cache.publish_events(ANY)
    stuck.connect(endpoint)
    stuck.subscribe("")
    router = Router(endpoint)
    patience = Patience(60.0)
    for seed in range(40):
        stored(cache, prompt(8, seed))
    wait_believed(router, prompt(8, 39), 8)
    assert not patience.ended, patience.said()
    stuck.close(), router.close()


@pytest.mark.slow
def test_a_router_that_reads_nothing_costs_a_bounded_amount_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "pagoda.kv_events.event_socket.MOST_BEHIND_BYTES", 16 << 20
    )
    message = 1 << 16
    publisher = EventPublisher(ANY)
    with zmq.Context() as context, context.socket(zmq.SUB) as stuck:
        stuck.setsockopt(zmq.RCVHWM, 1)
        stuck.setsockopt(zmq.LINGER, 0)
        stuck.connect(publisher.endpoint)
        stuck.subscribe("")
        wait_until(publisher.newcomers)
        for number in range(3000):  # 190 MiB
            publisher.send([BlockRemoved([number], "x" * message)])
        received = 0
        while stuck.poll(1000):
            stuck.recv_multipart()
            received += 1
    assert 250 <= received <= 1000  # 16 MiB, and what the kernel's buffers took
    publisher.close()


@pytest.mark.slow
def test_given_keys_and_parts_of_prompts_are_published_with_their_tokens_or_not_at_all(
    cache: Cache,
) -> None:
    tokens = prompt(4, 1)
    other = prompt(4, 2)
    router = Router(cache.publish_events(ANY))
    keys = cache.keys(other)
    # nobody says their tokens
    cache.store(None, kit.kv_of(other).transfer, keys=keys)
    cache.store(tokens, kit.kv_of(tokens).transfer)
    cache.lookup(tokens, start_tokens=2 * CHUNK)
    cache.lookup(tokens, keys=cache.keys(tokens, 2 * CHUNK))
    wait_believed(router, tokens, 4)
    assert router.believes(other, "CPU") == 0
    assert len(router.held["CPU"]) == 4
    cache.lookup(other)
    wait_believed(router, other, 4)
    router.close()


def test_of_a_namespace_with_a_salt_of_its_own_no_tokens_are_published(
    shm_root: Path,
) -> None:
    with cache_at(
        shm_root, None, namespace=Namespace("a-model", salt="theirs")
    ) as cache:
        router = Router(cache.publish_events(ANY))
        stored(cache, np.asarray(prompt(2)))
        wait_until(lambda: router.receive() or len(router.held["CPU"]) == 2)  # type: ignore[func-returns-value]
        for event in router.events:
            assert not event.get("token_ids")
        router.close()


def held_after_restart(
    host: Path, disk: Path, tokens: kit.Prompt
) -> tuple[int, int, int, int]:
    """Return what a router credits a restarted engine with, in both tiers, and what its look-ups
    find there.
    """
    with cache_at(host, disk) as cache:
        found_on_host = cache.lookup(tokens, tiers=["host"]).num_tokens // CHUNK
        found_on_disk = cache.lookup(tokens, tiers=["disk"]).num_tokens // CHUNK
    with cache_at(host, disk) as cache:
        router = Router(cache.publish_events(ANY))

        def credited() -> tuple[int, int]:
            return router.believes(tokens, "CPU"), router.believes(
                tokens, "STORAGE"
            )

        with suppress(AssertionError):
            wait_until(
                lambda: credited() == (found_on_host, found_on_disk), seconds=5
            )
        on_host, on_disk = credited()
        router.close()
    return on_host, on_disk, found_on_host, found_on_disk


def stored_and_closed(
    host: Path, disk: Path, tokens: kit.Prompt, pause_seconds: float
) -> None:
    """Store a prompt in a cache that publishes its events, and close the cache a moment later."""
    with cache_at(host, disk) as cache:
        cache.publish_events(ANY)
        cache.store(tokens, kit.kv_of(tokens).transfer)
        time.sleep(pause_seconds)


@pytest.mark.slow
@pytest.mark.parametrize("pause_seconds", [0.0, 0.02, 0.15])
def test_a_restarted_engine_publishes_what_was_stored_just_before_a_close(
    shm_root: Path, tmp_path: Path, pause_seconds: float
) -> None:
    tokens = prompt(5)
    stored_and_closed(shm_root, tmp_path, tokens, pause_seconds)
    assert held_after_restart(shm_root, tmp_path, tokens) == (5, 5, 5, 5)


@pytest.mark.soak
def test_a_router_credits_what_a_lookup_finds_after_closes_at_any_moment(
    shm_root: Path, tmp_path: Path
) -> None:
    random = Random(3)
    agreed = 0
    for number in range(50):
        host = shm_root / str(number)
        disk = tmp_path / str(number)
        tokens = prompt(random.randrange(1, 12), number)
        stored_and_closed(host, disk, tokens, random.random() * 0.4)
        on_host, on_disk, found_on_host, found_on_disk = held_after_restart(
            host, disk, tokens
        )
        assert found_on_host == len(tokens) // CHUNK
        agreed += (on_host, on_disk) == (found_on_host, found_on_disk)
    print(f"a router's credit is what a look-up finds: {agreed} of 50")
    assert agreed == 50


def test_without_a_prompt_log_a_close_leaves_no_tokens(
    shm_root: Path, tmp_path: Path
) -> None:
    tokens = prompt(3)
    with cache_at(shm_root, tmp_path, prompt_log=False) as cache:
        cache.publish_events(ANY)
        cache.store(tokens, kit.kv_of(tokens).transfer)
        directories = [ledger.directory for _, ledger in cache._tiers.ledgers()]
    for directory in directories:
        assert not (directory / "notes").exists()
