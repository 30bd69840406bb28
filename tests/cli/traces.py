"""Traces small enough to count by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pagoda_tools.replay import Request, format_request

# six different chunks, and two that are requested twice again
PROMPTS = [(1, 2), (3, 4), (1, 2), (5, 6), (1, 2)]


def written(
    path: Path, prompts: Sequence[tuple[int, ...]], chunk_tokens: int = 512
) -> Path:
    """Write a trace with one request a second."""
    requests = [
        Request(1e3 * n, 512 * len(ids), 1, ids, chunk_tokens)
        for n, ids in enumerate(prompts)
    ]
    path.write_text(
        "".join(format_request(request) + "\n" for request in requests)
    )
    return path
