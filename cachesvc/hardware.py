"""Memory that the daemon will own: GPUs or shared memory, and the costs of their links. Part of the composition
root."""

from __future__ import annotations

import errno
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from kvcache.v1.status_pb2 import DeviceStatus

from cachesvc import __version__
from cachesvc.config import Config
from cachesvc.memory import numa
from cachesvc.memory.arbiter import CopyRules
from cachesvc.memory.cuda import CudaBackend
from cachesvc.memory.interface import DeviceMemory
from cachesvc.memory.numa import MemoryLimit, memory_limits
from cachesvc.memory.shm import ShmBackend
from cachesvc.model.errors import InvalidRequest, Unavailable
from cachesvc.model.text import parse_address
from cachesvc.mover.life import ListedGpu, Listing, found
from cachesvc.mover.processes import MoverProcesses
from cachesvc.mover.records import Settings
from cachesvc.swap.movers import InProcessMovers
from cachesvc.swap.planner import H100_COSTS, LinkCosts, costs_of
from cachesvc.telemetry import events
from gpu_ops.calibration import BUFFER_BYTES, LinkFigures, calibrate
from gpu_ops.driver import CudaError, CudaMissing
from gpu_ops.gpu import Gpu, find_gpus


@dataclass(frozen=True, slots=True)
class Hardware:
    """Movers of the memory that the daemon will own. ``gpus`` are those that this process drives itself.

    ``nodes``: the NUMA node of each device, where there are several and the firmware tells.
    """

    movers: InProcessMovers | MoverProcesses
    gpus: tuple[Gpu, ...] = ()
    nodes: Mapping[str, int] = field(default_factory=dict)

    @property
    def backend(self) -> DeviceMemory:
        return self.movers.memory

    @property
    def has_processes(self) -> bool:
        """True where movers are processes: a device that broke comes back by itself, and host memory is files."""
        return isinstance(self.movers, MoverProcesses)

    def tell_losses(self, lost: Callable[[str, str], None]) -> None:
        """Tell ``lost(device, why)``, from a thread, when the slabs of a device are gone with its mover."""
        if isinstance(self.movers, MoverProcesses):
            self.movers.tell_losses(lost)

    def share_claim(self, claim: Callable[[], tuple[int, ...]]) -> None:
        """Have movers in processes of their own hold the daemon's lock, whose descriptor ``claim`` gives."""
        if isinstance(self.movers, MoverProcesses):
            self.movers.share_claim(claim)

    def hurry(self) -> None:
        """The daemon stops: wait for no process of a device that hangs."""
        if isinstance(self.movers, MoverProcesses):
            self.movers.hurry()


def choose_hardware(config: Config, listing: Listing | None = None) -> Hardware:
    """Hardware that the configuration asks for; ``auto`` takes GPUs where there are some. Nothing is started.
    ``listing``: of the GPUs, where that has begun.

    Raises Unavailable where cuda was asked for and cannot be had.
    """
    if config.backend != "shm":
        try:
            return gpu_hardware(config, listing)
        except CudaMissing as missing:
            if config.backend == "cuda":
                raise Unavailable(f"{missing}; or use --backend shm") from missing
            events.event("no_gpu", reason=str(missing))
        except CudaError as broken:  # a GPU is there: serving without it would hide that
            raise Unavailable(f"the GPU cannot be used: {broken}; see nvidia-smi, or use --backend shm") from broken
    if config.fault_copies:
        events.warning("copies_are_made_to_fail", share=config.fault_copies)
    names = tuple(f"shm-{number}" for number in range(config.shm_devices))
    nodes = dict.fromkeys(names, 0) if len(numa.nodes()) > 1 else {}
    if config.movers != "inside":
        return Hardware(processes("shm", config, names), nodes=nodes)
    rules, faults = copy_rules(config), config.fault_copies
    return Hardware(
        InProcessMovers(ShmBackend(len(names), config.device_pool, rules=rules, fault_copies=faults)), nodes=nodes
    )


def uses_vmm(config: Config, lacking: Sequence[str]) -> bool:
    """True where device pools are VMM memory, which a later daemon can map in place of an earlier one's.

    ``lacking``: devices whose driver has none; under ``auto`` one of them is enough for IPC handles on all, since
    replicas on several devices share.
    """
    if config.device_memory != "auto":
        return config.device_memory == "vmm"
    if lacking:
        events.warning("device_memory_by_handles", devices=",".join(lacking))
    return not lacking


