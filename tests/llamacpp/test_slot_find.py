"""What a proxy needs of the slots of real servers: tenants, finding without asking, and answers
whose tokens nobody knows.
"""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest

from pagoda.base.metrics import Reason
from pagoda.connectors.llamacpp.slot_states import LoadedState
from testbed.llama_servers import BUILDS, llama_server
from testbed.patience import Patience
from testbed.tiny_gguf import write_model
from tests.llamacpp.kit import (
    CHUNK,
    PROMPT,
    STEP,
    check_equal,
    erase,
    on_disk,
    opened,
    prompt_of,
)

# in chunks alone, which an attention model continues a little later
CHUNKS = PROMPT // CHUNK * CHUNK
WHOLE = PROMPT // STEP * STEP

# ---- tenants


@pytest.mark.parametrize("architecture", ["llama", "lfm2"])
def test_tenants_share_neither_chunks_nor_endings(
    architecture: str, models: Path
) -> None:
    tokens = prompt_of(1)
    expected = WHOLE if architecture == "llama" else PROMPT - 4
    with (
        llama_server(write_model(models, architecture)) as server,
        opened(server) as states,
    ):
        server.complete(tokens)
        mine = states.store(tokens, 0, salt="a")
        assert mine.new_tokens == CHUNKS
        for other in ("b", "", None):
            assert not states.find(tokens, salt=other)
            assert not states.load(tokens, 0, salt=other)
        assert states.find(tokens, salt="a").num_tokens == expected
        # its own chunks, all of them new
        yours = states.store(tokens, 0, salt="b")
        assert yours[:3] == mine[:3]
        assert not states.find(tokens)
        for salt in ("a", "b"):
            erase(server)
            assert states.load(tokens, 0, salt=salt).num_tokens == expected
            # at least one token is computed
            hits = min(expected, PROMPT - 1)
            assert server.complete(tokens).hits == hits


def test_a_tenant_of_a_call_is_the_tenant_of_an_object(
    models: Path, tmp_path: Path
) -> None:
    """What one process stored with the salt of its object, another finds with that of a call."""
    tokens = prompt_of(1)
    with llama_server(write_model(models, "lfm2")) as server:
        with opened(server, salt="a", **on_disk(tmp_path)) as states:
            server.complete(tokens)
            assert states.store(tokens, 0)
            assert states.find(tokens).num_tokens == PROMPT - 4
            assert not states.find(tokens, salt="")
        with opened(server, **on_disk(tmp_path)) as states:
            assert states.find(tokens, salt="a").num_tokens == PROMPT - 4
            assert not states.find(tokens)


# ---- finding


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("architecture", ["llama", "lfm2"])
def test_what_is_found_is_what_is_loaded(
    architecture: str, build: str, models: Path
) -> None:
    tokens = prompt_of(1)
    with (
        llama_server(write_model(models, architecture), build) as server,
        opened(server) as states,
    ):
        assert states.find(tokens).reason is Reason.ABSENT
        answer = server.complete(tokens)
        states.store([*tokens, *answer.tokens], 0)
        longer = [*tokens, *answer.tokens, *prompt_of(2, 90)[1:]]
        for prompt in (tokens, tokens[:300], longer, prompt_of(3), [], [1]):
            found = states.find(prompt)
            assert found == states.load(prompt, 0)
        assert states.find(longer)


def test_a_find_obeys_the_minimum_and_the_context(
    models: Path, tmp_path: Path
) -> None:
    tokens = prompt_of(1, 900)
    model = write_model(models)
    with (
        llama_server(model) as server,
        opened(server, **on_disk(tmp_path)) as states,
    ):
        server.complete(tokens)
        assert states.store(tokens, 0)
    options = {**on_disk(tmp_path), "min_hit_tokens": 400}
    with (
        llama_server(model, context=512) as server,
        opened(server, **options) as states,
    ):
        # of 512 tokens one must be left
        assert states.find(tokens).num_tokens == 448
        refused = states.find(tokens[:390])
        assert refused.num_tokens == 0
        assert refused.reason == Reason.BELOW_MINIMUM


def test_a_find_and_the_load_after_it_are_one_look_up(models: Path) -> None:
    tokens = prompt_of(1)
    with llama_server(write_model(models)) as server, opened(server) as states:

        def counted() -> tuple[int, int, int]:
            counters = states.stats()["counters"]
            return (
                counters["lookups"],
                counters["hits"],
                counters["hit_tokens"],
            )

        server.complete(tokens)
        states.store(tokens, 0)
        assert counted() == (0, 0, 0)
        assert states.find(tokens)
        assert counted() == (1, 1, CHUNKS)
        assert states.load(tokens, 0, counted=False)
        assert counted() == (1, 1, CHUNKS)
        # a find whose state the slot has already, and a load without a find
        assert states.find(tokens)
        assert states.load(tokens, 0)
        assert counted() == (3, 3, 3 * CHUNKS)
        assert not states.find(prompt_of(2))
        assert counted() == (4, 3, 3 * CHUNKS)
        tenant = states.stats()["tenants"]
        assert len(tenant) == 1


