"""BlockManager: the device blocks of one engine, from a request's first match to its release.

    add ─▶ waiting ── admit ─▶ admitted ── extend, computed ... ──▶ finish, release ─▶ (forgotten)
              ▲                   │
              └──── preempt ──────┘          finish and preempt leave what was computed in the prefix tree

It moves no bytes. Copies are handed out as plans; the engine does them and tells their end by ticket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from itertools import islice

from pagoda.blocks.admission import Admission
from pagoda.blocks.allocator import BlockPool, Rooms
from pagoda.blocks.completion import Ends
from pagoda.blocks.lower_tiers import Storeys
from pagoda.blocks.moves import Moves, Source
from pagoda.blocks.plans import Admitted, Extended, Match, Place, Plan, Refused, Settled, Waiting
from pagoda.blocks.request_state import Record, blocks_for
from pagoda.blocks.tree import Node, Tree, upward
from pagoda.cache import Cache
from pagoda.cache.hit import Hit
from pagoda.keys import Item, TokenIds, chunk_keys

__all__ = ["BlockManager"]

_COUNTERS = (
    "requests",
    "hit_requests",
    "asked_tokens",
    "hit_tokens_device",
    "hit_tokens_host",
    "hit_tokens_storage",
    "evicted_blocks",
    "dropped_blocks",
    "demoted_blocks",
    "promoted_blocks",
    "cancelled_moves",
)


class BlockManager:
    """Pool, prefix tree and moves of one device pool, over the host tier and what lies below it.

    Not thread-safe: it is called by one scheduler thread, also for the reports of other ranks. Every wrong use is a
    ValueError and changes nothing; trouble in the tiers is a shorter result.
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        *,
        cache: Cache | None = None,
        prefix_caching: bool = True,
        write_back: bool = True,
        ranks: int = 1,
    ) -> None:
        """Manage blocks 0 .. num_blocks - 1 of `block_tokens` tokens each; a chunk of `cache` is one block.

        Without `cache`, what is evicted is gone. Without `prefix_caching` it is a plain pool. `write_back`: what a
        finished request leaves on the device is copied to the host at once, so that evicting it costs nothing.
        """
        if block_tokens < 1 or ranks < 1:
            raise ValueError(f"block_tokens and ranks must be at least 1, got {block_tokens}, {ranks}")
        if cache is not None and cache.layout.chunk_tokens != block_tokens:
            raise ValueError(
                f"a block has {block_tokens} tokens, a chunk of the cache {cache.layout.chunk_tokens}: "
                "build the cache's layout with chunk_tokens = block_tokens"
            )
        self.block_tokens = block_tokens
        self.prefix_caching = prefix_caching
        self._write_back = write_back
        self._storeys = Storeys(cache)
        self._pool = BlockPool(num_blocks)
        self._tree = Tree()
        self._moves = Moves(self._storeys.slots)
        self._rooms = Rooms(self._pool, self._tree, self._moves)
        self._records: dict[str, Record] = {}
        self._ends = Ends(self._rooms, self._records, block_tokens, ranks)
        self._census = Census(self._rooms, self._records)
        self._admission = Admission(self._rooms, self._storeys, prefix_caching)
        self._pins = Pins(self._rooms)

    # ---- a request's tokens

    def add(
        self,
        request_id: str,
        tokens: TokenIds,
        *,
        items: Iterable[Item] = (),
        lora: str | None = None,
        salt: str | None = None,
    ) -> None:
        """Make a request known: hashes its whole blocks, takes and pins nothing. ValueError if it is known already."""
        if request_id in self._records:
            raise ValueError(f"request {request_id!r} is known already: release or finish it first")
        record = Record(request_id, lora, salt, self.block_tokens)
        if self.prefix_caching:
            record.rehash(self._storeys.root(lora, salt))
        record.append(tokens, items)
        if not record.num_tokens:
            raise ValueError(f"request {request_id!r} has no tokens")
        record.prompt_tokens = record.num_tokens
        self._records[request_id] = record

    def append(self, request_id: str, tokens: TokenIds) -> None:
        """Add generated tokens; only blocks that they fill are hashed."""
        self._record(request_id).append(tokens)

    def num_tokens(self, request_id: str) -> int:
        """How many tokens the request has, generated ones included."""
        return self._record(request_id).num_tokens

    def table(self, request_id: str) -> list[int]:
        """The device blocks of a request in order (a copy); empty while it waits."""
        return list(self._record(request_id).table)

    # ---- finding

    def match(self, request_id: str) -> Match:
        """Say what an admission would find. Pins nothing; on the host it leases the run for a moment."""
        return self._admission.match(self._waiting(request_id))

    def prefetch(self, request_id: str) -> Future[Hit] | None:
        """Begin to bring what lower tiers have of a waiting request up to the host; None if there is nothing to do.

        Blocks are taken by `admit` only, once the length is known. Who wants the same run shares one future.
        """
        return self._admission.prefetch(self._waiting(request_id))

    def where(self, key: bytes) -> Place:
        """Where the KV of a key is, nearest place first. Changes nothing."""
        node = self._tree.nodes.get(key)
        return self._storeys.where(key) if node is None else node.place

    # ---- admission

    def admit(
        self,
        request_id: str,
        *,
        reserve_tokens: int = 0,
        chunk_tokens: int | None = None,
        evict: bool = True,
    ) -> Admitted | Waiting | Refused:
        """Give a waiting request blocks for its tokens and `reserve_tokens` more; what its prefix hits is shared.

        With `chunk_tokens` (chunked prefill) there need not be room for all: it gets what is on the device, blocks for
        what the host has and for that many tokens more, as far as there is room, and at least for that many tokens;
        `extend` gives the rest as the prompt is computed. Refused has changed nothing; Waiting has begun to make room,
        and the request goes on waiting.
        """
        reserve = _count("reserve_tokens", reserve_tokens)
        if chunk_tokens is not None and chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
        return self._admission.admit(self._waiting(request_id), reserve, evict, chunk_tokens)

    # ---- while it runs

    def extend(self, request_id: str, num_tokens: int, *, evict: bool = True) -> Extended | Waiting | Refused:
        """Give an admitted request blocks for `num_tokens` tokens in all. All or nothing, as `admit`."""
        record = self._admitted_one(request_id)
        new = blocks_for(_count("num_tokens", num_tokens), self.block_tokens) - len(record.table)
        if new <= 0:
            return Extended(list(record.table), 0)
        shortage = self._rooms.shortage(new, evict=evict)
        if shortage is not None:
            return shortage
        waiting = self._rooms.make(new)
        if waiting is not None:
            return waiting
        blocks = self._pool.take(new)
        assert blocks is not None, "make() has seen to it that they are free"
        record.table += blocks
        return Extended(list(record.table), new)

    def computed(self, request_id: str, num_tokens: int) -> None:
        """Say that the first `num_tokens` tokens have their KV: whole blocks of the prompt can be hit from now on."""
        record = self._admitted_one(request_id)
        room = min(record.num_tokens, len(record.table) * self.block_tokens)
        if record.waits:
            raise ValueError(f"request {request_id!r} waits for tickets {sorted(record.waits)}")
        if not record.computed_tokens <= num_tokens <= room:
            raise ValueError(
                f"request {request_id!r}: {num_tokens} tokens cannot be computed, "
                f"{record.computed_tokens} were and {room} have blocks"
            )
        record.computed_tokens = num_tokens
        self._enter(record, min(num_tokens, record.prompt_tokens))

    def _enter(self, record: Record, num_tokens: int) -> None:
        """Enter whole computed blocks into the tree, behind the request's path."""
        if record.stale or not self.prefix_caching:
            return
        for i in range(record.entered, num_tokens // self.block_tokens):
            key, tip = record.keys[i], record.tip
            node = self._tree.nodes.get(key)
            if node is not None and node.parent is not tip:  # it is leaving and out of reach
                node = None
            if node is None:
                node = self._tree.insert(key, record.root, tip, record.table[i])
                record.made.append(node)
            elif node.place is Place.TO_DEVICE:
                return
            else:
                self._rooms.call_back([node])
                self._tree.lock(node)
                self._rooms.unlock(tip)
                record.twins.append(record.table[i])
            record.tip, record.entered = node, i + 1

    # ---- the end

    def finish(self, request_id: str, *, keep_output: bool = True) -> Plan | None:
        """Forget an admitted request; what it computed stays to be hit, output blocks too if they are to be kept.

        Returns the copies that the host lacks of it, if it is to be written back.
        """
        record = self._admitted_one(request_id)
        if not record.waits:
            most = record.computed_tokens if keep_output else record.prompt_tokens
            self._enter(record, min(record.computed_tokens, most))
        plan = self._written_back(record)
        self._let_go(record)
        del self._records[request_id]
        return plan

    def preempt(self, request_id: str) -> None:
        """Take an admitted request's blocks away; it waits, and finds what it had computed, output too, by matching."""
        record = self._admitted_one(request_id)
        if not record.waits:
            self._enter(record, record.computed_tokens)
        self._let_go(record)

    def release(self, request_id: str, *, discard: bool = False) -> None:
        """Forget a request, wherever it is.

        `discard`: what it computed since its admission, and nobody else uses, goes at once and is not demoted.
        """
        record = self._record(request_id)
        made = record.made if discard else []
        self._let_go(record)
        gone = (self._tree.drop(node) for node in reversed(made))
        self._pool.give_back([block for block in gone if block is not None])
        del self._records[request_id]

    def _let_go(self, record: Record) -> None:
        self._pool.give_back(record.own)
        self._rooms.unlock(record.tip, self._tree.now())
        record.let_go()

    def _written_back(self, record: Record) -> Plan | None:
        if not self._write_back or self._rooms.paused or record.stale or record.waits or record.tip is None:
            return None
        keys = record.keys[: record.entered]
        have = len(self._storeys.find(keys, 0).slots)
        nodes = list(islice(upward(record.tip), len(keys) - have))[::-1]
        sources = [
            Source(node.key, node.root, node.position, _key(node.parent), node.block, None) for node in nodes
        ]
        planned = self._moves.down(sources, path=nodes)
        if planned.lock is not None:
            self._tree.lock(planned.lock)
        return planned.plan

    # ---- moves

    def write_back(
        self,
        tokens: TokenIds,
        table: Sequence[int],
        *,
        items: Iterable[Item] = (),
        lora: str | None = None,
        salt: str | None = None,
    ) -> Plan | None:
        """Plan to copy what the host lacks of the whole blocks of `tokens`, in blocks `table`, down to it.

        By keys alone, for the decoder of a producer/decoder split: the blocks stay the caller's, and must stay as they
        are until the ticket has ended. Raises ValueError if there is not one block a key.
        """
        root = self._storeys.root(lora, salt)
        keys = chunk_keys(tokens, root, self.block_tokens, items)
        if len(keys) != len(table):
            raise ValueError(
                f"{len(keys)} whole blocks of tokens and {len(table)} device blocks: need as many"
            )
        if self._rooms.paused:
            return None
        have = len(self._storeys.find(keys, 0).slots)
        parents = [None, *keys]
        rows = list(zip(keys, parents, table, strict=False))
        sources = [Source(key, root, i, parent, block, None) for i, (key, parent, block) in enumerate(rows)]
        return self._moves.down(sources[have:]).plan

    def demote(self, num_blocks: int) -> Plan | None:
        """Begin to free up to `num_blocks` blocks ahead of need; what needs no copy is free when this returns."""
        return self._rooms.lower(_count("num_blocks", num_blocks))

    def completed(self, ticket: int, *, rank: int = 0, blocks: int | None = None) -> Settled:
        """Say that the copies of a plan have ended, and that the first `blocks` of them (None: all) are good.

        It is settled, by the minimum, when every rank has said so. A ticket that is late or unknown changes nothing.
        """
        return self._ends.report(ticket, rank, blocks)

    def failed(self, ticket: int, *, rank: int = 0) -> Settled:
        """Say that the copies of a plan have ended, and that none of them is good."""
        return self._ends.report(ticket, rank, 0)

    def lost(self, rank: int) -> list[Settled]:
        """Say that a rank has died: every ticket that waits for it fails, and no new moves are planned."""
        settled = self._ends.lost(rank)
        self._rooms.paused = True
        return settled

    @property
    def in_flight(self) -> int:
        """How many tickets have not ended."""
        return len(self._moves.under_way)

    @property
    def paused(self) -> bool:
        """Whether no new moves are planned."""
        return self._rooms.paused

    def pause(self) -> None:
        """Plan no new moves: what is evicted is dropped, the host is not asked. Drained when none is `in_flight`."""
        self._rooms.paused = True

    def resume(self) -> None:
        """Plan moves again, unless a rank was lost: its share of every chunk would be missing."""
        self._rooms.paused = self._ends.short_of_ranks

    # ---- pins, clearing

    def pin(
        self,
        tokens: TokenIds,
        *,
        items: Iterable[Item] = (),
        lora: str | None = None,
        salt: str | None = None,
    ) -> int:
        """Keep the leading blocks of `tokens` that are on the device there, until `unpin`; returns how many tokens."""
        keys = chunk_keys(tokens, self._storeys.root(lora, salt), self.block_tokens, items)
        names = chunk_keys(tokens, self._storeys.lasting_root(lora, salt), self.block_tokens, items)
        return self._pins.pin(keys, names) * self.block_tokens

    def unpin(
        self,
        tokens: TokenIds,
        *,
        items: Iterable[Item] = (),
        lora: str | None = None,
        salt: str | None = None,
    ) -> int:
        """End the longest pin on a prefix of `tokens`; returns its tokens. ValueError if there is none."""
        names = chunk_keys(tokens, self._storeys.lasting_root(lora, salt), self.block_tokens, items)
        return self._pins.unpin(names) * self.block_tokens

    def reset(self, *, abandon: bool = False) -> None:
        """Forget requests, tree and pins. Blocks of running copies come back when their tickets end.

        `abandon`: the engine says that no copy is running any more, so everything comes back at once. What the host and
        lower tiers have stays; `Cache.clear` gives that up.
        """
        self._ends.call_off_all()
        for record in self._records.values():
            self._let_go(record)
        self._records.clear()
        self._clear_tree()
        if abandon:
            self._ends.abandon_all()

    def weights_changed(self) -> tuple[str, ...]:
        """Say that the model's weights were updated in place: nothing cached before hits again, in any tier.

        Admitted requests keep their blocks, and what they compute is never cached; preempt them to begin anew. Returns
        those that waited for a move: they wait to be admitted again. Raises StoreError as `Cache.weights_changed`.
        """
        self._storeys.weights_changed()
        again = self._ends.call_off_all()
        for record in self._records.values():
            record.stale = record.admitted
        self._clear_tree()
        return tuple(again)

    def _clear_tree(self) -> None:
        self._pins.clear()
        self._pool.give_back(self._tree.clear())

    # ---- the whole

    @property
    def total(self) -> int:
        """How many blocks there are."""
        return self._pool.total

    @property
    def free(self) -> int:
        """How many hold nothing."""
        return self._pool.free

    def resize(self, num_blocks: int) -> None:
        """Set the number of blocks, as engines know it only after profiling or give some of them back.

        What is cached in blocks that go, or hangs below it, is dropped without a copy: `demote` before keeps it. Raises
        ValueError, and changes nothing, if one of those is in use, pinned or in flight.
        """
        self._pool.check_size(num_blocks)
        gone = self._tree.below([node for node in self._tree.nodes.values() if node.block >= num_blocks])
        cached = {node.block for node in gone if node.place is Place.DEVICE and not node.locks}
        busy = [
            block for block in range(num_blocks, self._pool.total)
            if not self._pool.is_free(block) and block not in cached
        ]  # fmt: skip
        if busy:
            raise ValueError(f"blocks {busy} are in use: {num_blocks} blocks are too few until they are free")
        dropped = [self._tree.drop(node) for node in gone]
        self._pool.give_back([block for block in dropped if block is not None])
        self._rooms.counts["dropped_blocks"] += len(gone)
        self._pool.resize(num_blocks)

    def has_room(self, num_blocks: int, *, evict: bool = False) -> bool:
        """Whether so many blocks are free or, with `evict`, could be made free. Changes nothing."""
        blocks = _count("num_blocks", num_blocks)
        return not isinstance(self._rooms.shortage(blocks, evict=evict), Refused)

    def stats(self) -> dict[str, int | float]:
        """Gauges, and counters since the beginning; times in seconds."""
        return {
            **self._census.gauges(),
            "pinned": len(self._pins.nodes()),
            **{name: self._rooms.counts[name] for name in _COUNTERS},
            "match_seconds": self._admission.match_seconds,
            "host_seconds": self._storeys.host_seconds,
            "fetch_seconds": self._storeys.fetch_seconds,
        }

    def check(self) -> None:
        """Raise AssertionError, with the numbers, unless every block is in one place and all counts agree.

        free + cached + in_use + in_flight == total.
        """
        self._census.check(self._pins.nodes())

    # ---- inner

    def _record(self, request_id: str) -> Record:
        try:
            return self._records[request_id]
        except KeyError:
            raise ValueError(f"there is no request {request_id!r}: it was released, or never added") from None

    def _waiting(self, request_id: str) -> Record:
        record = self._record(request_id)
        if record.admitted:
            raise ValueError(f"request {request_id!r} is admitted already")
        return record

    def _admitted_one(self, request_id: str) -> Record:
        record = self._record(request_id)
        if not record.admitted:
            raise ValueError(f"request {request_id!r} waits to be admitted")
        return record


def _count(name: str, number: int) -> int:
    if number < 0:
        raise ValueError(f"{name} must not be negative, got {number}")
    return number


def _key(node: Node | None) -> bytes | None:
    return None if node is None else node.key


class Pins:
    """Locks that belong to no request. Not thread-safe.

    A prefix is pinned by its keys, and unpinned by its names: keys under a root that new weights leave as it is.
    """

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._by_name: dict[bytes, list[Node]] = {}  # the last node of each pinned prefix, once a pin

    def nodes(self) -> list[Node]:
        """The last node of each pinned prefix."""
        return [node for nodes in self._by_name.values() for node in nodes]

    def pin(self, keys: Sequence[bytes], names: Sequence[bytes]) -> int:
        """Keep the leading keys that are on the device there; returns how many."""
        path = self._rooms.tree.path(keys)
        self._rooms.call_back(path)
        while path and path[-1].place is not Place.DEVICE:
            path.pop()
        if path:
            self._rooms.tree.lock(path[-1])
            self._by_name.setdefault(names[len(path) - 1], []).append(path[-1])
        return len(path)

    def unpin(self, names: Sequence[bytes]) -> int:
        """End the longest pin on a prefix of `names`; returns its length. ValueError if there is none."""
        name = next((name for name in reversed(names) if name in self._by_name), None)
        if name is None:
            raise ValueError("no prefix of these tokens is pinned")
        node = self._by_name[name].pop()
        if not self._by_name[name]:
            del self._by_name[name]
        self._rooms.unlock(node, self._rooms.tree.now())
        return node.position + 1

    def clear(self) -> None:
        """End all pins."""
        for node in self.nodes():
            self._rooms.unlock(node)
        self._by_name.clear()


class Census:
    """Counts blocks and locks; changes nothing. Not thread-safe."""

    def __init__(self, rooms: Rooms, records: dict[str, Record]) -> None:
        self._pool = rooms.pool
        self._tree = rooms.tree
        self._moves = rooms.moves
        self._records = records

    def gauges(self) -> dict[str, int]:
        """Blocks by what they are: nothing, in the tree, a request's alone, moving; and how many could be evicted."""
        orphans = sum(move.size for move in self._moves.ups() if move.void)
        own = sum(len(record.own) for record in self._records.values())
        return {
            "total": self._pool.total,
            "free": self._pool.free,
            "cached": self._tree.devices,
            "in_use": own + self._tree.detached,
            "in_flight": self._tree.leaving + self._tree.coming + orphans,
            "evictable": self._tree.evictable,
        }

    def check(self, pinned: Sequence[Node]) -> None:
        """Raise AssertionError unless each block is in one place, each lock has its owner and all counts agree."""
        self._pool.check()
        self._tree.check()
        gauges = self.gauges()
        parts = {name: gauges[name] for name in ("free", "cached", "in_use", "in_flight")}
        assert sum(parts.values()) == self._pool.total, f"{parts} do not add up to {self._pool.total}"
        blocks = self._blocks()
        assert len(set(blocks)) == len(blocks), f"a block is in two places: {sorted(blocks)}"
        assert not any(map(self._pool.is_free, blocks)), f"a block is in use and free: {sorted(blocks)}"
        leaving = sum(len(move.leaving()) for move in self._moves.downs())
        assert leaving == self._tree.leaving, f"{self._tree.leaving} leaving counted, {leaving} found"
        self._check_locks(pinned)
        for record in self._records.values():
            shared = [node.block for node in upward(record.tip)][::-1]
            assert len(shared) == record.entered, f"{record.entered} blocks entered, a path of {len(shared)}"

    def _check_locks(self, pinned: Sequence[Node]) -> None:
        """A node is locked by the requests, moves and pins whose paths end there, and once by each locked child."""
        ends = [record.tip for record in self._records.values()]
        ends += self._moves.ends()
        owners: dict[int, int] = {}
        for end in (*ends, *pinned):
            for node in upward(end):
                owners[id(node)] = owners.get(id(node), 0) + 1
                if owners[id(node)] > 1:
                    break
        for node in self._tree.nodes.values():
            wanted = owners.get(id(node), 0)
            assert node.locks == wanted, f"block {node.block} has {node.locks} locks, {wanted} owners"

    def _blocks(self) -> list[int]:
        """Every block that is not free."""
        blocks = [block for record in self._records.values() for block in record.own]
        blocks += [node.block for node in self._tree.nodes.values() if node.place is not Place.TO_HOST]
        blocks += [node.block for move in self._moves.downs() for node in move.leaving()]
        blocks += [node.block for move in self._moves.ups() if move.void for node in move.nodes]
        paths = (upward(record.tip) for record in self._records.values())
        detached = {id(node): node.block for path in paths for node in path if node.detached}
        return blocks + list(detached.values())
