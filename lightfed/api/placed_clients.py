"""The clients of a federation: their groups and their ranks."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from lightfed.distributed.collectives import Ranks
from lightfed.distributed.placement import Blocks, Rates, cut, exchanges, place, split
from lightfed.local.client_group import ClientGroup, GroupState, Packing, group_names
from lightfed.local.hooks import Hooks
from lightfed.local.local_work import ClientData, LocalWork, SessionPlans
from lightfed.state.client_state import Kept
from lightfed.state.rows import ModelLayout
from lightfed.utils.errors import UserError, require

log = logging.getLogger(__name__)


class PlacedClients:
    """The clients, numbered 0 .. N-1 in the order of the groups, and where they are.

    Args:
        groups: one architecture each.
        algorithm: prepares the modules, and decides whether clients keep their rows.
        data: the clients' samples.
        ranks: of the run.
        work: local work and sampling.
        seed: of the whole run.
        host_rows: keep client rows in host memory.
        row_folder: keep them in files in this folder instead.
        rates: session times that the run has measured before.
        pack: decides how the clients of a group train side by side; by default they do not.

    Attributes:
        moved: number of rows that have moved between ranks for this round.
    """

    def __init__(
        self,
        groups: Sequence[ClientGroup],
        algorithm: Hooks,
        data: ClientData,
        *,
        ranks: Ranks,
        work: LocalWork | None = None,
        seed: int = 0,
        host_rows: bool = False,
        row_folder: Path | None = None,
        rates: Rates | None = None,
        pack: Callable[["PlacedClients", GroupState], Packing] | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.rates = Rates() if rates is None else rates
        self.host_rows = host_rows or row_folder is not None
        self.data = data
        data.reserve(algorithm.hold_out)
        self.ranks = ranks
        self.device = ranks.device
        self.work = work or LocalWork()
        self.seed = seed
        self.clients = sum(group.count for group in groups)
        self.kept: dict[str, Kept] = {}
        self.masks: Kept | None = None
        prepare = algorithm.prepare_module
        build = partial(
            GroupState,
            seed=seed,
            device=self.device,
            host_rows=host_rows,
            row_folder=row_folder,
            prepare=prepare,
        )
        self.groups = [
            build(group, data, name=name, position=position)
            for position, (group, name) in enumerate(zip(groups, group_names(groups), strict=True))
        ]
        self._home_group = [i for i, group in enumerate(groups) for _ in range(group.count)]
        self._assigned: dict[int, int] = {}
        self._owner: dict[int, int] = {}
        self._packs: dict[int, int] = {}  # of stateless clients, the pack that each is in
        self.moved = 0
        for state in self.groups:
            if pack is not None:
                state.packing = pack(self, state)
        if algorithm.stateful:
            counts, sizes = [g.count for g in groups], [s.side_by_side for s in self.groups]
            self.blocks = Blocks(counts, sizes)
            self._settle()

    def _settle(self) -> None:
        """Assign all stateful clients their first home ranks and open their rows."""
        self._owner = self._placed(range(self.clients))
        mine = self.mine(range(self.clients))
        for index, state in enumerate(self.groups):
            state.open([k for k in mine if self._home_group[k] == index], keep=True)
            state.store.fill(state.initial)

    def warn(self, text: str | None) -> None:
        """Log a warning on one rank; does nothing for None."""
        if text is not None and self.ranks.rank == 0:
            log.warning("%s", text)

    def one_layout(self, fix: str) -> ModelLayout:
        """The layout of all clients; a UserError with this fix names two that differ."""
        first = self.groups[0]
        for state in self.groups:
            found = f"groups {first.name} and {state.name} have different architectures"
            require(state.layout == first.layout, "model.clients", found, fix)
        return first.layout

    def one_after_the_other(self, key: str, found: str, fix: str) -> None:
        """Reject several ranks, which train clients in parallel."""
        require(self.ranks.world == 1, key, f"{found}, on {self.ranks.world} ranks", fix)

    def state(self, client: int) -> GroupState:
        """The group of a client in this round."""
        return self.groups[self.group_of(client)]

    def group_of(self, client: int) -> int:
        return self._assigned.get(client, self._home_group[client])

    def groups_of(self, clients: Iterable[int]) -> list[int]:
        """`group_of` each."""
        home, assigned = self._home_group, self._assigned
        return (
            [assigned.get(k, home[k]) for k in clients] if assigned else [home[k] for k in clients]
        )

    def mine(self, clients: Sequence[int]) -> list[int]:
        """The given clients that are on this rank, in order."""
        return [k for k in clients if self._owner[k] == self.ranks.rank]

    def pack_of(self, client: int) -> int:
        """The number of what a client is placed with: in a pack, or alone."""
        return self.blocks.of(client) if self.algorithm.stateful else self._packs[client]

    def _placed(self, clients: Sequence[int]) -> dict[int, int]:
        """The rank of each client in its next session."""
        if self.ranks.world == 1:
            return dict.fromkeys(clients, 0)
        ranks = place(self.loads(clients), ranks=self.ranks.world)
        return {client: ranks[self.pack_of(client)] for client in clients}

    def _cut(self, clients: Sequence[int]) -> dict[int, int]:
        """The pack of every stateless client, by the configured lengths of their sessions."""
        packs: list[list[int]] = []
        plans = SessionPlans(self.data, self.work, seed=self.seed, timings=self.ranks.timings)
        for members in split(clients, self.group_of):
            packing = self.state(members[0]).packing
            if packing.most == 1:
                packs += [[client] for client in members]
                continue
            members.sort(key=lambda k: (plans.steps_of(k, 0), k))
            shape = partial(plans.shape, t=0, even=packing.even)
            for alike in split(members, shape):
                packs += cut(alike, packing.most)
        return {client: number for number, pack in enumerate(packs) for client in pack}

    def home_group(self, client: int) -> int:
        """The configured group of a client, ignoring the round's assignment."""
        return self._home_group[client]

    def home(self, client: int) -> int:
        """The rank of a stateful client."""
        return self._owner[client]

    def pays_to_move(self, sessions: Mapping[int, int | None]) -> list[tuple[int, int]]:
        """Stateful clients that had better change places before a round, in pairs.

        Blocks of clients that train side by side move as a whole. None unless their groups have
        been timed. The same on every rank. A session has so many batches; None for as many as
        configured.
        """
        if self.rates.of(self.groups_of(sessions)) is None:
            return []
        blocks, ranks = self.blocks, self.ranks.world
        homes = {block: self._owner[blocks.members(block)[0]] for block in range(len(blocks))}
        size = [n * self.groups[group].row_bytes for group, n in blocks.kinds]
        pairs = exchanges(self.loads(sessions, sessions), homes, blocks.kind, size, ranks=ranks)
        return [pair for a, b in pairs for pair in blocks.pairs(a, b)]

    def change_places(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Give the clients of each pair, of one group, the other's home and slot."""
        owner = self._owner
        for one, other in pairs:
            owner[one], owner[other] = owner[other], owner[one]
        self.moved += 2 * len(pairs)
        for index, state in enumerate(self.groups):
            theirs = [pair for pair in pairs if self._home_group[pair[0]] == index]
            both = [*theirs, *((b, a) for a, b in theirs)]
            state.store.give({leaves: comes for leaves, comes in both if leaves in state.store})

    def _open(self, clients: Sequence[int]) -> None:
        """Assign ranks and slots to a round's participants, if they are stateless.

        A UserError if one of them does not exist: a negative number would be another client's.
        """
        for client in clients:
            if not 0 <= client < self.clients:
                found = f"its round names client {client} of {self.clients}"
                raise UserError("model.algorithm", found, "give numbers from 0")
        if self.algorithm.stateful or all(k in self._owner for k in clients):
            return
        self._packs = self._cut(clients)
        self._owner = self._placed(clients)
        mine = self.mine(clients)
        groups = self.groups_of(mine)
        for index, state in enumerate(self.groups):
            theirs = [k for k, group in zip(mine, groups, strict=True) if group == index]
            state.open(theirs, keep=False)

    def loads(
        self, clients: Iterable[int], steps: Mapping[int, int | None] | None = None
    ) -> dict[int, float]:
        """`_costs` of the packs that clients are in."""
        loads: dict[int, float] = {}
        for client, cost in self._costs(clients, steps).items():
            pack = self.pack_of(client)
            loads[pack] = loads.get(pack, 0.0) + cost
        return loads

    def _costs(
        self, clients: Iterable[int], steps: Mapping[int, int | None] | None = None
    ) -> dict[int, float]:
        """Costs of sessions: seconds if all the clients' groups have been timed, else FLOPs.

        `steps` are the batches of sessions; as configured by default.
        """
        groups = {k: self.group_of(k) for k in clients}
        rates = self.rates.of(groups.values())
        if rates is None:  # only samples if a module's FLOPs are unknown
            rates = {c: max(self.groups[c].flops, 1.0) for c in groups.values()}
        given = steps or {}
        return {
            k: rates[c] * self.work.samples(self.data, k, given.get(k)) for k, c in groups.items()
        }
