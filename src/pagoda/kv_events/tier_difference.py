"""What routers were told of one tier, slot by slot, and how the published columns of the tier differ from it.

While nobody changes the ledger, and all was told, no slot is looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.ma  # else the first `np.isin` does it: 20 ms in the middle of an engine's step
import numpy.typing as npt

from pagoda.kv_events.notes import ChunkNote, EventForm
from pagoda.ledger import Ledger
from pagoda.ledger.chunk_notes import ChunkNotes
from pagoda.ledger.columns import NOT_READY, marks_of

PIECE = 16  # chunks told at once: steps of some 0.1 ms of the interpreter's lock, with rests between them
_GONE_PIECE = 64  # that are gone: of these only hashes are told, and a clear is soon told of a large store
_ROWS = 1 << 14  # looked at at once, by NumPy, which does not need that lock: some 0.14 ms
# of those to be told next; then those are chosen that were used since
_MOST_CHOSEN, _CHOSEN_SECONDS = 2048, 1.0
_NOTED_NS = 2_000_000_000  # after its use a chunk has its note, if it gets one

Slots = npt.NDArray[np.int64]
_Name: TypeAlias = tuple[int, bytes]  # a chunk's group, and the hashes of its note
# what is known of the chunk in a slot; `_UNNOTED`: it has no note yet, and another process may write one soon
_EMPTY, _WAITS, _TOLD, _OTHERS, _NO_NOTE, _UNNOTED = range(6)


class TierDifference:
    """What was told of one tier, slot by slot, and how its columns differ from it. For one thread.

    No loop of Python runs over all slots, and no dictionary has them: both would keep the interpreter from the engine.
    """

    def __init__(self, medium: str, ledger: Ledger, form: EventForm, rest: Callable[[], None]) -> None:
        """`rest` is called between pieces of work: it may leave the interpreter to others for a while."""
        self.medium, self.ledger, self.notes = medium, ledger, ChunkNotes(ledger.directory)
        self._form, self._rest = form, rest
        slots = ledger.columns.slots
        self._generation = np.zeros(slots, np.uint64)  # of the chunk that `_state` is about
        self._state = np.zeros(slots, np.uint8)
        self._held = np.zeros(slots, np.bool_)  # whether routers hold the chunk to be there
        self._names = np.full(slots, None, np.object_)  # of the chunks that they do
        self._marks = np.zeros(slots, np.uint64)  # of the namespaces of chunks that have a note
        self._walk: Iterator[list[object]] | None = None  # compares all slots, if it has begun
        # the ledger's last change when that walk began, and when the last whole one did
        self._walks_at: int | None = None
        self._compared: int | None = None
        # slots told since that walk began, and from the begin of the one before it on
        self._just: dict[_Name, int] = {}
        self._before: dict[_Name, int] = {}
        self._chosen, self._chosen_at = np.empty(0, np.int64), 0.0  # to be told next
        self._unchosen = False  # whether there may be more of them
        self._unnoted = False  # whether a slot is `_UNNOTED`

    def tell_again(self) -> None:
        """Tell everything once more. What is evicted before its turn is still told to be gone."""
        self._state[self._state == _TOLD] = _WAITS
        self.choose_again()

    def choose_again(self) -> None:
        """Choose once more what is told next, from the beginning: routers ignore a chunk if its parent is unknown."""
        self._chosen, self._unchosen = self._chosen[:0], True

    def keep_only(self, roots: set[bytes]) -> None:
        """Tell that what was told of all other namespaces is gone."""
        self._generation[self._held & ~np.isin(self._marks, marks_of(list(roots)))] = 0
        self._compared = self._walks_at = None

    def look_again(self, keys: Sequence[bytes] | set[bytes]) -> None:
        """Look again at slots without a note: there may be one now."""
        silent = np.flatnonzero(self._state >= _NO_NOTE)
        if len(silent):
            marks = self.ledger.columns.keys[silent, 0]
            self._state[silent[np.isin(marks, marks_of(list(keys)))]] = _WAITS
            self._unchosen = True

    def _slices(self) -> Iterator[slice]:
        """Walk all slots, some at a time, from the last to the first: often those that were used last come first."""
        for row in reversed(range(0, len(self._state), _ROWS)):
            yield slice(row, row + _ROWS)
            self._rest()

    def removed(self) -> Iterator[list[object]]:
        """Find the slots whose chunk is another than the last time; return the events of those that were told.

        Events are made as they are taken: the next call goes on with what was not. Not one slot is looked at if the
        ledger is as it was when all of them were compared.
        """
        if self._walk is None:
            self._walks_at = self.ledger.last_change()  # before the first slot is looked at
            if self._walks_at is not None and self._walks_at == self._compared:
                self._before, self._just = {}, {}  # each chunk that routers hold is in its slot
                return iter(())
            self._walk = self._compare()
        return self._walk

    def _compare(self) -> Iterator[list[object]]:
        """Walk all slots, and return events of what is gone."""
        self._before, self._just = self._just, {}
        published = self.ledger.columns.generation
        try:
            for rows in self._slices():
                lost = self.ledger.session.lost  # nothing of it hits any more
                old = self._held[rows] if lost else published[rows] != self._generation[rows]
                changed = np.flatnonzero(old) + rows.start
                now, held = published[changed], self._held[changed]
                self._changed(changed[~held], now[~held])
                gone, now = changed[held], now[held]
                for at in range(0, len(gone), _GONE_PIECE):
                    slots = gone[at : at + _GONE_PIECE]
                    events = self._events_of_gone(slots)
                    self._changed(slots, now[at : at + _GONE_PIECE])
                    if events:
                        yield events
            self._compared, self._unchosen = self._walks_at, True
        finally:
            self._walk = None

    def _changed(self, slots: Slots, generations: npt.NDArray[np.uint64]) -> None:
        """Note that these slots have other chunks now, of which nothing is known yet."""
        if len(slots):
            self._generation[slots], self._state[slots], self._unchosen = generations, _WAITS, True

    def _events_of_gone(self, slots: Slots) -> list[object]:
        """Return the events that the chunks told of these slots are gone; from now on routers do not hold them."""
        told: dict[int, list[bytes]] = {}
        for slot, (group, hashes) in zip(slots.tolist(), self._names[slots].tolist(), strict=True):
            name = group, hashes
            # else the chunk was stored again in another slot before this one was seen to be free
            if self._just.get(name, self._before.get(name, slot)) == slot:
                told.setdefault(group, []).append(hashes)
        events = [self._form.removed(hashes, self.medium, group) for group, hashes in told.items()]
        self._held[slots], self._names[slots] = False, None
        return events

    def meet(self, roots: set[bytes]) -> None:
        """Look again at the slots of namespaces of which this engine has seen its first request."""
        if roots:
            self._state[(self._state == _OTHERS) & np.isin(self._marks, marks_of(list(roots)))] = _WAITS
            self._unchosen = True

    def new(self) -> Iterator[list[int]]:
        """Return slots to be told, in pieces: chunks used last first, and of one prompt from its first chunk on.

        All slots are looked through for them, once a second if there are many: the next call goes on with the rest.
        """
        is_old = time.monotonic() > self._chosen_at + _CHOSEN_SECONDS
        if self._unchosen and (is_old or not (len(self._chosen) or self._walk)):
            self._choose()
        while len(self._chosen):
            slots, self._chosen = self._chosen[:PIECE].tolist(), self._chosen[PIECE:]
            # a slot may have taken another chunk since it was chosen: once that one is ready, its key is published
            yield self._ready(slots)
            if not len(self._chosen) and self._unchosen:
                self._choose()
        if self._unnoted:  # after all others, however often these are used
            self._state[self._state == _UNNOTED] = _WAITS
            self._unchosen, self._unnoted = True, False

    def _choose(self) -> None:
        """Choose the slots to be told next."""
        last_use, self._chosen_at = self.ledger.columns.last_use, time.monotonic()
        ready, uses, least = np.empty(0, np.int64), np.empty(0, np.int64), np.iinfo(np.int64).min
        for rows in self._slices():
            used = last_use[rows]
            more = np.flatnonzero((self._state[rows] == _WAITS) & (used != NOT_READY) & (used >= least))
            ready, uses = np.concatenate([more + rows.start, ready]), np.concatenate([used[more], uses])
            last = np.argsort(-uses, kind="stable")[:_MOST_CHOSEN]
            ready, uses = ready[last], uses[last]
            if len(ready) == _MOST_CHOSEN:
                least = int(uses[-1])
        self._chosen, self._unchosen = ready, len(ready) == _MOST_CHOSEN

    def _ready(self, slots: list[int]) -> list[int]:
        """Return those of these slots that still have their chunk, complete. NumPy would take longer for so few."""
        ledger, seen, last_use = self.ledger, self._generation.data, self.ledger.columns.last_use.data
        there = [slot for slot in slots if ledger.is_valid(slot, seen[slot]) and last_use[slot] != NOT_READY]
        return [] if ledger.session.lost else there

    def held_marks(self) -> npt.NDArray[np.uint64]:
        """Return the marks of the namespaces of all chunks that routers hold to be there."""
        return np.unique(self._marks[self._held])

    def generation_of(self, slot: int) -> int:
        """Return the generation of the chunk that is told of in a slot."""
        return int(self._generation[slot])

    def settle(self, slots: list[int], notes: list[ChunkNote | None], roots: set[bytes]) -> list[ChunkNote]:
        """Note what becomes of these slots: told, or of another namespace, or without a note. Return what is told.

        A slot that has another chunk by now, or none, waits for the next round. So does for a while one without a note,
        once all others were told: what another process loads, its thread notes when it tells of it.
        """
        told, session, note_of = [], self.ledger.session, dict(zip(slots, notes, strict=True))
        young = session.stamp(session.clock.monotonic_ns()) - _NOTED_NS
        for slot in self._ready(slots):
            if (note := note_of[slot]) is None:
                self._state[slot] = _NO_NOTE
                if self.ledger.columns.last_use[slot] > young:
                    self._state[slot], self._unnoted = _UNNOTED, True
                continue
            self._marks[slot] = memoryview(note.root).cast("Q")[0]  # as `marks_of`, sooner
            self._state[slot] = _TOLD if note.root in roots else _OTHERS
            if note.root in roots:
                name = note.group, note.hashes
                self._held[slot], self._names[slot] = True, name
                self._just[name] = slot
                told.append(note)
        return told
