"""Peers that a request names: asked only where the operator permits their networks, and forgotten when others come.

Where there are too many, the process whose requests name most loses one: others keep theirs.
"""

from __future__ import annotations

import ipaddress
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from cachesvc.model.errors import InvalidRequest, PermissionDenied
from cachesvc.model.numbers.sharing import BACKGROUND, Party
from cachesvc.model.text.addresses import parse_address
from cachesvc.peer.fleet.control import PeerControl
from cachesvc.peer.fleet.health import Peer

MOST_GUESTS = 256
MOST_NETWORKS = 64

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_networks(what: str, text: str) -> tuple[Network, ...]:
    """Parse networks by comma, such as ``10.0.0.0/8,fd00::/8``. Raises InvalidRequest."""
    texts = [each.strip() for each in text.split(",") if each.strip()]
    if len(texts) > MOST_NETWORKS:
        raise InvalidRequest(f"{what}: {len(texts)} networks, and there are at most {MOST_NETWORKS}; name larger ones")
    try:
        return tuple(map(ipaddress.ip_network, texts))
    except ValueError as error:
        raise InvalidRequest(f"{what}: {error}; write networks as 10.0.0.0/8, by comma") from error


class Guests:
    """Peers within ``networks``, each with a control that ``make`` gives for its address. Any thread."""

    def __init__(
        self, networks: Sequence[Network], make: Callable[[str], PeerControl], clock: Callable[[], float]
    ) -> None:
        self._networks = tuple(networks)
        self._make = make
        self._clock = clock
        self._peers: OrderedDict[str, tuple[Peer, Party]] = OrderedDict()
        self._lock = threading.Lock()

    def peer_at(self, address: str, party: Party = BACKGROUND) -> Peer:
        """The peer at HOST:PORT, which ``party`` names now. Raises InvalidRequest, and PermissionDenied where it is in
        none of the networks."""
        host = parse_address("peer", address, least_port=1).host
        if not self._permits(host):
            raise PermissionDenied(
                f"{address} is none of this node's peers, and {host} is not in a network of peer_allow; add one of them"
            )
        with self._lock:
            known = self._peers.get(address)
            peer = Peer(self._make(address), self._clock) if known is None else known[0]
            self._peers[address] = peer, party
            self._peers.move_to_end(address)
            gone = self._take_one() if len(self._peers) > MOST_GUESTS else None
        if gone is not None:
            gone.control.close()
        return peer

    def _take_one(self) -> Peer:
        """Under the lock: of the party with most guests the one that was named longest ago."""
        [(most, _)] = Counter(party for _, party in self._peers.values()).most_common(1)
        return self._peers.pop(next(at for at, (_, party) in self._peers.items() if party == most))[0]

    def all(self) -> list[Peer]:
        """Peers that were named lately."""
        with self._lock:
            return [peer for peer, _ in self._peers.values()]

    def _permits(self, host: str) -> bool:
        """True for an address in one of the networks. A name is none: it can mean another address the next time."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address.version == each.version and address in each for each in self._networks)
