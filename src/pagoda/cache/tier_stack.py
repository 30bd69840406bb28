"""The tiers of one cache, from the top down. `open_tiers` makes the stack of those that are
configured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from pagoda.codec import LOSSY
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger
from pagoda.tiers import DiskTier, HostTier, Tier


class TierStack:
    """The host tier, if there is one, and the tiers below it. Immutable. `written`: the tiers not
    read-only.
    """

    def __init__(
        self,
        host: HostTier | None,
        lower: tuple[Tier, ...],
        left_out: tuple[str, ...] = (),
    ) -> None:
        """`left_out`: names of the cache's tiers that may not be used now."""
        self.host = host
        self.lower = lower
        self.written = tuple(tier for tier in lower if not tier.read_only)
        self.left_out = left_out
        # from the top down
        self.all: tuple[Tier, ...] = lower if host is None else (host, *lower)
        self.names = tuple(tier.name for tier in self.all)

    def only(self, names: Iterable[str]) -> TierStack:
        """Return the chosen tiers. Raises ValueError for a name that is not a tier of this
        cache.
        """
        wanted = [names] if isinstance(names, str) else list(names)
        unknown = [
            name for name in wanted if name not in (*self.names, *self.left_out)
        ]
        if unknown:
            raise ValueError(
                f"no tier {unknown[0]!r}: this cache has {', '.join(self.names) or 'none'}"
            )
        host = (
            self.host
            if self.host is not None and self.host.name in wanted
            else None
        )
        lower = tuple(tier for tier in self.lower if tier.name in wanted)
        return TierStack(host, lower, self.left_out)

    def local(self) -> TierStack:
        """Return the tiers that are not shared with other machines."""
        remote = tuple(tier.name for tier in self.lower if tier.is_shared)
        lower = tuple(tier for tier in self.lower if not tier.is_shared)
        return (
            TierStack(self.host, lower, (*self.left_out, *remote))
            if remote
            else self
        )

    def without(self, names: Collection[str]) -> TierStack:
        """Return the tiers that do not have one of these names."""
        gone = tuple(name for name in self.names if name in names)
        if not gone:
            return self
        host = None if self.host is None or self.host.name in gone else self.host
        lower = tuple(tier for tier in self.lower if tier.name not in gone)
        return TierStack(host, lower, (*self.left_out, *gone))

    def exact(self) -> TierStack:
        """Return the tiers without a lossy codec."""
        lossy = tuple(tier.name for tier in self.lower if codecs_of([tier]))
        lower = tuple(tier for tier in self.lower if tier.name not in lossy)
        return (
            TierStack(self.host, lower, (*self.left_out, *lossy))
            if lossy
            else self
        )

    def joined_by(self, disk: Tier) -> TierStack:
        """Return these tiers and the disk tier, which was left out: it is the first below the host
        tier.
        """
        left_out = tuple(name for name in self.left_out if name != disk.name)
        return TierStack(self.host, (disk, *self.lower), left_out)

    def ledgers(self) -> list[tuple[str, Ledger]]:
        """Return the ledgers of the local tiers, by tier name."""
        return [
            (tier.name, tier.ledger)
            for tier in self.all
            if isinstance(tier, HostTier | DiskTier)
        ]

    def last_clears(self) -> list[int]:
        """Return a number of each local tier that changes when chunks are cleared there, by any
        process.
        """
        return [ledger.last_clear() for _, ledger in self.ledgers()]

    def register(self, namespace: Namespace) -> None:
        """Register a namespace and its labels with every tier; idempotent."""
        for tier in self.all:
            tier.register(namespace)


def codecs_of(tiers: Iterable[Tier]) -> tuple[str, ...]:
    """Return the lossy codecs of tiers, each once, sorted."""
    return tuple(sorted({tier.codec for tier in tiers}.intersection(LOSSY)))


def build_tiers(tiers: Sequence[Tier], layout: KVLayout) -> TierStack:
    """Return the stack of the caller's tiers. Raises ValueError if they do not fit each other."""
    for tier in tiers:
        if not isinstance(tier, Tier):
            raise ValueError(
                f"{type(tier).__name__} is not a whole tier: derive it from pagoda.tiers.Tier"
            )
        if tier.chunk_bytes != layout.chunk_bytes:
            raise ValueError(
                f"tier {tier.name!r} has chunks of {tier.chunk_bytes} bytes, the layout "
                f"{layout.chunk_bytes}: "
                "build both with one KVLayout"
            )
    if len({tier.name for tier in tiers}) != len(tiers):
        raise ValueError("two tiers have one name: give each tier its own")
    hosts = [tier for tier in tiers if isinstance(tier, HostTier)]
    if len(hosts) > 1 or (hosts and tiers[0] is not hosts[0]):
        raise ValueError("there is at most one host tier, and it is the first")
    return TierStack(hosts[0] if hosts else None, tuple(tiers[len(hosts) :]))
