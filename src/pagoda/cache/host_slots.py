"""The slots of the host tier, for engines that copy into and out of them themselves.

reserve -> copy into `view(slot)` -> commit | abort     match_prefix -> hold -> copy out -> still_valid -> release

If several ranks write a chunk, one rank reserves it with that many parts; each rank adopts, copies
and commits its part.
"""  # noqa: E501, W505

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pagoda.base.clock import Deadline, seconds_of
from pagoda.base.errors import ClosedError
from pagoda.base.metrics import Reason
from pagoda.cache.call import Call
from pagoda.cache.caller_hints import RequestHints, said
from pagoda.cache.lookup_call import LEASE_SECONDS
from pagoda.cache.recording import CallKind, SaidOfRequest
from pagoda.cache.resources import Resources
from pagoda.cache.weights_epoch import PresentWeights
from pagoda.cache.writeback import (
    Access,
    ChunkRef,
    Generations,
    Slots,
    chains,
    columns_of,
)
from pagoda.keys import TokenIds, as_token_ids
from pagoda.ledger import (
    CommitResult,
    Ledger,
    Match,
    Outcome,
    Refused,
    Reserved,
    RunToReserve,
)
from pagoda.ledger.call_tokens import CallToken
from pagoda.ledger.ghost_table import marks_of
from pagoda.ledger.request_meters import TokenLoad
from pagoda.policy.reuse_context import workload_of
from pagoda.tiers import HostTier
from pagoda.tiers.base import Bytes

T = TypeVar("T")


