"""LoRA adapters in the keys of their requests: a digest of the tensors that the workers have loaded.

vLLM's own keys know an adapter's name and path, behind which two engines, or one engine at two times, may have two
adapters. Files do not say either: an engine computes with what it read, and they may have changed since. So each worker
digests an adapter where vLLM loads it, and the digest stays with the loaded model for as long as vLLM keeps it:

    scheduler   a request of an adapter that is not known: it waits, and the next step asks the workers   ``Adapters``
    worker      loads it if need be, and answers with the digests of all that is loaded            ``LoadedAdapters``
    scheduler   the answer comes with the step's output, before anything that the step computed is sealed

What a worker loads without being asked is in the answer of the same step. So a request under whose keys something else
was computed is known in time, and is shared with no other.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from cachesvc_client.plugins.facts import new_hasher

from cachesvc.model.words import KEY_BYTES
from cachesvc_vllm.vllm_objects import LoraRequest

UNLIMITED = 1 << 30
DIGEST = "cachesvc_digest"
"""Attribute of a loaded adapter, and of a processed media item, that has its digest."""

log = logging.getLogger(__name__)


@dataclass
class AdapterReport:
    """Answer of the workers. ``loaded``: by rank, the digests of the adapters in its memory, by vLLM's numbers.
    ``epoch``: of the question that it answers."""

    epoch: int = 0
    loaded: dict[int, dict[int, bytes]] = field(default_factory=dict)

    def aggregate(self, other: AdapterReport | None) -> AdapterReport:
        """Combine the answers of different ranks to one step."""
        if other is None:
            return self
        return AdapterReport(min(self.epoch, other.epoch), {**self.loaded, **other.loaded})


@dataclass(slots=True)
class _Ask:
    """Question to the workers. ``step``: the number of the step that carries it; None: none yet."""

    request: LoraRequest
    step: int | None = None


class Adapters:
    """Adapters of one engine, by vLLM's numbers. Used from vLLM's scheduler thread.

    ``in_use``: gives the numbers that running requests use, which vLLM keeps loaded. ``ranks``: of the engine.
    ``most_together``: adapters that vLLM computes with in one step; ``most_loaded``: those that a worker keeps.
    """

    def __init__(
        self,
        in_use: Callable[[], AbstractSet[int]],
        ranks: int = 1,
        most_together: int = UNLIMITED,
        most_loaded: int = UNLIMITED,
    ) -> None:
        self._in_use = in_use
        self._ranks = ranks
        self._most_together = most_together
        self._most_loaded = max(most_together, most_loaded)
        self._by_rank: dict[int, dict[int, bytes]] = {}
        self._loaded: dict[int, bytes] = {}
        self._own: dict[int, bytes] = {}
        self._asked: dict[int, _Ask] = {}
        self._begun = self._ended = 0
        self.epoch = 0
        _schedulers.add(self)

    def salt(self, asked: LoraRequest | None) -> bytes | None:
        """Salt for the keys of a request with this ``LoRARequest``: 32 bytes, empty without one. None until the workers
        say what they have loaded, which the next step asks them. A salt of this engine's own where they cannot say.

        Asking may have a worker load the adapter, and so drop another one. So no more are asked for than vLLM computes
        with in one step, and one that may be dropped meanwhile counts as unknown.
        """
        if asked is None:
            return b""
        number = asked.lora_int_id
        known = self._loaded.get(number)
        if known is not None and (not self._may_drop or number in self._in_use()):
            return known
        if number in self._own:
            return self._own[number]
        together = self._in_use() | self._asked.keys() | {number}
        if number not in self._asked and len(together) <= self._most_together:
            self._asked[number] = _Ask(asked)
        return None

    def begin_step(self) -> tuple[LoraRequest, ...]:
        """A step is scheduled. Return the adapters that it asks the workers for."""
        self._begun += 1
        new = [each for each in self._asked.values() if each.step is None]
        for each in new:
            each.step = self._begun
        return tuple(each.request for each in new)

    def learn(self, report: AdapterReport) -> Mapping[int, bytes]:
        """Take the workers' answer, with a step's output. Return the salts of what was loaded in that step, and of what
        is this engine's own. An answer from before the last ``forget`` says nothing of what is loaded now. A rank
        without an answer has what it had."""
        by_rank = {**self._by_rank, **report.loaded}
        ranks = [by_rank.get(rank, {}) for rank in range(self._ranks)]
        common = set.intersection(*(set(each) for each in ranks))
        loaded = {number: _of_ranks([each[number] for each in ranks]) for number in common}
        if report.epoch == self.epoch:
            self._by_rank, self._loaded = by_rank, loaded
            for number in common:
                self._own.pop(number, None)
                self._asked.pop(number, None)
        return {**self._own, **loaded}

    def end_step(self) -> None:
        """A step's output has come: what it asked for and the workers do not know gets a salt of this engine's own."""
        self._ended += 1
        for number, each in list(self._asked.items()):
            if each.step is not None and each.step <= self._ended:
                del self._asked[number]
                self._own[number] = secrets.token_bytes(KEY_BYTES)
                log.warning(
                    "adapter_not_shared name=%s path=%s why=no worker has said what it loaded",
                    each.request.lora_name,
                    each.request.lora_path,
                )
        while len(self._own) > self._most_loaded:
            del self._own[next(iter(self._own))]

    def forget(self) -> None:
        """Nothing that is known holds any more: the prefix cache was reset, or adapters were loaded or removed."""
        self.epoch += 1
        self._by_rank.clear()
        self._loaded.clear()
        self._own.clear()
        self._asked.clear()

    @property
    def _may_drop(self) -> bool:
        """True where what was asked for may have a worker drop an adapter that nothing uses."""
        return bool(self._asked) and len(self._loaded.keys() | self._asked.keys()) > self._most_loaded


class LoadedAdapters:
    """Adapters in a worker's memory. Made within the worker's call that makes its connector, before vLLM loads the
    first adapter."""

    def __init__(self, rank: int) -> None:
        self._manager = _manager_of_caller()
        self._rank = rank
        if self._manager is None:
            log.warning("adapters_not_shared why=this worker keeps its LoRA manager elsewhere than known releases do")
        self._asked: tuple[LoraRequest, ...] = ()
        self._epoch = 0
        self._reported: tuple[int, dict[int, bytes]] = (0, {})
        digest_loads()

    def begin_step(self, asked: tuple[LoraRequest, ...], epoch: int) -> None:
        self._asked, self._epoch = asked, epoch

    def report(self) -> AdapterReport | None:
        """Load what was asked for, once the step's kernels were launched, and return what is loaded; None where there
        is no news."""
        manager = self._manager
        asked, self._asked = self._asked, ()
        for each in asked:
            try:
                if manager is not None:
                    manager.add_adapter(each)
            except Exception as error:  # noqa: BLE001 - vLLM raises it again when it loads the adapter for a request
                log.warning("adapter_not_loaded name=%s path=%s why=%s", each.lora_name, each.lora_path, error)
        found = {} if manager is None else manager._adapter_manager.list_adapters()  # noqa: SLF001 - the models
        loaded = {number: getattr(each, DIGEST, b"") for number, each in found.items()}
        news = self._epoch, {number: digest for number, digest in loaded.items() if digest}
        if news == self._reported and not asked:
            return None
        self._reported = news
        return AdapterReport(self._epoch, {self._rank: dict(news[1])})


def digest_loads() -> None:
    """Have each LoRA manager of this process digest what it loads. Idempotent."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    load = WorkerLoRAManager._load_adapter  # noqa: SLF001 - where files are read
    if hasattr(load, "__wrapped__"):
        return

    @wraps(load)
    def load_and_digest(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = load(self, *args, **kwargs)
        try:
            setattr(model, DIGEST, adapter_digest(model))
        except Exception as error:  # noqa: BLE001 - it serves all the same, and is not shared
            log.warning("adapter_not_shared why=its tensors cannot be read: %s", error)
        return model

    WorkerLoRAManager._load_adapter = load_and_digest  # noqa: SLF001


def _manager_of_caller() -> Any:
    """Return the LoRA manager of the worker that makes its connector; None where there is none. vLLM gives a connector
    no way to its worker, which is one of its callers."""
    frame: Any = sys._getframe(1)  # noqa: SLF001 - see above
    while frame is not None:
        manager = getattr(getattr(frame.f_locals.get("self"), "model_runner", None), "lora_manager", None)
        if manager is not None:
            return manager
        frame = frame.f_back
    return None


def watch_loads() -> None:
    """Have each engine of this process forget what it knows of adapters when a caller adds or removes one: what comes
    before the next step would be matched by the old one. Idempotent."""
    from vllm.v1.executor.abstract import Executor

    if hasattr(Executor.add_lora, "__wrapped__"):
        return
    Executor.add_lora, Executor.remove_lora = _forgetting(Executor.add_lora), _forgetting(Executor.remove_lora)


def _forgetting(call: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(call)
    def call_and_forget(*args: Any, **kwargs: Any) -> bool:
        for each in list(_schedulers):
            each.forget()
        return call(*args, **kwargs)

    return call_and_forget


def adapter_digest(model: Any) -> bytes:
    """Return the digest of a loaded ``LoRAModel``, 32 bytes: of all tensors, names and factors of it, whatever its
    number. Equal in all processes. Raises what reading the tensors raises."""
    parts = {name: value for name, value in vars(model).items() if name not in ("id", DIGEST)}
    return content_digest(parts, b"kv-vllm-adapter")


def content_digest(value: object, person: bytes) -> bytes:
    """Return the digest of a value with tensors in it, 32 bytes. Raises what reading the tensors raises."""
    algorithm, hasher = new_hasher()
    for piece in _pieces(value):
        hasher.update(piece)
    said = f"{algorithm}:{hasher.hexdigest()}"
    return hashlib.blake2b(said.encode(), digest_size=KEY_BYTES, person=person).digest()


def _pieces(value: Any) -> Iterable[memoryview]:
    """Bytes that say what a value is, each part with its type and size before it."""
    if hasattr(value, "untyped_storage"):  # a tensor
        yield _text("tensor", value.dtype, tuple(value.shape))
        import torch

        yield memoryview(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        yield _text("mapping", len(value))
        for key in sorted(value, key=repr):
            yield _text(key)
            yield from _pieces(value[key])
    elif isinstance(value, list | tuple):
        yield _text("list", len(value))
        for each in value:
            yield from _pieces(each)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield _text(type(value).__qualname__)
        yield from _pieces(vars(value))
    else:
        yield _text(value)


def _text(*parts: object) -> memoryview:
    return memoryview(f"{parts!r};".encode())


def _of_ranks(digests: list[bytes]) -> bytes:
    """Combine what all ranks have loaded: ranks with different adapters, or different experts of one, are as one
    engine again where others have the same."""
    if len(set(digests)) == 1:
        return digests[0]
    return hashlib.blake2b(b"".join(digests), digest_size=KEY_BYTES, person=b"kv-vllm-ranks").digest()


_schedulers: weakref.WeakSet[Adapters] = weakref.WeakSet()
