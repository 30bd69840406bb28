"""The directories that a demo makes for itself. They are removed however the demo ends.

A second process waits for the end of the demo, also for that by SIGKILL, and then removes them:
`python -m pagoda_tools.cli.demo.own_directories DIRECTORY TIER`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pagoda_tools.cli import UsageError

_REMOVAL_SECONDS = 60.0
# a killed demo's own children write for a moment longer
_TRIES = 20
_PAUSE_SECONDS = 0.1


@contextlib.contextmanager
def own_directory(parent: Path, tier: str) -> Iterator[Path]:
    """Yield a root for a tier in a new directory under `parent`; at the end, remove the directory,
    and the tier's entry in the register of tiers. Raises UsageError.
    """
    try:
        made = Path(tempfile.mkdtemp(prefix="pagoda-demo-", dir=parent))
    except OSError as trouble:
        raise UsageError(
            f"the demo needs a directory in {parent}: {trouble.strerror}"
        ) from None
    with contextlib.ExitStack() as undo:
        undo.callback(_remove, made, tier)
        remover = subprocess.Popen(
            [sys.executable, "-m", __name__, str(made), tier],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C reaches all processes of the terminal's group
            start_new_session=True,
        )
        undo.pop_all()
    try:
        yield made / tier
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            remover.communicate(timeout=_REMOVAL_SECONDS)
        if made.exists():
            # the other process was killed
            _remove(made, tier)


def _remove(made: Path, tier: str) -> None:
    from pagoda.base import recorded_tiers

    recorded_tiers.remove(os.path.realpath(made / tier))
    for _ in range(_TRIES):
        shutil.rmtree(made, ignore_errors=True)
        if not made.exists():
            return
        time.sleep(_PAUSE_SECONDS)


def main() -> None:
    """Wait for the end of stdin, and remove the directory of the arguments."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    _remove(Path(sys.argv[1]), sys.argv[2])


if __name__ == "__main__":
    main()
