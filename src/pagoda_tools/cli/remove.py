"""`pagoda remove`: frees the memory and the disk space of tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

from typer import Argument

from pagoda_tools.cli import FAILED, FailedError, UsageError, printing
from pagoda_tools.cli.remote_stores import all_remotes
from pagoda_tools.cli.stores import AsJson, ConfigFile, Yes, agreed, find_roots

_REMEDY = "name host, disk, a tier's root or a store"


class DoomedStore(NamedTuple):
    """A store that is to be removed, and its size in bytes."""

    tier: str
    bytes: int
    directory: str


def remove(
    what: Annotated[str | None, Argument(metavar="host|disk|PATH|URL")] = None,
    yes: Yes = False,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> int:
    """Remove tiers and all their chunks, to free their memory and disk space.

    A tier that a process has open stays. For a remote tier only its entry in the register is
    removed, not its chunks.

    Args:
        what: A tier, a tier's root, one store in it, or the URL of a remote tier; default: all
            local tiers, with --config only those of that file.
    """
    if what is not None and "://" in what:
        return _forget_remote(what)
    broken: dict[str, str] = {}
    stores = _stores(what, config, broken)
    total = sum(store.bytes for store in stores)
    where = ", ".join(store.directory for store in stores)
    question = (
        f"Remove {printing.size(total)} with all that is stored there: {where}?"
    )
    if stores and not yes and not agreed(question, "remove"):
        return FAILED
    gone = _remove(stores, broken)
    if as_json:
        total = sum(store.bytes for store in gone)
        done = [store._asdict() for store in gone]
        printing.print_json(
            {"removed_bytes": total, "stores": done, "failed": broken}
        )
    elif gone:
        rows = [
            (store.tier, printing.size(store.bytes), store.directory)
            for store in gone
        ]
        printing.print_table("", ("tier", "freed", "directory"), rows)
    elif not broken:
        printing.note("there is no local tier to remove")
    if what is None:
        known, sealed = all_remotes(None, config, opened_too=config is None)
        for spec in (*known, *sealed):
            printing.note(
                f"{spec.redacted}: stays, with its chunks (pagoda remove URL takes it from the "
                "register)"
            )
    if broken:
        raise FailedError("; ".join(broken.values()))
    return 0


def _forget_remote(url: str) -> int:
    from pagoda.base import recorded_tiers
    from pagoda.config.remote_urls import redacted

    if not recorded_tiers.remove(redacted(url)):
        raise UsageError(
            f"{redacted(url)}: not a remote tier of the register (pagoda stats lists them)"
        )
    printing.note(
        f"{redacted(url)} left the register; its chunks stay (pagoda clear removes them)"
    )
    return 0


def _stores(
    what: str | None, config: Path | None, broken: dict[str, str]
) -> list[DoomedStore]:
    """Return the stores that `what` names; adds roots that cannot be read to `broken`.

    Raises UsageError for a path without stores, StoreError for a path with stores of another user.
    """
    from pagoda.ledger.stores_under_root import (
        allocated_bytes,
        refuse_others,
        stores_in,
    )

    roots = find_roots(config, opened_too=config is None)
    if what in (None, "host", "disk"):
        found = []
        for root in (
            root for root, tier in roots.items() if what in (None, tier)
        ):
            try:
                found += stores_in(root)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as trouble:
                broken[str(root)] = f"{root}: cannot be read: {trouble.strerror}"
    else:
        path = Path(str(what))
        try:
            # an empty name does not mean the working directory
            if not what or not path.is_dir():
                wrong = (
                    "not a directory"
                    if what and path.exists()
                    else "no such directory"
                )
                raise UsageError(f"{what or repr(what)}: {wrong}; {_REMEDY}")
            # only now: the working directory may be gone
            path = path.absolute()
            found = stores_in(path) or [
                store for store in stores_in(path.parent) if store == path
            ]
        except OSError as trouble:
            raise UsageError(
                f"{what}: cannot be read: {trouble.strerror}; {_REMEDY}"
            ) from None
        if not found:
            refuse_others(path)
            raise UsageError(f"{what}: has no store; {_REMEDY}")
    return [
        DoomedStore(
            roots.get(store.parent.resolve(), ""),
            allocated_bytes(store),
            str(store),
        )
        for store in found
    ]


def _remove(
    stores: list[DoomedStore], broken: dict[str, str]
) -> list[DoomedStore]:
    """Remove all stores that can be removed, and return these; adds the errors of the others to
    `broken`.
    """
    from pagoda.base import recorded_tiers
    from pagoda.base.errors import StoreError
    from pagoda.ledger.stores_under_root import remove_store, stores_in

    gone: list[DoomedStore] = []
    for store in stores:
        directory = Path(store.directory)
        try:
            gone.append(store._replace(bytes=remove_store(directory)))
            if not stores_in(directory.parent):
                recorded_tiers.remove(str(directory.parent.resolve()))
        except StoreError as trouble:
            broken[store.directory] = str(trouble)
        except OSError as trouble:
            broken[store.directory] = (
                f"{directory}: cannot be removed: {trouble.strerror}"
            )
    return gone
