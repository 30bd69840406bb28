"""A vLLM engine in a separate process, and what is measured inside it. The engines of one run take
turns.

`Engine` is the calling side; the functions with a `Room` run in the engine's process. vLLM is
imported once, by the process from which all engines are forked.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

# vLLM's objects, as in a connector
from typing import Any, NamedTuple  # noqa: TID251

import numpy as np
from limits import MIB, Bytes, touched

# tokens: the default of vLLM on a CPU
BLOCK = 128
POOL_BLOCKS = 128
VOCABULARY = 4096
HIDDEN = 512
LAYERS = 6
HEADS = 8
KV_HEADS = 4
HEAD_DIM = 64
CALL_SECONDS = 240.0
_ENVIRONMENT = {
    # the engine's core in the calling process: no queue between them
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "PYTHONSAFEPATH": "1",  # or a file of this folder would be imported as vLLM
}
_PRELOAD = [
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
]
_FORKS = multiprocessing.get_context("forkserver")
# vLLM's scheduler and worker call these in every step, or for every request
_SCHEDULER_CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "take_events",
)
_WORKER_CALLS = (
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "build_connector_worker_meta",
)


class First(NamedTuple):
    """The first token of one prompt: wall time in seconds, and the tokens that came from each
    tier.
    """

    seconds: float
    device: int
    host: int
    disk: int


class Turn(NamedTuple):
    """One turn of work: seconds until everything was answered and stored, and the tokens of prompts
    and answers.

    `cpu_seconds` by thread: "engine" is the one that schedules and computes; "calls" of it in the
    connector's calls.
    """

    seconds: float
    tokens: int
    cpu_seconds: Counter[str]
    settle_seconds: float


class Copied(NamedTuple):
    """One call that copied pages: direction, bytes, wall time in seconds, and the length of its
    runs.
    """

    way: str  # "load" or "save"
    nbytes: int
    seconds: float
    run_bytes: int


class Load(NamedTuple):
    """One whole load, from the metadata to the last block: bytes and seconds."""

    nbytes: int
    seconds: float


@dataclass
class Room:
    """An engine and its measurements."""

    llm: Any
    calls: dict[str, list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    copies: list[Copied] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    calls_cpu_seconds: float = 0.0
    memory: tuple[Bytes, Bytes] | None = None
    # of the connector, while it may be detached
    halves: tuple[Any, Any] | None = None


class Engine:
    """An engine in a separate process. For one thread; `close` ends the process."""

    def __init__(
        self, name: str, log: Path, multiprocessing: bool = False, **options: Any
    ) -> None:
        """Start it. With `multiprocessing` its core has a process of its own, where nothing is
        measured.
        """
        self.name = name
        self._log = log
        _prepare()
        self._pipe, theirs = _FORKS.Pipe()
        environment = _ENVIRONMENT | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing))
        }
        self._process = _FORKS.Process(
            target=_live, args=(theirs, str(log), environment, options), name=name
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(room, *args)` in the engine's process. Raise RuntimeError with the end of
        its log.
        """
        with contextlib.suppress(ConnectionError):
            self._pipe.send((function, args))
        return self.answer()

    def answer(self) -> Any:
        """Wait for the answer to the last call; the first answer means that the engine has
        started.
        """
        try:
            good, answer = (
                self._pipe.recv()
                if self._pipe.poll(CALL_SECONDS)
                else (False, "no answer in time")
            )
        except (EOFError, ConnectionError):
            good = False
            answer = "its process has ended"
        if not good:
            raise RuntimeError(
                f"{self.name}: {answer}\n{self._log.read_text(errors='replace')[-3000:]}"
            )
        return answer

    @property
    def pid(self) -> int:
        """The number of its process."""
        assert self._process.pid is not None
        return self._process.pid

    def cpu_seconds(self) -> float:
        """Return the processor time of its process until now."""
        stat = (
            Path(f"/proc/{self._process.pid}/stat")
            .read_text()
            .rpartition(")")[2]
            .split()
        )
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the engine; kill it if it does not end."""
        with contextlib.suppress(ConnectionError):
            self._pipe.send(None)
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def options(model: Path, **others: Any) -> dict[str, Any]:
    """Return the options of every engine."""
    return {
        "model": str(model),
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "block_size": BLOCK,
        "enforce_eager": True,
        "num_gpu_blocks_override": POOL_BLOCKS,
        "kv_cache_memory_bytes": 256 * MIB,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 4096,
        "seed": 0,
        "skip_tokenizer_init": True,
    } | others


def connector(**extra: Any) -> dict[str, Any]:
    """Return the option of an engine with the connector."""
    return {
        "kv_transfer_config": {
            "kv_connector": "PagodaConnector",
            "kv_connector_module_path": "pagoda.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
    }


def wait_for_model(directory: Path, **sizes: int) -> None:
    """Write a random Llama of 28 million parameters, or other `sizes`, in another process.
    RuntimeError: it failed.
    """
    _prepare()
    process = _FORKS.Process(target=_make_model, args=(str(directory), sizes))
    process.start()
    process.join(CALL_SECONDS)
    if process.exitcode != 0:
        process.kill()
        raise RuntimeError(
            f"writing the model failed with exit code {process.exitcode}"
        )


def _prepare() -> None:
    """Prepare the process from which all engines are forked."""
    os.environ.update(_ENVIRONMENT)
    _FORKS.set_forkserver_preload(_PRELOAD)


def _make_model(directory: str, sizes: dict[str, int]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    usual = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2048,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
    }
    config = LlamaConfig(max_position_embeddings=8192, **(usual | sizes))
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


# ---- in the engine's process


def first_token(room: Room, prompt: Sequence[int]) -> First:
    """Generate one token."""
    before = room.counts.copy()
    began = time.perf_counter()
    (output,) = _generate(room, [prompt], 1)
    seconds = time.perf_counter() - began
    host, disk = (
        room.counts[f"hit_tokens_{tier}"] - before[f"hit_tokens_{tier}"]
        for tier in ("host", "disk")
    )
    return First(seconds, output.num_cached_tokens - host - disk, host, disk)


def attach(room: Room, on: bool) -> None:
    """Attach the connector of the idle engine, or detach it."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    scheduler = room.llm.llm_engine.engine_core.engine_core.scheduler
    room.halves = room.halves or (
        scheduler.connector,
        kv_transfer_state._KV_CONNECTOR_AGENT,
    )
    scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = (
        room.halves if on else (None, None)
    )


