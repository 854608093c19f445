"""Names of operators' counters. A name is a metric's label: it is never changed."""

from __future__ import annotations

from enum import StrEnum

from cachesvc.ledger.leases import LeaseEnd


class Count(StrEnum):
    """Counters of events since the daemon's start."""

    MATCH_REQUESTS = "match_requests"
    MATCH_BLOCKS = "match_blocks"
    PUBLISHED_BLOCKS = "published_blocks"
    DUPLICATE_BLOCKS = "duplicate_blocks"
    EVICTIONS = "evictions"
    HOST_EVICTIONS = "host_evictions"
    STOCK_SHORT = "stock_short"
    TICKETS_DONE = "tickets_done"
    TICKETS_FAILED = "tickets_failed"
    H2D_BYTES = "h2d_bytes"
    D2H_BYTES = "d2h_bytes"
    P2P_BYTES = "p2p_bytes"
    PEER_LOADS = "peer_loads"
    PEER_BLOCKS = "peer_blocks"
    RELAYED_BLOCKS = "relayed_blocks"
    STORAGE_FETCHES = "storage_fetches"
    STORAGE_FETCHED_BLOCKS = "storage_fetched_blocks"
    STORAGE_KEPT_BLOCKS = "storage_kept_blocks"
    STORAGE_NOT_KEPT_BLOCKS = "storage_not_kept_blocks"
    EXPECTATIONS = "expectations"
    EXPECTATIONS_REFUSED = "expectations_refused"
    EXPECTATIONS_ENDED_ARRIVED = "expectations_ended_arrived"
    EXPECTATIONS_ENDED_SILENT = "expectations_ended_silent"
    EXPECTATIONS_ENDED_ABSENT = "expectations_ended_absent"
    EXPECTATIONS_ENDED_GIVEN_UP = "expectations_ended_given_up"
    EXPECTATIONS_ENDED_UNREACHABLE = "expectations_ended_unreachable"
    EXPECTATIONS_ENDED_OTHER = "expectations_ended_other"
    EXPECTED_BLOCKS = "expected_blocks"
    LENT_BLOCKS = "lent_blocks"
    LENT_BLOCKS_BACK = "lent_blocks_back"
    PINS_ENDED_EARLY = "pins_ended_early"
    LEASES_LOST = "leases_lost"
    LEASES_ENDED_CLOSED = "leases_ended_closed"
    LEASES_ENDED_SILENT = "leases_ended_silent"
    LEASES_ENDED_PROCESS_ENDED = "leases_ended_process_ended"
    LEASES_ENDED_OTHER = "leases_ended_other"
    MODELS_DISMISSED = "models_dismissed"
    WRITE_BACK_PAUSES = "write_back_pauses"
    MODELS_DISTRUSTED = "models_distrusted"
    CALLS_BROKEN = "calls_broken"
    CHORES_REFUSED = "chores_refused"
    KEYS_MISPLACED = "keys_misplaced"
    EVENT_SUBSCRIPTIONS = "event_subscriptions"
    EVENT_SUBSCRIBERS_CUT_OFF = "event_subscribers_cut_off"


LEASES_ENDED = {
    LeaseEnd.CLOSED: Count.LEASES_ENDED_CLOSED,
    LeaseEnd.SILENT: Count.LEASES_ENDED_SILENT,
    LeaseEnd.PROCESS_ENDED: Count.LEASES_ENDED_PROCESS_ENDED,
    LeaseEnd.OTHER: Count.LEASES_ENDED_OTHER,
}
"""Counter of each end of a lease."""

EXPECTATIONS_ENDED = {
    "arrived": Count.EXPECTATIONS_ENDED_ARRIVED,
    "silent": Count.EXPECTATIONS_ENDED_SILENT,
    "absent": Count.EXPECTATIONS_ENDED_ABSENT,
    "given_up": Count.EXPECTATIONS_ENDED_GIVEN_UP,
    "unreachable": Count.EXPECTATIONS_ENDED_UNREACHABLE,
    "restarted": Count.EXPECTATIONS_ENDED_UNREACHABLE,
}
"""Counter of each end of an expectation; others count as OTHER."""
