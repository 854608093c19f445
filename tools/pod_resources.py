"""Resource requests of a daemon's pod, from its configured sizes.

    python -m tools.pod_resources --overlay gpu                       # of deploy/k8s/overlays/gpu
    python -m tools.pod_resources --config my.toml --gpus 4

Memory is what the pod's cgroup is charged: the host pool, device pools where they are shared memory (GPU memory is not
charged to a pod), and beside them the process, what the CUDA driver takes of the host for each GPU, the ledger, and the
catalogue of storage on disk.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from cachesvc.config import Config, load_config
from cachesvc.storage.file.engine import file_options
from cachesvc.storages import check_storage

KUBERNETES = Path(__file__).resolve().parent.parent / "deploy/k8s"
MIB = 1 << 20
PROCESS_BYTES = 512 * MIB
"""Python, gRPC and their buffers: 130 MiB when idle (Linux 6.18, 2026-11); the rest is for many calls at once."""
GPU_BYTES = 256 * MIB
"""Host memory of a CUDA context: 100 MiB for one H200 (driver 580, 2026-11), and room."""
POOL_BYTES_A_LEDGER_BYTE = 256
"""The ledger takes some 210 bytes a block (benchmarks.ledger), so this holds for blocks of 64 KiB and more."""
STORED_BYTES_A_KNOWN_BYTE = 1024
"""Half a KiB of memory for each object on disk (the catalogue, and its scan), of 512 KiB and more."""
LOOP_MILLICORES = 500
DEVICE_MILLICORES = 250
"""One load and one store thread a device, which mostly wait."""
HOST_GIB_A_CORE = 64
"""A core fills and pins about 1.3 GB/s: a pool is whole within a minute of the start."""


@dataclass(frozen=True, slots=True)
class PodResources:
    """For ``requests``; memory for ``limits`` too."""

    memory_bytes: int
    millicores: int

    def shown(self) -> str:
        """The amount in a manifest's notation."""
        memory = f"{-(-self.memory_bytes // MIB)}Mi"
        return (
            f"resources:\n  requests:\n    cpu: {self.millicores}m\n    memory: {memory}\n"
            f"  limits:\n    memory: {memory}\n"
        )


def resources_of(config: Config, gpus: int) -> PodResources:
    """For a daemon on a node of ``gpus`` GPUs (0: the shm backend's devices count)."""
    devices = gpus or config.shm_devices
    in_memory = config.host_pool + (0 if gpus else devices * config.device_pool)
    ledger = (config.host_pool + devices * config.device_pool) // POOL_BYTES_A_LEDGER_BYTE
    capacities = (file_options(spec).capacity for spec in check_storage(config.storage) if spec.kind == "file")
    stored = sum(capacities) // STORED_BYTES_A_KNOWN_BYTE
    host_cores = config.host_pool / (HOST_GIB_A_CORE << 30)
    millicores = LOOP_MILLICORES + DEVICE_MILLICORES * devices + int(1000 * host_cores)
    return PodResources(in_memory + PROCESS_BYTES + gpus * GPU_BYTES + ledger + stored, -(-millicores // 100) * 100)


def gpus_of(overlay: Path) -> int:
    """Number of GPUs of an overlay's nodes, by the annotation in its patch; 0 where it has none."""
    patch = overlay / "daemonset.yaml"
    found = re.search(r"cachesvc/gpus: \"(\d+)\"", patch.read_text(encoding="utf-8")) if patch.exists() else None
    return int(found[1]) if found else 0


def main() -> None:
    """Print the resources of an overlay, or of a configuration file."""
    parser = argparse.ArgumentParser(description="What a daemon's pod must ask for.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--overlay", metavar="NAME", help="one of deploy/k8s/overlays, or base")
    source.add_argument("--config", metavar="FILE", help="a daemon's TOML file")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of a node (default: the overlay's, or 0)")
    arguments = parser.parse_args()
    folder = KUBERNETES / ("base" if arguments.overlay == "base" else f"overlays/{arguments.overlay}")
    path = Path(arguments.config) if arguments.config else folder / "config.toml"
    gpus = gpus_of(path.parent) if arguments.gpus is None else arguments.gpus
    print(resources_of(load_config(str(path), {}), gpus).shown(), end="")


if __name__ == "__main__":
    main()
