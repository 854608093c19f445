"""Real vLLM processes over a real daemon on shared memory, and what is asked of them."""

from __future__ import annotations

import json
import os
import random
import select
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import grpc
from kvcache.v1 import admin_pb2, admin_pb2_grpc

from tests.e2e.rig import wait_until
from tests.forked_process import Forker, PipedProcess
from tests.vllm.weights import write_checkpoint

ROOT = Path(__file__).parents[2]
PYTHON_VARIABLE = "CACHESVC_VLLM_PYTHON"
BLOCK_TOKENS = 32
VOCABULARY = 512

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Prompt:
    """``new`` tokens are to follow. ``salt``: of vLLM's cache; ``sampling``: what else the request asks for;
    ``adapter``: its number and folder. ``image``: the seed of one that goes before;
    ``image_name``: what the client calls it."""

    tokens: tuple[int, ...]
    new: int = 8
    salt: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    adapter: tuple[int, str] | None = None
    image: int | None = None
    image_name: str = ""


@dataclass(frozen=True)
class Answer:
    """``tokens``: of each sample. ``logprobs``: of the two most likely tokens at each place, bit by bit; of the prompt
    too, where it asked for them. ``cached``: prompt tokens not computed. ``handover``: its words for a router."""

    tokens: tuple[tuple[int, ...], ...]
    logprobs: str
    cached: int
    handover: Mapping[str, Any] | None = None

    @property
    def said(self) -> tuple[tuple[tuple[int, ...], ...], str]:
        """Part of an answer that must not depend on any cache."""
        return self.tokens, self.logprobs


