"""What a run would be on many ranks (`lightfed plan`): who trains where, bytes, memory.

A few rounds run dry (`lightfed.previews.dry_run`): nothing is trained, no rank is started, and of
every cohort there is one module.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor, nn

from lightfed.distributed.collectives import Ranks
from lightfed.distributed.placement import Rates, place
from lightfed.local.session_setup import OptimizerFactory, make_optimizer
from lightfed.previews.dry_run import Call, NoRank, Rehearsal
from lightfed.runs.checkpoint import main_file
from lightfed.state.rows import ModelLayout
from lightfed.utils.errors import UserError

if TYPE_CHECKING:
    from lightfed.data.datamodule import FederatedDataModule
    from lightfed.engine.federation import Federation


@dataclass(frozen=True)
class CohortFigures:
    """Of one architecture.

    Attributes:
        name: in reports.
        clients: how many.
        parameters: trained or not.
        flops: forward FLOPs of a sample; 0 if they are not known.
        row: bytes of a client's row.
    """

    name: str
    clients: int
    parameters: int
    flops: float
    row: int


@dataclass(frozen=True)
class Balance:
    """How much longer the busiest ranks take than is possible at all, over the planned rounds.

    The bound of sessions that run side by side is the mean of the ranks, or the longest session.

    Attributes:
        planned: as the run will place its clients.
        other: with home ranks, where clients keep nothing; where they keep rows, and so have home
            ranks, with ranks drawn up anew for whoever trains.
    """

    planned: float
    other: float


@dataclass(frozen=True)
class Traffic:
    """Client bytes of a round, as the ledger will count them.

    Attributes:
        down: a mean over the rounds.
        up: likewise.
        servers: bytes between servers, or servers and a coordinator, likewise.
        at_most: masks save a part that is not known before training.
        depends: what is sent depends on what is trained: `up` is not known, and `down` is what
            is known without it.
    """

    down: float
    up: float
    servers: float
    at_most: bool
    depends: bool


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank.

    Attributes:
        rows: (ranks,) of its clients.
        on_host: the rows lie in host memory, and two of a cohort on the device.
        staged: those two of all cohorts; 0 where rows are on the device.
        modules: one live module of every cohort.
        server: models and buffers of the server.
        training: gradients and optimiser state of the largest cohort.
        exchange: buffer for rows of other ranks, at most.
    """

    rows: np.ndarray
    on_host: bool
    staged: int
    modules: int
    server: int
    training: int
    exchange: int

    @property
    def device(self) -> int:
        """Of the fullest rank's device."""
        rows = 0 if self.on_host else int(self.rows.max())
        parts = (self.staged, self.modules, self.server, self.training, self.exchange)
        return rows + sum(parts)


@dataclass(frozen=True)
class Plan:
    """The figures of `lightfed plan`.

    Attributes:
        algorithm: its name.
        stateful: clients keep rows, on home ranks.
        clients: of the federation.
        rounds: how many were rehearsed, from the first.
        participants: sessions of a round, a mean.
        timed: costs are measured seconds, not samples x forward FLOPs.
        cohorts: in their order.
        sessions: (ranks,) of a round, a mean.
        loads: (ranks,) sum of the costs of a round's sessions, a mean.
        balance: over the rounds.
        traffic: of a round.
        memory: of a rank.
    """

    algorithm: str
    stateful: bool
    clients: int
    rounds: int
    participants: float
    timed: bool
    cohorts: list[CohortFigures]
    sessions: np.ndarray
    loads: np.ndarray
    balance: Balance
    traffic: Traffic
    memory: Memory

    @property
    def world(self) -> int:
        return len(self.loads)


