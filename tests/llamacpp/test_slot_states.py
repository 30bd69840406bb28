"""Slots of real llama.cpp servers, stored and loaded. The control is the slot in memory with as
many hits: text and log-probabilities must be equal.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import threading
from pathlib import Path

import pytest

from pagoda.base.errors import ConfigError, StoreError
from pagoda.base.metrics import Reason
from pagoda.connectors.llamacpp import SlotStates, server_probe
from pagoda.connectors.llamacpp.server_probe import _PROBE_TEXT
from testbed.llama_servers import (
    BUILDS,
    LlamaOptions,
    LlamaServer,
    llama_server,
)
from testbed.patience import within
from testbed.tiny_gguf import (
    ARCHITECTURES,
    ATTENTION,
    HEAD,
    WINDOWS,
    write_adapter,
    write_model,
)
from tests.llamacpp.kit import (
    CHUNK,
    PROMPT,
    STEP,
    WINDOW_DISTANCE,
    check_equal,
    check_exact,
    erase,
    in_memory,
    on_disk,
    opened,
    prompt_of,
)
from tests.llamacpp.settings import all_pairs, keeps_checkpoints, options_of


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_loaded_slot_answers_as_the_slot_in_memory(
    architecture: str, build: str, models: Path
) -> None:
    tokens = prompt_of(1)
    with (
        llama_server(write_model(models, architecture), build) as server,
        opened(server) as states,
    ):
        is_useless = architecture in WINDOWS and build == "B"
        assert bool(states.trouble) == is_useless
        answer = server.complete(tokens)
        stored = states.store([*tokens, *answer.tokens], 0)
        state_tokens = PROMPT + len(answer.tokens) - 1
        if architecture in ATTENTION:
            assert stored.num_tokens == state_tokens // STEP * STEP
            check_exact(server, states, tokens, PROMPT // STEP * STEP)
        elif build == "A":
            # the checkpoint 4 tokens before the prompt's end; a window needs 130 rows
            is_window = architecture in WINDOWS
            expected = PROMPT - 2 if is_window else PROMPT - 4
            assert stored.endings[-2:] == (expected, state_tokens)
            most = WINDOW_DISTANCE if is_window else 0.0
            check_exact(server, states, tokens, expected, most)
        elif architecture in WINDOWS:
            assert stored.reason is Reason.NOT_CACHEABLE
            assert "saves no checkpoints" in stored.detail
            assert not states.load(tokens, 0)
        else:
            # without checkpoints only a continuation of all that was saved
            assert stored.endings == (state_tokens,)
            assert states.load(tokens, 0).reason is Reason.ABSENT
            longer = [*tokens, *answer.tokens, *prompt_of(2, 20)[1:]]
            control = server.complete(longer)
            erase(server)
            assert states.load(longer, 0).num_tokens == state_tokens
            check_equal(server.complete(longer), control, state_tokens)
        assert sorted(os.listdir(server.states))[1:] == []


@pytest.mark.parametrize(
    ("build", "architecture", "slot", "options"),
    [
        ("A", "llama", 1, {"slots": 2, "k": "q8_0", "v": "q8_0"}),
        ("B", "llama", 3, {"slots": 4, "unified": True, "k": "f32", "v": "bf16"}),
        ("A", "qwen3moe", 0, {"flash": False}),
        ("B", "qwen3", 1, {"slots": 2, "flash": False}),
        ("A", "deepseek2", 2, {"slots": 4, "unified": True}),
        ("A", "gemma3", 1, {"slots": 2, "flash": False}),
        ("A", "qwen3next", 1, {"slots": 2, "k": "q8_0"}),
        ("B", "llama", 0, {"flash": False, "k": "bf16"}),
    ],
)
def test_every_form_of_the_cache_is_exact(
    build: str, architecture: str, slot: int, options: LlamaOptions, models: Path
) -> None:
    tokens = prompt_of(1)
    with (
        llama_server(
            write_model(models, architecture), build, **options
        ) as server,
        opened(server) as states,
    ):
        answer = server.complete(tokens, slot)
        stored = states.store([*tokens, *answer.tokens], slot)
        assert stored, stored
        expected = states.load(tokens, slot).num_tokens
        assert expected >= PROMPT // CHUNK * CHUNK
        most = WINDOW_DISTANCE if architecture in WINDOWS else 0.0
        check_exact(server, states, tokens, expected, most, slot)


@pytest.mark.soak
def test_every_pair_of_settings_is_exact(models: Path) -> None:
    chosen = all_pairs(random.Random(1), keeps_checkpoints)
    assert len(chosen) <= 60
    for number, settings in enumerate(chosen):
        print(number, settings)
        options = options_of(settings)
        architecture = str(settings["architecture"])
        slot = number % options["slots"]
        tokens = prompt_of(number)
        model = write_model(models, architecture)
        with (
            llama_server(model, str(settings["build"]), **options) as server,
            opened(server) as states,
        ):
            server.complete(tokens, slot)
            assert states.store(tokens, slot), settings
            expected = states.load(tokens, slot).num_tokens
            assert expected >= PROMPT // CHUNK * CHUNK, settings
            most = WINDOW_DISTANCE if architecture in WINDOWS else 0.0
            check_exact(server, states, tokens, expected, most, slot)


def test_a_conversation_shares_what_another_one_stored(models: Path) -> None:
    """The chunks of a common beginning are stored once, and serve any continuation."""
    common = prompt_of(1, 4 * CHUNK)
    first = [*common, *prompt_of(2, 200)[1:]]
    second = [*common, *prompt_of(3, 300)[1:]]
    with (
        llama_server(write_model(models), slots=2) as server,
        opened(server) as states,
    ):
        server.complete(first, 0)
        assert states.store(first, 0).new_tokens == len(first) // CHUNK * CHUNK
        check_exact(server, states, second, len(common), slot=1)
        stored = states.store(second, 1)
        assert stored.new_tokens == len(second) // CHUNK * CHUNK - len(common)


def test_a_checkpoint_of_another_prompt_is_no_ending_of_this_one(
    models: Path,
) -> None:
    """A server keeps checkpoints that begin at the first token when another prompt takes the
    slot.
    """
    # its checkpoint, 4 tokens before the end, has one row that the second prompt has not
    first = prompt_of(1, 129)
    second = [*first[:124], *prompt_of(2, 125)[1:]]
    with (
        llama_server(write_model(models, "gemma3")) as server,
        opened(server) as states,
    ):
        server.complete(first)
        assert server.complete(second).hits == 124
        assert states.store(second, 0, marks=[131])
        for end in range(132, 240, 12):
            tokens = [*second[:end], *prompt_of(3, 20)[1:]]
            erase(server)
            loaded = states.load(tokens, 0)
            answer = server.complete(tokens)
            control = server.complete(tokens, 0, cache_prompt=False)
            assert answer.distance(control) <= WINDOW_DISTANCE, (end, loaded)


def test_a_restarted_server_gets_its_prompts_back(
    models: Path, tmp_path: Path
) -> None:
    tokens = prompt_of(1)
    with llama_server(write_model(models)) as server:
        with opened(server, **on_disk(tmp_path)) as states:
            cold = server.complete(tokens)
            assert states.store(tokens, 0).num_tokens == PROMPT // STEP * STEP
        server.server.restart()
        with opened(server, **on_disk(tmp_path)) as states:
            loaded = states.load(tokens, 0)
            assert loaded.num_tokens == PROMPT // STEP * STEP, loaded
            answer = server.complete(tokens)
            # at least one token is computed
            assert answer.hits == min(loaded.num_tokens, PROMPT - 1)
            assert answer.tokens == cold.tokens


@pytest.mark.parametrize("architecture", ["lfm2", "mamba2", "gemma3"])
def test_an_ending_is_found_by_another_process(
    architecture: str, models: Path, tmp_path: Path
) -> None:
    """Nothing but the tokens of the prompt says where a state can be continued."""
    tokens = prompt_of(1)
    with llama_server(write_model(models, architecture)) as server:
        with opened(server, **on_disk(tmp_path)) as states:
            server.complete(tokens)
            endings = states.store(tokens, 0).endings
            assert endings
        with opened(server, **on_disk(tmp_path)) as states:
            assert states.load(tokens, 0).num_tokens >= PROMPT - 4


def test_endings_that_were_seen_are_known_after_a_restart_of_the_server(
    models: Path,
) -> None:
    """They are looked for in the last two chunks only, unless this process has seen them."""
    tokens = prompt_of(1)
    other = [*tokens[:300], *prompt_of(2, 100)[1:]]
    with (
        llama_server(write_model(models, "lfm2")) as server,
        opened(server) as states,
    ):
        server.complete(tokens)
        early = states.store(tokens, 0).endings[0]
        assert early < 300 // CHUNK * CHUNK - CHUNK
        assert states.load(other, 0).num_tokens == early
        server.server.restart()
        assert states.load(other, 0).num_tokens == early


# ---- other KV for the same tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        "other weights",
        "other rope",
        "other scale",
        "other types",
        "another model",
    ],
)
def test_kv_of_another_model_is_never_loaded(
    change: str, models: Path, tmp_path: Path
) -> None:
    """The server would restore all of them: it compares shapes only."""
    tokens = prompt_of(1)
    adapter = str(write_adapter(models))
    model = write_model(models)
    options: LlamaOptions = {}
    fixed = {**on_disk(tmp_path), "adapters_are_fixed": True}
    other_model, other = {
        "other weights": (write_model(models, seed=1), options),
        "other rope": (model, LlamaOptions(rope_base=500000.0)),
        "other scale": (model, LlamaOptions(lora=[(adapter, 0.25)])),
        "other types": (model, LlamaOptions(k="q8_0", v="q8_0")),
        "another model": (write_model(models, "qwen3"), options),
    }[change]
    if change == "other scale":
        options = {"lora": [(adapter, 1.0)]}
    with (
        llama_server(model, **options) as server,
        opened(server, **fixed) as states,
    ):
        server.complete(tokens)
        assert states.store(tokens, 0)
        mine = states.cache.namespace
    with (
        llama_server(other_model, **other) as server,
        opened(server, **on_disk(tmp_path)) as states,
    ):
        assert states.cache.namespace.numerics != mine.numerics
        loaded = states.load(tokens, 0)
        assert loaded.num_tokens == 0
        assert server.complete(tokens).hits == 0


def test_zeroed_kv_is_seen_by_these_comparisons(models: Path) -> None:
    """A control of the tests above: other KV of the same shape gives other probabilities."""
    tokens = prompt_of(1)
    with llama_server(write_model(models)) as server:
        cold = server.complete(tokens)
        server.post("/slots/0?action=save", filename="state")
        path = server.states / "state"
        data = path.read_bytes()
        # head, tokens and cells stay; all rows of the first layer's K are zero
        cells = struct.unpack_from("<I", data, 8)[0] - 4
        begin = 12 + 4 * (cells + 4) + 8 + 12 * cells + 16 + 12
        end = begin + cells * HEAD * 2
        path.write_bytes(data[:begin] + bytes(end - begin) + data[end:])
        erase(server)
        server.post("/slots/0?action=restore", filename="state")
        answer = server.complete(tokens)
        assert answer.hits == PROMPT - 1
        assert answer.distance(cold) > 0.03


@pytest.mark.slow
def test_the_namespace_is_the_same_after_a_restart(models: Path) -> None:
    with llama_server(write_model(models, "qwen3next"), slots=2) as server:
        with opened(server) as states:
            mine = states.cache.namespace
        server.complete(prompt_of(5), 1)
        server.server.restart()
        with opened(server, probe_slot=0) as states:
            assert states.cache.namespace == mine


# ---- the tokens are the state's own


def test_a_slot_with_other_tokens_is_not_stored(models: Path) -> None:
    tokens = prompt_of(1)
    with llama_server(write_model(models)) as server, opened(server) as states:
        server.complete(tokens)
        wrong = [*tokens[:300], 101 if tokens[300] != 101 else 102, *tokens[301:]]
        stored = states.store(wrong, 0)
        assert stored.reason is Reason.FAILED_CHECK
        assert "another token 300 " in stored.detail
        assert states.stats()["counters"]["drop_not_cacheable"] == 1
        assert not states.load(wrong, 0)
        # of a prompt that is known in part only that part is stored
        assert states.store(tokens[:300], 0).num_tokens == 300 // STEP * STEP


def test_a_context_that_was_shifted_is_not_stored(models: Path) -> None:
    """After a shift the KV is not that of the tokens."""
    tokens = prompt_of(1, 500)
    with (
        llama_server(
            write_model(models), context=512, context_shift=True
        ) as server,
        opened(server) as states,
    ):
        answer = server.complete(tokens, predict=60)
        stored = states.store([*tokens, *answer.tokens], 0)
        assert stored.reason is Reason.FAILED_CHECK, stored
        assert not stored


ALONE_DISTANCE = 2e-2


@pytest.mark.parametrize("architecture", ATTENTION)
def test_a_prompt_is_continued_within_a_chunk(
    architecture: str, models: Path
) -> None:
    """The rows after the last whole chunk are kept, if they are half a chunk at least."""
    tokens = prompt_of(1)
    with (
        llama_server(write_model(models, architecture)) as server,
        opened(server) as states,
    ):
        for predict in (30, 100):
            answer = server.complete(tokens, predict=predict)
            held = [*tokens, *answer.tokens[:-1]]
            most = len(held) // STEP * STEP
            if len(held) % CHUNK < CHUNK // 2:
                most = len(held) // CHUNK * CHUNK
            stored = states.store(tokens, 0, more_tokens=predict)
            assert stored.num_tokens == most
            # whose answer was computed one token after the other
            prompt = [*held, *prompt_of(2, 30)[1:]]
            check_exact(server, states, prompt, most, ALONE_DISTANCE)
        # a prompt that ends before the tail has its chunks
        check_exact(server, states, tokens[:610], 610 // CHUNK * CHUNK)


def test_a_prompt_that_the_slot_holds_already_is_not_restored(
    models: Path,
) -> None:
    tokens = prompt_of(1)
    with llama_server(write_model(models)) as server, opened(server) as states:
        server.complete(tokens)
        states.store(tokens, 0)
        held = states.load(tokens, 0, held_tokens=PROMPT)
        assert held.reason is Reason.BELOW_MINIMUM
        assert server.complete(tokens).hits == PROMPT - 1


@pytest.mark.slow
def test_a_prompt_longer_than_the_context_loads_what_fits(
    models: Path, tmp_path: Path
) -> None:
    tokens = prompt_of(1, 900)
    model = write_model(models)
    with (
        llama_server(model) as server,
        opened(server, **on_disk(tmp_path)) as states,
    ):
        server.complete(tokens)
        assert states.store(tokens, 0).num_tokens == 900 // STEP * STEP
    with (
        llama_server(model, context=512) as server,
        opened(server, **on_disk(tmp_path)) as states,
    ):
        # of 512 tokens one must be left
        assert states.load(tokens, 0).num_tokens == 448
        assert server.complete(tokens[:500]).hits == 448


# ---- what changes while it runs


@pytest.mark.slow
def test_adapters_that_change_end_storing_and_name_other_kv(models: Path) -> None:
    """The server goes on to use KV of the old scale."""
    tokens = prompt_of(1)
    adapter = str(write_adapter(models))
    with (
        llama_server(write_model(models), lora=[(adapter, 1.0)]) as server,
        opened(server, adapters_are_fixed=True) as states,
    ):
        server.complete(tokens)
        assert states.store(tokens, 0)
        before = states.cache.namespace
        server._answer("POST", "/lora-adapters", '[{"id": 0, "scale": 0.25}]')
        server.complete(tokens)
        refused = states.store(tokens, 0)
        assert refused.reason is Reason.NOT_CACHEABLE
        assert "adapters were changed" in refused.detail
        assert states.load(tokens, 0).num_tokens == 0
        assert states.cache.namespace != before
        server.complete(tokens)
        assert "until it is restarted" in states.store(tokens, 0).detail


@pytest.mark.slow
def test_a_request_with_adapters_of_its_own_is_not_stored(models: Path) -> None:
    tokens = prompt_of(1)
    adapter = str(write_adapter(models))
    with (
        llama_server(write_model(models), lora=[(adapter, 1.0)]) as server,
        opened(server, adapters_are_fixed=True) as states,
    ):
        server.complete(tokens)
        assert states.store(tokens, 0)
        own = [{"id": 0, "scale": 0.25}]
        server.complete(tokens, lora=own)
        refused = states.store(tokens, 0)
        assert refused.reason is Reason.NOT_CACHEABLE
        assert "`lora`" in refused.detail
        # the next request with the same adapters would go on from what is loaded
        control = server.complete(tokens, lora=own, cache_prompt=False)
        refused_load = states.load(tokens, 0)
        assert refused_load.reason is Reason.NOT_CACHEABLE
        assert "`lora`" in refused_load.detail
        answer = server.complete(tokens, lora=own)
        assert answer.distance(control) < 0.02
        server.complete(tokens[:10])
        assert states.load(tokens, 0)


def test_adapters_of_which_the_slots_say_nothing(models: Path) -> None:
    tokens = prompt_of(1)
    options: LlamaOptions = {
        "lora": [(str(write_adapter(models)), 1.0)],
        "says_slots": False,
    }
    with (
        llama_server(write_model(models), **options) as server,
        opened(server, adapters_are_fixed=True) as states,
    ):
        server.complete(tokens, lora=[{"id": 0, "scale": 0.25}])
        stored = states.store(tokens, 0)
        assert stored.reason is Reason.NOT_CACHEABLE
        assert "--no-slots" in stored.detail
        assert not states.load(tokens, 0)


def test_a_scale_that_was_changed_and_changed_back_is_not_stored(
    models: Path,
) -> None:
    """Nothing shows it, so nothing is stored unless the caller says that it does not happen."""
    tokens = prompt_of(1)
    adapter = str(write_adapter(models))
    with (
        llama_server(write_model(models), lora=[(adapter, 1.0)]) as server,
        opened(server) as states,
    ):
        server._answer("POST", "/lora-adapters", '[{"id": 0, "scale": 0.25}]')
        server.complete(tokens)
        server._answer("POST", "/lora-adapters", '[{"id": 0, "scale": 1.0}]')
        refused = states.store(tokens, 0)
        assert refused.reason is Reason.NOT_CACHEABLE
        assert "adapters_are_fixed" in refused.detail


@pytest.mark.slow
def test_adapters_that_change_during_a_restore_empty_the_slot(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt_of(1)
    adapter = str(write_adapter(models))
    with (
        llama_server(write_model(models), lora=[(adapter, 1.0)]) as server,
        opened(server, adapters_are_fixed=True) as states,
    ):
        server.complete(tokens)
        assert states.store(tokens, 0)
        restore = states._server.restore

        def changed_before(slot: int, filename: str, seconds: float) -> int:
            body = '[{"id": 0, "scale": 0.25}]'
            server._answer("POST", "/lora-adapters", body)
            return restore(slot, filename, seconds)

        monkeypatch.setattr(states._server, "restore", changed_before)
        assert states.load(tokens, 0).reason is Reason.NOT_CACHEABLE
        assert server.complete(tokens).hits == 0


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_a_restart_with_other_weights_is_seen_with_a_fixed_marker(
    build: str,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLAMA_MEDIA_MARKER", "<__media__>")
    tokens = prompt_of(1)
    model = tmp_path / "model.gguf"
    shutil.copy(write_model(models), model)
    with llama_server(model, build) as server, opened(server) as states:
        server.complete(tokens)
        assert states.store(tokens, 0)
        other = tmp_path / "other.gguf"
        shutil.copy(write_model(models, seed=1), other)
        other.replace(model)
        server.server.restart()
        server.complete(tokens)
        assert "restarted" in states.store(tokens, 0).detail
        assert states.load(tokens, 0).num_tokens == 0
        # where its port is in another network namespace, nothing would show it
        monkeypatch.setattr(server_probe, "_is_here", lambda _: False)
        with opened(server) as states:
            assert "restarts cannot be noticed" in states.trouble
            assert states.store(tokens, 0).reason is Reason.NOT_CACHEABLE
            assert not states.load(tokens, 0)


def test_a_host_is_here_or_not() -> None:
    assert server_probe._is_here("localhost")
    assert server_probe._is_here("127.0.0.1")
    # of documentation: no machine has it
    assert not server_probe._is_here("192.0.2.1")


@pytest.mark.slow
def test_another_server_at_the_same_address_is_probed_again(models: Path) -> None:
    tokens = prompt_of(1)
    with llama_server(write_model(models)) as server, opened(server) as states:
        server.complete(tokens)
        assert states.store(tokens, 0)
        server.server.restart()
        server.complete(tokens)
        assert "restarted" in states.store(tokens, 0).detail
        assert states.load(tokens, 0)  # the same model: the same name
        server.complete(tokens)
        assert states.store(tokens, 0)


def restart_with(server: LlamaServer, old: str, new: str) -> None:
    """Restart it with other arguments."""
    command = server.server._command

    def changed(port: int) -> list[str]:
        words = list(command(port))
        assert any(old in word for word in words)
        return [word.replace(old, new) for word in words]

    server.server._command = changed
    server.server.restart()
    server.server._command = command


@pytest.mark.slow
def test_trouble_ends_with_a_correct_restart(models: Path) -> None:
    tokens = prompt_of(1)
    with (
        llama_server(write_model(models), reuse=256) as server,
        opened(server) as states,
    ):
        assert "--cache-reuse" in states.trouble
        assert not states.load(tokens, 0)
        restart_with(server, '"n_cache_reuse": 256', '"n_cache_reuse": 0')
        assert states.load(tokens, 0).reason is Reason.ABSENT
        assert states.trouble == ""
        server.complete(tokens)
        assert states.store(tokens, 0)


def test_a_restored_state_that_another_request_removed_is_tried_again(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With unified slots a request to another slot empties this one, now and then."""
    ask = server_probe._ask
    asked = []

    def emptied_once(server, slot, *args, **options):  # type: ignore[no-untyped-def]
        asked.append(slot)
        # two of the probe come before
        if len(asked) == 3:
            server.erase(slot, 10.0)
        return ask(server, slot, *args, **options)

    with llama_server(write_model(models)) as server:
        monkeypatch.setattr(server_probe, "_ask", emptied_once)
        with opened(server) as states:
            assert len(asked) > 3
            assert states.trouble == ""


