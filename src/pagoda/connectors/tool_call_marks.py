"""Tells by the last tokens of an answer whether it ended in a tool call.

Models write a call between marks, such as `<tool_call>` and `</tool_call>`. Most marks are tokens
of their own, which the vocabulary names; others are text, which the chat template shows. What no
rule here knows is no mark: then nothing is said of such answers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagoda.base.log import guarded_logger

log = guarded_logger("pagoda.connectors")

# the last tokens that are looked at: marks, and what may follow them
_TAIL = 16
_NAMES = re.compile(
    r"""
    # </tool_call> </minimax:tool_call> </longcat_tool_call> <|/tool_call|> </|dsml|function_calls>
    <\|?/ (?: [a-z0-9]+ [:|_] | \|\w+\| )? (?: tool | function ) _? calls? (?: [:_]\w+ )? \|?>
    # <|tool_call_end|> <|tool_calls_end|> <|tool_calls_section_end|> [/TOOL_CALLS]
    | <\|tool_calls? (?: _section )? _end\|> | \[/tool_calls\]
    # of single families: functiongemma, Gemma 4, Harmony, Llama 3 and 4, GLM, Command, InternLM
    | <end_function_call> | <tool_call\|> | <\|call\|> | <\|eom_id\|> | <\|python_end\|>
    | <\|observation\|> | <\|end_action\|> | <\|action_end\|>
    """,
    re.VERBOSE,
)
# marks before calls, after which nothing but calls comes, unless there is a mark at their end
_OPEN = {
    "[tool_calls]": "[/tool_calls]",
    "<|tool_call|>": "<|/tool_call|>",
    "<|python_tag|>": "",
}
_TAGS = re.compile(r"<[^<>\s'\"{}]{3,40}>")
_BEFORE = ("x", "}", "}\n", ">", ">\n", " ")
_AFTER = ("", "\n", "\n\n")
# of a mark that is text: its first characters may be one token with what is before it
_MERGED = len("</")


@dataclass(frozen=True)
class ToolCallMarks:
    """The marks of one model. Immutable.

    Args:
        ends: what is at the end of a tool call, in tokens.
        begins: what is at the beginning of calls that have no mark at their end.
        skipped: what may follow a mark: special tokens, white space.
    """

    ends: frozenset[tuple[int, ...]]
    begins: frozenset[int]
    skipped: frozenset[int]

    def end(
        self,
        answer: Sequence[int],
        is_complete: bool,
        stops: Collection[int] = (),
    ) -> bool:
        """Return whether an answer ended in a tool call. Pure.

        Args:
            answer: its tokens.
            is_complete: whether the model itself ended it.
            stops: further tokens that end this answer.
        """
        tail = tuple(answer[-_TAIL:])
        while tail:
            if any(tail[-len(mark) :] == mark for mark in self.ends):
                return True
            if tail[-1] not in self.skipped and tail[-1] not in stops:
                break
            tail = tail[:-1]
        return is_complete and any(mark in answer for mark in self.begins)


def marks_of(tokenizer: Any) -> ToolCallMarks | None:
    """Return the marks of a tokenizer's model, None if it has none that are known. Never raises:
    tokenizers are of many kinds, some of the model's own code.
    """
    try:
        return _found(tokenizer)
    except Exception as trouble:  # noqa: BLE001
        # a boundary: an engine starts without it
        log.info(
            "how answers end is not read from their tokens: %s of the tokenizer: %s",
            type(trouble).__name__,
            trouble,
        )
        return None


def _found(tokenizer: Any) -> ToolCallMarks | None:
    special = dict(
        zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=False)
    )
    named: dict[str, int] = {**tokenizer.get_added_vocab(), **special}
    # every answer ends in it
    eos = getattr(tokenizer, "eos_token_id", None)
    plain = {
        _plain(name): int(token) for name, token in named.items() if token != eos
    }
    ends: set[tuple[int, ...]] = {
        (token,) for name, token in plain.items() if _NAMES.fullmatch(name)
    }
    begins = {
        plain[name]
        for name, end in _OPEN.items()
        if name in plain and end not in plain
    }
    for mark in _marks_in_text(tokenizer):
        if mark not in named:
            ends.update(_as_text(tokenizer, mark))
    if not ends and not begins:
        log.debug("no marks of tool calls are known of this model")
        return None
    skipped = {int(token) for token in tokenizer.all_special_ids}
    for blank in _AFTER[1:]:
        skipped.update(_encoded(tokenizer, blank))
    # in place of a blank that the vocabulary does not have
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is not None:
        skipped.discard(unknown)
    log.debug(
        "an answer ends in a tool call if it ends in %s, or has %s",
        sorted(ends),
        sorted(begins),
    )
    return ToolCallMarks(frozenset(ends), frozenset(begins), frozenset(skipped))


def _plain(name: str) -> str:
    """Return a token's name in lower case, without the signs that stand for ordinary ones."""
    return name.lower().replace("\uff5c", "|").replace("\u2581", "_")


def _marks_in_text(tokenizer: Any) -> set[str]:
    """Return the marks that a model's chat templates show."""
    template = getattr(tokenizer, "chat_template", None)
    texts = template.values() if isinstance(template, Mapping) else [template]
    return {
        tag
        for text in texts
        if isinstance(text, str)
        for tag in _TAGS.findall(text)
        if _NAMES.fullmatch(_plain(tag))
    }


def _as_text(tokenizer: Any, mark: str) -> Iterator[tuple[int, ...]]:
    """Yield the tokens in which each text ends that ends in this mark."""
    for after in _AFTER:
        texts = [_encoded(tokenizer, before + mark + after) for before in _BEFORE]
        common = _common_end(texts)
        shown = str(tokenizer.decode(list(common))).strip()
        if len(shown) >= len(mark) - _MERGED and mark.endswith(shown):
            yield common


def _encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(map(int, tokenizer.encode(text, add_special_tokens=False)))


def _common_end(texts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    shortest = min(map(len, texts))
    for length in range(shortest, 0, -1):
        ends = {text[-length:] for text in texts}
        if len(ends) == 1:
            return ends.pop()
    return ()
