"""Routers of requests know what an engine hits: Dynamo's indexer listens to real engines through
restarts and reboots.

The indexer is the real one (`make setup-vllm` installs it); what it credits an engine with is
compared with what that engine then loads.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import zmq
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVEventBatch,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from pagoda.cache.writeback import ChunkRef
from pagoda.connectors.vllm.event_form import VLLMEventForm
from pagoda.connectors.vllm.event_publisher import EventOutlet
from pagoda.keys import derive_keys
from pagoda.kv_events.notes import BlockFacts
from pagoda.kv_events.stored_events import StoredEvents
from pagoda.ledger import Reserved, admin
from testbed.servers import free_port
from tests.cache import kit
from tests.cache.kit import cache_at
from tests.vllm import stores
from tests.vllm.engines import (
    BLOCK,
    CHUNK,
    FORKS,
    Engine,
    connector,
    loadable,
    options,
)
from tests.vllm.models import prompt
from tests.vllm.routers import SECONDS, Indexer, Service, events_at, notes_in


@pytest.fixture
def tiers(session_shm: Path, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    host = session_shm / "routers"
    disk = tmp_path / "disk"
    yield host, disk
    shutil.rmtree(host, ignore_errors=True)


Start = Callable[..., Engine]


@pytest.fixture
def start(llama: Path, logs: Path, tiers: tuple[Path, Path]) -> Iterator[Start]:
    """Starts engines that publish their events on a port; what still lives is ended."""
    begun: list[Engine] = []

    def begin(name: str, port: int, own: tuple[Path, Path] = tiers) -> Engine:
        engine = Engine(
            name,
            logs / f"{name}.log",
            **options(llama, **events_at(port)),
            **connector(*own),
        )
        begun.append(engine)
        return engine

    yield begin
    for engine in begun:
        if engine.alive():
            engine.kill()


def test_a_router_credits_what_an_engine_hits(
    start: Start, served: Callable[..., Any], tiers: tuple[Path, Path]
) -> None:
    ports = {1: free_port(), 2: free_port()}
    engines = {
        number: start(f"routed-{number}", port) for number, port in ports.items()
    }
    indexer = served(Indexer, ports)
    ours = prompt(7000, 1024)
    theirs = prompt(7001, 512 + 5)
    whole = {id(text): len(text) // CHUNK * CHUNK for text in (ours, theirs)}
    engines[1].wait_up().generate(ours)
    engines[2].wait_up().generate(theirs)
    stores.wait_ready(tiers[1], sum(whole.values()) // CHUNK)
    for number in engines:  # each may load what the other has stored
        for text in (ours, theirs):
            indexer.wait(number, text, cpu=whole[id(text)], disk=whole[id(text)])
    (answer,) = engines[2].generate(ours)
    assert answer.external == loadable(len(ours))

    engines[1].kill()  # a restart: host memory is warm
    engines[1] = start("routed-1-again", ports[1])
    engines[1].wait_up()
    indexer.wait(1, ours, cpu=1024, disk=1024)
    (answer,) = engines[1].generate(ours)
    assert answer.external == loadable(len(ours))

    for (
        number,
        engine,
    ) in engines.items():
        # with its next step it says that all is cleared, and means its own memory
        engine.reset()
        engine.generate(prompt(7002, BLOCK))
        indexer.wait(
            number, theirs, cpu=whole[id(theirs)], disk=whole[id(theirs)]
        )
    # by another process, while both engines wait for requests
    stores.clear(tiers[0])
    for number in engines:
        indexer.wait(number, theirs, cpu=0, disk=whole[id(theirs)])
    (answer,) = engines[2].generate(
        ours
    )  # from the disk: host memory has it again
    assert answer.external == loadable(len(ours))
    for number in engines:
        indexer.wait(number, ours, cpu=1024, disk=1024)
    late = served(Indexer, ports)  # a router that has received nothing yet
    began = time.monotonic()
    for number in engines:
        late.wait(number, ours, cpu=1024, disk=1024)
    print(f"credited {time.monotonic() - began:.2f} s after a router's start")

    for engine in engines.values():  # a reboot
        engine.kill()
    shutil.rmtree(tiers[0])
    engines[1] = start("routed-1-rebooted", ports[1])
    engines[1].wait_up()
    began = time.monotonic()
    indexer.wait(1, ours, cpu=0, disk=1024)
    print(f"credited {time.monotonic() - began:.2f} s after the restart")
    (answer,) = engines[1].generate(ours)
    assert answer.external == loadable(len(ours))

    engines[1].call(reset_all)  # other weights
    engines[1].generate(prompt(7003, BLOCK))
    indexer.wait(1, ours, cpu=0, disk=0)


def test_a_router_credits_a_cache_that_publishes_by_itself(
    tiers: tuple[Path, Path], served: Callable[..., Any]
) -> None:
    """Engines without events of their own: vLLM's decoder reads the messages, and the indexer
    believes them.
    """
    port = free_port()
    first = kit.prompt(6, 1)
    second = kit.prompt(4, 2)
    indexer = served(Indexer, {1: port}, kit.CHUNK)
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.subscribe(b"")
    for _ in range(2):  # the second engine finds the tiers of the first
        with cache_at(*tiers) as cache:
            subscriber.connect(cache.publish_events(f"tcp://127.0.0.1:{port}"))
            if not cache.lookup(first):
                for tokens in (first, second):
                    kit.stored(cache, tokens)
            indexer.wait(1, first.tolist(), cpu=6 * kit.CHUNK, disk=6 * kit.CHUNK)
            indexer.wait(1, second.tolist(), cpu=4 * kit.CHUNK)
            cache._tiers.ledgers()[0][1].columns.lease_until[:] = 0
    with cache_at(*tiers) as cache:
        # now, and not when it tries again
        subscriber.connect(cache.publish_events(f"tcp://127.0.0.1:{port}"))
        indexer.wait(1, first.tolist(), cpu=6 * kit.CHUNK)
        admin.clear(cache._tiers.ledgers()[0][1])
        indexer.wait(1, first.tolist(), cpu=0, disk=6 * kit.CHUNK)
        cache.clear()
        indexer.wait(1, first.tolist(), cpu=0, disk=0)
    kinds = set()
    while subscriber.poll(200):
        batch = msgspec.msgpack.decode(
            subscriber.recv_multipart()[2], type=KVEventBatch
        )
        kinds |= {type(event) for event in batch.events}
    subscriber.close()
    assert kinds == {AllBlocksCleared, BlockRemoved, BlockStored}


def test_a_conversation_that_returns_is_sent_to_the_machine_with_its_disk(
    start: Start, served: Callable[..., Any], session_shm: Path, tmp_path: Path
) -> None:
    ports = {1: free_port(), 2: free_port()}
    machines = {
        number: (session_shm / f"machine-{number}", tmp_path / f"disk-{number}")
        for number in ports
    }
    engines = {
        number: start(f"machine-{number}", ports[number], machines[number])
        for number in ports
    }
    begun = {
        number: [prompt(7100 + 10 * number + n, 512) for n in range(5)]
        for number in ports
    }
    for number, engine in engines.items():
        engine.wait_up()

        def is_stored(number: int = number, engine: Engine = engine) -> bool:
            """Say the prompts; a short one can end before all of its chunks get slots, on a busy
            machine.
            """
            engine.reset()
            engine.generate(*begun[number])
            time.sleep(0.5)
            return stores.ready(machines[number][1]) == 5 * 512 // CHUNK

        stores.wait_until(is_stored, "all prompts on the disk", SECONDS)
        (store,) = stores.stores(machines[number][1])
        noted = partial(notes_in, store)
        stores.wait_until(
            lambda noted=noted: noted() == 5 * 512 // CHUNK,
            "a note beside each chunk",
        )
        engine.kill()
        shutil.rmtree(machines[number][0])  # a reboot
    engines = {
        number: start(f"machine-{number}", ports[number], machines[number])
        for number in ports
    }
    router = served(Service, "dynamo.select_service")
    for number, port in ports.items():
        engines[number].wait_up()
        events = f"tcp://127.0.0.1:{port}"
        worker = {
            "worker_id": number,
            "endpoint": f"engine-{number}",
            "kv_events_endpoint": events,
            "block_size": BLOCK,
            "total_kv_blocks": 1000,
        }
        assert router.ask("/workers", worker)["lifecycle"] == "schedulable"

    def is_right(number: int, tokens: Sequence[int]) -> bool:
        answer = router.ask("/select", {"token_ids": [*tokens, 1, 2, 3]}) or {
            "worker_id": 0
        }
        return answer["worker_id"] == number and answer["overlap"]["disk"] == 512

    def right() -> int:
        return sum(
            is_right(number, one)
            for number, prompts in begun.items()
            for one in prompts
        )

    stores.wait_until(
        lambda: right() == 10, "the right machine for each", SECONDS
    )
    print(f"{right()} of 10 were sent to the machine that has them")
    for root, _ in machines.values():
        shutil.rmtree(root, ignore_errors=True)


@pytest.mark.slow
def test_after_random_stores_evictions_and_kills_the_router_has_the_ledgers_view(
    served: Callable[..., Any], session_shm: Path, tmp_path: Path
) -> None:
    host = session_shm / "lives"
    disk = tmp_path / "disk"
    ports = {1: free_port(), 2: free_port()}
    indexer = served(Indexer, ports)
    random = Random(11)

    FORKS.set_forkserver_preload(["tests.vllm.test_routers"])
    calm = tmp_path / "calm"
    rest = tmp_path / "rest"

    def life(number: int) -> Any:
        up = tmp_path / f"up-{random.random()}"
        process = FORKS.Process(
            target=live,
            args=(ports[number], host, disk, up, calm, rest),
            daemon=True,
        )
        process.start()
        stores.wait_until(up.exists, "a life", SECONDS)
        return process

    lives = {number: life(number) for number in ports}
    for _ in range(6):
        time.sleep(random.uniform(0.5, 1.5))
        number = random.choice([1, 2])
        lives[number].kill()
        lives[number].join(SECONDS)
        lives[number] = life(number)
    calm.touch()  # nothing is cleared any more, so something is there at the end
    time.sleep(2.0)
    rest.touch()  # no more stores

    def held() -> list[dict[str, int]]:
        """How much of each prompt the ledgers hold: in host memory, and anywhere."""
        with cache_at(host, disk) as cache:
            assert cache.slots is not None
            root = cache.slots.namespace()
            found = []
            there = {
                name: {row.key for row in admin.list_chunks(one)}
                for name, one in cache.slots.ledgers.items()
            }
            for n in range(PROMPTS):
                keys = derive_keys(request_of(n).block_hashes, root)
                upper = leading(key in there["host"] for key in keys)
                # the indexer goes down the tiers, and not up again
                lower = upper + leading(
                    key in there["disk"] for key in keys[upper:]
                )
                found.append({"cpu": BLOCK * upper, "disk": BLOCK * lower})
            return found

    def credited(number: int) -> list[dict[str, int]]:
        return [
            indexer.credit(number, list(request_of(n).all_token_ids))
            for n in range(PROMPTS)
        ]

    for number in lives:
        stores.wait_until(
            lambda number=number: credited(number) == held(),
            f"the view of {number}",
            SECONDS,
        )
    assert sum(one["disk"] for one in held()) > 20 * BLOCK
    for process in lives.values():
        process.kill()
        process.join(SECONDS)
    shutil.rmtree(host)


PROMPTS = 60


def leading(have: Iterable[bool]) -> int:
    return len(list(takewhile(bool, have)))


def request_of(number: int) -> Request:
    init_none_hash(sha256)
    # three prompts begin alike
    tokens = [number // 3 * 100_000 + n for n in range(BLOCK * (2 + number % 3))]
    tokens[BLOCK:] = [1000 * number + n for n in tokens[BLOCK:]]
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(
        f"{number}", tokens, SamplingParams(), None, block_hasher=hasher
    )


def live(
    port: int, host: Path, disk: Path, up: Path, calm: Path, rest: Path
) -> None:
    """The life of an engine, without a model: stores of random prompts, into tiers that are too
    small for all.
    """
    config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://*:{port}"
    )
    outlet = EventOutlet(config)
    EventPublisherFactory.create(config)
    random = Random(up.name)
    with cache_at(host, disk) as cache:
        slots = cache.slots
        assert slots is not None
        groups = {0: BlockFacts(BLOCK, BLOCK)}
        form = VLLMEventForm(groups, BLOCK)
        events = StoredEvents(
            slots.ledgers, slots.namespace, groups, form, outlet
        )
        events.start()
        up.touch()
        while True:
            time.sleep(random.uniform(0, 0.02))
            if rest.exists():
                continue
            request = request_of(random.randrange(PROMPTS))
            root = slots.namespace()
            keys = derive_keys(request.block_hashes, root)
            outcomes = slots.reserve(keys, namespace=root, start=0, parent=None)
            events.note(form.notes(request, root), root, root, 0, outcomes)
            done = [
                ChunkRef(
                    item.key,
                    n,
                    keys[n - 1] if n else None,
                    item.slot,
                    item.generation,
                )
                for n, item in enumerate(outcomes)
                if isinstance(item, Reserved)
            ]
            if random.random() < 0.1:
                slots.abort(
                    [Reserved(one.key, one.slot, one.generation) for one in done]
                )
            else:
                slots.commit({root: done})
            if random.random() < 0.01 and not calm.exists():
                cache.clear()


def reset_all(observed: Any) -> None:
    """Reset the engine's own cache and the connector's, as after an update of weights."""
    assert observed.llm.reset_prefix_cache(reset_connector=True)
