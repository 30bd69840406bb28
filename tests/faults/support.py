"""What the fault tests share: stores made of known bytes, children that may die, small file
systems.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from pagoda.base.clock import Clock
from pagoda.codec import HEADER_BYTES
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger, Present, Reserved, StoreSpec
from pagoda.slab.memory import MemorySlab
from pagoda.tiers.base import Chunk
from pagoda.tiers.disk import DiskTier
from testbed.programs import need
from tests.children import child, wait

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = blake3(b"a namespace").digest()
FIELDS = {"model": "test"}
SLOT_BYTES = 8192
# for a call that has to succeed: a busy machine may stand still for a while
PATIENT_SECONDS = 30.0


def key(number: int) -> bytes:
    """The key of chunk `number` of one long prompt."""
    return blake3(b"chunk %d" % number).digest()


def keys(numbers: Iterable[int]) -> list[bytes]:
    """Keys of several chunks."""
    return [key(number) for number in numbers]


def payload(of: bytes, nbytes: int = SLOT_BYTES) -> np.ndarray:
    """The bytes that belong to a key: every 8-byte word depends on the key and on its place."""
    scale, shift = np.frombuffer(of[:16], np.uint64)
    words: np.ndarray = (
        np.arange(nbytes // 8, dtype=np.uint64) * (scale | np.uint64(1)) + shift
    )
    return words.view(np.uint8)


def memory_spec(
    root: Path,
    slots: int = 32,
    name: str = "fingerprint",
    limit_bytes: int | None = None,
) -> StoreSpec:
    """A small store in memory."""
    return StoreSpec(
        root=root,
        name=name,
        kind="memory",
        slots=slots,
        slot_bytes=SLOT_BYTES,
        limit_bytes=limit_bytes,
    )


class Store:
    """A ledger with its slab in memory, and the two things one does with them. Not thread-safe."""

    def __init__(
        self,
        root: Path,
        slots: int = 32,
        name: str = "fingerprint",
        limit_bytes: int | None = None,
    ) -> None:
        self.ledger = Ledger.open(memory_spec(root, slots, name, limit_bytes))
        self.slab = MemorySlab(
            self.ledger.slab_path,
            self.ledger.slots,
            self.ledger.slot_bytes,
            self.ledger.page_guards,
        )
        self.ledger.namespaces.register(NAMESPACE, FIELDS)

    def save(self, wanted: Sequence[bytes]) -> int:
        """Stores a prompt from its start, in windows with one stamp; returns how many of its chunks
        are in.
        """
        stamp = self.ledger.stamp()
        stored = 0
        for start in range(0, len(wanted), self.ledger.window):
            window = wanted[start : start + self.ledger.window]
            parent = wanted[start - 1] if start else None
            outcomes = self.ledger.reserve(
                window,
                namespace=NAMESPACE,
                start=start,
                parent=parent,
                tokens=16,
                stamp=stamp,
                deadline_seconds=PATIENT_SECONDS,
            )
            reserved = [one for one in outcomes if isinstance(one, Reserved)]
            for one in reserved:
                self.slab.view(one.slot)[:] = payload(one.key)
            stored += sum(
                self.ledger.commit(reserved, deadline_seconds=PATIENT_SECONDS)
            )
            stored += sum(isinstance(one, Present) for one in outcomes)
        return stored

    def load(self, wanted: Sequence[bytes]) -> int:
        """Reads the leading run of a prompt and returns its length; AssertionError if a valid chunk
        has other bytes.
        """
        match = self.ledger.match_prefix(wanted, deadline_seconds=PATIENT_SECONDS)
        copies = [self.slab.view(int(slot)).copy() for slot in match.slots]
        valid = self.ledger.still_valid(match.slots, match.generations)
        for one, copy, good in zip(wanted, copies, valid, strict=False):
            assert not good or np.array_equal(copy, payload(one))
        return (
            int(np.argmin(valid))
            if len(valid) and not valid.all()
            else len(valid)
        )

    def close(self) -> None:
        """Closes the ledger."""
        self.ledger.close()


def environment() -> dict[str, str]:
    """What a child needs so that it can import this module as `support`."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [
                os.environ.get("PYTHONPATH", ""),
                str(ROOT),
                str(Path(__file__).parent),
            ]
        )
    }


