"""Several engines on one machine: they share what they store, and die without harm to the
others.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagoda.ledger import admin
from tests.vllm import stores
from tests.vllm.conftest import Same, Tiers
from tests.vllm.engines import CHUNK, Engine, connector, loadable
from tests.vllm.inside import ObservedEngine
from tests.vllm.models import prompt

Start = Callable[..., Engine]


@pytest.fixture
def start(
    lora_options: dict[str, Any], logs: Path, tiers: Tiers
) -> Iterator[Start]:
    """Starts engines on the tiers of `pagoda`, or on others; what still lives is ended."""
    begun: list[Engine] = []

    def begin(name: str, host: Path = tiers.host) -> Engine:
        engine = Engine(
            name,
            logs / f"{name}.log",
            **lora_options,
            **connector(host, tiers.disk),
        )
        begun.append(engine)
        return engine.wait_up()

    yield begin
    for engine in begun:
        engine.stop()


@pytest.fixture
def sound(tiers: Tiers) -> Callable[[], None]:
    """Assert that nothing is left of the dead processes, and that the numbers add up."""

    def judge() -> None:
        for root in tiers:
            stores.wait_until(
                lambda root=root: stores.check(root)["reserved"] == 0,
                f"nothing reserved in {root}",
            )

    return judge


@pytest.mark.slow
def test_engines_come_and_go(
    pagoda: Engine,
    tiers: Tiers,
    start: Start,
    sound: Callable[[], None],
    same: Same,
    stored: Callable[..., None],
    session_shm: Path,
    tmp_path: Path,
) -> None:
    """One life of a machine: two engines share; one is killed as it stores, its successor as it
    loads; a reboot; and weights that are changed in memory."""
    ours = [prompt(3000 + i, 9 * CHUNK + 5) for i in range(3)]
    theirs = [prompt(3010 + i, 700) for i in range(3)]
    stored(*ours)

    second = start("second")
    shared(second, same, ours)  # what the first computed, the second loads
    before = stores.ready(tiers.host)
    same(second, *theirs)
    stores.wait_ready(tiers.host, before + 3 * (700 // CHUNK))
    shared(pagoda, same, theirs)  # and the other way round

    torn = [prompt(3020 + i, 1000) for i in range(3)]
    second.call(slow_saves)
    second.ask(ObservedEngine.generate, torn)
    stores.wait_until(lambda: reserved(tiers.host) > 0, "a store under way")
    second.kill()
    pagoda.reset()
    same(pagoda, *torn)
    sound()

    third = start("third")
    shared(third, same, ours)
    same(third, *torn)
    third.reset()
    mark = tmp_path / "loading"
    third.call(slow_loads, str(mark))
    third.ask(ObservedEngine.generate, [*ours, *theirs, *torn])
    stores.wait_until(mark.exists, "a load under way")
    third.kill()
    pagoda.reset()
    shared(pagoda, same, [*ours, *theirs])
    same(pagoda, *torn)
    sound()

    stores.wait_until(
        lambda: stores.keys(tiers.host) <= stores.keys(tiers.disk),
        "all on the disk",
    )
    rebooted = start("rebooted", session_shm / "after a reboot")
    shared(rebooted, same, [*ours, *theirs, *torn])  # all of it from the disk

    keeps_to_itself(rebooted, pagoda, same, ours[0])
    stores.wait_until(
        lambda: (
            stores.keys(session_shm / "after a reboot") <= stores.keys(tiers.disk)
        ),
        "all on the disk",
    )
    stores.clear(tiers.host)
    shared(pagoda, same, ours)
    rebooted.stop()
    assert pagoda.alive()
    sound()


@pytest.mark.slow
def test_killed_at_any_moment(
    pagoda: Engine,
    tiers: Tiers,
    start: Start,
    sound: Callable[[], None],
    same: Same,
    stored: Callable[..., None],
) -> None:
    """Engines that load and store are killed whenever; the one that lives says what it says
    without.
    """
    draw = random.Random()
    for number in range(3):
        known = [prompt(3100 + 10 * number + i, 700) for i in range(3)]
        fresh = [prompt(3200 + 10 * number + i, 700) for i in range(3)]
        stored(*known)
        victim = start(f"victim {number}")
        victim.ask(ObservedEngine.generate, [*known, *fresh], max_tokens=40)
        time.sleep(draw.uniform(0.0, 1.0))
        victim.kill()
        pagoda.reset()
        same(pagoda, *known, *fresh)
        sound()
        shared(pagoda, same, known)


def other_weights(observed: ObservedEngine) -> None:
    """Change the weights in memory, and notify vLLM as the documentation requires."""

    def change(model: Any) -> None:
        for name, weights in model.named_parameters():
            # those of linear layers are packed when vLLM has loaded them
            if "norm" in name:
                weights.data[::3].mul_(-1.0)

    observed.llm.apply_model(change)
    assert observed.llm.reset_prefix_cache(reset_connector=True)


def keeps_to_itself(
    changed: Engine, pagoda: Engine, same: Same, one: list[int]
) -> None:
    """Assert that an engine whose weights change hits nothing from before, and then what it has
    computed since.
    """
    changed.call(other_weights)
    (other,) = changed.generate(one)
    (with_checkpoint,) = same(pagoda, one)
    assert other.external == 0
    assert other.tokens != with_checkpoint.tokens

    def hits_its_own() -> bool:
        changed.reset()
        (answer,) = changed.generate(one)
        assert answer.tokens == other.tokens
        return answer.external == loadable(len(one))

    stores.wait_until(hits_its_own, "what the other weights computed")


def shared(engine: Engine, same: Same, prompts: list[list[int]]) -> None:
    """Assert that an engine loads all that can be loaded of prompts that another (or it itself)
    computed.
    """
    engine.reset()
    for one in prompts:
        (answer,) = same(engine, one)
        assert answer.local == 0
        assert answer.external == loadable(len(one))


def reserved(root: Path) -> int:
    """How many slots are being written."""
    with stores.ledger_of(root) as ledger:
        return admin.gauges(ledger)["reserved"]


def slow_saves(observed: ObservedEngine) -> None:
    """Have every copy into slots take longer, in the middle."""
    from pagoda.transfer.pages_kv import PagesKV

    to_slots = PagesKV.to_slots

    def slow(self: PagesKV, starts: Any, slots: Any) -> None:
        for one, slot in zip(starts, slots, strict=True):
            to_slots(self, [one], [slot])
            time.sleep(0.2)

    PagesKV.to_slots = slow  # type: ignore[method-assign]


def slow_loads(observed: ObservedEngine, mark: str) -> None:
    """Make every copy into the engine's blocks slower, and report when there was one."""
    from pagoda.transfer.pages_kv import PagesKV

    from_slots = PagesKV.from_slots

    def slow(self: PagesKV, starts: Any, slots: Any) -> None:
        for one, slot in zip(starts, slots, strict=True):
            from_slots(self, [one], [slot])
            Path(mark).touch()
            time.sleep(0.2)

    PagesKV.from_slots = slow  # type: ignore[method-assign]
