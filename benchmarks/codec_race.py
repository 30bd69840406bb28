"""The race of compression methods on one sample."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import zstandard
from codec_kv import Bytes, Sample
from harness import Figure, Runs, Step, race, ratios
from limits import Copier, Memcpy, void

from pagoda.codec import decode, encode, zstd

THREADS = (1, 2)
OURS = "zstd (ours)"
SHUFFLE = "byte shuffle, zstd-1"
LIMIT = "memcpy"
# chunks of a step: with short turns other load on the machine affects all entrants equally
BATCH = 4


class Peer(Protocol):
    """One method to compress a chunk. Thread-safe."""

    def encode(self, chunk: Bytes, out: Bytes) -> Bytes:
        """The smaller bytes; `out` is room for them."""

    def decode(self, stored: Bytes, out: Bytes) -> None:
        """Fill `out`."""


class Ours:
    """The product."""

    def encode(self, chunk: Bytes, out: Bytes) -> Bytes:
        """As the tier calls it."""
        return encode("zstd", chunk, 2, out)[1]

    def decode(self, stored: Bytes, out: Bytes) -> None:
        """As the tier calls it."""
        if not decode("zstd", stored, 2, out):
            raise RuntimeError("what was encoded is not decoded")


class Plain(threading.local):
    """zstd at a level, on the unchanged bytes; each thread keeps a context."""

    def __init__(self, level: int) -> None:
        self._compress = zstandard.ZstdCompressor(level=level).compress
        self._decompress = zstandard.ZstdDecompressor().decompress

    def encode(self, chunk: Bytes, out: Bytes) -> Bytes:
        """One frame."""
        return np.frombuffer(self._compress(chunk.data), np.uint8)

    def decode(self, stored: Bytes, out: Bytes) -> None:
        """To where the bytes belong."""
        np.copyto(out, np.frombuffer(self._decompress(stored.data), np.uint8))


class Shuffle(Plain):
    """All low bytes, then all high bytes, by strided copies of the whole chunk; then zstd."""

    def encode(self, chunk: Bytes, out: Bytes) -> Bytes:
        """One frame."""
        return super().encode(
            np.ascontiguousarray(chunk.reshape(-1, 2).T).reshape(-1), out
        )

    def decode(self, stored: Bytes, out: Bytes) -> None:
        """To where the bytes belong."""
        np.copyto(
            out.reshape(-1, 2).T,
            np.frombuffer(self._decompress(stored.data), np.uint8).reshape(2, -1),
        )


def batches(
    work: Callable[[int], None],
    count: int,
    threads: int,
    pool: ThreadPoolExecutor,
) -> Step:
    """Return a step that does `work` on the next BATCH places of `count`; each thread has a
    contiguous share.
    """

    def share(first: int, thread: int) -> None:
        for place in range(
            first + BATCH * thread // threads,
            first + BATCH * (thread + 1) // threads,
        ):
            work(place % count)

    def step(number: int) -> None:
        others = [
            pool.submit(share, number * BATCH, thread)
            for thread in range(1, threads)
        ]
        share(number * BATCH, 0)
        for other in others:
            other.result()

    return step


class Field:
    """One sample, and every peer on it."""

    def __init__(self, sample: Sample, peers: Mapping[str, Peer]) -> None:
        self.chunks = sample.chunks
        self.peers = peers
        self.nbytes = sum(chunk.nbytes for chunk in self.chunks)
        self.outs, self.backs = (
            [np.zeros_like(chunk) for chunk in self.chunks] for _ in range(2)
        )
        # (peer, verb): seconds of one thread's steps
        self.processor: dict[tuple[str, str], list[float]] = {}
        self.stored = {
            name: [
                peer.encode(chunk, np.empty_like(chunk)) for chunk in self.chunks
            ]
            for name, peer in peers.items()
        }

    def ratio(self, name: str) -> float:
        """Return raw bytes per stored byte."""
        if name not in self.stored:
            return 1.0
        return self.nbytes / sum(piece.nbytes for piece in self.stored[name])

    def down(self, name: str) -> Callable[[int], None]:
        """Encode the chunk at a place."""
        return lambda place: void(
            self.peers[name].encode(self.chunks[place], self.outs[place])
        )

    def up(self, name: str) -> Callable[[int], None]:
        """Decode the chunk at a place."""
        return lambda place: self.peers[name].decode(
            self.stored[name][place], self.backs[place]
        )

    def runs(self, threads: int, rounds: int) -> dict[str, Runs]:
        """Race encoding and decoding, all peers and memcpy in turns."""
        count = len(self.chunks)
        copier = Copier(threads)
        found: dict[str, Runs] = {}
        limit = Memcpy(copier, self.chunks, self.outs, 0.5, BATCH).step
        with ThreadPoolExecutor(max(THREADS) - 1) as pool:
            for verb, way in (("encode", self.down), ("decode", self.up)):
                steps = {
                    name: batches(way(name), count, threads, pool)
                    for name in self.peers
                }
                steps[LIMIT] = limit
                if threads == 1:
                    steps = {
                        name: self._clocked(name, verb, step)
                        for name, step in steps.items()
                    }
                found[verb] = race(steps, rounds, count // BATCH)
        copier.close()
        return found

    def _clocked(self, name: str, verb: str, step: Step) -> Step:
        spent: list[float] = []
        self.processor[name, verb] = spent

        def clocked(number: int) -> None:
            began = time.thread_time()
            step(number)
            spent.append(time.thread_time() - began)

        return clocked

    def processor_speed(self, name: str, verb: str) -> float:
        """Return 10^9 raw bytes a second of processor time: the median of all steps of one
        thread.
        """
        return (
            BATCH
            * self.chunks[0].nbytes
            / statistics.median(self.processor[name, verb])
            / 1e9
        )

    def check(self) -> None:
        """Raise RuntimeError if a peer returned other bytes than it got."""
        for name in self.peers:
            for place, chunk in enumerate(self.chunks):
                self.backs[place][:] = 0
                self.up(name)(place)
                if not np.array_equal(chunk, self.backs[place]):
                    raise RuntimeError(f"{name} returned other bytes")


def parts_figures(field: Field, name: str, rounds: int) -> list[Figure]:
    """Return numpy's share of the time of encoding and decoding: splitting words into planes and
    joining them.
    """
    chunks = field.chunks
    backs = field.backs
    planes = np.empty((2, 1 << zstd.BLOCK_LOG), np.uint8)
    scratch = zstd._Scratch()

    def split(number: int) -> None:
        for words in zstd._blocks(
            chunks[number % len(chunks)], 2, zstd.BLOCK_LOG
        ):
            for place in (1, 0):
                zstd._split(words, place, planes[place, : words.size], scratch)

    def join(number: int) -> None:
        for words in zstd._blocks(backs[number % len(chunks)], 2, zstd.BLOCK_LOG):
            joined, widened = (
                each[: words.nbytes].view("<u2")
                for each in (scratch.first, scratch.second)
            )
            for place in (1, 0):
                zstd._join(
                    planes[place, : words.size], place, words, joined, widened
                )

    down = field.down(OURS)
    up = field.up(OURS)
    entrants: dict[str, Step] = {
        "encode": lambda number: down(number % len(chunks)),
        "split": split,
        "decode": lambda number: up(number % len(chunks)),
        "join": join,
    }
    runs = race(entrants, rounds, len(chunks))
    found = []
    for part, whole in (("split", "encode"), ("join", "decode")):
        # seconds of the part over seconds of the whole
        shares = ratios(runs[part], runs[whole])
        quoted = {"share": [round(each, 4) for each in shares]}
        found.append(
            Figure(
                f"codec_{name}_{part}_share_of_{whole}",
                statistics.median(shares),
                None,
                "ratio",
                quoted,
            )
        )
    return found
