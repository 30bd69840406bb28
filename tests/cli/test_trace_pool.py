"""TraceJob in several processes: the same results in the same order, and an end to all of it when
there is trouble.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence

import pytest

from pagoda_tools.cli import FailedError
from pagoda_tools.cli.trace_pool import TraceJob, TracePool
from pagoda_tools.replay import Request

REQUESTS = [Request(float(n), 512, 1, (n,)) for n in range(20)]


def ids_from(requests: Sequence[Request], start: int) -> list[int]:
    """Return the ids of a trace's end."""
    return [request.hash_ids[0] for request in requests[start:]]


def bad(requests: Sequence[Request]) -> list[int]:
    """Fail as a policy without room does."""
    raise ValueError("no room")


def dead(requests: Sequence[Request]) -> list[int]:
    """Die as a process that is killed for its memory does."""
    os._exit(9)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 3])
def test_results_come_in_the_order_of_the_work(jobs: int) -> None:
    with TracePool(REQUESTS, jobs, quiet=True) as pool:
        for starts in ([18, 3, 19, 7, 12], [15]):
            found = pool.run(
                [TraceJob(ids_from, (start,)) for start in starts], ""
            )
            assert found == [list(range(start, 20)) for start in starts]


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_what_a_process_raises_is_raised_here(jobs: int) -> None:
    with (
        TracePool(REQUESTS, jobs, quiet=True) as pool,
        pytest.raises(ValueError, match="no room"),
    ):
        pool.run([TraceJob(ids_from, (1,)), TraceJob(bad, ())], "")


@pytest.mark.slow
def test_a_process_that_dies_is_said_and_the_others_end() -> None:
    with TracePool(REQUESTS, 2, quiet=True) as pool:
        with pytest.raises(FailedError, match="--jobs 1"):
            pool.run([TraceJob(ids_from, (1,)), TraceJob(dead, ())], "")
        processes = multiprocessing.active_children()
    for process in processes:
        assert not process.is_alive()
