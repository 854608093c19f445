"""One command of ``cachesvc``: its name, one line about it, its flags, and what it does."""

from __future__ import annotations

import argparse
import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import grpc
from cachesvc_client.wire.credentials import PATIENT_OPTIONS, Credentials, credentials_from, open_remote
from cachesvc_client.wire.settings import DEFAULT_SOCKET, ChannelOptions, as_path, default_target
from google.protobuf.message import Message
from kvcache.v1 import admin_pb2_grpc

from cachesvc.model.text import describe_bytes, one_line
from cachesvc.wire.plain import plain

MOST = 2**31 - 1
MOST_LISTED = 4096
"""Length of the daemon's longest answer; the daemon reduces a greater limit to it."""


class Flag:
    """A flag or a word, as ``ArgumentParser.add_argument`` takes it."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self._names = names
        self._settings = settings

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Add it to a parser, or to a group of one."""
        parser.add_argument(*self._names, **self._settings)


flag = Flag
"""Written as a call of ``add_argument``."""


class Command(ABC):
    """A command as it was typed; ``arguments`` are its flags' values."""

    name: ClassVar[str]
    about: ClassVar[str]
    """Summary in one line, for the list of commands."""
    epilog: ClassVar[str] = ""
    flags: ClassVar[tuple[Flag, ...]] = ()

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments

    @classmethod
    def add_to(cls, commands: Any) -> None:
        parser = commands.add_parser(cls.name, help=cls.about, description=cls.about, epilog=cls.epilog)
        cls.add_flags(parser)
        parser.set_defaults(command=cls)

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        for each in cls.flags:
            each.add_to(parser)

    @abstractmethod
    def run(self) -> int:
        """Do it; the exit code: 0 well, 1 a check found something. Raises what ``main`` makes one line and 2 of."""


class DaemonCommand(Command):
    """Command that asks a daemon, which flags or the environment name."""

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """Add its flags, and those of the daemon."""
        super().add_flags(parser)
        add_target(parser)

    @property
    def target(self) -> Target:
        """Target daemon and credentials. Raises InvalidRequest."""
        return target_of(self.arguments)