def plan(
    fleet: Rehearsal,
    *,
    rounds: int,
    optimizer: OptimizerFactory | None,
    host_rows: bool = False,
    exchange_buffer: int = 0,
    chunks: int = 1,
) -> Plan:
    """Rehearse the first rounds and add up.

    Args:
        fleet: its ranks are none of the planned ones.
        rounds: how many.
        optimizer: of the configuration; None where modules have their own, whose state is not
            counted.
        host_rows: rows are to lie in host memory.
        exchange_buffer: bytes that rows of clients who hear each other may take.
        chunks: into which the samples of a client are cut; a round trains on one.
    """
    world, timed = fleet.ranks.world, fleet.rates.of(range(len(fleet.cohorts))) is not None
    calls: list[Call] = []
    sent = np.zeros(3)
    at_most = depends = exchanges = False
    slots = np.zeros((len(fleet.cohorts), world), dtype=np.int64)
    for t in range(rounds):
        fleet.open_round()
        fleet.algorithm.round(fleet, t)
        sums = fleet.close_round()
        sent += sums["bytes_down"], sums["bytes_up"], sums.get("server_bytes", 0.0)
        calls += fleet.calls
        np.maximum(slots, _slots(fleet), out=slots)
        at_most, depends = at_most | fleet.at_most, depends | fleet.depends
        exchanges |= fleet.exchanges
    sent /= rounds
    rows = [row_bytes(state.layout) for state in fleet.cohorts]
    return Plan(
        algorithm=type(fleet.algorithm).__name__,
        stateful=fleet.algorithm.stateful,
        clients=fleet.clients,
        rounds=rounds,
        participants=sum(len(call.costs) for call in calls) / rounds,
        timed=timed,
        cohorts=[
            CohortFigures(s.name, s.cohort.count, s.layout.parameter_numel, s.flops, row)
            for s, row in zip(fleet.cohorts, rows, strict=True)
        ],
        sessions=sum(
            (_loads(call, call.owner, world, ones=True) for call in calls), np.zeros(world)
        )
        / rounds,
        loads=sum((_loads(call, call.owner, world) for call in calls), np.zeros(world))
        / (rounds * chunks),
        balance=_balance(calls, fleet),
        traffic=Traffic(float(sent[0]), float(sent[1]), float(sent[2]), at_most, depends),
        memory=Memory(
            rows=np.array(rows) @ slots,
            on_host=host_rows,
            staged=2 * sum(rows) if host_rows else 0,
            modules=sum(rows),
            server=sum(t.numel() * t.element_size() for t in fleet.algorithm.state_dict().values()),
            training=_training_bytes(fleet, optimizer),
            exchange=_exchange_bytes(fleet, exchange_buffer) if exchanges else 0,
        ),
    )


def row_bytes(layout: ModelLayout) -> int:
    """Of a client's row, its padding with it."""
    return 4 * layout.floats.size + 8 * layout.integers.size


def _slots(fleet: Rehearsal) -> np.ndarray:
    """(cohorts, ranks) rows that there are in the round under way, or for good."""
    slots = np.zeros((len(fleet.cohorts), fleet.ranks.world), dtype=np.int64)
    if fleet.algorithm.stateful:
        for client, rank in fleet.homes().items():
            slots[fleet.home_cohort(client), rank] += 1
        return slots
    for call in fleet.calls:
        own = np.zeros_like(slots)
        for client, rank in call.owner.items():
            own[call.cohorts[client], rank] += 1
        np.maximum(slots, own, out=slots)
    return slots


def _loads(call: Call, owner: Mapping[int, int], world: int, *, ones: bool = False) -> np.ndarray:
    """(ranks,) sum of the costs of their sessions, or how many they are."""
    clients = sorted(call.costs)
    costs = None if ones else [call.costs[k] for k in clients]
    return np.bincount([owner[k] for k in clients], weights=costs, minlength=world).astype(float)


