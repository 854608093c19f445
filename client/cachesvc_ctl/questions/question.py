"""A command that asks the daemon one thing: the answer is shown as text or, with ``--json``, as data."""

from __future__ import annotations

import argparse
from abc import abstractmethod
from typing import Generic, TypeVar

from google.protobuf.message import Message
from kvcache.v1 import admin_pb2_grpc

from cachesvc_ctl.core.as_json import as_json
from cachesvc_ctl.core.command import MOST_LISTED, DaemonCommand, flag, listed
from cachesvc_ctl.core.text import for_terminal, left_out

DEADLINE_SECONDS = 30.0
Admin = admin_pb2_grpc.AdminServiceStub
R = TypeVar("R", bound=Message)
LIMIT = flag("--limit", type=listed, default=40, metavar="N", help=f"lines at most (default 40, most {MOST_LISTED})")


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
        """The answer for scripts."""
        return answer

    def more(self, *flags: str) -> str:
        """A last line where something was left out, and by which flags more of it could be seen."""
        can_rise = self.arguments.limit < MOST_LISTED
        return left_out(*(name for name in flags if can_rise or name != "--limit"))

    def code(self, _answer: R) -> int:
        """The exit code: 1 where a check found something."""
        return 0

    def run(self) -> int:
        """Ask and print."""
        with self.target.open() as channel:
            answer = self.ask(Admin(channel))
        print(as_json(self.data(answer)) if self.arguments.json else for_terminal(self.show(answer)))
        return self.code(answer)
