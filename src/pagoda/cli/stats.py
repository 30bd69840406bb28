"""`pagoda stats`: what is stored, what hits and what misses and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Option

from pagoda.cli import FAILED, UsageError, printing
from pagoda.cli.remote_stores import Unanswered, remotes_of, usage
from pagoda.cli.stores import AsJson, ConfigFile, Directory, find_stores, in_each, label

if TYPE_CHECKING:
    from pathlib import Path

    from pagoda.config import RemoteSpec
    from pagoda.ledger.snapshot import StoreSnapshot


def stats(
    directory: Directory = None,
    as_json: AsJson = False,
    prometheus: Annotated[bool, Option("--prometheus", help="Print the Prometheus text format.")] = False,
    config: ConfigFile = None,
) -> int:
    """Show what the stores hold, what hit, and what missed and why."""
    from pagoda.ledger.snapshot import StoreSnapshot

    if as_json and prometheus:
        raise UsageError("--json and --prometheus: choose one")
    snapshots, broken = in_each(find_stores(directory, config), StoreSnapshot.of)
    found = [snapshot._replace(directory=store) for store, snapshot in snapshots.items()]
    shared = [remote_usage(spec) for spec in remotes_of(directory, config)]
    if as_json:
        failures = [{"directory": str(store), "error": trouble} for store, trouble in broken.items()]
        stores = [snapshot.as_json() for snapshot in found] + failures
        printing.print_json({"stores": stores, "remotes": [remote._asdict() for remote in shared]})
    elif prometheus:
        print(_exposition(found, broken, shared), end="")
    else:
        _print(found)
        _print_shared(shared)
    troubles = [*broken.values(), *(remote.error for remote in shared if remote.error)]
    if not as_json:
        for trouble in troubles:
            printing.note(trouble)
    return FAILED if troubles else 0


class RemoteUsage(NamedTuple):
    """How full the engine of one remote tier is, in bytes (None: it does not say), or why it gave no answer."""

    tier: str
    address: str
    used_bytes: int | None
    limit_bytes: int | None
    error: str


def remote_usage(spec: RemoteSpec) -> RemoteUsage:
    """Ask a remote tier how full it is; an error is in the answer."""
    try:
        found = usage(spec)
    except Unanswered as trouble:
        return RemoteUsage(spec.name, spec.redacted, None, None, str(trouble))
    return RemoteUsage(spec.name, spec.redacted, found.used_bytes, found.limit_bytes, "")


def _print(found: list[StoreSnapshot]) -> None:
    if not found:
        printing.note("nothing is stored yet (pagoda config show tells where it would be)")
        return
    _print_room(found)
    _print_namespaces(found)
    _print_traffic(found)
    for title, prefix in (("misses", "miss_"), ("drops", "drop_")):
        rows = [
            {"tier": snapshot.tier, "reason": name.removeprefix(prefix), "chunks": count}
            for snapshot in found
            for name, count in snapshot.counters.items()
            if name.startswith(prefix) and count
        ]
        printing.print_dicts(f"{title} by reason", rows)
    pins = [(snapshot.tier, *pin) for snapshot in found for pin in snapshot.pins.items()]
    printing.print_dicts("pins", [{"tier": tier, "owner": owner, "chunks": n} for tier, owner, n in pins])


def _print_room(found: list[StoreSnapshot]) -> None:
    names = ("slots", "unbacked", "ready", "free", "reserved", "pinned", "leased", "members")
    rows = [
        (
            snapshot.tier,
            *(snapshot.gauges[name] for name in names),
            printing.size(snapshot.slot_bytes),
            printing.size(snapshot.used_bytes),
            printing.size(snapshot.size_bytes),
            snapshot.directory,
        )
        for snapshot in found
    ]
    printing.print_table("room", ("tier", *names, "slot", "used", "size", "directory"), rows)
    for snapshot in found:
        if unscanned := snapshot.gauges.get("unscanned"):
            printing.note(f"{snapshot.directory}: {unscanned:,} slots are still to be scanned")


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


def _print_namespaces(found: list[StoreSnapshot]) -> None:
    rows = [
        {
            "tier": snapshot.tier,
            "namespace": row.root.hex()[:12],
            "model": label(row.fields),
            "chunks": row.chunks,
            "bytes": printing.size(row.chunks * snapshot.slot_bytes),
        }
        for snapshot in found
        for row in snapshot.namespaces
    ]
    printing.print_dicts("namespaces", rows)


def _print_traffic(found: list[StoreSnapshot]) -> None:
    columns = ("lookups", "hits", "hit tokens", "stored", "bytes", "loaded", "bytes", "evicted", "damaged")
    rows = [(snapshot.tier, *_traffic(snapshot.counters)) for snapshot in found]
    printing.print_table("traffic", ("tier", *columns), rows)


def _traffic(count: dict[str, int]) -> tuple[object, ...]:
    return (
        count["lookups"],
        count["hits"],
        printing.share(count["hit_tokens"], count["asked_tokens"]),
        count["stored_chunks"],
        printing.size(count["stored_bytes"]),
        count["loaded_chunks"],
        printing.size(count["loaded_bytes"]),
        count["evicted_chunks"],
        count["failed_checks"],
    )


def _exposition(found: list[StoreSnapshot], broken: Iterable[Path], shared: list[RemoteUsage]) -> str:
    """Return all of it in Prometheus' text format."""
    from pagoda.tiers.remote.store_client import Usage

    try:
        from pagoda.serve.exposition import Exposition, exposition
    except ModuleNotFoundError as missing:
        if missing.name != "prometheus_client":
            raise
        raise UsageError("--prometheus needs prometheus-client: pip install 'pagodakv[metrics]'") from None
    remotes = {one.tier: None if one.error else Usage(one.used_bytes, one.limit_bytes) for one in shared}
    return exposition(Exposition(found, [str(store) for store in broken], remotes))[0].decode()
