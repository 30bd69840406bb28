"""One walk over the modules of a model, for all that is asked about them before each call.

`named_parameters`, `named_modules` and `getattr` take most of the time of such a question, so they
are not used here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


class ModelWalk(NamedTuple):
    """What a walk saw. Modules are in the order of `named_modules`, each once."""

    # if two are equal, no weight was replaced or written to in place: as `stamp_of`, by module
    weights: list[Any]
    # if two are equal, so are the modules' names, classes and plain attributes
    settings: list[Any]
    kinds: list[str]  # of the devices of parameters
    # a module's name, and its hooks on forward passes
    hooked: list[tuple[str, dict[int, Any]]]
    adapted: list[tuple[str, Any]]  # modules that can have adapters
    # modules in training mode, and those that have a method of their own
    unusual: list[tuple[str, Any]]


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
    walk = ModelWalk([], [], [], [], [], [])
    weights, settings, kinds, hooked, adapted, unusual = walk
    devices = set()
    adapting: dict[type, bool] = {}  # not kept: a class can be changed
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
        if plan.has_adapters or adapting[kind]:
            adapted.append((name, module))

        parameters = module._parameters
        if parameters:
            devices.update(
                [
                    weight.device
                    for weight in parameters.values()
                    if weight is not None
                ]
            )
            _add_tensors(weights, name, parameters)
        if module._buffers:
            _add_tensors(weights, name, module._buffers)
        if module._modules:
            before = f"{name}." if name else ""
            children = [
                (before + part, child)
                for part, child in module._modules.items()
                if child is not None
            ]
            waiting += reversed(children)
    kinds += sorted({device.type for device in devices})
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


def _add_tensors(weights: list[Any], name: str, tensors: dict[str, Any]) -> None:
    weights.append(name)
    for part, tensor in tensors.items():
        if tensor is not None:
            weights += (
                part,
                tensor.data_ptr(),
                0 if tensor.is_inference() else tensor._version,
            )


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
