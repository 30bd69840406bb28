"""Whether remote tiers answer, and what is wrong with how they are set up: for `check`, `config check` and others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from pagoda.cli.remote_stores import Unanswered, ask, patience

if TYPE_CHECKING:
    from pagoda.config import RemoteSpec
    from pagoda.tiers.remote.store_client import StoreConnection


class RemoteCheck(NamedTuple):
    """A remote tier, what is wrong with it (empty: nothing), and of a pool the nodes: on all machines the same.

    `warnings`: what is wrong with how it is set up.
    """

    tier: str
    address: str
    trouble: str
    nodes: str = ""
    warnings: Sequence[str] = ()


def pinged(specs: Sequence[RemoteSpec]) -> list[RemoteCheck]:
    """Return for each remote tier whether it answers and can be read, and whether its codec is installed."""
    return [_checked(spec) for spec in specs]


def _nodes(spec: RemoteSpec) -> str:
    """Return the nodes of a pool in one spelling, and a digest of them to compare; else an empty string."""
    from pagoda.errors import PagodaError

    if "+pool:" in spec.redacted[:12]:
        with suppress(PagodaError):
            place = spec.engine().address.partition("://")[2]
            return f"{place} digest {blake2b(f'{place} {spec.prefix}'.encode(), digest_size=4).hexdigest()}"
    return ""


def _checked(spec: RemoteSpec) -> RemoteCheck:
    nodes = _nodes(spec)
    try:
        warnings = ask(spec, partial(_ping, spec))
    except Unanswered as trouble:
        return RemoteCheck(spec.name, spec.redacted, str(trouble), nodes)
    return RemoteCheck(spec.name, spec.redacted, "", nodes, [worded(spec, warning) for warning in warnings])


def worded(spec: RemoteSpec, warning: str) -> str:
    """Return a warning about how a remote tier is set up, with its place."""
    return f"{spec.name} ({spec.redacted}): {warning}"


def _ping(spec: RemoteSpec, link: StoreConnection) -> Sequence[str]:
    from pagoda import codec
    from pagoda.tiers.remote.store_client import RefusedError

    link.ping(time.monotonic() + patience(spec))
    codec.require(spec.codec)
    with suppress(RefusedError):
        return link.usage(time.monotonic() + patience(spec)).warnings
    return ()
