"""Holders and transfers: leases, tenants, sequences, tickets."""

from __future__ import annotations

from kvcache.v1 import admin_pb2, common_pb2, inspect_pb2

from cachesvc_ctl.core.text import describe_bytes, table
from cachesvc_ctl.questions.question import DEADLINE_SECONDS, LIMIT, Admin, Question


class Leases(Question[admin_pb2.ListLeasesResponse]):
    """ListLeases."""

    name = "leases"
    about = "which engine holds what"

    def ask(self, admin: Admin) -> admin_pb2.ListLeasesResponse:
        """Ask for the leases that the caller may see."""
        return admin.ListLeases(admin_pb2.ListLeasesRequest(), timeout=DEADLINE_SECONDS)

    def show(self, answer: admin_pb2.ListLeasesResponse) -> str:
        """Show one lease a line."""
        rows = [
            (
                le.lease_id[:12],
                le.engine,
                le.model_id,
                le.replica,
                le.state,
                f"{le.silent_seconds:.1f}",
                le.sequences,
                le.private_pages,
                le.pinned_blocks,
                " ".join(map(str, le.process_ids)),
            )
            for le in answer.leases
        ]
        head = (
            *("lease", "engine", "model", "replica", "state"),
            *("silent s", "sequences", "private", "pinned", "processes"),
        )
        return table(head, rows)


class Tenants(Question[inspect_pb2.ListTenantsResponse]):
    """ListTenants."""

    name = "tenants"
    about = "what each tenant holds and may hold"

    def ask(self, admin: Admin) -> inspect_pb2.ListTenantsResponse:
        """Ask for the tenants that the caller may see."""
        return admin.ListTenants(inspect_pb2.ListTenantsRequest(), timeout=DEADLINE_SECONDS)

    def show(self, answer: inspect_pb2.ListTenantsResponse) -> str:
        """Show a line for each thing that is counted."""
        rows = [
            (t.tenant or "(shared)", what, t.used.get(what, 0), t.limits.get(what, 0) or "-")
            for t in answer.tenants
            for what in sorted({*t.used, *t.limits})
        ]
        return table(("tenant", "of what", "used", "limit"), rows)


class Sequences(Question[admin_pb2.ListSequencesResponse]):
    """ListSequences."""

    name = "sequences"
    about = "open sequences"
    flags = (LIMIT,)

    def ask(self, admin: Admin) -> admin_pb2.ListSequencesResponse:
        """The first ``--limit`` of them."""
        return admin.ListSequences(admin_pb2.ListSequencesRequest(limit=self.arguments.limit), timeout=DEADLINE_SECONDS)

    def show(self, answer: admin_pb2.ListSequencesResponse) -> str:
        """Show one sequence a line."""
        rows = [
            (
                s.lease_id[:12],
                s.sequence_id,
                s.blocks,
                s.sealed_blocks,
                s.private_pages,
                "out" if s.swapped_out else "device",
                s.failed or "-",
            )
            for s in answer.sequences
        ]
        head = ("lease", "sequence", "blocks", "sealed", "private pages", "where", "failed")
        return table(head, rows) + (self.more("--limit") if answer.truncated else "")


class Tickets(Question[admin_pb2.ListTicketsResponse]):
    """ListTickets."""

    name = "tickets"
    about = "transfers, the newest first"
    flags = (LIMIT,)

    def ask(self, admin: Admin) -> admin_pb2.ListTicketsResponse:
        """Ask for tickets: those that run, then those that ended."""
        return admin.ListTickets(admin_pb2.ListTicketsRequest(limit=self.arguments.limit), timeout=DEADLINE_SECONDS)

    def show(self, answer: admin_pb2.ListTicketsResponse) -> str:
        """Show one ticket a line."""
        rows = [
            (t.id, t.direction, ticket_state(t), t.blocks, describe_bytes(t.size_bytes), t.reason or "-")
            for t in answer.tickets
        ]
        return table(("ticket", "direction", "state", "blocks", "bytes", "reason"), rows)


def ticket_state(ticket: common_pb2.Ticket) -> str:
    """State of a ticket in a word."""
    return common_pb2.TicketState.Name(ticket.state).removeprefix("TICKET_STATE_").lower()
