"""How an answer ended is read from its last tokens: no client says anything."""

from __future__ import annotations

import importlib.util
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from pagoda.connectors.tool_call_marks import marks_of
from pagoda.policy.reuse_context import Ending
from pagoda_tools.replay import read_trace
from tests.vllm import calls, stores
from tests.vllm.calls import MARK, WORD
from tests.vllm.engines import CHUNK, Engine, connector, options
from tests.vllm.models import EOS, make_llama, prompt

# of vLLM's own parsers of tool calls
MARKS = [
    "</tool_call>",
    "</tool_calls>",
    "</TOOLCALL>",
    "</minimax:tool_call>",
    "</seed:tool_call>",
    "</longcat_tool_call>",
    "</dots_function_call>",
    "</ifm|tool_calls>",
    "<|/tool_call|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool_calls_end｜>",
    "</｜DSML｜function_calls>",
    "<end_function_call>",
    "<tool_call|>",
    "<|call|>",
    "<|eom_id|>",
    "<|observation|>",
    "<|END_ACTION|>",
    "<|action_end|>",
    "<|python_end|>",
]
OTHERS = [
    "<tool_call>",
    "</tool_response>",
    "</tools>",
    "</think>",
    "</function>",
    "<|im_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_calls_section_begin|>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁sep｜>",
    "<|call_to_action|>",
    "<|start_function_call|>",
]
END = 1


