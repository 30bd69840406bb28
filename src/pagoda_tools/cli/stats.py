"""`pagoda stats`: shows what is stored, what hits, what misses and why."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, Annotated

from typer import Option

from pagoda.base.metrics import GROWTH_BOUNDS, TIER_KINDS, by_reason
from pagoda_tools.cli import FAILED, UsageError, printing
from pagoda_tools.cli.headline import headline, trouble_line
from pagoda_tools.cli.remote_stores import (
    Unanswered,
    ask,
    exit_code,
    patience,
    remotes_of,
    worded,
)
from pagoda_tools.cli.stores import (
    AsJson,
    ConfigFile,
    Configured,
    Directory,
    Wide,
    find_stores,
    in_each,
    label,
)
from pagoda_tools.cli.text_tables import printable

if TYPE_CHECKING:
    from pathlib import Path

    from rich.text import Text

    from pagoda.config import RemoteSpec
    from pagoda.ledger.store_stats import StoreStats
    from pagoda_tools.serve.overview import RemoteUsage


def stats(
    directory: Directory = None,
    as_json: AsJson = False,
    prometheus: Annotated[bool, Option("--prometheus")] = False,
    wide: Wide = False,
    watch: Annotated[bool, Option("--watch")] = False,
    interval: Annotated[float | None, Option(min=0.1, max=3600)] = None,
    config: ConfigFile = None,
) -> int:
    """Show what the stores hold, what hit, what missed and why.

    Args:
        prometheus: Print the Prometheus text format.
        watch: Show it again and again, until Ctrl-C or q. With --json: one line each time.
        interval: With --watch: seconds between two looks, by default 2.
    """
    if as_json and prometheus:
        raise UsageError("--json and --prometheus: choose one")
    if watch and prometheus:
        raise UsageError("--watch and --prometheus: choose one")
    if interval is not None and not watch:
        raise UsageError("--interval is for --watch")
    show = partial(_show, directory, as_json, prometheus, wide, config)
    if watch:
        find_stores(directory, config)  # a wrong directory ends it at once
        return _watched(show, 2.0 if interval is None else interval, as_json)
    return show()


def _watched(
    show: Callable[[], int], interval_seconds: float, as_json: bool
) -> int:
    """Show it until the user ends that; return the last exit code."""

    def look() -> int:
        try:
            return show()
        except UsageError as trouble:  # the directory may come back
            printing.note(str(trouble))
            return FAILED

    from rich.text import Text

    from pagoda_tools.cli.live_screen import Key, LiveScreen

    out = printing.console()
    if as_json or not out.is_terminal or out.is_dumb_terminal:
        while True:
            if as_json:
                _print_line(look)
            else:
                print(time.strftime("%H:%M:%S"))
                look()
            sys.stdout.flush()
            time.sleep(interval_seconds)
    with LiveScreen(out) as screen:
        while True:
            said = _TerminalText()
            # remarks too: they would be drawn over
            with redirect_stdout(said), redirect_stderr(said):
                code = look()
            lines = Text.from_ansi(said.getvalue()).wrap(out, screen.width)
            clock = Text(f"{time.strftime('%H:%M:%S')}  q quit", style="dim")
            until = time.monotonic() + interval_seconds
            screen.draw(_cut([clock, *lines], screen.height))
            while (key := screen.wait(until)) is not None:
                if key is Key.QUIT:
                    return code
                screen.draw(_cut([clock, *lines], screen.height))


class _TerminalText(io.StringIO):
    """What would have been printed to a terminal."""

    def isatty(self) -> bool:
        return True


def _cut(lines: Sequence[Text], height: int) -> list[Text]:
    """Return as many lines as fit; the last one says how many do not."""
    from rich.text import Text

    if len(lines) <= height:
        return list(lines)
    missing = len(lines) - height + 1
    rest = f"and {missing} more lines: a larger terminal or pagoda top has them"
    return [*lines[: height - 1], Text(rest, style="dim")]


def _print_line(show: Callable[[], int]) -> None:
    """Print one JSON object as one line."""
    said = io.StringIO()
    with redirect_stdout(said):
        show()
    if said.getvalue():
        print(json.dumps(json.loads(said.getvalue())))


def _show(
    directory: Path | None,
    as_json: bool,
    prometheus: bool,
    wide: bool,
    config: Path | None,
) -> int:
    """Show it once; return the exit code."""
    found, broken = snapshots(find_stores(directory, config))
    shared = [remote_usage(spec) for spec in remotes_of(directory, config)]
    named = Configured(directory, config)
    troubles = {str(store): trouble for store, trouble in broken.items()}
    troubles |= {one.address: one.error for one in shared if one.error}
    if as_json:
        failures = [
            {"directory": str(store), "error": trouble}
            for store, trouble in broken.items()
        ]
        stores = [
            {"name": name, **snapshot.as_json()}
            for name, snapshot in zip(store_names(found), found, strict=True)
        ] + failures
        remotes = [remote._asdict() for remote in shared]
        printing.print_json(
            {
                "stores": stores,
                "remotes": remotes,
                "unconfigured": named.unnamed(troubles),
                **usage(found),
            }
        )
    elif prometheus:
        print(_exposition(found, broken, shared), end="")
    else:
        _print(found, shared, sum(map(named.names, troubles)), wide)
        if not (found or broken):
            printing.note(printing.NOTHING_STORED)
        _print_shared(shared)
    if not as_json:
        for place, trouble in troubles.items():
            named.note(place, trouble)
        for remote in shared:
            for warning in remote.warnings:
                printing.note(warning)
    return exit_code(named, troubles)


def snapshots(
    directories: Sequence[Path],
) -> tuple[list[StoreStats], dict[Path, str]]:
    """Return the facts and counters of the stores, and the errors of those that cannot be read."""
    if not directories:
        return [], {}
    from pagoda.ledger.store_stats import StoreStats

    found, broken = in_each(directories, StoreStats.of)
    return [
        snapshot._replace(directory=store) for store, snapshot in found.items()
    ], broken


def remote_usage(spec: RemoteSpec) -> RemoteUsage:
    """Ask a remote tier how full it is. The result has the error, if there is one."""
    from pagoda_tools.serve.overview import RemoteUsage

    try:
        found = ask(
            spec, lambda link: link.usage(time.monotonic() + patience(spec))
        )
    except Unanswered as trouble:
        return RemoteUsage(spec.name, spec.redacted, None, None, str(trouble))
    warnings = [worded(spec, text) for text in found.warnings]
    return RemoteUsage(
        spec.name,
        spec.redacted,
        found.used_bytes,
        found.limit_bytes,
        "",
        warnings,
        found.nodes,
        found.answering,
    )


def _print(
    found: list[StoreStats],
    shared: Sequence[RemoteUsage],
    troubles: int,
    wide: bool,
) -> None:
    stores = dict(zip(store_names(found), found, strict=True))
    if troubles:
        printing.print_text(trouble_line(troubles))
    for line in headline(stores, shared):
        printing.print_text(line)
    if not stores:
        return
    _print_room(stores, wide)
    printing.print_dicts("namespaces", namespace_rows(stores))
    printing.print_dicts("hits", hit_rows(stores))
    for by, rows in usage(found).items():
        printing.print_dicts(by, usage_rows(rows))
    _print_traffic(stores)
    for title, prefix in (("misses", "miss_"), ("drops", "drop_")):
        rows = [
            {"store": tier, "reason": reason, "chunks": count}
            for tier, snapshot in stores.items()
            for reason, count in by_reason(snapshot.counters, prefix).items()
        ]
        printing.print_dicts(f"{title} by reason", rows)
    pins = [
        (tier, *pin)
        for tier, snapshot in stores.items()
        for pin in snapshot.pins.items()
    ]
    printing.print_dicts(
        "pins",
        [{"store": tier, "chunks": n, "owner": owner} for tier, owner, n in pins],
    )


def store_names(found: Sequence[StoreStats]) -> list[str]:
    """Return the name of each store, which is the same in all commands."""
    if not found:
        return []
    from pagoda.ledger.store_names import store_names as named

    return named([(snapshot.tier, snapshot.directory) for snapshot in found])


def usage(found: Iterable[StoreStats]) -> dict[str, list[dict[str, object]]]:
    """Return what the "models" and the "tenants" of all these stores asked for, hit and saved."""
    from pagoda.ledger.request_meters import usage_by_model, usage_by_tenant

    meters = [meter for store in found for meter in store.meters]
    return {
        "models": usage_by_model(meters),
        "tenants": usage_by_tenant(meters),
    }


def usage_rows(
    usage: Sequence[Mapping[str, object]], most: int | None = None
) -> list[dict[str, object]]:
    """Return rows for people of some models or tenants, as `usage` has them; with `most`, only of
    the first ones. Prefill time that was saved is blank if it is not known.
    """
    rows: list[dict[str, object]] = []
    for one in usage[:most]:
        by = next(iter(one))
        numbers = {
            name: float(str(one[name]))
            for name in ("lookups", "asked_tokens", "hit_tokens", "loaded_tokens")
        }
        saved = one["saved_seconds"]
        rows.append(
            {
                by: printable(str(one[by])),
                "lookups": printing.count(int(numbers["lookups"])),
                "tokens": printing.count(int(numbers["asked_tokens"])),
                "hit": printing.share(
                    numbers["hit_tokens"], numbers["asked_tokens"]
                ),
                "loaded": printing.count(int(numbers["loaded_tokens"])),
                "saved": printing.age(
                    None if saved is None else float(str(saved))
                ),
            }
        )
    return rows


def hit_rows(stores: Mapping[str, StoreStats]) -> list[dict[str, object]]:
    """Return how much of the requested tokens was served, and from which tiers: one row per store
    with counts.

    A cache counts in its first local tier, for all its tiers.
    """
    return [
        {
            "counted in": tier,
            "lookups": printing.count(count["lookups"]),
            "hits": printing.count(count["hits"]),
            "hit tokens": printing.share(
                count["hit_tokens"], count["asked_tokens"]
            ),
            **{
                f"from {source}": printing.share(
                    count[f"hit_tokens_{source}"], count["asked_tokens"]
                )
                for source in TIER_KINDS
            },
        }
        for tier, count in (
            (tier, snapshot.counters) for tier, snapshot in stores.items()
        )
        if count["lookups"]
    ]


def _print_room(stores: Mapping[str, StoreStats], wide: bool) -> None:
    counted = ("ready", "free", "pinned", "members")
    rare = ("slots", "unbacked", "reserved", "leased")
    rows = [
        {
            "store": tier,
            **{
                name: printing.count(snapshot.gauges[name])
                for name in (*counted, *rare)
            },
            "slot": printing.size(snapshot.slot_bytes),
            "used": printing.size(snapshot.used_bytes),
            "size": printing.size(snapshot.grown_bytes),
            "directory": snapshot.directory,
        }
        for tier, snapshot in stores.items()
    ]
    printing.print_dicts("room", rows, without=() if wide else (*rare, "slot"))
    for snapshot in stores.values():
        if unscanned := snapshot.gauges.get("unscanned"):
            printing.note(
                f"{snapshot.directory}: {unscanned:,} slots are still to be scanned"
            )
        if taken := _memory_taken(snapshot):
            printing.note(f"{snapshot.directory}: {taken}")
        if nbytes := snapshot.gauges.get("hint_bytes"):
            printing.note(
                f"{snapshot.directory}: takes {printing.size(nbytes)} of memory to rank its chunks"
            )


def _memory_taken(store: StoreStats) -> str:
    """Return how much memory of the machine a host store has, and what kept it from growing; empty
    for a store that has all of its memory.
    """
    # a server of an earlier version does not send them
    now = store.gauges.get("allocated_bytes", 0)
    most = store.gauges.get("most_bytes", 0)
    refused = {
        bound: count
        for bound in GROWTH_BOUNDS
        if (count := store.counters.get(f"growth_refused_{bound}", 0))
    }
    if store.kind != "memory" or not (store.gauges["unbacked"] or refused):
        return ""
    told = (
        f"takes {printing.size(now)} of memory, grows to at most "
        f"{printing.size(most)}"
    )
    if refused:
        why = ", ".join(f"{bound} {count:,}" for bound, count in refused.items())
        told += f"; refused for lack of room: {why}"
    if failures := store.counters.get("growth_failures", 0):
        told += f"; {failures:,} pieces failed: see the engine's log"
    return told


def _print_shared(shared: list[RemoteUsage]) -> None:
    rows = [
        {
            "tier": remote.tier,
            "state": remote.state,
            "used": printing.size(remote.used_bytes),
            "limit": printing.size(remote.limit_bytes),
            "address": remote.address,
        }
        for remote in shared
    ]
    printing.print_dicts("remote tiers", rows)


def namespace_rows(
    stores: Mapping[str, StoreStats], most: int | None = None
) -> list[dict[str, object]]:
    """Return a row for each namespace of each store; with `most`, only for the largest ones, sorted
    by chunks.
    """
    found = [
        (tier, store.slot_bytes, row)
        for tier, store in stores.items()
        for row in store.namespaces
    ]
    if most is not None:
        found = sorted(found, key=lambda one: -one[2].chunks)[:most]
    return [
        {
            "store": tier,
            "namespace": row.root.hex()[:12],
            "chunks": printing.count(row.chunks),
            "bytes": printing.size(row.chunks * slot_bytes),
            "model": label(row.fields),
        }
        for tier, slot_bytes, row in found
    ]


def _print_traffic(stores: Mapping[str, StoreStats]) -> None:
    headings = {
        "stored_chunks": "stored",
        "stored_bytes": "bytes",
        "loaded_chunks": "loaded",
        "loaded_bytes": "bytes",
        "evicted_chunks": "evicted",
        "failed_checks": "damaged",
    }
    rows = [
        (tier, *(counted(name, one.counters[name]) for name in headings))
        for tier, one in stores.items()
    ]
    printing.print_table("traffic", ("store", *headings.values()), rows)


def counted(name: str, number: float) -> str:
    """Return the value of a counter for people: bytes with their unit, other numbers plain."""
    return (
        printing.size(number)
        if name.endswith("_bytes")
        else printing.count(round(number))
    )


def _exposition(
    found: list[StoreStats], broken: Iterable[Path], shared: list[RemoteUsage]
) -> str:
    """Return the facts and counters in Prometheus' text format."""
    from pagoda.tiers.remote.store_client import Usage

    try:
        from pagoda_tools.serve.exposition import Exposition, exposition
    except ModuleNotFoundError as missing:
        if missing.name != "prometheus_client":
            raise
        raise UsageError(
            "--prometheus needs prometheus-client: pip install 'pagodakv[metrics]'"
        ) from None
    remotes = {
        one.tier: None if one.error else Usage(one.used_bytes, one.limit_bytes)
        for one in shared
    }
    return exposition(
        Exposition(found, [str(store) for store in broken], remotes)
    )[0].decode()
