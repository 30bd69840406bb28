"""A lock that processes hold on a file or a directory for moments. Calls the operating system only.

Called by the log of requests, the verdicts of `pagoda quality` and the socket of `pagoda serve`.
"""

from __future__ import annotations

import fcntl
import time


def lock_file(fd: int, seconds: float) -> bool | None:
    """Lock a file or directory until this descriptor is closed; return whether it is locked.

    Args:
        fd: the descriptor; children that were forked meanwhile share its lock.
        seconds: how long to wait for another process. A stopped one may hold the lock for ever.

    Returns:
        False: another process held it all that time. None: the file system has no locks.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.005)
        except OSError:
            return None
