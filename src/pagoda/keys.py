"""Tokens to keys. Pure: nothing here reads or changes anything outside its arguments.

    root   = blake3(canonical encoding of the Namespace)                      32 bytes
    key[i] = blake3(token bytes of chunk i + its multimodal items, key=key[i-1]), key[-1] = root

Key i therefore names the whole prefix up to chunk i, on every machine and in every process. The
hash is cryptographic because users choose the token ids of their prompts.
"""

from __future__ import annotations

import json
import operator
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, overload

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

if TYPE_CHECKING:
    import torch

__all__ = [
    "FORMAT_VERSION",
    "Item",
    "KeyChain",
    "KeyPrefix",
    "Namespace",
    "PromptKeys",
    "TokenIds",
    "as_items",
    "as_token_ids",
    "chunk_keys",
    "derive_keys",
    "ending_key",
    "require_version",
]

# part of every root: raised when the meaning of a key or of stored bytes changes
FORMAT_VERSION = 1
KEY_BYTES = 32

Int32s: TypeAlias = npt.NDArray[np.int32]
TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer] | array[int] | memoryview | torch.Tensor"  # noqa: E501

_INT32_MAX = 2**31 - 1
_FEW_IDS = 4096
_all_bits = np.bitwise_or.reduce
_smallest = np.minimum.reduce
# Token ids are never negative, so a negative int32 ends the tokens of a message whatever the chunk
# length is.
_ITEMS_FOLLOW = struct.pack("<i", -1)
_DERIVED = struct.pack("<i", -2)
_ENDING = struct.pack("<i", -3)


def as_token_ids(tokens: TokenIds) -> Int32s:
    """Return token ids as a contiguous 1-D little-endian int32 array; changes nothing.

    An int32 array (numpy, torch on the CPU, array.array, any typed buffer) is wrapped without a
    copy, other integer types are converted by one call; only a list or tuple is walked, once.
    Raises ValueError for anything else.
    """
    if isinstance(tokens, (list, tuple)):
        return _from_items(tokens)
    found = _as_integers(tokens)
    if len(found) <= _FEW_IDS and found.dtype == _INT32:
        # the last byte of each, without numpy's start of a reduction
        is_right = found.tobytes()[3::4].isascii()
    else:
        # Every bit that any id has, in one pass: the sign is one, and so are those of large ids.
        is_right = not len(found) or 0 <= int(_all_bits(found)) <= _INT32_MAX
    if not is_right:
        raise _out_of_range(found)
    return np.ascontiguousarray(found, _INT32)


_INT32 = np.dtype("<i4")


def _as_integers(tokens: TokenIds) -> npt.NDArray[np.integer]:
    """Return token ids that are in no list as a 1-D array of integers, which may be out of range:
    without a copy, if there is an array. ValueError.
    """
    found: npt.NDArray[np.integer]
    if type(tokens) is np.ndarray:
        found = tokens
    elif isinstance(tokens, range):
        return _from_items(list(tokens))
    else:
        found = _from_buffer(tokens)
    if found.ndim != 1:
        raise ValueError(
            f"token ids must be 1-D, got shape {found.shape}: pass one sequence, e.g. ids[0]"
        )
    if found.dtype.kind not in "iu":
        raise ValueError(
            f"token ids must be integers, got {found.dtype}: convert them, e.g. ids.astype('int32')"
        )
    return found


def _out_of_range(found: npt.NDArray[np.integer]) -> ValueError:
    """Return what to raise for ids of which some are negative or too large."""
    if found.dtype.kind == "i" and found.min() < 0:
        return ValueError(
            f"token id {found.min()} is negative: remove padding and placeholder ids before calling"
        )
    return ValueError(
        f"token id {found.max()} is over {_INT32_MAX}: ids are int32, map them to the "
        "model's vocabulary"
    )


# of a longer list, so many items are arguments of one call
_PACKED_AT_ONCE = 65_536


@lru_cache(256)
def _packer(count: int) -> Callable[..., bytes]:
    """Return what turns so many ints into their bytes."""
    return struct.Struct(f"<{count}i").pack


