"""Events about chunks of hybrid models: what vLLM's offloading stores and loads, over real tiers,
without an engine.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.kv_offload.base import make_offload_key

from pagoda.config import Config
from pagoda.connectors.vllm.event_publisher import EventOutlet
from pagoda.connectors.vllm.shared_caches import let_go
from pagoda.ledger import admin
from tests.vllm.halves import (
    BLOCK,
    CHUNK,
    EACH,
    FULL,
    SLIDING,
    Halves,
    cache_of,
    config_of,
    keys,
    vllm_request,
    wait_until,
)


class Router:
    """Receives an engine's events, and says how many leading blocks of a prompt it credits it with
    in a group and a medium.
    """

    def __init__(self) -> None:
        self.outlet = EventOutlet(
            KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        )
        self.stored: list[BlockStored] = []
        self.held: dict[tuple[str, int], set[bytes]] = {}

    def receive(self) -> None:
        """Take what was published meanwhile."""
        for event in self.outlet.take():
            held = self.held.setdefault((event.medium, event.group_idx), set())
            if isinstance(event, BlockStored):
                self.stored.append(event)
                held.update(event.block_hashes)
            else:
                assert isinstance(event, BlockRemoved)
                held.difference_update(event.block_hashes)

    def credits(self, prompt: str, wanted: dict[tuple[str, int], int]) -> None:
        """Wait until that is what it credits, in chunks."""
        names = vllm_request("", prompt, 9).block_hashes

        def credit(where: tuple[str, int]) -> int:
            return len(
                list(
                    itertools.takewhile(
                        self.held.get(where, set()).__contains__, names
                    )
                )
            )

        wait_until(
            lambda: (
                self.receive()
                or {where: credit(where) // EACH for where in wanted} == wanted
            )
        )


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Router:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")  # whole ones
    return Router()


def test_what_earlier_engines_and_other_processes_stored_is_published(
    shm_root: Path, tmp_path: Path, router: Router
) -> None:
    config = config_of(shm_root, tmp_path)
    halves = Halves(config, outlet=router.outlet)
    everywhere = {("CPU", FULL): 3, ("CPU", SLIDING): 3}
    everywhere |= {("STORAGE", FULL): 3, ("STORAGE", SLIDING): 0}
    halves.store_prompt("p", 3)
    router.credits("p", everywhere)
    # vLLM's own, which would publish it once more
    assert list(halves.manager.take_events()) == []
    full = [
        event
        for event in router.stored
        if event.group_idx == FULL and event.medium == "CPU"
    ]
    assert [token for event in full for token in event.token_ids] == list(
        range(3 * CHUNK)
    )
    halves.close()
    again = Router()
    # after a restart, without a request
    halves = Halves(config, outlet=again.outlet)
    again.credits("p", everywhere)
    other = cache_of(config)
    host = halves.slots.ledgers["host"]
    admin.clear(host)  # by another process
    again.credits("p", everywhere | {("CPU", FULL): 0, ("CPU", SLIDING): 0})
    context = halves.request("loads", "p", 3)
    # from the disk: host memory has it again
    assert halves.hit(context, "p", 3) == 3
    again.credits("p", everywhere)
    other.clear()
    let_go(other)
    again.credits("p", dict.fromkeys(everywhere, 0))
    halves.close()


def test_what_a_request_loads_is_published_and_that_other_weights_end_it(
    config: Config, router: Router
) -> None:
    """The chunks are those of an engine without events, so nothing is known of them but what the
    request says.
    """
    silent = Halves(config)
    halves = Halves(config, outlet=router.outlet)
    silent.store_prompt("p", 3)
    context = halves.request("loads", "p", 3)
    assert halves.hit(context, "p", 3) == 3
    halves.begin_load(
        context, {group: keys("p", group, 3) for group in (FULL, SLIDING)}, {}
    )
    router.credits("p", {("CPU", FULL): 3, ("CPU", SLIDING): 3})
    # by another process; this engine waits for requests
    silent.worker._cache.weights_changed()
    router.credits("p", {("CPU", FULL): 0, ("CPU", SLIDING): 0})
    silent.close()
    more = Halves(config, outlet=EventOutlet(KVEventsConfig()))
    more.store_prompt("r", 3)
    router.credits("r", {("CPU", FULL): 3, ("CPU", SLIDING): 3})
    more.close()
    halves.manager.reset_cache()
    halves.store_prompt("q", 2)
    router.credits("q", {("CPU", FULL): 2, ("CPU", SLIDING): 2})
    halves.manager.reset_cache()  # and no step after it
    router.credits("q", {("CPU", FULL): 0, ("CPU", SLIDING): 0})
    halves.close()


def test_a_request_that_begins_again_with_other_weights_is_published(
    config: Config, router: Router
) -> None:
    halves = Halves(config, outlet=router.outlet)
    context = halves.request("stores", "p", 2)
    halves.manager._take_version("next", fresh=True)
    halves.store(context, keys("p", FULL, 2), {FULL: [1, 2, 3, 4]})
    router.credits("p", {("CPU", FULL): 2})
    halves.close()


def test_a_part_of_a_block_is_not_published_as_the_whole(
    config: Config, router: Router
) -> None:
    """vLLM stores states in the middle of a block, under the hash of the tokens before it."""
    halves = Halves(config, outlet=router.outlet)
    context = halves.request("stores", "p", 3)
    part = make_offload_key(vllm_request("", "p", 3).block_hashes[4], FULL)
    context.set_offload_key_position(part, 2 * CHUNK + BLOCK)
    (placed,) = halves.manager.prepare_store([part], context).store_spec.chunks
    assert halves.slots.commit(
        {halves.slots.namespace(weights_version=""): [placed.copy]}
    ) == [True]
    halves.store(context, keys("p", FULL, 2), {FULL: [3, 4, 5, 6]})
    router.credits("p", {("CPU", FULL): 2})
    assert sum(len(event.block_hashes) for event in router.stored) == 2 * EACH
    halves.close()


def test_of_a_request_with_a_salt_no_tokens_are_published_or_kept(
    config: Config, router: Router
) -> None:
    halves = Halves(config, outlet=router.outlet)
    context = halves.request("stores", "p", 1)
    halves.manager.request_arrived(vllm_request("stores", "p", 1, salt="secret"))
    halves.store(context, keys("p", FULL, 1), {FULL: [1, 2]})
    router.credits("p", {("CPU", FULL): 1})
    assert [list(event.token_ids) for event in router.stored] == [[]]
    kept = (halves.slots.ledgers["host"].directory / "notes").read_bytes()
    assert keys("p", FULL, 1)[0][:-4] in kept
    assert torch.arange(4, dtype=torch.int32).numpy().tobytes() not in kept
    halves.close()


def test_a_request_that_cannot_be_published_is_stored_all_the_same(
    config: Config, router: Router
) -> None:
    halves = Halves(config, outlet=router.outlet)
    context = halves.request("stores", "p", 2)
    odd = vllm_request("stores", "p", 2)
    odd.all_token_ids[0] = 1 << 40
    halves.manager.request_arrived(odd)
    assert halves.store(
        context, keys("p", FULL, 2), {FULL: [1, 2, 3, 4]}
    ) == keys("p", FULL, 2)
    halves.store_prompt("q", 1, at=10)
    router.credits("q", {("CPU", FULL): 1})
    router.credits("p", {("CPU", FULL): 0})
    halves.close()
