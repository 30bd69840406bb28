"""One call of an engine: its options, checked and made a request, and the boundary where an error
becomes a miss.

`Cache` builds the `CacheRequest` of a prompt and a `Call` for it, which runs at once, on another
thread, or awaited; `HostSlots` makes a `Call` for each of its methods. Calls and copies are named
ranges for profilers, switched on by `Config.profile`; while they are off, they cost one function
call. `Config.otel` makes a span of each call that has ended.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, NamedTuple, TypeAlias, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from pagoda.base.clock import (
    SLOWEST_BYTES_PER_SECOND,
    Clock,
    Deadline,
    seconds_of,
)
from pagoda.base.errors import ClosedError, ConfigError
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import Reason
from pagoda.cache.call_log import log_call
from pagoda.cache.caller_hints import HintedRequest, RequestHints
from pagoda.cache.counters import CacheCounters
from pagoda.cache.otel_spans import SpanRecorder
from pagoda.cache.results import Hit
from pagoda.cache.tier_stack import TierStack
from pagoda.keys import (
    Int32s,
    Item,
    KeyPrefix,
    Namespace,
    PromptKeys,
    TokenIds,
    as_items,
    as_token_ids,
    chunk_keys,
    keys_of_ids,
)
from pagoda.layout import KVLayout
from pagoda.tiers.base import Bytes
from pagoda.transfer import Transfer

log = guarded_logger("pagoda.cache")
T = TypeVar("T")

# -- the request -----------------------------------------------------------------------------------

Mask: TypeAlias = "Sequence[bool] | npt.NDArray[np.bool_]"
# the keys from the first chunk of the prompt on, or tuples (start, end, key) as `Cache.keys` gives
# them
Keys: TypeAlias = "Sequence[bytes] | Sequence[tuple[int, int, bytes]]"
# tokens, root, chunk_tokens, items -> the key of every whole chunk
KeyScheme: TypeAlias = Callable[
    [TokenIds, bytes, int, Iterable[Item]], list[bytes]
]


class CallOptions(TypedDict, total=False):
    """The options that every call takes by keyword; `Cache` says what they mean."""

    start_tokens: int
    mask: Mask | None
    keys: Keys | None
    any_position: bool
    items: Sequence[Item]
    lora: str | None
    salt: str | None
    weights_version: str | None
    numerics: str | None
    after: Hit | None
    tiers: Iterable[str] | None
    deadline_seconds: float | None
    limit_seconds: float | None
    hints: RequestHints | None


_FALSE = bytes(1)  # all values of a mask of misses
_OPTIONS = CallOptions.__optional_keys__
# the keys of a prompt of so many chunks are derived at once
_SHORT_CHUNKS = 16
# options with which keys are derived as they are without any
_LAZY_OPTIONS = frozenset(
    {
        "lora",
        "salt",
        "weights_version",
        "numerics",
        "after",
        "tiers",
        "deadline_seconds",
        "limit_seconds",
    }
)


class CacheRequest(NamedTuple):
    """Chunks [first, first + len(keys)) of a prompt of `length_tokens` tokens, with the tiers and
    the deadline.
    """

    namespace: Namespace
    tiers: TierStack  # that the call may use
    deadline: Deadline
    keys: Sequence[bytes]
    first: int  # chain position of keys[0]
    parent: bytes | None  # the key at first - 1
    length_tokens: int
    chunk_tokens: int
    # None: the caller gave keys only. With `PromptKeys`, those of the first chunks
    tokens: Int32s | None = None
    items: tuple[Item, ...] = ()
    # the keys before keys[0], as far as the caller gave them
    head: Sequence[bytes] = ()
    any_position: bool = False  # whether `first` is not known for certain
    hints: RequestHints | None = None

    def starts(self, begin: int, end: int) -> list[int]:
        """Return the first token of each of the chunks keys[begin:end]."""
        return [(self.first + i) * self.chunk_tokens for i in range(begin, end)]

    def position_of(self, index: int) -> int | None:
        """Return the chain position at which keys[index] must have been stored; None: any."""
        return None if self.any_position else self.first + index

    def window(self, index: int, whole: bool = False) -> Sequence[bytes]:
        """Return keys from that index on, at least one if there is one: of a look-up, those to ask
        about before others are derived; or all. Raises CallerError for bad ids.
        """
        keys = self.keys
        if type(keys) is not PromptKeys:
            return keys[index:] if index else keys
        try:
            return keys[index:] if whole else keys.window(index)
        except ValueError as error:
            raise CallerError(error) from error

    def parent_of(self, index: int) -> bytes | None:
        """Return the key of the chunk before keys[index], None at the root."""
        return self.keys[index - 1] if index else self.parent

    def hinted(self) -> HintedRequest:
        """Return the request, as far as hints are concerned."""
        keys = [*self.head, *self.keys]
        first = self.first - len(self.head)
        return HintedRequest(self.namespace.root, keys, self.deadline, first)

    def hit(
        self,
        by_tier: Mapping[str, int],
        reason: Reason | None = None,
        detail: str = "",
    ) -> Hit:
        """Return the answer: leading chunks by tier, and the reason why not more."""
        chunk_tokens = self.chunk_tokens
        tokens: dict[str, int] = {}
        served = 0
        for tier, chunks in by_tier.items():
            if chunks:
                tokens[tier] = chunks * chunk_tokens
                served += chunks * chunk_tokens
        start = self.first * chunk_tokens
        keys = self.keys
        if served:
            mask = np.zeros(self.length_tokens, np.bool_)
            mask[start : start + served] = True
        else:  # of a long prompt it would take longer than all else
            mask = np.ndarray(
                (self.length_tokens,), np.bool_, _FALSE, strides=(0,)
            )
        return Hit(
            served,
            tokens,
            mask,
            reason,
            detail,
            start,
            self.namespace.approximate,
            keys=keys.prefix() if type(keys) is PromptKeys else None,
        )

    def miss(self, reason: Reason, detail: str = "") -> Hit:
        """Return the answer of a call that serves nothing."""
        return self.hit({}, reason, detail)

    def hit_without_chunks(self) -> Hit:
        """Return the answer if there is no whole chunk in the request."""
        if self.length_tokens >= self.chunk_tokens:
            return self.hit({})
        detail = f"{self.length_tokens} tokens, a chunk has {self.chunk_tokens}"
        return self.miss(Reason.SHORT_PROMPT, detail)


def build_request(
    tokens: TokenIds | None,
    options: CallOptions,
    *,
    namespace: Namespace,
    tiers: TierStack,
    layout: KVLayout,
    scheme: KeyScheme,
    deadline_seconds: float,
    bounded: bool,
    clock: Clock,
    lazily: bool = False,
) -> CacheRequest:
    """Return the request for the whole chunks of `tokens` that `options` ask for.

    `namespace` and `tiers` are those of the present weights; `deadline_seconds` counts if the
    options have none;
    `bounded`: the deadline also depends on the bytes of the chunks. `lazily`: derive keys when they
    are read, if that can be done; the tokens do not change until then.

    `keys` replace hashing. Raises ValueError for an option that does not exist, a mask that is not
    False...False True...True, a start that is not a multiple of a chunk, keys that do not fit the
    tokens, and an unknown tier.
    """
    if (
        lazily
        and scheme is chunk_keys
        and tokens is not None
        and (not options or _LAZY_OPTIONS.issuperset(options))
    ):
        return _lazy_request(
            tokens, options, namespace, tiers, layout, deadline_seconds, clock
        )
    # otherwise a misspelt `salt` would share a tenant's chunks
    if not options.keys() <= _OPTIONS:
        raise ValueError(
            f"{', '.join(options.keys() - _OPTIONS)}: no such option; there are "
            f"{', '.join(sorted(_OPTIONS))}"
        )
    hints = options.get("hints")
    if hints is not None and not isinstance(hints, RequestHints):
        raise ValueError(
            f"hints is of type {type(hints).__name__}: pass a pagoda.RequestHints"
        )
    keys = options.get("keys")
    items = as_items(options.get("items", ()))
    whole: PromptKeys | None = None
    chunk_tokens = layout.chunk_tokens
    if (names := options.get("tiers")) is not None:
        tiers = tiers.only(names)
    if tokens is None and keys is None:
        raise ValueError(
            "neither tokens nor keys were given: pass tokens, or keys"
        )
    ids = None if tokens is None else as_token_ids(tokens)
    origin, given = (0, None) if keys is None else _given_keys(keys, chunk_tokens)
    length = (
        len(ids)
        if ids is not None
        else (origin + len(given or ())) * chunk_tokens
    )
    start_tokens = _tokens("start_tokens", options.get("start_tokens", 0))
    mask = options.get("mask")
    begin = (
        start_tokens if mask is None else _mask_start(mask, length, start_tokens)
    )
    if begin < 0 or begin % chunk_tokens:
        raise ValueError(
            f"the request begins at token {begin}: it must be a multiple of the chunk, "
            f"{chunk_tokens} tokens"
        )
    if begin > length:
        raise ValueError(
            f"start_tokens = {begin} is past the {length} tokens of the prompt"
        )
    first = begin // chunk_tokens or origin
    if given is None:
        assert ids is not None
        if "after" in options and scheme is chunk_keys and not items:
            whole = PromptKeys(
                ids,
                namespace.root,
                chunk_tokens,
                _known_keys(options),
                keeps=True,
            )
            given = whole[:]
        else:
            _known_keys(options)
            given = scheme(ids, namespace.root, chunk_tokens, items)
    elif origin + len(given) > length // chunk_tokens:
        raise ValueError(
            f"{len(given)} keys from chunk {origin} on, but {length} tokens: pass both of one "
            "prompt"
        )
    if first < origin:
        raise ValueError(
            f"keys begin at token {origin * chunk_tokens}, start_tokens = {start_tokens}: pass "
            "earlier keys"
        )
    skip = first - origin
    parent = given[skip - 1] if 0 < skip <= len(given) else None
    head = given[:skip]
    asked: Sequence[bytes] = given[skip:]
    if whole is not None and not skip:
        asked = whole
    deadline = _deadline_of(
        options,
        deadline_seconds,
        len(asked) * layout.chunk_bytes if bounded else None,
        clock,
    )
    return CacheRequest(
        namespace,
        tiers,
        deadline,
        asked,
        first,
        parent,
        length,
        chunk_tokens,
        ids,
        items,
        head,
        options.get("any_position", False),
        hints,
    )


def _lazy_request(
    tokens: TokenIds,
    options: CallOptions,
    namespace: Namespace,
    tiers: TierStack,
    layout: KVLayout,
    deadline_seconds: float,
    clock: Clock,
) -> CacheRequest:
    """Return the request for all whole chunks of `tokens`; of a long prompt only the first keys are
    derived. ValueError.
    """
    if options and (names := options.get("tiers")) is not None:
        tiers = tiers.only(names)
    chunk_tokens = layout.chunk_tokens
    keys: Sequence[bytes]
    try:
        count = len(tokens)
    except TypeError:  # `as_token_ids` says what is wrong with it
        count = 0
    if count > _SHORT_CHUNKS * chunk_tokens or "after" in options:
        keys = PromptKeys(
            tokens,
            namespace.root,
            chunk_tokens,
            _known_keys(options),
            keeps="after" in options,
        )
        ids = keys.first_ids
        length = keys.num_tokens
    else:
        ids = as_token_ids(tokens)
        keys = keys_of_ids(ids, namespace.root, chunk_tokens)
        length = len(ids)
    nbytes = len(keys) * layout.chunk_bytes
    return CacheRequest(
        namespace,
        tiers,
        _deadline_of(options, deadline_seconds, nbytes, clock),
        keys,
        0,
        None,
        length,
        chunk_tokens,
        ids,
    )


def _known_keys(options: CallOptions) -> KeyPrefix | None:
    """Return the keys that a call continues from, if they fit its prompt. ValueError."""
    after = options.get("after")
    if after is None:
        return None
    if not isinstance(after, Hit):
        raise ValueError(
            f"after = {after!r}: pass the hit of an earlier call, whose prompt this one continues"
        )
    return after.keys


def _deadline_of(
    options: CallOptions, patience: float, nbytes: int | None, clock: Clock
) -> Deadline:
    """Return the deadline of a call that begins now; `nbytes`: of its chunks, if it is bounded by
    them. ValueError.
    """
    limits: list[float] = []
    if options:
        if (seconds := options.get("deadline_seconds")) is not None:
            patience = seconds_of("deadline_seconds", seconds)
            limits.append(patience)
        if (most := options.get("limit_seconds")) is not None:
            limits.append(seconds_of("limit_seconds", most))
    if nbytes is not None:
        limits.append(patience + nbytes / SLOWEST_BYTES_PER_SECOND)
    return Deadline(patience, min(limits, default=None), clock)


def _tokens(name: str, number: object) -> int:
    """Return a number of tokens that a caller gave, perhaps numpy's: traces take only Python's.
    ValueError.
    """
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(
            f"{name} = {number!r}: write a whole number of tokens"
        ) from None


def _given_keys(keys: Keys, chunk_tokens: int) -> tuple[int, list[bytes]]:
    """Return the chain position of the first of the caller's keys, and the keys alone."""
    flat: list[bytes] = []
    origin = 0
    for i, key in enumerate(keys):
        if isinstance(key, tuple):
            start, _, key = key
            start = _tokens(f"keys[{i}]", start)
            origin = origin if i else start // chunk_tokens
            if start != (origin + i) * chunk_tokens:
                raise ValueError(
                    f"keys[{i}] begins at token {start}: keys must be one run of whole chunks"
                )
        if not isinstance(key, bytes) or len(key) != 32:
            raise ValueError(
                f"keys[{i}] is not a key of 32 bytes: use Cache.keys, KeyChain or derive_keys"
            )
        flat.append(key)
    return origin, flat


