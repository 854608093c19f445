"""A real Mooncake Store whose master, servers and writers freeze and die: nothing wrong comes out, nothing hangs."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachesvc.model.errors import InvalidRequest, Unavailable
from cachesvc.storage.mooncake.engine import MooncakeStorage
from cachesvc.storage.mooncake.native import MooncakeOptions, mooncake_options
from cachesvc.storage.objects import ObjectStore, Verb
from cachesvc.storage.seam import ObjectName, Outcome
from cachesvc.storage.spec import parse_storage
from tests.contracts.mooncake_rig import SEGMENT_BYTES, Cluster, MooncakeTurning, Program, free_port, require
from tests.contracts.storage_rig import FAR, PAGE_BYTES, Asked, Bench, name_of

OK, MISS, WRONG, BUSY, FAILED, LATE = (
    Outcome.OK,
    Outcome.MISS,
    Outcome.WRONG,
    Outcome.BUSY,
    Outcome.FAILED,
    Outcome.LATE,
)
GONE = {MISS, FAILED, LATE}
LARGE = (4 << 20,)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    require()
    made = Cluster(tmp_path)
    yield made
    made.close()


@pytest.fixture
def bench(cluster: Cluster) -> Iterator[Bench]:
    made = Bench(MooncakeTurning(cluster)).start()
    yield made
    made.turning.close()


def test_a_frozen_server_ends_the_wait_and_not_the_call(cluster: Cluster, bench: Bench) -> None:
    """The read comes back when the server goes on; until then its memory must not be used."""
    name = name_of("a")
    bench.keep([name])
    cluster.server.freeze()
    asked = bench.get([name], deadline=bench.now + 1)
    bench.now += 2
    assert bench.store.expire() == 1
    assert asked.told() == [LATE]
    assert asked.back == []
    cluster.server.thaw()
    bench.turning.crank()
    assert asked.back == [0]
    assert bench.fetch([name]) == [OK], "and it is as good as new"


def test_the_end_of_the_daemon_does_not_wait_for_a_frozen_server(cluster: Cluster, bench: Bench) -> None:
    name = name_of("a")
    bench.keep([name])
    cluster.server.freeze()
    asked = bench.get([name], deadline=bench.now + 1)
    bench.turning.close()
    assert asked.outcomes.get(0) in (None, BUSY), "it hangs, and its memory with it, or had not begun"
    cluster.server.thaw()
    bench.turning.crank()


def test_what_a_dead_server_had_is_gone_whatever_the_master_says(cluster: Cluster, bench: Bench) -> None:
    names = [name_of(key) for key in "abc"]
    bench.keep(names)
    cluster.server.kill()
    assert set(bench.fetch(names)) <= GONE
    assert set(bench.keep([name_of("d")])) <= {FAILED, BUSY}


def test_a_master_that_dies_and_comes_again_knows_nothing(cluster: Cluster, bench: Bench) -> None:
    name = name_of("a")
    bench.keep([name])
    cluster.master.kill()
    assert bench.fetch([name]) == [FAILED]
    assert bench.keep([name_of("b")]) == [FAILED]
    assert bench.exists([name]) == [False]
    with pytest.raises(Unavailable):
        bench.turning.backend.purge(None)
    cluster.master = cluster.start_master()
    assert bench.fetch([name]) == [MISS]
    cluster.wait_for_server()
    assert bench.keep([name]) == [OK]
    assert bench.fetch([name]) == [OK]


def test_a_master_that_is_not_there_yet(cluster: Cluster) -> None:
    """The daemon starts all the same, and finds it later."""
    cluster.master.kill()
    bench = Bench(MooncakeTurning(cluster)).start()
    try:
        assert bench.keep([name_of("a")]) == [FAILED]
        assert bench.exists([name_of("a")]) == [False]
        cluster.master = cluster.start_master()
        cluster.wait_for_server()
        name = name_of("b")
        assert cluster.raw.put(name.text, b"anything") == 0
        while bench.exists([name]) == [False]:  # until the engine has found the master
            assert cluster.server.process.poll() is None
        assert bench.keep([name_of("a")]) == [OK]
        assert bench.fetch([name_of("a"), name]) == [OK, WRONG]
    finally:
        bench.turning.close()


def test_a_master_that_is_frozen_holds_up_nobody(cluster: Cluster) -> None:
    """Its port is there, and nothing behind it: only another process finds that out."""
    cluster.master.freeze()
    bench = Bench(MooncakeTurning(cluster)).start()
    try:
        asked = bench.put([name_of("a")], deadline=_soon())
        assert asked.outcomes.get(0) in (None, BUSY, FAILED)
        cluster.master.thaw()
        name = name_of("b")
        assert cluster.raw.put(name.text, b"anything") == 0
        while bench.exists([name]) == [False]:
            assert cluster.server.process.poll() is None
        assert bench.keep([name_of("c")]) == [OK]
    finally:
        bench.turning.close()


WRITER = """
    import sys, mmap
    from cachesvc.storage.mooncake.native import connect, load, addresses, replication
    from cachesvc.storage.mooncake.native import MooncakeOptions
    master, size, *names = sys.argv[1:]
    module = load()
    library = connect(module, MooncakeOptions(master))
    chunk = memoryview(mmap.mmap(-1, int(size)))
    chunk[:] = b"#" * len(chunk)
    where, sizes = addresses(chunk[:128], [chunk[128:]])
    assert library.register_buffer(where[0], len(chunk)) == 0
    print("begins", flush=True)
    count = len(names)
    print(library.batch_put_from_multi_buffers(names, [where] * count, [sizes] * count, replication(module, 1)))
