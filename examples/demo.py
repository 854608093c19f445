"""Shows what the daemon is for: engines share one cache in place, and it outlives them. Run by `make demo`.

For each model one daemon is started, and the same questions are asked five times: without a cache, of an engine that
finds the cache empty, of a second engine, of the first one after it was killed and started anew, and with only the
host's copies left. Every answer must be the reference's, token by token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import grpc
from cachesvc_client import Layout
from cachesvc_ctl.core.daemon_process import DaemonFailed, DaemonProcess
from kvcache.v1 import admin_pb2, admin_pb2_grpc

from examples.engine import Answer, EngineSettings, layout_of
from examples.engine_process import EngineFailed, EngineProcess
from examples.texts import Conversation, conversations
from examples.tiny_transformer.tokens import Tokens, chat_prompt
from examples.tiny_transformer.variants import DEMO, VARIANTS

POOL_BLOCKS = 320  # on each tier: all questions of a variant take about half of that
PLANE_SLACK_BYTES = 1 << 20  # planes and slabs begin at round addresses
ADMIN_SECONDS = 10.0
SETTLE_SECONDS = 30.0

COLD, DEVICE, RESTART, HOST = "cold", "device", "restart", "host"

INTRODUCTION = """\
A daemon owns the KV cache of this machine, and engines compute in its pages. The engines here are small but real
transformers (random weights, so what they answer is noise, but always the same noise), asked about a real text.
TTFT is the time to the first token: from the request's arrival in the engine to the first token of the answer.
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """Questions of the demo: conversations, cut to what the time allows, and the number of tokens of an answer."""

    conversations: tuple[Conversation, ...]
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Question:
    """One turn with all that came before it, and what the model answers without a cache."""

    conversation: str
    turn: int
    prompt: Tokens
    reference: Answer

    @property
    def label(self) -> str:
        """Name in messages."""
        return f"{self.conversation}, turn {self.turn}"


@dataclass(slots=True)
class VariantReport:
    """Results of one model. ``passes``: by name, the answers in the order of ``questions``."""

    variant: str
    block_tokens: int
    questions: list[Question] = field(default_factory=list)
    passes: dict[str, list[Answer]] = field(default_factory=dict)
    loaded_bytes: dict[str, int] = field(default_factory=dict)
    attach_seconds: float = 0.0
    restart_seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def answers(self) -> int:
        """Number of answers compared with the reference."""
        return sum(map(len, self.passes.values()))

    @property
    def identical(self) -> int:
        """Number of answers equal to the reference, token by token."""
        return sum(
            answer.tokens == question.reference.tokens
            for answers in self.passes.values()
            for question, answer in zip(self.questions, answers, strict=True)
        )