def _mask_start(mask: Mask, length_tokens: int, start_tokens: int) -> int:
    """Return the number of leading Falses, which is `start_tokens` if that is not 0; the rest must
    be all True.
    """
    wanted = np.asarray(mask)
    if (
        wanted.ndim != 1
        or wanted.dtype != np.bool_
        or len(wanted) != length_tokens
    ):
        raise ValueError(
            f"a mask is one bool per token, ({length_tokens},); got {wanted.dtype} of shape "
            f"{wanted.shape}"
        )
    start = int(wanted.argmax()) if wanted.any() else len(wanted)
    if not wanted[start:].all():
        raise ValueError(
            "a mask is False...False True...True: this one has a False after a True"
        )
    if start_tokens not in (0, start):
        raise ValueError(
            f"start_tokens = {start_tokens}, but the mask begins at {start}: pass one of them"
        )
    return start


# -- the boundary ----------------------------------------------------------------------------------

# makes the context of a call or a copy from its name; torch.profiler's if ranges are on
_profiler_range: Callable[[str], AbstractContextManager[object]] = nullcontext
_ranges_are_on = False


def enable_profiler_ranges() -> None:
    """Switch the ranges of this process on. torch.profiler and NVTX see them as "pagoda.<call>".

    Raises ConfigError where torch is not installed.
    """
    global _profiler_range, _ranges_are_on
    try:
        from torch.profiler import record_function
    except ImportError as missing:
        raise ConfigError(
            f"profile = True: {missing}; install torch, or leave it out"
        ) from None
    _profiler_range = record_function
    _ranges_are_on = True


