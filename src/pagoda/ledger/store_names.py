"""One short name for each store, the same in `top`, `stats`, `ls` and the data of the page.

A name is the tier and the beginning of the store's directory name, such as `host:79aff3`. Logs and
errors have the whole path, so it is found there too, and it does not depend on which other stores
are shown. A private one is named by its process: `host:private-4711`. Only where two names would be
equal (the same layout under two roots) they are longer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

_FINGERPRINT = re.compile(r"[0-9a-f]{16}(\.\d+)?")
_PRIVATE = re.compile(r".*\.(private-\d+)-[0-9a-f]+")
_SHORT = 6  # hex digits of a layout's fingerprint


def store_names(stores: Sequence[tuple[str, Path]]) -> list[str]:
    """Return a name for each store, given as its tier and its directory; no two are equal, unless
    two directories are.
    """
    spellings = [_spellings(directory) for _, directory in stores]
    length = max(map(len, spellings), default=0)
    names = [
        f"{tier}:{each[0]}"
        for (tier, _), each in zip(stores, spellings, strict=True)
    ]
    for step in range(1, length):
        taken = Counter(names)
        for at, (tier, _) in enumerate(stores):
            if taken[names[at]] > 1:
                each = spellings[at]
                names[at] = f"{tier}:{each[min(step, len(each) - 1)]}"
    return names


def _spellings(directory: Path) -> list[str]:
    """Return how a store may be named, the shortest first, the whole path last."""
    own = directory.name
    root = directory.parent
    private = _PRIVATE.fullmatch(own)
    if private:
        return [private[1], own, f"{root.name}/{own}", str(directory)]
    short = own[:_SHORT] if _FINGERPRINT.fullmatch(own) else own
    found = [short, f"{root.name}/{short}", f"{root.name}/{own}"]
    above = root.parent
    while above.name:
        root_and_above = directory.relative_to(above.parent)
        found.append(str(root_and_above))
        above = above.parent
    return [*found, str(directory)]
