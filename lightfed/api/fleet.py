"""The clients of a federation as an algorithm sees them: participants, send, train, merge.

Every rank runs the same algorithm on its own Fleet and holds its share of the clients. The methods
below hide the placement.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, TypeVar

import numpy as np
import torch
from lightfed_kernels import FIXED_LIMIT, apply_mask_, compress, expand, popcount
from torch import Tensor

from lightfed.aggregation.coverage import Accumulate
from lightfed.aggregation.coverage_cache import Nesting, Parts
from lightfed.aggregation.gossip import Exchange, Over
from lightfed.aggregation.group_mean import Group, Sharing
from lightfed.aggregation.weights import whole
from lightfed.api.clients import Clients, Message
from lightfed.api.failures import judge
from lightfed.distributed.collectives import Ranks
from lightfed.distributed.placement import Rates, place
from lightfed.local.client_group import ClientGroup, GroupState, cohort_names
from lightfed.local.hooks import Hooks, Moment
from lightfed.local.local_work import ClientData, LocalWork, Phase
from lightfed.local.session import Report, weighted_means
from lightfed.local.session_runner import Training
from lightfed.state.client_state import Kept
from lightfed.state.costs import Ledger
from lightfed.state.parts import integers_of, part_of, with_prefix
from lightfed.state.rows import Row
from lightfed.state.server_model import ServerModel
from lightfed.utils.counts import rounded_up
from lightfed.utils.rng import numpy_generator

T = TypeVar("T")
Weights = Literal["samples", "uniform"]


class Fleet(Clients):
    """The clients, numbered 0 .. N-1 in the order of the cohorts.

    Args:
        cohorts: one architecture each.
        algorithm: the algorithm; its `setup` is called at the end of construction.
        data: the clients' samples.
        ranks: of the run.
        work: local work and sampling.
        seed: of the whole run.
        accumulate: how sums over clients are held.
        host_rows: keep client rows in host memory.
        exchange_buffer: bytes per rank for rows that clients exchange.
        rounds: number of rounds of the run, if known.
        max_failed: number of sessions of a round that may fail; by default all but one may raise.
        rates: session times that the run has measured before.

    Attributes:
        fruitless_rounds: number of rounds in a row, up to now, without a usable update.
    """

    def __init__(
        self,
        cohorts: Sequence[ClientGroup],
        algorithm: Hooks,
        data: ClientData,
        *,
        ranks: Ranks,
        work: LocalWork | None = None,
        seed: int = 0,
        accumulate: Accumulate = "float64",
        host_rows: bool = False,
        exchange_buffer: int = 2**28,
        rounds: int | None = None,
        max_failed: int | None = None,
        rates: Rates | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.rounds = rounds
        self.max_failed = max_failed
        self.fruitless_rounds = 0
        self.rates = Rates() if rates is None else rates
        self.host_rows = host_rows
        self.data = data
        data.reserve(algorithm.hold_out)
        self.ranks = ranks
        self.device = ranks.device
        self.work = work or LocalWork()
        self.seed = seed
        self.accumulate = accumulate
        self.clients = sum(cohort.count for cohort in cohorts)
        self.ledger = Ledger(self.clients)
        self.cohorts = [
            GroupState.build(
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
        self._silent: set[int] = set()  # clients whose sessions raised: they send nothing
        self._inbox: dict[int, Message] = {}
        output = self.cohorts[0].output_layer(data.num_classes) if algorithm.label_rows else None
        self._nesting = Nesting(
            [state.layout for state in self.cohorts],
            [state.name for state in self.cohorts],
            label_rows=output,
            method=type(algorithm).__name__,
            device=self.device,
        )
        self._exchange_buffer = exchange_buffer
        self._exchange: Exchange | None = None
        self.metrics: dict[str, float] = {}
        self.tests: dict[Moment, list[Report]] = {}  # in this round's sessions, on all ranks
        self.kept: dict[str, Kept] = {}
        self.masks: Kept | None = None
        self.training = Training(self)
        if algorithm.stateful:
            self._settle()
        algorithm.setup(self)

    def _settle(self) -> None:
        """Assign all stateful clients a home rank and open their rows, once."""
        self._owner = place(self._costs(range(self.clients)), ranks=self.ranks.world)
        for index, state in enumerate(self.cohorts):
            mine = [k for k in self.mine(range(self.clients)) if self._home_cohort[k] == index]
            state.open(mine, keep=True)
            for client in mine:
                state.store.row(client).copy_(state.initial)

    # Methods for algorithms.

    def participants(self, t: int) -> list[int]:
        """S_t: clients drawn uniformly without replacement, ascending; the same on every rank."""
        count = self.work.clients_per_round or rounded_up(self.work.fraction * self.clients)
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

    def new_part(self, prefix: str) -> ServerModel:
        """A server model of the first cohort's tensors with this name prefix.

        Initial values are that cohort's; cohorts may have more tensors.

        Raises:
            UserError: a cohort lacks one of them, or has it in another shape.
        """
        names = with_prefix(self.cohorts[0].layout, prefix)
        return self.new_common([names] * len(self.cohorts))

    def new_common(self, names: Sequence[Sequence[str]]) -> ServerModel:
        """A server model of tensors that cohorts have by different names.

        Initial values are those of the first cohort.

        Args:
            names: per cohort; the i-th name of each cohort is the same tensor.

        Raises:
            UserError: a cohort lacks one of them, or has it in another shape.
        """
        state = self.cohorts[0]
        model = part_of(state.layout, state.initial, names).to(self.device)
        for cohort in range(len(self.cohorts)):
            self.check_nested(model, cohort)
        return model

    def keep(self, name: str, *, durable: bool = True) -> Kept:
        """Declare a tensor that clients keep in addition to their rows; call it in `setup`.

        Args:
            name: in checkpoints.
            durable: it outlives its round; see `Kept`. Stateful algorithms only.
        """
        assert name not in self.kept, f"{name} is kept already"
        assert self.algorithm.stateful or not durable, "stateless clients keep nothing"
        place = torch.device("cpu") if self.host_rows else self.device
        self.kept[name] = Kept(name, place=place, device=self.device, durable=durable)
        return self.kept[name]

    def keep_masks(self) -> Kept:
        """A mask per client: packed words (P / 32,) of the elements that it holds and trains.

        The rest of the row stays 0. Only covered values are stored. A dense client has no mask.
        """
        self.masks = self.keep("mask")
        return self.masks

    def send(
        self,
        model: ServerModel,
        clients: Sequence[int],
        *,
        buffers: bool = True,
        tensors: Collection[str] | None = None,
        size: int | None = None,
    ) -> None:
        """Copy the covered part of a server model into the clients' rows.

        A row on the device is written only when its session starts or it is read, so that the
        written values are still in the cache during training.

        Args:
            model: of the server.
            clients: receivers.
            buffers: send BatchNorm statistics and other buffers too.
            tensors: names of the tensors to send; all by default.
            size: bytes on the wire, if the model is sent in another form.
        """
        self._open(clients)
        parts = Parts.of(buffers=buffers, tensors=tensors)
        for client in clients:
            state = self.state(client)
            covered = self._nesting.bytes(model, self.cohort_of(client), parts)
            self.ledger.sent_down(client, covered if size is None else size)
            if self._owner[client] == self.ranks.rank:
                self._deliver(client)  # an earlier message may cover more
                self._inbox[client] = Message(model, parts, model.floats._version)
                if state.staging is not None:
                    self._deliver(client)

    def train(
        self,
        clients: Sequence[int],
        t: int,
        *,
        steps: Mapping[int, int] | None = None,
        phases: Sequence[Phase] = (),
    ) -> None:
        """Train every client locally, in waves; metrics are means weighted by samples.

        A client whose session raises, or whose update is not finite, is named in the log and left
        out of this round's merges.

        Args:
            clients: clients to train.
            t: the round.
            steps: batches per session by client; as configured by default.
            phases: parts of every session, one after the other, instead of `steps`.

        Raises:
            Suspended: a signal asked the run to stop before all sessions finished.
            UserError: too many clients failed, or all.
        """
        self._open(clients)
        waves = (
            len(clients)
            if self.ranks.world == 1
            else max(sum(self._owner[k] == r for k in clients) for r in range(self.ranks.world))
        )
        training = self.training
        training.steps, training.phases = steps or {}, phases
        reports = training.sessions(clients, waves, t)
        for report in reports:
            self.ledger.computed(report.client, 3 * report.flops * report.samples)
            self.rates.add(
                self.cohort_of(report.client), samples=report.samples, seconds=report.seconds
            )
        self._usable |= self._judge(reports, t)
        self._silent |= {report.client for report in reports if report.error}
        good = [r for r in reports if self._usable[r.client]]
        self.metrics |= weighted_means(good)
        self.metrics["participants"] = float(len(reports))
        self.metrics["excluded"] = float(len(reports) - len(good))
        for moment, tests in training.tests.items():
            self.tests.setdefault(moment, []).extend(self.ranks.gather(tests))

    def _judge(self, reports: Sequence[Report], t: int) -> dict[int, bool]:
        """Which updates can be used; called by every rank.

        The others are named in the log. A client that keeps a non-finite row is reset.
        """
        limit = FIXED_LIMIT if self.accumulate == "fixed" else math.inf
        verdict = judge(reports, t, limit=limit)
        if self.algorithm.stateful:
            for client in self.mine(verdict.not_finite):
                self._reset(client)
        for warning in verdict.warnings:
            self.warn(warning)
        self.fruitless_rounds = verdict.check(
            t, allowed=self.max_failed, fruitless=self.fruitless_rounds
        )
        return verdict.usable

    def merge(
        self,
        clients: Sequence[int],
        *,
        into: ServerModel,
        weights: Weights | Mapping[int, float] = "samples",
        buffers: bool = True,
        tensors: Collection[str] | None = None,
        sent: Collection[int] | None = None,
        sizes: Mapping[int, int] | None = None,
    ) -> list[int]:
        """Coverage-weighted mean of the clients' rows; uncovered elements keep their old value.

        Args:
            clients: clients to merge.
            into: the server model that is replaced by the mean.
            weights: n_k, or 1 for all, or a weight of 0 or more per client.
            buffers: merge buffers too; integer ones become the largest of the clients'.
            tensors: names of the tensors to merge; all by default.
            sent: clients that send their rows; the server holds the others'. All by default.
            sizes: bytes on the wire by client, if rows are sent in another form.

        Returns:
            the clients in the mean; updates of the others were not finite.
        """
        parts = Parts.of(buffers=buffers, tensors=tensors)
        for client in list(self._inbox):
            self._deliver(client)
        valid = [k for k in clients if self._usable.get(k, True)]
        self._count_up(into, clients if sent is None else sorted(sent), parts, sizes)
        if not valid:
            return []
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
            weights=self._weights(weights, valid),
            labels=labels,
            accumulate=self.accumulate,
            sum_over_ranks=self.ranks.sum_ if self.ranks.world > 1 else None,
        )
        if parts.integers and into.integers.numel():
            largest = torch.full_like(into.integers, torch.iinfo(torch.int64).min)
            for i, row in rows.items():
                cohort = self.cohort_of(valid[i])
                theirs = integers_of(into, cohort, self.cohorts[cohort].layout, row)
                torch.maximum(largest, theirs.to(self.device), out=largest)
            into.integers.copy_(self.ranks.max_(largest))
        return valid

    def average(
        self,
        values: Mapping[int, Tensor],
        clients: Sequence[int],
        *,
        into: Tensor,
        weights: Weights | Mapping[int, float] = "uniform",
    ) -> list[int]:
        """The weighted mean over clients of tensors that they keep, into one of the server.

        The sum is in float64 over whole weights, so that it does not depend on placement. No
        message is counted: rows are, by `merge`; what travels besides is for `charge`.

        Args:
            values: of this rank's clients, by client, such as a `Kept`.
            clients: whose tensors are in the mean; others' updates are left out as in `merge`.
            into: the server's tensor, of one shape with theirs; it stays where nobody is left.
            weights: as in `merge`.

        Returns:
            those whose tensors are in the mean.
        """
        valid = [k for k in clients if self._usable.get(k, True)]
        shares = dict(zip(valid, self._weights(weights, valid), strict=True))
        total = torch.zeros_like(into, dtype=torch.float64)
        for client in self.mine(valid):
            total += shares[client] * values[client].to(total)
        self.ranks.sum_(total)
        if sum(shares.values()) > 0:
            into.copy_(total / sum(shares.values()))
        return valid

    def charge(self, clients: Sequence[int], *, up: float = 0.0, down: float = 0.0) -> None:
        """Count bytes that each of the clients sends and receives besides rows."""
        for client in self._speaking(clients):
            self.ledger.sent_up(client, up)
        for client in clients:
            self.ledger.sent_down(client, down)

    def show(self, model: ServerModel, clients: Sequence[int]) -> None:
        """Count the bytes of clients that read a server's model; their rows do not change."""
        for client in clients:
            size = self._nesting.bytes(model, self.cohort_of(client), Parts())
            self.ledger.sent_down(client, size)

    def relay(self, model: ServerModel, times: int) -> None:
        """Count the bytes of servers that send a model to or from a coordinator or each other."""
        layout = model.layout
        size = 4 * layout.floats.numel + 8 * layout.integers.numel
        self.ledger.sent_between_servers(times * size)

    def exchange(
        self,
        hears: Mapping[int, Sequence[int]],
        *,
        masks: Mapping[int, Tensor] | None = None,
        keep: Mapping[int, Tensor] | None = None,
        over: Over = "covered",
    ) -> None:
        """Replace every listed client's row by the mean over itself and its senders.

        All read the old rows; sums are in ascending order of the clients. Only for stateful
        algorithms with one architecture.

        Args:
            hears: receiver -> its senders, without itself; the same on every rank.
            masks: of this rank's clients: packed words (P / 32,) of a row's covered elements; None
                for all.
            keep: of this rank's receivers: elements of the mean that they keep; None for all.
            over: divide by the number of rows that cover an element, or by that of all rows.
        """
        assert self.algorithm.stateful, "only clients that keep rows can exchange them"
        if self._exchange is None:
            layout = self.cohorts[0].layout
            assert all(state.layout == layout for state in self.cohorts), "one architecture"
            self._exchange = Exchange(
                layout, self.ranks, owner=self._owner, buffer=self._exchange_buffer
            )
        rows = {k: self.row(k) for k in self.mine(range(self.clients))}
        sizes = self._exchange.mean_(rows, hears, masks=masks, keep=keep, over=over)
        for receiver in sorted(hears):
            for sender in hears[receiver]:
                self.ledger.sent_up(sender, sizes[sender])
                self.ledger.sent_down(receiver, sizes[sender])

    def share(
        self, clients: Sequence[int], groups: Sequence[Group], *, weights: Weights = "uniform"
    ) -> None:
        """Replace every group's tensors by their mean over the clients that have them.

        Stateful algorithms only. Clients with unusable updates receive but do not contribute.

        Args:
            clients: the participants.
            groups: groups of tensors that they share.
            weights: of the clients in the means: 1 for all, or n_k.
        """
        sharing = self._count_sharing(clients, groups)
        several = self.ranks.world > 1
        sharing.mean_(
            {k: self.row(k) for k in self.mine(clients)},
            weights={k: self._weight(weights, k) for k in clients if self._usable.get(k, True)},
            accumulate=self.accumulate,
            device=self.device,
            sum_over_ranks=self.ranks.sum_ if several else None,
            max_over_ranks=self.ranks.max_ if several else None,
        )

    def gradient(self, client: int, t: int) -> Tensor:
        """(P,) on the device: the gradient of one training batch at the client's row, in eval mode.

        Drawn by (seed, "gradient", t, client); the client must be on this rank.
        """
        return self.training.gradient(client, self._row_here(client), t)

    def collect(self, mine: Mapping[int, T]) -> dict[int, T]:
        """Gather a value per client from every rank, by client, on all ranks."""
        return dict(sorted(self.ranks.gather(list(mine.items()))))

    def usable(self, client: int) -> bool:
        """Whether the client's session of this round gave a finite update."""
        return self._usable.get(client, True)

    def tally(self, name: str, values: Iterable[Tensor]) -> None:
        """Add a metric to the round: a sum of integers over the clients of all ranks."""
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for value in values:
            total += value
        self.metrics[name] = float(self.ranks.sum_(total))

    def states(self) -> dict[int, dict[str, Tensor]] | None:
        """The state of this rank's clients for a checkpoint; None for a stateless algorithm."""
        if not self.algorithm.stateful:
            return None
        states = {k: self._state_of(k) for k in self.mine(range(self.clients))}
        # Cloned: a view would be saved with the whole matrix behind it.
        return {k: {n: t.cpu().clone() for n, t in s.items()} for k, s in states.items()}

    def load_states(self, shards: Sequence[Mapping[int, dict[str, Tensor]]]) -> None:
        """Load this rank's clients from a checkpoint's shards, written on any number of ranks."""
        if not self.algorithm.stateful:
            return
        for shard in shards:
            for client in self.mine(sorted(shard)):
                self._load_state(client, shard[client])

    def _state_of(self, client: int) -> dict[str, Tensor]:
        """The saved state of a client of this rank."""
        row, mask = self.row(client), self.mask(client)
        kept = {name: k.saved(client) for name, k in self.kept.items() if k.durable}
        state = {name: value for name, value in kept.items() if value is not None}
        if mask is None:
            return {"floats": row.floats, "integers": row.integers} | state
        mask = mask.to(row.floats.device)
        values = compress(row.floats, mask, nnz=int(popcount(mask)))
        return {"values": values, "integers": row.integers} | state

    def _load_state(self, client: int, state: Mapping[str, Tensor]) -> None:
        for name, kept in self.kept.items():
            if kept.durable:
                kept.restore(client, state.get(name))
        row, mask = self.row(client), self.mask(client)
        if mask is None:
            row.floats.copy_(state["floats"])
        else:
            place = row.floats.device
            expand(state["values"].to(place), mask.to(place), out=row.floats)
        row.integers.copy_(state["integers"])

    def _reset(self, client: int) -> None:
        """Reset a client to its initial values; of its kept state only a mask remains."""
        for kept in self.kept.values():
            if kept is not self.masks and kept.durable:
                kept.pop(client, None)
        self.algorithm.reset_client(self, client)
        mask = self.mask(client)
        if mask is not None:
            row = self.row(client).floats
            apply_mask_(row, mask.to(row.device))

    def open_round(self) -> None:
        """Forget the participants of the last round.

        This frees the rows of stateless clients.
        """
        self.metrics, self.tests, self._assigned, self._usable = {}, {}, {}, {}
        self._silent, self.training.calls = set(), 0
        for kept in self.kept.values():
            if not kept.durable:
                kept.clear()
        if not self.algorithm.stateful:
            self._owner = {}
            self._inbox.clear()

    def close_round(self) -> dict[str, float]:
        """The round's metrics and sums, the same on every rank."""
        return self.metrics | self.ledger.close_round()

    def _open(self, clients: Sequence[int]) -> None:
        """Assign ranks and slots to a round's participants, if they are stateless."""
        if self.algorithm.stateful or all(k in self._owner for k in clients):
            return
        self._owner = place(self._costs(clients), ranks=self.ranks.world)
        mine = self.mine(clients)
        for index, state in enumerate(self.cohorts):
            state.open([k for k in mine if self.cohort_of(k) == index], keep=False)

    def _speaking(self, clients: Iterable[int]) -> list[int]:
        """The clients whose sessions of this round did not raise."""
        return [client for client in clients if client not in self._silent]

    def _count_up(
        self,
        into: ServerModel,
        clients: Iterable[int],
        parts: Parts,
        sizes: Mapping[int, int] | None,
    ) -> None:
        """Count the bytes that clients send for a server model: the part they cover, or `sizes`."""
        for client in self._speaking(clients):
            covered = self._nesting.bytes(into, self.cohort_of(client), parts)
            self.ledger.sent_up(client, covered if sizes is None else sizes[client])

    def _count_sharing(self, clients: Sequence[int], groups: Sequence[Group]) -> Sharing:
        """Lay out the groups and count the bytes of sharing them."""
        layouts = [state.layout for state in self.cohorts]
        sharing = Sharing(groups, layouts, {k: self.home_cohort(k) for k in clients})
        for client in self._speaking(clients):
            self.ledger.sent_up(client, sharing.bytes(client))
        for client in clients:
            self.ledger.sent_down(client, sharing.bytes(client))
        return sharing

    def _costs(
        self, clients: Iterable[int], steps: Mapping[int, int] | None = None
    ) -> dict[int, float]:
        """Costs of sessions: seconds if all the clients' cohorts have been timed, else FLOPs.

        Args:
            clients: clients of the sessions.
            steps: batches per session by client; as configured by default.
        """
        cohorts = {k: self.cohort_of(k) for k in clients}
        rates = self.rates.of(cohorts.values())
        if rates is None:  # only samples if a module's FLOPs are unknown
            rates = {c: max(self.cohorts[c].flops, 1.0) for c in cohorts.values()}
        given = steps or {}
        return {k: rates[c] * self._samples(k, given.get(k)) for k, c in cohorts.items()}

    def _samples(self, client: int, steps: int | None) -> float:
        """Samples of a session; data in chunks counts all chunks, for each session."""
        per_epoch = self.data.num_batches(client)
        batches = self.work.batches(per_epoch) if steps is None else self.work.limited(steps)
        return self.data.num_samples(client) * batches / per_epoch

    def _weights(
        self, weights: Weights | Mapping[int, float], clients: Sequence[int]
    ) -> list[float]:
        """Integer weights of the clients in a sum."""
        if not isinstance(weights, Mapping):
            return [self._weight(weights, k) for k in clients]
        if any(isinstance(weights[k], float) for k in clients):
            weights = whole(weights)
        return [float(weights[k]) for k in clients]

    def _weight(self, weights: Weights, client: int) -> float:
        return float(self.data.num_samples(client)) if weights == "samples" else 1.0

    def _labels(self, client: int, rows: int) -> list[int]:
        """The label rows that a client contributes: those of its labels, and rows beyond labels."""
        held: list[int] = self.data.labels(client).tolist()
        surplus = range(self.data.num_classes, rows) if self.algorithm.surplus_rows else ()
        return [*held, *surplus]
