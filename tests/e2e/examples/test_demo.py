"""The demonstration as a newcomer runs it, and its engine where the cache fails it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cachesvc_ctl.core.daemon_process import DaemonProcess

from examples.demo import COLD, DEVICE, HOST, RESTART, Question, VariantReport, conclude, daemon_flags
from examples.engine import Answer, EngineSettings, layout_of
from examples.engine_process import EngineFailed, EngineProcess
from examples.tiny_transformer.variants import DEMO, VARIANTS
from tests.forked_daemon import ForkedDaemon
from tests.long_cases import IS_LONG

ROOT = Path(__file__).resolve().parents[3]
PROMPT = np.arange(100, dtype=np.int32)
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def reference() -> Answer:
    with EngineProcess(EngineSettings("reference", "tiny-gqa")) as engine:
        return engine.ask(PROMPT, NEW_TOKENS)


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with ForkedDaemon(daemon_flags(layout_of(VARIANTS["tiny-gqa"]))) as daemon:
        yield daemon


def test_the_quick_demo_is_token_identical_for_every_model(tmp_path: Path) -> None:
    """For the first one alone, unless ``CACHESVC_LONG`` is set: its script is the same for all."""
    out, names = tmp_path / "demo.json", list(DEMO)[: None if IS_LONG else 1]
    command = [sys.executable, "-m", "examples.demo", "--quick", "--json", str(out), "--variants", *names]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{8 * len(names)} answers, all token-identical" in run.stdout.splitlines()[-1]
    variants = json.loads(out.read_text())["variants"]
    assert [each["variant"] for each in variants] == names
    for each in variants:
        check_measurements(each)


def check_measurements(variant: dict[str, object]) -> None:
    passes, loaded, questions = variant["passes"], variant["loaded_bytes"], variant["questions"]
    assert isinstance(passes, dict)
    assert isinstance(loaded, dict)
    assert isinstance(questions, list)
    assert set(passes) == {COLD, DEVICE, RESTART, HOST}
    assert variant["problems"] == []
    assert variant["identical"] == variant["answers"] == len(passes) * len(questions)
    assert passes[COLD][0]["device_tokens"] == passes[COLD][0]["host_tokens"] == 0
    assert loaded[DEVICE] == loaded[RESTART] == 0 < loaded[HOST]
    for name, answers in passes.items():
        assert [answer["tokens"] for answer in answers] == [question["tokens"] for question in questions]
        assert all(answer["first_token_seconds"] > 0 for answer in answers), name


def test_an_engine_answers_by_itself_where_its_pool_is_too_small(daemon: DaemonProcess, reference: Answer) -> None:
    with EngineProcess(EngineSettings("small", "tiny-gqa", daemon.socket, device_blocks=2, host_blocks=2)) as engine:
        answer = engine.ask(PROMPT, NEW_TOKENS)
    assert answer.tokens == reference.tokens
    assert answer.went_alone.startswith("PoolExhausted")


def test_an_engine_answers_by_itself_once_the_daemon_is_gone(daemon: DaemonProcess, reference: Answer) -> None:
    settings = EngineSettings("left", "tiny-gqa", daemon.socket, device_blocks=32, host_blocks=32)
    with EngineProcess(settings) as engine:
        assert engine.ask(PROMPT, NEW_TOKENS).went_alone == ""
        daemon.process.kill()
        daemon.process.wait()
        answer = engine.ask(PROMPT, NEW_TOKENS)
    assert answer.tokens == reference.tokens
    assert answer.went_alone.startswith("DaemonUnavailable")


def test_an_engine_that_cannot_start_is_told() -> None:
    with pytest.raises(EngineFailed, match="has ended"):
        EngineProcess(EngineSettings("lost", "tiny-gqa", "/nowhere/cachesvc.sock", 4, 4)).start()


@pytest.mark.parametrize(
    ("tokens", "problems", "code", "last_line"),
    [
        ([1, 2], [], 0, "1 answers, all token-identical, in 3 s"),
        ([1, 3], [], 1, "1 answers, 1 of them differ from the reference, in 3 s"),
        ([1, 2], ["nothing was loaded"], 1, "1 answers, all token-identical, in 3 s; problems: 1, see above"),
    ],
)
def test_the_conclusion_is_what_was_found(
    capsys: pytest.CaptureFixture[str], tokens: list[int], problems: list[str], code: int, last_line: str
) -> None:
    question = Question("text/talk", 1, PROMPT, Answer([1, 2], 1.0))
    report = VariantReport("tiny-gqa", 16, [question], {COLD: [Answer(tokens, 1.0)]}, problems=problems)
    assert conclude([report], 3.0) == code
    assert capsys.readouterr().out.splitlines() == [*problems, last_line]


def test_fifty_lines_are_an_engine(daemon: DaemonProcess) -> None:
    """The integrator's guide shows this file: a second request, and a second process, find the first one's blocks."""
    command = [sys.executable, "-m", "examples.fifty_lines", daemon.socket]
    runs = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    first, second, third, fourth = (
        re.fullmatch(r"token (\d+), (\d+) of 1000 .*", line) for run in runs for line in run.splitlines()
    )
    assert first is not None
    assert [each[2] if each else None for each in (first, second, third, fourth)] == ["0", "992", "992", "992"]
    assert [each[1] if each else None for each in (second, third, fourth)] == [first[1]] * 3
