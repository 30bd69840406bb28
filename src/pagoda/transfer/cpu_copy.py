"""The CPU's copier: chunks between KV in CPU memory and slots, by this thread and by cores that are
idle.

Called by the views, which describe their KV as `KvRows`; `gpu.copy_engine` is the same for GPUs.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise, repeat
from typing import NamedTuple, cast

import numpy as np

from pagoda.base.signal_safe_threads import Pool, complete, wait
from pagoda.transfer.base import Bytes, Ids, Words

_WORD_BYTES = 8  # the widest words that are used
# what a thread takes at a time, so that no thread waits long for another
_PIECE_BYTES = 2 << 20
_LEAST_BYTES = 8 << 20  # a smaller copy ends before a helper has woken up
# limit for a copy without `threads`: four threads fill most memory buses
_MOST_THREADS = 4
_MOST_HELPERS = 15

# a call of numpy: how many bytes it copies, the function and its arguments
_Call = tuple[int, Callable[..., object], tuple[object, ...]]
# a piece of such a call, and how many bytes it copies
_Job = tuple[Callable[[], object], int]


class KvRows(NamedTuple):
    """Planes of KV of one shape: run `id` of plane p is `array[p, id]`, or `array[p, id // group,
    id % group]`.

    In a slot plane 0 begins at `offset`, and the others follow without a gap.
    """

    array: Words
    offset: int
    group: int = 1


# Runs [at, at + k) of a chunk, with their ids [k], or of chunks whose slots are at equal distances,
# with ids [chunks, k]. The fields: the first id if the others follow it without a gap; the ids;
# `at`; memory from the lowest slot on; the offset in it of the first chunk's slot; the distance
# from one slot to the next, positive or negative. It is a plain tuple, since one is made for each
# chunk.
_Batch = tuple[int | None, Ids, int, Bytes, int, int]


def copy_pairs(
    pairs: Sequence[tuple[Words, Words]], threads: int | None = None
) -> None:
    """Copy each pair's second array into its first, of the same shape and type; `threads` as for
    `CpuCopy`.
    """
    threads = threads or _idle_threads(sum([to.nbytes for to, _ in pairs]))
    if threads > 1:
        in_threads(
            _shares(piece for pair in pairs for piece in _pieces(*pair)), threads
        )
        return
    for to, source in pairs:
        np.copyto(to, source)


class CpuCopy:
    """The copies of one view. A chunk has `count` runs in each plane, each of `units` consecutive
    ids.

    Runs that are consecutive on both sides are copied by one call of numpy for each of `rows`,
    across chunks too if their slots are at equal distances in one memory. Other runs are gathered,
    or scattered, by one call for each of `rows`.

    `threads` None: as many as there are idle cores, if the copy is large enough. Thread-safe as
    `Transfer` says.
    """

    device_index: None = None  # of a CUDA device; see GpuCopy

    def __init__(
        self,
        rows: Sequence[KvRows],
        count: int,
        *,
        units: int = 1,
        threads: int | None = None,
    ) -> None:
        self._rows = rows
        self._count = count
        self._units = units
        self._threads = threads
        self._by_token = any(row.group > 1 for row in rows)

    def copy(self, ids: Ids, slots: Sequence[Bytes], *, into_slots: bool) -> None:
        """Copy runs, whose first ids are `ids` [chunks, count], into slots, or slots into runs;
        changes nothing else.

        `into_slots` False: runs whose id is below 0 are skipped.
        """
        threads = self._threads or _idle_threads(
            sum(slot.nbytes for slot in slots)
        )
        calls = self._calls(ids, slots, into_slots)
        if threads == 1:
            for _, call, arguments in calls:
                call(*arguments)
            return
        jobs: list[_Job] = []
        for nbytes, call, arguments in calls:
            if call is np.copyto:
                jobs.extend(_pieces(*cast("tuple[Words, Words]", arguments)))
            else:
                jobs.append((partial(call, *arguments), nbytes))
        in_threads(_shares(jobs), threads)

    def _calls(
        self, ids: Ids, slots: Sequence[Bytes], storing: bool
    ) -> Iterator[_Call]:
        """Make each call of numpy."""
        for run, some, at, memory, first, step in self._batches(
            ids, slots, storing
        ):
            known: dict[object, Ids] = {}  # shared by rows with the same strides
            seen = None
            width = 0
            stop = 0 if run is None else run + some.size * self._units
            for array, offset, group in self._rows:
                if array.shape != seen or array.itemsize != width:
                    seen = array.shape
                    width = array.itemsize
                    shape, strides, run_bytes = self._in_slot(
                        array, group, some.shape, step
                    )
                    begin = first + at * run_bytes
                    nbytes = math.prod(shape) * width
                slot: Words = np.ndarray(
                    shape, array.dtype, memory, begin + offset, strides
                )
                if run is None:
                    yield (
                        nbytes,
                        _gather if storing else _scatter,
                        (array, group, some, slot, known),
                    )
                    continue
                own = array[:, run:stop]
                if len(shape) != own.ndim:
                    # a view, since only one axis is split
                    own = own.reshape(shape)
                yield nbytes, np.copyto, (slot, own) if storing else (own, slot)

    def _in_slot(
        self, array: Words, group: int, ids: tuple[int, ...], step: int
    ) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return the shape and the strides of runs in slots, and the bytes of a run in a plane.

        The axes are [planes, ids, ...] of one chunk, [planes, chunks, ids, ...] of several.
        """
        width = array.itemsize
        inner = array.shape[2:] if group == 1 else array.shape[3:]
        within = (width,) if len(inner) == 1 else (inner[1] * width, width)
        id_bytes = inner[0] * within[0]
        run_bytes = id_bytes * self._units
        shape: tuple[int, ...] = (ids[-1] * self._units, *inner)
        strides: tuple[int, ...] = (id_bytes, *within)
        if len(ids) > 1:
            shape = (ids[0], *shape)
            strides = (step, *strides)
        return (
            (len(array), *shape),
            (self._count * run_bytes, *strides),
            run_bytes,
        )

    def _batches(
        self, ids: Ids, slots: Sequence[Bytes], storing: bool
    ) -> Iterator[_Batch]:
        chunks, runs = ids.shape
        # a gather needs a contiguous slot, and long runs are copied faster one by one than
        # scattered
        if chunks > 1 and (
            not (storing or runs == 1) or self._run(ids.reshape(-1)) is not None
        ):
            for _, some, at, memory, first, step in _joined(ids, slots):
                yield self._run(some.reshape(-1)), some, at, memory, first, step
            return
        for some, slot in zip(ids, slots, strict=True):
            if (run := self._run(some)) is not None or min(some.tolist()) >= 0:
                yield run, some, 0, slot, 0, 0
                continue
            for at, end in _spans(some):
                yield self._run(some[at:end]), some[at:end], at, slot, 0, 0

    def _run(self, ids: Ids) -> int | None:
        """Return the first id if the others follow it without a gap, else None."""
        first = ids.item(0)
        last = ids.item(-1)
        more = (ids.size - 1) * self._units
        if first < 0 or self._by_token or last - first != more:
            return None
        return (
            first
            if not more
            or ids.tolist() == list(range(first, last + 1, self._units))
            else None
        )