@pytest.mark.slow
def test_a_model_that_cannot_be_read_costs_the_slot_nothing(
    models: Path, tmp_path: Path
) -> None:
    tokens = prompt_of(1)
    model = tmp_path / "model.gguf"
    shutil.copy(write_model(models), model)
    with llama_server(model) as server, opened(server) as states:
        server.server.restart()
        hidden = model.rename(tmp_path / "hidden")
        server.complete(tokens)
        refused = states.load(tokens, 0)
        assert refused.reason is Reason.NOT_CACHEABLE
        assert "cannot be read" in refused.detail
        assert server.complete(tokens).hits == PROMPT - 1
        # refused at once until the server is another one
        hidden.rename(model)
        assert "cannot be read" in states.load(tokens, 0).detail
        server.server.restart()
        assert states.load(tokens, 0).reason is Reason.ABSENT


@pytest.mark.slow
def test_a_server_with_fewer_slots_and_another_directory_is_a_miss(
    models: Path, tmp_path: Path
) -> None:
    tokens = prompt_of(1)
    other = tmp_path / "other"
    other.mkdir()
    with (
        llama_server(write_model(models), slots=2) as server,
        opened(server) as states,
    ):
        restart_with(server, '"n_parallel": 2', '"n_parallel": 1')
        for _ in range(2):
            refused = states.load(tokens, 1)
            assert refused.reason is Reason.NOT_CACHEABLE
            assert "1 slots now" in refused.detail
        assert states.load(tokens, 0).reason is Reason.ABSENT
        assert "1 slots now" in states.store(tokens, 1).detail
        restart_with(server, str(server.states), str(other))
        server.complete(tokens)
        for _ in range(3):
            refused = states.load(tokens, 0)
            assert refused.reason is Reason.NOT_CACHEABLE
            assert "--slot-save-path" in refused.detail
        # one state, which has nothing of anybody's prompt
        (left,) = other.iterdir()
        assert left.stat().st_size < 100
        server.server.restart()
        assert states.load(tokens, 0).reason is Reason.ABSENT


