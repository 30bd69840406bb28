"""The weights epoch of a model on this machine, and which namespace and tiers a call may use in it.

Each local root keeps a record of the epochs (`pagoda.ledger.epoch_record`). An epoch is a number
and a random nonce, so that one epoch is never given out twice, whichever roots were open at that
time. Whoever opens roots compares them and raises those that are behind. A record also knows the
epochs that were left behind. Of two epochs of which none is known to come after the other one,
whatever their numbers, neither is known to be the present one: both are left behind, by a new
epoch. A process stores and serves under an epoch only in the tiers whose root has recorded it.

A process notices a change by one `stat` per root: the file that older versions keep for the model
grows with each one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from blake3 import blake3

from pagoda.base.errors import StoreError
from pagoda.base.fork import per_process
from pagoda.base.log import guarded_logger
from pagoda.base.metrics import Reason
from pagoda.base.quality_verdict import QualityState
from pagoda.cache.late_tier import BoundedCall
from pagoda.cache.resources import Resources
from pagoda.cache.tier_stack import TierStack
from pagoda.keys import Namespace, require_version
from pagoda.ledger import Ledger
from pagoda.ledger.epoch_record import (
    NEVER_CHANGED,
    Epoch,
    EpochRecord,
    new_epoch,
)

log = guarded_logger("pagoda.cache")

# how long a change waits for the root of a tier that was left out
_ROOT_SECONDS = 5.0
# between two looks whether a record is still the file that it was
_LOOK_SECONDS = 1.0
# the number of namespaces that are kept ready; further tenants are hashed again
_MOST_NAMESPACES = 1024
# epochs of this machine within one epoch of the configured namespace
_EPOCHS = 2**32


class PresentWeights:
    """What a call may use under the present weights: a namespace, and tiers. Thread-safe."""

    def __init__(
        self,
        resources: Resources,
        namespace: Namespace,
        begun: Sequence[QualityState],
        measure: Callable[[Namespace], list[QualityState]],
        of: PresentWeights | None = None,
    ) -> None:
        """Begin with the weights that a namespace names.

        `begun`: the present state of the lossy codecs of the tiers; `measure` returns that state
        for other weights or adapters, and is called once for each. `of`: the weights of another
        cache of the same model, over tiers with the same roots: a change reported to one of the two
        is valid for both.
        """
        self._resources = resources
        self._measure = measure
        if of is None:
            self._epoch = WeightsEpoch(
                resources.config.roots(),
                namespace.model,
                namespace.weights_epoch,
                resources.left_out(),
            )
        else:
            self._epoch = of._epoch
            for tier in self._epoch.unread.keys() - resources.left_out().keys():
                # the other cache has left it out, this one has it open
                self._epoch.compare_root(tier)
        self._epoch.share(resources)
        self._base = namespace
        # by adapter, salt, version, numerics and epoch: the namespace, and whether tiers are left
        # out
        self._scopes: dict[
            tuple[str, str, str, str, Epoch], tuple[Namespace, bool]
        ] = {}
        # what was asked for last, the state in which it was answered, and the answer
        self._last: (
            tuple[tuple[str | None, ...], object, tuple[Namespace, TierStack]]
            | None
        ) = None
        self._begun = list(begun)
        self._measured: dict[tuple[str, Epoch, str], list[QualityState]] = {}

    @per_process
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    def scope(
        self,
        lora: str | None = None,
        salt: str | None = None,
        version: str | None = None,
        numerics: str | None = None,
    ) -> tuple[Namespace, TierStack]:
        """Return the namespace of an adapter, a tenant and numerics now, and the tiers that may be
        used now.

        A stat notices weights that another process changed. After weights changed in place, no
        other machine has their KV or may get it, unless the change named a version. A `version`
        that is given is the caller's.

        Without a verdict for these weights with this adapter, the lossy tiers are left out, and the
        namespace is a different one: so KV that another process loads from a lossy tier into host
        memory is not found either.
        """
        asked = lora, salt, version, numerics
        state = self._epoch.state(), self._resources.tiers
        last = self._last
        if last is not None and last[0] == asked and last[1] == state:
            return last[2]
        found = self._scope(lora, salt, version, numerics, state[0][0])
        self._last = asked, state, found
        return found

    def _scope(
        self,
        lora: str | None,
        salt: str | None,
        version: str | None,
        numerics: str | None,
        epoch: Epoch,
    ) -> tuple[Namespace, TierStack]:
        version, epoch = self._present(version, epoch)
        lora = self._base.lora if lora is None else lora
        salt = self._base.salt if salt is None else salt
        numerics = self._base.numerics if numerics is None else numerics
        with self._lock:
            found = self._scopes.get((lora, salt, version, numerics, epoch))
        if found is None:
            is_left_out = any(
                state.checked == "left out"
                for state in self._quality_of(version, epoch, lora)
            )
            weights_epoch = self._base.weights_epoch * _EPOCHS + epoch.number
            versioned = self._base.of_version(version).of_change(epoch.nonce)
            namespace = versioned.with_(
                lora=lora,
                salt=salt,
                weights_epoch=weights_epoch,
                numerics=numerics,
            )
            # not a namespace of exact KV: writes in progress may still reach a lossy tier
            if is_left_out:
                namespace = namespace.with_(
                    approximate=f"{namespace.approximate},left out"
                )
            found = namespace, is_left_out
            with self._lock:
                while len(self._scopes) >= _MOST_NAMESPACES:
                    self._scopes.pop(next(iter(self._scopes)))
                self._scopes[lora, salt, version, numerics, epoch] = found
        namespace, is_left_out = found
        # only the root of a tier that was left out may know that the weights were changed
        known = not epoch.number and not self._epoch.unread
        tiers = self._resources.tiers if known else self._resources.tiers.local()
        if self._epoch.unrecorded or self._epoch.unread:
            tiers = tiers.without(self._epoch.unusable())
        return namespace, tiers.exact() if is_left_out else tiers

    def quality(self) -> list[QualityState]:
        """Return what is known of each lossy codec with the present weights, and where adapters in
        use differ.
        """
        version, epoch = self._present(None)
        found = {
            (str(state.setting), state.checked): state
            for state in self._quality_of(version, epoch)
        }
        for (*measured, _), states in list(self._measured.items()):
            if measured == [version, epoch]:
                for state in states:
                    found.setdefault((str(state.setting), state.checked), state)
        return list(found.values())

    def present(
        self,
        lora: str | None = None,
        salt: str | None = None,
        numerics: str | None = None,
    ) -> Namespace:
        """Return the namespace that names the present weights, with an adapter (the subject of a
        verdict), a salt and numerics.
        """
        lora = self._base.lora if lora is None else lora
        named = self._named(*self._present(None), lora)
        if salt is not None:
            named = named.with_(salt=salt)
        return named if numerics is None else named.with_(numerics=numerics)

    def _present(
        self, version: str | None, epoch: Epoch | None = None
    ) -> tuple[str, Epoch]:
        if epoch is None:
            epoch = self._epoch.epoch()
        if version is not None:
            require_version(version)
        version, named_at = (
            self._epoch.named if version is None else (version, NEVER_CHANGED)
        )
        return version, epoch if epoch.number > named_at.number else NEVER_CHANGED

    def _named(self, version: str, epoch: Epoch, lora: str) -> Namespace:
        begun_at = self._base.weights_epoch
        weights_epoch = (
            begun_at * _EPOCHS + epoch.number if epoch.number else begun_at
        )
        weights = self._base.of_version(version).of_change(epoch.nonce)
        return weights.with_(weights_epoch=weights_epoch, lora=lora)

    def _quality_of(
        self, version: str, epoch: Epoch, lora: str | None = None
    ) -> list[QualityState]:
        lora = self._base.lora if lora is None else lora
        if not self._begun or not (
            version or epoch.number or lora != self._base.lora
        ):
            return self._begun
        found = self._measured.get((version, epoch, lora))
        if found is None:
            found = self._measure(self._named(version, epoch, lora))
            while len(self._measured) >= _MOST_NAMESPACES:
                self._measured.pop(next(iter(self._measured)), None)
            self._measured[version, epoch, lora] = found
        return found

    def compare_root(self, tier: str) -> str | None:
        """Compare the root of a tier that was left out with the others, and raise what is behind.

        Returns None if it has recorded the present epoch, else why not. May wait as long as its
        disk does.
        """
        return self._epoch.compare_root(tier)

    def change(self, version: str) -> int:
        """Raise the weights epoch, or use a version, which needs no new epoch. See
        Cache.weights_changed.
        """
        require_version(version)
        if version:
            return self._epoch.name(version).number
        epoch, errors = self._epoch.raise_epoch()
        errors |= self._elsewhere(errors)
        tiers = self._resources.tiers
        uncleared = self._clear_unrecorded(errors)
        unraised = self._unraised(errors)
        none_recorded = len(errors) == len(self._resources.config.roots())
        if none_recorded and tiers.local() is not tiers:
            name_them = (
                "no local tier has a directory: call weights_changed with a name of the new "
                "weights"
            )
            raise StoreError(
                "other processes, and caches opened later, do not know that the weights have "
                "changed, and use the KV "
                "of the old weights in remote tiers: remove the cause and call weights_changed "
                "again, or stop them "
                f"({next(iter(errors.values()), name_them)})"
            )
        if unraised is not None:
            raise StoreError(
                "this process uses the new weights, but a tier that was left out could not "
                "record that they have "
                "changed: if the machine restarts before the tier takes part, it holds KV of the "
                "old weights under the "
                "name of the new ones. Repair it, remove its store, or call weights_changed "
                f"with a name ({unraised})"
            )
        if uncleared:
            why = "; ".join(
                f"{tier}: {errors[tier]}, {reason}"
                for tier, reason in uncleared.items()
            )
            raise StoreError(
                "this process uses the new weights, but a tier could neither record that they "
                "have changed nor be "
                "cleared: if the machine restarts before it can be written again, it holds KV of "
                "the old weights under "
                "the name of the new ones. Repair it, remove its store, or call weights_changed "
                f"with a name ({why})"
            )
        return epoch.number

    def _elsewhere(self, known: Collection[str]) -> dict[str, Exception]:
        """Return an error for each other tier whose open store is not under its root: the record of
        that root says nothing about it, and it may come back.
        """
        errors: dict[str, Exception] = {}
        for resources in self._epoch.sharing():
            for tier in resources.tiers.all:
                ledger = getattr(tier, "ledger", None)
                if not isinstance(ledger, Ledger) or tier.name in known:
                    continue
                store = ledger.session.store
                with contextlib.suppress(OSError):
                    if store.locks.are_away(store.directory):
                        errors[tier.name] = StoreError(
                            f"{store.directory} was renamed, unmounted or replaced"
                        )
        return errors

    def _clear_unrecorded(
        self, errors: Mapping[str, Exception]
    ) -> dict[str, str]:
        """Clear the tiers whose roots cannot record the epoch: that needs no space. Return why
        others were not.
        """
        uncleared: dict[str, str] = {}
        for resources in self._epoch.sharing():
            for tier in resources.tiers.all:
                if tier.name not in errors:
                    continue
                try:
                    tier.clear()
                except Exception as error:  # noqa: BLE001
                    # a boundary: the other tiers must be cleared
                    uncleared[tier.name] = str(error)
                else:
                    text = f"{tier.name} is cleared: {errors[tier.name]}"
                    resources.counters.warn(log, Reason.IO_ERROR, text)
        return uncleared

    def _unraised(self, errors: Mapping[str, Exception]) -> str | None:
        """Return which tier that was left out has not recorded the present epoch, and why; None if
        there is none.
        """
        for tier, reason in self._resources.left_out().items():
            if tier not in self._epoch.unread:
                if tier in errors:
                    return f"{tier}: {errors[tier]}"
                continue
            try:
                why = BoundedCall(
                    partial(self.compare_root, tier), "pagoda-compare-root"
                ).result(_ROOT_SECONDS)
            except (TimeoutError, OSError, StoreError) as error:
                why = str(error)
            if why is not None:
                return f"{tier}: {why}, {reason}"
        return None


class WeightsEpoch:
    """Reads and raises the epoch of one model. Thread-safe; other processes notice at their next
    `epoch()`.

    The version that was named is valid for all caches that share this object.
    """

    def __init__(
        self,
        roots: Mapping[str, Path],
        model: str,
        begun_at: int = 0,
        left_out: Collection[str] = (),
    ) -> None:
        """Compare the roots, except those of tiers that were `left_out`: their disks may be dead.
        Raise those behind.

        `begun_at`: the configured epoch, the same on all machines; within it this machine counts
        from 0.
        """
        name = f"{model}\0{begun_at}" if begun_at else model
        digest = blake3(
            name.encode(), derive_key_context="PagodaKV weights epoch"
        ).hexdigest(8)
        every = {tier: EpochRecord(root, digest) for tier, root in roots.items()}
        self._records = {
            tier: record for tier, record in every.items() if tier not in left_out
        }
        # by tier: records that were not compared yet; what they know of changes is unknown
        self.unread = {
            tier: record for tier, record in every.items() if tier in left_out
        }
        self._old_paths = _old_paths(self._records)
        # its count never decreases in this process, whatever happens to the files
        self._known = NEVER_CHANGED
        # names of the tiers whose root has not recorded that epoch: they are not used
        self.unrecorded: frozenset[str] = frozenset()
        # the caches that share this object
        self._sharing: list[weakref.ref[Resources]] = []
        # the version that the weights were changed to, and the epoch then
        self.named: tuple[str, Epoch] = ("", NEVER_CHANGED)
        # inode and size of the files that tell of a change
        self._seen: list[tuple[int, int] | None] = []
        self._look_at = 0.0
        self._inodes: list[int | None] = []
        for record in self._records.values():
            _reserve(record)
        self._compare_all(frozenset())

    @per_process
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    def epoch(self) -> Epoch:
        """Return how often the weights were changed in place, and which change was the last.

        Costs one stat per root as long as nothing has changed, and once a second another one.
        """
        seen = list(map(_identity, self._old_paths))
        if seen != self._seen or time.monotonic() >= self._look_at:
            self._look(seen)
        return self._known

    def state(
        self,
    ) -> tuple[Epoch, tuple[str, Epoch], frozenset[str], tuple[str, ...]]:
        """Return what namespaces and tiers depend on, to be compared; look for changes first."""
        return (
            self.epoch(),
            self.named,
            self.unrecorded,
            tuple(self.unread),
        )

    def _look(self, seen: list[tuple[int, int] | None]) -> None:
        """Compare the roots if something has changed: an epoch, the file of a record, or what could
        not be recorded.
        """
        with self._lock:
            told = seen != self._seen
            due = time.monotonic() >= self._look_at
            if told or (
                due and (self.unrecorded or self._inodes != self._record_inodes())
            ):
                self._compare_all(self.unrecorded)
            self._look_at = time.monotonic() + _LOOK_SECONDS

    def compare_root(self, tier: str) -> str | None:
        """Compare the root of a tier with the others, and raise those that are behind. See
        PresentWeights.
        """
        record = self.unread.get(tier)
        if record is not None:
            try:  # first without the lock: a dead disk may never answer
                with record.locked():
                    record.read()
            except (OSError, StoreError) as error:
                return str(error)
            _reserve(record)
        with self._lock:
            if record is not None:
                self._records[tier] = record
                self._old_paths = _old_paths(self._records)
                self.unread.pop(tier, None)
            self._compare_all(self.unrecorded)
        return (
            "its root cannot record that the weights were changed"
            if tier in self.unrecorded
            else None
        )

    def unusable(self) -> frozenset[str]:
        """Return the tiers whose root has not recorded the present epoch, or was not read yet."""
        return (
            self.unrecorded.union(self.unread) if self.unread else self.unrecorded
        )

    def share(self, resources: Resources) -> None:
        """Note that a cache with these resources uses this object. Keeps only a weak reference."""
        self._sharing = [weakref.ref(one) for one in (*self.sharing(), resources)]

    def sharing(self) -> list[Resources]:
        """Return the resources of the caches that use this object."""
        return [
            resources
            for sharing in self._sharing
            if (resources := sharing()) is not None
        ]

    def name(self, version: str) -> Epoch:
        """Note that the weights were changed to a named version; return the epoch in which the name
        is valid.
        """
        self.named = version, self.epoch()
        return self.named[1]

    def raise_epoch(self) -> tuple[Epoch, dict[str, Exception]]:
        """Raise the epoch; it is on the medium when this returns, except under the roots of the
        tiers in the errors.
        """
        with self._lock:
            epoch, errors = self._compare(is_new=True)
            self._note(epoch, frozenset(errors))
            return epoch, errors

    def _compare_all(self, before: frozenset[str]) -> None:
        """Find the present epoch, and record it under the roots that are behind. `before`: those
        that failed before.
        """
        epoch, errors = self._compare()
        if epoch == NEVER_CHANGED:  # a root without a record says the same
            errors = {}
        for tier in errors.keys() - before:
            text = (
                "%s is not used with weights that were changed in place: its root cannot "
                "record that (%s)"
            )
            log.warning(text, tier, errors[tier])
        self._note(epoch, frozenset(errors))

    def _note(self, epoch: Epoch, unrecorded: frozenset[str]) -> None:
        self.unrecorded = unrecorded
        self._known = epoch
        self._inodes = self._record_inodes()
        self._seen = [_identity(path) for path in self._old_paths]

    def _record_inodes(self) -> list[int | None]:
        found = (_identity(record.path) for record in self._records.values())
        return [None if identity is None else identity[0] for identity in found]

    def _compare(
        self, is_new: bool = False
    ) -> tuple[Epoch, dict[str, Exception]]:
        """Agree with all roots on the present epoch, or on a new one, and record it. Return the
        errors too, by tier.

        All roots are locked meanwhile, in the order of their paths, so that two processes do not
        write by turns.
        """
        errors: dict[str, Exception] = {}
        found: dict[str, Epoch | None] = {}
        # epochs that are known to be followed by another one
        passed: set[Epoch] = set()
        least = self._known.number
        with contextlib.ExitStack() as held:
            for tier, record in sorted(
                self._records.items(), key=lambda item: str(item[1].path)
            ):
                try:
                    held.enter_context(record.locked())
                    found[tier] = record.read()
                    least = max(least, record.least())
                except (OSError, StoreError) as error:
                    errors[tier] = error
                    if self._known == NEVER_CHANGED and record.has_promised():
                        found[tier] = None
            every = {
                epoch
                for epoch in (*found.values(), self._known)
                if epoch is not None
            } - {NEVER_CHANGED}
            for tier in found.keys() - errors.keys():
                # then they are not known to be followed
                with contextlib.suppress(OSError, StoreError):
                    passed |= self._records[tier].passed(every)
            epoch = _agreed(found, self._known, passed, least, is_new)
            for tier in found.keys() - errors.keys():
                record = self._records[tier]
                try:
                    if found[tier] != epoch:
                        record.write(epoch, passed=every)
                    else:
                        record.tell_older_versions(epoch)
                except (OSError, StoreError) as error:
                    errors[tier] = error
        return epoch, errors


def _reserve(record: EpochRecord) -> None:
    """Reserve space for changes. If the disk is full or read-only, there may be space when it is
    needed.
    """
    with contextlib.suppress(OSError):
        record.reserve()


def _agreed(
    found: Mapping[str, Epoch | None],
    known: Epoch,
    passed: Collection[Epoch],
    least: int,
    is_new: bool,
) -> Epoch:
    """Return the epoch that is valid when roots say this, and this process `known`. See the
    module's docstring.

    `passed`: those of them that are known to be followed by another one.
    """
    if is_new or None in found.values():
        return new_epoch(above=least)
    last = {epoch for epoch in (*found.values(), known) if epoch is not None} - {
        NEVER_CHANGED,
        *passed,
    }
    present = max(last, default=NEVER_CHANGED)
    if len(last) > 1 or present.number < least:
        return new_epoch(above=least)
    return present


def _old_paths(records: Mapping[str, EpochRecord]) -> list[str]:
    """Return the files that tell of changes, as text: `stat` takes longer for a `Path`."""
    return [str(record.old_path) for record in records.values()]


def _identity(path: str | Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size
