"""Which memory the daemon will own: GPUs or shared memory, and what their links cost. Part of the composition root."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cachesvc.config import Config
from cachesvc.memory import numa
from cachesvc.memory.arbiter import CopyRules
from cachesvc.memory.available import MemoryLimit, memory_limits
from cachesvc.memory.cuda import CudaBackend
from cachesvc.memory.seam import Backend
from cachesvc.memory.shm import ShmBackend
from cachesvc.model.errors import InvalidRequest, Unavailable
from cachesvc.service.host.device_line import DeviceLine
from cachesvc.swap.planner import LinkCosts
from cachesvc.telemetry import events
from gpu_ops.calibration import LinkFigures, calibrate
from gpu_ops.errors import CudaError, CudaMissing
from gpu_ops.gpu import Gpu, find_gpus


@dataclass(frozen=True, slots=True)
class Hardware:
    """The memory that the daemon will own. ``gpus`` are those of the cuda backend.

    ``nodes``: the NUMA node of each device, where there are several and the firmware tells.
    """

    backend: Backend
    gpus: tuple[Gpu, ...] = ()
    nodes: Mapping[str, int] = field(default_factory=dict)


def choose_hardware(config: Config) -> Hardware:
    """What the configuration asks for; ``auto`` takes GPUs where there are some. Nothing is started.

    Raises Unavailable where cuda was asked for and cannot be had.
    """
    if config.backend != "shm":
        try:
            return gpu_hardware(config)
        except CudaMissing as missing:
            if config.backend == "cuda":
                raise Unavailable(f"{missing}; or use --backend shm") from missing
            events.event("no_gpu", reason=str(missing))
        except CudaError as broken:  # a GPU is there: serving without it would hide that
            raise Unavailable(f"the GPU cannot be used: {broken}; see nvidia-smi, or use --backend shm") from broken
    rules = copy_rules(config)
    if config.fault_copies:
        events.warning("copies_are_made_to_fail", share=config.fault_copies)
    backend = ShmBackend(config.shm_devices, config.device_pool, rules=rules, fault_copies=config.fault_copies)
    return Hardware(backend, nodes=dict.fromkeys(backend.devices(), 0) if len(numa.nodes()) > 1 else {})


def copy_rules(config: Config) -> CopyRules:
    """How copies share a link."""
    return CopyRules(
        slice_bytes=config.slice_bytes,
        load_bytes_per_second=config.load_limit,
        store_bytes_per_second=config.store_limit,
    )


def gpu_hardware(config: Config) -> Hardware:
    """Every GPU that this process sees. The host pool is divided among their NUMA nodes."""
    gpus = find_gpus()
    backend = CudaBackend(gpus, config.device_pool, vmm=config.device_memory == "vmm", rules=copy_rules(config))
    nodes = device_nodes({gpu.uuid: gpu.facts.pci for gpu in gpus})
    for node, count in sorted(Counter(nodes.values()).items()):
        events.event("host_pool_node", node=node, gpus=count)
    return Hardware(backend, gpus, nodes)


def device_nodes(devices: Mapping[str, str], sysfs: Path = numa.SYSFS) -> dict[str, int]:
    """NUMA nodes of devices by their PCI addresses: of those whose node is known, where there are several nodes."""
    if len(numa.nodes(sysfs)) < 2:
        return {}
    near = {device: numa.node_of_pci(pci, sysfs) for device, pci in devices.items()}
    return {device: node for device, node in near.items() if node is not None}


def link_costs(config: Config, gpus: tuple[Gpu, ...], tell: Callable[[DeviceLine], None]) -> LinkCosts:
    """Measure started GPUs and tell what each is; the costs are the slowest one's. The default without a GPU.

    Raises Unavailable.
    """
    found: list[LinkFigures] = []
    for gpu in gpus:
        try:
            figures = calibrate(gpu) if config.calibration == "start" else None
        except RuntimeError as error:
            raise Unavailable(
                f"GPU {gpu.uuid} cannot be measured: {error}; see nvidia-smi and ulimit -l, or use --calibration never"
            ) from error
        line = DeviceLine(gpu.uuid, gpu.facts.name, config.device_pool, gpu.context_bytes, figures)
        events.event("device_ready", pci=gpu.facts.pci, free_bytes=gpu.free_bytes(), **line.logged())
        tell(line)
        if figures is not None:
            found.append(figures)
    if not found:
        return LinkCosts()
    slowest = min(found, key=lambda figures: figures.load_bytes_per_us)
    return LinkCosts(
        per_copy_us=slowest.per_copy_us,
        per_row_ns=slowest.per_row_ns,
        bytes_per_us=slowest.load_bytes_per_us,
        per_step_us=slowest.per_step_us,
        max_pitch_bytes=slowest.max_pitch_bytes,
    )


def check_memory(config: Config, hardware: Hardware) -> None:
    """Raises InvalidRequest where device pools would come out of this machine's memory and do not fit."""
    if not hardware.gpus:
        check_shm_memory(config, memory_limits())


def check_shm_memory(config: Config, limits: tuple[MemoryLimit, ...]) -> None:
    """Raises InvalidRequest where pools exceed memory; later, on first use, only the OOM killer would say no."""
    devices = config.shm_devices * config.device_pool
    for limit in limits[:1]:
        if devices + config.host_pool > limit.available_bytes:
            raise InvalidRequest(
                f"{config.shm_devices} shm device pools of {config.device_pool} bytes and a host pool of "
                f"{config.host_pool} need {devices + config.host_pool} bytes, but {limit.source} leaves "
                f"{limit.available_bytes}; ask for smaller pools or raise the limit"
            )
