"""Where the clients are: their groups, packs and ranks."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from lightfed.data.datamodule import FederatedDataModule
from lightfed.distributed.collectives import Ranks
from lightfed.distributed.placement import Rates, blocks, cut, place, split
from lightfed.local.client_group import GroupState
from lightfed.local.local_work import LocalWork, SessionPlans
from lightfed.utils.rng import numpy_generator


def participants(count: int, clients: int, *, seed: int, t: int) -> list[int]:
    """S_t: clients drawn uniformly without replacement, ascending; the same on every rank."""
    if count >= clients:
        return list(range(clients))
    rng = numpy_generator(seed, "participants", t)
    return sorted(rng.choice(clients, count, replace=False, shuffle=False).tolist())


class Places:
    """The groups, packs and ranks of the clients; the same on every rank.

    Args:
        states: the groups, whose clients are numbered in their order.
        keeps: clients keep their rows. They have home ranks, by blocks that train side by side.
        data: the clients' samples.
        work: local work and sampling.
        ranks: of the run.
        seed: of the whole run.

    Attributes:
        home_groups: by client, as configured.
        groups: by client, in this round.
        owner: the rank of a client: its home, or that of its sessions in this round.
        packs: the number of what a client is placed with, in a pack or alone.
        rates: measured times of sessions.
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
            sizes = [state.packing.most for state in states]
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
        """Give a round's participants their packs and ranks; False if they have them."""
        if self.keeps or all(k in self.owner for k in clients):
            return False
        self._cut(clients)
        self._settle(clients)
        return True

    def _settle(self, clients: Sequence[int]) -> None:
        """Give clients in packs the ranks of their next sessions."""
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
        """`costs` of the packs that clients are in."""
        loads: dict[int, float] = {}
        for client, cost in self.costs(clients).items():
            pack = self.packs[client]
            loads[pack] = loads.get(pack, 0.0) + cost
        return loads

    def costs(
        self, clients: Iterable[int], steps: Mapping[int, int | None] | None = None
    ) -> dict[int, float]:
        """Costs of sessions: seconds if all the clients' groups have been timed, else FLOPs.

        Args:
            clients: Whose sessions.
            steps: The batches of their sessions; as configured by default.
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