_spans: SpanRecorder | None = None


def enable_spans() -> None:
    """Switch OpenTelemetry spans of this process on. Raises ConfigError where their package is not
    installed.
    """
    global _spans
    _spans = SpanRecorder()


class CallerError(Exception):
    """Carries a ValueError of wrong use out of `Call.run`: the caller's KV does not fit its tokens,
    or tokens that were read late are no token ids.
    """

    def __init__(self, error: ValueError) -> None:
        super().__init__(str(error))
        self.error = error


class CheckedTransfer:
    """A transfer whose ValueErrors are distinguished from errors at run time. As thread-safe as the
    transfer.
    """

    def __init__(self, kv: Transfer, layout: KVLayout) -> None:
        if not hasattr(kv, "layout"):
            raise ValueError(
                f"kv is of type {type(kv).__name__}: pass a transfer, such as DenseKV or PagedKV"
            )
        if kv.layout.fingerprint != layout.fingerprint:
            raise ValueError(
                f"the KV has layout {kv.layout.fingerprint}, this cache {layout.fingerprint}: "
                "build both with one KVLayout"
            )
        self.layout = layout
        # None: in CPU memory
        self.device_index: int | None = getattr(kv, "device_index", None)
        # the transfer wants all chunks of the host tier in one call
        self.at_once: bool = getattr(kv, "at_once", False)
        self._kv = kv

    def to_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Call the transfer; raise CallerError for its ValueError."""
        try:
            with _profiler_range("pagoda.copy_down"):
                self._kv.to_slots(starts, slots)
        except ValueError as error:
            raise CallerError(error) from error

    def from_slots(self, starts: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Call the transfer; raise CallerError for its ValueError."""
        try:
            with _profiler_range("pagoda.copy_up"):
                self._kv.from_slots(starts, slots)
        except ValueError as error:
            raise CallerError(error) from error