"""


def begin_and_stop(cluster: Cluster, names: list[ObjectName], size_bytes: int) -> subprocess.Popen[str]:
    """Another writer of ``names``, held up in the middle by its server: its put has begun and not ended."""
    cluster.server.freeze()
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), cluster.options.master, str(size_bytes)]
        + [name.text for name in names],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    while "begins" not in (line := writer.stdout.readline()):
        assert line, "the writer died too soon"
    while cluster.raw.get_size(names[0].text) != -703:  # the master knows that a write is under way
        assert writer.poll() is None
    return writer


def test_a_writer_that_died_in_the_middle_is_put_again(cluster: Cluster, bench: Bench) -> None:
    """The library says 0 to everybody's puts of the same names, and nothing is stored, until the discard limit."""
    names = [name_of(key) for key in "ab"]
    writer = begin_and_stop(cluster, names, PAGE_BYTES + 128)
    writer.kill()
    writer.wait()
    cluster.server.thaw()
    hasty = [bench.put([name], deadline=_soon()) for name in names]
    bench.turning.crank()
    assert all(set(asked.told()) <= {FAILED, BUSY} for asked in hasty), "what is not there is not said to be"
    assert bench.fetch(names) == [MISS, MISS]
    patient = bench.put(names)
    bench.turning.crank()
    assert patient.told() == [OK, OK]
    assert bench.fetch(names) == [OK, OK]


def _soon() -> float:
    return time.monotonic() + 1.0


