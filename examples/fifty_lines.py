"""The least engine: a layer of attention, kept in the node's cache. `python -m examples.fifty_lines [SOCKET]`"""

from __future__ import annotations

import sys

import numpy as np
from cachesvc_client import AttachedPool, CacheClient, Lease, default_socket, gqa

VOCABULARY, WIDTH, BLOCK = 256, 64, 16
EMBED, TO_Q, TO_K, TO_V = np.random.default_rng(1).standard_normal((4, VOCABULARY, WIDTH), np.float32)
LAYOUT = gqa(layers=1, kv_heads=1, head_dim=WIDTH, block_tokens=BLOCK, dtype="float32")


def next_token(lease: Lease, pool: AttachedPool, prompt: list[int]) -> tuple[int, int]:
    """The token after the prompt, and the number of prompt tokens that came from the cache."""
    keys = lease.hasher(prompt).keys
    reusable = (len(prompt) - 1) // BLOCK  # one token at least is computed: the answer comes out of it
    with lease.match(keys, max_blocks=reusable) as sequence:
        sequence.allocate(-(-len(prompt) // BLOCK))  # the table's whole length; what lies on the host starts to load
        table = sequence.tables[0]
        for ticket in sequence.tickets:
            pool.wait_layer(ticket, layer=0, timeout_s=5)
        k, v = pool.planes[0, "k"], pool.planes[0, "v"]  # [pages, 1, BLOCK, WIDTH]: the daemon's own memory
        hit_tokens = sequence.hit_blocks * BLOCK
        for position in range(hit_tokens, len(prompt)):
            page, slot = table[position // BLOCK], position % BLOCK
            k[page, 0, slot], v[page, 0, slot] = TO_K[prompt[position]], TO_V[prompt[position]]
        seen_k = k[table, 0].reshape(-1, WIDTH)[: len(prompt)]
        seen_v = v[table, 0].reshape(-1, WIDTH)[: len(prompt)]
        scores = seen_k @ TO_Q[prompt[-1]] / np.sqrt(WIDTH)
        weights = np.exp(scores - scores.max())
        token = int(np.argmax(EMBED @ (weights @ seen_v / weights.sum())))
        if len(prompt) // BLOCK:
            sequence.publish(len(prompt) // BLOCK)  # full blocks are every engine's from now on
    return token, hit_tokens


def main() -> None:
    """Answer a prompt twice: the second time its full blocks are in place."""
    prompt = np.random.default_rng(2).integers(0, VOCABULARY, 1000).tolist()
    if "--help" in sys.argv:
        sys.exit(__doc__)
    socket = sys.argv[1] if len(sys.argv) > 1 else default_socket()
    with CacheClient(socket, engine="fifty lines") as client:
        model = client.register("fifty-lines@1", LAYOUT, device_pages=[1024], host_pages=[0])
        with client.open_lease(model) as lease, lease.attach() as pool:
            for _ in range(2):
                token, hit_tokens = next_token(lease, pool, prompt)
                print(f"token {token}, {hit_tokens} of {len(prompt)} tokens were there already")


if __name__ == "__main__":
    main()
