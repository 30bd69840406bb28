"""Which version an engine's weights are, by what its engine core does; no engine is started."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from pagoda.connectors.identity.lora_adapters import lora_name
from pagoda.connectors.vllm.engine_weights import (
    EngineWeights,
    sampled_weights,
    watch_engine_core,
)
from tests.vllm.models import make_lora


class Core:
    """The parts of an engine core that the methods under test use, with one connector below a
    MultiConnector.
    """

    def __init__(self, run: str | None = "a-run") -> None:
        watch_engine_core()
        self.taken: list[tuple[str, bool]] = []
        self.weights = EngineWeights(
            run, lambda version, fresh: self.taken.append((version, fresh))
        )
        self.has_blocks = self.refuses = False
        # what an encoder with the weights from before has made of images
        self.encoded = True
        self.memory: str | None = "some weights"
        ours = SimpleNamespace(engine_weights=self.weights)
        multi = SimpleNamespace(_connectors=[SimpleNamespace(), ours])
        self.scheduler = SimpleNamespace(
            get_kv_connector=lambda: multi,
            kv_cache_manager=SimpleNamespace(
                reset_prefix_cache=lambda: not self.has_blocks
            ),
            reset_prefix_cache=self._reset,
        )
        self.model_executor = SimpleNamespace(
            collective_rpc=lambda *_: [self._read()],
            sleep=self._sleep,
            sleeping_tags=set(),
        )
        self._weight_version = "default"

    def _reset(self, running: bool, connector: bool) -> bool:
        if self.refuses:
            raise RuntimeError("a request is being loaded")
        if connector:
            self.weights.changed()
        return True

    def pause_scheduler(self, mode: str = "abort", **_: Any) -> None:
        if mode == "wait":
            raise ValueError("'wait' mode can't be used in inproc-engine mode")
        self._reset(True, True)

    def _sleep(self, level: int) -> None:
        """Sleep as on a GPU, where the memory of the weights is given up: to read it ends the
        worker.
        """
        if not self.model_executor.sleeping_tags:
            self.model_executor.sleeping_tags |= {"weights", "kv_cache"}
            self._asleep = self.memory
            self.memory = None

    def _read(self) -> str:
        assert self.memory is not None, "an illegal memory access"
        return self.memory

    def wake_up(self) -> None:
        self.model_executor.sleeping_tags.clear()
        self.memory = self._asleep

    def reset_encoder_cache(self) -> None:
        self.encoded = False

    def call(self, name: str, *args: Any) -> Any:
        """Call vLLM's own method."""
        return getattr(EngineCore, name)(self, *args)


def test_a_version_is_one_of_its_run() -> None:
    one = Core()
    other = Core("another-run")
    none = Core(None)
    for core in (one, other, none):
        core.call("set_weight_version", "step-1")
        assert core._weight_version == "step-1"
    assert one.taken == [("a-run/step-1", True)]
    assert other.taken == [("another-run/step-1", True)]
    assert none.taken == []
    one.call("set_weight_version", "step-1")  # nothing is new
    assert len(one.taken) == 1


def test_a_version_is_not_taken_while_requests_have_kv() -> None:
    core = Core()
    core.has_blocks = True
    core.call("set_weight_version", "step-1")
    ((version, fresh),) = core.taken
    assert "/" not in version
    assert not fresh
    assert core.encoded
    core.has_blocks = False
    core.call("set_weight_version", "step-1")
    assert core.taken[1:] == [("a-run/step-1", True)]
    assert not core.encoded


def test_each_change_without_a_name_is_another_version() -> None:
    core = Core()
    for _ in range(2):
        assert core.call("reset_prefix_cache", False, True)
    assert core.call("reset_prefix_cache")  # vLLM's own cache alone
    assert len({version for version, _ in core.taken}) == len(core.taken) == 2
    for _, fresh in core.taken:
        assert not fresh


def test_a_reset_of_the_connector_that_fails_before_it_is_noticed() -> None:
    core = Core()
    core.refuses = True
    for connector, changes in ((False, 0), (True, 1)):
        with pytest.raises(RuntimeError, match="being loaded"):
            core.call("reset_prefix_cache", True, connector)
        assert len(core.taken) == changes


def test_an_update_that_begins_is_a_change() -> None:
    core = Core()
    for method, changes in (
        ("get_model", 0),
        ("start_weight_update", 1),
        (len, 1),
        ("reload_weights", 2),
    ):
        core.call("collective_rpc", method)
        assert len(core.taken) == changes


def test_a_sleep_that_keeps_the_weights_keeps_their_name() -> None:
    core = Core()
    core.call("set_weight_version", "step-1")
    core.weights.restore_after_sleep()
    core.call("sleep", 1)
    core.wake_up()
    assert "/" not in core.taken[-1][0]  # until it is known
    core.weights.restore_after_sleep()
    assert core.taken[-1] == ("a-run/step-1", True)
    core.weights.restore_after_sleep()
    assert len(core.taken) == 3