class Call(NamedTuple, Generic[T]):
    """One call of an engine, checked and ready to run once, on this thread or another; `cancel`
    from any thread.
    """

    name: str
    work: Callable[[], T]
    # the answer when the work fails or is refused
    miss: Callable[[Reason, str], T]
    deadline: Deadline
    counters: CacheCounters

    def run(self) -> T:
        """Do the work. Raises ValueError for wrong use only; every other error is a miss, counted
        and logged.
        """
        began = (
            time.perf_counter()
            if _spans is not None or log.isEnabledFor(logging.DEBUG)
            else None
        )
        try:
            if _ranges_are_on:
                with _profiler_range(f"pagoda.{self.name}"):
                    answer = self.work()
            else:
                answer = self.work()
        except CallerError as misuse:
            raise misuse.error from None
        except ClosedError as error:
            answer = self.refuse(Reason.CLOSED, str(error))
        except Exception as error:  # noqa: BLE001
            # the boundary: the engine continues after any error
            answer = self.refuse(
                Reason.IO_ERROR, f"{type(error).__name__}: {error}", error
            )
        if began is not None:
            seconds = time.perf_counter() - began
            log_call(self.name, answer, seconds)
            if _spans is not None:
                _spans.record(self.name, answer, seconds)
        return answer

    def refuse(
        self, reason: Reason, detail: str, error: Exception | None = None
    ) -> T:
        """Return the miss without doing the work; count and log it."""
        self.counters.add({f"miss_{reason}": 1})
        self.counters.warn(log, reason, detail, error)
        return self.miss(reason, detail)

    def cancel(self) -> None:
        """Let the work end as soon as it can."""
        self.deadline.cancel()
