"""KV events: report to routers of requests which chunks this machine's host memory and disk hold
for an engine.

One thread compares what it has reported with the published columns of each local tier, and sends
the difference: ten times a second while anything changes. Then it sleeps until the tables are
changed by any process (`store_watch`), a router comes, or a request brings a note. So it does not
matter which process stored, loaded, evicted or cleared a chunk, or whether this engine was running
then. A chunk is reported when every process can read it. For that the hashes and tokens are needed
by which the engine knew the chunk; they are its note (`notes`), kept beside the tier. A chunk
without a note is reported when a request finds it. Chunks of tenants and adapters are reported
after their first request to this engine.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from typing import Protocol

import numpy as np

from pagoda.base.log import guarded_logger
from pagoda.base.metrics import RateLimitedLog, Reason
from pagoda.base.oldest import drop_oldest
from pagoda.base.signal_safe_threads import Event, begin
from pagoda.kv_events.notes import (
    ChunkNote,
    EventForm,
    Groups,
    NoteMaker,
    packed,
    runs,
    unpacked,
)
from pagoda.kv_events.store_watch import StoreWatch
from pagoda.kv_events.tier_difference import TierDifference
from pagoda.ledger import Ledger, Outcome, Present, Reserved, queries
from pagoda.ledger.chunk_notes import MOST_NOTE_BYTES, ChunkNotes
from pagoda.ledger.ghost_table import marks_of
from pagoda.ledger.store_state import TABLES

log = guarded_logger("pagoda.events")

MEDIA = {"host": "CPU", "disk": "STORAGE"}  # the names of the tiers in events
_ROUND_SECONDS = 0.1
# while nothing is to be reported, a round after this time sees what no watch tells
_IDLE_SECONDS = 2.0
# how long rounds go on after a file of a store was removed or replaced: until `guard_watch` sees it
_GONE_SECONDS = 3.0
# everything is reported again from time to time. The pause is within these limits: four times as
# long as the last time took if it was completed, otherwise twice the pause before
_RETELL_SECONDS = 1.0
_LONGEST_RETELL_SECONDS = 600.0
_RETELL_SHARE = 4.0
# processor time after which the thread rests, at the end of its step
_BURST_SECONDS = 0.00005
# a rest is 20 times as long as a burst: the thread takes at most a twentieth of a processor
_REST = 20
_LONGEST_REST_SECONDS = 0.5  # `close` waits for a rest
# seconds for the removed or the new chunks of one tier; then the next tier has its turn
_MOST_TELLING = 0.2
# the pause between two rounds if the first has not reported everything, and while the outlet is
# full
_PAUSE_SECONDS = 0.002
# the notes of chunks being stored or loaded that are kept: some MiB
_REMEMBERED = 4096
# with more known namespaces than this, those without reported chunks are forgotten
_FEW_ROOTS = 1024


class Outlet(Protocol):
    """The receiver of an engine's events. Used by the reporting thread."""

    @property
    def cleared(self) -> int:
        """How often the engine reported that all its blocks are cleared; routers take that for its
        tiers too.
        """

    @property
    def is_full(self) -> bool:
        """Whether too many events are waiting, so that no more should be sent."""

    def newcomers(self) -> bool:
        """Whether routers have subscribed since the last call, and so have missed earlier events.
        Never waits.
        """

    def report_all(self) -> Iterator[None]:
        """Report step by step that all blocks are cleared, then those in the engine's own memory.
        All else follows.
        """

    def send(self, events: Sequence[object]) -> None:
        """Publish events."""

    def on_news(self, look: Callable[[], None]) -> None:
        """Let `look` be called, on any thread, when `newcomers` or `cleared` may have changed."""


