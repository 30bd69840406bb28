"""KV between a GPU and host slots against the link: `benchmarks/gpu/transfer.py [--json] [--quick]
[--only PART,...]`.

Our three copy methods and the chosen one, torch, and one copy per block, against one large pinned
copy; a compute stream with a concurrent transfer; a load layer by layer; the cost of registering
memory. Copied bytes are compared; speeds are not asserted. Without a GPU: one line, exit code 0.
The method: docs/design/benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    # instead of this directory, whose modules would hide others of the same name
    sys.path[0] = str(ROOT)
    sys.path.insert(1, str(ROOT / "src"))

if TYPE_CHECKING:
    from benchmarks.gpu.bench import Bench

SHM = Path("/dev/shm")


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object instead of tables",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two shapes, fewer chunks and rounds: a minute",
    )
    parser.add_argument(
        "--only",
        default="",
        help="some of the parts, as in --only cross_8b,beside",
    )
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument(
        "--seed",
        type=int,
        help="seed of data and block tables (default: a random one)",
    )
    parser.add_argument(
        "--shm-dir",
        type=Path,
        default=SHM,
        help="directory of the slots if it has enough space",
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="write gpu-NAME.json to DIR, and the tables of all records to gpu.md",
    )
    # a trial, on a CPU too
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and record. Return the exit code: 1 if a cell failed, 2 if something must be
    installed.
    """
    from benchmarks.gpu.ready import SKIPPED, trouble

    options = options_of(arguments)
    found = None if options.device == "cpu" and options.tiny else trouble()
    if found is not None:
        line = SKIPPED.format(why=found.why) if not found.code else found.why
        if options.json:
            print(
                json.dumps(
                    {"skipped": found.why, "exit_code": found.code, "line": line},
                    indent=1,
                )
            )
        else:
            print(line, file=sys.stderr if found.code else sys.stdout)
        return found.code
    try:
        import benchmarks.gpu.bench  # noqa: F401
    except ModuleNotFoundError as error:
        print(
            f"{error.name} is missing: {sys.executable} -m pip install {error.name}",
            file=sys.stderr,
        )
        return 2
    return _measure(options)


def _measure(options: argparse.Namespace) -> int:
    import torch

    from benchmarks.gpu.bench import Bench
    from benchmarks.gpu.devices import device_maker
    from benchmarks.gpu.plan import FULL, QUICK, TINY

    plan = FULL
    if options.tiny:
        plan = TINY
    elif options.quick:
        plan = QUICK
    seed = (
        int.from_bytes(os.urandom(4), "little")
        if options.seed is None
        else options.seed
    )
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device(
            "cuda",
            torch.cuda.current_device() if device.index is None else device.index,
        )
        torch.cuda.set_device(device)
    bench = Bench(plan, device, device_maker(device), seed, options.shm_dir)
    bench.wanted = list(filter(None, options.only.split(",")))
    unknown = [name for name in bench.wanted if name not in bench.parts]
    if unknown:
        print(
            f"--only accepts {', '.join(bench.parts)}, not {', '.join(unknown)}",
            file=sys.stderr,
        )
        return 2
    for name in bench.wanted or bench.parts:
        if bench.over:
            bench.leave_out(name)
            continue
        try:
            bench.parts[name]()
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            bench.errors.append(
                {"cell": name, "error": f"{type(error).__name__}: {error}"}
            )
        if options.record is not None:
            # after each part, so that an interrupted run keeps its measurements
            _record(bench, options.record)
    _print(bench, options)
    return 1 if bench.errors else 0


def _document(bench: Bench) -> Mapping[str, object]:
    from benchmarks.harness import document

    return document(bench.figures, extra=bench.extra())


def _print(bench: Bench, options: argparse.Namespace) -> None:
    try:
        bench.close()
    except Exception as error:  # noqa: BLE001
        bench.errors.append(
            {"cell": "link", "error": f"{type(error).__name__}: {error}"}
        )
    bench.complete = True
    if options.record is not None:
        _record(bench, options.record)
    found = _document(bench)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    from benchmarks.gpu.table import tables

    print(tables(json.loads(json.dumps(found))))


def _record(bench: Bench, directory: Path) -> None:
    from benchmarks.gpu.table import write

    found = _document(bench)
    gpu = found["gpu"]
    assert isinstance(gpu, dict)
    name = re.sub(
        r"[^a-z0-9]+", "-", str(gpu.get("name", "unknown")).lower()
    ).strip("-")
    directory.mkdir(parents=True, exist_ok=True)
    kind = [
        "gpu",
        name,
        *([bench.plan.name] if bench.plan.name != "full" else []),
        *bench.wanted,
    ]
    path = directory / f"{'-'.join(kind)}.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    write(directory)


if __name__ == "__main__":
    sys.exit(main())
