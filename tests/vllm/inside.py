"""Code inside the process of an engine under test: the engine, and calls that manipulate it.

Functions that take an `ObservedEngine` may be called from the tests through `Engine.call`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

# In one process, on one thread: forked children of a process that has imported all of vLLM start in
# seconds.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # what vLLM would compile at its first use takes longer than these tests
    "TORCHDYNAMO_DISABLE": "1",
}


class Answer(NamedTuple):
    """The result of one request: its tokens (of each sample), and the number of its prompt's tokens
    by tier.
    """

    tokens: tuple[tuple[int, ...], ...]
    prompt_tokens: int
    local: int
    external: int


class ObservedEngine:
    """An engine and its observed calls. For one thread."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        # a start collects garbage five times: half of its time would go to modules imported before
        # it
        gc.freeze()
        self.preemptions = 0
        self.counts = _counted()
        wait_patiently(self)
        # data that one function keeps for a later one
        self.kept: dict[str, Any] = {}
        self._prefills: dict[str, Any] = {}
        self.llm = LLM(**options)
        self._watch()

    @property
    def scheduler(self) -> Any:
        """The engine's scheduler; its `connector` is the scheduler's half of ours."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def worker_half(self) -> Any:
        """The worker's half of the connector, in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def _watch(self) -> None:
        core = self.llm.llm_engine.engine_core
        scheduler = self.scheduler
        get_output = core.get_output
        preempt = scheduler._preempt_request

        def watched() -> Any:
            outputs = get_output()
            for output in outputs.outputs:
                if output.prefill_stats is not None:
                    self._prefills.setdefault(
                        output.request_id, output.prefill_stats
                    )
            return outputs

        def preempted(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        core.get_output = watched
        scheduler._preempt_request = preempted

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 8,
        lora: tuple[str, int, str] | None = None,
        salt: str | None = None,
        n: int = 1,
        seed: int | None = None,
        prompt_logprobs: int | None = None,
        transfer: dict[str, Any] | None = None,
        actions: Sequence[tuple[str, str, dict[str, Any]]] = (),
    ) -> list[Answer]:
        """Generate for all prompts at once; greedy unless there is a seed. `actions`: types,
        versions and payloads of `kv_hints`.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        params = SamplingParams(
            temperature=0.0 if seed is None else 1.0,
            seed=seed,
            max_tokens=max_tokens,
            ignore_eos=True,
            n=n,
            prompt_logprobs=prompt_logprobs,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        asked = [
            {"prompt_token_ids": list(one)}
            | ({"cache_salt": salt} if salt else {})
            for one in prompts
        ]
        with self._hinting(actions):
            outputs = self.llm.generate(
                asked,
                params,
                lora_request=LoRARequest(*lora) if lora else None,
                use_tqdm=False,
            )
        return [self._answer(output) for output in outputs]

    @contextlib.contextmanager
    def _hinting(
        self, actions: Sequence[tuple[str, str, dict[str, Any]]]
    ) -> Iterator[None]:
        """Give the next requests `kv_hints`, which `LLM.generate` does not take."""
        if not actions:
            yield
            return
        from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

        made = [
            KvHintAction(str(number), *action)
            for number, action in enumerate(actions)
        ]
        engine = self.llm.llm_engine
        engine.add_request = partial(
            engine.add_request, kv_hints=KvHintsEnvelope("1.0", "m", made)
        )
        try:
            yield
        finally:
            del engine.add_request

    def _answer(self, output: Any) -> Answer:
        mine = [
            self._prefills.pop(name)
            for name in list(self._prefills)
            if _is_of(name, output.request_id)
        ]
        return Answer(
            tuple(tuple(sample.token_ids) for sample in output.outputs),
            len(output.prompt_token_ids),
            sum(one.num_local_cached_tokens for one in mine),
            sum(one.num_external_cached_tokens for one in mine),
        )

    def close(self) -> None:
        """End the engine as vLLM does at exit."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


def _counted() -> Counter[str]:
    """Return what the connector's halves in this process report to vLLM as counted, from now on."""
    from pagoda.connectors.vllm import PagodaConnector

    counts = Counter[str]()
    take = PagodaConnector.get_kv_connector_stats

    def watched(self: PagodaConnector) -> Any:
        if (stats := take(self)) is not None:
            counts.update(stats.data)
        return stats

    PagodaConnector.get_kv_connector_stats = watched  # type: ignore[method-assign]
    return counts


def _is_of(name: str, request: str) -> bool:
    """Whether an engine's request (its name has a random tail, samples have a number before) is
    that request.
    """
    parts = name.split("_", 1)
    return name.split("-")[0] == request or (
        len(parts) == 2 and parts[1].split("-")[0] == request
    )


def reset(observed: ObservedEngine) -> None:
    """Drop the device's cached blocks: all later hits come through the connector."""
    assert observed.llm.reset_prefix_cache()


def wait_patiently(observed: ObservedEngine) -> None:
    """Lengthen the connector's short waits."""
    from tests.vllm import patience

    patience.wait_long()


def wait_as_users_do(observed: ObservedEngine) -> None:
    """Give the connector's waits the values that users have."""
    from tests.vllm import patience

    patience.wait_shortly()


def counts(observed: ObservedEngine) -> dict[str, float]:
    """Return the connector's counts since the engine's start."""
    return dict(observed.counts)


def live(
    pipe: Connection,
    log: str,
    options: dict[str, Any],
    prepare: Callable[[], None] | None,
) -> None:
    """Run an engine's process: start it, answer calls until one ends it (None) or the caller has
    ended.
    """
    _log_to(log)
    os.environ.update(ENVIRONMENT)
    _fork_workers()
    try:
        if prepare is not None:
            prepare()
        observed = ObservedEngine(options)
    except BaseException:  # noqa: BLE001
        pipe.send((False, traceback.format_exc()))
        return
    pipe.send((True, os.getpid()))
    with contextlib.suppress(EOFError):
        while (call := pipe.recv()) is not None:
            function, args, kwargs = call
            try:
                reply = (True, function(observed, *args, **kwargs))
            except BaseException:  # noqa: BLE001
                reply = (False, traceback.format_exc())
            pipe.send(reply)
    observed.close()


def _log_to(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    sys.stdout, sys.stderr = (
        open(1, "w", closefd=False),  # noqa: SIM115
        open(2, "w", closefd=False, buffering=1),  # noqa: SIM115
    )
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def _fork_workers() -> None:
    """Fork the workers of a tensor-parallel engine: otherwise each would import all of vLLM
    again.
    """
    from vllm.distributed.device_communicators.cpu_communicator import (
        CpuCommunicator,
    )
    from vllm.v1.executor import multiproc_executor

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context(
        "fork"
    )
