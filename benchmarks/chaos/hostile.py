"""Effect of a hostile tenant on another engine: ``python -m benchmarks.chaos.hostile [--minutes 30] [--seed 1] [--json
OUT]``.

A daemon that may open 1,024 files serves an engine of tenant b, which makes a Step of 32 sequences every 10 ms and a
Match now and then. After a minute alone it has company: two processes with a token of tenant a (tight quotas) and one
with a token that may only read, which attack at random in all ways that ENGINES and READERS name. Reported are b's
times alone and beside them, what was refused to b, and the daemon's memory. Exit code 1 where a call of b's was
refused, its lease was lost, the daemon took more than 1 GiB beside its pools, or it did not come back to what it held
before.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing as mp
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from cachesvc_client import CacheClient, CacheClientError
from cachesvc_ctl.core.daemon_process import DaemonProcess

from benchmarks.chaos.attackers import ENGINES, KEY_BYTES, LAYOUT, READERS, Attacker
from benchmarks.chaos.proc import MIB, bytes_beside_pools
from benchmarks.support.calls import Beside, match_ms, spread, timed_ms
from benchmarks.support.recording import parser_of, save

FILES = 1024
EVERY_SECONDS = 0.01
SEQUENCES, BLOCKS = 32, 64
MOST_BYTES = 1 << 30
TOKENS = {
    "a": "a-token-of-a-hostile-tenant-0001",
    "b": "a-token-of-an-honest-tenant-0002",
    "r": "a-token-of-a-reader-00003",
}
QUOTAS = """
[quota.tenants.a]
device_bytes = "8MiB"
models = 2
leases = 8
pages = 8192
sequences = 4096
private_pages = 1024
calls_per_second = 200
operations_per_second = 4000
bytes_per_second = "4MiB"
calls_in_flight = 16
"""


def main() -> None:
    """Print what was found, and write JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--alone-seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    found = measure(arguments.minutes * 60, arguments.alone_seconds, arguments.seed)
    print(table(found))
    save(arguments, {"benchmark": "hostile", **found})
    sys.exit(0 if is_sound(found) else 1)


def measure(seconds: float, alone_seconds: float, seed: int) -> dict[str, Any]:
    """The whole run."""
    context = mp.get_context("spawn")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hostile-")))
        tokens = folder / "tokens.toml"
        tokens.write_text(tokens_file(), encoding="utf-8")
        tokens.chmod(0o600)
        flags = ["--backend", "shm", "--device-pool", "256MiB", "--host-pool", "64MiB", "--tokens", str(tokens)]
        flags += ["--listen", "127.0.0.1:0", "--lease-seconds", "10"]
        under = ["sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh"]
        daemon = stack.enter_context(DaemonProcess(flags, folder=str(folder), under=under))
        attacked = context.Event()
        victim = stack.enter_context(Beside(honest, daemon.socket, attacked))
        before = bytes_beside_pools(daemon.process.pid, 0)
        attacked.wait(alone_seconds)
        attacked.set()
        pipes = []
        crew = []
        for number, (who, kinds) in enumerate((("a", ENGINES), ("a", ENGINES), ("r", READERS))):
            own, other = context.Pipe()
            pipes.append(own)
            arguments = (daemon.socket, who, kinds, seed + number, time.time() + seconds, other)
            crew.append(context.Process(target=attack, args=arguments))
            crew[-1].start()
        most = before
        while any(each.is_alive() for each in crew):
            most = max(most, bytes_beside_pools(daemon.process.pid, 0))
            crew[0].join(1.0)
        attacks: Counter[str] = Counter()
        connections: Counter[str] = Counter()
        for own in pipes:
            tried, made = own.recv()
            attacks.update(tried)
            connections.update(made)
        served = victim.end()
        after = bytes_beside_pools(daemon.process.pid, 0)
        log = daemon.log.read_text(encoding="utf-8")
    return {
        "seconds": seconds,
        **served,
        "attacks": dict(attacks),
        "connections": dict(connections),
        "memory_mib": {"before": before / MIB, "most": most / MIB, "after": after / MIB},
        "defects": log.count('"call_broke"') + log.count("Traceback"),
    }


def tokens_file() -> str:
    """Tokens file of the tenants and their rights."""
    rows = (("a", "engine", "a"), ("b", "engine", "b"), ("r", "read-only", "a"))
    return QUOTAS + "".join(
        f'[[token]]\nname = "{who}"\nsha256 = "{hashlib.sha256(TOKENS[who].encode()).hexdigest()}"\n'
        f'scopes = ["{scope}"]\ntenant = "{tenant}"\n'
        for who, scope, tenant in rows
    )


