"""A tiny random model of every type of Transformers, built from its configuration class and the
settings of `tiny_settings`.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping

import torch
import transformers
from huggingface_hub.errors import (
    StrictDataclassClassValidationError,
    StrictDataclassFieldValidationError,
)
from transformers.models.auto import modeling_auto

from pagoda.connectors.transformers import layout_of
from tests.e2e.tiny_settings import (
    FAMILIES,
    INSTEAD,
    LEFT_OUT,
    MOST_PARAMETERS,
    PARTS,
    SMALL,
    VARIANTS,
    call_of,
)

# the classes of causal models first
_CLASSES = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
_FIELD = re.compile(r"field '(\w+)'")
# tiny models: on a busy machine a second thread only waits
torch.set_num_threads(1)
_TRIED = 20  # tokens of the prompt that a new model has to continue


def model_types() -> list[str]:
    """Return the types of models that generate text, sorted."""
    return sorted({*_CLASSES[0], *_CLASSES[1]})


def tiny_model(kind: str, seed: int = 0):
    """Return a model of this type that generates and whose KV can be cached. Raises ValueError if
    none was found, with all that failed.
    """
    troubles: list[str] = []
    for model in _tiny_models(kind, seed, troubles):
        try:
            layout_of(model, 16)
            return model
        except Exception as trouble:  # noqa: BLE001
            # whatever a model raises
            troubles.append(_sentence(trouble))
    raise ValueError(f"{kind}: no tiny model that can be cached: {troubles}")


def any_tiny_model(kind: str):
    """Return a model of this type that generates: one whose KV can be cached, else the first.
    Raises ValueError if there is none, with all that failed.
    """
    troubles: list[str] = []
    first = None
    for model in _tiny_models(kind, 0, troubles):
        try:
            layout_of(model, 16)
            return model
        except Exception:  # noqa: BLE001
            # whatever a model raises
            first = model if first is None else first
    if first is None:
        raise ValueError(f"{kind}: no tiny model that generates: {troubles}")
    return first


def untried_model(kind: str):
    """Return a model of this type, which may not be able to generate."""
    return _built(class_of(kind), kind, 0, {})


def class_of(kind: str):
    """Return the class of the models of a type: one that takes its whole configuration, if there
    is one.
    """
    return _classes_of(kind)[0]


def configured(model_class, kind: str, settings: Mapping[str, object]):
    """Return a configuration for a class of the models of a type, which takes the settings that it
    knows, and all of its family.
    """
    config = _configured(
        transformers.CONFIG_MAPPING[kind], settings, FAMILIES.get(kind, {})
    )
    wanted = model_class.config_class
    for name in getattr(config, "sub_configs", None) or {}:
        # of a class that takes a part of the configuration only
        if wanted is not type(config) and wanted is type(getattr(config, name)):
            return getattr(config, name)
    return config


def _classes_of(kind: str) -> list[type[transformers.PreTrainedModel]]:
    """Return the classes of the models of a type, those that take its whole configuration first."""
    named = [names[kind] for names in _CLASSES if kind in names]
    classes = [
        getattr(transformers, name if isinstance(name, str) else name[0])
        for name in named
    ]
    whole = transformers.CONFIG_MAPPING[kind]
    return sorted(classes, key=lambda one: one.config_class is not whole)


def _tiny_models(
    kind: str, seed: int, troubles: list[str]
) -> Iterator[transformers.PreTrainedModel]:
    """Yield each model of this type that generates; add what the others raised to `troubles`."""
    for model_class, variant in itertools.product(_classes_of(kind), VARIANTS):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = _built(model_class, kind, seed, variant)
                _try_out(kind, model)
        except Exception as trouble:  # noqa: BLE001
            # whatever a configuration or a model raises
            troubles.append(_sentence(trouble))
            continue
        yield model


def _sentence(trouble: Exception) -> str:
    return f"{type(trouble).__name__}: {trouble}"[:200]


def _built(model_class, kind: str, seed: int, variant: Mapping[str, object]):
    settings = {**SMALL, **variant}
    with torch.device("meta"):
        shell = model_class(configured(model_class, kind, settings))
    weights = sum(weight.numel() for weight in shell.parameters())
    if weights > MOST_PARAMETERS:
        raise ValueError(f"{weights} parameters even when it is built small")
    torch.manual_seed(seed)
    return model_class(configured(model_class, kind, settings)).eval()


def _try_out(kind: str, model) -> None:
    """Generate a few tokens. Raises whatever the model raises."""
    # MPT and Evolla have False: no call would be cached
    model.generation_config.use_cache = True
    prompt = torch.arange(3, 3 + _TRIED)[None]
    with torch.random.fork_rng(devices=[]):
        model.generate(**call_of(kind, prompt), max_new_tokens=6, do_sample=False)


def _configured(
    config_class, settings: Mapping[str, object], family: Mapping[str, object]
):
    """Return a configuration that takes the settings that it knows, and all of its family."""
    known = {
        *inspect.signature(config_class).parameters,
        *getattr(config_class, "attribute_map", {}),
    }
    parts = {}
    for name in getattr(config_class, "sub_configs", None) or {}:
        part = _part_class(config_class, name, family.get(name, {}))
        if part is not None:
            parts[name] = _part(name, part, settings, family.get(name, {}))
    own = {name: value for name, value in family.items() if name not in parts}
    chosen = {name: value for name, value in settings.items() if name in known}
    chosen = {
        name: value
        for name, value in {**chosen, **own}.items()
        if value is not LEFT_OUT
    }
    while True:
        try:
            # configurations complete the dicts that they are given
            return config_class(**copy.deepcopy(chosen), **parts)
        except StrictDataclassFieldValidationError as trouble:
            # a general setting that is a list here, or must not be None
            named = _FIELD.search(str(trouble))
            if not named or named[1] in own or named[1] not in chosen:
                raise
            del chosen[named[1]]


def _part_class(config_class, name: str, family: Mapping[str, object]):
    """Return the class of a part: the kind that its family names, else the kind that it has by
    default; None: by default it is left out.
    """
    if "model_type" in family:
        return transformers.CONFIG_MAPPING[family["model_type"]]
    declared = config_class.sub_configs[name]
    try:
        default = getattr(config_class(), name)
    except StrictDataclassClassValidationError:
        # the default of the whole is not complete
        return declared
    if default is None:
        return declared if family else None
    if declared is not transformers.AutoConfig:
        return declared
    instead = INSTEAD.get(default.model_type, default.model_type)
    return transformers.CONFIG_MAPPING[instead]


def _part(
    name: str,
    part,
    settings: Mapping[str, object],
    family: Mapping[str, object],
) -> dict[str, object]:
    made = _configured(part, {**settings, **PARTS.get(name, {})}, family)
    return {**made.to_dict(), "model_type": made.model_type}
