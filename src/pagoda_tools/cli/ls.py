"""`pagoda ls`: lists the stored chunks, or counts those of each namespace."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Option

from pagoda_tools.cli import FAILED, printing, stores
from pagoda_tools.cli.remote_stores import censuses, remotes_of

if TYPE_CHECKING:
    from pagoda.ledger import ChunkRow, NamespaceRow


class By(StrEnum):
    """What one line of the list is about."""

    CHUNK = "chunk"
    NAMESPACE = "namespace"


class Listed(NamedTuple):
    """One chunk in the list."""

    tier: str
    slot_bytes: int
    namespace: NamespaceRow | None
    row: ChunkRow

    def as_json(self) -> dict[str, object]:
        """Return the chunk as plain values."""
        row = self.row._asdict()
        fields = self.namespace.fields if self.namespace else {}
        names = {
            "key": row.pop("key").hex(),
            "namespace": row.pop("namespace_root").hex(),
        }
        return {
            "tier": self.tier,
            **names,
            "model": fields.get("model", ""),
            **row,
        }


class Total(NamedTuple):
    """The chunks of one namespace in one tier."""

    tier: str
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
    limit: Annotated[int, Option(min=0)] = 100,
    wide: stores.Wide = False,
    as_json: stores.AsJson = False,
    config: stores.ConfigFile = None,
) -> int:
    """List the stored chunks, latest used first; those of remote tiers are only counted.

    Args:
        by: One line per chunk or per namespace.
        limit: The most chunks to list; 0 = all.
    """
    known: dict[bytes, NamespaceRow] = {}
    broken: dict[str, str] = {}
    listed = _listed(
        stores.find_stores(directory, config), model, namespace, known, broken
    )
    totals = _totals(listed) if by is By.NAMESPACE else []
    found, number = _latest(listed, limit)  # `_totals` has consumed them
    counts, silent = censuses(remotes_of(directory, config), known)
    broken |= silent
    wanted = stores.chosen(known, model, namespace, broken)
    shared = [
        Total(spec.name, root.hex(), stores.label(known[root].fields), chunks)
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
            printing.note(f"{number - len(found):,} more (--limit 0 shows all)")
        for tier in dict.fromkeys(total.tier for total in shared):
            chunks_there = sum(
                total.chunks for total in shared if total.tier == tier
            )
            printing.note(
                f"{tier}: {chunks_there:,} more chunks (--by namespace shows of which namespaces)"
            )
    if not (number or shared or broken):
        printing.note("no chunks are stored")
    for address, trouble in broken.items():
        named.note(address, f"not listed: {address}: {trouble}")
    return FAILED if any(map(named.names, broken)) else 0


def _listed(
    directories: list[Path],
    model: str | None,
    prefix: str | None,
    known: dict[bytes, NamespaceRow],
    broken: dict[str, str],
) -> Iterator[Listed]:
    """Yield the chosen chunks, store by store; adds namespaces to `known`, stores that cannot be
    read to `broken`.
    """
    from pagoda.base.errors import PagodaError
    from pagoda.ledger import admin

    for store in directories:
        try:
            with stores.attached(store) as ledger:
                namespaces = admin.list_namespaces(ledger)
                known.update(namespaces)
                wanted = stores.chosen(namespaces, model, prefix, True)
                everything = model is None and prefix is None
                for row in admin.list_chunks(ledger):
                    if everything or row.namespace_root in wanted:
                        yield Listed(
                            ledger.tier,
                            ledger.slot_bytes,
                            namespaces.get(row.namespace_root),
                            row,
                        )
        except PagodaError as trouble:
            broken[str(store)] = str(trouble)


def _latest(listed: Iterator[Listed], limit: int) -> tuple[list[Listed], int]:
    """Return the `limit` chunks used last (0 = all) and the number of all chunks; keeps only these
    in memory.
    """
    number = 0

    def counted() -> Iterator[Listed]:
        nonlocal number
        for chunk in listed:
            number += 1
            yield chunk

    def order(chunk: Listed) -> tuple[float, int]:
        return chunk.row.last_use_age_seconds, chunk.row.position

    found = (
        heapq.nsmallest(limit, counted(), key=order)
        if limit
        else sorted(counted(), key=order)
    )
    return found, number


def _totals(listed: Iterator[Listed]) -> list[Total]:
    totals: dict[tuple[str, bytes], Total] = {}
    for chunk in listed:
        row = chunk.row
        at = chunk.tier, row.namespace_root
        seconds = row.last_use_age_seconds
        name = stores.label(chunk.namespace.fields if chunk.namespace else {})
        old = totals.get(at) or Total(
            chunk.tier, row.namespace_root.hex(), name, 0
        )
        totals[at] = old._replace(
            chunks=old.chunks + 1,
            tokens=(old.tokens or 0) + row.tokens,
            stored_bytes=(old.stored_bytes or 0) + chunk.slot_bytes,
            newest_seconds=seconds
            if old.newest_seconds is None
            else min(old.newest_seconds, seconds),
            oldest_seconds=max(old.oldest_seconds or 0.0, seconds),
        )
    return sorted(totals.values(), key=lambda total: -total.chunks)


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
            "tier": total.tier,
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
            "tier": chunk.tier,
            "key": chunk.row.key.hex()[:12],
            "namespace": chunk.row.namespace_root.hex()[:12],
            "position": chunk.row.position,
            "tokens": chunk.row.tokens,
            "last use": printing.age(chunk.row.last_use_age_seconds),
            "hits": chunk.row.hits,
            "flags": " ".join(
                flag for flag in ("leased", "pinned") if getattr(chunk.row, flag)
            ),
            "model": stores.label(
                chunk.namespace.fields if chunk.namespace else {}
            ),
        }
        for chunk in found
    ]
    printing.print_dicts(
        "", rows, without=() if wide else ("namespace", "tokens", "flags")
    )
