"""What `pagoda bench` measures: the tiers of a configuration, and the memory and the disk below
them.

Limit and tier take turns on the same bytes, so a busy machine slows both. Ratios are medians over
all turns. The stores are created beside the configured ones and removed afterwards: no stored chunk
is read or evicted.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pagoda.base import recorded_tiers
from pagoda.base.file_systems import nearest
from pagoda.base.signal_safe_threads import Pool, wait
from pagoda.config import Config
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.ledger import Reserved
from pagoda.slab.file import aligned
from pagoda.tiers import Chunk, DiskTier, Done, HostTier
from pagoda_tools.cli import FailedError

Bytes = npt.NDArray[np.uint8]
Step = Callable[[], object]

# the size of all slots together: several times a common last-level cache
_SPREAD_BYTES = 512 << 20
# one turn is a quarter of the slots: a member may reserve no more at a time
_TURNS_AROUND = 4
_LEDGER_BYTES = 64 << 20
_IO_SECONDS = 60.0


@dataclass
class Figure:
    """The speed of one operation and of its limit in each turn: GB/s (10^9 bytes)."""

    name: str
    threads: int
    limit: list[float] = field(default_factory=list)
    tier: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The tier's speed divided by that of the limit: the median over all turns."""
        return statistics.median(
            tier / limit
            for tier, limit in zip(self.tier, self.limit, strict=True)
        )

    def as_json(self) -> dict[str, float]:
        """Return the medians as plain values, in the order of the table."""
        return {
            "gb_per_second": statistics.median(self.tier),
            "limit_gb_per_second": statistics.median(self.limit),
            "ratio": self.ratio,
            "threads": self.threads,
            "turns": len(self.tier),
        }


def host_figures(
    config: Config, chunk_bytes: int, seconds: float, tick: Step
) -> list[Figure]:
    """Measure stores (reserve, copy, commit) and loads (match, copy, validate), and plain copies by
    one thread.
    """
    layout = KVLayout.opaque(config.chunk_tokens, chunk_bytes, "bench")
    size_bytes = _slots(chunk_bytes) * layout.slot_bytes
    parent = (
        Path(config.host_path).parent if config.host_shared else Path("/dev/shm")
    )
    with (
        _place(parent, 2 * size_bytes) as root,
        contextlib.closing(
            HostTier.open(layout, root, size_bytes, populate=False)
        ) as tier,
    ):
        tier.slab.populate(background=False)
        return _host_turns(tier, layout, seconds, tick)


def disk_figures(
    config: Config, chunk_bytes: int, seconds: float, tick: Step
) -> list[Figure]:
    """Measure verified writes and reads, and plain O_DIRECT I/O of the same bytes with as many
    threads.
    """
    layout = KVLayout.opaque(config.chunk_tokens, chunk_bytes, "bench")
    size_bytes = _slots(chunk_bytes) * (layout.slot_bytes + 4096)
    with _place(Path(config.disk_path).parent, 2 * size_bytes) as root:
        tier = DiskTier.open(
            layout,
            root,
            size_bytes,
            direct=config.disk_direct,
            durable=config.durable,
            io_threads=config.io_threads,
            queue_chunks=_slots(chunk_bytes),
            deadline_seconds=_IO_SECONDS,
        )
        with (
            contextlib.closing(tier),
            _limit_file(root, size_bytes, config.disk_direct) as limit,
        ):
            return _disk_turns(tier, limit, config, layout, seconds, tick)


def _host_turns(
    tier: HostTier, layout: KVLayout, seconds: float, tick: Step
) -> list[Figure]:
    namespace = Namespace("pagoda bench")
    tier.register(namespace)
    size = layout.chunk_bytes
    slots = _slots(layout.chunk_bytes)
    source = _filled(size)
    target = _filled(size)
    # shared anonymous memory consists of the same pages as /dev/shm, without a ledger
    room = np.frombuffer(mmap.mmap(-1, slots * size), np.uint8).reshape(
        slots, size
    )
    np.copyto(room, 1)
    bare = cycle([list(part) for part in np.split(room, _TURNS_AROUND)])
    part: list[Bytes] = []
    keys: list[bytes] = []

    def copy_in() -> None:
        part[:] = next(bare)
        for slot in part:
            np.copyto(slot, source)

    def copy_out() -> None:
        for slot in part:
            np.copyto(target, slot)

    def write() -> None:
        keys[:] = _fresh_keys(len(part))
        for at in range(0, len(keys), tier.ledger.window):
            asked = keys[at : at + tier.ledger.window]
            outcomes = tier.ledger.reserve(
                asked, namespace=namespace.root, start=at
            )
            reserved = [
                outcome for outcome in outcomes if isinstance(outcome, Reserved)
            ]
            for outcome in reserved:
                np.copyto(tier.slab.view(outcome.slot)[:size], source)
            if len(reserved) < len(asked) or not all(
                tier.ledger.commit(reserved)
            ):
                raise FailedError(
                    f"the host tier did not store a chunk: {outcomes[-1]}"
                )

    def read() -> None:
        match = tier.ledger.match_prefix(keys)
        for slot in match.slots.tolist():
            np.copyto(target, tier.slab.view(slot)[:size])
        if (
            len(match.slots) < len(keys)
            or not tier.ledger.still_valid(match.slots, match.generations).all()
        ):
            raise FailedError("the host tier lost a chunk while it was measured")

    writes = Figure("host_write", 1)
    reads = Figure("host_read", 1)
    _take_turns(
        writes,
        reads,
        slots // _TURNS_AROUND * size,
        (copy_in, write, copy_out, read),
        seconds,
        tick,
    )
    return [writes, reads]


