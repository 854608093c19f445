"""Bystander process of a benchmark: its calls, their latency, and the report."""

from __future__ import annotations

import multiprocessing as mp
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import grpc
from cachesvc_client import CacheClient, Registration
from grpc_health.v1 import health_pb2, health_pb2_grpc

Figures = dict[str, Any]


class Bystander:
    """Makes calls from a process of its own, without a pause, until the ``with`` ends: empty ones, or ``matching`` the
    prompt of these keys under that registration."""

    def __init__(self, socket: str, matching: tuple[Registration, bytes] | None = None) -> None:
        self._arguments = (socket,) if matching is None else (socket, *matching)
        self._target = watch if matching is None else watch_matches
        self._context = mp.get_context("spawn")
        self._stop = self._context.Event()
        self._mine, self._theirs = self._context.Pipe()
        self.figures: Figures = {}

    def __enter__(self) -> Bystander:
        self._process = self._context.Process(target=self._target, args=(self._stop, self._theirs, *self._arguments))
        self._process.start()
        self._mine.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.figures = summary(self._mine.recv())
        self._process.join()


def watch(stop: Event, answer: Connection, socket: str) -> None:
    """Milliseconds of every empty call until the event is set."""
    times: list[float] = []
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        health = health_pb2_grpc.HealthStub(channel)

        def call() -> None:
            health.Check(health_pb2.HealthCheckRequest())

        call()
        answer.send("watching")
        while not stop.is_set():
            times.append(timed(call))
    answer.send(times)


def watch_matches(stop: Event, answer: Connection, socket: str, model: Registration, keys: bytes) -> None:
    """Milliseconds of every Match, by the lane, until the event is set."""
    times: list[float] = []
    with CacheClient(socket, engine="bystander") as client, client.open_lease(model) as lease:
        lease.match(keys).release()
        answer.send("watching")
        while not stop.is_set():
            began = time.perf_counter()
            sequence = lease.match(keys)
            times.append((time.perf_counter() - began) * 1e3)
            sequence.release()
    answer.send(times)


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def summary(times_ms: list[float]) -> Figures:
    """Median, 99th percentile and longest, in milliseconds."""
    ordered = sorted(times_ms)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {"p50": round(statistics.median(ordered), 3), "p99": round(p99, 3), "max": round(ordered[-1], 3)}
