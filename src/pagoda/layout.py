"""The bytes of a chunk: their number and, if the engine's format is known, the place of each plane.
Pure.

A chunk is one contiguous run, layer by layer, plane by plane; each plane is contiguous in
`token_order`:

    | layer 0: K | V | K scales | V scales | layer 1: K | V | ... |      slot = chunk rounded up to 4096 bytes
"""  # noqa: E501, W505

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias, get_args

import msgspec
from blake3 import blake3

__all__ = [
    "ITEMSIZE",
    "SLOT_ALIGN",
    "KVLayout",
    "Plane",
    "Rotary",
    "TokenOrder",
    "itemsize",
]

SLOT_ALIGN = 4096  # a page; O_DIRECT needs it
TokenOrder: TypeAlias = Literal["heads_first", "tokens_first"]

# bytes per element; numpy has no name for half of these
ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}


def itemsize(dtype: str) -> int:
    """Return the bytes of one element of `dtype` ("bfloat16"). Raises ValueError for an unknown
    name.
    """
    try:
        return ITEMSIZE[dtype]
    except KeyError:
        known = ", ".join(ITEMSIZE)
        raise ValueError(
            f"unknown dtype {dtype!r}: one of {known}; pack sub-byte types as uint8"
        ) from None


class Plane(NamedTuple):
    """One array of a layer: `heads` x chunk_tokens x `dim` elements (K, or V, or the scales of
    one).
    """

    heads: int
    dim: int
    dtype: str


class Rotary(NamedTuple):
    """The rotary embedding that K was given: it allows K to be moved to another position. V has
    none.
    """

    theta: float  # the base of the frequencies
    dims: int  # how many leading dims of a head are rotated, in two halves
    scaling: str  # everything else that decides the angles, as text