class Demonstration:
    """One variant's run against a daemon of its own."""

    def __init__(self, variant: str, plan: Plan, daemon: DaemonProcess, admin: admin_pb2_grpc.AdminServiceStub) -> None:
        self._plan = plan
        self._admin = admin
        self._without_cache = EngineSettings("reference", variant)
        self._with_cache = EngineSettings("", variant, daemon.socket, POOL_BLOCKS, POOL_BLOCKS)
        self.report = VariantReport(variant, VARIANTS[variant].block_tokens)

    def run(self) -> VariantReport:
        """Run all passes in the order of the demo."""
        with EngineProcess(self._without_cache) as reference:
            say("  reference, a process without a cache: it computes every prompt from its first token on")
            self._ask_reference(reference)
        with ExitStack() as stack:
            first = stack.enter_context(EngineProcess(replace(self._with_cache, name="engine-a")))
            second = stack.enter_context(EngineProcess(replace(self._with_cache, name="engine-b")))
            self._serve(COLD, first, "engine A, cache empty at first: it finds only what it has just computed itself")
            self._serve(DEVICE, second, "engine B, another process: attends to A's pages where they lie")
            first.kill()
            say("  engine A is killed (SIGKILL) and started anew")
            heir = stack.enter_context(EngineProcess(replace(self._with_cache, name="engine-a")))
            self._serve(RESTART, heir, "engine A after its restart: the cache is still there")
            self.report.attach_seconds = heir.ready.attach_seconds
            self.report.restart_seconds = heir.seconds_to_first_token
            say(
                f"    attached in {heir.ready.attach_seconds * 1e3:.0f} ms; from process start to the first token "
                f"{heir.seconds_to_first_token:.2f} s, most of it imports and weights"
            )
            self._serve(
                HOST,
                second,
                "engine B, device pages evicted before each question: host copies come in layer by layer",
                before_each=lambda: self._evict_device(second.ready.model_id),
            )
        self._check_hits()
        self._check_pools()
        return self.report

    def _ask_reference(self, engine: EngineProcess) -> None:
        """The questions; each turn's prompt holds the reference's answers to the turns before."""
        for conversation in self._plan.conversations:
            answers: list[list[int]] = []
            for turn in range(1, len(conversation.turns) + 1):
                prompt = chat_prompt(conversation.document, conversation.turns[:turn], answers)
                answer = engine.ask(prompt, self._plan.new_tokens)
                answers.append(answer.tokens)
                self.report.questions.append(Question(conversation.name, turn, prompt, answer))
        say(f"    TTFT {list_times([question.reference for question in self.report.questions])}")

    def _serve(
        self, name: str, engine: EngineProcess, story: str, before_each: Callable[[], None] | None = None
    ) -> None:
        """Ask all questions of one engine, compare its answers and note what the daemon loaded meanwhile."""
        say(f"  {story}")
        before = self._read_loaded_bytes()
        answers = []
        for question in self.report.questions:
            if before_each is not None:
                before_each()
            answer = engine.ask(question.prompt, self._plan.new_tokens)
            answers.append(answer)
            label = f"{self.report.variant}, {name}, {question.label}"
            if answer.tokens != question.reference.tokens:
                self.report.problems.append(
                    f"{label}: answered {answer.tokens}, the reference {question.reference.tokens}"
                )
            if answer.went_alone:
                self.report.problems.append(f"{label}: the engine went on without the cache: {answer.went_alone}")
        self.report.passes[name] = answers
        loaded = self._read_loaded_bytes() - before
        self.report.loaded_bytes[name] = loaded
        found = sum(answer.device_tokens + answer.host_tokens for answer in answers)
        asked = sum(len(question.prompt) for question in self.report.questions)
        say(
            f"    TTFT {list_times(answers)}; found {found:,} of {asked:,} tokens; "
            f"loaded {loaded / 2**20:,.1f} MiB from the host"
        )

    def _read_loaded_bytes(self) -> int:
        status = self._admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=ADMIN_SECONDS)
        return status.counters.get("h2d_bytes", 0)

    def _evict_device(self, model_id: int) -> None:
        """Leave only host copies. A block on its way to the host is not evicted, so first all transfers have to end."""
        self._settle()
        self._admin.Evict(admin_pb2.EvictRequest(model_id=model_id, tier="device"), timeout=ADMIN_SECONDS)

    def _settle(self) -> None:
        """Wait until nothing moves; each look is a round trip, and transfers take milliseconds."""
        until = time.monotonic() + SETTLE_SECONDS
        while True:
            status = self._admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=ADMIN_SECONDS)
            running = status.counters.get("tickets_running", 0)
            held = sum(pool.private + pool.in_flight + pool.quarantined for pool in status.pools)
            if not running and not held:
                return
            if time.monotonic() > until:
                raise TimeoutError(
                    f"{running} transfers run and {held} pages are held {SETTLE_SECONDS:g} s after the last answer"
                )

    def _check_hits(self) -> None:
        """Each pass must have found what its story says, where its story says."""
        report = self.report
        if report.passes[COLD][0].device_tokens + report.passes[COLD][0].host_tokens:
            report.problems.append(f"{report.variant}, {COLD}: the first question was a hit in an empty cache")
        for name in (DEVICE, RESTART, HOST):
            for question, answer in zip(report.questions, report.passes[name], strict=True):
                hit = (len(question.prompt) - 1) // report.block_tokens * report.block_tokens
                wanted = (0, hit) if name == HOST else (hit, 0)
                found = (answer.device_tokens, answer.host_tokens)
                if found != wanted:
                    report.problems.append(
                        f"{report.variant}, {name}, {question.label}: (device, host) tokens {found}, expected {wanted}"
                    )
            if (report.loaded_bytes[name] > 0) != (name == HOST):
                report.problems.append(f"{report.variant}, {name}: {report.loaded_bytes[name]:,} bytes were loaded")

    def _check_pools(self) -> None:
        """Check the pools after all engines ended: no page is held, and every page is in exactly one place."""
        self._settle()
        verdict = self._admin.Verify(admin_pb2.VerifyRequest(), timeout=ADMIN_SECONDS)
        self.report.problems += [f"{self.report.variant}: {problem}" for problem in verdict.problems]


def say(text: str = "") -> None:
    """Progress, at once."""
    print(text, flush=True)


def list_times(answers: Sequence[Answer]) -> str:
    """Each answer's time to the first token."""
    return ", ".join(f"{answer.first_token_seconds:.3f}" for answer in answers) + " s"


def make_plan(*, is_quick: bool) -> Plan:
    """Two conversations on one text, which share its pages; quick: one, over the first lines."""
    first, second = conversations()[:2]
    if is_quick:
        return Plan((shorten(first, 400, turns=2),), new_tokens=8)
    return Plan((shorten(first, 1000, turns=2), shorten(second, 1000, turns=1)), new_tokens=8)


