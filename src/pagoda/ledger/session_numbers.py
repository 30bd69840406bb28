"""Numbers of sessions: two bytes for each slot say which session used it.

Two sessions never have the same number at a time, so that nobody can end the session of another
tenant by a name that happens to have its number.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

MOST_SESSIONS = 4000
MOST_AGENTS = 16
"""Of one session; further ones count as its first."""


class SessionNumbers:
    """The numbers of the sessions that asked last, from 1 on. Not thread-safe."""

    def __init__(self) -> None:
        # by digest of tenant and name, the session that asked longest ago first
        self._known: dict[bytes, dict[str, int]] = {}
        self._free: list[int] = []
        self._used = 0

    def number(
        self,
        tenant: bytes,
        session: str,
        agent: str,
        forget: Callable[[int], None],
    ) -> int:
        """Return the number of an agent of a session; 0 if no session is named. `forget` is called
        with a number before another session gets it.
        """
        if not session:
            return 0
        name = digest(tenant, session)
        agents = self._known.pop(name, None)
        if agents is None:
            agents = {}
            while len(self._known) >= MOST_SESSIONS:
                self._forget_oldest(forget)
        self._known[name] = agents
        if len(agents) >= MOST_AGENTS and agent not in agents:
            agent = next(iter(agents))
        if agent not in agents:
            agents[agent] = self._next()
        return agents[agent]

    def of(self, tenant: bytes, session: str) -> tuple[int, ...]:
        """Return the numbers of all agents of a session."""
        agents = self._known.get(digest(tenant, session), {})
        return tuple(agents.values())

    def _next(self) -> int:
        if self._free:
            return self._free.pop()
        self._used += 1
        return self._used

    def _forget_oldest(self, forget: Callable[[int], None]) -> None:
        oldest = next(iter(self._known))
        for number in self._known.pop(oldest).values():
            forget(number)
            self._free.append(number)


def digest(tenant: bytes, session: str) -> bytes:
    """Return what names a session of a tenant, whose root that is."""
    return blake2b(session.encode(), key=tenant, digest_size=16).digest()
