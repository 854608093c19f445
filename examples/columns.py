"""Decoding by arrays: one table for all sequences, one message an iteration. `python -m examples.columns SOCKET`"""

from __future__ import annotations

import sys

import numpy as np
from cachesvc_client import KEY_BYTES, BlockHasher, CacheClient, Lease, opaque

BLOCK, SEQUENCES, PROMPT, NEW = 16, 8, 40, 64
LAYOUT = opaque(block_bytes=4096, block_tokens=BLOCK)


def decode(lease: Lease) -> int:
    """Decode a batch; how many of its blocks were published."""
    rng = np.random.default_rng(3)
    hashers = [BlockHasher(lease.registration.namespace, BLOCK) for _ in range(SEQUENCES)]
    columns = lease.columns(max_sequences=SEQUENCES, max_blocks=-(-(PROMPT + NEW) // BLOCK))
    slots = []
    for hasher in hashers:  # what the arrays do not have is asked for with handles
        hasher.extend(rng.integers(0, 50_000, PROMPT))
        sequence = lease.match(bytes(hasher.keys))
        sequence.allocate(-(-PROMPT // BLOCK))
        slots.append(columns.add(sequence))
    at = np.array(slots)
    published = 0
    with lease.step(stock_pages=2 * SEQUENCES) as steps:
        steps.submit()  # fills the stock
        for tokens in range(PROMPT, PROMPT + NEW):
            grow = at[columns.blocks[at] * BLOCK == tokens]  # those whose next token begins a block
            full = tokens // BLOCK
            publish = at[columns.sealed[at] < full]
            keys = b"".join(bytes(hashers[slot].keys[columns.sealed[slot] * KEY_BYTES :]) for slot in publish)
            pending = steps.send_columns(columns, grow=grow, publish=(publish, full, keys))
            for hasher in hashers:  # attention by columns.tables[0, at], and the token that it gives
                hasher.extend(rng.integers(0, 50_000, 1))
            for odd in pending.answer().odd:  # a duplicate, whose cells are corrected by now, or an error
                print(f"{odd.call} of slot {odd.slot}: {odd.result}")
            published += len(publish)
        steps.submit_columns(columns, release=at)
    return published


def main() -> None:
    """Decode against a daemon."""
    with CacheClient(sys.argv[1], engine="columns") as client:
        model = client.register("columns@1", LAYOUT, device_pages=[1024], host_pages=[0])
        with client.open_lease(model) as lease:
            print(f"{decode(lease)} publishes of {SEQUENCES} sequences")


if __name__ == "__main__":
    main()
