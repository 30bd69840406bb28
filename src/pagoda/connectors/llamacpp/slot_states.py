"""SlotStates: the slots of a running llama-server, stored and loaded as chunks."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from pagoda.base.clock import Deadline, seconds_of
from pagoda.base.errors import ClosedError, PagodaError, StoreError
from pagoda.base.file_space import opened
from pagoda.base.finalizers import close_when_dropped
from pagoda.base.fork import per_process
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import Reason
from pagoda.cache import Cache, HintResult, RequestHints
from pagoda.cache.caller_hints import LATER, EndingName
from pagoda.cache.results import CacheStats, Hit
from pagoda.config import Config, ConfigOptions
from pagoda.connectors.endings import Endings, choose
from pagoda.connectors.hint_parameters import with_ending
from pagoda.connectors.llamacpp.server_probe import (
    ProbedServer,
    ServerAdapters,
    ServerIdentity,
    probe_server,
    slot_state,
)
from pagoda.connectors.llamacpp.server_requests import (
    ServerRequests,
    ServerTrouble,
)
from pagoda.connectors.llamacpp.state_directory import (
    NoRoomForState,
    StateDirectory,
)
from pagoda.connectors.llamacpp.state_file import (
    StateFile,
    UnknownState,
    read_state,
)
from pagoda.connectors.llamacpp.state_rows import (
    StateChunks,
    StateWriter,
    layout_of,
    possible_endings,
    read_ending,
)
from pagoda.keys import TokenIds, as_token_ids
from pagoda.layout import KVLayout

log = guarded_logger("pagoda.llamacpp")

# the rows after the last whole chunk are kept in steps of this part of a chunk, so that few places
# need to be looked at
_TAIL_STEPS = 8
_TRIES = 3  # to compose, if chunks disappear meanwhile
# a server that could not be probed again is left alone for as many times as long as that took
_PAUSE = 10
_LEAST_PAUSE_SECONDS = 60.0

Tokens = npt.NDArray[np.int32]


class LoadedState(NamedTuple):
    """The result of a `load` or a `find`. True if anything was restored, or found."""

    # what the slot holds now, of the prompt; 0: the slot was not restored. Of a `find`: what a load
    # is expected to restore
    num_tokens: int
    reason: Reason | None = None  # why not more
    detail: str = ""  # for people

    def __bool__(self) -> bool:
        return self.num_tokens > 0


class StoredState(NamedTuple):
    """The result of a `store`. True if the cache has anything of the slot now."""

    num_tokens: int  # tokens of the slot that can be loaded now
    new_tokens: int  # in chunks that were not stored before
    endings: tuple[
        int, ...
    ] = ()  # the numbers of tokens at which the state can be continued
    reason: Reason | None = None  # why not more
    detail: str = ""  # for people
    # all tokens of the state that was saved (int32); None: it was not read, or is of another prompt
    slot_tokens: Tokens | None = None

    def __bool__(self) -> bool:
        return self.num_tokens > 0


class _WantedPrefix(NamedTuple):
    """What a `store` was asked for."""

    ids: Tokens
    more_tokens: int
    marks: list[int]
    salt: str | None


_Answer = TypeVar("_Answer", LoadedState, StoredState)


class _Refused(Exception):
    """Ends a call with a reason."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class _ProbedCache(NamedTuple):
    """The cache of a server as it was probed. It is replaced as a whole: `find` takes no lock."""

    probed: ProbedServer
    layout: KVLayout
    cache: Cache
    endings: Endings


class _Seen(NamedTuple):
    """Which server answers now, with which adapters."""

    identity: ServerIdentity
    adapters: ServerAdapters


class _FailedProbe(NamedTuple):
    """A server that could not be probed again."""

    seen: _Seen
    why: str
    until: float  # when it may be tried again, of the monotonic clock


