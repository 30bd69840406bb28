"""The last requests of all processes that share a store, and why each got no more tokens: a ring in
one page.

`CacheCounters` appends a record where it counts a request, `StoreStats` reads them. An append is
two plain writes to mapped memory, without a lock or a system call; if two processes append at the
same moment, one record may be lost. A torn record, or one of another version, has a wrong checksum
and is left out. Nothing else depends on the records.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping
from pathlib import Path
from struct import Struct
from typing import NamedTuple
from zlib import crc32

from pagoda.base.metrics import TIER_KINDS
from pagoda.ledger.columns import map_or_private

MOST_REQUESTS = 63
NAMESPACE_BYTES = 16  # the bytes of a namespace's root that are kept
RING_BYTES = 4096
# the first 8 bytes of the page are the number of the next record
_RECORD_BYTES = 64
# time (Unix), process id, tokens asked for and hit by kind of tier, first bytes of the namespace's
# root, reason
_RECORD = Struct(f"<dIIIII{NAMESPACE_BYTES}s16s")
_CHECKSUM = Struct("<I")
# the largest number in a record; larger ones are cut, so that no request fails because of them
_WORD = 0xFFFFFFFF


class RecentRequest(NamedTuple):
    """A request that was counted. `namespace`: the first bytes of its root, zeros if it is not
    known.
    """

    time: float
    pid: int
    asked_tokens: int
    hit_tokens: dict[str, int]  # by kind of tier
    namespace: bytes
    reason: str | None  # why it got no more; None: all whole chunks were there


class RequestRing:
    """The ring of one store. Thread-safe and fork-safe; without space for the page, only this
    process sees it.
    """

    def __init__(self, source: Path | mmap.mmap) -> None:
        """Use that page of memory, or map that file; make it if it does not exist."""
        self._page = map_or_private(source, RING_BYTES)
        self._next = self._page[:8].cast("Q")

    def append(
        self,
        counts: Mapping[str, int],
        namespace: bytes,
        reason: str,
        pid: int = 0,
    ) -> None:
        """Append a request, by what it adds to the counters; `reason` is empty if all whole chunks
        were there. `pid`: of this process; asking the system would double the cost.
        """
        hits = counts.get
        record = _RECORD.pack(
            time.time(),
            pid or os.getpid(),
            counts["asked_tokens"] & _WORD,
            hits("hit_tokens_host", 0) & _WORD,
            hits("hit_tokens_disk", 0) & _WORD,
            hits("hit_tokens_remote", 0) & _WORD,
            namespace,
            reason.encode(),
        )
        number = self._next[0] % MOST_REQUESTS
        self._next[0] = number + 1
        begin = _RECORD_BYTES * (number + 1)
        self._page[begin : begin + _RECORD_BYTES] = record + _CHECKSUM.pack(
            crc32(record)
        )

    def newest(self) -> list[RecentRequest]:
        """Return the requests that are remembered, the newest first."""
        page = bytes(self._page)
        found = list[RecentRequest]()
        for begin in range(_RECORD_BYTES, RING_BYTES, _RECORD_BYTES):
            end = begin + _RECORD.size
            if _CHECKSUM.unpack_from(page, end)[0] == crc32(page[begin:end]):
                when, pid, asked, *hits, namespace, reason = _RECORD.unpack_from(
                    page, begin
                )
                by_kind = dict(zip(TIER_KINDS, hits, strict=True))
                why = reason.rstrip(b"\0").decode() or None
                found.append(
                    RecentRequest(when, pid, asked, by_kind, namespace, why)
                )
        return sorted(found, key=lambda request: -request.time)
