"""BlockManager: the device blocks of one engine, from a request's first match to its release.

    add ─▶ waiting ── admit ─▶ admitted ── extend, computed ... ──▶ finish, release ─▶ (forgotten)
              ▲                   │
              └──── preempt ──────┘          finish and preempt leave what was computed in the
                                             prefix tree

It copies no bytes. It returns copies as plans; the engine does them and reports their end by
ticket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from itertools import islice

from pagoda.blocks.admission import AdmissionControl
from pagoda.blocks.allocator import BlockAllocator
from pagoda.blocks.finished_moves import Completion
from pagoda.blocks.lower_tiers import LowerTiers
from pagoda.blocks.manager_results import (
    Admitted,
    Extended,
    NoRoom,
    Place,
    Plan,
    PrefixMatch,
    Settled,
    Waiting,
)
from pagoda.blocks.moves import Source
from pagoda.blocks.request_state import RequestState, blocks_for
from pagoda.blocks.tree import Node, upward
from pagoda.cache import Cache
from pagoda.cache.results import Hit
from pagoda.keys import Item, TokenIds, as_items, chunk_keys

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
    "down_moves",
    "down_blocks",
    "up_moves",
    "up_blocks",
)


class BlockManager:
    """Pool, prefix tree and moves of the device blocks of one engine, over the host tier and the
    tiers below it.

    Not thread-safe: one scheduler thread calls it, also for the reports of other ranks. Wrong use
    is a ValueError and changes nothing; a failure in the tiers is a shorter result.

    Example:
        >>> # without a cache: a pool with prefix caching
        >>> blocks = BlockManager(num_blocks=8, block_tokens=4)
        >>> blocks.add("first", list(range(10)))
        >>> len(blocks.admit("first", reserve_tokens=2).table)  # 12 tokens
        3
        >>> blocks.computed("first", 10)
        >>> blocks.add("second", list(range(10)))
        >>> # two whole blocks were computed before
        >>> blocks.admit("second", reserve_tokens=2).computed_tokens
        8
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
        """Manage blocks 0 .. num_blocks - 1 of `block_tokens` tokens each; a chunk of `cache` is
        one block.

        Without `cache`, evicted blocks are lost. Without `prefix_caching` it is a plain pool.
        `write_back`: the blocks that a finished request leaves on the device are copied to the host
        at once, so that evicting them is free.
        """
        if block_tokens < 1 or ranks < 1:
            raise ValueError(
                f"block_tokens and ranks must be at least 1, got {block_tokens}, {ranks}"
            )
        if cache is not None and cache.layout.chunk_tokens != block_tokens:
            raise ValueError(
                f"a block has {block_tokens} tokens, a chunk of the cache "
                f"{cache.layout.chunk_tokens}: "
                "build the cache's layout with chunk_tokens = block_tokens"
            )
        self.block_tokens = block_tokens
        self.prefix_caching = prefix_caching
        self._write_back = write_back
        self._lower_tiers = LowerTiers(cache)
        self._allocator = allocator = BlockAllocator(
            num_blocks, self._lower_tiers
        )
        self._pool = allocator.pool
        self._tree = allocator.tree
        self._moves = allocator.moves
        self._requests = allocator.requests
        self._admission = AdmissionControl(allocator, prefix_caching)
        self._completion = Completion(allocator, ranks, block_tokens)
        # The last nodes of pins, by the key of the last block under a root that does not change
        # with the weights.
        self._pinned: dict[bytes, list[Node]] = {}

    # ---- a request's tokens

    def add(
        self,
        request_id: str,
        tokens: TokenIds,
        *,
        items: Iterable[Item] = (),
        lora: str | None = None,
        salt: str | None = None,
        exact_tokens: int | None = None,
    ) -> None:
        """Add a request: hashes its whole blocks, allocates and pins nothing. ValueError if it
        already exists.

        `exact_tokens`: the KV after this many tokens will be approximate. Blocks with such KV have
        no keys: nothing is found for them, no other request finds them, and no tier gets them.
        None: all KV is exact.
        """
        if request_id in self._requests:
            raise ValueError(
                f"request {request_id!r} exists already: release or finish it first"
            )
        if exact_tokens is not None:
            _count("exact_tokens", exact_tokens)
        request = RequestState(
            request_id, lora, salt, self.block_tokens, exact_tokens
        )
        if self.prefix_caching:
            request.rehash(self._lower_tiers.root(lora, salt))
        request.append(tokens, items)
        if not request.num_tokens:
            raise ValueError(f"request {request_id!r} has no tokens")
        request.prompt_tokens = request.num_tokens
        self._requests[request_id] = request

    def append(self, request_id: str, tokens: TokenIds) -> None:
        """Add generated tokens; hashes only the blocks that they fill."""
        self._request(request_id).append(tokens)

    def num_tokens(self, request_id: str) -> int:
        """How many tokens the request has, generated ones included."""
        return self._request(request_id).num_tokens

    def table(self, request_id: str) -> list[int]:
        """The device blocks of a request in order (a copy); empty while it waits."""
        return list(self._request(request_id).table)

    # ---- finding

    def match(self, request_id: str) -> PrefixMatch:
        """Return what an admission would find. Pins nothing; on the host it leases the run for a
        moment.
        """
        return self._admission.match(self._waiting(request_id))

    def prefetch(self, request_id: str) -> Future[Hit] | None:
        """Begin to load a waiting request's chunks from lower tiers into the host tier; None if
        there is nothing to do.

        Only `admit` allocates blocks, once the length is known. Requests for the same run share one
        future.
        """
        return self._admission.prefetch(self._waiting(request_id))

    def where(self, key: bytes) -> Place:
        """Return the nearest place of the KV of a key. Changes nothing."""
        node = self._tree.nodes.get(key)
        return self._lower_tiers.where(key) if node is None else node.place

    # ---- admission

    def admit(
        self,
        request_id: str,
        *,
        reserve_tokens: int = 0,
        chunk_tokens: int | None = None,
        evict: bool = True,
    ) -> Admitted | Waiting | NoRoom:
        """Give a waiting request blocks for its tokens and `reserve_tokens` more; its prefix hits
        are shared.

        With `chunk_tokens` (chunked prefill) there need not be room for all tokens: the request
        gets the blocks on the device and, as far as there is room, blocks for what the host has and
        for `chunk_tokens` more tokens, but at least blocks for `chunk_tokens` tokens. `extend`
        gives the rest while the prompt is computed. NoRoom: nothing has changed. Waiting: blocks
        are being freed, and the request still waits.
        """
        reserve = _count("reserve_tokens", reserve_tokens)
        if chunk_tokens is not None and chunk_tokens < 1:
            raise ValueError(
                f"chunk_tokens must be at least 1, got {chunk_tokens}"
            )
        return self._admission.admit(
            self._waiting(request_id), reserve, evict, chunk_tokens
        )

    # ---- while it runs

    def extend(
        self, request_id: str, num_tokens: int, *, evict: bool = True
    ) -> Extended | Waiting | NoRoom:
        """Give an admitted request blocks for `num_tokens` tokens in total. All or nothing, like
        `admit`.

        Its cost is that of the blocks it adds, whatever the length of the table.
        """
        request = self._admitted_request(request_id)
        table = request.table
        new = blocks_for(
            _count("num_tokens", num_tokens), self.block_tokens
        ) - len(table)
        if new <= 0:
            return Extended([], table, len(table))
        shortage = self._allocator.shortage(new, evict=evict)
        if shortage is not None:
            return shortage
        waiting = self._allocator.make_room(new)
        if waiting is not None:
            return waiting
        blocks = self._pool.allocate(new)
        assert blocks is not None, "make_room() has freed them"
        table += blocks
        return Extended(blocks, table, len(table))

    def computed(self, request_id: str, num_tokens: int) -> None:
        """Report that the first `num_tokens` tokens have their KV: whole blocks can be hit from now
        on.
        """
        request = self._admitted_request(request_id)
        room = min(request.num_tokens, len(request.table) * self.block_tokens)
        if request.waits:
            raise ValueError(
                f"request {request_id!r} waits for tickets {sorted(request.waits)}"
            )
        if not request.computed_tokens <= num_tokens <= room:
            raise ValueError(
                f"request {request_id!r}: {num_tokens} tokens cannot be computed, "
                f"{request.computed_tokens} were and {room} have blocks"
            )
        request.computed_tokens = num_tokens
        self._insert_computed(request, min(num_tokens, request.prompt_tokens))

    def _insert_computed(self, request: RequestState, num_tokens: int) -> None:
        """Insert whole computed blocks into the tree, after the request's path."""
        if request.stale or not self.prefix_caching:
            return
        for i in range(
            request.num_in_tree,
            min(num_tokens // self.block_tokens, len(request.keys)),
        ):
            key = request.keys[i]
            last_node = request.last_node
            node = self._tree.child(last_node, key)
            if node is None:
                node = self._tree.insert(
                    key, request.root, last_node, request.table[i]
                )
                request.inserted.append(node)
            elif node.place is Place.TO_DEVICE:
                return
            else:
                self._allocator.cancel_evictions([node])
                self._tree.lock(node)
                self._allocator.unlock(last_node)
                request.duplicates.append(request.table[i])
            request.last_node = node
            request.num_in_tree = i + 1

    # ---- the end

    def finish(self, request_id: str, *, keep_output: bool = True) -> Plan | None:
        """End an admitted request; its computed blocks stay in the tree, output blocks only with
        `keep_output`.

        Returns the plan to write back the blocks that the host lacks, if there are any.
        """
        request = self._admitted_request(request_id)
        if not request.waits:
            most = (
                request.computed_tokens if keep_output else request.prompt_tokens
            )
            self._insert_computed(request, min(request.computed_tokens, most))
        plan = self._plan_write_back(request)
        self._allocator.requeue(request)
        del self._requests[request_id]
        return plan

    def preempt(self, request_id: str) -> None:
        """Release an admitted request's blocks; it waits again, and a match finds all that it has
        computed.
        """
        request = self._admitted_request(request_id)
        if not request.waits:
            self._insert_computed(request, request.computed_tokens)
        self._allocator.requeue(request)

    def release(self, request_id: str, *, discard: bool = False) -> None:
        """End a request, waiting or admitted.

        `discard`: blocks that it computed since its admission and that no other request uses are
        freed, not demoted.
        """
        request = self._request(request_id)
        inserted = request.inserted if discard else []
        self._allocator.requeue(request)
        self._allocator.discard(reversed(inserted))
        del self._requests[request_id]

    def _plan_write_back(self, request: RequestState) -> Plan | None:
        if (
            not self._write_back
            or self._lower_tiers.paused
            or request.stale
            or request.waits
        ):
            return None
        keys = request.keys[: request.num_in_tree]
        have = len(self._lower_tiers.match_host(keys, 0).slots)
        nodes = list(islice(upward(request.last_node), len(keys) - have))[::-1]
        planned = self._moves.plan_store(
            [Source.of(node, evicted=False) for node in nodes], path=nodes
        )
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
        """Plan to store the whole blocks of `tokens`, in blocks `table`, that the host lacks.

        By keys alone, for the decoder of a producer/decoder split: the caller keeps the blocks,
        which must not change until the ticket has ended. Raises ValueError unless there is one
        block per key.
        """
        root = self._lower_tiers.root(lora, salt)
        keys = chunk_keys(tokens, root, self.block_tokens, items)
        if len(keys) != len(table):
            raise ValueError(
                f"{len(keys)} whole blocks of tokens and {len(table)} device blocks: give one "
                "per whole block"
            )
        if self._lower_tiers.paused:
            return None
        have = len(self._lower_tiers.match_host(keys, 0).slots)
        parents = [None, *keys]
        rows = list(zip(keys, parents, table, strict=False))
        sources = [
            Source(key, root, i, parent, block, None)
            for i, (key, parent, block) in enumerate(rows)
        ]
        return self._moves.plan_store(sources[have:]).plan

    def demote(self, num_blocks: int) -> Plan | None:
        """Begin to free up to `num_blocks` blocks in advance; blocks that need no copy are free on
        return.
        """
        return self._allocator.evict(_count("num_blocks", num_blocks))

    def completed(
        self, ticket: int, *, rank: int = 0, blocks: int | None = None
    ) -> Settled:
        """Report that the copies of a plan have ended, and that the first `blocks` of them (None:
        all) are valid.

        The ticket is settled when every rank has reported, with the minimum of their numbers. A
        late or unknown ticket changes nothing.
        """
        return self._completion.report(ticket, rank, blocks)

    def failed(self, ticket: int, *, rank: int = 0) -> Settled:
        """Report that the copies of a plan have ended, and that all of them failed."""
        return self._completion.report(ticket, rank, 0)

    def lost(self, rank: int) -> list[Settled]:
        """Report that a rank has died: every ticket that waits for it fails, and no new moves are
        planned.
        """
        settled = self._completion.lost(rank)
        self._lower_tiers.paused = True
        return settled

    @property
    def in_flight(self) -> int:
        """How many tickets have not ended."""
        return len(self._moves.in_flight)

    @property
    def paused(self) -> bool:
        """Whether no new moves are planned."""
        return self._lower_tiers.paused

    def pause(self) -> None:
        """Plan no new moves: evicted blocks are dropped. All earlier moves have ended when
        `in_flight` is 0.
        """
        self._lower_tiers.paused = True

    def resume(self) -> None:
        """Plan moves again, unless a rank was lost: its part of every chunk would be missing."""
        self._lower_tiers.paused = self._completion.ranks_lost

    # ---- pins, clearing

    def pin(
        self,
        tokens: TokenIds,
        *,
        items: Iterable[Item] = (),
        lora: str | None = None,
        salt: str | None = None,
    ) -> int:
        """Keep the leading blocks of `tokens` that are on the device there, until `unpin`; returns
        how many tokens.
        """
        items = as_items(items)
        keys = chunk_keys(
            tokens, self._lower_tiers.root(lora, salt), self.block_tokens, items
        )
        names = chunk_keys(
            tokens,
            self._lower_tiers.lasting_root(lora, salt),
            self.block_tokens,
            items,
        )
        path = self._tree.path(keys)
        self._allocator.cancel_evictions(path)
        while path and path[-1].place is not Place.DEVICE:
            path.pop()
        if path:
            self._tree.lock(path[-1])
            self._pinned.setdefault(names[len(path) - 1], []).append(path[-1])
        return len(path) * self.block_tokens

    def unpin(
        self,
        tokens: TokenIds,
        *,
        items: Iterable[Item] = (),
        lora: str | None = None,
        salt: str | None = None,
    ) -> int:
        """End the longest pin on a prefix of `tokens`; returns its tokens. ValueError if there is
        none.
        """
        names = chunk_keys(
            tokens,
            self._lower_tiers.lasting_root(lora, salt),
            self.block_tokens,
            items,
        )
        name = next(
            (name for name in reversed(names) if name in self._pinned), None
        )
        if name is None:
            raise ValueError("no prefix of these tokens is pinned")
        node = self._pinned[name].pop()
        if not self._pinned[name]:
            del self._pinned[name]
        self._allocator.unlock(node, self._tree.now())
        return (node.position + 1) * self.block_tokens

    def reset(self, *, abandon: bool = False) -> None:
        """Remove requests, tree and pins. Blocks of running copies are freed when their tickets
        end.

        `abandon`: no copy is running any more, so all blocks are freed at once. Chunks on the host
        and in lower tiers stay; `Cache.clear` removes those.
        """
        self._completion.cancel_all()
        for request in self._requests.values():
            self._allocator.requeue(request)
        self._requests.clear()
        self._clear_tree()
        if abandon:
            self._completion.abandon_all()

    def weights_changed(self, version: str = "") -> tuple[str, ...]:
        """Report that the model's weights were updated in place: KV of the old weights never hits
        again, in any tier.

        `version` names the new weights for all machines, as in `Cache.weights_changed`.
        Admitted requests keep their blocks, and their KV is never cached; preempt them to start
        them again. Returns the requests that waited for a move: they wait to be admitted again.
        Raises StoreError like `Cache.weights_changed`.
        """
        self._lower_tiers.weights_changed(version)
        again = self._completion.cancel_all()
        for request in self._requests.values():
            request.stale = request.admitted
        self._clear_tree()
        return tuple(again)

    def _clear_tree(self) -> None:
        for node in self._pinned_nodes():
            self._allocator.unlock(node)
        self._pinned.clear()
        self._pool.release(self._tree.clear())

    # ---- the pool

    @property
    def total(self) -> int:
        """How many blocks there are."""
        return self._pool.total

    @property
    def free(self) -> int:
        """How many blocks are free."""
        return self._pool.free

    def resize(self, num_blocks: int) -> None:
        """Set the number of blocks, because engines know it only after profiling, or give some
        blocks back.

        Blocks cached in removed blocks, or below them in the tree, are dropped without a copy;
        `demote` before to keep them. Raises ValueError, and changes nothing, if one of those is in
        use, pinned or in flight.
        """
        self._pool.check_size(num_blocks)
        gone = self._tree.subtree(
            [
                node
                for node in self._tree.nodes.values()
                if node.block >= num_blocks
            ]
        )
        cached = {
            node.block
            for node in gone
            if node.place is Place.DEVICE and not node.locks
        }
        busy = [
            block
            for block in range(num_blocks, self._pool.total)
            if not self._pool.is_free(block) and block not in cached
        ]
        if busy:
            raise ValueError(
                f"blocks {busy} are in use: {num_blocks} blocks are too few until they are free"
            )
        self._allocator.discard(gone)
        self._allocator.counts["dropped_blocks"] += len(gone)
        self._pool.resize(num_blocks)

    def has_room(self, num_blocks: int, *, evict: bool = False) -> bool:
        """Whether `num_blocks` blocks are free or, with `evict`, can be made free. Changes
        nothing.
        """
        blocks = _count("num_blocks", num_blocks)
        return not isinstance(
            self._allocator.shortage(blocks, evict=evict), NoRoom
        )

    def stats(self) -> dict[str, int | float]:
        """Return gauges, and counters since the start; times in seconds.

        Those of down and of up are the plans whose copies ended well, at least in part: `seconds`
        is from the plan to the last rank's report. `pagoda.blocks.block_metrics` shows all of it to
        Prometheus.
        """
        return {
            **_gauges(self._allocator),
            "pinned": len(self._pinned_nodes()),
            **{name: self._allocator.counts[name] for name in _COUNTERS},
            "match_seconds": self._admission.match_seconds,
            "host_seconds": self._lower_tiers.host_seconds,
            "fetch_seconds": self._lower_tiers.fetch_seconds,
            **{
                f"{way}_seconds": seconds
                for way, seconds in self._completion.copy_seconds.items()
            },
        }

    def check(self) -> None:
        """Raise AssertionError, with the numbers, unless every block is in one place and all counts
        agree.

        free + cached + in_use + in_flight == total.
        """
        _check(self._allocator, self._pinned_nodes())

    # ---- helpers

    def _pinned_nodes(self) -> list[Node]:
        """Return the last node of each pinned prefix."""
        return [node for nodes in self._pinned.values() for node in nodes]

    def _request(self, request_id: str) -> RequestState:
        try:
            return self._requests[request_id]
        except KeyError:
            raise ValueError(
                f"there is no request {request_id!r}: it was released, or never added"
            ) from None

    def _waiting(self, request_id: str) -> RequestState:
        request = self._request(request_id)
        if request.admitted:
            raise ValueError(f"request {request_id!r} is admitted already")
        return request

    def _admitted_request(self, request_id: str) -> RequestState:
        request = self._request(request_id)
        if not request.admitted:
            raise ValueError(f"request {request_id!r} waits to be admitted")
        return request


def _count(name: str, number: int) -> int:
    if number < 0:
        raise ValueError(f"{name} must not be negative, got {number}")
    return number


# ---- invariants


def _gauges(state: BlockAllocator) -> dict[str, int]:
    """Return the blocks by state: free, in the tree, of one request, moving; and how many could be
    evicted.
    """
    orphans = sum(move.size for move in state.moves.loads() if move.cancelled)
    own_blocks = sum(
        request.num_own_blocks for request in state.requests.values()
    )
    return {
        "total": state.pool.total,
        "free": state.pool.free,
        "cached": state.tree.on_device,
        "in_use": own_blocks + state.tree.detached,
        "in_flight": state.tree.evicting + state.tree.loading + orphans,
        "evictable": state.tree.evictable,
    }


def _check(state: BlockAllocator, pinned: Sequence[Node]) -> None:
    """Raise AssertionError unless each block is in one place, each lock has an owner and all counts
    agree.
    """
    pool = state.pool
    tree = state.tree
    moves = state.moves
    pool.check()
    tree.check()
    gauges = _gauges(state)
    parts = {
        name: gauges[name] for name in ("free", "cached", "in_use", "in_flight")
    }
    assert sum(parts.values()) == pool.total, (
        f"{parts} do not add up to {pool.total}"
    )
    blocks = _used_blocks(state)
    assert len(set(blocks)) == len(blocks), (
        f"a block is in two places: {sorted(blocks)}"
    )
    assert not any(map(pool.is_free, blocks)), (
        f"a block is in use and free: {sorted(blocks)}"
    )
    evicting = sum(len(move.evicting()) for move in moves.stores())
    assert evicting == tree.evicting, (
        f"{tree.evicting} being evicted counted, {evicting} found"
    )
    _check_locks(state, pinned)
    for request in state.requests.values():
        shared = len(list(upward(request.last_node)))
        counted = request.num_in_tree
        assert shared == counted, (
            f"{counted} blocks in the tree, a path of {shared}"
        )


def _check_locks(state: BlockAllocator, pinned: Sequence[Node]) -> None:
    """Check that each node has one lock for each request, move and pin that ends there, and for
    each locked child.
    """
    ends = [request.last_node for request in state.requests.values()]
    owners = Counter[Node]()
    for end in (*ends, *state.moves.locked_nodes(), *pinned):
        for node in upward(end):
            owners[node] += 1
            if owners[node] > 1:
                break
    for node in state.tree.nodes.values():
        assert node.locks == owners[node], (
            f"block {node.block} has {node.locks} locks, {owners[node]} owners"
        )


def _used_blocks(state: BlockAllocator) -> list[int]:
    """Return every block that is not free."""
    blocks = [
        block
        for request in state.requests.values()
        for block in request.own_blocks
    ]
    blocks += [
        node.block
        for node in state.tree.nodes.values()
        if node.place is not Place.TO_HOST
    ]
    blocks += [
        node.block for move in state.moves.stores() for node in move.evicting()
    ]
    blocks += [
        node.block
        for move in state.moves.loads()
        if move.cancelled
        for node in move.nodes
    ]
    paths = (upward(request.last_node) for request in state.requests.values())
    return blocks + [
        node.block
        for node in {node for path in paths for node in path if node.detached}
    ]
