"""A daemon at work, for pictures and recorded sessions: engines that serve prompts of a few popular beginnings."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from cachesvc_client import CacheClient, CacheClientError, Lease, block_keys, opaque
from cachesvc_ctl.core.daemon_process import DaemonProcess

BLOCK_TOKENS = 16
FLAGS = (
    *("--backend", "shm", "--device-pool", "24MiB", "--host-pool", "64MiB", "--drain-seconds", "0"),
    *("--write-policy", "write_through", "--checksums", "all", "--web-listen", "127.0.0.1:0"),
)
DEVICE_PAGES, HOST_PAGES = 320, 900
WAIT_SECONDS = 30.0


@contextmanager
def lively_daemon(engines: int = 2, warm_requests: int = 60) -> Iterator[DaemonProcess]:
    """A daemon with ``engines`` engines at work; it has served ``warm_requests`` of each when the block begins."""
    stop, warm = threading.Event(), threading.Semaphore(0)
    with DaemonProcess(FLAGS) as daemon:
        threads = [
            threading.Thread(target=serve, args=(daemon.socket, number, stop, warm)) for number in range(engines)
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in range(engines * warm_requests):
                if not warm.acquire(timeout=60):
                    raise RuntimeError("the engines do not serve")
            yield daemon
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def serve(socket: str, number: int, stop: threading.Event, served: threading.Semaphore) -> None:
    """One engine: prompts of popular beginnings, now and then two requests at a time, until ``stop``."""
    dice = random.Random(number)
    layout = opaque(block_bytes=16384, block_tokens=BLOCK_TOKENS, layers=4)
    with CacheClient(socket, engine=f"engine-{'ab'[number % 2]}") as client:
        registration = client.register("tiny-llm@1", layout, device_pages=[DEVICE_PAGES], host_pages=[HOST_PAGES])
        with client.open_lease(registration) as lease:
            while not stop.is_set():
                try:
                    request(lease, registration.namespace, dice, stop)
                except CacheClientError:
                    if stop.is_set():
                        return
                    stop.wait(0.2)  # the daemon drains, or its host pool still comes
                served.release()


def request(lease: Lease, namespace: bytes, dice: random.Random, stop: threading.Event) -> None:
    """Match, load, compute the rest, publish, hold it for as long as decoding would take, release."""
    keys = block_keys(namespace, prompt(dice), BLOCK_TOKENS)
    blocks = len(keys) // 32
    with lease.match(keys) as sequence:
        sequence.allocate(blocks)
        sequence.wait_loaded(WAIT_SECONDS)
        if sequence.hit_blocks < blocks:
            sequence.publish(blocks)
        stop.wait(dice.uniform(0.01, 0.06))


def prompt(dice: random.Random) -> list[int]:
    """One of a few system prompts, then a conversation that may have been seen before."""
    system = int(dice.paretovariate(0.9)) % 6
    beginning = np.random.default_rng(system).integers(0, 50_000, 16 * BLOCK_TOKENS)
    turns = np.random.default_rng(1000 + 60 * system + int(dice.paretovariate(0.7)) % 60)
    return [*beginning.tolist(), *turns.integers(0, 50_000, dice.choice((8, 16, 24)) * BLOCK_TOKENS).tolist()]
