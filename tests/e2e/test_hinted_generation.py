"""Hints of `CachedModel.generate` reach the cache, and change no text."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from pagoda import RequestHints  # noqa: E402
from pagoda.policy.reuse_context import Ending  # noqa: E402
from tests.e2e.house import House  # noqa: E402
from tests.e2e.test_call_conditions import llama, texts  # noqa: E402


@pytest.mark.parametrize("stores", [True, False])
def test_a_session_is_known_and_ends(house: House, stores: bool) -> None:
    model = llama()
    cached = house.open(model)
    ids = torch.arange(1, 60)[None]
    plain = texts(model, ids)
    texts(cached, ids, hints=RequestHints(session="s", ending="turn"))
    over = RequestHints(session="s", session_end=True)
    assert texts(cached, ids, hints=over, store=stores) == plain
    assert cached.cache.stats()["hints"] == {
        "accepted": {"session": 2, "ending": 1, "session_end": 1}
    }
    _, ledger = cached.cache._tiers.ledgers()[0]
    contexts = ledger.columns.contexts
    assert contexts is not None
    # its own look-ups and stores are no use by others
    assert set((contexts.of_slots[contexts.marks > 0] >> 4 & 7).tolist()) == {4}


def test_what_is_no_hint_is_refused_before_anything_is_computed(
    house: House,
) -> None:
    cached = house.open(llama())
    with pytest.raises(ValueError, match=r"pass a pagoda\.RequestHints"):
        texts(cached, torch.arange(1, 60)[None], hints={"drop": True})


MARK, END, WORD = 70, 71, 72


def _tokenizer() -> object:
    """A tokenizer of the tiny model, with a mark of tool calls."""
    names = {f"t{number}": number for number in range(97)}
    del names[f"t{MARK}"], names["t96"]
    # Transformers asks for it, with stop strings
    names["abcdef"] = 96
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {**names, "</tool_call>": MARK}, unk_token="t0"
        )
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_tokens([tokenizers.AddedToken("</tool_call>", normalized=False)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="t0", eos_token=f"t{END}"
    )


def _answer(cached, seed: int, word: int, **more: object) -> list[int]:
    """Ask for a word and the end that models write."""
    torch.manual_seed(seed)
    ids = torch.randint(1, 60, (1, 59))
    out = cached.generate(
        ids,
        max_new_tokens=4,
        min_new_tokens=2,
        do_sample=False,
        eos_token_id=END,
        sequence_bias=[[[word], 100.0], [[END], 200.0]],
        **more,
    )
    return out[0, ids.shape[1] :].tolist()


def test_a_tool_call_is_known_if_the_call_has_its_tokenizer(
    house: House,
) -> None:
    cached = house.open(llama())
    words = _tokenizer()

    def told() -> dict[str, dict[str, int]]:
        return cached.cache.stats().get("hints", {})

    # the control: nothing begins without a tool call, or without a tokenizer
    assert _answer(cached, 1, WORD, tokenizer=words) == [WORD, WORD, END]
    assert _answer(cached, 2, MARK) == [MARK, MARK, END]
    assert told() == {}
    _answer(cached, 3, MARK, tokenizer=words)
    assert told() == {"accepted": {"ending": 1}}
    _answer(cached, 4, WORD, tokenizer=words)
    # a stop string ends a turn too
    _answer(cached, 5, WORD, tokenizer=words, stop_strings=[f"t{WORD}"])
    _answer(cached, 6, WORD)
    assert told() == {"accepted": {"ending": 3}}
    _, ledger = cached.cache._tiers.ledgers()[0]
    contexts = ledger.columns.contexts
    assert contexts is not None
    endings = contexts.of_slots[contexts.marks > 0] >> 4 & 7
    assert set(endings.tolist()) == {0, Ending.TOOL_CALL, Ending.TURN}


def test_no_ending_is_told_without_leave(house: House) -> None:
    cached = house.open(llama(), hints="never")
    _answer(cached, 3, MARK, tokenizer=_tokenizer())
    assert cached.cache.stats().get("hints", {}) == {}


def test_a_tokenizer_that_fails_loses_no_text(house: House) -> None:
    cached = house.open(llama())
    answer = [MARK, MARK, END]
    assert _answer(cached, 3, MARK, tokenizer="a name") == answer
    assert cached.last_stored
