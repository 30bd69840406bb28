"""What a client says of its request in `kv_transfer_params` decides which chunks go first."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pagoda.cache import RequestHints
from pagoda.connectors.hint_parameters import parameters_of, parsed_hints
from pagoda_tools.replay import read_trace
from tests.vllm import stores
from tests.vllm.engines import CHUNK, Engine, connector, options
from tests.vllm.inside import ObservedEngine
from tests.vllm.models import prompt

CHUNKS = 5
TOKENS = CHUNKS * CHUNK + 7


def _stats(observed: ObservedEngine) -> dict[str, Any]:
    half = observed.scheduler.connector._scheduling
    return dict(half._cache.stats())


class Survivors(NamedTuple):
    """How many chunks are left of each prompt, and how many tokens of the better one then hit."""

    neighbour: int
    hinted: int
    hit_tokens: int


def _store(engine: Engine, host: Path, tokens: list[int], **how: Any) -> None:
    """Compute a prompt, and wait until all of it is stored."""
    before = stores.counters(host)["stored_chunks"] if stores.stores(host) else 0
    engine.generate(tokens, **how)
    stores.wait_until(
        lambda: stores.counters(host)["stored_chunks"] == before + CHUNKS,
        "a stored prompt",
    )


def _after_a_flood(
    engine: Engine, host: Path, seed: int, **how: Any
) -> Survivors:
    """Store a prompt, and a younger one that is computed in this way. Then store as much as takes
    the place of one of them.
    """
    if stores.stores(host):
        stores.clear(host)
    engine.reset()
    prompts = prompt(seed, TOKENS), prompt(seed + 1, TOKENS)
    _store(engine, host, prompts[0])
    neighbour = stores.keys(host)
    _store(engine, host, prompts[1], **how)
    hinted = stores.keys(host) - neighbour
    if how:
        stores.wait_until(lambda: _heard(engine) > 0, "the hints")
    with stores.ledger_of(host) as ledger:
        slots = ledger.slots
    # one of the two goes, and of the next one less than a prompt
    for number in range(-(-(slots - CHUNKS) // CHUNKS)):
        _store(engine, host, prompt(seed + 2 + number, TOKENS))
    present = stores.keys(host)
    left = len(neighbour & present), len(hinted & present)
    engine.reset()
    (answer,) = engine.generate(prompts[left[1] > left[0]])
    return Survivors(*left, answer.external)


def _heard(engine: Engine) -> int:
    counters = engine.call(_stats)["counters"]
    return int(counters["hints_accepted"])


@pytest.fixture
def host(session_shm: Path) -> Path:
    return session_shm / "hinted"


def test_a_dropped_prompt_goes_before_an_older_one(
    llama: Path, host: Path, logs: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    engine = Engine(
        "hints",
        logs / "hints.log",
        **options(llama),
        **connector(host, host_size="8MiB", record=str(trace)),
    )
    # the control: without a hint the younger one does not go whole. Which of the two loses most
    # is open: their ages are compared in steps.
    plain = _after_a_flood(engine, host, 1000)
    assert plain.hinted > 0
    assert plain.hit_tokens == max(plain.neighbour, plain.hinted) * CHUNK
    assert _heard(engine) == 0
    told = {
        "pagoda.session": "a",
        "pagoda.drop": True,
        "pagoda.retain": "for ever",
        "pagoda.colour": "green",
        "do_remote_decode": False,
    }
    dropped = _after_a_flood(engine, host, 2000, transfer=told)
    assert dropped.hinted == 0 < dropped.neighbour
    assert dropped.hit_tokens == dropped.neighbour * CHUNK
    hints = engine.call(_stats)["hints"]
    assert hints["accepted"] == {"session": 1, "ending": 1, "drop": 1}
    assert hints["refused"] == {
        "retain_seconds: the value is wrong": 1,
        "unknown: there is no such hint": 1,
    }
    # the same as an action of vLLM's own envelope
    heard = _heard(engine)
    actions = [
        ("pagoda.drop", "1.0", {"session": "b"}),
        ("pagoda.drop", "9.0", {}),
        ("kv.fetch", "1.0", {"of": "another"}),
    ]
    engine.generate(prompt(3000, TOKENS), actions=actions)
    stores.wait_until(lambda: _heard(engine) > heard, "the actions")
    hints = engine.call(_stats)["hints"]
    assert hints["accepted"]["drop"] == 2
    assert hints["refused"]["unknown: there is no such hint"] == 2
    engine.stop()
    (line, _) = [one for one in read_trace(trace) if one.said_hints]
    assert line.stop == "length"
    assert len(line.hash_ids) == CHUNKS


def test_an_action_of_the_engines_own_envelope_drops_a_prompt(
    llama: Path, host: Path, logs: Path
) -> None:
    """In an engine that has just begun, on a store whose counts say that least recently used serves
    more: the prompts are those of the test above, cleared since.
    """
    engine = Engine(
        "actions",
        logs / "actions.log",
        **options(llama),
        **connector(host, host_size="8MiB"),
    )
    actions = [("pagoda.drop", "1.0", {"session": "a"})]
    dropped = _after_a_flood(engine, host, 1000, actions=actions)
    assert dropped.hinted == 0 < dropped.neighbour
    assert dropped.hit_tokens == dropped.neighbour * CHUNK
    hints = engine.call(_stats)["hints"]
    assert hints == {"accepted": {"session": 1, "ending": 1, "drop": 1}}
    engine.stop()


def test_wrong_values_are_refused_alone() -> None:
    parsed = parsed_hints(
        {
            "pagoda.session": 7,
            "pagoda.session_end": True,
            "pagoda.drop": 1,
            "pagoda.retain": float("nan"),
            "pagoda.ending": ["turn"],
            "pagoda.what": 1,
            "max_load_tokens": 0,
        }
    )
    assert parsed.hints is None
    assert parsed.refused == {
        "session": "the value is wrong",
        "session_end": "no session is named",
        "drop": "the value is wrong",
        "retain_seconds": "the value is wrong",
        "ending": "the value is wrong",
        "unknown": "there is no such hint",
    }


@pytest.mark.parametrize("seconds", [10**400, -(10**400), float("inf")])
def test_a_number_beyond_all_floats_is_refused_and_never_raises(
    seconds: float,
) -> None:
    """A client of an engine writes it; an error in the scheduler would end the engine."""
    parsed = parsed_hints({"pagoda.retain": seconds, "pagoda.drop": True})
    assert parsed.hints == RequestHints(drop=True)
    assert parsed.refused == {"retain_seconds": "the value is wrong"}


def test_the_engine_knows_the_session_too() -> None:
    parsed = parsed_hints({"pagoda.retain": 5, "pagoda.drop": True}, "s")
    assert parsed.hints is not None
    assert parsed.hints.session == "s"
    assert parsed.hints.drop
    assert parsed.refused == {"retain_seconds": "the prompt is dropped"}
    assert parsed_hints({"pagoda.session": "t"}, "s").hints.session == "t"  # type: ignore[union-attr]
    assert parsed_hints(None).hints is None


class Action(NamedTuple):
    """One of vLLM's `KvHintAction`, as far as it is read."""

    action_type: object
    action_version: object
    payload: object


class Envelope(NamedTuple):
    """A `KvHintsEnvelope`, perhaps a wrong one."""

    actions: object


def test_actions_are_read_and_those_of_others_left_alone() -> None:
    found = parameters_of(
        Envelope(
            [
                Action("pagoda.retain", "1.0", {"seconds": 5, "session": "s"}),
                Action("pagoda.session_end", "1.0", None),
                Action("pagoda.pin", "1.0", {}),
                Action("kv.fetch", "1.0", {}),
                Action(7, None, {}),
            ]
        )
    )
    parsed = parsed_hints(found)
    assert parsed.hints is not None
    assert parsed.hints.retain_seconds == 5
    assert parsed.hints.session_end
    assert parsed.refused == {"unknown": "there is no such hint"}
    wrong = Envelope([Action("pagoda.retain", "1.0", {})])
    assert parsed_hints(parameters_of(wrong)).refused == {
        "retain_seconds": "the value is wrong"
    }
    assert parameters_of(None) == parameters_of(Envelope(3)) == {}
