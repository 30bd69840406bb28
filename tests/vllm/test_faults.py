"""Whatever happens to stored chunks, the engine gives the same text as without, continues, and
stores again.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from testbed.patience import Patience
from tests.vllm import inside, stores
from tests.vllm.conftest import Plain, Same, Tiers
from tests.vllm.engines import BLOCK, CHUNK, Engine, connector, loadable
from tests.vllm.inside import ObservedEngine
from tests.vllm.models import prompt

OnDisk = Callable[..., set[bytes]]


@pytest.fixture(scope="session")
def cramped(
    lora_options: dict[str, Any], logs: Path, session_shm: Path, tiers: Tiers
) -> Iterator[Engine]:
    """An engine with a private host tier of 16 chunks, and little patience; its disk is `pagoda`'s.

    It has no prefix cache on the device: all that hits comes through the connector.
    """
    how = connector(
        session_shm / "cramped",
        tiers.disk,
        host_size="4MiB",
        deadline_seconds=3.0,
    )
    how |= lora_options | {"enable_prefix_caching": False}
    engine = Engine("cramped", logs / "cramped.log", **how)
    yield engine.wait_up()
    engine.stop()


@pytest.fixture(autouse=True)
def sound(pagoda: Engine, tiers: Tiers) -> Iterator[None]:
    """After each test: no fault is left in the engine, nothing is left half done, and the numbers
    add up.
    """
    yield
    pagoda.call(mend)
    pagoda.reset()
    for root in tiers:
        stores.wait_until(
            lambda root=root: stores.check(root)["reserved"] == 0,
            f"nothing reserved in {root}",
        )


def hits_again(engine: Engine, same: Same, one: list[int]) -> None:
    """The prompt is stored, or was stored again meanwhile, or is now: all of it can be loaded."""

    def hit() -> bool:
        engine.reset()
        before = failed_loads(engine)
        (answer,) = same(engine, one)
        return (
            answer.external == loadable(len(one))
            and failed_loads(engine) == before
        )

    stores.wait_until(hit, "a hit after the fault")


def failed_loads(engine: Engine) -> float:
    """How many loads did not bring all that was looked up."""
    return engine.call(inside.counts).get("failed_loads", 0)


@pytest.mark.parametrize(
    "position", [None, 0, 3], ids=["all", "the first", "the fourth"]
)
def test_chunks_that_are_damaged_on_disk_are_computed(
    pagoda: Engine,
    tiers: Tiers,
    same: Same,
    only_on_disk: OnDisk,
    position: int | None,
) -> None:
    """Bytes on the disk were flipped."""
    one = prompt(2000 if position is None else 2010 + position, 8 * CHUNK + 9)
    chunks = only_on_disk(one)
    assert stores.spoil(tiers.disk, chunks, position) == (
        8 if position is None else 1
    )
    before = failed_loads(pagoda)
    same(pagoda, one, one)  # the second waits for what the first loads
    assert failed_loads(pagoda) > before
    hits_again(pagoda, same, one)


def test_chunks_that_a_failing_disk_does_not_load_are_computed(
    pagoda: Engine, tiers: Tiers, same: Same, only_on_disk: OnDisk
) -> None:
    """Every read of the disk is an I/O error, for a while."""
    one = prompt(2100, 8 * CHUNK + 9)
    two = prompt(2101, 8 * CHUNK + 9)
    only_on_disk(one, two)
    before = failed_loads(pagoda)
    pagoda.call(fail_reads)
    same(pagoda, one, two)
    assert failed_loads(pagoda) > before
    pagoda.call(mend)
    hits_again(pagoda, same, one)
    fresh = iter(range(2110, 2200))

    def takes() -> bool:
        before = stores.ready(tiers.disk)
        same(pagoda, prompt(next(fresh), CHUNK + 1))
        time.sleep(0.5)
        return stores.ready(tiers.disk) > before

    stores.wait_until(takes, "the end of the disk's rest")


def fail_reads(observed: ObservedEngine) -> None:
    """Have every read of the disk fail."""
    from pagoda.slab.file import FileSlab

    def failing(self: FileSlab, views: Any, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    patch(observed, FileSlab, "_readv", failing)


def patch(
    observed: ObservedEngine, owner: Any, name: str, replacement: Any
) -> None:
    """Replace a function until `mend`."""
    observed.kept.setdefault("patched", []).append(
        (owner, name, getattr(owner, name))
    )
    setattr(owner, name, replacement)


def mend(observed: ObservedEngine) -> None:
    """Put back all that was replaced."""
    for owner, name, original in reversed(observed.kept.pop("patched", [])):
        setattr(owner, name, original)


@pytest.mark.parametrize("what", ["clear", "remove"])
def test_gone_between_look_up_and_load(
    pagoda: Engine, tiers: Tiers, same: Same, only_on_disk: OnDisk, what: str
) -> None:
    """What was looked up is evicted by another process, all of it or from the middle, before the
    load begins.
    """
    one = prompt(2200 if what == "clear" else 2201, 8 * CHUNK + 9)
    only_on_disk(one)
    hits_again(pagoda, same, one)  # so that it is in host memory, too
    pagoda.reset()
    before = failed_loads(pagoda)
    argument = "" if what == "clear" else ", 4"
    pagoda.call(
        interrupt_load,
        [f"{what}(Path({str(root)!r}){argument})" for root in tiers],
    )
    same(pagoda, one)
    assert failed_loads(pagoda) == before + 1
    # the request itself has stored what it had to compute
    stores.wait_ready(tiers.host, 8)
    pagoda.call(mend)
    hits_again(pagoda, same, one)


def interrupt_load(observed: ObservedEngine, calls: list[str]) -> None:
    """Have another process do something right before the next loads begin."""
    half = observed.worker_half
    start = half.start_load_kv

    def interrupted(*args: Any, **kwargs: Any) -> None:
        if half._get_connector_metadata().loads:
            for call in calls:
                stores.elsewhere(call)
        start(*args, **kwargs)

    patch(observed, half, "start_load_kv", interrupted)


def test_aborted_while_it_is_loaded(
    pagoda: Engine, plain: Plain, same: Same, only_on_disk: OnDisk
) -> None:
    """A request is aborted while its blocks are being filled: they are freed afterwards, and not
    before.

    Another with the same prompt, which waits for that load, goes on.
    """
    one = prompt(2300, 16 * CHUNK + 9)
    only_on_disk(one)
    pagoda.call(slow_reads, 0.05)
    free, during, after, said = pagoda.call(abort_during_load, one)
    assert during < free
    assert after == free
    assert [(said,)] == plain.says(one, max_tokens=4)
    pagoda.call(mend)
    same(pagoda, one)
    hits_again(pagoda, same, one)


def slow_reads(observed: ObservedEngine, seconds: float) -> None:
    """Have every read of the disk take longer."""
    from pagoda.slab.file import FileSlab

    readv = FileSlab._readv

    def slow(self: FileSlab, views: Any, offset: int) -> int:
        time.sleep(seconds)
        return readv(self, views, offset)

    patch(observed, FileSlab, "_readv", slow)


def abort_during_load(
    observed: ObservedEngine, one: list[int]
) -> tuple[int, int, int, tuple[int, ...]]:
    """Abort a request whose load has begun, while another with the same prompt waits for it.

    Returns the free blocks before, right after the abort and when both have gone, and what the
    other says.
    """
    from vllm import SamplingParams
    from vllm.v1.request import RequestStatus

    engine = observed.llm.llm_engine
    scheduler = observed.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    said: list[tuple[int, ...]] = []

    def asked() -> list[str]:
        return [
            engine.add_request(name, {"prompt_token_ids": one}, params)
            for name in ("aborted", "other")
        ]

    def step() -> None:
        said.extend(
            tuple(output.outputs[0].token_ids)
            for output in engine.step()
            if output.finished
        )

    def is_loading(name: str) -> bool:
        step()
        request = scheduler.requests.get(name)
        if request is None:
            return False
        return request.status is RequestStatus.WAITING_FOR_REMOTE_KVS

    def are_gone(names: list[str]) -> bool:
        step()
        return (
            not scheduler.requests.keys() & set(names)
            and pool.get_num_free_blocks() == free
        )

    names = asked()
    patience = Patience(stores.PATIENT_SECONDS)
    while not is_loading(names[0]):
        assert not patience.ended, patience.said()
        if names[0] not in scheduler.requests:
            # a look-up that had no answer in time: both were computed
            stores.wait_until(partial(are_gone, names), "their end")
            said.clear()
            assert observed.llm.reset_prefix_cache()
            names = asked()
    engine.abort_request([names[0]], internal=True)
    during = pool.get_num_free_blocks()
    stores.wait_until(partial(are_gone, names), "the end of both requests")
    return free, during, pool.get_num_free_blocks(), *said


def test_nothing_can_be_saved(pagoda: Engine, tiers: Tiers, same: Same) -> None:
    """The copy into host memory fails."""
    one = prompt(2400, 8 * CHUNK + 9)
    pagoda.call(fail_saves)
    same(pagoda, one)
    pagoda.call(mend)
    pagoda.reset()
    (answer,) = same(pagoda, one)
    assert answer.external == 0
    hits_again(pagoda, same, one)


def fail_saves(observed: ObservedEngine) -> None:
    """Have every copy into slots fail."""
    from pagoda.transfer.pages_kv import PagesKV

    def failing(self: PagesKV, starts: Any, slots: Any) -> None:
        raise MemoryError("no")

    patch(observed, PagesKV, "to_slots", failing)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_ledger_that_stays_locked_costs_hits_and_no_wrong_text(
    cramped: Engine,
    tiers: Tiers,
    session_shm: Path,
    same: Same,
    only_on_disk: OnDisk,
    tier: str,
) -> None:
    """A process was stopped in the gate of a ledger."""
    one = prompt(2500 if tier == "host" else 2501, 4 * CHUNK + 9)
    only_on_disk(one)
    root = session_shm / "cramped" if tier == "host" else tiers.disk
    cramped.call(inside.wait_as_users_do)
    with stores.busy(root):
        (answer,) = same(cramped, one)
        assert answer.external == 0
        same(cramped, prompt(2510, 200), prompt(2511, 300), max_tokens=70)
    cramped.call(inside.wait_patiently)
    hits_again(cramped, same, one)


def test_a_prompt_larger_than_the_host_tier_is_served_from_disk(
    cramped: Engine, tiers: Tiers, same: Same, only_on_disk: OnDisk
) -> None:
    """The host tier is smaller than one prompt, which is served from the disk nevertheless."""
    prompts = [prompt(2600 + i, 30 * CHUNK + BLOCK + 9) for i in range(3)]
    only_on_disk(*prompts)
    for one in prompts:
        hits_again(cramped, same, one)
    cramped.reset()
    same(
        cramped, *[prompt(2610 + i, 10 * CHUNK) for i in range(8)], max_tokens=70
    )
    cramped.reset()
    same(
        cramped,
        *prompts,
        *[prompt(2610 + i, 10 * CHUNK) for i in range(8)],
        max_tokens=70,
    )
