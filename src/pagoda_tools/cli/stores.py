"""Finds the stores of a command, and opens them beside the processes that use them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar

from typer import Argument, Option, confirm

from pagoda.base.errors import PagodaError
from pagoda.config.did_you_mean import did_you_mean
from pagoda_tools.cli import UsageError, printing

if TYPE_CHECKING:
    from pagoda.config import Config
    from pagoda.ledger import Ledger, NamespaceRow

T = TypeVar("T")
_STATE = "state"  # a directory with this file is a store
# a directory with these files is a store whose state is lost
_OTHERS = ("locks", "data.mdb")
_URL = re.compile(r"([A-Za-z][\w+.-]*):/")  # a path has no two slashes in a row

Directory: TypeAlias = Annotated[
    Path | None,
    Argument(
        metavar="DIRECTORY",
        help="A tier's root or one store in it; default: all of this user.",
    ),
]
ConfigFile: TypeAlias = Annotated[
    Path | None,
    Option(
        "--config",
        metavar="FILE",
        help="Configuration file instead of the usual ones.",
    ),
]
AsJson: TypeAlias = Annotated[
    bool, Option("--json", help="Print one JSON object.")
]
Wide: TypeAlias = Annotated[
    bool, Option("--wide", help="Show all columns of the tables.")
]
Yes: TypeAlias = Annotated[
    bool, Option("--yes", "-y", help="Do not ask for confirmation.")
]
Model: TypeAlias = Annotated[
    str | None, Option(metavar="NAME", help="Only namespaces of this model.")
]
Prefix: TypeAlias = Annotated[
    str | None,
    Option(
        "--namespace",
        metavar="PREFIX",
        help="Only the namespace whose hex name begins so.",
    ),
]
Tokens: TypeAlias = Annotated[
    str | None,
    Option(
        metavar="FILE",
        help="Token ids such as 1,2,3, or a file of them; - = stdin.",
    ),
]


def configured(file: Path | None) -> Config:
    """Return the loaded configuration. Raises ConfigError."""
    from pagoda.config.sources import load

    return load(file=file).config


class Configured:
    """The tiers that the command line or the configuration names.

    Trouble with one of them fails a command. The register has more: what this user opened once,
    with an argument or from a file that is gone. That may have gone for good, so trouble with it is
    a remark.
    """

    def __init__(self, directory: Path | None, config_file: Path | None) -> None:
        """Read the configuration. `directory`: the one that the command is about; then it is all
        that counts. Raises ConfigError.
        """
        config = configured(config_file)
        self._everything = directory is not None
        self._roots = {os.path.realpath(root) for root in config.roots().values()}
        self.servers = (
            *config.remotes(),
            *config.peer_servers(),
            *config.lookup_server(),
        )
        self._addresses = {spec.redacted for spec in self.servers}

    def names(self, place: Path | str) -> bool:
        """Return whether a store, by its directory, or a remote tier, by its URL without secrets,
        is named.
        """
        if self._everything or str(place) in self._addresses:
            return True
        above = os.path.realpath(os.path.dirname(place))
        return bool(self._roots & {os.path.realpath(place), above})

    def unnamed(self, places: Iterable[Path | str]) -> list[str]:
        """Return those of these places that are not named."""
        return [str(place) for place in places if not self.names(place)]

    def note(self, place: Path | str, trouble: str) -> bool:
        """Print what is wrong with a tier; return whether it fails the command."""
        fails = self.names(place)
        printing.note(trouble if fails else remark(place, trouble))
        return fails


def remark(place: Path | str, trouble: str) -> str:
    """Return the sentence about trouble with a tier that is only in the register."""
    return (
        f"{trouble} (a remark, because it is in no configuration: `pagoda remove {place}` takes it "
        "off this list)"
    )


def given_size(option: str, text: str) -> int | str:
    """Return the size that was given for an option, in bytes, or "auto". Raises UsageError."""
    from pagoda.config.sizes import parse_size

    try:
        return parse_size(text)
    except ValueError as trouble:
        raise UsageError(f"{option} {text}: {trouble}") from None


def given_bytes(option: str, text: str) -> int:
    """Return the size that was given for an option, in bytes, above 0. Raises UsageError."""
    size = given_size(option, text)
    if not isinstance(size, int) or not size:
        raise UsageError(f"{option} {text}: write a size such as 64GiB")
    return size


def find_roots(
    config_file: Path | None, opened_too: bool = True
) -> dict[Path, str]:
    """Return the roots of all known local tiers and their tiers: first the configured ones.

    Then, with `opened_too`, those that this user has opened in another way.
    """
    from pagoda.base import recorded_tiers

    named = configured(config_file).roots().items()
    entries = recorded_tiers.entries() if opened_too else []
    opened = [
        (entry.tier, Path(entry.place))
        for entry in entries
        if entry.tier != "remote"
    ]
    roots: dict[Path, str] = {}
    for tier, root in sorted(
        [*named, *opened], key=lambda found: found[0] != "host"
    ):
        roots.setdefault(Path(os.path.realpath(root)), tier)
    return roots


def find_stores(
    directory: Path | None, config_file: Path | None, opened_too: bool = True
) -> list[Path]:
    """Return the directories of the stores, host tier first; empty if the known roots have none.

    Without `directory`, these are the stores in `find_roots`.
    A root that cannot be read is in the result too: opening it raises its error, and the other
    stores are still used.

    Raises:
        UsageError: `directory` does not exist, cannot be read or has no store.
        StoreError: it has only stores of another user.
    """
    if directory is None:
        return [
            store
            for root in find_roots(config_file, opened_too)
            for store in _stores_of(root)
        ]
    try:
        if not directory.is_dir():
            if url := _URL.match(str(directory)):
                raise UsageError(_not_a_url(url[1]))
            wrong = (
                "not a directory" if directory.exists() else "no such directory"
            )
            raise UsageError(f"{directory}: {wrong}")
        found = _stores_in(directory.absolute())
    except OSError as trouble:
        raise UsageError(
            f"{directory}: cannot be read: {trouble.strerror}"
        ) from None
    if not found:
        from pagoda.ledger.stores_under_root import refuse_others

        refuse_others(directory)
        raise UsageError(
            f"{directory}: has no store; name a tier's root, such as /dev/shm/pagoda-{os.getuid()}"
        )
    return found


def _not_a_url(scheme: str) -> str:
    """Return what is wrong with a URL in the place of a directory; it is not shown, because it may
    have a password.
    """
    from pagoda.base.urls import SCHEMES

    known = scheme.lower() in SCHEMES
    what = (
        f"{scheme}:// is a remote store"
        if known
        else f"unknown store {scheme}://"
    )
    return (
        f"{what}, and no directory: name the root of a tier of this machine; a remote store is "
        "named in the configuration (remote), and is shown without an argument"
    )


def _stores_of(root: Path) -> list[Path]:
    try:
        return _stores_in(root)
    except FileNotFoundError:
        return []
    except OSError:
        return [root]


def _stores_in(directory: Path) -> list[Path]:
    if _is_store(directory):
        return [directory]
    return sorted(
        path
        for path in directory.iterdir()
        if path.name[0] != "." and _is_store(path)
    )


def _is_store(path: Path) -> bool:
    try:
        return (path / _STATE).is_file() or all(
            (path / name).is_file() for name in _OTHERS
        )
    except PermissionError:
        if path.lstat().st_uid == os.geteuid():
            raise
        # another user's directory, such as lost+found of a mounted file system
        return False


def attached(store: Path) -> AbstractContextManager[Ledger]:
    """Open an existing store in a context, which closes it. Other processes keep using it. Raises
    StoreError.
    """
    from pagoda.ledger import Ledger

    return closing(Ledger.attach(store))


@contextmanager
def all_attached(
    directory: Path | None, config_file: Path | None, broken: dict[str, str]
) -> Iterator[list[Ledger]]:
    """Open all stores that `find_stores` finds, inside the context. Raises the same errors.

    Stores that cannot be opened are left out: stderr and `broken` have their errors.
    """
    named = Configured(directory, config_file)
    with ExitStack() as stack:
        ledgers: list[Ledger] = []
        for store in find_stores(directory, config_file):
            try:
                ledgers.append(stack.enter_context(attached(store)))
            except PagodaError as trouble:
                if _is_gone(store):
                    continue
                broken[str(store)] = str(trouble)
                named.note(store, str(trouble))
        yield ledgers


def in_each(
    stores: Sequence[Path], work: Callable[[Ledger], T]
) -> tuple[dict[Path, T], dict[Path, str]]:
    """Do `work` with every store that can be opened; return the results, and the errors of the
    others.
    """
    done: dict[Path, T] = {}
    broken: dict[Path, str] = {}
    for store in stores:
        try:
            with attached(store) as ledger:
                done[store] = work(ledger)
        except (PagodaError, OSError) as trouble:
            if not _is_gone(store):
                broken[store] = str(trouble)
    return done, broken


def _is_gone(store: Path) -> bool:
    """Whether a store that was found has been removed since, as private ones are when their process
    ends: there is nothing to report.
    """
    try:
        store.lstat()
    except OSError as trouble:
        return isinstance(trouble, FileNotFoundError)
    return False


def agreed(question: str, command: str) -> bool:
    """Ask for confirmation at the terminal. Raises UsageError if stdin is not a terminal."""
    if not sys.stdin.isatty():
        raise UsageError(
            f"{command} asks before it deletes; add --yes to run it without a terminal"
        )
    return confirm(question, err=True)


def label(fields: Mapping[str, str]) -> str:
    """Return a name of a namespace for people: its model, and its other fields that are set."""
    extra = [
        f"{name}={fields[name]}"
        for name in ("revision", "kv_dtype", "lora", "salt")
        if fields.get(name)
    ]
    if fields.get("weights_epoch", "0") != "0":
        extra.append(f"weights_epoch={fields['weights_epoch']}")
    return " ".join([fields.get("model") or "(not named)", *extra])


def chosen(
    known: Mapping[bytes, NamespaceRow],
    model: str | None,
    prefix: str | None,
    may_lack: object,
) -> dict[bytes, NamespaceRow]:
    """Return the namespaces that `--model` and `--namespace` choose; all without these options.

    Raises UsageError for a prefix that is not hex, and for none, unless `may_lack` is true: then
    `known` may lack some, such as those of a tier that does not answer.
    """
    if prefix is not None and (
        not prefix or set(prefix.lower()) - set("0123456789abcdef")
    ):
        raise UsageError(
            f"--namespace {prefix!r}: not the beginning of a hex name (see pagoda stats)"
        )
    found = {
        root: row
        for root, row in known.items()
        if (model is None or row.fields.get("model") == model)
        and (prefix is None or root.hex().startswith(prefix.lower()))
    }
    if found or may_lack or (model is None and prefix is None):
        return found
    if model is not None:
        models = sorted({row.fields.get("model", "") for row in known.values()})
        raise UsageError(
            f"--model {model}: has no stored chunks{did_you_mean(model, models)} (see pagoda stats)"
        )
    raise UsageError(
        f"--namespace {prefix}: no namespace begins so (see pagoda stats)"
    )
