"""Eviction by learned hazards: against a plain telling of the policy, and what it keeps, forgets and is switched to."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from cachesvc.flows.allocate import allocate
from cachesvc.flows.core import Turns, resolve, tidy_all
from cachesvc.flows.match import match
from cachesvc.flows.publish import publish
from cachesvc.flows.recycle import release
from cachesvc.flows.transfers import set_eviction
from cachesvc.ledger.block_index import ROWS_A_TURN
from cachesvc.ledger.candidates import QueuedLeaves
from cachesvc.model.answers import Ended, Wait
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import KEY_BYTES
from cachesvc.policy.eviction import ShadowLru
from cachesvc.policy.hazard import LANDMARKS, REMEMBERED, SEGMENTS_LOOKED, History, HostUses
from cachesvc.policy.hazard_rates import Open, Rates
from tests.hazard_oracle import Oracle, Prompt
from tests.long_cases import long
from tests.unit.rigs.ledger_rig import chain, one_group, prefill, rig_of

BLOCK_TOKENS = 512
LAYOUT = Layout(BLOCK_TOKENS, 1, (PlaneGroup("full"),), (Plane("bytes", 0, "full", (1,), "uint8"),))
NO_END = 1 << 40


class Cache:
    """One engine that serves one prompt after another, in the time of the prompts."""

    def __init__(self, eviction: str, blocks: int) -> None:
        self.rig = rig_of(LAYOUT, device=(blocks,), eviction=eviction)
        self.rig.core.turns = Turns(*(NO_END for _ in Turns._fields))
        self.lease = self.rig.lease()

    def serve(self, prompt: Prompt, *, says: bool = True) -> int:
        """Blocks in place. ``says``: the engine tells how the request ended."""
        core = self.rig.core
        core.ledger.moment.seconds = prompt.at
        call = resolve(core.ledger, self.lease, prompt.at)
        keys = b"".join(block.to_bytes(KEY_BYTES, "little") for block in prompt.blocks)
        hit = match(core, call, 1, keys, 0)
        assert not isinstance(hit, Wait)
        blocks = len(prompt.blocks)
        assert not isinstance(allocate(core, call, 1, blocks), Wait)
        if hit.device_blocks < blocks:
            publish(core, call, 1, hit.device_blocks, b"", blocks - hit.device_blocks)
        release(core, call, 1, Ended(prompt.output_tokens, prompt.ended) if says else None)
        tidy_all(core)
        return hit.device_blocks

    @property
    def history(self) -> History:
        history = self.rig.model.blocks.chooser
        assert isinstance(history, History)
        return history


def conversations(seed: int, requests: int) -> Iterator[Prompt]:
    """Returning users, half of them once, each after a while of their own, below one of a few system prompts."""
    rng = random.Random(seed)
    names = iter(range(1, 1 << 30))
    systems = [[next(names) for _ in range(rng.randint(1, 6))] for _ in range(4)]
    waiting: list[tuple[float, list[int], float]] = []
    now = 0.0
    for _ in range(requests):
        now += rng.expovariate(3.0)
        waiting.sort(key=lambda user: user[0])
        if waiting and waiting[0][0] <= now:
            _, path, pause = waiting.pop(0)
        else:
            path, pause = list(rng.choice(systems)), rng.choice((5.0, 30.0, 120.0))
            path += [next(names) for _ in range(rng.choice((1, 2, 4, 24)))]
        path = path + [next(names) for _ in range(rng.randint(0, 3))]
        output = rng.choice((20, 150, 600))
        yield Prompt(now, tuple(path), output, now + 0.02 * output)
        if rng.random() < (0.9 if output > 100 else 0.4) and len(path) < 60:
            waiting.append((now + 0.02 * output + rng.expovariate(1 / pause), path, pause))


@pytest.mark.parametrize(("seed", "blocks"), [(1, 100), long(2, 250), (3, 600)])
def test_it_hits_as_the_plain_telling_of_the_policy_does(seed: int, blocks: int) -> None:
    prompts = list(conversations(seed, 1500))
    cache, oracle, lru = Cache("hazard", blocks), Oracle(blocks, BLOCK_TOKENS), Cache("lru", blocks)
    asked = sum(len(prompt.blocks) for prompt in prompts)
    mine, told, least = (sum(map(each.serve, prompts)) for each in (cache, oracle, lru))
    assert abs(mine - told) < 0.01 * asked
    assert mine > least + 0.25 * (told - least), "and what it gains over least recently used is most of that"
    cache.rig.check()


def test_a_long_path_is_taken_over_in_turns_and_nobody_sees_it_half_done() -> None:
    blocks = 2 * ROWS_A_TURN + 300
    cache = Cache("hazard", blocks + 8)
    long = tuple(range(1, blocks + 1))
    cache.serve(Prompt(1.0, long, 10, 1.5))
    core, index = cache.rig.core, cache.rig.model.blocks.index
    keys = b"".join(block.to_bytes(KEY_BYTES, "little") for block in long)
    call = resolve(core.ledger, cache.lease, 3.0)

    def is_under_way() -> bool:
        return index.taking is not None

    assert not isinstance(match(core, call, 1, keys, 0), Wait)
    assert is_under_way()
    assert sum(segment == cache.history.running[-1].own for segment in index.segments) == ROWS_A_TURN
    assert isinstance(match(core, call, 2, keys, 0), Wait), "the next call continues it first"
    while isinstance(match(core, call, 2, keys, 0), Wait):
        assert is_under_way()
    core.turns = core.turns._replace(pages=16)
    for sequence in (1, 2):
        while isinstance(release(core, call, sequence), Wait):
            pass
    assert not is_under_way()
    cache.rig.check()


class OnePath:
    """The first ``blocks`` blocks of a path whose segments are ``owners``; ``looks`` counts the look-ups."""

    def __init__(self, owners: list[int], blocks: int) -> None:
        self.blocks, self.known, self.resident = blocks, min(blocks, len(owners)), min(blocks, len(owners))
        self.looks = 0
        self._owners = owners

    def key(self, position: int) -> bytes:
        return position.to_bytes(KEY_BYTES, "little")

    def segment(self, position: int) -> int:
        self.looks += 1
        return self._owners[position]


def test_of_a_path_that_many_requests_used_last_only_the_deepest_are_looked_at() -> None:
    history, owners, most = History(BLOCK_TOKENS), list[int](), 4 * SEGMENTS_LOOKED
    path = OnePath(owners, most)
    for now, blocks in enumerate([*range(most, 0, -1), most]):
        path = OnePath(owners, blocks)
        parts = history.arrived(path, float(now), 0.0)
        history.taken(parts, np.array(owners[:blocks][::-1], np.int64), len(owners[:blocks]))
        history.grew(parts, len(owners), max(blocks, len(owners)))
        owners.extend([parts.own] * (blocks - len(owners)))
        owners[:blocks] = [parts.shared] * parts.shared_blocks + [parts.own] * (blocks - parts.shared_blocks)
        history.ended(parts, blocks, path.key(blocks - 1), Ended(5), float(now))
    columns = history.segments
    assert path.looks == SEGMENTS_LOOKED
    mine = {owner: owners.count(owner) for owner in owners}
    for slot in range(1, len(columns.flags)):
        held = max(0, columns.bottom[slot] - columns.top[slot])
        assert held == mine.get(slot, 0), "all that is above them is taken over too"
        assert bool(columns.flags[slot] & LANDMARKS) == (slot in mine)


def test_until_it_has_learned_it_is_least_recently_used() -> None:
    prompts = list(conversations(5, 20))
    assert [*map(Cache("hazard", 60).serve, prompts)] == [*map(Cache("lru", 60).serve, prompts)]


def test_where_engines_do_not_say_how_requests_ended_it_learns_from_what_they_showed() -> None:
    silent = Cache("hazard", 100)
    for prompt in conversations(1, 600):
        silent.serve(prompt, says=False)
    assert not any(silent.history.segments.queue_after)
    assert silent.history.rates.density.any()


def test_what_it_keeps_is_bounded() -> None:
    """More requests than are remembered, each with blocks of its own."""
    cache = Cache("hazard", 8)
    names = iter(range(1, 1 << 30))
    for number in range(REMEMBERED + 1000):
        cache.serve(Prompt(number * 0.5, (next(names), next(names)), 10, number * 0.5))
    history = cache.history
    assert len(history.remembered) == REMEMBERED
    assert not history.running
    assert len(history.segments) <= REMEMBERED + 8
    assert history.kept_keys <= 6 * REMEMBERED


def test_it_is_switched_on_and_off_while_blocks_are_there() -> None:
    """Blocks that were there before have no owner and go by their last access."""
    rig = rig_of(one_group(), device=(8,), eviction="lru")
    lease = rig.lease()
    for number, prompt in enumerate(("ab", "cd", "ef")):
        prefill(rig, lease, number, prompt)
        rig.run(release, lease, number)
    set_eviction(rig.core, "hazard")
    rig.check()
    assert isinstance(rig.place().leaves, QueuedLeaves)
    prefill(rig, lease, 10, "ghij")
    assert rig.device_keys() == {*_keys("cd"), *_keys("ef"), *_keys("ghij")}, "the oldest has gone"
    rig.run(release, lease, 10, Ended(3))
    set_eviction(rig.core, "lru")
    prefill(rig, lease, 11, "klmn")
    rig.run(release, lease, 11)
    assert rig.device_keys() == {*_keys("ghij"), *_keys("klmn")}


def _keys(prompt: str) -> list[bytes]:
    keys = chain(*prompt)
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def test_the_shadow_of_a_small_cache_is_least_recently_used_itself() -> None:
    prompts = list(conversations(7, 800))
    shadow, lru = ShadowLru(200), Cache("lru", 200)
    hits = 0
    for prompt in prompts:
        hit = lru.serve(prompt)
        hits += hit
        keys = b"".join(block.to_bytes(KEY_BYTES, "little") for block in prompt.blocks)
        shadow.matched(keys, len(prompt.blocks), hit)
    assert shadow.hits == shadow.shadow_hits == hits
    assert len(shadow) <= 200


def test_of_a_large_cache_the_shadow_follows_a_sample() -> None:
    rng = random.Random(3)
    shadow, whole = ShadowLru(1 << 16), 0
    prompts = [rng.randbytes(KEY_BYTES * 64) for _ in range(1 << 11)]  # twice as many blocks as it has
    for number in range(1 << 12):
        prompt = prompts[number % 700 if number % 2 else rng.randrange(len(prompts))]
        shadow.matched(prompt, 64, 64)
        whole += 64
    assert shadow.asked == pytest.approx(whole, rel=0.05)
    assert 0.4 < shadow.shadow_hits / shadow.asked < 0.95
    assert len(shadow) <= 4096


def test_candidates_move_when_their_request_has_ended() -> None:
    """From then on they are judged by their output and by the time since."""
    cache = Cache("hazard", 64)
    cache.serve(Prompt(1.0, (1, 2, 3), 500, 9.0))
    leaves = cache.rig.place().leaves
    assert isinstance(leaves, QueuedLeaves)
    [row] = [entry & 0xFFFF_FFFF for entry in leaves]
    segment = cache.rig.model.blocks.index.segments[row]
    before = cache.history.queue_of(segment)
    cache.history.advance(10.0)
    after = cache.history.queue_of(segment)
    assert before != after
    assert cache.history.since(segment) == 9.0
    assert [len(list(leaves.queues[number])) for number in (before, after)] == [0, 1]
    cache.rig.check()


def test_a_block_s_class_age_and_worth_are_told_in_words() -> None:
    cache = Cache("hazard", 64)
    for prompt in conversations(1, 200):
        cache.serve(prompt)
    worth = [cache.history.worth(cache.rig.model.blocks.index.segments[row], 1000.0) for row in range(3)]
    assert all(each is not None and each.age > 0 and "computed tokens" in each.words for each in worth)
    assert any(each is not None and each.density > 0 for each in worth)
    assert cache.history.worth(0, 1000.0) is None


def test_classes_that_are_not_used_from_the_host_are_not_worth_a_copy() -> None:
    uses = HostUses()
    for _ in range(600):
        uses.request()
        uses.used((1, 0), 100.0, 4)
        uses.unused((2, 0), 4)
    assert uses.is_worth(1, 0.5)
    assert not uses.is_worth(2, 0.5)
    assert uses.is_worth(2, 0.0)
    assert uses.is_worth(3, 0.5), "nothing is known of it: it is as the mean"


def test_classes_that_come_while_a_refit_is_under_way_wait_for_the_next() -> None:
    rates = Rates()
    old = rates.add_row(0, (1,))
    rates.touched(old, 1.0, 3.0)

    def landmarks() -> Iterator[Open]:
        new = rates.add_row(0, (2,))
        yield Open(np.array([old, new]), np.array([1.0, 9.0]), np.array([1.0, 1.0]))
        yield Open(np.array([new]), np.array([2.0]), np.array([1.0]))

    before = rates.density.copy()
    for _ in rates.refit(landmarks()):
        pass
    assert (rates.density[old] != before[old]).any()
    assert np.array_equal(rates.density[old + 1], before[old + 1])
    for _ in rates.refit(iter((Open(np.array([old + 1]), np.array([2.0]), np.array([1.0])),))):
        pass
    assert (rates.density[old + 1] != before[old + 1]).any()


def test_a_request_that_has_nothing_left_begins_anew_where_it_takes_a_block() -> None:
    """Its block went to a younger request and left the cache; an older one computed it again, and then it did too."""
    history = Cache("hazard", 8).history
    segments = history.segments
    older, younger = (segments.begin(number, 0.0, 0, 0, 1, 0, 0) for number in (1, 2))
    segments.top[younger] = segments.bottom[younger] = 1
    segments.grew(older, 0, 1)
    assert history.takes(younger, older, 0)
    assert (segments.top[younger], segments.bottom[younger]) == (0, 1)
    assert segments.top[older] == segments.bottom[older] == 1
