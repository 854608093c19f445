"""Questions of a borrower to another daemon, apart from the bytes themselves."""

from __future__ import annotations

import ipaddress
import socket
import struct
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from cachesvc.model.errors import CacheError, InvalidRequest, PermissionDenied, Unavailable
from cachesvc.model.numbers import BACKGROUND, Party
from cachesvc.model.text import Address, parse_address
from cachesvc.storage.seam import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, BackOff, ObjectName, Part, Scope
from cachesvc.storage.workers import nothing
from cachesvc.telemetry import events


class HandshakeFailed(Unavailable):
    """The two nodes do not trust each other's certificates."""


class PeerAbsent(Unavailable):
    """No daemon takes calls there: they fail at once, and no request waits for it."""


class PeerRefused(Unavailable):
    """The peer has answered, and refuses the call. ``is_full``: it has reached a limit, and may serve it later."""

    is_full = False


class PeerPaused(Unavailable):
    """The peer was not asked: it failed a moment ago. ``seconds``: after which it will be."""

    seconds = 0.0


@dataclass(eq=False, slots=True)
class Loan:
    """Answer of another daemon that was asked to lend, of the life ``epoch``. ``lease`` 0: it lends nothing.
    ``lent``: for each key and part (parts of a key together) whether it is there. ``host``, ``port``: where its bytes
    are. ``streams``: that may read it. ``computing``: blocks behind what is lent that an engine computes there;
    ``is_given_up``: it had begun to compute the first, and its request has ended.

    The borrower notes the rest, of the ``peer`` that lends. ``numbers``: on a stream, by name. ``is_expected``: it was
    asked for ahead. ``readers``: streams that read it and have not ended. ``waiting``: those of them that have not
    begun; without these it is renewed by what its streams bring. ``has_failed``: one of them has. ``is_unwanted``:
    they bring no more."""

    lease: int = 0
    epoch: int = 0
    secret: bytes = b""
    host: str = ""
    port: int = 0
    lent: tuple[bool, ...] = ()
    streams: int = 1
    computing: int = 0
    is_given_up: bool = False
    peer: Peer = field(init=False)
    numbers: dict[ObjectName, int] = field(default_factory=dict)
    since: float = 0.0
    is_expected: bool = False
    readers: int = 0
    waiting: int = 0
    has_failed: bool = False
    is_unwanted: bool = False


Answered = Callable[[Loan | CacheError], None]
"""Called once with the answer to a question, or with what it failed by, from any thread."""
Done = Callable[[CacheError | None], None]
"""Called once when a call has ended, with what it failed by or None, from any thread."""


class PeerControl(Protocol):
    """One other daemon, at ``address`` (HOST:PORT). Calls return at once and end by their deadlines; they raise a
    CacheError where nothing is asked."""

    address: str

    def borrow_later(
        self, scope: Scope, keys: bytes, parts: Sequence[Part], patience: float, seconds: float, answered: Answered
    ) -> None:
        """Have what is there of packed ``keys`` kept, once the first block is there, or ``patience`` seconds later.
        ``seconds``: for the answer."""

    def beat_later(self, loans: Sequence[Loan], seconds: float, done: Done) -> None:
        """Keep loans, the newest last, with a heartbeat; without any it finds out whether the peer answers."""

    def give_back_later(self, loan: Loan, seconds: float, done: Done) -> None:
        """Give back a loan."""

    def news_later(
        self, epoch: int, version: int, patience: float, answered: Callable[[DigestNews | CacheError], None]
    ) -> None:
        """Ask what the peer has, beyond a version that is known, and have it wait for a change."""

    def close(self) -> None:
        """Close the connection. Idempotent."""


LOOK_UP_SECONDS = 10.0
MOST_PEERS = 256
"""Most peers, those with an address of their own included."""

Resolve = Callable[[str, int], Sequence[str]]
"""Addresses of a name at a port, without repetition. Raises OSError."""


