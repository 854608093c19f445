"""Cells of states that vLLM takes next: at the end of what it schedules, as many as its managers will ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cachesvc_client.plugins.pages.group_tables import Positions


class StateCells:
    """``manager``: vLLM's ``KVCacheManager``. ``groups``: those of states, and the layout's group that each is.
    ``step_tokens``: the most that is computed in a step."""

    def __init__(self, manager: Any, groups: Mapping[int, int], step_tokens: int) -> None:
        self._manager = manager
        self._groups = groups
        self._step_tokens = step_tokens

    def wanted(
        self, request: Any, new_tokens: int, local_tokens: int, external_tokens: int, computed_blocks: Any
    ) -> Positions:
        """Return where an allocation for ``new_tokens`` takes cells, behind ``local_tokens`` of a hit in place, whose
        blocks are ``computed_blocks``, and ``external_tokens`` that are loaded. A request that is loaded holds its
        pages while it waits, so it gets those of its first chunk, too: else such requests may hold all pages, and none
        of them can run."""
        if external_tokens and not new_tokens:
            known = int(request.num_computed_tokens) + local_tokens + external_tokens
            new_tokens = max(0, min(int(request.num_tokens) - known, self._step_tokens))
        found: dict[int, range] = {}
        for group, state_group in self._groups.items():
            manager = self._manager.coordinator.single_type_managers[group]
            computed = () if computed_blocks is None else computed_blocks.blocks[group]
            local = int(request.num_computed_tokens) + local_tokens
            tokens = local + external_tokens + new_tokens
            pages = manager.get_num_blocks_to_allocate(
                request.request_id,
                tokens,
                computed,
                local + external_tokens,
                local,
                tokens,
                prefill_end=self._prefill_end(request),
            )
            pages -= sum(block.ref_cnt == 0 and not block.is_null for block in computed)
            end = -(-tokens // manager.block_size)
            found[state_group] = range(end - pages, end)
        return found

    def _prefill_end(self, request: Any) -> int:
        """Token at which vLLM saves a state within a chunk, as its ``allocate_slots`` says."""
        if self._manager.coordinator.retention_interval != 0:
            return 0
        return max(int(request.num_prompt_tokens), int(request.num_tokens) - 1)
