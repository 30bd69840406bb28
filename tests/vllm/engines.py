"""Engines under test, each in a separate process, and the tiers that they share."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.vllm import inside
from tests.vllm.inside import Answer, ObservedEngine

BLOCK = 32
CHUNK = 64
POOL_BLOCKS = 136
START_SECONDS = 120.0
CALL_SECONDS = 90.0
END_SECONDS = 60.0

_PRELOAD = [
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "vllm.lora.worker_manager",
]
FORKS = multiprocessing.get_context("forkserver")


class DeadEngineError(AssertionError):
    """An engine's process did not start, did not answer in time, or has ended."""


def options(model: Path, **others: Any) -> dict[str, Any]:
    """The options of every engine of these tests; equal ones compute equal texts."""
    return {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 4096,
        "block_size": BLOCK,
        "enforce_eager": True,
        "num_gpu_blocks_override": POOL_BLOCKS,
        "kv_cache_memory_bytes": 64 << 20,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "seed": 0,
    } | others


# What engines of these tests have and users' engines do not, and why. `test_user_options.py` has an
# engine of each kind without any of it.
ONLY_IN_TESTS: dict[str, tuple[Any, str]] = {
    "chunk_tokens": (CHUNK, "two blocks, so that hits end within a chunk, too"),
    "worth_it": (False, "a tiny model computes as fast as it loads"),
    "deadline_seconds": (
        20.0,
        "a busy machine must not turn an expected hit into a miss",
    ),
    "queue_chunks": (
        1024,
        "a busy machine must not drop what is expected on the disk",
    ),
}


def user_connector(
    host: Path, disk: Path | None = None, **extra: Any
) -> dict[str, Any]:
    """The option of an engine that uses these tiers, as a user writes it."""
    tiers: dict[str, Any] = {"host_path": str(host), "host_size": "128MiB"}
    if disk is not None:
        tiers |= {"disk_path": str(disk), "disk_size": "192MiB"}
    return {
        "kv_transfer_config": {
            "kv_connector": "PagodaConnector",
            "kv_connector_module_path": "pagoda.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": tiers | extra,
        }
    }


def connector(
    host: Path, disk: Path | None = None, **extra: Any
) -> dict[str, Any]:
    """Do the same, for tests in which a busy machine or a tiny model must change nothing."""
    more = {name: value for name, (value, _) in ONLY_IN_TESTS.items()}
    return user_connector(host, disk, **more | extra)


class Engine:
    """An engine in a separate process, forked from one that has imported vLLM. For one thread."""

    def __init__(
        self,
        name: str,
        log: Path,
        prepare: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        self.name = name
        self.log = log
        FORKS.set_forkserver_preload(_PRELOAD)
        os.environ.update(inside.ENVIRONMENT)
        self._pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(
            target=inside.live,
            args=(theirs, str(log), options, prepare),
            name=name,
        )
        self.process.start()
        theirs.close()
        self._awaited = True  # its message that it has started

    def wait_up(self) -> Engine:
        """Wait until the engine has started; several can start at the same time."""
        if self._awaited:
            self._awaited = False
            self.result(START_SECONDS)
        return self

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        within: float = CALL_SECONDS,
        **kwargs: Any,
    ) -> Any:
        """Call a module's function as `function(observed, ...)` in the engine's process and return
        what it returned.
        """
        self.ask(function, *args, **kwargs)
        return self.result(within)

    def ask(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        """Begin a call; `result` waits for its end."""
        self.wait_up()
        self._pipe.send((function, args, kwargs))

    def result(self, within: float = CALL_SECONDS) -> Any:
        """Wait for the result of a call. Raise DeadEngineError with the end of the engine's log."""
        try:
            if not self._pipe.poll(within):
                raise DeadEngineError(
                    f"{self.name}: no answer within {within} s\n{self._last_words(True)}"
                )
            good, reply = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise DeadEngineError(
                f"{self.name}: its process has ended\n{self._last_words()}"
            ) from None
        if not good:
            raise AssertionError(f"in {self.name}: {reply}\n{self._last_words()}")
        return reply

    def generate(self, *prompts: Sequence[int], **how: Any) -> list[Answer]:
        """Call `ObservedEngine.generate` for these prompts."""
        return self.call(ObservedEngine.generate, prompts, **how)

    def reset(self) -> None:
        """Empty the device's own prefix cache."""
        self.call(inside.reset)

    def alive(self) -> bool:
        """Return whether its process runs."""
        return self.process.is_alive()

    def kill(self) -> None:
        """Kill it with SIGKILL, and wait for its end."""
        self.process.kill()
        self.process.join(END_SECONDS)
        self._pipe.close()

    def stop(self) -> None:
        """End it as vLLM does. Raises DeadEngineError if it hangs or fails while it ends."""
        if not self.process.is_alive():
            return
        self.wait_up()
        self._pipe.send(None)
        self.process.join(END_SECONDS)
        if self.process.is_alive():
            words = self._last_words(True)
            self.kill()
            raise DeadEngineError(f"{self.name}: did not end\n{words}")
        if self.process.exitcode != 0:
            raise DeadEngineError(
                f"{self.name}: ended with {self.process.exitcode}\n{self._last_words()}"
            )

    def _last_words(self, stacks: bool = False) -> str:
        if stacks and self.process.is_alive() and self.process.pid:
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(1.0)
        return (
            self.log.read_text(errors="replace")[-6000:]
            if self.log.exists()
            else ""
        )


def loadable(prompt_tokens: int) -> int:
    """Return how many tokens of a stored prompt can be loaded: whole chunks, with one token left to
    compute.
    """
    return min(
        prompt_tokens // CHUNK * CHUNK, (prompt_tokens - 1) // BLOCK * BLOCK
    )
