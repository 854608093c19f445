"""Dynamo's selection service in a process of its own: a JSON request a line, and for each a line with its answer.

["worker", {...}]        register a worker, whose events it follows from then on
["scores", [token, ...]] for each worker: leading blocks on the device, on the host behind, on disk behind
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from typing import Any

ANSWER = "answer "
"""Before each answer: the router logs to the same place."""


async def main() -> None:
    """Serve until standard input ends."""
    service: Any = importlib.import_module("dynamo._core").SelectionService()
    while line := await asyncio.to_thread(sys.stdin.readline):
        what, value = json.loads(line)
        answer: Any = None
        if what == "worker":
            await service.upsert_worker(value | {"kv_events_endpoints": {0: value["kv_events_endpoints"]}})
        else:
            scores = await service.overlap_scores({"model_name": "m", "token_ids": value})
            answer = {
                worker["worker_id"]: [
                    worker["device_blocks"],
                    worker["host_pinned_extension_blocks"],
                    worker["disk_extension_blocks"],
                ]
                for worker in scores["workers"]
            }
        print(ANSWER + json.dumps(answer), flush=True)
    service.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
