"""`pagoda ls`: the chunks that are stored, or how many there are of each namespace."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from pagoda.cli import show
from pagoda.cli.stores import (
    AsJson,
    ConfigFile,
    Directory,
    Model,
    Prefix,
    attached,
    chosen,
    find_stores,
    label,
    refuse_unknown,
    tier_of,
)

if TYPE_CHECKING:
    from pagoda.ledger import NamespaceRow, Row


class By(StrEnum):
    """What one line of the list is."""

    CHUNK = "chunk"
    NAMESPACE = "namespace"


class Listed(NamedTuple):
    """One chunk as it is listed."""

    tier: str
    slot_bytes: int
    namespace: NamespaceRow | None
    row: Row

    def as_json(self) -> dict[str, object]:
        """Return all of it in plain types."""
        row, fields = self.row, self.namespace.fields if self.namespace else {}
        return {
            "tier": self.tier,
            "key": row.key.hex(),
            "namespace": row.namespace_root.hex(),
            "model": fields.get("model", ""),
            "slot": row.slot,
            "generation": row.generation,
            "position": row.position,
            "tokens": row.tokens,
            "last_use_age_seconds": row.last_use_age_seconds,
            "hits": row.hits,
            "leased": bool(row.leased),
            "pinned": bool(row.pinned),
        }


class Total(NamedTuple):
    """What one namespace has in one tier."""

    tier: str
    namespace: str
    model: str
    chunks: int
    tokens: int
    stored_bytes: int
    newest_seconds: float
    oldest_seconds: float


def ls(
    directory: Directory = None,
    by: Annotated[By, typer.Option(help="One line a chunk or a namespace.")] = By.CHUNK,
    model: Model = None,
    namespace: Prefix = None,
    limit: Annotated[
        int, typer.Option(min=0, help="At most so many chunks, latest used first; 0 = all.")
    ] = 100,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> int:
    """List the chunks that are stored, latest used first."""
    known: dict[bytes, NamespaceRow] = {}
    listed = _listed(find_stores(directory, config), model, namespace, known)
    if by is By.NAMESPACE:
        totals = _totals(listed)
        refuse_unknown(known, model, namespace)
        _print_totals(totals, as_json)
        return 0
    found, number = _latest(listed, limit)
    refuse_unknown(known, model, namespace)
    if as_json:
        show.print_json({"chunks": [chunk.as_json() for chunk in found], "total": number})
        return 0
    _print_chunks(found)
    if number > len(found):
        show.note(f"{number - len(found):,} more (--limit 0 shows all)")
    return 0


def _listed(
    stores: list[Path], model: str | None, prefix: str | None, known: dict[bytes, NamespaceRow]
) -> Iterator[Listed]:
    """Yield the chunks asked for, store by store; `known` gathers every namespace met."""
    for store in stores:
        with attached(store) as ledger:
            namespaces = ledger.namespaces(counted=False)
            known.update(namespaces)
            wanted = chosen(namespaces, model, prefix)
            everything = model is None and prefix is None
            for row in ledger.rows():
                if everything or row.namespace_root in wanted:
                    yield Listed(tier_of(ledger), ledger.slot_bytes, namespaces.get(row.namespace_root), row)


def _latest(listed: Iterator[Listed], limit: int) -> tuple[list[Listed], int]:
    """Return the `limit` chunks used last (0 = all) and how many there were; holds no more than those."""
    number = 0

    def counted() -> Iterator[Listed]:
        nonlocal number
        for chunk in listed:
            number += 1
            yield chunk

    def order(chunk: Listed) -> tuple[float, int]:
        return chunk.row.last_use_age_seconds, chunk.row.position

    found = heapq.nsmallest(limit, counted(), key=order) if limit else sorted(counted(), key=order)
    return found, number


def _totals(listed: Iterator[Listed]) -> list[Total]:
    totals: dict[tuple[str, bytes], Total] = {}
    for chunk in listed:
        row = chunk.row
        at = chunk.tier, row.namespace_root
        seconds = row.last_use_age_seconds
        name = label(chunk.namespace.fields if chunk.namespace else {})
        old = totals.get(at) or Total(chunk.tier, row.namespace_root.hex(), name, 0, 0, 0, seconds, seconds)
        totals[at] = old._replace(
            chunks=old.chunks + 1,
            tokens=old.tokens + row.tokens,
            stored_bytes=old.stored_bytes + chunk.slot_bytes,
            newest_seconds=min(old.newest_seconds, seconds),
            oldest_seconds=max(old.oldest_seconds, seconds),
        )
    return sorted(totals.values(), key=lambda total: -total.chunks)


def _print_totals(totals: list[Total], as_json: bool) -> None:
    if as_json:
        show.print_json({"namespaces": [total._asdict() for total in totals]})
        return
    rows = [
        (
            total.tier,
            total.namespace[:12],
            total.model,
            total.chunks,
            total.tokens,
            show.size(total.stored_bytes),
            show.age(total.newest_seconds),
            show.age(total.oldest_seconds),
        )
        for total in totals
    ]
    columns = ("tier", "namespace", "model", "chunks", "tokens", "bytes", "newest use", "oldest use")
    show.print_table("", columns, rows)


def _print_chunks(found: list[Listed]) -> None:
    rows = [
        (
            chunk.tier,
            chunk.row.key.hex()[:12],
            label(chunk.namespace.fields if chunk.namespace else {}),
            chunk.row.position,
            chunk.row.tokens,
            show.age(chunk.row.last_use_age_seconds),
            chunk.row.hits,
            " ".join(flag for flag in ("leased", "pinned") if getattr(chunk.row, flag)),
        )
        for chunk in found
    ]
    show.print_table("", ("tier", "key", "model", "position", "tokens", "last use", "hits", "flags"), rows)
