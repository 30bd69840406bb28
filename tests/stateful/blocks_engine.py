"""The engine of the model test: its state, the manager's state, and views of both."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from pagoda.blocks import BlockManager, Direction, Place
from pagoda.blocks.tree import Node
from pagoda.cache import Cache, Hit
from pagoda.config import Config
from pagoda.keys import Namespace, chunk_keys
from pagoda.ledger import Ledger, Reserved, admin
from tests.stateful.blocks_model import BLOCK, Devices, Prompt, Request, Ticket

ON_DEVICE = (Place.DEVICE, Place.TO_HOST, Place.TO_DEVICE)
# Gauges: what `NoRoom` and a late ticket must leave alone. The rest are counters and times.
GAUGES = (
    "total",
    "free",
    "cached",
    "in_use",
    "in_flight",
    "evictable",
    "pinned",
    "requests",
    "evicted_blocks",
    "dropped_blocks",
    "demoted_blocks",
    "promoted_blocks",
    "cancelled_moves",
)


class Engine:
    """One engine, and sometimes another process on the same host tier."""

    kind = "host"
    # counts of events, so that a machine that tests nothing is detected
    seen: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(
            tempfile.mkdtemp(prefix="pagoda-blocks-", dir="/dev/shm")
        )
        self.cache: Cache | None = None
        self.other: Cache | None = None
        self.requests: dict[str, Request] = {}
        self.tickets: dict[int, Ticket] = {}
        self.gone: list[int] = []  # tickets that have ended
        self.pins: list[tuple[Prompt, set[bytes]]] = []
        # every key ever requested -> the KV of its block
        self.right: dict[bytes, tuple[int, ...]] = {}
        self.named: dict[object, list[bytes]] = {}  # the keys of prompts
        # key -> the last step at which a request or a pin had it in its path
        self.used: dict[bytes, int] = {}
        self.busy: list[list[Reserved]] = []  # what the other process is storing
        self.fetches: list[Future[Hit | None]] = []
        self.epoch = self.names = self.now = 0
        self.dead: set[int] = set()  # ranks

    def start(self, blocks: int) -> None:
        """An engine with an empty memory."""
        self.devices = Devices(self.ranks, blocks)
        self.devices.scribble(range(blocks))
        self.manager = BlockManager(
            blocks,
            BLOCK,
            cache=self.cache,
            prefix_caching=self.prefix,
            write_back=self.write_back_on,
            ranks=self.ranks,
        )
        self.requests = {}
        self.tickets = {}
        self.gone = []
        self.dead = set()
        self.used = {}
        # without a cache, only the manager knows of other weights
        if self.cache is None:
            self.epoch = 0
            self.right = {}
            self.named = {}

    def open(self, slots: int) -> Cache:
        """One process's cache on the host tier (and the disk)."""
        disk = (
            {"disk_path": str(self.root / "disk"), "disk_size": 96 * 8192}
            if self.kind == "disk"
            else {}
        )
        config = Config(
            chunk_tokens=BLOCK,
            host_path=str(self.root / "host"),
            host_size=slots * 4096,
            min_hit_tokens=self.min_hit * BLOCK,
            worth_it=False,
            policy="lru",
            deadline_seconds=20.0,  # patience: the machine may be busy
            **disk,  # type: ignore[arg-type]
        )
        return Cache(
            config, namespace=Namespace("m"), layout=self.layout, clock=self.clock
        )

    # ---- what can be seen

    @property
    def ledger(self) -> Ledger | None:
        """The host tier's."""
        host = None if self.cache is None else self.cache._tiers.host
        return None if host is None else host.ledger

    def keys(self, prompt: Prompt) -> list[bytes]:
        """The keys of a prompt's whole blocks under the present weights; their KV is known from now
        on.
        """
        name = (tuple(prompt.tokens), prompt.items, prompt.salt, self.epoch)
        if name not in self.named:
            self.named[name] = keys = self.hashed(prompt)
            right = prompt.right(self.epoch)
            for at, key in enumerate(keys):
                tags = right[at * BLOCK : (at + 1) * BLOCK]
                assert self.right.setdefault(key, tags) == tags, (
                    "one key for two KVs"
                )
        return self.named[name]

    def hashed(self, prompt: Prompt) -> list[bytes]:
        """The keys as the cache gives them, or as a manager without one makes them."""
        if self.cache is not None:
            rows = self.cache.keys(
                prompt.tokens, items=prompt.items, salt=prompt.salt
            )
            return [key for _, _, key in rows]
        root = self.manager._lower_tiers.root(None, prompt.salt)
        return chunk_keys(prompt.tokens, root, BLOCK, prompt.items)

    def on_host(self) -> dict[bytes, tuple[int, int]]:
        """What the host tier has."""
        rows = () if self.ledger is None else admin.list_chunks(self.ledger)
        return {row.key: (row.slot, row.generation) for row in rows}

    def holds(self) -> int:
        """How many chunks of the host tier are kept from eviction for a load."""
        assert self.ledger is not None
        return self.ledger.session.read(
            lambda txn, tables: len(list(tables.rows(txn, tables.holds))), 20.0
        )

    def below(self, key: bytes) -> bool:
        """Whether a tier below the host has a key."""
        return self.cache is not None and any(
            tier.contains(key) for tier in self.cache._tiers.lower
        )

    def slot_bytes(self, tags: Sequence[int]) -> bytes:
        """What the slot of a block must hold."""
        return np.array(tags, np.uint64).tobytes() * self.ranks

    def snapshot(self) -> dict[str, object]:
        """All that a call which changes nothing must leave as it is."""
        stats = self.manager.stats()
        return {
            "gauges": {name: stats[name] for name in GAUGES},
            "free": self.manager.free,
            "tables": {
                r.name: self.manager.table(r.name) for r in self.running()
            },
            "places": {
                key: self.manager.where(key)
                for key in list(self.right)[-4:]
                if self.kind != "disk"
            },
            "nodes": self.nodes(),
            # over a disk a prefetch may be under way
            "host": self.on_host() if self.kind == "host" else {},
            "order": self.order(),
        }

    def nodes(self) -> dict[bytes, tuple[object, ...]]:
        """The tree."""
        return {
            key: (node.place, node.block, node.locks, node.children, node.ticket)
            for key, node in self.manager._tree.nodes.items()
        }

    def order(self) -> list[bytes]:
        """Which leaves would be evicted, first to last."""
        heap = sorted(
            (*entry[:2], entry[2].key)
            for entry in self.manager._tree._heap
            if entry[2].entry == entry[1]
        )
        return [key for *_, key in heap]

    def picture(self) -> str:
        """Text for the reader of a failure."""
        lines = [
            (
                f"{n.block}: {n.place} at {n.position}, {n.locks} locks, {n.children} children, "
                "used "
                f"{self.used.get(n.key)}"
            )
            for n in self.manager._tree.nodes.values()
        ]
        lines += [
            (
                f"{r.name}: {r.table} shared {r.shared}, {r.computed} of {len(r.prompt)}, waits "
                f"{r.waits}, stale {r.stale}"
            )
            for r in self.running()
        ]
        lines += [str(ticket.plan) for ticket in self.tickets.values()]
        return "\n".join([str(self.manager.stats()), *lines])

    def some_keys(self) -> list[bytes]:
        """Keys of the tree, of the host, and a few others."""
        known = [
            *self.manager._tree.nodes,
            *self.on_host(),
            *list(self.right)[-8:],
        ]
        return list(dict.fromkeys(known))

    def in_tree(self, key: bytes) -> bool:
        """Whether a key hits on the device: its block holds its KV, or a copy into it is under
        way.
        """
        node = self.manager._tree.nodes.get(key)
        if node is None:
            return False
        held = self.devices.blocks_with(self.right[key])
        assert node.block in held or self.coming(node.block), (
            "a block of the tree holds other KV than its key's"
        )
        return True

    def coming(self, block: int) -> bool:
        """Whether a copy to this block is under way."""
        ups = (
            ticket.plan
            for ticket in self.tickets.values()
            if ticket.plan.direction is Direction.UP
        )
        return any(block == copy.block for plan in ups for copy in plan.copies)

    # ---- requests

    def running(self) -> list[Request]:
        """Requests that have blocks."""
        return [request for request in self.requests.values() if request.running]

    def able(self) -> list[Request]:
        """Requests that have blocks and wait for nothing."""
        return [request for request in self.running() if not request.waits]

    def idle(self) -> list[Request]:
        """Requests without blocks."""
        return [
            request for request in self.requests.values() if not request.running
        ]

    def locked(self) -> set[str]:
        """Requests whose blocks are still read by a write-back of the caller."""
        return {
            ticket.lock
            for ticket in self.tickets.values()
            if ticket.lock is not None
        }

    def loose(self) -> list[Request]:
        """Requests that may end or be preempted."""
        locked = self.locked()
        return [
            request for request in self.running() if request.name not in locked
        ]

    # ---- moves

    def copy(
        self,
        ticket: Ticket,
        at: int,
        block: int,
        slot: int,
        rank: int,
        good: bool,
    ) -> None:
        """One copy of one rank: its own share of the slot."""
        assert self.cache is not None
        assert self.cache.slots is not None
        view = (
            self.cache.slots.view(slot)[: BLOCK * 8 * self.ranks]
            .view(np.uint64)
            .reshape(self.ranks, BLOCK)
        )
        kv = self.devices.kv
        if ticket.plan.direction is Direction.UP:
            kv[rank, block] = view[rank] if good else self.devices.rubbish()
        else:
            view[rank] = kv[rank, block] if good else self.devices.rubbish()

    def reported(self, ticket: Ticket) -> bool:
        """Whether all ranks have reported."""
        return set(range(self.ranks)) <= set(ticket.reports) | self.dead

    def ended_by(self) -> list[Ticket]:
        """Which tickets end now: those that all ranks have reported, and that depend on no running
        move.
        """
        ended: dict[int, Ticket] = {}
        while True:
            live = set(self.tickets) - set(ended)
            more = {
                n: self.tickets[n]
                for n in live
                if self.reported(self.tickets[n])
                and not self.tickets[n].deps & live
            }
            if not more:
                return list(ended.values())
            ended |= more
            for number, one in more.items():
                came = self.came(one)
                for behind in (
                    self.tickets.values() if came < len(one.plan.copies) else ()
                ):
                    # it depends on a failed move
                    if number in behind.deps and behind.first > one.first + came:
                        behind.deps = set()

    def came(self, ticket: Ticket) -> int:
        """How many leading copies of a ticket are good: on every rank, and out of a slot that still
        is the chunk's.
        """
        good = 0 if self.dead else min(ticket.reports.values())
        return (
            good
            if ticket.plan.direction is Direction.DOWN
            else min(good, self.standing(ticket))
        )

    def standing(self, ticket: Ticket) -> int:
        """How many leading slots of a ticket still hold the chunks that were there."""
        assert self.ledger is not None
        slots = np.array([copy.slot for copy in ticket.plan.copies])
        generations = np.array(
            [copy.generation for copy in ticket.plan.copies], np.uint64
        )
        return leading(self.ledger.still_valid(slots, generations).tolist())

    def rob(self) -> None:
        """Notes that chunks have been removed under copies."""
        for ticket in self.tickets.values():
            ticket.robbed = True

    def forget_deps(self) -> None:
        """The moves have lost their purpose: each ends by itself, and those that waited for others
        have ended.
        """
        for number in [
            n for n, ticket in self.tickets.items() if self.reported(ticket)
        ]:
            self.gone.append(number)
            del self.tickets[number]
        for ticket in self.tickets.values():
            ticket.deps = set()

    def fetched(self) -> None:
        """Waits for all prefetches."""
        for future in self.fetches:
            future.result(60)
        self.fetches = []

    def settled_below(self) -> None:
        """What was queued for the disk is on it."""
        if self.kind == "disk":
            for cache in (self.cache, self.other):
                assert cache is not None
                cache.flush(20)


def upward(node: Node | None) -> Iterable[Node]:
    """A node and its ancestors."""
    while node is not None:
        yield node
        node = node.parent


def pick(items: Iterable, which: int):  # type: ignore[no-untyped-def,type-arg]
    """One of them."""
    found = list(items)
    return found[which % len(found)]


def leading(flags: Iterable[bool]) -> int:
    """How many leading flags are set."""
    count = 0
    for flag in flags:
        if not flag:
            break
        count += 1
    return count


def blocks_of(tokens: int) -> int:
    """Blocks that so many tokens need."""
    return -(-tokens // BLOCK)
