"""`pagoda ls`: lists the stored chunks, or counts those of each namespace."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

from typer import Option

from pagoda_tools.cli import UsageError, printing, stores
from pagoda_tools.cli.remote_stores import censuses, exit_code, remotes_of

if TYPE_CHECKING:
    from pagoda.ledger import ChunkRow, Ledger, NamespaceRow

T = TypeVar("T")


_LIMIT = 100


class By(StrEnum):
    """What one line of the list is about."""

    CHUNK = "chunk"
    NAMESPACE = "namespace"


class _Store(NamedTuple):
    """A store that was read: its name for people, and how many of its chunks are chosen."""

    tier: str
    name: str
    slot_bytes: int
    chunks: int
    namespaces: dict[bytes, NamespaceRow]

    def fields_of(self, root: bytes) -> Mapping[str, str]:
        row = self.namespaces.get(root)
        return {} if row is None else row.fields


class Listed(NamedTuple):
    """One chunk in the list."""

    store: _Store
    namespace: NamespaceRow | None
    row: ChunkRow

    @property
    def fields(self) -> Mapping[str, str]:
        """The fields of its namespace."""
        return {} if self.namespace is None else self.namespace.fields

    def as_json(self) -> dict[str, object]:
        """Return the chunk as plain values."""
        row = self.row._asdict()
        names = {
            "key": row.pop("key").hex(),
            "namespace": row.pop("namespace_root").hex(),
        }
        return {
            "tier": self.store.tier,
            "store": self.store.name,
            **names,
            "model": self.fields.get("model", ""),
            **row,
        }


class Total(NamedTuple):
    """The chunks of one namespace in one store."""

    tier: str
    store: str
    namespace: str
    model: str
    chunks: int
    # this and the next are None for remote tiers, which only count chunks
    tokens: int | None = None
    stored_bytes: int | None = None
    newest_seconds: float | None = None
    oldest_seconds: float | None = None


def ls(
    directory: stores.Directory = None,
    by: By = By.CHUNK,
    model: stores.Model = None,
    namespace: stores.Prefix = None,
    limit: Annotated[int | None, Option(min=0)] = None,
    everything: Annotated[bool, Option("--all")] = False,
    wide: stores.Wide = False,
    as_json: stores.AsJson = False,
    config: stores.ConfigFile = None,
) -> int:
    """List the stored chunks, latest used first; those of remote tiers are only counted.

    Args:
        by: One line per chunk or per namespace.
        limit: The most chunks to list, by default 100; 0 = all.
        everything: List all chunks.
    """
    known: dict[bytes, NamespaceRow] = {}
    broken: dict[str, str] = {}
    if everything and limit is not None:
        raise UsageError("--all and --limit: choose one")
    most = 0 if everything else _LIMIT if limit is None else limit
    directories = stores.find_stores(directory, config)
    totals: list[Total] = []
    found: list[Listed] = []
    number = 0
    read = partial(_found, directories, model, namespace, known, broken)
    if by is By.NAMESPACE:
        totals = _totals(read(_sums))
    else:
        found, number = _latest(read(partial(_rows, most)), most)
    counts, silent = censuses(remotes_of(directory, config), known)
    broken |= silent
    wanted = stores.chosen(known, model, namespace, broken)
    shared = [
        Total(
            spec.name,
            spec.name,
            root.hex(),
            stores.label(known[root].fields),
            chunks,
        )
        for spec, found_there in counts.items()
        for root, chunks in sorted(
            found_there.items(), key=lambda count: -count[1]
        )
        if root in wanted
    ]
    named = stores.Configured(directory, config)
    if by is By.NAMESPACE:
        _print_totals(
            [*totals, *shared], broken, named.unnamed(broken), wide, as_json
        )
    elif as_json:
        chunks = [chunk.as_json() for chunk in found]
        counted = [
            {"tier": one.tier, "namespace": one.namespace, "chunks": one.chunks}
            for one in shared
        ]
        printing.print_json(
            {
                "chunks": chunks,
                "total": number,
                "remotes": counted,
                "failed": broken,
                "unconfigured": named.unnamed(broken),
            }
        )
    else:
        _print_chunks(found, wide)
        if number > len(found):
            printing.note(
                f"{number - len(found):,} more of {number:,} chunks (--all lists them, --by "
                "namespace counts them)"
            )
        for tier in dict.fromkeys(total.tier for total in shared):
            chunks_there = sum(
                total.chunks for total in shared if total.tier == tier
            )
            printing.note(
                f"{tier}: {chunks_there:,} more chunks (--by namespace shows of which namespaces)"
            )
    if not (number or totals or shared or broken):
        printing.note("no chunks are stored")
    for address, trouble in broken.items():
        named.note(address, f"not listed: {address}: {trouble}")
    return exit_code(named, broken)


def _found(
    directories: list[Path],
    model: str | None,
    prefix: str | None,
    known: dict[bytes, NamespaceRow],
    broken: dict[str, str],
    read: Callable[[Ledger, Container[bytes] | None, int], T],
) -> list[tuple[_Store, T]]:
    """Do `read` with each store; adds namespaces to `known`, stores that cannot be read to
    `broken`.

    `read` gets the ledger, the namespaces that are chosen (None: all), and how many chunks they
    have.
    """
    from pagoda.ledger import admin
    from pagoda.ledger.store_names import store_names

    def looked(ledger: Ledger) -> tuple[_Store, T]:
        namespaces = admin.list_namespaces(ledger)
        known.update(namespaces)
        wanted = stores.chosen(namespaces, model, prefix, True)
        everything = model is None and prefix is None
        chunks = sum(row.chunks for row in wanted.values())
        rows = read(ledger, None if everything else wanted, chunks)
        store = _Store(
            ledger.tier, ledger.tier, ledger.slot_bytes, chunks, namespaces
        )
        return store, rows

    here, failed = stores.in_each(directories, looked)
    broken |= {str(store): trouble for store, trouble in failed.items()}
    names = store_names(
        [(store.tier, directory) for directory, (store, _) in here.items()]
    )
    return [
        (store._replace(name=name), rows)
        for name, (store, rows) in zip(names, here.values(), strict=True)
    ]


def _latest(
    found: list[tuple[_Store, list[ChunkRow]]], limit: int
) -> tuple[list[Listed], int]:
    """Return the `limit` chunks used last (0 = all) and the number of all chosen chunks."""
    listed = [
        Listed(store, store.namespaces.get(row.namespace_root), row)
        for store, rows in found
        for row in rows
    ]
    listed.sort(
        key=lambda chunk: (chunk.row.last_use_age_seconds, chunk.row.position)
    )
    number = sum(store.chunks for store, _ in found)
    # chunks come and go while they are read
    return listed[: limit or None], max(number, len(listed))


def _rows(
    limit: int,
    ledger: Ledger,
    roots: Container[bytes] | None,
    number: int,
) -> list[ChunkRow]:
    """Return the chunks that may be listed of one store."""
    from pagoda.ledger import admin

    if limit:
        return admin.latest_chunks(ledger, limit, roots, number)
    return [
        row
        for row in admin.list_chunks(ledger)
        if roots is None or row.namespace_root in roots
    ]


def _sums(
    ledger: Ledger, roots: Container[bytes] | None, _number: int
) -> dict[bytes, Total]:
    """Return the totals of one store, without its name and those of models. Reads all chunks."""
    from pagoda.ledger import admin

    totals: dict[bytes, Total] = {}
    for row in admin.list_chunks(ledger):
        root = row.namespace_root
        if roots is not None and root not in roots:
            continue
        seconds = row.last_use_age_seconds
        old = totals.get(root) or Total("", "", root.hex(), "", 0, 0, 0)
        totals[root] = old._replace(
            chunks=old.chunks + 1,
            tokens=(old.tokens or 0) + row.tokens,
            stored_bytes=(old.stored_bytes or 0) + ledger.slot_bytes,
            newest_seconds=seconds
            if old.newest_seconds is None
            else min(old.newest_seconds, seconds),
            oldest_seconds=max(old.oldest_seconds or 0.0, seconds),
        )
    return totals


def _totals(found: list[tuple[_Store, dict[bytes, Total]]]) -> list[Total]:
    totals = [
        total._replace(
            tier=store.tier,
            store=store.name,
            model=stores.label(store.fields_of(root)),
        )
        for store, totals_there in found
        for root, total in totals_there.items()
    ]
    return sorted(totals, key=lambda total: -total.chunks)


def _print_totals(
    totals: list[Total],
    broken: dict[str, str],
    unnamed: list[str],
    wide: bool,
    as_json: bool,
) -> None:
    if as_json:
        printing.print_json(
            {
                "namespaces": [total._asdict() for total in totals],
                "failed": broken,
                "unconfigured": unnamed,
            }
        )
        return
    rows = [
        {
            "store": total.store,
            "namespace": total.namespace[:12],
            "chunks": total.chunks,
            "tokens": total.tokens,
            "bytes": printing.size(total.stored_bytes),
            "newest use": printing.age(total.newest_seconds),
            "oldest use": printing.age(total.oldest_seconds),
            "model": total.model,
        }
        for total in totals
    ]
    printing.print_dicts(
        "", rows, without=() if wide else ("tokens", "oldest use")
    )


def _print_chunks(found: list[Listed], wide: bool) -> None:
    rows = [
        {
            "store": chunk.store.name,
            "key": chunk.row.key.hex()[:12],
            "namespace": chunk.row.namespace_root.hex()[:12],
            "position": chunk.row.position,
            "tokens": chunk.row.tokens,
            "last use": printing.age(chunk.row.last_use_age_seconds),
            "hits": chunk.row.hits,
            "flags": " ".join(
                flag for flag in ("leased", "pinned") if getattr(chunk.row, flag)
            ),
            "model": stores.label(chunk.fields),
        }
        for chunk in found
    ]
    printing.print_dicts(
        "", rows, without=() if wide else ("namespace", "tokens", "flags")
    )
