"""Tables of the records of `transfer.py`: `benchmarks/gpu/table.py
docs/design/benchmarks/gpu-*.json [--write FILE]`.

docs/design/benchmarks/gpu.md is exactly the output for all records in that directory: never edit it
by hand.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

Json = Mapping[str, object]

HEAD = """# GPU transfers: what was measured

Written by `benchmarks/gpu/table.py` from the JSON beside it, never by hand. What it means: [README.md](README.md)."""  # noqa: E501
NOTHING = (
    "Nothing has been measured on a GPU yet: `make bench-gpu` on a machine with an H100 or "
    "H200."
)
ARROWS = {"down": "device -> host", "up": "host -> device"}
FORMS = {"pools": "a pool a layer", "blocks": "blocks outermost"}
_OTHERS = ("direct", "staged", "runs", "torch", "per block")


def page(documents: Sequence[Json]) -> str:
    """Return the whole page for these documents."""
    return (
        "\n\n".join([HEAD, *([tables(each) for each in documents] or [NOTHING])])
        + "\n"
    )


def tables(found: Json) -> str:
    """Return all tables of one document, under a heading that names the machine."""
    if "skipped" in found:
        return f"Skipped: {found['skipped']}"
    parts = [_heading(found), _machine(found)]
    parts += _section("Across the link", _crossing(found))
    parts += _section("Beside a stream of matrix products", _beside(found))
    parts += _section("Layer by layer", _layers(found))
    parts += _section("Registering host memory", _register(found))
    missed = [
        f"- `{name}`: {_number(found[name]):.3f} ({_of(found, 'notes', name)})"
        for name, goal in _mapping(found["targets"]).items()
        if not _mapping(goal)["ok"]
    ]
    parts += _section("Goals that were missed", "\n".join(missed))
    parts += _section("Left out", _list(found, "left_out", "why"))
    parts += _section("Failed", _list(found, "errors", "error"))
    return "\n\n".join(parts)


def _heading(found: Json) -> str:
    gpu = _mapping(found["gpu"])
    plan = found["plan"]
    said = [] if plan == "full" else [f"{plan} run"]
    if found.get("parts"):
        said.append(
            f"only {', '.join(str(each) for each in _sequence(found['parts']))}"
        )
    if not found.get("complete", True):
        said.append("stopped before its end")
    return f"## {', '.join([str(gpu.get('name', 'unknown')), str(found['date']), *said])}"


def _machine(found: Json) -> str:
    gpu = _mapping(found["gpu"])
    host = _mapping(found["machine"])
    link = " x".join(
        str(gpu[key])
        for key in ("pcie_link_gen_current", "pcie_link_width_current")
        if key in gpu
    )
    said = {
        "driver": gpu.get("driver_version"),
        "PCIe generation and width": link or None,
        "torch": gpu.get("torch"),
        "CUDA": gpu.get("cuda"),
        "triton": gpu.get("triton"),
        "SMs": gpu.get("sms"),
        "SM clock": gpu.get("clocks_sm"),
        "power limit": gpu.get("power_limit"),
        "programs by default": gpu.get("programs"),
        "processor": host.get("cpu"),
        "cores": host.get("cores"),
        "NUMA nodes": gpu.get("numa_nodes"),
        "kernel": host.get("kernel"),
        "Python": host.get("python"),
        "calling threads": gpu.get("calling_threads"),
        "torch threads": gpu.get("torch_threads"),
        "seconds of the whole run": found.get("seconds"),
    }
    rooms = [_mapping(each) for each in _sequence(found.get("host_memory", []))]
    kinds = dict.fromkeys(_room(each) for each in rooms)
    said["slots"] = "; ".join(kinds) or None
    return ", ".join(
        f"{name} {value}" for name, value in said.items() if value is not None
    )


def _room(room: Json) -> str:
    whole = (
        "registered"
        if room["registered_bytes"] == room["nbytes"]
        else "not registered"
    )
    return f"{room['kind']}, {whole}" + (
        f" ({room['trouble']})" if room.get("trouble") else ""
    )


def _crossing(found: Json) -> str:
    heads = (
        "KV",
        "memory",
        "chunks",
        "way across",
        "link GB/s",
        "ours GB/s",
        "of the link",
        "goal",
        "by",
        *_OTHERS,
    )
    lines = []
    for each in _cells(found, "crossing"):
        key = (
            f"{each['direction']}_{each['shape']}_{each['form']}_{each['chunks']}"
        )
        laps = _mapping(each["entrants"])
        ours = _mapping(laps["chosen"])
        registered = each["registered"]
        memory = f"{FORMS[str(each['form'])]}, runs of {_bytes(_number(each['run_bytes']))}"
        lines.append(
            (
                str(each["shape"]),
                memory if registered else f"{memory}, slots not registered",
                str(each["chunks"]),
                ARROWS[str(each["direction"])],
                f"{_median(_mapping(each['link'])['gb_per_second']):.2f}",
                f"{_median(ours['gb_per_second']):.2f}",
                f"{_median(ours['ratio']):.3f}",
                _goal(found, key) if registered else "",
                str(each["chosen"]) if registered else "a bounce buffer",
                *(_speed(laps, name) for name in _OTHERS),
            )
        )
    return _table(heads, lines)


def _beside(found: Json) -> str:
    heads = (
        "KV",
        "memory",
        "way across",
        "by",
        "programs",
        "alone GB/s",
        "beside GB/s",
        "products take",
        "goal",
        "TFLOP/s alone",
    )
    lines = []
    for each in _cells(found, "beside"):
        chosen = each["way"] == "chosen"
        way = f"chosen ({each['took']})" if chosen else str(each["way"])
        key = f"beside_{each['direction']}_{each['shape']}_{each['form']}_chosen"
        lines.append(
            (
                str(each["shape"]),
                FORMS[str(each["form"])],
                ARROWS[str(each["direction"])],
                way,
                "" if each["took"] == "runs" else str(each["programs"]),
                f"{_number(each['gb_per_second_alone']):.2f}",
                f"{_median(each['gb_per_second_beside']):.2f}",
                f"{_median(each['times']):.3f} x",
                _goal(found, key) if chosen else "",
                f"{_number(each['teraflops_alone']):.0f}",
            )
        )
    return _table(heads, lines)


def _layers(found: Json) -> str:
    heads = (
        "KV",
        "chunks",
        "by",
        "layer 0 ms",
        "middle layer ms",
        "all ms",
        "layer 0 of all",
        "goal",
        "all without a gate ms",
    )
    lines = []
    for each in _cells(found, "layers"):
        key = f"layer0_{each['shape']}_{each['chunks']}_{each['way']}"
        times = [
            f"{_median(each[name]) * 1e3:.3f}"
            for name in ("first_seconds", "middle_seconds", "whole_seconds")
        ]
        lines.append(
            (
                str(each["shape"]),
                str(each["chunks"]),
                str(each["way"]),
                *times,
                f"{_median(each['share']):.3f}",
                _goal(found, key),
                f"{_median(each['without_gate_seconds']) * 1e3:.3f}",
            )
        )
    return _table(heads, lines)


def _register(found: Json) -> str:
    lines = []
    for each in _cells(found, "register"):
        back = _mapping(each["unregister_gb_per_second"])
        for name, speeds in _mapping(each["register_gb_per_second"]).items():
            size = _bytes(_number(each["nbytes"]))
            lines.append(
                (
                    str(each["memory"]),
                    size,
                    name,
                    f"{_median(speeds):.2f}",
                    f"{_median(back[name]):.2f}",
                )
            )
    return _table(
        ("memory", "size", "by", "register GB/s", "unregister GB/s"), lines
    )


def _speed(laps: Json, name: str) -> str:
    if name not in laps:
        return ""
    return f"{_median(_mapping(laps[name])['gb_per_second']):.2f}"


def _goal(found: Json, key: str) -> str:
    goal = _mapping(found["targets"]).get(key)
    if goal is None:
        return ""
    wanted = _number(_mapping(goal)["target"])
    ok = _mapping(goal)["ok"]
    sign = ">=" if key.startswith(("down", "up")) else "<"
    return f"{sign} {wanted:.2f} {'ok' if ok else '**miss**'}"


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        return ""
    return "\n".join(
        "| " + " | ".join(line) + " |"
        for line in (heads, ["---"] * len(heads), *lines)
    )


def _section(title: str, text: str) -> list[str]:
    return [f"### {title}", text] if text else []


def _list(found: Json, name: str, what: str) -> str:
    return "\n".join(
        f"- {each['cell']}: {each[what]}" for each in _cells(found, name)
    )


def _of(found: Json, group: str, name: str) -> object:
    return _mapping(found[group])[name]


def _cells(found: Json, name: str) -> Iterable[Json]:
    return (_mapping(each) for each in _sequence(found.get(name, [])))


def _median(values: object) -> float:
    return statistics.median(_number(each) for each in _sequence(values))


def _bytes(number: float) -> str:
    for name, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:.0f} B"


def _mapping(value: object) -> Json:
    assert isinstance(value, dict)
    return value


def _sequence(value: object) -> Sequence[object]:
    assert isinstance(value, list)
    return value


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return value


def read(paths: Iterable[Path]) -> list[Json]:
    """Read the documents in these files, in the order of their names."""
    return [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(paths)
    ]


def write(directory: Path) -> None:
    """Write gpu.md beside the gpu-*.json of a directory, from all of them."""
    (directory / "gpu.md").write_text(
        page(read(directory.glob("gpu-*.json"))), encoding="utf-8"
    )


def main(arguments: list[str] | None = None) -> int:
    """Print the page of the named files, or write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="recorded JSON")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="write the page to FILE instead of printing it",
    )
    options = parser.parse_args(arguments)
    try:
        text = page(read(options.files))
    except (OSError, ValueError) as error:
        print(f"cannot read a record: {error}", file=sys.stderr)
        return 2
    if options.write is None:
        print(text, end="")
    else:
        options.write.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
