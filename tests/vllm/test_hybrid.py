"""A model with sliding windows in a real engine, whose OffloadingConnector stores here: the same
text, and hits.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from vllm.distributed.kv_events import BlockStored, KVEventBatch

from pagoda.cache.prompt_log import logged_prompts
from testbed.servers import free_port
from tests.cli.shelf import run_here
from tests.vllm import fleet, hybrid, stores, weights
from tests.vllm.engines import BLOCK, CHUNK, Engine, connector, options
from tests.vllm.inside import Answer
from tests.vllm.models import prompt
from tests.vllm.routers import Indexer, events_at

TRUNK = prompt(70, 700)
PROMPTS = [
    prompt(71, 1000),  # ten windows
    TRUNK + prompt(72, 60),
    TRUNK[:512] + prompt(73, 100),  # leaves it between two chunks
    prompt(74, 5 * CHUNK),  # whole chunks and nothing more
    prompt(75, 5 * CHUNK + 1),
    prompt(76, CHUNK // 2),  # less than a chunk
]
# a block ends where a chunk ends
EXACT = [prompt(77, 15 * CHUNK + 5), prompt(78, 8 * CHUNK + 9)]
TOKENS = 24


class TieredEngine:
    """One engine's process: first without a connector, then with one, then as after a restart of
    the machine.
    """

    def __init__(
        self,
        engine: Engine,
        plain: dict[str, Any],
        ours: dict[str, Any],
        right: list[Answer],
        exact: Any,
    ) -> None:
        self.engine = engine
        self.plain = plain
        self.ours = ours
        self.right = right
        # the log probabilities of every word after EXACT, which is on the device
        self.exact = exact
        extra = ours["kv_transfer_config"]["kv_connector_extra_config"]
        self.host = Path(extra["host_path"])
        self.disk = Path(extra["disk_path"])

    def same(self, answers: list[Answer]) -> list[Answer]:
        """Assert that this equals the answer of the engine without a connector."""
        assert [answer.tokens for answer in answers] == [
            answer.tokens for answer in self.right
        ]
        return answers

    def same_bits(self) -> None:
        """Assert that all log probabilities equal those after hits of the same length in the
        engine's own cache.
        """
        found = self.engine.call(hybrid.logprobs, EXACT, TOKENS)
        for each, (answer, now), (local, then) in zip(
            EXACT, found, self.exact, strict=True
        ):
            assert answer.external == local.local == wanted(each)
            assert np.array_equal(now, then)

    def one_by_one(self) -> list[Answer]:
        """Ask for each prompt alone; nothing of another is on the device."""
        answers = []
        for each in PROMPTS:
            self.engine.reset()
            answers += self.engine.generate(each, max_tokens=TOKENS)
        return self.same(answers)


@pytest.fixture(scope="module")
def tiered(
    tmp_path_factory: pytest.TempPathFactory, session_shm: Path, logs: Path
) -> Iterator[TieredEngine]:
    """The engine with the connector; it has computed and stored every prompt."""
    model = hybrid.make_gemma(tmp_path_factory.mktemp("models") / "gemma")
    plain = options(
        model, max_model_len=2048, num_gpu_blocks_override=240, max_logprobs=-1
    )
    ours = plain | connector(
        session_shm / "hybrid", tmp_path_factory.mktemp("hybrid") / "disk"
    )
    engine = Engine("hybrid", logs / "hybrid.log", **plain)
    right = []
    for each in PROMPTS:
        engine.reset()
        right += engine.generate(each, max_tokens=TOKENS)
    exact = engine.call(hybrid.logprobs, EXACT, TOKENS, "warm")
    engine.call(hybrid.restart, ours, within=120.0)
    found = TieredEngine(engine, plain, ours, right, exact)
    for each, answer in zip(PROMPTS, right, strict=True):
        # on the device or not: the text is the same
        (again,) = engine.generate(each, max_tokens=TOKENS)
        assert again.tokens == answer.tokens
    yield found
    engine.stop()


def wanted(each: list[int]) -> int:
    """How many tokens of a prompt can be loaded: whole chunks, and one token is left to compute."""
    return (len(each) - 1) // CHUNK * CHUNK


def test_the_model_is_hybrid_and_says_different_things(
    tiered: TieredEngine,
) -> None:
    assert set(tiered.engine.call(hybrid.groups)) == {
        "SlidingWindowSpec",
        "FullAttentionSpec",
    }
    assert len({answer.tokens for answer in tiered.right}) == len(PROMPTS)
    for answer in tiered.right:
        assert len(set(answer.tokens[0])) > TOKENS // 2


def test_the_token_in_which_a_prompt_differs_is_explained(
    tiered: TieredEngine, tmp_path: Path
) -> None:
    """By the log, which has the keys of the group with full attention; without it, by vLLM's
    hashes.
    """
    asked = tmp_path / "tokens.json"
    asked.write_text(
        json.dumps([*PROMPTS[0][:300], PROMPTS[0][300] + 1, *PROMPTS[0][301:]])
    )
    (store,) = stores.stores(tiered.host)
    stores.wait_until(
        lambda: len(list(logged_prompts(store))) >= len(PROMPTS) - 1,
        "logged prompts",
    )
    for logged in (True, False):
        if not logged:
            for name in ("prompts", "prompts-old"):
                (store / name).unlink(missing_ok=True)
        code, out, err = run_here(
            "explain", str(tiered.host), "--tokens", str(asked), "--json"
        )
        assert code == 0, err
        said = json.loads(out)
        last = said["answers"][-1]
        assert last["chunk"] == 300 // CHUNK
        assert last["num_tokens"] == 300 // CHUNK * CHUNK
        assert last["reason"] == "absent"
        assert [near["token"] for near in said["nearest"]] == (
            [300] if logged else []
        )


def test_the_same_text_from_host_memory(tiered: TieredEngine) -> None:
    answers = tiered.one_by_one()
    assert [answer.local for answer in answers] == [0] * len(PROMPTS)
    assert [answer.external for answer in answers] == pytest.approx(
        [wanted(each) for each in PROMPTS], abs=CHUNK
    )
    assert answers[0].external == wanted(PROMPTS[0])


def test_the_same_log_probabilities_bit_by_bit(tiered: TieredEngine) -> None:
    # each alone: in a batch, sums have another order
    tiered.engine.call(hybrid.logprobs, EXACT, TOKENS)
    tiered.same_bits()


def test_the_same_text_for_many_requests_at_once(tiered: TieredEngine) -> None:
    tiered.engine.reset()
    answers = tiered.same(tiered.engine.generate(*PROMPTS, max_tokens=TOKENS))
    assert sum(answer.external for answer in answers) >= wanted(PROMPTS[0])


def test_the_same_text_from_the_disk_after_a_restart(
    tiered: TieredEngine,
) -> None:
    stores.wait_until(
        lambda: stores.keys(tiered.disk) >= stores.keys(tiered.host),
        "all chunks on the disk",
    )
    # no process has the tiers open
    tiered.engine.call(hybrid.restart, tiered.plain, within=120.0)
    shutil.rmtree(tiered.host)
    tiered.engine.call(hybrid.restart, tiered.ours, within=120.0)
    tiered.same_bits()  # those of test_the_same_log_probabilities_bit_by_bit
    answers = tiered.one_by_one()
    assert answers[0].external == wanted(PROMPTS[0])
    assert (
        sum(answer.external for answer in answers)
        >= sum(map(wanted, PROMPTS)) - len(PROMPTS) * CHUNK
    )


def test_chunks_that_are_removed_before_they_are_loaded_are_computed(
    tiered: TieredEngine,
) -> None:
    tiered.engine.call(hybrid.clear_before_loads)
    for each, answer in zip(PROMPTS, tiered.right, strict=True):
        tiered.engine.reset()
        (again,) = tiered.engine.generate(each, max_tokens=TOKENS)
        assert again.tokens == answer.tokens
    assert tiered.engine.call(hybrid.cleared) >= 1
    assert tiered.engine.alive()


def test_chunks_that_are_cleared_once_they_are_promised_are_computed(
    tiered: TieredEngine,
) -> None:
    """Other requests hold the same chunks, and hit them again and again: none of these may be
    loaded.
    """
    tiered.engine.call(hybrid.restart, tiered.ours, within=120.0)
    tiered.one_by_one()
    tiered.engine.reset()
    stores.wait_until(
        lambda: stores.keys(tiered.disk) >= stores.keys(tiered.host),
        "all chunks on the disk",
    )
    prompts = [*PROMPTS, *PROMPTS]
    said = tiered.engine.call(hybrid.stale_hits, prompts, TOKENS)
    assert said == [answer.tokens[0] for answer in [*tiered.right, *tiered.right]]


def test_loads_that_always_fail_are_tried_once_a_request(
    tiered: TieredEngine,
) -> None:
    tiered.engine.call(hybrid.restart, tiered.ours, within=120.0)
    tiered.one_by_one()
    tiered.engine.reset()
    said = tiered.engine.call(hybrid.fail_loads, PROMPTS, TOKENS, within=30.0)
    assert said == [answer.tokens[0] for answer in tiered.right]


def test_requests_that_a_reset_preempts_go_on(tiered: TieredEngine) -> None:
    """With little memory on the device, and no cache in it, so that every hit comes through the
    connector.
    """
    few = tiered.ours | {
        "num_gpu_blocks_override": 100,
        "max_model_len": 1088,
        "enable_prefix_caching": False,
    }
    tiered.engine.call(hybrid.restart, few, within=120.0)
    (again,) = tiered.engine.generate(PROMPTS[0], max_tokens=TOKENS)
    assert again.tokens == tiered.right[0].tokens
    said = tiered.engine.call(hybrid.reset_under_load, PROMPTS[0], 8, TOKENS)
    assert said == [tiered.right[0].tokens[0]] * 8


def test_nothing_stored_before_a_reset_hits_after_it(
    tiered: TieredEngine,
) -> None:
    tiered.engine.call(hybrid.restart, tiered.ours, within=120.0)
    tiered.same(tiered.engine.generate(*PROMPTS, max_tokens=TOKENS))
    tiered.engine.call(hybrid.reset_all)
    answers = tiered.engine.generate(*PROMPTS, max_tokens=TOKENS)
    assert [answer.external for answer in tiered.same(answers)] == [0] * len(
        PROMPTS
    )
    assert tiered.engine.call(hybrid.held) == 0


def test_a_router_credits_what_the_engine_hits(
    tiered: TieredEngine, served: Callable[..., Any]
) -> None:
    """The indexer starts after the engine's restart, so it knows only what is published then."""
    ours = prompt(79, 15 * CHUNK + 5)
    begun = prompt(80, 3 * CHUNK)
    port = free_port()
    whole = 15 * CHUNK
    with_events = tiered.ours | events_at(port)
    tiered.engine.call(hybrid.restart, with_events, within=120.0)
    tiered.engine.generate(ours, begun, max_tokens=TOKENS)
    before = served(Indexer, {1: port})
    before.wait(1, ours, cpu=whole, disk=whole)
    before.wait(1, begun, cpu=3 * CHUNK, disk=3 * CHUNK)
    tiered.engine.call(hybrid.restart, with_events, within=120.0)
    indexer = served(Indexer, {1: port})
    began = time.monotonic()
    indexer.wait(1, ours, cpu=whole, disk=whole)
    print(f"credited {time.monotonic() - began:.2f} s after a router's start")
    indexer.wait(1, begun, cpu=3 * CHUNK, disk=3 * CHUNK)
    (answer,) = tiered.engine.generate(ours, max_tokens=1)
    assert answer.external == wanted(ours) == whole

    kinds = tiered.engine.call(hybrid.groups)
    full = {n for n, kind in enumerate(kinds) if kind == "FullAttentionSpec"}
    expected = {("STORAGE", n): ("full_attention", None) for n in full}
    expected |= {("CPU", n): ("full_attention", None) for n in full}
    expected |= {
        ("CPU", n): ("sliding_window", hybrid.WINDOW)
        for n in range(len(kinds))
        if n not in full
    }
    received = {}
    # one more that comes late
    with zmq.Context.instance().socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.connect(f"tcp://127.0.0.1:{port}")
        while received != expected:
            assert subscriber.poll(20_000), received
            for event in msgspec.msgpack.decode(
                subscriber.recv_multipart()[2], type=KVEventBatch
            ).events:
                if isinstance(event, BlockStored) and event.medium != "GPU":
                    kind = (
                        event.kv_cache_spec_kind,
                        event.kv_cache_spec_sliding_window,
                    )
                    received[event.medium, event.group_idx] = kind
                    assert event.locality == "LOCAL"
                    assert event.block_size == BLOCK

    tiered.engine.reset()
    # with this step it publishes that its own memory is empty
    tiered.engine.generate(prompt(81, BLOCK), max_tokens=1)
    stores.elsewhere(f"clear(Path({str(tiered.host)!r}))")
    indexer.wait(1, ours, cpu=0, disk=whole)
    (answer,) = tiered.engine.generate(ours, max_tokens=1)
    assert answer.external == whole
    indexer.wait(1, ours, cpu=whole, disk=whole)
    tiered.engine.reset()
    tiered.engine.generate(prompt(82, BLOCK), max_tokens=1)
    stores.elsewhere(
        f"clear(Path({str(tiered.host)!r})); clear(Path({str(tiered.disk)!r}))"
    )
    indexer.wait(1, ours, cpu=0, disk=0)
    (answer,) = tiered.engine.generate(ours, max_tokens=1)
    assert answer.external == 0


def test_versions_of_weights_outlive_a_restart(tiered: TieredEngine) -> None:
    """The engine of a run takes the place of the others here: the tests below need it."""
    ours = fleet.new_prompt()
    mine = fleet.of_run(tiered.ours, "a-run")
    tiered.engine.call(hybrid.restart, mine, within=120.0)
    base = fleet.computed(tiered.engine, ours)
    tiered.engine.call(weights.become, 1, "step-1")
    first = fleet.computed(tiered.engine, ours)
    tiered.engine.call(weights.become, 2, "step-2")
    assert len({base, first, fleet.computed(tiered.engine, ours)}) == 3
    tiered.engine.call(hybrid.restart, mine, within=120.0)
    assert fleet.hit(tiered.engine, ours) == base
    tiered.engine.call(weights.become, 1, "step-1")
    assert fleet.hit(tiered.engine, ours) == first


@pytest.mark.parametrize(
    "scenario", fleet.SCENARIOS, ids=lambda scenario: scenario.__name__
)
def test_what_happens_while_weights_change(
    tiered: TieredEngine, scenario: Callable[[fleet.Fleet], None]
) -> None:
    scenario(fleet.Fleet(tiered.engine, tiered.engine))
