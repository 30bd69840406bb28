"""What is known, for a short time, about which keys of a namespace a remote store has."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from pagoda.base.clock import Clock
from pagoda.base.fork import per_process
from pagoda.base.oldest import drop_oldest

_MOST_KEYS = 1 << 17  # the number of keys that are remembered: a few MiB
_MOST_HOLES = 1 << 12
# the time after its expiry in which an answer still explains a miss
_ANSWERED_NS = 10**9


class PresenceCache:
    """Remembers keys that were found under a namespace, and keys that were not. Thread-safe.

    A namespace of None means any: a caller without a namespace finds a key under any namespace.

    The answers are hints: a present key may have been removed since, an absent key may have been
    stored since.
    """

    def __init__(
        self,
        clock: Clock,
        present_seconds: float = 2.0,
        absent_seconds: float = 1.0,
    ) -> None:
        self._clock = clock
        self._lives_ns = {
            True: int(present_seconds * 1e9),
            False: int(absent_seconds * 1e9),
        }
        # key -> present, asked for directly, known until when; the oldest first
        self._known: dict[tuple[bytes | None, bytes], tuple[bool, bool, int]] = {}
        # keys that a load did not find although chunks behind them are there; the oldest first
        self._holes: dict[tuple[bytes | None, bytes], None] = {}

    @per_process
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    def record(
        self,
        namespace: bytes | None,
        keys: Iterable[bytes],
        present: bool,
        *,
        asked: bool = True,
        since_ns: int | None = None,
    ) -> None:
        """Remember that these keys are present, or absent.

        `asked` False: the store was asked only for some of them. `since_ns`: `now_ns()` of when
        the store was asked; it may not have seen what was stored after that, so such keys stay
        present.
        """
        value = (
            present,
            asked,
            self._clock.monotonic_ns() + self._lives_ns[present],
        )
        aliases = (namespace, None) if present else (namespace,)
        names = [(known_as, key) for key in keys for known_as in aliases]
        with self._lock:
            if since_ns is not None and not present:
                names = [
                    name for name in names if not self._is_newer(name, since_ns)
                ]
            for name in names:
                self._known.pop(name, None)
            self._known.update(dict.fromkeys(names, value))
            if present and asked:
                for name in names:
                    self._holes.pop(name, None)
            drop_oldest(self._known, _MOST_KEYS)

    def now_ns(self) -> int:
        """Return the time of a question that begins now, for `record`."""
        return self._clock.monotonic_ns()

    def _is_newer(self, name: tuple[bytes | None, bytes], since_ns: int) -> bool:
        """Whether a key was found or stored after this time. Called with the lock."""
        present, _, until = self._known.get(name, (False, False, 0))
        return present and until - self._lives_ns[True] > since_ns

    def record_hole(
        self, namespace: bytes, key: bytes, since_ns: int | None = None
    ) -> None:
        """Remember that a load has not found this key: for a short time as an absent one, and until
        it is stored as one that a look-up must ask about. `since_ns`: as in `record`.
        """
        self.record(namespace, [key], False, since_ns=since_ns)
        with self._lock:
            for known_as in (namespace, None):
                self._holes[(known_as, key)] = None
            drop_oldest(self._holes, _MOST_HOLES)

    def run_to_ask(
        self, namespace: bytes | None, keys: Sequence[bytes], exact_keys: int
    ) -> int:
        """Return how many leading keys are the next question, so that no key that a load did not
        find is taken for present: the store answers about up to `exact_keys` exactly.
        """
        holes = self._holes
        if holes and len(keys) > exact_keys:
            for at, key in enumerate(keys):
                if (namespace, key) in holes:
                    return max(at, exact_keys)
        return len(keys)

    def get(self, namespace: bytes | None, key: bytes) -> bool | None:
        """Return whether the key is present; None: not known."""
        present, _, until = self._known.get((namespace, key), (False, False, 0))
        return present if self._clock.monotonic_ns() < until else None

    def is_answered(self, namespace: bytes, key: bytes) -> bool:
        """Return whether the store has answered about this key recently, even if the answer may be
        out of date.
        """
        until = self._known.get((namespace, key), (False, False, -_ANSWERED_NS))[
            2
        ]
        return self._clock.monotonic_ns() < until + _ANSWERED_NS

    def is_stored(self, namespace: bytes | None, key: bytes) -> bool:
        """Return whether the store was asked for exactly this key and has it, so that it need not
        be sent.
        """
        present, asked, until = self._known.get(
            (namespace, key), (False, False, 0)
        )
        return present and asked and self._clock.monotonic_ns() < until

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._known.clear()
            self._holes.clear()
