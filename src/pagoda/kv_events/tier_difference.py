"""What routers were told of one tier, slot by slot, and how the published columns of the tier differ from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pagoda.kv_events.notes import ChunkNote, EventForm
from pagoda.ledger import Ledger
from pagoda.ledger.chunk_notes import ChunkNotes
from pagoda.ledger.columns import NOT_READY, marks_of

__all__ = ["PIECE", "Slots", "TierDifference"]

PIECE = 8  # chunks told at once: less than a millisecond of the interpreter's lock
_ROWS = 1 << 16  # compared at once
_MOST_SORTED = 4096

Slots = npt.NDArray[np.int64]
_Name: TypeAlias = tuple[int, bytes]  # a chunk's group, and the hashes of its note
_EMPTY, _WAITS, _TOLD, _OTHERS, _NO_NOTE = range(5)  # what is known of the chunk in a slot


class TierDifference:
    """What was told of one tier, slot by slot, and how its columns differ from it. For one thread."""

    def __init__(self, medium: str, ledger: Ledger, form: EventForm) -> None:
        self.medium, self.ledger, self.notes = medium, ledger, ChunkNotes(ledger.directory)
        self._form = form
        slots = ledger.columns.slots
        self._generation = np.zeros(slots, np.uint64)  # of the chunk that `_state` is about
        self._state = np.zeros(slots, np.uint8)
        self._names: dict[int, _Name] = {}  # of the chunks that routers hold to be there, by slot
        self._marks = np.zeros(slots, np.uint64)  # of a namespace of which this engine has seen no request
        self._before: dict[_Name, int] = {}  # slots told in the last round and in this one
        self._just: dict[_Name, int] = {}

    def tell_again(self) -> None:
        """Tell everything once more. It stays told meanwhile: what goes before its turn is told to be gone."""
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

    def removed(self) -> Iterator[list[object]]:
        """Find the slots whose chunk is another than the last time; return the events of those that were told."""
        self._before, self._just = self._just, {}
        published = self.ledger.columns.generation
        for row in range(0, len(published), _ROWS):
            now = published[row : row + _ROWS].copy()
            changed = np.flatnonzero(now != self._generation[row : row + _ROWS]) + row
            if not len(changed):
                continue
            gone = [slot for slot in changed.tolist() if slot in self._names]
            for at in range(0, len(gone), PIECE):
                names = [self._names.pop(slot) for slot in gone[at : at + PIECE]]
                told: dict[int, list[bytes]] = {}
                for slot, (group, hashes) in zip(gone[at:], names, strict=False):
                    # else the chunk was stored again in another slot before this one was seen to be free
                    if self._before.get((group, hashes), slot) == slot:
                        told.setdefault(group, []).append(hashes)
                if told:
                    yield [self._form.removed(hashes, self.medium, group) for group, hashes in told.items()]
            self._generation[changed] = now[changed - row]
            self._state[changed] = _WAITS

    def meet(self, roots: set[bytes]) -> None:
        """Look again at the slots of namespaces of which this engine has seen its first request."""
        if roots:
            self._state[(self._state == _OTHERS) & np.isin(self._marks, marks_of(list(roots)))] = _WAITS

    def new(self) -> Iterator[Slots]:
        """Return slots to be told, in pieces: chunks used last first, and of one prompt from its first chunk on."""
        last_use = self.ledger.columns.last_use
        ready = np.flatnonzero((self._state == _WAITS) & (last_use != NOT_READY))
        if len(ready) > _MOST_SORTED:  # more than a round can tell
            uses = last_use[ready]
            ready = ready[uses >= np.partition(uses, -_MOST_SORTED)[-_MOST_SORTED]]
        ready = ready[np.argsort(-last_use[ready], kind="stable")]
        for at in range(0, len(ready), PIECE):
            yield ready[at : at + PIECE]

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
                self._names[slot] = name
                self._just[name] = slot
                told.append(note)
        return told
