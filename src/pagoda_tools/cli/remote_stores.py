"""Asks the remote tiers: one connection per question, a deadline for every step, one sentence for
every error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pagoda.base.errors import ConfigError, PagodaError
from pagoda.base.urls import RemoteUrl
from pagoda_tools.cli import FAILED, USAGE, printing
from pagoda_tools.cli.stores import Configured, configured

if TYPE_CHECKING:
    from pagoda.base.recorded_tiers import Entry
    from pagoda.config import RemoteSpec
    from pagoda.ledger import NamespaceRow
    from pagoda.tiers.remote.store_client import ListingDeadline, StoreConnection

_T = TypeVar("_T")
NO_SECRET = (
    "its password or key is not known here: name a configuration that has it (--config), "
    "or remove it from the register (pagoda remove URL)"
)
_NAME_OR_REMOVE = (
    "name a configuration that has it (--config), or remove it from the register (pagoda "
    "remove URL)"
)
PATIENCE_SECONDS = 5.0
"""How long a command waits for one answer; a tier's own deadline is used if it is longer."""
WALK_SECONDS = 300.0
"""The longest time of a walk over all names."""
# answers of a Redis that refuses all clients and says why
_REFUSALS = ("READONLY", "NOREPLICAS", "MISCONF", "OOM")


class Unanswered(Exception):
    """A remote tier did not answer. `text`: what is wrong and what to do; the message names the
    tier. No secrets.

    `in_part`: some of its nodes answer, and are used.
    """

    def __init__(
        self, spec: RemoteSpec, text: str, in_part: bool = False
    ) -> None:
        self.text = _masked(spec, text)
        self.in_part = in_part
        super().__init__(f"{spec.name} ({spec.redacted}): {self.text}")


def remotes_of(
    directory: Path | None, config_file: Path | None
) -> tuple[RemoteSpec, ...]:
    """Return the remote tiers that are known here; none for a command about one directory. Raises
    ConfigError.

    The configured ones come first, then those that this user has opened in another way. Of the
    latter, those that cannot or may not be asked are named on stderr, each with the reason, and
    left out.
    """
    known, withheld = all_remotes(directory, config_file)
    for spec, why in withheld.items():
        printing.note(f"{spec.redacted}: {why}")
    return known


def require_libraries(specs: Iterable[RemoteSpec]) -> None:
    """Raise MissingLibraryError if the library of one of these tiers is not installed. Connects to
    nothing.

    For commands that change something; others show what they have, and end with `exit_code`.
    """
    from pagoda.base.errors import MissingLibraryError

    for spec in specs:
        try:
            spec.engine()
        except MissingLibraryError as missing:
            raise MissingLibraryError(f"{spec.redacted}: {missing}") from None
        except PagodaError:
            continue  # said by the command, when it asks


def exit_code(named: Configured, troubled: Iterable[Path | str]) -> int:
    """Return the exit code of a command that looked, and had trouble with these places: a failure
    if the configuration or the command names one; wrong use if a library is missing.
    """
    from pagoda.base.errors import MissingLibraryError

    failing = {str(place) for place in troubled if named.names(place)}
    try:
        require_libraries(
            spec for spec in named.servers if spec.redacted in failing
        )
    except MissingLibraryError:
        return USAGE
    return FAILED if failing else 0


def all_remotes(
    directory: Path | None, config_file: Path | None, opened_too: bool = True
) -> tuple[tuple[RemoteSpec, ...], dict[RemoteSpec, str]]:
    """Return the remote tiers that are known here: those that can be asked, and why each of the
    others is not asked.

    Without `opened_too`, these are only the configured ones.
    """
    if directory is not None:
        return (), {}
    from pagoda.base import recorded_tiers
    from pagoda.config.remote_urls import parse

    configured_here = {
        spec.redacted: spec for spec in configured(config_file).remotes()
    }
    known = {
        address: spec
        for address, spec in configured_here.items()
        if not spec.lacks_secret
    }
    withheld = {
        spec: NO_SECRET for spec in configured_here.values() if spec.lacks_secret
    }
    for entry in recorded_tiers.entries() if opened_too else ():
        if entry.tier != "remote" or entry.place in configured_here:
            continue
        try:
            spec = parse(entry.place)
        except ConfigError:  # of another version
            continue
        if why := _why_not_asked(entry, spec):
            withheld[spec] = why
        else:
            known[entry.place] = spec
    return tuple(known.values()), withheld


