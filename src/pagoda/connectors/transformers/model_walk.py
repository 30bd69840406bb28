"""One walk over the modules of a model, for all that is asked about them before each call.

`named_parameters`, `named_modules` and `getattr` take most of the time of such a question, so they
are not used here.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Set
from typing import Any, NamedTuple

from pagoda.connectors.transformers.foreign_state import (
    is_foreign,
    marks_of,
    marks_of_tensor,
)

METHODS = ("forward", "generate", "prepare_inputs_for_generation")
"""Of a model: they decide which KV belongs to which token."""
# attributes that adapters name, or that are asked for apart
_OTHERWISE_NAMED = frozenset(
    {
        "active_adapters",
        "disable_adapters",
        "gradient_checkpointing",
        "merged_adapters",
        "training",
    }
)
_SCALARS = frozenset({bool, int, float, str})
_MARKS_OF_ADAPTERS = ("active_adapters", "merged_adapters")
_MOST_PLANS = 4096  # sets of attributes to remember; a model has about ten
_SAMPLE_BYTES = 64  # of each weight in the CPU's memory, from its middle


class ModelWalk(NamedTuple):
    """What a walk saw. Modules are in the order of `named_modules`, each once."""

    # if two are equal, no weight was replaced or written to in place: as `stamp_of`, by module
    weights: list[Any]
    # if two are equal, so are the modules' names, classes and plain attributes, and all that
    # foreign modules hold
    settings: list[Any]
    kinds: list[str]  # of the devices of parameters
    # a module's name, and its hooks on forward passes
    hooked: list[tuple[str, dict[int, Any]]]
    adapted: list[tuple[str, Any]]  # modules that can have adapters
    # modules in training mode, and those that have a method of their own
    unusual: list[tuple[str, Any]]
    tensors: list[Any]  # those that `weights` and `settings` tell of

    def storages(self) -> list[Any]:
        """Return weak references to the memory of all tensors.

        As long as they exist, no other memory has the marks of one that was freed: so two walks
        are compared only while those of the first exist.
        """
        from torch.multiprocessing import reductions

        weak: Any = reductions.StorageWeakRef
        found = []
        for tensor in self.tensors:
            try:
                found.append(weak(tensor.untyped_storage()))
            except (NotImplementedError, RuntimeError):
                continue  # a class without memory of its own
        return found


class _Plan(NamedTuple):
    """What is looked for in a module with certain attributes."""

    attributes: tuple[str, ...]  # of which the module has them all
    plain: tuple[str, ...]  # those whose values are settings
    has_methods: bool
    has_adapters: bool


# by all attributes of a module, in their order
_plans: dict[tuple[str, ...], _Plan] = {}


def walk_over(model: Any) -> ModelWalk:
    """Return what there is to see of a model's modules now. Changes nothing."""
    walk = ModelWalk([], [], [], [], [], [], [])
    weights, settings, kinds, hooked, adapted, unusual, tensors = walk
    devices = set()
    adapting: dict[type, bool] = {}  # not kept: a class can be changed
    foreign: dict[type, bool] = {}
    strangers = []
    seen = set()
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        own = vars(module)
        attributes = tuple(own)
        plan = _plans.get(attributes) or _plan_for(attributes)
        kind = type(module)
        settings += (name, kind, plan.attributes)
        for attribute in plan.plain:
            value = own[attribute]
            settings.append(value if type(value) in _SCALARS else None)

        if plan.has_methods or own.get("training"):
            unusual.append((name, module))
        for hooks in (own.get("_forward_hooks"), own.get("_forward_pre_hooks")):
            if hooks:
                hooked.append((name, hooks))
        if kind not in adapting:
            adapting[kind] = any(
                hasattr(kind, mark) for mark in _MARKS_OF_ADAPTERS
            )
            foreign[kind] = is_foreign(kind)
        if plan.has_adapters or adapting[kind]:
            adapted.append((name, module))
            weights.append(merged_into(module))
        if foreign[kind]:
            strangers.append(module)

        parameters = module._parameters
        if parameters:
            devices.update(
                [
                    weight.device
                    for weight in parameters.values()
                    if weight is not None
                ]
            )
            _add_tensors(weights, tensors, name, parameters)
        if module._buffers:
            _add_tensors(weights, tensors, name, module._buffers)
        if module._modules:
            before = f"{name}." if name else ""
            children = [
                (before + part, child)
                for part, child in module._modules.items()
                if child is not None
            ]
            waiting += reversed(children)
    kinds += sorted({device.type for device in devices})
    if strangers:
        registered = seen | {id(tensor) for tensor in tensors}
        registered |= _configs_of(model)

        def mark(tensor: Any) -> Any:
            return mark_of(tensor, tensors.append)

        for module in strangers:
            settings.append(marks_of(module, registered, mark))
    return walk


