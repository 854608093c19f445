"""SGLang's cache on a daemon without an engine: what SGLang's scheduler asks of it, call by call.

    python -m tests.sglang.cache_runs SOCKET FAULTY_SOCKET

FAULTY_SOCKET: of a daemon a part of whose copies fails. Run by the Python that has SGLang, which need not have pytest.
Prints what each run found, as JSON: an import takes ten seconds.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.sglang.stubs import install

install()

import torch  # noqa: E402
from cachesvc_client.plugins.node import RESERVED_PAGES, Node, Share, new_instance  # noqa: E402
from cachesvc_sglang.adapters import LOADED, load_weights  # noqa: E402
from cachesvc_sglang.allocator import DaemonBudget  # noqa: E402 - the stubs come first
from cachesvc_sglang.identity import look_at_weights, replaced_weights  # noqa: E402
from cachesvc_sglang.memory import PoolMemory  # noqa: E402
from cachesvc_sglang.page_cache import PageCache  # noqa: E402
from cachesvc_sglang.settings import EngineSettings, flags_of  # noqa: E402
from sglang.srt.managers.schedule_batch import ReqKvInfo  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, CacheRequestOutcome  # noqa: E402

from cachesvc.model.layout import Layout, Plane, PlaneGroup  # noqa: E402

PAGE_TOKENS = 16
PAGES = 40
NUMBERS = itertools.count()
BOUND_S = 30.0
"""Time in which a page of another engine must have come, on any machine."""
WINDOW_TOKENS: int | None = None
"""That a layer reads before the query's, in a second group of the layout; None: there is none."""
LAYOUT = Layout(PAGE_TOKENS, 1, (PlaneGroup("full"),), (Plane("kv", 0, "full", (PAGE_TOKENS, 64), "uint8"),))


