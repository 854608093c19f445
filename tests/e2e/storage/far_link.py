"""A far link between two network namespaces, in user space: each packet comes late, and some never come.

Two tun devices do to packets of real TCP connections what ``tc netem`` does. Many kernels are built without that, and
here a test says which packets are lost.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_REQUEST = struct.Struct("16sH22x")
MOST_BYTES = 1 << 16
"""Most bytes of a packet."""
_TCP, _SYN, _ACK = 6, 0x02, 0x10


def open_device(name: str) -> int:
    """Make a device in this thread's network namespace; it is there until its descriptor is closed. Raises OSError."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(device, _TUNSETIFF, _REQUEST.pack(name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(device)
        raise
    return device


class FarLink:
    """Passes packets between two devices, which it closes. ``lost``: packets that did not come. ``lose_opening``: ports
    to which the next connection's first packet is lost."""

    def __init__(self, devices: Sequence[int], delay_s: float, loss: float, seed: int = 1) -> None:
        self.lost = 0
        self.lose_opening: set[int] = set()
        self._devices = devices
        self._delay_s = delay_s
        self._loss = loss
        self._dice = random.Random(seed)
        self._late: deque[tuple[float, int, bytes]] = deque()
        self._end, self._ending = os.pipe()
        self._thread = threading.Thread(target=self._pass, name="far-link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the devices."""
        os.close(self._ending)
        self._thread.join()
        for each in (self._end, *self._devices):
            os.close(each)

    def _pass(self) -> None:
        """Root of the thread."""
        while True:
            seconds = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            ready = select.select([*self._devices, self._end], [], [], seconds)[0]
            if self._end in ready:
                return
            for device in ready:
                self._take(device, self._devices[device == self._devices[0]])
            now = time.monotonic()
            while self._late and self._late[0][0] <= now:
                _, to, packet = self._late.popleft()
                _write(to, packet)

    def _take(self, device: int, to: int) -> None:
        """Take what a device sends, for the other one."""
        due = time.monotonic() + self._delay_s
        while (packet := _read(device)) is not None:
            opens = opened_port(packet) if self.lose_opening else 0
            if self._dice.random() < self._loss or opens in self.lose_opening:
                self.lose_opening.discard(opens)
                self.lost += 1
            else:
                self._late.append((due, to, packet))


def opened_port(packet: bytes) -> int:
    """The port to which an IPv4 packet opens a TCP connection; 0 for any other packet."""
    tcp = packet[4 * (packet[0] & 15) :]
    if packet[0] >> 4 != 4 or packet[9] != _TCP or tcp[13] & (_SYN | _ACK) != _SYN:
        return 0
    return int.from_bytes(tcp[2:4])


def _read(device: int) -> bytes | None:
    """A packet; None where there is none, or the device is down."""
    try:
        return os.read(device, MOST_BYTES)
    except OSError:
        return None


def _write(device: int, packet: bytes) -> None:
    """Hand over a packet. A device that is down, or full, loses it as a wire does."""
    try:
        os.write(device, packet)
    except OSError:
        return
