"""The codec on real KV: `python benchmarks/codec.py [--json | --markdown] [--quick]`.

Prints its compression ratio for the KV of a small model, beside the order-0 entropy bound, and its
speed, in turns with memcpy, with zstd on the unchanged bytes, and with a strided byte shuffle by
numpy before zstd. The model is made here: first random, then trained for a minute on one core. The
output names it. The last results: docs/how-to/codec.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
from codec_kv import Bytes, Sample, samples
from codec_race import (
    LIMIT,
    OURS,
    SHUFFLE,
    THREADS,
    Field,
    Ours,
    Peer,
    Plain,
    Shuffle,
    parts_figures,
)
from harness import MIB, Figure, Runs, gb_per_second, machine, ratios, report, say

from pagoda.codec import encode


@dataclass(frozen=True)
class Entropy:
    """Order-0 entropy, in bits, of the 16-bit words of a sample, and the ratios that it bounds."""

    exponent: float
    sign_mantissa: float
    bound: float  # each of the two coded separately
    bound_of_words: float  # all 16 bits together
    bound_as_split: float  # each byte coded separately, as the codec splits them


@dataclass(frozen=True)
class Row:
    """One codec on one sample: ratio, and 10^9 raw bytes a second (medians) by threads."""

    kv: str
    codec: str
    ratio: float
    encode: Mapping[int, float]
    decode: Mapping[int, float]
    # 10^9 raw bytes a second of processor time, less sensitive to load
    encode_processor: float
    decode_processor: float

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the cells of the table's row."""
        speeds = [
            *self.encode.values(),
            self.encode_processor,
            *self.decode.values(),
            self.decode_processor,
        ]
        return (
            self.kv,
            self.codec,
            f"{self.ratio:.3f}",
            *(f"{speed:.2f}" for speed in speeds),
        )


@dataclass(frozen=True)
class Result:
    """The result of one sample."""

    sample: Sample
    entropy: Entropy
    turned_ratio: float
    rows: Sequence[Row]
    figures: Sequence[Figure]


def entropy_of(chunks: Sequence[Bytes]) -> Entropy:
    """Return the entropy of all words of all chunks."""
    counts = sum(
        np.bincount(chunk.view("<u2"), minlength=1 << 16) for chunk in chunks
    )
    words = np.arange(1 << 16, dtype=np.uint16)

    def bits(part: npt.NDArray[np.uint16]) -> float:
        share = np.bincount(part, weights=counts)
        share = share[share > 0] / share.sum()
        return float(-(share * np.log2(share)).sum())

    exponent = bits(words >> 7 & 255)
    rest = bits(words & 127 | words >> 15 << 7)
    split = bits(words >> 8) + bits(words & 255)
    return Entropy(
        exponent, rest, 16 / (exponent + rest), 16 / bits(words), 16 / split
    )


def measured(sample: Sample, peers: Mapping[str, Peer], rounds: int) -> Result:
    """Race all peers on one sample, and check that each returns the bytes that it got."""
    say(f"racing on {sample.name} ...")
    field = Field(sample, peers)
    by_threads = {threads: field.runs(threads, rounds) for threads in THREADS}
    field.check()
    runs = {
        verb: {threads: by_threads[threads][verb] for threads in THREADS}
        for verb in ("encode", "decode")
    }
    rows = [row(sample.name, name, field, runs) for name in (*peers, LIMIT)]
    entropy = entropy_of(sample.chunks)
    share = field.ratio(OURS)
    figures = [
        *(
            figure(sample.name, verb, peer, runs, field.nbytes)
            for verb in runs
            for peer in (SHUFFLE, LIMIT)
        ),
        Figure(
            f"codec_{sample.name}_ratio_vs_bound",
            share / entropy.bound,
            None,
            "ratio",
        ),
        *parts_figures(field, sample.name, rounds),
    ]
    return Result(sample, entropy, turned_ratio(sample.chunks), rows, figures)


def row(
    kv: str, name: str, field: Field, runs: Mapping[str, Mapping[int, Runs]]
) -> Row:
    """Return one peer's medians over the rounds."""
    speeds = {
        verb: {
            n: statistics.median(gb_per_second(each[name], field.nbytes))
            for n, each in by.items()
        }
        for verb, by in runs.items()
    }
    processor = [
        round(field.processor_speed(name, verb), 3)
        for verb in ("encode", "decode")
    ]
    return Row(
        kv,
        name,
        field.ratio(name),
        speeds["encode"],
        speeds["decode"],
        *processor,
    )


