"""A process of the command maps LMDB's buffers: a further cache takes little private memory."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

# prints what each further cache takes of memory that no other process can have
PROGRAM = """
import json, re, sys
from pathlib import Path

import pagoda_tools.cli

def caches(args):
    from pagoda import Cache
    from pagoda.keys import Namespace
    from pagoda.layout import KVLayout

    opened, sizes = [], []
    for number in range(6):
        opened.append(
            Cache(
                namespace=Namespace(model="m"),
                layout=KVLayout.opaque(16, 4096, "heap"),
                chunk_tokens=16,
                host_size=64 * 4096,
                host_path=f"{sys.argv[1]}/{number}",
            )
        )
        rollup = Path("/proc/self/smaps_rollup").read_text()
        sizes.append(int(re.search(r"Anonymous: +(\\d+) kB", rollup)[1]))
    print(json.dumps([new - old for old, new in zip(sizes, sizes[1:])]))
    for cache in opened:
        cache.close()
    return 0

pagoda_tools.cli._run = caches
sys.exit(pagoda_tools.cli.main(None if sys.argv[2] == "own" else []))
"""


def further_cache(root: Path, whose: str) -> int:
    """What a further cache takes in a process, in KiB: the median."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(root), whose],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(sorted(json.loads(done.stdout))[2])


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries do as they do"
)
def test_a_further_cache_takes_little_where_the_process_is_ours(
    shm_root: Path,
) -> None:
    own = further_cache(shm_root / "own", "own")
    other = further_cache(shm_root / "other", "other's")
    assert own < other / 4, (own, other)