class HostSlots:
    """The host tier's slots and ledger, with what the cache does around a copy: counting and
    write-back.

    Thread-safe. An error at run time is a value: a shorter match, False, Refused. After the cache
    is closed every call is a miss. All copies must have ended before the close, because the slots
    may hold other chunks afterwards.
    """

    def __init__(
        self, resources: Resources, weights: PresentWeights, host: HostTier
    ) -> None:
        self._resources = resources
        self._weights = weights
        self._host = host
        self._ledger = host.ledger

    @property
    def count(self) -> int:
        """How many slots the host tier has."""
        return self._ledger.slots

    @property
    def ledgers(self) -> dict[str, Ledger]:
        """The ledgers of the local tiers by name, the host tier's first: for reports of what they
        hold.
        """
        return dict(self._resources.tiers.ledgers())

    def namespace(
        self,
        lora: str | None = None,
        salt: str | None = None,
        weights_version: str | None = None,
    ) -> bytes:
        """Return the root of an adapter's and a tenant's namespace under the present weights;
        register its labels.
        """
        namespace, _ = self._weights.scope(lora, salt, weights_version)
        if namespace.root not in self._resources.registered:
            self._resources.register(namespace)
        return namespace.root

    def stamp(self) -> int:
        """Return a recency stamp for all that is reserved for one prompt: its tail is evicted
        before its head.
        """
        return self._ledger.stamp()

    def view(self, slot: int) -> Bytes:
        """Return the bytes of a slot, (slot_bytes,) uint8, shared memory; after close, private
        zeros. IndexError.
        """
        return self.views((slot,))[0]

    def views(self, slots: Sequence[int]) -> list[Bytes]:
        """Return the bytes of some slots, like `view`; cheaper than one call for each."""
        try:
            return self._host.slab.views(slots)
        except ClosedError:
            return [np.zeros(self._host.slot_bytes, np.uint8) for _ in slots]

    def use_device(self, device_index: int) -> None:
        """Register the slots with the GPUs, in the background; before the first copy to or from a
        GPU. Cheap.
        """
        self._run(
            "use_device",
            lambda _: self._host.use_device(device_index),
            lambda *_: None,
        )

    # ---- out of slots

    def match_prefix(
        self, keys: Sequence[bytes], start: int, *, touch: bool = True
    ) -> Match:
        """Return the leading run of `keys`, whose chain positions begin at `start`; leased for
        LEASE_SECONDS.

        Without `touch`, neither recency nor leases change. Counts no hit: call `count_request` for
        that.
        """

        nothing = (np.empty(0, np.int64), np.empty(0, np.uint64))
        lease = LEASE_SECONDS if touch else 0.0
        return self._run(
            "find",
            lambda deadline: self._ledger.match_prefix(
                keys,
                start=start,
                touch=touch,
                lease_seconds=lease,
                deadline_seconds=deadline.remaining(),
            ),
            lambda reason, _: Match(*nothing, reason),
        )

    def count_request(
        self,
        num_tokens: int,
        by_tier: Mapping[str, int],
        reason: Reason | None,
        namespace: bytes = b"",
    ) -> None:
        """Count what an engine requested and what it got, like a lookup: tokens, and why not more.

        `namespace`: its root, for the list of the last requests; empty if it is not known.
        """
        self._resources.counters.count_request(
            num_tokens, by_tier, reason, namespace
        )

    def count_load(self, namespace: bytes, tokens: int, seconds: float) -> None:
        """Count what an engine copied out of slots into its own memory, for the saved time of the
        namespace's model and tenant.

        Args:
            namespace: its root, as `namespace` returns it.
            tokens: how many are there now.
            seconds: how long the engine waited for them.
        """
        self._resources.counters.count_load(
            namespace, TokenLoad(tokens, int(seconds * 1e6))
        )

    def leave_loads_to_another_rank(self) -> None:
        """Count no load of this process for models and tenants: with several ranks, each has a part
        of the same tokens.
        """
        self._resources.counters.meters_loads = False

    def count_dropped(self, reason: Reason, chunks: int) -> None:
        """Count chunks that an engine computed but does not store."""
        self._resources.counters.add({f"drop_{reason}": chunks})

    @property
    def is_recording(self) -> bool:
        """Whether requests are recorded, so that `record_request` is worth calling."""
        return self._resources.recorder is not None

    def record_request(
        self,
        keys: Sequence[bytes],
        num_tokens: int,
        *,
        start: int = 0,
        hints: RequestHints | None = None,
        namespace: bytes = b"",
    ) -> None:
        """Record one request for that many tokens, by the keys of its prompt from chain position
        `start` on.

        For engines that look up uncounted and call `count_request`. Does nothing if requests are
        not recorded.

        `hints`: what its caller said of it; it is then recorded at `Cache.note_answer`.
        `namespace`: its root, which names the tenant of its session.
        """
        told = None if hints is None else said(namespace, hints)
        self._record(CallKind.REQUEST, keys, start, num_tokens, said=told)

    @property
    def hears_hints(self) -> bool:
        """Whether a request without hints matters to those of others, so that
        `Cache.note_answer` is worth calling. Cheap.
        """
        return self._ledger.contexts.are_kept

    def context_of(self, first_key: bytes) -> int | None:
        """Return the context of new chunks of a prompt that begins with this chunk, for
        `reserve_runs`; None: nobody keeps contexts. Cheap.
        """
        if not self.hears_hints:
            return None
        return workload_of(marks_of([first_key]))

    def refuse_hint(self, hint: str, why: str) -> None:
        """Count a hint that a caller refuses. Both texts must be of a fixed set."""
        self._resources.hints.refuse(hint, why)

    def log_prompt(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        tokens: TokenIds,
        chunk_tokens: int = 0,
    ) -> None:
        """Log a stored prompt of text only, for `pagoda explain`; `keys` are those of its chunks
        from the first one on.

        `chunk_tokens`: the size of its chunks, if not the layout's. Does nothing if prompts are not
        logged; never raises.
        """
        if (prompts := self._resources.prompt_log) is not None:
            size = chunk_tokens or self._resources.layout.chunk_tokens
            prompts.append(namespace, size, keys, as_token_ids(tokens))

    def hold(self, slots: Slots, generations: Generations) -> list[bool]:
        """Keep chunks from eviction until `release` or the end of this process; False where a chunk
        is not there.

        No byte of a held slot changes. A chunk that is removed or cleared meanwhile is no longer
        matched or `still_valid`.
        """
        missed = [False] * len(slots)
        return self._run(
            "hold",
            lambda deadline: self._ledger.hold(
                slots, generations, deadline.remaining()
            ),
            lambda *_: missed,
        )

    def release(self, slots: Slots, generations: Generations) -> None:
        """End one hold on each of these chunks."""
        # not by `_run`: holds outlive this cache if another cache has the ledger open
        with suppress(ClosedError):
            self._ledger.release(slots, generations)

    def still_valid(
        self, slots: Slots, generations: Generations
    ) -> npt.NDArray[np.bool_]:
        """Return for each slot whether the bytes copied out of it until now are those of the
        matched chunk.
        """
        gone = np.zeros(len(slots), np.bool_)
        return self._run(
            "valid",
            lambda _: self._ledger.still_valid(slots, generations),
            lambda *_: gone,
        )

    def ready(
        self, slots: Slots, generations: Generations
    ) -> npt.NDArray[np.bool_]:
        """Return for each slot whether the chunk that was reserved or matched there is committed
        and still there.

        A hint, for reports of what is stored; check copied bytes with `still_valid`. Takes no lock.
        """
        gone = np.zeros(len(slots), np.bool_)
        return self._run(
            "ready",
            lambda _: self._ledger.is_ready(slots, generations),
            lambda *_: gone,
        )

    def note_access(self, namespace: bytes, read: Sequence[ChunkRef]) -> None:
        """Note that these chunks were copied out and valid: count them, and write them back if they
        are hit often.
        """

        def work(_: Deadline) -> None:
            nbytes = len(read) * self._host.chunk_bytes
            self._resources.counters.add(
                {"loaded_chunks": len(read), "loaded_bytes": nbytes}
            )
            left_out = self._weights.scope()[1].left_out
            for run in chains(read):
                where = columns_of(run)
                access = Access(
                    namespace, run.copy, len(run), where, left_out=left_out
                )
                for queue in self._resources.writeback:
                    queue.note_access(access)

        self._run("used", work, lambda *_: None)

    # ---- into slots

    def reserve(
        self,
        keys: Sequence[bytes],
        *,
        namespace: bytes,
        start: int,
        parent: bytes | None,
        stamp: int | None = None,
        parts: int = 1,
        deadline_seconds: float | None = None,
        context: int | None = None,
    ) -> list[Outcome]:
        """Reserve for each key a slot to copy into, evicting as needed: `Ledger.reserve` for any
        number of keys.

        Reserves in windows under one stamp; after the first window with a refusal no other is
        tried. A chunk of several `parts` is visible when all are committed; a part belongs to this
        process until another process adopts it. Takes no longer than the deadline, by default the
        host tier's. `context`: that of the new chunks, from `context_of`. Raises ValueError for a
        malformed key or for less than one part.
        """
        _check_reserve(keys, parts)
        chunk_tokens = self._resources.layout.chunk_tokens
        self._record(
            CallKind.RESERVE, keys, start, len(keys) * chunk_tokens, parent
        )
        run = RunToReserve(
            keys,
            namespace,
            start,
            parent,
            self.stamp() if stamp is None else stamp,
            context,
        )
        deadline = self._deadline(deadline_seconds)
        return self._ledger.owned(partial(self._reserve, run, parts, deadline))

    def _reserve(
        self,
        run: RunToReserve,
        parts: int,
        deadline: Deadline,
        token: CallToken,
    ) -> list[Outcome]:
        keys = run.keys
        chunk_tokens = self._resources.layout.chunk_tokens
        # the caller must commit or abort them, also if a later window fails
        made: list[Outcome] = []

        def rest(reason: Reason, _: str = "") -> list[Outcome]:
            return made + [Refused(key, reason) for key in keys[len(made) :]]

        def work(deadline: Deadline) -> list[Outcome]:
            # lower tiers, which get only chunks that have a slot here
            admit_all = bool(self._weights.scope()[1].written)
            while (at := len(made)) < len(keys):
                window = keys[at : at + self._ledger.window]
                reserve = partial(
                    self._ledger.reserve,
                    window,
                    namespace=run.namespace,
                    start=run.start + at,
                    parent=keys[at - 1] if at else run.parent,
                    tokens=chunk_tokens,
                    parts=parts,
                    stamp=run.stamp,
                    context=run.context,
                    admit_all=admit_all,
                    deadline_seconds=deadline.remaining(),
                )
                outcomes = self._ledger.owned(reserve, token)
                made.extend(outcomes)
                if refused := [
                    item.reason for item in outcomes if isinstance(item, Refused)
                ]:
                    self._resources.counters.add(
                        {f"drop_{refused[0]}": len(keys) - len(made)}
                    )
                    return rest(refused[0])
            return made

        return self._run("reserve", work, rest, deadline.remaining())

    def reserve_runs(
        self,
        runs: Sequence[RunToReserve],
        *,
        parts: int = 1,
        deadline_seconds: float | None = None,
    ) -> list[list[Outcome]]:
        """Reserve slots for several runs of chunks, such as those that all requests complete in one
        step of an engine; return the outcomes of each, in the order of its keys.

        It does what one `reserve` for each run does, at a fraction of the cost if they are short:
        they share transactions. Errors and the other arguments are those of `reserve`; the deadline
        is that of all together. Thread-safe.
        """
        _check_reserve([key for run in runs for key in run.keys], parts)
        chunk_tokens = self._resources.layout.chunk_tokens
        for run in runs:
            count = len(run.keys) * chunk_tokens
            self._record(CallKind.RESERVE, run.keys, run.start, count, run.parent)
        deadline = self._deadline(deadline_seconds)
        return self._ledger.owned(
            partial(self._reserve_runs, runs, parts, deadline)
        )

    def _reserve_runs(
        self,
        runs: Sequence[RunToReserve],
        parts: int,
        deadline: Deadline,
        token: CallToken,
    ) -> list[list[Outcome]]:
        """Reserve slots for runs that fit into one window together, for others one by one."""
        chunk_tokens = self._resources.layout.chunk_tokens
        window = self._ledger.window
        short = [run for run in runs if len(run.keys) <= window]

        def work(deadline: Deadline) -> list[list[Outcome]]:
            reserve = partial(
                self._ledger.reserve_runs,
                short,
                tokens=chunk_tokens,
                parts=parts,
                # as in `reserve`
                admit_all=bool(self._weights.scope()[1].written),
                deadline_seconds=deadline.remaining(),
            )
            return self._ledger.owned(reserve, token)

        def missed(reason: Reason, _: str = "") -> list[list[Outcome]]:
            return [[Refused(key, reason) for key in run.keys] for run in short]

        made = iter(self._run("reserve", work, missed, deadline.remaining()))
        return [
            next(made)
            if len(run.keys) <= window
            else self._reserve(run, parts, deadline, token)
            for run in runs
        ]

    def adopt(self, reserved: Sequence[Reserved], part: int) -> list[bool]:
        """Become the writer of one part of chunks that another process reserved, before the first
        byte is copied.

        False where that part can no longer be written; then nothing may be copied. An adopted part
        must be committed or aborted; if this process dies before, the chunk never becomes visible
        and its slot is freed.
        """
        missed = [False] * len(reserved)
        return self._run(
            "adopt",
            lambda deadline: self._ledger.adopt(
                reserved, part, deadline.remaining()
            ),
            lambda *_: missed,
        )

    def commit(
        self, written: Mapping[bytes, Sequence[ChunkRef]], part: int = 0
    ) -> list[bool]:
        """Report that the bytes of one part of chunks are in their slots; with its last part a
        chunk becomes visible.

        `written`: the chunks by the root of their namespace, each run in order. Returns one answer
        per chunk; False: not stored, and this process's claim on the slot is given up. Chunks that
        become visible by this call are counted and written back by the cache's policy; for each
        chunk this happens in one process, the one that committed the last part. Raises ValueError
        for a negative part; for a part that the chunks do not have, the answer is False.
        """
        if part < 0:
            raise ValueError(f"part must not be negative, got {part}")
        reserved = [ref.reserved for refs in written.values() for ref in refs]
        good: list[bool] = []

        def work(deadline: Deadline) -> list[bool]:
            results = self._ledger.commit(reserved, part, deadline.remaining())
            good.extend(map(bool, results))
            # Not PART: a reserved slot already has its generation, so a chunk with missing parts
            # would count as valid.
            visible = [
                one
                for one, how in zip(reserved, results, strict=True)
                if how is CommitResult.WHOLE
            ]
            kept = {(one.slot, one.generation) for one in visible}
            lower = self._weights.scope()[1].written
            for namespace, refs in written.items():
                for run in chains(refs):
                    stored = [
                        ref for ref in run if (ref.slot, ref.generation) in kept
                    ]
                    stamps = {tier.name: tier.stamp() for tier in lower}
                    for queue in self._resources.writeback:
                        queue.enqueue(namespace, stored, stamps)
            return good

        def missed(*_: object) -> list[bool]:
            self.abort(reserved[len(good) :])
            return good + [False] * (len(reserved) - len(good))

        return self._run("commit", work, missed)

    def abort(self, reserved: Sequence[Reserved]) -> None:
        """Give up reserved slots. Nothing may be copying into them any more."""
        with suppress(ClosedError):  # as in `release`
            self._ledger.abort(reserved)

    def _record(
        self,
        kind: CallKind,
        keys: Sequence[bytes],
        start: int,
        num_tokens: int,
        parent: bytes | None = None,
        said: SaidOfRequest | None = None,
    ) -> None:
        if self._resources.recorder is not None:
            self._resources.recorder.note(
                kind, tuple(keys), start, num_tokens, parent=parent, said=said
            )

    def _deadline(self, seconds: float | None) -> Deadline:
        """Return the deadline of a call that begins now; by default the host tier's."""
        if seconds is None:
            seconds = self._host.deadline_seconds
        else:
            seconds = seconds_of("deadline_seconds", seconds)
        return Deadline(seconds, seconds, self._resources.clock)

    def _run(
        self,
        name: str,
        work: Callable[[Deadline], T],
        miss: Callable[[Reason, str], T],
        deadline_seconds: float | None = None,
    ) -> T:
        """Run `work` as a `Call`: every error is a miss, counted and logged."""
        deadline = self._deadline(deadline_seconds)

        def checked() -> T:
            if self._resources.closed:
                raise ClosedError("the cache is closed")
            return work(deadline)

        return Call(name, checked, miss, deadline, self._resources.counters).run()


def _check_reserve(keys: Sequence[bytes], parts: int) -> None:
    """Raise ValueError for keys or parts of which no slot can be reserved."""
    if parts < 1:
        raise ValueError(f"parts must be at least 1, got {parts}")
    if any(len(key) != 32 for key in keys):
        raise ValueError(
            "a key has 32 bytes: use Cache.keys, KeyChain or derive_keys"
        )
