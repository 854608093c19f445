"""One life of a mover's process, as its daemon sees it: started or found, opened, and over when its connection ends.

What the mover says comes as records to ``take``, on the reader's thread; the last one says that it died, and
by then its process has ended: nothing of it writes to any memory any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol, TypedDict

from cachesvc.memory.interface import Handle
from cachesvc.memory.timeline import MappedSheet
from cachesvc.model.errors import CacheError, Unavailable
from cachesvc.model.text import module_command
from cachesvc.mover.records import (
    DIED,
    ENDS_BYTES,
    JOBS_BYTES,
    MOST_DESCRIPTORS,
    Channel,
    Message,
    MoverFault,
    MoverGone,
    Part,
    Reader,
    Ring,
    Settings,
    Writer,
    error_again,
    packed,
    showing,
    shown,
)

HURRY_SECONDS = 2.0
"""Given to a mover that owes an answer when the daemon stops."""
ANSWER_SECONDS = 60.0
"""The longest that a question may take: making a GPU's context, pinning a chunk, or the end of copies under way."""
GOING_SECONDS = 2.0
"""Time limit of a process to end after it has hung up, seconds; then it is killed."""


UNKILLABLE_SECONDS = 30.0
"""A process that was killed and is still there after so long stands in a driver's call that does not return."""


Claim = Callable[[], tuple[int, ...]]
"""Gives the descriptor of the page of the node's budget, and that of the daemon's lock, once it has one."""


class HostChunk(NamedTuple):
    """Host memory, by its region's number here and its file."""

    region: int
    view: memoryview
    fd: int


class StampOfLife(NamedTuple):
    """Stamp of a mover's life: its memory, by a descriptor that is ours where there is one, and the seed of its
    bytes."""

    handle: Handle
    fd: int | None
    seed: str

    def copy(self) -> StampOfLife:
        """The stamp with a descriptor of its own."""
        return self._replace(fd=None if self.fd is None else os.dup(self.fd))

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)


