"""Every call of the block manager, with a check of its result."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from pagoda.blocks import Admitted, Direction, Extended, NoRoom, Place, Waiting
from pagoda.ledger import Reserved, admin
from pagoda.testing import FakeClock
from pagoda.transfer import BlockKV
from tests.stateful.blocks_engine import blocks_of, leading, pick
from tests.stateful.blocks_judge import Judge
from tests.stateful.blocks_model import (
    BLOCK,
    Prompt,
    Request,
    Ticket,
    first_tag,
    next_tag,
)

MOST_REQUESTS = 8


class Calls(Judge):
    """An engine that makes every call of the manager, and checks the answer."""

    # ---- requests arrive, and are looked up

    def add(self, prompt: Prompt) -> None:
        """Add a new request."""
        self.added(prompt)

    def added(self, prompt: Prompt) -> str:
        """Add a request, and return its name."""
        self.names += 1
        name = f"r{self.names}"
        self.manager.add(
            name, prompt.tokens, items=prompt.items, salt=prompt.salt
        )
        self.requests[name] = Request(name, prompt, len(prompt), self.epoch)
        self.keys(prompt)
        assert self.manager.num_tokens(name) == len(prompt)
        return name

    def add_again(self, which: int) -> None:
        """Add another request with the prompt of an existing one."""
        self.added(
            Prompt(*vars(pick(self.requests.values(), which).prompt).values())
        )

    def append(self, which: int, count: int) -> None:
        """Append generated tokens."""
        request = pick(self.requests.values(), which)
        tokens = request.prompt.more(count)
        request.prompt = Prompt(
            [*request.prompt.tokens, *tokens],
            request.prompt.items,
            request.prompt.salt,
        )
        self.manager.append(request.name, tokens)
        if not request.stale:
            self.keys(request.prompt)
        assert self.manager.num_tokens(request.name) == len(request.prompt)

    def match(self, which: int) -> None:
        """Check that a match finds exactly what the memory, the host and the lower tiers have."""
        request = pick(self.idle(), which)
        before = self.snapshot()
        match = self.manager.match(request.name)
        assert self.snapshot() == before, "a look changed something"
        keys = self.keys(request.prompt)
        host = self.on_host()
        here = leading(self.in_tree(key) for key in keys)
        above = here + leading(key in host for key in keys[here:])
        everywhere = here + leading(
            key in host or self.below(key) for key in keys[here:]
        )
        if not self.prefix:
            here = above = everywhere = 0
        cut = request.prompt.cut
        assert match.num_tokens % BLOCK == 0
        assert match.num_tokens == cut(match.num_tokens // BLOCK) * BLOCK
        assert match.device_tokens <= here * BLOCK
        assert match.num_tokens <= cut(everywhere) * BLOCK
        assert match.device_tokens >= cut(min(self.surely(keys), here)) * BLOCK, (
            "a block in use did not hit"
        )
        most = cut(everywhere)
        if most - here < self.min_hit:
            most = cut(here)  # the rest is not worth a load
        # an item cannot end on the host then
        alone = self.manager.paused or self.dead
        ours = cut(here) if alone else min(most, here)
        assert match.device_tokens == ours * BLOCK or self.kind == "disk"
        if not alone:
            assert (
                match.device_tokens + match.host_tokens
                == min(most, above) * BLOCK
                or self.kind == "disk"
            )
            assert match.num_tokens == most * BLOCK or self.kind == "disk"

    def prefetch(self, which: int, wait: bool) -> None:
        """Prefetch from the lower tiers to the host, which has lost some chunks."""
        assert self.ledger is not None
        request = pick(self.idle(), which)
        admin.remove(self.ledger, self.keys(request.prompt)[which % 4 :])
        self.rob()
        future = self.manager.prefetch(request.name)
        if future is not None:
            self.seen["fetched"] += 1
            self.fetches.append(future)
        if wait:
            self.fetched()

    # ---- space

    def admit(
        self, which: int, reserve: int, evict: bool, chunk: int | None = None
    ) -> None:
        """Admit once: the request has its blocks, or waits for free blocks, or is refused and
        nothing has changed.
        """
        self.admitting(pick(self.idle(), which), reserve, evict, chunk)

    def admit_in_the_end(self, which: int, reserve: int) -> None:
        """Every request that waits for blocks gets an answer, however the moves end."""
        request = pick(self.idle(), which)
        for _ in range(4):
            answer = self.admitting(request, reserve, True)
            if not isinstance(answer, Waiting):
                return
            self.settle_all(answer.tickets)
        raise AssertionError(
            "blocks were promised four times and never became free"
        )

    def serve(self, which: int, extra: int) -> None:
        """The life of a request up to its first tokens, in one step, so that there is much to
        share.
        """
        request = pick(self.idle(), which)
        answer = self.admitting(request, extra, True)
        if isinstance(answer, Waiting):
            self.settle_all(answer.tickets)
            self.admitting(request, extra, True)
        if request.running:
            self.settle_all(request.waits)
        if request.running and not request.waits:
            self.compute_to(request, len(request.prompt))

    def flock(self, prompt: Prompt, cuts: list[int]) -> None:
        """Several requests for one prompt that only the host has, at once: they share its moves and
        build on them.
        """
        self.other_stores(prompt)
        for request in self.idle()[
            : max(0, len(self.requests) + len(cuts) - MOST_REQUESTS)
        ]:
            self.manager.release(request.name)
            del self.requests[request.name]
        for cut in cuts:
            name = self.added(prompt.head(min(cut, len(prompt))))
            self.admitting(self.requests[name], 0, True)

    def recall(self, which: int, count: int) -> None:
        """Add a request while the blocks that it would hit are being evicted."""
        self.demote(1 + count)
        leaving = {
            key
            for key, node in self.manager._tree.nodes.items()
            if node.place is Place.TO_HOST
        }
        hits = [
            request
            for request in self.idle()
            if leaving.intersection(self.keys(request.prompt))
        ]
        self.admitting(pick(hits or self.idle(), which), 0, True)

    def follow(self, which: int) -> None:
        """Add and admit a request with the prompt of a running one."""
        if len(self.requests) < MOST_REQUESTS:
            prompt = pick(self.running(), which).prompt
            name = self.added(
                Prompt([*prompt.tokens, 50, 51], prompt.items, prompt.salt)
            )
            self.admitting(self.requests[name], 0, True)

    def admitting(
        self,
        request: Request,
        reserve: int,
        evict: bool,
        chunk: int | None = None,
    ) -> Admitted | Waiting | NoRoom:
        """Call admit, and check the answer."""
        keys = self.keys(request.prompt)
        before = self.snapshot()
        needed = blocks_of(len(request.prompt) + reserve)
        inside = leading(self.in_tree(key) for key in keys) if self.prefix else 0
        answer = self.manager.admit(
            request.name, reserve_tokens=reserve, chunk_tokens=chunk, evict=evict
        )
        self.saw("admit", answer)
        if chunk is not None:
            path = request.prompt.cut(inside)
            most = needed
            if isinstance(answer, Admitted):
                needed = len(answer.table)
                assert needed <= most
                assert needed >= min(most, answer.shared, path + blocks_of(chunk))
                self.seen["in part"] += needed < most
            elif isinstance(answer, NoRoom):
                needed = min(most, inside + blocks_of(chunk))
        if isinstance(answer, NoRoom):
            self.judge_refusal(answer, before, evict)
            room = self.roomy(keys, evict)
            assert needed - min(request.prompt.cut(inside), inside) > room, (
                f"{answer}, {room} can be had\n{self.picture()}"
            )
        elif isinstance(answer, Waiting):
            assert evict
            self.judge_waiting(answer)
            # its path is kept for it, as far as it does not end inside an image
            for key in keys[:inside]:
                self.used.pop(key, None)
            self.judge_victims(before, needed)
        else:
            self.judge_admission(request, answer, needed, keys)
            self.judge_victims(before, needed)
        return answer

    def extend(self, which: int, more: int, evict: bool) -> None:
        """Reserve blocks for more tokens, at the end of the table."""
        request = pick(self.running(), which)
        total = len(request.prompt) + more
        before = self.snapshot()
        answer = self.manager.extend(request.name, total, evict=evict)
        self.saw("extend", answer)
        if isinstance(answer, NoRoom):
            self.judge_refusal(answer, before, evict)
            room = self.roomy((), evict)
            assert blocks_of(total) - len(request.table) > room, (
                f"{answer}, {room} can be had\n{self.picture()}"
            )
        elif isinstance(answer, Waiting):
            assert evict
            self.judge_waiting(answer)
        else:
            assert isinstance(answer, Extended)
            assert answer.table[: len(request.table)] == request.table
            assert (
                len(answer.table)
                == max(blocks_of(total), len(request.table))
                == len(set(answer.table))
            )
            assert answer.new == len(answer.table) - len(request.table)
            new = answer.table[len(request.table) :]
            for other in self.running():
                assert not (set(new) & set(other.table))
            self.devices.scribble(new)
            request.table = answer.table
        if not isinstance(answer, NoRoom):
            self.judge_victims(
                before, blocks_of(total) - len(before["tables"][request.name])
            )  # type: ignore[index]

    def has_room(self, count: int, evict: bool) -> None:
        """Check that it changes nothing, and agrees with the gauges."""
        before = self.snapshot()
        says = self.manager.has_room(count, evict=evict)
        assert self.snapshot() == before
        assert says == (count <= self.roomy((), evict))

    # ---- running

    def compute(self, which: int, count: int) -> None:
        """Compute KV, in pieces of any length."""
        request = pick(self.able(), which)
        self.compute_to(request, request.computed + count)

    def compute_to(self, request: Request, stop: int) -> None:
        """Compute tokens up to `stop`, as far as there are tokens and blocks."""
        stop = min(stop, len(request.prompt), len(request.table) * BLOCK)
        symbols = request.prompt.symbols()
        for at in range(request.computed, stop):
            assert at >= request.shared * BLOCK, (
                "the KV of a shared block would be written"
            )
            before = (
                request.kv[-1] if request.kv else first_tag(request.prompt.salt)
            )
            request.kv.append(next_tag(before, symbols[at], self.epoch))
            self.devices.kv[:, request.table[at // BLOCK], at % BLOCK] = (
                request.kv[-1]
            )
        self.manager.computed(request.name, request.computed)
        assert self.manager.table(request.name) == request.table

    def finish(self, which: int, keep: bool) -> None:
        """Finish a request: its blocks, and on request its output, are cached and may be written
        back to the host.
        """
        request = pick([r for r in self.loose() if not r.waits], which)
        plan = self.manager.finish(request.name, keep_output=keep)
        if plan is not None:
            assert self.write_back_on
            assert plan.direction is Direction.DOWN
            self.took(plan)
        self.left(
            request,
            request.computed
            if keep
            else min(request.computed, request.first_tokens),
        )
        del self.requests[request.name]

    def preempt(self, which: int) -> None:
        """Preempt a request: it releases its blocks, and finds its KV again unless they were
        reused.
        """
        request = pick(self.loose(), which)
        computed = request.computed
        waited = bool(request.waits)
        stale = request.stale
        self.manager.preempt(request.name)
        self.left(request, computed)
        request.back()
        if self.prefix and not waited and not stale:
            found = self.manager.match(request.name).device_tokens
            own = self.before_coming(
                self.keys(request.prompt)[: computed // BLOCK]
            )
            assert found >= request.prompt.cut(own) * BLOCK, (
                "it does not find its own work"
            )

    def release(self, which: int, discard: bool) -> None:
        """Abort a request in any state; twice is an error."""
        locked = self.locked()
        requests = [
            request
            for request in self.requests.values()
            if request.name not in locked
        ]
        if not requests:
            return
        request = pick(requests, which)
        flying = self.manager.in_flight
        free = self.manager.free
        self.manager.release(request.name, discard=discard)
        assert self.manager.in_flight == flying, (
            "a release planned or forgot a move"
        )
        del self.requests[request.name]
        if discard and request.running:
            own = self.nobodys(request)
            assert self.manager.free >= free + own, (
                f"{own} blocks belong to no other, {self.manager.free - free} were freed"
            )
        with pytest.raises(ValueError):
            self.manager.release(request.name)

    # ---- moves

    def demote(self, count: int) -> None:
        """Prefetch ahead of need."""
        before = self.snapshot()
        plan = self.manager.demote(count)
        if plan is not None:
            assert plan.direction is Direction.DOWN
            assert len(plan.copies) <= count
            assert not self.dead
            self.took(plan)
        self.judge_victims(before, count + self.manager.total)

    def settle(self, which: int, rank: int, end: str, count: int) -> None:
        """Report the end of the copies of one rank."""
        ticket = pick(self.tickets.values(), which)
        left = [r for r in range(self.ranks) if r not in ticket.reports]
        if left:
            self.report(ticket, left[rank % len(left)], end, count)

    def settle_all(self, tickets: Iterable[int] | None = None) -> None:
        """Let all copies succeed."""
        for number in sorted(self.tickets if tickets is None else tickets):
            for rank in range(self.ranks):
                ticket = self.tickets.get(number)
                if ticket is not None and rank not in ticket.reports:
                    self.report(ticket, rank, "all", 0)

    def report(self, ticket: Ticket, rank: int, end: str, count: int) -> None:
        """Do the good copies, write garbage for the failed ones, report, and check the outcome."""
        copies = ticket.plan.copies
        number = ticket.plan.ticket
        good = {
            "all": len(copies),
            "count": len(copies),
            "some": min(count, len(copies)),
        }.get(end, 0)
        for at, copy in enumerate(copies):
            self.copy(ticket, at, copy.block, copy.slot, rank, at < good)
        ticket.reports[rank] = good
        before = self.snapshot()
        if end == "failed":
            settled = self.manager.failed(number, rank=rank)
        else:
            settled = self.manager.completed(
                number, rank=rank, blocks=None if end == "all" else good
            )
        self.judge_settled(ticket, settled, before)

    def late(self, which: int, rank: int, end: str) -> None:
        """Check that a late, an unknown or a repeated report changes nothing."""
        number = 10**6 + which
        rank = rank % self.ranks
        again = [
            ticket for ticket in self.tickets.values() if rank in ticket.reports
        ]
        if end == "all" and again:
            number = pick(again, which).plan.ticket
        elif end != "count" and self.gone:
            number = pick(self.gone, which)
        before = self.snapshot()
        report = (
            self.manager.failed if end == "failed" else self.manager.completed
        )
        settled = report(number, rank=rank)
        assert not settled.known
        assert not (
            settled.ready or settled.shortened or settled.again or settled.freed
        )
        assert self.snapshot() == before

    def write_back(self, which: int) -> None:
        """By keys alone, as a decoder does that has no tree; the blocks stay as they are until the
        ticket ends.
        """
        request = pick([r for r in self.able() if not r.stale], which)
        count = request.computed // BLOCK
        prompt = request.prompt.head(count * BLOCK)
        plan = self.manager.write_back(
            prompt.tokens,
            request.table[:count],
            items=prompt.items,
            salt=prompt.salt,
        )
        if plan is not None:
            assert plan.direction is Direction.DOWN
            assert not self.manager.paused
            assert not self.dead
            assert {copy.block for copy in plan.copies} <= set(
                request.table[:count]
            )
            self.took(plan, lock=request.name)

    # ---- pins, pauses, resets

    def pin(self, which: int) -> None:
        """Pin leading blocks on the device."""
        prompt = pick(self.requests.values(), which).prompt
        keys = self.keys(prompt)
        tokens = self.manager.pin(
            prompt.tokens, items=prompt.items, salt=prompt.salt
        )
        assert tokens % BLOCK == 0
        for key in keys[: tokens // BLOCK]:
            assert self.in_tree(key)
        if tokens:
            self.pins.append((prompt.head(tokens), set(keys[: tokens // BLOCK])))

    def unpin(self, which: int) -> None:
        """Unpin them."""
        prompt, keys = self.pins.pop(which % len(self.pins))
        tokens = self.manager.unpin(
            prompt.tokens, items=prompt.items, salt=prompt.salt
        )
        assert tokens == len(keys) * BLOCK

    def pause(self) -> None:
        """Pause or resume moves."""
        if self.manager.paused:
            self.manager.resume()
            assert not self.manager.paused
        else:
            self.manager.pause()
            assert self.manager.paused

    def reset(self, abandon: bool) -> None:
        """Reset: everything is dropped; the blocks of running copies are freed at once or at their
        end.
        """
        if not abandon and self.locked():
            return
        self.manager.reset(abandon=abandon)
        self.requests = {}
        self.pins = []
        self.forget_deps()
        if abandon:
            self.gone += self.tickets
            self.tickets = {}
        assert not self.manager._tree.nodes
        assert self.manager.in_flight == len(self.tickets)
        flying = {
            copy.block
            for ticket in self.tickets.values()
            for copy in ticket.plan.copies
        }
        assert self.manager.free >= self.manager.total - len(flying)

    def weights_changed(self) -> None:
        """Change the weights: nothing cached hits again; requests that waited for a move wait for
        blocks again.
        """
        waited = {request.name for request in self.running() if request.waits}
        for request in self.able():
            if not request.stale:
                request.cached = self.keys(request.prompt)[
                    : request.computed // BLOCK
                ]
        back = self.manager.weights_changed()
        assert set(back) == waited
        assert len(back) == len(waited)
        self.epoch += 1
        self.pins = []
        self.forget_deps()
        for request in self.requests.values():
            request.stale = request.running and not request.waits
            if request.name in waited:
                request.back()
        for request in self.idle():
            match = self.manager.match(request.name)
            assert match.num_tokens == 0 or self.surely(
                self.keys(request.prompt)
            ), "KV of old weights hits"

    def lose(self, rank: int) -> None:
        """Let a rank die: moves that waited only for it end now, the others with the report of the
        other rank.
        """
        waiting = [self.tickets[number] for number in sorted(self.tickets)]
        waiting = [ticket for ticket in waiting if rank not in ticket.reports]
        answers = self.manager.lost(rank)
        assert len(answers) == len(waiting)
        assert self.manager.paused
        for ticket, settled in zip(waiting, answers, strict=True):
            ticket.reports[rank] = 0
            self.judge_settled(ticket, settled, None)
        self.dead.add(rank)
        self.agrees()
        self.drain()
        # a new engine finds what the old one left on the host
        self.start(self.manager.total)

    # ---- the other process

    def other_stores(self, prompt: Prompt) -> None:
        """Let another process store a prompt, and evict old chunks."""
        assert self.other is not None
        if len(self.keys(prompt)):
            right = np.array(prompt.right(self.epoch), np.uint64)[
                : len(prompt) // BLOCK * BLOCK
            ]
            blocks = np.repeat(right.reshape(-1, 1, BLOCK), self.ranks, axis=1)
            kv = BlockKV(np.ascontiguousarray(blocks), self.layout)
            self.other.store(
                prompt.tokens, kv, items=prompt.items, salt=prompt.salt
            )
            self.settled_below()

    def other_begins(self, prompt: Prompt, keep: bool) -> None:
        """Let another process begin a store: the keys are busy until it ends or aborts."""
        assert self.cache is not None
        assert self.ledger is not None
        if self.busy:
            self.ledger.abort(self.busy.pop())
        elif keep:
            keys = self.keys(prompt)[:4]
            root = self.cache._weights.scope(None, prompt.salt)[0].root
            outcomes = self.ledger.reserve(keys, namespace=root, tokens=BLOCK)
            self.busy.append(
                [one for one in outcomes if isinstance(one, Reserved)]
            )

    def other_removes(self, which: int, count: int) -> None:
        """Remove chunks on request; every second time chunks that are being copied up."""
        assert self.ledger is not None
        keys = list(self.on_host())
        ups = [
            one
            for one in self.tickets.values()
            if one.plan.direction is Direction.UP
        ]
        if ups and which % 2:
            places = {
                (copy.slot, copy.generation)
                for copy in pick(ups, which).plan.copies
            }
            keys = [
                key for key, place in self.on_host().items() if place in places
            ]
        admin.remove(self.ledger, keys[which % max(1, len(keys)) :][:count])
        self.rob()

    def wait(self, seconds: float) -> None:
        """Advance the clock; leases end."""
        if isinstance(self.clock, FakeClock):
            self.clock.advance(seconds)

    # ---- wrong use

    def wrong(self, which: int) -> None:
        """Make a wrong call: a ValueError, and nothing has changed."""
        manager = self.manager
        before = self.snapshot()
        wrongs = [
            lambda: manager.release("nobody"),
            lambda: manager.finish("nobody"),
            lambda: manager.admit("nobody"),
            lambda: manager.append("nobody", [1]),
        ]
        for request in self.running():
            wrongs += [
                lambda name=request.name: manager.admit(name),
                lambda name=request.name: manager.add(name, [1, 2]),
                lambda r=request: manager.computed(
                    r.name, len(r.table) * BLOCK + 1
                ),
            ]
        for request in self.idle():
            wrongs += [
                lambda name=request.name: manager.computed(name, 1),
                lambda name=request.name: manager.extend(name, 9),
                lambda name=request.name: manager.preempt(name),
            ]
        with pytest.raises(ValueError):
            wrongs[which % len(wrongs)]()
        assert self.snapshot() == before
