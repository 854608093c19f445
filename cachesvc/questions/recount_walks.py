"""Parts of conservation that are checked on the ledger itself, a little at a time: each step holds at its moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cachesvc.ledger.ledger import Ledger, Model
from cachesvc.ledger.sequences import Sequence

ROWS_A_STEP = 1024


def walk_keys(model: Model) -> Iterator[list[str]]:
    """Every key's row has that key and a copy, and every row without a key has none. A step looks at 1,024 rows."""
    index = model.blocks.index
    keys, rows = index.keys, index.rows
    first = 0
    while first < len(keys):
        out: list[str] = []
        for row in range(first, min(first + ROWS_A_STEP, len(keys))):
            key = keys[row]
            if key is None:
                if index.has_copy(row):
                    out.append(f"model {model.id} row {row}: a copy without a key")
            elif rows.get(key) != row:
                out.append(f"model {model.id} row {row}: key and row do not agree")
            elif not index.has_copy(row):
                out.append(f"model {model.id} row {row}: no copy anywhere")
        first += ROWS_A_STEP
        yield out


def walk_tables(ledger: Ledger, model: Model) -> Iterator[list[str]]:
    """A sequence on the device has, at every sealed position, the page of its block there. A step is one sequence."""
    known = [
        (lease.id, number) for lease in ledger.leases.values() if lease.model == model.id for number in lease.sequences
    ]
    for lease_id, number in known:
        lease = ledger.leases.get(lease_id)
        sequence = lease.sequences.get(number) if lease is not None else None
        if sequence is not None and not sequence.swapped_out and not sequence.failed:
            yield _table(model, sequence)


def _table(model: Model, sequence: Sequence) -> list[str]:
    place = model.replicas[sequence.replica].place
    path = model.blocks.index.path(sequence.anchor)
    if len(path) != sequence.sealed:
        return [f"sequence {sequence.id}: {len(path)} blocks above its anchor, {sequence.sealed} sealed"]
    out: list[str] = []
    for group in place.full_groups:
        pages, table = place.pages[group], sequence.tables[group]
        if [pages[row] for row in path[: sequence.blocks]] != table[: len(path)]:
            out.append(f"sequence {sequence.id} group {group}: its table is not the pages of its blocks")
    for group, held in sequence.window_rows.items():
        for position, row in held.items():
            if sequence.tables[group][position] != place.pages[group][row]:
                out.append(f"sequence {sequence.id} group {group}: not the windowed page of block {position}")
    return out


def walk_computing(ledger: Ledger, model: Model) -> Iterator[list[str]]:
    """Keys that sequences have declared to be computing are counted. One step: a count is of one moment or of none."""
    declared: Counter[bytes] = Counter()
    for lease in ledger.leases.values():
        for sequence in lease.sequences.values() if lease.model == model.id else ():
            for position in range(max(sequence.sealed, sequence.hit_blocks), sequence.declared):
                declared[sequence.key(position)] += 1
    yield [] if declared == model.computing else [f"model {model.id}: keys being computed do not add up"]