def test_an_engine_that_is_put_to_sleep_twice_is_not_read_in_its_sleep() -> None:
    core = Core()
    core.call("set_weight_version", "step-1")
    for _ in range(2):
        core.call("sleep", 1)
        assert "/" not in core.weights.version
    core.wake_up()
    core.weights.restore_after_sleep()
    assert core.weights.version == "a-run/step-1"


def test_a_sleep_that_fails_gives_no_later_reset_its_name() -> None:
    core = Core()
    core.call("set_weight_version", "step-1")
    with pytest.raises(ValueError, match="wait"):
        core.call("sleep", 1, "wait")
    core.call("reset_prefix_cache", False, True)  # before an update
    core.weights.restore_after_sleep()
    assert "/" not in core.weights.version


@pytest.mark.parametrize(
    "kind",
    ["level 2", "other weights", "reset while asleep", "a worker that fails"],
)
def test_any_other_sleep_does_not(kind: str) -> None:
    core = Core()
    core.call("set_weight_version", "step-1")
    core.call("sleep", 2 if kind == "level 2" else 1)
    core.wake_up()
    if kind == "other weights":
        core.memory = "others"
    if kind == "reset while asleep":
        core.call("reset_prefix_cache", False, True)
    if kind == "a worker that fails":
        del core.memory
    core.weights.restore_after_sleep()
    assert "/" not in core.weights.version


def test_a_version_that_is_named_during_a_sleep_is_kept() -> None:
    core = Core()
    core.call("sleep", 1)
    core.wake_up()
    core.call("set_weight_version", "step-2")
    core.weights.restore_after_sleep()
    assert core.weights.version == "a-run/step-2"


def test_weights_in_memory_are_compared_by_their_content() -> None:
    """A change of a part of any tensor is noticed, however it is laid out; time and addresses do
    not count.
    """

    def sampled(change: int | None = None) -> str:
        torch.manual_seed(0)
        model = torch.nn.Linear(700, 300)
        draft = torch.nn.Linear(8, 8)
        # as quantised weights often are
        model.weight.data = torch.randn(700, 300, dtype=torch.bfloat16).t()
        model.register_buffer("empty", torch.empty(0))
        model.register_buffer("scale", torch.tensor(1.5))
        tensors = [
            model.weight.data,
            model.bias.data,
            model.get_buffer("scale"),
            draft.bias.data,
        ]
        if change is not None:
            flat = (
                tensors[change].view(-1)
                if tensors[change].is_contiguous()
                else tensors[change].t().view(-1)
            )
            flat[::3] += 1
        runner = SimpleNamespace(
            get_model=lambda: model, get_draft_model=lambda: draft
        )
        return sampled_weights(SimpleNamespace(model_runner=runner))

    assert sampled() == sampled()
    assert len({sampled(), *map(sampled, range(4))}) == 5


def test_a_reset_is_logged_once_and_so_is_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Who asks why nothing hits any more finds the answer in the log."""
    core = Core()
    with caplog.at_level(logging.INFO, logger="pagoda"):
        core.call("reset_prefix_cache", True, True)
        core.weights.changed()
        assert [
            record.getMessage().split(":")[0] for record in caplog.records
        ] == ["the engine was reset, so its weights may have changed"]
        core.call("set_weight_version", "step-1")
        core.weights.changed()
        assert caplog.text.count("the engine was reset") == 2
        core.call("set_weight_version", "step-1")
        core.call("sleep", 1)
        core.wake_up()
        core.weights.restore_after_sleep()
        assert core.weights.version == "a-run/step-1"
        assert "the same as before the sleep" in caplog.text
        core.weights.changed()
        assert caplog.text.count("the engine was reset") == 4


def test_an_adapter_is_named_by_the_files_that_are_loaded(tmp_path: Path) -> None:
    """Not by those that are at its path when its first request comes."""
    path = make_lora(tmp_path / "adapter", 1)
    numbers = itertools.count(77_000)

    class Loaded(Core):
        def load(self, number: int) -> LoRARequest:
            request = LoRARequest("an-adapter", number, str(path))
            self.model_executor.add_lora = lambda _: True
            assert self.call("add_lora", request) is True
            return request

    core = Loaded()
    first = core.load(next(numbers))
    second = core.load(next(numbers))
    name = lora_name(first)
    assert name
    make_lora(tmp_path / "other", 2)
    for file in (tmp_path / "other").iterdir():
        file.replace(path / file.name)
    assert lora_name(second) is None
    assert lora_name(core.load(next(numbers))) not in (None, name)