def _words(*added: str, **more: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of words, with these tokens from number 4 on."""
    tokenizer = Tokenizer(
        WordLevel({"?": 0, "<end>": END, "a": 2, "b": 3}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="?", **{"eos_token": "<end>"} | more
    )


@pytest.mark.parametrize("mark", MARKS)
def test_an_answer_ends_in_a_tool_call_if_a_mark_is_its_end(mark: str) -> None:
    marks = marks_of(_words(mark))
    assert marks is not None
    for is_complete in (True, False):
        assert marks.end([2, 3, 4, END], is_complete)
        assert marks.end([2, 3, 4], is_complete)
        # what is not the end of the answer says nothing
        assert not marks.end([2, 4, 3, END], is_complete)
        assert not marks.end([4, END, 2], is_complete)
        assert not marks.end([2, 3, END], is_complete)
        assert not marks.end([], is_complete)
    # a token that a request has named as its end
    assert not marks.end([4, 3], True)
    assert marks.end([4, 3], True, {3})


@pytest.mark.parametrize("name", OTHERS)
def test_other_tokens_are_no_marks(name: str) -> None:
    assert marks_of(_words(name)) is None


def test_what_ends_every_answer_is_no_mark() -> None:
    assert marks_of(_words("<|eom_id|>", eos_token="<|eom_id|>")) is None


def test_calls_without_a_mark_at_their_end_are_known_by_their_beginning() -> None:
    marks = marks_of(_words("[TOOL_CALLS]"))
    assert marks is not None
    assert marks.end([2, 4, 3, 3, END], True)
    # the limit of tokens came first
    assert not marks.end([2, 4, 3, 3], False)
    assert not marks.end([2, 3, 3, END], True)
    closed = marks_of(_words("[TOOL_CALLS]", "[/TOOL_CALLS]"))
    assert closed is not None
    assert not closed.end([2, 4, 3, 3, END], True)
    assert closed.end([2, 4, 3, 5, END], True)


@pytest.mark.parametrize(
    "merged", [[], ["}\n</", ">\n"], ["}</", "tool_call>", "\n\n"]]
)
def test_a_mark_that_is_text_is_known_by_the_chat_template(
    merged: list[str],
) -> None:
    """`merged`: texts that are tokens of their own, across the ends of the mark."""
    corpus = [
        "{'name': 'x'}\n</tool_call>\n",
        "a tool that makes a call",
        *merged,
    ]
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=not merged
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=320,
        min_frequency=1,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=10,
    )
    tokenizer.train_from_iterator(merged * 50 or corpus, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    assert marks_of(fast) is None
    fast.chat_template = (
        "{% for call in calls %}<tool_call>\n{{ call }}\n</tool_call>{% endfor %}"
    )
    marks = marks_of(fast)
    assert marks is not None

    def ends(text: str) -> bool:
        ids = fast.encode(text, add_special_tokens=False)
        return marks.end([*ids, fast.eos_token_id], True)

    for before in ("{}", "{}\n", "abc", ">\n", "1 "):
        for after in ("", "\n", "\n\n"):
            assert ends(f"{before}</tool_call>{after}")
    assert not ends("a tool_call")
    assert not ends("</tool_call> was the mark")
    assert not ends("</tool>")


@pytest.mark.parametrize("name", ["tekken_240911.json", "tokenizer.model.v3"])
def test_a_tokenizer_of_mistral(name: str, tmp_path: Path) -> None:
    from vllm.tokenizers.mistral import MistralTokenizer

    spec = importlib.util.find_spec("mistral_common")
    assert spec is not None and spec.origin is not None
    (source,) = (Path(spec.origin).parent / "data").glob(
        name if name.startswith("tekken") else "*240323.model.v3"
    )
    as_named = "tekken.json" if name.startswith("tekken") else name
    shutil.copy(source, tmp_path / as_named)
    tokenizer = MistralTokenizer.from_pretrained(tmp_path)
    marks = marks_of(tokenizer)
    assert marks is not None
    call = tokenizer.get_vocab()["[TOOL_CALLS]"]
    text = tokenizer.encode('[{"name": "x"}]', add_special_tokens=False)
    assert marks.end([call, *text, tokenizer.eos_token_id], True)
    assert not marks.end([*text, tokenizer.eos_token_id], True)


class Strange(PreTrainedTokenizerFast):
    """A tokenizer of a model's own code, which lacks what others have."""

    def get_added_vocab(self) -> dict[str, int]:
        """Raise."""
        raise NotImplementedError("not here")


def test_a_tokenizer_that_fails_breaks_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = _words("</tool_call>")
    strange = Strange(tokenizer_object=words.backend_tokenizer)
    with caplog.at_level(logging.INFO, logger="pagoda.connectors"):
        assert marks_of(strange) is None
        assert marks_of(None) is None
    assert [record.levelname for record in caplog.records] == ["INFO"] * 2
    assert "not here" in caplog.text


# ---- engines

CHUNKS = 3
TOKENS = CHUNKS * CHUNK


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a mark of tool calls."""
    directory = make_llama(tmp_path_factory.mktemp("callers") / "llama")
    calls.write_tokenizer(directory)
    return directory


def _ask(engine: Engine, host: Path, seed: int, word: int, stops: bool) -> None:
    """Let an engine answer a prompt; wait until that is stored."""
    before = stores.counters(host)["stored_chunks"] if stores.stores(host) else 0
    answer = engine.call(calls.answer, prompt(seed, TOKENS), word, stops)
    assert answer == [word] * 3 + [EOS] * stops
    stores.wait_until(
        lambda: stores.counters(host)["stored_chunks"] == before + CHUNKS,
        "a stored prompt",
    )


def _wait_for(engine: Engine, answers: int) -> list[int]:
    """Wait until so many endings were told; return those that chunks have."""
    expected = {"accepted": {"ending": answers}}
    stores.wait_until(
        lambda: engine.call(calls.told)[0] == expected, "the endings"
    )
    endings: list[int] = engine.call(calls.told)[1]
    return endings


def test_endings_are_hints_from_the_first_tool_call_on(
    caller: Path, session_shm: Path, logs: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    host = session_shm / "calls"
    engine = Engine(
        "calls",
        logs / "calls.log",
        **options(caller),
        **connector(host, record=str(trace)),
    )
    # the control: answers without a call begin nothing
    _ask(engine, host, 1, WORD, True)
    _ask(engine, host, 2, WORD, False)
    assert engine.call(calls.told) == ({}, [])
    _ask(engine, host, 3, MARK, True)
    assert _wait_for(engine, 1) == [Ending.TOOL_CALL] * CHUNKS
    _ask(engine, host, 4, WORD, True)
    _wait_for(engine, 2)
    _ask(engine, host, 5, WORD, False)
    _wait_for(engine, 3)
    _ask(engine, host, 6, MARK, False)
    endings = _wait_for(engine, 4)
    assert endings == sorted(
        [Ending.TOOL_CALL] * 2 * CHUNKS
        + [Ending.TURN] * CHUNKS
        + [Ending.OTHER] * CHUNKS
    )
    engine.stop()
    stops = [line.stop for line in read_trace(trace)]
    assert stops[3:] == ["stop", "length", "tool_calls"]


@pytest.mark.parametrize(
    ("name", "extra", "more"),
    [
        ("never", {"hints": "never"}, {}),
        ("untokenized", {}, {"skip_tokenizer_init": True}),
    ],
)
def test_nothing_is_told_without_leave_or_without_a_tokenizer(
    caller: Path,
    session_shm: Path,
    logs: Path,
    name: str,
    extra: dict[str, Any],
    more: dict[str, Any],
) -> None:
    host = session_shm / name
    engine = Engine(
        name,
        logs / f"{name}.log",
        **options(caller, **more),
        **connector(host, **extra),
    )
    _ask(engine, host, 1, MARK, True)
    _ask(engine, host, 2, MARK, False)
    assert engine.call(calls.told) == ({}, [])
    engine.stop()
