"""The clients of a federation as an algorithm sees them: participants, send, train, merge."""

import logging
import math
import pickle
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from numbers import Integral
from typing import Literal, NamedTuple, TypeVar

import lightning.pytorch as L
import numpy as np
import torch
from lightfed_kernels import apply_mask_, popcount
from torch import Tensor, nn
from torch.optim import Optimizer

from lightfed.aggregation.coverage import Coverages, Parts
from lightfed.aggregation.server_optimizers import ServerStep
from lightfed.aggregation.weights import whole
from lightfed.algorithms.flexifed.group_mean import GroupMeans, SharedTensors
from lightfed.algorithms.peers.gossip import Exchange, Over
from lightfed.api.additions import check_additions, clock_of, personal_of
from lightfed.api.client_rows import ClientRows, pickled
from lightfed.api.failures import Outcomes, check
from lightfed.api.places import Places, participants
from lightfed.data.datamodule import FederatedDataModule
from lightfed.devices.device_clock import DeviceClock
from lightfed.devices.devices import Devices
from lightfed.devices.policy import Policy
from lightfed.distributed.collectives import Ranks
from lightfed.fits.session_trainer import SessionHost
from lightfed.local.client_group import ClientGroup, GroupState, Packing, group_names
from lightfed.local.hooks import Hooks, LocalPenalty, SessionContext, SessionHooks
from lightfed.local.local_work import LocalWork, Phase, RoundPlan, SessionPlans
from lightfed.local.rank_sessions import Training, Waves
from lightfed.local.session import Report, weighted_means
from lightfed.models.build import DataSpec
from lightfed.state.client_state import Kept, KeptStates, Saved, by_client
from lightfed.state.costs import Ledger
from lightfed.state.frozen_base import FrozenBase
from lightfed.state.rows import ModelLayout, Moment, Row, Rows
from lightfed.state.server_model import ServerModel, part_of
from lightfed.utils.errors import UserError, require

log = logging.getLogger(__name__)

T = TypeVar("T")
Weights = Literal["samples", "uniform"]


class Message(NamedTuple):
    """A message from the server to a client on this rank, with the model's version."""

    model: ServerModel
    parts: Parts
    version: int


