"""The tiers of one cache, from the top down, and how the configured ones are opened."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from pagoda.clock import Clock
from pagoda.config import Config
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger
from pagoda.tiers import DiskTier, HostTier, Tier

__all__ = ["Storeys", "open_storeys", "storeys_of"]


class Storeys(NamedTuple):
    """The host tier, if there is one, and what lies below it."""

    host: HostTier | None
    lower: tuple[Tier, ...]

    @property
    def all(self) -> tuple[Tier, ...]:
        """Every tier, from the top down."""
        return (self.host, *self.lower) if self.host is not None else self.lower

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, from the top down."""
        return tuple(tier.name for tier in self.all)

    def only(self, names: Iterable[str] | None) -> Storeys:
        """The chosen tiers (None: all). Raises ValueError for a name that is no tier of this cache."""
        if names is None:
            return self
        wanted = [names] if isinstance(names, str) else list(names)
        unknown = [name for name in wanted if name not in self.names]
        if unknown:
            raise ValueError(f"no tier {unknown[0]!r}: this cache has {', '.join(self.names) or 'none'}")
        host = self.host if self.host is not None and self.host.name in wanted else None
        return Storeys(host, tuple(tier for tier in self.lower if tier.name in wanted))

    def ledgers(self) -> list[tuple[str, Ledger]]:
        """The ledgers of the local tiers, by tier name."""
        return [(tier.name, tier.ledger) for tier in self.all if isinstance(tier, HostTier | DiskTier)]

    def register(self, namespace: Namespace) -> None:
        """Make a namespace known to every tier, with its labels; idempotent."""
        for tier in self.all:
            tier.register(namespace)


def storeys_of(tiers: Sequence[Tier], layout: KVLayout) -> Storeys:
    """The storeys made of tiers that the caller built. Raises ValueError if they do not fit each other."""
    for tier in tiers:
        if tier.chunk_bytes != layout.chunk_bytes:
            raise ValueError(
                f"tier {tier.name!r} has chunks of {tier.chunk_bytes} bytes, the layout {layout.chunk_bytes}"
            )
    if len({tier.name for tier in tiers}) != len(tiers):
        raise ValueError("two tiers have one name")
    hosts = [tier for tier in tiers if isinstance(tier, HostTier)]
    if len(hosts) > 1 or (hosts and tiers[0] is not hosts[0]):
        raise ValueError("there is at most one host tier, and it is the first")
    return Storeys(
        hosts[0] if hosts else None, tuple(tier for tier in tiers if not isinstance(tier, HostTier))
    )


def open_storeys(config: Config, layout: KVLayout, clock: Clock) -> Storeys:
    """Open the tiers that `config` describes. Raises StoreError with the remedy; nothing stays open then."""
    with contextlib.ExitStack() as undo:
        host: HostTier | None = None
        lower: list[Tier] = []
        if config.host_bytes:
            host = HostTier.open(
                layout,
                Path(config.host_path),
                config.host_bytes,
                shared=config.host_shared,
                policy=config.policy,
                deadline_seconds=config.deadline_seconds,
                clock=clock,
            )
            undo.callback(host.close)
        if config.disk_bytes:
            disk = DiskTier.open(
                layout,
                Path(config.disk_path),
                config.disk_bytes,
                direct=config.disk_direct,
                policy=config.policy,
                durable=config.durable,
                io_threads=config.io_threads,
                queue_chunks=config.queue_chunks,
                deadline_seconds=config.deadline_seconds,
                clock=clock,
            )
            undo.callback(disk.close)
            lower.append(disk)
        undo.pop_all()
        return Storeys(host, tuple(lower))
