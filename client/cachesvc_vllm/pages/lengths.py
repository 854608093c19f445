"""Lengths of a request's table: how far it is computed, and how far it has to reach."""

from __future__ import annotations

from typing import Any

from cachesvc_client.plugins.pages.request_pages import RequestPages


def computed_blocks(
    *, computed_tokens: int, in_flight_tokens: int, block_tokens: int, keys: int, redrafted_tokens: int = 0
) -> int:
    """Return how many leading blocks of a request may be sealed, at most one for each of its ``keys``.

    vLLM counts tokens as computed that steps under way still write, and a drafter of several modules writes its KV of
    the last ``redrafted_tokens`` of them again.
    """
    return min(max(0, computed_tokens - in_flight_tokens - redrafted_tokens) // block_tokens, keys)


def fills_nothing(request: Any, pages: RequestPages, new_tokens: int, lookahead_tokens: int, block_tokens: int) -> bool:
    """Return True where ``KVCacheManager.allocate_slots`` would do nothing for a request that runs: it has a slot for
    each token, and vLLM has reported the blocks that are full. That is most of what decoding costs there, in most
    iterations. False for requests with windows or states, which are freed there."""
    if new_tokens <= 0 or not pages.taken or pages.others or pages.tail is not None:
        return False
    tokens = request.num_computed_tokens + new_tokens
    has_slots = tokens + lookahead_tokens <= pages.taken_blocks * block_tokens
    return bool(has_slots and tokens < (pages.full_blocks + 1) * block_tokens)


def blocks_wanted(
    request: Any,
    new_tokens: int,
    *,
    external_tokens: int,
    lookahead_tokens: int = 0,
    longest_tokens: int,
    block_tokens: int,
    step_tokens: int | None = None,
) -> int:
    """Return how long a request's table has to be for ``new_tokens`` behind what is computed, ``external_tokens`` that
    are loaded and ``lookahead_tokens`` of a drafter; no longer than ``longest_tokens``. ``step_tokens``: the most that
    is computed in a step, where pages come back between two of them; None where none does."""
    tokens = new_tokens + external_tokens + lookahead_tokens
    if external_tokens:  # it holds them while it waits, so it gets all that it needs to run
        rest = request.num_tokens - tokens
        rest = rest if step_tokens is None else min(rest, step_tokens)
        tokens += max(0, rest + max(block_tokens, lookahead_tokens))
    tokens = min(int(request.num_computed_tokens) + tokens, longest_tokens)
    return -(-tokens // block_tokens)
