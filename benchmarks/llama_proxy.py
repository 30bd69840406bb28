"""What `pagoda llama-server` gives: `python benchmarks/llama_proxy.py [--json] [--quick]`.

Agents that share a long system text use two slots of a real llama.cpp server with one thread, which
is started again in the middle: the bare server with its own RAM cache, the same behind a proxy that
loads nothing, and behind the proxy. The same requests, in turns; then requests that a slot has
already. The text of every answer is compared.

    first_*   time to the first token of all first requests after the restart, two at a time: the
              bare server's against the proxy's, the median and the worst of a round
    rush_*    the same when all agents ask at the same moment, as they do after an outage
    gap_p99   time between two tokens of all streamed answers
    saved     bytes that the server wrote into state files, in bytes of the KV that was computed
    disk      bytes of chunks on the disk, against the KV of the shared text once and each
              conversation's own, and against a snapshot of each conversation
    warm_*    one more request of a conversation whose slot has it
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from harness import Figure, report, say

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from testbed.llama_client import LlamaClient, Message, Reply
from testbed.llama_proxy import LlamaProxy, owning_proxy
from testbed.llama_servers import LlamaOptions, LlamaServer, llama_server
from testbed.tiny_gguf import Size, write_model

SLOTS = 2
SYSTEM_TOKENS = 6000
OWN_TOKENS = 500  # of each conversation at the restart, about
FIRST_LETTERS = 230
NEXT_LETTERS = 40
ANSWER_TOKENS = 32
CONVERSATIONS = 8
# reads 6,000 tokens in 2 to 3 s of one thread
SIZE = Size(hidden=256, layers=2, inner=768)
TOKEN_BYTES = SIZE.layers * 2 * 64 * 2  # K and V of one head, in 16 bits
OPTIONS: LlamaOptions = {
    "slots": SLOTS,
    "context": SLOTS * 10240,
    "flash": False,
}
RAM_MIB = 2048  # of the bare server's own cache; behind the proxy it has none, as by default
IDLE_SECONDS = 4.0  # until all slots are saved
NEVER = "1000000000"  # tokens: no hit is as long


class Place(Protocol):
    """A server that agents ask."""

    client: LlamaClient

    @property
    def server_pid(self) -> int: ...

    def restart(self) -> None: ...


class BarePlace:
    """Only the server."""

    def __init__(self, server: LlamaServer) -> None:
        self._server = server.server
        self.client = LlamaClient(server.url)

    @property
    def server_pid(self) -> int:
        """Return the process id of the server."""
        return self._server.pid

    def restart(self) -> None:
        """End the server and start it."""
        self._server.restart()


class ProxyPlace:
    """A proxy that started its server."""

    def __init__(self, proxy: LlamaProxy) -> None:
        self.proxy = proxy
        self.client = proxy.client

    @property
    def server_pid(self) -> int:
        """Return the process id of the server."""
        return self.proxy.children[0]

    def restart(self) -> None:
        """End the proxy and its server as a user does, and start both."""
        self.proxy.stop()
        self.proxy.start()


class Agent:
    """One conversation."""

    def __init__(self, rng: random.Random, system: str) -> None:
        self._rng = rng
        self.messages: list[Message] = [
            {"role": "system", "content": system},
            {"role": "user", "content": _letters(rng, FIRST_LETTERS)},
        ]

    def ask(self, client: LlamaClient) -> Reply:
        """Ask for the next answer, and prepare what the user says to it."""
        reply = client.chat(self.messages, ANSWER_TOKENS, stream=True)
        if not reply.is_right:
            raise RuntimeError(f"{reply.status}: {reply.error}")
        self.messages += [
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": _letters(self._rng, NEXT_LETTERS)},
        ]
        return reply


@dataclass
class Round:
    """What one round of one arrangement gave."""

    first_seconds: list[float] = field(default_factory=list)
    rush_seconds: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    written_bytes: int = 0  # by the server, into files
    computed_tokens: int = 0
    tokens: list[int] = field(default_factory=list)  # of each conversation
    disk_bytes: int = 0


class Warm(NamedTuple):
    """Requests whose slot has all but a part of the prompt."""

    first_seconds: list[float]
    proxy_seconds: list[
        float
    ]  # of the proxy's processor time; empty: there is none


# ---- arrangements


@contextlib.contextmanager
def bare(model: Path, root: Path) -> Iterator[BarePlace]:
    """Start the server with its own RAM cache."""
    options: LlamaOptions = {**OPTIONS, "ram_mib": RAM_MIB}
    with llama_server(model, "B", **options) as server:
        yield BarePlace(server)


@contextlib.contextmanager
def proxied(model: Path, root: Path, **more: str) -> Iterator[ProxyPlace]:
    """Start it behind the proxy; the tiers are below `root`. `more`: other options of the proxy."""
    pagoda = {
        "host-size": "256MiB",
        "host-path": str(root / "host"),
        "disk-size": "256MiB",
        "disk-path": str(root / "disk"),
        **more,
    }
    with owning_proxy(model, pagoda, "B", **OPTIONS) as proxy:
        yield ProxyPlace(proxy)


@contextlib.contextmanager
def passing(model: Path, root: Path) -> Iterator[ProxyPlace]:
    """Start a proxy that passes requests on and loads nothing."""
    with proxied(model, root, **{"min-hit-tokens": NEVER}) as place:
        yield place


Arrangement = Callable[
    [Path, Path], contextlib.AbstractContextManager[BarePlace | ProxyPlace]
]


def arrangements(chunk_tokens: str) -> dict[str, Arrangement]:
    """Return all of them."""
    return {
        "bare": bare,
        "passing": passing,
        "proxy": partial(proxied, **{"chunk-tokens": chunk_tokens}),
    }


# ---- traffic


def agents_round(place: Place, seed: int, disk: Path) -> Round:
    """Let all agents ask twice, start everything again, and let all ask once more; and again, all
    at the same moment.
    """
    rng = random.Random(seed)
    system = _letters(rng, SYSTEM_TOKENS)
    agents = [
        Agent(random.Random(rng.random()), system) for _ in range(CONVERSATIONS)
    ]
    found = Round()
    for _ in range(2):
        replies = _ask_all(agents, place.client, SLOTS)
        _note(found, replies)
    found.tokens = [
        reply.hits + reply.computed + ANSWER_TOKENS for reply in replies
    ]
    time.sleep(IDLE_SECONDS)
    if disk.exists():
        found.disk_bytes = _bytes_of_chunks(disk)
    for clients in (SLOTS, CONVERSATIONS):
        found.written_bytes += _written_bytes(place.server_pid)
        place.restart()
        found.written_bytes -= _written_bytes(place.server_pid)
        replies = _ask_all(agents, place.client, clients)
        seconds = [reply.first_seconds for reply in replies]
        if clients == SLOTS:
            found.first_seconds = seconds
        else:
            found.rush_seconds = seconds
        _note(found, replies)
        time.sleep(IDLE_SECONDS)
    found.written_bytes += _written_bytes(place.server_pid)
    return found


def _ask_all(
    agents: Sequence[Agent], client: LlamaClient, clients: int
) -> list[Reply]:
    """Ask for all agents, so many at a time."""
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda agent: agent.ask(client), agents))


def _note(found: Round, replies: Sequence[Reply]) -> None:
    for reply in replies:
        found.gaps += [
            later - earlier
            for earlier, later in zip(
                reply.arrivals, reply.arrivals[1:], strict=False
            )
        ]
        found.texts.append(reply.text)
        found.computed_tokens += reply.computed + ANSWER_TOKENS


def warm_rounds(
    places: Sequence[BarePlace | ProxyPlace], rounds: int, own_tokens: int
) -> list[Warm]:
    """Ask each place in turns for the same conversation with other last words, whose beginning a
    slot has.
    """
    rng = random.Random(own_tokens)
    system = _letters(rng, SYSTEM_TOKENS)
    found = [Warm([], []) for _ in places]
    for turn in range(rounds + 1):
        own = _letters(rng, own_tokens)
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": own},
        ]
        for place, warm in zip(places, found, strict=True):
            time.sleep(0.5)
            before = _processor_seconds(place)
            reply = place.client.chat(messages, 1, stream=True)
            if not reply.is_right:
                raise RuntimeError(f"{reply.status}: {reply.error}")
            if turn:
                warm.first_seconds.append(reply.first_seconds)
                warm.proxy_seconds.append(_processor_seconds(place) - before)
    return found


def conversion_seconds(place: BarePlace, rounds: int) -> float:
    """Return the server's own time for the template and the tokens of such a prompt."""
    rng = random.Random(1)
    spent = []
    for _ in range(rounds):
        messages = [{"role": "system", "content": _letters(rng, SYSTEM_TOKENS)}]
        began = time.perf_counter()
        place.client.tokens_of("/v1/chat/completions", {"messages": messages})
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


