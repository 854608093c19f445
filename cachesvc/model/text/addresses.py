"""Addresses as people write them: one grammar of HOST:PORT for every flag, file and option."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple
from urllib.parse import quote

from cachesvc.model.errors import InvalidRequest

MOST_PORT = 65535

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\.?")
_PORT = re.compile(r"[0-9]{1,5}")


class Address(NamedTuple):
    """``host``: a name, an IPv4 address, or an IPv6 address without brackets."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """True where no other machine can reach it."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """True for a host that no other machine can reach: localhost, 127.0.0.0/8, ::1, and IPv4 in IPv6 of these."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def parse_address(what: str, text: str, *, least_port: int = 0) -> Address:
    """Parse ``HOST:PORT``; an IPv6 address stands in brackets, as in ``[::1]:9464``.

    ``what``: the name of the setting, for the error. Raises InvalidRequest.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or _PORT.fullmatch(port) is None or not least_port <= int(port) <= MOST_PORT:
        raise InvalidRequest(f"{what}: {text!r} is not HOST:PORT with a port from {least_port} to {MOST_PORT}")
    if host.startswith("[") and host.endswith("]"):
        try:
            address = ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            raise InvalidRequest(f"{what}: {text!r} has no IPv6 address between its brackets") from None
        if address.scope_id is not None and _NAME.fullmatch(address.scope_id) is None:
            raise InvalidRequest(f"{what}: {text!r} has no name of a network interface behind its %")
        return Address(str(address), int(port))
    if ":" in host:
        raise InvalidRequest(f"{what}: {text!r} is ambiguous: write an IPv6 address in brackets, such as [::1]:9464")
    if _NAME.fullmatch(host) is None:
        raise InvalidRequest(f"{what}: {text!r} has no name or address of a host before its port")
    return Address(host, int(port))


def parse_addresses(what: str, text: str, *, most: int) -> tuple[str, ...]:
    """Split a list of 1 to ``most`` different HOST:PORT by comma; blanks around a comma do not matter.

    Raises InvalidRequest.
    """
    addresses = tuple(each.strip() for each in text.split(","))
    if not 0 < len(addresses) <= most or len(set(addresses)) < len(addresses):
        raise InvalidRequest(f"{what}: {text!r} is not 1 to {most} different HOST:PORT by comma")
    for each in addresses:
        parse_address(what, each, least_port=1)
    return addresses


def unix_target(path: str) -> str:
    """Return the gRPC target of a unix socket. gRPC parses a URI, so ``%``, ``?`` and ``#`` are escaped."""
    return f"unix:{quote(path)}"
