"""Older versions on the stores of this one, beside it, and back again, with kills: never other
weights, never what was cleared, and nothing else is lost.

The older versions are taken from the history of this repository.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from pagoda.ledger.request_meters import read_meters
from testbed.patience import Patience
from testbed.servers import COMMAND_OF_ANY_VERSION
from tests.faults.support import ROOT, source_of

STEPS = Path(__file__).with_name("version_steps.py")
NOW = "this tree"
# both have tables of format 4, and count the changes of weights only in sizes of files
OLDER = (
    "ce45306c",
    "db1f5f08",
)
# has the format of this version, and counts nothing by model and tenant
WITHOUT_METERS = "1afea866"


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sources of each version, by its name."""
    found = {NOW: ROOT / "src"}
    for commit in (*OLDER, WITHOUT_METERS):
        found[commit] = source_of(commit, tmp_path_factory.mktemp(commit))
    return found


class Machine:
    """Two directories, which engines of several versions use one after the other."""

    def __init__(self, trees: dict[str, Path], host: Path, disk: Path) -> None:
        self._trees = trees
        self.host = host / "host"
        self.disk = disk / "disk"

    def start(self, version: str, end: str, *steps: str) -> subprocess.Popen[str]:
        """Start an engine."""
        command = [
            sys.executable,
            str(STEPS),
            str(self.host),
            str(self.disk),
            end,
            *steps,
        ]
        environment = {**os.environ, "PYTHONPATH": str(self._trees[version])}
        return subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, version: str, *steps: str, end: str = "close"
    ) -> dict[str, list[int]]:
        """Run an engine to its end; return what it found."""
        return answers(self.start(version, end, *steps), end)

    def reboot(self) -> None:
        """Lose what is in memory."""
        shutil.rmtree(self.host)


def answers(
    engine: subprocess.Popen[str], end: str = "close"
) -> dict[str, list[int]]:
    out, errors = engine.communicate(timeout=200)
    assert engine.returncode == (-9 if end == "kill" else 0), errors
    answer: dict[str, list[int]] = json.loads(out)
    return answer


