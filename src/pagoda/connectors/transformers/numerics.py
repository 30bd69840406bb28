"""How a model is computed at this moment: settings of the process, and of the model, that change
numbers but no weight.

They are part of the namespace, as text, and only where they differ from the defaults: with defaults
keys are what they always were. `CachedModel` reads them before and after each call, and
`namespace_of` when it is called.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from pagoda.connectors.transformers.model_walk import ModelWalk, walk_over

# libraries read these when they are first used
_VARIABLES = {
    "cpu": ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    "cuda": ("NVIDIA_TF32_OVERRIDE",),
}
_EXACT_VARIABLES = ("", "STRICT")
_EXACT_PRECISIONS = ("none", "ieee")  # of float32 products; "none" is the default
# of `torch.nn.attention.SDPBackend`: flash, efficient, math
_KERNEL_ORDER = (1, 2, 0)
# name in the namespace | of `torch.backends.cuda.matmul`; an older torch lacks some | its default
_MATMUL_FLAGS = (
    ("fp16_reduced", "allow_fp16_reduced_precision_reduction", True),
    ("bf16_reduced", "allow_bf16_reduced_precision_reduction", True),
    ("fp16_split_k", "allow_fp16_reduced_precision_reduction_split_k", True),
    ("bf16_split_k", "allow_bf16_reduced_precision_reduction_split_k", True),
    ("fp16_accumulation", "allow_fp16_accumulation", False),
)


class Numerics(NamedTuple):
    """What differs from the defaults; both are "" if nothing does."""

    autocast: str  # may give KV other dtypes
    others: str

    @property
    def text(self) -> str:
        """All differences, for the namespace."""
        return ", ".join(filter(None, self))


def numerics_of(model: Any, walk: ModelWalk | None = None) -> Numerics:
    """Return how `model` would be computed on this thread now. Changes nothing.

    `walk`: that of this moment, if there is one.
    """
    import torch

    kinds = (walk or walk_over(model)).kinds
    others = [
        *_precisions(kinds),
        *_attention_kernels(kinds),
        *_implementations(model),
    ]
    if torch.get_default_dtype() is not torch.float32:
        others.append(f"default_dtype={_name(torch.get_default_dtype())}")
    if torch.are_deterministic_algorithms_enabled():
        others.append("deterministic")
    return Numerics(", ".join(_autocasts(kinds)), ", ".join(others))


def _autocasts(kinds: Iterable[str]) -> list[str]:
    import torch

    return [
        f"autocast({kind})={_name(torch.get_autocast_dtype(kind))}"
        for kind in kinds
        if torch.amp.is_autocast_available(kind)
        and torch.is_autocast_enabled(kind)
    ]


def _precisions(kinds: Iterable[str]) -> list[str]:
    """Return the precisions of matrix products that are not the default."""
    import torch

    backends = torch.backends
    found = []
    for kind in kinds:
        precision = _float32_precision(kind)
        if precision not in _EXACT_PRECISIONS:
            found.append(f"float32_matmul({kind})={precision}")
        for variable in _VARIABLES.get(kind, ()):
            value = os.environ.get(variable, "")
            if value.upper() not in _EXACT_VARIABLES:
                found.append(f"{variable}={value}")
    if "cpu" in kinds and not backends.mkldnn.enabled:
        found.append("no_mkldnn")
    if "cuda" in kinds:
        cuda: Any = backends.cuda
        flags = [
            (name, getattr(cuda.matmul, setting, default), default)
            for name, setting, default in _MATMUL_FLAGS
        ]
        reduced = cuda.fp16_bf16_reduction_math_sdp_allowed()
        found += _other_flags([*flags, ("math_sdp_reduced", reduced, False)])
    return found


def _float32_precision(kind: str) -> str:
    """Return how float32 matrices are multiplied: "ieee" or "none" exactly, "tf32" or "bf16"
    rounded.
    """
    import torch

    backends: Any = torch.backends
    backend: Any = {
        "cpu": backends.mkldnn,
        "cuda": backends.cuda,
        "xpu": backends.mkldnn,
    }.get(kind)
    try:
        return str(backend.matmul.fp32_precision)
    except (AttributeError, RuntimeError):
        # another kind of device, or an older torch
        pass
    try:
        legacy = torch.get_float32_matmul_precision()
    except RuntimeError:
        # the process has set a precision that the old name cannot express
        return str(backends.fp32_precision)
    return "ieee" if legacy == "highest" else legacy


def _attention_kernels(kinds: Iterable[str]) -> list[str]:
    """Return the kernels of scaled_dot_product_attention that are switched off, or are tried in
    another order.
    """
    import torch

    cuda: Any = torch.backends.cuda
    names = ["flash_sdp", "math_sdp"]
    if "cuda" in kinds:
        names += ["mem_efficient_sdp", "cudnn_sdp"]
    found = _other_flags(
        [(name, getattr(cuda, f"{name}_enabled")(), True) for name in names]
    )
    if "cuda" in kinds and (order := _kernel_order()) != _KERNEL_ORDER:
        found.append(f"sdp_order={order}")
    return found


def _kernel_order() -> tuple[int, ...]:
    """Return in which order the flash, efficient and math kernels are tried, by their numbers.

    The place of cuDNN's kernel is left out: on some GPUs torch itself moves it to the front, at the
    first attention.
    """
    import torch

    read = getattr(torch._C, "_get_sdp_priority_order", None)
    if read is None:  # an older torch, which has one order
        return _KERNEL_ORDER
    return tuple(kernel for kernel in read() if kernel in _KERNEL_ORDER)


def _other_flags(flags: Iterable[tuple[str, Any, bool]]) -> list[str]:
    """Return the flags, each a name, a value and the default, that are not the default."""
    found = []
    for name, value, default in flags:
        if value is not default and value != default:
            found.append(f"{name}={value}")
    return found


def _implementations(model: Any) -> list[str]:
    """Return the implementations of attention and experts of the decoder that are not what the
    model would choose.
    """
    config = model.config.get_text_config(decoder=True)
    owner = next(
        (
            module
            for module in model.modules()
            if vars(module).get("config") is config
        ),
        None,
    )
    found = []
    for name, part in (("attention", "attn"), ("experts", "experts")):
        used = getattr(config, f"_{part}_implementation", None)
        choose = getattr(owner, f"get_correct_{part}_implementation", None)
        if used is None or choose is None:
            continue
        if used != choose(None):
            found.append(f"{name}={used}")
    return found


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
