"""Prefill in one engine, decode in another of another daemon:

    python -m tests.vllm.handover_runs RUN,... P_SOCKET D_SOCKET sync|async

Both are vLLM's scheduler without a model (``scheduling``); what a router says goes from one to the other here.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

from cachesvc_client.memory.pool import LoadOutcome
from cachesvc_vllm.wishes import tail_of
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from cachesvc.model.answers import TicketView
from tests.vllm.scheduling import LONGEST, VOCABULARY, Engine
from tests.vllm.shape import BLOCK_TOKENS, Shape

PROMPTS = 40
NEW = 6
ROUTED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None, "remote_port": None}
"""Words of a router to the prefilling engine."""


def prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts of up to 20 blocks."""
    dice = random.Random(seed)
    longest = LONGEST - NEW
    return [[dice.randrange(VOCABULARY) for _ in range(dice.randint(2, longest))] for _ in range(count)]


def is_full_hit(prompt: Sequence[int], hit: int) -> bool:
    """True where a decoder computes the last token of a prompt alone."""
    return hit == len(prompt) - 1


def has_full_blocks(prompt: Sequence[int], hit: int) -> bool:
    """True where a decoder computes no more of a prompt than the rest behind its full blocks."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS <= hit < len(prompt)


def finish(*engines: Engine) -> None:
    """Step engines until nothing is left."""
    while any(engine.is_busy for engine in engines):
        for engine in engines:
            engine.step()


def prefill(engine: Engine, prompt: Sequence[int]) -> dict[str, Any]:
    """Prefill as a router has it, and return what is to be passed on."""
    name = engine.add(prompt, 1, handover=ROUTED)
    finish(engine)
    return dict(engine.told[name])


def one_after_another(one: Engine, other: Engine) -> int:
    """All prompts are prefilled first, and then decoded, as many at once as find room: the decoder computes the last
    token of each."""
    asked = prompts(1, PROMPTS)
    told = [prefill(one, prompt) for prompt in asked]
    for first in range(0, PROMPTS, other.shape.at_a_time):
        names = {}
        for prompt, each in list(zip(asked, told, strict=True))[first : first + other.shape.at_a_time]:
            names[other.add(prompt, NEW, handover=each)] = prompt
        finish(other)
        for name, prompt in names.items():
            assert is_full_hit(prompt, other.hits[name]), (name, other.hits[name], len(prompt))
    return PROMPTS


def crowded(one: Engine, other: Engine) -> int:
    """More prompts come at once than find room: some find no page for the copy, and compute the end of their prompt.
    Then all of them are in place."""
    asked = prompts(13, PROMPTS)
    told = [prefill(one, prompt) for prompt in asked]
    for _ in range(2):
        names = {other.add(prompt, NEW, handover=each): prompt for prompt, each in zip(asked, told, strict=True)}
        finish(other)
        for name, prompt in names.items():
            assert has_full_blocks(prompt, other.hits[name]), (name, other.hits[name], len(prompt))
    return PROMPTS


def at_once(one: Engine, other: Engine) -> int:
    """The decoder has the request before the prefiller begins: it goes on with others meanwhile."""
    where = prefill(one, prompts(2, 1)[0])
    source = {"remote_prefiller": {key: where[key] for key in ("remote_host", "remote_port")}}
    waited = 0
    for prompt in prompts(3, 5):
        name = other.add(prompt, NEW, handover=source)
        beside = other.add(prompt[:1] + prompt, 20)
        while beside in other.scheduler.requests:
            other.step()
        waited += not other.answers[name]
        one.add(prompt, 1, handover=ROUTED)
        finish(one, other)
        assert has_full_blocks(prompt, other.hits[name]), (name, other.hits[name], prompt)
    assert waited >= 3, "it does not wait with its hands in its lap"
    return waited


def sent_twice(one: Engine, other: Engine) -> int:
    """A router passes on the same request twice, and to the prefiller too: all of them hit."""
    asked = prompts(7, 5)
    told = [prefill(one, prompt) for prompt in asked]
    names = [
        (engine, engine.add(prompt, NEW, handover=each))
        for engine in (other, other, one)
        for prompt, each in zip(asked, told, strict=True)
    ]
    finish(one, other)
    for (engine, name), prompt in zip(names, 3 * asked, strict=True):
        assert is_full_hit(prompt, engine.hits[name]), (name, prompt)
    return len(names)


def ending_within(seed: int, count: int, *, least: int = 2, full: int = 0) -> list[list[int]]:
    """Prompts whose last block has ``least`` tokens or more, and is not full; behind ``full`` blocks or more."""
    dice = random.Random(seed)
    lengths = [
        dice.randint(full, LONGEST // BLOCK_TOKENS - 4) * BLOCK_TOKENS + dice.randint(least, BLOCK_TOKENS - 1)
        for _ in range(count)
    ]
    return [[dice.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def own_copies(one: Engine, other: Engine) -> int:
    """Nothing that a decoder writes behind a prompt, or into its end, comes to another request."""
    asked = [*ending_within(20, 6), [1, 2], [3, 4, 5]]
    for prompt in asked:
        words = prefill(one, prompt)
        for engine in (other, other, one):
            name = engine.add(prompt, 2 * BLOCK_TOKENS, handover=words)
            while not engine.answers[name]:
                engine.step()
            engine.run_all()
            (table,) = engine.scheduler.kv_cache_manager.get_block_ids(name)
            engine.worker.slots[table[len(prompt) // BLOCK_TOKENS]] = 0
            engine.abort(name)
            finish(engine)
            names = [engine.add(prompt, each, handover=words) for each in (NEW, 2 * BLOCK_TOKENS)]
            finish(engine)
            assert all(is_full_hit(prompt, engine.hits[each]) for each in (name, *names)), (name, prompt)
            follow = [*prompt, *engine.answers[names[-1]]]
            again = engine.add(follow, NEW)
            finish(engine)
            assert engine.hits[again] >= (len(follow) - 1) // BLOCK_TOKENS * BLOCK_TOKENS, (
                "the block is sealed once full"
            )
    assert other.copies >= 4 * len(asked)
    return other.copies


def names() -> None:
    """A tail's key has all of its tokens, what is before it, an adapter, a salt, and the image on it and where that
    lies; nothing else."""
    hasher, greedy = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor), SamplingParams(max_tokens=1)

    def key(tokens: Sequence[int], image: tuple[str, int, int] | None = None, **said: Any) -> bytes:
        if image is not None:
            digest, offset, length = image
            place = PlaceholderRange(offset, length)
            said["mm_features"] = [MultiModalFeatureSpec(None, "image", digest, place, digest)]
        request = Request(f"r{len(found)}", list(tokens), greedy, None, block_hasher=hasher, **said)
        tail = tail_of(request, request.block_hashes, BLOCK_TOKENS)
        assert tail is not None
        return tail.key

    found: list[bytes] = []
    for full in ((), (1, 2, 3, 4)):
        first = len(full)
        found += [key((*full, *tail)) for tail in ((5, 6, 7), (5, 6, 8), (5, 6), (6, 5))]
        found += [key((*full, 5, 6, 7), lora_request=LoRARequest(name, 1, "/x")) for name in "ab"]
        found += [key((*full, 5, 6, 7), cache_salt=salt) for salt in "ab"]
        found += [key((*full, 5, 6, 7), (each, first + at, 1)) for each in "ab" for at in (0, 2)]
        assert key((*full, 5, 6, 7)) == found[-12]
    assert len(set(found)) == len(found)
    request = Request("r", [1, 2, 3, 4, 5], greedy, None, block_hasher=hasher)
    assert tail_of(request, request.block_hashes, BLOCK_TOKENS) is None, "its only token is computed anyway"


def other_tails(one: Engine, other: Engine) -> int:
    """A tail is found by all of its tokens, and by no more."""
    names()
    asked = ending_within(21, 10, least=3)
    for prompt in asked:
        words = prefill(one, prompt)
        full = len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
        changed = [*prompt[:-2], (prompt[-2] + 1) % VOCABULARY, prompt[-1]]
        for each in (changed, prompt[:-1], [*prompt, 7], [*prompt, 9, 8]):
            name = other.add(each, NEW, handover={**words, "remote_num_tokens": len(each)})
            finish(other)
            assert other.hits[name] == full, (name, each)
    return len(asked)


def aborted(one: Engine, other: Engine) -> int:
    """A prefill that is aborted seals no tail, and a decoder's request may be aborted at any moment."""
    where, step_tokens = prefill(one, prompts(2, 1)[0]), one.shape.step_tokens
    ended = {step_tokens, 0} if one.shape.is_async else {step_tokens}
    asked = ending_within(22, 6, full=step_tokens // BLOCK_TOKENS)
    for prompt in asked:
        name = one.add(prompt, 1, handover=ROUTED)
        one.step()
        one.abort(name)
        finish(one)
        name = other.add(prompt, NEW, handover={**where, "remote_num_tokens": len(prompt)})
        finish(other)
        assert other.hits[name] in ended, "the first step's, if it had ended"
    for steps, prompt in enumerate(ending_within(23, 16)):
        name = other.add(prompt, NEW, handover=prefill(one, prompt))
        for _ in range(steps):
            other.step()
        if name in other.scheduler.requests:
            other.abort(name)
        finish(other)
    return len(asked)


def evicted(one: Engine, other: Engine) -> int:
    """Blocks that the prefiller has evicted are computed; those that left the decoder's device come from its host."""
    asked = ending_within(24, 8)
    told = [prefill(one, prompt) for prompt in asked]
    half = len(asked) // 2
    names = [other.add(prompt, NEW, handover=each) for prompt, each in zip(asked[:half], told, strict=False)]
    finish(other)
    for fault in ("@evict prefiller device host", "@evict decoder device"):
        print(fault, flush=True)
        sys.stdin.readline()
    loads = other.loads
    names += [other.add(prompt, NEW, handover=each) for prompt, each in zip(asked, told, strict=True)]
    finish(other)
    hits = [other.hits[name] for name in names]
    assert hits == [len(prompt) - 1 for prompt in asked[:half] * 2] + [0] * half, hits
    assert other.loads > loads
    return len(names)


def spoilt(one: Engine, other: Engine) -> int:
    """A load that a step waits for fails, and with it the copy of the tail: the request begins anew, and what it seals
    is right."""
    asked = ending_within(25, 4)
    told = [prefill(one, prompt) for prompt in asked]
    end = other.worker._waits.end  # noqa: SLF001 - the mover fails

    def fail(ticket: TicketView) -> LoadOutcome:
        end(ticket)
        return LoadOutcome.FAILED

    for prompt, words in zip(asked, told, strict=True):
        other.add(prompt, NEW, handover=words)
        finish(other)
        print("@evict decoder device", flush=True)
        sys.stdin.readline()
        failed = other.failed_loads
        other.worker._waits.end = fail  # type: ignore[method-assign] # noqa: SLF001
        name = other.add(prompt, 2 * BLOCK_TOKENS, handover=words)
        while other.failed_loads == failed:
            other.step()
        other.worker._waits.end = end  # type: ignore[method-assign] # noqa: SLF001
        finish(other)
        again = other.add([*prompt, *other.answers[name]], NEW)
        whole = other.add(prompt, NEW, handover=words)
        finish(other)
        assert other.hits[again] >= len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS, name
        assert is_full_hit(prompt, other.hits[whole]), name
    return len(asked)


def never_computed(one: Engine, other: Engine) -> int:
    """A router says that a node has what it never had, to another one and to that node itself: none is waited for."""
    where = prefill(one, prompts(8, 1)[0])
    words = {"do_remote_prefill": True, **{key: where[key] for key in ("remote_host", "remote_port")}}
    asked = [(engine, prompt) for engine, seed in ((other, 9), (one, 10)) for prompt in prompts(seed, 5)]
    names = [(engine, engine.add(prompt, NEW, handover=words)) for engine, prompt in asked]
    finish(one, other)
    assert [len(engine.answers[name]) for engine, name in names] == [NEW] * len(names)
    return len(names)


def prefiller_restarts(one: Engine, other: Engine) -> int:
    """The prefiller's daemon lives again before the router has passed on anything: it has nothing, and says so."""
    asked = prompts(11, 10)
    told = [prefill(one, prompt) for prompt in asked]
    for fault in ("@kill", "@start"):
        print(fault, flush=True)
        sys.stdin.readline()
    names = [other.add(prompt, NEW, handover=each) for prompt, each in zip(asked, told, strict=True)]
    finish(one, other)
    assert [len(other.answers[name]) for name in names] == [NEW] * len(names)
    return len(names)


def prefiller_dies(one: Engine, other: Engine) -> int:
    """Every request ends, and rightly, with its prefiller's daemon killed before the router has passed on anything."""
    asked = prompts(4, 10)
    told = [prefill(one, prompt) for prompt in asked]
    print("@kill", flush=True)
    sys.stdin.readline()
    names = [other.add(prompt, NEW, handover=each) for prompt, each in zip(asked, told, strict=True)]
    source = {"remote_prefiller": {key: told[0][key] for key in ("remote_host", "remote_port")}}
    names += [other.add(prompt, NEW, handover=source) for prompt in prompts(5, 10)]
    finish(other)
    assert [len(other.answers[name]) for name in names] == [NEW] * len(names)
    return len(names)


def bad_words(one: Engine, other: Engine) -> int:
    """Whatever a router says, the engine goes on."""
    wrong: list[Any] = [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_host": 5, "remote_port": "x"},
        {"do_remote_prefill": True, "remote_host": "a b", "remote_port": 1},
        {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 1 << 40},
        {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 7100, "remote_num_tokens": "many"},
        {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1, "remote_num_tokens": 10**19},
        {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1, "remote_num_tokens": -(10**18)},
        {"do_remote_prefill": {"yes": [1]}, "remote_host": ["127.0.0.1"], "remote_port": {}},
        {"do_remote_prefill": True, "remote_host": "127.0.0.1\n", "remote_port": "1\x00"},
        {"do_remote_prefill": True, "remote_host": "fe80::1%\ud800", "remote_port": 1},
        {"do_remote_prefill": True, "remote_host": "fe80::1%\x1b[2J", "remote_port": 1},
        {"remote_prefiller": {"remote_host": "h" * 100_000, "remote_port": 10**19}},
        {"remote_prefiller": {"remote_host": "nowhere.invalid", "remote_port": 7100, "kv_request_id": ["x"] * 1000}},
        {"remote_prefiller": ["10.0.0.1"]},
        {"remote_kv_source": {"remote_host": "::1", "remote_port": 1}},
        {"do_remote_decode": True, "do_remote_prefill": True},
    ]
    names = [other.add(prompt, NEW, handover=each) for prompt, each in zip(prompts(6, len(wrong)), wrong, strict=True)]
    finish(one, other)
    assert [len(other.answers[name]) for name in names] == [NEW] * len(names)
    return len(names)


RUNS: dict[str, Callable[[Engine, Engine], int]] = {
    "one-after-another": one_after_another,
    "crowded": crowded,
    "at-once": at_once,
    "sent-twice": sent_twice,
    "never-computed": never_computed,
    "own-copies": own_copies,
    "other-tails": other_tails,
    "aborted": aborted,
    "evicted": evicted,
    "spoilt": spoilt,
    "prefiller-restarts": prefiller_restarts,
    "prefiller-dies": prefiller_dies,
    "bad-words": bad_words,
}


def main() -> None:
    """Run, and tell."""
    runs, prefiller, decoder, scheduling = sys.argv[1:]
    patience_ms = 2_000 if runs == "prefiller-dies" else 120_000
    shape = Shape(pages=400, stock=2, patience_ms=patience_ms, is_async=scheduling == "async")
    one, other = Engine("p", prefiller, 1, shape), Engine("d", decoder, 2, shape)
    told = {name: RUNS[name](one, other) for name in runs.split(",")}
    for engine in (one, other):
        engine.check_answers()
        assert engine.leftovers() == {}, engine.leftovers()
        engine.close()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
