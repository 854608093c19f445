"""Requests that hold pages and wait, in an engine without a daemon: all pages may be theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cachesvc_client.plugins.pages.page_book import PageBook

from cachesvc_vllm.loading import Loading

WAITING = ("WAITING", "PREEMPTED", "WAITING_FOR_REMOTE_KVS")
"""States of a request that waits for its turn; with the last one it may be that it need not know yet."""


def free_waiting(manager: Any, book: PageBook, requests: Mapping[str, Any], loading: Loading) -> None:
    """Free those of the ``requests`` that wait, but for what is ``loading``, when all pages are held by requests that
    came from the host and wait: else none finds room. vLLM preempts none that has not run, and looks no further than
    the first: they start over."""
    waiting = [each for name, each in requests.items() if each.status.name in WAITING and name not in loading]
    held = [pages.held for each in waiting if (pages := book.find(each.request_id)) is not None]
    if book.is_moving or sum(held) == book.held_blocks:
        for request in waiting:
            manager.free(request)
            request.num_computed_tokens = 0
