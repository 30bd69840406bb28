"""Every pair of the servers' settings through the proxy: what it loads is what the slot had."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import pytest

from testbed.llama_servers import (
    ONLY_LETTERS,
    Completion,
    LlamaServer,
    llama_server,
)
from testbed.tiny_gguf import WINDOWS, write_model
from tests.llama_proxy.kit import CHUNK, RunningProxy, forget, running_proxy
from tests.llamacpp.kit import (
    PROMPT,
    WINDOW_DISTANCE,
    check_equal,
    erase,
    prompt_of,
)
from tests.llamacpp.settings import all_pairs, keeps_checkpoints, options_of

CHOSEN = all_pairs(random.Random(1))


class Asked(NamedTuple):
    """An answer through the proxy, and what it says of it."""

    answer: Completion
    slot: int
    loaded: int
    why: str


def asked(proxy: RunningProxy, tokens: list[int]) -> Asked:
    answer = proxy.complete(
        tokens, n_probs=10, return_tokens=True, logit_bias=ONLY_LETTERS
    )
    assert answer.status == 200, answer.body
    told = answer.told
    return Asked(
        Completion(answer.json),
        int(told["slot"]),
        int(told["loaded"]),
        told.get("why", ""),
    )


def emptied(server: LlamaServer, slots: int) -> None:
    for slot in range(slots):
        erase(server, slot)


def check_through_the_proxy(
    settings: dict[str, object], models: Path, disk: Path
) -> str:
    """Let a prompt come back after a restart of the proxy; return what was compared."""
    model = write_model(models, str(settings["architecture"]))
    options = options_of(settings)
    with llama_server(model, str(settings["build"]), **options) as server:
        if keeps_checkpoints(settings):
            return check_loaded(server, settings, options["slots"], disk)
        if settings["architecture"] in WINDOWS:
            return check_never_loaded(server, options["slots"], disk)
        return check_only_continued(server, options["slots"], disk)


def check_loaded(
    server: LlamaServer, settings: dict[str, object], slots: int, disk: Path
) -> str:
    tokens = prompt_of(1)
    with running_proxy(server, disk) as proxy:
        cold = asked(proxy, tokens)
        assert cold.loaded == 0
    emptied(server, slots)
    with running_proxy(server, disk) as proxy:
        again = asked(proxy, tokens)
    assert again.loaded >= PROMPT // CHUNK * CHUNK, settings
    assert again.answer.tokens == cold.answer.tokens, settings
    emptied(server, slots)
    server.complete(tokens[: again.loaded], again.slot, predict=0)
    control = server.complete(tokens, again.slot)
    is_window = settings["architecture"] in WINDOWS
    most = WINDOW_DISTANCE if is_window else 0.0
    assert not is_window or again.answer.distance(cold.answer) <= most
    check_equal(again.answer, control, min(again.loaded, PROMPT - 1), most)
    return f"loaded {again.loaded}, distance {again.answer.distance(control)}"


def check_never_loaded(server: LlamaServer, slots: int, disk: Path) -> str:
    tokens = prompt_of(1)
    with running_proxy(server, disk) as proxy:
        cold = asked(proxy, tokens)
    emptied(server, slots)
    with running_proxy(server, disk) as proxy:
        again = asked(proxy, tokens)
    assert again.answer.hits == again.loaded == 0
    assert again.answer.tokens == cold.answer.tokens
    assert "saves no checkpoints" in again.why
    return f"never loaded: {again.why}"


def check_only_continued(server: LlamaServer, slots: int, disk: Path) -> str:
    tokens = prompt_of(1)
    with running_proxy(server, disk) as proxy:
        cold = asked(proxy, tokens)
    saved = [*tokens, *cold.answer.tokens[:-1]]
    longer = [*tokens, *cold.answer.tokens, *prompt_of(2, 20)[1:]]
    emptied(server, slots)
    with running_proxy(server, disk) as proxy:
        again = asked(proxy, tokens)
        emptied(server, slots)
        forget(proxy)
        goes_on = asked(proxy, longer)
    assert again.answer.hits == again.loaded == 0
    assert again.answer.tokens == cold.answer.tokens
    assert "only where its state was kept" in again.why
    assert goes_on.loaded == len(saved)
    emptied(server, slots)
    # the slot in memory that has computed the prompt and the answer
    server.complete(tokens, goes_on.slot)
    control = server.complete(longer, goes_on.slot)
    check_equal(goes_on.answer, control, len(saved))
    return f"only continued: {again.why}"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_some_pairs_of_settings_are_exact(
    number: int, models: Path, tmp_path: Path
) -> None:
    check_through_the_proxy(CHOSEN[number], models, tmp_path)


@pytest.mark.soak
def test_every_pair_of_settings_is_exact(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(CHOSEN) <= 60
    for number, settings in enumerate(CHOSEN):
        compared = check_through_the_proxy(
            settings, models, tmp_path / str(number)
        )
        with capsys.disabled():
            print(f"\n{number}: {settings}: {compared}", end="", flush=True)
