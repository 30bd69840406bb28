"""`pagoda clear`: removes chunks from every named tier, and says how many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Option

from pagoda_tools.cli import FAILED, FailedError, UsageError, printing, stores
from pagoda_tools.cli.remote_stores import (
    all_remotes,
    ask_each,
    censuses,
    cleared,
    require_libraries,
)

if TYPE_CHECKING:
    from pagoda.config import RemoteSpec
    from pagoda.ledger import Ledger, NamespaceRow


class ClearedStore(NamedTuple):
    """How many chunks were removed from one store."""

    tier: str
    chunks: int
    directory: str


def clear(
    directory: stores.Directory = None,
    model: stores.Model = None,
    namespace: stores.Prefix = None,
    local: Annotated[bool, Option("--local")] = False,
    yes: stores.Yes = False,
    as_json: stores.AsJson = False,
    config: stores.ConfigFile = None,
) -> int:
    """Remove all chunks, or those of one model or namespace, from every tier; from remote tiers for
    all machines.

    With --config, only from the tiers of that file.

    Args:
        local: Only from this machine's tiers; remote tiers stay as they are.
    """
    directories = stores.find_stores(directory, config, opened_too=config is None)
    everything = model is None and namespace is None
    remotes, withheld = all_remotes(directory, config, opened_too=config is None)
    left: list[str] = []
    if not local and directory is None:
        require_libraries(stores.configured(config).remotes())
    if local:
        left = [spec.redacted for spec in (*remotes, *withheld)]
        remotes = ()
        withheld = {}
    known = _known(directories)
    broken = {} if everything else censuses(remotes, known)[1]
    broken |= {spec.redacted: why for spec, why in withheld.items()}
    roots = stores.chosen(known, model, namespace, broken)
    if namespace is not None and len(roots) > 1:
        raise UsageError(
            f"--namespace {namespace}: {len(roots)} namespaces begin so; write more digits"
        )
    question = _question(
        _described(roots, model, namespace), directories, [*remotes, *withheld]
    )
    if not yes and not stores.agreed(question, "clear"):
        return FAILED
    wanted = None if everything else list(roots)
    here, failed = stores.in_each(
        directories, lambda ledger: (ledger.tier, _forget(ledger, wanted))
    )
    gone = [ClearedStore(*counted, str(store)) for store, counted in here.items()]
    asked = [spec for spec in remotes if spec.redacted not in broken]
    shared, deaf = ask_each(asked, lambda spec: cleared(spec, wanted))
    gone += [
        ClearedStore(spec.name, chunks, spec.redacted)
        for spec, chunks in shared.items()
    ]
    broken |= {
        **{str(store): trouble for store, trouble in failed.items()},
        **deaf,
    }
    # what is stored on this machine and was not cleared is a failure, whoever named it
    named = stores.Configured(directory, config)
    unnamed = [place for place in named.unnamed(broken) if "://" in place]
    _print(gone, left, broken, unnamed, as_json)
    nameless = sum(not row.fields for row in known.values())
    if nameless and model is not None:
        printing.note(
            f"{nameless} namespace(s) have no model name on this machine and were not cleared "
            f"(pagoda ls --by namespace lists them, --namespace clears one)"
        )
    for address in unnamed:
        named.note(address, f"not cleared: {address}: {broken[address]}")
    if failures := [place for place in broken if place not in unnamed]:
        troubles = "; ".join(f"{place}: {broken[place]}" for place in failures)
        raise FailedError(f"not cleared: {troubles}")
    return 0


def _print(
    cleared: list[ClearedStore],
    left: list[str],
    broken: dict[str, str],
    unnamed: list[str],
    as_json: bool,
) -> None:
    if as_json:
        number = sum(store.chunks for store in cleared)
        gone = [store._asdict() for store in cleared]
        printing.print_json(
            {
                "cleared": number,
                "stores": gone,
                "left": left,
                "failed": broken,
                "unconfigured": unnamed,
            }
        )
    else:
        printing.print_table("", ("tier", "chunks cleared", "directory"), cleared)
        for address in left:
            printing.note(
                f"{address}: stays as it is, for all machines (without --local it is cleared too)"
            )


def _known(directories: list[Path]) -> dict[bytes, NamespaceRow]:
    """Return the namespaces of all stores that can be opened. The others fail later, each with its
    reason.
    """
    from pagoda.ledger import admin

    known: dict[bytes, NamespaceRow] = {}
    for rows in stores.in_each(directories, admin.list_namespaces)[0].values():
        named = {root: row for root, row in known.items() if row.fields}
        known.update({**rows, **named})
    return known


def _described(
    roots: dict[bytes, NamespaceRow], model: str | None, prefix: str | None
) -> str:
    if model is None and prefix is None:
        return "ALL chunks, of all models and tenants,"
    models = sorted(
        {row.fields.get("model") or "(not named)" for row in roots.values()}
    )
    return f"{len(roots)} namespace(s) of {', '.join(models)}"


def _question(
    what: str, directories: list[Path], remotes: Sequence[RemoteSpec]
) -> str:
    others = ", ".join(spec.redacted for spec in remotes)
    return (
        f"Clear {what} in {len(directories)} "
        f"store(s){f' and, for all machines, in {others}' if others else ''}?"
    )


def _forget(ledger: Ledger, roots: list[bytes] | None) -> int:
    """Clear these namespaces, also in ledgers that do not know them: a rebuild may find evicted
    chunks again.
    """
    from pagoda.ledger import admin

    if roots is None:
        return admin.clear(ledger)
    return sum(admin.clear(ledger, root) for root in roots)
