"""The ledger: which chunk lies in which slot of a slab, for any number of processes, with no daemon.

    reserve -> copy bytes into the slots, no lock held -> commit | abort
    match   -> copy bytes out of the slots, no lock held -> still_valid

Bytes read are the chunk's if and only if the slot's published generation still is, after the copy, the one that the
*entry* had; so no read lock and no reference count can leak, whatever dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pagoda.clock import Clock
from pagoda.dropped import settle
from pagoda.errors import NoRoomError, StoreError
from pagoda.ledger import filling, keeping, reading
from pagoda.ledger.advice import Advice
from pagoda.ledger.columns import NOT_READY
from pagoda.ledger.ghosts import marks_of
from pagoda.ledger.locks import SCAN, barrier
from pagoda.ledger.members import mark_device
from pagoda.ledger.namespaces import Namespaces
from pagoda.ledger.outcome import Found, Landed, Match, Outcome, Present, Refused, Reserved
from pagoda.ledger.rebuild import absorb
from pagoda.ledger.session import Session, UnavailableError
from pagoda.ledger.sharing import Share
from pagoda.ledger.sight import BATCH, batches, pairs
from pagoda.ledger.spaces import Spaces
from pagoda.ledger.state import LOCKS, read_state
from pagoda.ledger.store import StoreSpec, discard_idle, open_store, trouble_told
from pagoda.ledger.upkeep import Upkeep, map_learnt
from pagoda.ledger.writing import Writing, window
from pagoda.metrics import Reason
from pagoda.threads import Condition

_LONGEST_LEASE_SECONDS = 60.0
_PRESENT_LEASE_SECONDS = 1.0
_STAMP_STEP = 1 << 16  # between two stamps of one process: room for the positions of a run
_ATTEMPTS = 12  # each looks at up to five times as many victims as all before
_MOST_VICTIMS = 2048  # looked at in one transaction: some ms
_KEY_BYTES = 32
T = TypeVar("T")
_ROOM = (Reason.FULL, Reason.REBUILDING)

_ledgers: list[Ledger] = []  # open, or being closed
_opening: dict[object, str] = {}  # directories of stores, by who opens them
_changed = Condition()  # of the two; never held while a store is opened or closed


class Ledger(Spaces):
    """One store's ledger in this process. Thread-safe and fork-safe; `open` hands out one shared object a store.

    Calls with `deadline_seconds` never take longer, never raise for trouble at run time, and count what they refuse:
    `drop_<reason>` for each Refused, `miss_ledger_busy` for each read and `drop_ledger_busy` for each write that could
    not be had in time. Misses of `match` are the caller's to count.
    """

    def __init__(self, session: Session, policy: str) -> None:
        super().__init__(session)
        self._uses = 1
        self._closing = self._borrowed = False
        self._advice = Advice(policy, session.columns)
        self.share = Share(self, Ledger.attach, Ledger.borrow)
        learnt = map_learnt(session.store.directory, self._advice)
        self._upkeep = Upkeep(session, self._advice, learnt, self.share)
        self._last_stamp = 0
        self._room = self._unbacked = 0
        self.window = window(self.slots)

    @classmethod
    def open(
        cls, spec: StoreSpec, policy: str = "lru", clock: Clock | None = None, deadline_seconds: float = 60.0
    ) -> Ledger:
        """Open or make the store. StoreError or NoRoomError with the remedy; ValueError for an unknown policy."""
        return cls._shared(spec, policy, clock or Clock(), deadline_seconds, create=True)

    @classmethod
    def attach(cls, directory: Path, clock: Clock | None = None, deadline_seconds: float = 10.0) -> Ledger:
        """Open an existing store as it is. StoreError if there is none."""
        return cls._shared(_as_it_is(directory), "lru", clock or Clock(), deadline_seconds, create=False)

    @classmethod
    def borrow(cls, directory: Path, clock: Clock, deadline_seconds: float) -> Ledger:
        """Open an existing store to take room from it: by who has the lock of its root, and closes it soon.

        Who wants to open it meanwhile waits. StoreError.
        """
        return cls._shared(_as_it_is(directory), "lru", clock, deadline_seconds, create=False, borrowed=True)

    @classmethod
    def _shared(
        cls, spec: StoreSpec, policy: str, clock: Clock, deadline_seconds: float, create: bool,
        borrowed: bool = False,
    ) -> Ledger:  # fmt: skip
        until = time.monotonic() + deadline_seconds
        if spec.private and create:
            spec = dataclasses.replace(spec, name=f"{spec.name}.private-{os.getpid()}-{secrets.token_hex(4)}")
        this, me = os.path.realpath(spec.root / spec.name), object()
        try:
            with _changed:
                while (known := cls._here(spec)) is not None or this in _opening.values():
                    if known is not None and not known._closing and not known._borrowed:
                        return known._shared_with(spec)
                    if not _changed.wait(_left(until)):
                        raise StoreError(
                            f"another thread has been opening or closing {spec.root / spec.name} for "
                            f"{deadline_seconds:g} s: see what it waits for"
                        )
                _opening[me] = this
            with trouble_told(spec.root / spec.name):
                ledger = cls._opened(spec, policy, clock, deadline_seconds, create, borrowed)
            ledger._borrowed = borrowed
            with _changed:
                _ledgers.append(ledger)
        finally:
            _opening.pop(me, None)  # built in: no exception of a signal handler comes before it
            with _changed:
                _changed.notify_all()
        with trouble_told(ledger.directory):
            ledger._begin(_left(until), create)
        return ledger

    def _begin(self, seconds: float, create: bool) -> None:
        """Do what is left to do once a store is open. StoreError or OSError, and it is closed, if that cannot be."""
        until = time.monotonic() + seconds
        try:
            self._begin_clears()
            self._tidy(_left(until))
        except BaseException:
            self.close()
            raise
        if create:
            self._settle(_left(until))

    @classmethod
    def _opened(
        cls, spec: StoreSpec, policy: str, clock: Clock, deadline_seconds: float, create: bool, locked: bool
    ) -> Ledger:
        until = time.monotonic() + deadline_seconds
        try:
            store = open_store(spec, clock, deadline_seconds, create, locked)
        except NoRoomError:
            settle(_left(until))  # a store that was dropped without a close may have the room
            store = open_store(spec, clock, _left(until), create)
        with contextlib.ExitStack() as undo:
            undo.callback(store.release)
            session = Session(store, clock, _left(until))
            undo.pop_all()
            undo.callback(session.close)
            ledger = cls(session, policy)
            undo.pop_all()
        return ledger

    @staticmethod
    def _here(spec: StoreSpec) -> Ledger | None:
        """The ledger of that store in this process: by the file, not by the path, or two would be inside one gate."""
        path = spec.root / spec.name / LOCKS
        for ledger in _ledgers:
            session = ledger._session
            if session.is_at(path) or (ledger._closing and session.store.locks.is_at(path)):
                return ledger
        return None

    def _settle(self, seconds: float) -> None:
        """Take the store's share of its root. StoreError, and the store is closed, if there is no room at all."""
        until = time.monotonic() + seconds
        try:
            try:
                self.share.settle(seconds)
            except NoRoomError:
                settle(_left(until))  # a store that was dropped without a close may have the room
                self.share.settle(_left(until))
        except NoRoomError:
            self.close()
            discard_idle(self.directory, 1.0)
            raise
        except UnavailableError as error:
            self.close()
            raise StoreError(
                f"the ledger at {self.directory} could not be changed: {error.reason}"
            ) from error
        except BaseException:
            self.close()
            raise

    def _shared_with(self, spec: StoreSpec) -> Ledger:
        if (self.kind, self.slot_bytes) != (spec.kind, spec.slot_bytes):
            raise StoreError(
                f"{self.directory} is open here for another kind of chunks ({self.kind}, {self.slot_bytes} bytes a "
                "slot): give each tier a path of its own"
            )
        self._uses += 1
        return self

    # ---- storing

    def stamp(self) -> int:
        """Return a recency stamp for one request: pass the same to every window of a run."""
        self._last_stamp = max(self._last_stamp + _STAMP_STEP, self._session.stamp(self._now()))
        return self._last_stamp

    def reserve(
        self, keys: Sequence[bytes], *, namespace: bytes, start: int = 0, parent: bytes | None = None, tokens: int = 0,
        parts: int = 1, stamp: int | None = None, all_in: bool = False, judged: bool = False,
        deadline_seconds: float = 1.0,
    ) -> list[Outcome]:  # fmt: skip
        """Promise each key a slot to copy `tokens` tokens' KV into, evicting as needed; leading keys first.

        `keys` stand at chain positions from `start` on, behind `parent`. At most `window` keys get a slot in one call,
        at most a quarter of the slots are promised to one member. The policy may keep newcomers out, unless `all_in`,
        or `judged` by `admit` before.
        Changes recency and leases of what is Present.
        """
        if parts < 1:
            raise ValueError(f"a chunk has at least one part, not {parts}")
        if any(len(key) != _KEY_BYTES for key in keys):
            raise ValueError(f"a key has {_KEY_BYTES} bytes")
        until = time.monotonic() + deadline_seconds
        stamp = self.stamp() if stamp is None else stamp
        request = filling.Request(keys[: self.window], start, parent, stamp, all_in, judged)
        made: list[tuple[Writing, filling.Batch]] = []
        try:
            return self._reserve(request, keys, namespace, tokens, parts, until, made)
        except BaseException:  # of a signal handler: nobody knows of these
            self.give_up([one for writing, batch in made if writing.committed for one in batch.outcomes])
            raise

    def _reserve(
        self, request: filling.Request, keys: Sequence[bytes], namespace: bytes, tokens: int, parts: int, until: float,
        every: list[tuple[Writing, filling.Batch]],
    ) -> list[Outcome]:  # fmt: skip
        outcomes: list[Outcome] = []
        hindrance: Reason | None = None
        if self._room < len(request.keys):
            self._look(request, until)
        for at in range(0, len(request.keys), BATCH):
            batch = range(at, min(at + BATCH, len(request.keys)))
            self._admit(request, batch, hindrance)
            if hindrance is not None:
                outcomes += [Refused(request.keys[i], hindrance) for i in batch]
                continue
            made, hindrance = self._reserve_batch(request, batch, namespace, tokens, parts, until, every)
            outcomes += made
        outcomes += [Refused(key, Reason.FULL) for key in keys[len(outcomes) :]]
        for outcome in outcomes:
            if isinstance(outcome, Refused):
                self.count(f"drop_{outcome.reason}")
        self._upkeep.wake(lacks=self._unbacked > 0 and self._room < self.window)
        return outcomes

    def _look(self, request: filling.Request, until: float) -> None:
        """Find out who is there and how much room there is: nobody who is there goes for another of the same call."""
        with contextlib.suppress(UnavailableError):
            found, self._room = self._session.read(
                lambda txn, tables: reading.look(txn, tables, request.keys), _left(until)
            )
            request.present[:] = [item is not None for item in found]
            self._keep_present(found, request.start, request.stamp)

    def _admit(self, request: filling.Request, batch: range, hindrance: Reason | None) -> None:
        """Ask the policy which newcomers of a batch may come in: none behind one that may not."""
        new, marks, stamps = request.newcomers(batch)
        if not len(new):
            return
        if hindrance is Reason.NOT_ADMITTED:
            self._advice.refuse(marks, stamps, self._now())
        elif hindrance is None and request.judged:
            request.hits[new] = self._advice.hits_of(marks)
        elif hindrance is None:
            admission = self._advice.admit(marks, stamps, self._room, self._now(), all_in=request.all_in)
            request.hits[new] = admission.hits
            request.admitted[new[admission.leading :]] = False

    def admit(self, keys: Sequence[bytes], *, start: int, stamp: int, deadline_seconds: float = 1.0) -> int:
        """Ask the policy how many of these keys, from the first on, may come in; what is here may. At most 64 at once.

        Changes ghosts, and recency and leases of what is here. Those that may are to be reserved as `judged`.
        """
        request = filling.Request(keys[:BATCH], start, None, stamp)
        self._look(request, time.monotonic() + deadline_seconds)
        self._admit(request, range(len(request.keys)), None)
        return len(request.keys) if request.admitted.all() else int(np.argmin(request.admitted))

    def refuse(self, keys: Sequence[bytes], *, start: int, stamp: int) -> None:
        """Note that keys were asked for that stand behind one that was not admitted. Changes ghosts only."""
        if keys:
            self._advice.refuse(marks_of(keys), stamp - start - np.arange(len(keys)), self._now())

    def _reserve_batch(
        self, request: filling.Request, batch: range, namespace: bytes, tokens: int, parts: int, until: float,
        every: list[tuple[Writing, filling.Batch]],
    ) -> tuple[list[Outcome], Reason | None]:  # fmt: skip
        """Reserve with as few victims as needed; look for more outside the gate as long as some are found.

        Returns what hinders all further keys too, if anything does.
        """
        done: list[Outcome] = []
        passed_over = 0
        for _ in range(_ATTEMPTS):
            ask = request.ask(batch.start + len(done), batch.stop, namespace, tokens, parts)
            looked = self._room < len(ask.keys)
            # So many more than are wanted that those who are kept do not hide those who may go.
            count = min(sum(ask.admitted) + 4 * passed_over, _MOST_VICTIMS)
            victims = (
                self._victims(count, request.stamp - _STAMP_STEP + 1) if looked else []
            )  # none of its own
            try:
                made = self._session.write(partial(self._reserve_in, ask, victims, every), _left(until))
            except UnavailableError as error:
                return done + [Refused(key, error.reason) for key in ask.keys], error.reason
            self._keep_present(made.outcomes, ask.start, request.stamp)  # before the next victims are chosen
            if made.passed_over:
                self._pass_over(made.passed_over, request.stamp)
            passed_over += len(made.passed_over)
            if not made.short:
                return done + made.outcomes, None if all(ask.admitted) else Reason.NOT_ADMITTED
            if looked and not len(victims):
                break
            served = next(
                i for i, o in enumerate(made.outcomes) if isinstance(o, Refused) and o.reason in _ROOM
            )
            done, made = done + made.outcomes[:served], made._replace(outcomes=made.outcomes[served:])
        return done + made.outcomes, Reason.FULL

    def _pass_over(self, slots: list[int], stamp: int) -> None:
        """Make those young that somebody keeps, so that they are not offered again and again."""
        stamps = np.full(len(slots), max(self.stamp(), stamp))
        self._advice.touch(np.array(slots, np.int64), stamps, asked=False)

    def _reserve_in(
        self, ask: filling.Ask, victims: Sequence[filling.Victim], every: list[tuple[Writing, filling.Batch]],
        writing: Writing, spaces: Namespaces,
    ) -> filling.Batch:  # fmt: skip
        batch = filling.reserve(writing, ask, victims, spaces)
        every.append((writing, batch))
        self._room, self._unbacked = writing.meta.free(), writing.meta.unbacked()
        return batch

    def _victims(self, count: int, stamp: int) -> list[filling.Victim]:
        slots = self._advice.victims(count, stamp, self._now())
        return list(map(filling.Victim, slots.tolist(), self._session.columns.generation[slots].tolist()))

    def _keep_present(self, outcomes: Sequence[Outcome | None], start: int, stamp: int) -> None:
        kept = [
            (o.slot, o.generation, stamp - start - i)
            for i, o in enumerate(outcomes)
            if isinstance(o, Present)
        ]
        if kept:
            slots, generations, stamps = (np.array(column) for column in zip(*kept, strict=True))
            self._touch(slots.astype(np.int64), generations.astype(np.uint64), stamps, asked=False)
            self.lease(slots, generations, _PRESENT_LEASE_SECONDS)

    def commit(
        self, reserved: Sequence[Reserved], part: int = 0, deadline_seconds: float = 1.0
    ) -> list[bool]:
        """Say that the bytes of one part are in; a chunk is visible when all parts are.

        False: not stored (superseded, cleared, taken back), or not yet: what missed its deadline is done by this
        process's next transaction.
        """
        return [how is not Landed.LOST for how in self.commit_part(reserved, part, deadline_seconds)]

    def commit_part(
        self, reserved: Sequence[Reserved], part: int, deadline_seconds: float = 1.0
    ) -> list[Landed]:
        """Do what `commit` does, and tell which chunks it was the last part of: only those are visible now.

        An exception (of a signal handler) leaves nothing reserved; a ValueError, for a wrong part, changes nothing.
        """
        done: list[Landed] = []
        try:
            self._commit(reserved, part, time.monotonic() + deadline_seconds, done)
            return done
        except ValueError:
            raise
        except BaseException:
            self.give_up(reserved[len(done) :])
            raise

    def _commit(self, reserved: Sequence[Reserved], part: int, until: float, done: list[Landed]) -> None:
        for batch in batches(reserved):
            try:
                done += self._session.write(lambda w, s: filling.commit(w, batch, part, s), _left(until))  # noqa: B023
            except UnavailableError as error:
                self.count(f"drop_{error.reason}", len(batch))
                self._session.defer(partial(self._commit_late, batch, part))
                done += [Landed.LOST] * len(batch)

    def _commit_late(self, reserved: Sequence[Reserved], part: int, writing: Writing) -> None:
        filling.commit(writing, reserved, part, Namespaces(writing.tables))

    def abort(self, reserved: Sequence[Reserved], deadline_seconds: float = 1.0) -> None:
        """Give up this member's parts, and free the slots that nobody else writes into any more.

        Only when this member writes into them no longer; what it has no part in is left alone.
        """
        until = time.monotonic() + deadline_seconds
        for batch in batches(reserved):
            self._now_or_later(partial(filling.abort, reserved=batch), _left(until))

    def give_up(self, outcomes: Sequence[Outcome], deadline_seconds: float = 1.0) -> None:
        """Do what `abort` does, for what of these was reserved and is not committed; for use after any exception."""
        reserved = [one for one in outcomes if isinstance(one, Reserved)]
        if reserved:
            self.abort(reserved, deadline_seconds)

    def adopt(self, reserved: Sequence[Reserved], part: int, deadline_seconds: float = 1.0) -> list[bool]:
        """Say that this member writes that part of chunks which another may have reserved."""
        done: list[bool] = []
        until = time.monotonic() + deadline_seconds
        for batch in batches(reserved):
            try:
                done += self._owed(
                    lambda w: filling.adopt(w, batch, part),  # noqa: B023
                    partial(filling.abort, reserved=batch),
                    _left(until),
                )
            except UnavailableError:
                done += [False] * len(batch)
        return done

    def _now_or_later(self, work: Callable[[Writing], None], deadline_seconds: float) -> None:
        """Do what nobody waits for: now, or with the next transaction, also after an exception of a signal handler."""
        self._session.defer(work)
        with contextlib.suppress(UnavailableError):
            self._session.write(lambda *_: None, deadline_seconds)

    def _owed(self, work: Callable[[Writing], T], undo: Callable[[Writing], None], seconds: float) -> T:
        """Do what somebody has to end later; if the answer is lost to an exception of a signal handler, `undo` it."""
        begun: list[Writing] = []

        def noted(writing: Writing, _: Namespaces) -> T:
            begun.append(writing)
            return work(writing)

        try:
            return self._session.write(noted, seconds)
        except BaseException:
            if begun and begun[-1].committed:
                self._now_or_later(undo, 1.0)
            raise

    # ---- reading

    def match(
        self, keys: Sequence[bytes], *, start: int | None = 0, namespace: bytes | None = None,
        stamp: int | None = None, lease_seconds: float = 0.0, touch: bool = True, asked: bool = True,
        deadline_seconds: float = 1.0,
    ) -> Match:  # fmt: skip
        """Return the leading run of keys that may be read. Changes recency (unless told not to) and leases.

        `keys` stand at chain positions from `start` on (None: not known). With a `namespace` (its root), a chunk of
        another one or at another position is a miss, and stays.

        `asked`: by somebody who wants to read them, which is a hit; not by who is about to store what is behind them.

        The generations are those of the entries: compare them with `still_valid` after the copy.
        """
        columns, until = self._session.columns, time.monotonic() + deadline_seconds
        try:
            run = self._session.read(
                lambda txn, tables: reading.find(txn, tables, columns, keys, namespace, start),
                deadline_seconds,
            )
        except UnavailableError as error:
            self.count(f"miss_{error.reason}")
            return Match(np.empty(0, np.int64), np.empty(0, np.uint64), error.reason)
        slots, generations = run.slots[: run.intact], run.generations[: run.intact]
        reason = run.reason
        if run.intact < len(run.slots):
            at = run.intact
            self._drop(
                keys[at], int(run.slots[at]), int(run.generations[at]), Reason.FAILED_CHECK, _left(until)
            )
        elif reason is None and len(slots) < len(keys):
            reason = self.why(keys[len(slots)]).reason
        if touch and len(slots):
            stamps = (self.stamp() if stamp is None else stamp) - (start or 0) - np.arange(len(slots))
            self._touch(slots, generations, stamps, asked, linked=True)
        if lease_seconds and len(slots):
            self.lease(slots, generations, lease_seconds)
        return Match(slots, generations, reason)

    def touch(
        self, keys: Sequence[bytes], *, start: int = 0, stamp: int | None = None, asked: bool = True,
        deadline_seconds: float = 1.0,
    ) -> list[bool] | None:  # fmt: skip
        """Raise the recency of those keys that are here, holes notwithstanding. Return which are; None: not in time.

        `asked`: they were asked for, and another tier had them.
        """
        try:
            found, _ = self._session.read(
                lambda txn, tables: reading.look(txn, tables, keys), deadline_seconds
            )
        except UnavailableError:
            return None
        here = [(i, item) for i, item in enumerate(found) if item is not None]
        if here:
            slots = np.fromiter((item.slot for _, item in here), np.int64, len(here))
            generations = np.fromiter((item.generation for _, item in here), np.uint64, len(here))
            positions = start + np.fromiter((i for i, _ in here), np.int64, len(here))
            stamps = (self.stamp() if stamp is None else stamp) - positions
            whole = here[-1][0] - here[0][0] == len(here) - 1
            self._touch(slots, generations, stamps, asked, linked=whole)
        return [item is not None for item in found]

    def _touch(
        self, slots: NDArray[np.int64], generations: NDArray[np.uint64], stamps: NDArray[np.int64], asked: bool,
        linked: bool = False,
    ) -> None:  # fmt: skip
        """Raise the recency of what still stands; `linked`: each is the parent of the next."""
        columns = self._session.columns
        standing = columns.generation[slots] == generations
        rows = slots[standing]
        self._advice.touch(rows, stamps[standing], asked)
        if linked and len(slots) > 1:
            child = standing[1:]
            columns.parent_slot[slots[1:][child]] = slots[:-1][child]
            columns.parent_generation[slots[1:][child]] = generations[:-1][child]

    def still_valid(self, slots: NDArray[np.int64], generations: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Say of each slot whether what was copied out of it was the chunk that was matched. Takes no lock."""
        barrier()
        return np.asarray(self._session.columns.generation[slots] == generations)

    def ready(self, slots: NDArray[np.int64], generations: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Say of each slot whether its chunk is committed and still there; a hint, for telling. Takes no lock."""
        columns = self._session.columns
        return np.asarray(self.still_valid(slots, generations) & (columns.last_use[slots] != NOT_READY))

    def lease(self, slots: NDArray[np.int64], generations: NDArray[np.uint64], seconds: float) -> None:
        """Ask the policy to pass these slots by for a while: at most 60 s, at most half of the slots."""
        columns, now = self._session.columns, self._now()
        rows = np.asarray(slots)[columns.generation[slots] == np.asarray(generations)]
        fresh = columns.lease_until[rows] <= now
        if fresh.any():
            room = max(0, self.slots // 2 - int(np.count_nonzero(columns.lease_until > now)))
            rows = np.concatenate([rows[~fresh], rows[fresh][:room]])
        until = now + int(min(seconds, _LONGEST_LEASE_SECONDS) * 1e9)
        columns.lease_until[rows] = np.maximum(columns.lease_until[rows], until)

    def hold(
        self, slots: NDArray[np.int64], generations: NDArray[np.uint64], deadline_seconds: float = 1.0
    ) -> list[bool]:
        """Keep chunks from eviction until `release` or the death of this process; False where they have gone.

        What is removed or cleared meanwhile is no longer found nor valid, but no byte of its slot changes before.
        """
        both = pairs(slots, generations)
        held: list[tuple[int, int]] = []

        def work(writing: Writing) -> list[bool]:
            answers = [keeping.hold(writing, *pair) for pair in both]
            held[:] = [pair for pair, ok in zip(both, answers, strict=True) if ok]
            return answers

        try:
            return self._owed(work, partial(_release, held), deadline_seconds)
        except UnavailableError:
            return [False] * len(both)

    def release(self, slots: NDArray[np.int64], generations: NDArray[np.uint64]) -> None:
        """End one hold of this member on each of these chunks."""
        self._now_or_later(partial(_release, pairs(slots, generations)), 1.0)

    def coldest(self, count: int) -> list[tuple[int, int]]:
        """Return up to `count` slots that would go first, none leased, and their generations. Changes nothing."""
        now, columns = self._now(), self._session.columns
        slots = self._advice.victims(count, self.stamp(), now)
        slots = slots[columns.lease_until[slots] <= now]
        return list(zip(slots.tolist(), columns.generation[slots].tolist(), strict=True))

    def in_use_by_others(self) -> bool:
        """Whether the store is open in other processes, or in this one by more than one user of this ledger."""
        return self._uses > 1 or len(self.processes()) > 1

    def backed(self) -> list[range]:
        """Return the slots that have pages, as ranges: only these can hold a chunk. Others may change that."""
        return self.share.ranges()

    def next_to_go(self, count: int) -> NDArray[np.int64]:
        """Return the slots that would go first if `count` were wanted now. Changes nothing."""
        return self._advice.victims(count, self.stamp(), self._now())

    # ---- pins, removal

    def pin(self, keys: Sequence[bytes], owner: str) -> int:
        """Keep chunks from eviction in the name of `owner`; return how many. At most a quarter of the slots."""
        if not owner or "\n" in owner:
            raise ValueError(f"{owner!r} cannot own pins: give a name of one line")

        pinned = 0
        for batch in batches(keys):
            pinned += self._patiently(lambda w, _: keeping.pin(w, batch, owner))  # noqa: B023
        return pinned

    def unpin(self, keys: Sequence[bytes] | None, owner: str) -> int:
        """End the pins of `owner` on these chunks (None: on all); return how many."""
        return self._patiently(lambda w, _: keeping.unpin(w, keys, owner))

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove chunks, pinned or not; return how many were there."""
        return sum(
            self._patiently(lambda w, _: keeping.remove(w, batch), frees=True)  # noqa: B023
            for batch in batches(keys)
        )

    def drop(self, key: bytes, slot: int, generation: int, reason: Reason) -> bool:
        """Remove a chunk that failed a check, if it still is the one that did; counted."""
        return self._drop(key, slot, generation, reason, 1.0)

    def _drop(self, key: bytes, slot: int, generation: int, reason: Reason, seconds: float) -> bool:
        if reason is Reason.FAILED_CHECK:
            self.count("failed_checks")
        try:
            return self._session.write(
                lambda w, _: keeping.drop(w, key, slot, generation, reason), seconds, frees=True
            )
        except UnavailableError:
            self._session.defer(lambda w: _ignore(keeping.drop(w, key, slot, generation, reason)))
            return False

    # ---- members, rebuild, upkeep, the end

    def upkeep(self) -> None:
        """Let the policy learn and look ahead. A thread of this ledger does it; doing it oneself does no harm."""
        self._upkeep.once()

    def uses_device(self) -> list[range]:
        """Say that this process registers the slab with a GPU, whose copies may outlive it.

        Returns the slots that have pages: from now on, as long as this process lives, nobody takes them.
        """
        self._patiently(lambda w, _: mark_device(w))
        return self.backed()

    def unscanned(self) -> range:
        """Slots whose headers have yet to be read after a rebuild."""
        meta = self._read_patiently(lambda txn, tables: tables.load_meta(txn))
        return range(meta.scan, meta.scan + meta.unscanned())

    def begin_scan(self) -> bool:
        """Be the one process that reads the headers back; False if another is."""
        return self._session.store.locks.try_lock(SCAN, exclusive=True)

    def end_scan(self) -> None:
        """Leave the rest of the headers to others."""
        self._session.store.locks.unlock(SCAN)

    def absorb(self, first_slot: int, found: Sequence[Found | None]) -> None:
        """Enter what the headers of the next unscanned slots say; None where a slot holds nothing. At most 64."""
        whole = self.slab_path.stat().st_blocks * 512 >= self.slots * self.slot_bytes
        self._patiently(lambda w, spaces: absorb(w, spaces, first_slot, found, whole))
        if not len(self.unscanned()):
            self.share.after_scan()

    def close(self) -> None:
        """Leave the store: reservations and holds are given up; the last to leave a store on disk marks it clean."""
        with _changed:
            self._uses -= 1
            if self._uses or self._closing:
                return
            self._closing = True  # who wants to open the store again waits until it is closed
        try:
            self.save_labels(every_seconds=0.0)
            self._upkeep.close()
            self._session.close()
        finally:
            with _changed:
                _ledgers.remove(self)
                _changed.notify_all()


def _fresh_locks() -> None:
    """A forked child has one thread: no lock that another thread of its parent held may stay locked."""
    global _changed
    _changed = Condition()
    _opening.clear()
    for ledger in list(_ledgers):
        ledger._labels_lock = threading.Lock()
        ledger._waiting.clear()  # the parent writes them
        advice = ledger._advice  # a thread may have been inside it
        ledger._advice = Advice(advice.policy, ledger.columns)
        ledger._upkeep = Upkeep(ledger._session, ledger._advice, ledger._upkeep.learnt, ledger.share)
        if ledger._closing or ledger._borrowed:  # by a thread that this process does not have
            _ledgers.remove(ledger)
            ledger._session.close()


os.register_at_fork(after_in_child=_fresh_locks)


def _as_it_is(directory: Path) -> StoreSpec:
    directory = directory.resolve()
    state = read_state(directory)
    if state is None:
        raise StoreError(f"there is no usable store at {directory}")
    return StoreSpec(
        directory.parent, directory.name, state.kind, state.slots, state.slot_bytes, private=state.private
    )


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _release(held: Sequence[tuple[int, int]], writing: Writing) -> None:
    for pair in held:
        keeping.release(writing, *pair)


def _ignore(_: bool) -> None:
    """For a step whose answer nobody waits for any more."""
