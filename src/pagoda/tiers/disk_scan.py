"""The rebuild of a disk ledger from the headers of its slots, in the background."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from pagoda import codec
from pagoda.ledger import Found
from pagoda.threads import Event
from pagoda.tiers.disk_io import Device

BATCH_SLOTS = 64
_RETRY_SECONDS = 0.2

_scanning: set[Path] = set()  # stores that a thread of this process is scanning
_scanning_lock = threading.Lock()


def scan(device: Device, stop: Event) -> None:
    """Read all headers that the ledger has not seen, if nobody else is doing so; returns when all are, or on `stop`.

    A header is trusted by its own checksum; it proves nothing about the payload: reads do.
    """
    while not stop.is_set() and len(device.ledger.unscanned()):
        if not _begin(device):  # somebody else scans; should it die, the turn comes here
            stop.wait(_RETRY_SECONDS)
            continue
        try:
            _scan(device, stop)
        finally:
            device.ledger.end_scan()
            _scanning.discard(device.ledger.directory)


def _begin(device: Device) -> bool:
    directory = device.ledger.directory
    with _scanning_lock:  # the ledger's lock keeps processes apart, this one the tiers of this process
        if directory in _scanning or not device.ledger.begin_scan():
            return False
        _scanning.add(directory)
        return True


def _forget_in_child() -> None:
    global _scanning_lock
    _scanning_lock = threading.Lock()
    _scanning.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def _scan(device: Device, stop: Event) -> None:
    while not stop.is_set():
        left = device.ledger.unscanned()
        if not len(left):
            return
        count = min(BATCH_SLOTS, len(left))
        found = _read(device, left[0], count)
        device.ledger.absorb(left[0], found)


def _read(device: Device, first: int, count: int) -> list[Found | None]:
    try:
        pages = device.slab.read_headers(first, count)
    except OSError as error:
        if count == 1:
            device.trouble(error, f"reading the header of slot {first}")
            return [None]
        return [found for slot in range(first, first + count) for found in _read(device, slot, 1)]
    return [_found(device, slot, codec.parse(page)) for slot, page in enumerate(pages, first)]


def _found(device: Device, slot: int, header: codec.Header | None) -> Found | None:
    if header is None or header.slot != slot or header.store_id != device.ledger.store_id:
        return None
    if header.fingerprint != device.fingerprint or header.length != device.chunk_bytes:
        return None
    return Found(
        key=header.key,
        namespace_root=header.namespace,
        epoch=header.epoch,
        position=header.position,
        tokens=header.tokens,
        sequence=header.sequence,
    )
