"""What modules that are not of Transformers hold besides parameters and buffers: numbers, vectors
and seeds of adapters, packed weights, settings in dicts and objects.

A module of Transformers follows from the configuration. One of PEFT, of a quantiser or of the user
may compute something else for the same parameters, so its attributes are part of the key: by value,
tensors by content. What has neither (a lock, an object in C++) is named by its class.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import types
from collections import deque
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np
import xxhash
from blake3 import blake3

from pagoda.connectors.identity.plain_values import stable

# packages whose modules follow from the configuration
_KNOWN = ("torch.", "transformers.", "transformers_modules.")
_SCALARS = frozenset({bool, int, float, str, type(None)})
_DEEPEST = 6  # how far values are looked for in containers and objects
_MOST_VALUES = 20_000  # of one module
# packages whose objects compute nothing, or hold half of the process
_OPAQUE = (
    "_thread.",
    "asyncio.",
    "concurrent.",
    "logging.",
    "threading.",
    "tokenizers.",
    "torch.distributed.",
    "weakref.",
)
# attributes that say nothing of what is computed, or that have a name of their own
_LEFT_OUT = frozenset(
    {
        "_active_adapter",
        "_active_adapters",
        "_adapters_disabled",
        "_caches",
        "_disable_adapters",
        "_hf_hook",
        "_is_hf_initialized",
        "_old_forward",
        "active_adapter",
        "active_adapters",
        "base_model_name_or_path",
        "disable_adapters",
        "forward",
        "generate",
        "generation_config",
        "gradient_checkpointing",
        "hf_device_map",
        "inference_mode",
        "merged_adapters",
        "name_or_path",
        "peft_config",
        "prepare_inputs_for_generation",
        "training",
        "warnings_issued",
    }
)


class Held:
    """An object that is compared by identity, and lives as long as it is compared."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def is_foreign(kind: type) -> bool:
    """Return whether modules of a class may hold more than the configuration and their weights
    say. Pure.
    """
    from torch import nn

    if not f"{kind.__module__}.".startswith(_KNOWN):
        return True
    # packed weights, which are neither parameters nor buffers
    return (
        getattr(kind, "_save_to_state_dict", None)
        is not nn.Module._save_to_state_dict
        or getattr(kind, "get_extra_state", None) is not nn.Module.get_extra_state
    )


def state_of(
    module: Any, registered: Set[int], of_tensor: Callable[[Any], Any]
) -> list[Any]:
    """Return what a foreign module holds besides parameters, buffers and modules, as plain values.
    Changes nothing.

    Raises ValueError for packed weights that cannot be read.

    Args:
        module: that is asked.
        registered: the `id` of each tensor and module that is found in the model anyway.
        of_tensor: returns what stands for another tensor.
    """
    reader = _StateReader(registered, of_tensor, by_identity=False)
    return reader.attributes(vars(module))


def marks_of(
    module: Any, registered: Set[int], of_tensor: Callable[[Any], Any]
) -> list[Any]:
    """Return what is equal as long as `state_of` is: cheaper, and only for comparisons. Changes
    nothing.
    """
    reader = _StateReader(registered, of_tensor, by_identity=True)
    return reader.attributes(vars(module))


def state_of_tensor(tensor: Any, of_tensor: Callable[[Any], Any]) -> list[Any]:
    """Return what a tensor of another class than torch's own holds: its inner tensors, and its
    attributes (scales of a quantised weight). Changes nothing.
    """
    reader = _StateReader(frozenset(), of_tensor, by_identity=False)
    return reader.attributes(_own(tensor))


def marks_of_tensor(tensor: Any, of_tensor: Callable[[Any], Any]) -> list[Any]:
    """Return what is equal as long as `state_of_tensor` is, only for comparisons. Changes
    nothing.
    """
    reader = _StateReader(frozenset(), of_tensor, by_identity=True)
    return reader.attributes(_own(tensor))


class _NamelessStateError(ValueError):
    """Something on which the KV may depend has no name."""


