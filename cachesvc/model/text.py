"""Addresses as people write them: one grammar of HOST:PORT for every flag, file and option."""

from __future__ import annotations

import argparse
import ipaddress
import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fractions import Fraction
from typing import Any, NamedTuple, NoReturn
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


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says what is wrong and where help is, without all usage before it. Exits with 2 then."""

    def error(self, message: str) -> NoReturn:
        """Write one line to standard error and exit with 2."""
        self.exit(2, f"{self.prog}: {message}{'' if message.endswith('?') else ';'} see {self.prog} --help\n")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse known arguments; an unknown argument is an error of this parser: a command's flags are its own."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = re.findall(r"(?<![\w-])--[\w-]+", self.format_usage())
            hint = did_you_mean(unknown[0].partition("=")[0], flags, "")
            self.error(f"unknown argument {unknown[0]}{hint and ', '}{hint}")
        return found, unknown


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this interpreter.

    ``-P`` keeps the working directory off the module search path. With ``-m`` alone the child imports a file
    ``random.py`` there: code execution where the daemon runs as root in a user's folder.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


LIKENESS = 0.75
"""Share of letters in common: a letter left out, added or swapped in a name. Below it, short names look like any."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """``did you mean 'status'?``, or ``otherwise`` where none of the known names is close."""
    near = get_close_matches(name, list(known), 1, LIKENESS)
    return f"did you mean {near[0]!r}?" if near else otherwise


def one_line(text: str) -> str:
    """Escape what a terminal would act on: control characters, newlines, and marks that change the writing direction.

    Names of models, engines and tenants come from callers. Printed as they are they could clear an operator's screen or
    forge a row of a table. Escaped text is not escaped again.
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


MOST_BYTES = 1 << 60
"""1 EiB: beyond any memory, and far below where a number of bytes no longer fits 64 bits."""

LEAST_AMOUNT_BYTES = 1 << 20
MOST_LIKELY_GIB = 4096
"""Numbers above it are likelier of MiB."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?b?)|b)?\s*", re.IGNORECASE | re.ASCII)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_LONGEST = 64


def parse_size(text: object) -> int:
    """Bytes of a size, rounded down. Raises InvalidRequest.

    ``4096`` and ``4096B`` are bytes; ``2k``, ``2Ki`` (as in Kubernetes) and ``2KiB`` are 2048, ``2KB`` 2000 of them;
    likewise M, G and T. A fraction may come before a unit, and capitals do not matter.
    """
    written = str(text)
    match = _SIZE.fullmatch(written) if len(written) <= _LONGEST else None
    if match is None:
        shown = repr(text if len(written) <= _LONGEST else f"{written[:_LONGEST]}...")
        raise InvalidRequest(
            f"{shown} is not a size; write a number of bytes, or one with KiB, MiB, GiB or TiB, e.g. 8GiB"
        )
    base = 1000 if (match[3] or "").lower() == "b" else 1024
    size = Fraction(match[1]) * base ** _POWERS.get((match[2] or "").lower(), 0)
    if size > MOST_BYTES:
        raise InvalidRequest(f"{written} is more than memory can have: at most {MOST_BYTES} bytes (1 EiB)")
    return int(size)


def parse_amount(text: object) -> int:
    """Bytes of a memory, a disk or a second, as ``parse_size``: a bare number below 1 MiB is no such amount, but one
    whose unit was left out. Raises InvalidRequest."""
    size = parse_size(text)
    if 0 < size < LEAST_AMOUNT_BYTES and str(text).strip().isdecimal():
        raise InvalidRequest(f"{size} is {size} bytes; did you mean {size}{_probable_unit(size)}? Bytes are {size}B")
    return size


def describe_bytes(count: float) -> str:
    """A number of bytes with a binary unit, four digits at most before the point: ``12 B``, ``3.42 GiB``."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.2f} {unit}"
    return f"{count / 1024:,.2f} TiB"


def _probable_unit(number: int) -> str:
    return "GiB" if number < MOST_LIKELY_GIB else "MiB"
