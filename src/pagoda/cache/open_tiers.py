"""Open the tiers that a configuration describes. `Cache` and the commands call it."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pagoda.cache.tier_stack import TierStack
from pagoda.clock import Clock
from pagoda.config import Config
from pagoda.config.remote_urls import RemoteSpec
from pagoda.config.sizes import AUTO, auto_bytes, format_size
from pagoda.config.sources import file_of
from pagoda.layout import KVLayout
from pagoda.metrics import guarded_logger
from pagoda.tiers import DiskTier, HostTier, Tier, recorded_tiers
from pagoda.tiers.remote.remote_tier import RemoteTier

if TYPE_CHECKING:
    from pagoda.tiers.remote.peers import PeersClient

log = guarded_logger("pagoda.cache")

_FEW_CHUNKS = 64  # the log warns of an "auto" size with fewer chunks


def open_tiers(config: Config, layout: KVLayout, clock: Clock) -> TierStack:
    """Open the tiers that `config` describes. Raises StoreError with the remedy; then no tier stays open."""
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
    unlimited = auto_bytes(None)  # without a limit, as the file system allows
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
    """Return the remote tier that a configured URL describes; does not connect yet. Raises ConfigError.

    It enters the register of tiers when the store has answered for the first time.
    """
    return RemoteTier(
        layout,
        spec.engine(),
        codec=spec.codec,
        connections=spec.connections,
        queue_chunks=spec.queue_chunks,
        deadline_seconds=spec.deadline_seconds,
        look_seconds=spec.look_seconds,
        clock=clock,
        answered=partial(recorded_tiers.add, "remote", spec.redacted, file=file_of(spec.redacted)),
    )
