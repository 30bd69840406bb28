"""The ledger: which chunk is in which slot of a slab, for any number of processes, without a
daemon.

    reserve      -> copy bytes into the slots, no lock held -> commit | abort
    match_prefix -> copy bytes out of the slots, no lock held -> still_valid

The bytes that were read are the chunk's if and only if, after the copy, the slot's published
generation still is the one that the *entry* had. So readers take no lock and no reference count,
and nothing leaks if a process dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from pagoda.base.clock import Clock
from pagoda.base.errors import ClosedError, NoRoomError, StoreError
from pagoda.base.finalizers import close_dropped
from pagoda.base.fork import here, per_process
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import Reason
from pagoda.base.signal_safe_threads import Condition
from pagoda.base.store_place import free_bytes, require_own
from pagoda.ledger import allocation, hold_pin_remove, queries
from pagoda.ledger.call_tokens import CallToken
from pagoda.ledger.clearing import Clearing
from pagoda.ledger.columns import (
    FEW_USED,
    KEY_BYTES,
    LONGEST_LEASE_NS,
    NOT_READY,
    PARENT_CELLS,
    Columns,
)
from pagoda.ledger.eviction_policy import GHOST_REASONS, Evictor
from pagoda.ledger.ghost_table import marks_of
from pagoda.ledger.growth_thread import GrowthThread
from pagoda.ledger.lmdb_tables import Meta, Tables, Txn
from pagoda.ledger.locks import DeadlineMissedError, barrier
from pagoda.ledger.members import mark_device
from pagoda.ledger.namespace_registry import NamespaceRegistry
from pagoda.ledger.outcomes import (
    CommitResult,
    Match,
    Miss,
    Outcome,
    Present,
    Refused,
    Reserved,
    RunToReserve,
)
from pagoda.ledger.request_contexts import RequestContexts
from pagoda.ledger.request_ring import RING_BYTES, RequestRing
from pagoda.ledger.root_usage import Holding, holdings
from pagoda.ledger.session import Session, UnavailableError
from pagoda.ledger.slab_pages import SlabPages
from pagoda.ledger.slots_in_use import PageGuards
from pagoda.ledger.space_sharing import SpaceShare
from pagoda.ledger.store_directory import (
    StoreSpec,
    open_store,
    os_errors_mapped,
    unusable,
    warn_of_slots,
)
from pagoda.ledger.store_state import REQUESTS, SLAB, Kind, read_state
from pagoda.ledger.stores_under_root import discard, in_use, root_locked
from pagoda.ledger.transaction import BATCH, Transaction, batches, window
from pagoda.ledger.upkeep_thread import UpkeepThread, map_learned
from pagoda.policy.prefill_cost import PrefillCost, objective_of

log = guarded_logger("pagoda")

# chunks that are known to be there as long as no transaction is committed
_MOST_MATCHED = 4096
# the wait for the tables' answer whether a chunk that was read is still there
_VALID_SECONDS = 1.0
# the part of its time that a reserve may wait for a store that grows
_GROWTH_SHARE = 0.8
_LOOK_SECONDS = 1.0
# how long a store is asked for pages
_GIVE_SECONDS = 0.5
T = TypeVar("T")


class OpenSlab(Protocol):
    """What a store asks of the slab that it opens, whatever kind it is."""

    def close(self) -> None:
        """Give the mapping or the file back. Idempotent."""


S = TypeVar("S", bound=OpenSlab)
R = TypeVar("R", covariant=True)


class OwningCall(Protocol[R]):
    """A call that puts on a token what its caller is to own."""

    def __call__(self, *, token: CallToken) -> R:
        """Do it."""


_ledgers: list[Ledger] = []  # open, or being closed


class _StoreOpenings:
    """The stores that threads of this process are opening."""

    @per_process
    def changed(self) -> Condition:
        """Guards them and the open ones; never held while a store is opened or closed."""
        return Condition()

    @per_process
    def directories(self) -> dict[object, str]:
        """Their directories, by the call that opens them."""
        return {}


_openings = _StoreOpenings()


class MatchedChunks:
    """Chunks of a store on disk that were there after a transaction, and are as long as no other
    one is committed.

    A look-up only adds its arrays; they are put in order when the first chunk of them is read. Any
    thread may call.
    """

    def __init__(self, transaction: int) -> None:
        self.transaction = transaction
        self.is_full = False
        self._count = 0
        self._added: list[tuple[NDArray[np.int64], NDArray[np.uint64]]] = []
        self._generations: dict[int, int] = {}  # by slot

    def add(
        self, slots: NDArray[np.int64], generations: NDArray[np.uint64]
    ) -> None:
        """Add what a look-up found after the transaction."""
        self._count += len(slots)
        self.is_full = self._count > _MOST_MATCHED
        self._added.append((slots, generations))

    def holds(self, slot: int, generation: int) -> bool:
        """Whether this chunk is one of them."""
        while self._added:
            try:
                slots, generations = self._added.pop()
            except IndexError:
                # another thread took it, and will have put it in order at the next call
                break
            self._generations.update(
                zip(slots.tolist(), generations.tolist(), strict=True)
            )
        return self._generations.get(slot) == generation


class Ledger:
    """One store's ledger in this process. Thread-safe and fork-safe; `open` returns one shared
    object per store.

    A call with `deadline_seconds` never takes longer, never raises for a failure at run time, and
    counts what it
    refuses: `drop_<reason>` for each Refused, `miss_ledger_busy` for each read and
    `drop_ledger_busy` for each write that was not done in time. The caller counts the misses of
    `match_prefix`.
    """

    def __init__(
        self, session: Session, policy: str, cost: PrefillCost | None = None
    ) -> None:
        state = session.store.state
        self.session = session
        self.directory: Path = session.store.directory
        self.kind: Kind = state.kind
        self.on_disk = state.kind == "file"
        self.slots = state.slots
        self.slot_bytes = state.slot_bytes
        self.chunk_bytes = state.chunk_bytes  # size of a payload; 0: unknown
        self.store_id = bytes.fromhex(state.store_id)
        self.slab_path: Path = self.directory / SLAB
        self.columns: Columns = session.columns
        self.page_guards: PageGuards | None = session.page_guards
        self.namespaces = NamespaceRegistry(session)
        self.clearing = Clearing(session, self.namespaces)
        self._matched = MatchedChunks(-1)
        self.requests = RequestRing(session.hints.page(REQUESTS, RING_BYTES))
        self._uses = 1
        # sizes that users in this process asked for, and how much at once
        self._asked = set[tuple[int | None, int | None]]()
        self._closing = self._borrowed = False
        self._thread_of = here()  # the process whose thread closes or borrows it
        self._policy = policy
        self._cost = cost
        self.pages = SlabPages(session)
        ask = partial(_pages_of, clock=session.clock)
        self.space = SpaceShare(session, self.pages, ask)
        self._learned = map_learned(session.hints, self.evictor)
        self._now = session.clock.monotonic_ns
        self.count = session.count
        self._last_stamp = 0
        # free slots, and how many should be free (0: all slots have pages), after the last reserve
        self._room = 0
        # victims that others took first, of late: see `_note_gone`
        self._gone = 0
        self._ahead = 0
        # the slots from this one on had no pages when this process looked last
        self.backed = 0
        self._looks_again = 0.0
        self.window = window(self.slots)

    @property
    def objective(self) -> str:
        """What the policy of this process serves most of."""
        return objective_of(self._cost)

    @per_process
    def evictor(self) -> Evictor:
        """The policy: what a parent's has learned of its requests is its own."""
        return Evictor(self._policy, self.columns, self._cost)

    @per_process
    def contexts(self) -> RequestContexts:
        """What the requests of this process say of their chunks."""
        return RequestContexts(self.session, self.evictor)

    @per_process
    def upkeep_thread(self) -> UpkeepThread:
        """The thread on which the policy learns and ranks."""
        return UpkeepThread(self.session, self.evictor, self._learned)

    @per_process
    def growth_thread(self) -> GrowthThread:
        """The thread that asks for more slots with pages."""
        return GrowthThread(self.session, self.space)

    @property
    def tier(self) -> str:
        """The name of the tier that the store belongs to: "host" or "disk"."""
        return "host" if self.kind == "memory" else "disk"

    @property
    def fitting(self) -> int:
        """How many chunks fit: now if the store gets no more pages, otherwise when it has grown."""
        stays = self.space.refused or self.growth_thread.rests
        return self.columns.capacity if stays else self.slots

    @classmethod
    def open(
        cls,
        spec: StoreSpec,
        policy: str = "lru",
        clock: Clock | None = None,
        deadline_seconds: float = 60.0,
        cost: PrefillCost | None = None,
    ) -> Ledger:
        """Open or create the store. StoreError or NoRoomError with the remedy; ValueError for an
        unknown policy. `cost`: see `Evictor`.
        """
        return cls._shared(
            spec,
            policy,
            clock or Clock(),
            deadline_seconds,
            create=True,
            cost=cost,
        )

    @classmethod
    def attach(
        cls,
        directory: Path,
        clock: Clock | None = None,
        deadline_seconds: float = 10.0,
        borrowed: bool = False,
    ) -> Ledger:
        """Open an existing store as it is. StoreError if there is none.

        `borrowed`: opened only to take space from it. The caller holds the lock of its root and
        soon closes the ledger; a thread that wants to open it meanwhile waits.
        """
        # `resolve` raises a RuntimeError for a loop of links
        directory = Path(os.path.realpath(directory))
        try:
            require_own(directory)
            state = read_state(directory)
            if state is None:
                os.listdir(directory)
        except OSError as trouble:
            raise StoreError(
                f"{directory} cannot be read: {trouble.strerror}"
            ) from trouble
        if state is None:
            raise unusable(directory, "its state is missing or damaged")
        spec = StoreSpec(
            directory.parent,
            directory.name,
            state.kind,
            state.slots,
            state.slot_bytes,
            private=state.private,
        )
        return cls._shared(
            spec,
            "lru",
            clock or Clock(),
            deadline_seconds,
            create=False,
            borrowed=borrowed,
        )

    @classmethod
    def _shared(
        cls,
        spec: StoreSpec,
        policy: str,
        clock: Clock,
        deadline_seconds: float,
        create: bool,
        borrowed: bool = False,
        cost: PrefillCost | None = None,
    ) -> Ledger:
        until = time.monotonic() + deadline_seconds
        if spec.private and create:
            spec = dataclasses.replace(
                spec,
                name=f"{spec.name}.private-{os.getpid()}-{secrets.token_hex(4)}",
            )
        this = os.path.realpath(spec.root / spec.name)
        me = object()
        opening = _openings.directories
        changed = _openings.changed
        _close_those_of_lost_threads()
        try:
            with changed:
                while (
                    known := cls._here(spec)
                ) is not None or this in opening.values():
                    if (
                        known is not None
                        and not known._closing
                        and not known._borrowed
                    ):
                        ledger = known._shared_with(spec)
                        break
                    if not changed.wait(_left(until)):
                        raise StoreError(
                            f"another thread has been opening or closing {spec.root / spec.name} "
                            "for "
                            f"{deadline_seconds:g} s: find out what it waits for"
                        )
                else:
                    opening[me] = this
            opens = me in opening
            if opens:
                with os_errors_mapped(spec.root / spec.name):
                    ledger = cls._opened(
                        spec, policy, clock, until, create, borrowed, cost
                    )
                ledger._borrowed = borrowed
                with changed:
                    _ledgers.append(ledger)
        finally:
            # a built-in: no exception of a signal handler can come before it
            opening.pop(me, None)
            with changed:
                changed.notify_all()

        def discard(kind: type[BaseException] | None, *_: object) -> None:
            has_no_room = kind is not None and issubclass(kind, NoRoomError)
            if has_no_room or (opens and ledger.session.store.made):
                discard_empty(ledger.directory, clock)

        with contextlib.ExitStack() as undo:
            undo.push(discard)  # after the other
            undo.callback(ledger.close)
            with os_errors_mapped(ledger.directory):
                if opens:
                    ledger.namespaces.prepare_clears()
                    ledger.session.recover(_left(until))
                    ledger._end_clears()
                elif create:
                    ledger._warn_of_others(spec, policy, cost)
                asked = spec.limit_bytes, spec.first_bytes
                if create and asked not in ledger._asked:
                    _with_space(partial(ledger.space.fit_to_limit, *asked), until)
                    ledger._asked.add(asked)
            undo.pop_all()
        return ledger

    @classmethod
    def _opened(
        cls,
        spec: StoreSpec,
        policy: str,
        clock: Clock,
        until: float,
        create: bool,
        locked: bool,
        cost: PrefillCost | None,
    ) -> Ledger:
        store = _with_space(
            lambda seconds: open_store(spec, clock, seconds, create, locked),
            until,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(store.release)
            session = Session(store, clock, _left(until))
            undo.pop_all()
            undo.callback(session.close)
            ledger = cls(session, policy, cost)
            undo.pop_all()
        return ledger

    def _end_clears(self) -> None:
        """End the clears of dead processes. If that fails, look-ups heed them all the same."""
        try:
            self.clearing.end_clears()
        except (StoreError, OSError) as error:
            log.warning(
                "a clear of %s that a process did not end could not be ended: %s",
                self.directory,
                error,
            )

    @staticmethod
    def _here(spec: StoreSpec) -> Ledger | None:
        """Return this process's ledger of that store, found by the file: two paths may name the
        same store.
        """
        directory = spec.root / spec.name
        for ledger in _ledgers:
            session = ledger.session
            # the opening meets the same error, and tells it
            with contextlib.suppress(OSError):
                if session.is_at(directory) or (
                    ledger._closing and session.store.locks.are_at(directory)
                ):
                    return ledger
        return None

    def _shared_with(self, spec: StoreSpec) -> Ledger:
        if (self.kind, self.slot_bytes) != (spec.kind, spec.slot_bytes):
            raise StoreError(
                f"{self.directory} is open here for another kind of chunks ({self.kind}, "
                f"{self.slot_bytes} bytes a "
                "slot): give each tier its own path"
            )
        self._uses += 1
        return self

    def _warn_of_others(
        self, spec: StoreSpec, policy: str, cost: PrefillCost | None
    ) -> None:
        """Log which wishes of one more user in this process have no effect, since the store was
        already open.
        """
        if policy != self._policy:
            text = "%s has policy %s as long as this process has it open, not the %s asked for"
            log.warning(text, self.directory, self._policy, policy)
        elif cost != self._cost:
            text = "%s has objective %s as long as this process has it open, not the %s asked for"
            own, wanted = map(objective_of, (self._cost, cost))
            log.warning(text, self.directory, own, wanted)
        warn_of_slots(self.directory, self.slots, spec)

    # ---- storing

    def stamp(self) -> int:
        """Return a recency stamp for one request: pass the same to every window of a run."""
        self._last_stamp = max(
            self._last_stamp + allocation.STAMP_STEP,
            self.session.stamp(self._now()),
        )
        return self._last_stamp

    def reserve(
        self,
        keys: Sequence[bytes],
        *,
        stamp: int | None = None,
        deadline_seconds: float = 1.0,
        token: CallToken | None = None,
        **options: Unpack[allocation.ReserveOptions],
    ) -> list[Outcome]:
        """Reserve a slot for each key, evicting as needed; leading keys first. At most `window`
        keys get a slot in one call, and one member has at most a quarter of the slots reserved.
        Changes recency and leases of what is Present.

        Args:
            keys: of one chain, 32 bytes each.
            stamp: the recency of their request; None: a new one.
            deadline_seconds: how long it may take.
            token: that of a `SlotWriter` or of `owned`, which owns what this call reserves, also
                if it raises. Without one, the caller owns what this returns.
            options: `namespace`, the root of the keys' namespace. `start`, the chain position of
                the first one, and `parent`, the key before it. `tokens` of a chunk, and the `parts`
                in which it is written. The policy may keep newcomers out, unless `admit_all`, or
                `already_admitted` by `admit`. `context` of new chunks, see `policy.reuse_context`.
                `found`: what `match_prefix` found for the keys a moment ago.
        """
        if token is None:
            reserve = partial(
                self.reserve,
                keys,
                stamp=stamp,
                deadline_seconds=deadline_seconds,
                **options,
            )
            return self.owned(reserve)
        _require_reservable(keys, options.get("parts", 1))
        until = time.monotonic() + deadline_seconds
        request = allocation.ReserveRequest(
            keys[: self.window],
            self.stamp() if stamp is None else stamp,
            grow_until=until - deadline_seconds * (1 - _GROWTH_SHARE),
            made=token.made,
            **options,
        )
        hindrance: Reason | None = None
        self._find_room([request], until)
        for at in range(0, len(request.keys), BATCH):
            batch = range(at, min(at + BATCH, len(request.keys)))
            try:
                self._admit(request, batch, hindrance, until)
            except DeadlineMissedError:
                hindrance = Reason.LEDGER_BUSY
            if hindrance is None:
                hindrance = self._reserve_batch(request, batch, until)
            else:
                request.outcomes += [
                    Refused(request.keys[i], hindrance) for i in batch
                ]
        self.contexts.put(request)
        outcomes = request.outcomes + [
            Refused(key, Reason.FULL) for key in keys[self.window :]
        ]
        self._note_reserved(outcomes)
        return outcomes

    def reserve_runs(
        self,
        runs: Sequence[RunToReserve],
        *,
        tokens: int = 0,
        parts: int = 1,
        admit_all: bool = False,
        deadline_seconds: float = 1.0,
        token: CallToken | None = None,
    ) -> list[list[Outcome]]:
        """Reserve slots for several runs, such as those of all requests of one step of an engine;
        return the outcomes of each.

        It does what a `reserve` for each would do, with one transaction for many short runs. The
        other arguments are those of `reserve`. Thread-safe.
        """
        if token is None:
            reserve = partial(
                self.reserve_runs,
                runs,
                tokens=tokens,
                parts=parts,
                admit_all=admit_all,
                deadline_seconds=deadline_seconds,
            )
            return self.owned(reserve)
        _require_reservable([key for run in runs for key in run.keys], parts)
        until = time.monotonic() + deadline_seconds
        outcomes: list[list[Outcome]] = []
        for group in self._together(runs):
            left = max(0.0, until - time.monotonic())
            if len(group) == 1:
                [run] = group
                alone = self.reserve(
                    run.keys,
                    namespace=run.namespace,
                    start=run.start,
                    parent=run.parent,
                    tokens=tokens,
                    parts=parts,
                    stamp=run.stamp,
                    admit_all=admit_all,
                    context=run.context,
                    deadline_seconds=left,
                    token=token,
                )
                outcomes.append(alone)
                continue
            requests = [
                allocation.ReserveRequest(
                    run.keys,
                    run.stamp,
                    run.start,
                    run.parent,
                    run.namespace,
                    tokens,
                    parts,
                    admit_all,
                    context=run.context,
                    grow_until=until - left * (1 - _GROWTH_SHARE),
                )
                for run in group
            ]
            for request in requests:
                request.made = token.made
            self._reserve_group(requests, until)
            for request in requests:
                self.contexts.put(request)
                outcomes.append(request.outcomes)
            self._note_reserved(
                [one for request in requests for one in request.outcomes]
            )
        return outcomes

    def _together(
        self, runs: Sequence[RunToReserve]
    ) -> Iterator[list[RunToReserve]]:
        """Yield the runs in groups that one transaction can take; a longer one is alone."""
        most = min(BATCH, self.window)
        group: list[RunToReserve] = []
        count = 0
        for run in runs:
            if group and count + len(run.keys) > most:
                yield group
                group = []
                count = 0
            group.append(run)
            count += len(run.keys)
        if group:
            yield group

    def _reserve_group(
        self, group: Sequence[allocation.ReserveRequest], until: float
    ) -> None:
        """Add the outcomes of several requests that fit into one transaction; what it has no slots
        for gets transactions of its own.
        """
        count = sum(len(request.keys) for request in group)
        # recency is below that of each, so no key of them is a victim
        newest = min(request.stamp for request in group) - allocation.STAMP_STEP
        try:
            self._find_room(group, until)
            taken = 0
            for request in group:
                batch = range(len(request.keys))
                taken += self._admit(request, batch, None, until, taken)
            victims: list[tuple[int, int]] = []
            if self._room < count:
                more = min(count + 2 * self._gone, allocation.MOST_VICTIMS)
                victims = self._victims(more, newest + 1, until)
            reserve = partial(
                allocation.reserve,
                batches=[
                    (request, range(len(request.keys))) for request in group
                ],
                victims=victims,
            )
            results = self.session.write(reserve, until - time.monotonic())
        except (UnavailableError, DeadlineMissedError) as error:
            for request in group:
                request.outcomes += _refused(request.keys, error)
            return
        last = results[-1]
        self._note_room(last.totals)
        self._note_gone(len(last.gone))
        self._pass_over(last.passed_over, group[-1].stamp, until)
        for request, made in zip(group, results, strict=True):
            self._keep_present(made.outcomes, request.start, request.stamp, until)
        is_full = False
        for request, made in zip(group, results, strict=True):
            request.outcomes += made.outcomes[: made.served]
            left = range(made.served, len(request.keys))
            if not left:
                continue
            if is_full:
                request.outcomes += made.outcomes[made.served :]
            else:
                hindrance = self._reserve_batch(request, left, until)
                is_full = hindrance is Reason.FULL

    def _note_reserved(self, outcomes: Sequence[Outcome]) -> None:
        """Count what was refused, and let threads prepare for the next reserve."""
        for outcome in outcomes:
            if isinstance(outcome, Refused):
                self.count({f"drop_{outcome.reason}": 1})
        if self._room < self._ahead or (
            self.space.exceeds and self._room < self.window
        ):
            self.growth_thread.wake()
        # nothing must be evicted soon while an eighth is free
        low = self._room * 8 < self.columns.capacity and self.evictor.is_low
        self.upkeep_thread.wake(low)

    def _find_room(
        self, group: Sequence[allocation.ReserveRequest], until: float
    ) -> None:
        """Find which keys are present if there may be too few free slots for all, and let the store
        grow.
        """
        if self._room < sum(len(request.keys) for request in group):
            self._find_present(group, until)
            wanted = sum(
                len(request.keys) - len(request.present) for request in group
            )
            self._let_grow(wanted, group[0].grow_until)

    def _let_grow(self, wanted: int, until: float) -> None:
        """Wait until then for that many free slots while the store grows."""
        with contextlib.suppress(UnavailableError):
            while (
                self._room < wanted
                and self._ahead
                and time.monotonic() < until
                and self.growth_thread.wait_for_step(wanted, until)
            ):
                self._note_totals(self._totals(until - time.monotonic()))

    def _totals(self, seconds: float) -> Meta:
        return self.session.read(
            lambda txn, tables: tables.load_meta(txn), seconds
        )

    def _note_totals(self, totals: Meta) -> None:
        """Note what a read transaction found."""
        self.columns.note_pages(totals.backed, totals.with_pages())
        self._note_room(totals)

    def _note_room(self, totals: Meta) -> None:
        """Note what a transaction left; one that wrote has noted the pages in the columns."""
        self._room = totals.free()
        self._ahead = self.space.ahead(totals)
        # another process let the store grow: this one maps the new pages
        self.backed = totals.backed
        if self.space.lags(totals.backed):
            self.growth_thread.wake()

    def look_for_pages(self) -> int:
        """Return up to which slot the store has grown, as far as this process knows; it looks at
        most once a second.
        """
        now = time.monotonic()
        if now > self._looks_again:
            self._looks_again = now + _LOOK_SECONDS
            with contextlib.suppress(UnavailableError, ClosedError):
                self._note_totals(self._totals(_VALID_SECONDS))
        return self.backed

    def _find_present(
        self, group: Sequence[allocation.ReserveRequest], until: float
    ) -> None:
        """Find which keys are present and how many slots are free.

        A present chunk is never evicted for another key of the same call.
        """
        if group[0].found is None:
            keys = [key for request in group for key in request.keys]
            with contextlib.suppress(UnavailableError):
                rows, totals = self.session.read(
                    partial(queries.find_entries, keys=keys),
                    until - time.monotonic(),
                )
                self._note_totals(totals)
                begin = 0
                for request in group:
                    request.found = rows[begin : begin + len(request.keys)]
                    begin += len(request.keys)
        for request in group:
            found = request.found or ()
            request.present.update(
                i for i, item in enumerate(found) if item is not None
            )
            self._keep_present(found, request.start, request.stamp, until)

    def _admit(
        self,
        request: allocation.ReserveRequest,
        batch: range,
        hindrance: Reason | None,
        until: float,
        taken: int = 0,
    ) -> int:
        """Ask the policy which newcomers of a batch are admitted: none after one that is not.
        Return how many there are.

        `taken`: free slots that others of the same transaction will take. DeadlineMissedError if
        other threads do not leave the policy in time.
        """
        new = [i for i in batch if i not in request.present]
        if not new:
            return 0
        marks = marks_of([request.keys[i] for i in new])
        stamps = request.stamp - request.start - np.array(new)
        if hindrance is Reason.NOT_ADMITTED:
            context = self.contexts.context_of(request)
            self.evictor.refuse(
                marks, stamps, self._now(), context, request.stamp
            )
        elif hindrance is None:
            leading, hits = self.evictor.admit(
                marks,
                stamps,
                max(0, self._room - taken),
                self._now(),
                admit_all=request.admit_all,
                already_admitted=request.already_admitted,
                arriving=self.contexts.context_of(request),
                stamp=request.stamp,
                until=until,
            )
            request.hits.update(zip(new, hits.tolist(), strict=True))
            if leading < len(new):
                request.end = new[leading]
        return len(new)

    def admit(
        self,
        keys: Sequence[bytes],
        *,
        start: int,
        stamp: int,
        deadline_seconds: float = 1.0,
    ) -> int:
        """Ask the policy how many of these keys, from the first on, are admitted or present. Takes
        at most 64 keys.

        Changes ghosts, and recency and leases of what is present. Pass the admitted keys to
        `reserve` as `already_admitted`.
        """
        request = allocation.ReserveRequest(keys[:BATCH], stamp, start)
        until = time.monotonic() + deadline_seconds
        request.grow_until = until - deadline_seconds * (1 - _GROWTH_SHARE)
        # as in `reserve`: with room for all, all are admitted
        self._find_room([request], until)
        # not in time: `reserve` asks again
        with contextlib.suppress(DeadlineMissedError):
            self._admit(request, range(len(request.keys)), None, until)
        return min(request.end, len(request.keys))

    def refuse(
        self,
        keys: Sequence[bytes],
        *,
        start: int,
        stamp: int,
        context: int = 0,
    ) -> None:
        """Record requests for keys after a key that was not admitted. Changes ghosts only."""
        if keys:
            stamps = stamp - start - np.arange(len(keys))
            self.evictor.refuse(
                marks_of(keys), stamps, self._now(), context, stamp
            )

    def _reserve_batch(
        self, request: allocation.ReserveRequest, batch: range, until: float
    ) -> Reason | None:
        """Reserve with as few victims as needed; search for more outside the gate as long as some
        are found.

        Adds to the outcomes; returns the reason that prevents all further keys, if there is one.
        """
        passed_over = 0
        compared = False
        left: list[Outcome] = []
        for _ in range(allocation.ATTEMPTS):
            if self._room < len(batch) and self._ahead:
                new = set(batch) - request.present
                few = sum(i < request.end for i in new)
                self._let_grow(few, request.grow_until)
            looked = self._room < len(batch)
            # Ask for more than are wanted: some may be pinned or held.
            wanted = max(0, min(request.end, batch.stop) - batch.start)
            count = min(
                wanted + 4 * passed_over + 2 * self._gone,
                allocation.MOST_VICTIMS,
            )
            # recency is below this request's, so no key of the request is a victim
            newest = request.stamp - allocation.STAMP_STEP + 1
            try:
                victims = self._victims(count, newest, until) if looked else []
                reserve = partial(
                    allocation.reserve,
                    batches=[(request, batch)],
                    victims=victims,
                )
                [made] = self.session.write(reserve, until - time.monotonic())
            except (UnavailableError, DeadlineMissedError) as error:
                refused = _refused([request.keys[i] for i in batch], error)
                request.outcomes += refused
                return refused[0].reason
            self._note_room(made.totals)
            if looked:
                self._note_gone(len(made.gone))
            # before the next victims are chosen, so that present chunks are not among them
            self._keep_present(
                made.outcomes, request.start + batch.start, request.stamp, until
            )
            self._pass_over(made.passed_over, request.stamp, until)
            passed_over += len(made.passed_over)
            request.outcomes += made.outcomes[: made.served]
            if made.served == len(batch):
                return None if batch.stop <= request.end else Reason.NOT_ADMITTED
            batch = range(batch.start + made.served, batch.stop)
            left = made.outcomes[made.served :]
            if looked and not made.served and not compared:
                # columns of a store on disk may lack what others stored: then they name no victim,
                # or chunks that left
                compared = True
                with contextlib.suppress(UnavailableError):
                    if self.session.compare_hints(until - time.monotonic()):
                        continue
            if looked and not victims:
                break
        request.outcomes += left
        return Reason.FULL

    def _note_gone(self, count: int) -> None:
        """Note how many victims other processes took between their choice and the gate, so that the
        next calls choose more: processes that store at the same time choose the same ones.
        """
        self._gone = max(count, self._gone // 2)

    def _pass_over(self, slots: Sequence[int], stamp: int, until: float) -> None:
        """Raise the recency of chunks that are pinned or held, so that they are not offered in
        every attempt.
        """
        if slots:
            stamps = np.full(len(slots), max(self.stamp(), stamp))
            rows = np.array(slots, np.int64)
            self.evictor.touch(rows, stamps, asked=False, until=until)

    def _victims(
        self, count: int, stamp: int, until: float
    ) -> list[tuple[int, int]]:
        slots = self.evictor.victims(count, stamp, self._now(), until)
        return _pairs(slots, self.columns.generation[slots])

    def _keep_present(
        self,
        outcomes: Sequence[Outcome | None],
        start: int,
        stamp: int,
        until: float,
    ) -> None:
        kept = [
            (o.slot, o.generation, stamp - start - i)
            for i, o in enumerate(outcomes)
            if isinstance(o, Present)
        ]
        if kept:
            slots, generations, stamps = (
                np.array(column) for column in zip(*kept, strict=True)
            )
            self._touch(
                slots.astype(np.int64),
                generations.astype(np.uint64),
                stamps,
                asked=False,
                until=until,
            )
            self.lease(slots, generations, allocation.PRESENT_LEASE_SECONDS)

    def commit(
        self,
        reserved: Sequence[Reserved],
        part: int = 0,
        deadline_seconds: float = 1.0,
        token: CallToken | None = None,
    ) -> list[CommitResult]:
        """Record that the bytes of one part are stored; a chunk is visible when all its parts are.

        LOST: the part is not stored (superseded, cleared, reclaimed), or not yet: a commit that
        missed its deadline is done by this process's next transaction. After an exception (of a
        signal handler) nothing is reserved; a ValueError, for a wrong part, changes nothing.
        `token`: that of a `SlotWriter`, if it owns them.
        """
        if token is None:
            return self.owned(
                partial(self._commit_own, reserved, part, deadline_seconds)
            )
        until = time.monotonic() + deadline_seconds
        done: list[CommitResult] = []
        for batch in batches(reserved):
            commit = partial(allocation.commit, reserved=batch, part=part)
            try:
                done += self.session.write(commit, until - time.monotonic())
            except UnavailableError as error:
                self.count({f"drop_{error.reason}": len(batch)})
                self.session.defer(commit)
                done += [CommitResult.LOST] * len(batch)
        return done

    def _commit_own(
        self,
        reserved: Sequence[Reserved],
        part: int,
        deadline_seconds: float,
        token: CallToken,
    ) -> list[CommitResult]:
        """Commit what only the caller owns until now."""
        token.made.append((None, reserved))
        try:
            return self.commit(reserved, part, deadline_seconds, token)
        except ValueError:
            token.made.clear()
            raise

    def abort(
        self, outcomes: Sequence[Outcome], deadline_seconds: float = 1.0
    ) -> None:
        """Give up this member's parts of what was reserved, and free the slots that no other member
        writes into.

        Call it only when this member no longer writes into them. An outcome that is not a
        reservation of this member, or is already committed, is left alone; so this call is safe
        after any exception.
        """
        until = time.monotonic() + deadline_seconds
        for batch in batches(
            [one for one in outcomes if isinstance(one, Reserved)]
        ):
            self._now_or_later(
                partial(allocation.abort, reserved=batch),
                until - time.monotonic(),
            )

    def adopt(
        self,
        reserved: Sequence[Reserved],
        part: int,
        deadline_seconds: float = 1.0,
    ) -> list[bool]:
        """Make this member the writer of that part of chunks that another member may have
        reserved.
        """
        until = time.monotonic() + deadline_seconds

        def adopt_all(token: CallToken) -> list[bool]:
            done: list[bool] = []
            for batch in batches(reserved):
                adopt = partial(
                    allocation.adopt, reserved=batch, part=part, made=token.made
                )
                try:
                    done += self.session.write(adopt, until - time.monotonic())
                except UnavailableError:
                    done += [False] * len(batch)
            return done

        return self.owned(adopt_all)

    def _now_or_later(
        self, work: Callable[[Transaction], None], deadline_seconds: float
    ) -> None:
        """Run work now or with the next transaction, also if a signal handler raises. No caller
        needs its result.
        """
        self.session.defer(work)
        with contextlib.suppress(UnavailableError):
            self.session.write(lambda _: None, deadline_seconds)

    def owned(self, work: OwningCall[T], token: CallToken | None = None) -> T:
        """Run a call that puts on a token what its caller is to own. If it is interrupted, the
        caller never learns of that: it is given up.

        `token`: that of the caller, which owns it if the call succeeds. Without one, the caller
        must be written in Python: no signal handler can run between the end of this and its next
        line.
        """
        own = CallToken()
        orphan = self.session.orphans.add
        try:
            result = work(token=own)
            if token is not None:
                token.take(own)
            return result
        except BaseException:
            orphan(own)
            self.session.drop_orphans()
            raise

    # ---- reading

    def match_prefix(
        self,
        keys: Sequence[bytes],
        *,
        start: int | None = 0,
        namespace: bytes | None = None,
        stamp: int | None = None,
        lease_seconds: float = 0.0,
        touch: bool = True,
        asked: bool = True,
        ahead: int = 0,
        deadline_seconds: float = 1.0,
    ) -> Match:
        """Return the leading run of keys that may be read. Changes leases, and recency unless the
        caller refuses that.

        `keys` are at chain positions from `start` on (None: unknown). With a `namespace` (its
        root), a chunk of another namespace or at another position counts as a miss and stays in the
        store.

        `asked`: the caller wants to read them, which counts as a hit; False if it is about to store
        what follows them. `ahead`: how many of the following keys it will reserve next; they are
        looked up too if some must be evicted for them.

        The generations are those of the entries: compare them with `still_valid` after the copy.
        """
        slots, generations, reason, following = self.find_prefix(
            keys,
            start=start,
            namespace=namespace,
            stamp=stamp,
            lease_seconds=lease_seconds,
            touch=touch,
            asked=asked,
            ahead=ahead,
            deadline_seconds=deadline_seconds,
        )
        return Match(
            np.asarray(slots, np.int64),
            np.asarray(generations, np.uint64),
            reason,
            following,
        )

    def find_prefix(
        self,
        keys: Sequence[bytes],
        *,
        start: int | None = 0,
        namespace: bytes | None = None,
        stamp: int | None = None,
        lease_seconds: float = 0.0,
        touch: bool = True,
        asked: bool = True,
        ahead: int = 0,
        deadline_seconds: float = 1.0,
    ) -> tuple[
        Sequence[int] | NDArray[np.int64],
        Sequence[int] | NDArray[np.uint64],
        Reason | None,
        Sequence[Present | None] | None,
    ]:
        """Do what `match_prefix` does; return the parts of its answer, of few chunks as lists."""
        until = time.monotonic() + deadline_seconds
        columns = self.columns
        on_disk = self.on_disk
        following: Sequence[Present | None] | None = None
        totals: Meta | None = None

        def find(txn: Txn, tables: Tables) -> tuple[queries.Found, int]:
            nonlocal following, totals
            # what is served from a disk is never decided by columns, which are only hints there
            found = queries.match_prefix(
                txn, tables, columns, not on_disk, keys, namespace, start
            )
            at = len(found[0])
            if ahead and self._room < len(keys) - at:
                following, totals = queries.find_entries(
                    txn, tables, keys[at : at + ahead]
                )
            return found, txn.id() if on_disk else 0

        try:
            found, transaction = self.session.read(find, deadline_seconds)
        except UnavailableError as error:
            self.count({f"miss_{error.reason}": 1})
            return [], [], error.reason, None
        slots, generations, intact, reason = found
        if on_disk:
            self._note_matched(
                transaction,
                np.asarray(slots, np.int64),
                np.asarray(generations, np.uint64),
            )
        if totals is not None:
            self._note_totals(totals)
        if intact < len(slots):
            damaged = keys[intact], int(slots[intact]), int(generations[intact])
            self.remove_exact(
                *damaged, Reason.FAILED_CHECK, until - time.monotonic()
            )
            slots = slots[:intact]
            generations = generations[:intact]
            following = None
        elif reason is None and len(slots) < len(keys):
            reason = self.explain_miss(keys[len(slots)]).reason
        if len(slots) and (touch or lease_seconds):
            newest = 0
            if touch:
                newest = self.stamp() if stamp is None else stamp
                newest -= start or 0
            self._use(
                slots, generations, newest, touch, asked, lease_seconds, until
            )
        if on_disk:
            self.upkeep_thread.read()
        return slots, generations, reason, following

    def _use(
        self,
        slots: Sequence[int] | NDArray[np.int64],
        generations: Sequence[int] | NDArray[np.uint64],
        newest: int,
        touch: bool,
        asked: bool,
        lease_seconds: float,
        until: float,
    ) -> None:
        """Raise the recency of a run of chunks, the first of which gets the stamp `newest`, and
        lease them, as `match_prefix` says.
        """
        if isinstance(slots, np.ndarray) or len(slots) > FEW_USED:
            slots = np.asarray(slots, np.int64)
            generations = np.asarray(generations, np.uint64)
            if touch:
                falling = newest - np.arange(len(slots))
                self._touch(
                    slots, generations, falling, asked, until, linked=True
                )
            if lease_seconds:
                self.lease(slots, generations, lease_seconds)
            return
        cells = self.columns.cells
        try:
            published = cells[0]
            count = len(slots)
            stamps: Sequence[int] = range(newest, newest - count, -1)
            here = slots
            linked = touch and count > 1
            if list(map(published.__getitem__, slots)) != generations:
                standing = [
                    at
                    for at, slot in enumerate(slots)
                    if published[slot] == generations[at]
                ]
                here = [slots[at] for at in standing]
                stamps = [newest - at for at in standing]
                linked = False
            if touch:
                self.evictor.touch_few(here, stamps, asked, until)
            if linked:
                parents = cells[PARENT_CELLS]
                parent_generations = cells[PARENT_CELLS + 1]
                before = slots[0]
                for at in range(1, count):
                    slot = slots[at]
                    parents[slot] = before
                    parent_generations[slot] = generations[at - 1]
                    before = slot
            if lease_seconds:
                nanoseconds = int(min(lease_seconds * 1e9, LONGEST_LEASE_NS))
                self.columns.lease_few(here, self._now(), nanoseconds)
        except ValueError:
            # in a child that a signal handler forked in this call, which is its parent's, they are
            # released: see `Columns.new_cells`
            if cells is self.columns.cells:
                raise

    def which(
        self, keys: Sequence[bytes], deadline_seconds: float = 1.0
    ) -> list[bool]:
        """Return for each key whether it has an entry, also behind keys that have none; all False
        if that is not known in time. Changes nothing.

        `match_prefix` says whether a chunk may be read: this names the keys worth asking it about.
        """
        try:
            found, _ = self.session.read(
                partial(queries.find_entries, keys=keys), deadline_seconds
            )
        except UnavailableError as error:
            self.count({f"miss_{error.reason}": 1})
            return [False] * len(keys)
        return [item is not None for item in found]

    def touch(
        self,
        keys: Sequence[bytes],
        *,
        start: int = 0,
        stamp: int | None = None,
        asked: bool = True,
        deadline_seconds: float = 1.0,
    ) -> list[bool] | None:
        """Raise the recency of the keys that are present, also after holes. Return which are; None:
        not done in time.

        `asked`: a request asked for them and got them from another tier.
        """
        until = time.monotonic() + deadline_seconds
        try:
            found, _ = self.session.read(
                partial(queries.find_entries, keys=keys), deadline_seconds
            )
        except UnavailableError:
            return None
        here = [(i, item) for i, item in enumerate(found) if item is not None]
        if here:
            slots = np.fromiter(
                (item.slot for _, item in here), np.int64, len(here)
            )
            generations = np.fromiter(
                (item.generation for _, item in here), np.uint64, len(here)
            )
            positions = start + np.fromiter(
                (i for i, _ in here), np.int64, len(here)
            )
            stamps = (self.stamp() if stamp is None else stamp) - positions
            whole = here[-1][0] - here[0][0] == len(here) - 1
            self._touch(slots, generations, stamps, asked, until, linked=whole)
        return [item is not None for item in found]

    def _touch(
        self,
        slots: NDArray[np.int64],
        generations: NDArray[np.uint64],
        stamps: NDArray[np.int64],
        asked: bool,
        until: float,
        linked: bool = False,
    ) -> None:
        """Raise the recency of chunks that are still valid; `linked`: each is the parent of the
        next.
        """
        columns = self.columns
        standing = columns.generation[slots] == generations
        rows = slots[standing]
        self.evictor.touch(rows, stamps[standing], asked, until)
        if linked and len(slots) > 1:
            child = standing[1:]
            columns.parent_slot[slots[1:][child]] = slots[:-1][child]
            columns.parent_generation[slots[1:][child]] = generations[:-1][child]

    def explain_miss(self, key: bytes) -> Miss:
        """Return why a key has no entry, as far as it is remembered."""
        ghost = self.columns.table.find(key)
        if ghost is None:
            return Miss(Reason.ABSENT, None)
        went, reason = ghost
        age = (self.session.stamp(self._now()) - went) / 1e9
        return Miss(GHOST_REASONS[reason % len(GHOST_REASONS)], max(0.0, age))

    def still_valid(
        self, slots: NDArray[np.int64], generations: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        """Return for each slot whether the bytes copied out of it are those of the matched chunk.

        In host memory it takes no lock. For a store on disk it reads the tables; False if they do
        not answer in time.
        """
        if self.on_disk:
            current = partial(
                queries.are_current,
                slots=slots.tolist(),
                generations=generations.tolist(),
            )
            try:
                return np.array(
                    self.session.read(current, _VALID_SECONDS), np.bool_
                )
            except (UnavailableError, ClosedError):
                return np.zeros(len(slots), np.bool_)
        barrier()
        return np.asarray(self.columns.generation[slots] == generations)

    def _note_matched(
        self,
        transaction: int,
        slots: NDArray[np.int64],
        generations: NDArray[np.uint64],
    ) -> None:
        """Note for `is_valid` that these chunks were there after that transaction."""
        matched = self._matched
        if matched.transaction != transaction or matched.is_full:
            matched = MatchedChunks(transaction)
            self._matched = matched
        matched.add(slots, generations)

    def is_valid(self, slot: int, generation: int) -> bool:
        """Return for one slot what `still_valid` returns for many."""
        return (
            self.are_valid([(slot, generation)])[0]
            if self.on_disk
            else self.is_published(slot, generation)
        )

    def are_valid(self, places: Sequence[tuple[int, int]]) -> list[bool]:
        """Return for a few slots, with their generations, what `still_valid` returns for arrays.

        For a store on disk it reads the tables only if there was a transaction since the chunks
        were found.
        """
        if not self.on_disk:
            return self.are_published(places)
        matched = self._matched
        # no transaction since the chunks were found: nothing has changed
        if (
            all(matched.holds(*place) for place in places)
            and self.session.last_transaction() == matched.transaction
        ):
            return [True] * len(places)
        slots, generations = zip(*places, strict=True)
        current = partial(
            queries.are_current, slots=slots, generations=generations
        )
        try:
            return self.session.read(current, _VALID_SECONDS)
        except (UnavailableError, ClosedError):
            return [False] * len(places)

    def is_published(self, slot: int, generation: int) -> bool:
        """Return for one slot what `are_published` returns for several."""
        return self.are_published([(slot, generation)])[0]

    def are_published(self, places: Sequence[tuple[int, int]]) -> list[bool]:
        """Return for each slot whether it is published with that generation; for a store on disk a
        hint. Takes no lock.
        """
        barrier()
        published = self.columns.cells[0]
        return [published[slot] == generation for slot, generation in places]

    def is_ready(
        self, slots: NDArray[np.int64], generations: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        """Return for each slot whether its chunk is committed and still there; a hint, for reports.
        Takes no lock.
        """
        barrier()
        columns = self.columns
        there = (columns.generation[slots] == generations) & (
            columns.last_use[slots] != NOT_READY
        )
        return np.asarray(there & (not self.session.lost))

    def last_clear(self) -> int:
        """Return a number that changes when chunks are cleared, of whatever namespace, by any
        process. Takes no lock.

        It is for chunks that wait without a slot: nothing in the tables says that they were
        cleared. Versions that do not mark their clears cannot have a store of this format open.
        """
        return self.session.store.locks.marked()

    def last_change(self) -> int | None:
        """Return the published number of the last change; None if it is not known now. Never waits.

        As long as the number is the same, each slot keeps the chunk that it has now, and a slot
        that is not ready stays so.
        """
        with contextlib.suppress(StoreError, ClosedError):
            return self.session.read(
                lambda txn, _: txn.id(), deadline_seconds=0.0
            )
        return None

    def lease(
        self,
        slots: NDArray[np.int64],
        generations: NDArray[np.uint64],
        seconds: float,
    ) -> None:
        """Keep the policy from evicting these slots for a while: at most 60 s, at most half of the
        slots.
        """
        rows = np.asarray(slots)[
            self.columns.generation[slots] == np.asarray(generations)
        ]
        self.columns.lease(
            rows, self._now(), int(min(seconds * 1e9, LONGEST_LEASE_NS))
        )

    def hold(
        self,
        slots: NDArray[np.int64],
        generations: NDArray[np.uint64],
        deadline_seconds: float = 1.0,
    ) -> list[bool]:
        """Keep chunks from eviction until `release` or the death of this process; False where they
        are gone.

        A chunk that is removed or cleared meanwhile is neither found nor valid, but no byte of its
        slot changes before.
        """
        chunks = _pairs(slots, generations)

        def hold(token: CallToken) -> list[bool]:
            step = partial(hold_pin_remove.hold, chunks=chunks, held=token.held)
            try:
                return self.session.write(step, deadline_seconds)
            except UnavailableError:
                return [False] * len(slots)

        return self.owned(hold)

    def release(
        self, slots: NDArray[np.int64], generations: NDArray[np.uint64]
    ) -> None:
        """End one hold of this member on each of these chunks."""
        self._now_or_later(
            partial(hold_pin_remove.release, chunks=_pairs(slots, generations)),
            1.0,
        )

    def next_victims(self, count: int) -> NDArray[np.int64]:
        """Return the slots that would be evicted first if `count` were needed now. Changes
        nothing.

        Not for the path of a request: for many slots it ranks all, which takes time in proportion
        to their number. None if other threads do not leave the policy in time.
        """
        stamp = self.stamp()
        if count > allocation.MOST_VICTIMS:
            self.evictor.rank(count, stamp, self._now())
        try:
            return self.evictor.victims(count, stamp, self._now())
        except DeadlineMissedError:
            return np.empty(0, np.int64)

    def give_pages(self, nbytes: int, idle: bool) -> int:
        """Free that many bytes of the slab, for the other stores of the root; return how many were
        freed. See `SlabPages.give`.
        """
        shared = self._uses > 1
        return self.pages.give(nbytes, idle, shared, self.next_victims)

    # ---- removal of a damaged chunk

    def remove_exact(
        self,
        key: bytes,
        slot: int,
        generation: int,
        reason: Reason,
        deadline_seconds: float = 1.0,
    ) -> bool:
        """Remove a chunk that failed a check or cannot be read, if the entry still names that slot
        and generation; counted.
        """
        if reason is Reason.FAILED_CHECK:
            self.count({"failed_checks": 1})
        drop = partial(
            hold_pin_remove.drop,
            key=key,
            slot=slot,
            generation=generation,
            # what is remembered of it: IO_ERROR would say that the tables did not answer
            reason=reason if reason in GHOST_REASONS else Reason.FAILED_CHECK,
        )
        try:
            return self.session.write(drop, deadline_seconds, frees=True)
        except UnavailableError:
            self.session.defer(drop)
            return False

    # ---- the slab, the end

    def open_slab(self, opener: Callable[[Path], S]) -> S:
        """Open this store's slab with `opener(path)`. StoreError if the directory has another store
        by now.
        """
        with os_errors_mapped(self.directory):
            slab = opener(self.slab_path)
            with contextlib.ExitStack() as undo:
                undo.callback(slab.close)
                self.session.require_store()
                undo.pop_all()
        return slab

    def register_device(self) -> list[range]:
        """Record that this process registers the slab with a GPU, whose copies may outlive the
        process.

        Returns the slots that have pages: as long as this process lives, no store takes them away.
        """
        self.session.write(mark_device)
        return self.pages.backed_ranges()

    def close(self) -> None:
        """Leave the store: give up reservations and holds; the last process to leave a store on
        disk marks it clean.
        """
        changed = _openings.changed
        with changed:
            self._uses -= 1
            if self._uses or self._closing:
                return
            # a thread that opens the store again waits until it is closed
            self._closing = True
            self._thread_of = here()
        try:
            self.namespaces.save_labels(every_seconds=0.0)
            self.upkeep_thread.close()
            self.growth_thread.close()
            self.session.close()
        finally:
            with changed:
                _ledgers.remove(self)
                changed.notify_all()


def _close_those_of_lost_threads() -> None:
    """Close, in a forked child, what a thread of its parent was closing or had borrowed: the child
    does not have this thread.
    """
    for ledger in [*_ledgers]:
        ends = ledger._closing or ledger._borrowed
        if ends and ledger._thread_of != here():
            _ledgers.remove(ledger)
            ledger.session.close()


def _with_space(step: Callable[[float], T], until: float) -> T:
    """Call `step` with the seconds left; if space is short, again after dropped stores are
    closed.
    """
    try:
        return step(_left(until))
    except NoRoomError:
        # a store that was dropped without `close` may still hold space
        close_dropped(_left(until))
        return step(_left(until))


def _pairs(
    slots: NDArray[np.int64], generations: NDArray[np.uint64]
) -> list[tuple[int, int]]:
    """Return slots with their generations."""
    return list(
        zip(
            np.asarray(slots).tolist(),
            np.asarray(generations).tolist(),
            strict=True,
        )
    )


def discard_empty(
    directory: Path, clock: Clock, deadline_seconds: float = 2.0
) -> bool:
    """Remove a store that no process has open and that holds no chunk; return whether it was
    removed. Never raises for a failure at run time: the store stays then.

    Both are found out under the lock of the root, so that no process stores anything in between.
    """
    with (
        contextlib.suppress(StoreError, ClosedError, OSError),
        root_locked(directory.parent, deadline_seconds),
    ):
        if not directory.is_dir() or in_use(directory):
            return False
        store = Ledger.attach(directory, clock, deadline_seconds, borrowed=True)
        with contextlib.closing(store):
            totals = store._totals(deadline_seconds)
        if totals.ready or totals.unscanned():
            return False
        discard(directory)
        return True
    return False


def make_room(
    root: Path, nbytes: int, clock: Clock, deadline_seconds: float = 10.0
) -> int:
    """Let the stores under a root that no process has open give up their coldest chunks; return the
    bytes freed.

    For a new store whose tables find no space: stores share the space of slabs, but not that of
    tables. Frees nothing if there is enough space. Never raises for a store that cannot give any.
    """
    freed = 0
    try:
        with root_locked(root, deadline_seconds):
            for holding in holdings(root):
                missing = nbytes - free_bytes(root, in_memory=True)
                if (
                    missing <= 0
                    or holding.in_use
                    or holding.state is None
                    or not holding.nbytes
                ):
                    continue
                with contextlib.suppress(StoreError, ClosedError, OSError):
                    wanted = min(missing, holding.nbytes)
                    freed += _pages_of(holding, wanted, clock, deadline_seconds)
    except (StoreError, OSError) as error:
        log.debug("no room is made under %s: %s", root, error)
    return freed


def _pages_of(
    holding: Holding,
    nbytes: int,
    clock: Clock,
    deadline_seconds: float = _GIVE_SECONDS,
) -> int:
    """Let a store of the root free that many bytes; return how many it freed. Under the lock of the
    root.

    If no process has it open, it is opened for that. StoreError or ClosedError if it cannot be.
    """
    giver = Ledger.attach(
        holding.directory, clock, deadline_seconds, borrowed=True
    )
    with contextlib.closing(giver):
        return giver.give_pages(nbytes, idle=not holding.in_use)


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _require_reservable(keys: Sequence[bytes], parts: int) -> None:
    """Raise ValueError for keys or parts of which no slot can be reserved."""
    if parts < 1:
        raise ValueError(f"a chunk has at least one part, not {parts}")
    if set(map(len, keys)) - {KEY_BYTES}:
        raise ValueError(f"a key has {KEY_BYTES} bytes")


def _refused(
    keys: Sequence[bytes], error: UnavailableError | DeadlineMissedError
) -> list[Refused]:
    """Return the outcomes of keys for which the ledger did not answer."""
    reason = (
        error.reason
        if isinstance(error, UnavailableError)
        else Reason.LEDGER_BUSY
    )
    return [Refused(key, reason) for key in keys]