def _from_items(tokens: list[int] | tuple[int, ...]) -> Int32s:
    """Turn a list into an array. ValueError.

    `struct` converts all items in one call, in a third of the time that numpy takes. It refuses
    floats and whatever is no int of 32 bits, but takes True as 1: so the types of items that became
    0 or 1 are looked at. Other lists take the slow path, which handles numpy's integers and errors.
    """
    if not tokens:
        return np.empty(0, _INT32)
    if type(tokens[0]) is not int:
        return as_token_ids(_from_mixed_items(tokens))
    count = len(tokens)
    try:
        if count <= _PACKED_AT_ONCE:
            packed = _packer(count)(*tokens)
        else:
            packed = b"".join(
                struct.pack(f"<{len(part)}i", *part)
                for at in range(0, count, _PACKED_AT_ONCE)
                if (part := tokens[at : at + _PACKED_AT_ONCE])
            )
    except struct.error:
        return as_token_ids(_from_mixed_items(tokens))
    ids = np.frombuffer(packed, _INT32)
    if _smallest(ids) <= 1:
        for at in np.flatnonzero(ids <= 1).tolist():
            if type(tokens[at]) is not int:
                return as_token_ids(_from_mixed_items(tokens))
        return as_token_ids(ids)
    return ids


def _from_mixed_items(tokens: Sequence[int]) -> npt.NDArray[np.integer]:
    """Turn any list into an array. The types are checked first, because numpy would read True as
    1.
    """
    kinds = set(map(type, tokens))
    wrong = [
        kind
        for kind in kinds
        if kind is not int and not issubclass(kind, np.integer)
    ]
    if wrong:
        what = ", ".join(sorted(kind.__name__ for kind in wrong))
        raise ValueError(
            f"token ids must be one flat sequence of int, found {what} among them: pass plain ints"
        )
    try:
        return np.array(tokens, dtype=np.int64)
    except OverflowError:
        raise ValueError(
            f"a token id is over {_INT32_MAX}: ids are int32, map them to the vocabulary"
        ) from None


def _from_buffer(tokens: object) -> npt.NDArray[np.integer]:
    """Wrap an array, tensor or typed buffer without a copy."""
    if isinstance(tokens, bytes | bytearray | str):
        raise ValueError(
            f"token ids as {type(tokens).__name__} have no item size: pass "
            "memoryview(data).cast('i') "
            "for int32 ids, or numpy.frombuffer(data, 'uint8') for byte-level ids"
        )
    try:
        found: npt.NDArray[np.integer] = np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        # e.g. a tensor on a GPU
        raise ValueError(
            f"token ids must be readable by the CPU, e.g. ids.cpu(): {error}"
        ) from None
    if found.dtype == object:
        raise ValueError(
            f"token ids must be an integer array or a list of int, got {type(tokens).__name__}"
        )
    return found


class Item(NamedTuple):
    """A multimodal item (an image, a sound) whose embeddings are at token positions [start,
    stop).
    """

    start: int
    stop: int
    # 32 bytes: a cryptographic hash of the content and of how it was processed
    digest: bytes


def as_items(items: Iterable[Item]) -> tuple[Item, ...]:
    """Return multimodal items, which are read once: an iterator is empty afterwards. ValueError for
    what is no item.
    """
    try:
        return tuple(
            Item(operator.index(start), operator.index(stop), digest)
            for start, stop, digest in items
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"items: each is an Item(start, stop, digest) with token positions ({error})"
        ) from error


