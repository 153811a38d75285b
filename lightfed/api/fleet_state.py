"""What a run holds of its clients: groups, rows, ranks, costs, clock, and the current round."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightfed_kernels import popcount
from torch import nn
from torch.optim import Optimizer

from lightfed.aggregation.coverage import Coverages
from lightfed.aggregation.server_optimizers import ServerStep
from lightfed.api.additions import check_additions, personal_names, personal_positions
from lightfed.api.client_rows import ClientRows
from lightfed.api.clock import Clock
from lightfed.api.failures import Outcomes, takes_no_time
from lightfed.api.places import Places
from lightfed.api.unseen import check_has_for_unseen, check_takes_unseen, refuse_unseen
from lightfed.data.datamodule import FederatedDataModule
from lightfed.distributed.collectives import Ranks
from lightfed.lightning_fits.session_trainer import SessionHost
from lightfed.local.alone import Alone
from lightfed.local.client_group import ClientGroup, group_names
from lightfed.local.client_sessions import ClientSessions
from lightfed.local.group_state import GroupState
from lightfed.local.hooks import Hooks, LocalPenalty, SessionContext, SessionHooks
from lightfed.local.local_work import LocalWork, RoundPlan
from lightfed.local.rank_sessions import Training, Waves
from lightfed.local.session import Report
from lightfed.models.build import DataSpec
from lightfed.state.client_state import Kept, KeptStates, Saved, by_client
from lightfed.state.costs import Ledger
from lightfed.state.frozen_base import FrozenBase
from lightfed.state.rows import Moment, Row, Rows
from lightfed.utils.errors import UserError

log = logging.getLogger(__name__)


class FleetState(ABC):
    """The state below the words of a `lightfed.api.fleet.Fleet`.

    Sessions, evaluation, checkpoints and exports work on it. An algorithm sees the Fleet, which
    adds the words that algorithms are written in. The constructor ends with the `setup` of the
    algorithm.

    Args:
        groups: The client groups, of one architecture each.
        algorithm: Prepares the modules, and decides whether clients keep their rows.
        data: The samples of the clients.
        ranks: The ranks of the run.
        work: Length of sessions, and number of clients in a round.
        seed: Seed of the whole run.
        host_rows: Whether client rows are kept in host memory.
        side_by_side: Makes what trains and tests several clients at once; by default none do.
        rounds: Number of rounds of the run, if it is known.
        max_failed: Number of sessions of a round that may fail; by default all but one may raise.
        server_optimizer: Makes an optimizer that takes merges as steps; by default a merge is the
            server's new model.
        personal: Tensors that stay with their client, as for `personal_tensors`.
        timing: Makes the clock of the clients' devices; by default that of the algorithm. Without
            either, rounds take no time.
        local_penalty: A term of the clients' objective, besides the algorithm's own.
        keep_optimizer: Whether clients keep the state of their optimizer from session to session.
        host: What sessions get from the Trainer of the run; nothing by default.

    Attributes:
        clients: Number of clients.
        seen: The clients that can take part in a round, ascending: all but the unseen ones.
        unseen: The clients that never train, ascending (`data.unseen`).
        sampled: Number of clients in a round.
        penalties: The terms of the clients' objective besides their loss.
        hooks: The algorithm and the penalties, whose hooks sessions call.
        groups: Modules and row stores of the groups.
        base: Frozen parameters of all groups, which are in no row.
        personal: Names of the tensors that stay with their client: no message has them.
        stateful: Whether clients keep something from round to round, for the algorithm, a penalty,
            personal tensors or their optimizer.
        keeps_late: Whether a late update is merged in the round in which it arrives.
        keeps: Whether rows outlive their round: with `stateful`, or until late updates arrive.
        late_floats: Only with `keeps_late`. By client of this rank whose update is under way, the
            floats of its row minus the server's parameters that it was sent, (P,).
        late_integers: Likewise, the integer buffers of its row, (Q,).
        has_merged: Whether this round has merged rows into a server model.
        ledger: Bytes and FLOPs of all clients.
        clock: Virtual time, which passes only for clients with devices.
        kept: What this rank's clients keep besides their rows.
        optimizers: Of these, the states of optimizers; None if they are not kept.
        attributes: Of these, what modules and callbacks keep in Python; None likewise.
        updates: Steps that the optimizers of each client have taken in all its sessions, of shape
            (N,).
        packs: Trains and tests several clients at once.
        places: Groups, packs and ranks of the clients.
        client_rows: Rows of this rank's clients.
        coverages: Which part of a server model each group's rows cover.
        server_step: Lets the server's optimizer step.
        client_sessions: Begins, ends and tests the sessions of this rank's clients.
        training: Trains this rank's clients.
        plan: What the loop has decided about the current round, or the last one.
        outcomes: Which updates of the current round can be used.
        uncounted: For sessions that may turn out to be too late, their round, by client.
        metrics: Metrics of the current round.
        tests: Reports of the tests in the current round's sessions, on all ranks.
    """

    def __init__(
        self,
        groups: Sequence[ClientGroup],
        algorithm: Hooks,
        data: FederatedDataModule,
        *,
        ranks: Ranks,
        work: LocalWork | None = None,
        seed: int = 0,
        host_rows: bool = False,
        side_by_side: Callable[[Any], Alone] = Alone,
        rounds: int | None = None,
        max_failed: int | None = None,
        server_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        personal: Sequence[str] = (),
        timing: Callable[[Any], Clock] | None = None,
        local_penalty: LocalPenalty | None = None,
        keep_optimizer: bool = False,
        host: SessionHost | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.data = data
        self.ranks = ranks
        self.device = ranks.device
        self.work = work or LocalWork()
        self.seed = seed
        self.host_rows = host_rows
        self.rounds = rounds
        self.max_failed = max_failed
        self.clients = sum(group.count for group in groups)
        self.seen: Sequence[int] = data.partition_.seen
        self.unseen: Sequence[int] = data.partition_.unseen.tolist()
        self.sampled = self.work.sampled(len(self.seen))
        self.penalties = [p for p in (algorithm.local_penalty, local_penalty) if p is not None]
        self.hooks: Sequence[SessionHooks] = [algorithm, *self.penalties]
        check_additions(
            algorithm,
            self.penalties,
            server_optimizer=server_optimizer is not None,
            keep_optimizer=keep_optimizer,
        )
        if self.unseen:
            check_takes_unseen(algorithm)
            self.work.check(len(self.seen), unseen=len(self.unseen))

        # Groups build their modules on the data's shapes, without the samples that are held out.
        data.reserve(algorithm.hold_out)
        self.base = FrozenBase()
        self.groups = self._build_groups(groups, host or SessionHost())

        # What clients keep follows from the method, its penalties and the configuration.
        keeps_optimizer = keep_optimizer or algorithm.carries
        self.personal = personal_names(algorithm, self.groups, personal)
        for state in self.groups:
            state.personal = personal_positions(state, self.personal, self.device)
        self.stateful = (
            algorithm.stateful
            or any(penalty.stateful for penalty in self.penalties)
            or bool(self.personal)
            or keeps_optimizer
        )
        self.kept = KeptStates()
        self.optimizers = self.keep("optimizer") if keeps_optimizer else None
        self.attributes = self.keep("attributes") if keeps_optimizer else None
        self.updates = np.zeros(self.clients, dtype=np.int64)

        # The clock prices what the groups and the ledger say. It decides whether rows outlive their
        # round, which places and packs have to know.
        self.ledger = Ledger(self.clients)
        self.clock = self._make_clock(timing or algorithm.timing)
        self.keeps_late = self.clock.keeps_late
        self.keeps = self.stateful or self.keeps_late
        if self.keeps_late:
            self.late_floats = self.keep("late update", durable=False)
            self.late_integers = self.keep("late counters", durable=False)
        self.has_merged = False

        self.packs = side_by_side(self)
        for state in self.groups:
            state.packing = self.packs.packing(state)
        self.places = Places(
            self.groups,
            data,
            self.work,
            keeps=self.keeps,
            ranks=ranks,
            seed=seed,
        )
        self.client_rows = ClientRows(self.groups, self.places, self.kept)
        if self.work.seconds is not None:
            self._check_local_seconds(self.work.seconds)

        self.coverages = self._make_coverages()
        self.server_step = ServerStep(server_optimizer, algorithm, self.personal)

        self.plan = RoundPlan()
        self.outcomes = Outcomes()
        self.uncounted: dict[int, int] = {}
        self.metrics: dict[str, float] = {}
        self.tests: dict[Moment, list[Report]] = {}
        self.client_sessions = ClientSessions(self)
        self.training = Training(self, self.client_sessions, self.packs)

        self._warn_of_groups()
        algorithm.setup(self)
        for penalty in self.penalties:
            penalty.setup(self)
        if self.unseen:
            check_has_for_unseen(self)

    def _build_groups(self, groups: Sequence[ClientGroup], host: SessionHost) -> list[GroupState]:
        """Build the module and the row store of every group, in their order."""
        ranks = self.ranks
        names = group_names(groups)
        return [
            GroupState(
                group,
                self.data,
                name=name,
                position=position,
                base=self.base,
                seed=self.seed,
                device=self.device,
                host_rows=self.host_rows,
                prepare=self.prepare,
                host=replace(host, device=self.device),
                # The ranks of a plan have no number, and none of them runs anything.
                once=None if ranks.rank < 0 else ranks.first,
                ranks=ranks,
            )
            for position, (group, name) in enumerate(zip(groups, names, strict=True))
        ]

    def _make_clock(self, timing: Callable[[Any], Clock] | None) -> Clock:
        """Make the clock of the clients' devices, or one in which no time passes."""
        if timing is None:
            return Clock(self.sampled, self.clients, self.seed, self.seen)
        return timing(self)

    def _make_coverages(self) -> Coverages:
        """Make what says which part of a server model each group's rows cover."""
        algorithm = self.algorithm
        label_rows = None
        if algorithm.label_rows:
            label_rows = self.groups[0].output_layer(self.data.num_classes)
        return Coverages(
            [state.layout for state in self.groups],
            [state.name for state in self.groups],
            label_rows=label_rows,
            depths=algorithm.depths,
            method=type(algorithm).__name__,
            device=self.device,
        )

    def flops_of_a_batch(self, clients: Sequence[int], t: int) -> list[float]:
        """Return the FLOPs of a step of clients' sessions in round t, on a mean batch of each."""
        flops = []
        for client in clients:
            state = self.state(client)
            samples = self.data.num_samples(client) / self.data.num_batches(client, t)
            flops.append(samples * state.passes * state.flops)
        return flops

    def _check_local_seconds(self, given: float) -> None:
        """Refuse seconds of a session in which no device makes a step, or some make any number."""
        clients = range(self.clients)
        of_a_step = self.clock.step_seconds(clients, self.flops_of_a_batch(clients, 0))
        if not self.clock.delays_steps and not of_a_step.all():
            raise takes_no_time(int(of_a_step.argmin()))
        if of_a_step.min() > given:
            found = f"{given:g}, and the fastest device needs {of_a_step.min():.3g} for a step"
            raise UserError("model.local_seconds", found, "give more")

    def _warn_of_groups(self) -> None:
        """Warn of what a user of these groups should know, once."""
        unlike = self.base.unlike([state.name for state in self.groups], sliced=True)
        if unlike:
            self.warn(f"{unlike}; they are frozen, so no method sends them")
        for note in dict.fromkeys(state.note for state in self.groups):
            self.warn(note)

    def prepare(self, module: L.LightningModule, data: DataSpec) -> None:
        """Let the algorithm and the penalties change a newly built client module."""
        for hooks in self.hooks:
            hooks.prepare_module(module, data)

    def warn(self, text: str | None) -> None:
        """Log a warning on one rank; do nothing without a text."""
        if text and self.ranks.rank == 0:
            log.warning("%s", text)

    def keep(self, name: str, *, durable: bool = True, with_server: bool = False) -> Kept:
        """Declare a tensor that clients keep in addition to their rows. Call it in `setup`.

        Args:
            name: Its name in checkpoints.
            durable: Whether it outlives its round, which requires a stateful algorithm; see `Kept`.
                What does not outlives it all the same until a late update of its client arrives.
            with_server: Whether the server holds a sum of it, such as the mean of all control
                variates. Change it only for the clients that a merge returns, so that both change
                together: sessions that are not finite leave both as they are.

        Raises:
            UserError: It is durable, and the algorithm does not declare `stateful`.
        """
        assert name not in self.kept, f"{name} is kept already"
        if durable and not self.stateful:
            raise UserError(
                "model.algorithm",
                f"keeps {name}, but is not stateful",
                "set stateful = True in its class",
            )
        self.kept[name] = Kept(
            name,
            place=self.row_device,
            device=self.device,
            durable=durable,
            with_server=with_server,
        )
        return self.kept[name]

    def mine(self, clients: Sequence[int]) -> list[int]:
        """Return those of the clients that are on this rank, in order."""
        rank = self.ranks.rank
        return [client for client in clients if self.places.owner[client] == rank]

    def group_of(self, client: int) -> int:
        """Return the group of a client in this round."""
        return self.places.groups[client]

    def home_group(self, client: int) -> int:
        """Return the configured group of a client, whatever its group in this round."""
        return self.places.home_groups[client]

    def state(self, client: int) -> GroupState:
        """Return the module and the rows of a client's group in this round."""
        return self.groups[self.places.groups[client]]

    def pack_of(self, client: int) -> int:
        """Return the number of a client's pack; a client that trains alone is a pack of its own."""
        return self.places.packs[client]

    @property
    def row_device(self) -> torch.device:
        """The device of the rows."""
        return torch.device("cpu") if self.host_rows else self.device

    def row(self, client: int) -> Row:
        """Return the row of a client of this rank, on the device where rows are kept."""
        return self.state(client).store.row(client)

    def row_here(self, client: int) -> Row:
        """Return the row of a client of this rank on the device, as a copy if it is on the host."""
        row = self.row(client)
        state = self.state(client)
        if state.staging is None:
            return row
        return state.borrow(row)

    @abstractmethod
    def in_session(self, session: SessionContext) -> "FleetState":
        """This fleet as an algorithm's `models` sees it while the model in a session is tested."""

    def stored_bytes(self, client: int) -> int:
        """Return the bytes that a client of this rank keeps; 0 for a stateless one."""
        if not self.stateful:
            return 0
        layout = self.state(client).layout
        mask = self.kept.mask(client)
        floats = layout.floats.numel if mask is None else int(popcount(mask))
        row_bytes = 4 * floats + 8 * layout.integers.numel
        return row_bytes + self.kept.bytes(client)

    def deployed(self, client: int | None) -> Rows:
        """Return the model that a client deploys between rounds, or the server's.

        Args:
            client: Number of the client; None for the server.

        Raises:
            UserError: The algorithm has no such model.
        """
        algorithm = self.algorithm
        if client is None:
            rows = algorithm.models(self, "global", [])
            owner = "the server"
        elif client in self.unseen:
            newcomers = algorithm.newcomers(self, [client])
            rows = None if newcomers is None else newcomers.served
            owner = f"client {client}, which is unseen,"
        else:
            rows = algorithm.models(self, algorithm.moments[0], [client])
            owner = f"client {client}"
        if rows is None:
            raise UserError(
                "model.algorithm",
                f"{type(algorithm).__name__} gives {owner} no model",
                "return one from its `models` to export, fine-tune or predict with",
            )
        return rows

    def open_clients(self, clients: Sequence[int]) -> None:
        """Assign ranks and slots to a round's participants, if they are stateless.

        Raises:
            UserError: The algorithm chooses participants by itself, and one of them is unseen.
        """
        if self.unseen:
            refuse_unseen(self.algorithm, self.unseen, clients)
        if self.places.open(clients):
            self.client_rows.open(clients)

    def open_round(self, plan: RoundPlan | None = None, waves: Waves | None = None) -> None:
        """Begin a round. Stateless clients have no rows until they are opened again.

        Args:
            plan: What the loop has decided about the round; by default the plan of the last one.
            waves: See `Training.start`.
        """
        self.clock.open()
        self.plan = plan or self.plan
        self.training.start(waves)
        self.metrics = {}
        self.tests = {}
        self.outcomes = Outcomes()
        self.uncounted = {}  # there are some after a round that was suspended
        self.has_merged = False
        self.places.open_round()
        under_way = set(self.clock.under_way)
        for kept in self.kept.values():
            kept.open_round(under_way)

    def close_round(self) -> dict[str, float]:
        """End a round, and return its metrics and sums, which are the same on every rank."""
        outcomes = self.outcomes
        sums = self.ledger.close_round()
        sums |= self.clock.close_round(outcomes.silent, outcomes.usable)
        outcomes.late = self.clock.late
        self._count_sessions_in_time()
        return self.metrics | sums

    def _count_sessions_in_time(self) -> None:
        """Tell penalties of the sessions whose updates have counted in this round."""
        in_time = self.outcomes.contributing(sorted(self.uncounted))
        round_of = {client: self.uncounted[client] for client in in_time} | self.clock.begun
        for t in sorted(set(round_of.values())):
            clients = sorted(client for client, begun in round_of.items() if begun == t)
            for penalty in self.penalties:
                penalty.counted(self, clients, t)
        self.uncounted = {}

    def states(self) -> Saved | None:
        """Return the state of this rank's clients for a checkpoint; None if they keep nothing."""
        if not self.keeps:
            return None
        return self.client_rows.saved(set(self.clock.under_way))

    def load_states(self, shards: Sequence[Saved]) -> None:
        """Load this rank's clients from a checkpoint's shards, written on any number of ranks."""
        if not self.keeps:
            return
        for shard in shards:
            states = by_client(shard)
            for client in self.mine(list(states)):
                self.client_rows.restore(client, states[client])
