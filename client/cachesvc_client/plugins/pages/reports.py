"""Reports of an iteration as operations of a step: blocks that are computed, cells that are given back, ended requests.

In this order: a cell that is given back in the same report is sealed before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cachesvc_client import CacheClientError
from cachesvc_client.plugins.pages.matches import refused
from cachesvc_client.plugins.pages.request_pages import RequestPages
from cachesvc_client.plugins.pages.untold import Reports, Sealing

Pack = Callable[[Sequence[bytes], bytes], bytes]
"""The daemon's keys of hashes and a salt."""


def put_reports(batch: Any, part: Reports, pack: Pack) -> None:
    """Add all that ``part`` has to a batch."""
    if part.sealing:
        _publish(batch, part.sealing, pack)
    ended = set(part.ended)
    for request, dead in part.dead.items():
        if request not in ended:
            _recycle(batch, request, dead)
    for request in part.ended:
        _release(batch, request)


def _publish(batch: Any, sealings: Mapping[RequestPages, Sealing], pack: Pack) -> None:
    """Those without states are entries of one column: it has the keys of all, or of none where Match had them."""
    plain: list[tuple[RequestPages, int, int, Sequence[bytes]]] = []
    sends_keys = False
    for request, sealing in sealings.items():
        assert request.sequence is not None
        record, blocks = request.sequence.record, sealing.blocks
        first = min(record.asked_blocks, blocks)
        if sealing.states:
            _publish_states(batch, request, sealing, first, pack)
        elif blocks > first:
            plain.append((request, first, blocks, sealing.keys))
            sends_keys = sends_keys or blocks > record.known_keys
    if plain:
        keys = [pack(keys[first:blocks], each.salt) for each, first, blocks, keys in plain] if sends_keys else ()
        sequences, firsts = [each.sequence for each, *_ in plain], [first for _, first, *_ in plain]
        batch.publish_all(sequences, [blocks for *_, blocks, _ in plain], keys, first_key=firsts)


def _publish_states(batch: Any, request: RequestPages, sealing: Sealing, first: int, pack: Pack) -> None:
    assert request.sequence is not None
    blocks = sealing.blocks
    keys = b"" if blocks <= request.sequence.record.known_keys else pack(sealing.keys[first:blocks], request.salt)
    try:
        batch.publish(request.sequence, max(blocks, first), keys, first_key=first, states=sealing.states)
    except CacheClientError as error:
        refused("publish", request.request_id, error)


def _recycle(batch: Any, request: RequestPages, dead: Mapping[int, int]) -> None:
    if request.sequence is None:
        return
    try:
        batch.give_back(request.sequence, dead, request.take_replaced(dead))
    except CacheClientError as error:
        refused("recycle", request.request_id, error)


def _release(batch: Any, request: RequestPages) -> None:
    if request.tail is not None:
        _release(batch, request.tail)
    if request.sequence is None:
        return
    try:
        batch.release(request.sequence, output_tokens=request.output_tokens)
    except CacheClientError as error:
        refused("release", request.request_id, error)