def processes(
    kind: str,
    config: Config,
    devices: Sequence[str],
    reaches: frozenset[tuple[str, str]] | None = None,
    *,
    vmm: bool = False,
) -> MoverProcesses:
    """A mover in a process of its own for each device. Raises InvalidRequest where those that run already are not as
    many."""
    if config.mover and len(config.mover) != len(devices):
        raise InvalidRequest(f"{len(config.mover)} movers for {len(devices)} devices: {', '.join(devices)}")
    settings = [
        Settings(
            kind,
            device,
            config.device_pool,
            vmm=vmm,
            slice_bytes=config.slice_bytes,
            load_limit=config.load_limit,
            store_limit=config.store_limit,
            fault_copies=config.fault_copies,
            log_level=config.log_level,
        )
        for device in devices
    ]
    return MoverProcesses(
        settings, __version__, begins=[partial(found, path) for path in config.mover], reaches=reaches
    )


def copy_rules(config: Config) -> CopyRules:
    """Rules by which copies share a link."""
    return CopyRules(
        slice_bytes=config.slice_bytes,
        load_bytes_per_second=config.load_limit,
        store_bytes_per_second=config.store_limit,
    )


def gpu_hardware(config: Config, listing: Listing | None = None) -> Hardware:
    """Every GPU that this process sees. The host pool is divided among their NUMA nodes.

    Raises CudaMissing, CudaError."""
    if config.movers != "inside":
        return _gpus_of_movers(config, listing or Listing())
    gpus = find_gpus()
    vmm = uses_vmm(config, [gpu.uuid for gpu in gpus if not gpu.facts.has_vmm])
    backend = CudaBackend(gpus, config.device_pool, vmm=vmm, rules=copy_rules(config))
    return Hardware(InProcessMovers(backend), gpus, _told_nodes({gpu.uuid: gpu.facts.pci for gpu in gpus}))


def _gpus_of_movers(config: Config, listing: Listing) -> Hardware:
    told = listing.gpus()
    if "absent" in told:
        raise CudaMissing(told["absent"])
    if "broken" in told:
        raise Unavailable(f"the GPU cannot be used: {told['broken']}; see nvidia-smi, or use --backend shm")
    gpus: list[ListedGpu] = told["gpus"]
    reaches = frozenset((source, gpu["uuid"]) for gpu in gpus for source in gpu["reaches"])
    vmm = uses_vmm(config, [gpu["uuid"] for gpu in gpus if not gpu["has_vmm"]])
    movers = processes("cuda", config, [gpu["uuid"] for gpu in gpus], reaches, vmm=vmm)
    return Hardware(movers, nodes=_told_nodes({gpu["uuid"]: gpu["pci"] for gpu in gpus}))


def _told_nodes(devices: Mapping[str, str]) -> dict[str, int]:
    nodes = device_nodes(devices)
    for node, count in sorted(Counter(nodes.values()).items()):
        events.event("host_pool_node", node=node, gpus=count)
    return nodes


def device_nodes(devices: Mapping[str, str], sysfs: Path = numa.SYSFS) -> dict[str, int]:
    """NUMA nodes of devices by their PCI addresses: of those whose node is known, where there are several nodes."""
    if len(numa.nodes(sysfs)) < 2:
        return {}
    near = {device: numa.node_of_pci(pci, sysfs) for device, pci in devices.items()}
    return {device: node for device, node in near.items() if node is not None}


def measure_links(config: Config, hardware: Hardware, tell: Callable[[DeviceStatus], None]) -> None:
    """Measure the links of started devices, tell what each is, and have the movers plan by that. Raises Unavailable
    where none can be measured."""
    movers = hardware.movers
    if isinstance(movers, InProcessMovers):
        movers.plan_by(link_costs(config, hardware.gpus, tell))
        return
    if movers.name != "cuda":
        return
    measured = movers.measure() if config.calibration == "start" else {}
    if budget := movers.budget.bytes_per_second:
        events.event("background_copies_budgeted", gb_per_second=round(budget / 1e9, 2))
    for device in movers.devices():
        try:
            facts = movers.facts(device)
        except Unavailable:
            tell(DeviceStatus(uuid=device, pool_bytes=config.device_pool))
            continue
        figures = LinkFigures(**measured[device]) if device in measured else None
        status = device_status(device, facts["name"], config.device_pool, facts["context_bytes"], figures)
        if figures is not None or config.calibration != "start":
            log_ready(status, facts["pci"], facts["free_bytes"])
        tell(status)


