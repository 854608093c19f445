"""Pages that were never shared: an engine goes on with them once the daemon has gone."""

from __future__ import annotations

from collections.abc import Iterable

from cachesvc_client.records.stock import Stock

from cachesvc_vllm.pages.request_pages import RequestPages


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

    def lengthen(self, request: RequestPages, blocks: int) -> bool:
        """Make a request's table ``blocks`` long; False where there are too few pages, or what it was to load will not
        come."""
        missing = blocks - len(request.pages)
        if len(request.pages) < request.hit_blocks + request.host_blocks or missing > len(self._pages):
            return False
        if missing > 0:
            request.pages += self._pages[:missing]
            del self._pages[:missing]
        return True
