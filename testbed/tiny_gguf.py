"""Tiny random models as GGUF files, for real llama.cpp servers: one for each form of their state.

    path = write_model(directory, "gemma3", seed=1)

Heads of 64, 32-bit weights, a vocabulary of bytes. A model takes some MB and a few ms for a token.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

HEAD = 64
WINDOW = 128
EXPERTS = 4
EXPERT_INNER = 64
VOCABULARY = 320
LATENT = 128  # of K and V in deepseek2
ROPE = 32  # of it, rotated


class Size(NamedTuple):
    """How much a model computes for a token: 128, 2, 256 is some 6,000 tokens a second of a thread,
    256, 2, 768 a third of it. The KV of one token depends only on the layers.
    """

    hidden: int  # a multiple of 64
    layers: int
    inner: int

    @property
    def heads(self) -> int:
        """Return the number of heads of queries; there is one of keys."""
        return self.hidden // HEAD


TINY = Size(hidden=128, layers=2, inner=256)

_ALIGNMENT = 32
_TYPES = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}
_INT32 = 5
_STRING = 8
_ARRAY = 9

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Value = (
    bool
    | int
    | float
    | str
    | Sequence[int]
    | Sequence[float]
    | Sequence[str]
    | Ints
)
ARCHITECTURES = (
    "llama",
    "qwen3",
    "qwen3moe",
    "deepseek2",
    "gemma3",
    "gpt-oss",
    "lfm2",
    "qwen3next",
    "mamba2",
)
ATTENTION = ("llama", "qwen3", "qwen3moe", "deepseek2")
WINDOWS = ("gemma3", "gpt-oss")
HYBRIDS = ("lfm2", "qwen3next")


def write_gguf(
    path: Path, values: Mapping[str, Value], tensors: Mapping[str, Floats]
) -> None:
    """Write a GGUF file of version 3 with these values and 32-bit tensors."""
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(values))]
    for name, value in values.items():
        head.append(_text(name) + _typed(value))
    offset = 0
    for name, tensor in tensors.items():
        # ggml counts dimensions from the innermost
        dims = tensor.shape[::-1]
        head.append(
            _text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        )
        head.append(struct.pack("<IQ", 0, offset))
        offset += _padded(tensor.nbytes)
    with open(path, "wb") as file:
        file.write(b"".join(head))
        for tensor in tensors.values():
            file.write(bytes(_padded(file.tell()) - file.tell()))
            file.write(np.ascontiguousarray(tensor, "<f4").tobytes())
        file.write(bytes(_padded(file.tell()) - file.tell()))


def write_model(
    directory: Path,
    architecture: str = "llama",
    seed: int = 0,
    *,
    size: Size = TINY,
    template: str = "",
    special: Sequence[str] = (),
) -> Path:
    """Write a random model of one of `ARCHITECTURES`; return its path.

    `template` is the one of its conversations. `special` are more tokens that control something:
    they stand in place of the first words of the vocabulary.
    """
    name = f"{architecture}-{seed}"
    if size != TINY:
        name += f"-{size.hidden}x{size.layers}x{size.inner}"
    if template or special:
        name += f"-{zlib.crc32(repr((template, special)).encode()):08x}"
    path = directory / f"{name}.gguf"
    if not path.exists():
        model = _Model(architecture, seed, size)
        model.values.update(_vocabulary(special))
        if template:
            model.values["tokenizer.chat_template"] = template
        write_gguf(path, model.values, model.tensors)
    return path


def write_adapter(directory: Path, seed: int = 7) -> Path:
    """Write a LoRA adapter for the queries and keys of `llama`; return its path."""
    random = np.random.default_rng(seed)
    path = directory / f"adapter-{seed}.gguf"
    tensors: dict[str, Floats] = {}
    for layer in range(TINY.layers):
        for name, width in (("attn_q", TINY.heads * HEAD), ("attn_k", HEAD)):
            low = random.standard_normal((4, TINY.hidden)) * 0.2
            high = random.standard_normal((width, 4)) * 0.2
            tensors[f"blk.{layer}.{name}.weight.lora_a"] = low.astype(np.float32)
            tensors[f"blk.{layer}.{name}.weight.lora_b"] = high.astype(np.float32)
    values: dict[str, Value] = {
        "general.architecture": "llama",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 4.0,
    }
    write_gguf(path, values, tensors)
    return path


def _padded(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _typed(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, bool | int | float):
        kind, form = _TYPES[type(value)]
        return struct.pack("<I", kind) + struct.pack(form, value)
    if isinstance(value, np.ndarray):
        head = struct.pack("<IIQ", _ARRAY, _INT32, len(value))
        return head + value.astype("<i4").tobytes()
    first = value[0]
    if isinstance(first, str):
        head = struct.pack("<IIQ", _ARRAY, _STRING, len(value))
        return head + b"".join(_text(str(item)) for item in value)
    kind, form = _TYPES[type(first)]
    head = struct.pack("<IIQ", _ARRAY, kind, len(value))
    return head + b"".join(struct.pack(form, item) for item in value)


class _Model:
    """The values and tensors of one architecture."""

    def __init__(self, architecture: str, seed: int, size: Size) -> None:
        self.architecture = architecture
        self.size = size
        self.random = np.random.default_rng(
            [seed, ARCHITECTURES.index(architecture)]
        )
        self.tensors: dict[str, Floats] = {}
        self.values: dict[str, Value] = {
            "general.architecture": architecture,
            "general.name": "tiny",
        }
        self._set(
            context_length=32768,
            embedding_length=self.size.hidden,
            block_count=self.size.layers,
            vocab_size=VOCABULARY,
        )
        self._set(**{"attention.layer_norm_rms_epsilon": 1e-5})
        describe: Mapping[str, Callable[[], None]] = {
            "deepseek2": self._latent_attention,
            "mamba2": self._state_space,
        }
        describe.get(architecture, self._attention)()
        if architecture in ("qwen3moe", "gpt-oss", "deepseek2", "qwen3next"):
            self._set(
                expert_count=EXPERTS,
                expert_used_count=2,
                expert_feed_forward_length=EXPERT_INNER,
            )
        self._weights("token_embd", VOCABULARY, self.size.hidden)
        for layer in range(self.size.layers):
            self._layer(layer)
        last = "token_embd_norm" if architecture == "lfm2" else "output_norm"
        self._ones(last, self.size.hidden)
        self._weights("output", VOCABULARY, self.size.hidden)

    # ---- values

    def _set(self, **values: Value) -> None:
        for name, value in values.items():
            self.values[f"{self.architecture}.{name}"] = value

    def _attention(self) -> None:
        rope = ROPE if self.architecture == "qwen3next" else HEAD
        kv_heads: Value = 1
        if self.architecture == "lfm2":
            kv_heads = [
                0 if self._is_recurrent(layer) else 1
                for layer in range(self.size.layers)
            ]
        self._set(feed_forward_length=self.size.inner)
        self._set(
            **{
                "attention.head_count": self.size.heads,
                "attention.head_count_kv": kv_heads,
                "attention.key_length": HEAD,
                "attention.value_length": HEAD,
                "rope.dimension_count": rope,
            }
        )
        if self.architecture in WINDOWS:
            self._set(**{"attention.sliding_window": WINDOW})
            self._set(**{"attention.sliding_window_pattern": 2})
        if self.architecture == "lfm2":
            self._set(**{"shortconv.l_cache": 3})
        if self.architecture == "qwen3next":
            self._set(
                full_attention_interval=2,
                expert_shared_feed_forward_length=EXPERT_INNER,
            )
            self._set_state_space(inner=256, size=64, ranks=4, groups=2)

    def _latent_attention(self) -> None:
        self._set(
            feed_forward_length=self.size.inner,
            leading_dense_block_count=1,
            expert_shared_count=1,
            expert_weights_scale=1.0,
        )
        self._set(
            **{
                "attention.head_count": self.size.heads,
                "attention.head_count_kv": 1,
                "attention.q_lora_rank": HEAD,
                "attention.kv_lora_rank": LATENT,
                "attention.key_length": LATENT + ROPE,
                "attention.value_length": LATENT,
                "attention.key_length_mla": HEAD + ROPE,
                "attention.value_length_mla": HEAD,
                "rope.dimension_count": ROPE,
            }
        )

    def _state_space(self) -> None:
        self._set(feed_forward_length=0)
        self._set(**{"attention.head_count": 0})
        inner = 2 * self.size.hidden
        self._set_state_space(inner=inner, size=16, ranks=inner // HEAD, groups=1)

    def _set_state_space(
        self, inner: int, size: int, ranks: int, groups: int
    ) -> None:
        self._set(
            **{
                "ssm.conv_kernel": 4,
                "ssm.inner_size": inner,
                "ssm.state_size": size,
                "ssm.time_step_rank": ranks,
                "ssm.group_count": groups,
            }
        )

    def _is_recurrent(self, layer: int) -> bool:
        return self.architecture in HYBRIDS and layer % 2 == 0

    # ---- tensors

    def _weights(self, name: str, *shape: int, kind: str = "weight") -> None:
        values = self.random.standard_normal(shape) * 0.1
        self.tensors[f"{name}.{kind}"] = values.astype(np.float32)

    def _ones(self, name: str, *shape: int, value: float = 1.0) -> None:
        name = name if name.endswith(("ssm_a", "ssm_d")) else f"{name}.weight"
        self.tensors[name] = np.full(shape, value, np.float32)

    def _layer(self, layer: int) -> None:
        block = f"blk.{layer}."
        self._ones(block + "attn_norm", self.size.hidden)
        if self.architecture == "mamba2":
            self._mamba(block)
            return
        if self.architecture == "deepseek2":
            self._latent_heads(block)
        elif self._is_recurrent(layer):
            self._recurrent(block)
        else:
            self._heads(block)
        if self.architecture in ("gemma3", "gpt-oss", "qwen3next"):
            self._ones(block + "post_attention_norm", self.size.hidden)
        if self.architecture not in ("gpt-oss", "qwen3next"):
            self._ones(block + "ffn_norm", self.size.hidden)
        if self.architecture == "gemma3":
            self._ones(block + "post_ffw_norm", self.size.hidden)
        is_dense = self.architecture == "deepseek2" and layer == 0
        if "expert_count" in str(self.values.keys()) and not is_dense:
            self._experts(block)
        else:
            self._mlp(block, "", self.size.inner)

    def _heads(self, block: str) -> None:
        gate = 2 if self.architecture == "qwen3next" else 1
        self._weights(
            block + "attn_q", self.size.heads * HEAD * gate, self.size.hidden
        )
        self._weights(block + "attn_k", HEAD, self.size.hidden)
        self._weights(block + "attn_v", HEAD, self.size.hidden)
        self._weights(
            block + "attn_output", self.size.hidden, self.size.heads * HEAD
        )
        if self.architecture == "gpt-oss":
            self._weights(block + "attn_sinks", self.size.heads)
            self._weights(block + "attn_q", self.size.heads * HEAD, kind="bias")
            self._weights(block + "attn_k", HEAD, kind="bias")
            self._weights(block + "attn_v", HEAD, kind="bias")
            self._weights(block + "attn_output", self.size.hidden, kind="bias")
        elif self.architecture != "llama":
            self._ones(block + "attn_q_norm", HEAD)
            self._ones(block + "attn_k_norm", HEAD)

    def _latent_heads(self, block: str) -> None:
        self._weights(block + "attn_q_a", HEAD, self.size.hidden)
        self._ones(block + "attn_q_a_norm", HEAD)
        self._weights(block + "attn_q_b", self.size.heads * (HEAD + ROPE), HEAD)
        self._weights(block + "attn_kv_a_mqa", LATENT + ROPE, self.size.hidden)
        self._ones(block + "attn_kv_a_norm", LATENT)
        self._weights(block + "attn_k_b", self.size.heads, LATENT, HEAD)
        self._weights(block + "attn_v_b", self.size.heads, HEAD, LATENT)
        self._weights(
            block + "attn_output", self.size.hidden, self.size.heads * HEAD
        )

    def _recurrent(self, block: str) -> None:
        if self.architecture == "lfm2":
            self._weights(block + "shortconv.conv", self.size.hidden, 3)
            self._weights(
                block + "shortconv.in_proj",
                3 * self.size.hidden,
                self.size.hidden,
            )
            self._weights(
                block + "shortconv.out_proj", self.size.hidden, self.size.hidden
            )
            return
        # a gated delta net: 2 heads of keys and 4 of values
        self._weights(block + "attn_qkv", 8 * HEAD, self.size.hidden)
        self._weights(block + "attn_gate", 4 * HEAD, self.size.hidden)
        self._weights(block + "ssm_conv1d", 8 * HEAD, 4)
        self._weights(block + "ssm_dt", 4, kind="bias")
        self._ones(block + "ssm_a", 4, value=-0.5)
        self._weights(block + "ssm_ba", 8, self.size.hidden)
        self._ones(block + "ssm_norm", HEAD)
        self._weights(block + "ssm_out", self.size.hidden, 4 * HEAD)

    def _mamba(self, block: str) -> None:
        inner = 2 * self.size.hidden
        mixed = inner + 2 * 16
        ranks = inner // HEAD
        self._weights(block + "ssm_in", inner + mixed + ranks, self.size.hidden)
        self._weights(block + "ssm_conv1d", mixed, 4)
        self._weights(block + "ssm_conv1d", mixed, kind="bias")
        self._weights(block + "ssm_dt", ranks, kind="bias")
        self._ones(block + "ssm_a", ranks, 1, value=-0.5)
        self._ones(block + "ssm_d", ranks, 1)
        self._ones(block + "ssm_norm", 1, inner)
        self._weights(block + "ssm_out", self.size.hidden, inner)

    def _mlp(self, block: str, suffix: str, inner: int) -> None:
        self._weights(f"{block}ffn_gate{suffix}", inner, self.size.hidden)
        self._weights(f"{block}ffn_up{suffix}", inner, self.size.hidden)
        self._weights(f"{block}ffn_down{suffix}", self.size.hidden, inner)

    def _experts(self, block: str) -> None:
        self._weights(block + "ffn_gate_inp", EXPERTS, self.size.hidden)
        self._weights(
            block + "ffn_gate_exps", EXPERTS, EXPERT_INNER, self.size.hidden
        )
        self._weights(
            block + "ffn_up_exps", EXPERTS, EXPERT_INNER, self.size.hidden
        )
        self._weights(
            block + "ffn_down_exps", EXPERTS, self.size.hidden, EXPERT_INNER
        )
        if self.architecture == "gpt-oss":
            self._weights(block + "ffn_gate_inp", EXPERTS, kind="bias")
            self._weights(
                block + "ffn_gate_exps", EXPERTS, EXPERT_INNER, kind="bias"
            )
            self._weights(
                block + "ffn_up_exps", EXPERTS, EXPERT_INNER, kind="bias"
            )
            self._weights(
                block + "ffn_down_exps", EXPERTS, self.size.hidden, kind="bias"
            )
        if self.architecture in ("deepseek2", "qwen3next"):
            self._mlp(block, "_shexp", EXPERT_INNER)
        if self.architecture == "qwen3next":
            self._weights(block + "ffn_gate_inp_shexp", self.size.hidden)


def _vocabulary(special: Sequence[str] = ()) -> dict[str, Value]:
    """Return a vocabulary of 3 control tokens, 256 bytes, more control tokens, and words nobody
    writes.
    """
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    first_word = 3 + len(bytes_) + len(special)
    words = [f"word{number}" for number in range(VOCABULARY - first_word)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *special, *words]
    kinds = [2, 3, 3, *[6] * len(bytes_), *[3] * len(special), *[1] * len(words)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * VOCABULARY,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
