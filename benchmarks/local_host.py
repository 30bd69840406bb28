"""Host slots against np.copyto."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from ground import NAMESPACE, Plan, keys_of, opened
from harness import Figure, Runs, Step, joined, race, ratio_figure, ratios
from limits import Bytes, Copier, Memcpy, mapped, pieces, spread

from pagoda.ledger import Ledger, Reserved
from pagoda.slab import MemorySlab

MEMORIES = ("slab", "sources", "private")


class HostSteps:
    """Write and read `batch` chunks a call through a ledger and its slab. Single-threaded."""

    def __init__(
        self, ledger: Ledger, slab: MemorySlab, keys: Sequence[bytes], batch: int
    ) -> None:
        self._ledger = ledger
        self._slab = slab
        self._keys = keys
        self._batch = batch

    def write(
        self, copier: Copier, sources: Sequence[Bytes], number: int
    ) -> None:
        """Reserve, copy and commit new keys. Every reserve evicts after the slab is full."""
        first = number * self._batch
        keys = self._keys[first : first + self._batch]
        reserved = [
            each
            for each in self._ledger.reserve(keys, namespace=NAMESPACE.root)
            if isinstance(each, Reserved)
        ]
        for place, each in enumerate(reserved, first):
            source = sources[place % len(sources)]
            copier.copy(self._slab.view(each.slot)[: source.size], source)
        if len(reserved) != len(keys) or not all(self._ledger.commit(reserved)):
            raise RuntimeError(
                f"only {len(reserved)} of {len(keys)} chunks were stored"
            )

    def read(
        self, copier: Copier, destinations: Sequence[Bytes], number: int
    ) -> None:
        """Match, copy and validate the keys that were stored last."""
        count = len(destinations)
        first = number * self._batch % count
        keys = self._keys[len(self._keys) - count + first :][: self._batch]
        found = self._ledger.match_prefix(keys)
        for place, slot in enumerate(found.slots.tolist(), first):
            destination = destinations[place % count]
            copier.copy(destination, self._slab.view(slot)[: destination.size])
        valid = self._ledger.still_valid(found.slots, found.generations)
        if len(valid) != len(keys) or not valid.all():
            raise RuntimeError(
                f"only {valid.sum()} of {len(keys)} chunks were found"
            )


def host_figures(
    plan: Plan, nbytes: int, target: float, suffix: str, batch: int
) -> list[Figure]:
    """Race chunks of `nbytes` to and from host slots, `batch` a call, against np.copyto between
    private arrays.

    The rounds are divided among three placements; in each of them another entrant's memory is
    allocated first, because the position of an array in the machine's memory changes the times more
    than what is measured here. The figure also quotes `limit_same`: np.copyto to or from the memory
    of the slab itself, without the ledger.
    """
    write: list[Runs] = []
    read: list[Runs] = []
    for place in range(len(MEMORIES)):
        rounds = replace(plan, rounds=-(-plan.rounds // len(MEMORIES)))
        with opened(
            plan, f"host{nbytes}x{batch}", spread(nbytes), nbytes
        ) as ledger:
            runs = _race(rounds, ledger, nbytes, batch, place)
        write.append(runs[0])
        read.append(runs[1])
    size_bytes = spread(nbytes) * nbytes
    return [
        _figure(
            f"host_write_vs_memcpy{suffix}",
            target,
            joined(write),
            size_bytes,
            plan,
        ),
        _figure(
            f"host_read_vs_memcpy{suffix}", target, joined(read), size_bytes, plan
        ),
    ]


def _race(
    plan: Plan, ledger: Ledger, nbytes: int, batch: int, place: int
) -> tuple[Runs, Runs]:
    """Race writes, then reads, with the memories allocated in an order that `place` rotates."""
    count = spread(nbytes)
    memories: dict[str, list[Bytes]] = {}
    slab = MemorySlab(ledger.slab_path, count, nbytes)
    for name in (*MEMORIES[place:], *MEMORIES[:place]):
        if name == "slab":
            slab.populate(threads=2, background=False)
        else:
            memories[name] = pieces(nbytes, count, len(name))
    sources = memories["sources"]
    private = memories["private"]
    same = mapped(ledger.slab_path, nbytes, count)
    copier = Copier(plan.threads)
    keys = keys_of("host", (plan.rounds + 2) * count)
    steps = HostSteps(ledger, slab, keys, batch)
    write = partial(steps.write, copier, sources)
    entrants: dict[str, Step] = {
        "candidate": write,
        "limit": Memcpy(copier, sources, private, 1 / 3, batch).step,
        "limit_same": Memcpy(copier, sources, same, 2 / 3, batch).step,
    }
    written = race(entrants, plan.rounds, count // batch)
    for number in range((plan.rounds + 1) * count // batch, len(keys) // batch):
        # stored again to be read next: the limit has overwritten the same slots
        write(number)
    _check(ledger, slab, keys[-count:], sources)
    entrants = {
        "candidate": partial(steps.read, copier, private),
        "limit": Memcpy(copier, sources, private, 1 / 3, batch).step,
        "limit_same": Memcpy(copier, same, private, 2 / 3, batch).step,
    }
    reads = race(entrants, plan.rounds, count // batch)
    slab.close()
    copier.close()
    return written, reads


def _check(
    ledger: Ledger,
    slab: MemorySlab,
    keys: Sequence[bytes],
    sources: Sequence[Bytes],
) -> None:
    for key, source in zip(keys, sources, strict=True):
        found = ledger.match_prefix([key])
        if not np.array_equal(
            slab.view(int(found.slots[0]))[: source.size], source
        ):
            raise RuntimeError("the bytes of a stored chunk are wrong")


def _figure(
    key: str, target: float, runs: Runs, nbytes: int, plan: Plan
) -> Figure:
    beside = [
        round(each, 4) for each in ratios(runs["limit_same"], runs["candidate"])
    ]
    figure = ratio_figure(
        key,
        target,
        runs,
        size_bytes=nbytes,
        threads=f"threads: {plan.threads}",
        beside={"ratio_to_memcpy_of_the_same_memory": beside},
    )
    return replace(
        figure,
        note=f"{figure.note}; {np.median(beside):.3f} of memcpy in the same memory",
    )
