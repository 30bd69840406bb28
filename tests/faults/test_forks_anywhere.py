"""A signal handler forks between any two instructions of a call, and its child returns into it much
later.

The parent has gone on by then: whatever the child writes of the interrupted call, it writes over
something else.
"""

from __future__ import annotations

import dis
import itertools
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import TypeVar

import pytest

import pagoda.ledger
from pagoda.ledger import Ledger, Reserved, admin
from pagoda.ledger.columns import Columns
from pagoda.ledger.store_state import (
    COLUMNS,
    COUNTERS_FILE,
    PAGE_GUARDS,
    STATE,
    TABLES,
)
from tests.children import child, in_light_process, wait
from tests.faults.support import NAMESPACE, Store, keys

LEDGER = str(Path(pagoda.ledger.__file__).parent)
T = TypeVar("T")
Tracer = Callable[[FrameType, str, object], object]
PARTS = 6  # all places take half a minute
CALLS = {
    op
    for name, op in dis.opmap.items()
    if name.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
}
CACHE = dis.opmap["CACHE"]
# exit codes: there are fewer places; the child has its parent's tables
NO_MORE = 3
STILL_OPEN = 4


def places(code: CodeType) -> set[int]:
    """Return the instructions of some code before which Python may run a signal handler."""
    # read by itself: `dis` takes ten times as long, in each of hundreds of processes
    ops = code.co_code
    steps = itertools.pairwise(
        at for at in range(0, len(ops), 2) if ops[at] != CACHE
    )
    return {b for a, b in steps if ops[a] in CALLS}


class ForkAt:
    """Traces the ledger, and forks at the n-th place that it meets."""

    def __init__(self, ledger: Ledger, n: int) -> None:
        self.ledger = ledger
        self.left = n
        # places of all that was called
        self.unseen: dict[CodeType, set[int]] = {}
        self.where = ""
        self.child = 0
        self.waits, self.go = os.pipe()

    def call(
        self, frame: FrameType, _event: str, _argument: object
    ) -> Tracer | None:
        code = {
            one.f_code.co_filename
            for one in (frame, frame.f_back)
            if one is not None
        }
        if self.where or not any(
            name.startswith(LEDGER) for name in code
        ):  # and what it calls, as `lmdb.open` does
            return None
        if frame.f_code not in self.unseen:
            self.unseen[frame.f_code] = places(frame.f_code)
        unseen = self.unseen[frame.f_code]
        if not unseen:
            return None

        def step(frame: FrameType, event: str, _argument: object) -> Tracer:
            if event == "opcode" and frame.f_lasti in unseen and not self.where:
                unseen.remove(frame.f_lasti)
                self.left -= 1
                if self.left < 0:
                    self.where = (
                        f"{frame.f_code.co_qualname}:{frame.f_lineno}, instruction "
                        f"{frame.f_lasti}"
                    )
                    self.fork()
            return step

        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return step

    def fork(self) -> None:
        sys.settrace(None)
        self.child = os.fork()
        if not self.child:
            signal.alarm(60)  # instead of a hang
            os.read(self.waits, 1)
            # what it begins from now on is its own: that may change the store
            self.ledger.session.gate.run = self.end  # type: ignore[assignment]

    def end(self, *_: object, **__: object) -> None:
        """End the child, which never uses what its parent had open: the parent may write there at
        any moment.
        """
        tables = str(self.ledger.directory / TABLES)
        os._exit(
            STILL_OPEN if tables in Path("/proc/self/maps").read_text() else 0
        )


def content(directory: Path, slots: int) -> dict[str, bytes]:
    """What is in the files of a store, without the hints."""
    files = {
        name: (directory / name).read_bytes()
        for name in (TABLES, COUNTERS_FILE, PAGE_GUARDS, STATE)
    }
    columns = Columns(directory / COLUMNS, slots)
    return {
        **files,
        "generations": columns.generation.tobytes(),
        "keys": columns.keys.tobytes(),
    }


def calls(
    store: Store, begin: int, end: Callable[[], None], views: list[object]
) -> None:
    """Reserve, commit, abort, find, hold, release. A child that returns into one of these ends
    after it.
    """
    ledger = store.ledger
    me = os.getpid()
    prompt = keys(range(begin, begin + 4))

    def own(result: T) -> T:
        if os.getpid() != me:
            end()
        return result

    outcomes = own(ledger.reserve(prompt, namespace=NAMESPACE, tokens=16))
    own(ledger.commit([one for one in outcomes if isinstance(one, Reserved)][:2]))
    own(ledger.abort(outcomes))
    match = own(ledger.match_prefix(prompt))
    views.append(own(store.slab.view(int(match.slots[0]))))
    own(ledger.hold(match.slots, match.generations))
    own(ledger.release(match.slots, match.generations))


def one_place(store: Store, n: int) -> None:
    """In a child of the test, which is no member yet and has no tables open: fork at the n-th
    place.
    """
    ledger = store.ledger
    at = ForkAt(store.ledger, n)
    views = list[object]()
    sys.settrace(at.call)
    try:
        calls(store, 10 * n, at.end, views)
    finally:
        sys.settrace(None)
        if at.where and not at.child:
            os._exit(1)
    if not at.where:
        os._exit(NO_MORE)
    calls(store, 10 * n + 4, at.end, views)
    before = content(ledger.directory, ledger.slots)
    os.write(at.go, b"!")
    ended = wait(at.child)
    after = content(ledger.directory, ledger.slots)
    changed = [name for name, data in before.items() if data != after[name]]
    calls(store, 10 * n, at.end, views)
    admin.check(ledger)
    if ended or changed:
        print(
            f"{n}: {at.where}: exit code {ended}, wrote {changed}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def every_place(root: Path, part: int) -> None:
    """Fork at every place of this part."""
    store = Store(root, slots=32)
    n = part
    while (code := wait(child(partial(one_place, store, n)))) != NO_MORE:
        assert code == 0, f"place {n}"
        n += PARTS
    assert n > 100, n
    admin.check(store.ledger)
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_child_that_a_signal_handler_forks_anywhere_writes_nothing_of_its_parents_call(
    shm_root: Path, part: int
) -> None:
    in_light_process(every_place, shm_root, part)