def resolve_name(name: str, port: int) -> list[str]:
    """Addresses of a name, as the system resolves it. Raises OSError."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = dict.fromkeys(str(each[4][0]) for each in found)
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]


class PeerNames:
    """``names``: to look up. ``make``: gives the control of an address and the name that it was found by. ``own``: this
    node's own addresses. ``found``: gets the peers that there are, whenever these have changed. ``most``: peers beside
    those with an address of their own."""

    def __init__(
        self,
        names: Sequence[Address],
        make: Callable[[str, str], PeerControl],
        own: Callable[[], Sequence[str]],
        clock: Callable[[], float],
        resolve: Resolve = resolve_name,
        most: int = MOST_PEERS,
    ) -> None:
        self._names = tuple(names)
        self._make = make
        self._own = own
        self._clock = clock
        self._resolve = resolve
        self._most = most
        self._peers: dict[str, Peer] = {}
        self._addresses: dict[Address, Sequence[str]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peer-names", daemon=True)
        self.found: Callable[[Sequence[Peer]], None] = nothing

    def start(self) -> None:
        if self._names:
            self._thread.start()

    def close(self) -> None:
        """Look up nothing more. Does not wait for the system's answer. Idempotent."""
        self._stopping.set()

    def look_up(self) -> None:
        """Look all names up once. A name that cannot be looked up stands for what it stood for."""
        for name in self._names:
            try:
                self._addresses[name] = self._resolve(name.host, name.port)
            except OSError as error:
                events.warning("peer_name_unknown", peers=f"{name.host}:{name.port}", reason=str(error))
        own = set(self._own())
        wanted = {each: name.host for name, found in self._addresses.items() for each in found if each not in own}
        kept = dict(list(wanted.items())[: self._most])
        if kept.keys() == self._peers.keys():
            return
        gone = [peer for address, peer in self._peers.items() if address not in kept]
        self._peers = {
            address: self._peers.get(address) or Peer(self._make(address, host), self._clock)
            for address, host in kept.items()
        }
        events.event("peers_changed", peers=len(self._peers), left_out=len(wanted) - len(kept))
        self.found(tuple(self._peers.values()))
        for peer in gone:
            peer.control.close()

    def _run(self) -> None:
        while True:
            try:
                self.look_up()
            except Exception:  # noqa: BLE001 - the root of a thread: the next time may be better
                events.failure("peer_names_broke")
            if self._stopping.wait(LOOK_UP_SECONDS):
                return


# Keeps the digests of peers: each is asked again once it has told something, or after a pause where it fails.
#
# A peer that answers at once has the next question at the next look, whatever it told: while engines seal, something
# has always changed there, and questions one after another would take up the peer's loop.

PATIENCE_SECONDS = 20.0
"""Time that a peer waits for a change of its own, seconds."""
QUICK_SECONDS = 1.0
"""Time within which an answer has come at once, seconds."""


class NewsReader:
    """``peers``: those that there are now. ``clock``: monotonic seconds. Any thread."""

    def __init__(self, peers: Callable[[], Sequence[Peer]], clock: Callable[[], float] = time.monotonic) -> None:
        self._peers = peers
        self._clock = clock
        self._asked: set[Peer] = set()
        self._is_open = True
        self._lock = threading.Lock()

    def look(self) -> None:
        """Ask peers of which no answer is under way. Called periodically."""
        for peer in self._peers():
            with self._lock:
                is_due = self._is_open and peer not in self._asked
                if is_due:
                    self._asked.add(peer)
            if is_due:
                self._ask(peer)

    def close(self) -> None:
        with self._lock:
            self._is_open = False

    def _ask(self, peer: Peer) -> None:
        digest, asked_at = peer.digest, self._clock()

        def told(news: DigestNews | CacheError) -> None:
            goes_on = False
            if isinstance(news, CacheError) or not any(each is peer for each in self._peers()):
                peer.digest.forget()  # without its news, a peer may have anything
            else:
                peer.digest.learn(news)
                peer.answered()
                goes_on = self._is_open and self._clock() - asked_at >= QUICK_SECONDS
            if goes_on:
                self._ask(peer)
                return
            with self._lock:
                self._asked.discard(peer)

        try:
            peer.control.news_later(digest.epoch, digest.version, PATIENCE_SECONDS, told)
        except CacheError as error:
            told(error)


# Health of another daemon: what it answers, and what it sends, each with a pause of its own after a failure.
#
# A failure counts once: those of calls that began before the pause that it set was over have the same cause.

LONGEST_PROBE_PAUSE_SECONDS = 1.0
"""Longest pause between two probes of a peer that does not answer, seconds: a probe holds up no request."""
WARN_SECONDS = 300.0
"""Between two warnings that certificates are not trusted."""
ABSENT_SECONDS = 1.0
"""Time for which an absent prefix is not asked for again, seconds."""
MOST_ABSENT = 4096


