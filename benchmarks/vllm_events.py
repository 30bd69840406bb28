"""What an engine's steps wait for Python's lock while routers are told of all that a tier holds.

A store of `--chunks` chunks with notes is made. Then the main thread takes steps, as vLLM's
scheduler does: it waits for the device, then runs Python with calls in between that give the lock
up. Meanwhile the thread of KV events tells of all chunks through vLLM's own publisher to a
subscriber, another process. It does so in turns: between them are turns in which nothing is told,
and turns in which another process uses the processor as much as telling does.

A step waits for the lock where its thread gives the processor up of itself (voluntary context
switches) although it has nothing else to wait for: so other work on the machine, which takes the
processor from it, is not counted. That which takes the processor from the thread that has the lock
is: so `held` is what the other threads of this process used of the processor meanwhile, about what
the wait would be on a machine with nothing else to do. Printed are percentiles of each kind of
turn, how many steps were held for more than 1 ms, and chunks told a second of the turns in which
they are. Needs vLLM (make setup-vllm) and about 9 KiB of shared memory a chunk:

    .venv-vllm/bin/python -P benchmarks/vllm_events.py --chunks 100000 [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import resource
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import zmq
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import EventPublisherFactory
from vllm.envs import enable_envs_cache

from pagoda import Cache, Config, KVLayout, Namespace
from pagoda.cache.writeback import ChunkRef
from pagoda.connectors.vllm.event_form import VLLMEventForm
from pagoda.connectors.vllm.event_publisher import EventOutlet
from pagoda.kv_events.notes import BlockFacts, ChunkNote
from pagoda.kv_events.stored_events import StoredEvents
from pagoda.ledger import Reserved
from pagoda.ledger.chunk_notes import ChunkNotes

# of a chunk; chunks of a prompt
TOKENS = 256
BLOCKS = 16
PROMPT = 64
# of a step: about 7 ms
DEVICE_SECONDS = 0.002
PARTS = 20
PYTHON = 5_000
UNLOCKED = bytes(32 << 10)
TURNS = {"told": 4.0, "nothing": 0.7, "load": 0.7}  # seconds
LONGEST_SECONDS = 3600
LOAD_SECONDS = 0.0005  # of the other process's stretches


def fill(cache: Cache, chunks: int) -> bytes:
    """Store that many chunks with notes, as an engine that ran before would have left them; return
    their namespace.
    """
    slots = cache.slots
    random = np.random.default_rng(0)
    assert slots is not None
    root = slots.namespace()
    notes = ChunkNotes(slots.ledgers["host"].directory)
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
            ChunkRef(
                one.key, n, keys[n - 1] if n else None, one.slot, one.generation
            )
            for n, one in enumerate(done)
        ]
        slots.commit({root: refs})
    return root


class Step(NamedTuple):
    """Seconds of one step."""

    wait: float  # for the lock
    # what other threads of this process used of the processor meanwhile
    held: float
    whole: float


def step() -> Step:
    """Take a step: wait for the device, then run Python and calls that give the lock up."""
    before = _switches()
    others = _others()
    began = time.perf_counter()
    time.sleep(DEVICE_SECONDS)
    now = time.perf_counter()
    # one for the device
    wait = now - began - DEVICE_SECONDS if _switches() > before + 1 else 0.0
    held = min(wait, _others() - others)
    switches = _switches()
    ran = time.thread_time()
    others = _others()
    now = time.perf_counter()
    for _ in range(PARTS):
        before = switches, ran, others, now
        total = 0
        for n in range(PYTHON):
            total += n
        zlib.crc32(UNLOCKED)
        switches = _switches()
        ran = time.thread_time()
        others = _others()
        now = time.perf_counter()
        if switches > before[0]:
            waited = now - before[3] - (ran - before[1])
            wait = wait + waited
            held = held + min(waited, others - before[2])
    return Step(wait, held, now - began)


def _switches() -> int:
    """Return how often this thread gave the processor up to wait for something: here, for the lock
    or the device.
    """
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _others() -> float:
    """Return how many seconds of the processor the other threads of this process have used."""
    return time.process_time() - time.thread_time()


def steps(until: float) -> list[Step]:
    """Take steps until a time."""
    taken = []
    while time.perf_counter() < until:
        taken.append(step())
    return taken


class Turns(EventOutlet):
    """An outlet that holds the thread that tells, without the lock, while it is not its turn."""

    def __init__(self, config: KVEventsConfig) -> None:
        super().__init__(config)
        self.told = threading.Event()

    def send(self, events: Sequence[object]) -> None:
        """Publish events once it is their turn."""
        self.told.wait()
        super().send(events)


def listen(address: str) -> None:
    """Hear all that is told: the subscriber's process."""
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.connect(address)
        sub.subscribe(b"")
        while True:
            sub.recv_multipart()


