"""The stores of the server: it finds them under the known roots, and opens them beside the engines.

`server` makes one `ServedStores`; `chunk_routes` calls it on the threads for blocking calls,
because a call may wait for the ledger, until its deadline.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from pagoda import codec
from pagoda.base.clock import Deadline
from pagoda.base.errors import ClosedError, NoRoomError, PagodaError
from pagoda.base.file_space import size_in_words
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.codec import HEADER_BYTES
from pagoda.layout import KVLayout
from pagoda.ledger import Ledger, admin
from pagoda.ledger.store_state import FORMAT, read_state
from pagoda.policy import DEFAULT_OBJECTIVE
from pagoda.slab import FileSlab, MemorySlab, aligned
from pagoda.tiers import Chunk, HostTier
from pagoda.tiers.base import Bytes, confirm_each
from pagoda.tiers.remote.remote_tier import STORE_ID

LEASE_SECONDS = 10.0  # of a chunk that is being sent; renewed after each piece
_LEDGER_SECONDS = 1.0  # the deadline of one call of a ledger
_FIND_SECONDS = 0.25  # the deadline of all look-ups of one request
_MOST_HEADERS = 2048  # 4 KiB each
_MOST_LABELS = 1024
# chunks of one namespace that arrive, or are read, within this time count as one run
_RUN_SECONDS = 5.0
_MOST_RUNS = 1024
_MOST_STORES = 64  # with so many stores, the server creates no more

K = TypeVar("K")
V = TypeVar("V")
_logger = guarded_logger("pagoda.serve")


class HostRoom(NamedTuple):
    """Where the server creates host stores for new layouts, and how large they may be."""

    path: Path
    size_bytes: int
    policy: str
    grows: bool = False  # `size_bytes` is the most: "auto"
    objective: str = DEFAULT_OBJECTIVE


class LocatedChunk(NamedTuple):
    """A chunk that may be read from `slot` of `store`, where it had this `generation`. It has a
    lease.
    """

    store: ServedStore
    slot: int
    generation: int

    def renew(self) -> bool:
        """Renew the lease; return whether the slot still has this chunk. If so, bytes read before
        belong to it.
        """
        ledger = self.store.ledger
        where = (np.array([self.slot]), np.array([self.generation], np.uint64))
        ledger.lease(*where, LEASE_SECONDS)
        return bool(ledger.still_valid(*where)[0])


class ServedStore:
    """One existing store, opened beside the processes that use it. Thread-safe.

    `close` takes effect when the last `using` has ended. `file` is a descriptor of the slab, for
    sendfile.
    """

    def __init__(
        self, directory: Path, ledger: Ledger, slab: MemorySlab | FileSlab
    ) -> None:
        """Take over `ledger` and its `slab`."""
        self.directory = directory
        self.ledger = ledger
        self.slab = slab
        self.in_memory = isinstance(slab, MemorySlab)
        self.tier = "host" if self.in_memory else "disk"
        self.chunk_bytes = ledger.chunk_bytes
        self.fingerprint = directory.name.partition(".")[0]
        # closed with the store
        self.file = open(ledger.slab_path, "rb", buffering=0)  # noqa: SIM115
        self._host_tier: HostTier | None = None
        self._lock = threading.Lock()
        self._users = 0
        self._closing = self._closed = False

    @classmethod
    def open(cls, directory: Path, deadline_seconds: float) -> ServedStore | None:
        """Open the store of a directory; return None if its chunks may not be served. Raises
        StoreError, OSError.

        The payload size of a store that only older versions have used is unknown until the next
        engine opens it.
        """
        state = read_state(directory)
        if state is not None and (state.private or not state.chunk_bytes):
            return None
        # its slots have encoded payloads, which may not be sent
        if lossy_codec_of(directory):
            return None
        ledger = Ledger.attach(directory, deadline_seconds=deadline_seconds)
        with contextlib.ExitStack() as undo:
            undo.callback(ledger.close)
            slots = ledger.slots
            slot_bytes = ledger.slot_bytes
            guards = ledger.page_guards
            if ledger.kind == "memory":
                slab: MemorySlab | FileSlab = ledger.open_slab(
                    lambda file: MemorySlab(file, slots, slot_bytes, guards)
                )
            else:
                slab = ledger.open_slab(
                    lambda file: FileSlab(file, slots, slot_bytes)
                )
            store = cls(directory, ledger, slab)
            undo.pop_all()
        return store

    def offset(self, slot: int) -> int:
        """Return where the payload of a slot begins in the slab's file."""
        return slot * self.ledger.slot_bytes + (
            0 if self.in_memory else HEADER_BYTES
        )

    def host_tier(self, chunk_tokens: int) -> HostTier:
        """Return the tier that stores chunks here; only for a store in memory."""
        assert isinstance(self.slab, MemorySlab)
        if self._host_tier is None:
            layout = KVLayout(chunk_tokens, self.chunk_bytes, self.fingerprint)
            self._host_tier = HostTier(layout, self.ledger, self.slab)
        return self._host_tier

    def is_current(self) -> bool:
        """Return whether the directory still has this store, not another one, as far as that can be
        told.
        """
        return _is_current(self.ledger)

    @contextlib.contextmanager
    def using(self) -> Iterator[ServedStore]:
        """Keep the store open during a request. Raises ClosedError after `close`."""
        with self._lock:
            if self._closing:
                raise ClosedError(f"the store at {self.directory} is closed")
            self._users += 1
        try:
            yield self
        finally:
            with self._lock:
                self._users -= 1
            self._close_if_idle()

    def close(self) -> None:
        """Close the store, now or when its last user has ended. Other processes keep using it."""
        self._closing = True
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        with self._lock:
            if self._users or self._closed or not self._closing:
                return
            self._closed = True
        self.file.close()
        self.slab.close()
        self.ledger.close()


