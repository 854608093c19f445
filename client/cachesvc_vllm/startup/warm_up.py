"""Guard of shared pages during vLLM's warm-up: its made-up requests write to page 0, which is never granted."""

from __future__ import annotations

from typing import Any


class WarmUp:
    """Guard from ``begin`` to ``end``; does nothing where this vLLM has no runner that warms up so."""

    def __init__(self) -> None:
        self._tables: Any = None

    def begin(self) -> None:
        """Replace every block id that a runner gets by page 0 from now on."""
        try:
            from vllm.v1.worker.gpu.block_table import BlockTables
        except ImportError:  # no Triton: the runner that warms up so cannot be here
            return
        self._tables = BlockTables
        BlockTables.redirect_writes_to_null_block = True

    def end(self) -> None:
        """Block ids are what they are. Idempotent."""
        tables, self._tables = self._tables, None
        if tables is not None:
            tables.redirect_writes_to_null_block = False
