"""Random prompts that share beginnings, as questions about the same documents do."""

from __future__ import annotations

import random
from collections.abc import Iterator

VOCABULARY = 30_000


class Prompts:
    """An endless stream; the same seed gives the same documents, `stream` other questions about
    them.
    """

    def __init__(
        self, seed: int, *, documents: int = 8, most: int = 320, stream: int = 0
    ) -> None:
        one = random.Random(seed)
        self._documents = [
            self._tokens(one, one.randrange(32, most)) for _ in range(documents)
        ]
        self._random = random.Random(f"{seed}-{stream}")
        self._most = most

    @staticmethod
    def _tokens(source: random.Random, count: int) -> list[int]:
        return [source.randrange(VOCABULARY) for _ in range(count)]

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        """Return a beginning of a document, mostly with another continuation."""
        document = self._random.choice(self._documents)
        kept = document[: self._random.randrange(1, len(document) + 1)]
        if self._random.random() < 0.7:
            kept = kept + self._tokens(
                self._random, self._random.randrange(1, 96)
            )
        return kept[: self._most]