class Request:
    """The part of SGLang's request that the cache reads. ``seed``: of its prompt of ``blocks`` blocks and a token."""

    def __init__(self, rid: str, seed: int, blocks: int) -> None:
        self.rid = rid
        self.cache_request_handle = CacheRequestHandle(rid=rid, attempt_id=0)
        self.lora_id: str | None = None
        self.origin_input_ids = array("q", [1000 * seed + at for at in range(blocks * PAGE_TOKENS + 1)])
        self.output_ids = array("q")
        self.full_untruncated_fill_ids = self.origin_input_ids
        self.cache_salt: str | None = None
        self.extra_key: str | None = None
        self.multimodal_inputs = self.input_embeds = None
        self.positional_embed_overrides = None
        self.skip_radix_cache_insert = False
        self.kv = ReqKvInfo()
        self.prefix_len = 0
        self.last_node: Any = None

    @property
    def blocks(self) -> int:
        """Length of its table."""
        return -(-len(self.origin_input_ids) // PAGE_TOKENS)

    def finished(self) -> bool:
        """True: it is released at its end alone."""
        return True


class Scheduling:
    """Calls of SGLang's scheduler to a cache on a daemon. ``model``: that no other run uses. ``is_off``: with
    ``--disable-radix-cache``. ``replaced``: why the weights are not those of the name."""

    def __init__(self, socket: str, model: str, *, is_off: bool = False, replaced: str = "") -> None:
        settings = EngineSettings(socket=socket, stock_blocks=1)
        pools = (PAGES,) if WINDOW_TOKENS is None else (PAGES, PAGES // 2)
        pages = tuple(each + RESERVED_PAGES for each in pools)
        share = Share(model, LAYOUT, pages[0], group_pages=pages)
        flags = flags_of(PAGE_TOKENS)
        self.node = Node(settings, new_instance("cache_runs"), share, flags=flags, attaches=True, keeps=True)
        self.node.start()
        pool = SimpleNamespace(
            cachesvc=PoolMemory(self.node, settings, replaced),
            layer_num=1,
            register_layer_transfer_counter=lambda _: None,
        )
        allocator = SimpleNamespace(get_kvcache=lambda: pool, pool_blocks=pools, bind=lambda _: None, device="cpu")
        params = SimpleNamespace(
            req_to_token_pool=None,
            token_to_kv_pool_allocator=allocator,
            page_size=PAGE_TOKENS,
            chunked_prefill_size=None,
            sliding_window_size=WINDOW_TOKENS,
            enable_metrics=False,
        )
        self.cache = PageCache(SimpleNamespace(params=params, disable_radix_cache=is_off))

    def match(self, request: Request) -> Any:
        """Match a request that waits; SGLang looks at it from now on."""
        tokens = request.full_untruncated_fill_ids
        key = SimpleNamespace(token_ids=tokens, limit=len(tokens) - 1)
        found = self.cache.match_prefix(SimpleNamespace(req=request, key=key))
        request.last_node = found.last_device_node
        self.cache.inc_lock_ref(request.last_node)
        return found

    def reserve(self, request: Request) -> bool:
        """Match a request, and give it the pages of its prompt."""
        found = self.match(request)
        new = len(request.origin_input_ids) - found.device_prefix_len - found.host_hit_length
        return self.cache.reserve(new, fits=True)

    def next_chunk(self, request: Request, blocks: int) -> bool:
        """Ask for the pages of a request's next chunk of ``blocks`` blocks."""
        self.cache.begin_iteration()
        self.cache.look_at_chunk(request)
        return self.cache.reserve(blocks * PAGE_TOKENS, fits=True)

    def step(self, requests: list[Request]) -> None:
        """Compute a step with requests that go on."""
        result = object()
        self.cache.begin_step(requests)
        self.cache.end_launch(result)
        self.cache.begin_output()
        assert not self.cache.take_void(result)
        self.cache.end_output()

    def load(self, request: Request) -> None:
        """Wait until what the host has of a request has come."""
        params = SimpleNamespace(best_match_node=request.last_node)
        while self.cache.init_load_back(params) is None:
            pass

    @property
    def messages(self) -> int:
        """Number of messages that were sent to the daemon for steps."""
        return self.node.lease.record.growing.step

    def run(self, request: Request) -> None:
        """Compute a request that has its pages, and end it."""
        self.finish(request, self.launch(request))

    def launch(self, request: Request, further_blocks: int = 0) -> object:
        """Launch a request that has the pages of its prompt, and further ones; its step's result."""
        result = object()
        assert self.cache.take([request], [(request.blocks + further_blocks) * PAGE_TOKENS])
        self.cache.begin_step([request])
        self.cache.end_launch(result)
        return result

    def finish(self, request: Request, result: object) -> None:
        """Take the output of a request, and end it."""
        tokens = len(request.origin_input_ids)
        self.cache.begin_output()
        assert not self.cache.take_void(result)
        self.cache.checkpoint(request, up_to=tokens - 1)
        self.cache.on_release(request, checkpointed=True)
        self.cache.end_output()
        self.cache.begin_iteration()

    def serve(self, request: Request) -> None:
        """Serve a request from its match to its end."""
        assert self.reserve(request)
        if request.last_node.host_blocks:
            self.load(request)
        self.run(request)

    def abort(self, request: Request) -> None:
        """Abort a request that waits."""
        self.cache.finish(SimpleNamespace(rid=request.rid), CacheRequestOutcome.ABORT)


def aborted_before_its_match(at: Scheduling) -> dict[str, Any]:
    """A request is aborted whose match was not sent yet; another of the same name follows, with another prompt."""
    at.serve(Request("first", 1, 2))
    at.cache.expect(Request("under way", 2, 1))
    gone = Request("same", 1, 2)
    at.cache.expect(gone)
    at.abort(gone)
    at.match(Request("next", 3, 1))
    held = at.cache._book.find("same") is not None  # noqa: SLF001 - nothing else shows it
    return {"held": held, "hit_tokens": at.match(Request("same", 4, 2)).device_prefix_len}


def admitted_beside_one_without_room(at: Scheduling) -> dict[str, Any]:
    """A pass admits a request, and finds no room for the next one."""
    admitted, short = Request("admitted", 1, 20), Request("short", 2, 30)
    assert at.reserve(admitted)
    has_room = at.reserve(short)
    pages = admitted.last_node
    is_kept = at.cache._book.find("admitted") is pages  # noqa: SLF001 - nothing else shows it
    at.run(admitted)
    while not at.reserve(short):
        at.cache.begin_iteration()
    return {"has_room": has_room, "is_kept": is_kept}


def loaded_and_given_back(at: Scheduling) -> dict[str, Any]:
    """A request has come from the host and waits; its pages are given back for another's, and it is matched anew."""
    at.serve(Request("first", 1, 12))
    at.serve(Request("large", 2, PAGES - 1))
    waits = Request("waits", 1, 12)
    assert at.reserve(waits)
    from_host = waits.last_node.host_blocks
    at.load(waits)
    at.cache.begin_iteration()
    at.serve(Request("other", 3, PAGES - 1))
    found = at.match(waits)
    return {"from_host": from_host, "in_place": found.device_prefix_len, "on_host": found.host_hit_length}


def messages_before_output(at: Scheduling) -> dict[str, Any]:
    """Requests that are alone, found in place, on the host and not at all; messages from each one's coming to its first
    token, which comes once its next step is launched, for which it gets a further page. And one beside which another
    one waits then."""
    sent = {}
    at.serve(Request("away", 1, 12))
    at.serve(Request("large", 2, PAGES - 1))
    at.serve(Request("near", 4, 12))
    for name, request in {
        "in_place": Request("in place", 4, 12),
        "from_host": Request("from host", 1, 12),
        "computed": Request("computed", 3, 12),
        "beside": Request("beside", 6, 12),
    }.items():
        before = at.messages
        at.cache.expect(request)
        assert at.reserve(request)
        found = request.last_node
        if found.host_blocks:
            at.load(request)
        result = at.launch(request)
        request.kv.kv_allocated_len = request.blocks * PAGE_TOKENS
        assert at.cache.reserve_decode([request])
        if name == "beside":
            at.cache.expect(Request("waits", 5, 1))
        next_result = at.launch(request, 1)
        sent[name] = [found.hit_blocks, found.host_blocks, at.messages - before]
        at.cache.begin_output()
        assert not at.cache.take_void(result)
        at.cache.end_output()
        at.finish(request, next_result)
    return sent


def next_chunk(at: Scheduling) -> dict[str, Any]:
    """A request that has the pages of its prompt takes most of the pool; tokens of the next chunk, and what is left."""
    large, tokens = Request("large", 1, PAGES - 6), 10 * PAGE_TOKENS
    assert at.reserve(large)
    result = at.launch(large)
    budget = DaemonBudget(SimpleNamespace(page_size=PAGE_TOKENS, available_size=at.cache.available_tokens), at.cache)
    chunk, left = budget.available_chunk_tokens(tokens), budget.remaining_total
    at.finish(large, result)
    return {"is_whole": chunk == tokens, "is_more_than_is_left": 0 < left < tokens}


def larger_than_half(at: Scheduling) -> dict[str, Any]:
    """A request that is alone takes more than half of the pool: whether SGLang admits it in its first pass."""
    large = Request("large", 1, PAGES * 5 // 8)
    at.cache.expect(large)
    at.match(large)
    tokens = len(large.origin_input_ids)
    budget = DaemonBudget(SimpleNamespace(page_size=PAGE_TOKENS, available_size=at.cache.available_tokens), at.cache)
    is_admitted, _ = budget.check_prefill(
        extend_input_len=tokens,
        total_tokens=tokens + PAGE_TOKENS,
        max_new_tokens=PAGE_TOKENS,
        input_tokens=tokens,
        swa_host_hit_length=0,
        chunk_limit=None,
    )
    at.abort(large)
    return {"is_admitted": is_admitted}


def aborted_while_idle(at: Scheduling) -> dict[str, Any]:
    """A request that waits is aborted, and nothing follows in its engine: whether another engine gets its pages."""
    other = Scheduling(at.node.socket_path, aborted_while_idle.__name__)
    try:
        waits, wants = Request("waits", 1, PAGES * 3 // 4), Request("wants", 2, PAGES * 3 // 4)
        assert at.reserve(waits)
        is_beside = other.reserve(wants)
        at.abort(waits)
        at.cache.begin_iteration()
        until_s = time.monotonic() + BOUND_S
        while not (has_room := other.reserve(wants)) and time.monotonic() < until_s:
            other.cache.begin_iteration()
        other.abort(wants)
    finally:
        other.cache.release_host_resources()
    return {"is_beside": is_beside, "has_room": has_room}


def chunks_that_wait_for_each_other(at: Scheduling) -> dict[str, Any]:
    """Two engines have each computed a half of a prompt, and the pool has too little for the rest of either: whether
    one begins anew, and the other one gets its pages then."""
    other = Scheduling(at.node.socket_path, chunks_that_wait_for_each_other.__name__)
    half, rest = PAGES * 2 // 5, PAGES // 4
    try:
        begun = [(at, Request("one", 1, half + rest - 1)), (other, Request("two", 2, half + rest - 1))]
        for each, request in begun:
            each.cache._chunk_blocks = half  # noqa: SLF001 - as where layers have windows
            each.match(request)
            assert each.cache.reserve(half * PAGE_TOKENS, fits=True)
            assert each.cache.take([request], [half * PAGE_TOKENS])
            request.prefix_len = half * PAGE_TOKENS
            each.step([request])
        assert not any(each.next_chunk(request, rest) for each, request in begun)
        until_s = time.monotonic() + BOUND_S
        gave_up = [each.cache.take_void_step() for each, _ in begun]
        while not any(gave_up) and time.monotonic() < until_s:
            for index, (each, request) in enumerate(begun):
                each.next_chunk(request, rest)
                gave_up[index] = not any(gave_up) and each.cache.take_void_step()
        loser, winner = begun if gave_up[0] else begun[::-1]
        loser[0].cache.on_release(loser[1], checkpointed=False)
        loser[0].cache.begin_iteration()
        while not (has_room := winner[0].next_chunk(winner[1], rest)) and time.monotonic() < until_s:
            pass
        winner[0].cache.on_release(winner[1], checkpointed=False)
    finally:
        other.cache.release_host_resources()
    return {"gave_up": sum(gave_up), "has_room": has_room}


def switched_off(at: Scheduling) -> dict[str, Any]:
    """An engine with ``--disable-radix-cache`` serves a prompt beside one that shares."""
    off = Scheduling(at.node.socket_path, switched_off.__name__, is_off=True)
    try:
        off.serve(Request("off", 1, 3))
        in_place = at.match(Request("first", 1, 3)).device_prefix_len
        at.serve(Request("shared", 2, 3))
        found = off.match(Request("off again", 2, 3)).device_prefix_len
    finally:
        off.cache.release_host_resources()
    return {"others_find": in_place, "it_finds": found}


def load_failed(at: Scheduling) -> dict[str, Any]:
    """The load of a request fails before SGLang computes on it: it is asked for again, and computes what it lacks."""
    for seed in range(100, 300):
        first, waits = Request(f"first {seed}", seed, 12), Request(f"waits {seed}", seed, 12)
        at.serve(first)
        at.serve(Request(f"large {seed}", seed + 1000, PAGES - 1))
        if not at.reserve(waits) or not waits.last_node.host_blocks:
            at.abort(waits)
            continue
        params = SimpleNamespace(best_match_node=waits.last_node)
        loads = at.cache._loads  # noqa: SLF001 - the load is to have ended before SGLang asks for it
        loads.begin(waits.last_node)
        while loads.look(waits.last_node, may_wait=True):
            pass
        if loads.has_come(waits.last_node):
            at.abort(waits)
            continue
        said = at.cache.init_load_back(params)
        at.cache.begin_iteration()
        is_admitted = at.reserve(waits)
        tokens = len(waits.origin_input_ids)
        has_slots = bool(at.cache.take([waits], [tokens]))
        found = {
            "is_asked_for_again": said is None,
            "is_admitted": is_admitted,
            "from_host": waits.last_node.host_blocks,
        }
        at.cache.on_release(waits, checkpointed=True)
        return {**found, "has_slots": has_slots}
    return {}


def two_of_one_name(at: Scheduling) -> dict[str, Any]:
    """Two requests with one ``rid`` at once, as two tokenizers send them, each with a prompt of its own."""
    first, second = Request("same", 1, 3), Request("same", 2, 3)
    for each in (first, second):
        at.cache.name_request(each)
        at.cache.name_request(each)  # a request that is retracted comes again
        at.cache.expect(each)
    assert at.reserve(first)
    hit = at.match(second).device_prefix_len
    assert at.reserve(second)
    are_apart = first.last_node is not second.last_node
    for each in (first, second):
        at.run(each)
    left = [*at.cache._keys, *at.cache._rows]  # noqa: SLF001 - nothing else shows it
    found = [at.match(Request(f"later {seed}", seed, 3)).device_prefix_len for seed in (1, 2)]
    return {"hit": hit, "are_apart": are_apart, "found": found, "left": left}


def weights_changed(at: Scheduling) -> dict[str, Any]:
    """The weights change while a request runs and another waits; what another engine of the old weights finds."""
    other = Scheduling(at.node.socket_path, weights_changed.__name__)
    try:
        at.serve(Request("before", 1, 3))
        runs, waits = Request("runs", 2, 3), Request("waits", 1, 3)
        assert at.reserve(runs)
        result = at.launch(runs)
        at.match(waits)
        at.cache.begin_weights()
        at.cache.end_weights(is_whole=True)
        at.finish(runs, result)
        own_old = at.match(waits).device_prefix_len
        at.serve(Request("after", 3, 3))
        return {
            "others_find": [other.match(Request(f"other {seed}", seed, 3)).device_prefix_len for seed in (1, 2, 3)],
            "it_finds": [own_old, at.match(Request("again", 3, 3)).device_prefix_len],
        }
    finally:
        other.cache.release_host_resources()


def replaced_while_loading(at: Scheduling) -> dict[str, Any]:
    """Files of a checkpoint are replaced between an engine's look at them and their digest, and not; what an engine of
    the name finds then of what that one computed, and what it finds itself."""
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "model.safetensors"
        arguments = SimpleNamespace(model_path=folder, load_format="auto")
        found: dict[str, Any] = {"why": [], "others_find": [], "it_finds": []}
        for seed, (is_replaced, word) in enumerate(((True, None), (False, None), (True, "the operator's word"))):
            weights.write_text("as it was", encoding="utf-8")
            look_at_weights(arguments)
            if is_replaced:
                weights.write_text("new", encoding="utf-8")
            why = replaced_weights(arguments, word)
            loads = Scheduling(at.node.socket_path, replaced_while_loading.__name__, replaced=why)
            try:
                loads.serve(Request("first", seed, 3))
                found["why"].append(why.replace(folder, "FOLDER"))
                found["others_find"].append(at.match(Request(f"other {seed}", seed, 3)).device_prefix_len)
                found["it_finds"].append(loads.match(Request("again", seed, 3)).device_prefix_len)
            finally:
                loads.cache.release_host_resources()
    return found


class Adapter:
    """The part of SGLang's adapter that its digest is of."""

    def __init__(self, *values: float) -> None:
        self.scaling = 2.0
        self.config = SimpleNamespace(hf_config={"r": 8, "lora_alpha": 16})
        self.layers = [SimpleNamespace(weights={"q_proj.lora_A.weight": torch.tensor(values, dtype=torch.bfloat16)})]
        self.embedding_layers: dict[str, Any] = {}
        self.added_tokens_embeddings: dict[str, Any] = {}


class AdapterManager:
    """The part of SGLang's manager of adapters that the hook reads."""

    def __init__(self) -> None:
        self.loras: dict[str, Adapter] = {}

    def load(self, number: str, *values: float) -> None:
        """Load an adapter by the hook."""

        def read(manager: AdapterManager, reference: Any) -> None:
            manager.loras[reference.lora_id] = Adapter(*values)

        load_weights(read, self, SimpleNamespace(lora_id=number))


def adapters(at: Scheduling) -> dict[str, Any]:
    """Adapters by what was loaded: other bytes under one number, equal ones under another, and one unseen."""

    def asks(at: Scheduling, number: str) -> Request:
        request = Request(f"{number} {next(NUMBERS)}", 1, 3)
        request.lora_id, request.extra_key = number, f"mine{number}"
        return request

    manager, other = AdapterManager(), Scheduling(at.node.socket_path, adapters.__name__)
    try:
        manager.load("fr", 1.0, 2.0)
        at.serve(asks(at, "fr"))
        same = at.match(asks(at, "fr")).device_prefix_len
        manager.load("elsewhere", 1.0, 2.0)
        elsewhere = other.match(asks(other, "elsewhere")).device_prefix_len
        manager.load("fr", 1.0, 3.0)
        replaced = other.match(asks(other, "fr")).device_prefix_len
        manager.load("fr", 1.0, 2.0)
        back = other.match(asks(other, "fr")).device_prefix_len
        at.serve(asks(at, "unseen"))
        unseen = [each.match(asks(each, "unseen")).device_prefix_len for each in (at, other)]
        manager.loras.clear()
        gc.collect()
        return {"found": [same, elsewhere, replaced, back], "unseen": unseen, "kept": len(LOADED)}
    finally:
        other.cache.release_host_resources()


RUNS: dict[str, Callable[[Scheduling], dict[str, Any]]] = {
    each.__name__: each
    for each in (
        aborted_before_its_match,
        aborted_while_idle,
        chunks_that_wait_for_each_other,
        admitted_beside_one_without_room,
        larger_than_half,
        loaded_and_given_back,
        messages_before_output,
        next_chunk,
        switched_off,
        two_of_one_name,
        weights_changed,
        replaced_while_loading,
        adapters,
    )
}


def main(socket: str, faulty_socket: str) -> None:
    """Make all runs."""
    found = {}
    runs = [(socket, name, run) for name, run in RUNS.items()]
    for at_socket, name, run in [*runs, (faulty_socket, load_failed.__name__, load_failed)]:
        at = Scheduling(at_socket, name)
        try:
            found[name] = run(at)
        finally:
            at.cache.release_host_resources()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
