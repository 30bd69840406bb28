"""Who else may write what this user's group may write: nobody where that is the user alone."""

from __future__ import annotations

import grp
import os
import pwd


def others_can_write(mode: int) -> bool:
    """Return whether this mode lets others write a file of this user and its group.

    Debian gives each user a group of the same name without other members: for such a user it does
    not. Root's group has members in some containers: for root it does.
    """
    if mode & 0o002:
        return True
    if not mode & 0o020:
        return False
    if os.geteuid() == 0:
        return True
    user = pwd.getpwuid(os.geteuid())
    group = grp.getgrgid(os.getegid())
    others = set(group.gr_mem) - {user.pw_name}
    return group.gr_name != user.pw_name or bool(others)
