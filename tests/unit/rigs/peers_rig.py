"""Two replicas of which one alone has a prompt, and calls that share, run by run."""

from __future__ import annotations

from functools import partial

from cachesvc.flows.loads import Sharing
from cachesvc.flows.match import match
from cachesvc.model.answers import Matched, Wait
from cachesvc.model.layout import Layout
from cachesvc.model.words import KEY_BYTES, Transfer
from tests.unit.rigs.ledger_rig import Rig, chain, one_group, rig_of, serve


def shared(
    prompt: str, *, layout: Layout | None = None, device: int = 16, host: int = 0, near: bool = True, replicas: int = 2
) -> tuple[Rig, str, str]:
    """A rig whose replica 0 alone has ``prompt``, and a lease on each of the first two replicas."""
    layout = layout or one_group()
    groups = len(layout.groups)
    rig = rig_of(layout, device=(device,) * groups, host=(host,) * groups, replicas=replicas)
    rig.mover.reachable = near
    a, b = rig.lease("a", 0), rig.lease("b", 1)
    serve(rig, a, 1, prompt)
    assert (len(rig.device_keys(0)), len(rig.device_keys(1))) == (len(prompt), 0)
    return rig, a, b


def asking(rig: Rig, lease: str, sequence: int, prompt: str, limit: int = 0) -> partial[Matched | Wait]:
    """One Match call, to be run again and again."""
    flow = partial(match, sharing=Sharing())
    return partial(rig.once, flow, lease, sequence, chain(*prompt), limit)


def waits_for(answer: object) -> int:
    assert isinstance(answer, Wait)
    assert answer.seconds is not None, "sharing never holds a call up without end"
    [ticket] = answer.tickets
    return ticket


def hit(answer: object) -> tuple[int, int]:
    assert isinstance(answer, Matched)
    return answer.device_blocks, answer.host_blocks


def rows(rig: Rig, prompt: str) -> list[int]:
    keys = chain(*prompt)
    return [rig.model.blocks.index.rows[keys[at : at + KEY_BYTES]] for at in range(0, len(keys), KEY_BYTES)]


def only_transfer(rig: Rig) -> Transfer:
    [transfer] = rig.mover.transfers.values()
    return transfer
