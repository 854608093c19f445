"""Who may open a socket's file: its owner alone, or a group of the system as well."""

from __future__ import annotations

import grp
import os
from pathlib import Path

from cachesvc.model.errors import Unavailable

GROUP_MODE = 0o660
MOST_GROUP = (1 << 32) - 2
"""The number above it means no change."""


def open_to_group(path: str, group: str) -> None:
    """Let ``group``, a name or a number, connect; an empty one changes nothing.

    The file was made with mode 0600, so nobody else could connect before. Raises Unavailable for a group that is
    unknown, or that this process may not give the file to.
    """
    if not group:
        return
    number = group_number(group)
    try:
        os.chown(path, -1, number)
        Path(path).chmod(GROUP_MODE)
    except OSError as error:
        raise Unavailable(
            f"cannot give the socket {path} to group {group}: {error.strerror}; the daemon must run as root or be a "
            "member of that group"
        ) from error


def group_number(group: str) -> int:
    """The number of a group that is named, or given by its number. Raises Unavailable."""
    try:
        number = int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
    except KeyError:
        number = MOST_GROUP + 1
    if number > MOST_GROUP:
        raise Unavailable(f"socket_group: there is no group {group!r} here; name another or give its number")
    return number
