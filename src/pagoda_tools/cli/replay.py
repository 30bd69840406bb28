"""`pagoda replay`: simulates a cache of another size or policy with recorded requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

from typer import Option

from pagoda.config import Config
from pagoda.config.sizes import AUTO
from pagoda_tools.cli import UsageError, printing, replay_inputs
from pagoda_tools.cli.load_speeds import speeds_of
from pagoda_tools.cli.replay_inputs import OPTIMUM, Cell, Trace, best, simulated
from pagoda_tools.cli.stores import (
    AsJson,
    ConfigFile,
    Wide,
    configured,
    given_bytes,
)

Speed: TypeAlias = Annotated[
    float | None,
    Option(
        min=1e-3,
        metavar="GB/S",
        help="The speed of loading chunks from this tier.",
    ),
]
_PNG = Path("pagoda-curve.png")
# the time of a simulation, relative to hindsight
_WEIGHTS = {"lru": 0.04, OPTIMUM: 0.01}
_OTHERS = 1.0


def replay(
    trace: replay_inputs.TraceFile = replay_inputs.SAMPLE,
    capacity_chunks: Annotated[
        list[int] | None, Option(min=1, metavar="N")
    ] = None,
    host: Annotated[str | None, Option(metavar="SIZE")] = None,
    disk: Annotated[str | None, Option(metavar="SIZE")] = None,
    policy: replay_inputs.Policies = None,
    objective: replay_inputs.Objectives = None,
    model: replay_inputs.ModelName = None,
    bytes_per_token: replay_inputs.TokenBytes = None,
    kv_dtype: replay_inputs.KVType = "bfloat16",
    curve: Annotated[bool, Option("--curve")] = False,
    points: Annotated[int, Option(min=2, max=100, metavar="N")] = 8,
    wide: Wide = False,
    png: Annotated[Path | None, Option(metavar="FILE")] = None,
    host_speed: Speed = None,
    disk_speed: Speed = None,
    measured: Annotated[Path | None, Option(metavar="FILE")] = None,
    prefill: Annotated[float | None, Option(min=1, metavar="N")] = None,
    engines: Annotated[int | None, Option(min=1, max=10_000, metavar="N")] = None,
    remote: Annotated[str | None, Option(metavar="SIZE")] = None,
    machines: Annotated[
        int | None, Option(min=1, max=10_000, metavar="N")
    ] = None,
    route: Annotated[str | None, Option(metavar="NAME")] = None,
    remote_policy: Annotated[str | None, Option(metavar="NAME")] = None,
    remote_write_policy: Annotated[str | None, Option(metavar="NAME")] = None,
    link: Annotated[str | None, Option(metavar="RATE")] = None,
    prices: Annotated[Path | None, Option(metavar="FILE")] = None,
    jobs: replay_inputs.Jobs = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> int:
    """Simulate a cache of that size and policy with recorded requests.

    Args:
        capacity_chunks: One tier of that many chunks; can be repeated.
        host: Size of host memory, such as 64GiB.
        disk: Size of the disk below it, such as 1TiB.
        curve: Print hit rates by size, and plot them as a PNG.
        points: Number of sizes of the curve.
        png: File for the curve as PNG; default pagoda-curve.png.
        measured: File with speeds, printed by `pagoda bench --json`.
        prefill: Tokens per second that the engine computes; default: by the model.
        engines: Number of engines; default: as many as the trace needs without a cache.
        remote: Size of a remote tier below them, which all machines share.
        machines: Number of machines above --remote; default: 1.
        route: How requests get to machines: round-robin (default), prefix.
        remote_policy: The policy of --remote; default: lru.
        remote_write_policy: Which chunks are sent there: write_through (default), second_sight.
        link: Bandwidth of each machine's and the store's link, such as 25Gbit.
        prices: Prices of object stores (TOML); default: list prices.
    """
    tiers = {
        name: size
        for name, size in (("host", host), ("disk", disk), ("remote", remote))
        if size is not None
    }
    _refuse(capacity_chunks, tiers, curve, png)
    shared = {
        "--machines": machines, "--route": route, "--remote-policy": remote_policy,
        "--remote-write-policy": remote_write_policy, "--link": link, "--prices": prices,
    }  # fmt: skip
    timed = {
        "--host-speed": host_speed,
        "--disk-speed": disk_speed,
        "--measured": measured,
        "--prefill": prefill,
        "--engines": engines,
    }
    _refuse_given(shared if remote is None else timed, remote is not None)
    names = replay_inputs.runs_of(policy, objective, config)
    found = replay_inputs.trace_of(trace, as_json)
    chunk_bytes = replay_inputs.chunk_bytes_of(
        found, model, bytes_per_token, kv_dtype
    )
    if tiers:
        sizes = {
            name: given_bytes(f"--{name}", size) for name, size in tiers.items()
        }
        if remote is not None:
            from pagoda_tools.cli import replay_fleet
            from pagoda_tools.replay import ROUTES, WRITE_POLICIES

            way = replay_inputs.one_of(
                ROUTES, "--route", route or "round-robin", "route"
            )
            (theirs,) = replay_inputs.policies_of(
                [remote_policy or "lru"], config, "--remote-policy"
            )
            written = remote_write_policy or "write_through"
            written = replay_inputs.one_of(
                WRITE_POLICIES, "--remote-write-policy", written, "policy"
            )
            rate = replay_fleet.link_of(link)
            costs = replay_fleet.prices_of(prices)
            plan = replay_fleet.FleetPlan(
                found,
                sizes,
                _known(chunk_bytes),
                machines or 1,
                way,
                theirs,
                written,
                rate,
                costs,
            )
            replay_fleet.show(plan, names, jobs, as_json)
            return 0
        from pagoda_tools.cli import replay_tiers

        speeds = speeds_of(host_speed, disk_speed, prefill, measured, model)
        count = (
            (engines or replay_tiers.engines_for(found, speeds.prefill))
            if speeds.prefill
            else 0
        )
        alone = replay_tiers.ReplayPlan(
            found, sizes, _known(chunk_bytes), speeds, count
        )
        replay_tiers.show(alone, names, jobs, as_json)
        return 0
    chunks = list(dict.fromkeys(capacity_chunks or ()))
    if curve:
        from pagoda_tools.cli.hit_rate_plot import sizes_of

        names = list(dict.fromkeys([*names, "lru"]))
        chunks = sorted(chunks) or sizes_of(found.distinct, points)
    cells, optimum = _cells(found, names, chunks, jobs, as_json)
    drawn = (
        {
            "png": _png(
                png,
                [*cells, *optimum.values()],
                found,
                chunk_bytes,
                configured_sizes(configured(config)),
            )
        }
        if curve
        else {}
    )
    if as_json:
        printing.print_json(
            {**_as_json(found, cells, optimum, chunk_bytes), **drawn}
        )
        return 0
    _print_cells(found, cells, optimum, chunk_bytes, wide)
    if drawn.get("png"):
        print(f"\n{drawn['png']}")
    return 0


def _refuse(
    chunks: Sequence[int] | None,
    tiers: dict[str, str],
    curve: bool,
    png: Path | None,
) -> None:
    """Raise UsageError for options that exclude each other."""
    if tiers and (chunks or curve):
        named = " and ".join(f"--{name}" for name in tiers)
        raise UsageError(f"{named}: leave out --capacity-chunks and --curve")
    if png is not None:
        if not curve:
            raise UsageError("--png needs --curve")
        from pagoda_tools.cli.hit_rate_plot import check_png

        check_png(png)
    if not (tiers or chunks or curve):
        raise UsageError(
            "a size is needed: --capacity-chunks, --host, --disk, --remote, --curve"
        )


def _refuse_given(options: Mapping[str, object], is_fleet: bool) -> None:
    """Raise UsageError if one of these options was given: they have no meaning without, or with,
    --remote.
    """
    for name, value in options.items():
        if value is not None:
            raise UsageError(
                f"{name}: --remote simulates no time; leave it out"
                if is_fleet
                else f"{name} needs --remote SIZE"
            )


def _known(chunk_bytes: int | None) -> int:
    """Return the bytes of a chunk. Raises UsageError for None."""
    if chunk_bytes is None:
        raise UsageError(
            "--host, --disk and --remote need --model NAME or --bytes-per-token N"
        )
    return chunk_bytes


def _cells(
    trace: Trace,
    policies: Sequence[str],
    sizes: Sequence[int],
    jobs: int | None,
    quiet: bool,
) -> tuple[list[Cell], dict[int, Cell]]:
    """Simulate every policy at every size; return its cells, and the optimum by size."""
    from pagoda_tools.cli.trace_pool import TraceJob, TracePool

    work = [
        TraceJob(simulated, (name, trace.room(size)), _WEIGHTS.get(name, _OTHERS))
        for size in sizes
        for name in policies
    ]
    work += [
        TraceJob(best, (trace.room(size),), _WEIGHTS[OPTIMUM]) for size in sizes
    ]
    # the longest first, so that all processes end at about the same time
    work.sort(key=lambda piece: -piece.weight)
    with TracePool(trace.requests, jobs, quiet) as pool:
        found = pool.run(work, f"replaying {trace.name}")
    by_room = {(cell.policy, cell.chunks): cell for cell in found}
    cells = [
        by_room[name, trace.room(size)]._replace(chunks=size)
        for size in sizes
        for name in policies
    ]
    return cells, {
        size: by_room[OPTIMUM, trace.room(size)]._replace(chunks=size)
        for size in sizes
    }


def _as_json(
    trace: Trace,
    cells: Sequence[Cell],
    optimum: Mapping[int, Cell],
    chunk_bytes: int | None,
) -> dict[str, object]:
    """Return the trace, and all cells as its runs."""
    runs: list[dict[str, object]] = []
    for cell in cells:
        run: dict[str, object] = {
            **replay_inputs.named(cell.policy),
            "capacity_chunks": cell.chunks,
            "hit_rate": cell.hit_rate,
            "prefill_saved": cell.saved_rate,
            "chunks_written": cell.chunks_written,
            "optimum": optimum[cell.chunks].hit_rate,
        }
        if chunk_bytes:
            run["capacity_bytes"] = cell.chunks * chunk_bytes
            run["bytes_written"] = cell.chunks_written * chunk_bytes
        runs.append(run)
    return trace.report(runs)


def _print_cells(
    trace: Trace,
    cells: Sequence[Cell],
    optimum: Mapping[int, Cell],
    chunk_bytes: int | None,
    wide: bool,
) -> None:
    slot_bytes = chunk_bytes or 0
    rows = [
        {
            "policy": cell.policy,
            "chunks": cell.chunks,
            "bytes": printing.size(cell.chunks * slot_bytes),
            "hit rate": printing.share(cell.hit_rate, 1),
            "saved": printing.share(cell.saved_rate, 1),
            "optimum": printing.share(optimum[cell.chunks].hit_rate, 1),
            "of what is possible": printing.share(cell.hit_rate, trace.infinite),
            "written": cell.chunks_written,
            "bytes written": printing.size(cell.chunks_written * slot_bytes),
        }
        for cell in cells
    ]
    unknown = () if chunk_bytes else ("bytes", "bytes written")
    rare = () if wide else ("written", "bytes written")
    printing.print_dicts(trace.title, rows, without=(*unknown, *rare))


def configured_sizes(config: Config) -> dict[str, int]:
    """Return the sizes of the tiers that are configured, in bytes, by option."""
    host = "host_size (auto)" if config.host_size == AUTO else "host_size"
    sizes = {host: config.host_bytes, "disk_size": config.disk_bytes}
    return {name: nbytes for name, nbytes in sizes.items() if nbytes}


def _png(
    png: Path | None,
    cells: Sequence[Cell],
    trace: Trace,
    chunk_bytes: int | None,
    marked: Mapping[str, int],
) -> str | None:
    """Draw the requested PNG, or the usual one if it can be drawn; return its name."""
    from pagoda_tools.cli.hit_rate_plot import check_png, save_png

    try:
        check_png(png or _PNG)
    except UsageError as trouble:
        printing.note(str(trouble))
        return None
    title = f"{trace.name}: {len(trace.requests):,} requests, {trace.chunk_tokens} tokens per chunk"
    save_png(png or _PNG, cells, trace.infinite, title, chunk_bytes, marked)
    return str(png or _PNG)
