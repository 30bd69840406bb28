"""What routers were told of one tier, slot by slot, and how the published columns of the tier differ from it."""

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

PIECE = 8  # chunks told at once: about 0.2 ms of the interpreter's lock
_GONE_PIECE = 64  # that are gone: of these only hashes are told, and a clear is soon told of a large store
_ROWS = 1 << 16  # looked at at once, by NumPy, which does not need that lock
# of those to be told next; then those are chosen that were used since
_MOST_CHOSEN, _CHOSEN_SECONDS = 2048, 1.0

Slots = npt.NDArray[np.int64]
_Name: TypeAlias = tuple[int, bytes]  # a chunk's group, and the hashes of its note
_EMPTY, _WAITS, _TOLD, _OTHERS, _NO_NOTE = range(5)  # what is known of the chunk in a slot


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
        self._marks = np.zeros(slots, np.uint64)  # of a namespace of which this engine has seen no request
        self._before: dict[_Name, int] = {}  # slots told in the last round and in this one
        self._just: dict[_Name, int] = {}
        self._chosen, self._more, self._chosen_at = np.empty(0, np.int64), False, 0.0  # to be told next

    def tell_again(self) -> None:
        """Tell everything once more. What is evicted before its turn is still told to be gone."""
        self._state[self._state == _TOLD] = _WAITS

    def drop_told(self) -> None:
        """Compare everything anew, with other namespaces: what was told is removed unless it is told again."""
        self._generation[:] = 0

    def look_again(self, keys: Sequence[bytes] | set[bytes]) -> None:
        """Look again at slots without a note: there may be one now."""
        silent = np.flatnonzero(self._state == _NO_NOTE)
        if len(silent):
            marks = self.ledger.columns.keys[silent, 0]
            self._state[silent[np.isin(marks, marks_of(list(keys)))]] = _WAITS

    def _slices(self) -> Iterator[slice]:
        """Walk all slots, some at a time, from the last to the first: often those that were used last come first."""
        for row in reversed(range(0, len(self._state), _ROWS)):
            yield slice(row, row + _ROWS)
            self._rest()

    def removed(self) -> Iterator[list[object]]:
        """Find the slots whose chunk is another than the last time; return the events of those that were told."""
        self._before, self._just = self._just, {}
        published = self.ledger.columns.generation
        for rows in self._slices():
            changed = np.flatnonzero(published[rows] != self._generation[rows]) + rows.start
            if not len(changed):
                continue
            now, gone = published[changed], changed[self._held[changed]]
            for at in range(0, len(gone), _GONE_PIECE):
                slots = gone[at : at + _GONE_PIECE]
                names = zip(slots.tolist(), self._names[slots].tolist(), strict=True)
                self._held[slots], self._names[slots] = False, None
                told: dict[int, list[bytes]] = {}
                for slot, (group, hashes) in names:
                    # else the chunk was stored again in another slot before this one was seen to be free
                    if self._before.get((group, hashes), slot) == slot:
                        told.setdefault(group, []).append(hashes)
                if told:
                    yield [self._form.removed(hashes, self.medium, group) for group, hashes in told.items()]
            self._generation[changed] = now
            self._state[changed] = _WAITS

    def meet(self, roots: set[bytes]) -> None:
        """Look again at the slots of namespaces of which this engine has seen its first request."""
        if roots:
            self._state[(self._state == _OTHERS) & np.isin(self._marks, marks_of(list(roots)))] = _WAITS

    def new(self) -> Iterator[Slots]:
        """Return slots to be told, in pieces: chunks used last first, and of one prompt from its first chunk on.

        All slots are looked through for them, once a second if there are many: the next call goes on with the rest.
        """
        if not len(self._chosen) or time.monotonic() > self._chosen_at + _CHOSEN_SECONDS:
            self._choose()
        while len(self._chosen):
            slots, self._chosen = self._chosen[:PIECE], self._chosen[PIECE:]
            # a slot may have taken another chunk since it was chosen: once that one is ready, its key is published
            yield slots[self.ledger.is_ready(slots, self._generation[slots])]
            if not len(self._chosen) and self._more:
                self._choose()

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
        self._chosen, self._more = ready, len(ready) == _MOST_CHOSEN

    def places(self, slots: Slots) -> list[tuple[int, bytes]]:
        """Return these slots with their keys."""
        return [(slot, self.ledger.columns.key_of(slot)) for slot in slots.tolist()]

    def generation_of(self, slot: int) -> int:
        """Return the generation of the chunk that is told of in a slot."""
        return int(self._generation[slot])

    def settle(self, slots: Slots, notes: Sequence[ChunkNote | None], roots: set[bytes]) -> list[ChunkNote]:
        """Note what becomes of these slots: told, or of another namespace, or without a note. Return what is told.

        A slot that has another chunk by now, or none, waits for the next round.
        """
        told = []
        still = self.ledger.is_ready(slots, self._generation[slots]).tolist()
        for slot, note, same in zip(slots.tolist(), notes, still, strict=True):
            if not same:
                continue
            if note is None:
                self._state[slot] = _NO_NOTE
            elif note.root not in roots:
                self._state[slot] = _OTHERS
                self._marks[slot] = marks_of([note.root])[0]
            else:
                self._state[slot] = _TOLD
                name = note.group, note.hashes
                self._held[slot], self._names[slot] = True, name
                self._just[name] = slot
                told.append(note)
        return told