def test_bytes_of_a_writer_that_was_thought_dead_are_never_served(tmp_path: Path) -> None:
    """Frozen for longer than the release limit, it writes into memory that is other objects' by now; the library reads
    those with success."""
    require()
    cluster = Cluster(tmp_path, discard=1, release=2)
    bench = Bench(MooncakeTurning(cluster)).start()
    try:
        late = [name_of(f"late {at}") for at in range(8)]
        writer = begin_and_stop(cluster, late, LARGE[0] + 128)
        writer.send_signal(signal.SIGSTOP)
        cluster.server.thaw()
        names = [name_of(f"{at}") for at in range(2 * SEGMENT_BYTES // LARGE[0])]
        for name in names:
            bench.keep([name], LARGE)
        writer.send_signal(signal.SIGCONT)
        writer.communicate()
        told = [bench.fetch([name], LARGE)[0] for name in names]  # looks at every byte of what is OK
        assert set(told) <= {OK, MISS, WRONG, FAILED, LATE}
        assert OK in told
    finally:
        bench.turning.close()
        cluster.close()


def test_more_than_it_has_room_for(bench: Bench) -> None:
    """Objects go by themselves, or what comes is BUSY; nothing is said to be kept that is not."""
    names = [name_of(f"{at}") for at in range(2 * SEGMENT_BYTES // LARGE[0])]
    kept = [bench.keep([name], LARGE)[0] for name in names]
    assert set(kept) <= {OK, BUSY, FAILED}
    assert kept.count(OK) > 8
    assert set(bench.fetch(names[-8:], LARGE) + bench.fetch(names[:8], LARGE)) <= {OK, *GONE}


def test_memory_that_was_not_registered_is_not_touched(bench: Bench) -> None:
    name = name_of("a")
    bench.keep([name])
    page = memoryview(mmap.mmap(-1, PAGE_BYTES))
    asked = Asked([name], [(page,)])
    bench.store.prepare(Verb.GET, asked.names, asked.pages, FAR, asked.each, asked.back.append)()
    bench.turning.crank()
    assert asked.told() == [FAILED]
    assert bytes(page) == bytes(PAGE_BYTES)


def test_two_daemons_share_one_store(cluster: Cluster, bench: Bench) -> None:
    """One's objects are the other's, also of those that both put at once."""
    other = Bench(MooncakeTurning(cluster)).start()
    try:
        names = [name_of(f"{at}") for at in range(32)]
        first, second = bench.put(names), other.put(list(reversed(names)))
        bench.turning.crank()
        other.turning.crank()
        assert bench.fetch(names) == other.fetch(names) == [OK] * 32
        assert set(first.told() + second.told()) <= {OK, FAILED}
    finally:
        other.turning.close()


# -- what needs no store -------------------------------------------------------------------------------------------


def test_options_by_their_names() -> None:
    spec = parse_storage(
        "mooncake:kv:50051?segment=1GiB&readers=8&discard=3s&host=10.0.0.1&write=through", ("mooncake",)
    )
    made = mooncake_options(spec)
    assert made == MooncakeOptions("kv:50051", "10.0.0.1", 1 << 30, readers=8, discard=3.0)
    assert made.address == ("kv", 50051)
    assert MooncakeOptions("[::1]:7").address == ("::1", 7)


@pytest.mark.parametrize(
    "text",
    [
        "mooncake:kv",
        "mooncake::50051",
        "mooncake:kv:0",
        "mooncake:kv:99999",
        "mooncake:kv:50051?segmnt=1",
        "mooncake:kv:50051?readers=0",
        "mooncake:kv:50051?writers=65",
        "mooncake:kv:50051?replicas=9",
        "mooncake:kv:50051?replicas=1.5",
        "mooncake:kv:50051?protocol=pigeon",
        "mooncake:kv:50051?discard=soon",
    ],
)
def test_options_that_are_wrong(text: str) -> None:
    with pytest.raises(InvalidRequest, match="storage"):
        mooncake_options(parse_storage(text, ("mooncake",)))


def test_a_library_that_is_not_there_says_what_to_install() -> None:
    def missing() -> object:
        raise Unavailable("install it")

    store = ObjectStore(MooncakeStorage(MooncakeOptions(f"127.0.0.1:{free_port()}"), missing), lambda: 0.0)
    with pytest.raises(Unavailable, match="install"):
        store.start()
    store.backend.close()


def test_programs_are_the_packages_own(tmp_path: Path) -> None:
    """A console script would leave its child behind."""
    require()
    program = Program(tmp_path, "mooncake_master", f"-rpc_port={free_port()}", f"-metrics_port={free_port()}")
    assert Path(f"/proc/{program.process.pid}/exe").resolve().name == "mooncake_master"
    program.kill()
