"""A vLLM engine in a process of its own, for ``benchmarks.vllm``: a JSON a line comes in, and one goes out.

    python -m benchmarks.vllm.engine WRITE_FD

It imports vLLM at once and makes its engine when the parent names the kind: a standby process costs no GPU memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import numpy as np

SLOW_DECAY = -6.0
"""Logarithm of the decay of recurrent states: they remember hundreds of tokens, so a wrong state changes answers."""
VOCABULARY = 32000
LONGEST = 40960

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LONGEST,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
}
"""The shape of a Llama of 8 billion parameters; one of its tokens has 128 KiB of KV."""

TINY: dict[str, Any] = {
    **MODEL,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}


@dataclass
class Flight:
    """A request under way: moments in seconds since the run began."""

    number: int
    begun_s: float
    first_s: float = 0.0
    steps: int = 0
    """Iterations of the engine until the first token, this one included."""
    cached: int = 0
    count: int = 0
    """Tokens so far, the last of them at ``last_s``."""
    last_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Time between one token and the next."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


def tokens_of(pieces: Sequence[Sequence[int]]) -> list[int]:
    """A prompt: ``(seed, tokens)`` after ``(seed, tokens)``. A seed says the same everywhere."""
    return [
        int(token)
        for seed, count in pieces
        for token in np.random.default_rng(seed).integers(3, VOCABULARY - 100, count)
    ]


def transfer_config(wish: dict[str, Any]) -> dict[str, Any]:
    """``LLM``'s arguments for its connector, if it has one."""
    host, _, port = wish["address"].rpartition(":")
    connectors = {
        "plain": {},
        "offload": {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {"cpu_bytes_to_use": wish["host_bytes"]},
        },
        "lmcache": {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_extra_config": {"lmcache.mp.host": host, "lmcache.mp.port": port},
        },
        "ours": {
            "kv_connector": "CachesvcConnector",
            "kv_connector_module_path": "cachesvc_vllm",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": wish["address"]},
        },
    }
    chosen = connectors[wish["kind"]]
    return {"kv_transfer_config": {"kv_role": "kv_both", **chosen}} if chosen else {}


def enliven_weights() -> None:
    """Have vLLM's random weights be those of a model before its training. Its own are so small, those of the norms too,
    that a wrong page would hardly change an answer. A tensor's name is its seed: a drafter that is the first layers of
    its target is right now and then."""
    import torch
    from vllm.model_executor.model_loader import dummy_loader

    names: dict[int, str] = {}
    load = dummy_loader.DummyModelLoader.load_weights

    def load_weights(loader: Any, model: Any, model_config: Any) -> None:
        names.clear()
        names.update((id(tensor), name) for name, tensor in (*model.named_parameters(), *model.named_buffers()))
        load(loader, model, model_config)

    def fill(tensor: Any, name: str = "") -> None:
        name = names.get(id(tensor), name)
        if not torch.is_floating_point(tensor) or name.endswith(("inv_freq", "cos_sin_cache")):
            return
        if tensor.ndim == 1:
            tensor.data.fill_(SLOW_DECAY if name.endswith("A_log") else 1.0)
        else:
            seed = zlib.crc32(name.encode())
            tensor.data.normal_(0.0, 0.02, generator=torch.Generator(tensor.device).manual_seed(seed))

    dummy_loader.DummyModelLoader.load_weights = load_weights
    dummy_loader.initialize_single_dummy_weight = fill


def compile_log() -> dict[str, bool]:
    """Return the option with which vLLM, where it has it, logs each kernel that is compiled while requests run."""
    from vllm.config import ObservabilityConfig

    option = "jit_monitor_verbose"
    return {option: True} if hasattr(ObservabilityConfig, option) else {}


