"""An SGLang engine in a process of its own, for ``benchmarks.sglang``: a JSON a line comes in, and one goes out.

    python -m benchmarks.sglang.engine WRITE_FD

It imports SGLang at once and makes its engine when the parent names the kind. SGLang's scheduler is a process of its
own, which runs this file's last lines first.
"""

from __future__ import annotations

import asyncio
import os
import time
import zlib
from importlib.util import find_spec
from typing import Any

from benchmarks.vllm.engine import Flight, serve, tokens_of

STREAM_TOKENS = 64
"""Tokens between two messages about a request, after its first one."""


def prepare() -> None:
    """Have SGLang's random weights be those of a model before its training: its own are so small that a wrong page
    would hardly change an answer. On a processor, the stubs of the tests stand for packages that need a GPU."""
    if find_spec("sgl_kernel") is None:
        from tests.sglang.stubs import install

        install()
    import torch
    from sglang.srt.model_loader import loader

    def fill(model: Any, *_: object, **__: object) -> None:
        for name, tensor in model.state_dict().items():
            if not torch.is_floating_point(tensor) or name.endswith(("inv_freq", "cos_sin_cache")):
                continue
            if tensor.ndim == 1:
                tensor.data.fill_(1.0)
                continue
            seed = zlib.crc32(name.encode())
            tensor.data.normal_(0.0, 0.02, generator=torch.Generator(tensor.device).manual_seed(seed))

    loader.initialize_dummy_weights = fill


class Server:
    """One engine, and what is asked of it."""

    def __init__(self, wish: dict[str, Any]) -> None:
        import sglang

        if wish["kind"] == "ours":
            os.environ["CACHESVC_SOCKET"] = wish["address"]
        self._engine = sglang.Engine(model_path=wish["model"], **wish["options"])

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the running engine."""
        arguments = self._engine.server_args
        names = ("attention_backend", "chunked_prefill_size", "disable_cuda_graph", "disable_overlap_schedule")
        return {name: getattr(arguments, name) for name in names}

    def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Ask ``prompts``, ``at_a_time`` of them, none after ``seconds``: what became of each."""
        prompts = [(number, prompt, tokens_of(prompt["pieces"])) for number, prompt in enumerate(asked["prompts"])]
        coming = iter(prompts)
        begun_s = time.perf_counter()
        done: list[dict[str, Any]] = []

        async def follow() -> None:
            for number, prompt, tokens in coming:
                if time.perf_counter() >= begun_s + asked["seconds"]:
                    return
                done.append(await self._ask(number, prompt, tokens))

        async def all_of_them() -> None:
            await asyncio.gather(*(follow() for _ in range(asked["at_a_time"])))

        self._engine.loop.run_until_complete(all_of_them())
        return {"seconds": time.perf_counter() - begun_s, "requests": sorted(done, key=lambda each: each["number"])}

    def reset(self) -> bool:
        """Forget the engine's own prefixes."""
        return bool(self._engine.flush_cache().success)

    def close(self) -> None:
        """End it as SGLang does."""
        self._engine.shutdown()

    async def _ask(self, number: int, prompt: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        flight = Flight(number, time.perf_counter())
        logprobs = prompt.get("logprobs")
        answers = await self._engine.async_generate(
            input_ids=tokens,
            sampling_params={
                "temperature": 0,
                "max_new_tokens": prompt["new"],
                "ignore_eos": True,
                "stream_interval": STREAM_TOKENS,
            },
            return_logprob=logprobs is not None,
            top_logprobs_num=logprobs or 0,
            stream=True,
        )
        last: dict[str, Any] = {}
        async for answer in answers:
            if not flight.first_s:
                flight.first_s, flight.cached = time.perf_counter(), answer["meta_info"]["cached_tokens"]
            last = answer
        return {
            "number": number,
            "first_s": flight.first_s - flight.begun_s,
            "seconds": time.perf_counter() - flight.begun_s,
            "cached": flight.cached,
            "tokens": list(last["output_ids"]),
            "logprobs": [
                sorted((token, value) for value, token, *_ in at)
                for at in last["meta_info"].get("output_top_logprobs") or ()
            ],
        }


def _load() -> dict[str, str]:
    prepare()
    import sglang

    return {"sglang": sglang.__version__}


if __name__ == "__main__":
    serve(_load, Server)
elif __name__ == "__mp_main__":
    prepare()  # SGLang's scheduler, in a process of its own
