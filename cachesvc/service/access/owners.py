"""Names of leases, and the limits of what callers may see of others' things."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterator
from hashlib import blake2b

from cachesvc.flows.context.core import Core
from cachesvc.model.errors import LeaseLost, NotFound
from cachesvc.questions.owned import why_lost
from cachesvc.questions.view import SHOWN_LETTERS, Sight
from cachesvc.service.access.auth import EVERYONE, UNPROVEN, Scope, caller

MODEL_BITS, TICKET_BITS = 30, 40
"""Bits of the numbers of models (uint32 on the wire) and of tickets (exact in JSON)."""
_ROUNDS = 4

_NAMED = re.compile("[0-9a-f]{32}-([0-9a-f]{1,16})")


def lease_name(epoch: int) -> str:
    """A new lease's id: 128 random bits, and the daemon's epoch behind them, by which a later daemon knows it."""
    return f"{secrets.token_hex(16)}-{epoch:x}"


def unordered_numbers(bits: int) -> Iterator[int]:
    """Numbers from 1 to 2**``bits`` - 1 (``bits`` is even), each once, in an order of this daemon's own: who gets some
    cannot know how many others were given out between them. It is a permutation of 1, 2, ... under a secret key."""
    key, half = secrets.token_bytes(16), bits // 2
    mask = (1 << half) - 1
    for number in itertools.count(1):
        high, low = number >> half & mask, number & mask
        for turn in range(_ROUNDS):
            mixed = blake2b(low.to_bytes(8, "little") + bytes((turn,)), key=key, digest_size=8).digest()
            high, low = low, high ^ int.from_bytes(mixed, "little") & mask
        if shuffled := high << half | low:
            yield shuffled


def shown_id(lease_id: str) -> str:
    """A lease's id as the log may have it: the whole one is a key to the lease."""
    return lease_id[:SHOWN_LETTERS]


def no_lease(core: Core, lease_id: str, epoch: int) -> NotFound | LeaseLost:
    """Error for a lease that ``Ledger.hear`` does not find."""
    if (why := why_lost(core, lease_id)) is not None:
        return LeaseLost(lease_id, why)
    if is_of_another_epoch(lease_id, epoch):
        return LeaseLost(lease_id, "it was opened with an earlier daemon, and its pages went with that one")
    return NotFound("lease", lease_id, "open one first")


def is_of_another_epoch(lease_id: str, epoch: int) -> bool:
    """True for a lease that another life of the daemon opened."""
    named = _NAMED.fullmatch(lease_id)
    return named is not None and int(named[1], 16) != epoch


def sight() -> Sight:
    """Limits of the running RPC's caller. The whole id of a lease is a key to it, so those who may only read get its
    beginning; callers without a proof get neither ids nor namespaces of models with a salt."""
    who = caller()
    return Sight(
        tenant=None if who.sees_all else who.tenant,
        whole_ids=who is EVERYONE or Scope.ADMIN in who.scopes,
        salted=who not in UNPROVEN,
    )