def shorten(conversation: Conversation, characters: int, *, turns: int) -> Conversation:
    """The conversation's first turns over the beginning of its document."""
    return replace(conversation, document=conversation.document[:characters], turns=conversation.turns[:turns])


def daemon_flags(layout: Layout) -> list[str]:
    """A daemon whose pools hold POOL_BLOCKS blocks of the layout on each tier, and that copies what is published."""
    pool_bytes = sum(plane.page_bytes * POOL_BLOCKS + PLANE_SLACK_BYTES for plane in layout.planes)
    flags = {
        "--backend": "shm",
        "--device-pool": str(pool_bytes),
        "--host-pool": str(pool_bytes),
        "--write-policy": "write_through",
    }
    return [part for pair in flags.items() for part in pair]


def demonstrate(variant: str, plan: Plan) -> VariantReport:
    """One variant from its daemon's start to its end."""
    with DaemonProcess(daemon_flags(layout_of(VARIANTS[variant]))) as daemon:
        say(f"{variant}: the daemon was ready after {daemon.seconds_to_ready:.2f} s")
        with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
            return Demonstration(variant, plan, daemon, admin_pb2_grpc.AdminServiceStub(channel)).run()


def draw_table(reports: Sequence[VariantReport]) -> str:
    """One line a variant: its opening question, which every engine has to answer with nothing in its own memory."""
    head = ("variant", "prompt tokens", "hit tokens", "TTFT cold", "device pages", "host pages", "after restart")
    rows: list[tuple[str, ...]] = [(*head, "tokens identical")]
    for report in reports:
        opening = {name: answers[0] for name, answers in report.passes.items()}
        cold = opening[COLD].first_token_seconds
        times = [f"{cold:.3f} s"]
        for name in (DEVICE, HOST, RESTART):
            seconds = opening[name].first_token_seconds
            times.append(f"{seconds:.3f} s ({cold / seconds:.0f}x)")
        prompt_tokens = f"{len(report.questions[0].prompt):,}"
        hit_tokens = f"{opening[DEVICE].device_tokens:,}"
        identical = f"{report.identical} of {report.answers}"
        rows.append((report.variant, prompt_tokens, hit_tokens, *times, identical))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) if index else cell.ljust(width) for index, (cell, width) in enumerate(line))
        for line in (list(zip(row, widths, strict=True)) for row in rows)
    )


def to_json(reports: Sequence[VariantReport], seconds: float) -> str:
    """Everything that was measured, answer by answer."""
    variants = [
        {
            "variant": report.variant,
            "questions": [
                {"conversation": q.conversation, "turn": q.turn, "prompt_tokens": len(q.prompt), **asdict(q.reference)}
                for q in report.questions
            ],
            "passes": {name: [asdict(answer) for answer in answers] for name, answers in report.passes.items()},
            "loaded_bytes": report.loaded_bytes,
            "attach_seconds": report.attach_seconds,
            "restart_seconds": report.restart_seconds,
            "answers": report.answers,
            "identical": report.identical,
            "problems": report.problems,
        }
        for report in reports
    ]
    return json.dumps({"seconds": seconds, "variants": variants}, indent=2) + "\n"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument(
        "--variants", nargs="+", choices=tuple(VARIANTS), default=list(DEMO), help=f"default: {', '.join(DEMO)}"
    )
    parser.add_argument("--json", metavar="OUT", help="write all measurements there")
    parser.add_argument("--quick", action="store_true", help="a short text: seconds, but nothing worth timing")
    return parser.parse_args()


def conclude(reports: Sequence[VariantReport], seconds: float) -> int:
    """Say what came out; the exit code, 1 where an answer differs or a pass is not what its story says."""
    problems = [problem for report in reports for problem in report.problems]
    answers = sum(report.answers for report in reports)
    identical = sum(report.identical for report in reports)
    for problem in problems:
        say(problem)
    differing = answers - identical
    verdict = f"{differing} of them differ from the reference" if differing else "all token-identical"
    rest = f"; problems: {len(problems)}, see above" if problems else ""
    say(f"{answers} answers, {verdict}, in {seconds:.0f} s{rest}")
    return 1 if differing or problems else 0


def main() -> int:
    """Run the demonstration; the exit code."""
    arguments = parse_arguments()
    plan = make_plan(is_quick=arguments.quick)
    began = time.monotonic()
    say(INTRODUCTION)
    reports = []
    try:
        for variant in arguments.variants:
            reports.append(demonstrate(variant, plan))
            say()
    except (DaemonFailed, EngineFailed, TimeoutError) as error:
        say(f"the demonstration ended early: {error}")
        return 1
    seconds = time.monotonic() - began
    if arguments.json:
        Path(arguments.json).write_text(to_json(reports, seconds), encoding="utf-8")
    say(draw_table(reports))
    say()
    return conclude(reports, seconds)


if __name__ == "__main__":
    sys.exit(main())
