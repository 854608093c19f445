"""A vLLM of two data parallel engines for the tests: python -m tests.vllm.ranks_process MODEL [SOCKET]

Asks each prompt of each rank in turn, and prints the tokens that were cached and the answers. The Python that has vLLM
runs it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

RANKS = (0, 1, 1, 0)


async def main(model: str, socket: str | None) -> None:
    """Start, ask, print, end."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    connector: dict[str, Any] = {
        "kv_connector": "CachesvcConnector",
        "kv_connector_module_path": "cachesvc_vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "engine_id": "one-id-of-a-template-that-is-longer-than-an-instance-may-be-shown",
        "kv_connector_extra_config": {"socket": socket},
    }
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            seed=0,
            block_size=32,
            max_model_len=2048,
            gpu_memory_utilization=0.1,
            num_gpu_blocks_override=256,
            enable_prefix_caching=socket is not None,
            data_parallel_size=2 if socket else 1,
            data_parallel_backend="mp",
            kv_transfer_config=connector if socket else None,
        )
    )
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
    answers = []
    for turn, rank in enumerate(RANKS):
        prompt = {"prompt_token_ids": [(at * 13 + 5) % 500 for at in range(1008 if turn < 3 else 500)]}
        asked = {"data_parallel_rank": rank} if socket else {}
        said = [each async for each in llm.generate(prompt, sampling, request_id=f"r{turn}", **asked)][-1]
        answers.append([said.num_cached_tokens, list(said.outputs[0].token_ids)])
    print(json.dumps(answers), flush=True)
    if socket:
        sys.stdin.readline()
    llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
