"""What a model's DynamicCache holds at a number of tokens, as bytes.

    rows     K and V of every token, of the layers with full attention: stored by chunk
    ending   everything else at exactly n tokens: the last w - 1 rows of layers with a sliding
             window of w, the states of recurrent and convolution layers, and the rows of the full
             layers after the last whole chunk

An ending is the values of the layers in their order, each at a multiple of 64 bytes:

    | layer 0: K of its window | V | layer 1: tail of K | tail of V | layer 2: states | ...

`shape_of` reads the shape from a cache that the model has filled. `read_ending` copies an ending
out of a cache, so that no value stays a view of the whole prompt's memory; `fill_cache` fills an
empty cache with one. Nothing here computes with the model.

Used by `stateful_probe` and `stateful_prompts`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from pagoda.layout import KVLayout, Plane, itemsize
from pagoda.transfer.base import Bytes

# raised when the bytes of an ending get another meaning
_FORMAT = 1
_ALIGNED = 64
# the parts of an ending of a model without full layers, whose chunks hold nothing
_LEAST_PART_BYTES = 4096
_MOST_PART_BYTES = 256 << 10
_PARTS = 256

# kinds of layers of a DynamicCache -> what they keep of each token, and whether they have states
_KINDS = {
    "DynamicLayer": ("full", False),
    "DynamicSlidingWindowLayer": ("window", False),
    "LinearAttentionLayer": ("", True),
    "LinearAttentionAndFullAttentionLayer": ("full", True),
    "LinearAttentionAndSlidingWindowAttentionLayer": ("window", True),
    "DummyLayer": ("", False),
}
# attributes of layers that hold tensors, all of which are in an ending or follow from it
_KNOWN_TENSORS = frozenset(
    {
        "_sliding_window_tensor",
        "conv_states",
        "keys",
        "recurrent_states",
        "values",
    }
)


class UnknownLayer(ValueError):
    """A layer keeps something that is not known here."""


class StateForm(NamedTuple):
    """One state of a recurrent or convolution layer."""

    kind: str  # the attribute of the layer: "conv_states" or "recurrent_states"
    number: int  # in that attribute
    shape: tuple[int, ...]  # without the batch
    dtype: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * itemsize(self.dtype)


class LayerForm(NamedTuple):
    """What one layer of the cache keeps."""

    rows: str  # "full": K and V of every token, "window": of the last ones, "": of none
    window: int  # tokens that the window covers, with the one that is computed
    planes: tuple[Plane, ...]  # of K and V
    states: tuple[StateForm, ...]
    has_state: tuple[bool, ...]  # `has_previous_state` after a pass
    device: Any  # None: the layer keeps nothing

    def kept_rows(self, tokens: int, chunk_tokens: int) -> int:
        """Return the rows of this layer in an ending of so many tokens."""
        if self.rows == "full":
            return tokens % chunk_tokens
        return min(tokens, self.window - 1) if self.rows == "window" else 0

    def named(self) -> list[object]:
        """Return everything but the device, for a fingerprint."""
        planes = [list(plane) for plane in self.planes]
        states = [list(state) for state in self.states]
        return [self.rows, self.window, planes, states, list(self.has_state)]


@dataclass(frozen=True)
class CacheShape:
    """The layers of a model's cache. Immutable."""

    layers: tuple[LayerForm, ...]
    code: str  # the version of the model's code

    @property
    def full(self) -> list[int]:
        """The layers whose rows are stored by chunk."""
        return [
            number
            for number, layer in enumerate(self.layers)
            if layer.rows == "full"
        ]

    @property
    def is_linear(self) -> bool:
        """Whether no layer has rows, so that the cache itself does not know its length."""
        return not any(layer.rows for layer in self.layers)

    def ending_bytes(self, tokens: int, chunk_tokens: int) -> int:
        """Return the bytes of an ending of so many tokens."""
        total = 0
        for layer in self.layers:
            rows = layer.kept_rows(tokens, chunk_tokens)
            for plane in layer.planes:
                total += _aligned(plane_bytes(plane, rows))
            for state in layer.states:
                total += _aligned(state.nbytes)
        return total

    @property
    def most_ending_bytes(self) -> int:
        """The bytes of an ending after a whole chunk, whose windows are full."""
        windows = [layer.window for layer in self.layers]
        return self.ending_bytes(max(windows, default=0), 1)

    def layout(self, chunk_tokens: int) -> KVLayout:
        """Return the layout of a chunk: rows of the full layers. Its fingerprint names the whole
        arrangement. ValueError if full layers differ.

        A model without full layers has chunks that only say that they are there: an ending is found
        through them.
        """
        full = [self.layers[number] for number in self.full]
        planes = {layer.planes for layer in full}
        if len(planes) > 1:
            raise ValueError(
                f"full-attention layers of different shapes {sorted(planes)}: not supported yet"
            )
        if full:
            layout = KVLayout.of(len(full), planes.pop(), chunk_tokens)
        else:
            part = self.most_ending_bytes // _PARTS
            part = -(-part // _LEAST_PART_BYTES) * _LEAST_PART_BYTES
            part = min(max(part, _LEAST_PART_BYTES), _MOST_PART_BYTES)
            layout = KVLayout.opaque(chunk_tokens, part, "endings alone")
        described = [
            _FORMAT,
            layout.fingerprint,
            self.code,
            [layer.named() for layer in self.layers],
        ]
        fingerprint = blake3(
            json.dumps(described).encode(),
            derive_key_context="PagodaKV endings of a Transformers model",
        ).hexdigest(8)
        return replace(layout, fingerprint=fingerprint)


def kinds_of(cache: Any) -> list[str]:
    """Return the kind of each layer of a cache. Pure."""
    return [type(layer).__name__ for layer in cache.layers]


def unknown_kind(cache: Any) -> str:
    """Return the first kind of layer that is not known here; "" if there is none. Pure."""
    return next((kind for kind in kinds_of(cache) if kind not in _KINDS), "")


def shape_of(model: Any, cache: Any) -> CacheShape:
    """Return the shape of a cache that the model has filled, with a batch of one. Changes nothing.

    Raises UnknownLayer if it holds something that is not known here.
    """
    layers = [
        _form_of(number, layer) for number, layer in enumerate(cache.layers)
    ]
    odd = [name for name, value in vars(cache).items() if _has_tensors(value, 0)]
    if odd:
        raise UnknownLayer(f"its cache has {odd[0]}, which is not known here")
    return CacheShape(tuple(layers), _code_of(model))


def plane_bytes(plane: Plane, rows: int) -> int:
    """Return the bytes of so many rows of a plane."""
    return plane.heads * plane.dim * rows * itemsize(plane.dtype)


def _form_of(number: int, layer: Any) -> LayerForm:
    kind = type(layer).__name__
    if kind not in _KINDS:
        raise UnknownLayer(f"layer {number} is of kind {kind}")
    for name, value in vars(layer).items():
        if name not in _KNOWN_TENSORS and _has_tensors(value, 0):
            raise UnknownLayer(
                f"layer {number} ({kind}) has {name}, which is not known here"
            )
    rows, has_states = _KINDS[kind]
    window = int(layer.sliding_window) if rows == "window" else 0
    planes: tuple[Plane, ...] = ()
    device = None
    # a layer that uses the KV of another one is never initialised
    if rows and layer.is_initialized:
        planes = tuple(_plane(one, number) for one in (layer.keys, layer.values))
        device = layer.keys.device
    states = []
    has_state: tuple[bool, ...] = ()
    if has_states:
        has_state = tuple(bool(one) for one in layer.has_previous_state.values())
        for name in ("conv_states", "recurrent_states"):
            for index, state in getattr(layer, name).items():
                if state is None:
                    continue
                states.append(
                    StateForm(name, index, tuple(state.shape[1:]), _dtype(state))
                )
                device = state.device
    return LayerForm(
        rows if planes else "",
        window if planes else 0,
        planes,
        tuple(states),
        has_state,
        device,
    )


def _has_tensors(value: Any, depth: int) -> bool:
    import torch

    if isinstance(value, torch.Tensor):
        return True
    if depth > 1:
        return False
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(_has_tensors(item, depth + 1) for item in value)
    return False


def _plane(tensor: Any, number: int) -> Plane:
    if tensor.ndim != 4 or tensor.shape[0] != 1:
        raise UnknownLayer(
            f"layer {number} does not keep K and V [batch, heads, tokens, dim]"
        )
    _, heads, _, dim = tensor.shape
    return Plane(heads, dim, _dtype(tensor))


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _code_of(model: Any) -> str:
    """Return the version of Transformers and a digest of the file that has the model's class."""
    import transformers

    file = getattr(sys.modules.get(type(model).__module__), "__file__", None)
    digest = ""
    if file and Path(file).is_file():
        digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    return f"{transformers.__version__} {type(model).__qualname__} {digest}"


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


# ---- from a cache to bytes and back


def is_at(shape: CacheShape, cache: Any, tokens: int) -> bool:
    """Return whether a cache holds exactly so many tokens, in the arrangement of `shape`. Pure."""
    if len(cache.layers) != len(shape.layers):
        return False
    if cache.get_seq_length() != tokens:
        return False
    for form, layer in zip(shape.layers, cache.layers, strict=True):
        if form.rows:
            rows = tokens
            if form.rows == "window":
                rows = min(tokens, form.window - 1)
                if layer.cumulative_length != tokens:
                    return False
            tensors = (layer.keys, layer.values)
            for plane, tensor in zip(form.planes, tensors, strict=True):
                heads, dim, dtype = plane
                if tensor is None or _dtype(tensor) != dtype:
                    return False
                if tuple(tensor.shape[1:]) != (heads, rows, dim):
                    return False
        if form.has_state:
            flags = layer.has_previous_state.values()
            if tuple(bool(flag) for flag in flags) != form.has_state:
                return False
        for state in form.states:
            tensor = getattr(layer, state.kind)[state.number]
            if tensor is None or _dtype(tensor) != state.dtype:
                return False
            if tuple(tensor.shape[1:]) != state.shape:
                return False
    return True


def batch_of(shape: CacheShape, cache: Any) -> int:
    """Return how many rows a cache has that `is_at` some number of tokens; 0: none. Pure."""
    for form, layer in zip(shape.layers, cache.layers, strict=True):
        if form.rows:
            return len(layer.keys)
        for state in form.states:
            return len(getattr(layer, state.kind)[state.number])
    return 0


def read_ending(
    shape: CacheShape, cache: Any, row: int, tokens: int, chunk_tokens: int
) -> Bytes:
    """Return a copy of the ending of one row of a cache that holds exactly `tokens` tokens; no
    value stays a view of the cache. Changes nothing.
    """
    payload = np.zeros(shape.ending_bytes(tokens, chunk_tokens), np.uint8)
    at = 0
    for form, layer in zip(shape.layers, cache.layers, strict=True):
        rows = form.kept_rows(tokens, chunk_tokens)
        values = []
        if form.rows:
            held = layer.keys.shape[2]
            values += [
                plane[row, :, held - rows :]
                for plane in (layer.keys, layer.values)
            ]
        values += [
            getattr(layer, state.kind)[state.number][row] for state in form.states
        ]
        for value in values:
            at = _put(payload, at, value)
    return payload


def fill_cache(
    shape: CacheShape,
    cache: Any,
    endings: list[Bytes],
    tokens: int,
    chunk_tokens: int,
    planes: list[list[Any]],
) -> None:
    """Fill an empty cache with `tokens` tokens of a batch.

    Args:
        endings: of each row.
        planes: K and V of each full layer, [batch, heads, at least `tokens`, dim], with the rows
            of the whole chunks; the others are written to it here. They become the cache's.
    """
    at = 0
    full = iter(planes)
    whole = tokens - tokens % chunk_tokens
    for form, layer in zip(shape.layers, cache.layers, strict=True):
        rows = form.kept_rows(tokens, chunk_tokens)
        values = []
        for heads, dim, dtype in form.planes:
            value, at = _take(endings, at, (heads, rows, dim), dtype)
            values.append(value)
        if form.rows == "full":
            held = next(full)
            for plane, tail in zip(held, values, strict=True):
                plane[:, :, whole:tokens] = tail.to(plane.device)
            values = [plane[:, :, :tokens] for plane in held]
        if form.rows:
            keys, held_values = (value.to(form.device) for value in values)
            layer.lazy_initialization(keys, held_values)
            layer.keys = keys
            layer.values = held_values
        if form.rows == "window":
            layer.cumulative_length = tokens
        for state in form.states:
            value, at = _take(endings, at, state.shape, state.dtype)
            value = value.to(form.device)
            layer.lazy_initialization(
                **{state.kind: value, "state_idx": state.number}
            )
            getattr(layer, state.kind)[state.number].copy_(value)
        for number, has_state in enumerate(form.has_state):
            layer.has_previous_state[number] = has_state


def _put(payload: Bytes, at: int, value: Any) -> int:
    """Copy a tensor into the payload; return where the next one begins."""
    import torch

    nbytes = value.numel() * value.element_size()
    if nbytes:
        target = torch.from_numpy(payload[at : at + nbytes]).view(value.dtype)
        target.view(value.shape).copy_(value.detach())
    return at + _aligned(nbytes)


def _take(
    endings: list[Bytes], at: int, shape: tuple[int, ...], dtype: str
) -> tuple[Any, int]:
    """Return one value of all rows, [batch, ...], as a copy, and where the next one begins."""
    import torch

    nbytes = int(np.prod(shape)) * itemsize(dtype)
    kind = getattr(torch, dtype)
    value = torch.empty((len(endings), *shape), dtype=kind)
    if nbytes:
        for row, payload in enumerate(endings):
            source = torch.from_numpy(payload[at : at + nbytes]).view(kind)
            value[row].copy_(source.view(shape))
    return value, at + _aligned(nbytes)


def repeat(cache: Any, repeats: int) -> None:
    """Repeat each row of a cache so many times. Layers with states have no method for that."""
    for layer in cache.layers:
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name, {})
            for number, state in states.items():
                if state is not None:
                    states[number] = state.repeat_interleave(repeats, dim=0)
        if getattr(layer, "keys", None) is not None and layer.keys.numel():
            layer.keys = layer.keys.repeat_interleave(repeats, dim=0)
            layer.values = layer.values.repeat_interleave(repeats, dim=0)
