"""The weights epoch of a model on this machine, and which namespace and tiers a call may use in it.

The epoch is kept in a small file under every local root. It is the file's *size*: raising it appends one byte, which
two processes can do at once without losing one, and a process notices it by one `stat`. The largest size under any root
is valid, so if one root is wiped (a reboot), nothing is lost. The files reserve space when the cache is opened, so that
an epoch can be raised even on a full disk.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from blake3 import blake3

from pagoda.cache.late_tier import BoundedCall
from pagoda.cache.resources import Resources
from pagoda.cache.tier_stack import TierStack
from pagoda.errors import StoreError
from pagoda.file_space import make_directory, opened, reserve_beyond
from pagoda.fork import reset_now_and_in_child
from pagoda.keys import Namespace
from pagoda.ledger.store_state import sync_directory
from pagoda.metrics import Reason, guarded_logger
from pagoda.quality_verdict import QualityState

log = guarded_logger("pagoda.cache")

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_ROOT_SECONDS = 5.0  # how long a change waits for the root of a tier that was left out
_RESERVED_BYTES = 1024  # space for this many epochs at any time
_BEYOND_FILES = 1 << 31  # no file becomes this long
_MOST_NAMESPACES = 1024  # the number of namespaces that are kept ready; further tenants are hashed again
_EPOCHS = 2**32  # epochs of this machine within one epoch of the configured namespace


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

        `begun`: the present state of the lossy codecs of the tiers; `measure` returns that state for other weights or
        adapters, and is called once for each. `of`: the weights of another cache of the same model, over tiers with the
        same roots: a change reported to one of the two is valid for both.
        """
        self._resources, self._measure = resources, measure
        if of is None:
            self._epoch = WeightsEpoch(
                resources.config.roots(), namespace.model, namespace.weights_epoch, resources.left_out()
            )
        else:
            self._epoch = of._epoch
        self._epoch.share(resources)
        self._base = namespace
        # by adapter, salt, version and epoch: the namespace, and whether tiers are left out
        self._scopes: dict[tuple[str, str, str, int], tuple[Namespace, bool]] = {}
        self._begun = list(begun)
        self._measured: dict[tuple[str, int, str], list[QualityState]] = {}
        reset_now_and_in_child(self)

    def reset(self) -> None:
        """Create the lock."""
        self._lock = threading.Lock()

    def scope(
        self, lora: str | None = None, salt: str | None = None, version: str | None = None
    ) -> tuple[Namespace, TierStack]:
        """Return the namespace of an adapter and a tenant now, and the tiers that may be used now.

        A stat notices weights that another process changed. After weights changed in place, no other machine has their
        KV or may get it, unless the change named a version. A `version` that is given is the caller's.

        Without a verdict for these weights with this adapter, the lossy tiers are left out, and the namespace is a
        different one: so KV that another process loads from a lossy tier into host memory is not found either.
        """
        version, epoch = self._present(version)
        lora = self._base.lora if lora is None else lora
        salt = self._base.salt if salt is None else salt
        with self._lock:
            found = self._scopes.get((lora, salt, version, epoch))
        if found is None:
            is_left_out = any(state.checked == "left out" for state in self._quality_of(version, epoch, lora))
            weights_epoch = self._base.weights_epoch * _EPOCHS + epoch
            versioned = self._base.of_version(version)
            namespace = versioned.with_(lora=lora, salt=salt, weights_epoch=weights_epoch)
            if is_left_out:  # not a namespace of exact KV: writes in progress may still reach a lossy tier
                namespace = namespace.with_(approximate=f"{namespace.approximate},left out")
            found = namespace, is_left_out
            with self._lock:
                while len(self._scopes) >= _MOST_NAMESPACES:
                    self._scopes.pop(next(iter(self._scopes)))
                self._scopes[lora, salt, version, epoch] = found
        namespace, is_left_out = found
        # only the root of a tier that was left out may know that the weights were changed
        known = not epoch and not self._epoch.unread
        tiers = self._resources.tiers if known else self._resources.tiers.local()
        return namespace, tiers.exact() if is_left_out else tiers

    def quality(self) -> list[QualityState]:
        """Return what is known of each lossy codec with the present weights, and where adapters in use differ."""
        version, epoch = self._present(None)
        found = {(str(state.setting), state.checked): state for state in self._quality_of(version, epoch)}
        for (*measured, _), states in list(self._measured.items()):
            if measured == [version, epoch]:
                for state in states:
                    found.setdefault((str(state.setting), state.checked), state)
        return list(found.values())

    def present(self, lora: str | None = None) -> Namespace:
        """Return the namespace that names the present weights, with an adapter: the subject of a verdict."""
        return self._named(*self._present(None), self._base.lora if lora is None else lora)

    def _present(self, version: str | None) -> tuple[str, int]:
        epoch = self._epoch.epoch()
        version, named_at = self._epoch.named if version is None else (version, 0)
        return version, epoch if epoch > named_at else 0

    def _named(self, version: str, epoch: int, lora: str) -> Namespace:
        begun_at = self._base.weights_epoch
        weights_epoch = begun_at * _EPOCHS + epoch if epoch else begun_at
        return self._base.of_version(version).with_(weights_epoch=weights_epoch, lora=lora)

    def _quality_of(self, version: str, epoch: int, lora: str | None = None) -> list[QualityState]:
        lora = self._base.lora if lora is None else lora
        if not self._begun or not (version or epoch or lora != self._base.lora):
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

        Returns None if it has recorded the present epoch, else why not. May wait as long as its disk does.
        """
        return self._epoch.compare_root(tier)

    def change(self, version: str) -> int:
        """Raise the weights epoch, or use a version, which needs no new epoch. See Cache.weights_changed."""
        if version:
            return self._epoch.name(version)
        epoch, errors = self._epoch.raise_epoch()
        tiers = self._resources.tiers
        for resources in self._epoch.sharing():
            for tier in resources.tiers.all:
                # its root cannot record the epoch, so its chunks are removed: that needs no space
                if tier.name in errors:
                    text = f"{tier.name} is cleared: {errors[tier.name]}"
                    resources.counters.warn(log, Reason.IO_ERROR, text)
                    tier.clear()
        unraised = self._unraised(errors)
        none_recorded = len(errors) == len(self._resources.config.roots())
        if none_recorded and tiers.local() is not tiers:
            name_them = "no local tier has a directory: call weights_changed with a name of the new weights"
            raise StoreError(
                "other processes, and caches opened later, do not know that the weights have changed, and use the KV "
                "of the old weights in remote tiers: remove the cause and call weights_changed again, or stop them "
                f"({next(iter(errors.values()), name_them)})"
            )
        if unraised is not None:
            raise StoreError(
                "this process uses the new weights, but a tier that was left out could not record that they have "
                "changed: if the machine restarts before the tier takes part, it holds KV of the old weights under the "
                f"name of the new ones. Repair it, remove its store, or call weights_changed with a name ({unraised})"
            )
        return epoch

    def _unraised(self, errors: Mapping[str, OSError]) -> str | None:
        """Return which tier that was left out has not recorded the present epoch, and why; None if there is none."""
        for tier, reason in self._resources.left_out().items():
            if tier not in self._epoch.unread:
                if tier in errors:
                    return f"{tier}: {errors[tier]}"
                continue
            try:
                why = BoundedCall(partial(self.compare_root, tier), "pagoda-compare-root").result(
                    _ROOT_SECONDS
                )
            except (TimeoutError, OSError, StoreError) as error:
                why = str(error)
            if why is not None:
                return f"{tier}: {why}, {reason}"
        return None


class WeightsEpoch:
    """Reads and raises the epoch of one model. Thread-safe; other processes notice at their next `epoch()`.

    The version that was named is valid for all caches that share this object.
    """

    def __init__(
        self, roots: Mapping[str, Path], model: str, begun_at: int = 0, left_out: Collection[str] = ()
    ) -> None:
        """Read the roots, except those of tiers that were `left_out`: their disks may be dead.

        `begun_at`: the configured epoch, the same on all machines; within it this machine counts from 0.
        """
        name = f"{model}\0{begun_at}" if begun_at else model
        digest = blake3(name.encode(), derive_key_context="PagodaKV weights epoch").hexdigest(8)
        every = {tier: root / f"weights-{digest}" for tier, root in roots.items()}
        self._roots = {tier: path for tier, path in every.items() if tier not in left_out}
        # by tier: roots that were not compared yet; what they may know of changes is unknown
        self.unread = {tier: path for tier, path in every.items() if tier in left_out}
        self._paths = list(self._roots.values())
        self._known = 0  # never decreases in this process, whatever happens to the files
        self._sharing: list[weakref.ref[Resources]] = []  # the caches that share this object
        self.named = ("", 0)  # the version that the weights were changed to, and the epoch then
        for path in self._paths:
            # the disk is full or read-only: there may be space when it is needed
            with contextlib.suppress(OSError):
                _reserve_space(path)
        reset_now_and_in_child(self)

    def reset(self) -> None:
        """Create the lock."""
        self._lock = threading.Lock()

    def epoch(self) -> int:
        """Return the number of times that the weights were changed in place. Costs one stat per root."""
        for path in self._paths:
            try:
                self._known = max(self._known, os.stat(path).st_size)
            except OSError:
                continue
        return self._known

    def compare_root(self, tier: str) -> str | None:
        """Compare the root of a tier with the others, and raise those that are behind. See PresentWeights."""
        path = self.unread.get(tier) or self._roots.get(tier)
        if path is None:
            return None
        try:  # without the lock: a dead disk may never answer
            found = os.stat(path).st_size
        except FileNotFoundError:
            found = 0
        except OSError as error:
            return str(error)
        with self._lock:
            self._known = max(self.epoch(), found)
            refused = _raised(path, self._known)
            if refused is not None:
                return str(refused)
            self._roots[tier] = path
            self._paths = list(self._roots.values())
            self.unread.pop(tier, None)
            for other in self._paths:
                refused = _raised(other, self._known)
                if refused is not None:
                    log.warning("%s cannot record a change of the weights: %s", other, refused)
        return None

    def share(self, resources: Resources) -> None:
        """Note that a cache with these resources uses this object. Keeps only a weak reference."""
        self._sharing = [weakref.ref(one) for one in (*self.sharing(), resources)]

    def sharing(self) -> list[Resources]:
        """Return the resources of the caches that use this object."""
        return [resources for sharing in self._sharing if (resources := sharing()) is not None]

    def name(self, version: str) -> int:
        """Note that the weights were changed to a named version; return the epoch in which the name is valid."""
        self.named = version, self.epoch()
        return self.named[1]

    def raise_epoch(self) -> tuple[int, dict[str, OSError]]:
        """Raise the epoch; it is on the medium when this returns, except under the roots of the tiers in the errors.

        If no root could be written, the epoch is a number that no other process has or will ever have.
        """
        with self._lock:
            target = self.epoch() + 1
            errors = {tier: error for tier, path in self._roots.items() if (error := _grow(path, target))}
            if errors and len(errors) == len(self._roots):
                target = max(target, _BEYOND_FILES + secrets.randbelow(_BEYOND_FILES))
            self._known = max(target, self.epoch())
            return self._known, errors


def _reserve_space(path: Path) -> None:
    if path.parent.is_dir():
        with opened(path, _APPEND) as fd:
            reserve_beyond(fd, os.fstat(fd).st_size + _RESERVED_BYTES)


def _raised(path: Path, target: int) -> OSError | None:
    """Raise the epoch of a root that is behind. Return the error if that fails."""
    try:
        behind = os.stat(path).st_size < target
    except OSError:
        behind = target > 0
    return _grow(path, target) if behind else None


def _grow(path: Path, target: int) -> OSError | None:
    """Append at least one byte to `path`, and up to `target`, and sync it. Appends of other processes add up."""
    try:
        make_directory(path.parent)
        with opened(path, _APPEND) as fd:
            os.write(fd, b"+" * max(1, target - os.fstat(fd).st_size))
            os.fsync(fd)
        sync_directory(path.parent)
    except OSError as error:
        return error
    return None
