"""Real routers, which know of two nodes what their engines' events say, find token for token what a match finds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvcache.v1 import admin_pb2

from tests.e2e.engine import BLOCK_TOKENS
from tests.e2e.rig import short_folder, wait_until
from tests.routers.rig import HOST_CREDIT, Worker, random_prompts, selection, vllm_router, workers

REQUESTS = 1000


def serve(nodes: Sequence[Worker], prompts: Sequence[Sequence[int]], seed: int) -> None:
    """Deal requests out, until nothing is copied any more."""
    dice = random.Random(seed)
    for prompt in prompts:
        dice.choice(nodes).serve(prompt)
    for node in nodes:
        node.settle()


def be_heard(nodes: Sequence[Worker], prompts: Sequence[Sequence[int]], knows: Callable[[int], bool]) -> None:
    """Serve until the router ``knows`` each worker's first prompt: its subscription takes a while to reach a publisher,
    and what was published before that it has replayed."""
    more = iter(random_prompts(len(prompts), 1000))
    for number, node in enumerate(nodes):
        node.serve(prompts[number])

        def is_heard(number: int = number, node: Worker = node) -> bool:
            node.serve(next(more))
            return knows(number)

        wait_until(is_heard, "the router hears the worker")


def test_dynamo_has_of_each_tier_what_a_match_finds() -> None:
    prompts = random_prompts(1, REQUESTS)
    with workers(2) as nodes, selection(nodes) as router:
        be_heard(nodes, prompts, lambda number: router.scores(prompts[number])[number][0] > 0)
        serve(nodes, prompts, 2)
        true = [{number: (*node.match(prompt), 0) for number, node in enumerate(nodes)} for prompt in prompts]
        wait_until(lambda: [router.scores(prompt) for prompt in prompts] == true, "the router has caught up")
        finds = [find for each in true for find in each.values()]
        assert sum(device for device, _, _ in finds) > 100
        assert sum(host for _, host, _ in finds) > 100
        assert sum(not any(find) for find in finds) > 100, "much was evicted"


def test_vllms_router_sends_prompts_where_most_of_them_is() -> None:
    prompts = random_prompts(3, REQUESTS)
    with workers(2) as nodes, vllm_router(nodes) as router:
        for number, node in enumerate(nodes):
            node.serve(prompts[number])

            def is_heard(number: int = number, node: Worker = node) -> bool:
                node.bridge.restart()  # a router that begins to listen asks for no replay: all is sent anew
                return router.choose([*prompts[number], 1])[1] > 0

            wait_until(is_heard, "the router hears the worker")
        serve(nodes, prompts, 4)
        worth = []
        for prompt in prompts:
            matches = [node.match(prompt) for node in nodes]
            worth.append([BLOCK_TOKENS * (device + HOST_CREDIT * host) for device, host in matches])
        assert sum(one != other for one, other in worth) > 100

        def has_caught_up() -> bool:
            chosen = [router.choose([*prompt, 1]) for prompt in prompts]  # at least one token is always computed
            return all(
                said == int(max(mine)) and mine[worker] == max(mine)
                for (worker, said), mine in zip(chosen, worth, strict=True)
            )

        wait_until(has_caught_up, "the router has caught up")


def test_dynamo_has_of_storage_what_a_match_finds() -> None:
    prompts = random_prompts(5, 40)
    with short_folder() as folder:
        flags = ("--storage", f"file:{folder}/store?capacity=1GiB&write=through", "--write-policy", "write_through")
        with workers(1, *flags, device_pages=256, host_pages=256) as nodes, selection(nodes) as router:
            (node,) = nodes
            be_heard(nodes, prompts, lambda number: router.scores(prompts[number])[number][0] > 0)
            serve(nodes, prompts, 6)
            blocks = [len(prompt) // BLOCK_TOKENS for prompt in prompts]
            wait_until(lambda: node.kept == len(node.served), "all is written")
            node.kept = 0
            node.bridge.restart()
            wait_until(lambda: node.kept == len(node.served), "the next snapshot has it, too")
            for tier in ("device", "host"):
                node.node.admin.Evict(admin_pb2.EvictRequest(model_id=1, tier=tier))
            wait_until(
                lambda: [router.scores(prompt)[0] for prompt in prompts] == [(0, 0, count) for count in blocks],
                "all is on disk alone",
            )
            assert [sum(node.match(prompt)) for prompt in prompts] == blocks
