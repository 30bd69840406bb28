"""Continuous batching over blocks: what an engine does around `pagoda.blocks.BlockManager`.

The life of a request:

    add ──> waiting ──admit──> loading ──copies came──> running ──last token──> finished
      (prefetch: disk -> host)  ^  (host -> device)        │  (write-back: device -> host -> disk)
                                └────────preempted─────────┘

The manager does all the bookkeeping and touches no KV. If something must be copied it returns a
`Plan`; the engine does the copies (on another thread, while the model computes) and reports by the
plan's ticket how they ended. A request with documents is blended: `blend` says which tokens it
computes, and in which order.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from operator import attrgetter

from transformers import PreTrainedModel

from pagoda import Cache, Hit, KVLayout
from pagoda.base.quality_verdict import QualityState
from pagoda.blend import BlendedPrompt, Document, SelectionPolicy
from pagoda.blocks import (
    Admitted,
    BlockManager,
    Direction,
    Extended,
    Plan,
    Waiting,
)

from .attention import KVPool, Part, batch_of, next_tokens, paged_model
from .blend import Documents, Load, Span
from .holes import Found, Holes


@dataclass(eq=False)
class Sequence:
    """One request, its answer so far and its numbers. `tokens` is the prompt and all generated
    tokens.
    """

    id: str
    # set by `Engine.add` if there are documents
    tokens: list[int] = field(default_factory=list)
    max_new_tokens: int = 32
    # of its tenant: requests with other salts never share KV with it
    salt: str | None = None
    arrival_seconds: float = 0.0  # for whoever adds it: when
    after: str | None = None  # and after which other request

    # instead of tokens: the answer is approximate
    documents: list[list[int]] | None = None
    question: list[int] | None = None  # what follows them
    # the share of the tokens of all documents but the first that is computed again
    recompute: float = 0.15
    policy: str | SelectionPolicy = "deviation"  # which ones
    # without a verdict of `pagoda quality` for this setting
    unchecked: bool = False
    quality: QualityState | None = None  # whether there is one
    # which tokens of the prompt are exact, recomputed, reused
    blended: BlendedPrompt | None = None

    prompt_tokens: int = 0
    # of the documents and of the question
    starts: list[int] = field(default_factory=list)
    # the documents after the first
    chains: list[Document] = field(default_factory=list)
    prefetches: list[Future[Hit]] = field(default_factory=list)
    # its blocks, while it is admitted
    table: list[int] = field(default_factory=list)
    computed: int = 0  # leading tokens whose KV is in those blocks
    loading: bool = False  # copies it needs are running
    loads: list[Load] = field(default_factory=list)  # of its documents
    # what the tiers have behind its first missing chunk
    behind: Future[Found | None] | None = None
    spans: Iterator[Span] | None = None  # what it computes until it decodes
    span: Span | None = None  # the present one
    # tickets that free blocks for it: ask again when they end
    blocked: frozenset[int] = frozenset()

    # leading tokens not computed, by tier
    hits: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    arrived: float = 0.0
    first_token_seconds: float | None = None

    @property
    def todo(self) -> Span:
        """The tokens to compute now, in order."""
        return self.span or Span(range(self.computed, len(self.tokens)))

    @property
    def left(self) -> int:
        """How many these are: 1 while decoding."""
        return len(self.todo.positions)

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.prompt_tokens :]


class Engine:
    """Serves requests with one model, greedily. Not thread-safe; `add` some, then `step` until not
    `busy`.

    A step is one forward pass of at most `step_tokens` tokens: one for each request that decodes,
    the rest of the budget for prompts, in chunks. Without `cache` evicted blocks are dropped;
    without `prefix_caching` nothing is kept.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: KVLayout,
        *,
        blocks: int,
        cache: Cache | None = None,
        prefix_caching: bool = True,
        step_tokens: int | None = None,
        most_running: int = 32,
        # the longest that a request waits for its prefetch
        patience_seconds: float = 5.0,
    ) -> None:
        self.pool = KVPool(layout, blocks, model.device)
        self.manager = BlockManager(
            blocks,
            layout.chunk_tokens,
            cache=cache,
            prefix_caching=prefix_caching,
        )
        self.waiting: list[Sequence] = []  # both in the order of arrival
        self.running: list[Sequence] = []
        self.prompt_tokens_computed = 0
        self._plain = model
        self._model = paged_model(model)
        self._cache = cache
        # made for the first request that has some
        self._documents: Documents | None = None
        self._holes = (
            Holes(self.pool, cache, patience_seconds)
            if cache is not None and prefix_caching
            else None
        )
        self._slots = cache.slots if cache is not None else None
        self._step_tokens = step_tokens or 1 << 30
        self._most_running = most_running
        self._patience_seconds = patience_seconds
        ends = model.generation_config.eos_token_id
        self._ends = {ends} if isinstance(ends, int) else set(ends or ())
        self._copier = ThreadPoolExecutor(1, "copier")
        self._moving: dict[int, Future[None]] = {}  # by ticket

    @property
    def documents(self) -> Documents:
        """What blends documents, opened at the first use. ValueError: without a cache, or K cannot
        be moved.
        """
        if self._cache is None:
            raise ValueError(
                "documents are kept in a cache: make the engine with one"
            )
        if self._documents is None:
            self._documents = Documents(
                self._plain, self._model, self.pool, self._cache
            )
        return self._documents

    @property
    def busy(self) -> bool:
        """Whether there is anything to step for."""
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Take a request, and prefetch its stored chunks. Raises ValueError if it cannot fit, or
        not be blended.
        """
        if seq.documents is not None:
            self.documents.prepare(seq)
        old = len(seq.tokens)
        new = seq.max_new_tokens
        room = self.manager.total * self.pool.block_tokens
        if old < 1 or new < 1 or old + new > room:
            raise ValueError(
                f"request {seq.id!r}: {old} + {new} tokens; at least 1 + 1, at most {room}"
            )
        exact_tokens = seq.starts[1] if seq.documents is not None else None
        self.manager.add(
            seq.id, seq.tokens, salt=seq.salt, exact_tokens=exact_tokens
        )
        prefix = self.manager.prefetch(seq.id)
        seq.prefetches = [prefix] if prefix is not None else []
        if seq.documents is not None:
            seq.prefetches += self.documents.prefetch(seq)
        seq.arrived = time.monotonic()
        seq.prompt_tokens = old
        self.waiting.append(seq)

    def abort(self, seq: Sequence) -> None:
        """Forget a request in any state; its blocks are free or cached."""
        self.manager.release(seq.id)
        (self.running if seq in self.running else self.waiting).remove(seq)

    def step(self) -> list[Sequence]:
        """Do what can be done now; returns the requests that it finished. Never waits longer than a
        moment.
        """
        self._settle()
        self._admit()
        work = self._schedule()
        if not work:  # wait a moment for a copy, a prefetch or a document
            fetches = [
                future for seq in self.waiting for future in seq.prefetches
            ]
            loads = [load.hit for seq in self.running for load in seq.loads]
            behind = [seq.behind for seq in self.running if seq.behind]
            pending = [
                future
                for future in (*self._moving.values(), *fetches, *loads, *behind)
                if not future.done()
            ]
            if not wait(pending, 0.05, FIRST_COMPLETED).done:
                time.sleep(0.001)
            return []
        parts = [part for _, part in work]
        tokens = next_tokens(self._model, batch_of(parts, self.pool))
        return [
            seq
            for (seq, part), token in zip(work, tokens, strict=True)
            if self._advance(seq, part, token)
        ]

    def close(self) -> None:
        """Abandon the requests and wait for running copies. The cache stays open, because the
        caller owns it.
        """
        for seq in [*self.running, *self.waiting]:
            self.abort(seq)
        self._copier.shutdown()
        self._settle()
        if self._documents is not None:
            self._documents.close()
        if self._holes is not None:
            self._holes.close()

    def _admit(self) -> None:
        """Give blocks to waiting requests, first come first served, until there are too few."""
        now = time.monotonic()
        for seq in list(self.waiting):
            if (
                len(self.running) == self._most_running
                or seq.blocked & self._moving.keys()
            ):
                return
            patient = now < seq.arrived + self._patience_seconds
            if patient and not all(future.done() for future in seq.prefetches):
                # its KV is being read from the disk; others may be admitted first
                continue
            reserve = min(
                self.pool.block_tokens,
                seq.prompt_tokens + seq.max_new_tokens - len(seq.tokens),
            )
            answer = self.manager.admit(seq.id, reserve_tokens=reserve)
            if isinstance(answer, Waiting):
                self._move(answer.plan)
                seq.blocked = answer.tickets
                return
            if not isinstance(answer, Admitted):
                return  # until a request finishes
            self._move(answer.plan)
            seq.table = answer.table
            seq.computed = answer.computed_tokens
            seq.loading = bool(answer.waits)
            seq.hits = answer.by_tier if not seq.output else seq.hits
            seq.loads = (
                self.documents.load(seq) if seq.documents is not None else []
            )
            # a tier from which its prefetch has not come is not waited for again
            came = all(future.done() for future in seq.prefetches)
            if came and seq.documents is None and self._holes is not None:
                seq.behind = self._holes.load(seq)
            self.waiting.remove(seq)
            insort(self.running, seq, key=attrgetter("arrived"))

    def _schedule(self) -> list[tuple[Sequence, Part]]:
        """Choose which tokens each request computes in this step: those that decode, then prompts,
        oldest first.
        """
        work = []
        budget = self._step_tokens
        for seq in sorted(self.running, key=lambda seq: seq.left > 1):
            if (
                budget
                and seq in self.running
                and self._has_loaded(seq)
                and self._has_room(seq)
            ):
                positions = seq.todo.positions[:budget]
                tokens = [seq.tokens[at] for at in positions]
                work.append(
                    (seq, Part(tokens, positions, seq.table, seq.todo.origin))
                )
                budget -= len(tokens)
        return sorted(work, key=lambda entry: len(entry[1].tokens))

    def _has_loaded(self, seq: Sequence) -> bool:
        """Whether all that a request loads has come; if so, blending begins."""
        if seq.loading or not all(load.hit.done() for load in seq.loads):
            return False
        if seq.documents is not None and seq.spans is None:
            seq.spans = self.documents.blend(seq)
            self._next_span(seq)
        if seq.behind is not None:
            if not seq.behind.done():
                return False
            # without it, all is computed
            failed = seq.behind.exception() is not None
            found = None if failed else seq.behind.result()
            seq.behind = None
            if found is not None and self._holes is not None:
                seq.spans = self._holes.fill(seq, found)
                self._next_span(seq)
        return True

    @staticmethod
    def _next_span(seq: Sequence) -> None:
        seq.span = next((span for span in seq.spans if span.positions), None)

    def _has_room(self, seq: Sequence) -> bool:
        """Get a block for the next token if one is needed, if necessary from the youngest
        request.
        """
        while len(seq.tokens) > len(seq.table) * self.pool.block_tokens:
            if seq.blocked & self._moving.keys():
                return False
            answer = self.manager.extend(seq.id, len(seq.tokens))
            if isinstance(answer, Extended):
                seq.table += answer.added
            elif isinstance(answer, Waiting):
                self._move(answer.plan)
                seq.blocked = answer.tickets
                return False
            else:
                youngest = self.running[-1]
                # what it computed is cached, so it will find its own work again
                self.manager.preempt(youngest.id)
                youngest.preemptions += 1
                self._back_to_waiting(youngest)
                if youngest is seq:
                    return False
        return True

    def _back_to_waiting(self, seq: Sequence) -> None:
        self.running.remove(seq)
        seq.table = []
        seq.computed = 0
        seq.loading = False
        # what was blended is lost with its blocks
        seq.loads = []
        seq.behind = None
        seq.spans = None
        seq.span = None
        insort(self.waiting, seq, key=attrgetter("arrived"))

    def _advance(self, seq: Sequence, part: Part, token: int) -> bool:
        """Note what a step computed of a request; returns whether the request is finished."""
        self.prompt_tokens_computed += sum(
            at < seq.prompt_tokens for at in part.positions
        )
        if not part.origin:  # else it computed a document alone
            seq.computed = part.positions[-1] + 1
            self.manager.computed(seq.id, seq.computed)
        if seq.span is not None:
            seq.span = seq.span._replace(
                positions=seq.span.positions[len(part.tokens) :]
            )
            if not seq.span.positions:
                self._next_span(seq)
        if seq.left:
            # a chunk in the middle of a prompt: its next token is known already
            return False
        if seq.first_token_seconds is None:
            seq.first_token_seconds = time.monotonic() - seq.arrived
        seq.tokens.append(token)
        self.manager.append(seq.id, [token])
        if len(seq.output) < seq.max_new_tokens and token not in self._ends:
            return False
        self._move(self.manager.finish(seq.id))
        self.running.remove(seq)
        return True

    def _move(self, plan: Plan | None) -> None:
        """Begin the copies of a plan, if there is one."""
        if plan is not None:
            self._moving[plan.ticket] = self._copier.submit(self._copy, plan)

    def _copy(self, plan: Plan) -> None:
        """Copy whole blocks, on the copier's thread. The future has its exception."""
        for block, slot, _ in plan.copies:
            move = (
                self.pool.to_slot
                if plan.direction is Direction.DOWN
                else self.pool.from_slot
            )
            move(block, self._slots.view(slot))

    def _settle(self) -> None:
        """Report to the manager which copies ended, and act on its answer."""
        for ticket in [
            ticket for ticket, copies in self._moving.items() if copies.done()
        ]:
            failed = self._moving.pop(ticket).exception() is not None
            settled = (
                self.manager.failed(ticket)
                if failed
                else self.manager.completed(ticket)
            )
            for seq in list(self.running):
                # the load was not complete: compute from there
                if seq.id in settled.shortened:
                    seq.computed = settled.shortened[seq.id]
                    if not seq.output:
                        found = min(seq.hits.get("device", 0), seq.computed)
                        seq.hits = {"device": found, "host": seq.computed - found}
                if seq.id in settled.ready:
                    seq.loading = False
                elif seq.id in settled.again:
                    self._back_to_waiting(seq)
