"""Rules for sending a token: never in plain text off this machine, and on a unix socket only to the daemon's own user.

The kernel names the user that serves a socket. The daemon's user is the one that CACHESVC_DAEMON_UID
names; where it names none, one's own, or the owner of the socket's folder, if no other user could have made that folder
or can put something into it. Root may be the daemon in any case.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from cachesvc.model.text.addresses import Address
from cachesvc_client.core.errors import InvalidRequest, UntrustedDaemon
from cachesvc_client.wire.life import connect, listener_uid

DAEMON_UID_VARIABLE = "CACHESVC_DAEMON_UID"
PROBE_S = 1.0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def is_loopback(address: str) -> bool:
    """True for a HOST:PORT that does not leave this machine; other forms of gRPC's addresses are not."""
    return Address(address.rpartition(":")[0].strip("[]"), 0).is_loopback


def require_private(address: str) -> None:
    """Check HOST:PORT before a token goes there without TLS. Raises InvalidRequest unless it is loopback."""
    if not is_loopback(address):
        raise InvalidRequest(
            f"a token is not sent to {address} in plain text: name the roots that sign the daemon's certificate "
            "(root_ca=, --tls-ca FILE, CACHESVC_TLS_CA; 'system' for this machine's own), or leave the token out"
        )


def may_show(address: str) -> bool:
    """True where a token may go to ``address`` now; False where no process serves that unix socket: send none then.

    Raises UntrustedDaemon for a socket that another user serves.
    """
    if not address.startswith(("/", ".")):
        return True  # ``require_private`` is what TCP is asked
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            connect(probe, address, PROBE_S)
            uid = listener_uid(probe)
    except OSError:  # gRPC says why, as it would without a token
        return False
    require_daemon(address, uid)
    return True


def require_daemon(path: str, uid: int, environment: Mapping[str, str] = os.environ) -> None:
    """``uid`` serves the socket at ``path``: is that the daemon's user? Raises UntrustedDaemon, InvalidRequest."""
    said = environment.get(DAEMON_UID_VARIABLE, "")
    if said and not said.isdecimal():
        raise InvalidRequest(f"{DAEMON_UID_VARIABLE} is {said!r}; it is the number of the daemon's user")
    if uid == 0 or (uid == int(said) if said else uid in (os.geteuid(), folder_owner(path))):
        return
    raise UntrustedDaemon(
        f"user {uid} serves {path}, and nothing says that this is the daemon: no token is sent there. If it is, set "
        f"{DAEMON_UID_VARIABLE}={uid}"
    )


def folder_owner(path: str) -> int | None:
    """The owner of a socket's folder, if it is his or root's doing alone that it is there, and what lies in it."""
    named, real = Path(path).absolute().parent, Path(path).resolve().parent
    try:
        owner = real.stat().st_uid
        above = [each.stat() for each in {named, *named.parents, real, *real.parents}]
    except OSError:
        return None
    is_his = all(each.st_uid in (0, owner) and not each.st_mode & _OTHERS_WRITE for each in above)
    return owner if is_his else None
