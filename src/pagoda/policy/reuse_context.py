"""The context of the last use of a chunk: what is known beside its time and the number of its uses.

A context is a number of eleven bits, so that columns and ghosts can keep it:

    workload   who asks: the first chunk of the prompt, hashed into 16
    ending     how the answer to the last request with this chunk ended, if somebody said so
    gap        after which time the requests of its session follow each other

Without a request hint a chunk is judged by its workload and its number of uses; with one, by its
workload, ending and gap. `row_of` makes one number of these, the row in the tables of
`reuse_worth`.
"""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from pagoda.policy import Contexts as ContextColumns
from pagoda.policy.reuse_worth import (
    AGES,
    CLASSES,
    Table,
    at_risk,
    class_of,
    first_guess,
    guessed,
    index,
)

WORKLOADS = 16
GAPS = 8
"""Classes of gaps that the tables tell apart; contexts have them in octaves."""

_ENDING_BIT = 4
_GAP_BIT = 7
_WORKLOAD = WORKLOADS - 1
_ENDING = 7 << _ENDING_BIT
_GAP = 15 << _GAP_BIT
_MOST_OCTAVE = 15
# 0: not known; then up to 6, 11, 23, 45, 91 and 362 seconds, and longer
_GAP_CLASSES = np.array([0, 1, 1, 1, 2, 3, 4, 5, 6, 6, 7, 7, 7, 7, 7, 7])

Contexts = NDArray[np.uint16]


class Ending(IntEnum):
    """How the answer to the last request with a chunk ended. The next one of its session comes when
    the tool has run, when the user has read the answer, or never.

    LEFT: its session has gone on without it. Such are the ends of prompts that are continued in the
    middle of a chunk, and what was before a summary.
    """

    UNKNOWN = 0
    TOOL_CALL = 1
    TURN = 2
    OTHER = 3
    SESSION = 4
    LEFT = 5


_ENDINGS_WITH_GAPS = (Ending.TOOL_CALL, Ending.TURN, Ending.OTHER)
ENDED = CLASSES + len(_ENDINGS_WITH_GAPS) * GAPS
"""The kind of chunks whose session is over."""
LEFT = ENDED + 1
"""The kind of chunks without which their session has gone on."""
KINDS = LEFT + 1
ROWS = WORKLOADS * KINDS

# How many watched chunks a guess counts for, where a kind with an ending or a workload is guessed
# from those like it. All chunks of a prompt are asked for together, so this is some ten prompts.
_GUESS_WEIGHT = 1000.0


# Fibonacci hashing: generations of one slot often differ by a power of two
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_MARK_SHIFT = np.uint64(48)
_SECONDS = (1 << 16) - 1
_HIGH_BITS = np.uint64(40)
_NANOSECONDS = 10**9


def workload_of(marks: NDArray[np.uint64]) -> int:
    """Return the workload of a prompt whose chunks have these marks, from its first one on: by
    other bits than those by which ghosts find their places. 0 for no chunk.
    """
    return int(marks[0] >> _HIGH_BITS) % WORKLOADS if len(marks) else 0


def mark_of(generations: NDArray[np.uint64]) -> NDArray[np.uint16]:
    """Return the mark of each generation. Two of 65,536 have the same: then a chunk is judged by
    what was known of another, as by a wrong hint.
    """
    return (generations * _SPREAD >> _MARK_SHIFT).astype(np.uint16)


def known_contexts(
    columns: ContextColumns,
    chosen: NDArray[np.int64] | slice,
    generations: NDArray[np.uint64],
) -> Contexts:
    """Return the contexts of these slots, which have these generations; 0: this process knows
    nothing of the chunk. A new array.
    """
    same = columns.marks[chosen] == mark_of(generations)
    contexts: Contexts = columns.of_slots[chosen] * same
    return contexts


def hint_second(stamp: int) -> int:
    """Return when a hint was given, from 1 on; it begins again after 18 hours."""
    return 1 + stamp // _NANOSECONDS % _SECONDS


def seconds_since(second: int, stamp: int) -> float:
    """Return how long ago that `hint_second` was, less than 18 hours."""
    return (stamp / _NANOSECONDS - (second - 1)) % _SECONDS


def kinds_of_ending(ending: Ending) -> slice:
    """Return the kinds of chunks whose last answer ended like this, one for each class of gaps."""
    first = CLASSES + _ENDINGS_WITH_GAPS.index(ending) * GAPS
    return slice(first, first + GAPS)


def context_of(
    workload: int, ending: Ending = Ending.UNKNOWN, octave: int = 0
) -> int:
    """Return the context of these parts."""
    ending_bits = int(ending) << _ENDING_BIT
    return workload % WORKLOADS | ending_bits | octave << _GAP_BIT


