"""SGLang's allocators and admission budgets, whose pages are the daemon's: reserved when a request is admitted.

A request's table is made as long as its prompt before SGLang counts on it (``DaemonBudget``), and a block longer before
each decode step that needs it (``check_decode_capacity``). So what SGLang allocates afterwards is read off the table,
and fails in no step. Where layers have windows, a pool of windows may have fewer pages than a prompt has blocks. So
there tables grow before each chunk (``WindowBudget``), while windows slide behind it:

    full pool     | page | page | page | page | page |        slots of SGLang's rows
    window pool                 | page | page | page |        found by those: ``full_to_swa_index_mapping``
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.prefill_budget import PrefillBudget, SWAPrefillBudget

from cachesvc_sglang.engine_cache import to_device


class ReservingBudget(PrefillBudget):  # type: ignore[misc]
    """Budget of a pass of admissions: a request that is admitted has the pages of what it computes."""

    @property
    def remaining_total(self) -> int:
        """Tokens that a further request may plan with. Reserved prompts were counted by SGLang and by the daemon."""
        return int(super().remaining_total) + int(self.tree_cache.reserved_tokens())

    @property
    def remaining_current(self) -> int:
        """Tokens that a further prompt may take now."""
        return int(super().remaining_current) + int(self.tree_cache.reserved_tokens())

    def check_prefill(self, *, extend_input_len: int, **wanted: Any) -> tuple[bool, int | None]:
        """Return whether the request that SGLang looks at has its pages, and the limit of its chunk."""
        fits, limit = super().check_prefill(extend_input_len=extend_input_len, **wanted)
        if not fits:
            self.tree_cache.ask_room()
            fits, limit = super().check_prefill(extend_input_len=extend_input_len, **wanted)
        tokens = self._first_tokens(extend_input_len, limit if fits else wanted["chunk_limit"])
        return (True, limit) if self.tree_cache.reserve(tokens, fits=fits) else (False, None)

    def _first_tokens(self, extend_input_len: int, _: int | None) -> int:
        return extend_input_len


class DaemonBudget(ReservingBudget):
    """A request that is admitted has the pages of its whole prompt."""

    def available_chunk_tokens(self, chunk_limit: int) -> int:
        """Tokens of a request's next chunk: it has the pages of its whole prompt. A chunk that was bounded by what is
        free would leave others room in its pass once the daemon has more, and SGLang ends at a second one in chunks."""
        return chunk_limit


class WindowBudget(ReservingBudget, SWAPrefillBudget):  # type: ignore[misc]
    """A request that is admitted has the pages of its first chunk, and of each further one when that is its turn. None
    is admitted beside a request whose chunk waits for pages, nor behind one that has more chunks: SGLang would count a
    chunk of the first, and ends at a second request in chunks, for which a shorter chunk would leave room."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_closed = False

    @property
    def remaining_swa(self) -> int:
        """Tokens of windows that a further request may plan with."""
        return int(super().remaining_swa) + int(self.tree_cache.reserved_tokens(1))

    def check_prefill(self, **wanted: Any) -> tuple[bool, int | None]:
        """Return whether the request that SGLang looks at has the pages of its first chunk, and the limit of that."""
        if self._is_closed:
            return False, None
        is_admitted, limit = super().check_prefill(**wanted)
        tokens = self.ceil_paged_tokens(wanted["extend_input_len"])
        self._is_closed = is_admitted and limit is not None and tokens > limit
        return is_admitted, limit

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        """Tokens of a request's next chunk: as many as fit. None where none do."""
        found: int | None = super().available_chunk_tokens(chunk_limit)
        if found is None or found < chunk_limit:
            self.tree_cache.ask_room()
            found = super().available_chunk_tokens(chunk_limit)
        if found is None:
            self._is_closed = True
            self.tree_cache.reserve(1, fits=False)
        return found

    def fit_chunk(self, *, extend_input_len: int, chunk_limit: int, **_: Any) -> int | None:
        """Give the chunk its pages: its limit; None where there is no room now."""
        has_pages = self.tree_cache.reserve(min(extend_input_len, chunk_limit), fits=True)
        self._is_closed = not has_pages or extend_input_len > chunk_limit
        return chunk_limit if has_pages else None

    def _first_tokens(self, extend_input_len: int, chunk_limit: int | None) -> int:
        return extend_input_len if chunk_limit is None else min(extend_input_len, chunk_limit)


