"""Host pages that this node lends to other nodes and borrows from them, or neither. Part of the composition root."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cachesvc.config import Config
from cachesvc.model.errors import InvalidRequest
from cachesvc.model.text import Address, parse_address, parse_addresses
from cachesvc.peer.borrower import PeerStorage
from cachesvc.peer.fleet import MOST_PEERS, Guests, PeerNames, parse_networks
from cachesvc.peer.lender import Lender
from cachesvc.service.calls.lending import DigestFeed, LendingDesk, PeerLenders
from cachesvc.service.loop.node import Node
from cachesvc.service.rpc.peer_service import GrpcControl, PeerListening, PeerServer, PeerService, PeerTokens
from cachesvc.storage.spec import StorageSpec, TierOptions, WriteWhen, parse_storage
from cachesvc.telemetry import events

ANY_HOST = ("0.0.0.0", "::")  # noqa: S104 - compared, not listened on
DNS = "dns:"
"""Before a name that stands for many peers."""


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """``addresses``: of the peers, the nearest first. ``tier``: how what they lend is waited for. ``names``: stand for
    further peers."""

    addresses: tuple[str, ...]
    tier: TierOptions
    names: tuple[Address, ...] = ()


def check_peers(config: Config) -> PeerSpec | None:
    """Peers that a daemon would ask; None: none. Raises InvalidRequest for impossible settings."""
    for name, address in (("peer_listen", config.peer_listen), ("peer_advertise", config.peer_advertise)):
        if address:
            _check_address(config, name, address)
    if config.peer_advertise and not config.peer_listen:
        raise InvalidRequest("peer_advertise: this node lends nothing; set peer_listen, too")
    for network in parse_networks("peer_allow", config.peer_allow):
        if not network.is_loopback:
            _require_trust(config, "peer_allow", str(network))
    if bool(config.peer_tls_certificate) != bool(config.peer_tls_key) or bool(config.peer_tls_ca) != bool(
        config.peer_tls_key
    ):
        raise InvalidRequest("peer_tls_certificate, peer_tls_key and peer_tls_ca go together: nodes know each other")
    if not 0 <= config.peer_data_port < 1 << 16:
        raise InvalidRequest(f"peer_data_port: {config.peer_data_port} is not a port")
    if not config.peers:
        return PeerSpec((), TierOptions(WriteWhen.NEVER)) if config.peer_allow else None
    spec: StorageSpec = parse_storage(f"peers:{config.peers}", ("peers",))
    spec.check_options(())
    tier = replace(spec.tier, write=WriteWhen.NEVER)
    if config.storage and spec.tier != TierOptions():
        raise InvalidRequest("peers: with storage, the options of both are those of storage")
    texts = [each.strip() for each in spec.where.split(",")]
    names = tuple(
        parse_address("peers", each.removeprefix(DNS), least_port=1) for each in texts if each.startswith(DNS)
    )
    listed = ",".join(each for each in texts if not each.startswith(DNS))
    addresses = parse_addresses("peers", listed, most=MOST_PEERS) if listed or not names else ()
    for address in (*addresses, *(each.removeprefix(DNS) for each in texts)):
        _check_address(config, "peers", address)
    return PeerSpec(addresses, tier, names)


def _check_address(config: Config, name: str, address: str) -> None:
    parsed = parse_address(name, address)
    if not parsed.is_loopback:
        _require_trust(config, name, parsed.host)


def _require_trust(config: Config, name: str, where: str) -> None:
    if not (config.peer_tokens and config.peer_tls_key):
        raise InvalidRequest(
            f"{name}: {where} is not loopback: nodes need peer_tokens and certificates (peer_tls_certificate, "
            "peer_tls_key, peer_tls_ca) to know each other"
        )


class Nodes:
    """``peers``: engine of borrowed pages; None without peers. Raises InvalidRequest for impossible settings."""

    def __init__(self, config: Config) -> None:
        self.spec = check_peers(config)
        self._config = config
        self._tokens = PeerTokens(config.peer_tokens) if config.peer_tokens else None
        files = PeerListening(config.peer_listen, config.peer_tls_certificate, config.peer_tls_key, config.peer_tls_ca)
        self._files = files
        addresses: Sequence[str] = () if self.spec is None else self.spec.addresses
        networks = parse_networks("peer_allow", config.peer_allow)

        def make(address: str, name: str = "") -> GrpcControl:
            return GrpcControl(address, files, self._tokens, name)

        guests = Guests(networks, make, time.monotonic) if networks else None
        room = MOST_PEERS - len(addresses)
        names = PeerNames(self.spec.names, make, self._own, time.monotonic, most=room) if self.spec else None
        controls = [make(each) for each in addresses]
        self.peers = PeerStorage(controls, time.monotonic, guests, names, self._own) if self.spec else None
        self.desk: LendingDesk | None = None
        self._digests: DigestFeed | None = None
        self._lender: Lender | None = None
        self._server: PeerServer | None = None

    def connect(self, node: Node, view: Callable[[int, int, int, int], memoryview]) -> None:
        """Connect to this node's ledger and host pages."""
        config = self._config
        if self.peers is not None:
            PeerLenders(node, self.peers, self._own)
            self.peers.own_epoch = node.epoch
        if not config.peer_listen:
            return
        self.desk = LendingDesk(node, view, config.peer_lease_seconds)
        host = parse_address("peer_listen", config.peer_listen).host
        self._digests = DigestFeed(node)
        self._lender = Lender(self.desk.loans, host, config.peer_data_port)
        service = PeerService(self.desk, self._lender, self._digests, node.epoch)
        self._server = PeerServer(service, self._files, self._tokens)

    def advertised(self) -> str:
        """HOST:PORT at which other nodes reach this one; empty where nothing is lent, or no address says where."""
        if self._config.peer_advertise:
            return self._config.peer_advertise
        if self._server is None:
            return ""
        host = parse_address("peer_listen", self._config.peer_listen).host
        if host in ANY_HOST:
            return ""
        return f"[{host}]:{self._server.port}" if ":" in host else f"{host}:{self._server.port}"

    def _own(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.advertised(), self._config.peer_listen)))

    async def start(self) -> None:
        """Raises a CacheError that says what cannot be had."""
        if self._tokens is not None:
            self._tokens.current()
        if self._lender is not None and self._server is not None:
            self._lender.start()
            await self._server.start()
            events.event("peers_ready", port=self._server.port, data_port=self._lender.port)

    async def close(self) -> None:
        """Lend nothing more: senders are cut, and pins go. Idempotent."""
        if self._server is not None:
            await self._server.close()
        if self._lender is not None:
            self._lender.close()
        if self.desk is not None:
            self.desk.loans.end_all()

    def attention(self) -> list[str]:
        """Sentences about nodes that cannot be borrowed from until an operator does something."""
        out = [] if self._digests is None else self._digests.attention()
        return out if self.peers is None else [*out, *self.peers.attention()]

    def tick(self) -> None:
        """Do periodic work, on the ledger thread."""
        if self.desk is not None:
            self.desk.loans.expire()
        if self._digests is not None:
            self._digests.tick()