def turn(room: Room, prompts: Sequence[Sequence[int]], max_tokens: int) -> Turn:
    """Answer all prompts at once, and wait until everything is stored."""
    began = time.perf_counter()
    cpu = _cpu_seconds(room)
    outputs = _generate(room, prompts, max_tokens)
    answered = time.perf_counter()
    settle(room)
    ended = time.perf_counter()
    tokens = sum(map(len, prompts)) + sum(
        len(output.outputs[0].token_ids) for output in outputs
    )
    spent = _cpu_seconds(room)
    spent.subtract(cpu)
    return Turn(ended - began, tokens, spent, ended - answered)


def _cpu_seconds(room: Room) -> Counter[str]:
    """Return the processor time of this process's threads so far, and how much of the engine's was
    in calls.
    """
    found: Counter[str] = Counter(calls=room.calls_cpu_seconds)  # type: ignore[arg-type]
    for thread in threading.enumerate():
        with contextlib.suppress(OSError):
            nanoseconds = (
                Path(f"/proc/self/task/{thread.native_id}/schedstat")
                .read_text()
                .split()[0]
            )
            name = (
                "engine"
                if thread is threading.main_thread()
                else thread.name.rstrip("-0123456789")
            )
            found[name] += int(nanoseconds) / 1e9  # type: ignore[assignment]
    return found


def settle(room: Room) -> None:
    """Wait until the connector has committed its copies, and the lower tiers have written them."""
    from vllm.distributed.kv_transfer import (
        get_kv_transfer_group,
        has_kv_transfer_group,
    )

    if not has_kv_transfer_group():
        return
    worker = get_kv_transfer_group()._worker
    while worker._save_threads.under_way:
        time.sleep(0.0005)
    if not worker._cache.flush(60.0):
        raise RuntimeError("the lower tiers were not written in a minute")


def reset(room: Room) -> None:
    """Drop all cached blocks of the device."""
    if not room.llm.reset_prefix_cache():
        raise RuntimeError("the device's blocks are in use")


def take(room: Room) -> tuple[dict[str, list[float]], list[Copied]]:
    """Return the measurements since the last call."""
    calls = dict(room.calls)
    copies = list(room.copies)
    room.calls.clear()
    room.copies.clear()
    return calls, copies


