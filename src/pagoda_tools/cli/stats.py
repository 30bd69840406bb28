"""`pagoda stats`: shows what is stored, what hits, what misses and why."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from typer import Option

from pagoda.base.metrics import GROWTH_BOUNDS, TIER_KINDS, by_reason
from pagoda_tools.cli import FAILED, UsageError, printing
from pagoda_tools.cli.remote_stores import (
    Unanswered,
    ask,
    patience,
    remotes_of,
    worded,
)
from pagoda_tools.cli.stores import (
    AsJson,
    ConfigFile,
    Directory,
    Wide,
    find_stores,
    in_each,
    label,
)

if TYPE_CHECKING:
    from pathlib import Path

    from pagoda.config import RemoteSpec
    from pagoda.ledger.store_stats import StoreStats
    from pagoda_tools.serve.overview import RemoteUsage


def stats(
    directory: Directory = None,
    as_json: AsJson = False,
    prometheus: Annotated[bool, Option("--prometheus")] = False,
    wide: Wide = False,
    config: ConfigFile = None,
) -> int:
    """Show what the stores hold, what hit, what missed and why.

    Args:
        prometheus: Print the Prometheus text format.
    """
    if as_json and prometheus:
        raise UsageError("--json and --prometheus: choose one")
    found, broken = snapshots(find_stores(directory, config))
    shared = [remote_usage(spec) for spec in remotes_of(directory, config)]
    if as_json:
        failures = [
            {"directory": str(store), "error": trouble}
            for store, trouble in broken.items()
        ]
        stores = [snapshot.as_json() for snapshot in found] + failures
        printing.print_json(
            {"stores": stores, "remotes": [remote._asdict() for remote in shared]}
        )
    elif prometheus:
        print(_exposition(found, broken, shared), end="")
    else:
        if found or not broken:
            _print(found, wide)
        _print_shared(shared)
    troubles = [
        *broken.values(),
        *(remote.error for remote in shared if remote.error),
    ]
    if not as_json:
        for text in (
            *troubles,
            *(warning for remote in shared for warning in remote.warnings),
        ):
            printing.note(text)
    return FAILED if troubles else 0


def snapshots(
    directories: Sequence[Path],
) -> tuple[list[StoreStats], dict[Path, str]]:
    """Return the facts and counters of the stores, and the errors of those that cannot be read."""
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
    )


def _print(found: list[StoreStats], wide: bool) -> None:
    if not found:
        printing.note(printing.NOTHING_STORED)
        return
    stores = dict(zip(store_names(found), found, strict=True))
    _print_room(stores, wide)
    printing.print_dicts("namespaces", namespace_rows(stores))
    printing.print_dicts("hits", hit_rows(stores))
    _print_traffic(stores)
    for title, prefix in (("misses", "miss_"), ("drops", "drop_")):
        rows = [
            {"tier": tier, "reason": reason, "chunks": count}
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
        [{"tier": tier, "chunks": n, "owner": owner} for tier, owner, n in pins],
    )


def store_names(found: Sequence[StoreStats]) -> list[str]:
    """Return a name for each store: its tier, and a number from the second store of a tier on."""
    seen: Counter[str] = Counter()
    names = []
    for snapshot in found:
        seen[snapshot.tier] += 1
        number = seen[snapshot.tier]
        names.append(
            snapshot.tier if number == 1 else f"{snapshot.tier} {number}"
        )
    return names


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
            "tier": tier,
            **{
                name: printing.count(snapshot.gauges[name])
                for name in (*counted, *rare)
            },
            "slot": printing.size(snapshot.slot_bytes),
            "used": printing.size(snapshot.used_bytes),
            "size": printing.size(snapshot.size_bytes),
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
    why = ", ".join(f"{bound} {count:,}" for bound, count in refused.items())
    return f"{told}; refused for lack of room: {why}" if why else told


def _print_shared(shared: list[RemoteUsage]) -> None:
    rows = [
        {
            "tier": remote.tier,
            "state": "NO ANSWER" if remote.error else "answers",
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
            "tier": tier,
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
    printing.print_table("traffic", ("tier", *headings.values()), rows)


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
