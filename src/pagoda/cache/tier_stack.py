"""The tiers of one cache, from the top down, and how the configured ones are opened."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pagoda.clock import Clock
from pagoda.codec import LOSSY
from pagoda.config import Config
from pagoda.config.remote_urls import RemoteSpec
from pagoda.config.sizes import AUTO, auto_bytes, format_size
from pagoda.keys import Namespace
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger
from pagoda.metrics import guarded_logger
from pagoda.tiers import DiskTier, HostTier, Tier, tier_registry
from pagoda.tiers.remote.remote_tier import RemoteTier

if TYPE_CHECKING:
    from pagoda.tiers.remote.peers import PeersClient

log = guarded_logger("pagoda.cache")

_FEW_CHUNKS = 64  # the log warns of an "auto" size with fewer chunks


class TierStack:
    """The host tier, if there is one, and the tiers below it. Immutable. `written`: those that are not only read."""

    def __init__(
        self, host: HostTier | None, lower: tuple[Tier, ...], left_out: tuple[str, ...] = ()
    ) -> None:
        """`left_out`: names of tiers of this cache that may not be used now."""
        self.host = host
        self.lower = lower
        self.written = tuple(tier for tier in lower if not (isinstance(tier, RemoteTier) and tier.read_only))
        self.left_out = left_out
        self.all: tuple[Tier, ...] = lower if host is None else (host, *lower)  # from the top down
        self.names = tuple(tier.name for tier in self.all)

    def only(self, names: Iterable[str]) -> TierStack:
        """Return the chosen tiers. Raises ValueError for a name that is not a tier of this cache."""
        wanted = [names] if isinstance(names, str) else list(names)
        unknown = [name for name in wanted if name not in (*self.names, *self.left_out)]
        if unknown:
            raise ValueError(f"no tier {unknown[0]!r}: this cache has {', '.join(self.names) or 'none'}")
        host = self.host if self.host is not None and self.host.name in wanted else None
        lower = tuple(tier for tier in self.lower if tier.name in wanted)
        return TierStack(host, lower, self.left_out)

    def local(self) -> TierStack:
        """Return the tiers that are not shared with other machines."""
        remote = tuple(tier.name for tier in self.lower if isinstance(tier, RemoteTier))
        lower = tuple(tier for tier in self.lower if not isinstance(tier, RemoteTier))
        return TierStack(self.host, lower, (*self.left_out, *remote)) if remote else self

    def exact(self) -> TierStack:
        """Return the tiers without a lossy codec."""
        lossy = tuple(tier.name for tier in self.lower if codecs_of([tier]))
        lower = tuple(tier for tier in self.lower if tier.name not in lossy)
        return TierStack(self.host, lower, (*self.left_out, *lossy)) if lossy else self

    def ledgers(self) -> list[tuple[str, Ledger]]:
        """Return the ledgers of the local tiers, by tier name."""
        return [(tier.name, tier.ledger) for tier in self.all if isinstance(tier, HostTier | DiskTier)]

    def last_clears(self) -> list[int]:
        """Return a number of each local tier that changes when chunks are cleared there, by any process."""
        return [ledger.last_clear() for _, ledger in self.ledgers()]

    def register(self, namespace: Namespace) -> None:
        """Register a namespace and its labels with every tier; idempotent."""
        for tier in self.all:
            tier.register(namespace)


def codecs_of(tiers: Iterable[Tier]) -> tuple[str, ...]:
    """Return the lossy codecs of tiers, each once, sorted."""
    return tuple(sorted({getattr(tier, "codec", "raw") for tier in tiers}.intersection(LOSSY)))


def build_tiers(tiers: Sequence[Tier], layout: KVLayout) -> TierStack:
    """Return the stack of tiers that the caller built. Raises ValueError if they do not fit each other."""
    for tier in tiers:
        if tier.chunk_bytes != layout.chunk_bytes:
            raise ValueError(
                f"tier {tier.name!r} has chunks of {tier.chunk_bytes} bytes, the layout {layout.chunk_bytes}: "
                "build both with one KVLayout"
            )
    if len({tier.name for tier in tiers}) != len(tiers):
        raise ValueError("two tiers have one name: give each tier its own")
    hosts = [tier for tier in tiers if isinstance(tier, HostTier)]
    if len(hosts) > 1 or (hosts and tiers[0] is not hosts[0]):
        raise ValueError("there is at most one host tier, and it is the first")
    return TierStack(hosts[0] if hosts else None, tuple(tiers[len(hosts) :]))


def open_tiers(config: Config, layout: KVLayout, clock: Clock) -> TierStack:
    """Open the tiers that `config` describes. Raises StoreError with the remedy; then none stays open."""
    with contextlib.ExitStack() as undo:
        host: HostTier | None = None
        lower: list[Tier] = []
        if host_bytes := _host_bytes(config, layout):
            host = HostTier.open(
                layout,
                Path(config.host_path),
                host_bytes,
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
                codec_name=config.disk_codec,
                policy=config.policy,
                durable=config.durable,
                io_threads=config.io_threads,
                queue_chunks=config.queue_chunks,
                deadline_seconds=config.deadline_seconds,
                clock=clock,
            )
            undo.callback(disk.close)
            lower.append(disk)
        if config.peers or config.lookup:
            peers = open_peers(config, layout, clock)
            undo.callback(peers.close)
            lower.append(peers)
        for spec in config.remotes():
            remote = open_remote(spec, layout, clock)
            undo.callback(remote.close)
            lower.append(remote)
        undo.pop_all()
        return TierStack(host, tuple(lower))


def _host_bytes(config: Config, layout: KVLayout) -> int:
    """Return the size of the host tier; log if "auto" gives few chunks, and return 0 if it gives none."""
    size_bytes = config.host_bytes
    chunks = layout.slots_in(size_bytes)
    unlimited = auto_bytes(None)  # by a file system
    if config.host_size != AUTO or (chunks and (chunks >= _FEW_CHUNKS or size_bytes == unlimited)):
        return size_bytes
    if size_bytes < unlimited:
        why = f"the file system of {config.host_path} is that small: mount a larger one (docker: --shm-size)"
    else:
        why = "this process may use so little memory: raise its limit"
    text = "host_size = auto comes to %s, %d chunks of %s%s, as %s, or set host_size"
    off = "" if chunks else ", so there is no host tier"
    log.warning(text, format_size(size_bytes), chunks, format_size(layout.slot_bytes), off, why)
    return size_bytes if chunks else 0


def open_peers(config: Config, layout: KVLayout, clock: Clock | None = None) -> RemoteTier:
    """Return the tier over the configured neighbours; does not connect yet. Raises ConfigError, StoreError."""
    return RemoteTier(layout, peers_client(config, clock=clock), clock=clock)


def peers_client(config: Config, *, look_seconds: float = 0.05, clock: Clock | None = None) -> PeersClient:
    """Return the configured neighbours as one store; connects to nothing. Raises ConfigError, StoreError."""
    from pagoda.tiers.remote.peer_directory import PeerDirectory
    from pagoda.tiers.remote.peers import PeersClient, PeerUrl

    urls = [
        PeerUrl(spec.url_with_password(), spec.options.get("dns") == "all") for spec in config.peer_servers()
    ]
    found = [PeerDirectory(spec.url_with_password(), prefix=spec.prefix) for spec in config.lookup_server()]
    directory = found[0] if found else None
    return PeersClient(urls, directory=directory, look_seconds=look_seconds, clock=clock)


def open_remote(spec: RemoteSpec, layout: KVLayout, clock: Clock | None = None) -> RemoteTier:
    """Return the remote tier that a configured URL describes; does not connect yet. Raises ConfigError."""
    tier_registry.add("remote", spec.redacted)
    return RemoteTier(
        layout,
        spec.engine(),
        codec=spec.codec,
        connections=spec.connections,
        queue_chunks=spec.queue_chunks,
        deadline_seconds=spec.deadline_seconds,
        look_seconds=spec.look_seconds,
        clock=clock,
    )
