"""Every pair of the servers' settings through the proxy: what it loads is what the slot had."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from testbed.llama_servers import ONLY_LETTERS, Completion, llama_server
from testbed.tiny_gguf import WINDOWS, write_model
from tests.llama_proxy.kit import CHUNK, RunningProxy, running_proxy
from tests.llamacpp.kit import (
    PROMPT,
    WINDOW_DISTANCE,
    check_equal,
    erase,
    prompt_of,
)
from tests.llamacpp.settings import all_pairs, options_of

CHOSEN = all_pairs(random.Random(1))


def asked(proxy: RunningProxy, tokens: list[int]) -> tuple[Completion, int, int]:
    """Return an answer through the proxy, its slot, and the tokens that were loaded for it."""
    answer = proxy.complete(
        tokens, n_probs=10, return_tokens=True, logit_bias=ONLY_LETTERS
    )
    assert answer.status == 200, answer.body
    told = answer.told
    return Completion(answer.json), int(told["slot"]), int(told["loaded"])


def check_through_the_proxy(
    settings: dict[str, object], models: Path, disk: Path
) -> None:
    architecture = str(settings["architecture"])
    model = write_model(models, architecture)
    tokens = prompt_of(1)
    options = options_of(settings)
    slots = range(options["slots"])
    with llama_server(model, str(settings["build"]), **options) as server:
        with running_proxy(server, disk) as proxy:
            cold, _, loaded = asked(proxy, tokens)
            assert loaded == 0
        for slot in slots:
            erase(server, slot)
        with running_proxy(server, disk) as proxy:
            answer, slot, loaded = asked(proxy, tokens)
        assert loaded >= PROMPT // CHUNK * CHUNK, settings
        assert answer.tokens == cold.tokens, settings
        for each in slots:
            erase(server, each)
        server.complete(tokens[:loaded], slot, predict=0)
        control = server.complete(tokens, slot)
        most = WINDOW_DISTANCE if architecture in WINDOWS else 0.0
        check_equal(answer, control, min(loaded, PROMPT - 1), most)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_some_pairs_of_settings_are_exact(
    number: int, models: Path, tmp_path: Path
) -> None:
    check_through_the_proxy(CHOSEN[number], models, tmp_path)


@pytest.mark.soak
def test_every_pair_of_settings_is_exact(models: Path, tmp_path: Path) -> None:
    for number, settings in enumerate(CHOSEN):
        print(number, settings)
        check_through_the_proxy(settings, models, tmp_path / str(number))
