"""Conversations as people have them with a server, and what a bare server answers to the same."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from testbed.llama_client import (
    CHAT,
    COMPLETION,
    OPENAI_COMPLETION,
    LlamaClient,
    Reply,
)
from testbed.llama_servers import ONLY_LETTERS

# Two next tokens whose log-probabilities differ by less may change places when they are computed
# in other batches. KV of another prompt changes them by 0.1 and more.
TIE = 1e-3


class Question(NamedTuple):
    """One request: which route, and its body."""

    route: str
    body: Mapping[str, object]


class Conversation:
    """A prompt that grows: a system text that others share, then words of its own and answers."""

    def __init__(self, rng: random.Random, system: str) -> None:
        self._rng = rng
        self._kind = rng.choice(("tokens", "text", "chat"))
        self._system = system
        self._messages = [self._said_by_user(60)]

    def __len__(self) -> int:
        """Return about how many tokens it has."""
        said = sum(len(message["content"]) + 30 for message in self._messages)
        return len(self._system) + said

    def question(self, predict: int) -> Question:
        """Return a request for the next words."""
        if self._kind == "chat":
            system = {"role": "system", "content": self._system}
            messages = [system, *self._messages]
            return Question(CHAT, {"messages": messages, "max_tokens": predict})
        text = self._system
        text += "".join(message["content"] for message in self._messages)
        prompt: str | list[int] = text
        if self._kind == "tokens":
            prompt = [1, *tokens_of(text)]
        if self._rng.random() < 0.5:
            return Question(
                OPENAI_COMPLETION, {"prompt": prompt, "max_tokens": predict}
            )
        return Question(COMPLETION, {"prompt": prompt, "n_predict": predict})

    def go_on(self, answer: str) -> None:
        """Add an answer, and what the user says to it."""
        self._messages.append({"role": "assistant", "content": answer})
        self._messages.append(self._said_by_user(90))

    def edit(self) -> None:
        """Change the last words of the user, as people do before they ask again."""
        self._messages[-1] = self._said_by_user(90)

    def _said_by_user(self, most: int) -> dict[str, str]:
        text = words(self._rng, self._rng.randint(1, most))
        return {"role": "user", "content": text}


def words(rng: random.Random, count: int) -> str:
    """Return that many random letters, each of which is a token."""
    return "".join(chr(rng.randint(ord("a"), ord("z"))) for _ in range(count))


def tokens_of(text: str) -> list[int]:
    """Return the tokens of letters in a model with a vocabulary of bytes."""
    return [3 + byte for byte in text.encode()]


class Controls:
    """A bare server that computes each prompt from its first token."""

    def __init__(self, client: LlamaClient) -> None:
        self._client = client
        self._known: dict[str, Reply] = {}
        self.counts: Counter[str] = Counter()

    def set_scales(self, scales: Sequence[Mapping[str, object]]) -> None:
        """Change the scale of adapters; all is computed anew."""
        self._client.post("/lora-adapters", scales)
        self._known.clear()

    def of(self, question: Question) -> Reply:
        """Return what is right."""
        name = json.dumps(question)
        if name not in self._known:
            body = {**question.body, "cache_prompt": False}
            self._known[name] = self._client.ask(question.route, body)
        return self._known[name]

    def fault_of(
        self, question: Question, reply: Reply, aborted: bool = False
    ) -> str:
        """Return what is wrong with a reply; empty if it is right.

        An answer of an aborted request may be shorter.
        """
        right = self.of(question)
        if aborted:
            wanted = right.text[: len(reply.text)]
        elif reply.status != right.status or bool(reply.error) != bool(
            right.error
        ):
            return (
                f"{reply.status} {reply.error}, not {right.status} {right.error}"
            )
        else:
            wanted = right.text
        self.counts["texts"] += 1
        if reply.text == wanted:
            return ""
        lead = self._lead(question, wanted, reply.text)
        if lead < TIE:
            self.counts["ties"] += 1
            return ""
        return (
            f"{reply.text!r}, not {wanted!r}, which leads by {lead:.3g}; "
            f"the bare server again: {self._again(question)}"
        )

    def _again(self, question: Question) -> list[str]:
        """Return what the bare server answers now: cold, and with what it has."""
        return [
            self._client.ask(
                question.route, {**question.body, "cache_prompt": cached}
            ).text
            for cached in (False, True, True)
        ]

    def _lead(self, question: Question, wanted: str, got: str) -> float:
        """Return by how much the right letter is likelier than the first other one."""
        first = 0
        while first < min(len(wanted), len(got)) and wanted[first] == got[first]:
            first += 1
        if first == min(len(wanted), len(got)):
            return math.inf
        tokens = self._client.tokens_of(question.route, question.body)
        asked = {
            "prompt": [*tokens, *tokens_of(wanted[:first])],
            "n_predict": 1,
            "n_probs": 320,
            "cache_prompt": False,
            "logit_bias": ONLY_LETTERS,
        }
        answer = self._client.post(COMPLETION, asked)
        assert isinstance(answer, dict)
        likely = answer["completion_probabilities"][0]["top_logprobs"]
        logprobs = {each["id"]: each["logprob"] for each in likely}
        [right] = tokens_of(wanted[first])
        [other] = tokens_of(got[first])
        lead: float = logprobs[right] - logprobs.get(other, -math.inf)
        return lead
