"""Peers behind a name that stands for many nodes, such as a headless Service: looked up again and again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence

from cachesvc.model.text.addresses import Address
from cachesvc.peer.fleet.control import PeerControl
from cachesvc.peer.fleet.health import Peer
from cachesvc.telemetry import events

LOOK_UP_SECONDS = 10.0
MOST_PEERS = 256
"""Most peers, those with an address of their own included."""

Resolve = Callable[[str, int], Sequence[str]]
"""Addresses of a name at a port, without repetition. Raises OSError."""


def resolve_name(name: str, port: int) -> list[str]:
    """Addresses of a name, as the system resolves it. Raises OSError."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = dict.fromkeys(str(each[4][0]) for each in found)
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]


class PeerNames:
    """``names``: to look up. ``make``: gives the control of an address and the name that it was found by. ``own``: this
    node's own addresses. ``told``: gets the peers that there are, whenever these have changed. ``most``: peers beside
    those with an address of their own."""

    def __init__(
        self,
        names: Sequence[Address],
        make: Callable[[str, str], PeerControl],
        own: Callable[[], Sequence[str]],
        clock: Callable[[], float],
        resolve: Resolve = resolve_name,
        most: int = MOST_PEERS,
    ) -> None:
        self._names = tuple(names)
        self._make = make
        self._own = own
        self._clock = clock
        self._resolve = resolve
        self._most = most
        self._peers: dict[str, Peer] = {}
        self._found: dict[Address, Sequence[str]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peer-names", daemon=True)
        self.told: Callable[[Sequence[Peer]], None] | None = None

    def start(self) -> None:
        """Begin to look up."""
        if self._names:
            self._thread.start()

    def close(self) -> None:
        """Look up nothing more. Does not wait for the system's answer. Idempotent."""
        self._stopping.set()

    def look_up(self) -> None:
        """Look all names up once. A name that cannot be looked up stands for what it stood for."""
        for name in self._names:
            try:
                self._found[name] = self._resolve(name.host, name.port)
            except OSError as error:
                events.warning("peer_name_unknown", peers=f"{name.host}:{name.port}", reason=str(error))
        own = set(self._own())
        wanted = {each: name.host for name, found in self._found.items() for each in found if each not in own}
        kept = dict(list(wanted.items())[: self._most])
        if kept.keys() == self._peers.keys():
            return
        gone = [peer for address, peer in self._peers.items() if address not in kept]
        self._peers = {
            address: self._peers.get(address) or Peer(self._make(address, host), self._clock)
            for address, host in kept.items()
        }
        events.event("peers_changed", peers=len(self._peers), left_out=len(wanted) - len(kept))
        if self.told is not None:
            self.told(tuple(self._peers.values()))
        for peer in gone:
            peer.control.close()

    def _run(self) -> None:
        """Root of the thread."""
        while True:
            try:
                self.look_up()
            except Exception:  # noqa: BLE001 - the root of a thread: the next time may be better
                events.failure("peer_names_broke")
            if self._stopping.wait(LOOK_UP_SECONDS):
                return
