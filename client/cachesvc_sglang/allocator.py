"""SGLang's allocator and admission budget, whose pages are the daemon's: reserved when a request is admitted.

A request's table is made as long as its prompt before SGLang counts on it (``DaemonBudget``), and a block longer before
each decode step that needs it (``check_decode_capacity``). So what SGLang allocates afterwards is read off the table,
and fails in no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from cachesvc_sglang.engine_cache import to_device


class PageAllocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]
    """Takes the place of SGLang's paged allocator, and does what that does until ``bind``. ``batch``: the one that is
    allocated for (``steps``)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cache: Any = None
        self.batch: Any = None
        super().__init__(*args, **kwargs)

    def bind(self, cache: Any) -> None:
        """Serve the pages of ``cache`` from now on."""
        self.cache = cache
        self.free_pages = None

    def available_size(self) -> int:
        return int(super().available_size() if self.cache is None else self.cache.available_tokens())

    def get_all_free_pages(self) -> Any:
        """Free pages: those of the pool are the daemon's, and not listed here."""
        return super().get_all_free_pages() if self.cache is None else torch.empty(0, dtype=torch.int64)

    def create_prefill_budget(self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> Any:
        """Return the budget of a pass of admissions."""
        kind = PrefillBudget if self.cache is None else DaemonBudget
        return kind(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> bool | None:
        """No-op: the daemon evicts when pages are reserved."""
        return super().evict_to_free_tokens(tree_cache, num_tokens) if self.cache is None else None

    def check_decode_capacity(
        self, *, num_tokens: int, tree_cache: Any, requests: Any = None, spec_algorithm: Any = None
    ) -> bool:
        """Reserve the next block of each request that needs one; False where there is no room: SGLang retracts."""
        if self.cache is None:
            return bool(
                super().check_decode_capacity(
                    num_tokens=num_tokens, tree_cache=tree_cache, requests=requests, spec_algorithm=spec_algorithm
                )
            )
        return bool(self.cache.reserve_decode(requests))

    def alloc(self, need_size: int) -> Any:
        """Allocate for no request: beams and sessions do, and get nothing."""
        return super().alloc(need_size) if self.cache is None else None

    def alloc_extend(
        self,
        prefix_lens: Any,
        prefix_lens_cpu: Any,
        seq_lens: Any,
        seq_lens_cpu: Any,
        last_loc: Any,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> Any:
        """Slots of the batch's new tokens; None where a table is too short."""
        if self.cache is None:
            return super().alloc_extend(
                prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages
            )
        firsts, ends = prefix_lens_cpu.tolist(), seq_lens_cpu.tolist()
        return self._slots(self.cache.take(self.batch.reqs, ends), firsts, ends)

    def alloc_decode(self, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any) -> Any:
        """Slot of each request's next token; None where a table is too short."""
        if self.cache is None:
            return super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)
        ends = seq_lens_cpu.tolist()
        return self._slots(self.cache.take(self.batch.reqs, ends), [end - 1 for end in ends], ends)

    def free(self, free_index: Any) -> None:
        """No-op: a request's pages go together, when it ends."""
        if self.cache is None:
            super().free(free_index)

    def free_segment(self, free_index: Any, *, start_pos: int) -> None:
        if self.cache is None:
            super().free_segment(free_index, start_pos=start_pos)

    def free_page_ids(self, page_ids: Any) -> None:
        if self.cache is None:
            super().free_page_ids(page_ids)

    def free_group_begin(self) -> None:
        if self.cache is None:
            super().free_group_begin()

    def free_group_end(self) -> None:
        if self.cache is None:
            super().free_group_end()

    def clear(self) -> None:
        """Forget all, after ``reset`` of the cache."""
        if self.cache is None:
            super().clear()

    def _slots(self, tables: Sequence[Sequence[int]] | None, firsts: Sequence[int], ends: Sequence[int]) -> Any:
        if tables is None:
            return None
        parts = [
            slots_of(table, first, end, self.page_size) for table, first, end in zip(tables, firsts, ends, strict=True)
        ]
        return to_device(np.concatenate(parts), self.device)


class DaemonBudget(PrefillBudget):  # type: ignore[misc]
    """Budget of a pass of admissions: a request that is admitted has the pages of its whole prompt."""

    @property
    def remaining_total(self) -> int:
        """Tokens that a further request may plan with. Reserved prompts were counted by SGLang and by the daemon."""
        return int(super().remaining_total) + int(self.tree_cache.reserved_tokens())

    @property
    def remaining_current(self) -> int:
        """Tokens that a further prompt may take now."""
        return int(super().remaining_current) + int(self.tree_cache.reserved_tokens())

    def available_chunk_tokens(self, chunk_limit: int) -> int:
        """Tokens of a request's next chunk: it has the pages of its whole prompt. A chunk that was bounded by what is
        free would leave others room in its pass once the daemon has more, and SGLang ends at a second one in chunks."""
        return chunk_limit

    def check_prefill(
        self, *, extend_input_len: int, total_tokens: int, chunk_limit: int | None, **_: Any
    ) -> tuple[bool, int | None]:
        """Return whether the request that SGLang looks at has its pages, and ``chunk_limit``."""
        fits = total_tokens < self.remaining_total
        if not fits:
            self.tree_cache.ask_room()
            fits = total_tokens < self.remaining_total
        return (True, chunk_limit) if self.tree_cache.reserve_prompt(extend_input_len, fits=fits) else (False, None)


def slots_of(table: Sequence[int], first: int, end: int, page_tokens: int) -> npt.NDArray[np.int64]:
    """Return the slots of tokens ``[first, end)`` of a request whose blocks are in the pages ``table``."""
    first_block = first // page_tokens
    pages = np.asarray(table[first_block : -(-end // page_tokens)], np.int64)
    slots = (pages[:, None] * page_tokens + np.arange(page_tokens)).reshape(-1)
    skipped = first - first_block * page_tokens
    return slots[skipped : skipped + end - first]