def load(share: Synchronized[float]) -> None:
    """Use that share of a processor: the process beside which steps are compared."""
    while True:
        if not (now := share.value):
            time.sleep(0.01)
            continue
        until = time.thread_time() + LOAD_SECONDS
        while time.thread_time() < until:
            pass
        time.sleep(LOAD_SECONDS * (1 / now - 1))


def told(stored: StoredEvents) -> int:
    """Return of how many chunks routers were told."""
    return int(np.count_nonzero(stored._tiers[0]._held))


@contextmanager
def processes(address: str, share: Synchronized[float]) -> Iterator[None]:
    """Run the subscriber and the load."""
    spawn = multiprocessing.get_context("spawn")
    started = [
        spawn.Process(target=target, args=(argument,), daemon=True)
        for target, argument in ((listen, address), (load, share))
    ]
    for process in started:
        process.start()
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.join()


def measure(cache: Cache, root: bytes, chunks: int) -> dict[str, float]:
    """Take steps while all chunks are told, in turns with steps beside nothing and beside as much
    load.
    """
    assert cache.slots is not None
    config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint="tcp://127.0.0.1:*"
    )
    outlet = Turns(config)
    publisher = EventPublisherFactory.create(config)
    address = publisher._pub.getsockopt_string(zmq.LAST_ENDPOINT)
    groups = {0: BlockFacts(TOKENS, TOKENS // BLOCKS, "full_attention")}
    form = VLLMEventForm(groups, TOKENS // BLOCKS)
    stored = StoredEvents(cache.slots.ledgers, lambda: root, groups, form, outlet)
    taken: dict[str, list[Step]] = {turn: [] for turn in TURNS}
    share = multiprocessing.get_context("spawn").Value("d", 0.0)
    # seconds of the processor by other threads than the steps'
    used = dict.fromkeys(TURNS, 0.0)
    seconds = dict.fromkeys(TURNS, 0.0)
    enable_envs_cache()  # as vLLM's engine does before its first step
    gc.collect()
    gc.freeze()
    with processes(address, share):
        outlet.told.set()
        stored.start()
        began = time.perf_counter()
        while (
            told(stored) < chunks
            and time.perf_counter() < began + LONGEST_SECONDS
        ):
            for turn, length in TURNS.items():
                (outlet.told.set if turn == "told" else outlet.told.clear)()
                share.value = (
                    used["told"] / seconds["told"] if turn == "load" else 0.0
                )
                at = time.perf_counter()
                others = _others()
                taken[turn] += steps(at + length)
                seconds[turn] += time.perf_counter() - at
                used[turn] += _others() - others
                # of a million chunks there are so many steps that collecting them would take 10 ms
                gc.freeze()
        outlet.told.set()
        heard = told(stored)
        stored.close()
        publisher.shutdown()
    figures = {
        "chunks_told": float(heard),
        "chunks_a_second": heard / seconds["told"],
        "processor_share": used["told"] / seconds["told"],
    }
    for turn, each in taken.items():
        figures[f"steps_{turn}"] = len(each)
        for what in Step._fields:
            times = sorted(getattr(step, what) for step in each)
            for name, part in (
                ("p50", 0.5),
                ("p99", 0.99),
                ("p999", 0.999),
                ("max", 1.0),
            ):
                figures[f"{what}_ms_{turn}_{name}"] = (
                    times[int(part * (len(times) - 1))] * 1e3
                )
        figures[f"held_above_1_ms_{turn}"] = sum(
            step.held > 0.001 for step in each
        )
    return figures


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
        layout = KVLayout.dense(
            layers=1, kv_heads=1, head_dim=1, dtype="uint8", chunk_tokens=TOKENS
        )
        config = Config(host_path=str(root), host_size=layout.slot_bytes * chunks)
        with Cache(
            config=config, layout=layout, namespace=Namespace(model="bench")
        ) as cache:
            figures = measure(cache, fill(cache, chunks), chunks)
        if options.json:
            print(json.dumps(figures))
        else:
            for name, value in figures.items():
                print(f"{name:26}{value:14,.3f}")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
