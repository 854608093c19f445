"""Pages that were never shared: an engine goes on with them once the daemon has gone."""

from __future__ import annotations

from collections.abc import Iterable

from cachesvc.model.words import NO_PAGE
from cachesvc_client.plugins.pages.group_tables import Positions
from cachesvc_client.plugins.pages.request_pages import RequestPages
from cachesvc_client.records.stock import Stock


class PrivatePages:
    """Used from one thread."""

    def __init__(self) -> None:
        self._pages: list[int] = []

    def __len__(self) -> int:
        return len(self._pages)

    def take_stock(self, stock: Stock | None) -> None:
        """The stock is this engine's."""
        for cells in stock.drain() if stock is not None else ():
            self._pages += cells.pages

    def take_ended(self, ended: Iterable[RequestPages]) -> None:
        """Take the pages of ended requests too."""
        for request in ended:
            self._pages += request.private_pages()

    def add(self, pages: Iterable[int]) -> None:
        """Take pages that a request reads no more."""
        self._pages += pages

    def lengthen(self, request: RequestPages, blocks: int, states: Positions) -> bool:
        """Make a request's table ``blocks`` long, with pages for ``states``; False where there are too few pages, or
        what it was to load will not come."""
        if request.rows < request.shared_blocks or (request.lacks_tail and request.has_lent_tail):
            return False
        growth = request.growth(blocks, states)
        if request.missing_pages(growth) > len(self._pages):
            return False
        if request.lacks_tail:
            assert request.tail is not None
            request.tail.pages += self._take(1)
        new = range(request.rows, growth.blocks)
        request.pages += self._take(len(new) * request.lead_parts.count)
        for table in request.others:
            if table.is_state:
                wanted = growth.positions[table.state_group]
                table.add([self._take(1)[0] if position in wanted else NO_PAGE for position in new])
            else:
                table.add(self._take(len(new) * table.parts.count))
        return True

    def _take(self, pages: int) -> list[int]:
        taken = self._pages[:pages]
        del self._pages[:pages]
        return taken