def figure(
    kv: str,
    verb: str,
    peer: str,
    runs: Mapping[str, Mapping[int, Runs]],
    nbytes: int,
) -> Figure:
    """Return our speed as a multiple of a peer's, round by round, with one thread."""
    found = runs[verb][1]
    paired = ratios(found[peer], found[OURS])
    key = f"codec_{kv}_{verb}_vs_{'memcpy' if peer == LIMIT else 'numpy_shuffle'}"
    ours = gb_per_second(found[OURS], nbytes)
    theirs = gb_per_second(found[peer], nbytes)
    note = f"{statistics.median(ours):.2f} against {statistics.median(theirs):.2f} GB/s, 1 thread"
    quoted = {
        "ours_gb_per_second": ours,
        "theirs_gb_per_second": theirs,
        "ratio": [round(each, 4) for each in paired],
    }
    return Figure(key, statistics.median(paired), None, "ratio", quoted, note)


def turned_ratio(chunks: Sequence[Bytes]) -> float:
    """Return the ratio for words rotated left by one bit: the whole exponent in the high byte, the
    sign in the low.
    """
    room = np.empty_like(chunks[0])
    nbytes = 0
    for chunk in chunks:
        words = chunk.view("<u2")
        nbytes += encode(
            "zstd", (words << 1 | words >> 15).view(np.uint8), 2, room
        )[1].nbytes
    return sum(chunk.nbytes for chunk in chunks) / nbytes


def table(
    heads: Sequence[str], lines: Sequence[Sequence[str]], markdown: bool
) -> str:
    """Format a table for a terminal, or in Markdown."""
    if markdown:
        return "\n".join(
            "| " + " | ".join(line) + " |"
            for line in (heads, ["---"] * len(heads), *lines)
        )
    widths = [
        max(len(line[i]) for line in (heads, *lines)) for i in range(len(heads))
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) for cell, width in zip(line, widths, strict=True)
        )
        for line in (heads, *lines)
    )


def printed(results: Sequence[Result], markdown: bool) -> Iterator[str]:
    """Yield the tables of a run."""
    for result in results:
        nbytes = sum(chunk.nbytes for chunk in result.sample.chunks)
        size = f"{len(result.sample.chunks)} chunks of {result.sample.chunks[0].nbytes // MIB} MiB"
        yield (
            f"{'- ' if markdown else ''}`{result.sample.name}`: {result.sample.model}. "
            f"{nbytes // MIB} MiB, {size}."
        )
    ways = [f"{n} thread{'s' * (n > 1)}" for n in THREADS] + ["processor"]
    heads = (
        "KV",
        "codec",
        "ratio",
        *(f"{verb}, {way}" for verb in ("encode", "decode") for way in ways),
    )
    yield "\nGB/s of raw bytes, medians; processor: per second of one thread's processor time.\n"
    yield table(
        heads, [row.texts for result in results for row in result.rows], markdown
    )
    yield "\nOrder-0 entropy of a word in bits, and the ratios that it bounds.\n"
    heads = (
        "KV",
        "exponent",
        "sign + mantissa",
        "bound",
        "bound of whole words",
        "as split",
        "ratio",
        "ratio, turned",
    )
    lines = []
    for result in results:
        found = (
            *asdict(result.entropy).values(),
            result.rows[0].ratio,
            result.turned_ratio,
        )
        lines.append((result.sample.name, *(f"{value:.3f}" for value in found)))
    yield table(heads, lines, markdown)
    yield "\nOne thread against another's, round by round.\n"
    figures = [each for result in results for each in result.figures]
    yield table(
        ("figure", "value", "of"),
        [(each.key, each.text, each.note) for each in figures],
        markdown,
    )
    yield "\n" + ", ".join(f"{name} {value}" for name, value in machine().items())


def main() -> None:
    """Read the command line, make the KV, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument(
        "--markdown",
        action="store_true",
        help="print tables for docs/how-to/codec.md",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="less training, less KV, fewer rounds",
    )
    options = parser.parse_args()
    nbytes, seconds, rounds = (
        (16 * MIB, 10, 3) if options.quick else (32 * MIB, 60, 9)
    )
    peers = {
        OURS: Ours(),
        SHUFFLE: Shuffle(1),
        "zstd-1": Plain(1),
        "zstd-3": Plain(3),
    }
    results = [
        measured(sample, peers, rounds) for sample in samples(nbytes, seconds)
    ]
    if not options.json:
        print("\n".join(printed(results, options.markdown)))
        return
    extra = {
        "models": {result.sample.name: result.sample.model for result in results},
        "codecs": [asdict(row) for result in results for row in result.rows],
        "entropy_bits": {
            result.sample.name: asdict(result.entropy) for result in results
        },
        "ratio_turned": {
            result.sample.name: result.turned_ratio for result in results
        },
    }
    report(
        [each for result in results for each in result.figures], True, extra=extra
    )


if __name__ == "__main__":
    main()
