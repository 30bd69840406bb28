"""Shared fixtures and hypothesis profiles of all suites."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.homes import made_home

if TYPE_CHECKING:
    from pagoda.ledger import Ledger

# Each test has a deadline (pytest-timeout); hypothesis's own deadline would only measure the load
# of the machine.
_quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
# `quick` has the same examples in every run of the same code; `thorough` generates new ones.
settings.register_profile(
    "quick",
    max_examples=50,
    deadline=None,
    suppress_health_check=_quiet,
    derandomize=True,
)
settings.register_profile(
    "thorough", max_examples=2000, deadline=None, suppress_health_check=_quiet
)
# For mutants: one failure is enough, so there is no shrinking.
settings.register_profile(
    "mutants",
    settings.get_profile("quick"),
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


# Processes that a test starts use the same sources as the test, not an installed package.
_package = importlib.util.find_spec("pagoda")
assert _package is not None
assert _package.submodule_search_locations is not None
SOURCES = str(Path(_package.submodule_search_locations[0]).parent)
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys(filter(None, [SOURCES, os.environ.get("PYTHONPATH")]))
)

# What the tests and their processes write into a home goes into an empty one, and what a user has
# configured is not read: neither his files nor his variables. Worker processes share it.
_HOME = "HOME_OF_TESTS"
if _HOME not in os.environ:
    _made = made_home(Path(tempfile.gettempdir()))
    os.environ[_HOME] = _made
    for _name in list(os.environ):
        if _name.startswith("PAGODA_") and not _name.startswith("PAGODA_TEST_"):
            del os.environ[_name]
    for _name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        os.environ.pop(_name, None)
    # but what vLLM has compiled is used again: minutes of each of its tests
    _compiled = str(Path.home() / ".cache" / "vllm")
    os.environ.setdefault("VLLM_CACHE_ROOT", _compiled)
    os.environ["HOME"] = _made
    os.environ["XDG_STATE_HOME"] = str(Path(_made, "state"))

# A shell that starts the tests in the background makes them ignore Ctrl-C, and their child
# processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


SLOW_PARTS = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option by which CI runs another part of the slow tests with each commit."""
    parser.addoption(
        "--slow-part",
        type=int,
        metavar="N",
        help=f"of the slow tests, every one whose number is N modulo {SLOW_PARTS}",
    )


@pytest.hookimpl(trylast=True)  # after what is not chosen has gone
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Let each worker begin with its share of the slow tests: one that begins late runs alone at
    the end.
    """
    workers = getattr(config, "workerinput", {"workercount": 1})["workercount"]
    slow = list[pytest.Item]()
    others = list[pytest.Item]()
    for item in items:
        (others if item.get_closest_marker("slow") is None else slow).append(item)
    wanted = config.getoption("slow_part")
    if wanted is not None:
        part = slow[wanted % SLOW_PARTS :: SLOW_PARTS]
        left_out = set(slow).difference(part)
        config.hook.pytest_deselected(items=list(left_out))
        slow = part
        items[:] = [item for item in items if item not in left_out]
    # there the tests of a file share an engine, and go on from what the one before has left
    if all(item.path.parent.name == "vllm" for item in items):
        return
    items[:] = [
        item
        for at in range(workers)
        for part in (slow, others)
        for item in part[
            at * len(part) // workers : (at + 1) * len(part) // workers
        ]
    ]


gc.disable()  # until all tests are collected: a fifth of that time otherwise


def pytest_collection_finish() -> None:
    """Leave all modules out of garbage collections, each of which takes half a second in a child
    process.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


_MANY_FILES = 200


def _open_ledgers() -> list[Ledger]:
    """Return the ledgers that this process has open; the package is not imported for it."""
    module = sys.modules.get("pagoda.ledger.ledger")
    return list(module._ledgers) if module is not None else []


def _close_others(kept: Sequence[Ledger]) -> None:
    """Close what a test left open: each store has eleven open files, a user may have 1,024."""
    kept_ids = set(map(id, kept))
    for ledger in _open_ledgers():
        if id(ledger) not in kept_ids:
            ledger._uses = 1
            ledger.close()


@pytest.fixture(autouse=True)
def _no_store_stays_open() -> Iterator[None]:
    kept = _open_ledgers()
    yield
    _close_others(kept)
    # a mapping keeps a file open until its object is collected, and many wait for that in a circle
    if len(os.listdir("/proc/self/fd")) > _MANY_FILES:
        gc.collect()


@pytest.fixture
def shm_root(_no_store_stays_open: None) -> Iterator[Path]:
    """Create a directory in shared memory for this test, and remove it afterwards."""
    kept = _open_ledgers()
    root = Path(tempfile.mkdtemp(prefix="pagoda-test-", dir="/dev/shm"))
    try:
        yield root
    finally:
        _close_others(kept)
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def shm_module_root() -> Iterator[Path]:
    """Create a directory in shared memory for the tests of one module, and remove it afterwards."""
    root = Path(tempfile.mkdtemp(prefix="pagoda-test-", dir="/dev/shm"))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def registers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the directory of all registers of tiers: `mktemp` for each would look through all that
    it made before.
    """
    return tmp_path_factory.mktemp("registers")


@pytest.fixture(autouse=True)
def register_of_tiers(registers: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a separate register of tiers, so that its tiers are in no register of the user
    or another test.
    """
    directory = Path(tempfile.mkdtemp(dir=registers))
    monkeypatch.setenv("XDG_STATE_HOME", str(directory))
    return directory
