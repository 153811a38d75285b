"""The words that an algorithm is written in: participants, send, train, merge, and their kin."""

import logging
import math
import pickle
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from numbers import Integral
from typing import Literal, TypeVar

import lightning.pytorch as L
import torch
from lightfed_kernels import apply_mask_
from torch import Tensor

from lightfed.aggregation.coverage import Parts
from lightfed.aggregation.weights import whole
from lightfed.api.client_rows import pickled
from lightfed.api.failures import check
from lightfed.api.fleet_state import FleetState
from lightfed.distributed.placement import split
from lightfed.local.local_work import Phase, SessionPlans
from lightfed.local.session import Report, weighted_means
from lightfed.state.rows import ModelLayout, Row, Rows
from lightfed.state.server_model import ServerModel, part_of
from lightfed.utils.errors import require

log = logging.getLogger(__name__)

T = TypeVar("T")
Weights = Literal["samples", "uniform"]


class Fleet(FleetState):
    """The clients, numbered 0 .. N-1 in the order of the groups: the words of an algorithm.

    Every rank runs the same algorithm on its own Fleet and holds its share of the clients. The
    words hide the placement. What a Fleet holds, and how it is made, is in `FleetState`.
    """

    def participants(self, t: int) -> list[int]:
        """S_t: clients drawn uniformly without replacement, ascending; the same on every rank.

        With devices only those that are there, and more than configured with `over_select`.
        """
        return self.clock.participants(t)

    def one_layout(self, fix: str) -> ModelLayout:
        """The layout of all clients; a UserError with this fix names two that differ."""
        first = self.groups[0]
        for state in self.groups:
            found = f"groups {first.name} and {state.name} have different architectures"
            require(state.layout == first.layout, "model.clients", found, fix)
        return first.layout

    def check_nested(self, model: ServerModel, group: int) -> None:
        """Reject a group whose rows do not fit into a server model; names group and layer."""
        self.coverages.fitting(model, group, Parts())

    def new_model(self, group: int = 0) -> ServerModel:
        """A server model in the layout of a group, with its initial values."""
        state = self.groups[group]
        return ServerModel(state.layout, state.initial.clone()).to(self.device)

    def new_part(self, prefix: str) -> ServerModel:
        """A server model of the first group's tensors with this name prefix.

        Initial values are that group's; groups may have more tensors.

        Raises:
            UserError: a group lacks one of them, or has it in another shape.
        """
        layout = self.groups[0].layout
        entries = [*layout.floats, *layout.integers]
        names = [entry.name for entry in entries if entry.name.startswith(prefix)]
        model = part_of(layout, self.groups[0].initial, [names] * len(self.groups))
        model = model.to(self.device)
        for group in range(len(self.groups)):
            self.check_nested(model, group)
        return model

    def send(
        self,
        model: ServerModel,
        clients: Sequence[int],
        *,
        tensors: Collection[str] | None = None,
        size: int | Sequence[int] | None = None,
    ) -> None:
        """Copy the covered part of a server model into the clients' rows.

        Args:
            model: of the server.
            clients: receivers.
            tensors: names of the tensors to send; all by default.
            size: bytes on the wire, for all or by client, if the model is sent in another form.
        """
        self.open_clients(clients)
        parts = self._parts(True, tensors)
        covered = self._covered(model, clients, parts)
        self.ledger.sent_down(clients, covered if size is None else size)

        for receivers in split(self.mine(clients), self.group_of):
            group = self.group_of(receivers[0])
            store = self.groups[group].store
            block = store.view(receivers)
            if block is not None:
                self.coverages.take(model, group, parts, block)
                continue
            for client in receivers:
                self.coverages.take(model, group, parts, store.row(client))

    def train(
        self,
        clients: Sequence[int],
        t: int,
        *,
        steps: Mapping[int, int] | None = None,
        phases: Sequence[Phase] = (),
        repeat: int = 1,
    ) -> None:
        """Train every client locally, in waves; metrics are means weighted by samples.

        A client whose session raises, or whose update is not finite, is named in the log and left
        out of this round's merges.

        Args:
            clients: clients to train.
            t: the round.
            steps: batches per session by client; as configured by default.
            phases: parts of every session, one after the other, instead of `steps`.
            repeat: steps on every batch, one after the other (pFedMe, APFL).

        Raises:
            Suspended: a signal asked the run to stop before all sessions finished.
            UserError: too many clients failed, or all.
        """
        self.open_clients(clients)
        training = self.training
        shares = self.clock.leaving(clients, t)
        given = training.plans
        plans = replace(given, steps=steps or {}, phases=phases, repeat=repeat, shares=shares)
        if shares and self.clock.loses_partial:
            self._lose(shares, plans, t)
            clients = [k for k in clients if k not in shares]
        waves = max(Counter(self.places.owner[k] for k in clients).values(), default=0)
        reports = training.sessions(clients, waves, t, plans)
        trained = [report.client for report in reports]
        passes = [self.state(report.client).passes for report in reports]
        flops = [
            n * report.flops * report.samples + report.besides
            for n, report in zip(passes, reports, strict=True)
        ]
        self.ledger.computed(trained, flops)
        for report in reports:
            self.updates[report.client] += report.updates
        self.clock.trained({report.client: report.steps for report in reports}, t)
        for report in reports:
            group = self.group_of(report.client)
            self.places.rates.add(group, samples=report.samples, seconds=report.seconds)
        bad = self.outcomes.add(reports)
        self._leave_out(bad, len(reports), t)
        left_out = {report.client for report in bad}
        good = [report for report in reports if report.client not in left_out]
        self.metrics |= weighted_means(good)
        for penalty in self.penalties:
            penalty.trained(self, [report.client for report in good], t)
        self._count(good, t)
        self.metrics["participants"] = float(len(reports))
        self.metrics["excluded"] = float(len(bad))
        for moment, tests in training.tests.items():
            self.tests.setdefault(moment, []).extend(tests)

    def _count(self, good: Sequence[Report], t: int) -> None:
        """Tell penalties of sessions that the server uses, or wait until it is known which."""
        clients = [report.client for report in good]
        if self.clock.drops_late:
            self.uncounted |= dict.fromkeys(clients, t)
            return
        for penalty in self.penalties:
            penalty.counted(self, clients, t)

    def _lose(self, shares: Mapping[int, float], plans: SessionPlans, t: int) -> None:
        """Count the work of clients that leave without sending it."""
        self.outcomes.lose(shares)
        steps = {k: plans.steps_of(k, t) for k in shares}
        each = {k: self.data.num_samples(k) / self.data.num_batches(k, t) for k in shares}
        states = {k: self.state(k) for k in shares}
        flops = [n * each[k] * states[k].passes * states[k].flops for k, n in steps.items()]
        self.ledger.computed([*shares], flops)

    def _leave_out(self, bad: Sequence[Report], sessions: int, t: int) -> None:
        """Name clients with unusable updates in the log, and reset kept rows that are not finite.

        A UserError if too many of the sessions failed.
        """
        if self.stateful:
            not_finite = [r.client for r in bad if not self.outcomes.finite(r)]
            for client in self.mine(not_finite):
                self._reset(client)
        check(bad, sessions, t, allowed=self.max_failed)
        for warning in self.outcomes.warnings(bad, t):
            self.warn(warning)

    def _reset(self, client: int) -> None:
        """Reset a client of this rank to its initial values.

        Of what it keeps, its mask remains, and what the server has a part of.
        """
        for kept in self.kept.values():
            if kept is not self.kept.masks and kept.durable and not kept.with_server:
                kept.pop(client, None)
        self.algorithm.reset_client(self, client)
        mask = self.kept.mask(client)
        if mask is not None:
            row = self.row(client).floats
            apply_mask_(row, mask.to(row.device))

    def usable(self, client: int) -> bool:
        """Whether the client's session of this round gave a finite update, in time."""
        return bool(self.contributing([client]))

    def only_counts(self, senders: Mapping[int, Sequence[int]], *, masked: bool) -> bool:
        """Whether an exchange of rows was only counted, by a dry run; False: it has to happen.

        Args:
            senders: Receiver -> the clients that it receives rows from.
            masked: Whether masks, known only after training, leave elements out.
        """
        return False

    def sending(self, clients: Iterable[int]) -> list[int]:
        """The clients that send in this round: those that have not left during their session."""
        return self.outcomes.sending(clients)

    def contributing(self, clients: Iterable[int]) -> list[int]:
        """The clients whose updates count in this round's means.

        The first call in a round ends the server's wait: with devices, later updates are late.
        """
        self.clock.close(self.outcomes.silent, self.outcomes.usable)
        self.outcomes.late = self.clock.late
        return self.outcomes.contributing(clients)

    def merge(
        self,
        clients: Sequence[int],
        *,
        into: ServerModel,
        weights: Weights | Mapping[int, float] = "samples",
        tensors: Collection[str] | None = None,
        sent: Collection[int] | None = None,
        sizes: Mapping[int, int] | None = None,
    ) -> list[int]:
        """Coverage-weighted mean of the clients' rows; uncovered elements keep their old value.

        Args:
            clients: clients to merge.
            into: the server model that is replaced by the mean.
            weights: n_k, or 1 for all, or a weight of 0 or more per client, of any unit; fractions
                are rounded to 2^-16 of the largest.
            tensors: names of the tensors to merge; all by default. Integer buffers become the
                largest of the clients'.
            sent: clients that send their rows; the server holds the others'. All by default.
            sizes: bytes on the wire by client, if rows are sent in another form.

        Returns:
            the clients in the mean; updates of the others were not finite.
        """
        parts = self._parts(True, tensors)
        senders = self.sending(clients if sent is None else sorted(sent))
        covered = self._covered(into, senders, parts)
        self.ledger.sent_up(senders, covered if sizes is None else [sizes[k] for k in senders])
        in_time = self.contributing(clients)
        valid = sorted([*in_time, *self.clock.arrived])
        before = into.floats.clone() if self.keeps_late else None
        if valid:
            labels = self.coverages.coverage(into, parts).table.num_labels
            here = [i for i, k in enumerate(valid) if self.places.owner[k] == self.ranks.rank]
            mine = [valid[i] for i in here]
            block = self.client_rows.view(mine)
            with self.server_step(into):
                self.coverages.merge_(
                    into,
                    parts,
                    [self.group_of(k) for k in valid],
                    here,
                    [self.row(k) for k in mine] if block is None else block,
                    weights=self.weights_of(weights, valid, discounted=True),
                    labels=[self._labels(k, labels) for k in valid] if labels else None,
                    ranks=self.ranks,
                )
        if before is not None:
            self._move_late(into, before, tensors)
        return valid

    def _move_late(
        self, into: ServerModel, before: Tensor, tensors: Collection[str] | None
    ) -> None:
        """Add the server's step to models that have not arrived: they become updates of its model.

        Statistics stay as they are.
        """
        step = Row(into.floats - before, into.integers)
        change = ServerModel(into.layout, step, aliases=into.aliases)
        parts = self._parts(False, tensors)
        for client in self.mine(self.clock.under_way):
            state, row = self.state(client), self.row(client)
            added = Row.zeros(state.layout, self.device)
            self.coverages.take(change, self.group_of(client), parts, added)
            row.floats.add_(added.floats.to(row.floats.device))

    def average(
        self,
        values: Mapping[int, Tensor],
        clients: Sequence[int],
        *,
        into: Tensor,
        weights: Weights | Mapping[int, float] = "uniform",
    ) -> list[int]:
        """The weighted mean over clients of tensors that they keep, into one of the server.

        The sum is in float64 over whole weights, so that it does not depend on placement. Bytes
        are not counted; see `charge`.

        Args:
            values: of this rank's clients, by client, such as a `Kept`.
            clients: whose tensors are in the mean; others' updates are left out as in `merge`.
            into: the server's tensor, of the same shape; unchanged if no client is left.
            weights: as in `merge`.

        Returns:
            those whose tensors are in the mean.
        """
        valid = self.contributing(clients)
        shares = dict(zip(valid, self.weights_of(weights, valid), strict=True))
        total = torch.zeros_like(into, dtype=torch.float64)
        for client in self.mine(valid):
            total += shares[client] * values[client].to(total)
        self.ranks.sum_(total)
        if sum(shares.values()) > 0:
            into.copy_(total / sum(shares.values()))
        return valid

    def report(self, name: str, value: float) -> None:
        """Add a number of this round to metrics.csv, such as a norm that the paper plots.

        Args:
            name: Of the column; a later number of the same round replaces an earlier one.
            value: The same on every rank.
        """
        self.metrics[name] = value

    def charge(
        self,
        clients: Sequence[int],
        *,
        up: float | Sequence[float] = 0.0,
        down: float | Sequence[float] = 0.0,
    ) -> None:
        """Count bytes that each of the clients sends and receives in addition to its row.

        They are one number for all, or one for each client.
        """
        sizes = dict(
            zip(clients, [up] * len(clients) if isinstance(up, float | int) else up, strict=True)
        )
        sending = self.sending(clients)
        self.ledger.sent_up(sending, [sizes[k] for k in sending])
        self.ledger.sent_down(clients, down)

    def sizes(
        self, model: ServerModel, clients: Sequence[int], *, buffers: bool = True
    ) -> list[float]:
        """Bytes of the part of a server's model that each client exchanges."""
        return self._covered(model, clients, self._parts(buffers, None))

    def _parts(self, buffers: bool, tensors: Collection[str] | None) -> Parts:
        """What a message has of a server model, or of these tensors."""
        return Parts(buffers, None if tensors is None else frozenset(tensors), self.personal)

    def _covered(self, model: ServerModel, clients: Iterable[int], parts: Parts) -> list[float]:
        """Bytes of the parts of a server model that each client covers."""
        groups = [self.group_of(k) for k in clients]
        each = {g: self.coverages.bytes(model, g, parts) for g in dict.fromkeys(groups)}
        return [each[group] for group in groups]

    def weights_of(
        self,
        weights: Weights | Mapping[int, float],
        clients: Sequence[int],
        *,
        discounted: bool = False,
    ) -> list[float]:
        """The clients' weights in a sum, as whole numbers, so that a sum does not depend on order.

        Args:
            weights: n_k, or 1 for all, or a weight per client.
            clients: In the order of the result.
            discounted: Updates that arrive late count less.

        Raises:
            UserError: a weight is no number of 0 or more.
        """
        if discounted and self.clock.arrived:
            plain = dict(zip(clients, self.weights_of(weights, clients), strict=True))
            weights = {k: w * self.clock.discount(k) for k, w in plain.items()}
        if weights == "samples":
            return [float(self.data.num_samples(k)) for k in clients]
        if not isinstance(weights, Mapping):
            fix = "give 'samples', 'uniform' or a number for each client"
            require(weights == "uniform", "model.algorithm", f"weights={weights!r}", fix)
            return [1.0] * len(clients)
        given: Mapping[int, float] = {k: weights[k] for k in clients}
        for client, weight in given.items():
            found = f"a weight of {weight} for client {client}"
            require(0 <= weight < math.inf, "model.algorithm", found, "give numbers of 0 or more")
        if not all(isinstance(weight, Integral) for weight in given.values()):
            given = whole(given)
        return [float(given[k]) for k in clients]

    def _labels(self, client: int, rows: int) -> list[int]:
        """The label rows that a client contributes: those of its labels, and rows beyond labels."""
        held: list[int] = self.data.labels(client).tolist()
        surplus = range(self.data.num_classes, rows) if self.algorithm.surplus_rows else ()
        return [*held, *surplus]

    def bind(self, client: int) -> L.LightningModule:
        """The client's live module, bound to its own row, or to a copy of a row on the host.

        The client must be on this rank.
        """
        return self.state(client).bind(self.row_here(client))

    def load(
        self, model: ServerModel, client: int, *, tensors: Collection[str] | None = None
    ) -> None:
        """Copy the part of a server model (or of the given tensors) into the row of a client.

        This is not a message: the ledger does not count it.
        """
        parts = self._parts(True, tensors)
        self.coverages.take(model, self.group_of(client), parts, self.row(client))

    def rows(
        self,
        clients: Sequence[int],
        *,
        given: ServerModel | None = None,
        tensors: Collection[str] | None = None,
    ) -> Rows:
        """The clients' own models; of a session under way, the model that is in it.

        Args:
            clients: of one group.
            given: take the part that they cover from this model instead; what they keep is not
                changed.
            tensors: names of the tensors to take; all by default.
        """
        s = self.session
        state = self.state(clients[0]) if s is None else s.group
        if given is None:
            return Rows(state.live, clients, self._read)
        parts, group = self._parts(True, tensors), self.groups.index(state)

        def read(some: Sequence[int]) -> Row:
            rows = self._read(some)
            rows = rows.clone() if len(some) > 1 else state.borrow(rows.each()[0]).repeated(1)
            self.coverages.take(given, group, parts, rows)
            return rows

        return Rows(state.live, clients, read)

    def _read(self, clients: Sequence[int]) -> Row:
        """(K, P) and (K, Q) on the device: rows of one group's clients on this rank."""
        if self.session is not None:
            return self.session.row.repeated(1)
        if len(clients) == 1:
            return self.row_here(clients[0]).repeated(1)
        block = self.state(clients[0]).store.block(clients)
        return block if block.floats.device == self.device else block.to(self.device)

    def server_rows(
        self, models: ServerModel | Sequence[ServerModel], clients: Sequence[int]
    ) -> Rows | None:
        """What clients of one group cover of the server's model; they share one row.

        With personal tensors each has a row of its own, and there is no whole model.

        Args:
            models: of the server, or of each client's own server.
            clients: none for whole models, as the global ones.
        """
        given = [models] if isinstance(models, ServerModel) else models
        if self.personal:
            return self.rows(clients, given=given[0]) if clients else None
        group = self.home_group(clients[0]) if clients else 0
        state, shared = self.groups[group], all(model is given[0] for model in given)
        whose = clients or range(len(given))
        of = dict(zip(whose, given, strict=False))

        def read(some: Sequence[int]) -> Row:
            if shared or len(some) == 1:
                return self._covered_row(of[some[0]] if not shared else given[0], group).repeated(1)
            rows = [self._covered_row(of[client], group).clone() for client in some]
            floats, integers = zip(*((row.floats, row.integers) for row in rows), strict=True)
            return Row(torch.stack(floats), torch.stack(integers))

        return Rows(state.live, whose, read, shared=shared)

    def _covered_row(self, model: ServerModel, group: int) -> Row:
        """The part of a server model that a group covers, in the group's layout, on the device."""
        state = self.groups[group]
        if state.layout == model.layout:
            return model.row
        row = state.borrow(state.initial)
        self.coverages.take(model, group, Parts(), row)
        return row

    def gradient(self, client: int, t: int) -> Tensor:
        """(P,) on the device: the gradient of one training batch at the client's row, in eval mode.

        Drawn by (seed, "gradient", t, client); the client must be on this rank. Its FLOPs count
        with the client's next session in the round, as three dense forward passes.
        """
        return self.training.gradient(client, self.row_here(client), t)

    def loss(self, client: int, t: int) -> float:
        """The mean loss of the client's training samples at its row, in eval mode, not augmented.

        After `send` and before `train` it is that of the model received. The client must be on this
        rank; `collect` gives all ranks those of all. FLOPs count as for `gradient`, once.
        """
        return self.training.loss(client, self.row_here(client), t)

    def collect(self, mine: Mapping[int, T]) -> dict[int, T]:
        """Gather a value per client from every rank, by client, on all ranks.

        They are copies, on one rank too: otherwise a view of a row would train on.
        """
        every = self.ranks.gather([pickled(dict(mine))])
        return dict(sorted(item for part in every for item in pickle.loads(part).items()))

    def once(self, jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
        """The results of jobs, in host memory on all ranks; each job runs on one.

        For results whose bits depend on the machine, such as singular values. As many are held at a
        time as there are ranks. What a job raises is raised on all ranks.
        """
        waiting = iter(jobs)
        if self.ranks.alone:
            yield from (job() for job in waiting)
        while some := list(islice(waiting, self.ranks.world)):
            results: list[T | Exception] = []
            try:
                results += [job() for job in some[self.ranks.rank : self.ranks.rank + 1]]
            except Exception as error:
                results.append(error)
            for result in map(pickle.loads, self.ranks.gather([pickled(one) for one in results])):
                if isinstance(result, Exception):
                    raise result
                yield result