@pytest.mark.slow
def test_a_cache_that_cannot_be_opened_again_is_a_miss(
    models: Path, tmp_path: Path
) -> None:
    tokens = prompt_of(1)
    model = tmp_path / "model.gguf"
    shutil.copy(write_model(models), model)
    kv = tmp_path / "kv"
    with llama_server(model) as server, opened(server, **on_disk(kv)) as states:
        other = tmp_path / "other.gguf"
        shutil.copy(write_model(models, "qwen3"), other)
        other.replace(model)
        server.server.restart()
        kv.rename(tmp_path / "moved")
        kv.write_text("no directory")
        for _ in range(2):
            assert states.load(tokens, 0).reason is Reason.NOT_CACHEABLE
        with pytest.raises(StoreError, match="was changed"):
            _ = states.cache
        assert states.find(tokens).reason is Reason.NOT_CACHEABLE
        kv.unlink()
        server.server.restart()
        assert states.load(tokens, 0).reason is Reason.ABSENT
        server.complete(tokens)
        assert states.store(tokens, 0)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "lfm2"])
def test_a_minimum_is_compared_with_the_whole_prompt(
    architecture: str, models: Path
) -> None:
    tokens = prompt_of(1)
    with (
        llama_server(write_model(models, architecture)) as server,
        opened(server, min_hit_tokens=500) as states,
    ):
        server.complete(tokens)
        assert states.store(tokens, 0)
        assert states.load(tokens, 0).num_tokens >= PROMPT // CHUNK * CHUNK
        short = tokens[:400]
        server.complete(short, cache_prompt=False)
        assert states.store(short, 0)
        refused = states.load(short, 0)
        assert refused.reason is Reason.BELOW_MINIMUM
        assert "of 500 tokens" in refused.detail


