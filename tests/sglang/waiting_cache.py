"""Requests that SGLang aborts while they wait, told to its cache on a daemon: what the cache keeps of them. And one
whose match has its answer after SGLang was told of no hit.

    python -m tests.sglang.waiting_cache SOCKET PID

PID is the daemon's.
Prints a JSON object. Run by the Python that has SGLang, which need not have pytest.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

from tests.sglang.stubs import install

PAGE_TOKENS, PAGES = 4, 64

LONGEST_S = 60.0
"""A busy machine's daemon has answered by then."""


def cache_on(path: str) -> Any:
    """The cache of an engine whose pool is on the daemon at ``path``."""
    from cachesvc_client.plugins.node import Node, Share, new_instance
    from cachesvc_sglang.memory import PoolMemory
    from cachesvc_sglang.page_cache import PageCache
    from cachesvc_sglang.settings import EngineSettings, flags_of

    from cachesvc.model.layout import Layout, Plane, PlaneGroup

    layout = Layout(PAGE_TOKENS, 1, (PlaneGroup("full"),), (Plane("k", 0, "full", (64,), "uint8"),))
    settings = EngineSettings(socket=path, host_blocks=0)
    share = Share("waiting", layout, PAGES)
    node = Node(settings, new_instance("waiting"), share, flags=flags_of(PAGE_TOKENS), attaches=True, keeps=True)
    node.start()
    buffers = SimpleNamespace(
        cachesvc=PoolMemory(node, settings, ""), layer_num=1, register_layer_transfer_counter=lambda _: None
    )
    allocator = SimpleNamespace(
        get_kvcache=lambda: buffers, pool_blocks=(PAGES - 1,), bind=lambda _: None, device="cpu"
    )
    params = SimpleNamespace(
        req_to_token_pool=None,
        token_to_kv_pool_allocator=allocator,
        page_size=PAGE_TOKENS,
        chunked_prefill_size=None,
        sliding_window_size=None,
        enable_metrics=False,
    )
    return PageCache(SimpleNamespace(params=params, disable_radix_cache=False))


def request(rid: str) -> Any:
    """A request that waits."""
    return SimpleNamespace(
        rid=rid,
        cache_request_handle=SimpleNamespace(rid=rid),
        lora_id=None,
        origin_input_ids=[*rid.encode(), *range(2 * PAGE_TOKENS)],
        output_ids=[],
        extra_key=None,
        cache_salt=None,
        input_embeds=None,
        multimodal_inputs=None,
        positional_embed_overrides=None,
        skip_radix_cache_insert=False,
    )


def admit_late(cache: Any, daemon: int) -> list[bool]:
    """Have the daemon answer a match after SGLang waited for it. Return whether the request is admitted with the match
    that SGLang has, and with a later one: SGLang waits once in an iteration, then looks in each."""
    from cachesvc_client.plugins import outbox

    late, admitted = request("late"), list[bool]()
    params = SimpleNamespace(req=late, key=SimpleNamespace(token_ids=late.origin_input_ids, limit=None))
    answer_s = outbox.ANSWER_S
    outbox.ANSWER_S = 0.0
    os.kill(daemon, signal.SIGSTOP)
    found = cache.match_prefix(params)
    os.kill(daemon, signal.SIGCONT)
    outbox.ANSWER_S = answer_s
    until_s = time.monotonic() + LONGEST_S
    while not any(admitted) and time.monotonic() < until_s:
        cache.inc_lock_ref(found.last_device_node)
        cache.ask_room()
        admitted.append(cache.reserve(len(late.origin_input_ids), fits=True))
        found = cache.match_prefix(params)
    return [admitted[0], admitted[-1]]


def main() -> None:
    """Entry point."""
    install()
    cache = cache_on(sys.argv[1])
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome

    waiting = [request(f"r{number}") for number in range(3)]
    for each in waiting:
        cache.expect(each)
    for each in waiting:
        cache.finish(SimpleNamespace(rid=each.rid), CacheRequestOutcome.ABORT)
    last = request("last")
    cache.expect(last)
    cache.match_prefix(SimpleNamespace(req=last, key=SimpleNamespace(token_ids=last.origin_input_ids, limit=None)))
    admitted = admit_late(cache, int(sys.argv[2]))
    left = [each.rid for each in waiting if cache._book.find(each.rid) is not None or each.rid in cache._keys]  # noqa: SLF001
    print(json.dumps({"left": left, "admitted": admitted}))
    cache.release_host_resources()


if __name__ == "__main__":
    main()