class Peer:
    """One other daemon, as this one sees it. Any thread. ``counts``: failures by kind.
    ``distrust``: why the two do not trust each other's certificates; empty once the peer has answered since.
    ``is_self``: it is this daemon. ``down_since``: when it stopped answering; None while it answers."""

    def __init__(self, control: PeerControl, clock: Callable[[], float]) -> None:
        self.control = control
        self.counts: Counter[str] = Counter()
        self.digest = PeerDigest()
        self.epoch = 0
        self.reason = ""
        self.distrust = ""
        self.is_self = False
        self.down_since: float | None = None
        self._warn_at = 0.0
        self._clock = clock
        self._answers = BackOff()
        self._bytes = BackOff()
        self._probe_at = 0.0
        self._is_silent = False
        self._absent: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def pause_left(self) -> float:
        """Seconds for which the peer is not asked to lend; 0: it may be asked now."""
        return max(0.0, max(self._answers.until, self._bytes.until) - self._clock())

    @property
    def is_usable(self) -> bool:
        return not self.pause_left

    @property
    def is_up(self) -> bool:
        """True where any request may ask it: no call waited for it in vain since it answered last. One that did is
        asked by probes, and for requests that name it."""
        return not self.is_self and not self._is_silent and self.is_usable

    @property
    def answers(self) -> bool:
        """False from a call without an answer on until it answers again."""
        return not self._answers.pause

    def lacks(self, key: bytes) -> bool:
        """True where a recent question found nothing that begins with this block."""
        with self._lock:
            return self._absent.get(key, 0.0) > self._clock()

    def answered(self, epoch: int = 0) -> None:
        """Note an answer in time. Another ``epoch`` (0: unknown) is another life, which may have what the last one
        lacked."""
        with self._lock:
            self._answers.succeeded(self._clock())
            self.distrust, self.down_since, self._is_silent = "", None, False
            if epoch not in (0, self.epoch):
                self.epoch = epoch
                self._absent.clear()

    def sent(self) -> None:
        """Note that a stream has brought all that it was asked for, and all of it was right."""
        with self._lock:
            self._bytes.succeeded(self._clock())

    def had_nothing(self, key: bytes) -> None:
        """Note that the peer lacks the blocks from this one on."""
        with self._lock:
            self._absent[key] = self._clock() + ABSENT_SECONDS
            self._absent.move_to_end(key)
            while len(self._absent) > MOST_ABSENT:
                self._absent.popitem(last=False)

    def distrusts(self, reason: str) -> bool:
        """Note that a certificate is not trusted, the peer's here or ours there. True where it is time to warn
        again."""
        with self._lock:
            is_new, self.distrust = not self.distrust, reason
            is_due = is_new or self._clock() >= self._warn_at
            if is_due:
                self._warn_at = self._clock() + WARN_SECONDS
            return is_due

    def did_not_answer(self, reason: str, began: float, *, is_absent: bool = False) -> bool:
        """Note that a call that began then had no answer. True where it counts. ``is_absent``: it failed at once, as to
        a daemon that is not started yet, which is asked again soon."""
        with self._lock:
            longest = LONGEST_PAUSE_SECONDS if self._is_silent or not is_absent else FIRST_PAUSE_SECONDS
            counts = self._note(self._answers, reason, began, longest)
            if counts:
                self.down_since = self._clock() if self.down_since is None else self.down_since
                self._is_silent |= not is_absent
            return counts

    def did_not_send(self, reason: str, began: float) -> bool:
        """Note that a loan of then was not sent as it should be. True where it counts."""
        with self._lock:
            return self._note(self._bytes, reason, began, LONGEST_PAUSE_SECONDS)

    def _note(self, back_off: BackOff, reason: str, began: float, longest: float) -> bool:
        """Under the lock: begin a pause. False, without effect, for a call that began before the last pause, or the
        success that ended it, was over."""
        self.counts["failed"] += 1
        self.reason = reason
        if began < back_off.until:
            return False
        back_off.failed(self._clock(), longest)
        return True

    def wants_probe(self) -> bool:
        """True once it is time to try a silent peer, or one that was never tried; that is noted as done."""
        with self._lock:
            now = self._clock()
            if (not self._is_silent and self._probe_at) or now < self._probe_at:
                return False
            self._probe_at = now + min(self._answers.pause or FIRST_PAUSE_SECONDS, LONGEST_PROBE_PAUSE_SECONDS)
            return True


