"""`pagoda vllm serve`: vLLM's own server, with PagodaKV in it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from testbed.servers import free_port
from tests.vllm import inside, stores
from tests.vllm.conftest import Plain, Same, Tiers
from tests.vllm.engines import CHUNK, Engine, connector, loadable
from tests.vllm.models import prompt

_START_SECONDS = 150.0
_CALL_SECONDS = 60.0
_END_SECONDS = 60.0


class Server:
    """A server in a session of its own, so that whatever it leaves running can be found."""

    def __init__(
        self,
        log: Path,
        options: dict[str, Any],
        tiers: Tiers,
        environment: Mapping[str, str] | None = None,
        **extra: Any,
    ) -> None:
        """Start it. `extra` are options of PagodaKV."""
        self.url = f"http://127.0.0.1:{free_port()}"
        self._log = log
        given = connector(*tiers, **extra)["kv_transfer_config"][
            "kv_connector_extra_config"
        ]
        model = options["model"]
        rest = {name: one for name, one in options.items() if name != "model"}
        rest |= {
            "host": "127.0.0.1",
            "port": self.url.rsplit(":", 1)[1],
            "served_model_name": "tiny",
        }
        command = [
            *(
                str(Path(sys.executable).with_name("pagoda")),
                "vllm",
                *_flags(given),
            ),
            *("serve", model, *_flags(rest), "--enable-prompt-tokens-details"),
        ]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | inside.ENVIRONMENT | dict(environment or {}),
                start_new_session=True,
            )

    def wait_up(self) -> Server:
        """Wait until it answers."""

        def up() -> bool:
            assert self.process.poll() is None, self.last_words()
            try:
                self.get("/health")
            except OSError:
                return False
            return True

        stores.wait_until(up, "a server", _START_SECONDS)
        return self

    def get(self, path: str) -> str:
        """Return the answer of a path."""
        with urllib.request.urlopen(
            f"{self.url}{path}", timeout=_CALL_SECONDS
        ) as answer:
            return str(answer.read().decode())

    def complete(
        self, one: list[int], max_tokens: int
    ) -> tuple[tuple[int, ...], int]:
        """The tokens of a completion, and how many of its prompt's were cached somewhere."""
        said = self.ask(one, max_tokens)
        return tuple(said["choices"][0]["token_ids"]), cached_tokens(said)

    def ask(
        self, one: list[int], max_tokens: int, **more: object
    ) -> dict[str, Any]:
        """The whole answer to a request for a completion."""
        asked: dict[str, object] = {
            "model": "tiny",
            "prompt": one,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_CALL_SECONDS) as answer:
            said: dict[str, Any] = json.load(answer)
        return said

    def post(self, path: str, **asked: object) -> None:
        """Call what changes the server's state."""
        body = json.dumps(asked).encode() if asked else b""
        request = urllib.request.Request(
            f"{self.url}{path}",
            body,
            {"Content-Type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=_CALL_SECONDS):
            pass

    def terminate(self) -> int:
        """End it as an operator does; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_END_SECONDS)

    def left(self) -> bool:
        """Whether any process of its session still runs."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def last_words(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        """Leave nothing of it."""
        if self.left():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(_END_SECONDS)


def cached_tokens(said: Mapping[str, Any]) -> int:
    """How many tokens of the prompt were cached somewhere, as an answer says."""
    details = said["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0


def _flags(options: dict[str, Any]) -> list[str]:
    flags = []
    for name, one in options.items():
        flag = name.replace("_", "-")
        if isinstance(one, bool):
            flags.append(f"--{flag}" if one else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(one)]
    return flags


@pytest.fixture
def server(
    lora_options: dict[str, Any], logs: Path, tiers: Tiers
) -> Iterator[Server]:
    """A server on the tiers of `pagoda`, with the same options."""
    # with the calls that an update of weights takes
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    one = Server(
        logs / "server.log", lora_options, tiers, environment, weights_run="a-run"
    )
    yield one
    one.kill()


def test_a_server_shares_chunks_with_engines_and_ends_cleanly(
    server: Server,
    pagoda: Engine,
    plain: Plain,
    tiers: Tiers,
    same: Same,
    stored: Callable[..., None],
) -> None:
    """It hits what another engine stored, and another what it stored; it shows what it does, and
    ends cleanly.
    """
    ours = prompt(5000, 9 * CHUNK + 3)
    theirs = prompt(5001, 9 * CHUNK + 3)
    stored(ours)
    server.wait_up()

    tokens, cached = server.complete(ours, 8)
    assert ((tokens,), cached) == (*plain.says(ours), loadable(len(ours))), (
        server.last_words()
    )
    before = stores.ready(tiers.host)
    tokens, cached = server.complete(theirs, 8)
    assert ((tokens,), cached) == (*plain.says(theirs), 0)
    stores.wait_ready(tiers.host, before + len(theirs) // CHUNK)

    metrics = server.get("/metrics")
    assert counter(metrics, "hit_tokens_host") + counter(
        metrics, "hit_tokens_disk"
    ) == loadable(len(ours))
    # by tier, as a label
    assert counter(metrics, "hit_tokens") == loadable(len(ours))
    assert counter(metrics, "loaded_tokens") == loadable(len(ours))
    assert counter(metrics, "saved_chunks") == len(theirs) // CHUNK

    server.post("/sleep?level=1")
    server.post("/wake_up")
    assert server.complete(ours, 8) == (
        plain.says(ours)[0][0],
        loadable(len(ours)),
    )
    for version, hit in (
        ("step-1", 0),
        ("step-2", 0),
        ("step-1", loadable(len(ours))),
    ):
        server.post("/pause")
        server.post("/update_weight_version", new_version=version)
        server.post("/resume")
        before = stores.ready(tiers.host)
        assert server.complete(ours, 8) == (plain.says(ours)[0][0], hit)
        stores.wait_ready(tiers.host, before + (0 if hit else len(ours) // CHUNK))

    assert server.terminate() == 0, server.last_words()
    stores.wait_until(lambda: not server.left(), "the end of all its processes")
    pagoda.reset()
    (answer,) = same(pagoda, theirs)
    assert answer.external == loadable(len(theirs))
    for tier in tiers:
        assert stores.check(tier)["reserved"] == 0


def counter(metrics: str, name: str, label: str = "") -> float:
    """The sum of a counter of ours in Prometheus' text, of those with a label."""
    found = re.findall(
        rf"^vllm:pagoda_{name}(?:_total)?(?:{{.*{label}.*}})? (\S+)$",
        metrics,
        re.MULTILINE,
    )
    assert found, f"no {name} in\n" + "\n".join(
        line for line in metrics.splitlines() if "pagoda" in line
    )
    return sum(map(float, found))
