"""Waits of the engine's GPU streams for words of the daemon's, and their release when the daemon goes.

The words lie in host memory that both processes have pinned: a stream waits for one there as fast as on the device
(H100, 2026-11: 16 us from one stream's write to another's wake either way), and to end a wait takes a store of the
processor, where a stream of our own could stand behind the very waits that it is to end.

A word that the daemon no longer moves would block a stream, and with it the GPU, without end. So every slot that a
stream may wait for is remembered until its load has ended, and at the loss each gets what a failed load leaves: the
failed word first, then the word at its end. The client keeps checking these words for a while, because the GPU may
still finish what the dead daemon had queued, and set a word back. A word that has come to its end is left alone: it may
be another load's by now.
"""

from __future__ import annotations

import logging
import threading

from cachesvc.model.futex import WORD_BYTES, Words, store_and_wake
from cachesvc.model.words import TimelineSlot, has_reached
from cachesvc_client.core.errors import AlreadyClosed, DaemonFault, DaemonUnavailable
from cachesvc_client.memory.cuda import CudaDevice

PRUNE_AT = 64
"""Pending slots at which those that ended are looked for; there are never more than the timeline has."""

AGAIN_S = (0.005, 0.02, 0.1, 0.4, 1.0, 2.0)
"""Pauses between releases. A daemon's copies in flight take milliseconds; taking down its context may take a second."""

log = logging.getLogger(__name__)

_PINNED: dict[int, Words] = {}
"""The words that the driver has pinned, by their address. They stay mapped until they are unpinned, even without a
close. (The driver refuses to pin what comes to lie at an address that it still takes for pinned.)"""


class StreamWaits:
    """The waits of one pool. ``words``: the timeline, writable, which stays mapped until ``close`` has said True."""

    def __init__(self, device: CudaDevice, words: Words, again_s: tuple[float, ...] = AGAIN_S) -> None:
        self._device = device
        self._words = words
        self._again_s = again_s
        self._base = 0
        self._lock = threading.Lock()
        self._pending: dict[int, TimelineSlot] = {}  # by word
        self._released: set[tuple[int, int]] = set()
        self._prune_at = PRUNE_AT
        self._entering = 0
        self._is_lost = False
        self._is_closed = False
        self._ended = threading.Event()
        self._repeater = threading.Thread(target=self._release_again, name="kvcache-release", daemon=True)

    def start(self) -> None:
        """Pin the words for this process's streams. Raises GpuFailed."""
        address = self._words.ctypes.data
        self._base = self._device.pin(address, self._words.nbytes)
        _PINNED[address] = self._words

    def wait(self, ticket: int, slot: TimelineSlot, stream: int, target: int) -> None:
        """Have a stream wait for a word. Raises DaemonUnavailable after the loss, AlreadyClosed, DaemonFault (no such
        word), InvalidRequest (stream), GpuFailed.

        What is enqueued when the loss comes is released, for it is remembered before. The call itself is made without
        the lock: it may block for as long as the stream's queue is full, and only a release could end that.
        """
        with self._lock:
            if self._is_closed:
                raise AlreadyClosed("this pool was closed; attach again")
            for word in (slot.word, slot.failed_word):
                if not 0 <= word < len(self._words):
                    raise DaemonFault(f"word {word} of a timeline of {len(self._words)}")
            if self._is_lost:
                raise DaemonUnavailable(
                    f"the daemon went away before load {ticket} was waited for; recompute its blocks"
                )
            self._remember(slot)
            self._entering += 1
        try:
            self._device.wait_word(stream, self._base + WORD_BYTES * slot.word, target)
        finally:
            with self._lock:
                self._entering -= 1

    def lose(self) -> None:
        """The daemon is gone: end the waits, refuse further ones. Idempotent."""
        with self._lock:
            if self._is_lost or self._is_closed:
                return
            self._is_lost = True
            self._prune()
            self._release()
            released = len(self._released)
            if released and self._again_s:
                self._repeater.start()
        if released:
            log.warning("stream_waits_released slots=%s", released)

    def has_released(self, slot: TimelineSlot) -> bool:
        """True where the slot came to its end by this release, not by the daemon."""
        return (slot.word, slot.end) in self._released

    def close(self) -> bool:
        """Let the words go; True when they may be unmapped. False while a stream may still wait for one, or is being
        told to: they stay mapped then, and a loss is still answered; call it again after the streams. Raises
        GpuFailed."""
        with self._lock:
            if self._is_closed:
                return True
            self._prune()
            if self._entering or (self._pending and not self._is_lost):
                return False
            self._is_closed = True
            address, self._words = self._words.ctypes.data, self._words[:0].copy()  # nothing of the mapping is held
        self._ended.set()
        if self._repeater.is_alive():
            self._repeater.join()
        self._device.unpin(address)
        del _PINNED[address]
        return True

    def _remember(self, slot: TimelineSlot) -> None:
        known = self._pending.get(slot.word)
        if known is not None and has_reached(known.end, slot.end):
            return
        self._pending[slot.word] = slot
        if len(self._pending) >= self._prune_at:
            self._prune()
            self._prune_at = max(PRUNE_AT, 2 * len(self._pending))

    def _prune(self) -> None:
        """Forget the slots whose loads have ended."""
        self._pending = {word: slot for word, slot in self._pending.items() if not self._has_ended(slot)}

    def _has_ended(self, slot: TimelineSlot) -> bool:
        return has_reached(int(self._words[slot.word]), slot.end)

    def _release(self) -> None:
        """Write what a failed load leaves into every pending slot. The lock is held."""
        for slot in self._pending.values():
            if not self._has_ended(slot):
                self._released.add((slot.word, slot.end))
                store_and_wake(self._words, slot.failed_word, slot.end)
                store_and_wake(self._words, slot.word, slot.end)

    def _release_again(self) -> None:
        try:
            for pause_s in self._again_s:
                if self._ended.wait(pause_s):
                    return
                with self._lock:
                    if self._is_closed:
                        return
                    self._release()
        except Exception:
            log.exception("release_failed slots=%s", len(self._pending))


def stream_handle(stream: object) -> int | None:
    """The driver's handle of a stream: itself where it is a number, else CuPy's ``ptr``, or torch's and paddle's
    ``cuda_stream``. None for anything else."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    for name in ("cuda_stream", "ptr"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    return None
