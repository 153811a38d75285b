"""Where the clients are: their groups, packs and ranks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from lightfed.data.datamodule import FederatedDataModule
from lightfed.distributed.collectives import Ranks
from lightfed.distributed.placement import Rates, blocks, cut, place, split
from lightfed.local.group_state import GroupState
from lightfed.local.local_work import LocalWork, SessionPlans
from lightfed.utils.rng import numpy_generator


def participants(count: int, clients: Sequence[int], *, seed: int, t: int) -> list[int]:
    """Return clients drawn uniformly without replacement, ascending; the same on every rank.

    Args:
        count: Number of clients to draw.
        clients: The clients to draw from, ascending.
        seed: Seed of the run.
        t: The round.
    """
    if count >= len(clients):
        return list(clients)
    rng = numpy_generator(seed, "participants", t)
    positions = rng.choice(len(clients), count, replace=False, shuffle=False).tolist()
    return sorted(clients[position] for position in positions)


def _block_size(state: GroupState, share: float) -> int:
    """Return how many clients of a group, which keep their rows, have one home.

    Only the participants of a round can train side by side. Blocks are therefore so large that
    about as many of each take part as fit into a pack. The size follows from the configuration
    alone: packs, and so the bits of results, must not depend on the number of ranks.

    Args:
        state: The group.
        share: Share of the clients in a round.
    """
    most = state.packing.most
    if most == 1 or share == 1.0:
        return most

    # Blocks of equal size, so that no rank has much less to do than the others.
    clients = state.group.count
    number_of_blocks = max(1, math.ceil(clients * share / most))
    return math.ceil(clients / number_of_blocks)


class Places:
    """The groups, packs and ranks of the clients; the same on every rank.

    Args:
        states: The groups. Clients are numbered in their order.
        data: The samples of the clients.
        work: Length of sessions, and number of clients in a round.
        keeps: Whether clients keep their rows. They then have a home rank, which they share with
            the clients that they train side by side with.
        ranks: The ranks of the run.
        seed: Seed of the whole run.

    Attributes:
        home_groups: The configured group of each client.
        groups: The group of each client in this round.
        owner: The rank of each client: its home, or the rank of its sessions in this round.
        packs: The number of each client's pack. A client alone is a pack of its own.
        rates: Measured times of sessions.
    """

    def __init__(
        self,
        states: Sequence[GroupState],
        data: FederatedDataModule,
        work: LocalWork,
        *,
        keeps: bool,
        ranks: Ranks,
        seed: int,
    ) -> None:
        self._states = states
        self._data = data
        self._work = work
        self._seed = seed
        self.keeps = keeps
        self.ranks = ranks
        self.rates = Rates()

        self.home_groups: list[int] = []
        for position, state in enumerate(states):
            self.home_groups += [position] * state.group.count
        self.groups = self.home_groups

        self.owner: dict[int, int] = {}
        self.packs: dict[int, int] = {}
        if keeps:
            # Their homes stay for the whole run: rows do not move between ranks.
            counts = [state.group.count for state in states]
            num_seen = len(data.partition_.seen)
            share = work.share(num_seen)
            if num_seen < sum(counts):
                share *= num_seen / sum(counts)
            sizes = [_block_size(state, share) for state in states]
            self.packs = dict(enumerate(blocks(counts, sizes)))
            self._settle([*self.packs])

    def open_round(self) -> None:
        """Begin a round, in which stateless clients have no place yet."""
        self.groups = self.home_groups
        if not self.keeps:
            self.owner, self.packs = {}, {}

    def assign(self, groups: Mapping[int, int]) -> None:
        """Put clients into other groups for this round; all others are in their own."""
        self.groups = [*self.home_groups]
        for client, group in groups.items():
            self.groups[client] = group

    def open(self, clients: Sequence[int]) -> bool:
        """Give the participants of a round their packs and ranks; False if they have them."""
        have_places = self.keeps or all(client in self.owner for client in clients)
        if have_places:
            return False
        self._cut(clients)
        self._settle(clients)
        return True

    def _settle(self, clients: Sequence[int]) -> None:
        """Give clients, which have their packs, the ranks of their next sessions."""
        if self.ranks.world == 1:
            self.owner = dict.fromkeys(clients, 0)
            return
        ranks = place(self.loads(clients), ranks=self.ranks.world)
        self.owner = {client: ranks[self.packs[client]] for client in clients}

    def _cut(self, clients: Sequence[int]) -> None:
        """Put stateless clients into packs, by the configured lengths of their sessions."""
        plans = SessionPlans(self._data, self._work, self._seed, self.ranks.timings)
        packs: list[list[int]] = []
        for members in split(clients, self.groups.__getitem__):
            packing = self._states[self.groups[members[0]]].packing
            if packing.most == 1:
                packs += [[client] for client in members]
                continue

            # Sessions of about one length go together, so that no lane waits long for another.
            members.sort(key=lambda client: (plans.steps_of(client, 0), client))
            shape_of = partial(plans.shape, t=0, even=packing.even)
            for alike in split(members, shape_of):
                packs += cut(alike, packing.most)

        self.packs = {}
        for number, pack in enumerate(packs):
            self.packs |= dict.fromkeys(pack, number)

    def loads(self, clients: Iterable[int]) -> dict[int, float]:
        """Return the `costs` of the packs that clients are in, by the number of the pack."""
        loads: dict[int, float] = {}
        for client, cost in self.costs(clients).items():
            pack = self.packs[client]
            loads[pack] = loads.get(pack, 0.0) + cost
        return loads

    def costs(
        self, clients: Iterable[int], steps: Mapping[int, int | None] | None = None
    ) -> dict[int, float]:
        """Return the costs of clients' sessions.

        They are seconds if all groups of the clients have been timed, else FLOPs.

        Args:
            clients: The clients.
            steps: Number of batches of each session; as configured by default.
        """
        group_of = {client: self.groups[client] for client in clients}
        rates = self.rates.of(group_of.values())
        if rates is None:
            # Without known FLOPs a cost is the number of samples.
            rates = {group: max(self._states[group].flops, 1.0) for group in group_of.values()}

        given_steps = steps or {}
        costs = {}
        for client, group in group_of.items():
            samples = self._work.samples(self._data, client, given_steps.get(client))
            costs[client] = rates[group] * samples
        return costs
