"""A process that uses a disk tier, for the tests of restarts and kills: `worker.py store|read PATH
SLOTS COUNT`.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from tests.tiers.tools import ROOT, SECONDS, chunks_of, keys_of, open_disk, right


def main(deed: str, path: str, slots: str, count: str) -> None:
    tier = open_disk(Path(path), int(slots))
    assert tier.wait_ready(SECONDS)
    keys = keys_of(int(count))
    if deed == "store":
        print(
            sum(
                future.result(SECONDS).ok
                for future in tier.store(chunks_of(keys), ROOT)
            ),
            flush=True,
        )
        tier.close()
    elif deed == "read":
        print(sum(right(tier, key) for key in keys), flush=True)
        tier.close()
    else:  # until killed
        for chain in itertools.count(1):
            chunks = chunks_of(keys_of(int(count), chain))
            print(
                chain,
                sum(
                    future.result(SECONDS).ok
                    for future in tier.store(chunks, ROOT)
                ),
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
