"""A random model as a GGUF file, for the demo with llama.cpp: a Llama whose tokens are bytes.

    | magic, version | numbers of tensors and values | values | table of tensors | tensors |

Everything is little-endian; the numbers of kinds are those of the format. Weights have 16 bits,
those of norms 32. The same sizes and seed give the same file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

# before the 256 bytes
_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
_UNKNOWN = 2
_CONTROL = 3
_BYTE = 6

_VERSION = 3
_ALIGNMENT = 32
_UINT32 = 4
_INT32 = 5
_FLOAT32 = 6
_BOOL = 7
_STRING = 8
_ARRAY = 9
_TENSOR_KINDS = {"<f4": 0, "<f2": 1}

_Value: TypeAlias = (
    bool | int | float | str | Sequence[str] | npt.NDArray[np.generic]
)


@dataclass(frozen=True)
class RandomModel:
    """The sizes of a random model. The default has 16 million parameters."""

    hidden: int = 512
    layers: int = 6
    inner: int = 1280
    heads: int = 8
    kv_heads: int = 2
    context_tokens: int = 32768
    # queries and keys are larger by this factor: attention that is spread over all tokens would
    # make a text that hardly depends on them
    sharpness: float = 2.0
    seed: int = 0


class _Tensor(NamedTuple):
    """A tensor of the table: its values are made when they are written."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    scale: float  # of random values; 0: all are 1

    @property
    def nbytes(self) -> int:
        """Its size in the file, without padding."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def token_of(letter: str) -> int:
    """Return the token of a character of one byte."""
    return len(_SPECIAL_TOKENS) + ord(letter)


def vocabulary_tokens() -> int:
    """Return how many tokens the vocabulary has."""
    return len(_SPECIAL_TOKENS) + 256


def write_random_model(path: Path, model: RandomModel) -> int:
    """Write a random Llama; return how many parameters it has.

    Raises OSError. A file that is there is replaced.
    """
    random = np.random.default_rng(model.seed)
    tensors = list(_tensors(model))
    values = _values(model)
    head = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(values))]
    for name, value in values.items():
        head.append(_text(name) + _typed(value))
    offset = 0
    for tensor in tensors:
        # the format counts dimensions from the innermost
        dimensions = tensor.shape[::-1]
        count = len(dimensions)
        head.append(_text(tensor.name))
        head.append(struct.pack(f"<I{count}Q", count, *dimensions))
        head.append(struct.pack("<IQ", _TENSOR_KINDS[tensor.dtype], offset))
        offset += _padded(tensor.nbytes)
    with open(path, "wb") as file:
        file.write(b"".join(head))
        file.write(bytes(_padded(file.tell()) - file.tell()))
        for tensor in tensors:
            file.write(_random_values(tensor, random).tobytes())
            file.write(bytes(_padded(tensor.nbytes) - tensor.nbytes))
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _random_values(
    tensor: _Tensor, random: np.random.Generator
) -> npt.NDArray[np.generic]:
    if not tensor.scale:
        return np.ones(tensor.shape, tensor.dtype)
    values = random.standard_normal(tensor.shape, np.float32)
    values *= tensor.scale
    return values.astype(tensor.dtype)


def _values(model: RandomModel) -> Mapping[str, _Value]:
    head = model.hidden // model.heads
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    kinds = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * len(bytes_)]
    return {
        "general.architecture": "llama",
        "general.name": "random",
        "llama.context_length": model.context_tokens,
        "llama.embedding_length": model.hidden,
        "llama.block_count": model.layers,
        "llama.feed_forward_length": model.inner,
        "llama.vocab_size": vocabulary_tokens(),
        "llama.attention.head_count": model.heads,
        "llama.attention.head_count_kv": model.kv_heads,
        "llama.attention.key_length": head,
        "llama.attention.value_length": head,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": head,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*_SPECIAL_TOKENS, *bytes_],
        "tokenizer.ggml.scores": np.zeros(vocabulary_tokens(), "<f4"),
        "tokenizer.ggml.token_type": np.array(kinds, "<i4"),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }


def _tensors(model: RandomModel) -> Iterator[_Tensor]:
    hidden = model.hidden
    kv_width = hidden // model.heads * model.kv_heads

    def weights(name: str, rows: int, columns: int, gain: float = 1.0) -> _Tensor:
        # this scale keeps the size of what goes through
        scale = gain / math.sqrt(columns)
        return _Tensor(f"{name}.weight", (rows, columns), "<f2", scale)

    def norm(name: str) -> _Tensor:
        return _Tensor(f"{name}.weight", (hidden,), "<f4", 0.0)

    yield weights("token_embd", vocabulary_tokens(), hidden)
    for layer in range(model.layers):
        block = f"blk.{layer}."
        yield norm(f"{block}attn_norm")
        yield weights(f"{block}attn_q", hidden, hidden, model.sharpness)
        yield weights(f"{block}attn_k", kv_width, hidden, model.sharpness)
        yield weights(f"{block}attn_v", kv_width, hidden)
        yield weights(f"{block}attn_output", hidden, hidden)
        yield norm(f"{block}ffn_norm")
        yield weights(f"{block}ffn_gate", model.inner, hidden)
        yield weights(f"{block}ffn_up", model.inner, hidden)
        yield weights(f"{block}ffn_down", hidden, model.inner)
    yield norm("output_norm")
    yield weights("output", vocabulary_tokens(), hidden)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _typed(value: _Value) -> bytes:
    """Return a value with its kind before it."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, np.ndarray):
        kind = _FLOAT32 if value.dtype == np.dtype("<f4") else _INT32
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + value.tobytes()
    items = b"".join(_text(item) for item in value)
    return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + items
