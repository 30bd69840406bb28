"""Passes on to the model what a `CachedModel` does not have, so that its callers can use it as the
model itself: `transformers.pipeline`, `cached.config`, `cached.device`, `cached(...)`.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

# of the model: they generate from a cache of their own, so nothing is loaded or stored
_OTHER_WAYS = frozenset(
    {
        "continuous_batching_context_manager",
        "generate_batch",
        "init_continuous_batching",
    }
)


class ModelFacade:
    """The base of `CachedModel`. It is not an instance of the model's class: `isinstance` says no.

    What is read or called goes to the model, unless the cache has it. A method that returns the
    model (`to`, `eval`, `half`) returns the `CachedModel`, so that a chained call does not lose the
    cache. What is written or deleted goes to the model too, unless the cache has it.
    """

    model: Any

    def went_without(self, why_not: str) -> None:
        """Take note of a call that the cache has no part in."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `model(...)` returns: one forward pass, without the cache."""
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the model. AttributeError if it has none either."""
        if "model" not in self.__dict__ or name.startswith("__"):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        found = getattr(self.model, name)
        if not inspect.ismethod(found):
            return found

        @functools.wraps(found)
        def call(*args: Any, **kwargs: Any) -> Any:
            if name in _OTHER_WAYS:
                self.went_without(
                    f"{name} fills a cache of its own: call generate"
                )
            answer = found(*args, **kwargs)
            return self if answer is self.model else answer

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model, unless it is the cache's own."""
        if self._is_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self.model, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the model, unless it is the cache's own."""
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self.model, name)

    def _is_own(self, name: str) -> bool:
        """Return whether an attribute is of this object: those that it got while it was opened."""
        own = self.__dict__
        return not own.get("_opened") or name in own or hasattr(type(self), name)

    def __dir__(self) -> list[str]:
        """Return the names of both."""
        return sorted({*super().__dir__(), *dir(self.model)})