class _StateReader:
    """Reads values. For one use."""

    def __init__(
        self,
        registered: Set[int],
        of_tensor: Callable[[Any], Any],
        *,
        by_identity: bool,
    ) -> None:
        self._registered = registered
        self._of_tensor = of_tensor
        self._by_identity = by_identity
        self._inside: set[int] = set()  # objects that are being read
        self._left = _MOST_VALUES

    def attributes(self, own: Mapping[str, Any], depth: int = 0) -> list[Any]:
        ours = _names_of_a_module()
        found: list[Any] = []
        for name, value in own.items():
            if name in ours or name in _LEFT_OUT:
                continue
            if type(value) not in _SCALARS:
                value = self.value(value, depth)
            found.append([name, value])
        if not self._by_identity:
            found.sort(key=lambda pair: str(pair[0]))
        return found

    def value(self, value: Any, depth: int) -> Any:
        import torch

        kind = type(value)
        if kind in _SCALARS:
            return value
        self._left -= 1
        if self._left < 0:
            if self._by_identity:
                return Held(value)
            raise _NamelessStateError(
                "a module holds more values than can be named: keep data apart from the model"
            )
        if id(value) in self._registered:
            return "registered"
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if kind in (torch.dtype, torch.device, torch.Size) or isinstance(
            value, enum.Enum
        ):
            return str(value)
        if id(value) in self._inside or depth > _DEEPEST:
            return _name_of(kind)
        self._inside.add(id(value))
        try:
            return self._object(value, depth + 1)
        except _NamelessStateError:
            raise
        except Exception:  # noqa: BLE001
            # a boundary: whatever the code of an object raises
            return [_name_of(kind), "cannot be read"]
        finally:
            self._inside.discard(id(value))

    def _object(self, value: Any, depth: int) -> Any:
        import torch

        if isinstance(value, Mapping):
            pairs = [
                [str(name), self.value(each, depth)]
                for name, each in value.items()
            ]
            return pairs if self._by_identity else sorted(pairs, key=str)
        if isinstance(value, str | bytes):
            return str(value)
        if isinstance(value, list | tuple | range | deque):
            return [self.value(each, depth) for each in value]
        if isinstance(value, set | frozenset):
            parts = [self.value(each, depth) for each in value]
            return sorted(parts, key=repr)
        if isinstance(value, np.ndarray | np.generic):
            array = np.ascontiguousarray(value)
            return [
                str(array.dtype),
                list(array.shape),
                xxhash.xxh3_128_hexdigest(array.tobytes()),
            ]
        if isinstance(value, torch.nn.Module):
            return self._module(value, depth)
        if isinstance(value, torch.ScriptObject):
            return self._packed(value, depth)
        if isinstance(value, functools.partial):
            parts = [value.func, value.args, value.keywords]
            return [self.value(part, depth) for part in parts]
        if isinstance(value, types.MethodType):
            bound = self.value(value.__self__, depth)
            return [_name_of(value.__func__), bound]
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        return self._other(value, depth)

    def _other(self, value: Any, depth: int) -> Any:
        kind = type(value)
        name = _name_of(value if isinstance(value, type) else kind)
        if isinstance(value, type | types.ModuleType):
            return name
        if f"{kind.__module__}.".startswith("transformers."):
            if not hasattr(value, "to_dict"):  # such as a tokenizer
                return name
            return [name, self.value(stable(value.to_dict()), depth)]
        if f"{kind.__module__}.".startswith(_OPAQUE):
            return name
        own = _own(value)
        if own:
            return [name, self.attributes(own, depth)]
        if self._by_identity:
            return Held(value)
        # that of `object` has an address
        return [name, text if " at 0x" not in (text := repr(value)) else ""]

    def _module(self, module: Any, depth: int) -> Any:
        """A module that is kept out of sight of the model, in a list or an object."""
        parts = [module._parameters, module._buffers, module._modules]
        return [
            _name_of(type(module)),
            [self._object(part, depth) for part in parts],
            self.attributes(vars(module), depth),
        ]

    def _packed(self, value: Any, depth: int) -> Any:
        if self._by_identity:
            return Held(value)
        try:
            inside = value.__getstate__()
        except Exception as trouble:  # whatever a class in C++ raises
            raise _NamelessStateError(
                f"a module holds a {_name_of(type(value))}, whose content cannot be read: pass "
                "weights=..."
            ) from trouble
        return self.value(inside, depth)

    def _function(self, function: Any, depth: int) -> Any:
        cells = []
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                cells.append(self.value(cell.cell_contents, depth))
        code = function.__code__
        if self._by_identity:
            return [Held(code), cells]
        constants = [one for one in code.co_consts if type(one) in _SCALARS]
        return [
            _name_of(function),
            blake3(code.co_code).hexdigest(8),
            [constants, self.value(function.__defaults__, depth), cells],
        ]


@functools.lru_cache(maxsize=1)
def _names_of_a_module() -> frozenset[str]:
    from torch import nn

    return frozenset(vars(nn.Module()))


def _own(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", None) or {})
    for name in getattr(type(value), "__slots__", ()):
        if isinstance(name, str) and hasattr(value, name):
            found[name] = getattr(value, name)
    return found


def _name_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
