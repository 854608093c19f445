"""Answers of a peer, against what it was asked: a real call to a listener that answers as the test says."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager

import grpc
import pytest
from kvcache.v1 import peer_pb2, peer_pb2_grpc

from cachesvc.model.errors import CacheError, Unavailable
from cachesvc.peer.fleet import Loan, PeerRefused
from cachesvc.service.rpc.peer_service import GrpcControl, PeerListening
from cachesvc.storage.seam import Part, Scope
from cachesvc.wire.status import ERROR_METADATA_KEY

KEYS = bytes(32 * 4)
PARTS = [Part(65535, 0, 1), Part(1, 0, 1)]


class Answering(peer_pb2_grpc.PeerServiceServicer):
    """Answers each Borrow with one answer."""

    def __init__(self, answer: peer_pb2.BorrowResponse) -> None:
        self.answer = answer

    def Borrow(self, request: peer_pb2.BorrowRequest, context: grpc.ServicerContext) -> peer_pb2.BorrowResponse:
        return self.answer

    def Beat(self, request: peer_pb2.BeatRequest, context: grpc.ServicerContext) -> peer_pb2.BeatResponse:
        return peer_pb2.BeatResponse()

    def Return(self, request: peer_pb2.ReturnRequest, context: grpc.ServicerContext) -> peer_pb2.ReturnResponse:
        return peer_pb2.ReturnResponse()

    def News(self, request: peer_pb2.NewsRequest, context: grpc.ServicerContext) -> peer_pb2.NewsResponse:
        return peer_pb2.NewsResponse()


@contextmanager
def answering(answer: peer_pb2.BorrowResponse | Answering, port: int = 0) -> Iterator[int]:
    server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 1)])
    service = answer if isinstance(answer, Answering) else Answering(answer)
    peer_pb2_grpc.add_PeerServiceServicer_to_server(service, server)
    at = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield at
    finally:
        server.stop(None).wait()


def borrow_by(control: GrpcControl) -> Loan | CacheError:
    said: Future[Loan | CacheError] = Future()
    control.borrow_later(Scope(bytes(32), bytes(8)), KEYS, PARTS, 0.0, 60.0, said.set_result)
    return said.result()


def borrow(answer: peer_pb2.BorrowResponse) -> Loan | CacheError:
    with answering(answer) as port, closing(GrpcControl(f"127.0.0.1:{port}", PeerListening(""), None)) as control:
        return borrow_by(control)


def test_a_peer_whose_news_failed_before_it_was_there_is_asked_at_once() -> None:
    """gRPC pauses before it connects again, longer each time, and fails what is called meanwhile."""
    with socket.socket() as keeping:
        keeping.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        keeping.bind(("127.0.0.1", 0))
        port = keeping.getsockname()[1]
        with closing(GrpcControl(f"127.0.0.1:{port}", PeerListening(""), None)) as control:
            for _ in range(2):
                failed: Future[object] = Future()
                control.news_later(0, 0, 20.0, failed.set_result)
                assert isinstance(failed.result(), CacheError)
            with answering(peer_pb2.BorrowResponse(lease_id=3, epoch=7, data_port=7101, lent=bytes([1])), port):
                assert isinstance(borrow_by(control), Loan)


def test_what_is_lent_of_each_key_and_part_comes_as_it_was_said() -> None:
    said = borrow(peer_pb2.BorrowResponse(lease_id=3, epoch=7, data_port=7101, lent=bytes([1, 0, 1, 1])))
    assert isinstance(said, Loan)
    assert said.lent == (True, False, True, True)


@pytest.mark.parametrize(
    "answer",
    [
        peer_pb2.BorrowResponse(lease_id=3, epoch=7, data_port=7101, lent=bytes([1]) * 9),
        peer_pb2.BorrowResponse(lease_id=3, epoch=7, data_port=70000, lent=bytes([1])),
        peer_pb2.BorrowResponse(lease_id=3, epoch=7, lent=bytes([1])),
    ],
)
def test_an_answer_to_another_question_is_none(answer: peer_pb2.BorrowResponse) -> None:
    said = borrow(answer)
    assert isinstance(said, Unavailable)
    assert "was asked for 8" in str(said)


LOAN = Loan(1, 7, bytes(32), "127.0.0.1", 7101, (True,))


def beat(control: GrpcControl) -> CacheError | None:
    said: Future[CacheError | None] = Future()
    control.beat_later([LOAN], 60.0, said.set_result)
    return said.result()


def test_a_closed_connection_stays_closed() -> None:
    """A heartbeat that came late opened a channel that nothing closed any more."""
    with answering(peer_pb2.BorrowResponse()) as port:
        control = GrpcControl(f"127.0.0.1:{port}", PeerListening(""), None)
        assert beat(control) is None
        control.close()
        for call in (
            lambda: control.beat_later([LOAN], 60.0, lambda _: None),
            lambda: control.give_back_later(LOAN, 60.0, lambda _: None),
            lambda: control.news_later(0, 0, 60.0, lambda _: None),
            lambda: borrow_by(control),
        ):
            with pytest.raises(Unavailable, match="the connection was closed"):
                call()


@pytest.mark.parametrize(
    ("code", "metadata", "is_answer", "is_full"),
    [
        (grpc.StatusCode.OUT_OF_RANGE, ((ERROR_METADATA_KEY, "LIMIT"),), True, True),
        (grpc.StatusCode.INVALID_ARGUMENT, ((ERROR_METADATA_KEY, "INVALID"),), True, False),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, (), True, True),
        (grpc.StatusCode.UNAVAILABLE, (), False, False),
        (grpc.StatusCode.UNAUTHENTICATED, ((ERROR_METADATA_KEY, "UNAUTHENTICATED"),), False, False),
    ],
)
def test_a_refusal_is_an_answer_of_the_peer(
    code: grpc.StatusCode, metadata: tuple[tuple[str, str], ...], is_answer: bool, is_full: bool
) -> None:
    """One that is full, or is asked for another layout, is there for all other calls."""

    class Refusing(Answering):
        def Borrow(self, request: peer_pb2.BorrowRequest, context: grpc.ServicerContext) -> peer_pb2.BorrowResponse:
            context.set_trailing_metadata(metadata)
            context.abort(code, "not now")
            raise AssertionError("abort raises")

    with (
        answering(Refusing(peer_pb2.BorrowResponse())) as port,
        closing(GrpcControl(f"127.0.0.1:{port}", PeerListening(""), None)) as control,
    ):
        said = borrow_by(control)
    assert isinstance(said, CacheError)
    assert isinstance(said, PeerRefused) == is_answer
    assert getattr(said, "is_full", False) == is_full