def _balance(calls: Sequence[Call], fleet: Rehearsal) -> Balance:
    calls, world, homes = [call for call in calls if call.costs], fleet.ranks.world, fleet.homes()
    bound = sum(max(sum(call.costs.values()) / world, max(call.costs.values())) for call in calls)

    def over(owner_of: Callable[[Call], Mapping[int, int]]) -> float:
        if not bound:
            return 1.0  # nobody trains
        return float(sum(_loads(call, owner_of(call), world).max() for call in calls) / bound)

    def anew(call: Call) -> Mapping[int, int]:
        return place(call.costs, ranks=world)

    other = over(anew) if fleet.algorithm.stateful else over(lambda _: homes)
    return Balance(planned=over(lambda call: call.owner), other=other)


def _exchange_bytes(fleet: Rehearsal, buffer: int) -> int:
    """Blocks of rows that come and go are no larger than the rows of all."""
    if fleet.ranks.world == 1:
        return 0
    return min(buffer, 6 * fleet.clients * 4 * fleet.cohorts[0].layout.size)


def _training_bytes(fleet: Rehearsal, optimizer: OptimizerFactory | None) -> int:
    """Gradients and optimiser state of the cohort with the most of them."""
    trained = max(
        sum(p.numel() for p in state.module.parameters() if p.requires_grad)
        for state in fleet.cohorts
    )
    return round(4 * trained * (1 + (0.0 if optimizer is None else state_slots(optimizer))))


def state_slots(factory: OptimizerFactory) -> float:
    """Numbers that an optimiser keeps for a parameter, found out on a small one."""
    parameter = nn.Parameter(torch.zeros(8, 8))
    optimizer = make_optimizer(factory, [parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step(lambda: 0.0)
    kept = [v for v in optimizer.state[parameter].values() if isinstance(v, Tensor)]
    return sum(v.numel() for v in kept if v.dim()) / parameter.numel()


def plan_of(
    federation: "Federation",
    trainer: L.Trainer,
    data: "FederatedDataModule",
    *,
    world: int,
    rounds: int,
    ckpt_path: str | None = None,
) -> Plan:
    """The plan of a configuration.

    Args:
        federation: what is trained.
        trainer: says how many rounds there are, and how many batches a session has.
        data: prepared here, on the CPU.
        world: ranks.
        rounds: to rehearse.
        ckpt_path: a checkpoint whose measured times are the costs, if it has them for all cohorts.

    Raises:
        UserError: there are more ranks than clients, or what a run would refuse.
    """
    clients, seed = federation.num_clients, federation.seed
    if not 1 <= world <= clients:
        found = f"{world} ranks for {clients} clients"
        raise UserError("world_size", found, "give at least 1 and at most one rank a client")
    if rounds < 1:
        raise UserError("rounds", f"{rounds}", "give at least 1")
    ranks = NoRank(world)
    rates = _rates(ckpt_path, len(federation.cohorts))
    data.prepare(clients=clients, seed=seed, device=ranks.device, folder=None)
    fleet = Rehearsal(
        federation.cohorts,
        federation.algorithm,
        data,
        ranks=ranks,
        work=federation.work(trainer.limit_train_batches),
        seed=seed,
        rounds=trainer.max_epochs if (trainer.max_epochs or 0) > 0 else None,
        rates=rates,
    )
    return plan(
        fleet,
        rounds=rounds,
        optimizer=federation.optimizer,
        host_rows=federation.host_rows,
        exchange_buffer=federation.exchange_buffer,
        chunks=data.chunks,
    )


def _rates(ckpt_path: str | None, cohorts: int) -> Rates:
    """Those of a checkpoint, for all cohorts.

    Raises:
        UserError: it has none, or not for all.
    """
    if ckpt_path is None:
        return Rates()
    rates = Rates.of_checkpoint(main_file(ckpt_path), Ranks(torch.device("cpu")))
    if rates.of(range(cohorts)) is None:
        found = f"{ckpt_path} has no times of sessions of all {cohorts} cohorts"
        fix = "give a checkpoint of this configuration, or leave it out"
        raise UserError("ckpt_path", found, fix)
    return rates
