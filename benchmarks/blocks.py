"""The speed of `pagoda.blocks`: `python benchmarks/blocks.py [--json] [--quick]`.

The time of the bookkeeping, and a small engine with and without a prefix cache, a host tier and a
disk tier; the JSON quotes every round under "runs". What each figure means, and the last results:
docs/design/benchmarks.md.
"""

from __future__ import annotations

from blocks_books import admit_figure, step_figure, tree_figures
from blocks_engine import engine_figures
from ground import Part, main

PARTS: dict[str, Part] = {
    "admit": admit_figure,
    "step": step_figure,
    "tree": tree_figures,
    "engine": engine_figures,
}

if __name__ == "__main__":
    main(__doc__, PARTS, {})