class ServedStores:
    """All stores that are served. Thread-safe; only `scan`, `room_for` and `end` change which
    stores these are.

    The header of a chunk is computed once per (store, slot, generation) and kept: generations are
    never reused.
    """

    def __init__(
        self, find: Callable[[], Sequence[Path]], host: HostRoom | None = None
    ) -> None:
        """`find` returns the directories of the existing stores, host tier first. `host`: where to
        create new ones.
        """
        self._find = find
        self._host = host
        self._stores: dict[Path, ServedStore] = {}
        self._lock = threading.Lock()  # for the next three; held only briefly
        # held while stores are opened or closed
        self._scanning = threading.Lock()
        self._headers: OrderedDict[tuple[bytes, int, int], bytes] = OrderedDict()
        self._labels: OrderedDict[bytes, dict[str, str]] = OrderedDict()
        self._runs: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        # stores that are not served, and were logged
        self._lossy: set[Path] = set()
        self._unserved: dict[
            Path, Ledger
        ] = {}  # only for operators: of lossy codecs, private, of older versions
        # of the last scan: stores of one process, and stores that could not be opened, and why
        self._private: list[Path] = []
        self._unopened: dict[Path, str] = {}
        self._ending = False
        self._log = RateLimitedLog()

    # ---- which stores there are ------------------------------------------------------------------

    def scan(self) -> None:
        """Open new stores, close removed ones. Waits for the locks of other processes, a second in
        total.
        """
        with self._scanning:
            deadline = Deadline(_LEDGER_SECONDS)
            there = [Path(os.path.realpath(path)) for path in self._find()]
            kept: dict[Path, ServedStore] = {}
            unserved: dict[Path, Ledger] = {}
            private: list[Path] = []
            unopened: dict[Path, str] = {}
            for path in there:
                if self._ending:
                    break
                known = self._stores.get(path)
                ledger = self._unserved.get(path)
                if known is not None and known.is_current():
                    kept[path] = known
                    continue
                if ledger is not None and _is_current(ledger):
                    unserved[path] = ledger
                    continue
                try:
                    made = self._opened(path, deadline.last())
                    state = read_state(path) if made is None else None
                    if state is not None and state.private:
                        private.append(path)
                    elif made is None:
                        unserved[path] = Ledger.attach(
                            path, deadline_seconds=deadline.last()
                        )
                    else:
                        kept[path] = made
                except (PagodaError, OSError) as trouble:
                    unopened[path] = str(trouble)
                    self._log.warn(
                        _logger,
                        Reason.IO_ERROR,
                        f"a store is not served: {trouble}",
                    )
            before = self._stores
            self._stores = kept
            before_unserved = self._unserved
            self._unserved = unserved
            self._private = private
            self._unopened = unopened
            for store in before.values():
                if store not in kept.values():
                    store.close()
            for ledger in before_unserved.values():
                if ledger not in unserved.values():
                    ledger.close()

    def _opened(self, path: Path, deadline_seconds: float) -> ServedStore | None:
        if (lossy := lossy_codec_of(path)) and path not in self._lossy:
            self._lossy.add(path)
            why = (
                "of such engines only chunks in host memory are served, under the keys of "
                "approximate KV"
            )
            _logger.warning(
                "%s is not served: its codec %s is lossy; %s", path, lossy, why
            )
        return ServedStore.open(path, deadline_seconds)

    def stores(self) -> list[ServedStore]:
        """Return the open stores, host tier first."""
        return list(self._stores.values())

    def ledgers(self) -> list[Ledger]:
        """Return the ledgers of all open stores, host tier first, then of those that are not
        served.
        """
        return [store.ledger for store in self.stores()] + list(
            self._unserved.values()
        )

    def unopened(self) -> dict[Path, str]:
        """Return why stores that exist could not be opened at the last scan, by directory."""
        return dict(self._unopened)

    @contextlib.contextmanager
    def for_operators(self) -> Iterator[tuple[list[Ledger], dict[str, str]]]:
        """Yield the ledgers of all stores of this machine, and why others cannot be opened, by
        directory.
        """
        with contextlib.ExitStack() as stack:
            ledgers = self.ledgers()
            failed = {
                str(path): trouble for path, trouble in self._unopened.items()
            }
            for path in self._private:
                try:
                    attached = Ledger.attach(
                        path, deadline_seconds=_LEDGER_SECONDS
                    )
                    ledgers.append(
                        stack.enter_context(contextlib.closing(attached))
                    )
                except (PagodaError, OSError) as trouble:
                    if path.exists():  # else its owner has ended meanwhile
                        failed[str(path)] = str(trouble)
            yield ledgers, failed

    def end(self) -> list[ServedStore | Ledger]:
        """Stop serving; return the stores, which the caller must close."""
        self._ending = True
        with self._scanning:
            before = self._stores
            self._stores = {}
            unserved = self._unserved
            self._unserved = {}
        return [*before.values(), *unserved.values()]

    # ---- finding ---------------------------------------------------------------------------------

    def locate(self, namespace: bytes, key: bytes) -> LocatedChunk | Reason:
        """Return where a chunk is, with a lease, or why it is not found. Does not change
        recency.
        """
        reason = Reason.ABSENT
        deadline = Deadline(_LEDGER_SECONDS)
        for store in self.stores():
            match = store.ledger.match_prefix(
                [key],
                start=None,
                namespace=namespace,
                touch=False,
                lease_seconds=LEASE_SECONDS,
                deadline_seconds=deadline.last(),
            )
            if len(match.slots):
                return LocatedChunk(
                    store, int(match.slots[0]), int(match.generations[0])
                )
            if (
                match.reason not in (None, Reason.OTHER_NAMESPACE)
                and reason is Reason.ABSENT
            ):
                reason = match.reason
        return reason

    def find(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        """Return how many leading keys are stored, in all stores together. Does not change recency.

        Neighbours ask all neighbours about every prompt, but read from one: only reads count as
        uses.
        """
        until = time.monotonic() + _FIND_SECONDS
        at = 0
        before = -1
        # repeat while one store continues the run of another
        while before < at < len(keys) and time.monotonic() < until:
            before = at
            for store in self.stores():
                match = store.ledger.match_prefix(
                    keys[at:],
                    start=None,
                    namespace=namespace,
                    touch=False,
                    deadline_seconds=max(0.0, until - time.monotonic()),
                )
                at += len(match.slots)
                if at == len(keys):
                    break
        return at

    def find_each(self, namespace: bytes, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is stored, in any store, also behind absent ones. Does not
        change recency.
        """
        until = time.monotonic() + _FIND_SECONDS
        here = [False] * len(keys)
        for store in self.stores():
            left = until - time.monotonic()
            if all(here) or left <= 0:
                break
            ledger = store.ledger
            perhaps = [
                there and not known
                for there, known in zip(
                    ledger.which(keys, left), here, strict=True
                )
            ]

            def find(
                begin: int,
                stop: int,
                seconds: float | None,
                ledger: Ledger = ledger,
            ) -> int:
                match = ledger.match_prefix(
                    keys[begin:stop],
                    start=None,
                    namespace=namespace,
                    touch=False,
                    deadline_seconds=seconds or 0.0,
                )
                return len(match.slots)

            more = confirm_each(perhaps, find, until - time.monotonic())
            here = [known or new for known, new in zip(here, more, strict=True)]
        return here

    def locate_with_header(
        self, namespace: bytes, key: bytes
    ) -> tuple[LocatedChunk, bytes] | Reason:
        """Locate a chunk for a reader; if it is in memory, return its header page too. One step on
        a thread.

        It raises the recency of the chunk; the head of a run gets a higher recency than its tail.
        """
        found = self.locate(namespace, key)
        if isinstance(found, Reason):
            return found
        ledger = found.store.ledger
        slot = np.array([found.slot])
        stamp = self._stamp(found.store, namespace) - ledger.columns.position[
            slot
        ].astype(np.int64)
        ledger.evictor.touch(slot, stamp, True)
        if not found.store.in_memory:
            return found, b""
        page = self.header_of(namespace, key, found)
        return page if isinstance(page, Reason) else (found, page)

    # ---- reading ---------------------------------------------------------------------------------

    def header_of(
        self, namespace: bytes, key: bytes, found: LocatedChunk
    ) -> bytes | Reason:
        """Return the header page of a chunk in memory: its fields, and the checksum of the bytes in
        its slot.
        """
        name = found.store.ledger.store_id, found.slot, found.generation
        with self._lock:
            page = self._headers.get(name)
            if page is not None:
                self._headers.move_to_end(name)
        if page is None:
            slab = found.store.slab
            assert isinstance(slab, MemorySlab)
            sealed = self._sealed(namespace, key, found, slab.view(found.slot))
            # Only this proves that the checksum is of this chunk's bytes, not of the next chunk's
            # in the slot.
            if sealed is None or not found.renew():
                return Reason.EVICTED
            page = sealed
            with self._lock:
                _keep(self._headers, name, page, _MOST_HEADERS)
        return page

    def read(
        self, namespace: bytes, key: bytes, found: LocatedChunk, buffer: Bytes
    ) -> bytes | Reason:
        """Read and verify a chunk on disk into `buffer` (page-aligned, a slot's payload); return
        its header page.
        """
        store = found.store
        page = aligned(HEADER_BYTES)
        assert isinstance(store.slab, FileSlab)
        try:
            store.slab.read(found.slot, [page, buffer])
        except OSError as error:
            self._log.warn(
                _logger,
                Reason.IO_ERROR,
                f"reading slot {found.slot} of {store.directory}: {error}",
            )
            return Reason.IO_ERROR
        if not found.renew():
            return Reason.EVICTED
        expected = codec.Expected(
            store_id=store.ledger.store_id,
            slot=found.slot,
            namespace=namespace,
            key=key,
            length=store.chunk_bytes,
            codec="raw",
            fingerprint=store.fingerprint,
            sequence=found.generation,
        )
        if codec.verify(page, buffer, expected) is not None:
            if not codec.is_foreign(page):
                store.ledger.remove_exact(
                    key,
                    found.slot,
                    found.generation,
                    Reason.FAILED_CHECK,
                    _LEDGER_SECONDS,
                )
            return Reason.FAILED_CHECK
        return self._sealed(namespace, key, found, buffer) or Reason.EVICTED

    def _sealed(
        self, namespace: bytes, key: bytes, found: LocatedChunk, payload: Bytes
    ) -> bytes | None:
        store = found.store
        row = next(
            admin.list_chunks(
                store.ledger, slot=found.slot, deadline_seconds=_LEDGER_SECONDS
            ),
            None,
        )
        if row is None or (row.key, row.generation) != (key, found.generation):
            return None
        header = codec.Header(
            store_id=STORE_ID,
            slot=0,
            namespace=namespace,
            epoch=0,
            key=key,
            position=row.position,
            length=store.chunk_bytes,
            tokens=row.tokens,
            codec="raw",
            fingerprint=store.fingerprint,
            sequence=found.generation,
        )
        return codec.seal(header, payload).tobytes()

    # ---- storing and removing --------------------------------------------------------------------

    def room_for(self, header: codec.Header) -> ServedStore | None:
        """Return the host store of a header's layout; create it if the server may. StoreError,
        NoRoomError.
        """
        for store in self.stores():
            if store.in_memory and store.fingerprint == header.fingerprint:
                return store
        if self._host is None:
            return None
        layout = KVLayout(
            max(1, header.tokens), header.length, header.fingerprint
        )
        if (
            not layout.slots_in(self._host.size_bytes)
            or len(self.stores()) >= _MOST_STORES
        ):
            raise NoRoomError(
                f"no store for chunks of {size_in_words(header.length)}: start the server with "
                "more --host-size"
            )
        path = self._host.path / f"{layout.fingerprint}.{FORMAT}"
        with self._scanning:
            made = self._stores.get(path)
            if made is None:
                tier = HostTier.open(
                    layout,
                    self._host.path,
                    self._host.size_bytes,
                    policy=self._host.policy,
                    objective=self._host.objective,
                    grows=self._host.grows,
                )
                made = ServedStore(path, tier.ledger, tier.slab)
                self._stores = {path: made, **self._stores}
        return made

    def put_value(
        self,
        store: ServedStore,
        header: codec.Header,
        page: Bytes,
        stored: Bytes,
        stamp: int | None = None,
    ) -> tuple[bool, Reason | None]:
        """Verify a value (its header page and all bytes after it) and store it like `put`."""
        payload = (
            stored if header.codec == "raw" else aligned(store.ledger.slot_bytes)
        )
        # the encoded bytes have it at this place; a wrong value fails the check
        word_bytes = int(stored[1]) if stored.nbytes > 1 else 0
        if codec.restore(page, stored, header, word_bytes, payload) is not None:
            return False, Reason.FAILED_CHECK
        return self.put(store, header, payload, stamp)

    def put(
        self,
        store: ServedStore,
        header: codec.Header,
        payload: Bytes,
        stamp: int | None = None,
    ) -> tuple[bool, Reason | None]:
        """Store a verified chunk. Return whether it is new, and if it is not stored, why. `stamp`:
        its recency.
        """
        namespace = header.namespace
        key = header.key
        tier = store.host_tier(max(1, header.tokens))
        if tier.match_prefix([key], start=header.position, namespace=namespace):
            return False, None
        fields = self._labels.get(namespace) or {"layout": header.fingerprint}
        store.ledger.namespaces.register(namespace, dict(fields))
        chunk = Chunk(
            key, header.position, header.tokens, payload, None, lambda: True
        )
        (ended,) = tier.store(
            [chunk], namespace, stamp=stamp or self._stamp(store, namespace)
        )
        done = ended.result(0)
        return done.ok, done.reason

    def _stamp(self, store: ServedStore, namespace: bytes) -> int:
        """Return the recency of a chunk that arrives or is read: one per run, so that its tail is
        evicted first.
        """
        now = time.monotonic()
        run = store.ledger.store_id + namespace
        with self._lock:
            until, stamp = self._runs.get(run, (0.0, 0))
            if now > until:
                until = now + _RUN_SECONDS
                stamp = store.ledger.stamp()
            _keep(self._runs, run, (until, stamp), _MOST_RUNS)
        return stamp

    def label(self, namespace: bytes, fields: Mapping[str, str]) -> None:
        """Remember the readable fields of a namespace, without its salt. Stores get them with its
        next chunk.
        """
        with self._lock:
            _keep(self._labels, namespace, dict(fields), _MOST_LABELS)

    def remove(self, namespace: bytes, key: bytes) -> int:
        """Remove a chunk from all stores; return how many had it. Raises StoreError."""
        removed = 0
        for store in self.stores():
            found = store.ledger.match_prefix(
                [key],
                start=None,
                namespace=namespace,
                touch=False,
                deadline_seconds=_LEDGER_SECONDS,
            )
            if len(found.slots):
                removed += admin.remove(store.ledger, [key])
        return removed


def _keep(kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """Add a value as the latest; keep only the latest `most`."""
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)


def _is_current(ledger: Ledger) -> bool:
    """Return whether a directory still has the store of a ledger; also if its disk does not say so
    now.
    """
    try:
        return ledger.session.store.is_current()
    except OSError:
        return True


def lossy_codec_of(store: Path) -> str:
    """Return the lossy codec of a store's chunks; empty: they are exactly as engines have computed
    them. Pure.
    """
    name = store.name.partition(".")[2]
    return name if name in codec.LOSSY else ""


def is_value_of(
    header: codec.Header, namespace: bytes, key: bytes, length: int
) -> bool:
    """Return whether a header describes a value of this key with `length` bytes."""
    expected = codec.Expected(
        store_id=STORE_ID, slot=0, epoch=0, namespace=namespace, key=key
    )
    stored = length - HEADER_BYTES
    return (
        codec.agrees(header, expected)
        and stored == (header.stored_bytes or header.length)
        and stored <= header.length
        and header.tokens < 1 << 31
        and header.position < 1 << 31
        and re.fullmatch(r"[0-9a-f]{16}", header.fingerprint) is not None
    )