def number(least: int, most: int = MOST) -> Callable[[str], int]:
    """Type of a number in a range, for argparse."""

    def parsed(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return parsed


count, at_least_one = number(0), number(1)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0.1 and 3600 seconds")
    return value


def hex_digits(text: str) -> str:
    """A key, or its first digits, for argparse."""
    digits = text.lower().removeprefix("0x")
    if not digits or set(digits) - set("0123456789abcdef"):
        raise argparse.ArgumentTypeError(f"{text!r} is not hexadecimal")
    return digits


STDIN = "-"
SILENT = ("SETTINGS frame", "Deadline Exceeded", "DEADLINE_EXCEEDED")
"""gRPC's words for a socket whose process takes connections and does not answer."""
PLAIN = {
    "No such file": "nothing listens there: no such file",
    "Connection refused": "nothing listens there: its daemon has ended",
    **dict.fromkeys(SILENT, "it takes connections and does not answer"),
}


@dataclass(frozen=True)
class Target:
    """A daemon: the path of its socket or HOST:PORT, and what its caller proves itself by."""

    address: str
    credentials: Credentials

    def open(self) -> grpc.Channel:
        """A channel that proves itself with every call. Raises InvalidRequest for files that cannot be read."""
        return open_remote(self.address, self.credentials)

    def make_channel(self, socket_path: str, options: ChannelOptions = PATIENT_OPTIONS) -> grpc.Channel:
        """Make a channel, for callers that do so by path and options."""
        return open_remote(socket_path, self.credentials, options)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name the daemon, and those of the operator's credentials."""
    group = parser.add_argument_group("the daemon, and credentials")
    one = group.add_mutually_exclusive_group().add_argument
    one("--socket", metavar="PATH", help=f"its unix socket (else CACHESVC_SOCKET, else {DEFAULT_SOCKET})")
    one("--address", metavar="HOST:PORT", help="over TCP instead (else CACHESVC_ADDRESS)")
    add = group.add_argument
    add("--token-file", metavar="FILE", help="file with the token, or - (else CACHESVC_TOKEN, CACHESVC_TOKEN_FILE)")
    roots = "TLS for TCP: PEM roots that sign the daemon's certificate, or system (else CACHESVC_TLS_CA)"
    add("--tls-ca", default="", metavar="FILE", help=roots)
    add("--tls-certificate", default="", metavar="FILE", help="PEM certificate of one's own")
    add("--tls-key", default="", metavar="FILE", help="its key")


def target_of(arguments: argparse.Namespace) -> Target:
    """Target that those flags, or the environment, name. Raises InvalidRequest for files that do not go together."""
    found = credentials_from(*_said(arguments.token_file))
    roots = arguments.tls_ca or found.root_ca
    proof = replace(found, root_ca=roots, certificate=arguments.tls_certificate, key=arguments.tls_key)
    return Target(address_of(arguments), proof)


def _said(token_file: str | None) -> tuple[str | None, str | None]:
    """A token and a token file; one that comes by standard input is read here, since it can be read but once."""
    return (sys.stdin.read().strip(), None) if token_file == STDIN else (None, token_file)


def address_of(arguments: argparse.Namespace) -> str:
    """HOST:PORT or the path of a socket: as typed, else as the environment says."""
    address, path = getattr(arguments, "address", None), getattr(arguments, "socket", None)
    return str(address or (as_path(path) if path else default_target()))


def no_answer(failure: grpc.RpcError, arguments: argparse.Namespace) -> str:
    """Message for an operator where no daemon answers at ``arguments``' socket or address."""
    told = getattr(failure, "details", None)  # calls have it, mere errors of gRPC do not
    reason = str(told() if told is not None else failure).removeprefix(
        "failed to connect to all addresses; last error: "
    )
    address = address_of(arguments)
    is_tls = bool(getattr(arguments, "tls_ca", "") or getattr(arguments, "tls_certificate", ""))
    if not address.startswith(("/", ".")):
        return f"no answer from {address} ({reason}); {_address_hint(reason, is_tls)}"
    return f"no answer from {address} ({_plain(reason)}); {_socket_hint(reason)}"


def _plain(reason: str) -> str:
    """Reason that gRPC gives for a unix socket, without its codes and the path that it repeats."""
    return next((said for words, said in PLAIN.items() if words in reason), reason)


def _socket_hint(reason: str) -> str:
    if "Permission denied" in reason:
        return "that socket is closed to this user: be the daemon's user, or in its --socket-group"
    if any(words in reason for words in SILENT):
        return "the daemon is stopped or stuck: see the end of its log, and kill -CONT or restart it"
    return "is the daemon running on that --socket? start cachesvcd, or name its socket in CACHESVC_SOCKET"


def _address_hint(reason: str, is_tls: bool) -> str:
    said = reason.lower()
    if "ssl" in said or "tls" in said or "verification" in said:
        return "does it speak TLS, for that name, by a certificate of --tls-ca? see also --tls-certificate, --tls-key"
    if "socket closed" not in said and "reset" not in said:
        return "is the daemon running with that --listen?"
    # Something took the connection and hung up: what a TLS port does with plain text, and without a certificate.
    if is_tls:
        return "it hung up: does it ask for a client's TLS certificate (--tls-certificate, --tls-key)?"
    return "it hung up: a TLS port wants --tls-ca, and where it asks for them --tls-certificate and --tls-key"


__all__ = ["describe_bytes", "for_terminal", "left_out", "one_line", "table"]


def for_terminal(text: str) -> str:
    """Escape each line of a text of several."""
    return "\n".join(map(one_line, text.split("\n")))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns; numbers to the right. Cells are escaped by ``one_line``. Without rows: ``none``."""
    if not rows:
        return "none"
    cells = [list(head), *([f"{c:,}" if isinstance(c, int) else one_line(str(c)) for c in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    right = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(head))]
    lines = [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)).rstrip()
        for line in cells
    ]
    return "\n".join(lines)


class Table:
    """Columns of a listing, as ``title=cell | ...``; a title like its cell can be left out.

    A cell is a field of the row, or a format string of its fields in braces; ``?`` behind it shows a dash where it is
    empty. Fields of bytes are worded. ``made``: cells that are computed from the row, by name.
    """

    def __init__(self, columns: str, **made: Callable[[Any], object]) -> None:
        parts = [each.strip().rpartition("=") for each in columns.split("|")]
        self._head = [title if sign else cell.rstrip("?") for title, sign, cell in parts]
        self._cells = [made.get(cell) or partial(_cell, cell) for _, _, cell in parts]

    def text(self, rows: Iterable[object]) -> str:
        return table(self._head, [[cell(row) for cell in self._cells] for row in rows])


def _cell(cell: str, row: object) -> object:
    name = cell.removesuffix("?")
    value: Any = re.sub(r"{(\w+)", r"{0.\1", name).format(row) if "{" in name else attrgetter(name)(row)
    if name.endswith("_bytes"):
        return describe_bytes(value)
    if not isinstance(value, str | int | float):
        value = " ".join(map(str, value))
    return value or "-" if name != cell else value


def left_out(*flags: str) -> str:
    """A last line where there is more than was shown; ``flags``: those that held it back and can be raised."""
    return f"\n(more are there; raise {' and '.join(flags)})" if flags else "\n(more are there)"


def as_json(message: Message) -> str:
    return json.dumps(plain(message), indent=2)


class MissingExtraError(RuntimeError):
    """An optional module is needed now and cannot be imported.

    Fields: `module` (what was imported), `extra` (the pip extra that brings it), `purpose` (what needed it).
    """

    def __init__(self, module: str, extra: str, purpose: str) -> None:
        # The facts are the arguments (not the message), so that the error survives a trip between processes.
        super().__init__(module, extra, purpose)
        self.module = module
        self.extra = extra
        self.purpose = purpose

    def __str__(self) -> str:
        return (
            f"{self.purpose} needs the Python module {self.module}, which cannot be imported. "
            f"Install the extra {self.extra}: pip install 'cachesvc[{self.extra}]'"
        )


@contextmanager
def part_file(path: Path) -> Iterator[Path]:
    """Yield a file beside ``path``, with the same suffix; it replaces ``path`` at the end.

    A pipe or a device is written directly.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    part = path.with_name(f"{path.stem}.part{path.suffix}")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


DEADLINE_SECONDS = 30.0
Admin = admin_pb2_grpc.AdminServiceStub
R = TypeVar("R", bound=Message)
LIMIT = flag(
    "--limit",
    type=number(1, MOST_LISTED),
    default=40,
    metavar="N",
    help=f"lines at most (default 40, most {MOST_LISTED})",
)


class Question(DaemonCommand, Generic[R]):
    """``ask`` calls the daemon; ``show`` words the answer without a call, so that both forms are of the same answer."""

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """Add its own flags, ``--json``, and those of the daemon."""
        flag("--json", action="store_true", help="print the answer as JSON: every field, always").add_to(parser)
        super().add_flags(parser)

    @abstractmethod
    def ask(self, admin: Admin) -> R:
        """The answer. Raises grpc.RpcError, CacheClientError."""

    @abstractmethod
    def show(self, answer: R) -> str:
        """The answer for people."""

    def data(self, answer: R) -> R:
        return answer

    def more(self, *flags: str) -> str:
        """A last line where something was left out, and by which flags more of it could be seen."""
        can_rise = self.arguments.limit < MOST_LISTED
        return left_out(*(name for name in flags if can_rise or name != "--limit"))

    def code(self, _answer: R) -> int:
        """The exit code: 1 where a check found something."""
        return 0

    def run(self) -> int:
        with self.target.open() as channel:
            answer = self.ask(Admin(channel))
        print(as_json(self.data(answer)) if self.arguments.json else for_terminal(self.show(answer)))
        return self.code(answer)


class Listing(Question[R]):
    """Question whose answer is one table: of the lines in its field ``lines``."""

    lines: ClassVar[str]
    table: ClassVar[Table]

    def show(self, answer: R) -> str:
        more = self.more("--limit") if getattr(answer, "truncated", False) else ""
        return self.table.text(getattr(answer, self.lines)) + more