class SlotStates:
    """The slots of one llama-server, stored in and loaded from PagodaKV's tiers: for people with a
    proxy of their own.

    A request is then: `load` its tokens into a slot, ask the server with `id_slot` of this slot,
    and `store` the prompt with its answer once the slot is idle. The server must have been started
    with `--slot-save-path`, on this machine, without `--cache-reuse` and `--context-shift`: after
    those the KV in a slot is not that of its tokens.

    What is loaded is right or it is not loaded. The namespace has digests of the model, of its
    adapters, and of the KV that this server computed for a fixed prompt when it was opened; what is
    stored is keyed by the tokens that the state itself has.

    Failures at run time raise nothing: they are a result with a reason, counted, and logged at most
    once in ten seconds. Thread-safe; calls wait for each other, except `find`.

    Example:
        states = SlotStates("http://127.0.0.1:8080", "/dev/shm/slots", disk_path="/var/kv")
        loaded = states.load(tokens, slot=0)
        ...  # POST /completion {"prompt": tokens, "id_slot": 0}
        states.store(tokens + answer, slot=0)
    """

    def __init__(
        self,
        server_url: str,
        directory: str | os.PathLike[str],
        *,
        api_key: str = "",
        state_bytes: int | None = None,
        probe_slot: int | None = None,
        adapters_are_fixed: bool = False,
        salt: str = "",
        limit_seconds: float = 30.0,
        config: Config | None = None,
        **options: Unpack[ConfigOptions],
    ) -> None:
        """Probe the server, which computes 64 tokens twice, and open the cache of its model.

        Args:
            server_url: of one llama-server, such as "http://127.0.0.1:8080".
            directory: its `--slot-save-path`, best in /dev/shm; made if there is none. States go
                through it one at a time. It must be for this user only (mode 700).
            api_key: of the server.
            state_bytes: the most bytes of a state file; larger states are neither stored nor
                loaded. Default: an eighth of the free memory. The server is not asked to write one
                that seems larger; how large it is, is known only once it is written.
            probe_slot: the slot that computes the probe; what it holds is lost. Default: the last.
            adapters_are_fixed: nobody changes the scales of the server's LoRA adapters
                (`POST /lora-adapters`) while it runs. It goes on to use KV of the old scales, and
                a change that was taken back cannot be seen: without this promise KV of a server
                with adapters is loaded, but not stored.
            salt: keeps tenants apart; the salt of calls that name none.
            limit_seconds: for each call; a server that computes an answer lets it wait. A probe is
                not limited by it.
            config: the options of the cache; without it they come from the environment and the
                configuration file.
            options: of `Config`, such as `host_size`, `disk_path` and `chunk_tokens`; they take
                precedence over `config`, environment and file.

        Raises ConfigError or StoreError, with what to do.
        """
        self._config = _configured(config, options)
        self._limit_seconds = seconds_of("limit_seconds", limit_seconds)
        self._server = ServerRequests(server_url, api_key)
        self._chunk_tokens = self._config.chunk_tokens
        self._tail_step = max(1, self._chunk_tokens // _TAIL_STEPS)
        self._salt = salt
        self._adapters_are_fixed = adapters_are_fixed
        self._closed = False
        self._most_slots = 0
        self._failed: _FailedProbe | None = None
        self._current: _ProbedCache | None = None
        self._were_adapters_changed = False
        self._directory = StateDirectory(directory, state_bytes)
        self._finalizer = close_when_dropped(self, self._directory.close)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._open(probe_slot)
            undo.pop_all()

    @per_process
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    def _open(self, slot: int | None) -> None:
        """Probe the server and open the cache of what it computes now."""
        probed = probe_server(
            self._server, self._directory, slot, self._chunk_tokens, self._salt
        )
        layout = layout_of(probed.cut.state, self._chunk_tokens)
        known = self._current
        if known is not None and (
            known.layout != layout or known.probed.namespace != probed.namespace
        ):
            self._current = None
            known.cache.close()
            known = None
        if known is None:
            # the minimum is that of a prompt, and an ending is one of several calls for it
            config = replace(self._config, min_hit_tokens=0)
            cache = Cache(config, namespace=probed.namespace, layout=layout)
            known = _ProbedCache(probed, layout, cache, Endings(cache))
        self._current = known._replace(probed=probed)
        self._probed: ProbedServer = probed
        self._most_slots = max(self._most_slots, probed.slots)
        if probed.trouble:
            log.warning(
                "nothing is stored or loaded for %s: %s",
                self._server.url,
                probed.trouble,
            )

    @property
    def trouble(self) -> str:
        """Why nothing is stored or loaded for this server; empty if it can be used."""
        return self._probed.trouble

    @property
    def kind(self) -> str:
        """What the model is: "attention" (can be continued after every chunk), "window", "hybrid"
        or "recurrent" (can be continued at endings).
        """
        return self._probed.cut.state.kind

    @property
    def slots(self) -> int:
        """How many slots the server has."""
        return self._probed.slots

    @property
    def context_tokens(self) -> int:
        """How many tokens a slot of the server can hold, prompt and answer."""
        return self._probed.context

    @property
    def shares_cells(self) -> bool:
        """Whether all slots share the context (`--kv-unified`): the server empties idle ones when a
        request needs their room.
        """
        return self._probed.streams == 1 and self._probed.slots > 1

    @property
    def cache(self) -> Cache:
        """The cache of the model as it is now; it stays this object's to close.

        Raises ClosedError, or StoreError if the server was changed and cannot be used now.
        """
        return self._usable().cache

    def _usable(self) -> _ProbedCache:
        """Return what is open now. Raises ClosedError, StoreError."""
        if self._closed:
            raise ClosedError("SlotStates was closed")
        current = self._current
        if current is None:
            failed = self._failed
            why = failed.why if failed else "it is probed now"
            raise StoreError(f"{self._server.url} was changed: {why}")
        return current

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Report how long the server took to compute so many tokens of a prompt (`prompt_n` and
        `prompt_ms` of its timings): then `pagoda stats` says how much time loads have saved.
        """
        current = self._current
        if current is None:
            return
        with contextlib.suppress(ClosedError):
            current.cache.observe_prefill(tokens, seconds)

    def stats(self) -> CacheStats:
        """Return what `Cache.stats` returns."""
        return self.cache.stats()

    def refuse_hint(self, hint: str, why: str) -> None:
        """Count a hint that a proxy refuses. Both texts must be of a fixed set."""
        current = self._current
        if current is not None:
            current.cache.refuse_hint(hint, why)

    def hint_counts(self) -> Mapping[str, Mapping[str, int]]:
        """Return how many hints were accepted, clipped and refused, by hint and reason."""
        current = self._current
        if current is None:
            return {}
        try:
            return current.cache.stats().get("hints", {})
        except ClosedError:
            return {}

    def ended(
        self, hints: RequestHints | None, ending: EndingName
    ) -> RequestHints | None:
        """Return the hints of a request whose answer ended in this way, for `store` or
        `note_answer`; see `with_ending`.
        """
        current = self._current
        is_heard = current is not None and current.cache.hears_hints
        return with_ending(hints, ending, self._config.hints, is_heard)

    def note_answer(
        self,
        tokens: TokenIds,
        *,
        salt: str | None = None,
        hints: RequestHints | None = None,
    ) -> tuple[HintResult, ...]:
        """Say by `hints` how a request ended, as `Cache.note_answer` does, for a prompt of which
        nothing is to be stored; return what became of each. Asks the server nothing.

        Args:
            tokens: the prompt and the answer, as far as they are known.
            salt: a tenant, instead of that of this object.
            hints: None: its client says nothing.

        Raises ValueError for wrong use, and nothing else.
        """
        ids = as_token_ids(tokens)
        _require_salt(salt)
        return self._note(ids, (), salt, hints)

    def _note(
        self,
        ids: Tokens,
        lengths: Sequence[int],
        salt: str | None,
        hints: RequestHints | None,
    ) -> tuple[HintResult, ...]:
        """Note how a request ended. `lengths`: of its endings; none: they are looked for."""
        current = self._current
        if current is None or (hints is None and not current.cache.hears_hints):
            return ()
        endings = current.endings
        size = current.probed.cut.payload_bytes
        try:
            lengths = lengths or endings.seen(ids, salt=salt)
            keys = endings.keys_with(ids, lengths, size, salt=salt)
        except ClosedError:
            return ()
        return current.cache.note_answer(None, keys=keys, salt=salt, hints=hints)

    def find(
        self,
        tokens: TokenIds,
        *,
        salt: str | None = None,
        hints: RequestHints | None = None,
    ) -> LoadedState:
        """Return the longest stored state that these tokens begin with, as `load` would restore it;
        change nothing but its recency.

        Asks the server nothing and waits for no other call, so it is for every request of a proxy.
        It is about the server as it was probed last: only `load` notices another one, and probes
        it; meanwhile nothing is found. So call `load` also after `Reason.BUSY` and
        `Reason.NOT_CACHEABLE`: otherwise a server that was changed is never used again.

        It is counted as a look-up: pass `counted=False` to the `load` that follows it. `reason` and
        `detail` may tell one tenant what another has stored: they are not for clients.

        Args:
            tokens: of the whole prompt.
            salt: a tenant, instead of that of this object: different salts share nothing.
            hints: what its client says of the request; only the session counts here.

        Raises ValueError for wrong use, and nothing else.
        """
        ids = as_token_ids(tokens)
        _require_salt(salt)
        current = self._current
        if self._closed or current is None:
            return self._not_open()
        if current.probed.trouble:
            current.cache.decline(current.probed.trouble)
            return LoadedState(0, Reason.NOT_CACHEABLE, current.probed.trouble)
        found = self._longest(current, ids, salt, hints=hints)
        now = self._current
        if self._closed or now is None or now.cache is not current.cache:
            return self._not_open()
        return found

    def _not_open(self) -> LoadedState:
        """Return the miss of a `find` while there is no cache for it."""
        if self._closed:
            return LoadedState(0, Reason.CLOSED, "SlotStates was closed")
        failed = self._failed
        if failed is not None:
            return LoadedState(0, Reason.NOT_CACHEABLE, failed.why)
        return LoadedState(
            0, Reason.BUSY, "the server was changed, and is probed again"
        )

    def load(
        self,
        tokens: TokenIds,
        slot: int,
        *,
        held_tokens: int = 0,
        salt: str | None = None,
        counted: bool = True,
        limit_seconds: float | None = None,
    ) -> LoadedState:
        """Restore into `slot` the longest stored state that these tokens begin with.

        What the slot holds is replaced, or lost if the server refuses the state. Ask the server
        with `id_slot` next: its `cache_n` must be at least `num_tokens` - 1. If the server or its
        adapters were changed, it is probed again first, in this slot.

        Args:
            tokens: of the whole prompt, as the server makes them (`/tokenize` with `add_special`).
            slot: its number.
            held_tokens: how many leading tokens the slot has by your own account: a state that is
                not longer is not restored.
            salt: a tenant, instead of that of this object: different salts share nothing.
            counted: whether this is a look-up in the statistics; False after a `find` of the same
                prompt. Failures are counted in both cases.
            limit_seconds: instead of that of this object.

        Raises ValueError for wrong use.
        """
        ids = self._checked(tokens, slot)
        _require_salt(salt)
        deadline = self._deadline(limit_seconds)

        def work() -> LoadedState:
            self._renew(slot, deadline)
            self._require_slot(slot)
            return self._load(ids, slot, held_tokens, salt, counted, deadline)

        return self._guarded(work, LoadedState, deadline, is_load=True)

    def store(
        self,
        tokens: TokenIds,
        slot: int,
        *,
        more_tokens: int = 0,
        marks: Iterable[int] = (),
        salt: str | None = None,
        limit_seconds: float | None = None,
        hints: RequestHints | None = None,
    ) -> StoredState:
        """Save an idle slot, and store what is not stored yet.

        Args:
            tokens: the prompt and the answer, as far as you know them. The state must begin with
                them, or they with it; only what both have is stored.
            slot: its number.
            more_tokens: the state may go on after `tokens` by up to so many tokens of an answer
                that you do not know; those that it has are stored as well.
            marks: numbers of tokens after which other prompts will go on in another way, such as
                the end of the system's text: models that are not "attention" can be continued there
                if the server kept a checkpoint.
            salt: a tenant, instead of that of this object: different salts share nothing.
            limit_seconds: instead of that of this object.
            hints: how the request ended, noted also if nothing could be stored.

        Raises ValueError for wrong use.
        """
        ids = self._checked(tokens, slot)
        _require_salt(salt)
        if type(more_tokens) is not int or more_tokens < 0:
            raise ValueError(
                f"more_tokens = {more_tokens!r}: it must be an int, at least 0"
            )
        wanted = _WantedPrefix(ids, more_tokens, list(marks), salt)
        deadline = self._deadline(limit_seconds)

        def work() -> StoredState:
            self._require_same(deadline)
            self._require_slot(slot)
            self._require_fixed_adapters()
            return self._store(wanted, slot, deadline)

        def miss(_: int, reason: Reason, detail: str) -> StoredState:
            return StoredState(0, 0, (), reason, detail)

        stored = self._guarded(work, miss, deadline, is_load=False)
        known = ids if stored.slot_tokens is None else stored.slot_tokens
        self._note(known[: len(ids) + more_tokens], stored.endings, salt, hints)
        return stored

    def close(self) -> None:
        """Close the cache and remove what is in the directory; idempotent.

        Waits for a call that has begun, but at most `limit_seconds`; a call that takes longer (a
        probe) does this at its end.
        """
        self._closed = True
        if not self._lock.acquire(timeout=self._limit_seconds):
            return
        try:
            self._release()
        finally:
            self._lock.release()

    def _release(self) -> None:
        """Give up what is held; the lock is held."""
        current = self._current
        self._current = None
        if current is not None:
            current.cache.close()
        self._finalizer()

    def __enter__(self) -> SlotStates:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what both calls share

    def _checked(self, tokens: TokenIds, slot: int) -> Tokens:
        if type(slot) is not int or not 0 <= slot < self._most_slots:
            # a larger number would wrap around, to another conversation
            raise ValueError(
                f"slot {slot!r} is not one of the {self._most_slots}"
            )
        return as_token_ids(tokens)

    def _deadline(self, seconds: float | None) -> Deadline:
        if seconds is None:
            return Deadline(self._limit_seconds, self._limit_seconds)
        seconds = seconds_of("limit_seconds", seconds)
        return Deadline(seconds, seconds)

    def _guarded(
        self,
        work: Callable[[], _Answer],
        miss: Callable[[int, Reason, str], _Answer],
        deadline: Deadline,
        *,
        is_load: bool,
    ) -> _Answer:
        """Do the work alone; every failure is an answer, counted and logged."""
        if not self._lock.acquire(timeout=deadline.remaining()):
            return miss(0, Reason.BUSY, "another call did not end in time")
        try:
            if self._closed:
                raise ClosedError("SlotStates was closed")
            return work()
        except _Refused as refused:
            found = refused
        except ClosedError as closed:
            return miss(0, Reason.CLOSED, str(closed))
        except NoRoomForState as full:
            found = _Refused(Reason.IO_ERROR, str(full))
        except (ServerTrouble, PagodaError, OSError) as trouble:
            reason = Reason.DEADLINE if deadline.passed else Reason.IO_ERROR
            found = _Refused(reason, f"{type(trouble).__name__}: {trouble}")
        except UnknownState as unknown:
            found = _Refused(
                Reason.FAILED_CHECK,
                f"a state of the server was refused: {unknown}",
            )
        finally:
            if self._closed:
                self._release()
            self._lock.release()
        current = self._current
        if current is not None:
            current.cache.decline(found.detail, loaded=not is_load)
        return miss(0, found.reason, found.detail)

    def _look(self, seconds: Callable[[], float]) -> _Seen:
        """Ask which server answers, and remember whether its adapters were changed. `seconds` are
        left for a request. Raises ServerTrouble.
        """
        adapters = ServerAdapters.of(self._server, seconds())
        identity = ServerIdentity.of(self._server, seconds())
        if identity != self._probed.identity:
            self._were_adapters_changed = False
        elif adapters != self._probed.adapters:
            self._were_adapters_changed = True
        return _Seen(identity, adapters)

    def _is_same(self, seen: _Seen) -> bool:
        """Whether the server is the one that was probed, with the same adapters."""
        if seen.identity != self._probed.identity:
            return False
        return seen.adapters == self._probed.adapters

    def _require_same(self, deadline: Deadline) -> None:
        if not self._is_same(self._look(deadline.remaining)):
            raise _Refused(
                Reason.NOT_CACHEABLE,
                "the server was restarted or its adapters were changed since it was probed: what "
                "its slots hold may be of before; the next load probes it again",
            )
        if self._were_adapters_changed:
            raise _Refused(
                Reason.NOT_CACHEABLE,
                "the adapters were changed while the server ran, and it goes on to use KV of "
                "before: nothing is stored until it is restarted",
            )
        if self._probed.trouble:
            raise _Refused(Reason.NOT_CACHEABLE, self._probed.trouble)

    def _require_fixed_adapters(self) -> None:
        if self._probed.adapters.listed and not self._adapters_are_fixed:
            raise _Refused(
                Reason.NOT_CACHEABLE,
                "the server has adapters, and goes on to use KV of scales that were changed and "
                "changed back: if nobody sends POST /lora-adapters, pass adapters_are_fixed=True",
            )

    def _require_slot(self, slot: int) -> None:
        """Refuse a slot that a server does not have since its restart."""
        if slot >= self._probed.slots:
            raise _Refused(
                Reason.NOT_CACHEABLE,
                f"the server has {self._probed.slots} slots now, and no slot {slot}",
            )

    def _renew(self, slot: int, deadline: Deadline) -> None:
        """Probe a server again that is another one now, in the slot that is to be loaded."""
        seen = self._look(deadline.remaining)
        if self._current is None or not self._is_same(seen):
            self._probe_again(slot, seen)
        if self._probed.trouble:
            raise _Refused(Reason.NOT_CACHEABLE, self._probed.trouble)

    def _probe_again(self, slot: int, seen: _Seen) -> None:
        """Probe a server, unless this has just failed: it takes long and empties the slot."""
        if slot >= seen.identity.slots:
            raise _Refused(
                Reason.NOT_CACHEABLE,
                f"the server has {seen.identity.slots} slots now, and no slot {slot}",
            )
        began = time.monotonic()
        failed = self._failed
        if failed is not None and failed.seen == seen and began < failed.until:
            raise _Refused(Reason.NOT_CACHEABLE, failed.why)
        try:
            self._open(slot)
        except (PagodaError, OSError, UnknownState) as error:
            now = time.monotonic()
            pause = max(_LEAST_PAUSE_SECONDS, _PAUSE * (now - began))
            why = f"it was probed again, and cannot be used: {error}"
            self._failed = _FailedProbe(seen, why, now + pause)
            log.warning(
                "nothing is stored or loaded for %s: %s", self._server.url, why
            )
            raise _Refused(Reason.NOT_CACHEABLE, why) from None
        self._failed = None

    def _require_idle(self, slot: int, deadline: Deadline) -> Any:
        """Return what the server says of a slot. Refuse one that computes, and one whose last
        request chose adapters: its KV is theirs, and the next request with the same ones would go
        on from what is loaded.
        """
        said = slot_state(self._server, slot, deadline.remaining()) or {}
        if said.get("is_processing"):
            raise _Refused(Reason.BUSY, f"slot {slot} is computing an answer")
        if not self._probed.adapters.listed:
            return said
        if said and "id_task" not in said and "params" not in said:
            # no request yet
            return said
        params = said.get("params")
        if not isinstance(params, dict):
            params = {}
        if "lora" not in params:
            raise _Refused(
                Reason.NOT_CACHEABLE,
                f"the server has adapters, and does not say which the last request of slot {slot} "
                "chose: start it without --no-slots",
            )
        if params["lora"]:
            raise _Refused(
                Reason.NOT_CACHEABLE,
                f"the last request of slot {slot} had the field `lora`: its KV is not that of the "
                "server's own adapters",
            )
        return said

    # ---- load

    def _load(
        self,
        ids: Tokens,
        slot: int,
        held_tokens: int,
        salt: str | None,
        counted: bool,
        deadline: Deadline,
    ) -> LoadedState:
        current = self._usable()
        most = len(ids)
        for number in range(_TRIES):
            found = self._longest(
                current, ids, salt, most, counted=counted and not number
            )
            count = found.num_tokens
            if count <= held_tokens:
                if count:
                    detail = (
                        f"{count} tokens are stored, the slot has {held_tokens}"
                    )
                    return LoadedState(0, Reason.BELOW_MINIMUM, detail)
                return found
            self._require_idle(slot, deadline)
            loaded = self._compose(current, ids[:count], slot, salt, deadline)
            if loaded:
                return found
            most = count - 1
        return LoadedState(
            0, Reason.EVICTED, "chunks disappeared while they were loaded"
        )

    def _longest(
        self,
        current: _ProbedCache,
        ids: Tokens,
        salt: str | None,
        most: int | None = None,
        *,
        counted: bool = True,
        hints: RequestHints | None = None,
    ) -> LoadedState:
        """Return how many tokens of `ids` can be loaded, at most `most`, and why not more."""
        most = len(ids) if most is None else most
        most = min(most, current.probed.context - 1)
        counts = []

        def usable(hit: Hit) -> Hit:
            found = self._usable_of(current, ids, salt, most, hit)
            counts.append(found.num_tokens)
            return hit.shortened(found.num_tokens, found.reason, found.detail)

        hit = current.cache.lookup(
            ids[:most], counted=counted, usable=usable, salt=salt, hints=hints
        )
        # without a count the look-up failed
        return LoadedState(sum(counts), hit.reason, hit.detail)

    def _usable_of(
        self,
        current: _ProbedCache,
        ids: Tokens,
        salt: str | None,
        most: int,
        hit: Hit,
    ) -> LoadedState:
        """Return how many tokens can be loaded of the chunks that were found."""
        cut = current.probed.cut
        kind = cut.state.kind
        count = hit.num_tokens
        why = (hit.reason, hit.detail)
        deadline = Deadline(self._config.deadline_seconds)
        if kind == "attention":
            tail = current.endings.find_tail(
                ids,
                whole_chunks=count // self._chunk_tokens,
                most_tokens=most,
                step=self._tail_step,
                payload_bytes=cut.payload_bytes,
                deadline=deadline,
                salt=salt,
            )
            count = max(count, tail)
        else:
            if kind != "window":
                most = min(most, len(ids) - 1)
            count = current.endings.find(
                ids,
                whole_chunks=hit.num_tokens // self._chunk_tokens,
                most_tokens=most,
                payload_bytes=cut.payload_bytes,
                deadline=deadline,
                salt=salt,
            )
            if not count and deadline.passed:
                why = (Reason.DEADLINE, "the search for endings took too long")
            elif not count and hit.num_tokens:
                why = (
                    Reason.ABSENT,
                    f"{hit.num_tokens} tokens are stored, but no ending: a {kind} model can be "
                    "continued only where its state was kept",
                )
        minimum = self._config.min_hit_tokens
        if 0 < count < minimum:
            detail = f"{count} of {minimum} tokens"
            return LoadedState(0, Reason.BELOW_MINIMUM, detail)
        return LoadedState(count, *why)

    def _compose(
        self,
        current: _ProbedCache,
        ids: Tokens,
        slot: int,
        salt: str | None,
        deadline: Deadline,
    ) -> bool:
        """Write a state of exactly these tokens and let the server restore it; return whether all
        of it was there.
        """
        cut = current.probed.cut
        streams = current.probed.streams
        ending = np.empty(0, np.uint8)
        if self.kind != "attention" or len(ids) % self._chunk_tokens:
            size = cut.payload_bytes(len(ids))
            found = current.endings.load(ids, size, salt=salt)
            if found is None:
                return False
            ending = found.payload
        nbytes = cut.file_bytes(len(ids), streams)
        self._require_below_limit(nbytes)
        with self._directory.state() as path:
            with (
                self._directory.room_for(nbytes),
                opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd,
            ):
                writer = StateWriter(fd, cut, streams, ids)
                whole = len(ids) // self._chunk_tokens * self._chunk_tokens
                if whole:
                    chunks = writer.chunks(current.layout)
                    hit = current.cache.retrieve(
                        ids[:whole],
                        chunks,
                        counted=False,
                        salt=salt,
                        limit_seconds=deadline.last(),
                    )
                    if chunks.error is not None:
                        raise chunks.error
                    if hit.num_tokens < whole:
                        return False
                writer.put_ending(ending)
                state = read_state(fd, cut.state)
                if not np.array_equal(state.tokens, ids):
                    raise UnknownState("a composed state has other tokens")
            try:
                restored = self._server.restore(
                    slot, path.name, deadline.remaining()
                )
            except ServerTrouble as trouble:
                # rows that it has read before it refused the rest must not stay in the slot
                with contextlib.suppress(ServerTrouble):
                    self._server.erase(slot, deadline.last())
                raise _Refused(
                    Reason.IO_ERROR,
                    f"the server did not restore the state: {trouble}",
                ) from None
        if restored != len(ids):
            self._server.erase(slot, deadline.last())
            raise _Refused(
                Reason.FAILED_CHECK,
                f"{restored} of {len(ids)} tokens were restored",
            )
        self._require_same_after(slot, deadline)
        return True

    def _require_same_after(self, slot: int, deadline: Deadline) -> None:
        """Empty a restored slot again unless the server is still the one that was probed."""
        is_same = False
        try:
            is_same = self._is_same(self._look(deadline.last))
        finally:
            if not is_same:
                self._server.erase(slot, deadline.last())
        if not is_same:
            raise _Refused(
                Reason.NOT_CACHEABLE,
                "the server was restarted or its adapters were changed while the slot was restored",
            )

    def _require_below_limit(self, nbytes: int) -> None:
        most = self._directory.state_bytes
        if nbytes > most:
            raise _Refused(
                Reason.TOO_LARGE,
                f"a state of {nbytes:,} bytes, at most {most:,} may be in {self._directory.path}: "
                "raise state_bytes (--state-bytes)",
            )

    # ---- store

    def _store(
        self, wanted: _WantedPrefix, slot: int, deadline: Deadline
    ) -> StoredState:
        cut = self._probed.cut
        said = self._require_idle(slot, deadline)
        held = said.get("n_prompt_tokens")
        expected = held if isinstance(held, int) else len(wanted.ids)
        nbytes = cut.saved_bytes(expected, self._probed.streams)
        self._require_below_limit(nbytes)
        with self._directory.state() as path:
            with self._directory.room_for(nbytes):
                saved = self._server.save(slot, path.name, deadline.remaining())
            if not saved:
                raise _Refused(
                    Reason.ABSENT,
                    f"slot {slot} is empty: with unified slots every request empties the idle ones "
                    "(--no-cache-idle-slots)",
                )
            with opened(path, os.O_RDONLY) as fd:
                # the bytes that were checked are the bytes that are stored
                path.unlink()
                self._require_below_limit(os.fstat(fd).st_size)
                self._require_same(deadline)
                return self._store_file(fd, wanted, deadline)

    def _store_file(
        self, fd: int, wanted: _WantedPrefix, deadline: Deadline
    ) -> StoredState:
        current = self._usable()
        cut = current.probed.cut
        state = read_state(fd, cut.state)
        ids = self._tokens_to_store(wanted, state)
        endings = self._chosen_endings(state, len(ids), wanted.marks)
        if not endings and self.kind != "attention":
            detail = (
                f"a {self.kind} model can be continued only where its state was kept, and this "
                "state has no such place: it is shorter than the window, or this build of the "
                "server saves no checkpoints"
            )
            current.cache.decline(detail, loaded=True)
            return StoredState(
                0, 0, (), Reason.NOT_CACHEABLE, detail, state.tokens
            )
        size = self._chunk_tokens
        # chunks after the last ending could not be used
        used = len(ids) if self.kind == "attention" else max(endings)
        whole = used // size * size
        if not whole and self.kind == "attention":
            detail = f"{len(ids)} tokens, a chunk has {size}"
            return StoredState(
                0, 0, (), Reason.SHORT_PROMPT, detail, state.tokens
            )
        stored = current.cache.store(
            ids[:whole],
            StateChunks(fd, state.full, state.tokens, current.layout),
            salt=wanted.salt,
            limit_seconds=deadline.last(),
            hints=LATER,
        )
        have = (stored.num_chunks + stored.present) * size
        new = stored.num_tokens
        reason = stored.reason
        kept = []
        for count in endings:
            # its chunks must be there as well
            if count // size * size > have:
                continue
            payload = read_ending(state, cut, count)
            if current.endings.store(ids[:count], payload, salt=wanted.salt):
                kept.append(count)
            else:
                reason = reason or Reason.FULL
        most = max(kept, default=0)
        if self.kind == "attention":
            most = max(most, have)
        return StoredState(most, new, tuple(kept), reason, "", state.tokens)

    def _tokens_to_store(self, wanted: _WantedPrefix, state: StateFile) -> Tokens:
        """Return the tokens of a state that may be stored; refuse those of another prompt."""
        known = wanted.ids
        common = min(len(known), len(state.tokens))
        differing = np.flatnonzero(known[:common] != state.tokens[:common])
        if len(differing):
            raise _Refused(
                Reason.FAILED_CHECK,
                f"the slot has another token {differing[0]} than the {len(known)} that were given: "
                "it holds another prompt, or its context was shifted",
            )
        return state.tokens[: len(known) + wanted.more_tokens]

    def _chosen_endings(
        self, state: StateFile, most: int, marks: list[int]
    ) -> list[int]:
        """Return where a state is cut, beside its chunks; nowhere if there is no place for it."""
        if self.kind == "attention":
            return self._tail_ends(most)
        possible = [
            (lowest, min(highest, most))
            for lowest, highest in possible_endings(state, self._probed.cut)
            if lowest <= most
        ]
        return choose(possible, marks)

    def _tail_ends(self, tokens: int) -> list[int]:
        """Return where the tail of so many tokens of an attention model ends, if it is long enough
        to be worth the bytes of a chunk.
        """
        tail = tokens % self._chunk_tokens
        if 2 * tail < self._chunk_tokens:
            return []
        return [tokens - tail % self._tail_step]


def _require_salt(salt: str | None) -> None:
    if salt is None:
        return
    if type(salt) is not str:
        raise ValueError(f"salt must be a str, got {type(salt).__name__}")
    # a ValueError as well, for what has no bytes
    salt.encode()


def _configured(config: Config | None, options: ConfigOptions) -> Config:
    """Return the options, from the environment and the file where `config` is None. ConfigError."""
    if config is not None:
        # Config converts what it is given
        return replace(config, **options)  # type: ignore[arg-type]
    from pagoda.config.sources import load

    return load(None, None, None, **options).for_engine()
