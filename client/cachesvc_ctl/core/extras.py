"""The error for an optional dependency that is not installed, with the command that installs it."""

from __future__ import annotations


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
