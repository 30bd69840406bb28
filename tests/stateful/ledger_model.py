"""The prompts that the model test uses, and what must be in the ledger, as dicts."""

from __future__ import annotations

from dataclasses import dataclass, field

from blake3 import blake3
from hypothesis import strategies as st

from pagoda.ledger import Reserved
from pagoda.ledger.allocation import BUSY_NS

SLOTS = 32
DEPTH = 7
TRUNK = 2
CHAINS = 8
TOKENS = 16
NAMESPACES = [blake3(b"tenant %d" % n).digest() for n in range(2)]


def _key(chain: int, position: int) -> bytes:
    """Chains 2n and 2n + 1 share their first TRUNK chunks; chains belong to the namespaces in
    pairs.
    """
    name = chain if position >= TRUNK else chain // 2 * 2
    return blake3(b"%d %d" % (name, position)).digest()


KEYS = [
    [_key(chain, position) for position in range(DEPTH)]
    for chain in range(CHAINS)
]
PARENT = {
    KEYS[c][p]: KEYS[c][p - 1] if p else None
    for c in range(CHAINS)
    for p in range(DEPTH)
}
POSITION = {KEYS[c][p]: p for c in range(CHAINS) for p in range(DEPTH)}
NAMESPACE = {
    KEYS[c][p]: NAMESPACES[c // 2 % 2]
    for c in range(CHAINS)
    for p in range(DEPTH)
}
ALL = sorted(POSITION)

chains = st.integers(0, CHAINS - 1)
lengths = st.integers(1, DEPTH)
any_keys = st.lists(st.sampled_from(ALL), min_size=1, max_size=4, unique=True)
owners = st.sampled_from(["ann", "bob"])


@dataclass
class Pending:
    """A reservation: its missing parts, its start, and whether its member is dead or it was taken
    over.
    """

    reserved: Reserved
    missing: set[int]
    started: int
    dead: bool = False
    overtaken: bool = False


@dataclass
class Model:
    """What must be in the ledger."""

    # key -> slot, generation
    ready: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    pending: list[Pending] = field(default_factory=list)
    # some of them were removed: their slots wait
    held: set[tuple[int, int]] = field(default_factory=set)
    leases: dict[tuple[int, int], int] = field(default_factory=dict)  # until, ns
    pins: dict[str, set[bytes]] = field(default_factory=dict)
    gone: set[tuple[int, int]] = field(default_factory=set)

    def pinned(self) -> set[bytes]:
        """Pinned keys."""
        return set().union(*self.pins.values()) if self.pins else set()

    def claimed(self) -> dict[bytes, Pending]:
        """Return the keys with a reservation of a live member, the latest of each."""
        return {
            one.reserved.key: one
            for one in self.pending
            if not one.dead and not one.overtaken
        }

    def busy(self, now: int) -> set[bytes]:
        """Return the keys that no other member may reserve yet."""
        return {
            key
            for key, one in self.claimed().items()
            if now - one.started <= BUSY_NS
        }

    def waiting(self) -> set[tuple[int, int]]:
        """Return the slots of chunks that were removed while held: they are free when the hold
        ends.
        """
        return self.held & self.gone

    def leave(self, key: bytes) -> None:
        """Note that a chunk was removed."""
        place = self.ready.pop(key)
        self.gone.add(place)
        self.leases.pop(place, None)
        for pins in self.pins.values():
            pins.discard(key)
