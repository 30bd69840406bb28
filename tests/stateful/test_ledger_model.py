"""The ledger against a model made of dicts: every rule is a call, and `check()` and a comparison of
all tables follow.

Which chunk is evicted is the policy's business; the model holds it to the rules: never what is
pinned, held or asked for by the same call, leases only when nothing else is left, no chunk before
those that continue it, and no more than was needed.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pagoda.base.metrics import Reason
from pagoda.ledger import (
    Busy,
    Ledger,
    Present,
    Refused,
    Reserved,
    StoreSpec,
    admin,
)
from pagoda.testing import FakeClock
from tests.children import kill_self
from tests.stateful.ledger_model import (
    ALL,
    CHAINS,
    DEPTH,
    KEYS,
    NAMESPACE,
    NAMESPACES,
    PARENT,
    POSITION,
    SLOTS,
    TOKENS,
    Model,
    Pending,
    any_keys,
    chains,
    lengths,
    owners,
)


class LedgerMachine(RuleBasedStateMachine):
    """One process (and children that it forks) on one store."""

    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="pagoda-model-", dir="/dev/shm"))
        self.clock = FakeClock()
        self.model = Model()
        self.spec = StoreSpec(
            root=self.root,
            name="model",
            kind="memory",
            slots=SLOTS,
            slot_bytes=4096,
        )

    @initialize()
    def begin(self) -> None:
        """Opens the ledger."""
        self.open()

    def open(self) -> None:
        """Opens the ledger and names both tenants."""
        self.ledger = Ledger.open(self.spec, self.policy, clock=self.clock)
        self.be_alone()
        for number, namespace in enumerate(NAMESPACES):
            self.ledger.namespaces.register(
                namespace, {"model": "m", "salt": str(number)}
            )

    def be_alone(self) -> None:
        """Keeps the ledger's thread away: it would evict and learn in real time, so no two runs
        would be the same.
        """
        self.ledger.upkeep_thread._start = lambda: None  # type: ignore[method-assign]

    def teardown(self) -> None:
        """Closes and removes the store."""
        if hasattr(self, "ledger"):
            self.ledger.close()
        shutil.rmtree(self.root, ignore_errors=True)

    # the ledger's present answer

    def found(self) -> dict[bytes, tuple[int, int]]:
        """All chunks by the ledger's own listing."""
        return {
            row.key: (row.slot, row.generation)
            for row in admin.list_chunks(self.ledger)
        }

    def shielded(self, key: bytes, leases: bool = True) -> bool:
        """Whether a chunk must (or, for leases, should) not be evicted."""
        place = self.model.ready[key]
        leased = (
            leases and self.model.leases.get(place, 0) > self.clock.monotonic_ns()
        )
        return place in self.model.held or key in self.model.pinned() or leased

    # storing

    @rule(
        chain=chains,
        length=lengths,
        parts=st.integers(1, 2),
        end=st.sampled_from(["commit", "commit", "commit", "leave", "abort"]),
    )
    def store(self, chain: int, length: int, parts: int, end: str) -> None:
        """Stores the head of a chain in windows with one stamp, as the facade does."""
        stamp = self.ledger.stamp()
        for start in range(0, length, self.ledger.window):
            wanted = KEYS[chain][start : min(length, start + self.ledger.window)]
            reserved, refused = self.reserve(wanted, start, parts, stamp)
            if end == "commit":
                self.commit_parts(reserved, range(parts))
            elif end == "abort":
                self.abort(reserved)
            if refused or (end == "leave" and reserved):
                break

    @rule(last=chains)
    def fill(self, last: int) -> None:
        """Store whole chains until there are no free slots except those that the policy frees."""
        for chain in range(last, last + 5):
            self.store(chain % CHAINS, DEPTH, 1, "commit")
            # leases of what was found present count among those that cover half of the slots
            self.clock.advance(1.5)

    def reserve(
        self, wanted: Sequence[bytes], start: int, parts: int, stamp: int
    ) -> tuple[list[Reserved], bool]:
        """One call of reserve, judged key by key and victim by victim."""
        now = self.clock.monotonic_ns()
        claimed = self.model.claimed()
        before = dict(self.model.ready)
        busy = self.model.busy(now)
        shields = {key: self.shielded(key) for key in before}
        hard = {key: self.shielded(key, leases=False) for key in before}
        mine = sum(not one.dead for one in self.model.pending)
        outcomes = self.ledger.reserve(
            wanted,
            namespace=NAMESPACE[wanted[0]],
            start=start,
            parent=PARENT[wanted[0]],
            tokens=TOKENS,
            parts=parts,
            stamp=stamp,
        )
        after = self.found()
        evicted = [key for key in before if key not in after]
        for key, outcome in zip(wanted, outcomes, strict=True):
            assert outcome.key == key
            if key in before:
                assert isinstance(outcome, Present), (
                    f"{outcome} for a chunk that is there"
                )
                assert (outcome.slot, outcome.generation) == before[key]
                assert key not in evicted
            elif key in busy:
                assert isinstance(outcome, Busy)
                assert outcome.owner == self.ledger.session.member
            else:
                assert isinstance(outcome, Reserved | Refused), outcome
        reserved = [one for one in outcomes if isinstance(one, Reserved)]
        refused = [one for one in outcomes if isinstance(one, Refused)]
        self.judge_victims(evicted, before, shields, hard, set(wanted))
        self.judge_refusals(outcomes, mine, len(reserved), len(evicted))
        for key in evicted:
            self.model.leave(key)
        self.model.pending = [
            one for one in self.model.pending if not one.dead
        ] + [
            one
            for one in self.model.pending
            if one.dead and one.reserved.key not in {r.key for r in reserved}
        ]
        assert not {(one.slot, one.generation) for one in reserved} & (
            self.model.gone | set(self.model.ready.values())
        )
        for one in reserved:
            if one.key in claimed:
                claimed[one.key].overtaken = True
        self.model.pending += [
            Pending(one, set(range(parts)), now) for one in reserved
        ]
        return reserved, bool(refused)

    def judge_victims(
        self,
        evicted: Sequence[bytes],
        before: dict[bytes, tuple[int, int]],
        shields: dict[bytes, bool],
        hard: dict[bytes, bool],
        wanted: set[bytes],
    ) -> None:
        """No victim that is pinned, held or wanted; leased ones last; no chunk before those that
        continue it.
        """
        stay = set(before) - set(evicted) - wanted
        for key in evicted:
            assert not hard[key], "a pinned or held chunk was evicted"
            if shields[key]:
                spared = [other for other in stay if not shields[other]]
                assert not spared, (
                    f"a leased chunk was evicted although {len(spared)} others could be evicted"
                )
            else:
                tail = [
                    other
                    for other in stay
                    if not shields[other] and self.continues(other, key, before)
                ]
                assert not tail, (
                    f"position {POSITION[key]} was evicted before "
                    f"{[POSITION[one] for one in tail]} of its chain"
                )

    @staticmethod
    def continues(
        key: bytes, of: bytes, there: dict[bytes, tuple[int, int]]
    ) -> bool:
        """Whether `key` comes after `of` in a chain and can be reached from it."""
        parent = PARENT[key]
        while parent is not None and parent != of and parent in there:
            parent = PARENT[parent]
        return parent == of

    def judge_refusals(
        self, outcomes: Sequence[object], mine: int, reserved: int, evicted: int
    ) -> None:
        """Leading keys are served first; a refusal means no free slot or a limit; nothing is
        evicted without need.
        """
        rooms = [one for one in outcomes if isinstance(one, Reserved | Refused)]
        kinds = [isinstance(one, Reserved) for one in rooms]
        assert kinds == sorted(kinds, reverse=True), (
            "a later key was served before a leading one"
        )
        assert evicted <= reserved, "more was evicted than was needed"
        gauges = admin.gauges(self.ledger)
        if not all(kinds):
            reasons = {one.reason for one in rooms if isinstance(one, Refused)}
            assert reasons in (
                {Reason.FULL},
                {Reason.NOT_ADMITTED} if self.policy == "hindsight" else None,
            ), reasons
            assert (
                gauges["free"] == 0
                or Reason.NOT_ADMITTED in reasons
                or mine + reserved >= SLOTS // 4
            ), f"refused with {gauges} and {mine} reserved before"
        assert mine + reserved <= SLOTS // 4

    def commit_parts(
        self, reserved: Sequence[Reserved], parts: Sequence[int]
    ) -> None:
        """Commits some parts of some reservations."""
        for part in parts:
            now = [one for one in self.model.pending if one.reserved in reserved]
            done = self.ledger.commit([one.reserved for one in now], part)
            for one, good in zip(now, done, strict=True):
                assert bool(good) == (part in one.missing), (
                    f"part {part}, missing {one.missing}: {good}"
                )
                self.landed(one, part)

    def landed(self, one: Pending, part: int) -> None:
        """A part is in; with the last of them the chunk is there."""
        one.missing.discard(part)
        if not one.missing:
            self.model.pending.remove(one)
            self.model.ready[one.reserved.key] = (
                one.reserved.slot,
                one.reserved.generation,
            )

    def abort(self, reserved: Sequence[Reserved]) -> None:
        """Gives reservations back."""
        self.ledger.abort(reserved)
        self.model.gone |= {(one.slot, one.generation) for one in reserved}
        self.model.pending = [
            one for one in self.model.pending if one.reserved not in reserved
        ]

    @precondition(lambda self: self.model.pending)
    @rule(data=st.data(), part=st.integers(0, 1), adopt=st.booleans())
    def finish(self, data: st.DataObject, part: int, adopt: bool) -> None:
        """Commits a part of what was left uncommitted, as another process would have it; sometimes
        adopts it first.
        """
        one = data.draw(st.sampled_from(self.model.pending))
        if one.dead or part not in one.missing:
            return
        sent = pickle.loads(pickle.dumps(one.reserved))
        if adopt:
            assert self.ledger.adopt([sent], part) == [True]
        # it is lost with its first part, and keeps its slot until its last one
        assert [*map(bool, self.ledger.commit([sent], part))] == [
            not one.overtaken
        ]
        if one.overtaken and one.missing == {part}:
            self.model.pending.remove(one)
            self.model.gone.add((sent.slot, sent.generation))
        else:
            self.landed(one, part)

    @precondition(lambda self: self.model.pending)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """Aborts something that was left uncommitted."""
        one = data.draw(st.sampled_from(self.model.pending))
        if not one.dead:
            self.abort([one.reserved])

    @precondition(lambda self: self.model.gone - self.model.held)
    @rule(data=st.data())
    def late(self, data: st.DataObject) -> None:
        """A commit, abort, lease, hold or drop of something that no longer exists changes
        nothing.
        """
        slot, generation = data.draw(
            st.sampled_from(sorted(self.model.gone - self.model.held))
        )
        ghost = Reserved(data.draw(st.sampled_from(ALL)), slot, generation)
        assert self.ledger.commit([ghost]) == [False]
        self.ledger.abort([ghost])
        place = np.array([slot]), np.array([generation], np.uint64)
        assert self.ledger.hold(*place) == [False]
        self.ledger.lease(*place, 10.0)
        self.ledger.release(*place)
        assert not self.ledger.remove_exact(
            ghost.key, slot, generation, Reason.FAILED_CHECK
        )

    # reading

    @rule(
        chain=chains,
        length=lengths,
        lease=st.sampled_from([0.0, 0.0, 5.0]),
        touch=st.booleans(),
    )
    def match(self, chain: int, length: int, lease: float, touch: bool) -> None:
        """Check that the leading run is exactly that of the model, with the reason of its end."""
        wanted = KEYS[chain][:length]
        match = self.ledger.match_prefix(wanted, lease_seconds=lease, touch=touch)
        run = next(
            (n for n, key in enumerate(wanted) if key not in self.model.ready),
            length,
        )
        places = list(
            zip(match.slots.tolist(), match.generations.tolist(), strict=True)
        )
        assert places == [self.model.ready[key] for key in wanted[:run]]
        assert (match.reason is None) == (run == length)
        if run < length:
            assert (match.reason is Reason.BUSY) == (
                wanted[run] in self.model.claimed()
            ), match.reason
        if lease:
            self.lease_model(places, lease)

    def lease_model(
        self, places: Sequence[tuple[int, int]], seconds: float
    ) -> None:
        """Leases cover at most half of the slots: past that the model does not count on them."""
        now = self.clock.monotonic_ns()
        self.model.leases = {
            place: until
            for place, until in self.model.leases.items()
            if until > now
        }
        for place in places:
            if len(self.model.leases) < SLOTS // 2 or place in self.model.leases:
                self.model.leases[place] = max(
                    self.model.leases.get(place, 0), now + int(seconds * 1e9)
                )

    @precondition(lambda self: self.model.ready)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        """Keeps a chunk until it is released."""
        places = data.draw(
            st.lists(
                st.sampled_from(sorted(self.model.ready.values())),
                max_size=3,
                unique=True,
            )
        )
        places = [place for place in places if place not in self.model.held]
        slots = np.array([s for s, _ in places], np.int64)
        generations = np.array([g for _, g in places], np.uint64)
        assert self.ledger.hold(slots, generations) == [True] * len(places)
        self.model.held |= set(places)

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Release a chunk; if it was removed meanwhile, its slot is free now."""
        slot, generation = data.draw(st.sampled_from(sorted(self.model.held)))
        self.ledger.release(np.array([slot]), np.array([generation], np.uint64))
        self.model.held.discard((slot, generation))

    @rule(seconds=st.sampled_from([0.001, 1.0, 6.0, 100.0]))
    def wait(self, seconds: float) -> None:
        """Time passes; leases end."""
        self.clock.advance(seconds)

    # taking away

    @rule(wanted=any_keys, owner=owners)
    def pin(self, wanted: list[bytes], owner: str) -> None:
        """Pin present chunks, up to a quarter of the slots."""
        admin.pin(self.ledger, wanted, owner)
        now = {
            who: set(pinned)
            for who, pinned in admin.list_pins(self.ledger).items()
            if pinned
        }
        mine = self.model.pins.setdefault(owner, set())
        extra = now.get(owner, set()) - mine
        assert extra <= set(wanted)
        assert extra <= set(self.model.ready)
        mine |= extra
        missing = [
            key for key in wanted if key in self.model.ready and key not in mine
        ]
        assert not missing or len(self.model.pinned()) >= SLOTS // 4

    @rule(wanted=st.none() | any_keys, owner=owners)
    def unpin(self, wanted: list[bytes] | None, owner: str) -> None:
        """Takes an owner's pins back."""
        mine = self.model.pins.get(owner, set())
        gone = mine if wanted is None else mine & set(wanted)
        assert admin.unpin(self.ledger, wanted, owner) == len(gone)
        self.model.pins[owner] = mine - gone

    @rule(wanted=any_keys)
    def remove(self, wanted: list[bytes]) -> None:
        """Remove chunks, also pinned and held ones: the request is explicit."""
        there = [key for key in wanted if key in self.model.ready]
        assert admin.remove(self.ledger, wanted) == len(there)
        for key in there:
            self.model.leave(key)
        found = self.found()
        for key in there:
            assert key not in found

    @precondition(lambda self: self.model.ready)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """A chunk that failed its check is removed, if the slot still has that chunk."""
        key = data.draw(st.sampled_from(sorted(self.model.ready)))
        slot, generation = self.model.ready[key]
        assert not self.ledger.remove_exact(
            key, slot, generation + 1, Reason.FAILED_CHECK
        )
        assert self.ledger.remove_exact(
            key, slot, generation, Reason.FAILED_CHECK
        )
        self.model.leave(key)

    @rule(which=st.sampled_from([0, 1, None]))
    def clear(self, which: int | None) -> None:
        """Remove all chunks of a tenant; its running stores will not be committed."""
        namespace = None if which is None else NAMESPACES[which]
        gone = [
            key for key in self.model.ready if namespace in (None, NAMESPACE[key])
        ]
        assert admin.clear(self.ledger, namespace) == len(gone)
        for key in gone:
            self.model.leave(key)
        doomed = [
            one
            for one in self.model.pending
            if namespace in (None, NAMESPACE[one.reserved.key])
        ]
        for one in doomed:
            if not one.dead:
                *parts, last = sorted(one.missing)
                for part in parts:
                    self.ledger.commit([one.reserved], part)
                assert self.ledger.commit([one.reserved], last) == [False]
            self.model.gone.add((one.reserved.slot, one.reserved.generation))
        self.model.pending = [
            one for one in self.model.pending if one not in doomed
        ]

    # coming and going

    @rule()
    def reopen(self) -> None:
        """A member that leaves takes its reservations and holds with it; chunks and pins stay."""
        self.ledger.close()
        self.model.gone |= {
            (one.reserved.slot, one.reserved.generation)
            for one in self.model.pending
        }
        self.model.pending = []
        self.model.held = set()
        self.open()

    @rule(chain=chains, length=lengths, dies=st.booleans())
    def child(self, chain: int, length: int, dies: bool) -> None:
        """Fork a child that reserves, holds what it finds, and dies or ends without cleanup."""
        receive, send = os.pipe()
        pid = os.fork()
        if pid == 0:
            self.act_as_child(
                KEYS[chain][: min(length, self.ledger.window)], dies, send
            )
        os.close(send)
        with os.fdopen(receive, "rb") as pipe:
            said = pipe.read()
        os.waitpid(pid, 0)
        assert said, "the child failed"
        reserved, evicted = pickle.loads(said)
        for key in evicted:
            assert not self.shielded(key, leases=False)
            self.model.leave(key)
        claimed = self.model.claimed()
        for one in reserved:
            if one.key in claimed:
                claimed[one.key].overtaken = True
        self.model.pending += [
            Pending(one, {0}, 0, dead=True) for one in reserved
        ]
        admin.reap(self.ledger)
        self.model.gone |= {(one.slot, one.generation) for one in reserved}
        self.model.pending = [one for one in self.model.pending if not one.dead]
        assert admin.gauges(self.ledger)["members"] == 1

    def act_as_child(self, wanted: list[bytes], dies: bool, send: int) -> None:
        """Never returns."""
        try:
            self.be_alone()
            before = self.found()
            match = self.ledger.match_prefix(wanted, touch=False)
            held = self.ledger.hold(match.slots, match.generations)
            outcomes = self.ledger.reserve(
                wanted, namespace=NAMESPACE[wanted[0]], tokens=TOKENS
            )
            assert all(held)
            assert len(outcomes) == len(wanted)
            reserved = [one for one in outcomes if isinstance(one, Reserved)]
            os.write(
                send,
                pickle.dumps(
                    (reserved, [key for key in before if key not in self.found()])
                ),
            )
            if not dies:
                self.ledger.close()
        except BaseException:  # noqa: BLE001
            import traceback

            traceback.print_exc()
            os._exit(1)
        kill_self()

    # what holds after every step

    @invariant()
    def agrees(self) -> None:
        """`check()` passes, and listing, gauges, pins and validity are the model's."""
        if not hasattr(self, "ledger"):
            return
        admin.check(self.ledger)
        model = self.model
        gauges = admin.gauges(self.ledger)
        assert self.found() == model.ready
        assert gauges["ready"] == len(model.ready)
        assert gauges["slots"] == SLOTS
        taken = len(model.pending) + len(model.waiting())
        assert gauges["reserved"] == taken, (
            f"{gauges}, {model.pending}, {model.waiting()}"
        )
        assert gauges["free"] == SLOTS - len(model.ready) - taken
        assert {
            who: set(pinned)
            for who, pinned in admin.list_pins(self.ledger).items()
            if pinned
        } == {w: p for w, p in model.pins.items() if p}
        assert gauges["pinned"] == len(model.pinned()) <= SLOTS // 4
        self.validity()

    def validity(self) -> None:
        """Exactly the chunks that are there are valid, under their own generation only."""
        places = [*self.model.ready.values(), *self.model.gone]
        slots = np.array([slot for slot, _ in places], np.int64)
        generations = np.array(
            [generation for _, generation in places], np.uint64
        )
        valid = self.ledger.still_valid(slots, generations).tolist()
        assert valid == [True] * len(self.model.ready) + [False] * len(
            self.model.gone
        )


SETTINGS = settings(
    max_examples=int(os.environ.get("STRESS_EXAMPLES", "50")),
    stateful_step_count=40,
    deadline=None,
    # to shrink one takes minutes: set Phase.shrink by hand
    phases=[
        Phase.explicit,
        Phase.reuse,
        Phase.generate,
    ],
)
TestLedger = pytest.mark.slow(LedgerMachine.TestCase)
TestLedger.settings = SETTINGS