# Peers that a request names: asked only where the operator permits their networks, and forgotten when others come.
#
# Where there are too many, the process whose requests name most loses one: others keep theirs.

MOST_GUESTS = 256
MOST_NETWORKS = 64

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_networks(what: str, text: str) -> tuple[Network, ...]:
    """Parse networks by comma, such as ``10.0.0.0/8,fd00::/8``. Raises InvalidRequest."""
    texts = [each.strip() for each in text.split(",") if each.strip()]
    if len(texts) > MOST_NETWORKS:
        raise InvalidRequest(f"{what}: {len(texts)} networks, and there are at most {MOST_NETWORKS}; name larger ones")
    try:
        return tuple(map(ipaddress.ip_network, texts))
    except ValueError as error:
        raise InvalidRequest(f"{what}: {error}; write networks as 10.0.0.0/8, by comma") from error


class Guests:
    """Peers within ``networks``, each with a control that ``make`` gives for its address. Any thread."""

    def __init__(
        self, networks: Sequence[Network], make: Callable[[str], PeerControl], clock: Callable[[], float]
    ) -> None:
        self._networks = tuple(networks)
        self._make = make
        self._clock = clock
        self._peers: OrderedDict[str, tuple[Peer, Party]] = OrderedDict()
        self._lock = threading.Lock()

    def peer_at(self, address: str, party: Party = BACKGROUND) -> Peer:
        """The peer at HOST:PORT, which ``party`` names now. Raises InvalidRequest, and PermissionDenied where it is in
        none of the networks."""
        host = parse_address("peer", address, least_port=1).host
        if not self._permits(host):
            raise PermissionDenied(
                f"{address} is none of this node's peers, and {host} is not in a network of peer_allow; add one of them"
            )
        with self._lock:
            known = self._peers.get(address)
            peer = Peer(self._make(address), self._clock) if known is None else known[0]
            self._peers[address] = peer, party
            self._peers.move_to_end(address)
            gone = self._take_one() if len(self._peers) > MOST_GUESTS else None
        if gone is not None:
            gone.control.close()
        return peer

    def _take_one(self) -> Peer:
        """Under the lock: of the party with most guests the one that was named longest ago."""
        [(most, _)] = Counter(party for _, party in self._peers.values()).most_common(1)
        return self._peers.pop(next(at for at, (_, party) in self._peers.items() if party == most))[0]

    def all(self) -> list[Peer]:
        with self._lock:
            return [peer for peer, _ in self._peers.values()]

    def _permits(self, host: str) -> bool:
        """True for an address in one of the networks. A name is none: it can mean another address the next time."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address.version == each.version and address in each for each in self._networks)


# Digest of what a node has, some bits a block: it may take a block for there that is not, and never the reverse.
#
# The lender counts, so that blocks can leave; others get its bits, first all of them and then those that flipped since.
# A key is a hash already: parts of it are the numbers of its bits.

HASHES = 4
LEAST_BITS, MOST_BITS = 1 << 13, 1 << 22
BITS_A_BLOCK = 10
"""About one in a hundred blocks that are not there is taken for one that is."""
MOST_FLIPS = 1 << 16
"""Flips that are remembered; a reader that is further behind gets all bits."""
MOST_COUNT = (1 << 16) - 1
FULL_SHARE = 0.9
"""Share of bits set from which on a digest says nothing: two in three blocks that are not there seem to be."""
_WORDS = struct.Struct(f"<{HASHES}Q")


class DigestNews(NamedTuple):
    """State ``version`` of a digest of the life ``epoch``: all ``bits``, or (empty) what ``flips`` since the version
    that was asked for, packed numbers of bits."""

    epoch: int
    version: int
    bits: bytes
    flips: bytes


def bits_for(blocks: int) -> int:
    """Number of bits for a number of blocks, a power of two."""
    return min(MOST_BITS, max(LEAST_BITS, 1 << (BITS_A_BLOCK * blocks).bit_length()))


def words_of(key: bytes) -> tuple[int, ...]:
    """The words of a key, of which bits' numbers are made."""
    return _WORDS.unpack(key)