class Fleet:
    """The clients, numbered 0 .. N-1 in the order of the groups; what an algorithm is written in.

    Every rank runs the same algorithm on its own Fleet and holds its share of the clients. The
    methods of a Fleet hide the placement. Construction ends with the algorithm's `setup`.

    Args:
        groups: one architecture each.
        algorithm: prepares the modules, and decides whether clients keep their rows.
        data: the clients' samples.
        ranks: of the run.
        work: local work and sampling.
        seed: of the whole run.
        host_rows: keep client rows in host memory.
        pack: decides how the clients of a group train side by side; by default they do not.
        rounds: number of rounds of the run, if known.
        max_failed: number of sessions of a round that may fail; by default all but one may raise.
        server_optimizer: steps to what is merged; by default merges are the server's new values.
        personal: tensors that stay with their client, as of `personal_tensors`.
        devices: of the clients, which make rounds last; those of the algorithm by default.
        policy: when the server merges; by default when all clients have sent.
        local_penalty: a term of the clients' objective, besides the algorithm's own.
        keep_optimizer: clients keep the state of their optimiser from session to session.
        host: what sessions get from the Trainer of the run; nothing by default.

    Attributes:
        clients: number of clients.
        penalties: terms of the clients' objective.
        hooks: whose hooks sessions call: the algorithm, and the penalties.
        personal: names of the tensors that no message has: a client's own.
        stateful: clients keep their rows, for the algorithm, a penalty, or these tensors.
        groups: the groups' modules and row stores.
        keeps: clients keep their rows from round to round: the algorithm's, or until late updates
            arrive.
        keeps_late: late updates are merged when they arrive.
        base: the frozen parameters of all groups, which are in no row.
        places: where clients are.
        client_rows: of this rank's clients.
        kept: what these keep besides their rows.
        optimizers: of these, the states of optimisers; None if they are not kept.
        attributes: of these, what modules and callbacks keep in Python; None likewise.
        updates: steps that the optimisers of each client have taken in all of its sessions.
        ledger: bytes and FLOPs of all clients.
        training: runs sessions.
        session: under way, while its model is tested.
        server_step: lets the server's optimiser step.
        plan: of this round, or of the last one.
        clock: virtual time of the clients' devices; None without any.
        metrics: of this round.
        tests: reports of the tests in this round's sessions, on all ranks.
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
        pack: Callable[["Fleet", GroupState], Packing] | None = None,
        rounds: int | None = None,
        max_failed: int | None = None,
        server_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        personal: Sequence[str] = (),
        devices: Devices | None = None,
        policy: Policy | None = None,
        local_penalty: LocalPenalty | None = None,
        keep_optimizer: bool = False,
        host: SessionHost | None = None,
    ) -> None:
        self.algorithm, self.data, self.ranks, self.seed = algorithm, data, ranks, seed
        self.device, self.work = ranks.device, work or LocalWork()
        self.host_rows = host_rows
        self.clients = sum(group.count for group in groups)
        self._sampled = self.work.sampled(self.clients)
        self.rounds, self.max_failed = rounds, max_failed
        self.penalties = [p for p in (algorithm.local_penalty, local_penalty) if p is not None]
        self.hooks: Sequence[SessionHooks] = [algorithm, *self.penalties]
        check_additions(
            algorithm,
            self.penalties,
            server_optimizer=server_optimizer is not None,
            keep_optimizer=keep_optimizer,
            policy=policy,
        )
        data.reserve(algorithm.hold_out)
        self.base = FrozenBase()
        build = partial(
            GroupState,
            base=self.base,
            seed=seed,
            device=self.device,
            host_rows=host_rows,
            prepare=self.prepare,
            host=replace(host or SessionHost(), device=self.device),
            once=None if ranks.rank < 0 else ranks.first,
            ranks=ranks,
        )
        self.groups = [
            build(group, data, name=name, position=position)
            for position, (group, name) in enumerate(zip(groups, group_names(groups), strict=True))
        ]
        self.personal = personal_of(algorithm, self.groups, personal, self.device)
        self.stateful = algorithm.stateful or any(p.stateful for p in self.penalties)
        keep_optimizer |= algorithm.carries
        self.stateful |= bool(self.personal) or keep_optimizer
        self.kept = KeptStates()
        self.keeps_late = policy is not None and policy.late == "keep"
        self.keeps = self.stateful or self.keeps_late
        self.optimizers = self.keep("optimizer") if keep_optimizer else None
        self.attributes = self.keep("attributes") if keep_optimizer else None
        self.updates = np.zeros(self.clients, dtype=np.int64)
        self.server_step = ServerStep(server_optimizer, algorithm, self.personal)
        for state in self.groups:
            if pack is not None:
                state.packing = pack(self, state)
        self.places = Places(
            self.groups,
            data,
            self.work,
            keeps=self.keeps,
            ranks=ranks,
            seed=seed,
        )
        self.client_rows = ClientRows(self.groups, self.places, self.kept)
        self._classes = data.num_classes
        self._coverages = Coverages(
            [state.layout for state in self.groups],
            [state.name for state in self.groups],
            label_rows=self.groups[0].output_layer(self._classes) if algorithm.label_rows else None,
            depths=algorithm.depths,
            method=type(algorithm).__name__,
            device=self.device,
        )
        self._inbox: dict[int, Message] = {}
        self._uncounted: dict[int, int] = {}  # rounds of sessions that may be too late, by client
        self._exchange: Exchange | None = None
        self._outcomes = Outcomes()
        self.ledger = Ledger(self.clients)
        self.clock = clock_of(
            devices or algorithm.devices,
            policy,
            self.groups,
            self.ledger,
            sampled=self._sampled,
            seed=seed,
        )
        self.metrics: dict[str, float] = {}
        self.tests: dict[Moment, list[Report]] = {}
        self.plan = RoundPlan()
        self.session: SessionContext | None = None
        self.training = Training(self)
        unlike = self.base.unlike([state.name for state in self.groups], sliced=True)
        self.warn(unlike and f"{unlike}, which are frozen, so that no method sends them")
        for note in dict.fromkeys(state.note for state in self.groups):
            self.warn(note)
        algorithm.setup(self)
        for penalty in self.penalties:
            penalty.setup(self)

    def prepare(self, module: L.LightningModule, data: DataSpec) -> None:
        """Modify a newly built client module, for the algorithm and the penalties."""
        for hooks in self.hooks:
            hooks.prepare_module(module, data)

    def participants(self, t: int) -> list[int]:
        """S_t: clients drawn uniformly without replacement, ascending; the same on every rank.

        With devices only those that are there, and more than configured with `over_select`.
        """
        if self.clock is not None and self.clock.selects:
            return self.clock.participants(t)
        return participants(self._sampled, self.clients, seed=self.seed, t=t)

    def assign(self, groups: Mapping[int, int]) -> None:
        """Put stateless clients into other groups for this round (HeteroFL's dynamic levels)."""
        found = "a client that keeps tensors of its own cannot change its shape"
        require(not self.stateful, "model.algorithm", found, "keep none, or keep the groups fixed")
        found = "keep, and clients change their groups"
        require(not self.keeps, "model.policy.late", found, "drop late updates")
        self.places.assign(groups)

    def mine(self, clients: Sequence[int]) -> list[int]:
        """The given clients that are on this rank, in order."""
        return [k for k in clients if self.places.owner[k] == self.ranks.rank]

    def group_of(self, client: int) -> int:
        """The group of a client in this round."""
        return self.places.groups[client]

    @property
    def _place(self) -> torch.device:
        """The device of the rows."""
        return torch.device("cpu") if self.host_rows else self.device

    def home_group(self, client: int) -> int:
        """The configured group of a client, ignoring the round's assignment."""
        return self.places.home_groups[client]

    def pack_of(self, client: int) -> int:
        """The number of what a client is placed with: in a pack, or alone."""
        return self.places.packs[client]

    def state(self, client: int) -> GroupState:
        """The module and the rows of a client's group in this round."""
        return self.groups[self.places.groups[client]]

    def _open(self, clients: Sequence[int]) -> None:
        """Assign ranks and slots to a round's participants, if they are stateless."""
        if self.places.open(clients):
            self.client_rows.open(clients)

    def warn(self, text: str | None) -> None:
        """Log a warning on one rank; does nothing without a text."""
        if text and self.ranks.rank == 0:
            log.warning("%s", text)

    def one_layout(self, fix: str) -> ModelLayout:
        """The layout of all clients; a UserError with this fix names two that differ."""
        first = self.groups[0]
        for state in self.groups:
            found = f"groups {first.name} and {state.name} have different architectures"
            require(state.layout == first.layout, "model.clients", found, fix)
        return first.layout

    def check_nested(self, model: ServerModel, group: int) -> None:
        """Reject a group whose rows do not fit into a server model; names group and layer."""
        self._coverages.fitting(model, group, Parts())

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
        return self.new_common([names] * len(self.groups))

    def new_common(self, names: Sequence[Sequence[str]]) -> ServerModel:
        """A server model of tensors that groups have by different names.

        Initial values are those of the first group.

        Args:
            names: per group; the i-th name of each group is the same tensor.

        Raises:
            UserError: a group lacks one of them, or has it in another shape.
        """
        state = self.groups[0]
        model = part_of(state.layout, state.initial, names).to(self.device)
        for group in range(len(self.groups)):
            self.check_nested(model, group)
        return model

    def base_model(self, tensors: Collection[str] | None = None) -> ServerModel:
        """The frozen parameters of all clients as server state, for a method that changes them.

        The clients' models have views of its row: a change is theirs at once, and no message.

        Args:
            tensors: names of those to change; all by default.

        Raises:
            UserError: the groups have no frozen parameters, or unlike ones.
        """
        return self.base.server_model([state.name for state in self.groups], tensors)

    def keep(self, name: str, *, durable: bool = True, with_server: bool = False) -> Kept:
        """Declare a tensor that clients keep in addition to their rows; call it in `setup`.

        Args:
            name: in checkpoints.
            durable: it outlives its round; see `Kept`. Stateful algorithms only.
            with_server: the server holds a sum of it, such as the mean of all control variates.
                Change it only for the clients that a merge returns, so that both change together;
                sessions that are not finite leave both as they are.
        """
        assert name not in self.kept, f"{name} is kept already"
        found, fix = f"keeps {name}, but is not stateful", "set stateful = True in its class"
        require(self.stateful or not durable, "model.algorithm", found, fix)
        self.kept[name] = Kept(
            name,
            place=self._place,
            device=self.device,
            durable=durable,
            with_server=with_server,
        )
        return self.kept[name]

    def keep_masks(self) -> Kept:
        """A mask per client: packed words (P / 32,) of the elements that it holds and trains.

        The rest of the row stays 0. Only covered values are stored. A dense client has no mask.
        """
        self.kept.masks = self.keep("mask")
        return self.kept.masks

    def send(
        self,
        model: ServerModel,
        clients: Sequence[int],
        *,
        tensors: Collection[str] | None = None,
        size: int | Sequence[int] | None = None,
    ) -> None:
        """Copy the covered part of a server model into the clients' rows.

        A row on the device is written only when its session starts or it is read, so that the
        written values are still in the cache during training.

        Args:
            model: of the server.
            clients: receivers.
            tensors: names of the tensors to send; all by default.
            size: bytes on the wire, for all or by client, if the model is sent in another form.
        """
        self._open(clients)
        parts = self._parts(True, tensors)
        covered = self._covered(model, clients, parts)
        self.ledger.sent_down(clients, covered if size is None else size)
        mine = self.mine(clients)
        self.deliver(mine)  # an earlier message may cover more
        self._inbox |= dict.fromkeys(mine, Message(model, parts, model.floats._version))
        if self.host_rows:
            self.deliver(mine)

    def deliver(self, clients: Collection[int]) -> None:
        """Write what servers have sent into the rows of clients of this rank."""
        waiting: dict[tuple[int, int], tuple[Message, list[int]]] = {}
        for client in clients:
            if client in self._inbox:
                message, group = self._inbox.pop(client), self.group_of(client)
                waiting.setdefault((id(message), group), (message, []))[1].append(client)
        for (_, group), (message, receivers) in waiting.items():
            model, store = message.model, self.groups[group].store
            as_sent = model.floats._version == message.version
            assert as_sent, "the server model changed after sending"
            block = store.view(receivers) if len(receivers) > 1 else None
            for rows in [store.row(k) for k in receivers] if block is None else [block]:
                self._coverages.take(model, group, message.parts, rows)

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
        self._open(clients)
        training, shares = self.training, dict[int, float]()
        if self.clock is not None:
            shares = self.clock.policy.leaving(clients, of=self.clients, t=t, seed=self.seed)
        given = training.plans
        plans = replace(given, steps=steps or {}, phases=phases, repeat=repeat, shares=shares)
        if shares and self.clock is not None and self.clock.policy.partial == "lose":
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
        if self.clock is not None:
            self.clock.trained({report.client: report.steps for report in reports}, t)
        for report in reports:
            group = self.group_of(report.client)
            self.places.rates.add(group, samples=report.samples, seconds=report.seconds)
        bad = self._outcomes.add(reports)
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
        if self.clock is not None and self.clock.policy.drops_late:
            self._uncounted |= dict.fromkeys(clients, t)
            return
        for penalty in self.penalties:
            penalty.counted(self, clients, t)

    def _count_waiting(self) -> None:
        """Tell penalties of the sessions of the round that were in time."""
        clients = self._outcomes.contributing(sorted(self._uncounted))
        for t in sorted({*self._uncounted.values()}):
            of_round = [client for client in clients if self._uncounted[client] == t]
            for penalty in self.penalties:
                penalty.counted(self, of_round, t)
        self._uncounted = {}

    def _lose(self, shares: Mapping[int, float], plans: SessionPlans, t: int) -> None:
        """Count the work of clients that leave without sending it."""
        self._outcomes.lose(shares)
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
            not_finite = [r.client for r in bad if not self._outcomes.finite(r)]
            for client in self.mine(not_finite):
                self._reset(client)
        check(bad, sessions, t, allowed=self.max_failed)
        for warning in self._outcomes.warnings(bad, t):
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
        return bool(self._valid([client]))

    def finished(self, clients: Sequence[int]) -> list[int]:
        """The clients whose sessions of this round gave a finite update, in time or late."""
        return [k for k in clients if self._outcomes.usable.get(k, True)]

    def _valid(self, clients: Iterable[int]) -> list[int]:
        """The clients whose updates this round can use; the server waits for no more of them."""
        if self.clock is not None:
            self.clock.close(self._outcomes.silent, self._outcomes.usable)
            self._outcomes.late = self.clock.late
        return self._outcomes.contributing(clients)

    @property
    def timed(self) -> DeviceClock:
        """The clock, for a method whose class names devices."""
        assert self.clock is not None
        return self.clock

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
        self.deliver([*self._inbox])
        senders = self._outcomes.sending(clients if sent is None else sorted(sent))
        covered = self._covered(into, senders, parts)
        self.ledger.sent_up(senders, covered if sizes is None else [sizes[k] for k in senders])
        valid, staleness = self._valid(clients), {} if self.clock is None else self.clock.arrived
        valid = sorted([*valid, *staleness])
        before = into.floats.clone() if self.keeps_late else None
        if valid:
            labels = self._coverages.coverage(into, parts).table.num_labels
            here = [i for i, k in enumerate(valid) if self.places.owner[k] == self.ranks.rank]
            mine = [valid[i] for i in here]
            block = self.client_rows.view(mine)
            with self.server_step(into):
                self._coverages.merge_(
                    into,
                    parts,
                    [self.group_of(k) for k in valid],
                    here,
                    [self.row(k) for k in mine] if block is None else block,
                    weights=self._weights(weights, valid, staleness),
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
        assert self.clock is not None
        step = Row(into.floats - before, into.integers)
        change = ServerModel(into.layout, step, aliases=into.aliases)
        parts = self._parts(False, tensors)
        for client in self.mine(self.clock.under_way):
            state, row = self.state(client), self.row(client)
            added = Row.zeros(state.layout, self.device)
            self._coverages.take(change, self.group_of(client), parts, added)
            row.floats.add_(added.floats.to(row.floats.device))

    @contextmanager
    def reordered(self, model: ServerModel, order: Callable[[int], Tensor]) -> Iterator[None]:
        """Send and merge other slices of a server model than the leading ones.

        Within the context the units of every layer are in another order, so that the leading part
        of it is a rolling window (FedRolex) or a random choice, the same for all clients. Axes that
        no group narrows stay: inputs, classes. Layers are connected unit by unit, which a
        flattened feature map is not.

        Args:
            model: of the server; in its own order again afterwards.
            order: width of a layer -> (width,) the position of each unit in the model. Layers of
                one width have one order, because residual connections add them.
        """
        self._coverages.reorder_(model, order)
        try:
            yield
        finally:
            self._coverages.reorder_(model, lambda width: order(width).argsort())

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
        valid = self._valid(clients)
        shares = dict(zip(valid, self._weights(weights, valid), strict=True))
        total = torch.zeros_like(into, dtype=torch.float64)
        for client in self.mine(valid):
            total += shares[client] * values[client].to(total)
        self.ranks.sum_(total)
        if sum(shares.values()) > 0:
            into.copy_(total / sum(shares.values()))
        return valid

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
        sending = self._outcomes.sending(clients)
        self.ledger.sent_up(sending, [sizes[k] for k in sending])
        self.ledger.sent_down(clients, down)

    def show(self, model: ServerModel, clients: Sequence[int]) -> None:
        """Count the bytes of clients that read a server's model; their rows do not change."""
        self.ledger.sent_down(clients, self.sizes(model, clients))

    def sizes(
        self, model: ServerModel, clients: Sequence[int], *, buffers: bool = True
    ) -> list[float]:
        """Bytes of the part of a server's model that each client exchanges."""
        return self._covered(model, clients, self._parts(buffers, None))

    def relay(self, model: ServerModel, times: int) -> None:
        """Count the bytes of servers that send a model to or from a coordinator or each other."""
        size = 4 * model.layout.floats.numel + 8 * model.layout.integers.numel
        self.ledger.sent_between_servers(times * size)

    def exchange(
        self,
        senders: Mapping[int, Sequence[int]],
        *,
        masks: Mapping[int, Tensor] | None = None,
        keep: Mapping[int, Tensor] | None = None,
        over: Over = "covered",
    ) -> None:
        """Replace every listed client's row by the mean over itself and its senders.

        All read the old rows; sums are in ascending order of the clients. Only for stateful
        algorithms with one architecture.

        Args:
            senders: receiver -> its senders, without itself; the same on every rank.
            masks: of this rank's clients: packed words (P / 32,) of a row's covered elements; None
                for all.
            keep: of this rank's receivers: elements of the mean that they keep; None for all.
            over: divide by the number of rows that cover an element, or by that of all rows.
        """
        assert self.algorithm.stateful, "only clients that keep rows can exchange them"
        if self._exchange is None:
            layout = self.groups[0].layout
            assert all(state.layout == layout for state in self.groups), "one architecture"
            self._exchange = Exchange(
                layout, self.ranks, owner=self.places.owner, device=self._place
            )
        if self.clock is not None:
            self.clock.meet(senders)
        mine = self.mine(range(self.clients))
        self.deliver(mine)
        block = self.client_rows.view(mine)
        rows = dict(zip(mine, map(self.row, mine) if block is None else block.each(), strict=True))
        sizes = self._exchange.mean_(rows, senders, masks=masks, keep=keep, over=over, block=block)
        pairs = [(receiver, sender) for receiver in sorted(senders) for sender in senders[receiver]]
        spent = [sizes[sender] for _, sender in pairs]
        self.ledger.sent_up([sender for _, sender in pairs], spent)
        self.ledger.sent_down([receiver for receiver, _ in pairs], spent)

    def share(
        self,
        clients: Sequence[int],
        shared: Sequence[SharedTensors],
        *,
        weights: Weights = "uniform",
    ) -> None:
        """Replace shared tensors by their mean over the clients that have them.

        Stateful algorithms only. Clients with unusable updates receive but do not contribute.

        Args:
            clients: the participants.
            shared: disjoint sets of tensors that they share.
            weights: of the clients in the means: 1 for all, or n_k.
        """
        layouts = [state.layout for state in self.groups]
        means = GroupMeans(shared, layouts, {k: self.home_group(k) for k in clients})
        sending = self._outcomes.sending(clients)
        self.ledger.sent_up(sending, [means.bytes(client) for client in sending])
        valid = self._valid(clients)
        self.ledger.sent_down(clients, [means.bytes(client) for client in clients])
        means.mean_(
            {k: self.row(k) for k in self.mine(clients)},
            weights=dict(zip(valid, self._weights(weights, valid), strict=True)),
            ranks=self.ranks,
        )

    def _parts(self, buffers: bool, tensors: Collection[str] | None) -> Parts:
        """What a message has of a server model, or of these tensors."""
        return Parts(buffers, None if tensors is None else frozenset(tensors), self.personal)

    def _covered(self, model: ServerModel, clients: Iterable[int], parts: Parts) -> list[float]:
        """Bytes of the parts of a server model that each client covers."""
        groups = [self.group_of(k) for k in clients]
        each = {g: self._coverages.bytes(model, g, parts) for g in dict.fromkeys(groups)}
        return [each[group] for group in groups]

    def _weights(
        self,
        weights: Weights | Mapping[int, float],
        clients: Sequence[int],
        staleness: Mapping[int, int] | None = None,
    ) -> list[float]:
        """Integer weights of the clients in a sum; a UserError if one is no number of 0 or more.

        `staleness` are the rounds that updates come late.
        """
        if staleness:
            assert self.clock is not None
            plain = dict(zip(clients, self._weights(weights, clients), strict=True))
            e = self.clock.policy.exponent
            weights = {k: w * (1 + staleness.get(k, 0)) ** -e for k, w in plain.items()}
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
        surplus = range(self._classes, rows) if self.algorithm.surplus_rows else ()
        return [*held, *surplus]

    def row(self, client: int) -> Row:
        """The client's own row, on the device of the store; the client must be on this rank."""
        if client in self._inbox:
            self.deliver([client])
        return self.state(client).store.row(client)

    def _row_here(self, client: int) -> Row:
        """The client's row on the device: its own, or a copy of a row on the host."""
        row, state = self.row(client), self.state(client)
        return row if state.staging is None else state.borrow(row)

    def bind(self, client: int) -> L.LightningModule:
        """The client's live module, bound to its own row, or to a copy of a row on the host.

        The client must be on this rank.
        """
        return self.state(client).bind(self._row_here(client))

    def load(
        self, model: ServerModel, client: int, *, tensors: Collection[str] | None = None
    ) -> None:
        """Copy the part of a server model (or of the given tensors) into the row of a client.

        This is not a message: the ledger does not count it.
        """
        parts = self._parts(True, tensors)
        self._coverages.take(model, self.group_of(client), parts, self.row(client))

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
            self._coverages.take(given, group, parts, rows)
            return rows

        return Rows(state.live, clients, read)

    def _read(self, clients: Sequence[int]) -> Row:
        """(K, P) and (K, Q) on the device: rows of one group's clients on this rank."""
        if self.session is not None:
            return self.session.row.repeated(1)
        if len(clients) == 1:
            return self._row_here(clients[0]).repeated(1)
        self.deliver(clients)
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
        self._coverages.take(model, group, Parts(), row)
        return row

    def deployed(self, client: int | None) -> Rows:
        """The model that a client deploys between rounds, or the server's.

        A UserError if the algorithm has no such model.
        """
        algorithm = self.algorithm
        kind, clients = ("global", []) if client is None else (algorithm.moments[0], [client])
        rows = algorithm.models(self, kind, clients)
        if rows is None:
            whose = "the server" if client is None else f"client {client}"
            found = f"{type(algorithm).__name__} gives {whose} no model"
            fix = "return one from its `models` to export, fine-tune or predict with"
            raise UserError("model.algorithm", found, fix)
        return rows

    def gradient(self, client: int, t: int) -> Tensor:
        """(P,) on the device: the gradient of one training batch at the client's row, in eval mode.

        Drawn by (seed, "gradient", t, client); the client must be on this rank. Its FLOPs count
        with the client's next session in the round, as three dense forward passes.
        """
        return self.training.gradient(client, self._row_here(client), t)

    def loss(self, client: int, t: int) -> float:
        """The mean loss of the client's training samples at its row, in eval mode, not augmented.

        After `send` and before `train` it is that of the model received. The client must be on this
        rank; `collect` gives all ranks those of all. FLOPs count as for `gradient`, once.
        """
        return self.training.loss(client, self._row_here(client), t)

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

    def stored_bytes(self, client: int) -> int:
        """Bytes that a client of this rank keeps; 0 for a stateless one."""
        if not self.stateful:
            return 0
        layout, mask = self.state(client).layout, self.kept.mask(client)
        floats = layout.floats.numel if mask is None else int(popcount(mask))
        return 4 * floats + 8 * layout.integers.numel + self.kept.bytes(client)

    def open_round(self, plan: RoundPlan | None = None, waves: Waves | None = None) -> None:
        """Begin a round. Its participants are open: this frees the rows of stateless clients.

        The plan is that of the last round by default; `waves` as of `Training.start`.
        """
        if self.clock is not None:
            self.clock.open()
        self.plan = plan or self.plan
        self.training.start(waves)
        self.metrics, self.tests, self._outcomes = {}, {}, Outcomes()
        self._uncounted = {}  # of a round that was suspended
        self.places.open_round()
        for kept in self.kept.values():
            if not kept.durable:
                kept.clear()
        if not self.keeps:
            self._inbox.clear()

    def close_round(self) -> dict[str, float]:
        """The round's metrics and sums, the same on every rank."""
        sums, ends = self.ledger.close_round(), self._outcomes
        if self.clock is not None:
            sums |= self.clock.close_round(ends.silent, ends.usable)
            ends.late = self.clock.late
            self._count_waiting()
        return self.metrics | sums

    def states(self) -> Saved | None:
        """The state of this rank's clients for a checkpoint; None if they keep nothing."""
        if not self.keeps:
            return None
        self.deliver([*self._inbox])
        return self.client_rows.saved()

    def load_states(self, shards: Sequence[Saved]) -> None:
        """Load this rank's clients from a checkpoint's shards, written on any number of ranks."""
        for shard in shards if self.keeps else ():
            states = by_client(shard)
            for client in self.mine(list(states)):
                self.client_rows.restore(client, states[client])
