"""Views of leases and sequences that an engine can read without asking the daemon, in either client."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from cachesvc.model.answers import TicketView
from cachesvc_client.core.errors import CacheClientError, Conflict, Registration
from cachesvc_client.core.keys import BlockHasher, ExtraKey
from cachesvc_client.memory.pool import AttachedPool
from cachesvc_client.records.lease_record import LeaseRecord
from cachesvc_client.records.sequence_record import Pages, SequenceRecord


class LeaseView:
    """Known state of a lease. ``record``: for handles made under it."""

    def __init__(self, record: LeaseRecord) -> None:
        self.record = record

    def __repr__(self) -> str:
        """State; of the id, which is a key to the lease, its beginning."""
        state = "closed" if self.record.is_closed else "lost" if self.is_lost else "live"
        on = self.registration
        return f"<{type(self).__name__} {self.id[:12]} on model {on.model_id}, replica {on.replica}: {state}>"

    @property
    def id(self) -> str:
        """The lease_id: hand it to worker processes, for ``CacheClient.attach``."""
        return self.record.id

    @property
    def instance(self) -> str:
        """The name under which processes of one engine share it; empty where none do."""
        return self.record.instance

    @property
    def joined(self) -> bool:
        """True where another process of the instance had opened it."""
        return self.record.joined

    @property
    def registration(self) -> Registration:
        """The model and replica that it is on."""
        return self.record.registration

    @property
    def is_lost(self) -> bool:
        """True once the daemon took the lease away or went away itself: recompute, and open a new one."""
        return self.record.is_lost

    @property
    def is_sure(self) -> bool:
        """True where it is known, without a call, that what was read of the lease's pages up to now was its own: no
        other engine can have got them. False while heartbeats are late, once the process was stopped (``make_sure``),
        and in a child of the process that opened the lease."""
        return self.record.is_sure

    @property
    def is_draining(self) -> bool:
        """True when the daemon wants to go: finish what runs, open nothing."""
        return self.record.is_draining

    @property
    def pools(self) -> tuple[AttachedPool, ...]:
        """The pools that this lease attached in this process."""
        return tuple(self.record.pools)

    def on_lost(self, callback: Callable[[CacheClientError], None]) -> None:
        """Call ``callback(error)`` once when the lease is lost, from a thread of the client's or on its loop; at once
        if it is. It must not block."""
        self.record.on_lost(callback)

    def hasher(self, tokens: Seq[int] | npt.NDArray[np.integer] = (), extras: Seq[ExtraKey] = ()) -> BlockHasher:
        """Keys of a prompt under this lease's namespace, in blocks of its layout; ``extend`` adds the tokens to come.

        ``extras``: what decides KV beside the tokens. Raises InvalidRequest.
        """
        hasher = BlockHasher(self.registration.namespace, self.registration.layout.block_tokens, tuple(extras))
        hasher.extend(tokens)
        return hasher

    def launch(self) -> int:
        """The number of an iteration of the engine's, asked for before the tables are read that its kernels get.

        Until ``completed`` says that it has ended nothing that it may use goes back to the daemon. Engines that compute
        one iteration at a time, and recycle and release in between, need neither.
        """
        return self.record.launches.begin()


class SequenceView:
    """Known state of a sequence, as of its last call or step. One thread uses it at a time."""

    def __init__(self, record: SequenceRecord) -> None:
        self.record = record

    def __repr__(self) -> str:
        """State, as of the last call or step."""
        state = "released" if self.is_released else "swapped out" if self.is_swapped_out else "open"
        return (
            f"<{type(self).__name__} {self.id}: {state}, {self.blocks} blocks, {self.sealed_blocks} sealed, hit "
            f"{self.device_blocks} on the device and {self.host_blocks} on the host>"
        )

    @property
    def id(self) -> int:
        return self.record.id

    @property
    def device_blocks(self) -> int:
        """Blocks of the hit that were in place at Match: nothing to load, nothing to compute."""
        return self.record.matched.device_blocks

    @property
    def host_blocks(self) -> int:
        """Blocks of the hit behind those that ``allocate`` starts to load."""
        return self.record.matched.host_blocks

    @property
    def storage_blocks(self) -> int:
        """Number of ``host_blocks`` whose bytes came from storage for this Match."""
        return self.record.matched.storage_blocks

    @property
    def hit_blocks(self) -> int:
        """``device_blocks + host_blocks``: what need not be computed."""
        return self.device_blocks + self.host_blocks

    @property
    def full_blocks(self) -> int:
        """Blocks that the groups without a window have: more than ``hit_blocks`` where a missing window page or state
        has shortened the hit."""
        return self.record.matched.full_blocks

    @property
    def computing_blocks(self) -> int:
        """Blocks after the hit that another engine was computing at Match: waiting and matching again may pay."""
        return self.record.matched.computing_blocks

    @property
    def coming_blocks(self) -> int:
        """Blocks after the hit that were on their way from another node at Match, as ``expected``: match again."""
        return self.record.matched.coming_blocks

    @property
    def blocks(self) -> int:
        return self.record.blocks

    @property
    def sealed_blocks(self) -> int:
        """Leading blocks that are shared and immutable: never write into their pages."""
        return self.record.sealed_blocks

    @property
    def tables(self) -> tuple[Pages, ...]:
        """Page of each block, for each group of the layout: int32 ``[blocks]``, -1 where there is none.

        Read-only views, good until the sequence's next call. Raises Conflict while the sequence is swapped out,
        UsedAfterFork in a child of the process that opened it.
        """
        self.record.maker.check()
        if self.record.is_swapped_out:
            raise Conflict(f"sequence {self.id} is swapped out and has no pages; swap it in first")
        return tuple([table.pages for table in self.record.tables])

    @property
    def tickets(self) -> tuple[TicketView, ...]:
        """Loads that the tables rely on: wait for their layers in ``AttachedPool``, or for all in ``wait_loaded``."""
        return self.record.tickets

    @property
    def is_swapped_out(self) -> bool:
        return self.record.is_swapped_out

    @property
    def is_released(self) -> bool:
        """True once ``release`` was called: nothing else can be done with the sequence."""
        return self.record.is_released or self.record.ends_after > 0