def numbers_of(keys: bytes, bits: int) -> Any:
    """Numbers of the bits of packed keys, a row for each."""
    return np.frombuffer(keys, "<u8").reshape(-1, HASHES) & np.uint64(bits - 1)


class CountedDigest:
    """PeerDigest of this node's copies. ``size``: bits; ``version`` counts changes from 1 on."""

    def __init__(self, bits: int) -> None:
        self.version = 1
        self.size = bits
        self._set = 0
        self._counts = np.zeros(bits, np.uint16)
        self._flips: deque[tuple[int, Any]] = deque()
        self._remembered = 0
        self._forgotten = 1

    @property
    def is_saturated(self) -> bool:
        """True where nearly all bits are set, so that it tells nothing."""
        return self._set > FULL_SHARE * self.size

    def change(self, keys: bytes, *, came: bool) -> None:
        """Copies of packed keys have come, or gone."""
        numbers = numbers_of(keys, self.size).reshape(-1).astype(np.int64)
        touched, times = np.unique(numbers, return_counts=True)
        before = self._counts[touched].astype(np.int64)
        after = np.clip(before + times if came else before - times, 0, MOST_COUNT)
        self._counts[touched] = np.where(before == MOST_COUNT, MOST_COUNT, after)  # a full counter stays
        flipped = touched[(before > 0) != (self._counts[touched] > 0)].astype("<u4")
        self._set += len(flipped) if came else -len(flipped)
        if not len(flipped):
            return
        self.version += 1
        self._flips.append((self.version, flipped))
        self._remembered += len(flipped)
        while self._remembered > MOST_FLIPS:
            self._forgotten, gone = self._flips.popleft()
            self._remembered -= len(gone)

    def news(self, epoch: int, known_version: int) -> DigestNews:
        """Changes since a version that a reader knows; 0: it knows none."""
        if not self._forgotten <= known_version <= self.version:
            bits = np.packbits(self._counts > 0, bitorder="little").tobytes()
            return DigestNews(epoch, self.version, bits, b"")
        flips = [flipped for version, flipped in self._flips if version > known_version]
        return DigestNews(epoch, self.version, b"", b"".join(each.tobytes() for each in flips))


class PeerDigest:
    """Another node's digest, as far as it has told: ``bits``, empty until it has. Any thread may read; one writes."""

    def __init__(self) -> None:
        self.epoch = 0
        self.version = 0
        self.bits = b""
        self.is_saturated = False

    @property
    def is_known(self) -> bool:
        """True once the node has told which blocks it has. One that seems to have all of them has not."""
        return bool(self.bits) and not self.is_saturated

    def learn(self, news: DigestNews) -> None:
        if news.bits:
            count = len(news.bits)
            if count & (count - 1) or not LEAST_BITS <= 8 * count <= MOST_BITS:
                self.forget()
                return
            self.bits = news.bits
        elif news.flips:
            if news.epoch != self.epoch or len(news.flips) % 4 or not self.bits:
                self.forget()
                return
            bits = np.frombuffer(self.bits, np.uint8).copy()
            flips = np.frombuffer(news.flips, "<u4") % np.uint32(8 * len(bits))
            np.bitwise_xor.at(bits, flips >> 3, np.uint8(1) << (flips & 7).astype(np.uint8))
            self.bits = bits.tobytes()
        self.epoch, self.version = news.epoch, news.version
        if news.bits or news.flips:
            self.is_saturated = int.from_bytes(self.bits, "little").bit_count() > FULL_SHARE * 8 * len(self.bits)

    def forget(self) -> None:
        """Know nothing of the node any more."""
        self.epoch, self.version, self.bits, self.is_saturated = 0, 0, b"", False

    def has(self, words: Sequence[int]) -> bool:
        """True where the node has the block of these words of a key, most likely."""
        bits = self.bits
        mask = 8 * len(bits) - 1
        for word in words:
            number = word & mask
            if not bits or not bits[number >> 3] >> (number & 7) & 1:
                return False
        return True

    def reach(self, keys: Sequence[bytes]) -> int:
        """Count the first keys that the node has, most likely: it has no block without those above."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) >> 1
            if self.has(words_of(keys[middle - 1])):
                low = middle
            else:
                high = middle - 1
        return low