@pytest.mark.slow
def test_close_waits_for_a_call_and_no_call_opens_it_again(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt_of(1)
    probing = threading.Event()
    go_on = threading.Event()
    probe = server_probe._probe

    def held_up(*args: object) -> object:
        probing.set()
        assert go_on.wait(60)
        return probe(*args)  # type: ignore[arg-type]

    with llama_server(write_model(models)) as server:
        states = opened(server, limit_seconds=0.5)
        server.server.restart()
        monkeypatch.setattr(server_probe, "_probe", held_up)
        caller = threading.Thread(
            target=states.load, args=(tokens, 0), kwargs={"limit_seconds": 60}
        )
        caller.start()
        assert probing.wait(60)
        with within(8):
            states.close()
        # it is closed already for whoever calls
        assert states.load(tokens, 0, limit_seconds=0.1).reason in (
            Reason.BUSY,
            Reason.CLOSED,
        )
        go_on.set()
        caller.join()
        assert states._current is None
        assert states.load(tokens, 0).reason is Reason.CLOSED
        assert os.listdir(server.states) == []


def test_a_slot_that_holds_more_than_the_limit_is_not_saved(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt_of(1)
    with (
        llama_server(write_model(models)) as server,
        opened(server, state_bytes=300000) as states,
    ):
        server.complete(tokens)
        saved = []
        monkeypatch.setattr(states._server, "save", lambda *_: saved.append(1))
        refused = states.store(tokens[:70], 0)
        assert refused.reason is Reason.TOO_LARGE
        assert not saved


@pytest.mark.slow
def test_a_stopped_server_ends_no_call_after_its_limit(models: Path) -> None:
    tokens = prompt_of(1)
    with llama_server(write_model(models)) as server, opened(server) as states:
        server.complete(tokens)
        states.store(tokens, 0)
        server.server.stop()
        for call in (states.store, states.load):
            # far below the limits of single requests
            with within(8):
                answer = call(tokens, 0, limit_seconds=0.5)
            assert answer.reason is Reason.DEADLINE, answer
        server.server.cont()
        assert states.load(tokens, 0)


def test_a_server_that_is_gone_is_a_miss(models: Path) -> None:
    tokens = prompt_of(1)
    with llama_server(write_model(models)) as server, opened(server) as states:
        server.server.kill()
        assert states.load(tokens, 0).reason is Reason.IO_ERROR
        assert states.store(tokens, 0).reason is Reason.IO_ERROR
        assert states.stats()["counters"]["miss_not_cacheable"] == 1


def test_a_window_of_full_size_is_not_served(models: Path) -> None:
    """The server believes that it has rows that no saved state has: wrong text, without a sign."""
    with (
        llama_server(write_model(models, "gemma3"), swa_full=True) as server,
        opened(server) as states,
    ):
        assert "--swa-full" in states.trouble
        server.complete(prompt_of(1))
        assert states.store(prompt_of(1), 0).reason is Reason.NOT_CACHEABLE
        assert states.load(prompt_of(1), 0).reason is Reason.NOT_CACHEABLE


@pytest.mark.parametrize("build", BUILDS)
def test_a_server_that_moves_rows_is_not_served(build: str, models: Path) -> None:
    """Its slots hold the tokens of a prompt, and KV that was computed after others."""
    with (
        llama_server(write_model(models), build, reuse=256) as server,
        opened(server) as states,
    ):
        assert "--cache-reuse" in states.trouble
        assert not states.load(prompt_of(1), 0)


def test_tokens_that_are_equal_by_chance_do_not_hide_that_rows_are_moved(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both prompts would begin with two equal tokens, and one too few would be moved."""
    nobodys = server_probe._nobodys_tokens

    def equal(probe: server_probe._Probe, count: int) -> server_probe.Tokens:
        tokens = nobodys(probe, count)
        tokens[1] = tokens[1 + server_probe._LEFT_OUT_TOKENS]
        return tokens

    monkeypatch.setattr(server_probe, "_nobodys_tokens", equal)
    with (
        llama_server(write_model(models), reuse=256) as server,
        opened(server) as states,
    ):
        assert "--cache-reuse" in states.trouble


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_probe_leaves_nothing_that_a_prompt_could_use(
    architecture: str, models: Path
) -> None:
    """It restores states of zeros; the server keeps copies of slots in its RAM."""
    model = write_model(models, architecture)
    with llama_server(model, ram_mib=64) as server, opened(server) as states:
        assert server.post("/slots/0?action=save", filename="x")["n_saved"] == 0
        body = {"content": _PROBE_TEXT, "add_special": True}
        tokens = server.post("/tokenize", **body)["tokens"]
        answer = server.complete(tokens)  # type: ignore[arg-type]
        assert answer.hits == 0
        assert states.trouble == ""


@pytest.mark.slow
def test_an_empty_slot_and_a_large_state_are_refused(models: Path) -> None:
    tokens = prompt_of(1)
    with llama_server(write_model(models)) as server:
        with opened(server) as states:
            erase(server)
            assert states.store(tokens, 0).reason is Reason.ABSENT
            server.complete(tokens)
            assert states.store(tokens, 0)
        with opened(server, state_bytes=50000) as states:
            server.complete(tokens)
            refused = states.store(tokens, 0)
            assert refused.reason is Reason.TOO_LARGE
            assert "raise state_bytes" in refused.detail
            # shorter than what the slot holds, and still not written beyond the limit for long
            assert states.store(tokens[:70], 0).reason is Reason.TOO_LARGE
            assert len(os.listdir(server.states)) == 1


# ---- opening


@pytest.mark.parametrize("build", BUILDS)
def test_a_server_with_a_key_that_says_nothing_of_its_slots(
    build: str, models: Path
) -> None:
    tokens = prompt_of(1)
    options: LlamaOptions = {"key": "secret", "says_slots": False}
    with llama_server(write_model(models), build, **options) as server:
        with pytest.raises(StoreError, match="pass api_key"):
            opened(server)
        with opened(server, api_key="secret") as states:
            server.complete(tokens)
            assert states.store(tokens, 0)
            check_exact(server, states, tokens, PROMPT // STEP * STEP)


def test_wrong_use_says_what_to_do(models: Path, tmp_path: Path) -> None:
    with llama_server(write_model(models), slots=2) as server:
        with pytest.raises(ConfigError, match="--slot-save-path"):
            SlotStates(server.url, tmp_path / "other", **in_memory())
        os.chmod(server.states, 0o755)
        with pytest.raises(StoreError, match="chmod 700"):
            SlotStates(server.url, server.states, **in_memory())
        os.chmod(server.states, 0o700)
        with pytest.raises(ConfigError, match="slot 2 is not one of the 2"):
            SlotStates(server.url, server.states, probe_slot=2, **in_memory())
        with opened(server) as states:
            with pytest.raises(ValueError, match="slot 2"):
                states.load([1, 2, 3], 2)
            with pytest.raises(ValueError, match="flat"):
                states.store(["a"], 0)  # type: ignore[list-item]
        assert states.load([1, 2, 3], 0).reason is Reason.CLOSED
        assert os.listdir(server.states) == []
    with pytest.raises(StoreError, match="is a llama-server running there"):
        SlotStates(server.url, tmp_path / "states", **in_memory())
    for url in ("localhost:8080", "https://127.0.0.1", "http://127.0.0.1:port"):
        with pytest.raises(ConfigError, match="server_url"):
            SlotStates(url, tmp_path / "states", **in_memory())
