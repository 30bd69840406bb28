"""Both halves of the connector without an engine: real requests of vLLM, a real cache, memory whose
bytes are known.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

from pagoda.base.errors import StoreError
from pagoda.cache import Cache
from pagoda.cache.prompt_log import logged_prompts
from pagoda.connectors.vllm import lookups
from pagoda.connectors.vllm.connector import PagodaConnector
from pagoda.connectors.vllm.event_publisher import EventOutlet
from pagoda.connectors.vllm.identity.machine_facts import machine_facts
from pagoda.connectors.vllm.kv_memory import KVMemory
from pagoda.connectors.vllm.lookups import TrackedRequest
from pagoda.connectors.vllm.metadata import (
    Later,
    PagodaMetadata,
    PagodaWorkerMetadata,
    Save,
)
from pagoda.connectors.vllm.options import ConnectorOptions
from pagoda.connectors.vllm.scheduler import PagodaScheduler
from pagoda.connectors.vllm.shared_caches import let_go, opened
from pagoda.connectors.vllm.worker import PagodaWorker
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.ledger import Reserved, admin, allocation
from pagoda.ledger.request_ring import NAMESPACE_BYTES
from pagoda.transfer.gpu.device_pages_kv import DevicePagesKV
from pagoda_tools.replay import read_trace
from testbed.patience import wait_until
from tests.cache.kit import config_of
from tests.ledger.support import gate_taken
from tests.thread_limits import no_threads
from tests.vllm import models, patience

BLOCK = 4
CHUNK = 16
PAGE = 2048
BLOCKS = 256
LAYOUT = KVLayout.opaque(CHUNK, CHUNK // BLOCK * PAGE, "tests of the connector")
NAMESPACE = Namespace("a-model")


class Halves:
    """A scheduler's and a worker's half over one cache of 64 slots, and the memory of 256
    blocks.
    """

    def __init__(
        self,
        root: Path,
        on_cpu: bool = True,
        parts: int = 1,
        record: str = "",
        described: bool = True,
        outlet: EventOutlet | None = None,
        **more: Any,
    ) -> None:
        init_none_hash(sha256)
        self.options = ConnectorOptions(config_of(root, None, record=record))
        self.memory = torch.zeros(BLOCKS, PAGE, dtype=torch.int8)
        self.scheduler = PagodaScheduler(self.options, BLOCK, outlet, **more)
        self.worker = PagodaWorker(self.options, None, None)
        text = "tests of the connector"
        self.seen = KVMemory(
            [self.memory], BLOCK, BLOCKS, (PAGE,), text, parts, 0, True, on_cpu
        )
        self.worker.open_cache(self.seen, NAMESPACE)
        if described:
            self.scheduler.opened([self.worker.handshake])

    @property
    def cache(self) -> Cache:
        assert self.worker._cache is not None
        return self.worker._cache

    @property
    def host_ledger(self) -> Any:
        assert self.cache.slots is not None
        return self.cache.slots.ledgers["host"]

    def request(self, tokens: list[int], name: str, **more: Any) -> Request:
        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(
            name, tokens, SamplingParams(), None, block_hasher=hasher, **more
        )
        self.scheduler.new_request(request)
        return request

    def asked(self, request: Request, local: int = 0) -> int:
        """Return what can be loaded, as soon as it is known."""
        answers: list[int | None] = [None]

        def known() -> bool:
            self.scheduler._lookups.next_pass()
            answers[0] = self.scheduler.matched(request, local)[0]
            return answers[0] is not None

        wait_until(known)
        assert answers[0] is not None
        return answers[0]

    def hits(self, tokens: list[int], name: str, **more: Any) -> int:
        """Return what can be loaded of a new request."""
        return self.asked(self.request(tokens, name, **more))

    def allocated(self, request: Request, table: list[int], count: int) -> None:
        """Give a request blocks, and load so many tokens of it into them."""
        blocks = SimpleNamespace(get_block_ids=lambda: (table,))
        self.scheduler.allocated(request, blocks, count)

    def loaded(self) -> None:
        """Begin the loads, and wait until all have ended."""
        self.worker.load(self.step([]))
        wait_until(lambda: bool(self.worker.finished_loads(True)))

    def step(
        self,
        table: list[int] | dict[str, list[int]],
        others_load: bool = False,
        **scheduled: int,
    ) -> PagodaMetadata:
        """Schedule these requests; `table`: the blocks of all of them, or of each."""
        tables = (
            table if isinstance(table, dict) else dict.fromkeys(scheduled, table)
        )
        state = KVConnectorBlockState(
            set(scheduled), lambda name: (tables[name],), {}
        )
        return self.scheduler.step(
            SimpleNamespace(
                num_scheduled_tokens=scheduled,
                total_num_scheduled_tokens=sum(scheduled.values()),
                kv_connector_block_state=state,
                has_sync_kv_loads=others_load,
            )
        )

    def saved(self, meta: PagodaMetadata) -> None:
        """Do what a worker does in a step without faults, until its chunks are visible or given
        up.
        """
        self.worker.begin(meta)
        self.worker.save(meta)
        wait_until(lambda: not self.worker._save_threads.under_way)

    def stored(
        self,
        tokens: list[int],
        name: str,
        table: list[int] | None = None,
        **more: Any,
    ) -> None:
        """Store a prompt, computed in these blocks, or in the first ones."""
        if table is None:
            table = list(range(len(tokens) // BLOCK))
        request = self.request(tokens, name, **more)
        assert self.asked(request) == 0
        meta = self.step(table, **{name: len(tokens)})
        self.saved(meta)
        self.scheduler.finished(request)

    def take_worker_messages(self) -> None:
        """Take the worker's messages at the end of a step."""
        self.scheduler.take_output(
            KVConnectorOutput(kv_connector_worker_meta=self.worker.take_meta())
        )

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


@pytest.fixture
def halves(shm_root: Path) -> Iterator[Halves]:
    made = Halves(shm_root)
    yield made
    made.close()


@pytest.fixture
def on_device(shm_root: Path) -> Iterator[Halves]:
    """Saves and loads take the path of a device's memory; the memory is a CPU's."""
    made = Halves(shm_root, on_cpu=False)
    yield made
    made.close()


def tokens(chunks: float, seed: int = 0) -> list[int]:
    return [seed * 1000 + n for n in range(int(chunks * CHUNK))]


def one_longer(chunks: float, seed: int = 0) -> list[int]:
    """Return a prompt that goes on for one token behind these chunks."""
    return [*tokens(chunks, seed), 1]


def event_outlet() -> EventOutlet:
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return EventOutlet(config)


def fill(memory: torch.Tensor, table: list[int], salt: int) -> None:
    for block in table:
        memory[block] = (block * 7 + salt) % 127