@pytest.fixture
def machine(trees: dict[str, Path], shm_root: Path, tmp_path: Path) -> Machine:
    return Machine(trees, shm_root, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("older", OLDER)
def test_a_disk_store_of_an_older_version_is_kept_and_so_it_is_back_again(
    machine: Machine, older: str
) -> None:
    prompts = ",".join(map(str, range(8)))
    everything = {str(number): [4, 0] for number in range(8)}
    machine.run(older, f"store=0:{prompts}")
    for version, end in [
        (NOW, "close"),
        (older, "kill"),
        (NOW, "kill"),
        (older, "close"),
        (NOW, "close"),
    ]:
        machine.reboot()
        assert (
            machine.run(version, f"served=0:{prompts}", end=end) == everything
        ), version


@pytest.mark.slow
def test_that_a_store_is_rebuilt_is_logged_in_one_line(machine: Machine) -> None:
    machine.run(OLDER[0], "store=0:1")
    engine = machine.start(NOW, "close", "served=0:1")
    _, errors = engine.communicate(timeout=200)
    assert errors.count("rebuilding the ledger") == 1
    assert "format 4, this version writes 5" in errors


@pytest.mark.slow
@pytest.mark.parametrize("older", OLDER)
@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_change_of_weights_by_any_version_is_heeded_by_all(
    machine: Machine, older: str, end: str
) -> None:
    machine.run(older, "store=0:1,2", end=end)
    machine.run(NOW, "served=0:1", "change", "store=1:2", end=end)
    assert machine.run(
        older, "served=1:1,2", "store=1:3", "served=1:3", end=end
    ) == {
        "1": [0, 0],
        "2": [0, 0],
        "3": [4, 0],
    }
    assert machine.run(NOW, "served=1:1,2,3", end=end)["2"] == [4, 0], (
        "what this version stored is its own"
    )
    machine.run(older, "change", "store=2:4", end=end)
    for version in (NOW, older, NOW):
        found = machine.run(version, "served=2:1,2,3,4", end=end)
        assert [found[number][0] for number in "123"] == [0, 0, 0]
        for _, bad in found.values():
            assert not bad
    machine.reboot()
    for version in (older, NOW):
        found = machine.run(version, "served=2:1,2,3,4", end=end)
        assert [found[number][0] for number in "123"] == [0, 0, 0]
        for _, bad in found.values():
            assert not bad


@pytest.mark.slow
@pytest.mark.parametrize("older", OLDER)
@pytest.mark.parametrize("end", ["close", "kill"])
def test_what_any_version_cleared_stays_cleared(
    machine: Machine, older: str, end: str
) -> None:
    machine.run(older, "store=0:1", end=end)
    machine.run(NOW, "store=0:2", "clear", "store=0:3", end=end)
    machine.reboot()
    gone = {"1": [0, 0], "2": [0, 0]}
    assert machine.run(older, "served=0:1,2,3", end=end) == gone | {"3": [4, 0]}
    machine.run(older, "clear", "store=0:4", end=end)
    gone["3"] = [0, 0]
    for version in (NOW, older, NOW):
        assert machine.run(version, "served=0:1,2,3,4", end=end) == gone | {
            "4": [4, 0]
        }


def asked_of(root: Path) -> int:
    """Return the tokens that the meters of the stores in a directory have."""
    files = list(root.glob("*/meters"))
    return sum(
        meter.counts["asked_tokens"]
        for file in files
        for meter in read_meters(file)
    )


@pytest.mark.slow
@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_version_without_meters_leaves_those_of_this_one_alone(
    machine: Machine, end: str
) -> None:
    """Both share one store in host memory, at once and in turns; the disk store changes hands."""
    prompts = {"1": [4, 0], "2": [4, 0]}
    assert machine.run(NOW, "store=0:1,2", "served=0:1,2", end=end) == prompts
    counted = asked_of(machine.host)
    assert counted > 0
    expected = counted
    for version in (WITHOUT_METERS, NOW, WITHOUT_METERS, NOW):
        expected += counted * (version == NOW)
        assert machine.run(version, "served=0:1,2", end=end) == prompts
        assert asked_of(machine.host) == expected, version


@pytest.mark.slow
def test_a_version_without_meters_beside_this_one(
    machine: Machine, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    go = tmp_path / "go"
    engine = machine.start(
        NOW,
        "close",
        "store=0:1",
        "served=0:1",
        f"ready={ready}",
        f"go={go}",
        "served=0:1",
    )
    until = time.monotonic() + 120
    while not ready.exists() and time.monotonic() < until:
        time.sleep(0.01)
    counted = asked_of(machine.host)
    for end in ("close", "kill"):
        assert machine.run(WITHOUT_METERS, "served=0:1", end=end) == {"1": [4, 0]}
        assert asked_of(machine.host) == counted
    go.touch()
    assert answers(engine) == {"1": [4, 0]}
    assert asked_of(machine.host) == 2 * counted


@pytest.mark.slow
@pytest.mark.parametrize("first", [NOW, OLDER[0]])
def test_two_versions_at_once_never_share_a_disk_store(
    machine: Machine, tmp_path: Path, first: str
) -> None:
    second = OLDER[0] if first == NOW else NOW
    ready = tmp_path / "ready"
    go = tmp_path / "go"
    engine = machine.start(
        first, "close", "store=0:1", f"ready={ready}", f"go={go}", "served=0:1"
    )
    patience = Patience(120)
    while not ready.exists() and not patience.ended:
        time.sleep(0.01)
    refused = machine.run(second, "served=0:1")
    assert "another version of PagodaKV uses it" in refused["error"]
    go.touch()
    assert answers(engine) == {"1": [4, 0]}, "it kept its store"
    assert machine.run(second, "served=0:1") == {"1": [4, 0]}


@pytest.mark.slow
@pytest.mark.parametrize("older", OLDER)
def test_the_clear_of_an_older_version_names_the_stores_that_it_does_not_reach(
    machine: Machine, trees: dict[str, Path], tmp_path: Path, older: str
) -> None:
    """Open or not, and the next engine of that version discards what is left in host memory."""
    ready = tmp_path / "ready"
    go = tmp_path / "go"
    engine = machine.start(
        NOW, "close", "store=0:1", f"ready={ready}", f"go={go}", "served=0:1"
    )
    patience = Patience(120)
    while not ready.exists() and not patience.ended:
        time.sleep(0.01)
    for is_open in (True, False):
        done = clear_from_terminal(trees[older], machine.host, tmp_path)
        assert done.returncode == 1 and "not cleared" in done.stderr, done.stderr
        for store in machine.host.glob("*/"):
            assert str(store) in done.stderr
        if is_open:
            go.touch()
            assert answers(engine) == {"1": [4, 0]}
    shutil.rmtree(machine.disk)
    machine.run(older, "store=0:2")
    assert machine.run(NOW, "served=0:1") == {"1": [0, 0]}


def clear_from_terminal(
    tree: Path, root: Path, state: Path
) -> subprocess.CompletedProcess[str]:
    """Run `pagoda clear` of a version."""
    return subprocess.run(
        [*COMMAND_OF_ANY_VERSION, "clear", str(root), "--yes"],
        env={
            **os.environ,
            "PYTHONPATH": str(tree),
            "XDG_STATE_HOME": str(state),
            "COLUMNS": "300",
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_versions_and_kills(machine: Machine, seed: int) -> None:
    draw = random.Random(seed)
    weights = 0
    # prompts that may be found: stored with these weights, and not cleared since
    alive: set[int] = set()
    for turn in range(16):
        version = draw.choice([NOW, NOW, *OLDER])
        end = draw.choice(["close", "kill"])
        new = [100 * turn + number for number in range(3)]
        steps = [f"served={weights}:{listed(range(0, 100 * turn, 100))}"]
        action = draw.choice(["store", "store", "change", "clear", "reboot"])
        if action == "reboot" and machine.host.exists():
            machine.reboot()
        if action in ("change", "clear"):
            steps.append(action)
            alive.clear()
        weights += action == "change"
        steps.append(f"store={weights}:{listed(new)}")
        found_before = set(alive) if action not in ("change", "clear") else None
        answer = machine.run(version, *steps, end=end)
        assert not any(wrong for _, wrong in answer.values()), (
            seed,
            turn,
            version,
            answer,
        )
        if found_before is not None:
            hits = {int(number) for number, (count, _) in answer.items() if count}
            assert hits <= found_before, (
                seed,
                turn,
                version,
                hits - found_before,
            )
        alive.update(new)
    assert alive


def listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
