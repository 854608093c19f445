"""SGLang engines of a model with latents (MLA), in turn: each answer is that of SGLang alone.

Requests come one by one: SGLang's own answers of this model depend on what else is in a batch.
"""

from __future__ import annotations

import json

from tests.e2e.rig import running_node, short_folder
from tests.sglang.rig import SglangFleet
from tests.vllm.rig import BLOCK_TOKENS, MODEL, check_daemon, engines, random_prompt, random_requests
from tests.vllm.weights import write_checkpoint

LATENTS = {
    **{name: value for name, value in MODEL.items() if name != "head_dim"},
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 2,
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "attention_bias": False,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
"""A DeepSeek-V2 whose layers are all dense: SGLang's experts have no kernels for processors."""

SMALL_BLOCKS = 48

EVICTED = [random_prompt(500 + each, 12.5) for each in range(5)]
"""Prompts that drive each other from the device."""


def test_latents_are_found_elsewhere_come_from_the_host_and_are_answered_alike(fleet: SglangFleet) -> None:
    with short_folder() as folder:
        (folder / "config.json").write_text(json.dumps(LATENTS), encoding="utf-8")
        write_checkpoint(folder, LATENTS, seed=3)
        latents = SglangFleet(folder, fleet.forker)
        requests = random_requests(13, 16)
        with engines(latents.engine(None)) as (alone,):
            expected, others = ([alone.ask(each)[0].said for each in asked] for asked in (EVICTED, requests))
        with running_node() as node:
            with engines(*(latents.engine(node.socket, SMALL_BLOCKS) for _ in range(2))) as (one, other):
                assert [one.ask(each)[0].said for each in EVICTED] == expected
                answers = [other.ask(each)[0] for each in EVICTED]
                assert [answer.said for answer in answers] == expected
                assert [answer.cached for answer in answers] == [12 * BLOCK_TOKENS] * len(EVICTED)
                said = [(one, other)[at % 2].ask(each)[0].said for at, each in enumerate(requests)]
                assert said == others
                assert other.ask(EVICTED[0])[0].said == expected[0]  # its pages are on the device now
                other.plant_wrong_pages()
                assert other.ask(EVICTED[0])[0].said != expected[0], "wrong pages would show"
            check_daemon(node.socket)
