"""Traces from files that the tests write: what is read, and by which line a broken one is refused."""

from __future__ import annotations

import json
import pickle
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard
from cachesvc_ctl.core.command import MissingExtraError
from cachesvc_lab.traces import (
    MAX_LINE_BYTES,
    MAX_NUMBER,
    SyntheticTraceSpec,
    TraceError,
    TraceRequest,
    generate_trace,
    read_trace,
    write_synthetic_trace,
)

from tests.oracle import distinct_blocks, infinite_hits


def a_line(ids: list[int], *, tokens: int | None = None, **changes: object) -> str:
    fields: dict[str, object] = {
        "timestamp": 7,
        "input_length": len(ids) * 512 if tokens is None else tokens,
        "output_length": 3,
        "hash_ids": ids,
    }
    return json.dumps(fields | changes)


GOOD = a_line([1, 2])


def write_plain(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def write_compressed(folder: Path, data: bytes) -> Path:
    path = folder / "trace.jsonl.zst"
    path.write_bytes(data)
    return path


def failure_of(path: Path, **options: int) -> TraceError:
    with pytest.raises(TraceError) as caught:
        list(read_trace(path, **options))  # type: ignore[arg-type]
    assert caught.value.path == path
    assert caught.value.remedy
    return caught.value


def test_the_fields_of_a_request_are_kept_in_file_order(tmp_path: Path) -> None:
    path = write_plain(
        tmp_path,
        a_line([4, 5], timestamp=12, output_length=0),
        a_line([4, 6, 7], timestamp=30, output_length=9, session="ignored"),
    )
    assert list(read_trace(path)) == [
        TraceRequest(0, 12, 1024, 0, (4, 5)),
        TraceRequest(1, 30, 1536, 9, (4, 6, 7)),
    ]


def test_only_filled_blocks_are_kept(tmp_path: Path) -> None:
    path = write_plain(tmp_path, a_line([1], tokens=511), a_line([], tokens=511), a_line([1, 2], tokens=1023))
    assert [request.block_ids for request in read_trace(path)] == [(), (), (1,)]


def test_the_block_size_is_the_caller_s(tmp_path: Path) -> None:
    path = write_plain(tmp_path, a_line([1, 2, 3], tokens=40))
    assert [request.block_ids for request in read_trace(path, block_tokens=16)] == [(1, 2)]


def test_another_block_size_is_refused_and_not_misread(tmp_path: Path) -> None:
    path = write_plain(tmp_path, a_line([1, 2, 3, 4]))
    for block_tokens in (256, 1024):
        error = failure_of(path, block_tokens=block_tokens)
        assert error.line_number == 1
        assert "4 hash_ids" in error.reason
        assert "block_tokens" in error.remedy


def test_limit_ends_the_reading_before_what_is_broken_behind_it(tmp_path: Path) -> None:
    path = write_plain(tmp_path, GOOD, GOOD, "{")
    assert [request.index for request in read_trace(path, limit=2)] == [0, 1]
    assert failure_of(path, limit=3).line_number == 3


def test_requests_come_before_the_broken_line_is_reached(tmp_path: Path) -> None:
    requests = read_trace(write_plain(tmp_path, GOOD, GOOD, "{"))
    assert next(requests).index == 0
    assert next(requests).index == 1
    with pytest.raises(TraceError, match="line 3"):
        next(requests)


@pytest.mark.parametrize("frames", [1, 3], ids=["one_frame", "three_frames"])
def test_a_compressed_trace_reads_like_the_plain_one(tmp_path: Path, frames: int) -> None:
    lines = [
        a_line(list(range(length))) for length in range(400)
    ]  # 400 KiB: several chunks, lines across their borders
    plain = write_plain(tmp_path, *lines)
    data = plain.read_bytes()
    cuts = [len(data) * part // frames for part in range(frames + 1)]
    parts = [data[start:end] for start, end in pairwise(cuts)]
    compressed = write_compressed(tmp_path, b"".join(zstandard.compress(part) for part in parts))
    requests = list(read_trace(compressed))
    assert len(requests) == 400
    assert requests == list(read_trace(plain))


def test_line_ends_and_blank_lines_do_not_matter_but_count(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(GOOD.encode() + b"\r\n\r\n \n" + GOOD.encode() + b"\n\n" + GOOD.encode())
    assert [request.index for request in read_trace(path)] == [0, 1, 2]
    path.write_bytes(path.read_bytes() + b"\n\n{")
    assert failure_of(path).line_number == 8


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "no JSON"),
        ('{"timestamp": 1} x', "no JSON"),
        ("[" * 100_000, "no JSON"),
        ('{"timestamp": ' + "9" * 5000 + "}", "no JSON"),
        ("[1]", "JSON list"),
        ("null", "JSON NoneType"),
        ('{"input_length": 0, "output_length": 0, "hash_ids": []}', "timestamp is missing"),
        ('{"timestamp": 0, "output_length": 0, "hash_ids": []}', "input_length is missing"),
        ('{"timestamp": 0, "input_length": 0, "hash_ids": []}', "output_length is missing"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 0}', "hash_ids is missing"),
        (a_line([1], timestamp=-1), "timestamp is -1"),
        (a_line([1], timestamp=1.5), "timestamp is 1.5"),
        (a_line([1], timestamp=True), "timestamp is True"),
        (a_line([1], timestamp=MAX_NUMBER + 1), f"timestamp is {MAX_NUMBER + 1}"),
        (a_line([1], input_length="512"), "input_length is '512'"),
        (a_line([1], input_length=-512), "input_length is -512"),
        (a_line([1], output_length=None), "output_length is None"),
        (a_line([1], output_length=float("nan")), "output_length is nan"),
        (a_line([1], hash_ids={"1": 1}), "hash_ids is a dict"),
        (a_line([1, -2]), "hash_ids is -2"),
        (a_line([1, True]), "hash_ids is True"),
        (a_line([1, 2], hash_ids=[1, "2"]), "hash_ids is '2'"),
        (a_line([1], tokens=1024), "1 hash_ids, but 1024 tokens fill 2"),
    ],
)
def test_a_broken_line_is_refused_by_its_number(tmp_path: Path, line: str, reason: str) -> None:
    error = failure_of(write_plain(tmp_path, GOOD, line, GOOD))
    assert error.line_number == 2
    assert reason in error.reason
    assert str(error).startswith(f"{error.path}, line 2: ")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(GOOD.encode() + b"\n\xff\xfe\x00\n")
    assert failure_of(path).line_number == 2


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b" " * (2 * MAX_LINE_BYTES))
    error = failure_of(path)
    assert error.line_number == 1
    assert "longer than" in error.reason


