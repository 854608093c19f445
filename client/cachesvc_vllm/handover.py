"""Prefill on one node, decode on another: what routers say of it with a request, and what they are answered.

    P   do_remote_decode             its last output says where the blocks are: do_remote_prefill, remote_host, ...
    D   do_remote_prefill            the router passes that on: the daemon fetches what P's daemon has
    D   remote_prefiller             the same while P computes; remote_kv_source: any node that has the blocks

Blocks are found by content, so neither side holds anything for the other, and a wrong or late word costs time alone.
The last block of a prompt, where it is not full, is handed over too (``wishes.py``). It is waited for where
the prefill has ended; before that it comes with the last full blocks, or is computed: not every prefiller seals it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from cachesvc_client import Expected, Retention
from cachesvc_client.plugins.keeper import News

from cachesvc.model.errors import InvalidRequest
from cachesvc.model.text import parse_address

log = logging.getLogger(__name__)


MOST_HOST_CHARACTERS = 253


MOST_DIGITS = 9


ABORTED = "FINISHED_ABORTED"


def expected_of(request: Any, patience_s: float, block_tokens: int) -> Expected | None:
    """Read what another node computes of a request, as a router says; None: nothing, or nothing that can be read."""
    params = request.kv_transfer_params
    if not params or not isinstance(params, Mapping):
        return None
    if params.get("do_remote_prefill"):
        return _expected(request, params, patience_s, block_tokens, is_computed=True)
    for name, is_computed in (("remote_prefiller", False), ("remote_kv_source", True)):
        if isinstance(where := params.get(name), Mapping):
            return _expected(request, where, patience_s, block_tokens, is_computed=is_computed)
    return None


def retention_of(request: Any) -> Retention:
    """Return the client's hint on a request's blocks: ``retention`` in its ``kv_transfer_params``, "once" or "keep".
    Another word is logged and ignored: a hint fails no request."""
    params = request.kv_transfer_params
    if not params or not isinstance(params, Mapping) or "retention" not in params:
        return Retention.DEFAULT
    said = params["retention"]
    try:
        return Retention(said)
    except ValueError:
        if _news.is_new("retention"):
            log.warning("retention_ignored request=%s retention=%s", request.request_id, repr(said)[:60])
        return Retention.DEFAULT


def _expected(
    request: Any, where: Mapping[str, Any], patience_s: float, block_tokens: int, *, is_computed: bool
) -> Expected | None:
    tokens, prompt_tokens = _number(where.get("remote_num_tokens")), int(request.num_tokens)
    host, port = where.get("remote_host"), _number(where.get("remote_port"))
    peer = f"[{host}]:{port}" if isinstance(host, str) and ":" in host else f"{host}:{port}"
    try:
        if not isinstance(host, str) or len(host) > MOST_HOST_CHARACTERS:
            raise InvalidRequest("remote_host is no name or address")
        parse_address("remote_host", peer, least_port=1)
    except InvalidRequest as error:  # a match with it would be refused each time
        if _news.is_new("params"):
            log.warning("remote_params_ignored request=%s why=%s", request.request_id, error)
        return None
    if is_computed and (tokens is None or tokens >= prompt_tokens):
        return Expected(peer, 0, patience_s, is_computed, waits=False)
    blocks = (prompt_tokens if tokens is None else min(tokens, prompt_tokens)) // block_tokens
    return Expected(peer, blocks, patience_s, is_computed, waits=False) if blocks else None


def hands_over(request: Any) -> bool:
    """Return True for a request that is prefilled for another engine: a router says so, and it ends with its prompt, so
    that nothing is written behind that."""
    params = request.kv_transfer_params
    is_asked = bool(params) and isinstance(params, Mapping) and bool(params.get("do_remote_decode"))
    return is_asked and request.max_tokens == 1


def _number(value: object) -> int | None:
    """A number of ``MOST_DIGITS`` digits at most that is not negative, or its text; None for anything else."""
    if isinstance(value, str) and value.isdecimal() and len(value) <= MOST_DIGITS:
        value = int(value)
    return value if type(value) is int and 0 <= value < 10**MOST_DIGITS else None


def answer_of(request: Any, address: str, engine_id: str, ranks: int) -> dict[str, Any] | None:
    """Answer a router that asked where the decoding engine finds the blocks; None: it did not. ``address``: where this
    engine's daemon lends."""
    params = request.kv_transfer_params
    if not params or not isinstance(params, Mapping) or not params.get("do_remote_decode") or not address:
        return None
    if request.status.name == ABORTED:
        return None
    host, port = parse_address("peer_address", address)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [],
        "remote_engine_id": engine_id,
        "remote_request_id": request.request_id,
        "remote_host": host,
        "remote_port": port,
        "remote_num_tokens": int(request.num_computed_tokens),
        "tp_size": ranks,
    }


_news = News()
