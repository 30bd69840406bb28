"""Common parts of the benchmarks: the command line, the plan, keys, a ledger in shared memory."""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness import MIB, Figure, report, say
from limits import fio

from pagoda.keys import Namespace
from pagoda.ledger import Ledger, StoreSpec

NAMESPACE = Namespace(model="benchmark")


@dataclass(frozen=True)
class Plan:
    """How much to measure, and where."""

    rounds: int
    quick: bool
    threads: int
    shm: Path
    disk: Path


def keys_of(name: str, count: int) -> list[bytes]:
    """Return `count` distinct 32-byte keys."""
    return [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(count)]


@contextmanager
def opened(
    plan: Plan, name: str, slots: int, slot_bytes: int
) -> Iterator[Ledger]:
    """Open a ledger in shared memory with the namespace registered; remove its directory
    afterwards.
    """
    with tempfile.TemporaryDirectory(
        prefix="pagoda-bench-", dir=plan.shm
    ) as root:
        spec = StoreSpec(
            root=Path(root),
            name=name,
            kind="memory",
            slots=slots,
            slot_bytes=slot_bytes,
        )
        ledger = Ledger.open(spec)
        try:
            ledger.namespaces.register(NAMESPACE.root, NAMESPACE.fields())
            yield ledger
        finally:
            ledger.close()


Part = Callable[[Plan], Sequence[Figure]]


def measure(
    plan: Plan, parts: Mapping[str, Part], wanted: set[str]
) -> list[Figure]:
    """Return the figures of the wanted parts, or of all parts if `wanted` is empty."""
    found: list[Figure] = []
    for name, part in parts.items():
        if not wanted or name in wanted:
            say(f"{name} ...")
            found += part(plan)
    return found


def fio_beside(plan: Plan) -> dict[str, object]:
    """Measure fio on the same filesystem; the values are None where fio is not installed."""
    with tempfile.TemporaryDirectory(
        prefix="pagoda-bench-", dir=plan.disk
    ) as directory:
        return {
            f"fio_{kind}": fio(Path(directory), kind, 512 * MIB)
            for kind in ("write", "read")
        }


def main(
    description: str | None,
    parts: Mapping[str, Part],
    beside: Mapping[str, Part],
    with_fio: bool = True,
) -> None:
    """Read the command line, measure and print. `beside`: parts whose figures have no target.

    `with_fio`: if all parts are measured, print what fio reaches on the same file system.
    """
    names = [*parts, *beside]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds, a smaller ledger"
    )
    parser.add_argument("--only", default="", help=f"some of: {','.join(names)}")
    parser.add_argument(
        "--threads", type=int, default=1, help="copying threads, of both sides"
    )
    parser.add_argument("--shm-dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument(
        "--disk-dir",
        type=Path,
        default=Path("/var/tmp"),
        help="on the disk to measure",
    )
    options = parser.parse_args()
    wanted = set(filter(None, options.only.split(",")))
    if wanted - set(names):
        parser.error(f"--only accepts {', '.join(names)}")
    plan = Plan(
        3 if options.quick else 9,
        options.quick,
        options.threads,
        options.shm_dir,
        options.disk_dir,
    )
    figures = measure(plan, parts, wanted)
    others = measure(plan, beside, wanted)
    report(
        figures,
        options.json,
        others,
        fio_beside(plan) if with_fio and not wanted else {},
    )