def link_costs(config: Config, gpus: tuple[Gpu, ...], tell: Callable[[DeviceStatus], None]) -> LinkCosts:
    """Measure started GPUs and tell what each is; the costs are the slowest one's. The default without a GPU.

    Raises Unavailable.
    """
    figured: list[LinkFigures] = []
    for gpu in gpus:
        try:  # one after another: they share the time that a start may take
            figures = calibrate(gpu, buffer_bytes=BUFFER_BYTES // len(gpus)) if config.calibration == "start" else None
        except RuntimeError as error:
            raise Unavailable(
                f"GPU {gpu.uuid} cannot be measured: {error}; see nvidia-smi and ulimit -l, or use --calibration never"
            ) from error
        status = device_status(gpu.uuid, gpu.facts.name, config.device_pool, gpu.context_bytes, figures)
        log_ready(status, gpu.facts.pci, gpu.free_bytes())
        tell(status)
        if figures is not None:
            figured.append(figures)
    if not figured:
        return H100_COSTS if gpus else LinkCosts()
    return costs_of(asdict(min(figured, key=lambda figures: figures.load_bytes_per_us)))


def device_status(uuid: str, name: str, pool_bytes: int, context_bytes: int, link: LinkFigures | None) -> DeviceStatus:
    """One device as operators see it. ``link`` is None where it was not measured."""
    status = DeviceStatus(uuid=uuid, name=name, pool_bytes=pool_bytes, context_bytes=context_bytes)
    if link is not None:
        status.load_gb_per_second = round(link.load_bytes_per_us / 1e3, 2)
        status.store_gb_per_second = round(link.store_bytes_per_us / 1e3, 2)
        status.both_gb_per_second = round(link.both_bytes_per_us / 1e3, 2)
        status.copy_us = round(link.per_copy_us, 2)
        status.row_ns = round(link.per_row_ns, 1)
        status.step_us = round(link.per_step_us, 2)
        status.narrow_plane_bytes = link.narrow_plane_bytes
    return status


def log_ready(status: DeviceStatus, pci: str, free_bytes: int) -> None:
    """Log a device with its figures; an event has a name of its own, so its ``uuid`` and ``name`` have others there."""
    figures = {field.name: value for field, value in status.ListFields() if field.name not in ("uuid", "name")}
    known = {"device": status.uuid, "device_name": status.name, **figures}
    events.event("device_ready", pci=pci, free_bytes=free_bytes, **known)


WAYS_IN = (
    ("listen", "cannot listen on"),
    ("health_listen", "cannot answer probes on"),
    ("metrics_listen", "cannot serve metrics on"),
    ("web_listen", "cannot serve the page on"),
    ("peer_listen", "cannot listen for other nodes on"),
)


NO_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors of an address that this machine does not have."""


def check_ports(config: Config) -> None:
    """Raises Unavailable for the first configured address that this machine cannot serve on, before any pool is
    filled."""
    for words, flag, text, reason in find_ports(config):
        if reason:
            raise Unavailable(f"{words} {text}: {reason}; choose another {flag} (ss -ltnp shows who has a port)")


def find_ports(config: Config) -> Iterator[tuple[str, str, str, str]]:
    """Configured addresses: how a refusal begins, the flag, the address, and why it cannot be served on, or nothing."""
    for name, words in WAYS_IN:
        if text := str(getattr(config, name)):
            yield words, "--" + name.replace("_", "-"), text, port_trouble(*parse_address(name, text))


def port_trouble(host: str, port: int) -> str:
    """Reason why a TCP server cannot have an address; empty where it can. Of a name with several addresses, this
    machine need not have all: localhost is ::1 too where there is no IPv6."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return f"{error.strerror}"
    absent = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen(1)
        except OSError as error:
            if error.errno not in NO_ADDRESS:
                return f"{error.strerror}"
            absent.append(f"{error.strerror}")
    return absent[0] if len(absent) == len(found) else ""


def check_machine(config: Config, hardware: Hardware) -> None:
    """Raises Unavailable for an address that is taken, InvalidRequest where device pools would come out of this
    machine's memory and do not fit. An ending daemon has given both back by the time that its socket is free."""
    check_ports(config)
    if hardware.backend.name == "shm":
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
