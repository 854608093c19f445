"""Requests' pages that the stock does not have: asked for ahead of their turn, or at once with what can be spared."""

from __future__ import annotations

from collections.abc import Callable

from cachesvc_client.plugins.pages.grants import Grants
from cachesvc_client.plugins.pages.group_tables import NO_POSITIONS, Positions
from cachesvc_client.plugins.pages.matches import Matches
from cachesvc_client.plugins.pages.request_pages import RequestPages


class Asking:
    """``drop_idle``: gives back what other requests hold that wait; True where one did. Used from the engine's
    scheduler thread."""

    def __init__(self, grants: Grants, matches: Matches, drop_idle: Callable[[RequestPages | None], bool]) -> None:
        self._grants = grants
        self._matches = matches
        self._drop_idle = drop_idle

    def ahead(self, request: RequestPages, blocks: int, states: Positions) -> None:
        """Ask the daemon for pages of a request that waits, and go on. Where it had none, take those of the stock, and
        first give back what other requests hold that wait."""
        if request.is_growing or self._grants.is_short or not self._grants.outbox.has_room:
            return
        if request.was_refused:
            request.was_refused = False
            self._drop_idle(request)
            self._grants.grow_some(request, blocks)
        self._grants.ask(request, blocks, states, self._matches.wanting(request), no_wait=True)

    def now(self, request: RequestPages, blocks: int, states: Positions) -> bool:
        """Ask the daemon for pages; where it has too few, with what this engine can spare: hits of requests that wait,
        and its stock. True once the request has them; False at once where an answer does not come in time."""
        if self._allocate(request, blocks, states):
            return True
        assert request.sequence is not None
        if self._grants.is_late(request):
            return False
        if self._drop_idle(request) and self._allocate(request, blocks, states):
            return True
        hit_blocks = request.sequence.hit_blocks
        if request.rows < hit_blocks and not self._allocate(request, hit_blocks, NO_POSITIONS):
            return False
        self._grants.grow_some(request, blocks)
        return request.has_pages(blocks, states) or self._allocate(request, blocks, states)

    def _allocate(self, request: RequestPages, blocks: int, states: Positions) -> bool:
        others = [] if request.taken or self._grants.is_short else self._matches.wanting(request)
        return not request.is_growing and self._grants.allocate(request, blocks, states, others)
