"""Parser of both command lines: one line for a mistake, with the nearest known name."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from cachesvc.model.text.nearest import did_you_mean


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