@dataclass(frozen=True)
class KVLayout:
    """The memory layout of the KV of one chunk. Immutable; create it with `dense`, `mla`, `of` or
    `opaque`.

    `fingerprint` (16 hex characters) names the layout: equal fingerprints mean equal bytes.
    `planes` describes one layer; it is empty if the bytes are opaque. Raises ValueError if the
    numbers disagree.

    Example:
        >>> layout = KVLayout.dense(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")
        >>> layout.chunk_tokens, layout.chunk_bytes  # 2 planes x 32 x 256 x 8 x 128 x 2 bytes
        (256, 33554432)
    """

    chunk_tokens: int
    chunk_bytes: int
    fingerprint: str
    layers: int = 0
    planes: tuple[Plane, ...] = ()
    token_order: TokenOrder = "heads_first"
    rotary: Rotary | None = None  # given only if KV is moved to other positions

    def __post_init__(self) -> None:
        _positive(chunk_tokens=self.chunk_tokens, chunk_bytes=self.chunk_bytes)
        if not re.fullmatch(r"[0-9a-f]{16}", self.fingerprint):
            raise ValueError(
                f"a fingerprint is 16 hex characters, got {self.fingerprint!r}: use "
                "KVLayout.opaque(...)"
            )
        if self.token_order not in get_args(TokenOrder):
            raise ValueError(
                f"token_order must be one of {', '.join(get_args(TokenOrder))}, got "
                f"{self.token_order!r}"
            )
        if bool(self.planes) != bool(self.layers):
            raise ValueError(
                "layers and planes come together: give both, or neither for opaque bytes"
            )
        if self.planes and self.chunk_bytes != self.layers * self.layer_bytes:
            raise ValueError(
                f"chunk_bytes is {self.chunk_bytes}, the planes make "
                f"{self.layers * self.layer_bytes}"
            )

    @classmethod
    def of(
        cls,
        layers: int,
        planes: Iterable[Plane],
        chunk_tokens: int = 256,
        token_order: TokenOrder = "heads_first",
    ) -> KVLayout:
        """Return the layout of `layers` layers that each have these planes, in this order."""
        planes = tuple(Plane(*plane) for plane in planes)
        _positive(layers=layers, chunk_tokens=chunk_tokens, planes=len(planes))
        sizes = [_plane_bytes(plane, chunk_tokens) for plane in planes]
        _check_aligned(planes, sizes)
        shape = [layers, [list(plane) for plane in planes], token_order]
        return cls(
            chunk_tokens=chunk_tokens,
            chunk_bytes=layers * sum(sizes),
            fingerprint=_fingerprint("planes", chunk_tokens, shape),
            layers=layers,
            planes=planes,
            token_order=token_order,
        )

    @classmethod
    def dense(
        cls,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        chunk_tokens: int = 256,
        v_head_dim: int | None = None,
        has_v: bool = True,
        token_order: TokenOrder = "heads_first",
        scales: str | None = None,
    ) -> KVLayout:
        """Return the layout of K and V per layer, each [kv_heads, chunk_tokens, head_dim] (or
        tokens first).

        Args:
            layers: layers that keep KV.
            kv_heads: heads of K and V, fewer than those of the queries in models with grouped
                attention.
            head_dim: numbers of a head.
            dtype: of K and V, such as "bfloat16".
            chunk_tokens: tokens in one chunk.
            v_head_dim: that of V, if it differs.
            has_v: False: K alone.
            token_order: "heads_first" or "tokens_first".
            scales: the dtype of scales, one per head and token; they follow K and V, first those of
                K. For other shapes use `of`.
        """
        dims = [head_dim]
        if has_v:
            dims.append(head_dim if v_head_dim is None else v_head_dim)
        planes = [Plane(kv_heads, dim, dtype) for dim in dims]
        if scales is not None:
            planes += [Plane(kv_heads, 1, scales) for _ in dims]
        return cls.of(layers, planes, chunk_tokens, token_order)

    @classmethod
    def mla(
        cls, layers: int, latent_dim: int, dtype: str, chunk_tokens: int = 256
    ) -> KVLayout:
        """Return the layout of multi-head latent attention: one plane [chunk_tokens, latent_dim]
        per layer.
        """
        return cls.of(layers, [Plane(1, latent_dim, dtype)], chunk_tokens)

    @classmethod
    def opaque(
        cls, chunk_tokens: int, chunk_bytes: int, description: str
    ) -> KVLayout:
        """Return a layout whose bytes only the engine understands. A new format needs a new
        `description`.
        """
        _positive(chunk_tokens=chunk_tokens, chunk_bytes=chunk_bytes)
        if not description:
            raise ValueError(
                "description must say what the bytes are, so that another format gets another "
                "fingerprint"
            )
        return cls(
            chunk_tokens,
            chunk_bytes,
            _fingerprint("opaque", chunk_tokens, [chunk_bytes, description]),
        )

    def with_rotary(self, rotary: Rotary) -> KVLayout:
        """Return this layout for KV that may be moved to other positions: same bytes, another
        fingerprint. Pure.

        The fingerprint names the embedding, so that KV is never moved by the angles of another one.
        """
        if not self.planes:
            raise ValueError(
                "the bytes are opaque: only K of a layout with planes can be moved"
            )
        if not 0 < rotary.dims <= self.planes[0].dim or rotary.dims % 2:
            raise ValueError(
                f"rotary.dims is {rotary.dims}: an even number of at most {self.planes[0].dim}, "
                "the dim of K"
            )
        fingerprint = _fingerprint(
            "rotary", self.chunk_tokens, [self.fingerprint, *rotary]
        )
        return replace(self, fingerprint=fingerprint, rotary=rotary)

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of one slot: `chunk_bytes` rounded up to 4096."""
        return -(-self.chunk_bytes // SLOT_ALIGN) * SLOT_ALIGN

    @property
    def layer_bytes(self) -> int:
        """Return the bytes of one layer of a chunk; 0 if the bytes are opaque."""
        return sum(
            _plane_bytes(plane, self.chunk_tokens) for plane in self.planes
        )

    def slots_in(self, size_bytes: int) -> int:
        """Return how many whole slots fit in `size_bytes`."""
        return max(size_bytes, 0) // self.slot_bytes

    def tokens_in(self, size_bytes: int) -> int:
        """Return how many tokens fit in `size_bytes` of slots."""
        return self.slots_in(size_bytes) * self.chunk_tokens

    def plane_offset(self, layer: int, plane: int) -> int:
        """Return the byte of the chunk at which a plane begins. ValueError if it does not exist."""
        self._plane(plane)
        if not 0 <= layer < self.layers:
            raise ValueError(
                f"layer {layer} is not one of the {self.layers} of this layout"
            )
        before = self.planes[:plane]
        return layer * self.layer_bytes + sum(
            _plane_bytes(p, self.chunk_tokens) for p in before
        )

    def plane_bytes(self, plane: int) -> int:
        """Return the bytes of a plane in one layer of one chunk."""
        return _plane_bytes(self._plane(plane), self.chunk_tokens)

    def plane_shape(self, plane: int) -> tuple[int, int, int]:
        """Return (heads, chunk_tokens, dim), or (chunk_tokens, heads, dim) if tokens come first."""
        heads, dim, _ = self._plane(plane)
        if self.token_order == "heads_first":
            return heads, self.chunk_tokens, dim
        return self.chunk_tokens, heads, dim

    def _plane(self, plane: int) -> Plane:
        if not 0 <= plane < len(self.planes):
            raise ValueError(
                f"plane {plane} is not one of the {len(self.planes)} of this layout"
            )
        return self.planes[plane]


def _plane_bytes(plane: Plane, chunk_tokens: int) -> int:
    return plane.heads * plane.dim * chunk_tokens * itemsize(plane.dtype)


def _check_aligned(planes: tuple[Plane, ...], sizes: list[int]) -> None:
    """Raise ValueError unless every plane of every layer begins at a multiple of its itemsize."""
    offset = 0
    for plane, size in zip(planes, sizes, strict=True):
        _positive(heads=plane.heads, dim=plane.dim)
        if offset % itemsize(plane.dtype) or sum(sizes) % itemsize(plane.dtype):
            raise ValueError(
                f"{plane} would begin at an odd byte: use a chunk_tokens that is a multiple of 8"
            )
        offset += size


def _fingerprint(kind: str, chunk_tokens: int, shape: list[object]) -> str:
    described = msgspec.msgpack.encode([kind, chunk_tokens, shape])
    return blake3(
        described, derive_key_context="PagodaKV layout fingerprint"
    ).hexdigest(8)


def _positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if type(number) is not int or number < 1:
            raise ValueError(
                f"{name} must be an int of at least 1, got {number!r}"
            )