def test_a_step_that_breaks_off_stores_nothing(
    halves: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM saves on the way out of a forward that raised: a signal in the middle of it, no
    memory.
    """
    connector: Any = object.__new__(PagodaConnector)
    connector._worker = halves.worker
    connector._scheduler = None
    connector._connector_metadata = None
    monkeypatch.setattr(mixin, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(mixin, "get_forward_context", lambda: None)

    def step(meta: PagodaMetadata, trouble: BaseException | None) -> None:
        output = SimpleNamespace(
            kv_connector_metadata=meta,
            has_sync_kv_loads=False,
            finished_req_ids=set(),
        )
        with mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(output):  # type: ignore[arg-type]
            if trouble is not None:
                raise trouble

    table = list(range(8))
    request = halves.request(tokens(2), "first")
    assert halves.asked(request) == 0
    try:
        raise LookupError
    except LookupError:
        # an engine may be used while an exception is being handled
        step(halves.step(table, first=2 * CHUNK), None)
    wait_until(lambda: not halves.worker._save_threads.under_way)
    assert halves.hits(tokens(3), "next") == 2 * CHUNK
    for number, trouble in enumerate(
        (SystemExit(), KeyboardInterrupt(), RuntimeError("no memory"), None), 1
    ):
        # the last one succeeds, but may have read data of the failed ones
        prompt = tokens(2, seed=number)
        request = halves.request(prompt, f"r{number}")
        assert halves.asked(request) == 0
        meta = halves.step(table, **{f"r{number}": 2 * CHUNK})
        assert len(meta.saves[0].copies) == 2
        with nullcontext() if trouble is None else pytest.raises(type(trouble)):
            step(meta, trouble)
        wait_until(lambda: not halves.worker._save_threads.under_way)
        halves.scheduler.finished(request)
        assert halves.hits([*prompt, 1], f"again{number}") == 0


@pytest.mark.parametrize("how", ["never begun", "never ended"])
def test_after_a_step_that_was_lost_nothing_is_stored(
    halves: Halves, how: str
) -> None:
    """The scheduler counts it as computed, and so does the engine's own cache."""
    halves.stored(tokens(1), "first", [1, 2, 3, 4])
    lost = halves.step([], lost=0)
    if how == "never ended":
        halves.worker.begin(lost)
    halves.stored(tokens(1, seed=2), "second", [1, 2, 3, 4])
    assert halves.hits(one_longer(1), "third") == CHUNK
    assert halves.hits(one_longer(1, seed=2), "fourth") == 0


@pytest.mark.parametrize("version", ["", "a-run/step-1"])
def test_what_is_loaded_is_what_was_saved(halves: Halves, version: str) -> None:
    halves.scheduler._take_version(version, True)
    there = list(range(10, 18))
    here = list(range(100, 108))
    fill(halves.memory, there, 3)
    halves.stored(tokens(2), "first", there)
    request = halves.request([*tokens(2), 1, 2, 3], "second")
    assert halves.asked(request, local=BLOCK) == 2 * CHUNK - BLOCK
    halves.memory[here] = 111
    halves.allocated(request, [10, *here[1:]], 2 * CHUNK - BLOCK)
    halves.loaded()
    assert not halves.worker.take_bad_blocks()
    assert torch.equal(halves.memory[here[1:]], halves.memory[there[1:]])
    # that one was in the engine's own cache
    assert (halves.memory[here[0]] == 111).all()


def test_a_request_is_remembered_with_the_namespace_of_its_tenant(
    halves: Halves,
) -> None:
    there = list(range(10, 18))
    halves.stored(tokens(2), "first", there, cache_salt="a tenant")
    request = halves.request(one_longer(2), "second", cache_salt="a tenant")
    assert halves.asked(request) == 2 * CHUNK
    halves.allocated(request, there, 2 * CHUNK)
    root = halves.scheduler._tracked["second"].found.root  # type: ignore[union-attr]
    (remembered,) = halves.cache.slots._ledger.requests.newest()  # type: ignore[union-attr]
    assert remembered.namespace == root[:NAMESPACE_BYTES]
    assert remembered.asked_tokens == 2 * CHUNK + 1
    assert remembered.hit_tokens["host"] == 2 * CHUNK


def test_a_load_that_cannot_begin_is_reported_as_failed(halves: Halves) -> None:
    halves.stored(tokens(2), "first")
    request = halves.request(one_longer(2), "second")
    assert halves.asked(request) == 2 * CHUNK
    far = [*range(8, 15), BLOCKS + 5]  # a block that the memory does not have
    halves.allocated(request, far, 2 * CHUNK)
    meta = halves.step([])
    halves.worker.load(meta)
    assert halves.worker.finished_loads(False) == {"second"}
    assert halves.worker.take_bad_blocks() == set(far)
    meta = halves.worker.take_meta()
    # not confused with those of another connector's loads
    assert meta is not None
    assert meta.bad_blocks == set(far)
    halves.scheduler.take_output(
        KVConnectorOutput(
            finished_recving={"second"}, kv_connector_worker_meta=meta
        )
    )
    assert halves.asked(request) == 0  # it computes for itself


def test_a_save_that_cannot_be_copied_is_given_up(halves: Halves) -> None:
    request = halves.request(tokens(1), "first")
    assert halves.asked(request) == 0
    meta = halves.step([1, 2, 3, BLOCKS], first=CHUNK)
    halves.saved(meta)
    stats = halves.worker.stats.take()
    assert stats is not None
    assert stats.data["refused_chunks"] == 1
    halves.stored(tokens(1), "again", [1, 2, 3, 4])
    assert halves.hits(tokens(2), "third") == CHUNK


def test_the_saves_of_a_step_are_one_commit_and_fail_alone(
    halves: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call and a transaction for each request would cost more than the chunks do."""
    names = ("first", "second", "third")
    requests = [
        halves.request(tokens(1, seed), name) for seed, name in enumerate(names)
    ]
    assert [halves.asked(request) for request in requests] == [0, 0, 0]
    rows = {
        "first": [1, 2, 3, 4],
        "second": [5, 6, 7, BLOCKS],
        "third": [8, 9, 10, 11],
    }
    commits = list[int]()
    commit = allocation.commit

    def counted(transaction: Any, reserved: Any, part: Any) -> Any:
        commits.append(len(reserved))
        return commit(transaction, reserved, part)

    monkeypatch.setattr(allocation, "commit", counted)
    meta = halves.step(rows, **dict.fromkeys(names, CHUNK))
    halves.saved(meta)
    assert commits == [2]
    stats = halves.worker.stats.take()
    assert stats is not None
    assert stats.data["saved_chunks"] == 2
    assert stats.data["refused_chunks"] == 1
    again = [
        halves.request(one_longer(1, seed), f"again {seed}") for seed in range(3)
    ]
    assert [halves.asked(request) for request in again] == [CHUNK, 0, CHUNK]


def test_a_session_whose_tokens_are_replaced_gets_keys_of_its_new_tokens(
    halves: Halves,
) -> None:
    """Streamed input drops tokens that were not computed, and puts others in their place."""
    there = list(range(8))
    halves.stored(tokens(2), "first", there)
    request = halves.request(one_longer(2), "session")
    assert halves.asked(request) == 2 * CHUNK
    del request._all_token_ids[:], request.block_hashes[:]
    request._all_token_ids.extend(one_longer(2, seed=9))
    request.update_block_hashes()
    assert halves.asked(request) == 0  # as many tokens, but others
    fill(halves.memory, there, 5)
    meta = halves.step(there, session=2 * CHUNK)
    halves.saved(meta)
    assert halves.hits(one_longer(2, seed=9), "second") == 2 * CHUNK


def test_who_waits_for_anothers_load_asks_anew_when_it_fails(
    halves: Halves,
) -> None:
    halves.stored(tokens(2), "stored")
    first, second = (
        halves.request(one_longer(2), name) for name in ("first", "second")
    )
    assert halves.asked(first) == halves.asked(second) == 2 * CHUNK
    halves.allocated(first, list(range(8, 17)), 2 * CHUNK)
    assert halves.scheduler.matched(second, 0) == (None, False)
    halves.cache.clear()
    halves.loaded()
    meta = halves.worker.take_meta()
    assert meta is not None
    assert meta.failed == {"first"}
    halves.scheduler.take_output(
        KVConnectorOutput(
            finished_recving={"first"}, kv_connector_worker_meta=meta
        )
    )
    assert halves.asked(second) == 0


def test_loads_are_not_waited_for_where_the_engine_keeps_no_prefixes(
    shm_root: Path,
) -> None:
    halves = Halves(shm_root, shares_blocks=False)
    halves.stored(tokens(2), "stored")
    first, second = (
        halves.request(one_longer(2), name) for name in ("first", "second")
    )
    assert halves.asked(first) == 2 * CHUNK
    halves.allocated(first, list(range(8, 17)), 2 * CHUNK)
    assert halves.asked(second) == 2 * CHUNK
    halves.close()


def test_who_can_get_nothing_does_not_wait_for_a_look_up(halves: Halves) -> None:
    go_on = threading.Event()
    busy = [
        halves.scheduler._lookups._threads.submit(go_on.wait, 60.0)
        for _ in range(2)
    ]
    try:
        assert halves.scheduler.matched(
            halves.request(tokens(0.9), "short"), 0
        ) == (0, False)
        long = halves.request(tokens(3.1), "long")
        # all of it is in the engine's own cache
        assert halves.scheduler.matched(long, 3 * CHUNK) == (
            0,
            False,
        )
        assert halves.scheduler.matched(long, 2 * CHUNK) == (None, False)
    finally:
        go_on.set()
    assert [each.result() for each in busy] == [True, True]
    assert halves.asked(long, 2 * CHUNK) == 0


@pytest.mark.parametrize("local", [0, 2 * CHUNK])
def test_requests_go_on_where_no_thread_can_be_started(
    halves: Halves, local: int
) -> None:
    """Nothing will ever answer a look-up; nothing of the prompt, or all of it, is in the engine's
    own cache.
    """
    with no_threads():
        request = halves.request(tokens(2.1), "waits")
        assert halves.scheduler.matched(request, local) == (0, False)
        assert halves.scheduler.matched(request, local) == (0, False)
    request = halves.request(tokens(2.1), "next")
    assert halves.asked(request, local) == 0


def test_look_ups_that_hang_keep_no_request(
    halves: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory of adapters does not answer: its requests wait a while, and those after them not
    at all.
    """
    monkeypatch.setattr(lookups, "LONGEST_SECONDS", 0.1)
    go_on = threading.Event()
    monkeypatch.setattr(
        lookups, "lora_name", lambda _: go_on.wait(60.0) and "an-adapter"
    )
    adapter = LoRARequest("an-adapter", 1, "/not/there")
    try:
        for number in range(lookups._MOST + 8):  # clients that do not wait
            halves.scheduler.finished(
                halves.request(
                    tokens(2.1, number), f"adapter {number}", lora_request=adapter
                )
            )
        assert halves.hits(tokens(2.1), "waits", lora_request=adapter) == 0
        later = halves.request(tokens(2.1), "later")
        assert halves.scheduler.matched(later, 0) == (0, False)
        meta = halves.step(list(range(9)), later=2 * CHUNK)
        assert not meta.saves
        halves.scheduler.finished(later)
    finally:
        go_on.set()
    halves.scheduler._lookups._threads.join(30.0)
    halves.stored(tokens(2), "stored")
    assert halves.hits(tokens(2.1), "hits") == 2 * CHUNK


def test_few_prompts_wait_to_be_logged(halves: Halves) -> None:
    """Behind threads that are busy: requests that end keep their tokens alive no longer than
    that.
    """
    go_on = threading.Event()
    look_ups = halves.scheduler._lookups
    requests = [
        halves.request(tokens(1, seed), f"ends {seed}") for seed in range(20)
    ]
    for request in requests:
        assert halves.asked(request) == 0
    busy = [look_ups._threads.submit(go_on.wait, 60.0) for _ in range(2)]
    try:
        for request in requests:
            tracked = halves.scheduler._tracked[request.request_id]
            tracked.saved = 1
            look_ups.log_prompt(tracked, CHUNK)
        assert look_ups._threads.under_way <= lookups._MOST_LOGS
    finally:
        go_on.set()
    for each in busy:
        assert each.result()
    look_ups._threads.join(30.0)
    assert look_ups._cache.flush(30.0)
    ledger = halves.scheduler._lookups._cache.slots._ledger
    assert len(list(logged_prompts(ledger.directory))) == lookups._MOST_LOGS - 2


def test_a_request_is_recorded_as_it_was_asked(
    shm_root: Path, tmp_path: Path
) -> None:
    """The state must not be that of a later time, when a busy thread handles it: the answer has
    begun by then.
    """
    halves = Halves(shm_root, record=str(tmp_path / "trace.jsonl"))
    go_on = threading.Event()
    busy = [
        halves.scheduler._lookups._threads.submit(go_on.wait, 60.0)
        for _ in range(2)
    ]
    try:
        request = halves.request(tokens(2), "one")
        request.append_output_token_ids([5] * (CHUNK + 2))
        # as where very many came with it: its first, and late
        halves.scheduler._lookups.begin(TrackedRequest(request))
    finally:
        go_on.set()
    for each in busy:
        assert each.result()
    assert halves.asked(request) == 0
    halves.close()
    recorded = [
        (len(line.hash_ids), line.input_length)
        for line in read_trace(tmp_path / "trace.jsonl")
    ]
    assert recorded == [(2, 2 * CHUNK)] * 2


def test_what_was_refused_for_want_of_time_is_saved_in_a_later_step(
    halves: Halves,
) -> None:
    """Another process has the lock for a moment, while answers are computed, which must not wait
    for it.
    """
    table = list(range(8))
    for number, name in enumerate(("late", "later")):
        request = halves.request(tokens(2, seed=number), name)
        assert halves.asked(request) == 0
    locked = threading.Event()
    go_on = threading.Event()

    def hold(_: object) -> None:
        locked.set()
        assert go_on.wait(20)

    host = halves.host_ledger
    holder = threading.Thread(target=host.session.write, args=(hold, 20.0))
    holder.start()
    assert locked.wait(20)
    patience.wait_shortly()
    step = {"late": 2 * CHUNK, "later": 2 * CHUNK, "other": 1}
    assert not halves.step(table, **step).saves
    for tracked in halves.scheduler._tracked.values():
        tracked.request.num_computed_tokens = 2 * CHUNK
    assert not halves.step(table, late=1, later=1).saves
    go_on.set()
    holder.join()
    found: list[Save] = []

    def saved() -> bool:
        found.extend(halves.step(table, late=1, later=1).saves)
        return len(found) == 2

    wait_until(saved)
    assert [(save.first, len(save.copies)) for save in found] == [(0, 2)] * 2
    assert not halves.step(table, late=1, later=1).saves


def test_the_chunks_of_all_requests_of_a_step_are_reserved_in_one_transaction(
    halves: Halves,
) -> None:
    """One each would take longer than a step may wait: with many requests, most of the chunks of
    their answers would never be stored.
    """
    names = [f"r{number}" for number in range(8)]
    requests = {}
    tables = {}
    for number, name in enumerate(names):
        requests[name] = halves.request(tokens(1, seed=number), name)
        assert halves.asked(requests[name]) == 0
        tables[name] = list(range(4 * number, 4 * number + 4))
    host = halves.host_ledger

    def transactions() -> int:
        return host.session.read(lambda txn, _: txn.id(), 60.0)

    before = transactions()
    meta = halves.step(tables, **dict.fromkeys(names, CHUNK))
    assert transactions() == before + 1
    assert [save.request for save in meta.saves] == names
    assert [save.blocks for save in meta.saves] == list(tables.values())
    halves.saved(meta)
    for number in range(8):
        again = halves.request(one_longer(1, seed=number), f"again{number}")
        assert halves.asked(again) == CHUNK


def test_an_error_about_one_request_of_a_step_costs_the_others_nothing(
    halves: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are given up: nobody will fill them."""
    table = list(range(4))
    for number, name in enumerate(("wrong", "right")):
        request = halves.request(tokens(1, seed=number), name)
        assert halves.asked(request) == 0
    noted = halves.scheduler._noted

    def raises_once(due: Any, outcomes: Any) -> Any:
        if due.tracked.request.request_id == "wrong":
            raise LookupError("no")
        return noted(due, outcomes)

    monkeypatch.setattr(halves.scheduler, "_noted", raises_once)
    meta = halves.step(table, wrong=CHUNK, right=CHUNK)
    assert [save.request for save in meta.saves] == ["right"]
    host = halves.host_ledger
    assert admin.gauges(host)["reserved"] == 1
    assert not halves.scheduler._tracked["wrong"].saves
    assert halves.scheduler._tracked["right"].saves


def test_a_request_waits_for_the_load_of_its_chunks_and_no_longer(
    halves: Halves,
) -> None:
    """Whoever loads them, and whatever else is loaded."""
    table = list(range(8))
    halves.stored(tokens(2), "first", table)
    halves.stored(tokens(1, seed=5), "other", table[:4])

    def begun(prompt: list[int], name: str) -> None:
        request = halves.request([*prompt, 1], name)
        assert halves.asked(request) == len(prompt)
        halves.allocated(request, table, len(prompt))

    def ended(name: str) -> None:
        halves.scheduler.take_output(KVConnectorOutput(finished_recving={name}))

    begun(tokens(2), "long")
    begun(tokens(1, seed=5), "another")
    waiting = halves.request([*tokens(1), 2], "waiting")
    halves.scheduler._lookups.next_pass()

    def waits() -> bool:
        halves.scheduler.matched(waiting, 0)
        return halves.scheduler._tracked["waiting"].waits_for == "long"

    wait_until(waits)
    ended("another")
    assert halves.scheduler.matched(waiting, 0) == (None, False)
    ended("long")
    assert halves.asked(waiting) == CHUNK
    assert not halves.scheduler._loaders


def leave_room(halves: Halves, chunks: int) -> None:
    """Leave a worker so much device memory for what waits to be copied into slots."""
    pages = halves.worker._pages
    assert isinstance(pages, DevicePagesKV)
    halves.worker._staging, _ = pages.preallocate(chunks * LAYOUT.chunk_bytes)


def test_what_has_no_room_on_the_device_is_saved_in_a_later_step(
    on_device: Halves,
) -> None:
    """Of a long prompt, no more is copied within the device at once than the connector may use
    there.
    """
    halves = on_device
    leave_room(halves, 2)
    table = list(range(20))
    fill(halves.memory, table, 3)
    request = halves.request(tokens(5), "long")
    assert halves.asked(request) == 0
    for chunks in (5, 3, 1, 0):
        meta = halves.step(table, long=5 * CHUNK)
        assert sum(len(save.copies) for save in meta.saves) == chunks
        halves.saved(meta)
        halves.scheduler.take_output(
            KVConnectorOutput(kv_connector_worker_meta=halves.worker.take_meta())
        )
    assert halves.hits(one_longer(5), "next") == 5 * CHUNK
    stats = halves.worker.stats.take()
    assert stats is not None
    assert stats.data["saved_chunks"] == 5
    assert "refused_chunks" not in stats.data


@pytest.mark.parametrize("reported_first", [True, False])
def test_what_had_no_room_when_its_request_ended_is_counted(
    on_device: Halves, reported_first: bool
) -> None:
    """A short answer ends before the rest of its prompt is saved: vLLM reports the end before the
    workers' answer.
    """
    halves = on_device
    leave_room(halves, 2)
    request = halves.request(tokens(5), "short")
    assert halves.asked(request) == 0
    meta = halves.step(list(range(20)), short=5 * CHUNK)
    halves.saved(meta)
    request.num_computed_tokens = 5 * CHUNK
    request.append_output_token_ids(7)
    calls = [
        lambda: halves.scheduler.take_output(
            KVConnectorOutput(kv_connector_worker_meta=halves.worker.take_meta())
        ),
        lambda: halves.scheduler.finished(request),
    ]
    for call in calls if reported_first else reversed(calls):
        call()
    stats = halves.scheduler.stats.take()
    assert stats is not None
    assert stats.data["unsaved_chunks"] == 3
    assert halves.cache.stats()["drops"] == {"queue_full": 3}
    assert halves.hits(one_longer(5), "next") == 2 * CHUNK


def test_what_was_saved_is_not_counted_as_unsaved(halves: Halves) -> None:
    request = halves.request(tokens(3), "whole")
    assert halves.asked(request) == 0
    meta = halves.step(list(range(12)), whole=3 * CHUNK)
    halves.saved(meta)
    request.num_computed_tokens = 3 * CHUNK
    # the last of them is not computed
    request.append_output_token_ids(list(range(CHUNK)))
    meta = halves.step(list(range(16)), whole=CHUNK - 1)
    halves.saved(meta)
    request.num_computed_tokens = 4 * CHUNK
    halves.scheduler.finished(request)
    stats = halves.scheduler.stats.take()
    assert stats is None


def test_where_speculation_needs_it_the_last_block_of_a_hit_is_computed(
    shm_root: Path,
) -> None:
    """EAGLE and MTP draft from what the model makes of the last block, as in vLLM's own prefix
    cache.
    """
    halves = Halves(shm_root, drops_last_block=True)
    try:
        halves.stored(tokens(3), "first")
        request = halves.request(one_longer(3), "next")
        assert halves.asked(request) == 3 * CHUNK - BLOCK
        assert halves.asked(request, local=3 * CHUNK - BLOCK) == 0
        assert halves.asked(request, local=3 * CHUNK - 2 * BLOCK) == BLOCK
        # and one token is left
        assert halves.hits(tokens(1), "short") == CHUNK - 2 * BLOCK
    finally:
        halves.close()


def test_where_others_wait_for_each_step_nothing_waits(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines of data and expert parallelism step together: one that waits for its loads delays
    them all.
    """

    def waits(*_: Any, **__: Any) -> Any:
        raise AssertionError("it waits")

    for in_lockstep in (True, False):
        halves = Halves(shm_root, in_lockstep=in_lockstep)
        try:
            assert halves.step([]).idle is not in_lockstep
            monkeypatch.setattr("pagoda.connectors.vllm.lookups.wait", waits)
            raised = (
                nullcontext()
                if in_lockstep
                else pytest.raises(AssertionError, match="it waits")
            )
            with gate_taken(halves.cache.slots._ledger), raised:  # type: ignore[union-attr]
                halves.scheduler.matched(halves.request(tokens(2), "asks"), 0)
        finally:
            monkeypatch.undo()
            halves.close()


def test_a_host_that_has_no_room_for_one_chunk_is_said_at_the_start(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size is "auto", and what it comes to is so little that there would be no host tier."""
    monkeypatch.setattr("pagoda.cache.open_tiers._host_bytes", lambda *_: 0)
    with pytest.raises(
        StoreError,
        match=f"no room for one chunk of {LAYOUT.slot_bytes:,} bytes.*shm-size",
    ):
        opened(config_of(shm_root, None), NAMESPACE, LAYOUT)
    monkeypatch.undo()
    # no part of it stays open
    let_go(opened(config_of(shm_root, None), NAMESPACE, LAYOUT))


def test_without_device_memory_the_engine_starts_all_the_same(
    shm_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(self: DevicePagesKV, snapshot_bytes: int) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DevicePagesKV, "preallocate", full)
    halves = Halves(shm_root, on_cpu=False)
    try:
        assert "no device memory is left for copies" in caplog.text
        halves.stored(tokens(1), "first")
        assert halves.hits(one_longer(1), "next") == CHUNK
    finally:
        halves.close()


def test_a_chunk_larger_than_the_room_is_saved_alone(on_device: Halves) -> None:
    leave_room(on_device, 0)
    on_device.stored(tokens(1), "first")
    assert on_device.hits(one_longer(1), "next") == CHUNK


def test_two_ranks_report_the_earliest_chunk_that_waits() -> None:
    one = PagodaWorkerMetadata({"a"}, set(), {"a": Later(3, 4), "b": Later(1, 1)})
    other = PagodaWorkerMetadata(
        {"c"}, set(), {"a": Later(2, 5), "c": Later(7, 2)}
    )
    assert one.aggregate(other) == PagodaWorkerMetadata(
        {"a", "c"}, set(), {"a": Later(2, 5), "b": Later(1, 1), "c": Later(7, 2)}
    )


def test_what_a_step_does_not_compute_is_not_saved(halves: Halves) -> None:
    """A prompt is computed in pieces; tokens scheduled after its own are a draft that may be
    rejected.
    """
    request = halves.request(tokens(3.5), "long")
    assert halves.asked(request) == 0
    table = list(range(16))
    positions = []
    for scheduled in (CHUNK - 1, 1, CHUNK + 3, 2 * CHUNK):
        meta = halves.step(table, long=scheduled)
        positions.append(
            [copy.position for save in meta.saves for copy in save.copies]
        )
        request.num_computed_tokens += scheduled
    assert positions == [[], [0], [1], [2]]


def test_a_look_up_leaves_the_scheduler_s_half_twice_at_most(
    halves: Halves,
) -> None:
    """The scheduler's thread asks once a pass for each waiting request."""
    halves.stored(tokens(2), "before")
    request = halves.request(tokens(2.25), "r")
    assert halves.asked(request) == 2 * CHUNK
    asked = list[str]()

    def module_of(frame: FrameType | None) -> str:
        return "" if frame is None else frame.f_globals["__name__"]

    def note(frame: FrameType, event: str, _: object) -> None:
        here = PagodaScheduler.__module__
        leaves = module_of(frame.f_back) == here != module_of(frame)
        if event == "call" and leaves and module_of(frame).startswith("pagoda."):
            asked.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        assert halves.scheduler.matched(request, 0) == (2 * CHUNK, True)
    finally:
        sys.setprofile(None)
    assert asked == ["restore_after_sleep", "found_tokens"]


def test_at_least_one_token_is_left_to_compute(halves: Halves) -> None:
    halves.stored(tokens(2), "first")
    assert halves.hits(tokens(2), "again") == 2 * CHUNK - BLOCK


def test_a_chunk_that_differs_behind_its_first_block_is_another(
    halves: Halves,
) -> None:
    halves.stored(tokens(2), "first")
    other = [*tokens(1), *tokens(2)[CHUNK : CHUNK + BLOCK], *tokens(2, seed=1)]
    assert halves.hits(other, "other") == CHUNK


def test_another_adapter_under_the_same_path_is_another(
    halves: Halves, tmp_path: Path
) -> None:
    """vLLM's hashes know an adapter by its name and path; what it does to the KV is in its
    files.
    """
    path = models.make_lora(tmp_path / "adapter", 1)
    first, again, other = (
        LoRARequest("adapter", number, str(path)) for number in (9001, 9002, 9003)
    )
    halves.stored(tokens(2), "first", lora_request=first)
    assert halves.hits(one_longer(2), "again", lora_request=again) == 2 * CHUNK
    shutil.rmtree(path)
    models.make_lora(path, 2)
    assert halves.hits(one_longer(2), "other", lora_request=other) == 0


def test_requests_without_hashes_are_not_cached_and_that_is_one_line(
    halves: Halves, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "two", "three"):
        request = Request(
            name, tokens(2), SamplingParams(), None, block_hasher=None
        )
        halves.scheduler.new_request(request)
        assert halves.scheduler.matched(request, 0) == (0, False)
    logged = [line for line in caplog.messages if "block hashes" in line]
    assert logged == [
        "io_error: request one is not cached: the number of its block hashes is wrong"
    ]


def test_an_adapter_that_cannot_be_named_is_said_and_counted(
    halves: Halves, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = models.make_lora(tmp_path / "adapter", 1)
    adapter = LoRARequest("poet", 9004, str(path))
    halves.stored(tokens(2), "before", lora_request=adapter)
    shutil.rmtree(path)
    models.make_lora(path, 2)
    for name in ("after", "again"):
        request = halves.request(one_longer(2), name, lora_request=adapter)
        assert halves.asked(request) == 0
        halves.scheduler.allocated(request, None, 0)
    (line,) = [line for line in caplog.messages if "adapter" in line]
    assert line.startswith(
        "io_error: requests with the adapter 'poet' are not cached: its files"
    )
    assert halves.cache.stats()["misses"]["io_error"] == 2


def test_after_a_reset_nothing_that_was_stored_before_hits(
    halves: Halves,
) -> None:
    halves.stored(tokens(2), "before")
    running = halves.request(one_longer(1, seed=1), "running")
    assert halves.asked(running) == 0
    halves.scheduler.weights.changed()
    meta = halves.step(list(range(4)), running=CHUNK)
    assert not meta.saves  # it is unknown which weights computed it
    halves.saved(meta)
    halves.scheduler.finished(running)
    assert halves.hits(one_longer(2), "after") == 0
    halves.stored(tokens(2), "anew")
    assert halves.hits(one_longer(2), "next") == 2 * CHUNK


def test_what_waits_when_a_version_is_taken_begins_again(halves: Halves) -> None:
    """Its look-up had the answer of other weights; it hits and stores what belongs to those of
    now.
    """
    halves.stored(tokens(2), "before")
    waits = halves.request(one_longer(2), "waits")
    stored = halves.request(tokens(1, seed=1), "stored")
    assert halves.asked(waits) == 2 * CHUNK
    assert halves.asked(stored) == 0
    halves.scheduler.weights.changed()
    assert halves.asked(waits) == 0
    assert halves.asked(stored) == 0
    for version in ("run/1", "run/2", "run/1"):
        halves.scheduler._take_version(version, True)
        assert halves.asked(waits) == 0
        assert halves.asked(stored) == 0 or version == "run/1"
        meta = halves.step(list(range(4)), stored=CHUNK)
        halves.saved(meta)
    # as vLLM does after a sleep
    halves.scheduler.opened([halves.worker.handshake])
    halves.scheduler.finished(stored)
    assert halves.hits(one_longer(1, seed=1), "after") == CHUNK


def test_what_cannot_begin_again_is_not_cached(halves: Halves) -> None:
    halves.stored(tokens(2), "before")
    request = halves.request(one_longer(2), "waits")
    assert halves.asked(request) == 2 * CHUNK
    request.block_hashes.pop()
    halves.scheduler._take_version("run/1", True)
    assert halves.scheduler.matched(request, 0) == (0, False)


def test_a_slot_that_was_given_up_meanwhile_is_not_written(
    halves: Halves,
) -> None:
    """The worker of another process is late: by then another chunk may have the slot."""
    request = halves.request(tokens(1), "first")
    assert halves.asked(request) == 0
    meta = halves.step([1, 2, 3, 4], first=CHUNK)
    (copy,) = meta.saves[0].copies
    slots = halves.cache.slots
    assert slots is not None
    reserved = Reserved(copy.key, copy.slot, copy.generation)
    slots.abort([reserved])
    slots.view(copy.slot)[:] = 9
    fill(halves.memory, [1, 2, 3, 4], 3)
    meta.scheduler_pid = 0  # no process of this machine has that number
    halves.saved(meta)
    assert (slots.view(copy.slot) == 9).all()
    message = halves.worker.take_meta()
    assert message is not None
    assert message.unsaved == {reserved}


def test_each_rank_has_its_own_pages_in_a_chunk(shm_root: Path) -> None:
    halves = Halves(shm_root, parts=2)
    memory = torch.zeros_like(halves.memory)
    other = PagodaWorker(halves.options, None, None)
    other.open_cache(halves.seen._replace(planes=[memory], part=1), NAMESPACE)
    both = {halves.worker: halves.memory, other: memory}
    there = list(range(8))
    here = list(range(100, 108))
    first = halves.request(tokens(2), "first")
    assert halves.asked(first) == 0
    meta = halves.step(there, first=2 * CHUNK)
    for number, (worker, its) in enumerate(both.items()):
        fill(its, there, 10 * number)
        worker.begin(meta)
        worker.save(meta)
        wait_until(lambda worker=worker: not worker._save_threads.under_way)
    second = halves.request(one_longer(2), "second")
    assert halves.asked(second) == 2 * CHUNK
    halves.allocated(second, here, 2 * CHUNK)
    meta = halves.step([])
    for worker, its in both.items():
        worker.load(meta)
        wait_until(lambda worker=worker: bool(worker.finished_loads(True)))
        assert not worker.take_bad_blocks()
        assert torch.equal(its[here], its[there])
    assert not torch.equal(halves.memory[here], memory[here])
    other.shutdown()
    halves.close()


def test_what_the_engine_has_already_is_not_written_over(halves: Halves) -> None:
    halves.stored(tokens(2), "first")
    request = halves.request(one_longer(2), "second")
    assert halves.asked(request, local=BLOCK) == 2 * CHUNK - BLOCK
    halves.allocated(request, list(range(100, 109)), 2 * CHUNK - BLOCK)
    halves.memory[100:109] = 111
    halves.loaded()
    written = [
        block
        for block in range(100, 109)
        if not (halves.memory[block] == 111).all()
    ]
    assert written == list(range(101, 108))


def test_what_decides_the_bytes_of_a_page_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """K is packed for the vector unit, and each attention backend has a separate format."""

    def facts(backend: type = CPUAttentionBackend, isa: str = "vec") -> str:
        layer = SimpleNamespace(get_attn_backend=lambda: backend, isa=isa)
        compiled = SimpleNamespace(static_forward_context={"layer": layer})
        config: Any = SimpleNamespace(compilation_config=compiled)
        return str(machine_facts(torch.device("cpu"), config, ["layer"]))

    described = [facts(), facts(isa="amx"), facts(FlashAttentionBackend)]
    monkeypatch.setattr(
        torch.backends.cpu, "get_cpu_capability", lambda: "another"
    )
    assert len({*described, facts()}) == 4


def test_below_a_multi_connector_requests_wait_for_the_first_messages(
    shm_root: Path,
) -> None:
    """A MultiConnector passes on another connector's handshake. A reset before the description
    comes counts, too.
    """
    first = Halves(shm_root)
    first.stored(tokens(2), "first")
    for reset, hit in ((False, 2 * CHUNK), (True, 0)):
        halves = Halves(shm_root, described=False)
        if reset:
            halves.scheduler.weights.changed()
        request = halves.request(one_longer(2), "waits")
        assert halves.scheduler.matched(request, 0) == (None, False)
        halves.worker.report_handshake()
        meta = halves.step([])
        halves.worker.begin(meta)
        halves.take_worker_messages()
        assert halves.asked(request) == hit
        halves.close()
    first.close()


def test_a_description_that_never_comes_costs_one_wait(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = Halves(shm_root, described=False)
    request = halves.request(tokens(2), "waits")
    monkeypatch.setattr("pagoda.connectors.vllm.scheduler.LONGEST_SECONDS", 0.0)
    assert halves.scheduler.matched(request, 0) == (0, False)
    halves.scheduler.allocated(request, None, 0)
    assert halves.scheduler.matched(halves.request(tokens(3), "next"), 0) == (
        0,
        False,
    )
    halves.close()


def test_who_loads_nothing_waits_until_it_can_be_saved(shm_root: Path) -> None:
    """The prompt of a prefill engine is computed in one step, and then the request has ended."""
    halves = Halves(shm_root, role="kv_producer")
    with gate_taken(halves.cache.slots._ledger):  # type: ignore[union-attr]
        request = halves.request(tokens(2), "prompt")
        assert halves.scheduler.matched(request, 0) == (None, False)
        # nothing of it is new
        assert halves.scheduler.matched(request, 2 * CHUNK) == (0, False)
    assert halves.asked(request) == 0
    (save,) = halves.step(list(range(8)), prompt=2 * CHUNK).saves
    assert len(save.copies) == 2
    halves.close()


def test_an_engine_that_loads_nothing_publishes_nothing_and_leaves_notes_for_one_that_does(
    shm_root: Path,
) -> None:
    """Routers would send a prompt to an engine that has to compute it all the same."""
    outlets = {
        "kv_producer": event_outlet(),
        "kv_consumer": event_outlet(),
    }
    producer, consumer = (
        Halves(shm_root, role=role, outlet=outlet)
        for role, outlet in outlets.items()
    )
    producer.stored(tokens(2), "prompt")
    events: list[object] = []
    wait_until(lambda: events.extend(outlets["kv_consumer"].take()) or events)  # type: ignore[func-returns-value]
    (event,) = events
    assert isinstance(event, BlockStored)
    assert list(event.token_ids) == tokens(2)
    assert outlets["kv_producer"].take() == []
    consumer.close()
    assert "pagoda-events" not in [
        thread.name for thread in threading.enumerate()
    ], "the producer publishes, only later"
    producer.close()


def test_what_an_engine_loads_is_published_and_that_other_weights_end_it(
    shm_root: Path,
) -> None:
    """The chunks are those of an engine without events, so nothing is known of them but what the
    request says.
    """
    outlet = event_outlet()
    silent = Halves(shm_root)
    halves = Halves(shm_root, outlet=outlet)
    table = list(range(8))
    silent.stored(tokens(2), "first", table)
    request = halves.request(one_longer(2), "second")
    assert halves.asked(request) == 2 * CHUNK
    halves.allocated(request, table, 2 * CHUNK)
    events: list[Any] = []
    wait_until(lambda: events.extend(outlet.take()) or events)  # type: ignore[func-returns-value]
    halves.scheduler.weights.changed()
    wait_until(lambda: events.extend(outlet.take()) or len(events) > 1)  # type: ignore[func-returns-value]
    stored, removed = events
    assert isinstance(stored, BlockStored)
    assert list(stored.token_ids) == tokens(2)
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == stored.block_hashes
    silent.close(), halves.close()


def credited(outlet: EventOutlet, held: set[Any]) -> int:
    """Take what was published; return how many blocks a router credits the engine with."""
    for event in outlet.take():
        (
            held.update
            if isinstance(event, BlockStored)
            else held.difference_update
        )(event.block_hashes)
    return len(held)


def test_weights_that_another_process_has_changed_are_published_while_the_engine_waits(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored with the new ones is published, and a request from before brings nothing of
    the old ones back.
    """
    # whole ones, as requests have them
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    outlet = event_outlet()
    held = set[Any]()
    halves = Halves(shm_root, outlet=outlet)
    table = list(range(16))
    halves.stored(tokens(2), "first", table)
    adapted = LoRARequest(
        "an-adapter", 3, str(models.make_lora(shm_root / "adapter", 3))
    )
    for seed, more in enumerate(
        ({"lora_request": adapted}, {"cache_salt": "a tenant"}), 1
    ):
        halves.stored(tokens(1, seed), f"of {seed}", table, **more)
    longer = halves.request(tokens(4, 5), "longer")
    assert halves.asked(longer) == 0
    meta = halves.step(table, longer=2 * CHUNK)
    halves.saved(meta)
    wait_until(lambda: credited(outlet, held) == 6 * CHUNK // BLOCK)
    with Cache(
        halves.options.config, namespace=NAMESPACE, layout=LAYOUT
    ) as other:
        other.weights_changed()
    wait_until(lambda: credited(outlet, held) == 0)
    longer.num_computed_tokens = 2 * CHUNK
    # the rest of it, which was named before
    meta = halves.step(table, longer=2 * CHUNK)
    halves.saved(meta)
    other_half = Halves(shm_root, outlet=EventOutlet(KVEventsConfig()))
    # another engine with the new weights
    other_half.stored(tokens(3, 7), "other", table)
    names = halves.request(tokens(3, 7), "the same").block_hashes
    wait_until(lambda: credited(outlet, held) == 3 * CHUNK // BLOCK)
    assert held == set(names)
    halves.stored(tokens(1, 8), "next", table)
    wait_until(lambda: credited(outlet, held) == 4 * CHUNK // BLOCK)
    other_half.close(), halves.close()


def test_a_sleeping_engine_publishes_nothing_and_all_once_its_weights_are_known_to_be_the_same(
    shm_root: Path,
) -> None:
    outlet = event_outlet()
    held = set[Any]()
    halves = Halves(shm_root, outlet=outlet)
    weights = ["the same"]
    halves.stored(tokens(2), "first")
    wait_until(lambda: credited(outlet, held) == 2 * CHUNK // BLOCK)
    executor = SimpleNamespace(
        collective_rpc=lambda _: weights, sleeping_tags=set()
    )
    halves.scheduler.weights.falls_asleep(
        SimpleNamespace(model_executor=executor)
    )
    halves.scheduler.weights.changed()  # the reset that belongs to the sleep
    wait_until(lambda: credited(outlet, held) == 0)
    # with the first request after it
    halves.scheduler.weights.restore_after_sleep()
    wait_until(lambda: credited(outlet, held) == 2 * CHUNK // BLOCK)
    halves.close()


def test_that_another_adapter_has_taken_a_name_is_published(
    shm_root: Path,
) -> None:
    """Blocks are named by an adapter's name. A request of the old one that still runs brings
    nothing back.
    """
    outlet = event_outlet()
    published = list[Any]()
    halves = Halves(shm_root, outlet=outlet)
    table = list(range(16))
    held = set[Any]()

    def blocks() -> int:
        for event in (events := outlet.take()):
            (
                held.update
                if isinstance(event, BlockStored)
                else held.difference_update
            )(event.block_hashes)
        published.extend(events)
        return len(held)

    old, new, odd = (
        LoRARequest(
            "an-adapter",
            number,
            str(models.make_lora(shm_root / f"adapter-{seed}", seed)),
        )
        for number, seed in ((301, 3), (302, 4), (301, 5))
    )
    halves.stored(tokens(1, 1), "of none", table)
    running = halves.request(tokens(4, 2), "running", lora_request=old)
    assert halves.asked(running) == 0
    meta = halves.step(table, running=2 * CHUNK)
    halves.saved(meta)
    wait_until(lambda: blocks() == 3 * CHUNK // BLOCK)
    request = halves.request(tokens(1, 2), "of the new one", lora_request=new)
    assert halves.asked(request) == 0
    wait_until(lambda: blocks() == CHUNK // BLOCK)
    running.num_computed_tokens = 2 * CHUNK
    meta = halves.step(table, running=2 * CHUNK)
    halves.saved(meta)
    meta = halves.step(table, **{"of the new one": CHUNK})
    halves.saved(meta)
    wait_until(lambda: blocks() == 2 * CHUNK // BLOCK)
    assert (
        len([one for event in published for one in event.block_hashes])
        == (3 + 2 + 1) * CHUNK // BLOCK
    )
    assert halves.hits(tokens(1, 2), "of unknown weights", lora_request=odd) == 0
    wait_until(lambda: blocks() == CHUNK // BLOCK)
    halves.close()


@pytest.mark.parametrize("moment", ["between its names", "before its look-up"])
def test_a_request_that_is_named_while_the_weights_change_brings_nothing_back(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    # whole ones, as requests have them
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    outlet = event_outlet()
    held = set[Any]()
    halves = Halves(shm_root, outlet=outlet)
    table = list(range(8))
    halves.stored(tokens(2), "first", table)
    wait_until(lambda: credited(outlet, held) == 2 * CHUNK // BLOCK)
    whose = halves.cache.slots if moment == "between its names" else halves.cache
    name = "namespace" if moment == "between its names" else "lookup"
    call = getattr(whose, name)
    asked = threading.Event()

    def changed_then(*args: Any, **named: Any) -> Any:
        if (
            threading.current_thread().name.startswith("pagoda-look")
            and not asked.is_set()
        ):
            asked.set()
            answer = call(*args, **named) if whose is halves.cache.slots else None
            with Cache(
                halves.options.config, namespace=NAMESPACE, layout=LAYOUT
            ) as other:
                other.weights_changed()
            return call(*args, **named) if answer is None else answer
        return call(*args, **named)

    monkeypatch.setattr(whose, name, changed_then)
    halves.stored(tokens(2, 1), "second", table)
    assert asked.is_set()
    wait_until(lambda: credited(outlet, held) == 0)
    halves.stored(tokens(1, 2), "third", table)
    names = set(halves.request(tokens(1, 2), "the same").block_hashes)
    wait_until(lambda: credited(outlet, held) >= CHUNK // BLOCK and held >= names)
    assert held == names
    halves.close()


def test_what_another_connector_loads_is_saved_when_its_step_has_ended(
    halves: Halves,
) -> None:
    """It reports at the step's end which blocks it did not fill; the next step may have begun by
    then.
    """
    table = list(range(8))
    first, next_one, late = (
        halves.request(tokens(2, seed), f"r{seed}") for seed in (1, 2, 3)
    )
    for request in (first, next_one):
        assert halves.asked(request) == 0
    halves.scheduler.allocated(next_one, None, 0)
    assert len(halves.step(table, r2=CHUNK).saves) == 1
    halves.scheduler.allocated(first, None, 0)
    first.num_computed_tokens = CHUNK  # by the other connector, within this step
    meta = halves.step(table, others_load=True, r1=CHUNK, r2=CHUNK)
    assert [save.request for save in meta.saves] == []  # r2 has nothing new
    next_one.num_computed_tokens = CHUNK
    begun = halves.step(table, r1=1, r2=CHUNK)
    assert [save.request for save in begun.saves] == ["r2"]  # it was there before
    assert halves.asked(late) == 0
    halves.scheduler.allocated(late, None, 0)
    # it may share blocks with the first
    assert halves.step(table, r3=2 * CHUNK).saves == []
    late.num_computed_tokens = 2 * CHUNK - 1
    halves.worker.begin(meta)
    halves.take_worker_messages()
    assert [save.request for save in halves.step(table, r1=1, r3=1).saves] == [
        "r1",
        "r3",
    ]


@pytest.mark.parametrize("early", [True, False])
def test_what_is_computed_after_a_failed_load_of_another_connector_is_not_stored(
    shm_root: Path, early: bool
) -> None:
    """With asynchronous scheduling vLLM goes on from a token that it does not keep, and its own
    cache has that KV.
    """
    halves = Halves(shm_root, schedules_early=early)
    table = list(range(8))

    def saved_after(seed: int, ours: set[int], all_bad: set[int]) -> int:
        """Let another connector load within a step; return how much of a request that comes after
        it is saved.
        """
        meta = halves.step(table, others_load=True, loads=1)
        halves.worker.begin(meta)
        halves.worker._report.bad_blocks.update(ours)
        meta = halves.worker.take_meta()
        output = KVConnectorOutput(
            kv_connector_worker_meta=meta, invalid_block_ids=all_bad
        )
        halves.scheduler.take_output(output)
        request = halves.request(tokens(1, seed), f"r{seed}")
        assert halves.asked(request) == 0
        halves.scheduler.allocated(request, None, 0)
        return len(halves.step(table, **{f"r{seed}": CHUNK}).saves)

    assert saved_after(1, set(), set()) == 1
    assert saved_after(2, {5}, {5}) == 1  # our own loads run beside the steps
    assert saved_after(3, {5}, {5, 6}) == (0 if early else 1)
    assert saved_after(4, set(), set()) == (0 if early else 1)
    halves.close()
