"""An orderly stop, with the next daemon already trying to start: engines hear of the loss, and of nothing else."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

from cachesvc_client import CacheClient, CacheClientError, DaemonDraining, DaemonUnavailable, Lease, Reattacher
from cachesvc_ctl.core.daemon_process import DaemonFailed, DaemonProcess

from tests.e2e.engine import PLAIN, WAIT_SECONDS
from tests.e2e.rig import FLAGS, short_folder


class Supervisor:
    """Starts the next daemon as soon as the socket is free."""

    def __init__(self, folder: Path) -> None:
        self.daemon = DaemonProcess(FLAGS, folder=str(folder))
        self.is_up = threading.Event()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._start)
        self._thread.start()

    def _start(self) -> None:
        while not self._given_up.is_set():
            try:
                self.daemon.start()
            except DaemonFailed:
                continue
            self.is_up.set()
            return

    def stop(self) -> None:
        self._given_up.set()
        self._thread.join()
        if self.is_up.is_set():
            self.daemon.stop()


def match_until_lost(lease: Lease) -> CacheClientError:
    """Error that ends the matching; a daemon that drains does not."""
    while True:
        try:
            lease.match(b"").release()
        except DaemonDraining:
            continue
        except CacheClientError as error:
            return error


def test_a_stop_is_told_as_the_loss_at_the_first_call_though_the_next_daemon_comes() -> None:
    with short_folder() as folder:
        first = DaemonProcess(FLAGS, folder=str(folder))
        first.start()
        with CacheClient(first.socket) as client:
            lease = client.open_lease(client.register("m", PLAIN, device_pages=[8]))
            told: queue.SimpleQueue[CacheClientError] = queue.SimpleQueue()
            lease.on_lost(told.put)
            back: queue.SimpleQueue[tuple[Lease, ...]] = queue.SimpleQueue()
            epoch = client.epoch
            first.process.terminate()
            supervisor = Supervisor(folder)
            try:
                ended = match_until_lost(lease)
                assert type(ended) is DaemonUnavailable, ended
                assert lease.is_lost
                assert not client.connected
                assert isinstance(told.get(timeout=WAIT_SECONDS), DaemonUnavailable)
                with Reattacher(client, back.put):
                    (fresh,) = back.get(timeout=WAIT_SECONDS)
                assert client.epoch != epoch
                fresh.match(b"").release()
                client.close()
            finally:
                supervisor.stop()
        first.process.wait()