def memcpy(room: Room, nbytes: int, run_bytes: int, number: int) -> float:
    """Time one np.copyto of `nbytes`, in runs of `run_bytes` that are not adjacent on one side.

    Each number has a different place in 256 MiB on each side, so that nothing is in a processor
    cache.
    """
    if room.memory is None:
        room.memory = touched(256 * MIB, 1), touched(256 * MIB, 2)
    rows = nbytes // run_bytes
    whole, runs = room.memory
    places = max(1, whole.size // (2 * nbytes))
    start = number % places * 2 * nbytes
    source = runs[start : start + 2 * rows * run_bytes].reshape(
        rows, 2, run_bytes
    )[:, 0]
    into = whole[start : start + rows * run_bytes].reshape(rows, run_bytes)
    began = time.perf_counter()
    np.copyto(into, source)
    return time.perf_counter() - began


def chunk_tokens(room: Room) -> int:
    """Return the connector's default number of tokens in a chunk."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker._layout.chunk_tokens  # type: ignore[no-any-return]


def _generate(
    room: Room, prompts: Sequence[Sequence[int]], max_tokens: int
) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    return room.llm.generate(
        [{"prompt_token_ids": list(each)} for each in prompts],
        params,
        use_tqdm=False,
    )


def _live(
    pipe: Connection,
    log: str,
    environment: dict[str, str],
    engine: dict[str, Any],
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = (
        open(1, "w", closefd=False),  # noqa: SIM115
        open(2, "w", closefd=False),  # noqa: SIM115
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(environment)
    try:
        from vllm import LLM

        room = Room(LLM(**engine))
        if environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
            _watch(room)
        pipe.send((True, None))
        while (call := pipe.recv()) is not None:
            function, args = call
            pipe.send((True, function(room, *args)))
        room.llm.llm_engine.engine_core.shutdown()
    except EOFError:
        return
    except BaseException:  # the caller gets the error  # noqa: BLE001
        pipe.send((False, traceback.format_exc()))
    os._exit(0)


def _watch(room: Room) -> None:
    """Time the connector's calls and copies, and sum its counts, if there is a connector."""
    from vllm.distributed.kv_transfer import (
        get_kv_transfer_group,
        has_kv_transfer_group,
    )

    if not has_kv_transfer_group():
        return
    from pagoda.connectors.vllm.connector_stats import PagodaStats
    from pagoda.transfer.pages_kv import PagesKV

    scheduler = room.llm.llm_engine.engine_core.engine_core.scheduler
    for half, names in (
        (scheduler.connector, _SCHEDULER_CALLS),
        (get_kv_transfer_group(), _WORKER_CALLS),
    ):
        for name in names:
            setattr(half, name, _timed(room, name, getattr(half, name)))
    _time_copies(room, PagesKV)
    take = PagodaStats.take

    def counted(self: PagodaStats) -> PagodaStats | None:
        # each half's own; vLLM adds the one to the other afterwards
        if (taken := take(self)) is not None:
            room.counts.update(taken.data)
        return taken

    PagodaStats.take = counted  # type: ignore[method-assign]


def _timed(room: Room, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    asked: set[str] = set()

    @wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        cpu = time.thread_time()
        answer = call(*args, **kwargs)
        spent = time.perf_counter() - began
        room.calls_cpu_seconds += time.thread_time() - cpu
        kind = name
        if name == "get_num_new_matched_tokens":
            kind += "_again" if args[0].request_id in asked else "_first"
            asked.add(args[0].request_id)
        room.calls[kind].append(spent)
        return answer

    return timed


def _time_copies(room: Room, kind: type[Any]) -> None:
    for name, way in (("to_slots", "save"), ("from_slots", "load")):
        setattr(kind, name, _timed_copy(room, way, getattr(kind, name)))


def _timed_copy(
    room: Room, way: str, copy: Callable[..., None]
) -> Callable[..., None]:
    @wraps(copy)
    def timed(kv: Any, starts: Sequence[int], slots: Any) -> None:
        began = time.perf_counter()
        copy(kv, starts, slots)
        spent = time.perf_counter() - began
        room.copies.append(
            Copied(way, len(starts) * kv.layout.chunk_bytes, spent, kv.run_bytes)
        )

    return timed
