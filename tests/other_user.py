"""Code that runs as another user, in a process of its own: for tests that root runs."""

from __future__ import annotations

import os
from collections.abc import Callable


def as_user(uid: int, call: Callable[[], object]) -> str:
    """Run ``call`` as a user; returns the text of what it raised, or an empty one."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        told = ""
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            call()
        except BaseException as error:  # noqa: BLE001 - the parent reads what it was
            told = str(error)
        os.write(writer, told.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return told
