"""A connection that is kept: made when it is needed, and replaced when it has failed.

`remote_tier` keeps one for each of its threads, `redis_nodes` one to each node.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from pagoda.tiers.remote.health import Health
from pagoda.tiers.remote.store_client import RefusedError, StoreConnection

_Connection = TypeVar("_Connection", bound=StoreConnection)
_T = TypeVar("_T")


class KeptConnection(Generic[_Connection]):
    """A connection to a store or to a node of it. For one thread at a time, except `give_up`.

    What fails with an older connection is tried again with a new one: the server may have closed
    the older one meanwhile, or after a failover the address leads to a server that accepts. Only
    what is out of time is not tried again. In both cases other connections of that age lead nowhere
    either, so they are replaced before their next use.
    """

    def __init__(
        self,
        health: Health,
        make: Callable[[], _Connection],
        close: Callable[[_Connection], None],
    ) -> None:
        """`make` returns a connection that is still to be opened; `close` ends one."""
        self._health = health
        self._make = make
        self._close = close
        self._connection: _Connection | None = None
        self._made = self._used = 0.0  # when (time.monotonic())
        self.was_old = False
        """Whether the last call ended with a connection that was there before."""
        self.was_open = False
        """Whether the last call ended with one that had been opened."""
        self.is_given_up = False

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    def run(
        self, work: Callable[[_Connection], _T], until: Callable[[], float]
    ) -> _T:
        """Run `work` with the connection, which is opened `until` then if it must be. Raises what
        fails: OSError, RefusedError.
        """
        moved = False
        while True:
            self.was_old = self.was_open = self._is_ready()
            is_sound = False
            try:
                done = work(self._connection or self._opened(until()))
                is_sound = True
            except RefusedError as refusal:
                is_sound = self.was_open and not refusal.reconnect
                if is_sound or not self.was_old or self.is_given_up:
                    raise
                moved = True
            except OSError as error:
                if not self.was_old or self.is_given_up:
                    raise
                if isinstance(error, TimeoutError):
                    self._health.trusted_since = time.monotonic()
                    raise
            finally:
                if not is_sound:
                    self.close()
            if is_sound:
                self._used = time.monotonic()
                self._health.breaker.record_success()
                if moved:  # the other connections still lead to the old server
                    self._health.trusted_since = self._made
                return done

    def _is_ready(self) -> bool:
        """Return whether there is an older connection that can be used; close one that is no longer
        trusted.
        """
        if self._made < self._health.trusted_since:
            self.close()
        return self.is_open

    def _opened(self, until: float) -> _Connection:
        self._made = time.monotonic()
        connection = self._connection = self._make()
        if self.is_given_up:
            connection.abort()
        connection.open(until)
        self.was_open = True
        return connection

    def idle_for(self, seconds: float) -> bool:
        """Return whether there is a connection that has been idle for `seconds`."""
        return self.is_open and time.monotonic() - self._used >= seconds

    def give_up(self) -> None:
        """Make the running call fail now, and all later ones. From any thread."""
        self.is_given_up = True
        if (connection := self._connection) is not None:
            connection.abort()

    def close(self) -> None:
        """Close the connection, if there is one."""
        connection = self._connection
        self._connection = None
        if connection is not None:
            self._close(connection)
