"""How often machines that compute one prompt send it: `python benchmarks/remote_writes.py [--json]
[--quick]`.

Each machine is a process with its own host tier over one Redis on loopback. All store the same new
prompt at the same moment, and the bytes that Redis receives, questions included, are compared with
the bytes of the prompt's chunks and their header pages. `--machines 1,10` says how many machines.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import redis
from cache_copies import CHUNK_TOKENS, tokens_of
from ground import NAMESPACE
from harness import MIB, Figure, report, say
from limits import pieces

from pagoda import Cache, Config, KVLayout
from pagoda.codec import HEADER_BYTES
from pagoda.tiers import HostTier
from pagoda.tiers.remote.redis import RedisClient
from pagoda.tiers.remote.remote_tier import RemoteTier
from pagoda.transfer import BlockKV

SIZES = (64 << 10, 256 << 10, MIB, 8 * MIB)
MACHINES = (1, 10)
PROMPT_BYTES = 32 * MIB
MOST_CHUNKS = 64
FEWEST_CHUNKS = 8
TARGET = 1.1
PATIENCE_SECONDS = 60.0
SPAWN = multiprocessing.get_context("spawn")


def chunks_of(chunk_bytes: int) -> int:
    """Return how many chunks the prompt has."""
    return max(FEWEST_CHUNKS, min(MOST_CHUNKS, PROMPT_BYTES // chunk_bytes))


def store_as_one_machine(
    url: str, chunk_bytes: int, shm: Path, rounds: int, gate: Barrier
) -> None:
    """Open a cache over the store; store each round's prompt with all others, and end when it is in
    the store.
    """
    layout = KVLayout.opaque(CHUNK_TOKENS, chunk_bytes, "benchmark")
    chunks = chunks_of(chunk_bytes)
    place = pieces(chunk_bytes, chunks, 1)
    whole = np.lib.stride_tricks.as_strided(
        place[0], (chunks, chunk_bytes), (chunk_bytes, 1)
    )
    config = Config(chunk_tokens=layout.chunk_tokens, worth_it=False)
    with tempfile.TemporaryDirectory(prefix="pagoda-bench-", dir=shm) as root:
        host = HostTier.open(
            layout, Path(root), 2 * chunks * layout.slot_bytes, populate=False
        )
        host.slab.populate(background=False)
        tier = RemoteTier(layout, RedisClient(url))
        with Cache(
            config, namespace=NAMESPACE, layout=layout, tiers=[host, tier]
        ) as cache:
            for number in range(rounds):
                gate.wait(PATIENCE_SECONDS)
                if (
                    cache.store(
                        tokens_of(number, chunks), BlockKV(whole, layout)
                    ).num_chunks
                    != chunks
                ):
                    raise RuntimeError("not all was stored")
                if not cache.flush(PATIENCE_SECONDS):
                    raise RuntimeError("the writes have not ended")
                gate.wait(PATIENCE_SECONDS)
                # meanwhile it is read how much was received
                gate.wait(PATIENCE_SECONDS)


def sent_figure(
    chunk_bytes: int, machines: int, rounds: int, shm: Path
) -> Figure:
    """Return the bytes that Redis received over those of the prompt's chunks and pages; the median
    over rounds.
    """
    from testbed.servers import redis_server

    gate = SPAWN.Barrier(machines + 1)
    prompt_bytes = chunks_of(chunk_bytes) * (chunk_bytes + HEADER_BYTES)
    times = list[float]()
    seconds = list[float]()
    with redis_server() as server, redis.Redis.from_url(server.url) as client:
        arguments = (server.url, chunk_bytes, shm, rounds, gate)
        children = [
            SPAWN.Process(
                target=store_as_one_machine, args=arguments, daemon=True
            )
            for _ in range(machines)
        ]
        for child in children:
            child.start()
        for _ in range(rounds):
            before = client.info("stats")["total_net_input_bytes"]
            gate.wait(PATIENCE_SECONDS)
            began = time.perf_counter()
            gate.wait(PATIENCE_SECONDS)
            seconds.append(time.perf_counter() - began)
            times.append(
                (client.info("stats")["total_net_input_bytes"] - before)
                / prompt_bytes
            )
            kept = client.dbsize()
            gate.wait(PATIENCE_SECONDS)
            if kept != chunks_of(chunk_bytes):
                raise RuntimeError(
                    f"the store has {kept} names, not one for each chunk"
                )
            client.flushall()
        for child in children:
            child.join(PATIENCE_SECONDS)
            if child.exitcode:
                raise RuntimeError("a machine has failed")
    times.sort()
    note = (
        f"{chunks_of(chunk_bytes)} chunks; {1e3 * min(seconds):.0f} ms until all machines "
        "know it is stored"
    )
    runs = {
        "times": [round(each, 4) for each in times],
        "seconds": [round(each, 4) for each in seconds],
    }
    key = f"sent_vs_computed_{chunk_bytes >> 10}kib_{machines}_machines"
    return Figure(key, times[len(times) // 2], TARGET, "times", runs, note)


def main() -> int:
    """Read the command line, measure and print. Exit code 2: nothing can be measured on this
    machine.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument(
        "--machines",
        default=",".join(map(str, MACHINES)),
        help="how many, as in 1,2,10",
    )
    parser.add_argument(
        "--shm-dir",
        type=Path,
        default=Path("/dev/shm"),
        help="directory of the machines' files",
    )
    options = parser.parse_args()
    # testbed.servers starts the servers
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from testbed.programs import lacking

    if missing := lacking("redis-server"):
        say(missing)
        return 2
    rounds = 3 if options.quick else 9
    figures = [
        sent_figure(chunk_bytes, int(machines), rounds, options.shm_dir)
        for chunk_bytes in SIZES
        for machines in options.machines.split(",")
    ]
    report(figures, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