def _why_not_asked(entry: Entry, spec: RemoteSpec) -> str:
    """Return why a remote tier of the register is not contacted; "" if it is."""
    from pagoda.base.trusted_files import one_line
    from pagoda.config.sources import still_names

    if entry.file is None:
        return (
            "not asked: an earlier version noted it, without the file that named it; "
            f"{_NAME_OR_REMOVE}"
        )
    if entry.file and not still_names(entry.file, entry.place):
        gone = f"not asked: {one_line(entry.file)} is gone, or no longer names it"
        return f"{gone}; {_NAME_OR_REMOVE}"
    return NO_SECRET if spec.lacks_secret else ""


def censuses(
    specs: Sequence[RemoteSpec], known: dict[bytes, NamespaceRow]
) -> tuple[dict[RemoteSpec, Mapping[bytes, int]], dict[str, str]]:
    """Return how many chunks of each namespace each remote tier has, and the errors of tiers that
    do not answer.

    Adds the namespaces that no local tier has to `known`, without names: only the machines that
    made them know these.
    """
    from pagoda.ledger import NamespaceRow

    found, broken = ask_each(
        specs,
        lambda spec: ask(spec, lambda link: link.count_by_namespace(_walk(spec))),
    )
    for counts in found.values():
        for root, chunks in counts.items():
            known.setdefault(root, NamespaceRow(root, {}, chunks))
    return found, broken


def leading(spec: RemoteSpec, root: bytes, keys: Sequence[bytes]) -> int:
    """Return how many leading keys of one namespace a tier has. Raises Unanswered."""
    return ask(
        spec,
        lambda link: link.find(root, keys, time.monotonic() + patience(spec)),
    )


def cleared(spec: RemoteSpec, roots: Sequence[bytes] | None) -> int:
    """Remove the chunks of these namespaces (None: all of PagodaKV), for all machines. Raises
    Unanswered.
    """
    found = [None] if roots is None else list(roots)
    walk = _walk(spec)  # one deadline for all of them
    return ask(spec, lambda link: sum(link.clear(root, walk) for root in found))


def patience(spec: RemoteSpec) -> float:
    """Return how long one step may take."""
    return max(PATIENCE_SECONDS, spec.deadline_seconds)


def _walk(spec: RemoteSpec) -> ListingDeadline:
    from pagoda.tiers.remote.store_client import ListingDeadline

    return ListingDeadline(patience(spec), WALK_SECONDS)


def ask_each(
    specs: Sequence[RemoteSpec], work: Callable[[RemoteSpec], _T]
) -> tuple[dict[RemoteSpec, _T], dict[str, str]]:
    """Do `work` with every remote tier; return the results, and the errors of tiers that do not
    answer.
    """
    done: dict[RemoteSpec, _T] = {}
    broken: dict[str, str] = {}
    for spec in specs:
        try:
            done[spec] = work(spec)
        except Unanswered as trouble:
            broken[spec.redacted] = trouble.text
    return done, broken


def ask(spec: RemoteSpec, question: Callable[[StoreConnection], _T]) -> _T:
    """Ask a remote tier on a new connection, and return its answer. Raises Unanswered."""
    from pagoda.base.metrics import Reason
    from pagoda.tiers.remote.store_client import ListingTimeout, RefusedError

    place = ""
    try:
        client = spec.engine()
        place = f"{client.address}: "
        link = client.connection()
        try:
            return question(link.open(time.monotonic() + patience(spec)))
        finally:
            link.close()
    except ListingTimeout as unended:
        raise Unanswered(
            spec,
            f"{unended}; the finished part stays: run the command again to continue",
        ) from None
    except TimeoutError:
        late = (
            f"no answer within {patience(spec):g} s; check that it runs and that no firewall "
            "blocks it"
        )
        raise Unanswered(spec, late) from None
    except RefusedError as refusal:
        said = str(refusal).removeprefix(place).rstrip(".")
        if refusal.contained:
            raise Unanswered(spec, said, in_part=True) from None
        # otherwise the text says what to do
        told = "write redis" in said or said.startswith(_REFUSALS)
        if refusal.reason is not Reason.NOT_ADMITTED and not told:
            said += "; check the password and the rights of its user"
        raise Unanswered(spec, f"refuses: {said}") from None
    except OSError as trouble:
        said = str(trouble.strerror or trouble).removeprefix(place).rstrip(".")
        raise Unanswered(spec, f"{said}; check that it runs there") from None
    except PagodaError as trouble:
        raise Unanswered(spec, str(trouble)) from None


