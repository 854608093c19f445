"""A model of three groups in one pool: full attention, a window, and states whose planes have other widths."""

from __future__ import annotations

from cachesvc_client import KEY_BYTES, NO_PAGE, Layout, Plane, PlaneGroup

from tests.e2e.engine import BLOCK_TOKENS, WAIT_SECONDS, WINDOW_TOKENS, Engine, Served

FULL, WINDOW, STATE = range(3)
HYBRID = Layout(
    BLOCK_TOKENS,
    1,
    (
        PlaneGroup("full", pool="kv"),
        PlaneGroup("window", WINDOW_TOKENS, pool="kv"),
        PlaneGroup("state", pool="kv", is_state=True),
    ),
    (
        *(Plane(name, 0, "full", (2, BLOCK_TOKENS, 4), "float16") for name in ("k", "v")),
        *(Plane(name, 1, "window", (2, BLOCK_TOKENS, 4), "float16") for name in ("k", "v")),
        Plane("conv", 2, "state", (3, 20), "float16"),
        Plane("ssm", 2, "state", (2, 7, 7), "float32"),
    ),
)


def serve_hybrid(engine: Engine, tokens: list[int], chunk: int = 4, *, is_late: bool = False) -> Served:
    """``Engine.serve`` in chunks, at whose ends a state is published; the windows are recycled. ``is_late``: a state is
    published by a call after that of its block."""
    keys = engine.keys(tokens)
    blocks = len(keys) // KEY_BYTES
    with engine.lease.match(keys) as sequence:
        hit = sequence.hit_blocks
        sequence.allocate(hit)
        sequence.wait_loaded(WAIT_SECONDS)
        bad = engine.bad(sequence, keys, range(hit))
        if hit:
            assert [int(page != NO_PAGE) for page in sequence.tables[STATE]] == [0] * (hit - 1) + [1]
        computed = hit
        while computed < blocks:
            last = min(computed + chunk, blocks)
            sequence.allocate(last)
            engine.fill(sequence, keys, range(computed, last))
            page = int(sequence.tables[STATE][last - 1])
            if is_late:
                sequence.publish(last)
            answer = sequence.publish(last, states={STATE: {last - 1: page}})
            assert not answer.kept
            computed = last
            sequence.recycle(computed * BLOCK_TOKENS)
        pages = [table.tolist() for table in sequence.tables]
        return Served(sequence.device_blocks, sequence.host_blocks, blocks - hit, 0, pages, bad)
