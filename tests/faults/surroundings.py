"""Cases in which one file of a store, or of its root, fails its users: removed, older, cut, or of
another boot.

A case is a kind of tier, a file, a harm, and whether an engine has the store open meanwhile.
Engines are processes that store chunks whose bytes name the weights and the number of clears at
that moment. So a chunk that is served late shows by itself that it belongs to other weights, or
that it was cleared. Every engine gets the version of the weights from its case.

`python -m tests.faults.surroundings ROOT [--kind host|disk] [--cases N] [--seed N] [--jobs N]
[--only PATTERN]` runs all cases, or the untouched ones and N that the seed chooses, in a directory,
and prints one line of JSON for each. Exit code 1 if one went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import random
import re
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal, cast

import numpy as np

from pagoda.base.clock import Clock
from pagoda.base.errors import StoreError
from pagoda.base.metrics import Reason
from pagoda.cache import Cache
from pagoda.config import Config
from pagoda.keys import Namespace, chunk_keys
from pagoda.layout import KVLayout
from pagoda.transfer import BlockKV

Kind = Literal["host", "disk"]
Harm = Literal["untouched", "removed", "older", "cut", "of another boot"]

KINDS: tuple[Kind, ...] = ("host", "disk")
POLICIES = ("lru", "hindsight")
HARMS: tuple[Harm, ...] = ("removed", "older", "cut", "of another boot")
# What only people read, or only helps: an engine that lost one of them serves all the same.
GUARD_NOTHING = (
    "counters",
    "limit",
    "namespaces",
    "prompts",
    "requests",
    "speeds",
    "waiting",
)
GUARD_NOTHING_PREFIXES = ("learnt-",)

CHUNK_TOKENS = 16
CHUNKS = 4  # of a prompt
SLOTS = 64
LAYOUT = KVLayout.opaque(CHUNK_TOKENS, 8192, "surroundings")
PROMPTS = range(6)
KEPT = range(4)  # those that are stored after the last clear
RACED = range(100, 112)
# for one step of an engine, on a machine that may be busy: then it hangs
ANSWER_SECONDS = 240.0
# for a process to notice a replaced file; the longer one is the second try
NOTICE_SECONDS = (2.0, 15.0)
# what is left of a longer file: the first pages of the tables, and no more
CUT_BYTES = 12288
MAGIC = 0x50414741

# what an engine says about one chunk: "wrong", or the weights and the number of clears that its
# bytes name
Said = Literal["wrong"] | tuple[int, int]


@dataclass(frozen=True)
class Case:
    """One thing that happens to one file.

    `file` is relative to the root of the tier; `STORE` is the store's directory in it.
    """

    kind: Kind
    file: str
    harm: Harm
    running: bool
    # two engines store at once right after the harm, and not only later
    races_first: bool = False
    # which admits every chunk; another one for the files that only it has
    policy: str = "lru"

    def __str__(self) -> str:
        state = "running" if self.running else "stopped"
        race = ", a race at once" if self.races_first else ""
        return f"{self.kind}, {state}: {self.file} {self.harm}{race}"

    @property
    def guards_nothing(self) -> bool:
        """Whether every chunk has to be served without this file."""
        name = Path(self.file).name
        return name in GUARD_NOTHING or name.startswith(GUARD_NOTHING_PREFIXES)

    @property
    def may_kill(self) -> bool:
        """Whether the engine that runs may die: a page of its memory is no longer there."""
        return self.kind == "host" and self.running and self.harm == "cut"


@dataclass
class Result:
    """What happened in one case. Without `violations` every promise was kept."""

    case: str
    kept: int = 0  # chunks that had to be there when the file was harmed
    served: int = 0  # how many of them the next engine got
    served_running: int = 0  # and the engine that had the store open
    deaths: int = 0
    allowed_deaths: int = 0
    refusals: list[str] = field(default_factory=list)
    # that the next engine gave for what it did not serve
    reasons: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    seconds: float = 0.0


class DiedError(Exception):
    """An engine ended by itself."""


class HungError(Exception):
    """An engine did not answer."""


# ---- an engine -----------------------------------------------------------------------------------


class _OtherBoot(Clock):
    """The machine's clock in an earlier boot."""

    def boot_id(self) -> str:
        return "11111111-2222-4333-8444-555555555555"


