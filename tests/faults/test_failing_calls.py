"""Each system call of a cache fails once, with each error that it can have: see `failing_calls`."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.programs import skip
from tests.children import in_light_process
from tests.faults.failing_calls import ERRORS, Outcome, live_with_a_failure
from tests.seccomp import watched_calls

pytestmark = pytest.mark.timeout(1500)
PLACES = 12  # of each call and error in the soak test
EVERY = [
    (call, error) for call in watched_calls() for error in ERRORS.get(call, ())
]
# what a full or broken disk, or a full process, does first
OFTEN = [
    ("pwritev2", "EIO"),
    ("preadv2", "EIO"),
    ("fsync", "EIO"),
    ("fallocate", "ENOSPC"),
    ("openat", "EMFILE"),
    ("mmap", "ENOMEM"),
    ("fcntl", "ENOLCK"),
    ("pread64", "EIO"),
]


def _outcome(
    host: Path, disk: Path, call: str, error: str, at: int, lasts: bool = False
) -> Outcome:
    try:
        return live_with_a_failure(host, disk, call, error, at, lasts)
    except OSError as trouble:
        # no seccomp here, or another process listens to this one
        print(f"not here: {trouble}", flush=True)
        sys.exit(3)


def fail(host: str, disk: str, call: str, error: str, places: int) -> None:
    """Let some of the calls of that name fail, one in each life: those that a seed chooses."""
    roots = (Path(host, "host"), Path(disk, "disk"))
    dice = random.Random(f"{call} {error}")
    total = _outcome(*roots, call, error, -1)
    assert not total.wrong
    places = min(places, total.calls)
    wrong = []
    for at in sorted(dice.sample(range(total.calls), places)):
        outcome = live_with_a_failure(*roots, call, error, at)
        wrong += [f"{call} {error}, number {at}: {one}" for one in outcome.wrong]
    assert not wrong, "\n".join(wrong)


# calls that a sandbox or an older kernel refuses, each of which has a substitute
REFUSED = [
    ("fallocate", "ENOSYS"),
    ("fallocate", "EPERM"),
    # kernels before 6.10 always say so of a large part of a tmpfs, if a timer's signals come often
    ("fallocate", "EINTR"),
    ("madvise", "ENOSYS"),
    ("madvise", "EAGAIN"),
    ("madvise", "EINTR"),
    ("mlock", "EPERM"),
    ("preadv2", "ENOSYS"),
    ("pwritev2", "ENOSYS"),
    ("prlimit64", "EPERM"),
    ("flock", "ENOLCK"),
    ("link", "EPERM"),
    ("getrandom", "ENOSYS"),
    ("ioctl", "ENOTTY"),
]


def refuse(host: str, disk: str, call: str, error: str, _: int) -> None:
    """Refuse all calls of that name."""
    roots = (Path(host, "host"), Path(disk, "disk"))
    outcome = _outcome(*roots, call, error, 0, lasts=True)
    assert outcome.failed
    assert not outcome.wrong, outcome.wrong


def failed(
    work: Callable[..., None],
    shm_root: Path,
    tmp_path: Path,
    call: str,
    error: str,
    places: int = 1,
) -> None:
    """Run it in a process of its own; skip where no process can be asked about its calls."""
    arguments = (str(shm_root), str(tmp_path), call, error, places)
    try:
        in_light_process(work, *arguments)
    except AssertionError as trouble:
        if "ended with 3" in str(trouble):
            raise skip(
                "a process cannot be asked about its system calls"
            ) from None
        raise


@pytest.mark.slow
@pytest.mark.parametrize(("call", "error"), OFTEN)
def test_a_call_that_fails_costs_chunks_at_most(
    shm_root: Path, tmp_path: Path, call: str, error: str
) -> None:
    failed(fail, shm_root, tmp_path, call, error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "error"), [one for one in REFUSED if one[0] in watched_calls()]
)
def test_a_call_that_is_refused_has_a_substitute(
    shm_root: Path, tmp_path: Path, call: str, error: str
) -> None:
    failed(refuse, shm_root, tmp_path, call, error)


@pytest.mark.soak
@pytest.mark.parametrize(("call", "error"), EVERY)
def test_every_call_that_fails_costs_chunks_at_most(
    shm_root: Path, tmp_path: Path, call: str, error: str
) -> None:
    failed(fail, shm_root, tmp_path, call, error, PLACES)