def chunk_keys(
    tokens: TokenIds, root: bytes, chunk_tokens: int, items: Iterable[Item] = ()
) -> list[bytes]:
    """Return the 32-byte keys of the whole chunks of `tokens` (a last, partial chunk has no key).
    Changes nothing.

    Items may overlap each other and reach past the end of the tokens. Raises ValueError for bad ids
    or items.
    """
    _check_chain(root, chunk_tokens)
    ids = as_token_ids(tokens)
    known = _checked(items, 0, len(ids))
    trailers = _trailers(known, 0, len(ids) // chunk_tokens, chunk_tokens)
    return _chain(ids, root, chunk_tokens, trailers)


class KeyPrefix(NamedTuple):
    """The keys of the first chunks of a prompt, and a digest of their token ids: a prompt that
    begins with the same ids continues from them. Immutable.
    """

    root: bytes
    chunk_tokens: int
    keys: tuple[bytes, ...]
    digest: bytes


class PromptKeys(Sequence[bytes]):
    """The keys of the whole chunks of a prompt, as `chunk_keys` returns them, but derived when they
    are read: a look-up reads none behind the first chunk that is missing.

    Ids are checked when they are hashed, a partial chunk with the last whole one. Until then the
    tokens must not change. Not thread-safe.
    """

    def __init__(
        self,
        tokens: TokenIds,
        root: bytes,
        chunk_tokens: int,
        after: KeyPrefix | None = None,
        keeps: bool = False,
    ) -> None:
        """Derive the first few keys, or continue from those of an earlier prompt, `after`, if this
        one begins with its chunks. Raises ValueError for bad ids.

        `keeps`: a later prompt may continue from these keys: see `prefix`.
        """
        _check_chain(root, chunk_tokens)
        self._tokens: npt.NDArray[np.integer] | list[int] | tuple[int, ...]
        if isinstance(tokens, list | tuple):
            self._tokens = tokens
        else:
            self._tokens = _as_integers(tokens)
        self.num_tokens = len(self._tokens)
        self._count = self.num_tokens // chunk_tokens
        self._chunk_tokens = chunk_tokens
        self._root = root
        self._keys: list[bytes] = []
        # of the ids of all keys
        self._hasher = blake3() if keeps else None
        ids = None if after is None else self._continued(after)
        self.first_ids: Int32s = (
            self._derive(_first_window(self._count)) if ids is None else ids
        )
        """The ids of the chunks that are known at first."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        return iter(self[:])

    def window(self, at: int) -> list[bytes]:
        """Return keys from index `at` on: those that are known, or if there are none, some more.
        Raises ValueError for bad ids.
        """
        known = len(self._keys)
        if at >= known < self._count:
            self._derive(max(at + 1, known * _GROWTH))
        return self._keys[at:]

    def prefix(self) -> KeyPrefix | None:
        """Return the keys that are known, for a prompt that begins like this one; None unless they
        are kept.
        """
        if self._hasher is None:
            return None
        return KeyPrefix(
            self._root,
            self._chunk_tokens,
            tuple(self._keys),
            self._hasher.digest(),
        )

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        """Return a key, or some. Raises ValueError for bad ids."""
        if not isinstance(index, int) or not 0 <= index < len(self._keys):
            self._derive(self._count)
        return self._keys[index]

    def _continued(self, after: KeyPrefix) -> Int32s | None:
        """Take over the keys of an earlier prompt, and return the ids of its chunks; None, and do
        nothing, unless this prompt begins with the same ids, under the same root.

        To compare the digests of the ids takes a small part of the time that their keys would take,
        which hash one chunk after the other.
        """
        count = len(after.keys)
        if (after.root, after.chunk_tokens) != (self._root, self._chunk_tokens):
            return None
        if not 0 < count <= self._count:
            return None
        ids = as_token_ids(self._tokens[: count * self._chunk_tokens])
        hasher = blake3(_bytes_of(ids))
        if hasher.digest() != after.digest:
            return None
        if self._hasher is not None:
            self._hasher = hasher
        self._keys = list(after.keys)
        return ids

    def _derive(self, count: int) -> Int32s:
        """Derive the keys up to that number of chunks, and return the ids that were hashed."""
        known = len(self._keys)
        if count < self._count:
            last = count * self._chunk_tokens
        else:  # with the last chunk, what follows it
            last = self.num_tokens
        tokens = self._tokens
        if known or last < self.num_tokens:
            tokens = tokens[known * self._chunk_tokens : last]
        ids = as_token_ids(tokens)
        parent = self._keys[-1] if known else self._root
        new = _chain(ids, parent, self._chunk_tokens, {})
        if self._hasher is not None:
            whole = ids[: len(new) * self._chunk_tokens]
            self._hasher.update(_bytes_of(whole))
        self._keys += new
        return ids


def _first_window(count: int) -> int:
    """Return how many of so many chunks are hashed first: all of a prompt for which one more
    question to the tiers would take longer than to hash it.
    """
    return count if count <= _AT_ONCE else _FIRST_WINDOW


def _bytes_of(ids: Int32s) -> memoryview:
    """Return the memory of ids, which is contiguous."""
    return ids.data.cast("B") if len(ids) else memoryview(b"")


# a prompt of up to so many chunks is hashed at once
_AT_ONCE = 64
# how many chunks of a longer one are hashed first; then always so many times as many
_FIRST_WINDOW = 8
_GROWTH = 8


def keys_of_ids(ids: Int32s, root: bytes, chunk_tokens: int) -> list[bytes]:
    """Return what `chunk_keys` returns for ids that `as_token_ids` returned, without items."""
    return _chain(ids, root, chunk_tokens, {})


class KeyChain:
    """The keys of a growing conversation: only new tokens are hashed. Not thread-safe: one chain,
    one thread.

    `keys` and `num_tokens` cover all tokens so far; the tokens of the last, partial chunk are kept.
    """

    def __init__(self, root: bytes, chunk_tokens: int) -> None:
        _check_chain(root, chunk_tokens)
        self.root = root
        self.chunk_tokens = chunk_tokens
        self._keys: list[bytes] = []
        # always a private copy, always shorter than a chunk
        self._tail: Int32s = np.empty(0, dtype="<i4")
        self._items: list[Item] = []  # items that reach past the last whole chunk

    @property
    def keys(self) -> list[bytes]:
        """The keys of all whole chunks so far (a copy)."""
        return list(self._keys)

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far, including those of the partial chunk."""
        return len(self._keys) * self.chunk_tokens + len(self._tail)

    def extend(self, tokens: TokenIds, items: Iterable[Item] = ()) -> list[bytes]:
        """Append `tokens` and return the keys of the chunks that they complete; items count from
        the first token.

        Raises ValueError, and changes nothing, for bad ids or items, or for an item in a chunk that
        is already hashed.
        """
        ids = as_token_ids(tokens)
        first = len(self._keys)
        hashed = len(self._keys) * self.chunk_tokens
        new = _checked(items, hashed, self.num_tokens + len(ids))
        pending = np.concatenate((self._tail, ids)) if len(self._tail) else ids
        count = len(pending) // self.chunk_tokens
        known = sorted(self._items + new)
        trailers = _trailers(known, first, first + count, self.chunk_tokens)
        keys = _chain(
            pending,
            self._keys[-1] if self._keys else self.root,
            self.chunk_tokens,
            trailers,
        )
        self._tail = pending[count * self.chunk_tokens :].copy()
        self._keys += keys
        self._items = [
            item
            for item in known
            if item.stop > len(self._keys) * self.chunk_tokens
        ]
        return keys


def derive_keys(digests: Sequence[bytes], root: bytes) -> list[bytes]:
    """Return one key for each of an engine's own chained digests, under `root`; changes nothing.

    A digest must already name the whole prefix up to its block. Raises ValueError if one is under
    16 bytes.
    """
    _check_chain(root, 1)
    short = [len(digest) for digest in digests if len(digest) < 16]
    if short:
        raise ValueError(
            f"a digest of {short[0]} bytes cannot name a prefix: set the engine's hash to a "
            "32-byte one"
        )
    return [blake3(_DERIVED + digest, key=root).digest() for digest in digests]


def ending_key(tail: TokenIds, parent: bytes) -> bytes:
    """Return the key of what an engine keeps of a prefix beside its whole chunks; changes nothing.

    `tail` has the tokens after the last whole chunk, whose key (or the root) is `parent`. No chunk
    has such a key. Raises ValueError for bad ids.
    """
    _check_chain(parent, 1)
    return blake3(_ENDING + as_token_ids(tail).tobytes(), key=parent).digest()


def _chain(
    ids: Int32s, parent: bytes, chunk_tokens: int, trailers: Mapping[int, bytes]
) -> list[bytes]:
    """Hash the whole chunks of `ids`; `trailers`: chunk (0 = first of `ids`) -> bytes that follow
    its tokens.
    """
    view = _bytes_of(ids)
    step = chunk_tokens * 4
    keys: list[bytes] = []
    append = keys.append
    for start in range(0, len(view) - step + 1, step):
        hasher = blake3(view[start : start + step], key=parent)
        if trailers and start // step in trailers:
            hasher.update(trailers[start // step])
        parent = hasher.digest()
        append(parent)
    return keys


def _trailers(
    items: Sequence[Item], first: int, last: int, chunk_tokens: int
) -> dict[int, bytes]:
    """Return, for chunks [first, last) that items overlap, the bytes that follow their tokens (0 =
    `first`).

    One record per item: start and stop relative to the chunk's first token as signed 64-bit, then
    the digest. They are not clipped to the chunk: one long item differs from two short ones, and a
    prefix keeps its keys.
    """
    found: dict[int, bytes] = {}
    for item in items:
        for chunk in range(
            max(item.start // chunk_tokens, first),
            min(-(-item.stop // chunk_tokens), last),
        ):
            origin = chunk * chunk_tokens
            record = (
                struct.pack("<qq", item.start - origin, item.stop - origin)
                + item.digest
            )
            found[chunk - first] = (
                found.get(chunk - first, _ITEMS_FOLLOW) + record
            )
    return found


def _checked(items: Iterable[Item], hashed: int, num_tokens: int) -> list[Item]:
    """Return the items in canonical order. Raises ValueError unless they begin in [hashed,
    num_tokens).
    """
    checked = sorted(as_items(items))
    for start, stop, digest in checked:
        if not isinstance(digest, bytes) or len(digest) != KEY_BYTES:
            raise ValueError(
                f"digest of item [{start}, {stop}) must be {KEY_BYTES} bytes, e.g. "
                "blake3(pixels).digest()"
            )
        if not 0 <= start < stop < 2**62:
            raise ValueError(
                f"item [{start}, {stop}) must be a half-open range of token positions with start "
                "< stop"
            )
        if start >= num_tokens:
            raise ValueError(
                f"item [{start}, {stop}) begins past the {num_tokens} tokens: pass it with its "
                "tokens"
            )
        if start < hashed:
            raise ValueError(
                f"item [{start}, {stop}) begins in tokens hashed already (up to {hashed}): pass "
                "it with them"
            )
    return checked


def _check_chain(root: bytes, chunk_tokens: int) -> None:
    if len(root) != KEY_BYTES:
        raise ValueError(
            f"a root is {KEY_BYTES} bytes, got {len(root)}: use Namespace(...).root"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")


@dataclass(frozen=True)
class Namespace:
    """Everything that KV depends on besides the tokens: a different value is a different key space.
    Immutable.

    `revision` is the model's version, `weights` a digest of its weights, `weights_epoch` counts
    updates in place, `kv_dtype` is the dtype of KV, `layout` a layout's fingerprint (`Cache` fills
    it in), `world_size` the number of ranks that computed it, `lora` names the adapter's content
    (not its path), `salt` keeps tenants apart. `approximate` says what makes KV approximate ("q4");
    "" is exact KV. `numerics` says which settings make the engine compute other numbers with the
    same weights ("autocast=bfloat16"); "" is its defaults. Raises ValueError for a field of the
    wrong type.

    Example:
        >>> mine = Namespace(model="meta-llama/Llama-3.1-8B", revision="d04e592", salt="tenant A")
        >>> mine.root == mine.with_(salt="tenant B").root  # another tenant never hits these chunks
        False
    """

    model: str
    revision: str = ""
    weights: str = ""
    weights_epoch: int = 0
    kv_dtype: str = ""
    layout: str = ""
    world_size: int = 1
    lora: str = ""
    salt: str = field(default="", repr=False)  # a secret
    approximate: str = ""
    numerics: str = ""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            wanted = int if entry.name in _INT_FIELDS else str
            if type(value) is not wanted:
                raise ValueError(
                    f"Namespace.{entry.name} must be {wanted.__name__}, got {type(value).__name__}"
                )
            if isinstance(value, str) and not value.isascii():
                _require_text(entry.name, value)
        if not self.model:
            raise ValueError(
                "Namespace.model must not be empty: give the model's name or a digest of its "
                "weights"
            )
        if (
            not 0 <= self.weights_epoch < 2**63
            or not 1 <= self.world_size < 2**31
        ):
            raise ValueError(
                "Namespace.weights_epoch must be at least 0 and world_size at least 1"
            )

    @cached_property
    def root(self) -> bytes:
        """The 32-byte parent of every first key: a hash of all fields and of FORMAT_VERSION."""
        # pairs in MessagePack are length-prefixed and typed: two namespaces never have the same
        # encoding
        pairs = [
            ("format", FORMAT_VERSION),
            *((name, getattr(self, name)) for name in self._named()),
        ]
        encoded = msgspec.msgpack.encode(pairs)
        return blake3(
            encoded, derive_key_context="PagodaKV namespace root"
        ).digest()

    def fields(self) -> dict[str, str]:
        """Return every field as text for people to read, but only the start of a digest of the
        salt.
        """
        texts = {name: str(getattr(self, name)) for name in self._named()}
        if self.salt:
            digest = blake3(
                self.salt.encode(), derive_key_context="PagodaKV salt label"
            )
            texts["salt"] = digest.hexdigest(8)
        return {"format": str(FORMAT_VERSION), **texts}

    def _named(self) -> list[str]:
        """Return the names of the fields; later ones only if they are set, so that ordinary KV
        keeps its old keys.
        """
        return [
            f.name
            for f in fields(self)
            if f.name not in _LATER_FIELDS or getattr(self, f.name)
        ]

    @staticmethod
    def differing(
        a_fields: Mapping[str, str], b_fields: Mapping[str, str]
    ) -> list[str]:
        """Return the names of the fields (as `fields()` gives them) in which two namespaces
        differ.
        """
        return [
            name
            for name in {**a_fields, **b_fields}
            if a_fields.get(name) != b_fields.get(name)
        ]

    def with_(self, **changes: str | int) -> Namespace:
        """Return a changed copy. Raises ValueError for a bad value, TypeError for an unknown
        field.
        """
        return replace(self, **changes)  # type: ignore[arg-type]

    def of_version(self, version: str) -> Namespace:
        """Return the namespace of a named version of these weights; "" is these weights themselves.
        Pure. ValueError unless it is a str.
        """
        require_version(version)
        return (
            self.with_(weights=json.dumps([self.weights, version]))
            if version
            else self
        )

    def of_change(self, nonce: int) -> Namespace:
        """Return the namespace of these weights after a change in place; 0 is these weights
        themselves. Pure.

        `nonce`: a random number that no other change has.
        """
        return (
            self.with_(weights=json.dumps([self.weights, "", f"{nonce:016x}"]))
            if nonce
            else self
        )


def _require_text(name: str, value: str) -> None:
    """Raise ValueError for a text without bytes: a path that is not UTF-8 has such characters."""
    try:
        value.encode()
    except UnicodeEncodeError:
        shown = "it" if name == "salt" else ascii(value[:200])
        raise ValueError(
            f"Namespace.{name}: {shown} is not UTF-8: write another name, or rename the directory "
            "that it names"
        ) from None


def require_version(version: object) -> None:
    """Raise ValueError unless a name of weights is a str: 3 and "3" would be other weights, and 0
    no name.
    """
    if not isinstance(version, str):
        raise ValueError(
            f"a version of weights must be str, got {type(version).__name__}: write a name that "
            'all machines write the same, such as "run 7, step 100"'
        )


_INT_FIELDS = frozenset({"weights_epoch", "world_size"})
_LATER_FIELDS = frozenset({"approximate", "numerics"})
