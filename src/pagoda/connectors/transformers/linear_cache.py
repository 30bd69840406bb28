"""A DynamicCache for models without attention, whose layers do not know how many tokens they hold.

`generate` passes such a model its whole prompt, also behind a state that covers a part of it. This
cache says how many tokens it holds, so that only the others are computed.

Its states are the same for any number of tokens, so a hook on the model counts those of each pass:
during a call of `CachedModel.generate`, or as long as a cache lives that `CachedModel.prefix` has
handed out. Without the count a state would be stored under the key of fewer tokens.

Imports transformers, so import this module only when it is needed.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import DynamicCache

from pagoda.base.finalizers import close_when_dropped
from pagoda.connectors.transformers.positions import generating_module


class LinearCache(DynamicCache):
    """A DynamicCache that says how many tokens it holds.

    Whoever fills it sets `held_tokens`; `generate` asks for it before its first pass only.
    """

    # there is nothing in it that a compiled pass could use: as for a DynamicCache
    is_compileable = False

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.held_tokens = 0
        self.is_copy = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Fill a copy, for which no hook counts."""
        vars(self).update(state)
        self.is_copy = True

    @property
    def is_linear(self) -> list[bool]:
        """No layer, so that `generate` asks how many tokens are held."""
        return [False] * len(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens are held."""
        return self.held_tokens

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()  # type: ignore[no-untyped-call]
        self.held_tokens = 0


# caches that hooks count for; a hook has only a name, so that its model can be copied and pickled
_COUNTED: weakref.WeakValueDictionary[str, LinearCache] = (
    weakref.WeakValueDictionary()
)


class _Counter:
    """A hook on passes, that counts the tokens of those into one cache."""

    def __init__(self, cache: LinearCache) -> None:
        self.name = uuid.uuid4().hex
        _COUNTED[self.name] = cache

    def __call__(self, _: Any, args: Any, kwargs: Any, out: Any) -> None:
        cache = _COUNTED.get(self.name)
        given = [*args, *kwargs.values()]
        if cache is None or not any(value is cache for value in given):
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        # of tokens, or what stands for them
        passed = ids if ids is not None else kwargs["inputs_embeds"]
        cache.held_tokens += passed.shape[1]


@contextmanager
def counted_passes(model: Any, cache: LinearCache) -> Iterator[None]:
    """Count the tokens of the model's passes into `cache`. The model has a hook only during the
    block.
    """
    hook = _hooked(model, cache)
    try:
        yield
    finally:
        hook.remove()


def count_passes(model: Any, cache: LinearCache) -> None:
    """Count the tokens of the model's passes into `cache`. The model has a hook as long as the
    cache lives.
    """
    hook = _hooked(model, cache)
    close_when_dropped(cache, hook.remove)


def _hooked(model: Any, cache: LinearCache) -> Any:
    # inside of a compiled shell or of adapters, whose `generate` passes by the outer module
    generating = generating_module(model)
    return generating.register_forward_hook(_Counter(cache), with_kwargs=True)