class Server:
    """One engine, and what is asked of it."""

    def __init__(self, wish: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(
            model=wish["model"],
            load_format="dummy",
            skip_tokenizer_init=True,
            seed=0,
            block_size=wish["block_tokens"],
            max_model_len=wish["longest"],
            max_num_seqs=wish["sequences"],
            enforce_eager=wish["eager"],
            enable_prefix_caching=True,
            **compile_log(),
            **wish["options"],
            **transfer_config(wish),
        )
        self._engine = self._llm.llm_engine
        self._seconds: list[float] = []
        self._loads: list[float] = []
        self._numbers = iter(range(1 << 40))
        if wish["kind"] == "ours" and not wish["split"]:
            self._keep_times()

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the running engine."""
        config = self._engine.vllm_config
        return {
            "gpu_bytes": _gpu_bytes(),
            "async": bool(config.scheduler_config.async_scheduling),
            "v2": bool(config.use_v2_model_runner),
            "graphs": str(config.compilation_config.cudagraph_mode),
            "batch_tokens": config.scheduler_config.max_num_batched_tokens,
            "hybrid": not config.scheduler_config.disable_hybrid_kv_cache_manager,
            "block_tokens": config.cache_config.block_size,
        }

    def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Ask ``prompts``, ``at_a_time`` of them, none after ``seconds``: what became of each. One with ``behind`` is
        asked when each request under way has that many tokens."""
        begun_s = time.perf_counter()
        flights: dict[str, Flight] = {}
        done: list[dict[str, Any]] = []
        waiting = deque(enumerate(asked["prompts"]))
        until_s = begun_s + asked["seconds"]
        while True:
            while waiting and len(flights) < asked["at_a_time"] and time.perf_counter() < until_s:
                number, prompt = waiting[0]
                if any(each.count < prompt.get("behind", 0) for each in flights.values()):
                    break
                waiting.popleft()
                name = self._add(prompt)
                flights[name] = Flight(number, time.perf_counter() - begun_s)
            if not flights:
                break
            outputs = self._engine.step()
            for flight in flights.values():
                flight.steps += not flight.first_s
            for out in outputs:
                flight, now_s = flights[out.request_id], time.perf_counter() - begun_s
                said = out.outputs[0]
                if len(said.token_ids) > flight.count:
                    if flight.count:
                        flight.gaps_s.append(now_s - flight.last_s)
                    else:
                        flight.first_s, flight.cached = now_s, out.num_cached_tokens or 0
                    flight.count, flight.last_s = len(said.token_ids), now_s
                if out.finished:
                    told = _told(flights.pop(out.request_id), said, now_s)
                    done.append({**told, "gaps_s": flight.gaps_s} if asked["gaps"] else told)
        return {"seconds": time.perf_counter() - begun_s, "requests": sorted(done, key=lambda each: each["number"])}

    def take_times(self) -> list[float]:
        """Seconds of the connector in each iteration since the last call."""
        taken = list(self._seconds)
        self._seconds.clear()
        return taken

    def take_loads(self) -> list[float]:
        """Seconds of each load from the host since the last call."""
        taken = list(self._loads)
        self._loads.clear()
        return taken

    def take_drafts(self) -> dict[str, float]:
        """Draft tokens that were proposed and accepted since the start."""
        told = {each.name: float(each.value) for each in self._llm.get_metrics() if hasattr(each, "value")}
        return {name: told[f"vllm:spec_decode_num_{name}_tokens"] for name in ("draft", "accepted")}

    def reset(self) -> bool:
        """Forget the engine's own prefixes."""
        return bool(self._llm.reset_prefix_cache())

    def close(self) -> None:
        """End it as vLLM does."""
        self._engine.engine_core.shutdown()

    def _add(self, prompt: dict[str, Any]) -> str:
        from vllm import SamplingParams

        name = str(next(self._numbers))
        sampling = SamplingParams(
            temperature=0, max_tokens=prompt["new"], logprobs=prompt.get("logprobs"), detokenize=False, ignore_eos=True
        )
        tokens = tokens_of(prompt["pieces"]) + prompt.get("tail", [])
        self._engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
        return name

    def _keep_times(self) -> None:
        connector = self._engine.engine_core.engine_core.scheduler.connector
        told = connector.get_kv_connector_stats

        def take() -> Any:
            stats = told()
            if stats is not None:
                self._seconds += stats.data["step_seconds"]
                self._loads += stats.data["load_seconds"]
            return stats

        connector.get_kv_connector_stats = take


def _told(flight: Flight, said: Any, now_s: float) -> dict[str, Any]:
    logprobs = [sorted((token, each.logprob) for token, each in at.items()) for at in said.logprobs or ()]
    return {
        "number": flight.number,
        "first_s": flight.first_s - flight.begun_s,
        "seconds": now_s - flight.begun_s,
        "steps": flight.steps,
        "cached": flight.cached,
        "tokens": list(said.token_ids),
        "logprobs": logprobs,
    }


def _gpu_bytes() -> int:
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def _answers(load: Callable[[], dict[str, str]], make: Callable[[dict[str, Any]], Any], lines: TextIO) -> Iterator[Any]:
    begun_s, versions = time.perf_counter(), load()
    yield {"imported_s": time.perf_counter() - begun_s, **versions}
    begun_s, server = time.perf_counter(), make(json.loads(lines.readline()))
    yield {"started_s": time.perf_counter() - begun_s, **server.facts}
    for line in lines:
        asked = json.loads(line)
        what = asked.pop("do")
        yield server.run(asked) if what == "run" else getattr(server, what)()
    server.close()


def serve(load: Callable[[], dict[str, str]], make: Callable[[dict[str, Any]], Any]) -> None:
    """Answer the parent until there is nothing more to read. ``load``: imports the engine; its version by name.
    ``make``: an engine of the parent's wish."""
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as out:
        try:
            for answer in _answers(load, make, sys.stdin):
                print(json.dumps(answer), file=out, flush=True)
        except Exception as error:
            print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), file=out, flush=True)
            raise


def _load() -> dict[str, str]:
    import vllm

    enliven_weights()
    return {"vllm": vllm.__version__}


if __name__ == "__main__":
    serve(_load, Server)
elif __name__ == "__mp_main__":
    enliven_weights()  # vLLM's core, in a process of its own
