"""One simulated node with its engines and its bad luck, all from one seed.

After every step the ledger must add up, and every sealed page on every tier must hold the bytes of its key.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

from cachesvc.flows import pinning
from cachesvc.flows.leases import empty_lost, lose_silent
from cachesvc.flows.registration import PoolRequest, Registered, RegisterRequest, register
from cachesvc.model.errors import PoolExhausted, Unavailable
from cachesvc.model.layout import Layout, Plane, PlaneGroup
from cachesvc.model.words import Direction, PageState
from cachesvc.questions.audit import verify_at_once
from tests.conservation import audit
from tests.sim.biases import bias_of
from tests.sim.engine import SimEngine
from tests.sim.followers import Followers
from tests.sim.node import SimNode
from tests.sim.rules import broken_rules, unhurried

SILENCE_LIMIT_SECONDS = 30.0
LOOKS = 0.25
"""Probability that everything is checked after a step: what is wrong mostly stays wrong."""
FAULTS = (
    "client_retry",
    "clock_jump",
    "copy_delayed",
    "copy_failed",
    "daemon_drained",
    "device_lost",
    "device_returned",
    "engine_died_mid_write",
    "engine_fell_silent",
    "host_pages_late",
    "mischained",
    "mover_refused",
    "patience_ended",
    "scheduler_changed",
    "ticket_expedited",
    "worker_died",
    "write_backs_paused",
    "wrote_after_loss",
)
"""Kinds of bad luck that a long enough run must have seen."""
SHARED = ("peer_loads", "peer_blocks", "relayed_blocks")
"""Counters of what replicas got of each other, read at the end of a run."""


def gqa_layout() -> Layout:
    """Two layers of k and v on one rank."""
    planes = [Plane(name, layer, "full", (2, 4, 6), "uint8") for layer in range(2) for name in ("k", "v")]
    return Layout(4, 1, (PlaneGroup("full"),), tuple(planes))


def windowed_layout(window_tokens: int, sink_tokens: int, pool: str, state_bytes: int = 37) -> Layout:
    """Two ranks: a replicated full group, and a window whose bytes differ by rank; of one ``pool``, if it is named, and
    then a group of states, and one of scratch."""
    planes = [Plane("latent", layer, "full", (37,), "uint8") for layer in range(2)]
    planes += [Plane(name, 1, "window", (37,) if pool else (3, 7), "uint8") for name in ("k", "v")]
    groups: tuple[PlaneGroup, ...] = (
        PlaneGroup("full", replicated=True, pool=pool),
        PlaneGroup("window", window_tokens, sink_tokens, pool=pool),
    )
    if pool:
        planes.append(Plane("ssm", 2, "state", (state_bytes,), "uint8"))
        planes.append(Plane("ring", 2, "scratch", (11,), "uint8"))
        groups = (*groups, PlaneGroup("state", pool=pool, is_state=True), PlaneGroup("scratch", 0, pool=pool))
    return Layout(4, 2, groups, tuple(planes))


class World:
    """``step`` until tired, then ``finish``. ``faults`` counts what went wrong on purpose."""

    def __init__(self, seed: int, looks: float = LOOKS) -> None:
        """``looks``: how often everything is looked at; it changes nothing that happens."""
        self.seed = seed
        self.rng = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.bias = bias_of(seed)
        self.node = SimNode(self.rng, self.faults, self.bias)
        self.followers = Followers(seed, self.node)
        self._share_of_looks = looks
        self._looks = random.Random(f"looks of {seed}")
        self.frozen: dict[tuple[str, Direction], int] = {}
        self.steps = 0
        self.names = 0
        for _ in range(24 if self.bias.host_is_there else self.rng.choice((0, 2, 8, 24, 24))):
            self.node.host_pool.fill_one()
        self.requests = self._draw_requests()
        self.engines = [SimEngine(self.node, self.rng, f"engine {i}", 0) for i in range(4)]
        self.kinds = {f"engine {i}": self.rng.choice(kinds) for i, kinds in enumerate(self.bias.kinds)}

    def _draw_requests(self) -> list[RegisterRequest]:
        rng = self.rng

        bias = self.bias

        def pages(*ranges: tuple[int, int]) -> PoolRequest:
            return PoolRequest(tuple(rng.randint(*each) for each in ranges))

        device, both = (bias.device,), (bias.device, bias.device_windows)
        gqa = gqa_layout()
        pool = rng.choice(("", "kv"))
        windowed = windowed_layout(rng.choice((6, 8)), rng.choice((0, 0, 4)), pool, rng.choice((37, 50)))
        gqa_host, windowed_host = pages(bias.host), pages(bias.host, bias.host_windows)
        on_devices = [pages(*both), pages(*both)]
        if pool:
            on_devices = [PoolRequest((sum(each.pages) * 4 // 3,) * 4) for each in on_devices]
            windowed_host = PoolRequest((windowed_host.pages[0], *(windowed_host.pages[1],) * 3))
        return [
            RegisterRequest("model", gqa, b"tenant 1", ("step-0",), pages(*device), gqa_host, reserved_pages=1),
            RegisterRequest("model", gqa, b"tenant 1", ("step-1",), pages(*device), gqa_host, reserved_pages=1),
            RegisterRequest("model", windowed, b"tenant 2", ("step-0", "step-1"), on_devices[0], windowed_host),
            RegisterRequest("model", windowed, b"tenant 2", ("step-1", "step-0"), on_devices[1], windowed_host),
        ]

    def _register(self, request: RegisterRequest) -> Registered:
        node = self.node
        if not node.backend.broken.isdisjoint(request.devices):
            raise Unavailable("the device does not work")
        made = node.run(partial(register, node.core, node.vault, request, node.now))
        for replica in made.model.replicas:
            replica.place.pieces.piece_blocks = 2  # so that short prompts have some
        return made

    # -- steps -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One event, and the checks after it."""
        self.steps += 1
        self.node.now += self.rng.random()
        self.node.backend.now = max(self.node.backend.now, self.node.now)
        events: dict[str, tuple[float, Callable[[], None]]] = {
            "engine_acts": (60, self._engine_acts),
            "copy_moves": (20, self._copy_moves),
            "delivers": (14, self._deliver),
            "tidies": (14 if self.node.core.chores else 0, self.node.tidy),
            "host_fills": (4, self._host_fills),
            "copy_fails": (1, self._copy_fails),
            "copy_freezes": (3, self._copy_freezes),
            "sweeps": (1, self._sweep),
            "device_returns": (6 if self.node.backend.broken else 0, self._device_returns),
            "operator_evicts": (3, self._operator_evicts),
        }
        if self.rng.random() < self.bias.misfortune:
            events = {
                "clock_jumps": (1, self._clock_jumps),
                "operator_drains": (1, self._operator_drains),
                "rival": (0.5, self._rival),
                "engine_fails": (4, self._engine_fails),
                "mover_refuses": (2, self._refuse_mover),
                "mover_dies": (1, self._mover_dies),
            }
        weights = [weight * self.bias.world.get(name, 1.0) for name, (weight, _) in events.items()]
        self.rng.choices([call for _, call in events.values()], weights)[0]()
        self.check()

    def check(self) -> None:
        """Raises AssertionError that says what broke."""
        self.followers.check()
        if self._looks.random() < self._share_of_looks:
            self.look()

    def look(self) -> None:
        """The whole ledger and every sealed page: most of what a step costs, so not after each."""
        problems = [*audit(self.node.core.ledger).problems, *broken_rules(self.node.core.ledger)]
        if not self.node.inbox:
            problems += unhurried(self.node.core.ledger, self.node.engine)
        assert not problems, problems
        wrong = [*self.node.misplaced(), *self.node.corrupt()]
        assert not wrong, wrong

    def _engine_acts(self) -> None:
        engine = self.rng.choice(self.engines)
        if self.node.now < engine.silent_until:
            return
        if not engine.is_open:
            try:
                made = self._register(self.requests[self.kinds[engine.name]])
            except (Unavailable, PoolExhausted):
                return
            engine.replica = made.replica.id
            engine.start(made.model)
            return
        if engine.silent_until and engine.lease not in self._live():
            engine.scribble()  # what its kernels did before the loss was noticed
            self.faults["wrote_after_loss"] += 1
        engine.silent_until = 0.0
        engine.step()

    def _deliver(self) -> None:
        if self.node.inbox:
            self.node.deliver()
        else:
            self._engine_acts()

    def _live(self) -> set[str]:
        leases = self.node.core.ledger.leases.values()
        return {lease.id for lease in leases if lease.state.value == "live"}

    def _copy_moves(self) -> None:
        pending = [p for p in self.node.backend.pending() if self.frozen.get((p.device, p.direction), 0) < self.steps]
        if pending:
            one = self.rng.choice(pending)
            move = self.rng.choice((self.node.backend.run_step, self.node.backend.run_one))
            move(one.device, one.direction)
        else:
            self._engine_acts()

    def _copy_fails(self) -> None:
        pending = self.node.backend.pending()
        if pending:
            busiest = max(pending, key=lambda stream: (stream.jobs, stream.direction is Direction.LOAD))
            one = self.rng.choice((self.rng.choice(pending), busiest))  # others may hang on what fails there
            self.node.backend.fail_one(one.device, one.direction, RuntimeError("the simulator breaks this copy"))
            self.faults["copy_failed"] += 1

    def _copy_freezes(self) -> None:
        pending = self.node.backend.pending()
        if pending:
            one = self.rng.choice(pending)
            self.frozen[one.device, one.direction] = self.steps + self.rng.randint(5, 30)
            self.faults["copy_delayed"] += 1

    def _host_fills(self) -> None:
        if not self.node.host_pool.fill_one():
            self.node.host_pool.clean_one()

    def _refuse_mover(self) -> None:
        self.node.mover.refuse = self.rng.randint(1, 2)

    def _mover_dies(self) -> None:
        device = self.rng.choice(("step-0", "step-1"))
        if device not in self.node.backend.broken:
            self.node.kill_mover(device)
            self.faults["device_lost"] += 1

    def _device_returns(self) -> None:
        self.node.backend.mend_device(self.rng.choice(sorted(self.node.backend.broken)))
        self.faults["device_returned"] += 1

    def _sweep(self) -> None:
        self.node.run(partial(empty_lost, self.node.core))
        self.node.run(partial(lose_silent, self.node.core, SILENCE_LIMIT_SECONDS, self.node.now))

    def _clock_jumps(self) -> None:
        self.node.now += self.rng.choice((10.0, 40.0))
        self.faults["clock_jump"] += 1
        self._sweep()

    def _engine_fails(self) -> None:
        engine = self.rng.choice(self.engines)
        if not engine.is_open:
            return
        match self.rng.randrange(4):
            case 0:
                engine.write_half()
                engine.die()
                self.faults["engine_died_mid_write"] += 1
            case 1:
                if engine.lose_worker():
                    self.faults["worker_died"] += 1
            case 2:
                engine.silent_until = self.node.now + self.rng.choice((5.0, 50.0))
                self.faults["engine_fell_silent"] += 1
            case _:
                engine.quiesce()
                self.faults["engine_closed"] += 1

    def _operator_drains(self) -> None:
        if self.steps > 150 and self.rng.random() < 0.2:
            self.node.run(partial(pinning.drain, self.node.core))
            self.faults["daemon_drained"] += 1

    def _operator_evicts(self) -> None:
        core = self.node.core
        for model in list(core.ledger.models.values()):
            tier = self.rng.choice(self.bias.evicted_tiers)
            self.node.run(partial(pinning.evict, core, model.id, tier, self.rng.choice((0, 1, 3))))
        self.faults["operator_evicted"] += 1

    def _rival(self) -> None:
        """A new model wants most of a device and some of the host: idle models are evicted, or it is refused."""
        self.names += 1
        before = {model.id for model in self.node.core.ledger.models.values()}
        request = RegisterRequest(
            f"rival {self.names}",
            gqa_layout(),
            b"",
            (self.rng.choice(("step-0", "step-1")),),
            PoolRequest((self.rng.choice((40, 300)),)),
            self.rng.choice((PoolRequest((0,)), PoolRequest((8,)), PoolRequest((400,)), PoolRequest())),
        )
        try:
            self._register(request)
        except (PoolExhausted, Unavailable):
            after = {model.id for model in self.node.core.ledger.models.values()}
            assert after == before, "a refusal evicts no model"
            self.faults["rival_refused"] += 1
        else:
            after = {model.id for model in self.node.core.ledger.models.values()}
            self.faults["rival_came"] += 1
        self.faults["model_evicted"] += len(before - after)

    # -- the end -----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """All that was begun ends."""
        self.node.backend.run_all()
        while self.node.inbox or self.node.core.chores:
            self.node.deliver()
            self.node.tidy()
            self.node.backend.run_all()
        self.node.run(partial(empty_lost, self.node.core))
        while self.node.core.chores:
            self.node.tidy()

    def finish(self) -> None:
        """Everybody leaves: nothing may be private, in flight, pinned or quarantined then."""
        self._settle()
        self.look()
        for engine in self.engines:
            if engine.is_open:
                engine.die()
            self.look()
        self._settle()
        self.look()
        for name in SHARED:
            self.node.events[name] += self.node.core.counters.get(name, 0)
        ledger = self.node.core.ledger
        assert not ledger.tickets.running
        assert not ledger.leases
        for model in ledger.models.values():
            assert not model.computing
            assert not model.lost, "something of a lost replica is left"
            for place in model.blocks.index.places:
                for pool in place.pools:
                    settled = pool.counts[PageState.FREE] + pool.counts[PageState.SEALED]
                    assert settled == pool.usable, f"{pool.name}: {pool.counts}"
        self.node.engine.close()
        self.node.backend.close()
        self.node.host_pool.close()


def run(seed: int, steps: int, looks: float = LOOKS) -> World:
    """One whole simulation. An AssertionError names the seed and the step."""
    world = World(seed, looks)
    try:
        while world.steps < steps:
            world.step()
        assert verify_at_once(world.node.core) == [], "what Verify finds in a sound daemon"
        world.finish()
    except Exception as error:
        error.add_note(f"replay: python -m tests.sim {seed} {world.steps + 1}   (step {world.steps} of seed {seed})")
        raise
    return world
