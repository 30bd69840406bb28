"""What was reported of one tier, slot by slot, and how the published columns of the tier differ
from that.

While the ledger does not change and everything is reported, no slot is examined.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pagoda.kv_events.notes import ChunkNote, EventForm
from pagoda.ledger import Ledger
from pagoda.ledger.chunk_notes import ChunkNotes
from pagoda.ledger.columns import NOT_READY
from pagoda.ledger.ghost_table import marks_of

# chunks reported at once: steps that hold the interpreter's lock for some 0.1 ms, with rests
# between them
PIECE = 16
# removed chunks reported at once: these are only hashes, and the clear of a large store is reported
# soon
_GONE_PIECE = 64
_ROWS = 1 << 14  # rows examined at once by NumPy, without that lock: some 0.14 ms
# limits for the chunks chosen to be reported next; after these, chunks that were used meanwhile are
# chosen
_MOST_CHOSEN = 2048
_CHOSEN_SECONDS = 1.0
# the time after its use in which a chunk gets its note, if it gets one
_NOTED_NS = 2_000_000_000

Slots = npt.NDArray[np.int64]
# a chunk's group, and the hashes of its note
_Name: TypeAlias = tuple[int, bytes]
# states of a slot's chunk; `_UNNOTED`: it has no note yet, but another process may soon write one
_EMPTY, _WAITS, _TOLD, _OTHERS, _NO_NOTE, _UNNOTED = range(6)


class TierDifference:
    """What was reported of one tier, slot by slot, and how its columns differ from that. For one
    thread.

    There is no Python loop over all slots and no dictionary of them: both would keep the
    interpreter's lock too long.
    """

    def __init__(
        self,
        medium: str,
        ledger: Ledger,
        form: EventForm,
        rest: Callable[[], None],
    ) -> None:
        """`rest` is called between pieces of work: it may release the interpreter's lock for a
        while.
        """
        self.medium = medium
        self.ledger = ledger
        self.notes = ChunkNotes(ledger.directory)
        self._form = form
        self._rest = rest
        slots = ledger.columns.slots
        # generation of the chunk that `_state` is about
        self._generation = np.zeros(slots, np.uint64)
        self._state = np.zeros(slots, np.uint8)
        # whether the chunk is reported as stored
        self._held = np.zeros(slots, np.bool_)
        # names of the chunks that were reported as stored
        self._names = np.full(slots, None, np.object_)
        # marks of the namespaces of chunks that have a note
        self._marks = np.zeros(slots, np.uint64)
        # the comparison of all slots, if it has begun
        self._walk: Iterator[list[object]] | None = None
        # number of the ledger's last change when that walk began, and when the last complete walk
        # began
        self._walks_at: int | None = None
        self._compared: int | None = None
        # slots reported since that walk began, and since the beginning of the walk before it
        self._just: dict[_Name, int] = {}
        self._before: dict[_Name, int] = {}
        # slots to be reported next
        self._chosen = np.empty(0, np.int64)
        self._chosen_at = 0.0
        self._unchosen = False  # whether there may be more such slots
        self._unnoted = False  # whether a slot is `_UNNOTED`

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to be reported, as long as the ledger does not change."""
        is_compared = (
            self._walk is None
            and self._compared is not None
            and self._walks_at == self._compared
        )
        waits = self._unchosen or self._unnoted or len(self._chosen) > 0
        return is_compared and not waits

    def tell_again(self) -> None:
        """Report everything again. A chunk that is evicted before its turn is still reported as
        removed.
        """
        self._state[self._state == _TOLD] = _WAITS
        self.choose_again()

    def choose_again(self) -> None:
        """Choose again, from the beginning, what is reported next: routers ignore a chunk whose
        parent is unknown.
        """
        self._chosen = self._chosen[:0]
        self._unchosen = True

    def keep_only(self, roots: set[bytes]) -> None:
        """Report the chunks of all other namespaces as removed."""
        self._generation[
            self._held & ~np.isin(self._marks, marks_of(list(roots)))
        ] = 0
        self._compared = self._walks_at = None

    def look_again(self, keys: Sequence[bytes] | set[bytes]) -> None:
        """Examine slots without a note again: there may be one now."""
        silent = np.flatnonzero(self._state >= _NO_NOTE)
        if len(silent):
            marks = self.ledger.columns.keys[silent, 0]
            self._state[silent[np.isin(marks, marks_of(list(keys)))]] = _WAITS
            self._unchosen = True

    def _slices(self) -> Iterator[slice]:
        """Walk all slots, some at a time, from the last to the first: so recently used slots often
        come first.
        """
        for row in reversed(range(0, len(self._state), _ROWS)):
            yield slice(row, row + _ROWS)
            self._rest()

    def removed(self) -> Iterator[list[object]]:
        """Find the slots whose chunk has changed since the last call; return the events for chunks
        that were reported.

        Events are made as they are taken: the next call continues with the rest. No slot is
        examined if the ledger has not changed since all of them were compared.
        """
        if self._walk is None:
            # read before the first slot is examined
            self._walks_at = self.ledger.last_change()
            if self._walks_at is not None and self._walks_at == self._compared:
                # every reported chunk is in its slot
                self._before = {}
                self._just = {}
                return iter(())
            self._walk = self._compare()
        return self._walk

    def _compare(self) -> Iterator[list[object]]:
        """Walk all slots and return events for removed chunks."""
        self._before = self._just
        self._just = {}
        published = self.ledger.columns.generation
        try:
            for rows in self._slices():
                # a lost store: none of its chunks can hit any more
                lost = self.ledger.session.lost
                old = (
                    self._held[rows]
                    if lost
                    else published[rows] != self._generation[rows]
                )
                changed = np.flatnonzero(old) + rows.start
                now = published[changed]
                held = self._held[changed]
                self._changed(changed[~held], now[~held])
                gone = changed[held]
                now = now[held]
                for at in range(0, len(gone), _GONE_PIECE):
                    slots = gone[at : at + _GONE_PIECE]
                    events = self._events_of_gone(slots)
                    self._changed(slots, now[at : at + _GONE_PIECE])
                    if events:
                        yield events
            self._compared = self._walks_at
            self._unchosen = True
        finally:
            self._walk = None

    def _changed(self, slots: Slots, generations: npt.NDArray[np.uint64]) -> None:
        """Note that these slots have new chunks, of which nothing is known yet."""
        if len(slots):
            self._generation[slots] = generations
            self._state[slots] = _WAITS
            self._unchosen = True

    def _events_of_gone(self, slots: Slots) -> list[object]:
        """Return the events that report the chunks of these slots as removed."""
        told: dict[int, list[bytes]] = {}
        for slot, (group, hashes) in zip(
            slots.tolist(), self._names[slots].tolist(), strict=True
        ):
            name = group, hashes
            # otherwise the chunk was stored again in another slot before this slot was found free
            if self._just.get(name, self._before.get(name, slot)) == slot:
                told.setdefault(group, []).append(hashes)
        events = [
            self._form.removed(hashes, self.medium, group)
            for group, hashes in told.items()
        ]
        self._held[slots] = False
        self._names[slots] = None
        return events

    def meet(self, roots: set[bytes]) -> None:
        """Examine again the slots of namespaces whose first request this engine has just seen."""
        if roots:
            self._state[
                (self._state == _OTHERS)
                & np.isin(self._marks, marks_of(list(roots)))
            ] = _WAITS
            self._unchosen = True

    def new(self) -> Iterator[list[int]]:
        """Return slots to report, in pieces: recently used chunks first, those of one prompt from
        the first on.

        All slots are searched for them, once a second if there are many: the next call continues
        with the rest.
        """
        is_old = time.monotonic() > self._chosen_at + _CHOSEN_SECONDS
        if self._unchosen and (is_old or not (len(self._chosen) or self._walk)):
            self._choose()
        while len(self._chosen):
            slots = self._chosen[:PIECE].tolist()
            self._chosen = self._chosen[PIECE:]
            # a slot may have got another chunk since it was chosen; when that chunk is ready, its
            # key is published
            yield self._ready(slots)
            if not len(self._chosen) and self._unchosen:
                self._choose()
        # these come after all others, however often they are used
        if self._unnoted:
            self._state[self._state == _UNNOTED] = _WAITS
            self._unchosen = True
            self._unnoted = False

    def _choose(self) -> None:
        """Choose the slots to report next."""
        last_use = self.ledger.columns.last_use
        self._chosen_at = time.monotonic()
        ready = np.empty(0, np.int64)
        uses = np.empty(0, np.int64)
        least = np.iinfo(np.int64).min
        for rows in self._slices():
            used = last_use[rows]
            more = np.flatnonzero(
                (self._state[rows] == _WAITS)
                & (used != NOT_READY)
                & (used >= least)
            )
            ready = np.concatenate([more + rows.start, ready])
            uses = np.concatenate([used[more], uses])
            last = np.argsort(-uses, kind="stable")[:_MOST_CHOSEN]
            ready = ready[last]
            uses = uses[last]
            if len(ready) == _MOST_CHOSEN:
                least = int(uses[-1])
        self._chosen = ready
        self._unchosen = len(ready) == _MOST_CHOSEN

    def _ready(self, slots: list[int]) -> list[int]:
        """Return those of these slots that still have their complete chunk. For so few slots NumPy
        would be slower.
        """
        ledger = self.ledger
        seen = self._generation.data
        last_use = self.ledger.columns.last_use.data
        there = [
            slot
            for slot in slots
            if ledger.is_published(slot, seen[slot])
            and last_use[slot] != NOT_READY
        ]
        return [] if ledger.session.lost else there

    def held_marks(self) -> npt.NDArray[np.uint64]:
        """Return the marks of the namespaces of all chunks that are reported as stored."""
        return np.unique(self._marks[self._held])

    def generation_of(self, slot: int) -> int:
        """Return the generation of the chunk that is known in a slot."""
        return int(self._generation[slot])

    def classify(
        self, slots: list[int], notes: list[ChunkNote | None], roots: set[bytes]
    ) -> list[ChunkNote]:
        """Note the state of these slots: reported, of another namespace, or without a note. Return
        the notes to report.

        A slot that has another chunk by now, or none, waits for the next round. After all others
        were reported, a slot without a note waits for a while too: if another process loaded the
        chunk, its thread writes the note when it reports it.
        """
        told = []
        session = self.ledger.session
        note_of = dict(zip(slots, notes, strict=True))
        young = session.stamp(session.clock.monotonic_ns()) - _NOTED_NS
        for slot in self._ready(slots):
            if (note := note_of[slot]) is None:
                self._state[slot] = _NO_NOTE
                if self.ledger.columns.last_use[slot] > young:
                    self._state[slot] = _UNNOTED
                    self._unnoted = True
                continue
            # like `marks_of`, but faster
            self._marks[slot] = memoryview(note.root).cast("Q")[0]
            self._state[slot] = _TOLD if note.root in roots else _OTHERS
            if note.root in roots:
                name = note.group, note.hashes
                self._held[slot] = True
                self._names[slot] = name
                self._just[name] = slot
                told.append(note)
        return told
