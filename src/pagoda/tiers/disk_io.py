"""What the reads, the writes and the scan of a disk tier share: ledger, slab, breaker, log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagoda.codec import HEADER_BYTES
from pagoda.ledger import Ledger
from pagoda.metrics import RateLimitedLog, Reason
from pagoda.slab import aligned
from pagoda.tiers.base import Bytes
from pagoda.tiers.breaker import Breaker

_logger = logging.getLogger("pagoda.tiers.disk")


class Slab(Protocol):
    """What a disk tier asks of its slab (`pagoda.slab.FileSlab` or one with its contract)."""

    @property
    def direct(self) -> bool:
        """Whether buffers must begin on a page and have whole pages."""

    def read(self, slot: int, buffers: Sequence[Bytes]) -> None:
        """Fill the buffers from the start of a slot; OSError if not all came."""

    def write(self, slot: int, buffers: Sequence[Bytes]) -> None:
        """Write the buffers from the start of a slot; OSError if not all went."""

    def read_headers(self, first: int, count: int) -> Sequence[memoryview]:
        """The first pages of [first, first + count)."""

    def sync(self) -> None:
        """Return when all is on the medium."""

    def close(self) -> None:
        """Close once the last running call ends."""


@dataclass(frozen=True)
class Device:
    """One store on a disk, with what is known of its health. Thread-safe, as all of its parts are."""

    ledger: Ledger
    slab: Slab
    chunk_bytes: int
    slot_bytes: int  # of a payload: chunk_bytes in whole pages
    fingerprint: str
    breaker: Breaker
    durable: bool = False
    log: RateLimitedLog = field(default_factory=RateLimitedLog)

    def trouble(self, error: Exception, what: str) -> Reason:
        """Note that I/O or a background job failed; returns the reason to give. OSErrors count for the breaker."""
        if isinstance(error, OSError):
            self.breaker.failed()
        return self.note(Reason.IO_ERROR, f"{what} failed: {type(error).__name__}: {error}")

    def note(self, reason: Reason, message: str) -> Reason:
        """Log why a chunk was not served, one line a reason in a while; returns the reason."""
        self.log.warn(_logger, reason, message)
        return reason

    def is_valid(self, slot: int, generation: int) -> bool:
        """Whether the slot still holds what it held under this generation."""
        slots, generations = np.array([slot], np.int64), np.array([generation], np.uint64)
        return bool(self.ledger.still_valid(slots, generations)[0])

    def suits(self, buffer: Bytes) -> bool:
        """Whether the slab can move a whole payload to or from `buffer` without a copy."""
        if buffer.nbytes < self.slot_bytes or not buffer.flags.c_contiguous:
            return False
        return not self.slab.direct or buffer.ctypes.data % HEADER_BYTES == 0

    def renew(self) -> None:
        """Make locks anew, in a forked child: a thread of the parent may have held them."""
        self.breaker.renew()
        self.log.renew()

    def close(self) -> None:
        """Let go of the slab and the ledger."""
        self.slab.close()
        self.ledger.close()


class Scratch:
    """The buffers of one I/O thread: a header page and, made when first needed, room for one payload."""

    def __init__(self, payload_bytes: int) -> None:
        self.page: npt.NDArray[np.uint8] = aligned(HEADER_BYTES)
        self._payload_bytes = payload_bytes
        self._room: Bytes | None = None

    @property
    def room(self) -> Bytes:
        """A page-aligned payload for buffers that the slab cannot use as they are."""
        if self._room is None:
            self._room = aligned(self._payload_bytes)
        return self._room
