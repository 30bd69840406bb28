"""Weights that change in the memory of an engine, and what happens meanwhile. Inside its process;
takes an ObservedEngine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.vllm.inside import ObservedEngine


def _load(observed: ObservedEngine, step: int) -> None:
    """Give the weights the values of that step of a training; 0: of the checkpoint. Nobody is
    notified.
    """

    def change(model: Any) -> None:
        for name, weights in model.named_parameters():
            # those of linear layers are packed when vLLM has loaded them
            if "norm" in name:
                weights.data.copy_(
                    observed.kept.setdefault(name, weights.data.clone())
                )
                if step:
                    weights.data[step::7] -= 2.0

    observed.llm.apply_model(change)


def _name(observed: ObservedEngine, version: str) -> None:
    observed.llm.llm_engine.set_weight_version(version)


def become(observed: ObservedEngine, step: int, version: str | None) -> None:
    """Update the weights as the documentation requires."""
    assert observed.llm.reset_prefix_cache(reset_connector=True)
    _load(observed, step)
    if version is not None:
        _name(observed, version)


def named(observed: ObservedEngine, version: str) -> None:
    """Name the present weights."""
    _name(observed, version)


def queued(
    observed: ObservedEngine, prompt: list[int], step: int, version: str
) -> tuple[tuple[int, ...], int]:
    """Update the weights while a request waits that was looked up before; return its tokens and its
    hit.
    """
    _ask(observed, prompt)
    for request in observed.scheduler.requests.values():
        while (
            observed.scheduler.connector.get_num_new_matched_tokens(request, 0)[0]
            is None
        ):
            _empty_step(observed)
    become(observed, step, version)
    (answer,) = _finish(observed)
    return answer


def _empty_step(observed: ObservedEngine) -> None:
    """Do a step that computes nothing, also in the worker: a step that it does not see is one that
    was lost.
    """
    from vllm.v1.core.sched.output import SchedulerOutput

    output = SchedulerOutput.make_empty()
    output.kv_connector_metadata = (
        observed.scheduler.connector.build_connector_meta(output)
    )
    executor = observed.llm.llm_engine.engine_core.engine_core.model_executor
    observed.scheduler.update_from_output(output, executor.execute_model(output))


def named_while_one_runs(
    observed: ObservedEngine, prompt: list[int], step: int, version: str
) -> tuple[int, ...]:
    """Update and name the weights after nine tokens of a request's answer, without a reset; return
    all of it.
    """
    _ask(observed, prompt, max_tokens=80)
    _step_until(observed, lambda request: request.num_output_tokens > 8)
    _load(observed, step)
    _name(observed, version)
    ((answer, _),) = _finish(observed)
    return answer


def named_while_one_loads(
    observed: ObservedEngine, prompt: list[int], step: int, version: str
) -> tuple[int, ...]:
    """Update and name the weights while a request waits for the chunks of others, without a reset;
    it ends.
    """
    with _loading(observed, prompt):
        _load(observed, step)
        _name(observed, version)
    return ()


def reset_while_one_loads(observed: ObservedEngine, prompt: list[int]) -> str:
    """Try to reset everything while a request is being loaded; return vLLM's error."""
    with _loading(observed, prompt):
        try:
            observed.llm.reset_prefix_cache(
                reset_running_requests=True, reset_connector=True
            )
        except RuntimeError as refused:
            return str(refused)
    return ""


def named_while_one_is_stored(
    observed: ObservedEngine, prompt: list[int], step: int, version: str
) -> None:
    """Update and name the weights while the chunks of a request that has ended are not committed
    yet.
    """
    from pagoda.cache.host_slots import HostSlots

    commit = HostSlots.commit
    gate = threading.Event()

    def late(self: HostSlots, *args: Any, **kwargs: Any) -> Any:
        assert gate.wait(60)
        return commit(self, *args, **kwargs)

    HostSlots.commit = late  # type: ignore[method-assign]
    try:
        _ask(observed, prompt, max_tokens=1)
        _finish(observed)
        become(observed, step, version)
    finally:
        gate.set()
        HostSlots.commit = commit  # type: ignore[method-assign]


def sleep(
    observed: ObservedEngine,
    level: int,
    step: int | None = None,
    reset: bool = False,
) -> None:
    """Sleep and wake up; between, or afterwards, the weights change or vLLM is reset."""
    observed.llm.sleep(level=level)
    if reset:
        assert observed.llm.reset_prefix_cache(reset_connector=True)
    observed.llm.wake_up()
    if step is not None:
        _load(observed, step)


def begin_update(observed: ObservedEngine) -> None:
    """Begin an update through vLLM's own calls, which fails: no trainer is there."""
    try:
        observed.llm.collective_rpc("start_weight_update")
    except RuntimeError:
        return
    raise AssertionError("it began")


# ---- parts of it


def _ask(
    observed: ObservedEngine, prompt: list[int], max_tokens: int = 8
) -> None:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True
    )
    observed.kept["asked"] = observed.kept.get("asked", 0) + 1
    observed.llm.llm_engine.add_request(
        f"asked{observed.kept['asked']}", {"prompt_token_ids": prompt}, params
    )


def _step_until(observed: ObservedEngine, reached: Callable[[Any], bool]) -> None:
    while not any(
        reached(request) for request in observed.scheduler.requests.values()
    ):
        assert observed.llm.llm_engine.has_unfinished_requests()
        observed.llm.llm_engine.step()


def _finish(observed: ObservedEngine) -> list[tuple[tuple[int, ...], int]]:
    ended = []
    while observed.llm.llm_engine.has_unfinished_requests():
        ended += [
            output for output in observed.llm.llm_engine.step() if output.finished
        ]
    answers = [observed._answer(output) for output in ended]
    return [(answer.tokens[0], answer.external) for answer in answers]


@contextmanager
def _loading(observed: ObservedEngine, prompt: list[int]) -> Iterator[None]:
    """While a request loads, which does not end before the context; then finish it."""
    from vllm.v1.request import RequestStatus

    from pagoda.transfer.pages_kv import PagesKV

    from_slots = PagesKV.from_slots
    gate = threading.Event()

    def late(self: PagesKV, *args: Any) -> None:
        assert gate.wait(60)
        from_slots(self, *args)

    assert observed.llm.reset_prefix_cache()
    PagesKV.from_slots = late  # type: ignore[method-assign]
    try:
        _ask(observed, prompt)
        _step_until(
            observed,
            lambda request: (
                request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            ),
        )
        yield
    finally:
        gate.set()
        PagesKV.from_slots = from_slots  # type: ignore[method-assign]
    _finish(observed)
