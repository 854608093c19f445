"""Lists of what the ledger holds: models, sequences, transfers."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import NamedTuple

from cachesvc.flows.transfer.transfers import ticket_view
from cachesvc.model.answers import TicketView
from cachesvc.model.layout import Layout
from cachesvc.questions.query import MAX_LISTED
from cachesvc.questions.steps import Question, in_steps
from cachesvc.questions.view import Listed, View

SEQUENCES_LISTED = 1024
TICKETS_LISTED = 64


class ReplicaLine(NamedTuple):
    """One replica of a model, and how many leases are on it."""

    replica: int
    devices: tuple[str, ...]
    leases: int


class ModelLine(NamedTuple):
    """One model. Pages are by group; ``device_pages``: of its first replica. ``out_of_service``: why its calls are
    refused, empty where they are served."""

    model_id: int
    model: str
    namespace: bytes
    layout: Layout
    replicas: list[ReplicaLine]
    blocks: int
    host_pages: tuple[int, ...]
    device_pages: tuple[int, ...]
    out_of_service: str
    reserved_pages: int
    display_name: str
    weights_version: str


class SequenceLine(NamedTuple):
    """One open sequence and what it holds."""

    lease_id: str
    sequence_id: int
    blocks: int
    sealed_blocks: int
    private_pages: int
    swapped_out: bool
    failed: str


def models(view: View) -> Question[list[ModelLine]]:
    """Every model."""
    leases = Counter((lease.model, lease.replica) for lease in view.leases())
    lines: list[ModelLine] = []
    for some in in_steps(list(view.models())):
        lines += [
            ModelLine(
                model.id,
                model.name,
                view.namespace_of(model),
                model.layout,
                [ReplicaLine(each.id, each.devices, leases[model.id, each.id]) for each in model.replicas],
                len(model.blocks.index),
                model.host_pages,
                next((each.device_pages for each in (*model.replicas, *model.lost)), ()),
                model.suspect,
                model.reserved_pages,
                model.display_name,
                model.weights_version,
            )
            for model in some
        ]
        yield None
    return lines


def sequences(view: View, lease_id: str = "", limit: int = 0) -> Question[Listed[SequenceLine]]:
    """Open sequences of a lease, named as the caller may see it, or (empty) of every lease.

    ``limit`` 0: ``SEQUENCES_LISTED``; at most ``MAX_LISTED``.
    """
    limit = min(limit or SEQUENCES_LISTED, MAX_LISTED)
    every = (
        (view.lease_id(lease), sequence)
        for lease in view.leases()
        if lease_id in ("", lease.id, view.lease_id(lease))
        for sequence in lease.sequences.values()
    )
    found = list(islice(every, limit + 1))
    lines: list[SequenceLine] = []
    for some in in_steps(found[:limit]):
        lines += [
            SequenceLine(
                shown_id,
                sequence.id,
                sequence.blocks,
                sequence.sealed,
                sum(len(own) for own in sequence.own),
                sequence.swapped_out,
                sequence.failed,
            )
            for shown_id, sequence in some
        ]
        yield None
    return Listed(lines, len(found) > limit)


def tickets(view: View, limit: int = 0) -> Question[list[TicketView]]:
    """Transfers: those that run, then those that ended, the newest first. ``limit`` 0: ``TICKETS_LISTED``."""
    lines: list[TicketView] = []
    for some in in_steps(list(islice(view.tickets(), min(limit or TICKETS_LISTED, MAX_LISTED)))):
        lines += map(ticket_view, some)
        yield None
    return lines