def _joined(ids: Ids, slots: Sequence[Bytes]) -> Iterator[_Batch]:
    """Join chunks without skipped runs whose slots are at equal distances in one memory.

    An array over slots of several memories would also span what lies between them: numpy takes that
    for an overlap with the engine's KV, and copies through a temporary array, which may lie between
    them too, and so on until the stack ends.
    """
    whole: list[bool] = (ids.min(axis=1) >= 0).tolist()
    places = [slot.ctypes.data for slot in slots]
    begin = step = 0
    for at in range(1, len(slots) + 1):
        if at < len(slots) and whole[at - 1] and whole[at]:
            memory = slots[at].base
            found = places[at] - places[at - 1]
            # None: it owns its memory
            one_memory = memory is not None and memory is slots[at - 1].base
            # otherwise the slots overlap, or are not a whole number of words apart, and are copied
            # one by one
            apart = abs(found) >= slots[at].nbytes and not found % _WORD_BYTES
            if one_memory and apart and step in (0, found):
                step = found
                continue
        if at - begin > 1:
            lowest, first = (
                (slots[begin], 0)
                if step > 0
                else (slots[at - 1], step * (begin + 1 - at))
            )
            nbytes = abs(step) * (at - 1 - begin) + lowest.nbytes
            memory = np.lib.stride_tricks.as_strided(lowest, (nbytes,), (1,))
            yield None, ids[begin:at], 0, memory, first, step
        else:
            for a, b in _spans(ids[begin]):
                yield None, ids[begin, a:b], a, slots[begin], 0, 0
        begin = at
        step = 0


def _spans(ids: Ids) -> Iterator[tuple[int, int]]:
    """Return the ranges of a chunk's runs between the skipped runs."""
    cuts = [-1, *np.flatnonzero(ids < 0).tolist(), len(ids)]
    return ((a + 1, b) for a, b in pairwise(cuts) if b - a > 1)


def _gather(
    array: Words, group: int, ids: Ids, slot: Words, known: dict[object, Ids]
) -> None:
    """Copy scattered runs of one chunk into its slot."""
    # otherwise np.take would first copy all of the array; its mode "raise" would copy through a
    # buffer
    if group == 1 and array.flags.c_contiguous:
        np.take(array, ids, axis=1, out=slot, mode="clip")
    elif (flat := _flat(array)) is not None:
        np.take(
            flat,
            _numbers(array, group, ids, known),
            axis=0,
            out=slot,
            mode="clip",
        )
    else:
        for at, number in enumerate(ids.tolist()):
            np.copyto(slot[:, at], array[:, number])


def _scatter(
    array: Words, group: int, ids: Ids, slot: Words, known: dict[object, Ids]
) -> None:
    """Copy slots into scattered runs, none of which occurs twice."""
    if group == 1 or (flat := _flat(array)) is None:
        array[:, ids] = slot
    else:
        flat[_numbers(array, group, ids, known)] = slot


