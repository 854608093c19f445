"""An engine's side of the daemon: connected, registered, with one lease and the slab mapped, and brought back after a
loss.

An engine's worker and its scheduler are two connectors in one process: they share one ``Node``, by the engine's id.
"""

from __future__ import annotations

import hashlib
import logging
import threading

from cachesvc.model.layout import Layout
from cachesvc_client import AttachedPool, CacheClient, CacheClientError, Lease
from cachesvc_vllm.errors import ConnectorRefused
from cachesvc_vllm.remapping import map_over
from cachesvc_vllm.settings import Settings
from cachesvc_vllm.slab_layout import GROUP

RETRY_S = 0.1
"""Between two attempts to come back: one on a socket that nobody listens on costs a millisecond."""

log = logging.getLogger(__name__)

_nodes: dict[str, Node] = {}


class Node:
    """``layout`` for ``pages`` blocks under the name ``model``."""

    def __init__(self, settings: Settings, engine: str, model: str, layout: Layout, pages: int) -> None:
        self._settings = settings
        self._model = model
        self._layout = layout
        self._pages = pages
        self._client = CacheClient(settings.socket, engine=engine, token_file=settings.token_file)
        self._lease: Lease | None = None
        self._pool: AttachedPool | None = None
        self._back: tuple[Lease, AttachedPool] | None = None
        self._address: int | None = None
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="cachesvc-vllm-reattach", daemon=True)

    @property
    def lease(self) -> Lease:
        """The engine's lease: the first one, or what ``move`` gave."""
        assert self._lease is not None
        return self._lease

    @property
    def pool(self) -> AttachedPool:
        """The slab that the lease's pages are in."""
        assert self._pool is not None
        return self._pool

    @property
    def socket_path(self) -> str:
        """Where the daemon is looked for."""
        return self._client.socket_path

    @property
    def is_back(self) -> bool:
        """True when a new lease waits to be taken, after the old one was lost."""
        return self._back is not None

    def start(self) -> None:
        """Connect, register, open a lease, attach. Raises ConnectorRefused (sizes), and what these calls raise."""
        client, settings = self._client, self._settings
        client.connect()
        registration = client.register(
            self._model,
            self._layout,
            tenant_salt=_salt(settings.tenant_salt),
            device_pages=[self._pages],
            host_pages=None if settings.host_blocks is None else [settings.host_blocks],
        )
        if registration.device_pages != (self._pages,):
            raise ConnectorRefused(
                f"the daemon's pool of {self._model} has {registration.device_pages[0]} blocks, and this engine has "
                f"{self._pages}: start it with --num-gpu-blocks-override {registration.device_pages[0]}"
            )
        self._take(client.open_lease(registration))
        client.on_lost(self._wake.set)
        self._thread.start()

    def keep_address(self) -> None:
        """The engine's tensors lie on the slab where it is mapped now: a later slab will be mapped there too."""
        if not self.pool.is_on_gpu:
            self._address = int(self.pool.slab(GROUP).ctypes.data)

    def move(self) -> Lease:
        """Take the new lease, whose slab takes the place of the old one. Nothing uses the pages of the old one."""
        assert self._back is not None
        assert self._address is not None
        old = self.lease
        (self._lease, self._pool), self._back = self._back, None
        slab = self._pool.slab(GROUP)
        map_over(self._address, int(slab.ctypes.data), slab.nbytes)
        try:
            old.close(quiesced=True)
        except CacheClientError as error:
            log.debug("old_lease_not_closed why=%s", error)
        return self.lease

    def close(self) -> None:
        """End the lease and disconnect. Idempotent."""
        self._is_closed = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._client.close()

    def _take(self, lease: Lease) -> None:
        self._lease, self._pool = lease, lease.attach(0)
        lease.on_lost(lambda _: self._wake.set())

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._wake.wait()
                self._wake.clear()
                if self._address is None:
                    log.error("daemon_gone restart this engine once the daemon is back")
                    return
                while not self._is_closed and self._back is None and self.lease.is_lost and not self._come_back():
                    self._wake.wait(RETRY_S)
        except Exception:
            log.exception("reattach_failed")

    def _come_back(self) -> bool:
        """Try to get a new lease; True when there is one."""
        client = self._client
        lease = None
        try:
            if client.connected:  # the daemon is there, and took the lease away
                lease = client.open_lease(self.lease.registration)
            else:
                lease = client.reconnect()[-1]
            if lease.registration.device_pages != (self._pages,):
                raise ConnectorRefused(f"the daemon came back with {lease.registration.device_pages} blocks")
            self._back = (lease, lease.attach(0))
        except (CacheClientError, ConnectorRefused, IndexError) as error:
            log.debug("daemon_not_back why=%s", error)
            if lease is not None:
                lease.close()
            return False
        lease.on_lost(lambda _: self._wake.set())
        log.warning("daemon_back blocks=%s", self._pages)
        return True


def shared_node(engine_id: str) -> Node | None:
    """The node of this process's engine, if its worker has made it."""
    return _nodes.get(engine_id)


def share_node(engine_id: str, node: Node) -> None:
    """Let the engine's scheduler find it."""
    _nodes[engine_id] = node


def drop_node(engine_id: str) -> None:
    """Close the node of an engine. Idempotent."""
    node = _nodes.pop(engine_id, None)
    if node is not None:
        node.close()


def _salt(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=32).digest() if text else b""

