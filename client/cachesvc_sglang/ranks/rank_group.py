"""Start of an engine's ranks: each learns what the others have, and none starts where one cannot."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, TypeVar

from cachesvc_client.plugins.daemon.errors import ConnectorRefused

from cachesvc_sglang.ranks.links import FollowerLinks, LeaderLink

T = TypeVar("T")


class RankGroup:
    """Rank ``rank`` of ``size``. ``gather``: the values of all ranks, in their order; each of them calls it."""

    def __init__(self, rank: int, size: int, gather: Callable[[Any], list[Any]]) -> None:
        self.rank = rank
        self.size = size
        self._gather = gather

    @property
    def is_first(self) -> bool:
        """True for the rank that decides."""
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