# -- the engine that must not notice -----------------------------------------------------------------------------------


def honest(ends: Event, pipe: Connection, path: str, attacked: Event) -> None:
    """Steps and matches until told to end; their milliseconds before and under attack."""
    times: dict[str, dict[str, list[float]]] = {name: {"step": [], "match": []} for name in ("alone", "attacked")}
    refused: list[str] = []
    with CacheClient(path, engine="honest", token=TOKENS["b"]) as client:
        lease = client.open_lease(client.register("m", LAYOUT, device_pages=[16384], host_pages=[0]))
        stream = lease.step(stock_pages=4 * SEQUENCES)
        pipe.send("ready")
        rng = np.random.default_rng(1)
        while not ends.is_set():
            held = [lease.match(b"") for _ in range(SEQUENCES)]
            for blocks in range(1, BLOCKS + 1):
                if ends.is_set():
                    break
                next_at = time.perf_counter() + EVERY_SECONDS
                now = times["attacked" if attacked.is_set() else "alone"]
                try:
                    now["step"].append(timed_ms(partial(step, stream, held, blocks)))
                    if blocks % 8 == 0:
                        now["match"].append(match_ms(lease, rng.bytes(256 * KEY_BYTES)))
                except CacheClientError as error:
                    refused.append(repr(error))
                    if lease.is_lost:
                        ends.wait()
                time.sleep(max(0.0, next_at - time.perf_counter()))  # an engine's kernels run meanwhile
            for each in held:
                each.release()
        pipe.send(
            {
                "step_ms": {name: spread(taken["step"]) for name, taken in times.items()},
                "match_ms": {name: spread(taken["match"]) for name, taken in times.items()},
                "refused": len(refused),
                "refusals": refused[:5],
                "leases_lost": int(lease.is_lost),
            }
        )


def step(stream: Any, held: list[Any], blocks: int) -> None:
    """One iteration: every sequence grows by a block."""
    batch = stream.batch()
    for each in held:
        batch.allocate(each, blocks)
    stream.submit(batch)


# -- attackers ---------------------------------------------------------------------------------------------------------


def attack(path: str, who: str, kinds: tuple[str, ...], seed: int, until: float, pipe: Connection) -> None:
    """Attack at random until the time is up; how often each was tried, and how often it ended in a refusal."""
    rng = random.Random(seed)
    attacker = Attacker(path, TOKENS[who], rng)
    tried: Counter[str] = Counter()
    while time.time() < until:
        kind = rng.choice(kinds)
        tried[kind] += 1
        try:
            getattr(attacker, kind)()
        except (CacheClientError, grpc.RpcError, OSError):
            tried[f"{kind}: refused"] += 1
            if rng.random() < 0.1:
                with contextlib.suppress(CacheClientError):
                    attacker.drop()
    attacker.drop()
    pipe.send((tried, attacker.connections))


def is_sound(found: dict[str, Any]) -> bool:
    """False where the honest engine lost something, or the daemon grew."""
    memory = found["memory_mib"]
    is_back = memory["after"] <= 1.25 * memory["before"] + 64
    nothing_lost = not (found["refused"] or found["leases_lost"] or found["defects"])
    return nothing_lost and is_back and memory["most"] * MIB <= MOST_BYTES


def table(found: dict[str, Any]) -> str:
    """Table of the results for operators."""

    def rows() -> Iterator[str]:
        for what in ("step_ms", "match_ms"):
            for when, figures in found[what].items():
                yield f"{what:9} {when:9} " + "  ".join(f"{name} {value:>9}" for name, value in figures.items())
            ratio = found[what]["attacked"]["p99"] / found[what]["alone"]["p99"]
            yield f"{what:9} p99 under attack / alone {ratio:.2f}"
        memory = found["memory_mib"]
        yield "memory beside pools, MiB: " + ", ".join(f"{name} {value:.0f}" for name, value in memory.items())
        yield f"refused to the honest engine {found['refused']}, leases lost {found['leases_lost']}"
        yield f"defects in the log {found['defects']}"
        yield "connections: " + ", ".join(f"{name} {count:,}" for name, count in sorted(found["connections"].items()))
        yield "attacks: " + ", ".join(f"{name} {count}" for name, count in sorted(found["attacks"].items()))

    return "\n".join(rows())


if __name__ == "__main__":
    main()
