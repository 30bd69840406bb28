"""Whole SGLang engines with a model, on the CPU: after a restart the text is the same, and the KV
was not computed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from testbed.servers import free_port

# skips this module without SGLang
from testbed.sglang_parts import _copy_layers  # noqa: F401
from tests.sglang.whole_engine import prompt
from tests.vllm.models import make_llama

ROOT = Path(__file__).resolve().parents[2]
PAGE = 16
RUN = "import sys; from pagoda_tools.cli import main; sys.exit(main())"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random Llama."""
    return str(make_llama(tmp_path_factory.mktemp("models") / "llama"))


def answers(
    model: str, extra: dict[str, Any] | None = None, **plan: Any
) -> list[dict[str, Any]]:
    """Start an engine, and return its answers to four prompts."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.sglang.whole_engine"]
    command.append(json.dumps({"model": model, "extra": extra, **plan}))
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    found = [
        json.loads(line)
        for line in done.stdout.splitlines()
        if line.startswith("{")
    ]
    assert found and found[-1] == {"ended": True}, done.stderr[-3000:]
    return found[:-1]


def texts(found: list[dict[str, Any]]) -> list[tuple[list[int], list[float]]]:
    """What must be the same."""
    return [(one["tokens"], one["logprobs"]) for one in found]


@pytest.mark.timeout(3000)
def test_a_restarted_engine_answers_the_same_without_computing(
    shm_root: Path, tmp_path: Path, model: str
) -> None:
    """From the host tier, then from the disk; the controls see nothing, or something else."""
    extra = {
        "backend_name": "pagoda",
        "module_path": "pagoda.connectors.sglang",
        "class_name": "PagodaHiCache",
        "host_path": str(shm_root / "host"),
        "host_size": "32MiB",
        "disk_path": str(tmp_path / "disk"),
        "disk_size": "64MiB",
        "prefetch_threshold": PAGE,
        "hicache_storage_pass_prefix_keys": True,
    }
    plain = answers(model)
    cold = answers(model, extra)
    warm = answers(model, extra)
    shutil.rmtree(shm_root / "host")
    disk = answers(model, extra)
    assert texts(plain) == texts(cold) == texts(warm) == texts(disk)
    whole = [(len(prompt(number)) - 1) // PAGE * PAGE for number in range(4)]
    assert [one["stored"] for one in cold] == [0] * 4
    assert (
        [one["stored"] for one in warm]
        == [one["stored"] for one in disk]
        == whole
    )
    assert [
        one["cached"] for one in answers(model, {**extra, "salt": "another"})
    ] == [0] * 4
    zeroed = answers(model, extra, zeroed=True)
    assert [one["stored"] for one in zeroed] == whole
    for one, right in zip(zeroed, plain, strict=True):
        assert one["tokens"] != right["tokens"]


@pytest.mark.timeout(3000)
def test_after_an_update_of_its_weights_an_engine_answers_as_the_new_weights_do(
    shm_root: Path, tmp_path: Path, model: str
) -> None:
    """SGLang does not notify its storage, which has pages of the same prompts with the weights of
    the files.
    """
    extra = {
        "backend_name": "pagoda",
        "module_path": "pagoda.connectors.sglang",
        "class_name": "PagodaHiCache",
        "host_path": str(shm_root / "host"),
        "host_size": "32MiB",
        "prefetch_threshold": PAGE,
        "hicache_storage_pass_prefix_keys": True,
    }
    other = str(make_llama(tmp_path / "other", seed=1))
    first = answers(model, extra)
    updated = answers(model, extra, updated=other)
    assert [one["stored"] for one in updated] == [0] * 4
    assert texts(updated) == texts(answers(other)) != texts(first)
    again = answers(model, extra)
    assert texts(again) == texts(first)
    for one in again:
        assert one["stored"]


FLAGS = shlex.split(
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend "
    "none "
    "--disable-overlap-schedule --skip-tokenizer-init --skip-server-warmup --max-total-tokens "
    "4096 --page-size 16 "
    "--mem-fraction-static 0.5 --hicache-ratio 2 --hicache-io-backend direct "
    "--hicache-mem-layout page_first_direct "
    "--hicache-storage-prefetch-policy wait_complete"
)


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    """Send one request to the server; return its answer."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(
        f"http://127.0.0.1:{port}/{path}",
        data,
        {"Content-Type": "application/json"},
    )
    with urlopen(request, timeout=200) as answer:
        text = answer.read()
    return json.loads(text) if body else text


def served(command: list[str], log: Path) -> list[dict[str, Any]]:
    """Start the server that `pagoda sglang` printed, ask it two long prompts, end it; return the
    answers.
    """
    port = free_port()
    with log.open("ab") as out:
        server = subprocess.Popen(
            [*command, "--port", str(port)],
            cwd=ROOT,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + 400
        while True:
            assert server.poll() is None and time.monotonic() < until, (
                log.read_text()[-3000:]
            )
            with suppress(OSError):
                ask(port, "health")
                break
            time.sleep(0.5)
        sampling = {"temperature": 0, "max_new_tokens": 24}
        found = [
            ask(
                port,
                "generate",
                {"input_ids": prompt(number), "sampling_params": sampling},
            )
            for number in (3, 4)
        ]
        time.sleep(2)  # the last pages are on their way to the storage
        return found
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.timeout(2000)
def test_a_restarted_server_finds_what_it_stored(
    shm_root: Path, tmp_path: Path, model: str
) -> None:
    """With the command that `pagoda sglang serve` prints."""
    options = [
        "--host-path",
        str(shm_root / "host"),
        "--host-size",
        "32MiB",
        "--disk-size",
        "0",
        "--print",
    ]
    printed = subprocess.run(
        [sys.executable, "-c", RUN, "sglang", *options, "serve", model, *FLAGS],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.startswith("python -m sglang.launch_server ")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.sglang.whole_server",
        *shlex.split(printed)[3:],
    ]
    cold, warm = (served(command, tmp_path / "log") for _ in range(2))
    assert [one["output_ids"] for one in warm] == [
        one["output_ids"] for one in cold
    ]
    assert [one["meta_info"]["cached_tokens"] for one in cold] == [0, 0]
    stored = [
        one["meta_info"]["cached_tokens_details"]["storage"] for one in warm
    ]
    assert stored == [
        (len(prompt(number)) - 1) // PAGE * PAGE for number in (3, 4)
    ]