def tokens_of(prompt: int) -> np.ndarray:
    """Return the tokens of a prompt."""
    return np.random.default_rng(prompt).integers(
        0, 50_000, CHUNKS * CHUNK_TOKENS, dtype=np.int32
    )


def bytes_of(key: bytes, weights: int, clears: int) -> np.ndarray:
    """Return the bytes of a chunk: they name the weights and the number of clears, and each word
    depends on all.
    """
    first, second = np.frombuffer(key[:16], np.uint64)
    mixed = np.uint64(weights * 1_000_003 + clears * 7919 + 1)
    scale = (first ^ mixed) | np.uint64(1)
    words = np.arange(LAYOUT.chunk_bytes // 8, dtype=np.uint64) * scale + second
    words[:3] = MAGIC, weights, clears
    return words.view(np.uint8)


def said_by(chunk: np.ndarray, key: bytes) -> Said:
    """Return what the bytes of a served chunk say."""
    magic, weights, clears = (int(word) for word in chunk.view(np.uint64)[:3])
    if magic != MAGIC or weights > 1000 or clears > 1000:
        return "wrong"
    return (
        (weights, clears)
        if np.array_equal(chunk, bytes_of(key, weights, clears))
        else "wrong"
    )


class _Lines(logging.Handler):
    """Keep what is logged, for the case to see why chunks were lost."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.name}: {record.getMessage()[:300]}")


class _Engine:
    """The process of an engine: it carries out the commands of its case."""

    def __init__(
        self, kind: Kind, policy: str, root: Path, other_boot: bool
    ) -> None:
        self._kind = kind
        self._policy = policy
        self._root = root
        self._clock = _OtherBoot() if other_boot else Clock()
        self._cache: Cache | None = None
        self._log = _Lines()
        logger = logging.getLogger("pagoda")
        logger.handlers = [self._log]
        logger.propagate = False
        # it logs every new store
        logging.getLogger("pagoda.tiers.register").setLevel(logging.ERROR)

    def serve(self, pipe: Connection) -> None:
        """Answer until it is killed."""
        while True:
            name, *arguments = pipe.recv()
            try:
                answer: tuple[str, object] = (
                    "done",
                    getattr(self, name)(*arguments),
                )
            except StoreError as error:
                answer = ("refused", f"{type(error).__name__}: {error}")
            except BaseException:  # a border: the case shows it  # noqa: BLE001
                answer = ("raised", traceback.format_exc())
            lines = self._log.lines
            self._log.lines = []
            pipe.send((*answer, lines))

    def open(self) -> None:
        """Open a cache with one tier."""
        size = SLOTS * LAYOUT.slot_bytes
        options: dict[str, object] = {
            "host_size": size,
            "host_path": str(self._root),
        }
        if self._kind == "disk":
            size = SLOTS * (LAYOUT.slot_bytes + 4096)
            options = {
                "host_size": 0,
                "disk_size": size,
                "disk_path": str(self._root),
            }
        config = Config(
            chunk_tokens=CHUNK_TOKENS,
            worth_it=False,
            policy=self._policy,
            deadline_seconds=30.0,
            **options,  # type: ignore[arg-type]
        )
        self._cache = Cache(
            config, namespace=Namespace("m"), layout=LAYOUT, clock=self._clock
        )

    @property
    def cache(self) -> Cache:
        assert self._cache is not None
        return self._cache

    def store(self, prompts: Sequence[int], weights: int, clears: int) -> int:
        """Store prompts; return how many chunks are stored or were there."""
        stored = 0
        for prompt in prompts:
            tokens = tokens_of(prompt)
            keys = chunk_keys(tokens, bytes(32), CHUNK_TOKENS)
            blocks = np.stack([bytes_of(key, weights, clears) for key in keys])
            answer = self.cache.store(tokens, BlockKV(blocks, LAYOUT))
            stored += answer.num_chunks + answer.present
        self.cache.flush(60.0)
        return stored

    def read(self, prompts: Sequence[int]) -> tuple[list[Said], list[str]]:
        """Return what the served chunks say, and the reasons why there were not more."""
        said: list[Said] = []
        reasons: list[str] = []
        for prompt in prompts:
            tokens = tokens_of(prompt)
            blocks = np.zeros((CHUNKS, LAYOUT.chunk_bytes), np.uint8)
            hit = self.cache.retrieve(tokens, BlockKV(blocks, LAYOUT))
            keys = chunk_keys(tokens, bytes(32), CHUNK_TOKENS)
            served = hit.num_tokens // CHUNK_TOKENS
            said += [said_by(blocks[i], keys[i]) for i in range(served)]
            if served < CHUNKS:
                reasons.append(str(hit.reason))
        return said, reasons

    def read_whole(self, prompts: Sequence[int]) -> tuple[list[Said], list[str]]:
        """As `read`, after a rebuild from the slab has ended."""
        until = time.monotonic() + ANSWER_SECONDS / 4
        with contextlib.suppress(StoreError):
            while (
                self.cache.stats()["tiers"].get(self._kind, {}).get("unscanned")
                and time.monotonic() < until
            ):
                time.sleep(0.01)
        return self.read(prompts)

    def race(
        self, prompts: Sequence[int], weights: int, clears: int, rounds: int
    ) -> list[Said]:
        """Store and read prompts while another engine does the same, more of them than there are
        slots.
        """
        said: list[Said] = []
        order = random.Random(os.getpid())
        for _ in range(rounds):
            shuffled = order.sample(list(prompts), len(prompts))
            for at in range(0, len(shuffled), 4):
                self.store(shuffled[at : at + 4], weights, clears)
                said += self.read(shuffled[: at + 4])[0]
        return said

    def change(self) -> int:
        """Declare the weights changed."""
        return self.cache.weights_changed()

    def clear(self) -> dict[str, str]:
        """Clear the namespace; return the tiers that could not be cleared."""
        return dict(self.cache.clear().failed)

    def close(self) -> None:
        """Close the cache."""
        if self._cache is not None:
            self._cache.close(30.0)
            self._cache = None


def _be_engine(
    pipe: Connection, kind: Kind, policy: str, root: Path, other_boot: bool
) -> None:
    _Engine(kind, policy, root, other_boot).serve(pipe)


class Engine:
    """One engine, as its case sees it. Killed at the end of the `with` block."""

    _FORKS = multiprocessing.get_context("fork")

    def __init__(
        self, result: Result, case: Case, root: Path, other_boot: bool = False
    ) -> None:
        self._result = result
        self._pipe, theirs = self._FORKS.Pipe()
        self._process = self._FORKS.Process(
            target=_be_engine,
            args=(theirs, case.kind, case.policy, root, other_boot),
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()

    def begin(self, name: str, *arguments: object) -> None:
        """Send it a command."""
        with contextlib.suppress(BrokenPipeError):  # it died: `end` says so
            self._pipe.send((name, *arguments))

    def end(self, name: str) -> object:
        """Return its answer. DiedError, HungError, StoreError."""
        ready = wait([self._pipe, self._process.sentinel], ANSWER_SECONDS)
        try:
            if not ready:
                raise HungError(name)
            kind, value, lines = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5.0)
            raise DiedError(
                f"{name}: exit code {self._process.exitcode}"
            ) from None
        self._result.log += lines
        if kind == "refused":
            raise StoreError(value)
        if kind == "raised":
            raise RuntimeError(f"{name} raised {value}")
        return value

    def do(self, name: str, *arguments: object) -> object:
        """Send it a command, and return its answer."""
        self.begin(name, *arguments)
        return self.end(name)

    def read(
        self, prompts: Sequence[int], name: str = "read"
    ) -> tuple[list[Said], list[str]]:
        """Return what the served chunks of prompts say, and the reasons why there were not more."""
        return cast("tuple[list[Said], list[str]]", self.do(name, prompts))


# ---- a case --------------------------------------------------------------------------------------


class Run:
    """The run of one case in an empty directory. `weights` and `clears` are the truth of the
    machine.
    """

    def __init__(
        self, case: Case, directory: Path, notice_seconds: float
    ) -> None:
        self.case = case
        self.directory = directory
        self.root = directory / "root"
        self.result = Result(str(case))
        self.weights = self.clears = 0
        self._notice_seconds = notice_seconds
        self._harmed = False

    def go(self) -> Result:
        """Run the case."""
        began = time.monotonic()
        try:
            self._go()
        except HungError as error:
            self.result.violations.append(f"hung: {error}")
        except DiedError as error:
            self.result.deaths += 1
            self.result.violations.append(f"died: {error}")
        except StoreError as error:
            self.result.violations.append(f"does not open: {error}")
        except RuntimeError as error:
            self.result.violations.append(f"raised: {error}")
        self.result.seconds = round(time.monotonic() - began, 2)
        return self.result

    def _go(self) -> None:
        case = self.case
        if case.harm == "of another boot":
            with self._engine(other_boot=True) as first:
                first.do("open")
                self._change(first)
                first.do("store", PROMPTS, self.weights, self.clears)
                first.do("close")
            self._keep_copy()
        with self._engine() as engine:
            self._prepare(engine)
            if case.running:
                self._harm()
                self._beside(engine)
            else:
                engine.do("close")
        if not case.running:
            self._harm()
            with self._engine() as second:
                self._open(second, alone=True)
                self._look("after the harm", second, kept=True)
                self._new_promises("a start later", second, second)
                second.do("close")
        with self._engine() as last:
            self._open(last, alone=True)
            self._look("at the next start", last)
            self._new_promises("at the next start", last, last)
            stored = cast(
                "int", last.do("store", KEPT, self.weights, self.clears)
            )
            said, _ = last.read(KEPT)
            self._judge("at the end", said)
            if (
                self._admits_all
                and min(stored, len(said)) < 0.95 * len(KEPT) * CHUNKS
            ):
                self._violated(
                    "useless",
                    f"{stored} chunks stored and {len(said)} served at the end",
                )
            last.do("close")
        reported = (
            self.result.log
            or self.result.refusals
            or set(self.result.reasons) - {str(Reason.ABSENT)}
        )
        if self.result.served < 0.95 * self.result.kept and not reported:
            self._violated(
                "silent",
                "chunks were lost, with no line in the log and no reason but `absent`",
            )

    def _engine(self, other_boot: bool = False) -> Engine:
        return Engine(self.result, self.case, self.root, other_boot)

    @property
    def _admits_all(self) -> bool:
        return self.case.policy == "lru"

    def _prepare(self, engine: Engine) -> None:
        """Leave chunks of earlier weights, cleared ones, and those that are right."""
        engine.do("open")
        engine.do("store", PROMPTS, self.weights, self.clears)
        if self.case.harm == "older":
            self._keep_copy()
        self._change(engine)
        engine.do("store", PROMPTS, self.weights, self.clears)
        self._clear(engine)
        engine.do("store", PROMPTS[:3], self.weights, self.clears)
        self._change(engine)
        engine.do("store", PROMPTS, self.weights, self.clears)
        self._clear(engine)
        engine.do("store", KEPT, self.weights, self.clears)
        said, _ = engine.read(KEPT)
        self._judge("before the harm", said)
        self.result.kept = len(said)
        if self._admits_all and len(said) < len(KEPT) * CHUNKS:
            self._violated("useless", f"{len(said)} chunks before the harm")

    def _beside(self, engine: Engine) -> None:
        """Let the engine that has the store open go on, and another one begin."""
        alive: list[Engine] = [engine]
        with self._engine() as second:
            with self._may_die(engine, alive):
                self._look(
                    "after the harm, by the engine that runs",
                    engine,
                    running=True,
                )
            if self._open(second, alone=engine not in alive):
                alive.append(second)
                self._look(
                    "after the harm, by the next engine", second, kept=True
                )
            if self.case.races_first:
                self._race("at once", alive, engine)
            time.sleep(self._notice_seconds)
            for one in (second, engine, second):
                if one in alive:
                    with self._may_die(engine, alive):
                        self._new_promises("later, two engines", one, *alive)
            self._race("later", alive, engine)
            for one in list(alive):
                with self._may_die(engine, alive):
                    one.do("close")

    @contextlib.contextmanager
    def _may_die(self, engine: Engine, alive: list[Engine]) -> Iterator[None]:
        """Go on without the engine that ran, if the case may kill it and did."""
        try:
            yield
        except DiedError:
            if not self.case.may_kill or engine not in alive:
                raise
            alive.remove(engine)
            self.result.allowed_deaths += 1

    def _open(self, engine: Engine, alone: bool) -> bool:
        """Open the store in an engine; it may be refused with a sentence only while another one has
        it open.
        """
        try:
            engine.do("open")
        except StoreError as error:
            if alone:
                raise
            self.result.refusals.append(str(error)[:300])
            return False
        return True

    def _look(
        self, when: str, engine: Engine, kept: bool = False, running: bool = False
    ) -> None:
        said, reasons = engine.read(PROMPTS, "read_whole")
        self._judge(when, said)
        if kept:
            self.result.served = len(said)
            self.result.reasons = sorted(set(reasons))
        if running:
            self.result.served_running = len(said)

    def _new_promises(self, when: str, engine: Engine, *others: Engine) -> None:
        """Change the weights and clear, in one engine; nothing of before may be served by any."""
        self._change(engine)
        for one in others:
            self._judge(
                f"{when}, after a change of weights", one.read(PROMPTS)[0]
            )
        engine.do("store", PROMPTS[:2], self.weights, self.clears)
        self._clear(engine)
        for one in others:
            self._judge(f"{when}, after a clear", one.read(PROMPTS)[0])
        engine.do("store", PROMPTS[2:4], self.weights, self.clears)

    def _race(self, when: str, engines: Sequence[Engine], runs: Engine) -> None:
        """Let engines store and read the same prompts at the same time."""
        for one in engines:
            one.begin("race", RACED, self.weights, self.clears, 2)
        alive = list(engines)
        for one in list(engines):
            with self._may_die(runs, alive):
                self._judge(
                    f"{when}, while two engines store",
                    cast("list[Said]", one.end("race")),
                )
        if isinstance(engines, list):
            engines[:] = alive

    def _change(self, engine: Engine) -> None:
        engine.do("change")
        self.weights += 1

    def _clear(self, engine: Engine) -> None:
        if not engine.do("clear"):  # else it says that it did not
            self.clears += 1

    def _judge(self, when: str, said: Sequence[Said]) -> None:
        found = Counter[str]()
        for one in said:
            if one == "wrong":
                found["wrong"] += 1
            elif one[0] != self.weights:
                found["other weights"] += 1
            elif one[1] != self.clears:
                found["cleared"] += 1
        for what, count in found.items():
            self._violated(what, f"{count} of {len(said)} chunks, {when}")

    def _violated(self, what: str, text: str) -> None:
        self.result.violations.append(f"{what}: {text}")

    # -- files

    def _path(self) -> Path | None:
        """Return the file that is harmed, if it is there."""
        parts = Path(self.case.file).parts
        if parts[0] != "STORE":
            path = self.root / self.case.file
            return path if path.exists() else None
        stores = [state.parent for state in self.root.glob("*/state")]
        found = [
            one / Path(*parts[1:])
            for one in stores
            if (one / Path(*parts[1:])).exists()
        ]
        return found[0] if found else None

    def _keep_copy(self) -> None:
        if (path := self._path()) is not None:
            shutil.copy2(path, self.directory / "copy")

    def _harm(self) -> None:
        path = self._path()
        copy = self.directory / "copy"
        if path is None or self.case.harm == "untouched":
            return
        if self.case.harm == "removed":
            path.unlink()
        elif self.case.harm == "cut":
            os.truncate(path, min(path.stat().st_size // 2, CUT_BYTES))
        elif copy.exists():  # else there was no such file at that time
            shutil.copy2(copy, path.with_name(".put-back"))
            os.replace(path.with_name(".put-back"), path)


def files_of(kind: Kind, policy: str, directory: Path) -> list[str]:
    """Return the files of a store and of its root, as an engine has them while it runs and leaves
    them.
    """
    run = Run(
        Case(kind, "none", "untouched", False, policy=policy), directory, 0.0
    )
    with run._engine() as engine:
        run._prepare(engine)
        found = {path for path in run.root.rglob("*") if path.is_file()}
        engine.do("close")
    found |= {path for path in run.root.rglob("*") if path.is_file()}
    names = set[str]()
    for path in found:
        parts = path.relative_to(run.root).parts
        names.add(
            str(
                Path(
                    *(
                        "STORE"
                        if (run.root / parts[0]).is_dir() and i == 0
                        else part
                        for i, part in enumerate(parts)
                    )
                )
            )
        )
    shutil.rmtree(directory, ignore_errors=True)
    return sorted(names)


def cases_of(kind: Kind, directory: Path) -> list[Case]:
    """Return all cases of a kind of tier; the directory is used and removed."""
    found: list[Case] = []
    policies: dict[str, str] = {}
    for policy in POLICIES:
        for file in files_of(kind, policy, directory):
            policies.setdefault(file, policy)
    for running in (False, True):
        found.append(Case(kind, "none", "untouched", running))
        for file, policy in sorted(policies.items()):
            for harm in HARMS:
                found.append(Case(kind, file, harm, running, policy=policy))
                if running:
                    # in one case the race evicts what later checks look for, in the other one it
                    # comes late
                    found.append(
                        Case(
                            kind,
                            file,
                            harm,
                            running,
                            races_first=True,
                            policy=policy,
                        )
                    )
    return found


def run_case(case: Case, directory: Path) -> Result:
    """Run a case in a directory that is made and removed; once more, with patience, if only its
    members were late.
    """
    result = Result(str(case))
    for notice_seconds in NOTICE_SECONDS:
        directory.mkdir(parents=True)
        try:
            result = Run(case, directory, notice_seconds).go()
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        if not case.running or not all(
            " later, two engines" in one for one in result.violations
        ):
            break
    return with_controls(case, result)


def with_controls(case: Case, result: Result) -> Result:
    """Add what was lost without need."""
    needed = 0.0
    if case.may_kill:
        needed = 0.0
    elif case.harm == "untouched":
        needed = 1.0
    elif case.guards_nothing and not result.refusals:
        needed = 0.95
    if result.served < needed * result.kept:
        result.violations.append(
            f"lost: {result.served} of {result.kept} chunks are served"
        )
    return result


def _be_case(case: Case, directory: Path, pipe: Connection) -> None:
    pipe.send(asdict(run_case(case, directory)))


def run_all(
    cases: Sequence[Case], directory: Path, jobs: int
) -> Iterator[Result]:
    """Run cases, `jobs` at a time, each in a process; yield the results as they come."""
    forks = multiprocessing.get_context("fork")
    waiting = list(enumerate(cases))
    running: dict[Connection, tuple[Case, BaseProcess]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            number, case = waiting.pop(0)
            ours, theirs = forks.Pipe(duplex=False)
            process = forks.Process(
                target=_be_case, args=(case, directory / f"case-{number}", theirs)
            )
            process.start()
            theirs.close()
            running[ours] = case, process
        for pipe in wait(list(running)):
            assert isinstance(pipe, Connection)
            case, process = running.pop(pipe)
            try:
                yield Result(**pipe.recv())
            except EOFError:
                yield Result(str(case), violations=["the case itself ended"])
            pipe.close()
            process.join()


def table(results: Sequence[Result]) -> str:
    """Return the figures of a run, on one line."""
    kinds = Counter(
        re.split("[:]", violation)[0]
        for one in results
        for violation in one.violations
    )
    figures = {
        name: kinds[name]
        for name in (
            "wrong",
            "other weights",
            "cleared",
            "died",
            "hung",
            "raised",
        )
    }
    figures |= {
        name: kinds[name]
        for name in ("does not open", "lost", "silent", "useless")
    }
    allowed = sum(one.allowed_deaths for one in results)
    said = ", ".join(f"{count} {name}" for name, count in figures.items())
    return f"{len(results)} cases: {said}; {allowed} deaths of a host's file that was cut"


def main() -> int:
    """Run the cases; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1))
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    os.environ["XDG_STATE_HOME"] = str(options.root / "registers")
    cases = [
        case
        for kind in ([options.kind] if options.kind else KINDS)
        for case in cases_of(kind, options.root / "probe")
        if re.search(options.only, str(case))
    ]
    if options.cases is not None:
        controls = [case for case in cases if case.harm == "untouched"]
        harmed = [case for case in cases if case.harm != "untouched"]
        chosen = random.Random(options.seed).sample(
            harmed, min(options.cases, len(harmed))
        )
        cases = controls + chosen
    results: list[Result] = []
    for result in run_all(cases, options.root, options.jobs):
        results.append(result)
        print(json.dumps(asdict(result)), flush=True)
    print(table(results), file=sys.stderr)
    return int(any(result.violations for result in results))


if __name__ == "__main__":
    sys.exit(main())
