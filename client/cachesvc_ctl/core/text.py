"""Text that commands write for people: aligned tables, bytes with a unit, and the number of omitted rows."""

from __future__ import annotations

from collections.abc import Sequence

from cachesvc.model.text.printable import one_line
from cachesvc.model.text.sizes import describe_bytes

__all__ = ["describe_bytes", "for_terminal", "left_out", "one_line", "table"]


def for_terminal(text: str) -> str:
    """Escape each line of a text of several."""
    return "\n".join(map(one_line, text.split("\n")))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns; numbers to the right. Cells are escaped by ``one_line``. Without rows: ``none``."""
    if not rows:
        return "none"
    cells = [list(head), *([f"{c:,}" if isinstance(c, int) else one_line(str(c)) for c in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    right = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(head))]
    lines = [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)).rstrip()
        for line in cells
    ]
    return "\n".join(lines)


def left_out(*flags: str) -> str:
    """A last line where there is more than was shown; ``flags``: those that held it back and can be raised."""
    return f"\n(more are there; raise {' and '.join(flags)})" if flags else "\n(more are there)"
