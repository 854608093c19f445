"""Certificates of nodes are replaced while both daemons run; where nodes distrust each other, operators see why."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from kvcache.v1 import admin_pb2

from cachesvc.model.errors import Unavailable
from cachesvc.service.host.tls import NodeCertificates
from tests.e2e.access.test_access import Authority
from tests.e2e.engine import Engine, prompt
from tests.e2e.rig import Node, running_node, short_folder, wait_until
from tests.e2e.storage.test_nodes import BLOCKS, LENDING, engine_on, peer_port

PROBE_SECONDS = 10.0


class Files:
    """Files of one node: its certificate, key and authorities, and its tokens."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.paths = [str(folder / name) for name in ("node.pem", "node.key", "roots.pem")]
        self.tokens = folder / "tokens"
        self.tokens.write_text("a token of nodes, long enough\n", encoding="utf-8")

    def install(self, own: Authority, *trusted: Authority) -> None:
        """Have a certificate of ``own``, and trust its and more authorities."""
        certificate, key = own.sign("node", 7)
        roots = "".join((each.folder / "root.pem").read_text(encoding="utf-8") for each in (own, *trusted))
        (own.folder / "roots").write_text(roots, encoding="utf-8")
        for source, path in zip((certificate, key, str(own.folder / "roots")), self.paths, strict=True):
            fresh = f"{path}.new"
            shutil.copy(source, fresh)
            Path(fresh).replace(path)

    @property
    def flags(self) -> list[str]:
        """For a daemon."""
        names = ("--peer-tls-certificate", "--peer-tls-key", "--peer-tls-ca")
        flags = [word for pair in zip(names, self.paths, strict=True) for word in pair]
        return ["--peer-tokens", str(self.tokens), *flags]


def authority(folder: Path) -> Authority:
    """One of its own."""
    folder.mkdir()
    return Authority(folder)


def told(node: Node) -> list[str]:
    """Return the lines of its status about other nodes."""
    attention = node.admin.GetStatus(admin_pb2.GetStatusRequest()).attention
    return [line for line in attention if "nothing is borrowed" in line]


def borrows(source: Engine, engine: Engine, seeds: Iterator[int]) -> bool:
    """True where another prompt of the lender's is a hit: a peer that failed rests for a while."""
    asked = prompt(next(seeds), BLOCKS)
    source.serve(asked)
    return engine.serve(asked).computed == 0


def test_new_certificates_count_without_a_restart_and_distrust_is_told() -> None:
    with short_folder() as folder:
        one, two = authority(folder / "one"), authority(folder / "two")
        left, right = Files(folder / "left"), Files(folder / "right")
        left.install(one)
        right.install(one)
        with running_node([*LENDING, *left.flags]) as lender:
            peers = ["--peers", f"localhost:{peer_port(lender)}?wait=5s&deadline=20s"]
            with (
                running_node([*peers, *right.flags]) as borrower,
                Engine(lender.socket, device_pages=64, host_pages=4096) as source,
                engine_on(borrower) as engine,
            ):
                seeds = count()
                wait_until(lambda: borrows(source, engine, seeds), "certificates of one authority")
                assert told(borrower) == []
                right.install(two)
                wait_until(
                    lambda: not borrows(source, engine, seeds) and bool(told(borrower)), "it takes the new files"
                )
                (line,) = told(borrower)
                assert "the TLS handshake fails: its certificate is not accepted here (" in line
                assert "peer_tls_ca" in line
                assert '"event": "peer_distrusted"' in borrower.log()
                left.install(two)
                wait_until(lambda: borrows(source, engine, seeds), "both have the new ones")
                assert told(borrower) == []


def test_why_nodes_distrust_each_other_is_said() -> None:
    with short_folder() as folder:
        one, two = authority(folder / "one"), authority(folder / "two")
        files = Files(folder / "left")
        files.install(one)
        with running_node(["--peer-listen", "localhost:0", *files.flags]) as lender:
            address = f"localhost:{peer_port(lender)}"
            mine = Files(folder / "mine")
            mine.install(one)
            assert NodeCertificates(*mine.paths).why_refused(address, PROBE_SECONDS) == ""
            mine.install(two)
            assert "its certificate is not accepted here" in NodeCertificates(*mine.paths).why_refused(
                address, PROBE_SECONDS
            )
            mine.install(two, one)
            assert "this node's certificate is not accepted there" in NodeCertificates(*mine.paths).why_refused(
                address, PROBE_SECONDS
            )
            mine.install(one)
            wrong_name = f"127.0.0.1:{peer_port(lender)}"
            assert "127.0.0.1" in NodeCertificates(*mine.paths).why_refused(wrong_name, PROBE_SECONDS)
        assert NodeCertificates(*mine.paths).why_refused(address, PROBE_SECONDS) == "", "nothing answers there"


def test_files_that_do_not_fit_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files, own = Files(tmp_path / "node"), authority(tmp_path / "one")
    with pytest.raises(Unavailable, match="certificates for other nodes cannot be read"):
        NodeCertificates(*files.paths).current()
    files.install(own)
    certificates = NodeCertificates(*files.paths)
    number, first = certificates.current()
    assert certificates.current() == (number, first)
    Path(files.paths[1]).write_text("no key", encoding="utf-8")
    for _ in range(3):
        assert certificates.current() == (number, first)
    Path(files.paths[1]).unlink()
    for _ in range(3):
        assert certificates.current() == (number, first)
    assert caplog.messages == ["certificate_not_read"] * 2, "once a change"
    files.install(own)
    renewed, second = certificates.current()
    assert renewed > number
    assert second is not first


def test_a_certificate_for_the_name_that_a_peer_was_found_by_is_no_cause_of_silence(tmp_path: Path) -> None:
    root = authority(tmp_path / "root")
    certificate, key = root.sign("peers.example", 7, "DNS:peers.example")
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(certificate, key)
    own = NodeCertificates(certificate, key, str(root.folder / "root.pem"))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(2):
                plain, _ = listener.accept()
                try:
                    with served.wrap_socket(plain, server_side=True) as stream:
                        stream.sendall(b"x")
                except OSError:  # the other side has seen enough
                    plain.close()

        answering = threading.Thread(target=answer)
        answering.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert own.why_refused(address, 30.0, "peers.example") == ""
        assert "not accepted here" in own.why_refused(address, 30.0)
        answering.join()
