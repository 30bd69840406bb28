"""The expected result of each call of the block manager, and the invariants after every step,
recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagoda.blocks import (
    Admitted,
    Direction,
    Extended,
    NoRoom,
    Place,
    Plan,
    Settled,
    Waiting,
)
from tests.stateful.blocks_engine import ON_DEVICE, Engine, leading, upward
from tests.stateful.blocks_model import BLOCK, Request, Ticket


class Judge(Engine):
    """An engine that verifies everything."""

    # ---- space

    def saw(
        self, call: str, answer: Admitted | Extended | Waiting | NoRoom
    ) -> None:
        """Counts answers."""
        self.seen[f"{call} {type(answer).__name__}"] += 1
        if isinstance(answer, Admitted):
            self.seen["up"] += answer.plan is not None
            self.seen["waits for another's move"] += len(answer.waits) > (
                answer.plan is not None
            )
            for tier in answer.by_tier:
                self.seen[f"hits {tier}"] += 1

    def judge_refusal(
        self, answer: NoRoom, before: dict[str, object], evict: bool
    ) -> None:
        """Check that a refusal is correct, and changed nothing."""
        assert answer.needed > answer.available >= 0
        after = self.snapshot()
        assert after == before, (
            f"refused, but changed {[name for name in after if after[name] != before[name]]}"
        )

    def judge_waiting(self, answer: Waiting) -> None:
        """Check that there is something to wait for."""
        if answer.plan is not None:
            assert answer.plan.direction is Direction.DOWN
            assert answer.plan.ticket in answer.tickets
            self.took(answer.plan)
        assert answer.tickets and answer.tickets <= set(self.tickets), (
            f"{answer} of {list(self.tickets)}"
        )

    def roomy(self, keys: Sequence[bytes], evict: bool) -> int:
        """Blocks that no request uses: they are free now or when all copies have ended."""
        if not evict:
            return self.manager.free
        used = {block for request in self.running() for block in request.table}
        wanted = set(keys).union(*(pinned for _, pinned in self.pins))
        # its path may pass through a duplicate of its own block
        for request in self.running():
            if request.stale:
                used |= {
                    node.block
                    for node in upward(
                        self.manager._requests[request.name].last_node
                    )
                }
            else:
                wanted |= set(
                    self.keys(request.prompt)[: request.computed // BLOCK]
                )
        used |= {
            node.block
            for key, node in self.manager._tree.nodes.items()
            if key in wanted
        }
        return self.manager.total - len(used)

    def judge_victims(self, before: dict[str, object], needed: int) -> None:
        """Leaves that no request uses, the oldest first, no more than needed."""
        nodes: dict[bytes, tuple[object, ...]] = before["nodes"]  # type: ignore[assignment]
        after = self.manager._tree.nodes
        gone = {
            key
            for key, row in nodes.items()
            if row[0] is Place.DEVICE
            and (key not in after or after[key].place is Place.TO_HOST)
        }
        free: int = before["free"]  # type: ignore[assignment]
        assert len(gone) <= max(0, needed - free), (
            f"{len(gone)} left for {needed} blocks, {free} were free"
        )
        for key in gone:
            assert not nodes[key][2], "a block in use was evicted"
        stayed = [
            key
            for key, row in nodes.items()
            if row[0] is Place.DEVICE
            and not row[2]
            and not row[3]
            and key not in gone
        ]
        spared = [
            key
            for key in stayed
            if key in after
            and not after[key].locks
            and after[key].place is Place.DEVICE
        ]
        if gone and spared:
            oldest = min(
                (self.used[key] for key in spared if key in self.used),
                default=self.now,
            )
            newest = max(
                (self.used[key] for key in gone if key in self.used), default=0
            )
            assert newest <= oldest, (
                f"evicted what was used at {newest}, kept a leaf last used at "
                f"{oldest}\n{self.picture()}"
            )

    def judge_admission(
        self,
        request: Request,
        answer: Admitted,
        needed: int,
        keys: Sequence[bytes],
    ) -> None:
        """The table is complete, and the hits are blocks whose KV is there or being loaded."""
        assert len(answer.table) == needed == len(set(answer.table))
        hit = answer.computed_tokens // BLOCK
        assert answer.computed_tokens % BLOCK == 0
        assert answer.computed_tokens < len(request.prompt)
        assert hit == request.prompt.cut(hit) == answer.shared, answer
        assert sum(answer.by_tier.values()) == answer.computed_tokens
        assert self.prefix or not hit
        for other in self.running():
            own = (
                set(other.table[other.shared :])
                if other.stale
                else set(other.table[other.computed // BLOCK :])
            )
            assert not own & set(answer.table), (
                f"{other.name} writes into blocks of the table"
            )
        request.admitted(answer, self.epoch)
        if answer.plan is not None:
            assert answer.plan.direction is Direction.UP
            assert not self.manager.paused
            assert not self.dead
            assert answer.plan.ticket in answer.waits
            self.took(answer.plan, request)
        assert answer.waits <= set(self.tickets)
        self.devices.scribble(answer.table[answer.shared :])
        assert self.manager.table(request.name) == answer.table

    # ---- hits

    def surely(self, keys: Sequence[bytes]) -> int:
        """Leading blocks that running requests have computed, as their prompts', and have in
        use.
        """
        if not self.prefix:
            return 0
        held: set[bytes] = set()
        for request in self.able():
            if not request.stale:
                count = min(request.computed, request.first_tokens) // BLOCK
                held.update(self.keys(request.prompt)[:count])
        return leading(key in held for key in keys)

    def left(self, request: Request, computed: int) -> None:
        """What a request has computed and released is still in the tree."""
        if self.prefix and not request.waits and not request.stale:
            keys = self.keys(request.prompt)[: computed // BLOCK]
            keys = keys[: self.before_coming(keys)]
            assert all(self.manager.where(key) in ON_DEVICE for key in keys), (
                "what was computed is not cached"
            )
            self.used.update(dict.fromkeys(keys, self.now + 1))

    def before_coming(self, keys: list[bytes]) -> int:
        """How many keys precede the first whose block is being loaded: after that one nothing is
        entered.
        """
        return leading(
            self.manager.where(key) is not Place.TO_DEVICE for key in keys
        )

    def nobodys(self, request: Request) -> int:
        """Blocks at the end of its own ones that no other request, move, pin or cached continuation
        needs.
        """
        kept = {block for other in self.running() for block in other.table}
        kept |= {
            copy.block
            for ticket in self.tickets.values()
            for copy in ticket.plan.copies
        }
        parents = {id(node.parent) for node in self.manager._tree.nodes.values()}
        kept |= {
            n.block
            for n in self.manager._tree.nodes.values()
            if n.locks or id(n) in parents
        }
        # its path may go through nodes that new weights have detached
        for other in self.running():
            kept |= {
                node.block
                for node in upward(self.manager._requests[other.name].last_node)
            }
        return leading(
            block not in kept
            for block in reversed(request.table[request.shared :])
        )

    # ---- moves

    def took(
        self, plan: Plan, leader: Request | None = None, lock: str | None = None
    ) -> None:
        """A plan was returned: no other request has its blocks and slots."""
        assert plan.ticket not in self.tickets and plan.ticket not in self.gone, (
            "a ticket was used twice"
        )
        assert plan.copies
        assert self.cache is not None
        blocks = [copy.block for copy in plan.copies]
        slots = [copy.slot for copy in plan.copies]
        assert len(set(blocks)) == len(blocks)
        assert len(set(slots)) == len(slots)
        ticket = Ticket(plan, leader.name if leader else None, lock=lock)
        host = {place: key for key, place in self.on_host().items()}
        others = [one.plan for one in self.tickets.values()]
        if plan.direction is Direction.UP:
            assert leader is not None
            ticket.first = leader.table.index(blocks[0])
            ticket.deps = leader.waits - {plan.ticket}
            assert (
                blocks == leader.table[ticket.first : ticket.first + len(blocks)]
            )
            assert ticket.first + len(blocks) == leader.shared
            wanted = self.keys(leader.prompt)[ticket.first : leader.shared]
            assert [
                host.get((copy.slot, copy.generation)) for copy in plan.copies
            ] == wanted
            self.devices.scribble(blocks)
        else:
            for copy in plan.copies:
                assert (copy.slot, copy.generation) not in host
            downs = {
                copy.slot
                for other in others
                if other.direction is Direction.DOWN
                for copy in other.copies
            }
            assert not downs & set(slots), "two copies into one slot"
            ticket.source = [
                self.devices.kv[:, block].tobytes() for block in blocks
            ]
            known = {self.slot_bytes(tags) for tags in self.right.values()}
            assert all(held in known for held in ticket.source), (
                "rubbish is on its way to the host"
            )
        # (a cancelled copy DOWN may still read a block that was reassigned: its result is
        # discarded)
        filled = {
            copy.block
            for other in others
            if other.direction is Direction.UP
            for copy in other.copies
        }
        assert not filled & set(blocks), "two copies with one block"
        self.tickets[plan.ticket] = ticket

    def judge_settled(
        self, ticket: Ticket, settled: Settled, before: dict[str, object] | None
    ) -> None:
        """Requests that waited for it continue or wait again; nothing happens while a rank has yet
        to report.
        """
        assert settled.known, "a ticket that is under way was not known"
        ended = self.ended_by()
        assert settled.ended == (
            ticket.plan.ticket in {one.plan.ticket for one in ended}
        ), settled
        for name in ("again", "shortened", "ready"):
            self.seen[name] += len(getattr(settled, name))
        self.seen["behind"] += settled.ended and len(ended) > 1
        self.seen["not ended"] += not settled.ended
        self.seen["ended"] += settled.ended
        if not settled.ended:
            assert not (
                settled.ready
                or settled.shortened
                or settled.again
                or settled.freed
            )
            assert before is None or self.snapshot() == before
            return
        numbers = {one.plan.ticket for one in ended}
        hurt = any(
            self.came(one) < len(one.plan.copies)
            for one in ended
            if one.plan.direction is Direction.UP
        )
        waited = [
            request for request in self.running() if request.waits & numbers
        ]
        for request in waited:
            request.waits -= numbers
        for one in ended:
            del self.tickets[one.plan.ticket]
            self.gone.append(one.plan.ticket)
        back = set(settled.again)
        assert back <= {request.name for request in waited} and (
            hurt or not back
        ), settled
        assert set(settled.shortened) <= set(settled.ready) and (
            hurt or not settled.shortened
        ), settled
        assert len(set(settled.ready)) == len(settled.ready)
        for name in settled.again:
            self.requests[name].back()
        for name, computed in settled.shortened.items():
            self.shorten(self.requests[name], computed)
        ready = {
            request.name
            for request in waited
            if request.running and not request.waits
        }
        assert set(settled.ready) == ready, (
            f"{settled}, but {ready} wait for nothing"
        )
        assert settled.freed >= 0

    def shorten(self, request: Request, computed: int) -> None:
        """It keeps its blocks, and computes from there."""
        assert computed < request.computed
        assert computed % BLOCK == 0
        assert request.prompt.cut(computed // BLOCK) == computed // BLOCK, (
            "shortened to inside an image"
        )
        request.shared = computed // BLOCK
        request.kv = request.kv[:computed]
        self.devices.scribble(request.table[request.shared :])

    # ---- after every step

    def agree_tables(self) -> None:
        """Invariants of requests: right KV, and tables that share leading whole blocks only."""
        owners: dict[int, tuple[int, bytes | None]] = {}
        busy = {
            copy.block
            for t in self.tickets.values()
            for copy in t.plan.copies
            if t.plan.direction is Direction.UP
        }
        for request in self.running():
            keys = (
                request.cached
                if request.stale
                else self.keys(request.prompt)[: request.computed // BLOCK]
            )
            for at, block in enumerate(request.table):
                mine = (at, keys[at] if at < len(keys) else None)
                assert owners.setdefault(block, mine) == mine, (
                    f"block {block} is of two tables: {mine}, {owners[block]}"
                )
                if mine[1] is None:
                    # of no other request
                    owners[block] = (at, request.name.encode())
            if not request.waits:
                assert not busy & set(request.table), (
                    "a copy writes into a table that waits for nothing"
                )
                assert self.devices.holds(request.table, request.kv), (
                    f"{request.name} has wrong KV"
                )
            if not request.stale:
                entered = max(
                    request.shared,
                    min(request.computed, request.first_tokens) // BLOCK,
                )
                self.used.update(dict.fromkeys(keys[:entered], self.now))
        for _, keys_ in self.pins:
            for key in keys_:
                self.used[key] = self.now

    def agree_gauges(self) -> None:
        """The numbers are those of the tables and the tree."""
        manager = self.manager
        stats = self.manager.stats()
        nodes = self.manager._tree.nodes
        assert (
            stats["total"]
            == stats["free"]
            + stats["cached"]
            + stats["in_use"]
            + stats["in_flight"]
        )
        assert manager.in_flight == len(self.tickets), (
            f"{manager.in_flight} in flight, {list(self.tickets)} known"
        )
        tables = {block for request in self.running() for block in request.table}
        tree = {node.block for node in nodes.values()}
        flying = {
            copy.block
            for ticket in self.tickets.values()
            for copy in ticket.plan.copies
        }
        for block in tables | tree:
            assert not manager._pool.is_free(block)
        taken = {
            block
            for block in range(manager.total)
            if not manager._pool.is_free(block)
        }
        tree |= {
            node.block
            for record in manager._requests.values()
            for node in upward(record.last_node)
        }
        assert taken <= tables | tree | flying, (
            f"blocks {taken - tables - tree - flying} are lost"
        )

    def agree_host(self) -> None:
        """Every chunk of the host tier is one that is known, with its bytes; what is being loaded
        stays.

        And `where` is where a key is.
        """
        for ticket in self.tickets.values():
            if ticket.plan.direction is Direction.UP and not ticket.robbed:
                assert self.standing(ticket) == len(ticket.plan.copies), (
                    "a chunk was evicted while it was being loaded"
                )
        fetching = any(not future.done() for future in self.fetches)
        host = self.on_host()
        self.agree_bytes(host)
        self.agree_places(host, fetching)

    def agree_bytes(self, host: dict[bytes, tuple[int, int]]) -> None:
        """The host has only correct KV that was computed."""
        if self.cache is None:
            return
        assert self.cache.slots is not None
        views = self.cache.slots.views([slot for slot, _ in host.values()])
        for (key, (slot, generation)), view in zip(
            host.items(), views, strict=True
        ):
            assert key in self.right, "a key that no request computed"
            if view[: BLOCK * 8 * self.ranks].tobytes() != self.slot_bytes(
                self.right[key]
            ):
                place = np.array([slot]), np.array([generation], np.uint64)
                assert not self.cache.slots.still_valid(*place)[0], (
                    "the host has wrong bytes"
                )

    def agree_places(
        self, host: dict[bytes, tuple[int, int]], fetching: bool
    ) -> None:
        """`where` is where a key is."""
        for key in self.some_keys()[self.now % 8 :: 8]:
            place = self.manager.where(key)
            node = self.manager._tree.nodes.get(key)
            if node is not None:
                assert place == node.place
                assert self.in_tree(key)
            elif fetching:
                assert place not in ON_DEVICE
            elif key in host:
                assert place is Place.HOST
            elif self.below(key):
                assert place is Place.STORAGE
            else:
                assert place is Place.FREED
        for _, pinned in self.pins:
            assert all(
                self.manager.where(key) is Place.DEVICE for key in pinned
            ), "a pinned block has left"