class Life:
    """``start`` opens it. ``version``: what it has to be of. ``claim``: descriptors that it gets too, of which it keeps
    the lock's until its end."""

    def __init__(self, begin: Begin, version: str, settings: Settings, claim: Claim) -> None:
        self._begin = begin
        self._version = version
        self._settings = settings
        self._claim = claim
        self._process: MoverProcess | None = None
        self._sign_channel: Channel | None = None
        self._is_ours = False
        self._is_let_go = True  # it may go on without this life
        self._learning = threading.Lock()
        self._known: set[int] = set()
        self.facts: dict[str, Any] = {}
        self.pid = 0
        self.lingers = False  # it was killed and does not end: it may still write

    def start(self) -> None:
        """Start the process, or find it, and open it for the device. Raises a CacheError that says what is missing."""
        with ExitStack() as undo:
            try:
                connection, self._process = self._begin()
                undo.callback(self._forget_process)
                undo.callback(self._reap)
                undo.callback(connection.close)
                jobs, ends = Ring.make("kvcache-jobs", JOBS_BYTES), Ring.make("kvcache-ends", ENDS_BYTES)
            except OSError as error:
                raise Unavailable(f"no mover for {self._settings.device}: {error}") from error
            self._connection, self._channel = connection, Channel(connection, self.kill)
            undo.callback(jobs.close)
            undo.callback(ends.close)
            self._jobs, self._reader, self._rings = Writer(jobs), Reader(ends), (jobs, ends)
            hello = self._greet()
            if hello["version"] != self._version:
                raise Unavailable(f"the mover is of version {hello['version']}, this daemon of {self._version}")
            self._is_ours, self.pid = True, hello["pid"]
            told = self.ask("open", descriptors=(jobs.fd, ends.fd, *self._claim()), **asdict(self._settings))
            self.facts = told.head
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            with theirs:
                self.ask("watch", descriptors=(theirs.fileno(),))
            self._signs, self._sign_channel = ours, Channel(ours, self.kill)
            undo.pop_all()
        self._is_let_go = False
        self._watcher = threading.Thread(target=self._watch, name=f"mover-{self._settings.device}", daemon=True)
        self._watcher.start()

    def put(self, record: Sequence[Part]) -> None:
        """Tell the mover something; returns at once, whether it lives or not."""
        self._jobs.put(record)

    def take(self) -> list[bytes]:
        """Wait for records from the mover, and take those that are there. One thread."""
        self._reader.wait()
        return self._reader.take()

    def ask(
        self, name: str, *, descriptors: Sequence[int] = (), seconds: float = ANSWER_SECONDS, **fields: Any
    ) -> Message:
        """Ask the mover, from any thread. Raises what it refuses with, and Unavailable where it is gone, or has not
        answered in ``seconds`` seconds: then it is ended."""
        return self._channel.ask(name, seconds, Message(fields, descriptors=tuple(descriptors)))

    def probe(self, seconds: float) -> str:
        """Ask whether the device works, whatever else the mover is asked meanwhile; returns what is wrong, or nothing.
        Raises as ``ask``: a mover that is silent for ``seconds`` seconds is ended."""
        assert self._sign_channel is not None, "it was started"
        fault: str = self._sign_channel.ask("probe", seconds).head["fault"]
        return fault

    def require_answer(self, seconds: float) -> None:
        """Ask for a sign of life; no driver is asked. Raises as ``probe``."""
        assert self._sign_channel is not None, "it was started"
        self._sign_channel.ask("alive", seconds)

    def open_sheet(self, number: int, before: MappedSheet | None = None) -> MappedSheet:
        """Make words of a model, which go on where those of ``before`` stood, and have the mover write them and
        hold their ``writers``: no other process can but this one, unless engines must. Raises as ``ask``."""
        with ExitStack() as undo:
            try:
                sheet = MappedSheet(self._settings.timeline_words, is_shared=self._settings.kind == "cuda")
                undo.callback(sheet.close)
                if before is not None:
                    sheet.continue_from(before)
                sheet.hand_over(lambda *both: self.ask("open_sheet", descriptors=both, sheet=number))
                sheet.seal()
            except OSError as error:
                raise Unavailable(f"no memory for words of {self._settings.device}: {error}; see ulimit -n") from error
            undo.pop_all()
        return sheet

    def learn_hosts(self, chunks: Sequence[HostChunk]) -> dict[int, Exception]:
        """Have the mover map and pin chunks of host memory, each once, several at a time: one by one they are pinned
        more slowly than filled. Returns the errors of those that it refuses, by region. Raises MoverGone."""
        refused: dict[int, Exception] = {}
        with self._learning:
            new = [chunk for chunk in chunks if chunk.region not in self._known]
            for first in range(0, len(new), MOST_DESCRIPTORS):
                batch = new[first : first + MOST_DESCRIPTORS]
                refused |= self._learn_batch(batch)
                self._known.update(chunk.region for chunk in batch if chunk.region not in refused)
        return refused

    def _learn_batch(self, batch: Sequence[HostChunk]) -> dict[int, Exception]:
        sizes, files = [(chunk.region, chunk.view.nbytes) for chunk in batch], [chunk.fd for chunk in batch]
        try:
            told = self.ask("register_hosts", descriptors=files, chunks=sizes).head["refused_of"]
        except MoverGone:
            raise
        except (CacheError, MoverFault) as error:
            return {chunk.region: error for chunk in batch}
        pairs = zip(batch, told, strict=True)
        return {chunk.region: error_again(*refused) for chunk, refused in pairs if refused is not None}

    def learn_peer(self, region: int, handle: Handle, fd: int | None) -> None:
        """Have the mover map another one's slab, once. Raises as ``ask``."""
        with self._learning:
            if region not in self._known:
                self._channel.ask("open_peer", ANSWER_SECONDS, showing(handle, fd, region=region))
                self._known.add(region)

    def forget_peer(self, region: int) -> None:
        """Undo ``learn_peer``, where it was done. Raises as ``ask``."""
        with self._learning:
            if region in self._known:
                self._known.remove(region)
                self.ask("close_peer", region=region)

    def stamp(self) -> StampOfLife:
        """Have the mover write its stamp. Raises as ``ask``."""
        told = self.ask("stamp")
        return StampOfLife(*shown(told), told.head["seed"])

    def check_peer(self, stamp: StampOfLife) -> tuple[str, bool]:
        """Have the mover pull another one's stamp; returns what is wrong, if anything, and whether the pull did not
        end. Raises as ``ask``."""
        told = self._channel.ask("check_peer", ANSWER_SECONDS, showing(stamp.handle, stamp.fd, seed=stamp.seed)).head
        return told["wrong"], told["hangs"]

    def kill(self) -> None:
        """End the process. One that was found and has not said what it is may be another daemon's: that one is left
        alone."""
        process = self._process
        if process is None or not (process.is_child or self._is_ours):
            self._channel.close()
            return
        self._is_let_go = False
        process.kill()
        self._channel.break_off()
        if self._sign_channel is not None:
            self._sign_channel.break_off()

    def hurry(self) -> None:
        """The daemon stops: a mover that owes an answer has ``HURRY_SECONDS`` more, and is ended then."""
        self._channel.hurry(HURRY_SECONDS)

    def hang_up(self) -> None:
        """Have it end its work, and its process if that is a child of this one."""
        self._is_let_go = True
        self._channel.close()

    def wait_over(self) -> None:
        """Wait, after hanging up, until its work is over. One that takes too long is killed."""
        self._watcher.join(ANSWER_SECONDS)
        if self._watcher.is_alive():
            self.kill()
            self._watcher.join()

    def give_back(self) -> None:
        """Close what is left of an ended life whose records were all taken, but for the words."""
        self._watcher.join()
        self._forget_process()
        self._jobs.close()
        for ring in self._rings:
            ring.close()
        self._connection.close()
        self._signs.close()

    def _watch(self) -> None:
        """Root of a thread: wait for the end of the connection, on whichever side, then of the process, and say so."""
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLRDHUP)
        poll.poll()
        self._reap()
        Writer(self._rings[1]).put([packed(DIED)])

    def _greet(self) -> dict[str, Any]:
        """Greeting of the mover. Raises Unavailable."""
        try:
            return self.ask("hello").head
        except MoverGone as silent:
            raise Unavailable(
                f"the mover of {self._settings.device} does not answer ({silent.__cause__}): it has ended, hangs, or "
                "serves another daemon"
            ) from silent

    def _reap(self) -> None:
        """Wait for the process, where that is ending: then it writes nowhere any more. One that was found may go on,
        for another daemon, and has given up its work for this one before it hung up."""
        process = self._process
        if process is None or (self._is_let_go and not process.is_child):
            return
        if not process.has_ended(GOING_SECONDS):
            process.kill()
            self.lingers = not process.has_ended(UNKILLABLE_SECONDS)

    def _forget_process(self) -> None:
        if self._process is not None:
            self._process.close()