def plain_settings(module: Any) -> dict[str, Any]:
    """Return the plain attributes of a module: those that `ModelWalk.settings` has of it. Changes
    nothing.
    """
    return {
        attribute: value
        for attribute, value in vars(module).items()
        if type(value) in _SCALARS and _is_setting(attribute)
    }


def registered_in(model: Any) -> Set[int]:
    """Return the `id` of each module, parameter and buffer of a model, and of its configurations:
    they are named anyway. Changes nothing.
    """
    found = {id(module) for module in model.modules()}
    found |= {id(tensor) for tensor in model.parameters()}
    found |= {id(tensor) for tensor in model.buffers()}
    return found | _configs_of(model)


def _configs_of(model: Any) -> set[int]:
    config = getattr(model, "config", None)
    parts = [
        getattr(config, name, None)
        for name in getattr(config, "sub_configs", None) or ()
    ]
    return {id(part) for part in (config, *parts) if part is not None}


def merged_into(module: Any) -> tuple[str, ...]:
    """Return which adapters are part of the weights of a module now: torch does not count how they
    get there.
    """
    return tuple(map(str, getattr(module, "merged_adapters", None) or ()))


def mark_of(
    tensor: Any, seen: Callable[[Any], None] | None = None
) -> tuple[Any, ...]:
    """Return what changes if a tensor is written to, or gets other memory.

    torch counts writes, but neither those through `.data` nor any to a tensor of the inference
    mode: so a few bytes in the middle of the memory are part of it, where the CPU can read them.

    `seen` is called with the tensor, and with those of which its class makes it.
    """
    if seen is not None:
        seen(tensor)
    version = 0 if tensor.is_inference() else tensor._version
    if type(tensor) not in _plain_tensors() or _is_sparse(tensor):
        parts = [mark_of(part, seen) for part in inner_tensors(tensor)]
        held = marks_of_tensor(tensor, lambda part: mark_of(part, seen))
        return _address_of(tensor), version, id(tensor), parts, held
    storage = tensor.untyped_storage()
    sample = _sample(tensor, storage) if tensor.is_cpu else b""
    # another tensor in the same memory counts its writes anew
    return tensor.data_ptr(), version, storage._cdata, tensor._cdata, sample


@functools.lru_cache(maxsize=1)
def _plain_tensors() -> frozenset[type]:
    import torch

    return frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def _is_sparse(tensor: Any) -> bool:
    import torch

    return tensor.layout is not torch.strided


def _address_of(tensor: Any) -> int:
    try:
        return int(tensor.data_ptr())
    except (NotImplementedError, RuntimeError):
        return 0  # made of other tensors, without memory of its own


def inner_tensors(tensor: Any) -> Iterator[Any]:
    """Yield the tensors of which a tensor's class makes it. Pure."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield getattr(tensor, name)


def _sample(tensor: Any, storage: Any) -> bytes:
    """Return some bytes of a tensor. `storage` is held, so that no thread frees it meanwhile."""
    size = tensor.element_size()
    middle = tensor.numel() // 2 if tensor.is_contiguous() else 0
    first = (tensor.storage_offset() + middle) * size
    length = min(_SAMPLE_BYTES, storage.nbytes() - first)
    if length <= 0:
        return b""
    return ctypes.string_at(storage.data_ptr() + first, length)


def _add_tensors(
    weights: list[Any],
    found: list[Any],
    name: str,
    tensors: dict[str, Any],
) -> None:
    weights.append(name)
    for part, tensor in tensors.items():
        if tensor is not None:
            weights.append(part)
            weights += mark_of(tensor, found.append)


def _plan_for(attributes: tuple[str, ...]) -> _Plan:
    plain = tuple(attribute for attribute in attributes if _is_setting(attribute))
    has_adapters = any(mark in attributes for mark in _MARKS_OF_ADAPTERS)
    plan = _Plan(
        attributes, plain, not set(METHODS).isdisjoint(attributes), has_adapters
    )
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    _plans[attributes] = plan
    return plan


def _is_setting(attribute: str) -> bool:
    return not attribute.startswith("_") and attribute not in _OTHERWISE_NAMED
