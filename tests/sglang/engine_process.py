"""An SGLang of its own process for the tests: reads requests, a JSON a line, and writes answers.

    python -m tests.sglang.engine_process '{"model": FOLDER, "blocks": N, "cachesvc": true, ...}'

Run by the Python that has SGLang, which need not have pytest.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from typing import Any


def make(wish: dict[str, Any]) -> Any:
    """The engine that is wished for."""
    import sglang

    plain: dict[str, Any] = {
        "model_path": wish["model"],
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "skip_tokenizer_init": True,
        "disable_cuda_graph": True,
        "page_size": 32,
        "context_length": 2048,
        "max_running_requests": 16,
        "mem_fraction_static": 0.001 if wish["cachesvc"] else 0.2,  # the pool takes nothing of the engine's memory
        "max_total_tokens": wish["blocks"] * 32,
        "chunked_prefill_size": 256,
        "random_seed": wish.get("seed", 0),
        "log_level": os.environ.get("CACHESVC_TEST_LOG", "error"),
    }
    backend = {"radix_cache_backend": "cachesvc"} if wish["cachesvc"] else {}
    return sglang.Engine(**{**plain, **backend, **wish.get("options", {})})


def answer(engine: Any, asked: dict[str, Any]) -> Any:
    """Answer to one line."""
    if asked.get("reset"):
        return engine.flush_cache().success
    if asked.get("plant"):
        engine.collective_rpc("plant_wrong_pages")
        return 1
    if not (prompts := asked["prompts"]):
        return []
    adapters = [each["adapter"] and each["adapter"][1] for each in prompts]
    answers = engine.generate(
        input_ids=[each["tokens"] for each in prompts],
        sampling_params=[
            {"temperature": 0, "ignore_eos": True, "max_new_tokens": each["new"], **each["sampling"]}
            for each in prompts
        ],
        return_logprob=[True] * len(prompts),
        top_logprobs_num=[2] * len(prompts),
        cache_salt=[each["salt"] for each in prompts],
        lora_path=adapters if any(adapters) else None,
    )
    return [
        {
            "tokens": [each["output_ids"]],
            "logprobs": [
                [(token, logprob) for logprob, token, *_ in at]
                for at in each["meta_info"].get("output_top_logprobs") or ()
            ],
            "cached": each["meta_info"]["cached_tokens"],
        }
        for each in answers
    ]


def main(wish: dict[str, Any]) -> None:
    """Be an engine until there is nothing more to read. What SGLang prints goes where its log does."""
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # SGLang's processes are forked as well
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        if wish["log"]:
            os.dup2(os.open(wish["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
        os.dup2(2, 1)
        try:
            engine = make(wish)
        except Exception as error:
            print(json.dumps({"refused": str(error)}), file=out, flush=True)
            raise
        print(json.dumps({"ready": True}), file=out, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(engine, json.loads(line))), file=out, flush=True)
        engine.shutdown()
    os._exit(0)  # SGLang leaves threads behind that would be waited for


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