def engine_environment() -> dict[str, str]:
    """Environment of a process with vLLM."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in (".", "client", "proto/gen")),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # each process would have a compiler look at its headers, seconds for one sum
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # workers are sent a function of the tests'
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else vLLM wants a NUMA node for each rank
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }


@cache
def forker() -> Forker:
    """Forks processes with vLLM."""
    return Forker(os.environ[PYTHON_VARIABLE], "tests.vllm.preload", engine_environment())


class Engine:
    """A vLLM, or an SGLang, that answers lines of JSON."""

    def __init__(self, process: PipedProcess) -> None:
        self.process = process

    def wait_ready(self) -> Engine:
        """Until it serves. Fails where it refused to start."""
        said = self._read()
        assert said == {"ready": True}, said
        return self

    def refusal(self) -> str:
        """Reason why it did not start."""
        return str(self._read()["refused"])

    def send(self, *prompts: Prompt) -> None:
        """Ask, and collect later."""
        self._write({"prompts": [asdict(each) for each in prompts]})

    def collect(self) -> list[Answer]:
        """The answers to what was sent."""
        return _answers(self._read())

    def collect_unless_ended(self) -> list[Answer] | None:
        """The same; None of an engine that has ended by itself instead."""
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            return None
        return _answers(json.loads(line))

    def has_answered(self) -> bool:
        """True where what was sent first has its answers."""
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def ask(self, *prompts: Prompt) -> list[Answer]:
        """All in one batch."""
        self.send(*prompts)
        return self.collect()

    def reset(self) -> bool:
        """``reset_prefix_cache``."""
        self._write({"reset": True})
        return bool(self._read())

    def load_adapter(self, number: int, folder: str) -> None:
        """``add_lora``, in place of what was loaded under this number."""
        self._write({"load": [number, folder]})
        assert self._read() is True

    def sleep(self, level: int) -> None:
        """``sleep``: vLLM pauses, resets its prefix cache, and has its workers free what they can."""
        self._write({"sleep": level})
        self._read()

    def wake(self) -> None:
        """``wake_up``."""
        self._write({"wake": True})
        self._read()

    def plant_wrong_pages(self, stage: int = 0) -> None:
        """Have each page of the memory of a pipeline's stage hold what another page held, behind the daemon's back. For
        the end of a test: whatever is cached is wrong from here on."""
        self._write({"plant": True, "stage": stage})
        assert self._read() > 0

    def metrics(self) -> dict[str, float]:
        """Metrics of the connector and of drafts, as vLLM's own metrics have them. Wants ``disable_log_stats``
        false."""
        self._write({"metrics": True})
        return dict(self._read())

    def workers(self) -> list[int]:
        """Process ids of its ranks, where core and workers have processes of their own."""
        parents = {int(each.name): _parent(each) for each in Path("/proc").iterdir() if each.name.isdigit()}
        grandchildren = [pid for pid, parent in parents.items() if parents.get(parent) == self.process.pid]
        its_tracker = b"resource_tracker"
        return [pid for pid in sorted(grandchildren) if its_tracker not in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def wait_dead(self) -> int:
        """Until it has ended by itself: its exit code."""
        self.process.wait()
        return self.process.end()

    def kill(self) -> None:
        """With all of its processes, at once."""
        self.process.send_signal(signal.SIGKILL, to_all=True)
        self.process.end()

    def kill_if_running(self) -> None:
        """For the end of a test that failed."""
        if self.process.poll() is None:
            self.kill()

    def stop(self) -> int:
        """Let it end by itself: its exit code."""
        return self.process.end()

    def _write(self, message: Mapping[str, Any]) -> None:
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def _read(self) -> Any:
        line = self.process.stdout.readline()
        assert line, f"the engine ended with {self.process.wait()}"
        return json.loads(line)


def _answers(told: Sequence[Mapping[str, Any]]) -> list[Answer]:
    return [
        Answer(
            tuple(map(tuple, each["tokens"])), json.dumps(each["logprobs"]), int(each["cached"]), each.get("handover")
        )
        for each in told
    ]


@dataclass(frozen=True)
class Fleet:
    """Makes engines of one model. ``weight_scale``: of dummy weights, where it is not the usual one."""

    folder: Path
    load_format: str = "dummy"
    weight_scale: float | None = None

    def engine(
        self,
        socket: str | None,
        blocks: int = 256,
        *,
        is_split: bool = False,
        extra: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
        **wish: Any,
    ) -> Engine:
        """An engine that starts. ``socket``: of its daemon, None: plain vLLM. ``is_split``: its core has a
        process of its own. ``variables``: more of its environment."""
        wished = {
            "model": str(self.folder),
            "load_format": self.load_format,
            "blocks": blocks,
            "extra": None if socket is None else {"socket": socket, **(extra or {})},
            **wish,
        }
        variables = {**(variables or {}), "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(is_split))}
        if self.weight_scale is not None:
            variables["CACHESVC_TEST_WEIGHT_SCALE"] = str(self.weight_scale)
        return Engine(forker().start("tests.vllm.engine_process", json.dumps(wished), variables=variables))


@contextmanager
def engines(*started: Engine) -> Iterator[Sequence[Engine]]:
    """They end with the block, whatever becomes of it."""
    try:
        yield [each.wait_ready() for each in started]
        for each in started:
            if each.process.poll() is None:
                assert each.stop() == 0
    finally:
        for each in started:
            each.kill_if_running()


def _parent(process: Path) -> int:
    """Parent of a process of /proc; 0 where it has just gone."""
    try:
        return int((process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def check_daemon(socket: str) -> None:
    """Check that no page is held, and that every page is in exactly one place."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)

        def held() -> dict[str, int]:
            pools = admin.GetStatus(admin_pb2.GetStatusRequest()).pools
            return {
                each: sum(getattr(pool, each) for pool in pools) for each in ("private", "in_flight", "quarantined")
            }

        wait_until(lambda: not any(held().values()), f"all pages came back: {held()}")
        assert list(admin.Verify(admin_pb2.VerifyRequest()).problems) == []


def make_fleet(folder: Path) -> Fleet:
    """Engines of a model of random weights, the same in each of them, and on each rank."""
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    return Fleet(folder)


def make_saved_fleet(folder: Path) -> Fleet:
    """Engines of a model whose random weights are on disk."""
    made = make_fleet(folder)
    write_checkpoint(folder, MODEL, seed=1)
    return Fleet(made.folder, "auto")


def random_prompt(seed: int, blocks: float, new: int = 8, head: Sequence[int] = ()) -> Prompt:
    """``blocks`` blocks of tokens, after a shared ``head``."""
    rng = random.Random(seed)
    return Prompt((*head, *(rng.randrange(3, VOCABULARY) for _ in range(int(blocks * BLOCK_TOKENS)))), new)


def random_requests(seed: int, count: int) -> list[Prompt]:
    """Prompts of up to 13 blocks, most of which begin as others do and go on otherwise."""
    rng = random.Random(seed)
    heads = [random_prompt(each, 10).tokens for each in range(6)]
    requests = []
    for each in range(count):
        head = rng.choice(heads)[: rng.randrange(0, 10 * BLOCK_TOKENS)]
        requests.append(random_prompt(1000 + each, rng.random() * 3 + 0.1, new=rng.randrange(1, 40), head=head))
    return requests