def test_only_what_can_be_used_counts_as_a_hit(models: Path) -> None:
    """Chunks without an ending are no use to a hybrid model, nor are those below the minimum."""
    tokens = prompt_of(1)
    with (
        llama_server(write_model(models, "lfm2"), "B") as server,
        opened(server, min_hit_tokens=200) as states,
    ):
        answer = server.complete(tokens)
        # without checkpoints only a continuation of all that was saved
        whole = [*tokens, *answer.tokens]
        assert states.store(whole, 0)
        assert not states.find(tokens)
        counters = states.stats()["counters"]
        assert counters["lookups"] == 1
        assert counters["hits"] == 0
        assert counters["hit_tokens"] == 0
        assert counters["miss_absent"] == 1
        assert states.find([*whole, 5, 6])
        counters = states.stats()["counters"]
        assert counters["lookups"] == 2
        assert counters["hits"] == 1
        assert counters["hit_tokens"] == CHUNKS
        server.complete(tokens[:150], predict=0, cache_prompt=False)
        assert states.store(tokens[:150], 0)
        assert not states.find(tokens[:160])
        counters = states.stats()["counters"]
        assert counters["lookups"] == 3
        assert counters["hits"] == 1
        assert counters["miss_below_minimum"] == 1


def test_a_find_asks_the_server_nothing_and_waits_for_no_call(
    models: Path,
) -> None:
    tokens = prompt_of(1)
    with llama_server(write_model(models)) as server, opened(server) as states:
        server.complete(tokens)
        states.store(tokens, 0)
        server.server.stop()
        loading = threading.Thread(
            target=states.load, args=(tokens, 0), kwargs={"limit_seconds": 60}
        )
        loading.start()
        try:
            # a load holds the lock of the calls, and the server does not answer it
            patience = Patience(60)
            while states._lock.acquire(blocking=False):
                states._lock.release()
                assert not patience.ended
            assert states.find(tokens).num_tokens == WHOLE
            assert not states.find(prompt_of(2))
            assert loading.is_alive()
        finally:
            server.server.cont()
            loading.join()


