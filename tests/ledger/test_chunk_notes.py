"""Notes beside a ledger: those of neighbouring slots are read at once, and each counts only under
its own key.
"""

from __future__ import annotations

from pathlib import Path

from pagoda.ledger.chunk_notes import MOST_NOTE_BYTES, ChunkNotes
from pagoda.ledger.store_state import NOTES

PAGE_BYTES = 4096


def key(slot: int) -> bytes:
    return bytes([slot + 1]) * 32


def test_notes_of_neighbouring_slots_are_those_of_each_slot(
    tmp_path: Path,
) -> None:
    """In any order, also twice, beside slots without a note, and past the end of the file."""
    notes = ChunkNotes(tmp_path)
    kept = {
        slot: bytes([slot]) * (slot or MOST_NOTE_BYTES)
        for slot in (0, 1, 2, 4, 5, 9)
    }
    assert notes.read([(0, key(0)), (1, key(1))]) == [None, None]
    notes.write((slot, key(slot), note) for slot, note in kept.items())
    for slots in (
        list(range(16)),
        list(range(15, -1, -1)),
        [4, 5, 4, 5, 6],
        [9, 10, 11],
        [20, 21],
    ):
        assert notes.read([(slot, key(slot)) for slot in slots]) == [
            kept.get(slot) for slot in slots
        ]
    assert notes.read([(1, key(1)), (2, key(3)), (3, key(3)), (4, key(4))]) == [
        kept[1],
        None,
        None,
        kept[4],
    ]


def test_a_torn_note_takes_nothing_of_its_neighbour(tmp_path: Path) -> None:
    notes = ChunkNotes(tmp_path)
    notes.write((slot, key(slot), b"a note") for slot in range(3))
    with (tmp_path / NOTES).open("r+b") as file:
        file.seek(PAGE_BYTES + 32)
        # the length of slot 1's
        file.write((2 * PAGE_BYTES).to_bytes(4, "little"))
    assert notes.read([(slot, key(slot)) for slot in range(3)]) == [
        b"a note",
        None,
        b"a note",
    ]
