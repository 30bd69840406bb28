"""The sizes of the benchmark of GPU transfers: full, quick, or a trial on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.stock import SHAPES, Shape

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    """Sizes and rounds. After `budget_seconds` no further cell begins, and the JSON lists the
    skipped ones.
    """

    name: str
    shapes: tuple[Shape, ...]
    chunks: tuple[int, ...]
    rounds: int
    beside_chunks: int
    beside_rounds: int
    alone_calls: int
    programs: tuple[int, ...]
    product_size: int
    product_seconds: float
    layers: tuple[tuple[str, int], ...]  # shape, chunks
    link_bytes: int
    register_bytes: int
    budget_seconds: float

    @property
    def most_chunks(self) -> int:
        """Return the largest number of chunks of one call."""
        return max(self.chunks)

    def shape(self, key: str) -> Shape | None:
        """Return a shape of this plan, or None."""
        return next((shape for shape in self.shapes if shape.key == key), None)


FULL = Plan(
    name="full",
    shapes=(SHAPES["8b"], SHAPES["mla"], SHAPES["70b"]),
    chunks=(1, 8, 64),
    rounds=5,
    beside_chunks=8,
    beside_rounds=5,
    alone_calls=8,
    programs=(2, 4, 8, 16, 32),
    product_size=8192,
    product_seconds=0.2,
    layers=(("8b", 8), ("8b", 64), ("mla", 8), ("70b", 8)),
    link_bytes=GIB,
    register_bytes=2 * GIB,
    budget_seconds=390.0,
)

QUICK = Plan(
    name="quick",
    shapes=(SHAPES["8b"], SHAPES["mla"]),
    chunks=(1, 8),
    rounds=3,
    beside_chunks=4,
    beside_rounds=3,
    alone_calls=8,
    programs=(8,),
    product_size=8192,
    product_seconds=0.15,
    layers=(("8b", 8),),
    link_bytes=512 * MIB,
    register_bytes=512 * MIB,
    budget_seconds=60.0,
)

# Every function once or twice, on shapes that are fast in Triton's interpreter: its figures are
# meaningless.
TINY = Plan(
    name="tiny",
    shapes=(
        Shape("8b", "tiny, two planes", 3, 2, 4, block_tokens=2, chunk_tokens=4),
        Shape(
            "mla",
            "tiny, one plane",
            3,
            1,
            12,
            planes=1,
            block_tokens=2,
            chunk_tokens=4,
        ),
    ),
    chunks=(1, 2),
    rounds=1,
    beside_chunks=1,
    beside_rounds=1,
    alone_calls=1,
    programs=(2,),
    product_size=32,
    product_seconds=0.001,
    layers=(("8b", 2), ("mla", 1)),
    link_bytes=4096,
    register_bytes=MIB,
    budget_seconds=120.0,
)