@pytest.mark.parametrize(
    ("first", "second", "block"),
    [([1, 2, 3], [1, 3], 3), ([1, 2], [2], 2), ([2], [1, 2], 2), ([1, 2], [2, 1], 2)],
    ids=["skips_one", "becomes_root", "was_root", "turned_round"],
)
def test_an_id_with_two_parents_is_refused(tmp_path: Path, first: list[int], second: list[int], block: int) -> None:
    path = write_plain(tmp_path, a_line(first), a_line(second))
    error = failure_of(path)
    assert error.line_number == 2
    assert error.reason.startswith(f"block {block} follows")
    assert [request.block_ids for request in read_trace(path, check_parents=False)] == [
        tuple(first),
        tuple(second),
    ]


def test_an_id_twice_in_one_prompt_is_refused(tmp_path: Path) -> None:
    assert failure_of(write_plain(tmp_path, a_line([1, 2, 1]))).line_number == 1
    assert failure_of(write_plain(tmp_path, a_line([1, 1]))).line_number == 1


def test_a_compressed_trace_that_was_cut_anywhere_is_refused(tmp_path: Path) -> None:
    lines = "".join(a_line(list(range(n))) + "\n" for n in range(30)).encode()
    whole = zstandard.compress(lines[:1000]) + zstandard.compress(lines[1000:])
    frame_end = len(zstandard.compress(lines[:1000]))  # a cut just here leaves a whole frame: only its line is broken
    for length in range(1, len(whole)):
        error = failure_of(write_compressed(tmp_path, whole[:length]))
        assert error.line_number is not None
        assert ("truncated" in error.reason) == (length != frame_end)
    assert len(list(read_trace(write_compressed(tmp_path, whole)))) == 30


def test_what_lies_before_the_cut_can_be_read(tmp_path: Path) -> None:
    compressor = zstandard.ZstdCompressor().compressobj()
    data = compressor.compress((GOOD + "\n").encode() * 3) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    path = write_compressed(tmp_path, data)
    assert len(list(read_trace(path, limit=3))) == 3
    assert failure_of(path).line_number == 4


def test_a_file_that_is_no_zstd_is_refused(tmp_path: Path) -> None:
    error = failure_of(write_compressed(tmp_path, (GOOD + "\n").encode()))
    assert error.line_number == 1
    assert "zstd stream is broken" in error.reason
    trailing = zstandard.compress((GOOD + "\n").encode()) + b"no frame"
    assert "zstd stream is broken" in failure_of(write_compressed(tmp_path, trailing)).reason


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_a_request_is_refused(tmp_path: Path, content: bytes) -> None:
    plain = tmp_path / "trace.jsonl"
    plain.write_bytes(content)
    for path in (
        plain,
        write_compressed(tmp_path, zstandard.compress(content)),
        write_compressed(tmp_path, b""),
    ):
        error = failure_of(path)
        assert error.line_number is None
        assert "no request" in error.reason