def test_nothing_is_found_while_a_server_is_probed_again(
    models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its KV may have another name then; afterwards what is found is that of the new one."""
    tokens = prompt_of(1)
    model = tmp_path / "model.gguf"
    model.write_bytes(write_model(models).read_bytes())
    with llama_server(model) as server, opened(server) as states:
        server.complete(tokens)
        states.store(tokens, 0)
        before = states.find(tokens)
        assert before.num_tokens == WHOLE
        other = tmp_path / "other.gguf"
        other.write_bytes(write_model(models, seed=1).read_bytes())
        other.replace(model)
        server.server.restart()
        # nobody has asked the server
        assert states.find(tokens) == before
        during: list[LoadedState] = []
        close = states.cache.close

        def closed(*args: float) -> bool:
            during.append(states.find(tokens))
            done = close(*args)
            during.append(states.find(tokens))
            return done

        monkeypatch.setattr(states.cache, "close", closed)
        assert not states.load(tokens, 0)
        assert [found.reason for found in during] == [Reason.BUSY] * 2
        assert not states.find(tokens)
        server.complete(tokens)
        states.store(tokens, 0)
        assert states.find(tokens).num_tokens == WHOLE


def test_a_find_during_a_close_is_a_miss_and_no_error(models: Path) -> None:
    tokens = prompt_of(1)
    with llama_server(write_model(models, "lfm2")) as server:
        for _ in range(3):
            states = opened(server)
            server.complete(tokens)
            assert states.store(tokens, 0)
            begun = threading.Barrier(3)
            answers: list[LoadedState] = []

            def ask(
                states=states,
                begun=begun,
                answers=answers,
            ) -> None:
                begun.wait()
                for _ in range(2000):
                    answers.append(states.find(tokens))
                    if answers[-1].reason is Reason.CLOSED:
                        return

            threads = [threading.Thread(target=ask) for _ in range(2)]
            for thread in threads:
                thread.start()
            begun.wait()
            states.close()
            for thread in threads:
                thread.join()
            assert sum(a.reason is Reason.CLOSED for a in answers) == 2
            for answer in answers:
                if answer.reason is not Reason.CLOSED:
                    assert answer.num_tokens == PROMPT - 4, answer
            assert states.find(tokens).reason is Reason.CLOSED


def test_a_cache_that_fails_is_a_miss_of_a_find(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt_of(1)
    with (
        llama_server(write_model(models, "lfm2")) as server,
        opened(server) as states,
    ):
        server.complete(tokens)
        states.store(tokens, 0)

        def failed(*_: object, **__: object) -> list[bool]:
            raise ValueError("mmap closed or invalid")

        monkeypatch.setattr(states.cache, "which", failed)
        found = states.find(tokens)
        assert found.reason is Reason.IO_ERROR
        assert "mmap closed" in found.detail
        assert states.stats()["counters"]["miss_io_error"] == 1


def test_a_server_that_cannot_be_used_is_a_miss_of_a_find(models: Path) -> None:
    with (
        llama_server(write_model(models), reuse=256) as server,
        opened(server) as states,
    ):
        found = states.find(prompt_of(1))
        assert found.reason is Reason.NOT_CACHEABLE
        assert "--cache-reuse" in found.detail
        assert states.stats()["counters"]["miss_not_cacheable"] == 1
        assert states.stats()["counters"]["lookups"] == 0


# ---- answers that nobody knows


@pytest.mark.parametrize(
    ("build", "architecture"), [("A", "llama"), ("B", "llama"), ("A", "lfm2")]
)
def test_an_answer_is_stored_whose_tokens_are_not_known(
    build: str, architecture: str, models: Path
) -> None:
    tokens = prompt_of(1)
    with (
        llama_server(write_model(models, architecture), build) as server,
        opened(server) as states,
    ):
        # the last token of an answer is in no state, and the rest ends with a chunk
        answer = server.complete(tokens, predict=10 * CHUNK - PROMPT + 1)
        held = [*tokens, *answer.tokens[:-1]]
        for more in (0, len(answer.tokens), 4096):
            stored = states.store(tokens, 0, more_tokens=more)
            end = min(len(held), PROMPT + more)
            if architecture == "llama":
                assert stored.num_tokens == end // STEP * STEP
            else:
                assert stored.num_tokens == (len(held) if more else PROMPT - 4)
            assert stored.slot_tokens is not None
            assert stored.slot_tokens.dtype == np.int32
            assert stored.slot_tokens.tolist() == held
        longer = [*held, *prompt_of(2, 20)[1:]]
        control = server.complete(longer)
        erase(server)
        assert states.load(longer, 0).num_tokens == len(held)
        check_equal(server.complete(longer), control, len(held))


def test_no_more_of_an_answer_is_stored_than_was_allowed(models: Path) -> None:
    tokens = prompt_of(1)
    with llama_server(write_model(models)) as server, opened(server) as states:
        answer = server.complete(tokens, predict=200)
        held = [*tokens, *answer.tokens[:-1]]
        # one token short of a chunk, and exactly a chunk
        short = CHUNKS + 2 * CHUNK - PROMPT - 1
        stored = states.store(tokens, 0, more_tokens=short)
        assert stored.num_tokens == CHUNKS + 2 * CHUNK - STEP
        stored = states.store(tokens, 0, more_tokens=short + 1)
        assert stored.num_tokens == CHUNKS + 2 * CHUNK
        assert states.find(held).num_tokens == CHUNKS + 2 * CHUNK
        # also of an answer that is known in part
        known = [*tokens, *answer.tokens[:50]]
        stored = states.store(known, 0, more_tokens=0)
        assert stored.num_tokens == (PROMPT + 50) // STEP * STEP


def test_the_known_tokens_must_begin_the_state_in_any_case(models: Path) -> None:
    tokens = prompt_of(1)
    wrong = [*tokens[:300], 101 if tokens[300] != 101 else 102, *tokens[301:]]
    with llama_server(write_model(models)) as server, opened(server) as states:
        server.complete(tokens)
        refused = states.store(wrong, 0, more_tokens=100)
        assert refused.reason is Reason.FAILED_CHECK
        assert refused.slot_tokens is None
        erase(server)
        assert states.store(tokens, 0, more_tokens=100).slot_tokens is None
        server.complete(tokens[:20], predict=0)
        short = states.store(tokens, 0, more_tokens=100)
        assert short.reason is Reason.SHORT_PROMPT
        assert short.slot_tokens is not None
        assert short.slot_tokens.tolist() == tokens[:20]


def test_a_state_without_a_place_to_go_on_says_what_the_slot_holds(
    models: Path,
) -> None:
    tokens = prompt_of(1)
    with (
        llama_server(write_model(models, "lfm2"), "B") as server,
        opened(server) as states,
    ):
        answer = server.complete(tokens, predict=40)
        stored = states.store(tokens, 0)
        assert stored.reason is Reason.NOT_CACHEABLE
        assert stored.slot_tokens is not None
        assert len(stored.slot_tokens) == PROMPT + len(answer.tokens) - 1
        assert states.stats()["counters"]["drop_not_cacheable"] == 1


def test_wrong_use_of_a_call_is_a_value_error(models: Path) -> None:
    tokens = prompt_of(1)
    with llama_server(write_model(models)) as server, opened(server) as states:
        for more in (-1, 1.5, "1", True, None):
            with pytest.raises(ValueError, match="more_tokens"):
                states.store(tokens, 0, more_tokens=more)  # type: ignore[arg-type]
        calls = (
            states.find,
            lambda ids, salt: states.load(ids, 0, salt=salt),
            lambda ids, salt: states.store(ids, 0, salt=salt),
        )
        for call, salt in itertools.product(calls, (5, b"a", ["a"], "\ud800")):
            with pytest.raises(ValueError, match=r"salt|surrogates"):
                call(tokens, salt=salt)  # type: ignore[operator]
        with pytest.raises(ValueError, match="flat"):
            states.find(["a"])  # type: ignore[list-item]
