"""What callers say of their requests decides which chunks go first, and nothing else does."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.clock import Deadline
from pagoda.base.errors import ConfigError
from pagoda.cache import Cache, RequestHints
from pagoda.cache.caller_hints import HintedRequest
from pagoda.cache.recording import require_trace
from pagoda.ledger import Ledger, Reserved
from pagoda.ledger.retained_chunks import RETAINED_SHARE
from pagoda.ledger.session_numbers import MOST_SESSIONS, SessionNumbers
from pagoda.policy.hindsight import _SharedValues
from pagoda.testing import FakeClock
from pagoda_tools.replay import TierSpec, read_trace, simulate
from tests.cache.kit import CHUNK, LAYOUT, NAMESPACE, kv_of, prompt

SLOTS = 64
LENGTH = 8  # chunks of each prompt
PROMPTS = SLOTS // LENGTH


class Told:
    """A small cache, whose requests may say something."""

    def __init__(self, root: Path, **options: object) -> None:
        self.clock = FakeClock()
        self.cache = Cache(
            namespace=NAMESPACE,
            layout=LAYOUT,
            clock=self.clock,
            host_path=str(root),
            host_size=SLOTS * LAYOUT.slot_bytes,
            deadline_seconds=60.0,  # a busy machine stores all, too
            **options,  # type: ignore[arg-type]
        )
        ((_, self.ledger),) = self.cache._tiers.ledgers()

    def ask(self, seed: int, salt: str = "", **told: object) -> int:
        """Retrieve a prompt and store it; return how many chunks hit."""
        self.clock.advance(2)
        hints = RequestHints(**told) if told else None  # type: ignore[arg-type]
        tokens = prompt(LENGTH, seed)
        kv = kv_of(tokens).transfer
        hit = self.cache.retrieve(tokens, kv, hints=hints, salt=salt)
        self.cache.store(tokens, kv, hints=hints, salt=salt)
        return hit.num_tokens // CHUNK

    def has(self, seed: int, salt: str = "") -> int:
        """Return how many chunks of a prompt are there, without a touch."""
        hit = self.cache.explain(prompt(LENGTH, seed), salt=salt)
        return hit.num_tokens // CHUNK

    def fill(self, first: int, last: int, **told: object) -> None:
        for seed in range(first, last):
            self.ask(seed, **told)


@pytest.fixture
def told(shm_root: Path) -> Iterator[Callable[..., Told]]:
    opened: list[Told] = []

    def make(**options: object) -> Told:
        opened.append(Told(shm_root / str(len(opened)), **options))
        return opened[-1]

    yield make
    for one in opened:
        one.cache.close()


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_dropped_prompt_is_gone_first(
    told: Callable[..., Told], is_dropped: bool
) -> None:
    cache = told()
    cache.fill(0, PROMPTS - 1, session="others")
    cache.ask(100, session="mine", drop=is_dropped)
    cache.ask(101)
    # the control: the oldest goes
    gone, kept = (100, 0) if is_dropped else (0, 100)
    assert cache.has(gone) == 0
    assert cache.has(kept) == LENGTH


@pytest.mark.parametrize("ends", [True, False])
def test_chunks_of_a_closed_session_are_gone_before_older_ones(
    told: Callable[..., Told], ends: bool
) -> None:
    cache = told()
    cache.fill(0, PROMPTS - 2)
    cache.ask(100, session="mine", ending="turn")
    # of another conversation in the same session
    cache.ask(101, session="mine", agent="helper", session_end=ends)
    cache.fill(200, 202)
    gone, kept = ((100, 101), (0, 1)) if ends else ((0, 1), (100, 101))
    assert [cache.has(seed) for seed in (*gone, *kept)] == [0, 0, LENGTH, LENGTH]


@pytest.mark.parametrize("used", ["stored", "looked up", "by nobody named", ""])
def test_what_another_session_used_since_is_not(
    told: Callable[..., Told], used: str
) -> None:
    cache = told()
    cache.ask(100, session="mine")
    if used == "stored":
        cache.ask(100, session="another")
    elif used == "looked up":
        other = RequestHints(session="another")
        cache.cache.lookup(prompt(LENGTH, 100), hints=other)
    elif used:
        cache.ask(100)
    cache.fill(0, PROMPTS - 1)
    hints = RequestHints(session="mine", session_end=True)
    cache.cache.note_answer(prompt(LENGTH, 100), hints=hints)
    contexts = cache.ledger.columns.contexts
    assert contexts is not None
    over = np.flatnonzero((contexts.of_slots >> 4 & 7) == 4)
    assert len(over) == (0 if used else LENGTH)


def test_a_session_of_another_tenant_is_another_one(
    told: Callable[..., Told],
) -> None:
    cache = told()
    cache.ask(100, salt="theirs", session="s")
    cache.fill(0, PROMPTS - 1)
    before = _contexts(cache.ledger)
    # the same text and the same name
    for hints in (
        RequestHints(session="s", session_end=True),
        RequestHints(session="s", drop=True),
    ):
        cache.cache.note_answer(prompt(LENGTH, 100), hints=hints, salt="mine")
    assert _contexts(cache.ledger) == before
    # the control
    over = RequestHints(session="s", session_end=True)
    cache.cache.note_answer(prompt(LENGTH, 100), hints=over, salt="theirs")
    assert _contexts(cache.ledger) != before
    cache.ask(200)
    assert cache.has(100, "theirs") == 0
    assert cache.has(0) == LENGTH


def _contexts(ledger: Ledger) -> list[int]:
    contexts = ledger.columns.contexts
    assert contexts is not None
    found: list[int] = contexts.of_slots.tolist()
    return found


@pytest.mark.parametrize("policy", ["hindsight", "lru"])
def test_retained_chunks_go_last_and_within_their_budget(
    told: Callable[..., Told], policy: str
) -> None:
    cache = told(policy=policy)
    for seed in range(PROMPTS):
        cache.ask(seed, retain_seconds=300)
    budget = SLOTS // RETAINED_SHARE
    cache.fill(100, 100 + 3 * PROMPTS)
    # the heads of the first; nothing was kept from being stored
    assert [cache.has(seed) for seed in range(PROMPTS)] == [budget] + 7 * [0]
    assert cache.has(100 + 3 * PROMPTS - 1) == LENGTH
    why = f"retain_seconds: retained chunks take at most 1/{RETAINED_SHARE} of a tier"
    stats = cache.cache.stats()
    assert stats["hints"]["clipped"] == {why: 1}
    assert stats["hints"]["refused"] == {why: PROMPTS - 1}
    assert stats["counters"]["hints_refused"] == PROMPTS - 1
    # and not for ever
    cache.clock.advance(300)
    cache.fill(200, 200 + 2 * PROMPTS)
    assert cache.has(0) == 0


def test_a_day_is_the_longest(told: Callable[..., Told]) -> None:
    cache = told()
    tokens = prompt(1)
    cache.cache.store(tokens, kv_of(tokens).transfer)
    results = cache.cache.note_answer(
        tokens, hints=RequestHints(retain_seconds=1e9)
    )
    assert list(map(str, results)) == ["retain_seconds clipped (at most 86400 s)"]


def test_everybody_retains_and_nothing_is_kept_out(
    told: Callable[..., Told],
) -> None:
    cache = told()
    for seed in range(3 * PROMPTS):
        cache.ask(seed, retain_seconds=80_000)
        assert cache.has(seed) == LENGTH


@pytest.mark.parametrize(
    "wrong",
    [
        {"session": "s" * 257},
        {"session": 3},
        {"session": "\ud800"},
        {"ending": "happily"},
        {"session_end": True},
        {"session": "s", "session_end": 1},
        {"agent": "a"},
        {"drop": "yes"},
        {"drop": True, "retain_seconds": 3},
        {"retain_seconds": -1},
        {"retain_seconds": float("nan")},
        {"retain_seconds": 10**400},
        {"retain_seconds": True},
    ],
)
def test_hints_that_make_no_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"write|name the session"):
        RequestHints(**wrong)  # type: ignore[arg-type]


def test_a_call_takes_nothing_else(told: Callable[..., Told]) -> None:
    with pytest.raises(ValueError, match=r"pass a pagoda\.RequestHints"):
        told().cache.lookup([1], hints={"drop": True})  # type: ignore[typeddict-item]
    with pytest.raises(ConfigError, match="hints"):
        told(hints="sometimes")


def test_each_hint_has_an_answer(told: Callable[..., Told]) -> None:
    everything = {
        "session": "s",
        "agent": "a",
        "ending": "turn",
        "session_end": True,
        "drop": True,
    }
    never = told(hints="never")
    never.ask(0, **everything)
    assert never.cache.stats()["hints"] == {
        "refused": {f"{name}: hints = 'never'": 1 for name in everything}
    }
    assert never.ledger.columns.contexts is None
    lru = told(policy="lru")
    lru.ask(0, **everything)
    refused = lru.cache.stats()["hints"]["refused"]
    assert refused == {
        f"{name}: the policy lru makes no use of it": 1 for name in everything
    }
    kept = told()
    kept.ask(0, **everything)
    assert kept.cache.stats()["hints"] == {
        "accepted": dict.fromkeys(everything, 1)
    }
    absent = kept.cache.note_answer(
        prompt(LENGTH, 9), hints=RequestHints(drop=True)
    )
    assert list(map(str, absent)) == [
        "drop refused (no chunk of the prompt is stored)"
    ]
    kept.cache.close()
    closed = kept.cache.note_answer([1], hints=RequestHints(drop=True))
    assert list(map(str, closed)) == ["drop refused (the cache is closed)"]


def _played(cache: Told, seed: int) -> list[int]:
    random = np.random.default_rng(seed)
    # otherwise a thread would learn at any moment
    cache.ledger.upkeep_thread._thread = threading.current_thread()
    for _ in range(400):
        cache.ask(int(random.zipf(1.3)) % 40)
        cache.ledger.upkeep_thread.run_once()
    keys: list[int] = cache.ledger.columns.keys[:, 0].tolist()
    return keys


@pytest.mark.slow
def test_without_hints_nothing_is_different(told: Callable[..., Told]) -> None:
    auto = told()
    never = told(hints="never")
    assert _played(auto, 1) == _played(never, 1)
    assert auto.ledger.columns.contexts is None
    assert "hints" not in auto.cache.stats()
    # the control: other traffic leaves other chunks
    assert _played(told(), 2) != _played(never, 1)


def test_others_learn_what_they_learnt_without_hints(
    told: Callable[..., Told],
) -> None:
    """The shared values keep their form, and get the same counts."""
    counts = []
    for options in ({"hints": "always"}, {"hints": "never"}):
        cache = told(**options)
        for turn in range(4):
            for seed in range(PROMPTS // 2):
                cache.ask(seed)
            cache.ledger.upkeep_thread.run_once()
            assert (
                turn
                or cache.ledger.columns.contexts is not None
                or (options["hints"] == "never")
            )
        learned = cache.ledger.upkeep_thread.learned
        assert learned is not None
        shared = _SharedValues.of(learned)
        counts.append((shared.asked.tolist(), shared.shadow.tolist()))
        assert shared.asked.sum() == 3 * LENGTH * PROMPTS // 2
    assert counts[0] == counts[1]


def test_a_recorded_request_has_its_hints(
    told: Callable[..., Told], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    cache = told(record=str(trace))
    cache.ask(0, session="secret name", ending="tool_call")
    cache.ask(1)
    cache.ask(2, session="secret name", agent="a", session_end=True)
    cache.ask(4, drop=True)
    cache.ask(5, retain_seconds=1e9)
    looked = prompt(LENGTH, 3)
    cache.cache.lookup(looked, hints=RequestHints(session="other"))
    cache.cache.close()
    lines = list(read_trace(trace))
    told_of = [(one.stop or None, one.last or None) for one in lines]
    assert told_of == [
        ("tool_calls", None),
        (None, None),
        (None, True),
        (None, None),
        (None, None),
        (None, None),
    ]
    assert lines[3].drop is True
    assert lines[4].retain_seconds == 86_400
    sessions = [one.session for one in lines]
    assert sessions[0] == sessions[2] != sessions[5]
    assert lines[0].said_hints == "session accepted, ending accepted"
    assert b"secret" not in trace.read_bytes()
    # the simulator reads them, and a new recorder goes on in that file
    simulate(lines, [TierSpec("host", SLOTS, "hindsight")], with_hints=True)
    whole = trace.read_bytes()
    for line in whole.splitlines():
        for cut in range(len(line) - 1, 40, -1):
            trace.write_bytes(line[:cut])
            require_trace(trace)
    trace.write_bytes(b'{"timestamp":1.0,"x":2}')
    with pytest.raises(ConfigError):
        require_trace(trace)


def test_numbers_of_sessions_are_each_of_one() -> None:
    forgotten: list[int] = []
    forget = forgotten.append
    numbers = SessionNumbers()
    first = numbers.number(b"t", "s", "", forget)
    assert first == numbers.number(b"t", "s", "", forget)
    assert numbers.number(b"u", "s", "", forget) != first
    assert numbers.number(b"t", "s", "agent", forget) not in (first, 0)
    assert len(numbers.of(b"t", "s")) == 2
    assert numbers.number(b"t", "", "", forget) == 0
    for other in range(MOST_SESSIONS):
        numbers.number(b"t", f"other {other}", "", forget)
    assert first in forgotten
    assert numbers.of(b"t", "s") == ()


def _child(cache: Told, answers: Queue[tuple[bool, int]]) -> None:
    contexts = cache.ledger.columns.contexts
    cache.ask(50, session="s")
    answers.put((contexts is None, cache.has(50)))


def test_a_child_begins_without_contexts(told: Callable[..., Told]) -> None:
    cache = told()
    cache.ask(0, session="s")
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_child, args=(cache, answers))
    child.start()
    assert answers.get(timeout=60) == (True, LENGTH)
    child.join(60)
    assert cache.ledger.columns.contexts is not None


def test_hints_reach_a_disk_whose_chunks_come_later(
    told: Callable[..., Told], tmp_path: Path
) -> None:
    options = {"disk_path": str(tmp_path), "disk_size": "2MiB"}
    cache = Cache(
        namespace=NAMESPACE,
        layout=LAYOUT,
        host_size=SLOTS * LAYOUT.slot_bytes,
        host_shared=False,
        **options,  # type: ignore[arg-type]
    )
    tokens = prompt(LENGTH, 1)
    cache.store(
        tokens,
        kv_of(tokens).transfer,
        hints=RequestHints(session="s", drop=True),
    )
    assert cache.flush()
    disk = dict(cache._tiers.ledgers())["disk"]
    assert (
        sorted(_contexts(disk))[-LENGTH:] == sorted(_contexts(disk))[-1:] * LENGTH
    )
    assert max(_contexts(disk)) >> 4 & 7 == 4
    cache.close()


def test_a_dropped_prompt_leaves_what_another_session_used(
    told: Callable[..., Told],
) -> None:
    cache = told()
    cache.ask(100, session="mine")
    cache.ask(100, session="another")
    cache.fill(0, PROMPTS - 1)
    dropped = RequestHints(session="mine", drop=True)
    before = _contexts(cache.ledger)
    cache.cache.note_answer(prompt(LENGTH, 100), hints=dropped)
    assert _contexts(cache.ledger) == before


@pytest.mark.parametrize("who", ["theirs", "mine"])
def test_nor_does_it_undo_what_another_session_retains(
    told: Callable[..., Told], who: str
) -> None:
    cache = told()
    cache.ask(100, session=who, retain_seconds=600)
    cache.ask(100, session="mine", drop=True)
    cache.fill(0, 2 * PROMPTS, session="others")
    budget = SLOTS // RETAINED_SHARE
    assert cache.has(100) == (budget if who == "theirs" else 0)


def test_a_look_without_hints_begins_nothing(told: Callable[..., Told]) -> None:
    cache = told()
    cache.ask(0)
    assert cache.cache.note_answer(prompt(LENGTH, 0)) == ()
    hinted = cache.cache._resources.hints
    request = HintedRequest(bytes(32), [], Deadline(60.0))
    hinted.note_answer({"host": cache.ledger}, request, None)
    assert cache.ledger.columns.contexts is None


def test_hints_wait_no_longer_than_their_call(told: Callable[..., Told]) -> None:
    cache = told()
    cache.ask(0, session="s")
    deadline = Deadline(0.02, clock=cache.clock)
    request = HintedRequest(NAMESPACE.root, [], deadline)
    assert request.patience_seconds() == pytest.approx(0.02)
    cache.clock.advance(1)
    assert request.patience_seconds() == 0
    # another thread is in the ledger, for as long as it likes
    gate = cache.ledger.session.gate
    begun = threading.Event()
    over = threading.Event()

    def stay() -> None:
        assert gate.hold(60)
        begun.set()
        over.wait(60)
        gate.let_go()

    other = threading.Thread(target=stay)
    other.start()
    assert begun.wait(60)
    try:
        (result,) = cache.cache._resources.hints.note_answer(
            {"host": cache.ledger}, request, RequestHints(drop=True)
        )
    finally:
        over.set()
        other.join(60)
    assert result.answer == "refused"


def test_hints_reach_chunks_that_are_being_stored(
    told: Callable[..., Told],
) -> None:
    cache = told()
    cache.ask(0, session="s")
    keys = [key for *_, key in cache.cache.keys(prompt(LENGTH, 7))]
    slots = cache.cache.slots
    assert slots is not None
    made = slots.reserve(keys, namespace=slots.namespace(), start=0, parent=None)
    (result,) = cache.cache.note_answer(
        None, keys=keys, hints=RequestHints(drop=True)
    )
    assert result.answer == "accepted"
    assert (np.array(_contexts(cache.ledger)) >> 4 & 7 == 4).sum() == LENGTH
    slots.abort([one for one in made if isinstance(one, Reserved)])
