"""Names that stand for many peers: these come and go, and a name that cannot be looked up changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from cachesvc.model.text import Address
from cachesvc.peer.fleet import MOST_PEERS, Peer, PeerNames, resolve_name
from tests.unit.peer.peer_rig import LendingNode, NearControl

NAME = Address("cachesvc.example", 7100)


class Zone:
    """Hosts that the name stands for; None: it cannot be looked up."""

    def __init__(self, most: int = MOST_PEERS) -> None:
        self.hosts: list[str] | None = []
        self.told: list[list[str]] = []
        self.closed: list[str] = []
        node = LendingNode()
        node.close()
        zone = self

        class Control(NearControl):
            def close(self) -> None:
                zone.closed.append(self.address)

        self.names = PeerNames(
            [NAME],
            lambda address, _: Control(node, address),
            lambda: ["10.0.0.9:7100"],
            lambda: 0.0,
            self.resolve,
            most,
        )
        self.names.found = self.note

    def resolve(self, name: str, port: int) -> Sequence[str]:
        if self.hosts is None:
            raise OSError("no such name")
        return [f"{host}:{port}" for host in self.hosts]

    def note(self, peers: Sequence[Peer]) -> None:
        self.told.append([peer.control.address for peer in peers])

    def look_up(self, *hosts: str) -> None:
        self.hosts = list(hosts)
        self.names.look_up()


def test_nodes_come_and_go_and_this_one_is_left_out() -> None:
    zone = Zone()
    zone.look_up("10.0.0.1", "10.0.0.9")
    zone.look_up("10.0.0.1", "10.0.0.2", "10.0.0.9")
    zone.look_up("10.0.0.1", "10.0.0.2")
    zone.look_up("10.0.0.2")
    assert zone.told == [["10.0.0.1:7100"], ["10.0.0.1:7100", "10.0.0.2:7100"], ["10.0.0.2:7100"]]
    assert zone.closed == ["10.0.0.1:7100"]


def test_a_name_that_cannot_be_looked_up_stands_for_what_it_stood_for() -> None:
    zone = Zone()
    zone.look_up("10.0.0.1")
    zone.hosts = None
    zone.names.look_up()
    assert zone.told == [["10.0.0.1:7100"]]
    assert not zone.closed


def test_there_are_only_so_many() -> None:
    zone = Zone(most=MOST_PEERS - 6)
    zone.look_up(*(f"10.0.{number // 256}.{number % 256}" for number in range(300)))
    assert len(zone.told[-1]) == 250


def test_the_systems_names_are_understood() -> None:
    assert "127.0.0.1:7100" in resolve_name("localhost", 7100)
