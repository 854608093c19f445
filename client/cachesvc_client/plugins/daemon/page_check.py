"""Debugging: has anything changed a page after it was sealed? The daemon compares checksums, and the engine waits.

A kernel that writes where it should not, or a warm-up that does, harms other engines; this finds the engine that did.
"""

from __future__ import annotations

from pathlib import Path

import grpc
from kvcache.v1 import admin_pb2, admin_pb2_grpc

from cachesvc.model.text.addresses import unix_target
from cachesvc.wire.status import AUTHORIZATION_METADATA_KEY, BEARER
from cachesvc_client.plugins.daemon.errors import ConnectorRefused
from cachesvc_client.wire.credentials import credentials_from

DEADLINE_S = 600.0
"""Time limit of a check, seconds: it reads all sealed pages, at the daemon's ``--checksum-limit``."""


class PageChanged(RuntimeError):
    """Sealed pages are not what they were; the message names them."""


class PageCheck:
    """``steps``: iterations between two checks; 0: never. Used from one thread."""

    def __init__(self, socket_path: str, token_file: str | None, model_id: int, steps: int) -> None:
        self._socket_path = Path(socket_path).absolute()
        self._token_file = token_file
        self._model_id = model_id
        self._steps = steps
        self._seen = 0

    def step(self) -> None:
        """Count an iteration that has ended. Raises as ``check``."""
        self._seen += 1
        if self._steps and self._seen % self._steps == 0:
            self.check(f"iteration {self._seen}")

    def check(self, when: str) -> None:
        """Raises PageChanged, and ConnectorRefused where the daemon cannot tell."""
        if not self._steps:
            return
        token = credentials_from(None, self._token_file).read_token()
        proof = ((AUTHORIZATION_METADATA_KEY, BEARER + token),) if token else ()
        request = admin_pb2.VerifyRequest(checksums=True, model_id=self._model_id)
        try:
            with grpc.insecure_channel(unix_target(str(self._socket_path))) as channel:
                admin = admin_pb2_grpc.AdminServiceStub(channel)
                answer = admin.Verify(request, timeout=DEADLINE_S, metadata=proof)
        except grpc.RpcError as error:
            raise ConnectorRefused(
                f"verify_steps: the daemon did not verify ({error}); it takes a token that may read"
            ) from error
        if answer.checksums.mode != "all":
            raise ConnectorRefused(
                "verify_steps: the daemon takes no checksums of all pages: start it with --checksums all"
            )
        if not answer.ok or answer.checksums.mismatches:
            found = [*answer.problems, *(str(each).replace("\n", " ") for each in answer.checksums.mismatches)]
            raise PageChanged(f"at {when}: {'; '.join(found[:8])}")
