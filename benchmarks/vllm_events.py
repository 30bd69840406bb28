"""What it costs an engine's steps that routers are told of all that a tier holds.

A store of `--chunks` chunks with notes is made; then the main thread takes steps, some milliseconds of Python and a
wait, as vLLM's scheduler does, while the thread of KV events tells of all chunks through vLLM's own publisher to a
subscriber; before and after it as many without. Printed are the times of the steps both ways, and chunks a second.
Needs vLLM (make setup-vllm) and about 9 KiB of shared memory a chunk:

    .venv-vllm/bin/python -P benchmarks/vllm_events.py --chunks 100000 [--json]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import zmq
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import EventPublisherFactory

from pagoda import Cache, Config, KVLayout, Namespace
from pagoda.cache.writeback import ChunkRef
from pagoda.connectors.vllm.event_notes import VLLMEventForm
from pagoda.connectors.vllm.event_publisher import EventOutlet
from pagoda.kv_events.notes import BlockFacts, ChunkNote
from pagoda.kv_events.stored_events import StoredEvents
from pagoda.ledger import Reserved
from pagoda.ledger.chunk_notes import ChunkNotes

TOKENS, BLOCKS, PROMPT = 256, 16, 64  # of a chunk; chunks of a prompt
STEP_SECONDS, PYTHON = 0.01, 20_000


def fill(cache: Cache, chunks: int) -> bytes:
    """Store that many chunks with notes, as an engine that ran before would have left them; return their namespace."""
    slots, random = cache.slots, np.random.default_rng(0)
    assert slots is not None
    root, notes = slots.namespace(), ChunkNotes(slots.ledgers["host"].directory)
    for _ in range(0, chunks, PROMPT):
        keys = [random.bytes(32) for _ in range(PROMPT)]
        hashes = [random.bytes(32 * BLOCKS) for _ in range(PROMPT)]
        outcomes = slots.reserve(keys, namespace=root, start=0, parent=None)
        done = [item for item in outcomes if isinstance(item, Reserved)]
        written = []
        for n, item in enumerate(done):
            parent = hashes[n - 1][-32:] if n else b""
            tokens = random.integers(0, 100_000, TOKENS, np.int32).tobytes()
            note = ChunkNote(root, parent, hashes[n], tokens)
            written.append((item.slot, item.key, msgspec.msgpack.encode(note)))
        notes.write(written)
        refs = [
            ChunkRef(one.key, n, keys[n - 1] if n else None, one.slot, one.generation)
            for n, one in enumerate(done)
        ]
        slots.commit({root: refs})
    return root


def steps(until: Callable[[], bool]) -> list[float]:
    """Take steps until a condition holds; return the seconds of each."""
    taken = []
    while not until():
        began = time.perf_counter()
        total = 0
        for n in range(PYTHON):
            total += n
        time.sleep(STEP_SECONDS / 2)
        taken.append(time.perf_counter() - began)
    return taken


def after_400() -> Callable[[], bool]:
    """Return a condition that holds from the 401st question on."""
    left = iter(range(400))
    return lambda: next(left, None) is None


def measure(cache: Cache, root: bytes, chunks: int) -> dict[str, float]:
    """Take steps while all chunks are told, and as many without."""
    assert cache.slots is not None
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint="tcp://127.0.0.1:*")
    outlet = EventOutlet(config)
    publisher = EventPublisherFactory.create(config)
    address = publisher._pub.getsockopt_string(zmq.LAST_ENDPOINT)
    heard, ended = [0], threading.Event()

    def listen() -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as sub:
            sub.connect(address)
            sub.subscribe(b"")
            while not ended.is_set():
                if sub.poll(100):
                    heard[0] += len(sub.recv_multipart()[2])

    listener = threading.Thread(target=listen)
    listener.start()
    groups = {0: BlockFacts(TOKENS, TOKENS // BLOCKS, "full_attention")}
    form = VLLMEventForm(groups, TOKENS // BLOCKS)
    stored = StoredEvents(cache.slots.ledgers, root, groups, form, outlet)
    tier = stored._tiers[0]
    alone = steps(after_400())
    began = time.perf_counter()
    stored.start()
    beside = steps(lambda: len(tier._names) >= chunks or time.perf_counter() - began > 1800)
    seconds = time.perf_counter() - began
    after = steps(after_400())
    told = len(tier._names)
    stored.close()
    publisher.shutdown()
    ended.set()
    listener.join()
    alone += after

    def share(times: list[float], part: float) -> float:
        return sorted(times)[int(part * (len(times) - 1))] * 1e3

    return {
        "chunks_told": told,
        "chunks_a_second": told / seconds,
        "heard_mb": heard[0] / 1e6,
        "steps_beside": len(beside),
        "step_ms_alone": statistics.median(alone) * 1e3,
        "step_ms_beside": statistics.median(beside) * 1e3,
        "step_ms_alone_p99": share(alone, 0.99),
        "step_ms_beside_p99": share(beside, 0.99),
        "step_ms_alone_p999": share(alone, 0.999),
        "step_ms_beside_p999": share(beside, 0.999),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chunks = options.chunks // PROMPT * PROMPT
    root = Path(tempfile.mkdtemp(prefix="pagoda-bench-", dir="/dev/shm"))
    try:
        layout = KVLayout.dense(layers=1, kv_heads=1, head_dim=1, dtype="uint8", chunk_tokens=TOKENS)
        config = Config(host_path=str(root), host_size=layout.slot_bytes * chunks)
        with Cache(config=config, layout=layout, namespace=Namespace(model="bench")) as cache:
            figures = measure(cache, fill(cache, chunks), chunks)
        if options.json:
            print(json.dumps(figures))
        else:
            for name, value in figures.items():
                print(f"{name:24}{value:14,.2f}")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
