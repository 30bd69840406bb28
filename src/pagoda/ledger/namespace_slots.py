"""Which slots may have chunks of a namespace: hints, so that a clear of few chunks does not read
all rows of the tables.

One number for each slot, mapped and shared by all processes, beside the columns: the namespace of
the latest chunk that was put there. `Session` writes it after a transaction, `clearing` reads it.
The row of a namespace says how many chunks it has, so a clear sees when numbers are missing (of
another version, or lost), and then reads all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagoda.ledger.columns import map_or_private
from pagoda.ledger.hint_pages import HintPages

_NAME = "namespace-slots"
# numbers of namespaces are never used again, so two of one store may have the same low bits: the
# tables say whose a chunk is
_LOW = 2**16 - 1
_PIECE = 1 << 15  # slots that are searched at once


class NamespaceSlots:
    """The numbers of one store. Thread-safe: each is written at once, and may be wrong."""

    def __init__(self, hints: HintPages, slots: int) -> None:
        """Map the numbers of a store with that many slots; without space they are private to this
        process.
        """
        nbytes = 2 * slots
        source = hints.page(_NAME, nbytes)
        # the store was resized
        with suppress(OSError):
            if isinstance(source, Path) and source.stat().st_size != nbytes:
                source.unlink()
        self._numbers: NDArray[np.uint16] = np.frombuffer(
            map_or_private(source, nbytes), np.uint16
        )
        self._cells = self._numbers.data

    def note(self, namespaces: Mapping[int, int]) -> None:
        """Note the number of the namespace for each of these slots."""
        cells = self._cells
        for slot, number in namespaces.items():
            cells[slot] = number & _LOW

    def of(self, namespace: int) -> Iterator[int]:
        """Find the slots that may have chunks of a namespace, by its number."""
        wanted = np.uint16(namespace & _LOW)
        # in pieces, and by `find`: to make an array of a large store takes twice as long, and who
        # has found enough asks for no more
        room = bytearray(_PIECE)
        equal = np.frombuffer(room, np.bool_)
        for start in range(0, len(self._numbers), _PIECE):
            piece = self._numbers[start : start + _PIECE]
            np.equal(piece, wanted, out=equal[: len(piece)])
            at = -1
            while (at := room.find(1, at + 1, len(piece))) >= 0:
                yield start + at
