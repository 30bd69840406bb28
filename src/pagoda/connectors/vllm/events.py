"""vLLM's KV events: routers of requests are told which chunks this machine's host memory and disk hold for this engine.

One thread compares what it has told with the published columns of each local tier, several times a second, and sends
the difference: so it makes no difference which process stored, loaded, evicted or cleared a chunk, or whether this
engine was running then. A chunk is told once every process can read it. What it takes to tell a chunk, the hashes and
tokens that the engine knew it by, is its note (`event_notes`), kept beside the tier; of a chunk without a note routers
hear when a request finds it. Chunks of tenants and adapters are told from their first request to this engine on.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    KVCacheEvent,
)

from pagoda.connectors.vllm.event_notes import (
    LOCAL,
    BlockFacts,
    ChunkNote,
    joined,
    note_of,
    split_hashes,
)
from pagoda.connectors.vllm.event_publisher import EventOutlet
from pagoda.ledger import Ledger, Outcome, Present, Reserved
from pagoda.ledger.chunk_notes import MOST_NOTE_BYTES, ChunkNotes
from pagoda.ledger.columns import NOT_READY, marks_of
from pagoda.metrics import RateLimitedLog, Reason, guarded_logger
from pagoda.threads import Event, begin

__all__ = ["StoredEvents"]

log = guarded_logger("pagoda.vllm")

_MEDIA = {"host": MEDIUM_CPU, "disk": MEDIUM_STORAGE}
_ROUND_SECONDS = 0.1
# between two times that all is told: so long at least, and at most; four times as long as it took, if it was completed,
# else twice as long as before
_RETELL_SECONDS, _LONGEST_RETELL_SECONDS, _RETELL_SHARE = 1.0, 600.0, 4.0
_REST = 6  # times the processor's time of a piece: a seventh of a processor at most, however much there is to tell
_MOST_TELLING = 0.05  # seconds of the processor for what is new in a tier; then what is gone has its turn
_PIECE = 8  # chunks told at once: less than a millisecond of the interpreter's lock
_PAUSE_SECONDS = 0.002  # at least, between two pieces
_REMEMBERED = 4096  # notes of chunks that are being stored or loaded: some MiB
_ROWS = 1 << 16  # compared at once
_MOST_SORTED = 4096
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ChunkNote).decode

Slots = npt.NDArray[np.int64]
_EMPTY, _WAITS, _TOLD, _OTHERS, _NO_NOTE = range(5)  # what is known of the chunk in a slot


class StoredEvents:
    """Tells routers of the chunks of one engine. All methods are for the scheduler's thread; only `close` waits."""

    def __init__(
        self,
        ledgers: Mapping[str, Ledger],
        root: bytes,
        facts: BlockFacts,
        outlet: EventOutlet,
        keeps_notes: bool = True,
    ) -> None:
        """Prepare; `start` begins. `ledgers`: of the local tiers, by name; `root`: of the engine's namespace.

        Without `keeps_notes` no token ids are left beside the tiers: a restarted engine tells of no earlier chunk.
        """
        self._facts, self._outlet, self._keeps_notes = facts, outlet, keeps_notes
        self._tiers = [TierDifference(_MEDIA[name], ledger, facts) for name, ledger in ledgers.items()]
        self._host = ChunkNotes(ledgers["host"].directory)
        self._lock = threading.Lock()
        self._roots = {root}  # of which there was a request; the thread reads it without the lock
        self._met: set[bytes] = set()  # those of them that are new
        self._fresh: OrderedDict[bytes, ChunkNote] = (
            OrderedDict()
        )  # by key: of chunks that are being stored or loaded
        self._told_of: set[bytes] = set()  # keys of these notes that are new
        self._lines = RateLimitedLog()
        self._ended = Event()
        self._renewed = False
        self._rested = 0.0  # what the thread had used of the processor at its last rest
        self._thread = threading.Thread(target=self._run, name="pagoda-events", daemon=True)

    def start(self) -> None:
        """Begin to tell."""
        begin(self._thread)

    def note(self, request: Any, root: bytes, first: int, outcomes: Sequence[Outcome]) -> None:
        """Keep the notes of chunks `first`, `first` + 1, ... of a request, for which slots have just been reserved."""
        written = []
        for chunk, outcome in enumerate(outcomes, first):
            if isinstance(outcome, Reserved | Present):
                note = self._remember(request, root, chunk, outcome.key)
                if note is not None and isinstance(outcome, Reserved):
                    written.append((outcome.slot, outcome.key, note))
        self._write(self._host, written)

    def found(self, request: Any, root: bytes, first: int, keys: Sequence[bytes]) -> None:
        """Keep the notes of chunks that a request found in the tiers: routers hear of those that had none."""
        for chunk, key in enumerate(keys, first):
            self._remember(request, root, chunk, key)

    def take(self) -> list[KVCacheEvent]:
        """Return the events that this engine's step is to publish; none if its publisher needs no step."""
        return self._outlet.take()

    def renew(self, root: bytes) -> None:
        """Tell that no chunk of before is served any more; from now on the engine's namespace is `root`."""
        with self._lock:
            self._roots, self._renewed = {root}, True
            self._fresh.clear()
            self._told_of.clear()

    def close(self) -> None:
        """End the thread, in bounded time. Idempotent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _remember(self, request: Any, root: bytes, chunk: int, key: bytes) -> ChunkNote | None:
        with self._lock:
            if (known := self._fresh.get(key)) is not None:
                self._fresh.move_to_end(key)
                return known
            note = note_of(request, chunk, root, self._facts)
            if note is not None:
                if root not in self._roots:
                    self._roots.add(root)
                    self._met.add(root)
                self._fresh[key] = note
                self._told_of.add(key)
                if len(self._fresh) > _REMEMBERED:
                    self._told_of.discard(self._fresh.popitem(last=False)[0])
            return note

    def _write(self, notes: ChunkNotes, written: Sequence[tuple[int, bytes, ChunkNote]]) -> None:
        if not self._keeps_notes:
            return
        encoded = [(slot, key, _encode(note)) for slot, key, note in written]
        fitting = [row for row in encoded if len(row[2]) <= MOST_NOTE_BYTES]
        try:
            if fitting:
                notes.write(fitting)
        except OSError as error:
            self._lines.warn(
                log, Reason.IO_ERROR, f"routers will not hear of chunks after a restart: {error}"
            )

    # ---- the thread

    def _run(self) -> None:
        cleared, self._rested = self._outlet.cleared, time.thread_time()
        # when all was last told from the beginning, whether it was completed, how long to wait before the next time
        retold, whole, pause, wanted = time.monotonic(), False, _RETELL_SECONDS, False
        while not self._ended.wait(_ROUND_SECONDS):
            began = time.monotonic()
            try:
                wanted = self._outlet.newcomers() or wanted
                if wanted and began >= retold + pause:
                    pause *= 1 if whole else 2
                    retold, whole, wanted, cleared = began, False, False, -1
                    self._outlet.tell_anew()
                if self._outlet.cleared != cleared:  # for routers also what these tiers hold: tell it again
                    cleared = self._outlet.cleared
                    for tier in self._tiers:
                        tier.tell_again()
                if self._round() and not whole:
                    whole, pause = True, _RETELL_SHARE * (time.monotonic() - retold)
                pause = min(max(pause, _RETELL_SECONDS), _LONGEST_RETELL_SECONDS)
            except Exception as trouble:  # noqa: BLE001  # a boundary: the engine serves on
                why = f"KV events are late: {type(trouble).__name__}: {trouble}"
                self._lines.warn(log, Reason.IO_ERROR, why)
            self._rest()

    def _round(self) -> bool:
        """Tell what has changed. Return whether that was all: a round is short, and the next one goes on."""
        whole = True
        with self._lock:
            roots, met, told_of, renewed = self._roots, self._met, self._told_of, self._renewed
            self._met, self._told_of, self._renewed = set(), set(), False
        for tier in self._tiers:
            if renewed:
                tier.drop_told()
            tier.meet(met)
            if told_of:
                tier.look_again(told_of)
            for removed in tier.removed():
                self._send(removed)
            began = time.thread_time()
            for slots in tier.new():
                self._tell(tier, slots, roots)
                if time.thread_time() - began > _MOST_TELLING:
                    whole = False
                    break
        return whole

    def _tell(self, tier: TierDifference, slots: Slots, roots: set[bytes]) -> None:
        """Tell of some chunks of a tier, in order; notes come from beside the tier, this process, or another tier."""
        places = tier.places(slots)
        notes = self._read(tier.notes, places)
        lacking = {key: slot for (slot, key), note in zip(places, notes, strict=True) if note is None}
        if lacking:
            others = self._notes_elsewhere(tier, lacking)
            self._write(tier.notes, [(lacking[key], key, note) for key, note in others.items()])
            notes = [note or others.get(key) for (_, key), note in zip(places, notes, strict=True)]
        mine = tier.settle(slots, notes, roots)
        columns = tier.ledger.columns
        if gone := [(slot, key) for key, slot in lacking.items() if not columns.has(slot, key)]:
            with suppress(OSError):  # it was cleared meanwhile: the note that was just written goes as well
                tier.notes.erase(gone)
        self._send(list(joined(mine, tier.medium, self._facts)))

    def _notes_elsewhere(self, tier: TierDifference, keys: Iterable[bytes]) -> dict[bytes, ChunkNote]:
        """Return the notes of those of these keys that this process or another tier has."""
        found = {key: note for key in keys if (note := self._fresh.get(key)) is not None}
        for other in self._tiers:
            lacking = [key for key in keys if key not in found]
            if other is not tier and lacking and other.notes.exist():
                places = other.ledger.columns.places_of(lacking)
                notes = zip(places, self._read(other.notes, places), strict=True)
                found |= {key: note for (_, key), note in notes if note is not None}
        return found

    def _read(self, notes: ChunkNotes, places: Sequence[tuple[int, bytes]]) -> list[ChunkNote | None]:
        try:
            return [None if note is None else self._decoded(note) for note in notes.read(places)]
        except OSError as trouble:
            self._warn_of_note(trouble)
            return [None] * len(places)

    def _decoded(self, note: bytes) -> ChunkNote | None:
        try:
            return _decode(note)
        except msgspec.DecodeError as trouble:  # of another version
            self._warn_of_note(trouble)
            return None

    def _warn_of_note(self, trouble: Exception) -> None:
        why = f"routers hear of chunks only when they are found: {trouble}"
        self._lines.warn(log, Reason.IO_ERROR, why)

    def _send(self, events: Sequence[KVCacheEvent]) -> None:
        if events:
            self._outlet.send(events)
        self._rest()
        while self._outlet.is_full and not self._ended.wait(_PAUSE_SECONDS):
            pass

    def _rest(self) -> None:
        """Leave the interpreter to the engine, in proportion to what this thread took of it since the last rest."""
        self._ended.wait(max(_PAUSE_SECONDS, _REST * (time.thread_time() - self._rested)))
        self._rested = time.thread_time()


class TierDifference:
    """What was told of one tier, slot by slot, and how its columns differ from it. For one thread."""

    def __init__(self, medium: str, ledger: Ledger, facts: BlockFacts) -> None:
        self.medium, self.ledger, self.notes = medium, ledger, ChunkNotes(ledger.directory)
        self._facts = facts
        slots = ledger.columns.slots
        self._generation = np.zeros(slots, np.uint64)  # of the chunk that `_state` is about
        self._state = np.zeros(slots, np.uint8)
        self._hashes: dict[int, bytes] = {}  # of the chunks that routers hold to be there, by slot
        self._others: dict[int, bytes] = {}  # by slot: a namespace of which this engine has seen no request
        self._before: dict[bytes, int] = {}  # slots told in the last round and in this one, by the hashes
        self._just: dict[bytes, int] = {}

    def tell_again(self) -> None:
        """Tell everything once more. It stays told meanwhile: what goes before its turn is told to be gone."""
        self._state[self._state == _TOLD] = _WAITS

    def drop_told(self) -> None:
        """Compare everything anew, with other namespaces: what was told is removed unless it is told again."""
        self._generation[:] = 0
        self._others.clear()

    def look_again(self, keys: Sequence[bytes] | set[bytes]) -> None:
        """Look again at slots without a note: there may be one now."""
        silent = np.flatnonzero(self._state == _NO_NOTE)
        if len(silent):
            marks = self.ledger.columns.keys[silent, 0]
            self._state[silent[np.isin(marks, marks_of(list(keys)))]] = _WAITS

    def removed(self) -> Iterator[list[KVCacheEvent]]:
        """Find the slots whose chunk is another than the last time; return the events of those that were told."""
        self._before, self._just = self._just, {}
        published = self.ledger.columns.generation
        for row in range(0, len(published), _ROWS):
            now = published[row : row + _ROWS].copy()
            changed = np.flatnonzero(now != self._generation[row : row + _ROWS]) + row
            if not len(changed):
                continue
            gone = [slot for slot in changed.tolist() if slot in self._hashes]
            for at in range(0, len(gone), _PIECE):
                hashes = [self._hashes.pop(slot) for slot in gone[at : at + _PIECE]]
                # a chunk that was stored again in another slot before this one was seen to be free
                names = [
                    name
                    for slot, one in zip(gone[at:], hashes, strict=False)
                    if self._before.get(one, slot) == slot
                    for name in split_hashes(one, self._facts)
                ]
                if names:
                    yield [BlockRemoved(block_hashes=names, medium=self.medium, group_idx=0, locality=LOCAL)]
            self._generation[changed] = now[changed - row]
            self._state[changed] = _WAITS

    def meet(self, roots: set[bytes]) -> None:
        """Look again at the slots of namespaces of which this engine has seen its first request."""
        for slot in [slot for slot, root in self._others.items() if root in roots] if roots else ():
            del self._others[slot]
            self._state[slot] = _WAITS

    def new(self) -> Iterator[Slots]:
        """Return slots to be told, in pieces: chunks used last first, and of one prompt from its first chunk on."""
        last_use = self.ledger.columns.last_use
        ready = np.flatnonzero((self._state == _WAITS) & (last_use != NOT_READY))
        if len(ready) > _MOST_SORTED:  # more than a round can tell
            uses = last_use[ready]
            ready = ready[uses >= np.partition(uses, -_MOST_SORTED)[-_MOST_SORTED]]
        ready = ready[np.argsort(-last_use[ready], kind="stable")]
        for at in range(0, len(ready), _PIECE):
            yield ready[at : at + _PIECE]

    def places(self, slots: Slots) -> list[tuple[int, bytes]]:
        """Return these slots with their keys."""
        return [(slot, self.ledger.columns.key_of(slot)) for slot in slots.tolist()]

    def settle(self, slots: Slots, notes: Sequence[ChunkNote | None], roots: set[bytes]) -> list[ChunkNote]:
        """Note what becomes of these slots: told, or of another namespace, or without a note. Return what is told.

        A slot that has another chunk by now, or none, waits for the next round.
        """
        told = []
        still = self.ledger.is_ready(slots, self._generation[slots]).tolist()
        for slot, note, same in zip(slots.tolist(), notes, still, strict=True):
            if not same:
                continue
            self._others.pop(slot, None)
            if note is None:
                self._state[slot] = _NO_NOTE
            elif note.root not in roots:
                self._state[slot] = _OTHERS
                self._others[slot] = note.root
            else:
                self._state[slot] = _TOLD
                self._hashes[slot] = note.hashes
                self._just[note.hashes] = slot
                told.append(note)
        return told
