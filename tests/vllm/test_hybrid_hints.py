"""Hints of requests whose KV is of several kinds: sliding windows or states beside attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pagoda.cache import RequestHints
from pagoda.connectors.vllm.request_hints import of_tenant
from pagoda.ledger import admin
from pagoda.policy.reuse_context import Ending
from tests.vllm import calls, hybrid, stores
from tests.vllm.calls import MARK, WORD
from tests.vllm.engines import Engine, connector, options
from tests.vllm.models import prompt


class Hinted(NamedTuple):
    """An engine with a small host tier, its directory, and the tokens of a chunk."""

    engine: Engine
    host: Path
    chunk: int

    def tokens(self, seed: int) -> list[int]:
        """A prompt of five chunks and a little more."""
        return prompt(seed, 5 * self.chunk + 40)

    def stored(self) -> int:
        """How many chunks were ever stored."""
        if not stores.stores(self.host):
            return 0
        return int(stores.counters(self.host)["stored_chunks"])

    def store(
        self, prompt_of: int | list[int], word: int | None = None, **how: Any
    ) -> int:
        """Compute a prompt, or the one of this seed; return how many chunks were stored, when no
        more come. `word`: the answer.
        """
        tokens = prompt_of
        if isinstance(tokens, int):
            tokens = self.tokens(tokens)
        before = self.stored()
        if word is None:
            self.engine.generate(tokens, **how)
        else:
            self.engine.call(calls.answer, tokens, word, True)
        # the last ones are offered with the next step
        self.engine.generate(prompt(9999, 5), max_tokens=2)

        def rests() -> bool:
            with stores.ledger_of(self.host) as ledger:
                is_writing = admin.gauges(ledger)["reserved"] > 0
            return not is_writing and self.stored() > before

        stores.wait_until(rests, "a stored prompt")
        return self.stored() - before

    def hit(self, seed: int) -> int:
        """How many tokens of a prompt hit."""
        self.engine.reset()
        (answer,) = self.engine.generate(self.tokens(seed))
        return answer.external

    def told(self, **accepted: int) -> Counter[int]:
        """Wait until so many hints were accepted, and nothing was refused; return the endings of
        chunks.
        """

        def are_noted() -> bool:
            hints = self.engine.call(calls.told)[0]
            assert "refused" not in hints
            return accepted.items() <= hints.get("accepted", {}).items()

        stores.wait_until(are_noted, "the hints")
        return Counter(self.engine.call(calls.told)[1])


@pytest.fixture(params=["windows", "states", "parts"])
def hinted(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    session_shm: Path,
    logs: Path,
) -> Iterator[Hinted]:
    """An engine that has just begun, on an empty store."""
    name = f"{request.node.name}".replace("[", "-").rstrip("]")
    directory = tmp_path_factory.mktemp("models") / "model"
    more: dict[str, Any] = {"max_model_len": 2048, "num_gpu_blocks_override": 240}
    with_windows = request.param == "windows"
    if with_windows:
        model = hybrid.make_gemma(directory)
    else:
        model = hybrid.make_qwen_next(directory)
        more |= {"dtype": "bfloat16", "enable_prefix_caching": True}
    if request.param == "parts":
        # vLLM also keeps the end of a prompt within a block
        more["prefix_match_unit"] = 32
    calls.write_tokenizer(model)
    host = session_shm / name
    # some 40 or 60 chunks
    ours = connector(host, host_size="5MiB" if with_windows else "3MiB")
    if not with_windows:
        extra = ours["kv_transfer_config"]["kv_connector_extra_config"]
        del extra["chunk_tokens"]
    engine = Engine(name, logs / f"{name}.log", **options(model, **more), **ours)
    block = engine.call(hybrid.block_tokens)
    yield Hinted(engine, host, 2 * block if with_windows else block)
    engine.stop()


def _after_a_flood(hinted: Hinted, seed: int, **how: Any) -> tuple[int, int, int]:
    """Store a prompt, and a younger one that is computed in this way. Then store what takes the
    place of a part of one; return how much that is, and what is left of each.
    """
    if stores.stores(hinted.host):
        stores.clear(hinted.host)
    hinted.engine.reset()
    whole = hinted.store(seed)
    neighbour = stores.keys(hinted.host)
    assert hinted.store(seed + 1, **how) == whole
    younger = stores.keys(hinted.host) - neighbour
    if how:
        assert hinted.told(session=1, drop=1) == {Ending.SESSION: whole}
    with stores.ledger_of(hinted.host) as ledger:
        slots = ledger.slots
    prompts = slots // whole + 1
    for number in range(2, prompts):
        hinted.store(seed + number)
    present = stores.keys(hinted.host)
    evicted = prompts * whole - len(present)
    return evicted, len(neighbour - present), len(younger - present)


def test_a_dropped_prompt_goes_before_an_older_one(hinted: Hinted) -> None:
    # the control
    evicted, older, younger = _after_a_flood(hinted, 1000)
    assert evicted > 0
    assert older > 0
    told = {"pagoda.session": "a", "pagoda.drop": True}
    evicted, older, younger = _after_a_flood(hinted, 2000, transfer=told)
    assert (older, younger) == (0, evicted)
    assert hinted.hit(2000) >= 5 * hinted.chunk
    assert hinted.hit(2001) < 5 * hinted.chunk


def test_a_session_leaves_what_is_before_its_windows(hinted: Hinted) -> None:
    told = {"pagoda.session": "a"}
    whole = hinted.store(1, transfer=told)
    assert hinted.told(session=1) == {Ending.OTHER: whole}
    longer = hinted.tokens(1) + prompt(2, 5 * hinted.chunk)
    more = hinted.store(longer, transfer=told)
    endings = hinted.told(session=2)
    chain = 10
    assert endings[Ending.OTHER] + endings[Ending.LEFT] == whole + more
    assert chain < endings[Ending.OTHER] < whole + more
    # the end of the session ends both
    hinted.store(3, transfer=told | {"pagoda.session_end": True})
    endings = hinted.told(session=3, session_end=1)
    assert endings[Ending.OTHER] == 0
    # what is needed of it was not left
    hinted.engine.reset()
    (answer,) = hinted.engine.generate(longer)
    assert answer.external >= chain * hinted.chunk


def test_another_tenants_session_of_this_name_is_another(hinted: Hinted) -> None:
    told = {"pagoda.session": "a"}
    whole = hinted.store(1, transfer=told, salt="x")
    hinted.store(2, transfer=told | {"pagoda.session_end": True}, salt="y")
    assert hinted.told(session=2, session_end=1) == {
        Ending.OTHER: whole,
        Ending.SESSION: whole,
    }
    hinted.store(3, transfer=told | {"pagoda.session_end": True}, salt="x")
    assert hinted.told(session=3, session_end=2) == {Ending.SESSION: 3 * whole}


def test_an_ending_is_a_hint_from_the_first_tool_call_on(hinted: Hinted) -> None:
    def ask(seed: int, word: int) -> int:
        return hinted.store(seed, word=word)

    ask(1, WORD)
    # the control: chat begins nothing
    assert hinted.engine.call(calls.told) == ({}, [])
    whole = ask(2, MARK)
    assert hinted.told() == {Ending.TOOL_CALL: whole}
    ask(3, WORD)
    assert hinted.told() == {Ending.TOOL_CALL: whole, Ending.TURN: whole}


def test_a_session_without_a_salt_keeps_its_name() -> None:
    hints = RequestHints(session="a", drop=True)
    assert of_tenant(hints, None) == of_tenant(hints, "") == hints
    of_x, of_y = of_tenant(hints, "x"), of_tenant(hints, "y")
    assert of_x is not None and of_y is not None
    assert len({hints.session, of_x.session, of_y.session}) == 3
    assert of_tenant(hints, "x") == of_x
    assert of_x.drop
    assert of_tenant(None, "x") is None
    assert of_tenant(RequestHints(drop=True), "x") == RequestHints(drop=True)
