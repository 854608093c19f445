"""A forked child shares its parent's sockets: it gets an error, and neither speaks nor closes in the parent's name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from cachesvc_client import UsedAfterFork
from cachesvc_client.core.errors import Maker

from tests.unit.rigs.client_rig import FakeDaemon

PARENT = """
import json, os, sys
from cachesvc_client import CacheClient, CacheClientError, EventSubscriber
from cachesvc_client.layouts.families import opaque

def names(calls):
    told = {}
    for name, call in calls.items():
        try:
            call()
            told[name] = "nothing"
        except CacheClientError as error:
            told[name] = type(error).__name__
    return told

with CacheClient(sys.argv[1]) as client:
    registration = client.register("m", opaque(block_bytes=64, block_tokens=4))
    lease = client.open_lease(registration)
    pool, sequence, other = lease.attach(), lease.match(b""), lease.match(b"")
    events = EventSubscriber(sys.argv[1], registration.namespace)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        told = names({
            "match": lambda: lease.match(b""),
            "tables": lambda: sequence.tables,
            "publish": lambda: sequence.publish(1),
            "release": sequence.release,
            "make_sure": lambda: lease.make_sure(1),
            "allocate": lambda: sequence.allocate(1),
            "step": lambda: lease.step().submit(),
            "attach": lease.attach,
            "planes": lambda: pool.planes,
            "register": lambda: client.register("m", registration.layout),
            "reconnect": client.reconnect,
            "pool.close": pool.close,
            "sequence.__exit__": lambda: sequence.__exit__(None, None, None),
            "lease.close": lease.close,
            "lease.__exit__": lambda: lease.__exit__(None, None, None),
            "client.close": client.close,
            "subscribe": lambda: next(events.subscribe()),
            "events.close": events.close,
        })
        told["states"] = [client.connected, lease.is_sure]
        os.write(writing, json.dumps(told).encode())
        del sequence, other, lease, pool, client
        os._exit(0)
    os.close(writing)
    told = json.loads(os.read(reading, 65536))
    os.waitpid(child, 0)
    sequence.allocate(2)
    told["parent"] = [client.connected, lease.is_lost, sequence.blocks, other.release()]
print(json.dumps(told))
"""


def test_a_child_is_told_and_the_parent_goes_on(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path)
    daemon.start()
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", PARENT, daemon.path]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told.pop("parent") == [True, False, 2, 2]
    assert told.pop("states") == [False, False]
    assert set(told.values()) == {"UsedAfterFork"}, told
    assert [len(daemon.seen[rpc]) for rpc in ("Close", "Detach", "Allocate", "Release", "Match")] == [1, 1, 1, 1, 2]
    daemon.close()


def test_a_maker_knows_its_own_process() -> None:
    maker = Maker()
    maker.check()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            maker.check()
        except UsedAfterFork as told:
            os.write(writing, str(told).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert f"of process {os.getpid()} was used in process {child}" in os.read(reading, 4096).decode()
