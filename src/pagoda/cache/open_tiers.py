"""Open the tiers that a configuration describes. `Cache` and the commands call it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pagoda.base import recorded_tiers
from pagoda.base.clock import Clock
from pagoda.base.errors import NoRoomError, StoreError
from pagoda.base.file_systems import nearest
from pagoda.base.log import guarded_logger
from pagoda.base.store_place import free_bytes
from pagoda.cache.late_tier import BoundedCall, LateTier
from pagoda.cache.tier_stack import TierStack
from pagoda.config import Config
from pagoda.config.remote_urls import RemoteSpec
from pagoda.config.sizes import (
    AUTO,
    FILESYSTEM_SHARE,
    auto_bytes,
    format_size,
)
from pagoda.config.sources import file_of
from pagoda.layout import KVLayout
from pagoda.ledger.ledger import make_room
from pagoda.tiers import DiskTier, HostTier, Tier
from pagoda.tiers.remote.remote_tier import RemoteTier

if TYPE_CHECKING:
    from pagoda.tiers.remote.peers import PeersClient

log = guarded_logger("pagoda.cache")

_DISK_SECONDS = 65.0  # a store gives up a wait for other processes after 60 s
_HOST_ATTEMPTS = 4  # others may take the space at the same time
_LEDGER_BYTES = 8 << 20  # what the files of a ledger take
_LEDGER_BYTES_PER_SLOT = 1024  # and for each slot
_FEW_CHUNKS = 64  # the log warns of an "auto" size with fewer chunks


def open_tiers(
    config: Config, layout: KVLayout, clock: Clock
) -> tuple[TierStack, LateTier | None]:
    """Open the tiers that `config` describes; return them, and the disk tier if it is left out for
    now.

    Raises StoreError with the remedy; then no tier stays open, and no store that this call made
    keeps its space.
    """
    with contextlib.ExitStack() as undo:
        host = _open_host(config, layout, clock)
        if host is not None:
            undo.callback(host.undo_opening)
        lower: list[Tier] = []
        late: LateTier | None = None
        if config.disk_bytes:
            disk = _open_disk(config, layout, clock)
            if isinstance(disk, LateTier):
                late = disk
            else:
                undo.callback(disk.undo_opening)
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
        return TierStack(
            host, tuple(lower), () if late is None else (late.name,)
        ), late


def _open_disk(
    config: Config, layout: KVLayout, clock: Clock
) -> DiskTier | LateTier:
    """Open the disk tier. With `start_without = "lower"`, one that fails or does not answer is left
    out for now.
    """
    reopen: Callable[[], DiskTier] = partial(
        DiskTier.open,
        layout,
        Path(config.disk_path),
        config.disk_bytes,
        direct=config.disk_direct,
        codec_name=config.disk_codec,
        policy=config.policy,
        objective=config.objective,
        durable=config.durable,
        io_threads=config.io_threads,
        queue_chunks=config.queue_chunks,
        deadline_seconds=config.deadline_seconds,
        clock=clock,
    )
    if config.start_without == "none":
        return reopen()
    opening = BoundedCall(reopen, "pagoda-open-disk")
    try:
        return opening.result(_DISK_SECONDS)
    except TimeoutError as error:
        late = LateTier(
            DiskTier.name, f"{config.disk_path}: {error}", reopen, opening
        )
    except (StoreError, OSError) as error:
        late = LateTier(DiskTier.name, str(error), reopen)
    log.warning(
        (
            "starting without the disk tier, which takes part as soon as it can be opened "
            "(start_without = lower): %s"
        ),
        late.reason,
    )
    return late


def _open_host(config: Config, layout: KVLayout, clock: Clock) -> HostTier | None:
    """Open the host tier; None if it is turned off. With "auto", others may have taken the space:
    then it is smaller.

    Raises StoreError, also NoRoomError for a size that was asked for.
    """
    size_bytes = _host_bytes(config, layout)
    has_made_room = False
    for _ in range(_HOST_ATTEMPTS):
        if not size_bytes:
            return None
        try:
            return HostTier.open(
                layout,
                Path(config.host_path),
                size_bytes,
                shared=config.host_shared,
                policy=config.policy,
                objective=config.objective,
                deadline_seconds=config.deadline_seconds,
                clock=clock,
                grows=config.host_size == AUTO,
            )
        except NoRoomError as error:
            if not has_made_room and config.host_shared:
                has_made_room = True
                need_bytes = (
                    _LEDGER_BYTES
                    + layout.slots_in(size_bytes) * _LEDGER_BYTES_PER_SLOT
                )
                if make_room(
                    Path(config.host_path), need_bytes + layout.slot_bytes, clock
                ):
                    continue
            if config.host_size != AUTO:
                raise
            size_bytes = _smaller(size_bytes, error, config, layout)
    return None


def _smaller(
    size_bytes: int, error: NoRoomError, config: Config, layout: KVLayout
) -> int:
    """Return the bytes that there is room for now, less than `size_bytes`; 0 if not for one chunk.
    Logs it.
    """
    free = free_bytes(nearest(Path(config.host_path)), in_memory=True)
    room = (
        max(0, int(free * FILESYSTEM_SHARE) - _LEDGER_BYTES) * layout.slot_bytes
    )
    found = min(
        room // (layout.slot_bytes + _LEDGER_BYTES_PER_SLOT), size_bytes // 2
    )
    chunks = layout.slots_in(found)
    outcome = (
        f"{format_size(found)}, {chunks} chunks, until this process starts again"
    )
    log.warning(
        "host_size = auto: others have taken the space of %s (%s); the host tier is %s",
        format_size(size_bytes),
        error,
        outcome if chunks else "left out",
    )
    return found if chunks else 0


def _host_bytes(config: Config, layout: KVLayout) -> int:
    """Return the size of the host tier; log if "auto" gives few chunks, and return 0 if it gives
    none.
    """
    size_bytes = config.host_bytes
    chunks = layout.slots_in(size_bytes)
    unlimited = auto_bytes(None)  # without a limit, as the file system allows
    if config.host_size != AUTO or (
        chunks
        and (
            chunks >= _FEW_CHUNKS
            or size_bytes == unlimited
            or config.auto_bound  # who bounded it has said how little it is
        )
    ):
        return size_bytes
    if config.auto_bound:
        why = config.auto_bound
    elif size_bytes < unlimited:
        why = (
            f"the file system of {config.host_path} is that small: mount a larger one "
            "(docker: --shm-size)"
        )
    else:
        why = "this process may use so little memory: raise its limit"
    text = (
        "host_size = auto comes to %s, %d chunks of %s%s, as %s, or set host_size"
    )
    off = "" if chunks else ", so there is no host tier"
    log.warning(
        text,
        format_size(size_bytes),
        chunks,
        format_size(layout.slot_bytes),
        off,
        why,
    )
    return size_bytes if chunks else 0


def open_peers(
    config: Config, layout: KVLayout, clock: Clock | None = None
) -> RemoteTier:
    """Return the tier over the configured neighbours; does not connect yet. Raises ConfigError,
    StoreError.
    """
    return RemoteTier(layout, peers_client(config, clock=clock), clock=clock)


def peers_client(
    config: Config, *, look_seconds: float = 0.05, clock: Clock | None = None
) -> PeersClient:
    """Return the configured neighbours as one store; connects to nothing. Raises ConfigError,
    StoreError.
    """
    from pagoda.tiers.remote.peer_directory import PeerDirectory
    from pagoda.tiers.remote.peers import PeersClient, PeerUrl

    urls = [
        PeerUrl(
            spec.url_with_password(),
            spec.options.get("dns") == "all",
            "proof" in spec.options,
        )
        for spec in config.peer_servers()
    ]
    found = [
        PeerDirectory(spec.url_with_password(), prefix=spec.prefix)
        for spec in config.lookup_server()
    ]
    directory = found[0] if found else None
    return PeersClient(
        urls, directory=directory, look_seconds=look_seconds, clock=clock
    )


def open_remote(
    spec: RemoteSpec, layout: KVLayout, clock: Clock | None = None
) -> RemoteTier:
    """Return the remote tier that a configured URL describes; does not connect yet. Raises
    ConfigError.

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
        answered=partial(
            recorded_tiers.add,
            "remote",
            spec.redacted,
            file=file_of(spec.redacted),
        ),
    )