class StoredEvents:
    """Reports the chunks of one engine to routers. Thread-safe; only `close` waits."""

    def __init__(
        self,
        ledgers: Mapping[str, Ledger],
        present_root: Callable[[], bytes],
        groups: Groups,
        form: EventForm,
        outlet: Outlet,
        keeps_notes: bool = True,
    ) -> None:
        """Prepare; `start` starts the thread. `ledgers`: the ledgers of the local tiers, by name.

        `present_root` returns the root of the engine's namespace, for requests without an adapter
        and a salt; it changes when the weights change, here or in another process. Without
        `keeps_notes` no token ids are left beside the tiers: then a restarted engine reports no
        earlier chunk.
        """
        self._groups = groups
        self._form = form
        self._outlet = outlet
        self._keeps_notes = keeps_notes
        self._tiers = [
            TierDifference(MEDIA[tier], at, form, self._rest)
            for tier, at in ledgers.items()
        ]
        self._lock = threading.Lock()
        self._present_root = present_root
        self._root = present_root()
        # of which there was a request; the thread reads it without the lock
        self._roots = {self._root}
        # if there are more, those of which nothing is held are forgotten
        self._most_roots = _FEW_ROOTS
        self._met: set[bytes] = set()  # those of them that are new
        # by an adapter's name, and the latest namespaces of which no request comes any more
        self._adapters: dict[Hashable, bytes] = {}
        self._gone: dict[bytes, None] = {}
        # by key: of chunks that are being stored or loaded
        self._fresh: OrderedDict[bytes, ChunkNote] = OrderedDict()
        self._told_of: set[bytes] = set()  # keys of these notes that are new
        self._lines = RateLimitedLog()
        self._ended = Event()
        # while the thread runs; None: the system allows none, and the thread looks ten times a
        # second
        self._watch: StoreWatch | None = None
        # `look` was called since the last round began
        self._has_news = False
        self._gone_at = -_GONE_SECONDS
        self._renewed = False
        # still True after a failure: events were lost, and everything is reported again
        self._sending = False
        self._rested = 0.0  # processor time of the thread at its last rest
        # of `report_all`: what is left
        self._full_report: Iterator[None] = iter(())
        self._thread = threading.Thread(
            target=self._run, name="pagoda-events", daemon=True
        )

    def start(self) -> None:
        """Start the reporting thread."""
        self._outlet.on_news(self.look)
        begin(self._thread)

    def look(self) -> None:
        """Let the thread look soon for what has changed besides the tiers: routers, notes, the
        weights. Cheap.
        """
        if not self._has_news:
            self._has_news = True
            watch = self._watch
            if watch is not None:
                watch.wake()

    def note(
        self,
        make: NoteMaker,
        root: bytes,
        present: bytes,
        first: int,
        outcomes: Sequence[Outcome],
    ) -> None:
        """Keep the notes of chunks `first`, `first` + 1, ... of a request, for which host slots
        were just reserved.

        `make` returns the note of a chunk by its number; `root`: that of the request's namespace;
        `present`: what `present_root` returned when the namespace was determined. If the weights
        have changed since then, nothing is kept. A failure to note costs events and nothing else.
        """
        there = [
            (n, one)
            for n, one in enumerate(outcomes, first)
            if isinstance(one, Reserved | Present)
        ]
        notes = self._remember(
            make, root, present, [(chunk, one.key) for chunk, one in there]
        )
        new = [
            one
            for _, one in there
            if isinstance(one, Reserved) and one.key in notes
        ]
        written = [
            (one.slot, one.generation, one.key, notes[one.key]) for one in new
        ]
        self._write(
            next(tier for tier in self._tiers if tier.medium == MEDIA["host"]),
            written,
        )

    def found(
        self,
        make: NoteMaker,
        root: bytes,
        present: bytes,
        first: int,
        keys: Sequence[bytes],
    ) -> None:
        """Keep the notes of chunks that a request found in the tiers: chunks without a note are
        then reported.
        """
        self._remember(make, root, present, list(enumerate(keys, first)))

    def name_adapter(self, name: Hashable, root: bytes | None) -> None:
        """Note the namespace of requests that use an adapter of this name; None: no chunk is served
        for them.

        Reports of another adapter of the same name are withdrawn: routers know adapters by their
        names.
        """
        with self._lock:
            before = self._adapters.get(name)
            if root is not None:
                self._adapters[name] = root
                self._gone.pop(root, None)
            if before not in (None, root) and before not in self._gone:
                self._gone[before] = None
                drop_oldest(self._gone, _FEW_ROOTS)
                self._roots.discard(before)
                self._renewed = True
        self.look()

    def close(self) -> bool:
        """End the thread; return whether it has ended, within about a second. Idempotent."""
        self._ended.set()
        self._has_news = False
        self.look()
        if self._thread.is_alive():
            self._thread.join(1.0)
        return not self._thread.is_alive()

    def keep_notes(self) -> None:
        """Write the notes of chunks that requests met and that are beside no tier yet; an engine's
        close calls it.

        The thread writes a chunk's note when it reports the chunk. What was stored shortly before a
        close was not reported, and without a note the restarted engine would report it only when a
        request finds it. Call it after `close`, when the last chunks were written to the lower
        tiers. A failure costs events and nothing else.
        """
        with self._lock:
            self._follow_weights()
            fresh = dict(self._fresh)
        if not fresh or not self._keeps_notes:
            return
        for tier in self._tiers:
            try:
                self._write(tier, self._without_note(tier, fresh))
            except Exception as trouble:  # noqa: BLE001
                # a boundary: the engine is closing
                why = f"chunks are not reported to routers after a restart: {trouble}"
                self._lines.warn(log, Reason.IO_ERROR, why)

    def _without_note(
        self, tier: TierDifference, fresh: Mapping[bytes, ChunkNote]
    ) -> list[tuple[int, int, bytes, ChunkNote]]:
        """Return slot, generation, key and note of those chunks that a tier has without a note
        beside it.
        """
        found, _ = tier.ledger.session.read(
            partial(queries.find_entries, keys=list(fresh))
        )
        stored = [item for item in found if item is not None]
        notes = tier.notes.read([(item.slot, item.key) for item in stored])
        lacking = []
        for item, note in zip(stored, notes, strict=True):
            if note is None:
                lacking.append(
                    (item.slot, item.generation, item.key, fresh[item.key])
                )
        return lacking

    def _remember(
        self,
        make: NoteMaker,
        root: bytes,
        present: bytes,
        chunks: Sequence[tuple[int, bytes]],
    ) -> dict[bytes, ChunkNote]:
        """Return the notes of chunks, by key, as far as they can be made. A note is made only
        once.
        """
        try:
            known = self._known([key for _, key in chunks])
            lacking = [(chunk, key) for chunk, key in chunks if key not in known]
            made = {
                key: note
                for chunk, key in lacking
                if (note := make(chunk)) is not None
            }
        except Exception as trouble:  # noqa: BLE001
            # a boundary: an engine's step goes on, whatever its request is
            why = f"routers do not hear of some chunks: {type(trouble).__name__}: {trouble}"
            self._lines.warn(log, Reason.IO_ERROR, why)
            return {}
        fresh = self._fresh
        with self._lock:
            if present != self._root or root in self._gone:
                return {}
            if (known or made) and root not in self._roots:
                self._roots.add(root)
                self._met.add(root)
            fresh.update(made)
            self._told_of |= made.keys()
            while len(fresh) > _REMEMBERED:
                self._told_of.discard(fresh.popitem(last=False)[0])
            has_news = bool(self._met or self._told_of or self._renewed)
        if has_news:
            self.look()
        return known | made

    def _known(self, keys: Sequence[bytes]) -> dict[bytes, ChunkNote]:
        """Return the notes that are kept here for these keys, with the present weights."""
        with self._lock:
            self._follow_weights()
            known = {
                key: note
                for key in keys
                if (note := self._fresh.get(key)) is not None
            }
            for key in known:
                self._fresh.move_to_end(key)
            return known

    def _follow_weights(self) -> None:
        """Start again if the weights have changed: no older chunk is served any more. Called with
        the lock.
        """
        root = self._present_root()
        if root != self._root:
            self._root = root
            self._roots = {root}
            self._met = {root}
            self._renewed = True
            for learned in (
                self._adapters,
                self._gone,
                self._fresh,
                self._told_of,
            ):
                learned.clear()

    def _write(
        self,
        tier: TierDifference,
        written: Sequence[tuple[int, int, bytes, ChunkNote]],
    ) -> None:
        """Write notes of a tier, each with slot, generation and key; erase those that were cleared
        meanwhile.
        """
        kept = written if self._keeps_notes else []
        try:
            encoded = [
                (slot, key, packed(note, MOST_NOTE_BYTES))
                for slot, _, key, note in kept
            ]
            fitting = [row for row in encoded if len(row[2]) <= MOST_NOTE_BYTES]
            if not fitting:
                return
            tier.notes.write(fitting)
            if gone := [
                (at, key)
                for at, number, key, _ in written
                if not tier.ledger.is_valid(at, number)
            ]:
                tier.notes.erase(gone)
        except Exception as trouble:  # a boundary: see `_made`  # noqa: BLE001
            why = f"chunks are not reported to routers after a restart: {trouble}"
            self._lines.warn(log, Reason.IO_ERROR, why)

    # ---- the thread

    def _run(self) -> None:
        try:
            self._watch = self._watched()
            self._rounds()
        finally:
            watch = self._watch
            self._watch = None
            if watch is not None:
                watch.close()

    def _watched(self) -> StoreWatch | None:
        """Watch the tables of the tiers, and the records of epochs in their roots."""
        places = [tier.ledger.directory for tier in self._tiers]
        roots = {place.parent for place in places}
        try:
            return StoreWatch([place / TABLES for place in places], roots)
        except (OSError, AttributeError) as trouble:
            # AttributeError: the C library has no inotify
            log.info(
                "the tiers are compared ten times a second, since a change of %s cannot be waited "
                "for: %s",
                ", ".join(map(str, places)),
                trouble,
            )
            return None

    def _sleep(self, seconds: float, is_idle: bool) -> bool:
        """Wait for the next round: that many seconds, if nothing is to be reported after a change;
        return whether to end.
        """
        watch = self._watch
        if watch is not None:
            if is_idle and not watch.wait(_IDLE_SECONDS):
                return self._ended.is_set()
            if self._ended.wait(seconds):
                return True
            self._has_news = False
            if watch.forget():
                self._gone_at = time.monotonic()
            return False
        return self._ended.wait(seconds)

    def _is_idle(self) -> bool:
        """Whether the next round has nothing to do unless something changes."""
        is_gone = time.monotonic() < self._gone_at + _GONE_SECONDS
        return not is_gone and all(tier.is_settled for tier in self._tiers)

    def _rounds(self) -> None:
        cleared = self._outlet.cleared
        self._rested = time.thread_time()
        # when the last report of everything began, whether it was completed, and the pause before
        # the next one
        retold = time.monotonic()
        whole = False
        pause = _RETELL_SECONDS
        wanted = False
        next_round = _ROUND_SECONDS
        is_idle = False
        while not self._sleep(next_round, is_idle):
            is_idle = False
            began = time.monotonic()
            next_round = _ROUND_SECONDS
            try:
                wanted = self._outlet.newcomers() or wanted
                if wanted and began >= retold + pause:
                    pause *= 1 if whole else 2
                    retold = began
                    whole = False
                    wanted = False
                    cleared = -1
                    self._full_report = self._outlet.report_all()
                # routers take that for these tiers too: report them again
                if self._outlet.cleared != cleared:
                    cleared = self._outlet.cleared
                    for tier in self._tiers:
                        tier.tell_again()
                if not self._round():
                    next_round = _PAUSE_SECONDS
                else:
                    if not whole:
                        whole = True
                        pause = _RETELL_SHARE * (time.monotonic() - retold)
                    is_idle = not wanted and self._is_idle()
                pause = min(max(pause, _RETELL_SECONDS), _LONGEST_RETELL_SECONDS)
            except Exception as trouble:  # noqa: BLE001
                # a boundary: the engine serves on
                wanted |= self._sending
                for tier in self._tiers:
                    tier.choose_again()
                why = f"KV events are late: {type(trouble).__name__}: {trouble}"
                self._lines.warn(log, Reason.IO_ERROR, why)
            if not is_idle:
                self._rest()

    def _round(self) -> bool:
        """Report what has changed. Return whether that was everything: a round is short, and the
        next one continues.
        """
        self._sending = True
        whole = self._for_a_while(self._full_report)
        self._sending = False
        with self._lock:
            self._follow_weights()
            roots = self._roots
            met = self._met
            told_of = self._told_of
            renewed = self._renewed
            self._met = set()
            self._told_of = set()
            self._renewed = False
        for tier in self._tiers:
            if renewed:
                tier.keep_only(roots)
            tier.meet(met)
            if told_of:
                tier.look_again(told_of)
        for tier in self._tiers:
            whole &= self._for_a_while(map(self._send, tier.removed()))
        for tier in self._tiers:
            whole &= self._for_a_while(
                map(partial(self._tell, tier, roots), tier.new())
            )
        if whole and len(roots) > self._most_roots:
            self._forget_roots()
        return whole

    def _forget_roots(self) -> None:
        """Forget the namespaces without reported chunks. Called when everything was reported.

        At its next request, such a namespace counts as new.
        """
        held = np.unique(
            np.concatenate([tier.held_marks() for tier in self._tiers])
        )
        with self._lock:
            used = {
                self._root,
                *self._met,
                *(note.root for note in self._fresh.values()),
            }
            known = list(self._roots)
            there = zip(
                known, np.isin(marks_of(known), held).tolist(), strict=True
            )
            self._roots = {
                root for root, is_held in there if is_held or root in used
            }
            self._adapters = {
                name: root
                for name, root in self._adapters.items()
                if root in self._roots
            }
            self._most_roots = max(_FEW_ROOTS, 2 * len(self._roots))

    def _for_a_while(self, pieces: Iterable[None]) -> bool:
        """Do pieces of work, with rests, for a limited time. Return whether all were done."""
        began = time.monotonic()
        for _ in pieces:
            self._rest()
            if time.monotonic() - began > _MOST_TELLING or self._ended.is_set():
                return False
        return True

    def _tell(
        self, tier: TierDifference, roots: set[bytes], slots: list[int]
    ) -> None:
        """Report some chunks of a tier, in order; their notes are beside the tier, in this process,
        or in another tier.

        It rests between its steps; a chunk that is removed after `classify` is reported as removed
        afterwards.
        """
        self._rest()
        places = [(slot, tier.ledger.columns.key_of(slot)) for slot in slots]
        notes = self._read(tier.notes, places)
        lacking = {
            key: slot
            for (slot, key), note in zip(places, notes, strict=True)
            if note is None
        }
        if lacking:
            others = self._notes_elsewhere(tier, lacking)
            own = tier.generation_of
            self._write(
                tier,
                [
                    (lacking[key], own(lacking[key]), key, note)
                    for key, note in others.items()
                ],
            )
            notes = [
                note or others.get(key)
                for (_, key), note in zip(places, notes, strict=True)
            ]
        self._rest()
        # if something fails from here on, it is reported again
        self._sending = True
        mine = tier.classify(
            slots, [self._told_in(tier.medium, note) for note in notes], roots
        )
        self._rest()
        events = []
        for run in runs(mine, self._groups):
            events.append(self._form.stored(run, tier.medium))
            self._rest()
        self._send(events)

    def _told_in(self, medium: str, note: ChunkNote | None) -> ChunkNote | None:
        """Return a note if its chunk is reported for a medium.

        Routers that know windows and states look for them in memory. For a disk, Dynamo does not
        read groups: a window would count as the whole prefix, and its removal as the removal of the
        prefix.
        """
        if note is None or medium == MEDIA["host"]:
            return note
        return note if self._groups[note.group].needs_all else None

    def _notes_elsewhere(
        self, tier: TierDifference, keys: Iterable[bytes]
    ) -> dict[bytes, ChunkNote]:
        """Return the notes that this process or another tier has for these keys."""
        found = {
            key: note
            for key in keys
            if (note := self._fresh.get(key)) is not None
        }
        for other in self._tiers:
            lacking = [key for key in keys if key not in found]
            if other is not tier and lacking and other.notes.exist():
                places = other.ledger.columns.places_of(lacking)
                notes = zip(places, self._read(other.notes, places), strict=True)
                found |= {
                    key: note for (_, key), note in notes if note is not None
                }
        return found

    def _read(
        self, notes: ChunkNotes, places: Sequence[tuple[int, bytes]]
    ) -> list[ChunkNote | None]:
        try:
            found = notes.read(places)
        except OSError as trouble:
            self._warn_of_note(str(trouble))
            return [None] * len(places)
        self._rest()
        return [None if note is None else self._decoded(note) for note in found]

    def _decoded(self, note: bytes) -> ChunkNote | None:
        try:
            found = unpacked(note)
            if (
                facts := self._groups.get(found.group)
            ) is not None and facts.fits(found):
                return found
            trouble = "a note has other sizes"
        except ValueError as error:  # also for text that is not UTF-8
            trouble = str(error)
        self._warn_of_note(trouble)  # the note is of another version
        return None

    def _warn_of_note(self, trouble: str) -> None:
        self._lines.warn(
            log,
            Reason.IO_ERROR,
            f"chunks are reported to routers only when found: {trouble}",
        )

    def _send(self, events: Sequence[object]) -> None:
        self._sending = True
        if events:
            self._outlet.send(events)
        self._sending = False
        while self._outlet.is_full and not self._ended.wait(_PAUSE_SECONDS):
            pass

    def _rest(self) -> None:
        """Rest, so that the engine has the interpreter, if this thread has used the processor for a
        burst.
        """
        used = time.thread_time() - self._rested
        if used > _BURST_SECONDS:
            # costs half as much as the `wait` of an event
            time.sleep(min(_REST * used, _LONGEST_REST_SECONDS))
            self._rested = time.thread_time()
