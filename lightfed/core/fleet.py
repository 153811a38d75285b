"""The clients of a federation as an algorithm sees them: participants, send, train, merge.

Every rank runs the same algorithm on its own Fleet and holds its share of the clients; the words
below hide which.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as L
import numpy as np
import torch
from lightfed_kernels import FIXED_LIMIT
from torch import Tensor

from lightfed.comm.collectives import Ranks
from lightfed.core.algorithm import Algorithm, ServerModel
from lightfed.core.cohort import Cohort, CohortState, cohort_names
from lightfed.core.coverage import Accumulate
from lightfed.core.ledger import Ledger
from lightfed.core.nesting import Nesting, Parts
from lightfed.core.optimizer import Stepper
from lightfed.core.placement import place
from lightfed.core.session import (
    LocalSession,
    PendingReport,
    Report,
    Runtime,
    Work,
    weighted_means,
)
from lightfed.core.store import Row
from lightfed.core.work import ClientData, LocalWork
from lightfed.utils.rng import derive_seed, numpy_generator, torch_generator

log = logging.getLogger(__name__)

Weights = Literal["samples", "uniform"]
RunClient = Callable[[int], PendingReport]
Waves = Callable[[list[int], int, RunClient], list[PendingReport]]


@dataclass(frozen=True)
class Message:
    """What a server sent to a client on this rank, and the version of the model at that time."""

    model: ServerModel
    parts: Parts
    version: int


class Fleet:
    """The clients, numbered 0 .. N-1 in the order of the cohorts.

    Args:
        cohorts: one architecture each.
        algorithm: for its declarations; its `setup` is called at the end of construction.
        data: the clients' samples.
        ranks: of the run.
        work: local work and sampling.
        seed: of the whole run.
        accumulate: how sums over clients are held.
        host_rows: keep client rows in host memory.
    """

    def __init__(
        self,
        cohorts: Sequence[Cohort],
        algorithm: Algorithm,
        data: ClientData,
        *,
        ranks: Ranks,
        work: LocalWork | None = None,
        seed: int = 0,
        accumulate: Accumulate = "float64",
        host_rows: bool = False,
    ) -> None:
        self.algorithm = algorithm
        self.data = data
        self.ranks = ranks
        self.device = ranks.device
        self.work = work or LocalWork()
        self.seed = seed
        self.accumulate = accumulate
        self.clients = sum(cohort.count for cohort in cohorts)
        self.ledger = Ledger(self.clients)
        self.cohorts = [
            CohortState.build(
                cohort,
                data,
                name=name,
                position=position,
                seed=seed,
                device=self.device,
                host_rows=host_rows,
                prepare=algorithm.prepare_module,
            )
            for position, (cohort, name) in enumerate(
                zip(cohorts, cohort_names(cohorts), strict=True)
            )
        ]
        self._home_cohort = np.repeat(np.arange(len(cohorts)), [c.count for c in cohorts])
        self._assigned: dict[int, int] = {}
        self._owner: dict[int, int] = {}
        self._usable: dict[int, bool] = {}
        self._inbox: dict[int, Message] = {}
        self._nesting = Nesting(
            self.cohorts, algorithm, num_classes=data.num_classes, device=self.device
        )
        self.metrics: dict[str, float] = {}
        self.lr: float | None = None
        self.runtime = Runtime()
        self._sessions: dict[int, LocalSession] = {}
        self.waves: Waves = lambda mine, _, run: [run(client) for client in mine]
        has_hook = type(algorithm).local_gradient is not Algorithm.local_gradient
        self._hook = algorithm.local_gradient if has_hook else None
        if algorithm.stateful:
            self._settle()
        algorithm.setup(self)

    def _settle(self) -> None:
        """Stateful clients: a home rank for all, and their rows, once."""
        self._owner = place({k: self._cost(k) for k in range(self.clients)}, ranks=self.ranks.world)
        for index, state in enumerate(self.cohorts):
            mine = [k for k in self.mine(range(self.clients)) if self._home_cohort[k] == index]
            state.open(mine, keep=True)
            for client in mine:
                state.store.row(client).copy_(state.initial)

    # What an algorithm says.

    def participants(self, t: int) -> list[int]:
        """S_t: clients drawn uniformly without replacement, ascending; the same on every rank."""
        count = self.work.clients_per_round or math.ceil(self.work.fraction * self.clients)
        if count >= self.clients:
            return list(range(self.clients))
        rng = numpy_generator(self.seed, "participants", t)
        return sorted(rng.choice(self.clients, count, replace=False, shuffle=False).tolist())

    def assign(self, cohorts: Mapping[int, int]) -> None:
        """Put clients into other cohorts for this round (HeteroFL's dynamic levels).

        Stateless algorithms only.
        """
        assert not self.algorithm.stateful, "a client that keeps its row cannot change its shape"
        self._assigned = dict(cohorts)

    def new_model(self, cohort: int = 0) -> ServerModel:
        """A server model in the layout of a cohort, with its initial values."""
        state = self.cohorts[cohort]
        row = Row(state.initial.floats.clone(), state.initial.integers.clone())
        return ServerModel(state.layout, row).to(self.device)

    def send(
        self,
        model: ServerModel,
        clients: Sequence[int],
        *,
        buffers: bool = True,
        tensors: Collection[str] | None = None,
    ) -> None:
        """Copy the covered part of a server model into the clients' rows.

        A row on the device is written when its session begins, or somebody looks at it: what has
        just been written is in the cache when it is trained.

        Args:
            model: of the server.
            clients: receivers.
            buffers: send BatchNorm statistics and other buffers too.
            tensors: names of the only tensors to send; all by default.
        """
        self._open(clients)
        parts = Parts.of(buffers=buffers, tensors=tensors)
        for client in clients:
            state = self.state(client)
            self.ledger.sent_down(client, self._nesting.bytes(model, self.cohort_of(client), parts))
            if self._owner[client] == self.ranks.rank:
                self._deliver(client)  # what was sent before, and may cover more
                self._inbox[client] = Message(model, parts, model.floats._version)
                if state.staging is not None:
                    self._deliver(client)

    def train(self, clients: Sequence[int], t: int) -> None:
        """Local training of every client, in waves; metrics are their means, weighted by samples.

        A client whose update is not finite is named in the log and left out of this round's merges.
        """
        self._open(clients)
        mine = self.mine(clients)
        waves = (
            len(mine)
            if self.ranks.world == 1
            else max(sum(self._owner[k] == r for k in clients) for r in range(self.ranks.world))
        )
        pending = self.waves(mine, waves, lambda client: self._run(client, mine, t))
        reports = self.ranks.gather([report.resolve() for report in pending])
        reports.sort(key=lambda report: report.client)
        for report in reports:
            self.ledger.computed(
                report.client, 3 * self.state(report.client).flops * report.samples
            )
        self._judge(reports, t)

    def merge(
        self,
        clients: Sequence[int],
        *,
        into: ServerModel,
        weights: Weights = "samples",
        buffers: bool = True,
        tensors: Collection[str] | None = None,
    ) -> None:
        """Coverage-weighted mean of the clients' rows; elements nobody covers keep their old value.

        Args:
            clients: whose rows.
            into: the server model that is replaced by the mean.
            weights: n_k, or 1 for all.
            buffers: merge buffers too; integer ones become the largest of the clients'.
            tensors: names of the only tensors to merge; all by default.
        """
        parts = Parts.of(buffers=buffers, tensors=tensors)
        for client in list(self._inbox):
            self._deliver(client)
        valid = [k for k in clients if self._usable.get(k, True)]
        for client in clients:
            self.ledger.sent_up(client, self._nesting.bytes(into, self.cohort_of(client), parts))
        if not valid:
            return
        coverage = self._nesting.coverage(into, parts)
        rows_of_labels = coverage.table.num_labels
        labels = [self._labels(k, rows_of_labels) for k in valid] if rows_of_labels else None
        rows = {
            i: self.state(k).store.row(k)
            for i, k in enumerate(valid)
            if self._owner[k] == self.ranks.rank
        }
        coverage.merge_(
            into.floats,
            [self.cohort_of(k) for k in valid],
            {i: row.floats for i, row in rows.items()},
            weights=[
                float(self.data.num_samples(k)) if weights == "samples" else 1.0 for k in valid
            ],
            labels=labels,
            accumulate=self.accumulate,
            sum_over_ranks=self.ranks.sum_ if self.ranks.world > 1 else None,
        )
        if parts.integers and into.integers.numel():
            largest = torch.full_like(into.integers, torch.iinfo(torch.int64).min)
            for row in rows.values():
                torch.maximum(largest, row.integers.to(self.device), out=largest)
            into.integers.copy_(self.ranks.max_(largest))

    # What the rest of core, and tests, ask.

    def state(self, client: int) -> CohortState:
        """The cohort of a client in this round."""
        return self.cohorts[self.cohort_of(client)]

    def cohort_of(self, client: int) -> int:
        return self._assigned.get(client, int(self._home_cohort[client]))

    def mine(self, clients: Sequence[int]) -> list[int]:
        """Those of the clients that lie on this rank, in order."""
        return [k for k in clients if self._owner[k] == self.ranks.rank]

    def row(self, client: int) -> Row:
        """The client's own row, where it is kept; the client lies on this rank."""
        self._deliver(client)
        return self.state(client).store.row(client)

    def bind(self, client: int) -> L.LightningModule:
        """The client's live module, bound to the client's own row; it lies on this rank."""
        module = self.state(client).live.bind(self.row(client))
        assert isinstance(module, L.LightningModule)
        return module

    def bind_model(self, model: ServerModel, cohort: int = 0) -> L.LightningModule:
        """A cohort's live module, bound to a server model of its layout."""
        module = self.cohorts[cohort].live.bind(model.row)
        assert isinstance(module, L.LightningModule)
        return module

    def session_of(self, module: L.LightningModule) -> LocalSession:
        """The session that evaluates a module: a cohort's, or one for an algorithm's own module."""
        session = self._sessions.get(id(module))
        if session is None:
            session = self._sessions[id(module)] = LocalSession(module, self.runtime)
        return session

    def attach(self, runtime: Runtime, steppers: Sequence[tuple[Stepper, bool]]) -> None:
        """Give the cohorts their sessions.

        Args:
            runtime: of the Trainer.
            steppers: one a cohort, and whether it takes the round's learning rate.
        """
        self.runtime = runtime
        self._sessions = {}
        for state, (stepper, takes_lr) in zip(self.cohorts, steppers, strict=True):
            state.takes_lr = takes_lr
            state.session = LocalSession(state.module, runtime, live=state.live, stepper=stepper)
            self._sessions[id(state.module)] = state.session

    def home_cohort(self, client: int) -> int:
        """The configured cohort of a client, whatever it is assigned in a round."""
        return int(self._home_cohort[client])

    def home(self, client: int) -> int:
        """The rank of a stateful client."""
        return self._owner[client]

    def load_parameters(self, model: ServerModel, client: int) -> None:
        """A server's parameters, without buffers, into a client's row.

        No message, and nothing in the ledger.
        """
        coverage = self._nesting.fitting(model, self.cohort_of(client), Parts(buffers=False))
        coverage.take(model.floats, self.cohort_of(client), self.row(client).floats)

    def check_nested(self, model: ServerModel, cohort: int) -> None:
        """Refuse a cohort whose rows do not fit into a server model.

        Raises:
            UserError: names the cohort and the layer.
        """
        self._nesting.fitting(model, cohort, Parts())

    def covered_row(self, model: ServerModel, client: int) -> Row:
        """The part of a server model that a client covers, as a row in the client's own layout."""
        cohort = self.home_cohort(client)
        state = self.cohorts[cohort]
        row = Row(
            state.initial.floats.to(self.device, copy=True),
            state.initial.integers.to(self.device, copy=True),
        )
        self._nesting.fitting(model, cohort, Parts()).take(model.floats, cohort, row.floats)
        row.integers.copy_(model.integers)
        return row

    def rows(self) -> dict[int, list[Tensor]] | None:
        """The rows of this rank's stateful clients, for a checkpoint.

        None if clients keep nothing.
        """
        if not self.algorithm.stateful:
            return None
        rows = {k: self.row(k) for k in self.mine(range(self.clients))}
        # Cloned: a view would be saved with the whole matrix behind it.
        return {
            k: [row.floats.cpu().clone(), row.integers.cpu().clone()] for k, row in rows.items()
        }

    def load_rows(self, shards: Sequence[Mapping[int, list[Tensor]]]) -> None:
        """Take this rank's clients from the shards of a checkpoint, whatever ranks wrote them."""
        if not self.algorithm.stateful:
            return
        for shard in shards:
            for client in self.mine(sorted(shard)):
                self.row(client).copy_(Row(*shard[client]))

    def open_round(self) -> None:
        """Forget the participants of the last round.

        The rows of stateless clients are free again.
        """
        self.metrics, self._assigned, self._usable = {}, {}, {}
        if not self.algorithm.stateful:
            self._owner = {}
            self._inbox.clear()

    def close_round(self) -> dict[str, float]:
        """The round's metrics and sums, the same on every rank."""
        return self.metrics | self.ledger.close_round()

    def _open(self, clients: Sequence[int]) -> None:
        """Stateless clients: ranks and slots for the participants of a round."""
        if self.algorithm.stateful or all(k in self._owner for k in clients):
            return
        self._owner = place({k: self._cost(k) for k in clients}, ranks=self.ranks.world)
        mine = self.mine(clients)
        for index, state in enumerate(self.cohorts):
            state.open([k for k in mine if self.cohort_of(k) == index], keep=False)

    def _deliver(self, client: int) -> None:
        """Write what was sent to a client into its row."""
        message = self._inbox.pop(client, None)
        if message is None:
            return
        model, row = message.model, self.state(client).store.row(client)
        assert model.floats._version == message.version, "the server model changed under way"
        cohort = self.cohort_of(client)
        coverage = self._nesting.fitting(model, cohort, message.parts)
        coverage.take(model.floats, cohort, row.floats)
        if message.parts.integers and row.integers.numel():
            row.integers.copy_(model.integers)

    def _cost(self, client: int) -> float:
        return self.data.num_samples(client) * max(self.state(client).flops, 1.0)

    def _labels(self, client: int, rows: int) -> list[int]:
        """The label rows that a client gives: of its labels, and of those that stand for none."""
        held: list[int] = self.data.labels(client).tolist()
        surplus = range(self.data.num_classes, rows) if self.algorithm.surplus_rows else ()
        return [*held, *surplus]

    def _run(self, client: int, mine: list[int], t: int) -> PendingReport:
        """One session, on this rank."""
        state = self.state(client)
        assert state.session is not None, "sessions are attached before the first round"
        row = self._fetch(client, mine)
        state.live.bind(row)
        self.algorithm.session_start(self, client, state.module)
        per_epoch = self.data.num_batches(client)
        work = Work(
            client,
            self._batches(client, t, self.work.batches(per_epoch)),
            epoch_batches=per_epoch,
            lr=self.lr if state.takes_lr else None,
            seed=derive_seed(self.seed, "session", t, client),
            hook=self._hook,
        )
        report = state.session.train(row, work)
        if state.staging is not None:
            state.staging.put_back(client)
        return report

    def _fetch(self, client: int, mine: list[int]) -> Row:
        """The client's row on the device, and the next client's on its way."""
        state = self.state(client)
        if state.staging is None:
            return self.row(client)
        row = state.staging.get(client)
        position = mine.index(client) + 1
        if position < len(mine) and (ahead := self.state(mine[position]).staging) is not None:
            ahead.prefetch(mine[position])
        return row

    def _batches(self, client: int, t: int, left: int) -> Iterator[Any]:
        order = torch_generator(self.seed, "order", t, client)
        augment = torch_generator(self.seed, "augment", t, client) if self.data.augments else None
        while left > 0:
            before = left
            for batch in self.data.train_epoch(client, order=order, augment=augment, limit=left):
                left -= 1
                yield batch
            assert left < before, f"client {client} has no batch"

    def _start_anew(self, client: int) -> None:
        """Give a stateful client its initial row: from what is not finite there is no way back."""
        if self.algorithm.stateful and self._owner[client] == self.ranks.rank:
            self.row(client).copy_(self.state(client).initial)

    def _judge(self, reports: list[Report], t: int) -> None:
        """Who is left out, and the round's means."""
        limit = FIXED_LIMIT if self.accumulate == "fixed" else math.inf
        for report in reports:
            self._usable[report.client] = usable = report.norm < limit
            if not usable:
                self._start_anew(report.client)
            if not usable and self.ranks.rank == 0:
                log.warning(
                    "round %d: the update of client %d is not finite (norm %g); "
                    "it is left out of the merge, and a client that keeps its row starts anew",
                    t, report.client, report.norm,
                )  # fmt: skip
        good = [r for r in reports if self._usable[r.client]]
        self.metrics |= weighted_means(good)
        self.metrics["participants"] = float(len(reports))
        self.metrics["excluded"] = float(len(reports) - len(good))
