"""Parts of the plugin that need neither SGLang nor torch: which prompts share, ranks that start together."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, TypeVar

from cachesvc_client.core.keys import BlockHasher, ExtraKey
from cachesvc_client.plugins.keeper import ConnectorRefused

from cachesvc_sglang.links import FollowerLinks, LeaderLink

DIGEST_BYTES = 32


class PromptKeys:
    """Keys of one request, which grow with its tokens. ``namespace``: of the registration. ``extra_key``: its client's.
    ``adapter``: digest of its LoRA adapter. ``hashes``: of the full blocks."""

    def __init__(
        self,
        namespace: bytes,
        block_tokens: int,
        extra_key: str | None,
        cache_salt: str | None,
        adapter: bytes | None = None,
    ) -> None:
        named = {"sglang.extra": extra_key, "sglang.salt": cache_salt}
        extras = tuple(ExtraKey.of_prompt(kind, _digest(text)) for kind, text in named.items() if text)
        if adapter is not None:
            extras = (*extras, ExtraKey.of_prompt("sglang.adapter", adapter))
        self._hasher = BlockHasher(namespace, block_tokens, extras)
        self._tokens = 0
        self.hashes: list[bytes] = []

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """Hash what is new of the request's ``tokens``, which never lose any; the keys of all full blocks."""
        if len(tokens) > self._tokens:
            blocks = self._hasher.extend(tokens[self._tokens :])
            self._tokens = len(tokens)
            self.hashes += map(self._hasher.key, range(len(self.hashes), blocks))
        return self.hashes


def may_share(request: Any) -> bool:
    """Return whether a request's tokens say what its KV depends on. Images stand in its tokens by a short hash, and
    embeddings do not at all."""
    return (
        request.multimodal_inputs is None
        and request.input_embeds is None
        and request.positional_embed_overrides is None
        and not request.skip_radix_cache_insert
    )


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES, person=b"kv-sglang-extra").digest()


class EngineRefused(ConnectorRefused):
    """The engine is configured in a way that the plugin cannot serve; the message says what works instead."""


T = TypeVar("T")


class RankGroup:
    """Rank ``rank`` of ``size``. ``gather``: the values of all ranks, in their order; each of them calls it."""

    def __init__(self, rank: int, size: int, gather: Callable[[Any], list[Any]]) -> None:
        self.rank = rank
        self.size = size
        self._gather = gather

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all(self, act: Callable[[], T]) -> list[T]:
        """Results of all ranks. Raises what ``act`` raises, and ConnectorRefused where another rank failed."""
        if self.size == 1:
            return [act()]
        try:
            mine = act()
        except BaseException as error:
            self._gather((f"{type(error).__name__}: {error}", None))
            raise
        found = self._gather(("", mine))
        for rank, (failure, _) in enumerate(found):
            if failure:
                raise ConnectorRefused(f"rank {rank} of this engine did not start: {failure}")
        return [value for _, value in found]

    def connect(self) -> tuple[FollowerLinks | None, LeaderLink | None]:
        """Links of the first rank to the others, or of this rank to the first."""
        if self.size == 1:
            return None, None
        if not self.is_first:
            path = self.all(lambda: "")[0]
            link = Client(path, "AF_UNIX")
            link.send(self.rank)
            return None, LeaderLink(link, self.rank)
        folder = Path(tempfile.mkdtemp(prefix="cachesvc-ranks-"))
        try:
            with Listener(str(folder / "links"), "AF_UNIX", backlog=self.size) as listener:
                self.all(lambda: str(folder / "links"))
                links: dict[int, Connection] = {}
                while len(links) < self.size - 1:
                    link = listener.accept()
                    links[link.recv()] = link
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return FollowerLinks([links[rank] for rank in sorted(links)]), None


def ranks_of_engine() -> RankGroup:
    """Ranks of this process's engine, once SGLang has its process groups."""
    import torch
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    size = int(parallel.tp_size)
    if size == 1:
        return RankGroup(0, 1, lambda mine: [mine])
    group = parallel.tp_group

    def gather(mine: Any) -> list[Any]:
        found = [None] * size
        torch.distributed.all_gather_object(found, mine, group=group.cpu_group)
        return found

    return RankGroup(int(group.rank_in_group), size, gather)
