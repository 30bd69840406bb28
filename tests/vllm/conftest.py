"""Shared by the tests with real engines: models, directories of tiers, engines that live for the
whole run.
"""

from __future__ import annotations

import re
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pagoda.config import Config
from tests.vllm import models, patience, stores
from tests.vllm.engines import CHUNK, Engine, connector, options
from tests.vllm.halves import Halves, config_of
from tests.vllm.inside import Answer
from tests.vllm.routers import SECONDS, Service


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what failed in each file and the causes with their numbers, if a test failed."""
    from vllm import __version__

    stats = terminalreporter.stats
    failed = [*stats.get("failed", ()), *stats.get("error", ())]
    if not failed:
        return
    passed = Counter(
        report.nodeid.split("::")[0] for report in stats.get("passed", ())
    )
    by_file = Counter(report.nodeid.split("::")[0] for report in failed)
    causes = Counter(_cause(str(report.longrepr)) for report in failed)
    terminalreporter.section(
        f"vLLM {__version__}: {sum(passed.values())} passed, {len(failed)} failed"
    )
    for file, number in sorted(by_file.items()):
        terminalreporter.write_line(
            f"{file}: {passed[file]} passed, {number} failed"
        )
    for cause, number in causes.most_common():
        terminalreporter.write_line(f"{number} x {cause}")


def _cause(text: str) -> str:
    """Return the last line of a failure that names an exception: an engine's traceback has its own
    within.
    """
    named = re.findall(
        r"^(?:E +)?((?:[\w.]+(?:Error|Exception)|Failed|assert)\b.*\S)",
        text,
        re.MULTILINE,
    )
    inner = [
        line
        for line in named
        if not line.startswith(("AssertionError: Traceback", "assert"))
    ]
    return (inner or named or [text.strip()])[-1][:300]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return models.make_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def adapters(
    tmp_path_factory: pytest.TempPathFactory,
) -> list[tuple[str, int, str]]:
    """Two adapters of it, as (name, number, path)."""
    root = tmp_path_factory.mktemp("adapters")
    return [
        (f"adapter-{seed}", seed, str(models.make_lora(root / f"{seed}", seed)))
        for seed in (1, 2)
    ]


@pytest.fixture(scope="session")
def session_shm() -> Iterator[Path]:
    """Create a directory in shared memory for this run."""
    root = Path(tempfile.mkdtemp(prefix="pagoda-vllm-", dir="/dev/shm"))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def lora_options(llama: Path) -> dict[str, Any]:
    """The options of the engines whose answers are compared."""
    return options(
        llama, enable_lora=True, max_loras=2, max_lora_rank=models.RANK
    )


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directories in which engines write."""
    return tmp_path_factory.mktemp("logs")


Same = Callable[..., list[Answer]]


class Plain:
    """An engine without a connector: its answers are the reference. Each prompt is asked once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[str, tuple[tuple[int, ...], ...]] = {}

    def says(
        self, *prompts: Sequence[int], **how: Any
    ) -> list[tuple[tuple[int, ...], ...]]:
        """Return the reference tokens (of each sample) for each prompt."""
        for prompt in prompts:
            if (name := repr((list(prompt), how))) not in self._known:
                self._known[name] = self._engine.generate(prompt, **how)[0].tokens
        return [self._known[repr((list(prompt), how))] for prompt in prompts]


class Tiers(NamedTuple):
    """The directories of an engine's tiers."""

    host: Path
    disk: Path


@pytest.fixture(scope="session")
def tiers(session_shm: Path, tmp_path_factory: pytest.TempPathFactory) -> Tiers:
    """The tiers of `pagoda`, which other engines may share."""
    return Tiers(session_shm / "host", tmp_path_factory.mktemp("tiers") / "disk")


@pytest.fixture(scope="session")
def _both(
    lora_options: dict[str, Any], logs: Path, tiers: Tiers
) -> Iterator[tuple[Engine, Engine]]:
    without = Engine("plain", logs / "plain.log", **lora_options)
    ours = Engine(
        "pagoda", logs / "pagoda.log", **lora_options, **connector(*tiers)
    )
    yield without, ours
    without.stop()
    ours.stop()


@pytest.fixture(scope="session")
def plain(_both: tuple[Engine, Engine]) -> Plain:
    """The engine without a connector."""
    return Plain(_both[0])


@pytest.fixture(scope="session")
def pagoda(_both: tuple[Engine, Engine]) -> Engine:
    """The engine with the connector, host and disk; tests that share it use separate prompts."""
    return _both[1]


@pytest.fixture(scope="session")
def same(plain: Plain) -> Callable[..., list[Answer]]:
    """Ask an engine, and assert that its answer equals that of the engine without a connector."""

    def ask(engine: Engine, *prompts: Sequence[int], **how: Any) -> list[Answer]:
        answers = engine.generate(*prompts, **how)
        assert [answer.tokens for answer in answers] == plain.says(
            *prompts, **how
        )
        return answers

    return ask


@pytest.fixture
def stored(pagoda: Engine, tiers: Tiers, same: Same) -> Callable[..., None]:
    """Compute and store prompts, and empty the device's own cache. Compare the answers, too.

    The tiers are empty when the test begins.
    """
    pagoda.reset()
    for root in tiers:
        stores.clear(root)

    def store(*prompts: list[int], max_tokens: int = 1, **how: Any) -> None:
        before = stores.ready(tiers.host)
        for one in prompts:
            (answer,) = same(pagoda, one, max_tokens=max_tokens, **how)
            assert answer.external == 0
        chunks = sum((len(one) + max_tokens - 1) // CHUNK for one in prompts)
        stores.wait_ready(tiers.host, before + chunks)
        pagoda.reset()

    return store


@pytest.fixture
def only_on_disk(
    stored: Callable[..., None], tiers: Tiers
) -> Callable[..., set[bytes]]:
    """Do the same as `stored`, then clear host memory. Return the keys of the chunks, which are on
    the disk.
    """

    def store(*prompts: list[int], **how: Any) -> set[bytes]:
        before = stores.keys(tiers.disk) if stores.stores(tiers.disk) else set()
        stored(*prompts, **how)
        stores.wait_ready(
            tiers.disk, len(before) + sum(len(one) // CHUNK for one in prompts)
        )
        stores.clear(tiers.host)
        return stores.keys(tiers.disk) - before

    return store


# ---- the halves of the OffloadingSpec, without an engine


@pytest.fixture
def host(session_shm: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A host tier's directory of one test."""
    root = session_shm / request.node.name[:80].replace("/", "-")
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def config(host: Path) -> Config:
    """64 host slots and no disk."""
    return config_of(host)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step store its chunks and every look-up end, however late a busy machine does
    so.
    """
    for module, name in patience.WAITS:
        monkeypatch.setattr(module, name, patience.PATIENT_SECONDS)


@pytest.fixture
def halves(config: Config) -> Iterator[Halves]:
    """Both halves over it."""
    both = Halves(config)
    yield both
    both.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts services; they are ended."""
    begun: list[Service] = []

    def begin(kind: Callable[..., Service], *options: Any) -> Service:
        begun.append(kind(tmp_path / f"service-{len(begun)}.log", *options))
        return begun[-1]

    yield begin
    for service in begun:
        service.process.send_signal(signal.SIGKILL)
        service.process.wait(SECONDS)