def _masked(spec: RemoteSpec, text: str) -> str:
    """Return `text` without the tier's secrets, which an engine or its library may have
    repeated.
    """
    remote = RemoteUrl.of(spec.url)
    passwords = remote.parts.password or "", remote.password
    for secret in (*passwords, *spec.options.values()):
        if len(secret) > 3 and secret not in spec.redacted:
            text = text.replace(secret, "***")
    return text


# ---- whether they answer, and their settings


class RemoteCheck(NamedTuple):
    """The check of a remote tier. `trouble`: what is wrong with it, or empty. `nodes`: those of a
    pool.

    The nodes must be the same on all machines. `warnings`: what is wrong with its settings.
    `in_part`: some nodes answer and are used; the trouble names the others. `answering`: how many,
    such as "2 of 3 nodes".
    """

    tier: str
    address: str
    trouble: str
    nodes: str = ""
    warnings: Sequence[str] = ()
    in_part: bool = False
    answering: str = ""

    @property
    def verdict(self) -> str:
        """One word or two for the table."""
        if not self.trouble:
            return "answers"
        if self.in_part:
            return self.answering or "answers in part"
        return "NO ANSWER"


def pinged(specs: Sequence[RemoteSpec]) -> list[RemoteCheck]:
    """Check for each remote tier that it answers and can be read, and that its codec is
    installed.
    """
    return [_checked(spec) for spec in specs]


def _nodes(spec: RemoteSpec) -> str:
    """Return the nodes of a pool in one spelling, and a digest to compare; an empty string for
    other tiers.
    """

    if "+pool:" in spec.redacted[:12]:
        with suppress(PagodaError):
            place = spec.engine().address.partition("://")[2]
            return (
                f"{place} digest "
                f"{blake2b(f'{place} {spec.prefix}'.encode(), digest_size=4).hexdigest()}"
            )
    return ""


def _checked(spec: RemoteSpec) -> RemoteCheck:
    nodes = _nodes(spec)
    try:
        warnings = ask(spec, partial(_ping, spec))
    except Unanswered as trouble:
        return RemoteCheck(
            spec.name,
            spec.redacted,
            str(trouble),
            nodes,
            in_part=trouble.in_part,
            answering=_answering(spec) if trouble.in_part else "",
        )
    return RemoteCheck(
        spec.name,
        spec.redacted,
        "",
        nodes,
        [worded(spec, warning) for warning in warnings],
    )


def _answering(spec: RemoteSpec) -> str:
    """Return how many nodes of a pool answer; an empty string if that cannot be found out."""
    with suppress(Unanswered):
        found = ask(
            spec, lambda link: link.usage(time.monotonic() + patience(spec))
        )
        if found.nodes is not None:
            return f"{found.answering} of {found.nodes} nodes"
    return ""


def worded(spec: RemoteSpec, warning: str) -> str:
    """Return a warning about the settings of a remote tier, with its address."""
    return f"{spec.name} ({spec.redacted}): {warning}"


def _ping(spec: RemoteSpec, link: StoreConnection) -> Sequence[str]:
    from pagoda import codec
    from pagoda.tiers.remote.store_client import RefusedError

    link.ping(time.monotonic() + patience(spec))
    codec.require(spec.codec)
    with suppress(RefusedError):
        return link.usage(time.monotonic() + patience(spec)).warnings
    return ()