def gap_octave(context: int) -> int:
    """Return the gap in a context, in octaves of seconds; 0: not known."""
    return (context & _GAP) >> _GAP_BIT


def next_gap_octave(before: int, seconds: float) -> int:
    """Return the gap of a session after one more gap of that length: half of what it was, half new.

    One gap says little: of coding agents, it explains 7 % of the next one, and the mean of such
    halves 12 %.
    """
    octave = 1 + round(math.log2(max(seconds, 1.0)))
    octave = min(octave, _MOST_OCTAVE)
    if not before:
        return octave
    return (octave + before + 1) // 2


def asked_again(contexts: Contexts) -> Contexts:
    """Return the contexts of chunks that are asked for again: how that ends is not known yet."""
    return contexts & np.uint16(0xFFFF ^ _ENDING)


def ended(contexts: Contexts, ending: Ending, octave: int) -> Contexts:
    """Return the contexts of chunks after an answer that ended like this."""
    return contexts & np.uint16(_WORKLOAD) | np.uint16(
        context_of(0, ending, octave)
    )


def are_over(contexts: Contexts) -> NDArray[np.bool_]:
    """Return which of these contexts say that their session is over, or their prompt dropped."""
    over: NDArray[np.bool_] = contexts & np.uint16(_ENDING) == np.uint16(
        Ending.SESSION << _ENDING_BIT
    )
    return over


def row_of(hits: NDArray[np.integer], contexts: Contexts) -> NDArray[np.int64]:
    """Return the row of chunks with this number of hits and these contexts: workload, then kind."""
    kinds = class_of(hits)
    hinted = np.flatnonzero(contexts & np.uint16(_ENDING))
    if len(hinted):
        found = contexts[hinted].astype(np.int64)
        ending = (found & _ENDING) >> _ENDING_BIT
        gap = _GAP_CLASSES[(found & _GAP) >> _GAP_BIT]
        with_gap = CLASSES + (ending - 1) * GAPS + gap
        without_gap = ENDED + ending - Ending.SESSION
        found_kinds = np.where(ending < Ending.SESSION, with_gap, without_gap)
        # also for values that no process writes
        kinds[hinted] = np.minimum(found_kinds, LEFT)
    workloads = (contexts & np.uint16(_WORKLOAD)).astype(np.int64)
    return workloads * KINDS + kinds


def worth_of_hazards(hazard: Table, by_kind: Table) -> Table:
    """Return the yield per second of a slot with a chunk of each row and age, (ROWS, AGES), from
    what `hazards_in_context` returns.
    """
    best: Table = np.tile(index(by_kind), (WORKLOADS, 1))
    # for the others it is the same, and this is most of the time
    seen = (hazard != np.tile(by_kind, (WORKLOADS, 1))).any(axis=1)
    best[seen] = index(hazard[seen])
    return best


def hazards_in_context(asked: Table, watched: Table) -> tuple[Table, Table]:
    """Return the share of chunks that is asked for, of each row and age, (ROWS, AGES), and of each
    kind, (KINDS, AGES).

    As `reuse_worth.worth`, but what is little known is guessed in steps: a workload's kind from
    that kind of all workloads, a gap from all gaps of its ending, and these from all chunks. A
    session that is over is taken to ask for nothing, until its chunks are asked for all the same.
    """
    risk = at_risk(asked, watched).reshape(WORKLOADS, KINDS, AGES)
    asked = asked.reshape(WORKLOADS, KINDS, AGES)
    asked_by_kind = asked.sum(axis=0)
    risk_by_kind = risk.sum(axis=0)
    of_all = first_guess(asked_by_kind.sum(axis=0), risk_by_kind.sum(axis=0))
    by_kind = np.empty((KINDS, AGES))
    plain = slice(0, CLASSES)
    by_kind[plain] = guessed(asked_by_kind[plain], risk_by_kind[plain], of_all)
    for ending in _ENDINGS_WITH_GAPS:
        kinds = kinds_of_ending(ending)
        by_ending = guessed(
            asked_by_kind[kinds].sum(axis=0),
            risk_by_kind[kinds].sum(axis=0),
            of_all,
            _GUESS_WEIGHT,
        )
        by_kind[kinds] = guessed(
            asked_by_kind[kinds], risk_by_kind[kinds], by_ending, _GUESS_WEIGHT
        )
    nothing = np.zeros(AGES)
    by_kind[ENDED] = guessed(asked_by_kind[ENDED], risk_by_kind[ENDED], nothing)
    by_kind[LEFT] = guessed(asked_by_kind[LEFT], risk_by_kind[LEFT], of_all)
    hazard = guessed(asked, risk, by_kind, _GUESS_WEIGHT)
    return (
        np.minimum(hazard, 1.0).reshape(ROWS, AGES),
        np.minimum(by_kind, 1.0),
    )
