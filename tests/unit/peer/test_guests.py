"""Peers that requests name: within the permitted networks alone, and a bounded number of them."""

from __future__ import annotations

import pytest

from cachesvc.model.errors import InvalidRequest, PermissionDenied
from cachesvc.peer.fleet import MOST_GUESTS, Guests, parse_networks
from tests.unit.peer.peer_rig import LendingNode, NearControl


class ClosedControl(NearControl):
    """Remembers that it was closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def guests() -> Guests:
    node = LendingNode()
    node.close()
    return Guests(
        parse_networks("peer_allow", "10.0.0.0/8, fd00::/8"), lambda address: ClosedControl(node, address), lambda: 0.0
    )


@pytest.mark.parametrize(
    "address", ["11.0.0.1:7100", "decoder.example:7100", "[fe80::1]:7100", "[::ffff:10.0.0.1]:7100"]
)
def test_what_is_in_no_network_is_refused(guests: Guests, address: str) -> None:
    with pytest.raises(PermissionDenied, match="peer_allow"):
        guests.peer_at(address)


@pytest.mark.parametrize("address", ["10.1.2.3:7100", "[fd00::5]:7100"])
def test_what_is_in_one_is_the_same_peer_each_time(guests: Guests, address: str) -> None:
    assert guests.peer_at(address) is guests.peer_at(address)


def test_the_ones_named_longest_ago_are_closed(guests: Guests) -> None:
    first = guests.peer_at("10.0.0.1:1").control
    for port in range(1, MOST_GUESTS + 1):
        guests.peer_at(f"10.0.1.1:{port}")
    assert len(guests.all()) == MOST_GUESTS
    assert isinstance(first, ClosedControl)
    assert first.is_closed


def test_a_process_that_names_many_takes_no_place_of_another_one(guests: Guests) -> None:
    neighbours = guests.peer_at("10.0.0.1:1", (1, 1))
    for port in range(1, 2 * MOST_GUESTS):
        guests.peer_at(f"10.0.1.1:{port}", (2, 2))
    assert len(guests.all()) == MOST_GUESTS
    assert guests.peer_at("10.0.0.1:1", (1, 1)) is neighbours


@pytest.mark.parametrize("text", ["10.0.0.1/8", "everywhere", ",".join(["10.0.0.0/8"] * 65)])
def test_networks_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="peer_allow"):
        parse_networks("peer_allow", text)
