"""A DynamicCache for models without attention, whose layers do not know how many tokens they hold.

`generate` passes such a model its whole prompt, also behind a state that covers a part of it. This
cache says how many tokens it holds, so that only the others are computed.

Imports transformers, so import this module only when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import DynamicCache


class LinearCache(DynamicCache):
    """A DynamicCache that says how many tokens it holds.

    Whoever fills it sets `held_tokens`; `generate` asks for it before its first pass only.
    """

    # there is nothing in it that a compiled pass could use: as for a DynamicCache
    is_compileable = False

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.held_tokens = 0

    @property
    def is_linear(self) -> list[bool]:
        """No layer, so that `generate` asks how many tokens are held."""
        return [False] * len(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens are held."""
        return self.held_tokens


@contextmanager
def counted_passes(model: Any, cache: LinearCache) -> Iterator[None]:
    """Count the tokens of the model's passes into `cache`. The model has a hook only during the
    block.
    """

    def passed(_: Any, args: Any, kwargs: Any, out: Any) -> None:
        given = any(value is cache for value in kwargs.values())
        ids = kwargs.get("input_ids")
        if given and ids is not None:
            cache.held_tokens += ids.shape[1]

    hook = model.register_forward_hook(passed, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
