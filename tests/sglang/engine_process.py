"""SGLang engines for the tests, forked from one process that has imported SGLang: an import takes ten seconds.

    python -m tests.sglang.engine_process SOCKET

Each connection to the socket is an engine of its own, with SGLang's own processes: it reads a wish, then requests, a
JSON a line, and writes answers. Run by the Python that has SGLang, which need not have pytest.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from importlib import import_module
from typing import Any

from tests.sglang.stubs import install


def make(wish: dict[str, Any]) -> Any:
    """The engine that is wished for."""
    import sglang

    plain: dict[str, Any] = {
        "model_path": wish["model"],
        "load_format": wish["load_format"],
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
    if not (prompts := asked["prompts"]):
        return []
    answers = engine.generate(
        input_ids=[each["tokens"] for each in prompts],
        sampling_params=[
            {"temperature": 0, "ignore_eos": True, "max_new_tokens": each["new"], **each["sampling"]}
            for each in prompts
        ],
        return_logprob=[True] * len(prompts),
        top_logprobs_num=[2] * len(prompts),
        cache_salt=[each["salt"] for each in prompts],
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


def serve(connection: socket.socket) -> None:
    """Be an engine until there is nothing more to read."""
    with connection, connection.makefile("r") as lines, connection.makefile("w") as out:
        print(json.dumps({"pid": os.getpid()}), file=out, flush=True)
        wish = json.loads(lines.readline())
        os.environ.update(wish["environment"])
        if wish["log"]:
            os.dup2(os.open(wish["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), sys.stderr.fileno())
        try:
            engine = make(wish)
        except Exception as error:
            print(json.dumps({"refused": str(error)}), file=out, flush=True)
            raise
        print(json.dumps({"ready": True}), file=out, flush=True)
        for line in lines:
            print(json.dumps(answer(engine, json.loads(line))), file=out, flush=True)
        engine.shutdown()
        print(json.dumps({"ended": True}), file=out, flush=True)


def main(path: str) -> None:
    """Fork an engine for each connection, until this process is killed."""
    install()
    for module in ("entrypoints.engine", "managers.scheduler", "models.registry"):
        import_module(f"sglang.srt.{module}")
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # SGLang's processes are forked as well
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("listens", flush=True)
        while True:
            connection, _ = listener.accept()
            if os.fork():
                connection.close()
                continue
            listener.close()
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
            try:
                serve(connection)
            except Exception:  # noqa: BLE001 - the root of the process
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
