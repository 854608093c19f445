"""Blocks that left the device come back from the host, and nothing is answered differently for it."""

from __future__ import annotations

from tests.e2e.rig import running_node
from tests.vllm.rig import BLOCK_TOKENS, Engine, Fleet, engines, random_prompt

DEVICE_BLOCKS = 72
"""A request of the largest size fits; the prompts together do not."""


def test_a_prompt_that_left_the_device_is_loaded_and_not_computed(fleet: Fleet, plain: Engine) -> None:
    prompts = [random_prompt(each, 20.5 - each % 2 / 2) for each in range(8)]  # some end with a block
    hits = [min(20 * BLOCK_TOKENS, len(prompt.tokens) - 1) for prompt in prompts]
    with running_node(["--checksums", "all"]) as node:
        extra, options = {"host_blocks": 400, "verify_steps": 10}, {"disable_log_stats": False}
        engine = fleet.engine(node.socket, DEVICE_BLOCKS, extra=extra, options=options)
        expected = plain.ask(*prompts)
        with engines(engine) as (mine,):
            first = [mine.ask(prompt)[0] for prompt in prompts]
            assert [answer.said for answer in first] == [answer.said for answer in expected]
            answers = [mine.ask(prompt)[0] for prompt in prompts]
            assert [answer.said for answer in answers] == [answer.said for answer in expected]
            assert [answer.cached for answer in answers] == hits
            assert node.counters()["hit_blocks_host"] >= 20
            together = mine.ask(*prompts)  # more than fit at a time
            assert [answer.said for answer in together] == [answer.said for answer in expected]
            metrics = mine.metrics()
            assert metrics["vllm:cachesvc_hit_tokens_total.host"] >= 20 * BLOCK_TOKENS
            assert metrics["vllm:cachesvc_loads_total.came"] >= 1
            assert metrics["vllm:cachesvc_loads_total.failed"] == 0
            assert metrics["vllm:cachesvc_step_seconds_count"] > 0
            asked = metrics["vllm:cachesvc_asked_tokens_total"]
            assert asked == 3 * sum(len(prompt.tokens) for prompt in prompts)
