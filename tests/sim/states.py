"""States of a simulated engine's requests, and the blocks in which it wants them."""

from __future__ import annotations

from cachesvc.model.answers import GroupCells, Positions
from cachesvc.model.words import NO_PAGE
from tests.sim.calls import SimCalls
from tests.sim.processes import Request


class SimStates(SimCalls):
    """An engine whose layout may have states."""

    def _positions(self, first: int, last: int) -> Positions:
        """Now and then an engine says which new blocks get a state; windows have no holes here."""
        assert self.model is not None
        return {
            group: sorted(self.rng.sample(range(first, last), self.rng.randint(0, last - first)))
            for group in self.model.layout.state_groups
            if self.rng.random() < 0.6
        }

    def _note_states(self, request: Request, first: int) -> None:
        """States of new blocks are private."""
        assert self.model is not None
        for group in self.model.layout.state_groups:
            for position, page in enumerate(request.tables[group][first:], start=first):
                if page != NO_PAGE:
                    request.private_states[group, position] = page

    def _has_stock(self) -> bool:
        """True where its stock has a page of each group."""
        assert self.model is not None
        return all(len(self.stock[groups[0]]) >= len(groups) for groups in self.model.layout.pools)

    def _named_states(self, request: Request, last: int) -> tuple[GroupCells, ...]:
        """Some of its private states before block ``last``, to be published."""
        ready = [at for at in request.private_states if at[1] < last]
        named = self.rng.sample(ready, self.rng.randint(0, len(ready))) if not request.tickets else []
        return tuple(GroupCells(*at, (request.private_states[at],)) for at in named)

    def _states_published(self, request: Request, named: tuple[GroupCells, ...], kept: tuple[GroupCells, ...]) -> None:
        """The daemon has sealed those that it did not say are its own still."""
        own = {(cells.group, cells.first_block) for cells in kept}
        for cells in named:
            if (cells.group, cells.first_block) not in own:
                del request.private_states[cells.group, cells.first_block]
        self.node.events["states_published"] += len(named) > len(own)
        self.node.events["states_kept"] += bool(own)
