"""What was done to a model's code and settings, apart from its weights: edits, hooks, other forward
methods.

Edits after the model was opened have a name, which is part of the namespace. Code that was put
between the modules has
none: calls go on without the cache while it is there. Hooks may only look: `hook_watch` finds that
out. What a class or a function was replaced by cannot be seen here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

from blake3 import blake3

from pagoda.connectors.identity.plain_values import stable
from pagoda.connectors.transformers.foreign_state import is_foreign, state_of
from pagoda.connectors.transformers.hook_watch import ForeignHook
from pagoda.connectors.transformers.model_identity import named_tensor
from pagoda.connectors.transformers.model_walk import (
    METHODS,
    ModelWalk,
    plain_settings,
    registered_in,
)

# hooks of these only observe, or compute a weight from other weights, which are named
_HARMLESS_HOOKS = ("torch.nn.utils.", "torch.utils.", "transformers.", "pagoda.")

_Facts = dict[str, Any]  # by name: plain values


class ModelEdits:
    """The settings of one model when this was made, and how the present ones differ. As thread-safe
    as the model.
    """

    def __init__(self, model: Any, walk: ModelWalk) -> None:
        """`walk` is that of this moment."""
        self._model = model
        try:
            self._modules = _modules_of(model)
        except ValueError:
            # who names the weights reads the same, and says so
            self._modules = {}
        self._config = _config_of(model)
        self._latest: _Facts = self._modules
        self._seen = walk.settings  # when the latest were read
        self._memory = walk.storages()

    def text(self, walk: ModelWalk) -> str:
        """Return a name of the differences, "" if there are none: the same edits have the same name
        everywhere. ValueError if what a module holds cannot be read.

        `walk` is that of this moment.
        """
        if walk.settings != self._seen:
            self._latest = _modules_of(self._model)
            self._seen = walk.settings
            self._memory = walk.storages()
        modules = self._latest
        config = _config_of(self._model)
        if modules == self._modules and config == self._config:
            return ""
        differences = [
            *_differences(self._modules, modules),
            *_differences(self._config, config),
        ]
        digest = blake3(json.dumps(differences, default=repr).encode())
        return f"edited={digest.hexdigest(8)}"


def code_between(model: Any, walk: ModelWalk) -> str:
    """Return a sentence on the first method that was replaced, or module whose dropout is on; "" if
    there is none.

    Changes nothing.
    """
    for name, module in walk.unusual:
        own = vars(module)
        if own.get("training") and (module is model or _is_random(module)):
            return (
                f"{_place(name)} is in training mode, where dropout changes the KV: call "
                "model.eval()"
            )
        for method in METHODS:
            replaced = own.get(method)
            if replaced is not None and not _is_known_method(
                module, method, replaced
            ):
                return (
                    f"{method} of {_place(name)} was replaced by {_described(replaced)}, which "
                    "no key contains: "
                    "restore it"
                )
    return ""


def foreign_hooks(walk: ModelWalk) -> list[ForeignHook]:
    """Return the hooks on forward passes that may change them, in no certain order. Changes
    nothing.
    """
    from torch.nn.modules import module as torch_module

    found = []
    for registered in (
        torch_module._global_forward_hooks,
        torch_module._global_forward_pre_hooks,
    ):
        found += _foreign_in(registered, "all modules")
    for name, registered in walk.hooked:
        found += _foreign_in(registered, _place(name))
    return found


def _foreign_in(registered: Any, place: str) -> list[ForeignHook]:
    return [
        ForeignHook(
            registered, number, hook, f"the hook {_described(hook)} on {place}"
        )
        for number, hook in list(registered.items())
        if not _is_harmless(hook)
    ]


def _modules_of(model: Any) -> _Facts:
    """Return the class of each module, its plain attributes, and what it holds if it is foreign."""
    found: _Facts = {}
    registered = None
    for name, module in model.named_modules():
        # the shell of a compiled module, which computes the same
        if "_orig_mod" in module._modules:
            continue
        held: Any = plain_settings(module)
        if is_foreign(type(module)):
            registered = registered or registered_in(model)
            held = state_of(module, registered, named_tensor)
        found[name.replace("_orig_mod.", "").removesuffix("._orig_mod")] = (
            type(module),
            held,
        )
    return found


def _config_of(model: Any) -> _Facts:
    facts: _Facts = stable(model.config.to_dict())
    return facts


def _differences(old: _Facts, new: _Facts) -> Iterator[tuple[str, Any]]:
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield name, new.get(name)


# ---- code of others


def _is_random(module: Any) -> bool:
    """Whether a module computes something else in training mode. Modules that others add are in it
    unless told.
    """
    from torch.nn.modules.batchnorm import _NormBase
    from torch.nn.modules.dropout import _DropoutNd

    if isinstance(module, _NormBase):
        return True
    return any(
        type(value) in (int, float)
        and value > 0
        and ("drop" in name or "jitter" in name or "noise" in name)
        for name, value in vars(module).items()
    ) or (isinstance(module, _DropoutNd) and module.p > 0)


def _is_harmless(hook: Any) -> bool:
    return f"{_origin(hook)}.".startswith(_HARMLESS_HOOKS)


def _is_known_method(module: Any, name: str, replaced: Any) -> bool:
    plain = getattr(replaced, "__func__", replaced)
    if plain is getattr(type(module), name, None) or hasattr(
        replaced, "_torchdynamo_orig_callable"
    ):
        return True
    if name == "forward":  # accelerate moves weights between devices
        return _origin(replaced) == "accelerate.hooks"
    # PEFT puts the method of the wrapped model into the wrapper
    return f"{_origin(replaced)}.".startswith(("transformers.", "peft."))


def _origin(function: Any) -> str:
    """Return the module in which a function's code is, whatever it pretends to wrap."""
    plain = _unwrapped(function)
    return str(
        getattr(plain, "__globals__", {}).get("__name__")
        or type(plain).__module__
    )


def _described(function: Any) -> str:
    plain = _unwrapped(function)
    return f"{_origin(function)}.{getattr(plain, '__qualname__', type(plain).__qualname__)}"


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def _place(name: str) -> str:
    return f"module {name}" if name else "the model"
