"""The queue of a disk tier's reads and writes: order, bounds, shared reads, and its end."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from pagoda.base.metrics import Reason
from pagoda.tiers.base import Done, InSlot
from pagoda.tiers.io_queue import (
    IoQueue,
    ReadRequest,
    WriteRequest,
    valid_writes,
)
from testbed.patience import Patience, wait_until
from tests.interrupts import interrupted_before
from tests.tiers.tools import (
    LAYOUT,
    ROOT,
    chunks_of,
    is_right,
    keys_of,
    payload_of,
    room,
)

KEYS = keys_of(8)
OK = Done(True, None)


def write(n: int, namespace: bytes = ROOT) -> WriteRequest:
    return WriteRequest(chunks_of(KEYS[n : n + 1], n)[0], namespace, None)


def added(queue: IoQueue, write: WriteRequest) -> WriteRequest | Reason:
    return queue.add_writes([write])[0]


def read(n: int) -> ReadRequest:
    return ReadRequest(KEYS[n], n, ROOT, room())


def test_nothing_is_outstanding_only_when_all_futures_are_done() -> None:
    """A caller that has flushed reads what became of its chunks."""
    queue = IoQueue(8)
    first = write(1)
    second = write(2)
    assert queue.add_writes([first, second]) == [first, second]
    queue.take(2)
    seen: list[bool] = []
    for one in (first, second):
        one.future.add_done_callback(lambda _: seen.append(queue.wait(None, 0.0)))
    queue.finish_writes([(first, OK), (second, OK)])
    # whoever flushes as soon as the last one is done does not wait for itself
    assert seen == [False, True]
    assert queue.wait(None, 0.0)


def test_reads_come_before_writes_and_each_kind_in_order() -> None:
    queue = IoQueue(8)
    writes = [write(n) for n in range(3)]
    for each in writes:
        assert added(queue, each) is each
    reads = [read(5), read(6)]
    for one in reads:
        assert queue.add_reads([one]) == [None]
    assert [queue.take(2), queue.take(2)] == [[one] for one in reads]
    assert queue.take(2) == writes[:2]
    assert queue.take(2) == writes[2:]


def test_the_writes_of_a_batch_leave_some_to_the_other_threads() -> None:
    queue = IoQueue(8)
    for n in range(4):
        added(queue, write(n))
    assert [len(queue.take(16, 2) or []) for _ in range(3)] == [2, 1, 1]  # type: ignore[arg-type]


def test_a_thread_that_waits_takes_all_writes_of_one_call() -> None:
    """A transaction a batch: one for each chunk would cost more than all the rest."""
    queue = IoQueue(8)
    taken = list[int]()
    thread = threading.Thread(
        target=lambda: taken.append(len(queue.take(16) or []))
    )  # type: ignore[arg-type]
    thread.start()

    def slowly() -> Iterator[WriteRequest]:
        for n in range(4):
            yield write(n)
            time.sleep(0.02)  # time enough to take what is queued by now

    queued = queue.add_writes(slowly())
    thread.join(60)
    assert taken == [4]
    for each in queued:
        assert isinstance(each, WriteRequest)


def test_workers_share_what_is_queued_but_no_small_batch() -> None:
    queue = IoQueue(8)
    for n in range(8):
        added(queue, write(n))
    taken = [queue.take(16, shares=2, fewest_writes=3) for _ in range(3)]
    assert [len(batch) for batch in taken] == [4, 3, 1]  # type: ignore[arg-type]


def test_batches_are_numbered_in_the_order_in_which_they_are_taken() -> None:
    """They reserve their slots in that order, whichever thread is faster."""
    queue = IoQueue(8)
    writes = [write(n) for n in range(3)]
    for each in writes:
        added(queue, each)
    for _ in range(2):
        queue.take(2)
    assert [each.batch for each in writes] == [1, 1, 2]


def test_the_newest_write_is_refused_until_one_has_ended() -> None:
    queue = IoQueue(2)
    first = write(0)
    added(queue, first)
    added(queue, write(1))
    assert not queue.has_room()
    assert added(queue, write(2)) is Reason.QUEUE_FULL
    queue.take(1)
    # being written still counts
    assert added(queue, write(2)) is Reason.QUEUE_FULL
    queue.finish_writes([(first, OK)])
    assert isinstance(added(queue, write(2)), WriteRequest)


def test_reads_are_bounded_too() -> None:
    queue = IoQueue(2, read_chunks=2)
    assert queue.add_reads([read(n) for n in range(3)]) == [
        None,
        None,
        Reason.QUEUE_FULL,
    ]


def test_the_same_key_is_written_once() -> None:
    queue = IoQueue(2)
    first = write(0)
    added(queue, first)
    assert added(queue, write(0)) is first
    assert queue.take(9) == [first]


def test_a_write_is_in_flight_until_it_has_ended() -> None:
    queue = IoQueue(2)
    first = write(0)
    added(queue, first)
    queue.take(1)
    assert queue.in_flight(KEYS[0])
    assert queue.pending_writes(KEYS) == {KEYS[0]: first}
    assert not queue.wait([KEYS[0]], 0.01)
    queue.finish_writes([(first, OK)])
    assert not queue.in_flight(KEYS[0])
    assert queue.wait([KEYS[0]], 0)
    assert first.future.result(0) == OK


def test_a_write_whose_future_is_done_is_in_flight_no_more() -> None:
    queue = IoQueue(1)
    ended = write(0)
    added(queue, ended)
    queue.take(1)
    seen: list[tuple[bool, bool]] = []
    ended.future.add_done_callback(
        lambda _: seen.append((queue.in_flight(KEYS[0]), queue.has_room()))
    )
    queue.finish_writes([(ended, OK)])
    assert seen == [(False, True)]


def test_wait_ends_when_the_write_ends() -> None:
    queue = IoQueue(2)
    first = write(0)
    added(queue, first)
    threading.Timer(0.05, lambda: queue.finish_writes([(first, OK)])).start()
    patience = Patience(50)
    assert queue.wait(KEYS, 100)
    assert not patience.ended, patience.said()


def test_reads_of_one_chunk_share_one_flight_and_all_get_the_bytes() -> None:
    queue = IoQueue(2)
    leader = read(0)
    follower = read(0)
    other = read(1)
    queue.add_reads([leader, follower, other])
    assert queue.take(1) == [leader]
    assert queue.take(1) == [other]
    leader.buffer[:] = payload_of(KEYS[0])
    queue.finish_reads([(leader, OK)], LAYOUT.chunk_bytes)
    assert follower.future.result(0) == OK
    assert is_right(KEYS[0], follower.buffer)
    assert queue.outstanding() == (0, 1)


def test_who_follows_shares_a_failure_too() -> None:
    queue = IoQueue(2)
    leader = read(0)
    follower = read(0)
    queue.add_reads([leader, follower])
    failed = Done(False, Reason.IO_ERROR)
    queue.finish_reads([(leader, failed)], LAYOUT.chunk_bytes)
    assert follower.future.result(0) == Done(False, Reason.IO_ERROR)
    again = read(0)
    queue.add_reads([again])
    assert not again.future.done()


def test_cancel_takes_what_waits_and_marks_what_is_being_written() -> None:
    queue = IoQueue(8)
    begun = write(0)
    waiting = write(1)
    other = write(2, namespace=b"other")
    for each in (begun, waiting, other):
        added(queue, each)
    assert queue.take(1) == [begun]
    queued: list[WriteRequest] = []
    assert queue.cancel(Reason.CLEARED, queued, namespace=ROOT) == [begun]
    assert queued == [waiting]
    assert not begun.is_valid()
    assert queue.pending_writes(KEYS) == {KEYS[2]: other}
    assert queue.in_flight(KEYS[0])
    assert added(queue, write(0)) is Reason.BUSY
    assert queue.take(9) == [other]


def test_what_was_put_back_is_cancelled_at_once() -> None:
    queue = IoQueue(8)
    first, second, third = (write(n) for n in range(3))
    for each in (first, second, third):
        added(queue, each)
    for pause, each in zip((0.02, 3600.0, 0.01), queue.take(3), strict=True):
        assert queue.put_back(each, pause)
    queued: list[WriteRequest] = []
    assert queue.cancel(Reason.REMOVED, queued, key=KEYS[1]) == []
    assert queued == [second]
    queue.finish_writes([(second, Done(False, Reason.REMOVED))])
    assert isinstance(added(queue, write(1)), WriteRequest), (
        "it can be stored again"
    )
    again = queue.pending_writes(KEYS)[KEYS[1]]
    assert [queue.take(1) for _ in range(3)] == [[again], [third], [first]]


def test_close_hands_back_what_had_not_begun() -> None:
    queue = IoQueue(8)
    begun = write(0)
    waiting = write(1)
    one = read(3)
    added(queue, begun)
    queue.take(1)
    added(queue, waiting)
    queue.add_reads([one])
    assert queue.close() == ([waiting], [one])
    assert queue.close() == ([], [])
    assert queue.take(1) is None
    assert added(queue, write(2)) is Reason.CLOSED
    assert queue.add_reads([read(2)]) == [Reason.CLOSED]


def test_close_wakes_who_waits_for_work() -> None:
    queue = IoQueue(8)
    thread = threading.Thread(target=queue.take, args=(1,), daemon=True)
    thread.start()
    queue.close()
    thread.join(60)
    assert not thread.is_alive()


def test_a_thread_that_waits_for_work_sleeps_when_work_ends() -> None:
    """To wake it costs more than a small write does; what waits for the end is woken."""
    queue = IoQueue(8)
    mine = write(1)
    reading = read(2)
    assert added(queue, mine) is mine
    assert queue.take(1) == [mine]
    assert queue.add_reads([reading]) == [None]
    assert queue.take(1) == [reading]
    worker = threading.Thread(target=queue.take, args=(1,))
    waiter = threading.Thread(target=queue.wait, args=(None, 60.0))
    worker.start()
    waiter.start()
    wait_until(
        lambda: len(queue._changed._waiters) == len(queue._ended._waiters) == 1
    )
    (waiting,) = queue._changed._waiters
    queue.finish_writes([(mine, OK)])
    queue.finish_reads([(reading, OK)], 0)
    waiter.join(60.0)
    assert not waiter.is_alive()
    assert list(queue._changed._waiters) == [waiting]
    queue.close()
    worker.join(60.0)
    assert not worker.is_alive()


def placed(n: int, slot: int) -> ReadRequest:
    return ReadRequest(KEYS[n], n, ROOT, room(), (slot, 1))


def test_reads_of_adjacent_slots_are_taken_together() -> None:
    queue = IoQueue(8, run_chunks=3)
    slots = [4, 5, 7, 8, 9, 10, 12, 11]
    reads = [placed(n, slot) for n, slot in enumerate(slots)]
    assert queue.add_reads(reads) == [None] * 8
    runs: list[list[ReadRequest]] = []
    queue.read_all(runs.append)
    assert runs == [reads[:2], reads[2:5], reads[5:6], reads[6:7], reads[7:]]


def test_what_is_read_elsewhere_joins_no_run() -> None:
    queue = IoQueue(8, run_chunks=8)
    queued = read(1)
    queued.source = write(1)
    reads = [placed(0, 4), queued, placed(2, 6), read(3), read(4)]
    queue.add_reads(reads)
    assert [queue.take(1) for _ in reads] == [[each] for each in reads]


def test_one_thread_is_woken_for_each_run() -> None:
    queue = IoQueue(8, run_chunks=2)
    threads = [
        threading.Thread(target=queue.take, args=(1,), daemon=True)
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(queue._changed._waiters) == 4)
    # two of one run, one that is full, and one in another place; the last follows the first
    reads = [placed(0, 4), placed(1, 5), placed(2, 6), placed(3, 20)]
    queue.add_reads([*reads, placed(0, 4)])
    assert len(queue._changed._waiters) == 1
    wait_until(lambda: not queue._reads)
    queue.close()


def test_threads_are_woken_for_as_many_writes_as_one_takes() -> None:
    queue = IoQueue(8, fewest_writes=2)
    threads = [
        threading.Thread(target=queue.take, args=(2, 3, 2), daemon=True)
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(queue._changed._waiters) == 3)
    queue.add_writes([write(n) for n in range(3)])
    assert len(queue._changed._waiters) == 1
    wait_until(lambda: not queue._writes)
    queue.close()


def test_the_first_chunk_of_a_run_ends_last() -> None:
    """Who waits for it finds the others there, and waits once."""
    queue = IoQueue(8, run_chunks=8)
    reads = [placed(n, n) for n in range(4)]
    follower = placed(2, 2)
    queue.add_reads([*reads, follower])
    assert queue.take(1) == reads
    ended: list[ReadRequest] = []
    for each in (*reads, follower):
        each.future.add_done_callback(lambda _, each=each: ended.append(each))  # type: ignore[misc]
    failed = Done(False, Reason.FAILED_CHECK)
    dones = [OK, failed, OK, OK]
    reads[2].buffer[:] = payload_of(KEYS[2])
    queue.finish_reads(list(zip(reads, dones, strict=True)), LAYOUT.chunk_bytes)
    assert ended == [reads[3], follower, reads[2], reads[1], reads[0]]
    assert [each.future.result(0) for each in reads] == dones
    assert follower.future.result(0) == OK
    assert is_right(KEYS[2], follower.buffer)
    assert queue.outstanding() == (0, 0)


def test_what_several_writes_share_is_asked_once() -> None:
    asked: list[str] = []

    def source(name: str, valid: bool) -> Callable[[], bool]:
        return lambda: bool(asked.append(name)) or valid

    shared = source("shared", True)
    sources = [shared, shared, source("gone", False), shared]
    writes = [
        WriteRequest(chunks_of(KEYS[n : n + 1], n, each)[0], ROOT, None)
        for n, each in enumerate(sources)
    ]
    writes[3].cancelled = Reason.REMOVED
    assert valid_writes(writes) == writes[:2]
    assert asked == ["shared", "gone"]


def test_chunks_in_slots_are_asked_about_at_once() -> None:
    """One look at each ledger, and one barrier, for all chunks of a batch."""
    asked: list[list[tuple[int, int]]] = []

    def published(places: Sequence[tuple[int, int]]) -> list[bool]:
        asked.append(list(places))
        return [slot != 1 for slot, _ in places]

    writes = [
        WriteRequest(
            chunks_of(KEYS[n : n + 1], n, InSlot(published, (n, 7)))[0], ROOT, 0
        )
        for n in range(3)
    ]
    assert valid_writes(writes) == [writes[0], writes[2]]
    assert asked == [[(0, 7), (1, 7), (2, 7)]]
    assert [write.is_valid() for write in writes] == [True, False, True]


@pytest.mark.parametrize("kind", ["reads", "writes"])
def test_what_an_interrupted_call_has_queued_is_taken_at_once(kind: str) -> None:
    """By a thread that waits, not only when the next call comes."""
    some = [read(n) if kind == "reads" else write(n) for n in range(2)]
    method = IoQueue.add_reads if kind == "reads" else IoQueue.add_writes
    for line in itertools.count(1):
        queue = IoQueue(8, fewest_writes=4)
        thread = threading.Thread(target=_take_all, args=[queue])
        thread.start()
        wait_until(partial(_is_waited_for, queue))
        ended = not interrupted_before(
            line,
            method.__code__,
            partial(method, queue, some),  # type: ignore[arg-type]
        )
        if queue._changed._is_owned():  # type: ignore[attr-defined]
            # before the end of `with`, where no handler can run
            queue._changed.release()
        wait_until(partial(_is_empty, queue))
        queue.close()
        thread.join(60)
        if ended:
            assert line > 5
            break


def _take_all(queue: IoQueue) -> None:
    while queue.take(4) is not None:
        pass


def _is_waited_for(queue: IoQueue) -> bool:
    return bool(queue._changed._waiters)


def _is_empty(queue: IoQueue) -> bool:
    return not queue._reads and not queue._writes
