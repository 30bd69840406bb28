"""The prompts for measuring quality: one JSON object per line.

    {"documents": [TEXT, ...], "question": TEXT, "answer": TEXT}     for blending and codecs; the
                                                                     answer is optional
    {"prompt": TEXT, "answer": TEXT}                                 for codecs only

TEXT is a text, or a list of token ids. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from reprlib import repr as shown  # values in a line may be of any length
from typing import NamedTuple, Protocol

import msgspec
from blake3 import blake3

_MOST_TOKENS = 2**20  # the most tokens of one prompt
# the tokens that an answer may have more than the expected text, which may be split differently in
# its context
_MORE_TOKENS = 2


class Tokenizer(Protocol):
    """The methods of a Transformers tokenizer that are used."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""


class ExpectedAnswer(NamedTuple):
    """An expected answer. An answer of the model is right if it begins with this one."""

    ids: list[int]  # empty for a text
    text: str  # empty for ids
    new_tokens: int  # the most tokens that the model must write for it


class QualityPrompt(NamedTuple):
    """One prompt. Without documents the whole prompt is the question."""

    line: int
    documents: list[list[int]]
    question: list[int]
    expected: ExpectedAnswer | None

    @property
    def tokens(self) -> list[int]:
        """The whole prompt."""
        return [
            token for piece in (*self.documents, self.question) for token in piece
        ]


class BadLine(NamedTuple):
    """A line that cannot be used, and why."""

    line: int
    why: str


class _NoPrompt(ValueError):
    """The reason why a line cannot be used."""


def read_prompts(
    path: Path,
    tokenizer: Tokenizer | None,
    *,
    vocabulary: int,
    most_tokens: int | None = None,
) -> tuple[list[QualityPrompt], list[BadLine]]:
    """Return the prompts of a file, and its bad lines. Empty lines are ignored.

    Args:
        path: the file.
        tokenizer: for text; None: a line with text is a bad one.
        vocabulary: the number of tokens that the model knows.
        most_tokens: the most tokens of a prompt and its answer that the model accepts; None: no
            limit.

    Raises:
        OSError: the file cannot be read.
    """
    good = list[QualityPrompt]()
    bad = list[BadLine]()
    reader = _LineReader(
        tokenizer, vocabulary, min(most_tokens or _MOST_TOKENS, _MOST_TOKENS)
    )
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                good.append(reader.prompt(number, line))
            except _NoPrompt as why:
                bad.append(BadLine(number, str(why)))
    return good, bad


def prompts_digest(prompts: Sequence[QualityPrompt]) -> str:
    """Return 32 hex characters that identify prompts and expected answers. Pure."""
    named = [(one.documents, one.question, one.expected) for one in prompts]
    return str(
        blake3(
            msgspec.json.encode(named), derive_key_context="PagodaKV prompts"
        ).hexdigest(16)
    )


class _LineReader:
    """Makes prompts from lines. Not thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer | None, vocabulary: int, most_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._most_tokens = most_tokens

    def prompt(self, number: int, line: bytes) -> QualityPrompt:
        """Return the prompt of a line. Raises _NoPrompt."""
        try:
            found = msgspec.json.decode(line)
        except (
            msgspec.DecodeError,
            UnicodeDecodeError,
            RecursionError,
        ) as trouble:
            raise _NoPrompt(f"is not JSON: {trouble}") from None
        if not isinstance(found, dict):
            raise _NoPrompt(
                'is not an object such as {"documents": [...], "question": "..."}'
            )
        has_documents = "documents" in found
        known = (
            {"documents", "question", "answer"}
            if has_documents
            else {"prompt", "answer"}
        )
        unknown = sorted(found.keys() - known)
        if unknown:
            raise _NoPrompt(
                f"has {shown(unknown[0])}, which is none of {', '.join(sorted(known))}"
            )
        if has_documents:
            documents = self._documents(found["documents"])
            question = self._ids("question", found.get("question"), first=False)
        else:
            documents = []
            question = self._ids("prompt", found.get("prompt"), first=True)
        prompt = QualityPrompt(
            number, documents, question, self._expected(found.get("answer"))
        )
        tokens = len(prompt.tokens)
        if tokens > self._most_tokens:
            raise _NoPrompt(
                f"has {tokens:,} tokens, and the model takes at most {self._most_tokens:,}"
            )
        if tokens < 2:
            raise _NoPrompt("has one token: nothing before it could be reused")
        return prompt

    def _documents(self, value: object) -> list[list[int]]:
        if not isinstance(value, list) or not value:
            raise _NoPrompt("documents must be a list with at least one document")
        return [
            self._ids(f"documents[{number}]", one, first=number == 0)
            for number, one in enumerate(value)
        ]

    def _expected(self, value: object) -> ExpectedAnswer | None:
        if value is None:
            return None
        if isinstance(value, str):
            ids = self._ids("answer", value.strip(), first=False)
            return ExpectedAnswer([], value.strip(), len(ids) + _MORE_TOKENS)
        ids = self._ids("answer", value, first=False)
        return ExpectedAnswer(ids, "", len(ids))

    def _ids(self, name: str, value: object, *, first: bool) -> list[int]:
        """Return token ids; special tokens are added to the text that begins the prompt, as
        `generate` does.
        """
        if isinstance(value, str):
            if self._tokenizer is None:
                raise _NoPrompt(
                    f"{name} is text, and the model has no tokenizer: give token ids"
                )
            value = (
                self._tokenizer.encode(value, add_special_tokens=first)
                if value
                else []
            )
        if not isinstance(value, list):
            raise _NoPrompt(f"{name} must be text or a list of token ids")
        if not value:
            raise _NoPrompt(f"{name} is empty")
        for token in value:
            if type(token) is not int or not 0 <= token < self._vocabulary:
                raise _NoPrompt(
                    f"{name} has {shown(token)}, and token ids are from 0 to "
                    f"{self._vocabulary - 1:,}"
                )
        return value
