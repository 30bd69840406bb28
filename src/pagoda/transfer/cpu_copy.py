"""Copies within CPU memory, in one thread or several."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda.threads import Pool, wait

__all__ = ["Pair", "copy_pairs", "in_threads"]

_SPLIT_BYTES = 1 << 20  # a smaller share costs more to hand to a thread than to copy


class Pair(NamedTuple):
    """One copy: two arrays of the same shape and dtype that share no memory."""

    to: npt.NDArray[np.generic]
    source: npt.NDArray[np.generic]


def copy_pairs(pairs: Iterable[Pair], threads: int = 1) -> None:
    """Do the copies; changes what they point to. Returns when all are done, in any order.

    np.copyto drops the GIL, and where the inner run is contiguous on both sides it is a memmove a run. More
    than one thread pays only where one core cannot fill the memory bus, and never below a megabyte a thread.
    """
    if threads > 1:
        pairs = list(pairs)
        threads = min(threads, sum(pair.to.nbytes for pair in pairs) // _SPLIT_BYTES)
    if threads <= 1:
        _copy(pairs)
        return
    cut = [piece for pair in pairs for piece in _split(pair, threads)]
    in_threads([partial(_copy, share) for share in _shares(cut, threads)], threads)


def in_threads(jobs: Sequence[Callable[[], None]], threads: int) -> None:
    """Run `jobs`, the last one on this thread. Returns when all have ended; raises what one raised."""
    if threads <= 1:
        for job in jobs:
            job()
        return
    waiting, mine = list[Future[None]](), list(jobs)
    try:
        with contextlib.suppress(RuntimeError):  # no thread can be had: the rest is done here
            while len(mine) > 1:
                waiting.append(_pool(threads).submit(mine[0]))
                del mine[0]
        for job in mine:
            job()
        wait(waiting)
    except BaseException:
        wait(waiting)  # nothing may still write into a slot after this ends
        raise
    for future in waiting:
        future.result()


def _copy(pairs: Iterable[Pair]) -> None:
    for to, source in pairs:
        np.copyto(to, source)


def _split(pair: Pair, parts: int) -> list[Pair]:
    """Cut a large copy along its first axis, so that every thread gets some of it."""
    rows = pair.to.shape[0]
    if pair.to.nbytes < _SPLIT_BYTES or rows < parts:
        return [pair]
    cuts = [rows * part // parts for part in range(parts + 1)]
    return [Pair(pair.to[a:b], pair.source[a:b]) for a, b in pairwise(cuts)]


def _shares(pairs: list[Pair], threads: int) -> list[list[Pair]]:
    """Deal the copies out so that each share has about as many bytes; neighbours stay together."""
    shares: list[list[Pair]] = [[] for _ in range(threads)]
    each, done = sum(pair.to.nbytes for pair in pairs) / threads, 0
    for pair in pairs:
        shares[min(int(done / each), threads - 1)].append(pair)
        done += pair.to.nbytes
    return shares


@lru_cache(maxsize=4)
def _pool(threads: int) -> Pool:
    """The threads that help with copies; made once a process and count."""
    return Pool(threads - 1, "pagoda-copy")


if hasattr(os, "register_at_fork"):  # a child has none of the parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
