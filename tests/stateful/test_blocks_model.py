"""The block manager against a model that recomputes everything from an engine's memory, after every
step.

The engine of this test has a memory for every rank. It computes KV that is right only behind right
KV, copies late (just before it reports a copy's end), writes rubbish where a copy failed and into
every block that it is given for itself; so a block that two own, that is freed too early or found
under a wrong key shows as wrong KV somewhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from pagoda.base.clock import Clock
from pagoda.layout import KVLayout
from pagoda.ledger import admin
from pagoda.testing import FakeClock
from tests.stateful.blocks_calls import MOST_REQUESTS, Calls
from tests.stateful.blocks_engine import GAUGES
from tests.stateful.blocks_model import BLOCK, PROMPTS, Prompt

WEIGHTS = {
    "add": 4,
    "add again": 2,
    "follow": 4,
    "flock": 4,
    "recall": 3,
    "append": 4,
    "match": 3,
    "fetch": 3,
    "admit": 7,
    "admit in part": 4,
    "admit in the end": 3,
    "serve": 4,
    "extend": 5,
    "compute": 7,
    "finish": 5,
    "preempt": 3,
    "release": 3,
    "demote": 3,
    "settle": 8,
    "settle well": 4,
    "write back": 2,
    "store": 2,
    "begin": 1,
    "remove": 2,
    "clear": 1,
    "wait": 1,
    "pin": 1,
    "unpin": 1,
    "pause": 2,
    "reset": 1,
    "weights": 1,
    "lose": 1,
    "late": 1,
    "wrong": 1,
    "room": 1,
}
OPS = [op for op, weight in WEIGHTS.items() for _ in range(weight)]
DISTURBING = (
    "begin",
    "remove",
    "clear",
    "pause",
    "reset",
    "weights",
    "lose",
    "settle",
)
ENDS = ["all", "count", "some", "none", "failed"]
# to shrink a failure takes a minute: ask for it
PHASES = [Phase.explicit, Phase.generate]
numbers = st.integers(0, 7)
prompts = st.builds(
    Prompt.drawn,
    st.sampled_from([0, 0, 1, 1, 2]),
    st.integers(1, PROMPTS[1]),
    st.integers(0, PROMPTS[2] - 1),
    st.integers(0, PROMPTS[3] - 1),
    st.sampled_from([False] * 5 + [True]),
)


class BlocksMachine(Calls, RuleBasedStateMachine):
    """One engine, and sometimes another process on the same host tier."""

    steps = 0  # of all runs of this class

    # ---- begin and end

    @initialize(
        blocks=st.integers(6, 24),
        slots=st.sampled_from([16, 24, 64]),
        ranks=st.sampled_from([1, 1, 2]),
        prefix=st.sampled_from([True] * 9 + [False]),
        write_back=st.booleans(),
        calm=st.sampled_from([True, False, False]),
        min_hit=st.sampled_from([0, 0, 2, 4]),
    )
    def begin(
        self,
        blocks: int,
        slots: int,
        ranks: int,
        prefix: bool,
        write_back: bool,
        calm: bool,
        min_hit: int,
    ) -> None:
        """Opens the cache, if there is one, and the manager. `min_hit`: blocks that are worth a
        load.
        """
        self.min_hit = min_hit
        self.ranks = ranks
        self.prefix = prefix
        self.write_back_on = write_back
        self.calm = calm
        self.layout = KVLayout.opaque(
            BLOCK, BLOCK * 8 * ranks, f"model of {ranks} ranks"
        )
        self.clock = FakeClock() if self.kind == "host" else Clock()
        if self.kind != "none":
            self.cache, self.other = self.open(slots), self.open(slots)
        self.start(blocks)

    def teardown(self) -> None:
        """End every request and ticket: all blocks are freed."""
        try:
            # otherwise it would hide the earlier failure
            if hasattr(self, "manager") and sys.exc_info()[0] is None:
                self.drain()
        finally:
            for cache in (self.other, self.cache):
                if cache is not None:
                    cache.close()
            shutil.rmtree(self.root, ignore_errors=True)

    def drain(self) -> None:
        """What a sleeping engine does: nothing is left in use or in flight, and a reset frees the
        rest.
        """
        manager = self.manager
        for name, count in manager.stats().items():
            if name not in GAUGES[:8] and "seconds" not in name:
                self.seen[name] += int(count)
        self.settle_all()
        for request in list(self.requests.values()):
            manager.release(request.name)
            del self.requests[request.name]
        while self.pins:
            self.unpin(0)
        manager.check()
        stats = manager.stats()
        assert (
            manager.in_flight
            == stats["in_flight"]
            == stats["in_use"]
            == stats["pinned"]
            == 0
        ), stats
        assert stats["free"] + stats["cached"] == stats["total"], stats
        if self.ledger is not None:
            self.fetched()
            assert admin.gauges(self.ledger)["reserved"] == sum(
                map(len, self.busy)
            ), "a reservation was left"
            assert not self.holds(), "a hold was left"
        manager.reset()
        assert manager.free == manager.total
        manager.check()

    # ---- one step

    @rule(
        op=st.sampled_from(OPS),
        which=numbers,
        more=st.integers(0, 15),
        prompt=prompts,
    )
    def step(self, op: str, which: int, more: int, prompt: Prompt) -> None:
        """One thing that can happen, drawn by weight; what is not possible now gives way to what
        brings the rest on.

        (Not one rule each: hypothesis leaves half of all rules out of a run, and a life of a
        request needs most.)
        """
        if self.calm and op in DISTURBING:
            op = "settle well"
        if not self.acted(op, which, more, prompt):
            self.bring_on(which, prompt)

    def acted(self, op: str, which: int, more: int, prompt: Prompt) -> bool:
        """Does it, if it is possible now."""
        able = self.able()
        idle = self.idle()
        running = self.running()
        loose = self.loose()
        done = [request for request in loose if not request.waits]
        fresh = [request for request in able if not request.stale]
        room = MOST_REQUESTS - len(self.requests)
        self.seen[op] += 1
        if op == "add" and room:
            self.add(prompt)
        elif op == "add again" and room and self.requests:
            self.add_again(which)
        elif op == "follow" and room and running:
            self.follow(which)
        elif op == "recall" and idle:
            self.recall(which, more)
        elif op == "flock" and len(running) < 4 and self.other is not None:
            self.flock(
                prompt, [5 + which + more, 5 + 2 * more, 36][: 2 + which % 2]
            )
        elif op == "append" and self.requests:
            self.append(which, 1 + more % 6)
        elif op == "match" and idle:
            self.match(which)
        elif op == "fetch" and idle and self.kind == "disk":
            self.prefetch(which, more % 2 == 0)
        elif op == "admit" and idle:
            self.admit(which, max(0, more - 8), which != 3)
        elif op == "admit in part" and idle:
            self.admit(which, 0, which != 3, chunk=1 + more)
        elif op == "admit in the end" and idle:
            self.admit_in_the_end(which, more // 4)
        elif op == "serve" and idle:
            self.serve(which, more // 4)
        elif op == "extend" and running:
            self.extend(which, more, which != 3)
        elif op == "compute" and able:
            self.compute(which, 1 + more)
        elif op == "finish" and done:
            self.finish(which, more > 3)
        elif op == "preempt" and loose:
            self.preempt(which)
        elif op == "release" and self.requests:
            self.release(which, more > 7)
        elif op == "demote" and not self.manager.paused:
            self.demote(1 + more % 12)
        elif op in ("settle", "settle well") and self.tickets:
            self.settle(
                which,
                more % 2,
                ENDS[more % len(ENDS)] if op == "settle" else "all",
                more // 2,
            )
        elif op == "write back" and fresh:
            self.write_back(which)
        elif op == "store" and self.other is not None:
            self.other_stores(prompt)
        elif op == "begin" and self.other is not None:
            self.other_begins(prompt, which > 2)
        elif op == "remove" and self.other is not None:
            self.other_removes(which + more, 1 + which)
        elif op == "clear" and self.other is not None and which == 0:
            self.other.clear(everything=True)
            self.rob()
        elif op == "wait" and self.kind == "host":
            self.wait([0.5, 6.0, 100.0][which % 3])
        elif op == "pin" and self.requests and len(self.pins) < 2:
            self.pin(which)
        elif op == "unpin" and self.pins:
            self.unpin(which)
        elif op == "pause" and which < 3:
            self.pause()
        elif op == "reset" and which < 3:
            self.reset(more > 7)
        elif op == "weights" and which < 4:
            self.weights_changed()
        elif op == "lose" and which < 4 and self.ranks == 2:
            self.lose(more % 2)
        elif op == "late":
            self.late(which, more % 2, ENDS[more % len(ENDS)])
        elif op == "wrong":
            self.wrong(which + 8 * more)
        elif op == "room":
            self.has_room(which + 2 * more, more % 2 == 0)
        else:
            self.seen[op] -= 1
            return False
        return True

    def bring_on(self, which: int, prompt: Prompt) -> None:
        """What there always is to do."""
        if self.manager.paused:
            self.manager.resume()
        elif self.tickets and which in (1, 4, 6):
            self.settle(
                which,
                0,
                "all" if self.calm or which < 4 else ENDS[which % 5],
                which // 2,
            )
        elif self.able() and len(self.requests) == MOST_REQUESTS:
            self.release(which, False)
        elif len(self.requests) < MOST_REQUESTS:
            self.add(prompt)

    @invariant()
    def agrees(self) -> None:
        """`check()` passes, no request has wrong KV, no two write into one block, the host has no
        wrong bytes.
        """
        if not hasattr(self, "manager"):
            return
        type(self).steps += 1
        self.now += 1
        self.manager.check()
        self.settled_below()
        self.agree_tables()
        self.agree_gauges()
        self.agree_host()


class WithoutHost(BlocksMachine):
    """No cache: evicted blocks are lost."""

    kind = "none"


class WithDisk(BlocksMachine):
    """A disk tier below the host."""

    kind = "disk"


USUAL = {
    "up": 50,
    "waits for another's move": 20,
    "ended": 200,
    "ready": 50,
    "admit Waiting": 20,
    "extend Extended": 50,
}


# machine, examples, steps at least, and how often the usual has to happen in them
RUNS: dict[str, tuple[type[BlocksMachine], int, int, dict[str, int]]] = {
    "host": (BlocksMachine, 80, 14_000, USUAL),
    "nothing": (WithoutHost, 25, 4_400, {"evicted_blocks": 100}),
    "disk": (WithDisk, 8, 1_400, {"fetched": 5}),
}


def run(name: str) -> None:
    """Runs one of the machines; AssertionError if something is wrong, or if too little happened."""
    machine, examples, least, usual = RUNS[name]
    share = int(os.environ.get("STRESS_EXAMPLES", "25")) / 50
    machine.seen = Counter()
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max(1, round(examples * share)),
            stateful_step_count=200,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[*PHASES, Phase.shrink]
            if "PAGODA_TEST_SHRINK" in os.environ
            else PHASES,
        ),
    )
    print(machine.steps, "steps:", dict(sorted(machine.seen.items())))
    part = min(1, share)
    assert machine.steps >= least * part
    rare = {
        event: n for event, n in usual.items() if machine.seen[event] < n * part
    }
    assert share < 0.5 or not rare, (rare, machine.seen)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", ["host", "nothing", pytest.param("disk", marks=pytest.mark.soak)]
)
def test_random_steps_agree_with_the_model(name: str) -> None:
    """Some 9,000 steps in all, twice as many in `make soak`, and everything to be tested did happen
    in them.

    In a process of its own: Hypothesis draws constants that it finds in the modules which happen to
    be imported, so that only there the quick examples are the same in every run. The disk's threads
    are never quite the same: soak.
    """
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([os.environ["PYTHONPATH"], str(root)])
    environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "tests.stateful.test_blocks_model", name]
    done = subprocess.run(
        command,
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-20000:]}"


if __name__ == "__main__":
    import tests.conftest  # the profiles  # noqa: F401

    run(sys.argv[1])