def python(
    code: str,
    *arguments: object,
    before: Sequence[str] = (),
    seconds: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Runs a script in a new process that can import this module as `support`."""
    command = [*before, sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(
        command,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    """What a script printed; AssertionError with its trace if it failed or was killed by a
    signal.
    """
    assert done.returncode == 0, (
        f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


def source_of(commit: str, place: Path) -> Path:
    """Unpack the source of an older version into `place` and return the directory `src`; skips the
    test where the history of the repository is not there.
    """
    packed = subprocess.run(
        ["git", "-C", ROOT, "archive", commit, "src"],
        capture_output=True,
        check=False,
    )
    if packed.returncode:
        pytest.skip(
            f"needs the history of the repository: {packed.stderr.decode().strip()}"
        )
    # not `tarfile`, whose safe way of unpacking Python 3.11 has since 3.11.4 only
    subprocess.run(["tar", "-x", "-C", place], input=packed.stdout, check=True)
    return place / "src"


def own_mounts() -> list[str]:
    """Return the words before a command that give it separate mounts; skips the test if this is not
    permitted.
    """
    words = ["unshare", "--mount", "--propagation", "private"]
    need("unshare")
    if subprocess.run(
        [*words, "true"], capture_output=True, check=False
    ).returncode:
        pytest.skip(
            "needs root (unshare --mount) for a file system of its own size"
        )
    return words


@contextlib.contextmanager
def open_files_left(count: int) -> Iterator[None]:
    """Let this process open only so many more files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    used = {
        number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")
    }  # not that of the list itself
    free = (number for number in itertools.count() if number not in used)
    least = next(itertools.islice(free, count, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def apart(work: Callable[[], object]) -> str:
    """Return what `work` returned in a forked child, as text: a separate process, and much faster
    than `python`.
    """
    receive, send = os.pipe()
    pid = child(lambda: os.write(send, str(work()).encode()))
    os.close(send)
    with os.fdopen(receive) as pipe:
        said = pipe.read()
    code = wait(pid)
    assert code == 0, f"exit code {code}, said {said!r}"
    return said


class AfterReboot(Clock):
    """The machine's clock, but after a restart of the machine."""

    def __init__(self, boot: str = "another boot") -> None:
        self._boot = boot

    def boot_id(self) -> str:
        """The id of that boot."""
        return self._boot


LAYOUT = KVLayout.opaque(16, SLOT_BYTES, "fault tests")
STRIDE = HEADER_BYTES + SLOT_BYTES
TENANT = Namespace(model="test")
OTHER_TENANT = Namespace(model="test", salt="other")


def disk(root: Path, slots: int = 40, clock: Clock | None = None) -> DiskTier:
    """Opens the disk tier of `slots` slots under a root."""
    tier = DiskTier.open(
        LAYOUT,
        root,
        disk_bytes(slots),
        policy="lru",
        deadline_seconds=PATIENT_SECONDS,
        clock=clock,
    )
    tier.register(TENANT)
    tier.register(OTHER_TENANT)
    return tier


def disk_bytes(slots: int) -> int:
    """A size for which the tier has `slots` slots."""
    return slots * STRIDE


def save_to(
    tier: DiskTier, wanted: Sequence[bytes], namespace: Namespace = TENANT
) -> int:
    """Stores a prompt from its start; returns how many of its chunks are on the disk."""
    parents = [None, *wanted]
    chunks = [
        Chunk(one, position, 16, payload(one), parents[position], lambda: True)
        for position, one in enumerate(wanted)
    ]
    stored = 0
    stamp = tier.ledger.stamp()
    for start in range(0, len(chunks), 16):
        stored += sum(
            one.result(60).ok
            for one in tier.store(
                chunks[start : start + 16], namespace.root, stamp=stamp
            )
        )
    return stored


def load_from(
    tier: DiskTier, wanted: Sequence[bytes], namespace: Namespace = TENANT
) -> list[bytes]:
    """Which of these keys the tier serves; AssertionError if one comes with other bytes."""
    served = []
    for one in wanted:
        found = tier.get(one, namespace=namespace.root)
        if found is not None:
            assert np.array_equal(found[:SLOT_BYTES], payload(one)), (
                f"wrong bytes for {one.hex()[:12]}"
            )
            served.append(one)
    return served
