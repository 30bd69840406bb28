"""Copies within CPU memory, in one thread or several. Called by the views."""

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

__all__ = ["CopyPair", "copy_pairs", "in_threads"]

_SPLIT_BYTES = 1 << 20  # a smaller share costs more to hand to a thread than to copy


class CopyPair(NamedTuple):
    """One copy: two arrays of the same shape and dtype that share no memory."""

    to: npt.NDArray[np.generic]
    source: npt.NDArray[np.generic]


def copy_pairs(pairs: Iterable[CopyPair], threads: int = 1) -> None:
    """Do the copies in any order; changes their targets. Returns when all are done.

    np.copyto drops the GIL; if the inner run is contiguous on both sides it is one memmove per run. More than one
    thread helps only if one core cannot fill the memory bus, and never below a megabyte per thread.
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
    """Run `jobs`, the last one on this thread. Returns when all have ended; raises the error of one that failed."""
    if threads <= 1:
        for job in jobs:
            job()
        return
    waiting, mine = list[Future[None]](), list(jobs)
    try:
        with contextlib.suppress(RuntimeError):  # no thread can be started: the rest is done here
            while len(mine) > 1:
                waiting.append(_pool(threads).submit(mine[0]))
                del mine[0]
        for job in mine:
            job()
        wait(waiting)
    except BaseException:
        wait(waiting)  # nothing may still write into a slot after this call ends
        raise
    for future in waiting:
        future.result()


def _copy(pairs: Iterable[CopyPair]) -> None:
    for to, source in pairs:
        np.copyto(to, source)


def _split(pair: CopyPair, parts: int) -> list[CopyPair]:
    """Cut a large copy along its first axis, so that every thread gets a part of it."""
    rows = pair.to.shape[0]
    if pair.to.nbytes < _SPLIT_BYTES or rows < parts:
        return [pair]
    cuts = [rows * part // parts for part in range(parts + 1)]
    return [CopyPair(pair.to[a:b], pair.source[a:b]) for a, b in pairwise(cuts)]


def _shares(pairs: list[CopyPair], threads: int) -> list[list[CopyPair]]:
    """Distribute the copies so that each share has about the same bytes; neighbours stay together."""
    shares: list[list[CopyPair]] = [[] for _ in range(threads)]
    each, done = sum(pair.to.nbytes for pair in pairs) / threads, 0
    for pair in pairs:
        shares[min(int(done / each), threads - 1)].append(pair)
        done += pair.to.nbytes
    return shares


@lru_cache(maxsize=4)
def _pool(threads: int) -> Pool:
    """Return the threads that help with copies; made once per process and count."""
    return Pool(threads - 1, "pagoda-copy")


if hasattr(os, "register_at_fork"):  # a child has none of the parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