def _slots(chunk_bytes: int) -> int:
    """Return how many slots a store gets: more than the processor's caches hold, and enough for a
    ledger.
    """
    return max(
        4 * _TURNS_AROUND,
        _SPREAD_BYTES // chunk_bytes // _TURNS_AROUND * _TURNS_AROUND,
    )


def _disk_turns(
    tier: DiskTier,
    limit: int,
    config: Config,
    layout: KVLayout,
    seconds: float,
    tick: Step,
) -> list[Figure]:
    namespace = Namespace("pagoda bench")
    tier.register(namespace)
    count = _slots(layout.chunk_bytes) // _TURNS_AROUND
    buffers = [aligned(layout.slot_bytes) for _ in range(count)]
    for buffer in buffers:
        buffer[: layout.chunk_bytes] = _filled(layout.chunk_bytes)
    keys: list[bytes] = []
    slot_bytes = layout.slot_bytes

    def save() -> None:
        keys[:] = _fresh_keys(count)
        links = enumerate(zip(keys, [None, *keys], buffers, strict=False))
        chunks = [
            Chunk(key, number, config.chunk_tokens, buffer, parent, lambda: True)
            for number, (key, parent, buffer) in links
        ]
        _all_done(tier.store(chunks, namespace.root), "write")

    def load() -> None:
        _all_done(tier.load(keys, buffers, namespace=namespace.root), "read")

    def bare_write(number: int) -> None:
        os.pwrite(limit, buffers[number].data, number * slot_bytes)

    def bare_read(number: int) -> None:
        os.preadv(limit, [buffers[number].data], number * slot_bytes)

    writes = Figure("disk_write", config.io_threads)
    reads = Figure("disk_read", config.io_threads)
    with Pool(config.io_threads, "pagoda-measure") as pool:

        def at_once(move: Callable[[int], None]) -> Step:
            return lambda: list(pool.map(move, range(count)))

        steps = (at_once(bare_write), save, at_once(bare_read), load)
        _take_turns(
            writes, reads, count * layout.chunk_bytes, steps, seconds, tick
        )
    return [writes, reads]


def _take_turns(
    writes: Figure,
    reads: Figure,
    nbytes: int,
    steps: Sequence[Step],
    seconds: float,
    tick: Step,
) -> None:
    """Time the steps (plain write, write, plain read, read) in turn until `seconds` are over, at
    least three times.
    """
    until = time.monotonic() + seconds
    while len(writes.tier) < 3 or time.monotonic() < until:
        for speeds, step in zip(
            (writes.limit, writes.tier, reads.limit, reads.tier),
            steps,
            strict=True,
        ):
            began = time.perf_counter()
            step()
            speeds.append(nbytes / (time.perf_counter() - began) / 1e9)
        tick()


def _fresh_keys(count: int) -> list[bytes]:
    return [secrets.token_bytes(32) for _ in range(count)]


def _filled(nbytes: int) -> Bytes:
    """Return random bytes; every page of them is in memory."""
    return np.resize(
        np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8), nbytes
    )


def _all_done(futures: Sequence[Future[Done]], what: str) -> None:
    wait(futures, _IO_SECONDS)
    for done in (future.result(0) for future in futures):
        if not done.ok:
            raise FailedError(
                f"the disk tier could not {what} a chunk: {done.reason}"
            )


@contextlib.contextmanager
def _place(parent: Path, need_bytes: int) -> Iterator[Path]:
    """Create a directory for a store, and remove it at the end. Raises FailedError if there is too
    little space.
    """
    parent = nearest(parent)
    room = os.statvfs(parent)
    if room.f_bavail * room.f_frsize < need_bytes + _LEDGER_BYTES:
        raise FailedError(
            f"{parent}: the measurement needs {need_bytes >> 20} MiB of free space; try a "
            "smaller --chunk-size"
        )
    try:
        root = Path(tempfile.mkdtemp(prefix="pagoda-bench-", dir=parent))
    except OSError as trouble:
        raise FailedError(
            f"{parent}: cannot be written: {trouble.strerror}"
        ) from None
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)
        recorded_tiers.remove(os.path.realpath(root))


@contextlib.contextmanager
def _limit_file(root: Path, nbytes: int, direct: bool | None) -> Iterator[int]:
    """Open a preallocated file for plain I/O; it bypasses the page cache if the file system can do
    that.
    """
    path = root / ".limit"
    flags = os.O_RDWR | os.O_CREAT
    bypass = 0 if direct is False else os.O_DIRECT
    try:
        fd = os.open(path, flags | bypass, 0o600)
    except OSError:
        fd = os.open(path, flags, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        yield fd
    finally:
        os.close(fd)