def _flat(array: Words) -> Words | None:
    """Return the runs of a pool that is contiguous, plane by plane or block by block, in the order
    of their memory.
    """
    pool = array if array.flags.c_contiguous else array.swapaxes(0, 1)
    return pool.reshape(-1, array.shape[-1]) if pool.flags.c_contiguous else None


def _numbers(array: Words, group: int, ids: Ids, known: dict[object, Ids]) -> Ids:
    """Return the numbers of runs in `_flat`, [planes, *ids]; `known`: those of other arrays with
    the same strides.
    """
    if (numbers := known.get(array.strides)) is None:
        run_bytes = array.shape[-1] * array.itemsize
        planes = np.arange(len(array)).reshape(-1, *[1] * ids.ndim) * (
            array.strides[0] // run_bytes
        )
        blocks, tokens = np.divmod(ids, group) if group > 1 else (ids, 0)
        known[array.strides] = numbers = planes + (
            blocks * (array.strides[1] // run_bytes) + tokens
        )
    return numbers


# -- threads ---------------------------------------------------------------------------------------


def in_threads(jobs: Sequence[Callable[[], object]], threads: int) -> None:
    """Run `jobs` on this thread and on helpers: each takes the next as soon as it is free. Returns
    when all have ended.

    If a job fails, jobs that have not begun are dropped, and its error is raised.
    """
    todo = deque(jobs)
    helpers: list[Future[None]] = []
    try:
        try:
            # no thread can be started: the other threads do all jobs
            with contextlib.suppress(RuntimeError):
                # built-ins: no exception of a signal handler can come between a start and its entry
                # in this list
                helpers.extend(
                    map(
                        _helper_pool().submit,
                        repeat(_drain, min(threads, len(todo)) - 1),
                        repeat(todo),
                    )
                )
            _drain(todo)
        finally:
            _end(todo, helpers)  # no job may write into a slot after this call
    finally:  # repeated, in case of a second signal
        _end(todo, helpers)
    for helper in helpers:
        if not helper.cancelled():
            helper.result()


def _drain(todo: deque[Callable[[], object]]) -> None:
    try:
        while todo:
            try:
                job = todo.popleft()
            except IndexError:  # another thread took the last job
                return
            job()
    finally:
        todo.clear()  # after an error: the others do no more of them


def _end(todo: deque[Callable[[], object]], helpers: list[Future[None]]) -> None:
    todo.clear()
    for helper in helpers:
        helper.cancel()  # if it has not begun, there is no job left for it
    complete(partial(wait, helpers))


def _shares(jobs: Iterable[_Job]) -> list[Callable[[], object]]:
    """Join small copies, so that each job is worth a thread's while."""
    shares: list[Callable[[], object]] = []
    some = list[Callable[[], object]]()
    nbytes = 0
    for job, size in jobs:
        some.append(job)
        nbytes += size
        if nbytes >= _PIECE_BYTES:
            shares.append(partial(_run_all, some))
            some = []
            nbytes = 0
    return [*shares, partial(_run_all, some)]


def _run_all(jobs: Sequence[Callable[[], object]]) -> None:
    for job in jobs:
        job()


def _pieces(to: Words, source: Words) -> Iterator[_Job]:
    """Cut a large copy along the first axis that is long enough."""
    parts = to.nbytes // _PIECE_BYTES
    long_enough = (axis for axis, size in enumerate(to.shape) if size >= parts)
    axis = next(long_enough, None)
    if axis is None or parts <= 1:
        yield partial(np.copyto, to, source), to.nbytes
        return
    cuts = [to.shape[axis] * part // parts for part in range(parts + 1)]
    for a, b in pairwise(cuts):
        which = (*[slice(None)] * axis, slice(a, b))
        yield partial(np.copyto, to[which], source[which]), to[which].nbytes


def _idle_threads(nbytes: int) -> int:
    """Return how many threads a copy of `nbytes` may use: this one, and one for each idle core."""
    if nbytes < _LEAST_BYTES:
        return 1
    pool = _helpers
    ours = 1 if pool is None else 1 + pool.under_way
    idle = len(os.sched_getaffinity(0)) - max(ours, _running_threads())
    return 1 + max(0, min(idle, _MOST_THREADS - 1))


def _running_threads() -> int:
    """Return how many threads of the machine run or want to run now, this one included. Takes 10
    us.
    """
    try:
        fd = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return int(os.read(fd, 128).split()[3].partition(b"/")[0])
        finally:
            os.close(fd)
    except (OSError, ValueError, IndexError):
        # the number is not known: this thread copies alone
        return _MOST_HELPERS + 1


_helpers: Pool | None = None


def _helper_pool() -> Pool:
    """Return the helper threads, shared by all views of this process; a forked child begins without
    threads.
    """
    global _helpers
    pool = _helpers
    if pool is None:
        _helpers = pool = Pool(_MOST_HELPERS, "pagoda-copy")
    return pool


def end_helpers() -> None:
    """End the helper threads as soon as they are idle; the next large copy starts new ones."""
    global _helpers
    pool = _helpers
    _helpers = None
    if pool is not None:
        pool.shutdown(wait=False)
