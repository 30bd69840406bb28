"""Time to first token from a neighbour over 10 Gbit/s: `python benchmarks/neighbours_link.py
[--json] [--quick]`.

Two machines are network namespaces, joined by a cable that `tc ... tbf` shapes; needs root and
iproute2. On one of them the model of `pagoda demo` stores its prompt, and `pagoda serve` gives it
away. On the other one the same model answers the same prompt in turns: computed, and with KV from
the neighbour, in an empty host tier. For comparison a bare socket moves as many bytes as the KV has
over the same link.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict, cast

from harness import Figure, Runs, race, ratios, report, say
from remote_links_engine import Wire

from pagoda.config import Config
from pagoda.connectors.transformers import CachedModel, layout_of
from pagoda_tools.cli.demo.demo_child import Size, Task, _Asker

sys.path.append(str(Path(__file__).parents[1]))  # for testbed

from testbed.netns import NotPermittedError, Place, network

BITS_PER_SECOND = 10e9
LIMIT = 0.5  # of the time that computing takes
PORT = 7777
TOKEN = "a-token-of-this-benchmark"
ANSWER_SECONDS = 600.0
ROOM_BYTES = 512 << 20


@dataclass(frozen=True)
class Work:
    """What one of the two machines does."""

    host_path: str
    peer: str  # the other one's server; empty: compute the prompt and store it
    address: str  # of the bare socket
    kv_bytes: int
    rounds: int


class Said(TypedDict, total=False):
    """What a machine says at its end: of what it stored, or of the turns that it took."""

    first: list[list[int]]
    prompt_tokens: int
    tokens: int
    kv_bytes: int
    runs: Runs
    reused: list[int]


def store(work: Work) -> Said:
    """Compute the prompt and store it; return how much that is."""
    asker = _asker(work)
    ids = asker.prompts[0]
    kv = asker.empty()
    first = asker.ask(ids, kv, new_tokens=1).tokens
    with _opened(asker, work) as cached:
        cached.store(ids, kv)
        tokens = cached.cache.lookup(ids[0].tolist()).num_tokens
    layout = layout_of(asker.model, asker.task.size.chunk_tokens)
    kv_bytes = tokens // layout.chunk_tokens * layout.chunk_bytes
    return {
        "first": first,
        "prompt_tokens": ids.shape[1],
        "tokens": tokens,
        "kv_bytes": kv_bytes,
    }


def ask(work: Work) -> Said:
    """Race computing against the neighbour; return the seconds and how many tokens each turn
    reused.
    """
    asker = _asker(work)
    ids = asker.prompts[0]
    first: list[list[int]] = []
    reused: list[int] = []
    with (
        _opened(asker, work) as cached,
        closing(Wire(work.address, work.kv_bytes)) as wire,
    ):

        def computed(_: int) -> None:
            first.append(asker.ask(ids, asker.empty(), new_tokens=1).tokens)

        def peer(_: int) -> None:
            answer = asker.ask_cached(cached, ids, new_tokens=1)
            first.append(answer.tokens)
            reused.append(answer.by_tier.get("peers", 0))

        turns = {"computed": computed, "peer": peer, "wire": wire.step}
        runs: Runs = race(
            turns, work.rounds, before=lambda: cached.cache.clear() and None
        )
    return {"runs": runs, "first": first, "reused": reused[-work.rounds :]}


def _asker(work: Work) -> _Asker:
    return _Asker(Task("cold", work.host_path, "", Size()), lambda _: None)


def _opened(asker: _Asker, work: Work) -> CachedModel:
    config = Config(
        chunk_tokens=asker.task.size.chunk_tokens,
        host_path=work.host_path,
        host_size=ROOM_BYTES,
        peers=[work.peer] if work.peer else [],
        deadline_seconds=60.0,
        worth_it=False,
    )
    return CachedModel(asker.model, config)


def measured(rounds: int, shm: Path) -> list[Figure]:
    """Return the figure. NotPermittedError where namespaces are not permitted."""
    with (
        tempfile.TemporaryDirectory(prefix="pagoda-bench-", dir=shm) as root,
        network() as net,
    ):
        near = net.place("asks")
        far = net.place("computes")
        cable = net.cable(near, far)
        cable.shape(BITS_PER_SECOND)
        say("the neighbour computes and stores the prompt ...")
        peer = f"http://:{TOKEN}@{cable.far}:{PORT}"
        work = Work(f"{root}/far", "", cable.far, 0, rounds)
        stored = _answer(far, work)
        serve = "import sys; from pagoda_tools.cli import main; sys.exit(main())"
        command = [
            sys.executable,
            "-c",
            serve,
            "serve",
            "--json",
            work.host_path,
            "--listen",
            f"{cable.far}:{PORT}",
        ]
        environment = {**os.environ, "PAGODA_SERVE_TOKEN": TOKEN}
        server = far.start(*command, env=environment, stdout=subprocess.PIPE)
        bare = far.start(
            sys.executable,
            str(Path(__file__).with_name("remote_links_engine.py")),
            "serve",
            cable.far,
            stdout=subprocess.PIPE,
        )
        if not (server.stdout.readline() and bare.stdout.readline()):
            raise RuntimeError("a server did not start")
        say("in turns: computed, and from the neighbour ...")
        work = Work(f"{root}/near", peer, cable.far, stored["kv_bytes"], rounds)
        found = _answer(near, work)
    if any(tokens != stored["first"] for tokens in found["first"]):
        raise RuntimeError(
            "the first token from the neighbour's KV differs from the computed one"
        )
    runs = found["runs"]
    paired = ratios(runs["peer"], runs["computed"])
    seconds = {name: statistics.median(each) for name, each in runs.items()}
    hits = sum(tokens == stored["tokens"] for tokens in found["reused"])
    mbytes = stored["kv_bytes"] / 1e6
    gbits = stored["kv_bytes"] * 8 / seconds["wire"] / 1e9
    note = (
        f"{seconds['peer']:.3f} against {seconds['computed']:.3f} s; {hits} of {rounds} turns "
        "reused "
        f"{stored['tokens']:,} of {stored['prompt_tokens']:,} tokens: {mbytes:.0f} MB, for which "
        "a bare socket took "
        f"{seconds['wire']:.3f} s ({gbits:.1f} Gbit/s)"
    )
    times = [round(each, 4) for each in paired]
    quoted = {
        "times": times,
        "seconds": runs,
        "stored": stored,
        "reused": found["reused"],
    }
    return [
        Figure(
            "peer_ttft_vs_cold_10gbit",
            statistics.median(paired),
            LIMIT,
            "times",
            quoted,
            note,
        )
    ]


def _answer(place: Place, work: Work) -> Said:
    """Run one machine's part to its end."""
    process = place.start(
        sys.executable,
        __file__,
        "--work",
        json.dumps(asdict(work)),
        stdout=subprocess.PIPE,
        env={"OMP_WAIT_POLICY": "passive", **os.environ},
    )
    late = threading.Timer(ANSWER_SECONDS, process.kill)
    late.start()
    try:
        said, _ = process.communicate()
    finally:
        late.cancel()
    if process.returncode:
        raise RuntimeError(
            f"a machine's part ended with {process.returncode}, or after {ANSWER_SECONDS:.0f} s"
        )
    return cast("Said", json.loads(said.splitlines()[-1]))


def main() -> int:
    """Measure and print. Exit code 2: not permitted on this machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--shm-dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work = Work(**json.loads(options.work))
        print(json.dumps(ask(work) if work.peer else store(work)))
        return 0
    try:
        report(measured(3 if options.quick else 7, options.shm_dir), options.json)
    except NotPermittedError as trouble:
        say(f"neighbours_link: {trouble}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
