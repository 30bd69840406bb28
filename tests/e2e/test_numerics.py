"""Settings of torch that change what a GPU computes: each is named where a model is on a GPU, and
nowhere else.

The settings can be changed without a GPU. What a walk over a model on a GPU would see differs in
the kinds of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pagoda.connectors.transformers.model_walk import ModelWalk, walk_over
from pagoda.connectors.transformers.numerics import numerics_of
from tests.e2e.tiny import llama

Change = Callable[[], object]
CUDA = torch.backends.cuda
MATMUL = CUDA.matmul


@pytest.fixture(scope="module")
def model():
    return llama(seed=7)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for part in (MATMUL, torch.backends.mkldnn.matmul, torch.backends):
        part.fp32_precision = "none"
    MATMUL.allow_fp16_reduced_precision_reduction = True
    MATMUL.allow_bf16_reduced_precision_reduction = True
    MATMUL.allow_fp16_accumulation = False
    CUDA.allow_fp16_bf16_reduction_math_sdp(False)
    CUDA.enable_mem_efficient_sdp(True)
    CUDA.enable_cudnn_sdp(True)
    CUDA.enable_flash_sdp(True)
    CUDA.enable_math_sdp(True)
    torch._C._set_sdp_priority_order(FIRST_ORDER)
    torch.set_autocast_enabled("cuda", False)


FIRST_ORDER = torch._C._get_sdp_priority_order()


def on(model, kind: str) -> ModelWalk:
    """Return what a walk sees of a model that is on another kind of device."""
    return walk_over(model)._replace(kinds=[kind])


def tried_in_order(*kernels: SDPBackend) -> None:
    """Set in which order kernels of attention are tried, as `sdpa_kernel(..., set_priority=True)`
    does.
    """
    with sdpa_kernel(list(kernels), set_priority=True):
        order = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(order)


def text_on(model, kind: str) -> str:
    return numerics_of(model, on(model, kind)).text


def test_with_defaults_nothing_is_named(model) -> None:
    assert text_on(model, "cuda") == ""
    assert text_on(model, "cpu") == ""
    assert text_on(model, "mps") == ""


ONLY_ON_CUDA: dict[str, Change] = {
    "float32_matmul(cuda)=tf32": partial(setattr, MATMUL, "allow_tf32", True),
    "fp16_reduced=False": partial(
        setattr, MATMUL, "allow_fp16_reduced_precision_reduction", False
    ),
    "bf16_reduced=False": partial(
        setattr, MATMUL, "allow_bf16_reduced_precision_reduction", False
    ),
    "fp16_split_k=False": partial(
        setattr, MATMUL, "allow_fp16_reduced_precision_reduction", (False, False)
    ),
    "bf16_split_k=False": partial(
        setattr, MATMUL, "allow_bf16_reduced_precision_reduction", (False, False)
    ),
    "fp16_accumulation=True": partial(
        setattr, MATMUL, "allow_fp16_accumulation", True
    ),
    "math_sdp_reduced=True": partial(
        CUDA.allow_fp16_bf16_reduction_math_sdp, True
    ),
    "mem_efficient_sdp=False": partial(CUDA.enable_mem_efficient_sdp, False),
    "cudnn_sdp=False": partial(CUDA.enable_cudnn_sdp, False),
    "sdp_order=(2, 1, 0)": partial(
        tried_in_order,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.MATH,
    ),
    "autocast(cuda)=float16": partial(torch.set_autocast_enabled, "cuda", True),
}


@pytest.mark.parametrize("name", ONLY_ON_CUDA)
def test_what_only_a_gpu_does_is_named_there_alone(name: str, model) -> None:
    ONLY_ON_CUDA[name]()
    assert name in text_on(model, "cuda")
    assert text_on(model, "cpu") == ""


EVERYWHERE: dict[str, Change] = {
    "flash_sdp=False": partial(CUDA.enable_flash_sdp, False),
    "math_sdp=False": partial(CUDA.enable_math_sdp, False),
    "float32_matmul(KIND)=tf32": partial(
        setattr, torch.backends, "fp32_precision", "tf32"
    ),
}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_what_both_do_is_named_on_both(name: str, kind: str, model) -> None:
    EVERYWHERE[name]()
    assert name.replace("KIND", kind) in text_on(model, kind)


def test_the_old_name_of_the_precision_counts(model) -> None:
    torch.set_float32_matmul_precision("high")
    assert "float32_matmul(cuda)=tf32" in text_on(model, "cuda")
    assert "float32_matmul(mps)=high" in text_on(model, "mps")


def test_a_precision_that_the_old_name_cannot_express(model) -> None:
    """Torch raises then for the old name, which is all there is for some kinds of devices."""
    torch.backends.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    assert "float32_matmul(mps)=tf32" in text_on(model, "mps")


def test_the_variable_of_the_library_counts(
    model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert "NVIDIA_TF32_OVERRIDE=1" in text_on(model, "cuda")
    assert text_on(model, "cpu") == ""


def test_the_place_of_the_kernel_of_cudnn_does_not_count(model) -> None:
    """On some GPUs torch moves it to the front at the first attention: the keys of before must
    stay.
    """
    tried_in_order(
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    )
    assert text_on(model, "cuda") == ""
