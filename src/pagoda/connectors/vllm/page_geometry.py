"""One layer's KV cache as pages of bytes: [num_blocks, page_bytes] over vLLM's memory, or a
refusal. Copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

_REMEDY = "start vLLM with VLLM_KV_CACHE_LAYOUT=LBNHC, or LBHNC on a CPU"


class Page(NamedTuple):
    """The pages of one layer, or of several that share them.

    `start`: address of block 0; `stride`: bytes to the next block; `kernel_tokens`: tokens in a
    block of the attention kernel; `text`: spec, dtype, shape and order, which distinguish formats.
    `heads`: how many heads the page consists of, if each is one run of bytes, which `head_text`
    describes; otherwise 0.
    """

    start: int
    stride: int
    page_bytes: int
    kernel_tokens: int
    text: str
    plane: torch.Tensor
    storage: int
    names: tuple[str, ...]
    heads: int = 0
    head_text: str = ""


def page_of(name: str, tensor: Any, spec: Any, num_blocks: int) -> Page:
    """Return the pages of one layer. Changes nothing.

    Raises ValueError unless the bytes of each block are one dense run of the size that the spec
    states.
    """
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
        raise ValueError(
            f"{name}: its KV cache is not a tensor [blocks, heads, tokens, content] but "
            f"{_kind(tensor)}"
        )
    if (
        tensor.dtype.is_complex
        or tensor.layout != torch.strided
        or tensor.is_quantized
    ):
        raise ValueError(
            f"{name}: a KV cache of {tensor.dtype} ({tensor.layout}) is not known here"
        )
    kernel_blocks = int(tensor.shape[0])
    if num_blocks < 1 or kernel_blocks < num_blocks or kernel_blocks % num_blocks:
        raise ValueError(
            f"{name}: {kernel_blocks} blocks of the kernel are not a multiple of {num_blocks} "
            "blocks"
        )
    ratio = kernel_blocks // num_blocks
    item = tensor.element_size()
    if spec.block_size % ratio:
        raise ValueError(
            f"{name}: blocks of {spec.block_size} tokens are not {ratio} blocks of the kernel"
        )
    kernel_bytes = _dense_bytes(name, tensor)
    kernel_stride = int(tensor.stride(0)) * item
    page_bytes = kernel_bytes * ratio
    if ratio > 1 and kernel_stride != kernel_bytes:
        raise ValueError(
            f"{name}: the {ratio} kernel blocks of a block are not adjacent: {_REMEDY}"
        )
    stride = (
        kernel_stride * ratio
        if num_blocks > 1
        else max(kernel_stride * ratio, page_bytes)
    )
    if page_bytes != int(spec.unpadded_page_size_bytes) or stride < int(
        spec.page_size_bytes
    ):
        raise ValueError(
            f"{name}: pages of {page_bytes} bytes every {stride}, but vLLM says "
            f"{spec.unpadded_page_size_bytes} and"
            f" with padding {spec.page_size_bytes}: this format is not known here"
        )
    if stride < page_bytes:
        raise ValueError(
            f"{name}: pages of {page_bytes} bytes every {stride} overlap: {_REMEDY}"
        )
    storage = tensor.untyped_storage()
    offset = int(tensor.storage_offset()) * item
    if offset + (num_blocks - 1) * stride + page_bytes > storage.nbytes():
        raise ValueError(
            f"{name}: {num_blocks} blocks reach beyond the {storage.nbytes()} bytes of the KV cache"
        )
    plane = torch.empty(0, dtype=torch.int8, device=tensor.device)
    plane.set_(storage, offset, (num_blocks, page_bytes), (stride, 1))
    return Page(
        start=int(tensor.data_ptr()),
        stride=stride,
        page_bytes=page_bytes,
        kernel_tokens=int(spec.block_size) // ratio,
        text=(
            f"{type(spec).__name__} {_text(spec)} {tensor.dtype} {list(tensor.shape[1:])} "
            f"{_order(tensor)}"
        ),
        head_text=(
            f"{type(spec).__name__} {_text(spec, by_head=True)} {tensor.dtype} "
            f"{list(tensor.shape[2:])}"
        ),
        heads=_heads(tensor, spec) if ratio == 1 else 0,
        plane=plane,
        storage=int(storage.data_ptr()),
        names=(name,),
    )


def check_apart(pages: Sequence[Page]) -> None:
    """Raise ValueError if two pages share a byte, which would let one layer's KV be written over
    another's.
    """
    for number, one in enumerate(pages):
        for other in pages[number + 1 :]:
            if one.storage == other.storage and _overlap(one, other):
                raise ValueError(
                    f"the pages of {one.names[0]} and {other.names[0]} overlap: this format is "
                    "not known"
                )


def _overlap(one: Page, other: Page) -> bool:
    """Whether any page of `one` shares a byte with any of `other`; if strides differ, whether their
    ranges overlap.
    """
    low, high = sorted((one, other), key=lambda page: page.start)
    if (
        low.start + (len(low.plane) - 1) * low.stride + low.page_bytes
        <= high.start
    ):
        return False
    if low.stride != high.stride:
        return True
    between = (high.start - low.start) % low.stride
    return between < low.page_bytes or low.stride - between < high.page_bytes


def _dense_bytes(name: str, tensor: torch.Tensor) -> int:
    """Return the bytes of one block of the kernel. Raises ValueError if there are gaps between its
    elements.
    """
    run = 1
    for stride, size in sorted(
        zip(tensor.stride()[1:], tensor.shape[1:], strict=True)
    ):
        if size > 1 and stride != run:
            raise ValueError(
                f"{name}: the bytes of a block are not one run (shape {list(tensor.shape)}, strides"
                f" {list(tensor.stride())}): {_REMEDY}"
            )
        run *= size
    return run * tensor.element_size()


def _heads(tensor: torch.Tensor, spec: Any) -> int:
    """Return how many heads a page consists of, if each is one run with the KV of all tokens;
    otherwise 0.
    """
    _, heads, tokens, content = tensor.shape
    if (
        type(spec).__name__ != "FullAttentionSpec"
        or content != spec.head_size + spec.head_size_v
    ):
        return 0
    return heads if heads == 1 or tensor.stride(1) == tokens * content else 0


def _order(tensor: torch.Tensor) -> str:
    """Return the dimensions of a block by descending stride, as letters: HNC or NHC. Those of size
    1 are left out.
    """
    named = zip("HNC", tensor.stride()[1:], tensor.shape[1:], strict=True)
    return "".join(
        letter
        for letter, _, size in sorted(named, key=lambda each: -each[1])
        if size > 1
    )


def _text(spec: Any, by_head: bool = False) -> str:
    """Return the fields of a spec that decide how a page is read; `by_head`: without the number of
    heads.
    """
    names = (
        "num_kv_heads",
        "num_heads",
        "head_size",
        "head_size_v",
        "dtype",
        "kv_quant_mode",
        "tokens_per_state",
    )
    more = (
        "cache_dtype_str",
        "model_version",
        "cache_role",
        "sliding_window",
        "attention_chunk_size",
    )
    return " ".join(
        f"{name}={getattr(spec, name, None)}"
        for name in (*names[2 * by_head :], *more)
    )


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return (
        f"{type(value).__name__} {list(shape)}"
        if shape is not None
        else type(value).__name__
    )
