"""A vLLM of its own process for the tests: reads requests, a JSON a line, and writes answers.

    python -m tests.vllm.engine_process '{"model": FOLDER, "blocks": N, "extra": {...} or null}'

Run by the Python that has vLLM, which need not have pytest.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def make(wish: dict[str, Any]) -> Any:
    """The engine that is wished for."""
    from vllm import LLM

    options: dict[str, Any] = {}
    if wish["extra"] is not None:
        options["kv_transfer_config"] = {
            "kv_connector": "CachesvcConnector",
            "kv_connector_module_path": "cachesvc_vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": wish["extra"],
        }
    if wish.get("events"):
        from vllm.config.kv_events import KVEventsConfig

        options["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, endpoint=wish["events"])
    plain: dict[str, Any] = {
        "model": wish["model"],
        "load_format": wish["load_format"],
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "seed": wish.get("seed", 0),
        "dtype": "float32",  # at 16 bits an answer's last digits depend on its batch, on processors with AMX
        "block_size": 32,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "gpu_memory_utilization": 0.2,
        "num_gpu_blocks_override": wish["blocks"],
        "enable_prefix_caching": wish.get("caching", True),
    }
    return LLM(**{**plain, **options, **wish.get("options", {})})


def answer(llm: Any, asked: dict[str, Any]) -> Any:
    """Answer to one line."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    if asked.get("reset"):
        return llm.reset_prefix_cache()
    if asked.get("sleep"):
        return llm.sleep(level=asked["sleep"])
    if asked.get("wake"):
        return llm.wake_up()
    if asked.get("load"):
        number, folder = asked["load"]
        return llm.llm_engine.add_lora(LoRARequest(f"adapter-{number}", number, folder, load_inplace=True))
    if asked.get("plant"):
        return sum(llm.collective_rpc(plant_wrong_pages, args=(asked["stage"],)))
    if asked.get("metrics"):
        from prometheus_client import REGISTRY

        words = ("cachesvc", "spec_decode")
        samples = [
            each for metric in REGISTRY.collect() for each in metric.samples if any(word in each.name for word in words)
        ]
        marks = ("tier", "outcome")
        return {
            ".".join([each.name, *(each.labels[key] for key in marks if key in each.labels)]): each.value
            for each in samples
        }
    prompts = [
        {
            "prompt_token_ids": each["tokens"],
            **({"cache_salt": each["salt"]} if each["salt"] else {}),
            **({} if each["image"] is None else {"multi_modal_data": {"image": _image(each["image"])}}),
            **({"multi_modal_uuids": {"image": [each["image_name"]]}} if each["image_name"] else {}),
        }
        for each in asked["prompts"]
    ]
    plain = {"temperature": 0, "logprobs": 2, "detokenize": False, "ignore_eos": True}
    sampling = [SamplingParams(**{**plain, "max_tokens": each["new"], **each["sampling"]}) for each in asked["prompts"]]
    adapters = [
        LoRARequest(f"adapter-{each['adapter'][0]}", *each["adapter"]) if each["adapter"] else None
        for each in asked["prompts"]
    ]
    return [
        {
            "tokens": [list(said.token_ids) for said in out.outputs],
            "logprobs": [[_told(at) for at in said.logprobs] for said in out.outputs]
            + [_told(at) for at in out.prompt_logprobs or ()],
            "cached": out.num_cached_tokens,
            "handover": out.kv_transfer_params,
        }
        for out in llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapters)
    ]


def plant_wrong_pages(_: Any, stage: int) -> int:
    """Move the bytes of all pages of a pipeline's stage to the page before; how many."""
    from cachesvc_client.plugins.request_pages import PageCopy
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.distributed.parallel_state import get_pp_group

    if get_pp_group().rank_in_group != stage:
        return 0

    worker = get_kv_transfer_group()._worker  # noqa: SLF001 - what nothing but a test does
    moves = [PageCopy(page + 1, page) for page in range(1, worker.share.pages - 1)]
    for move in moves:
        worker._copier.copy([move])  # noqa: SLF001
    return len(moves)


def _image(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (56, 56, 3), np.uint8))


def _told(at: Any) -> Any:
    return None if at is None else sorted((token, each.logprob) for token, each in at.items())


def main(wish: dict[str, Any]) -> None:
    """Serve until there is nothing more to read. What vLLM prints goes where its log does."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        try:
            llm = make(wish)
        except Exception as error:
            print(json.dumps({"refused": str(error)}), file=out, flush=True)
            raise
        print(json.dumps({"ready": True}), file=out, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(llm, json.loads(line))), file=out, flush=True)
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