# ---- what is read of processes and stores


def _written_bytes(pid: int) -> int:
    """Return what a process has written into files, its log too."""
    with open(f"/proc/{pid}/io", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("wchar:"):
                return int(line.split()[1])
    raise RuntimeError("/proc does not say what a process has written")


def _processor_seconds(place: BarePlace | ProxyPlace) -> float:
    """Return the processor time that the proxy has used."""
    if isinstance(place, BarePlace):
        return 0.0
    with open(f"/proc/{place.proxy.pid}/schedstat", encoding="ascii") as words:
        main = int(words.read().split()[0])
    total = 0
    for task in Path(f"/proc/{place.proxy.pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return max(main, total) / 1e9


def _bytes_of_chunks(disk: Path) -> int:
    """Return the bytes that all chunks of a disk tier take."""
    command = [sys.executable, "-m", "pagoda", "stats", "--json", str(disk)]
    said = subprocess.run(command, capture_output=True, check=True).stdout
    return sum(
        store["slot_bytes"] * store["gauges"]["ready"]
        for store in json.loads(said)["stores"]
        if store["tier"] == "disk"
    )


def _letters(rng: random.Random, count: int) -> str:
    return "".join(chr(rng.randint(ord("a"), ord("z"))) for _ in range(count))


# ---- figures


def traffic_figures(
    runs: dict[str, list[Round]], chunk_tokens: int
) -> tuple[list[Figure], list[Figure]]:
    """Return the figures with a target, and those without."""
    found: list[Figure] = []
    beside: list[Figure] = []
    for of in ("first", "rush"):
        for name, pick in (("median", statistics.median), ("worst", max)):
            seconds = {
                arrangement: [
                    pick(getattr(each, f"{of}_seconds")) for each in rounds
                ]
                for arrangement, rounds in runs.items()
            }
            found.append(_first_figure(f"{of}_{name}", seconds, "proxy"))
            beside.append(_first_figure(f"{of}_{name}", seconds, "passing"))
    gaps = {name: [_p99(each.gaps) for each in runs[name]] for name in runs}
    times = [
        ours / theirs
        for theirs, ours in zip(gaps["bare"], gaps["proxy"], strict=True)
    ]
    found.append(
        Figure(
            "gap_p99",
            statistics.median(times),
            1.10,
            "times",
            {"times": times, "bare": gaps["bare"], "proxy": gaps["proxy"]},
            f"{_ms(gaps['proxy'])} after {_ms(gaps['bare'])}",
        )
    )
    return [*found, *_byte_figures(runs, chunk_tokens)], beside


def _first_figure(
    key: str, seconds: dict[str, list[float]], arrangement: str
) -> Figure:
    """Return how many times as long the bare server takes."""
    ratios = [
        theirs / ours
        for theirs, ours in zip(
            seconds["bare"], seconds[arrangement], strict=True
        )
    ]
    is_control = arrangement == "passing"
    return Figure(
        f"{key}_passing" if is_control else key,
        statistics.median(ratios),
        None if is_control else 5.0,
        "ratio",
        {
            "ratio": ratios,
            "bare_seconds": seconds["bare"],
            "seconds": seconds[arrangement],
        },
        f"{_ms(seconds[arrangement])}, the bare server {_ms(seconds['bare'])}",
    )


def _byte_figures(
    runs: dict[str, list[Round]], chunk_tokens: int
) -> list[Figure]:
    saved = []
    on_disk = []
    of_snapshots = []
    for theirs, ours in zip(runs["bare"], runs["proxy"], strict=True):
        # the log is written by both
        written = ours.written_bytes - theirs.written_bytes
        saved.append(written / (ours.computed_tokens * TOKEN_BYTES))
        own = sum(ours.tokens) - len(ours.tokens) * SYSTEM_TOKENS
        chunks = len(ours.tokens) * chunk_tokens
        wanted = (SYSTEM_TOKENS + own + chunks) * TOKEN_BYTES
        on_disk.append(ours.disk_bytes / wanted)
        of_snapshots.append(ours.disk_bytes / (sum(ours.tokens) * TOKEN_BYTES))
    return [
        Figure(
            key,
            statistics.median(times),
            target,
            "times",
            {"times": times},
            note,
        )
        for key, target, times, note in (
            ("saved", 3.0, saved, "bytes saved, in bytes of new KV"),
            ("disk", 1.05, on_disk, "shared once, own, and a chunk each"),
            ("disk_snapshots", 0.22, of_snapshots, "a snapshot each"),
        )
    ]


def warm_figures(
    places: Sequence[BarePlace | ProxyPlace], rounds: int
) -> list[Figure]:
    """Return what the proxy adds where the slot has the prompt. `places`: bare, then proxied."""
    [first] = [each for each in places if isinstance(each, BarePlace)]
    theirs, ours = warm_rounds(places, rounds, 16)
    conversion = conversion_seconds(first, rounds)
    added = [
        mine - other
        for other, mine in zip(
            theirs.first_seconds, ours.first_seconds, strict=True
        )
    ]
    long_theirs, long_ours = warm_rounds(places, rounds, 2000)
    times = [
        mine / other
        for other, mine in zip(
            long_theirs.first_seconds, long_ours.first_seconds, strict=True
        )
    ]
    return [
        Figure(
            "warm_processor",
            statistics.median(ours.proxy_seconds),
            0.005,
            "seconds",
            {"seconds": ours.proxy_seconds},
            "processor time of the proxy for one request",
        ),
        Figure(
            "warm_added",
            statistics.median(added),
            conversion + 0.005,
            "seconds",
            {
                "seconds": added,
                "bare_seconds": theirs.first_seconds,
                "conversion_seconds": [conversion],
            },
            f"to {_ms(theirs.first_seconds)}; template and tokens alone {conversion * 1e3:.1f} ms",
        ),
        Figure(
            "warm_long",
            statistics.median(times),
            1.03,
            "times",
            {
                "times": times,
                "bare_seconds": long_theirs.first_seconds,
                "seconds": long_ours.first_seconds,
            },
            f"2,000 new tokens: {_ms(long_theirs.first_seconds)} bare",
        ),
    ]


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def _ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ms"


def measure(
    starts: dict[str, Arrangement], model: Path, root: Path, rounds: int
) -> dict[str, list[Round]]:
    """Give each arrangement a turn in every round; each begins with nothing stored."""
    runs: dict[str, list[Round]] = {name: [] for name in starts}
    for turn in range(rounds):
        for name, start in starts.items():
            with tempfile.TemporaryDirectory(dir=root) as made:
                place_root = Path(made)
                disk = place_root / "disk"
                with start(model, place_root) as place:
                    found = agents_round(place, turn, disk)
            runs[name].append(found)
            say(
                f"round {turn + 1} of {rounds}, {name}: first tokens after "
                f"{_ms(found.first_seconds)}, the worst {_ms([max(found.first_seconds)])}; all "
                f"at once {_ms(found.rush_seconds)}, {_ms([max(found.rush_seconds)])}"
            )
    return runs


def main() -> int:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object"
    )
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        default=256,
        help="of the proxy; default: 256",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round, fewer repetitions"
    )
    parser.add_argument(
        "--only",
        choices=("traffic", "warm"),
        default="",
        help="one of the two parts",
    )
    options = parser.parse_args()
    rounds = 1 if options.quick else 3
    figures: list[Figure] = []
    beside: list[Figure] = []
    extra: dict[str, object] = {}
    with tempfile.TemporaryDirectory(
        prefix="pagoda-bench-", dir="/dev/shm"
    ) as made:
        root = Path(made)
        model = write_model(root, size=SIZE)
        if options.only != "warm":
            starts = arrangements(str(options.chunk_tokens))
            runs = measure(starts, model, root, rounds)
            counted, others = traffic_figures(runs, options.chunk_tokens)
            figures += counted
            beside += others
            extra["other_texts"] = sum(
                text != right
                for name in ("passing", "proxy")
                for ours, theirs in zip(runs[name], runs["bare"], strict=True)
                for text, right in zip(ours.texts, theirs.texts, strict=True)
            )
        if options.only != "traffic":
            with (
                bare(model, root) as first,
                proxied(model, root) as second,
            ):
                repetitions = 5 if options.quick else 20
                figures += warm_figures([first, second], repetitions)
    report(figures, options.json, beside, extra)
    return int(bool(extra.get("other_texts")))


if __name__ == "__main__":
    sys.exit(main())
