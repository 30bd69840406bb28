"""How one thread of a remote tier moves chunks: encoded and sealed on the way out, decoded and verified coming in."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence

from pagoda import codec
from pagoda.codec import HEADER_BYTES
from pagoda.errors import ConfigError
from pagoda.metrics import Reason
from pagoda.slab import aligned
from pagoda.tiers.base import Bytes, Done
from pagoda.tiers.io_queue import IoQueue, Read, Write
from pagoda.tiers.remote.remote_worker import Line, RemoteStore
from pagoda.tiers.remote.store_client import Link, Put, Refused

STORE_ID = b"pagoda/remote/1\0"  # of the headers, where a store of one machine has its own


class RemoteHand:
    """The saves and loads of one thread, with its own link and buffers."""

    def __init__(self, store: RemoteStore, queue: IoQueue) -> None:
        self._store, self._queue = store, queue
        self._line = Line(store)
        self._page: Bytes = aligned(HEADER_BYTES)
        self._room: Bytes | None = None
        self._stays = False  # what the present load was not given is left alone

    def close(self) -> None:
        """Let go of the link."""
        self._line.close()

    def _scratch(self) -> Bytes:
        """Room for one encoded chunk, made when first needed."""
        if self._room is None:
            self._room = aligned(self._store.chunk_bytes)
        return self._room

    # ---- in ------------------------------------------------------------------------------------------------------

    def load(self, read: Read) -> None:
        """Do one read and end its future, whatever happens."""
        store, self._stays = self._store, False
        try:
            reason = self._load(read)
        except Exception as error:  # noqa: BLE001  # the border of the background: becomes the value of the future
            reason = store.trouble(error, "a load")
        if reason is None:
            store.count("loaded_chunks")
            store.count("loaded_bytes", store.chunk_bytes)
        else:
            store.count(f"miss_{reason}")
            if (
                reason in (Reason.ABSENT, Reason.FAILED_CHECK) and not self._stays
            ):  # else it may well be there
                store.memo.note(read.namespace, [read.key], False)
        self._queue.loaded(read, Done(reason is None, reason), store.chunk_bytes)

    def _load(self, read: Read) -> Reason | None:
        if self._queue.copied(read, self._store.chunk_bytes):
            return None
        for root in self._store.roots(read.namespace):
            if self._store.breaker.open:
                return Reason.TIER_SKIPPED
            reason = self._line.use(lambda link, root=root: self._get(link, root, read), "a load")  # type: ignore[misc]
            if reason is not Reason.ABSENT:
                return reason
        return Reason.ABSENT

    def _get(self, link: Link, root: bytes, read: Read) -> Reason | None:
        store = self._store
        payload = read.buffer[: store.chunk_bytes]
        expected = self._expected(read, root)
        found: codec.Header | None = None

        def place() -> Bytes | None:
            nonlocal found
            found = codec.parse(self._page)
            self._stays = self._good_for_others(found, expected, read)
            if self._stays or found is None or not codec.agrees(found, expected):
                return None
            nbytes = found.stored_bytes or found.length
            return payload if found.codec == "raw" else self._scratch()[:nbytes]

        try:
            count = link.get(root, read.key, self._page, place, store.until(store.chunk_bytes))
        except Refused as refusal:
            if refusal.reason is not Reason.FAILED_CHECK:
                raise
            return Reason.FAILED_CHECK if self._stays else self._spoiled(link, root, read.key)
        if count is None:
            return Reason.ABSENT
        if found is None or not self._decoded(found.codec, count, payload):
            return self._spoiled(link, root, read.key)
        if codec.verify(self._page, payload, expected) is not None:
            return self._spoiled(link, root, read.key)
        return None

    def _good_for_others(self, found: codec.Header | None, expected: codec.Expected, read: Read) -> bool:
        """Whether a value that is not served is left alone: it is good for others, or was asked for wrongly."""
        if codec.is_foreign(self._page):
            self._store.note(
                Reason.FAILED_CHECK, "a chunk that another version wrote cannot be read: it stays"
            )
            return True
        if found is None or not codec.agrees(found, expected):
            return False
        return read.position not in (None, found.position) or not self._can_read(found.codec)

    def _can_read(self, name: str) -> bool:
        """Whether the library of a codec is installed here; the log says which one is not."""
        try:
            codec.require(name)
        except ConfigError as missing:
            self._store.note(Reason.FAILED_CHECK, f"chunks cannot be read: {missing}")
            return False
        return True

    def _decoded(self, name: str, count: int, payload: Bytes) -> bool:
        if name == "raw":
            return count == payload.nbytes
        return codec.decode(name, self._scratch()[:count], self._store.word_bytes, payload)

    def _spoiled(self, link: Link, root: bytes, key: bytes) -> Reason:
        """Take away a value that cannot be served, or its key could not be stored again."""
        self._store.count("failed_checks")
        with contextlib.suppress(Refused):
            link.remove(root, [key], self._store.until())
        return Reason.FAILED_CHECK

    def _expected(self, read: Read, root: bytes) -> codec.Expected:
        return codec.Expected(
            store_id=STORE_ID,
            slot=0,
            namespace=root,
            epoch=0,
            key=read.key,
            length=self._store.chunk_bytes,
            fingerprint=self._store.fingerprint,
        )

    # ---- out -----------------------------------------------------------------------------------------------------

    def save(self, writes: Sequence[Write], between: Callable[[], None]) -> None:
        """Do a batch of writes and end their futures, whatever happens; `between` runs before each (reads go first)."""
        for write in writes:
            try:
                between()
                reason = self._save(write)
            except Exception as error:  # noqa: BLE001  # the border of the background: becomes the value of the future
                reason = self._store.trouble(error, "a save")
            if reason is not None:
                self._store.count(f"drop_{reason}")
            self._queue.saved(write, Done(reason is None, reason))

    def _save(self, write: Write) -> Reason | None:
        store = self._store
        if store.breaker.open:
            return Reason.TIER_SKIPPED
        if store.refusals.resting:
            return store.refusal
        if not write.usable():
            return write.cancelled or Reason.STALE
        if store.memo.get(write.namespace, write.chunk.key):  # a look-up's late answer
            return None
        payload = write.chunk.payload[: store.chunk_bytes]
        name, stored = codec.encode(store.codec, payload, store.word_bytes, self._scratch_for(store.codec))
        codec.seal(self._header(write, name, stored.nbytes), payload, self._page)
        # From the checksum to this line the payload was what its key names: so is whatever verifies against it later.
        if not write.usable():
            return write.cancelled or Reason.STALE

        def usable() -> bool:
            return write.usable() if name == "raw" else write.cancelled is None

        def put(link: Link) -> Put:
            until = store.until(stored.nbytes)
            return link.put(write.namespace, write.chunk.key, self._page, stored, usable, until)

        how = self._line.use(put, "a save", store.refusals)
        return how if isinstance(how, Reason) else self._ended(write, how)

    def _scratch_for(self, name: str) -> Bytes:
        return self._page[:0] if name == "raw" else self._scratch()

    def _ended(self, write: Write, how: Put) -> Reason | None:
        store, key = self._store, write.chunk.key
        if how is Put.BUSY:
            return Reason.BUSY
        if how is Put.STALE:
            return write.cancelled or Reason.STALE
        if write.cancelled is not None:  # taken away while it was being published
            self._line.use(lambda link: link.remove(write.namespace, [key], store.until()), "a removal")
            return write.cancelled
        store.memo.note(write.namespace, [key], True)
        if how is Put.STORED:
            store.count("stored_chunks")
            store.count("stored_bytes", store.chunk_bytes)
        return None

    def _header(self, write: Write, name: str, stored_bytes: int) -> codec.Header:
        return codec.Header(
            store_id=STORE_ID,
            slot=0,
            namespace=write.namespace,
            epoch=0,
            key=write.chunk.key,
            position=write.chunk.position,
            length=self._store.chunk_bytes,
            tokens=write.chunk.tokens,
            codec=name,
            fingerprint=self._store.fingerprint,
            sequence=secrets.randbits(63),
            stored_bytes=stored_bytes,
        )
