from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagoda_tools.quality.prompt_lines import (
    BadLine,
    ExpectedAnswer,
    QualityPrompt,
    prompts_digest,
    read_prompts,
)


class Letters:
    """A tokenizer: a token a letter, and one before the text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))


def read(
    path: Path,
    *lines: object,
    tokenizer: Letters | None = None,
    most: int | None = None,
) -> tuple[list[QualityPrompt], list[BadLine]]:
    texts = [
        line if isinstance(line, bytes) else json.dumps(line).encode()
        for line in lines
    ]
    (path / "prompts.jsonl").write_bytes(b"\n".join(texts))
    return read_prompts(
        path / "prompts.jsonl", tokenizer, vocabulary=200, most_tokens=most
    )


def test_prompts_may_be_ids_or_text(tmp_path: Path) -> None:
    good, bad = read(
        tmp_path,
        {"documents": [[1, 2], [3]], "question": [4], "answer": [5, 6]},
        b"",
        {"documents": ["ab", "c"], "question": "d", "answer": " ef "},
        {"prompt": "gh"},
        tokenizer=Letters(),
    )
    assert bad == []
    assert good == [
        QualityPrompt(1, [[1, 2], [3]], [4], ExpectedAnswer([5, 6], "", 2)),
        QualityPrompt(3, [[1, 97, 98], [99]], [100], ExpectedAnswer([], "ef", 4)),
        QualityPrompt(4, [], [1, 103, 104], None),
    ]
    assert good[1].tokens == [1, 97, 98, 99, 100]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b'{"prompt": "\xff"}', "is not JSON"),
        (b'{"\xff": [1]}', "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        ([1], "is not an object"),
        ({}, "prompt must be text or a list of token ids"),
        ({"documents": [[1]]}, "question must be text"),
        ({"documents": [], "question": [1]}, "at least one document"),
        ({"documents": [[]], "question": [1]}, "documents[0] is empty"),
        ({"documents": [[1], [2, "x"]], "question": [1]}, "documents[1] has 'x'"),
        ({"documents": [[1, True]], "question": [1]}, "documents[0] has True"),
        (
            {"documents": [[1, 200]], "question": [1]},
            "documents[0] has 200, and token ids are from 0 to 199",
        ),
        ({"documents": [[1, -1]], "question": [1]}, "documents[0] has -1"),
        (
            {"documents": ["a"], "question": [1]},
            "documents[0] is text, and the model has no tokenizer",
        ),
        ({"documents": [[1]], "question": [1], "answer": ""}, "no tokenizer"),
        ({"documents": [[1]], "question": [1], "answer": []}, "answer is empty"),
        (
            {"documents": [[1]], "question": [1], "answer": 3},
            "answer must be text",
        ),
        (
            {"documents": [[1]], "question": [1], "prompt": [1]},
            "has 'prompt', which is none of",
        ),
        (
            {"prompt": [1, 2], "question": [1]},
            "has 'question', which is none of answer, prompt",
        ),
        ({"k" * 100_000: [1]}, "which is none of answer, prompt"),
        ({"prompt": ["k" * 100_000]}, "prompt has 'kkk"),
        ({"prompt": [1]}, "has one token"),
        ({"prompt": [1] * 11}, "has 11 tokens, and the model takes at most 10"),
    ],
)
def test_every_bad_line_is_named(tmp_path: Path, line: object, said: str) -> None:
    good, bad = read(
        tmp_path, {"prompt": [1, 2]}, line, {"prompt": [1, 2]}, line, most=10
    )
    assert [one.line for one in good] == [1, 3]
    assert [one.line for one in bad] == [2, 4]
    assert all(said in one.why and len(one.why) < 200 for one in bad), bad


def test_the_digest_names_prompts_and_answers(tmp_path: Path) -> None:
    lines = [
        {"documents": [[1], [2]], "question": [3]},
        {"documents": [[1, 2]], "question": [3]},
        {"prompt": [1, 2, 3]},
        {"prompt": [1, 2, 3], "answer": [4]},
    ]
    digests = {prompts_digest(read(tmp_path, line)[0]) for line in lines}
    assert len(digests) == 4
    assert prompts_digest(read(tmp_path, lines[0])[0]) in digests
