"""Passes on to the model what a `CachedModel` does not have, so that its callers can use it as the
model itself: `transformers.pipeline`, `cached.config`, `cached.device`, `cached(...)`.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

_OWN = frozenset({"cache", "last", "last_stored", "model"})


class ModelFacade:
    """The base of `CachedModel`. It is not an instance of the model's class: `isinstance` says no.

    What is read or called goes to the model, unless the cache has it. A method that returns the
    model (`to`, `eval`, `half`) returns the `CachedModel`, so that a chained call does not lose the
    cache. What is written goes to the model too, if the model has it.
    """

    model: Any

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
            answer = found(*args, **kwargs)
            return self if answer is self.model else answer

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model, if it is one and not the cache's own."""
        is_own = name in _OWN or name.startswith("_")
        if is_own or not hasattr(self.__dict__.get("model"), name):
            super().__setattr__(name, value)
        else:
            setattr(self.model, name, value)

    def __dir__(self) -> list[str]:
        """Return the names of both."""
        return sorted({*super().__dir__(), *dir(self.model)})
