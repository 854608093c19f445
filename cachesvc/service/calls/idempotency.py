"""Remembered answers: a request_id that comes again gets its first answer, by whichever way it comes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from google.protobuf.message import Message

from cachesvc.model.errors import KeyReused, LimitExceeded

KEEP_ANSWERS = 256
"""Answers of a lease that are kept, if they are small."""
KEEP_LEAST = 32
"""Answers that are kept beside large ones: more than a client has steps under way."""
KEEP_BYTES = 1 << 20
"""Bytes that further answers may take."""
KEEP_MOST_BYTES = 8 << 20
"""Bytes that all answers of a lease may take, but for the last: one message is no larger."""
TENANT_BYTES = 64 << 20
"""Bytes that the answers of all leases of one tenant may take. Beyond it each lease has its part of it, and beyond
twice as much not even its last answer for certain: a tenant with that many large answers pays for them with retries of
its own."""
MOST_RETRIES = 16
"""Calls that wait for the answer of one that is under way."""
KEEP_CONTENTS_BYTES = 128 << 10
"""Largest request that is kept itself beside its answer: that is cheaper than a hash. Match of 2,048 blocks is half."""

Mark = tuple[str, type[Message], bytes | int]
"""Mark that distinguishes requests under one id: the call, its message, and their bytes or 64 bits of a hash over
them."""


def mark_of(name: str, request: Message, came: bytes, *, is_ours: bool = False) -> Mark:
    """The mark of a request. ``came``: its bytes, as its caller has written them, or (``is_ours``) the daemon,
    deterministically."""
    if len(came) > KEEP_CONTENTS_BYTES and not is_ours:
        came = _as_we_write(request)  # which is no longer
    return name, type(request), came if len(came) <= KEEP_CONTENTS_BYTES else hash(came)


def are_same(one: Mark, other: Mark) -> bool:
    """True for marks of equal requests, however each of them was written."""
    if one == other:
        return True
    (name, kind, first), (other_name, other_kind, second) = one, other
    if isinstance(first, int) or isinstance(second, int) or (name, kind) != (other_name, other_kind):
        return False
    return _as_we_write(kind.FromString(first)) == _as_we_write(kind.FromString(second))


def _as_we_write(request: Message) -> bytes:
    return request.SerializeToString(deterministic=True)


class AnswerBudget:
    """Bytes of the answers of one tenant's leases."""

    __slots__ = ("held", "leases")

    def __init__(self) -> None:
        self.held = 0
        self.leases = 0


class Repeats:
    """The last answers of one lease by request_id (never 0), in ``given``, and the calls that are ``under_way``.
    ``budget``: its tenant's.

    Those under way are not pushed out by answers: there are at most as many as a process may have waiting.
    """

    def __init__(self, budget: AnswerBudget) -> None:
        self._bytes = 0
        self._budget = budget
        budget.leases += 1
        self.given: OrderedDict[int, tuple[Mark, Message, int]] = OrderedDict()
        self.under_way: dict[int, tuple[Mark, asyncio.Future[Any]]] = {}
        self._retries: dict[int, int] = {}

    def find(self, request_id: int, mark: Mark) -> Any:
        """The answer to this id, or the future of a call that is under way; None for a new id.

        Raises KeyReused for an id with other contents.
        """
        given = self.given.get(request_id) or self.under_way.get(request_id)
        if given is None:
            return None
        if not are_same(given[0], mark):
            raise KeyReused(request_id)
        return given[1]

    def begin(self, request_id: int, mark: Mark, future: asyncio.Future[Any]) -> None:
        """The first call under this id is under way, until ``end``."""
        self.under_way[request_id] = mark, future

    def end(self, request_id: int) -> None:
        """End the first call. Unless its answer is kept, a retry starts anew."""
        del self.under_way[request_id]
        self._retries.pop(request_id, None)

    def retry(self, request_id: int) -> None:
        """Count one more call that waits for the answer of the first. Raises LimitExceeded for more than a client would
        send."""
        retries = self._retries.get(request_id, 0) + 1
        if retries > MOST_RETRIES:
            raise LimitExceeded(f"retries of request {request_id}, which is under way", retries, MOST_RETRIES)
        self._retries[request_id] = retries

    def keep(self, request_id: int, mark: Mark, answer: Message) -> None:
        """Remember an answer; the oldest go where all are too many or too large."""
        contents = mark[2]
        size_bytes = answer.ByteSize() + (len(contents) if isinstance(contents, bytes) else 0)
        self.given[request_id] = mark, answer, size_bytes
        self._bytes += size_bytes
        self._budget.held += size_bytes
        while self._is_too_much():
            _, (_, _, size_bytes) = self.given.popitem(last=False)
            self._bytes -= size_bytes
            self._budget.held -= size_bytes

    def forget(self) -> None:
        """Take the lease's answers out of its tenant's account."""
        self._budget.held -= self._bytes
        self._budget.leases -= 1

    def _is_too_much(self) -> bool:
        count, budget = len(self.given), self._budget
        if budget.held > TENANT_BYTES and self._bytes > TENANT_BYTES // budget.leases:
            return count > 1 or (count == 1 and budget.held > 2 * TENANT_BYTES)
        if count <= 1:
            return False
        return count > KEEP_ANSWERS or self._bytes > (KEEP_BYTES if count > KEEP_LEAST else KEEP_MOST_BYTES)
