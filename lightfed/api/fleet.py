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
from typing_extensions import override

from lightfed.aggregation.coverage import Parts
from lightfed.aggregation.weights import whole
from lightfed.api.client_rows import copied, pickled
from lightfed.api.failures import check, takes_no_time
from lightfed.api.fleet_state import FleetState
from lightfed.distributed.placement import cut, split
from lightfed.local.group_state import GroupState
from lightfed.local.hooks import SessionContext
from lightfed.local.local_work import Phase, SessionPlans
from lightfed.local.session import Report, weighted_means
from lightfed.state.rows import ModelLayout, Row, Rows
from lightfed.state.server_model import ServerModel, part_of
from lightfed.utils.counts import rounded_down
from lightfed.utils.errors import UserError

log = logging.getLogger(__name__)

# Rows of clients are copied together, to be written by one call, up to this many bytes.
_SENT_TOGETHER = 1 << 20

T = TypeVar("T")
Weights = Literal["samples", "uniform"]


class Fleet(FleetState):
    """The clients of a federation, numbered 0 .. N-1 in the order of their groups.

    Its methods are the words that an algorithm's `round` is written in. Every rank runs the same
    algorithm on its own Fleet and holds a share of the clients; the words hide on which rank a
    client is. What a Fleet holds, and how it is made, is in `FleetState`.
    """

    def participants(self, t: int) -> list[int]:
        """Return S_t, the clients of round t, ascending; the same on every rank.

        They are drawn uniformly without replacement. With devices, only clients that are available
        are drawn, and with `over_select` more of them than configured.
        """
        return self.clock.participants(t)

    def one_layout(self, fix: str) -> ModelLayout:
        """Return the layout that the rows of all clients have.

        Args:
            fix: What the error tells a user to do.

        Raises:
            UserError: Two groups have different architectures.
        """
        first = self.groups[0]
        for state in self.groups:
            if state.layout != first.layout:
                found = f"groups {first.name} and {state.name} have different architectures"
                raise UserError("model.clients", found, fix)
        return first.layout

    def check_nested(self, model: ServerModel, group: int) -> None:
        """Refuse a group whose rows do not fit into a server model; the error names a layer."""
        self.coverages.fitting(model, group, Parts())

    def new_model(self, group: int = 0) -> ServerModel:
        """Return a server model in the layout of a group, with the group's initial values."""
        state = self.groups[group]
        return ServerModel(state.layout, state.initial.clone()).to(self.device)

    def new_part(self, prefix: str) -> ServerModel:
        """Return a server model of those tensors of the first group whose names have a prefix.

        It has the initial values of that group. Other groups may have more tensors.

        Raises:
            UserError: A group lacks one of the tensors, or has it in another shape.
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
            model: A model of the server.
            clients: The clients that receive it.
            tensors: Names of the tensors to send; all by default.
            size: Bytes on the wire if the model is sent in another form, one number for all clients
                or one for each.
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

            # Rows that lie apart. Small ones are copied together, changed and written back, which
            # takes one call instead of one for each client. Large ones would be copied for nothing.
            together = _SENT_TOGETHER // store.row_bytes
            if together < 2:
                for client in receivers:
                    self.coverages.take(model, group, parts, store.row(client))
                continue
            for some in cut(receivers, together):
                copies = store.copy(some)
                self.coverages.take(model, group, parts, copies)
                store.put_block(some, copies)

    def train(
        self,
        clients: Sequence[int],
        t: int,
        *,
        steps: Mapping[int, int] | None = None,
        phases: Sequence[Phase] = (),
        repeat: int = 1,
    ) -> None:
        """Train every client locally. Metrics of the round are means weighted by samples.

        A client whose session raises, or whose update is not finite, is named in the log and left
        out of the merges of this round.

        Args:
            clients: Clients to train.
            t: The round.
            steps: Number of batches of each client's session; as configured by default.
            phases: The parts of every session, one after the other, instead of `steps`.
            repeat: Number of steps on every batch, one after the other (pFedMe, APFL).

        Raises:
            Suspended: A signal asked the run to stop before all sessions finished.
            UserError: Too many clients failed, or all.
        """
        self.open_clients(clients)
        if self.work.seconds is not None:
            self.check_own_length(steps is not None or bool(phases))
            steps = self.steps_in_time(clients, t, repeat=repeat)

        # Some clients leave during their session. What they have done by then is sent, or lost.
        leaving = self.clock.leaving(clients, t)
        plans = replace(
            self.client_sessions.plans,
            steps=steps or {},
            phases=phases,
            repeat=repeat,
            shares=leaving,
        )
        if leaving and self.clock.loses_partial:
            self._lose(leaving, plans, t)
            clients = [client for client in clients if client not in leaving]

        clients_by_rank = Counter(self.places.owner[client] for client in clients)
        waves = max(clients_by_rank.values(), default=0)
        reports = self.training.train(clients, waves, t, plans)
        self._record(reports, t)

        rejected = self.outcomes.add(reports)
        self._leave_out(rejected, len(reports), t)
        rejected_clients = {report.client for report in rejected}
        accepted = [report for report in reports if report.client not in rejected_clients]

        self.metrics |= weighted_means(accepted)
        self.metrics["participants"] = float(len(reports))
        self.metrics["excluded"] = float(len(rejected))
        for penalty in self.penalties:
            penalty.trained(self, [report.client for report in accepted], t)
        self._count(accepted, t)
        for moment, tests in self.client_sessions.tests.items():
            self.tests.setdefault(moment, []).extend(tests)

    def _record(self, reports: Sequence[Report], t: int) -> None:
        """Record what sessions have cost: FLOPs, optimizer steps, and time on both clocks."""
        flops = []
        for report in reports:
            passes = self.state(report.client).passes
            flops.append(passes * report.flops * report.samples + report.besides)
        self.ledger.computed([report.client for report in reports], flops)

        for report in reports:
            self.updates[report.client] += report.updates
            group = self.group_of(report.client)
            self.places.rates.add(group, samples=report.samples, seconds=report.seconds)
        self.clock.trained({report.client: report.steps for report in reports}, t)

    def _count(self, accepted: Sequence[Report], t: int) -> None:
        """Tell the penalties of sessions that the server uses, or wait until it is known which."""
        clients = [report.client for report in accepted]
        if self.clock.drops_late or self.keeps_late:
            self.uncounted |= dict.fromkeys(clients, t)
            return
        for penalty in self.penalties:
            penalty.counted(self, clients, t)

    def check_own_length(self, has_own: bool) -> None:
        """Refuse `model.local_seconds` for a method that says how long sessions are."""
        if has_own:
            name = type(self.algorithm).__name__
            found = f"given, and {name} says itself how long its sessions are"
            raise UserError("model.local_seconds", found, "leave it out")

    def steps_in_time(self, clients: Sequence[int], t: int, *, repeat: int = 1) -> dict[int, int]:
        """Return the number of batches that each client trains on in `model.local_seconds`.

        It is at least one. Only computation counts, and the delay of a step; neither messages nor
        the delay of a session.

        Args:
            clients: Numbers of the clients.
            t: The round.
            repeat: Number of steps on every batch.
        """
        assert self.work.seconds is not None, "sessions have a number of steps or epochs"
        of_a_step = self.clock.step_seconds(clients, self.flops_of_a_batch(clients, t), t)
        batches = {}
        for client, seconds in zip(clients, of_a_step.tolist(), strict=True):
            if not seconds > 0:
                raise takes_no_time(client)
            batches[client] = max(1, rounded_down(self.work.seconds / (repeat * seconds)))
        return batches

    def _lose(self, leaving: Mapping[int, float], plans: SessionPlans, t: int) -> None:
        """Count the work of clients that leave without sending it.

        Args:
            leaving: The share of its session that each client completes.
            plans: The number of steps of each session.
            t: The round.
        """
        self.outcomes.lose(leaving)
        flops = []
        for client, of_a_batch in zip(leaving, self.flops_of_a_batch([*leaving], t), strict=True):
            flops.append(plans.steps_of(client, t) * of_a_batch)
        self.ledger.computed([*leaving], flops)

    def _leave_out(self, rejected: Sequence[Report], sessions: int, t: int) -> None:
        """Name clients with unusable updates in the log, and reset kept rows that are not finite.

        Raises:
            UserError: Too many of the sessions failed.
        """
        if self.stateful:
            not_finite = [r.client for r in rejected if not self.outcomes.finite(r)]
            for client in self.mine(not_finite):
                self._reset(client)
        check(rejected, sessions, t, allowed=self.max_failed)
        for warning in self.outcomes.warnings(rejected, t):
            self.warn(warning)

    def _reset(self, client: int) -> None:
        """Reset a client of this rank to its initial values.

        Of what it keeps, its mask remains, and what the server has a part of: a server that went on
        with a sum over memories that a client has forgotten would be wrong for good.
        """
        for kept in self.kept.values():
            forgets = kept.durable and not kept.with_server
            if forgets and kept is not self.kept.masks:
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
        """Replace a server model by the coverage-weighted mean of the clients' rows.

        An element is the mean over the clients that cover it. One that no client covers keeps its
        old value.

        With `late: keep`, an update of an earlier round that arrives is one of the clients in the
        mean. It counts as a change from the model that its client was sent: the parameters of its
        row are `into` plus that change. Statistics count as they are.

        Args:
            clients: Clients to merge.
            into: The server model that is replaced by the mean.
            weights: n_k, or 1 for all, or a weight of 0 or more per client, of any unit; fractions
                are rounded to 2^-16 of the largest. With `late: keep`, clients whose updates arrive
                need one, too.
            tensors: Names of the tensors to merge; all by default. Integer buffers become the
                largest of the clients'.
            sent: Clients that send their rows; the server holds the others'. All by default.
            sizes: Bytes on the wire by client, if rows are sent in another form.

        Returns:
            The clients in the mean. The others' updates were not finite, or too late.
        """
        # The bytes go up whether or not the update can be used.
        parts = self._parts(True, tensors)
        senders = self.sending(clients if sent is None else sorted(sent))
        if sizes is None:
            self.ledger.sent_up(senders, self._covered(into, senders, parts))
        else:
            self.ledger.sent_up(senders, [sizes[client] for client in senders])

        # The first merge of a round ends the server's wait. Updates of earlier rounds that have
        # been kept and arrive now count in this mean.
        in_time = self.contributing(clients)
        merged = sorted([*in_time, *self.clock.arrived])
        if self.keeps_late:
            self._keep_late(clients, into, tensors)
        if merged:
            self._merge(merged, into, parts, weights, tensors)
        return merged

    def _merge(
        self,
        clients: Sequence[int],
        into: ServerModel,
        parts: Parts,
        weights: Weights | Mapping[int, float],
        tensors: Collection[str] | None,
    ) -> None:
        """Replace a server model by the mean of the clients' rows, one all-reduce for all."""
        owner = self.places.owner
        positions_on_this_rank = [
            position for position, client in enumerate(clients) if owner[client] == self.ranks.rank
        ]
        clients_on_this_rank = [clients[position] for position in positions_on_this_rank]

        # One view, where the rows follow each other in one store; else a list of rows.
        block = None
        if not self.clock.arrived:
            block = self.client_rows.view(clients_on_this_rank)
        rows: Row | list[Row] = []
        if block is None:
            rows = [self._sent_row(client, into, tensors) for client in clients_on_this_rank]
        else:
            rows = block

        label_rows = self.coverages.coverage(into, parts).table.num_labels
        labels = [self._labels(client, label_rows) for client in clients] if label_rows else None
        with self.server_step(into):
            self.coverages.merge_(
                into,
                parts,
                [self.group_of(client) for client in clients],
                positions_on_this_rank,
                rows,
                weights=self.weights_of(weights, clients, discounted=True),
                labels=labels,
                ranks=self.ranks,
            )

    def _keep_late(
        self, clients: Sequence[int], into: ServerModel, tensors: Collection[str] | None
    ) -> None:
        """Keep updates that come too late until they arrive, as changes from the server's model.

        The rows stay as they are: they belong to the clients, which may go on with them.

        Args:
            clients: Clients to merge.
            into: The server model, before its step.
            tensors: Names of the tensors to merge; None for all.

        Raises:
            UserError: The method merges more than once in a round: it would not be known which of
                the merges a late update belongs to.
        """
        if self.has_merged:
            found = f"keep, and {type(self.algorithm).__name__} merges more than once in a round"
            raise UserError("model.policy.late", found, "drop late updates")
        self.has_merged = True

        late = self.clock.late.intersection(clients, self.clock.under_way)
        for client in self.mine(sorted(late)):
            row = self.row_here(client)
            received = self._covered_parameters(client, into, tensors)
            self.late_floats[client] = row.floats - received
            self.late_integers[client] = row.integers

    def _sent_row(self, client: int, into: ServerModel, tensors: Collection[str] | None) -> Row:
        """Return what a client of this rank has sent; arguments as for `_keep_late`."""
        if client not in self.clock.arrived:
            return self.row(client)
        current = self._covered_parameters(client, into, tensors)
        return Row(current + self.late_floats[client], self.late_integers[client])

    def _covered_parameters(
        self, client: int, model: ServerModel, tensors: Collection[str] | None
    ) -> Tensor:
        """Return the parameters that a client covers of a server model, (P,) as in its row.

        Statistics and what it does not cover are 0.
        """
        covered = Row.zeros(self.state(client).layout, self.device)
        parts = self._parts(False, tensors)
        self.coverages.take(model, self.group_of(client), parts, covered)
        return covered.floats

    def average(
        self,
        values: Mapping[int, Tensor],
        clients: Sequence[int],
        *,
        into: Tensor,
        weights: Weights | Mapping[int, float] = "uniform",
        in_full: bool = False,
    ) -> list[int]:
        """Replace a tensor of the server by the weighted mean of tensors that clients keep.

        The sum is in float64 with whole weights, so that it does not depend on which rank a client
        is on. Bytes are not counted; see `charge`.

        Args:
            values: Tensors of this rank's clients, by client, such as a `Kept`.
            clients: Clients to average: those that `merge` has returned, late ones among them.
                Those without a usable update are skipped as in `merge`.
            into: The tensor of the server, of the same shape. It does not change if no client is
                left.
            weights: As in `merge`.
            in_full: Updates that come late weigh as much as others. It is for what the server has
                as a sum over clients that they also keep: both have to change alike.

        Returns:
            The clients in the mean.
        """
        contributing = self.contributing(clients)
        weight_of = dict(
            zip(
                contributing,
                self.weights_of(weights, contributing, discounted=not in_full),
                strict=True,
            )
        )
        total = torch.zeros_like(into, dtype=torch.float64)
        for client in self.mine(contributing):
            total += weight_of[client] * values[client].to(total)
        self.ranks.sum_(total)

        weight_sum = sum(weight_of.values())
        if weight_sum > 0:
            into.copy_(total / weight_sum)
        return contributing

    def report(self, name: str, value: float) -> None:
        """Add a number of this round to metrics.csv, such as a norm that the paper plots.

        Args:
            name: Name of the column. A later number of the same round replaces an earlier one.
            value: The number, which has to be the same on every rank.
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

        Args:
            clients: The clients that exchange something more.
            up: Bytes that each client sends: one number for all, or one for each.
            down: Bytes that each client receives, likewise.
        """
        each_up = [up] * len(clients) if isinstance(up, float | int) else up
        up_of = dict(zip(clients, each_up, strict=True))
        sending = self.sending(clients)
        self.ledger.sent_up(sending, [up_of[client] for client in sending])
        self.ledger.sent_down(clients, down)

    def sizes(
        self, model: ServerModel, clients: Sequence[int], *, buffers: bool = True
    ) -> list[float]:
        """Return the bytes of the part of a server model that each client exchanges."""
        return self._covered(model, clients, self._parts(buffers, None))

    def _parts(self, buffers: bool, tensors: Collection[str] | None) -> Parts:
        """Return which part of a server model a message has: all of it, or these tensors."""
        return Parts(buffers, None if tensors is None else frozenset(tensors), self.personal)

    def _covered(self, model: ServerModel, clients: Iterable[int], parts: Parts) -> list[float]:
        """Return the bytes of the part of a server model that each client covers."""
        groups = [self.group_of(client) for client in clients]
        bytes_of = {group: self.coverages.bytes(model, group, parts) for group in set(groups)}
        return [bytes_of[group] for group in groups]

    def weights_of(
        self,
        weights: Weights | Mapping[int, float],
        clients: Sequence[int],
        *,
        discounted: bool = False,
    ) -> list[float]:
        """Return the clients' weights in a sum, as whole numbers.

        Sums of whole numbers do not depend on the order of the clients.

        Args:
            weights: "samples" for n_k, "uniform" for 1, or a weight for each client.
            clients: The clients, in the order of the result.
            discounted: Whether updates that arrive late count less.

        Raises:
            UserError: A weight is no number of 0 or more.
        """
        if discounted and self.clock.arrived:
            undiscounted = zip(clients, self.weights_of(weights, clients), strict=True)
            weights = {k: weight * self.clock.discount(k) for k, weight in undiscounted}

        if weights == "samples":
            return [float(self.data.num_samples(client)) for client in clients]
        if weights == "uniform":
            return [1.0] * len(clients)
        if not isinstance(weights, Mapping):
            fix = "give 'samples', 'uniform' or a number for each client"
            raise UserError("model.algorithm", f"weights={weights!r}", fix)

        weight_of: Mapping[int, float] = {client: weights[client] for client in clients}
        for client, weight in weight_of.items():
            if not 0 <= weight < math.inf:  # also NaN
                found = f"a weight of {weight} for client {client}"
                raise UserError("model.algorithm", found, "give numbers of 0 or more")
        if not all(isinstance(weight, Integral) for weight in weight_of.values()):
            weight_of = whole(weight_of)
        return [float(weight_of[client]) for client in clients]

    def _labels(self, client: int, label_rows: int) -> list[int]:
        """Return the label rows that a client contributes: of its labels, and beyond the labels."""
        rows: list[int] = self.data.labels(client).tolist()
        if self.algorithm.surplus_rows:
            rows += range(self.data.num_classes, label_rows)
        return rows

    def bind(self, client: int) -> L.LightningModule:
        """Return the module of a client of this rank, bound to its row.

        If rows are kept on the host, it is bound to a copy of the row on the device.
        """
        return self.state(client).bind(self.row_here(client))

    def load(
        self, model: ServerModel, client: int, *, tensors: Collection[str] | None = None
    ) -> None:
        """Copy the part of a server model that a client covers into its row.

        This is not a message: its bytes are not counted.

        Args:
            model: A model of the server.
            client: A client of this rank.
            tensors: Names of the tensors to copy; all by default.
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
        """Return the clients' own models, as they are in their rows.

        While a model is tested in its session, it is the model in that session.

        Args:
            clients: Clients of one group.
            given: A server model that replaces the part which the clients cover of it. Their rows
                do not change.
            tensors: Names of the tensors to take from it; all by default.
        """
        state = self._group_of_rows(clients)
        if given is None:
            return Rows(state.live, clients, self._read)

        parts = self._parts(True, tensors)
        group = self.groups.index(state)

        def read_with_given(some: Sequence[int]) -> Row:
            rows = self._read(some)
            # These may be the clients' own rows, which must not change.
            if len(some) > 1:
                rows = rows.clone()
            else:
                rows = state.borrow(rows.each()[0]).repeated(1)
            self.coverages.take(given, group, parts, rows)
            return rows

        return Rows(state.live, clients, read_with_given)

    def _group_of_rows(self, clients: Sequence[int]) -> GroupState:
        """The group of clients whose rows are read."""
        return self.state(clients[0])

    def _read(self, clients: Sequence[int]) -> Row:
        """Read rows of one group's clients on this rank, as (K, P) and (K, Q) on the device."""
        if len(clients) == 1:
            return self.row_here(clients[0]).repeated(1)
        block = self.state(clients[0]).store.block(clients)
        return block if block.floats.device == self.device else block.to(self.device)

    def server_rows(
        self, models: ServerModel | Sequence[ServerModel], clients: Sequence[int]
    ) -> Rows | None:
        """Return the part of the server's model that clients of one group cover.

        They share one row. With personal tensors each client has a row of its own, and there is no
        whole model.

        Args:
            models: The model of the server, or one for each client.
            clients: Clients of one group; empty for whole models, such as the global ones.

        Returns:
            The models; None if there is no whole model.
        """
        each = [models] if isinstance(models, ServerModel) else models
        if self.personal:
            return self.rows(clients, given=each[0]) if clients else None

        group = self.home_group(clients[0]) if clients else 0
        shared = all(model is each[0] for model in each)
        readers = clients or range(len(each))
        model_of = dict(zip(readers, each, strict=False))

        def read(some: Sequence[int]) -> Row:
            if shared:
                return self._covered_row(each[0], group).repeated(1)
            if len(some) == 1:
                return self._covered_row(model_of[some[0]], group).repeated(1)
            rows = [self._covered_row(model_of[client], group).clone() for client in some]
            return Row(
                torch.stack([row.floats for row in rows]),
                torch.stack([row.integers for row in rows]),
            )

        return Rows(self.groups[group].live, readers, read, shared=shared)

    def _covered_row(self, model: ServerModel, group: int) -> Row:
        """Return the part of a server model that a group covers, as a row of the group."""
        state = self.groups[group]
        if state.layout == model.layout:
            return model.row
        row = state.borrow(state.initial)
        self.coverages.take(model, group, Parts(), row)
        return row

    def gradient(self, client: int, t: int) -> Tensor:
        """Return the gradient of one training batch at a client's row, in eval mode.

        The batch is drawn by (seed, "gradient", t, client). Its FLOPs count with the client's next
        session in the round, as three dense forward passes.

        Args:
            client: A client of this rank.
            t: The round.

        Returns:
            A tensor of shape (P,) on the device.
        """
        return self.client_sessions.gradient(client, self.row_here(client), t)

    def loss(self, client: int, t: int) -> float:
        """Return the mean loss of a client's training samples at its row.

        The module is in eval mode, and samples are not augmented. After `send` and before `train`
        it is the loss of the model that the client has received. `collect` gives all ranks the
        losses of all clients. FLOPs count as for `gradient`, with one forward pass.

        Args:
            client: A client of this rank.
            t: The round.
        """
        return self.client_sessions.loss(client, self.row_here(client), t)

    @override
    def in_session(self, session: SessionContext) -> "Fleet":
        """The same fleet, in which `rows` gives the model that is in a session.

        An algorithm's `models` gets it for a test within a session: there the client's row may be
        on another device, or in a pack, and only the session has the model.
        """
        return _InSession(self, session)

    def collect(self, mine: Mapping[int, T]) -> dict[int, T]:
        """Gather a value for each client from all ranks, and return them by client on every rank.

        The values are copies, also on a single rank: a view of a row would change as the client
        trains.
        """
        if self.ranks.alone:
            return dict(sorted(copied(dict(mine)).items()))

        collected: dict[int, T] = {}
        for of_a_rank in self.ranks.gather([pickled(dict(mine))]):
            collected |= pickle.loads(of_a_rank)
        return dict(sorted(collected.items()))

    def once(self, jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
        """Run each job on one rank, and yield the results, in host memory, on all ranks.

        It is for results whose bits depend on the machine, such as singular values. At most as many
        results are held at a time as there are ranks. What a job raises is raised on all ranks.
        """
        if self.ranks.alone:
            for job in jobs:
                yield job()
            return

        waiting = iter(jobs)
        while one_for_each_rank := list(islice(waiting, self.ranks.world)):
            # The last ranks may have no job. They take part in the collective all the same.
            results: list[T | Exception] = []
            try:
                for job in one_for_each_rank[self.ranks.rank : self.ranks.rank + 1]:
                    results.append(job())
            except Exception as error:
                results.append(error)

            for sent in self.ranks.gather([pickled(result) for result in results]):
                result = pickle.loads(sent)
                if isinstance(result, Exception):
                    raise result
                yield result


class _InSession(Fleet):
    """A fleet as it is seen while the model in a session is tested.

    Everything is the fleet's own but the rows, which are the session's.
    """

    def __init__(self, fleet: Fleet, session: SessionContext) -> None:
        # Not FleetState's constructor: this is a second look at the fleet, not a second fleet.
        vars(self).update(vars(fleet))
        self._session = session

    @override
    def _group_of_rows(self, clients: Sequence[int]) -> GroupState:
        return self._session.group

    @override
    def _read(self, clients: Sequence[int]) -> Row:
        return self._session.row.repeated(1)
