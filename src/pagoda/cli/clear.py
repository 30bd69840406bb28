"""`pagoda clear`: forgets chunks in every tier named, and says how many went."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from pagoda.cli import FAILED, FailedError, UsageError, show
from pagoda.cli.stores import (
    AsJson,
    ConfigFile,
    Directory,
    Model,
    Prefix,
    attached,
    chosen,
    find_stores,
    refuse_unknown,
    tier_of,
)

if TYPE_CHECKING:
    from pagoda.ledger import Ledger, NamespaceRow


class Cleared(NamedTuple):
    """How many chunks went from one store."""

    tier: str
    chunks: int
    directory: str


def clear(
    directory: Directory = None,
    model: Model = None,
    namespace: Prefix = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> int:
    """Forget all chunks, or those of one model or namespace, in every tier."""
    stores = find_stores(directory, config)
    known = _known(stores)
    refuse_unknown(known, model, namespace)
    roots = chosen(known, model, namespace)
    if namespace is not None and len(roots) > 1:
        raise UsageError(f"--namespace {namespace}: begins {len(roots)} namespaces; write more of it")
    what = _described(roots, model, namespace)
    if not yes and not _agreed(f"Clear {what} in {len(stores)} store(s)?"):
        return FAILED
    everything = model is None and namespace is None
    cleared, broken = _clear(stores, None if everything else list(roots))
    if as_json:
        gone = [store._asdict() for store in cleared]
        show.print_json({"cleared": sum(store.chunks for store in cleared), "stores": gone, "failed": broken})
    else:
        show.print_table("", ("tier", "chunks cleared", "directory"), cleared)
    if broken:
        raise FailedError(
            f"not cleared: {'; '.join(f'{store}: {trouble}' for store, trouble in broken.items())}"
        )
    return 0


def _known(stores: list[Path]) -> dict[bytes, NamespaceRow]:
    """Return the namespaces of all stores that can be opened; the others fail later, with a reason each."""
    from pagoda.errors import PagodaError

    known: dict[bytes, NamespaceRow] = {}
    for store in stores:
        try:
            with attached(store) as ledger:
                known.update(ledger.namespaces(counted=False))
        except PagodaError:
            continue
    return known


def _described(roots: dict[bytes, NamespaceRow], model: str | None, prefix: str | None) -> str:
    if model is None and prefix is None:
        return "EVERYTHING, of all models and tenants,"
    models = sorted({row.fields.get("model") or "(not named)" for row in roots.values()})
    return f"{len(roots)} namespace(s) of {', '.join(models)}"


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("clear asks before it deletes: say --yes where nobody can answer")
    return typer.confirm(question, err=True)


def _clear(stores: list[Path], roots: list[bytes] | None) -> tuple[list[Cleared], dict[str, str]]:
    """Clear every store, going on past one that fails; return what went and what is wrong with the others."""
    from pagoda.errors import PagodaError

    cleared: list[Cleared] = []
    broken: dict[str, str] = {}
    for store in stores:
        try:
            with attached(store) as ledger:
                cleared.append(Cleared(tier_of(ledger), _forget(ledger, roots), str(store)))
        except PagodaError as trouble:
            broken[str(store)] = str(trouble)
    return cleared, broken


def _forget(ledger: Ledger, roots: list[bytes] | None) -> int:
    """Clear the namespaces that this store knows; only those, so that no tenant loses another's chunks."""
    if roots is None:
        return ledger.clear()
    known = ledger.namespaces(counted=False)
    return sum(ledger.clear(root) for root in roots if root in known)