class DaemonPages(BaseTokenToKVPoolAllocator):  # type: ignore[misc]
    """Takes the place of an allocator of SGLang's, and does what that does until ``bind``. ``batch``: the one that is
    allocated for (``steps``). ``budgets``: without the daemon, and with it."""

    budgets: tuple[type[PrefillBudget], type[PrefillBudget]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cache: Any = None
        self.batch: Any = None
        super().__init__(*args, **kwargs)

    def bind(self, cache: Any) -> None:
        """Serve the pages of ``cache`` from now on."""
        self.cache = cache

    def get_all_free_pages(self) -> Any:
        """Free pages: those of the pool are the daemon's, and not listed here."""
        return super().get_all_free_pages() if self.cache is None else torch.empty(0, dtype=torch.int64)

    def create_prefill_budget(self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> Any:
        """Return the budget of a pass of admissions."""
        kind = self.budgets[self.cache is not None]
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
        self, prefix_lens: Any, prefix_lens_cpu: Any, seq_lens: Any, seq_lens_cpu: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        """Slots of the batch's new tokens; None where a table is too short."""
        if self.cache is None:
            return super().alloc_extend(prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, *rest, **kwargs)
        return self._slots(prefix_lens_cpu.tolist(), seq_lens_cpu.tolist())

    def alloc_decode(self, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any) -> Any:
        """Slot of each request's next token; None where a table is too short."""
        if self.cache is None:
            return super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)
        ends = seq_lens_cpu.tolist()
        return self._slots([end - 1 for end in ends], ends)

    def free(self, free_index: Any) -> None:
        """No-op: a request's pages go together, when it ends."""
        if self.cache is None:
            super().free(free_index)

    def free_segment(self, free_index: Any, *, start_pos: int) -> None:
        if self.cache is None:
            super().free_segment(free_index, start_pos=start_pos)

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

    def _slots(self, firsts: Sequence[int], ends: Sequence[int]) -> Any:
        tables = self.cache.take(self.batch.reqs, ends)
        if tables is None:
            return None
        parts = [
            slots_of(table, first, end, self.page_size) for table, first, end in zip(tables, firsts, ends, strict=True)
        ]
        return to_device(np.concatenate(parts), self.device)


class PageAllocator(DaemonPages, PagedTokenToKVPoolAllocator):  # type: ignore[misc]
    """Takes the place of SGLang's paged allocator."""

    budgets = (PrefillBudget, DaemonBudget)

    @property
    def pool_blocks(self) -> tuple[int, ...]:
        return (int(self.num_pages),)

    def bind(self, cache: Any) -> None:
        """Serve the pages of ``cache`` from now on."""
        super().bind(cache)
        self.free_pages = None

    def available_size(self) -> int:
        return int(super().available_size() if self.cache is None else self.cache.available_tokens())

    def free_page_ids(self, page_ids: Any) -> None:
        if self.cache is None:
            super().free_page_ids(page_ids)


class WindowAllocator(DaemonPages, SWATokenToKVPoolAllocator):  # type: ignore[misc]
    """Takes the place of SGLang's allocator of a pool of whole sequences and one of windows."""

    budgets = (SWAPrefillBudget, WindowBudget)

    @property
    def pool_blocks(self) -> tuple[int, ...]:
        return int(self.size_full) // self.page_size, int(self.size_swa) // self.page_size

    def available_size(self) -> int:
        return min(self.full_available_size(), self.swa_available_size())

    def full_available_size(self) -> int:
        return int(super().full_available_size() if self.cache is None else self.cache.available_tokens())

    def swa_available_size(self) -> int:
        return int(super().swa_available_size() if self.cache is None else self.cache.available_tokens(1))

    def free_swa(self, free_index: Any) -> None:
        """No-op: the cache gives windows back (``evict_sliding_windows``)."""
        if self.cache is None:
            super().free_swa(free_index)

    def free_swa_segment(self, free_index: Any, *, start_pos: int) -> None:
        if self.cache is None:
            super().free_swa_segment(free_index, start_pos=start_pos)

    def free_full(self, free_index: Any) -> None:
        if self.cache is None:
            super().free_full(free_index)

    def free_full_segment(self, free_index: Any, *, start_pos: int) -> None:
        if self.cache is None:
            super().free_full_segment(free_index, start_pos=start_pos)

    def _slots(self, firsts: Sequence[int], ends: Sequence[int]) -> Any:
        slots = super()._slots(firsts, ends)
        if slots is not None:
            self._show_windows()
        return slots

    def _show_windows(self) -> None:
        """Note where the windows of new blocks are, for kernels find them by the slots of the other pool.

        A block behind which a window slid keeps what was noted of it: a request in the same pages may still read it,
        and one that does not reads nothing there."""
        new = self.cache.take_windows(self.batch.reqs)
        if not new:
            return
        pages, windows = (np.array(each, np.int64)[:, None] for each in zip(*new, strict=True))
        tokens = np.arange(self.page_size)
        slots, window_slots = ((each * self.page_size + tokens).reshape(-1) for each in (pages, windows))
        self.full_to_swa_index_mapping[to_device(slots, self.device)] = to_device(window_slots, self.device)


def slots_of(table: Sequence[int], first: int, end: int, page_tokens: int) -> npt.NDArray[np.int64]:
    """Return the slots of tokens ``[first, end)`` of a request whose blocks are in the pages ``table``."""
    first_block = first // page_tokens
    pages = np.asarray(table[first_block : -(-end // page_tokens)], np.int64)
    slots = (pages[:, None] * page_tokens + np.arange(page_tokens)).reshape(-1)
    skipped = first - first_block * page_tokens
    return slots[skipped : skipped + end - first]
