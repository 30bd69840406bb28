"""What the ledger answers: small typed tuples. A failure at run time is a `Refused` or a reason,
never an exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagoda.base.metrics import Reason


class Reserved(NamedTuple):
    """A slot to copy the chunk's bytes into, then commit or abort. May be sent to another
    process.
    """

    key: bytes
    slot: int
    generation: int


class Present(NamedTuple):
    """The chunk is stored already; nothing to do."""

    key: bytes
    slot: int
    generation: int


class Busy(NamedTuple):
    """A living member is filling a slot for that key."""

    key: bytes
    owner: int


class Refused(NamedTuple):
    """There is no free slot, or the policy or a limit refuses the chunk."""

    key: bytes
    reason: Reason


Outcome = Reserved | Present | Busy | Refused


class RunToReserve(NamedTuple):
    """Keys of one chain that want slots: at positions from `start` on, after `parent`. `stamp`: the
    recency of their request. `context`: see `reuse_context`; None: what their keys say.
    """

    keys: Sequence[bytes]
    namespace: bytes
    start: int
    parent: bytes | None
    stamp: int
    context: int | None = None


class CommitResult(IntEnum):
    """The result of committing one part of a chunk; true if it is stored. Only the last part gets
    WHOLE.
    """

    LOST = 0  # superseded, cleared, reaped, or not committed in time
    WHOLE = 1  # stored, and it was the last part: the chunk is visible now
    # stored, but other parts are missing: the chunk cannot be read yet, though its generation is
    # valid
    PART = 2


class Match(NamedTuple):
    """The leading run that may be read: slots[i], of generations[i], holds key i. `reason`: why the
    run ends there.

    `reason` is None if all keys are in the run. `following`: which of the next keys have a chunk,
    for `Ledger.reserve`; None: nobody looked.
    """

    slots: NDArray[np.int64]
    generations: NDArray[np.uint64]
    reason: Reason | None
    following: Sequence[Present | None] | None = None


class Miss(NamedTuple):
    """Why a key is absent, and for how long (seconds, if known)."""

    reason: Reason
    age_seconds: float | None


class NamespaceRow(NamedTuple):
    """A namespace that has, or had, chunks here. `fields`: its label for people; empty if it is not
    known here.
    """

    root: bytes
    fields: dict[str, str]
    chunks: int


class ChunkRow(NamedTuple):
    """A chunk that may be read."""

    key: bytes
    slot: int
    generation: int
    namespace_root: bytes
    position: int
    tokens: int
    last_use_age_seconds: float
    hits: int
    leased: bool
    pinned: bool


class ScannedChunk(NamedTuple):
    """A chunk whose header was read from the slab during a rebuild.

    `epoch` is compared with the generation before which its namespace was cleared. It equals
    `sequence`; an older version wrote the number of the namespace's clears instead, which is less
    than any generation.
    """

    key: bytes
    namespace_root: bytes
    epoch: int
    position: int
    tokens: int
    sequence: int


class Report(NamedTuple):
    """What `check` counted. `unreachable`: chunks without their parent; `stale_hints`: rows whose
    hints are wrong.
    """

    gauges: dict[str, int]
    unreachable: int
    stale_hints: int