LIST_SECONDS = 60.0
"""Time limit of the driver, seconds."""


class ListedGpu(TypedDict):
    """A GPU as the process names it. ``has_vmm``: see ``GpuFacts``; ``reaches``: GPUs that it can read from."""

    uuid: str
    name: str
    pci: str
    has_vmm: bool
    reaches: list[str]


class Listing:
    """The process runs from the beginning, so that its second or so passes while the daemon's modules are imported. One
    that is never asked ends by itself."""

    def __init__(self) -> None:
        """Start the listing. Raises Unavailable."""
        command = module_command("cachesvc.mover", "--list")
        try:
            self._process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise _unlisted(error) from error

    def gpus(self) -> dict[str, Any]:
        """Its result, once: ``gpus``, each with the devices that it reaches; or why there are none (``absent``,
        ``broken``).

        Raises Unavailable.
        """
        said = b""
        try:
            told, said = self._process.communicate(timeout=LIST_SECONDS)
            if self._process.returncode:
                raise OSError(f"exit code {self._process.returncode}")
            found: dict[str, Any] = json.loads(told)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._process.kill()
            raise _unlisted(error, said) from error
        return found


def _unlisted(error: Exception, said: bytes = b"") -> Unavailable:
    why = said.decode(errors="replace").strip().rpartition("\n")[2]
    return Unavailable(f"the GPUs cannot be listed: {error}{why and f' ({why})'}; see nvidia-smi, or use --backend shm")


# The process of a mover: a child of this one, or one that was started by hand and is found at a socket.
#
# Either can be ended from here: a mover that hangs would else be waited for, for it may still write to the host's
# pages.

SO_PEERPIDFD = 77
"""asm-generic/socket.h, from Linux 6.5 on."""


class MoverProcess(Protocol):
    """``is_child``: it serves this process alone, and ends with it."""

    is_child: bool

    def kill(self) -> None:
        """End the process. No-op where it has ended."""

    def has_ended(self, seconds: float | None) -> bool:
        """Wait so long for its end (None: for as long as it takes)."""

    def close(self) -> None:
        """Forget the process. Idempotent."""


Begin = Callable[[], tuple[socket.socket, MoverProcess | None]]
"""Gives a connection to a mover, and its process where it has one of its own. Raises OSError."""


class Child:
    is_child = True

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def kill(self) -> None:
        self._process.kill()

    def has_ended(self, seconds: float | None) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Forget a process that has ended."""


class FoundProcess:
    """A process by its ``pidfd``, which it takes over."""

    is_child = False

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd
        self._lock = threading.Lock()

    def kill(self) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def has_ended(self, seconds: float | None) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(None if seconds is None else seconds * 1e3))

    def close(self) -> None:
        with self._lock:
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1


def child(device: str) -> tuple[socket.socket, MoverProcess | None]:
    """Start a device's mover as a child of this process, which ends with it. Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = module_command("cachesvc.mover", "--connected", str(theirs.fileno()), "--gpu", device)
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])  # noqa: S603
    return ours, Child(process)


def found(path: str) -> tuple[socket.socket, MoverProcess | None]:
    """Connect to a mover that listens at ``path``, of this user or root. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)  # where too many wait already this would wait too
        connection.connect(path)
        connection.setblocking(True)
        pid, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (0, os.getuid()):
            raise PermissionError(f"the mover there is of user {uid}")
        return connection, _killable(connection, pid)
    except OSError as refused:
        connection.close()
        is_busy = isinstance(refused, BlockingIOError)
        why = "others wait for it already" if is_busy else refused.strerror or str(refused)
        raise OSError(f"{path}: {why}") from refused


def _killable(connection: socket.socket, pid: int) -> FoundProcess:
    """The process at the other end. Raises OSError where it could not be ended."""
    try:
        pidfd = struct.unpack("i", connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4))[0]
    except OSError:  # an older kernel
        pidfd = os.pidfd_open(pid)
    process = FoundProcess(pidfd)
    try:
        signal.pidfd_send_signal(pidfd, 0)  # none is sent: whether one may be
    except OSError as refused:
        process.close()
        raise PermissionError(
            f"the mover there could not be ended, were it to hang ({refused.strerror}): run it as this user, in "
            "this PID namespace"
        ) from refused
    return process
