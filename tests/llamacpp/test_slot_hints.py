"""What is said of a request decides which chunks and endings of slots go first."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from pagoda.cache import HintAnswer, RequestHints
from pagoda.connectors.llamacpp import SlotStates, StoredState
from pagoda.policy.reuse_context import Ending
from testbed.llama_servers import LlamaServer, llama_server
from testbed.tiny_gguf import write_model
from tests.llamacpp.kit import CHUNK, PROMPT, erase, opened, prompt_of

CHUNKS = PROMPT // CHUNK
SLOTS = 2 * CHUNKS + 4


class Survivors(NamedTuple):
    """How many chunks are left of two prompts."""

    older: int
    younger: int


def _store(
    server: LlamaServer,
    states: SlotStates,
    seed: int,
    hints: RequestHints | None = None,
) -> list[int]:
    tokens = prompt_of(seed)
    erase(server)
    server.complete(tokens, predict=1)
    states.find(tokens, hints=hints)
    assert states.store(tokens, 0, hints=hints)
    return tokens


def _left(states: SlotStates, tokens: list[int]) -> int:
    return states.cache.explain(tokens).num_tokens // CHUNK


def _after_another(
    server: LlamaServer, hints: RequestHints | None = None
) -> Survivors:
    """Store a prompt, a younger one of which something is said, and one that takes the place of
    most of another.
    """
    with opened(server) as states:
        slot_bytes = states.cache.layout.slot_bytes
    with opened(server, host_size=SLOTS * slot_bytes) as states:
        older = _store(server, states, 1)
        younger = _store(server, states, 2, hints)
        assert _left(states, older) == _left(states, younger) == CHUNKS
        _store(server, states, 3)
        return Survivors(_left(states, older), _left(states, younger))


def test_a_dropped_prompt_goes_before_an_older_one(models: Path) -> None:
    with llama_server(write_model(models, "llama")) as server:
        # the control: the older one goes
        plain = _after_another(server)
        assert plain.older < plain.younger == CHUNKS
        dropped = _after_another(server, RequestHints(session="a", drop=True))
        assert dropped.younger < dropped.older == CHUNKS


@pytest.mark.parametrize("architecture", ["llama", "lfm2"])
def test_a_session_keeps_the_ending_that_it_goes_on_from(
    architecture: str, models: Path
) -> None:
    """The ends of its shorter prompts are what it has left, and nothing else is."""
    said = RequestHints(session="a", ending="tool_call")
    with (
        llama_server(write_model(models, architecture)) as server,
        opened(server) as states,
    ):
        tokens = _store(server, states, 1, said)
        assert _rows(states, Ending.TOOL_CALL) >= CHUNKS
        assert not _rows(states, Ending.LEFT)
        before = _rows(states, Ending.TOOL_CALL)
        # the same prompt again, of which nothing is new
        states.find(tokens, hints=said)
        results = states.note_answer(tokens, hints=said)
        assert {one.answer for one in results} == {HintAnswer.ACCEPTED}
        assert _rows(states, Ending.TOOL_CALL) == before
        assert not _rows(states, Ending.LEFT)
        longer = tokens + prompt_of(2)[1:CHUNK]
        server.complete(longer, predict=1)
        states.find(longer, hints=said)
        stored = states.store(longer, 0, hints=said)
        # the ending of the shorter prompt
        assert _rows(states, Ending.LEFT) > 0
        assert _rows(states, Ending.TOOL_CALL) >= before
        assert states.find(longer).num_tokens >= stored.num_tokens - 4


@pytest.mark.parametrize("architecture", ["llama", "lfm2"])
@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "shared"])
def test_the_end_of_a_session_ends_what_only_it_used(
    architecture: str, is_shared: bool, models: Path
) -> None:
    said = RequestHints(session="a", ending="turn")
    over = RequestHints(session="a", session_end=True)
    with (
        llama_server(write_model(models, architecture)) as server,
        opened(server) as states,
    ):
        tokens = _store(server, states, 1, said)
        longer = tokens + prompt_of(2)[1:CHUNK]
        server.complete(longer, predict=1)
        assert states.store(longer, 0, hints=said)
        stored = _rows(states, Ending.TURN) + _rows(states, Ending.LEFT)
        if is_shared:
            assert _store_again(states, server, tokens)
        states.note_answer(longer, hints=over)
        ended = _rows(states, Ending.SESSION)
        assert 0 < ended <= stored - CHUNKS if is_shared else ended == stored


def _store_again(
    states: SlotStates, server: LlamaServer, tokens: list[int]
) -> StoredState:
    """Store a prompt of which nobody says anything."""
    erase(server)
    server.complete(tokens, predict=1)
    return states.store(tokens, 0)


def _rows(states: SlotStates, ending: Ending) -> int:
    """Return how many chunks and parts of endings have a request that ended so."""
    ((_, ledger),) = states.cache._tiers.ledgers()
    contexts = ledger.columns.contexts
    assert contexts is not None
    return int(np.count_nonzero((contexts.of_slots >> 4 & 7) == ending))


def test_hints_without_anything_stored_are_refused(models: Path) -> None:
    said = RequestHints(session="a", drop=True)
    with llama_server(write_model(models, "llama")) as server:
        with opened(server) as states:
            assert states.note_answer(prompt_of(1)) == ()
            states.note_answer(prompt_of(1), hints=said)
            assert states.hint_counts() == {
                "accepted": {"session": 1},
                "refused": {"drop: no chunk of the prompt is stored": 1},
            }
            # the slot is empty
            assert not states.store(prompt_of(1), 0, hints=said)
            assert states.hint_counts()["accepted"] == {"session": 2}
        assert states.note_answer(prompt_of(1), hints=said) == ()
        assert states.hint_counts() == {}