def test_what_is_no_trace_is_refused_when_asked_for_and_not_later(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(GOOD)
    (tmp_path / "folder.jsonl").mkdir()
    for name, reason in (
        ("trace.json", "suffix"),
        ("trace.zst", "suffix"),
        ("none.jsonl", "no such file"),
        ("folder.jsonl", "no such file"),
    ):
        with pytest.raises(TraceError, match=reason) as caught:
            read_trace(tmp_path / name)
        assert caught.value.line_number is None


@pytest.mark.parametrize("options", [{"block_tokens": 0}, {"limit": 0}, {"limit": -1}])
def test_limits_that_make_no_sense_are_the_caller_s_fault(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        read_trace(write_plain(tmp_path, GOOD), **options)  # type: ignore[arg-type]


def test_without_zstandard_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_compressed(tmp_path, zstandard.compress(GOOD.encode()))
    plain = write_plain(tmp_path, GOOD)
    monkeypatch.setitem(sys.modules, "zstandard", None)  # what an import finds where nothing is installed
    with pytest.raises(MissingExtraError, match=r"\[replay\]") as caught:
        read_trace(path)
    assert (caught.value.module, caught.value.extra) == ("zstandard", "replay")
    assert len(list(read_trace(plain))) == 1


def test_the_errors_survive_a_trip_between_processes(tmp_path: Path) -> None:
    error = failure_of(write_plain(tmp_path, "{"))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.line_number == 1
    missing = MissingExtraError("zstandard", "replay", "reading")
    assert str(pickle.loads(pickle.dumps(missing))) == str(missing)


def test_a_synthetic_trace_is_a_trace_that_reuses_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    spec = SyntheticTraceSpec(requests=400, seed=5)
    assert write_synthetic_trace(path, spec) == path.stat().st_size
    requests = list(read_trace(path))
    assert len(requests) == 400
    times = [request.timestamp_ms for request in requests]
    assert times == sorted(times)
    assert max(request.input_tokens for request in requests) <= spec.max_prompt_tokens
    assert min(request.output_tokens for request in requests) >= 1
    counts = infinite_hits(requests)
    assert 0.4 < counts.hits / counts.blocks < 0.98
    assert counts.computed == distinct_blocks(requests)
    roots = [request.block_ids[0] for request in requests if request.block_ids]
    assert 2 <= len(set(roots)) <= spec.system_prompts


def test_the_unfilled_block_of_a_synthetic_trace_is_never_met_again() -> None:
    unfilled: list[int] = []
    filled: set[int] = set()
    for line in generate_trace(SyntheticTraceSpec(requests=200)):
        assert len(line["hash_ids"]) == -(-line["input_length"] // 512)
        filled.update(line["hash_ids"][: line["input_length"] // 512])
        unfilled += line["hash_ids"][line["input_length"] // 512 :]
    assert len(set(unfilled)) == len(unfilled) > 100
    assert filled.isdisjoint(unfilled)


def test_a_seed_stands_for_the_bytes_of_a_synthetic_trace(tmp_path: Path) -> None:
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_synthetic_trace(tmp_path / f"{name}.jsonl", SyntheticTraceSpec(requests=50, seed=seed))
        texts.append((tmp_path / f"{name}.jsonl").read_bytes())
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_a_synthetic_trace_keeps_to_small_prompts_and_odd_blocks(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    spec = SyntheticTraceSpec(
        requests=200,
        block_tokens=7,
        system_tokens_min=0,
        system_tokens_max=30,
        max_prompt_tokens=31,
        turns_mean=1,
    )
    write_synthetic_trace(path, spec)
    requests = list(read_trace(path, block_tokens=7))
    assert len(requests) == 200
    assert max(request.input_tokens for request in requests) <= 31


def test_a_synthetic_trace_has_one_form(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"plain \.jsonl"):
        write_synthetic_trace(tmp_path / "made.jsonl.zst", SyntheticTraceSpec())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"requests": 0},
        {"system_prompts": 0},
        {"block_tokens": 0},
        {"zipf_exponent": -1.0},
        {"conversations_per_second": 0.0},
        {"think_seconds_mean": float("nan")},
        {"turns_mean": 0.5},
        {"system_tokens_min": 9000},
        {"max_prompt_tokens": 100},
    ],
)
def test_a_spec_out_of_range_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        SyntheticTraceSpec(**changes)  # type: ignore[arg-type]
