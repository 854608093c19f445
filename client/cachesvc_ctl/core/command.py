"""One command of ``cachesvc``: its name, one line about it, its flags, and what it does."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from cachesvc_ctl.core.target import Target, add_target, target_of

MOST = 2**31 - 1
MOST_LISTED = 4096
"""Length of the daemon's longest answer; the daemon reduces a greater limit to it."""


@dataclass(frozen=True)
class Flag:
    """A flag or a word, as ``ArgumentParser.add_argument`` takes it."""

    names: tuple[str, ...]
    settings: dict[str, Any]

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Add it to a parser, or to a group of one."""
        parser.add_argument(*self.names, **self.settings)


def flag(*names: str, **settings: Any) -> Flag:
    """A flag, written as a call of ``add_argument``."""
    return Flag(names, settings)


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
        """Add it to the parser's commands."""
        parser = commands.add_parser(cls.name, help=cls.about, description=cls.about, epilog=cls.epilog)
        cls.add_flags(parser)
        parser.set_defaults(command=cls)

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """Add its flags to its own parser."""
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


def count(text: str) -> int:
    """A number, 0 or more, for argparse."""
    if not text.isdecimal() or int(text) > MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {MOST}")
    return int(text)


def at_least_one(text: str) -> int:
    """A number of lines, levels or engines, for argparse."""
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MOST}")
    return int(text)


def listed(text: str) -> int:
    """A number of lines that a daemon lists in one answer, for argparse."""
    if not text.isdecimal() or not 1 <= int(text) <= MOST_LISTED:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MOST_LISTED}")
    return int(text)


def seconds(text: str) -> float:
    """A time, for argparse."""
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
