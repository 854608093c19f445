"""Another process that maps memory of a test's: it prints the digest of what it sees and turns every bit."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys

import numpy as np

from gpu_ops.gpu import gpu_by_uuid, started
from gpu_ops.memory import close_ipc, map_fd, open_ipc, unmap
from tests.gpu.rig import write_device


def main() -> None:
    """``{"uuid", "size_bytes"}`` with ``"handle"`` (hex), or with ``"socket"``, over which a descriptor comes."""
    request = json.loads(sys.argv[1])
    size = request["size_bytes"]
    with started(gpu_by_uuid(request["uuid"])) as gpu:
        if "handle" in request:
            with gpu.current() as cuda:
                address = open_ipc(cuda, bytes.fromhex(request["handle"]))
        else:
            with socket.socket(fileno=request["socket"]) as connection:
                _, (descriptor,), _, _ = socket.recv_fds(connection, 1, 1)
            with gpu.current() as cuda:
                address = map_fd(cuda, gpu.facts.ordinal, descriptor, size)
            os.close(descriptor)
        seen = gpu.read(address, size)
        write_device(gpu, address, np.bitwise_not(np.frombuffer(seen, np.uint8)).tobytes())
        with gpu.current() as cuda:
            if "handle" in request:
                close_ipc(cuda, address)
            else:
                unmap(cuda, address, size)
    print(hashlib.sha256(seen).hexdigest())


if __name__ == "__main__":
    main()
