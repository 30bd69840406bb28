"""Watches the hooks that others put on a model, during one computation: does one of them change
what is computed?

Most hooks only look: the cache works with them. A hook that returns a value, or writes to a tensor
that it was given, gives the prompt another KV. If that is noticed within a pass over the prompt,
before a token was chosen or handed out, HookChanges ends the pass, and the call starts again
without the cache. `CachedModel` keeps in mind which hooks did.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_DEEPEST = 3  # how far tensors are looked for in what a hook is given


class ForeignHook(NamedTuple):
    """A hook of unknown code, where it is registered."""

    registered: dict[int, Any]  # of the module
    number: int
    hook: Any
    text: str  # what it is, and where, for people


class HookChanges(ValueError):
    """A hook changed what the model computes; nothing was handed out yet.

    Attributes:
        hook: that did it.
        prompt_shown: whether a streamer has received the prompt, as `generate` was called before.
    """

    def __init__(self, seen: ForeignHook) -> None:
        super().__init__(
            f"{seen.text} changes the KV, which no key contains: remove it"
        )
        self.hook = seen.hook
        self.prompt_shown = True


class HookWatch:
    """A context in which the hooks of a model are watched, on this thread. For one use.

    Attributes:
        changing: the hook that was seen to change something after the passes over the prompt, None
            if there was none.
    """

    def __init__(
        self, model: Any, hooks: Sequence[ForeignHook], columns: int | None = None
    ) -> None:
        """Prepare the watch.

        Args:
            model: that computes.
            hooks: to be watched.
            columns: of the prompt. A pass after which fewer have KV is not the last one over it;
                None: nothing is handed out within this context.
        """
        self.changing: ForeignHook | None = None
        self._model = model
        self._hooks = hooks
        self._thread = threading.get_ident()
        self._columns = columns
        self._passed = False  # the prompt is computed
        self._watchers: list[Any] = []
        self._end: Any = None

    def __enter__(self) -> HookWatch:
        if not self._hooks:
            return self
        for seen in self._hooks:
            watcher = self._watcher_of(seen)
            seen.registered[seen.number] = watcher
            self._watchers.append(watcher)
        self._end = self._model.register_forward_hook(
            self._pass_ended, with_kwargs=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        for seen, watcher in zip(self._hooks, self._watchers, strict=True):
            # else it was removed meanwhile
            if seen.registered.get(seen.number) is watcher:
                seen.registered[seen.number] = seen.hook
        if self._end is not None:
            self._end.remove()

    def _pass_ended(
        self, _model: Any, _args: Any, kwargs: Mapping[str, Any], _out: Any
    ) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._columns is not None and _columns_after(kwargs) >= self._columns:
            self._passed = True

    def _watcher_of(self, seen: ForeignHook) -> Any:
        def watcher(*given: Any) -> Any:
            if threading.get_ident() != self._thread:
                return seen.hook(*given)
            tensors = list(_tensors_in(given))
            before = _versions(tensors)
            answer = seen.hook(*given)
            if (
                answer is not None
                or before is None
                or _versions(tensors) != before
            ):
                self._noticed(seen)
            return answer

        return watcher

    def _noticed(self, seen: ForeignHook) -> None:
        if not self._passed:
            raise HookChanges(seen)
        self.changing = self.changing or seen


def _columns_after(kwargs: Mapping[str, Any]) -> float:
    """Return how many columns have KV after a pass with these arguments, infinity if that is not
    known: then no hook ends a call that may have handed out tokens.
    """
    mask = kwargs.get("attention_mask")
    shape: tuple[int, ...] = getattr(mask, "shape", ())
    if len(shape) == 2:
        return int(shape[1])
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    ids = kwargs.get("input_ids")
    if ids is None or ids.shape[1] == 1 or not hasattr(cache, "get_seq_length"):
        return math.inf
    try:
        return int(cache.get_seq_length())
    except ValueError:  # of recurrent layers alone, which do not count
        return math.inf


def _versions(tensors: Sequence[Any]) -> list[int] | None:
    """Return how often each tensor was written to; None if torch does not count that (inference
    mode).
    """
    if any(tensor.is_inference() for tensor in tensors):
        return None
    return [tensor._version for tensor in tensors]


def _tensors_in(value: Any, depth: int = 0) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEEPEST and isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(item, depth + 1)
