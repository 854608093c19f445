"""Names of leases, and the limits of what callers may see of others' things."""

from __future__ import annotations

import re
import secrets

from cachesvc.flows.context.core import Core
from cachesvc.model.errors import LeaseLost, NotFound
from cachesvc.questions.owned import why_lost
from cachesvc.questions.view import SHOWN_LETTERS, Sight
from cachesvc.service.access.auth import EVERYONE, UNPROVEN, Scope, caller

_NAMED = re.compile("[0-9a-f]{32}-([0-9a-f]{1,16})")


def lease_name(epoch: int) -> str:
    """A new lease's id: 128 random bits, and the daemon's epoch behind them, by which a later daemon knows it."""
    return f"{secrets.token_hex(16)}-{epoch:x}"


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
