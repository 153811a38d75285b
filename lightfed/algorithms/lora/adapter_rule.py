"""What the rules of federated low-rank adapters have in common: everything but a layer's merge.

The update of client k to a layer's weight W is s_k B_k A_k, with a scale s_k and a rank r_k of its
own:

    client k starts from  A_k = A[:r_k],  B_k = D[:, :r_k] / s_k
    and sends             A_k  and  s_k B_k,  the factors of what it applies
    the server merges     A, D, perhaps W <- merge_layer(all that was sent of this layer)

Papers assume one scale. The server holds A and D = s B of the greatest rank R. All start from one
A, drawn row by row, and B = 0. Other trained tensors, such as a head, are averaged as in FedAvg.
Integer buffers keep their initial values.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, NamedTuple

import lightning.pytorch as L
import torch
from lightfed_kernels import Layout
from torch import Tensor, nn
from typing_extensions import override

from lightfed.aggregation.coverage import Parts
from lightfed.algorithms.lora.adapters import PEFT, Adapter, adapters_of
from lightfed.algorithms.lora.merge_check import MergeCheck
from lightfed.algorithms.lora.products import Product
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet, Weights
from lightfed.local.hooks import Newcomers, SessionContext
from lightfed.local.local_work import Phase
from lightfed.models.build import DataSpec
from lightfed.state.frozen_base import check_changeable
from lightfed.state.rows import ModelKind, Row, Rows
from lightfed.state.server_model import ServerModel
from lightfed.utils.errors import UserError, reason
from lightfed.utils.rng import torch_generator

# Which factors of the adapters are in a message, or frozen.
Factors = Literal["", "A", "B", "AB"]


@dataclass(frozen=True)
class Sent:
    """What the clients of a round sent of one layer, in the order of their numbers; all float64.

    Attributes:
        round: The round t.
        layer: The position of the layer among those with adapters.
        p: The clients' shares, whose sum is 1.
        scales: s_k of each client.
        A: A_k of each client, (r_k, in).
        D: s_k B_k of each client, (out, r_k).
        old_A: The server's A before the merge, (R, in).
        old_D: The server's D before the merge, (out, R).
        start: The common initial A, (R, in).
    """

    round: int
    layer: int
    p: list[float]
    scales: list[float]
    A: list[Tensor]
    D: list[Tensor]
    old_A: Tensor
    old_D: Tensor
    start: Tensor

    @property
    def top(self) -> int:
        """The greatest rank of a client in this round."""
        return max(map(len, self.A))

    @property
    def mean_scale(self) -> float:
        """The mean of the clients' scales, sum_k p_k s_k."""
        return sum(p_k * s_k for p_k, s_k in zip(self.p, self.scales, strict=True))

    @cached_property
    def mean(self) -> Product:
        """M = sum_k p_k s_k B_k A_k, the mean of the clients' updates."""
        return Product.sum(self.p, self.D, self.A)

    def averaged(self, weights: Sequence[float], *, by_rank: bool = False) -> tuple[Tensor, Tensor]:
        """Return A (R, in) and D (out, R): weighted sums of the clients' padded factors.

        A rank that no client with a weight has keeps its values. Otherwise both of its factors
        would be 0, and with them their gradients, for good.

        Args:
            weights: A weight for each client.
            by_rank: Whether a rank is divided by the weights of the clients that have it.
        """
        A = torch.zeros_like(self.old_A)
        D = torch.zeros_like(self.old_D)
        weight_sums = torch.zeros_like(A[:, 0])  # (R,) of the clients that have a rank
        for weight, A_k, D_k in zip(weights, self.A, self.D, strict=True):
            rank = len(A_k)
            weight_sums[:rank] += weight
            A[:rank] += weight * A_k
            D[:, :rank] += weight * D_k

        has_owner = weight_sums > 0
        divisors = weight_sums if by_rank else torch.ones_like(weight_sums)
        A = torch.where(has_owner[:, None], A / divisors[:, None], self.old_A)
        D = torch.where(has_owner, D / divisors, self.old_D)
        return rounded(A), rounded(D)


@dataclass(frozen=True)
class Merged:
    """A layer after a merge.

    Attributes:
        applied: What the server's adapter applies, besides `base`.
        A: The server's A; None if it does not change.
        D: The server's D; None if it does not change.
        base: What is added to the weight W of all clients, as the factors that are sent; None for
            nothing.
        kept: How many components of M the rule has kept; None if it keeps no components.
    """

    applied: Product
    A: Tensor | None = None
    D: Tensor | None = None
    base: Product | None = None
    kept: int | None = None

    def error(self, mean: Product) -> tuple[float, float]:
        """Return ||applied + base - M|| and ||M||, with the base in the precision of rows."""
        difference = self.applied - mean
        if self.base is None:
            return difference.norm(), mean.norm()
        return float((difference.dense + rounded(self.base.dense)).norm()), mean.norm()


class _OnHost(NamedTuple):
    """A merged layer in host memory, as float32, which travels between ranks.

    Attributes:
        layer: The position of the layer among those with adapters.
        A: The server's A; None if it does not change.
        D: The server's D; None if it does not change.
        base: (out, in) added to the weight W; None for nothing.
        base_rank: The number of factors whose product `base` is.
        kept: How many components of M the rule has kept; None if it keeps no components.
        error: ||applied + base - M|| and ||M||.
    """

    layer: int
    A: Tensor | None
    D: Tensor | None
    base: Tensor | None
    base_rank: int
    kept: int | None
    error: tuple[float, float]


class AdapterRule(Algorithm):
    """A rule of federated adapters: `merge_layer`, and which factors are trained and sent.

    A rule with messages of another kind, or of another kind in every round, overrides `bytes_up`
    and `bytes_down`; one that trains one factor at a time overrides `frozen`.

    Attributes:
        up: The factors that clients send.
        down: The factors that the server sends.
        shared: Names of the tensors that the server writes into rows; None for all.
        changes_base: Whether the rule adds to the weights W of all clients.
        model: The server's A and D, and all other trained tensors.
        base: The weights W, if the rule changes them.
        added: The ranks of all that was added to W, (L,) by layer.
        seen: The same when a client was served last, (N, L).
    """

    side_by_side = True
    holds = "the server's adapters, cut to its rank"
    up: Factors = "AB"
    down: Factors = "AB"
    shared: Collection[str] | None = None
    changes_base = False
    model: ServerModel
    base: ServerModel
    added: Tensor
    seen: Tensor

    def __init__(
        self, weights: Weights = "samples", adapters: dict[str, str] | None = None
    ) -> None:
        """Set the clients' weights, and the names of the adapters.

        Args:
            weights: p_k, by the number of samples, or uniform.
            adapters: The part of a parameter's name that marks a factor A, and the part that marks
                its B, such as `{down: up}`; by default those of peft. A module's attribute
                `scaling` is s_k.
        """
        super().__init__()
        self.weights: Weights = weights
        self.names = PEFT if adapters is None else adapters
        self._draws = 0

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        # This is the seed of (seed, "prepare"), which is the same for all groups.
        self._draws = torch.initial_seed()
        parameters = dict(module.named_parameters())
        tensors = {name: parameter.detach() for name, parameter in parameters.items()}
        for adapter in adapters_of(module, self.names):
            A, B = adapter.factors(tensors)
            if not (parameters[adapter.a].requires_grad and parameters[adapter.b].requires_grad):
                raise UserError(
                    "model.clients",
                    f"one of {adapter.a} and {adapter.b} is frozen",
                    "train both; FFALoRA freezes A",
                )
            if B.any():
                raise UserError(
                    "model.clients",
                    f"{adapter.b} does not start at 0",
                    "choose an initialization that does not change the model, as peft's default",
                )
            if self.changes_base and not adapter.base:
                raise UserError(
                    "model.clients",
                    f"base_layer.weight, base.weight or weight of {adapter.layer} is missing, "
                    "trained, quantized or shared",
                    f"{type(self).__name__} needs a frozen one",
                )
            if self.changes_base:
                check_changeable(adapter.base, parameters[adapter.base], type(self).__name__)
            A.copy_(self.initial(adapter, len(A)))

    def initial(self, own: Adapter, rank: int) -> Tensor:
        """Return a layer's A at the start, (rank, in); a lower rank has the first rows."""
        return drawn(own, rank, torch_generator(self._draws, f"adapters/{own.layer}"))

    @override
    def setup(self, fed: Fleet) -> None:
        self.adapters = self._adapters_by_group(fed)  # groups, layers
        self.late_rows = fed.keep("late adapters", durable=False)
        self.starts = []
        for adapter, rank in zip(self.adapters[0], self.server_ranks(), strict=True):
            self.starts.append(self.initial(adapter, rank).to(fed.device))

        self.others = self._other_tensors(fed)
        self._check_biases()
        self.model = self._server_model(fed)
        for group in range(len(fed.groups)):
            fed.check_nested(self.model, group)

        if self.changes_base:
            for state, adapters in zip(fed.groups, self.adapters, strict=True):
                MergeCheck(state, adapters, fed.data).run(type(self).__name__)

            # Clients' models have views of this row: a change is theirs at once, without a message.
            groups = [state.name for state in fed.groups]
            weights = [adapter.base for adapter in self.adapters[0]]
            self.base = fed.base.server_model(groups, weights)
            self.register_buffer("added", torch.zeros(len(self.starts), dtype=torch.int64))
            self.register_buffer("seen", self.added.repeat(fed.clients, 1))

    def adapters_in(self, module: nn.Module) -> list[Adapter]:
        """Return the adapters of a module, as `prepare_module` has left it."""
        return adapters_of(module, self.names)

    def _adapters_by_group(self, fed: Fleet) -> list[list[Adapter]]:
        """Return the adapters of each group, with the layers in the order of the first group.

        Raises:
            UserError: Groups adapt unlike layers.
        """
        adapters_of_layers = []
        for state in fed.groups:
            adapters = self.adapters_in(state.module)
            adapters_of_layers.append({adapter.layer: adapter for adapter in adapters})

        layers = adapters_of_layers[0].keys()
        for state, by_layer in zip(fed.groups, adapters_of_layers, strict=True):
            unlike = sorted(layers ^ by_layer.keys())
            if unlike:
                raise UserError(
                    "model.clients",
                    f"groups {fed.groups[0].name} and {state.name} differ in adapters of "
                    f"{', '.join(unlike[:2])}",
                    "adapt the same layers; groups may differ in rank",
                )
        return [[by_layer[layer] for layer in layers] for by_layer in adapters_of_layers]

    def _other_tensors(self, fed: Fleet) -> frozenset[str]:
        """Return the names of the tensors that are averaged as in FedAvg.

        Raises:
            UserError: The user wants factors of adapters to be personal.
        """
        factors = set()
        for adapter in self.adapters[0]:
            factors |= adapter.names

        personal_by_rule = self.personal(fed.groups[0].module)
        personal_factors = factors & fed.personal - personal_by_rule
        if personal_factors:
            raise UserError(
                "model.personal",
                f"factors of adapters, {min(personal_factors)}",
                "leave them out, or choose FedSALoRA, whose clients keep B",
            )

        names = [entry.name for entry in fed.groups[0].layout.floats]
        return frozenset(name for name in names if name not in factors | fed.personal)

    def _check_biases(self) -> None:
        """Refuse an adapter's bias in groups with unlike scales: it is applied times the scale."""
        for layer in range(len(self.adapters[0])):
            bias = self.adapters[0][layer].bias
            scales = {adapters[layer].scale for adapters in self.adapters}
            if bias in self.others and len(scales) > 1:
                raise UserError(
                    "model.clients",
                    f"{bias}, but groups differ in alpha / rank",
                    "leave out lora_bias",
                )

    def server_ranks(self) -> list[int]:
        """Return the server's rank R of every layer: the greatest rank of a group."""
        ranks = []
        for adapters_of_layer in zip(*self.adapters, strict=True):
            ranks.append(max(adapter.rank for adapter in adapters_of_layer))
        return ranks

    def _server_model(self, fed: Fleet) -> ServerModel:
        """Return the first group's initial values, but with R ranks: the common A, and D = 0."""
        state = fed.groups[0]
        parameters = dict(state.module.named_parameters())
        shapes: dict[str, tuple[int, ...]] = {}
        for adapter, start in zip(self.adapters[0], self.starts, strict=True):
            shapes |= adapter.shapes(parameters, len(start))

        entries = state.layout.floats
        floats = Layout.build(
            (entry.name, shapes.get(entry.name, entry.shape)) for entry in entries
        )
        row = Row(floats.new_row(device=fed.device), state.initial.integers.to(fed.device))

        initial = entries.views(state.initial.floats)
        views = floats.views(row.floats)
        for name in self.others:
            views[name].copy_(initial[name])
        for adapter, start in zip(self.adapters[0], self.starts, strict=True):
            if adapter.a in views:  # FFA-LoRA's A is frozen, and in no row
                A, _ = adapter.factors(views)
                A.copy_(start)
        return ServerModel(replace(state.layout, floats=floats), row)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)  # S
        sizes = self.bytes_down(fed, clients, t)
        if self.changes_base:
            sizes += self._missed(clients)
            self.seen[clients] = self.added

        fed.send(self.model, clients, tensors=self.shared, size=sizes.tolist())
        self.sessions(fed, clients, t)
        self.before_sending(fed, clients, t)

        # In a round without a usable update there is no error.
        fed.metrics |= dict.fromkeys(("aggregation_error", "aggregation_error_worst"), 0.0)
        fed.charge(clients, up=self.bytes_up(fed, clients, t).tolist())
        usable = [client for client in clients if fed.usable(client)]
        if fed.keeps_late:
            self._keep_late(fed, clients)
            usable = sorted([*usable, *fed.clock.arrived])
        if usable:
            with fed.server_step(self.model, fixed=self.names_of(self.frozen(t))):
                self.merge(fed, usable, t)
        elif fed.keeps_late:
            self._merge_others(fed, [])  # keeps late ones

    def _keep_late(self, fed: Fleet, clients: Sequence[int]) -> None:
        """Keep rows that come too late until they arrive, as changes from what was sent.

        Args:
            fed: The federation.
            clients: The participants of this round.
        """
        late = fed.clock.late.intersection(clients, fed.clock.under_way)
        for client in fed.mine(sorted(late)):
            received = self._as_received(fed, client)
            self.late_rows[client] = fed.row(client).floats.to(fed.device) - received

    def _as_received(self, fed: Fleet, client: int) -> Tensor:
        """Return what the server's model is in a client's row, (P,); 0 for what it does not get."""
        received = Row.zeros(fed.state(client).layout, fed.device)
        parts = Parts(True, None if self.shared is None else frozenset(self.shared), fed.personal)
        fed.coverages.take(self.model, fed.home_group(client), parts, received)
        self.take(fed, client, received.floats)
        return received.floats

    def sent_row(self, fed: Fleet, client: int) -> Tensor:
        """Return the row (P,) that a client of this rank has sent.

        A late one is what the client would receive now, plus the change that it has made.
        """
        if client not in fed.clock.arrived:
            return fed.row(client).floats
        return self._as_received(fed, client) + self.late_rows[client]

    def frozen(self, t: int) -> Factors:
        """Return which factors the sessions of round t leave as they are; by default none.

        Neither do a server's optimizer and its momentum move them in that round.
        """
        return ""

    def sessions(self, fed: Fleet, clients: Sequence[int], t: int) -> None:
        """Train the clients of round t; by default in one session each."""
        fed.train(clients, t, phases=self._phases(fed, self.frozen(t)))

    def bytes_down(self, fed: Fleet, clients: Sequence[int], t: int) -> Tensor:
        """Return the bytes that each client is sent in round t, (K,), besides those of the base."""
        return self.sizes(fed, clients, self.down)

    def bytes_up(self, fed: Fleet, clients: Sequence[int], t: int) -> Tensor:
        """Return the bytes that each client sends in round t, (K,)."""
        return self.sizes(fed, clients, self.up)

    def names_of(self, factors: Factors) -> frozenset[str]:
        """Return the names of all tensors A, or B, or both."""
        names = set()
        for adapter in self.adapters[0]:
            if "A" in factors:
                names.add(adapter.a)
            if "B" in factors:
                names.add(adapter.b)
        return frozenset(names)

    def _phases(self, fed: Fleet, frozen: Factors) -> list[Phase]:
        """Return the one part of a session that trains all but these factors; [] if it is all."""
        if not frozen:
            return []
        return [self.phase_without(fed, self.names_of(frozen))]

    def phase_without(self, fed: Fleet, left_alone: Collection[str]) -> Phase:
        """Return a part of a session, as long as configured, that trains all parameters but these.

        Raises:
            UserError: The name of one of them begins with that of another parameter.
        """
        trained = []
        for name, parameter in fed.groups[0].module.named_parameters():
            if parameter.requires_grad and name not in left_alone:
                trained.append(name)

        # A phase names parameters by their prefixes.
        for name in sorted(left_alone):
            if name.startswith(tuple(trained)):
                raise UserError(
                    "model.clients",
                    f"the name {name} begins with that of another trained parameter",
                    f"rename it: {type(self).__name__} trains one of the two at a time",
                )
        return Phase(trained, epochs=fed.work.epochs, steps=fed.work.steps)

    def before_sending(self, fed: Fleet, clients: Sequence[int], t: int) -> None:
        """Do what clients do between their sessions and their messages; by default nothing."""

    def ranks(self, fed: Fleet, client: int) -> list[int]:
        """Return r_k by layer."""
        return [adapter.rank for adapter in self.adapters[fed.home_group(client)]]

    def sizes(
        self,
        fed: Fleet,
        clients: Sequence[int],
        factors: Factors,
        *,
        most: Tensor | None = None,
    ) -> Tensor:
        """Return the bytes of a message of each client, (K,).

        Args:
            fed: The federation.
            clients: The K clients.
            factors: Which factors are in the message besides the other tensors.
            most: (L,) the most ranks of a layer that are in a message; None for all of a client's.
        """
        widths = []  # elements of one rank, by layer
        for adapter in self.adapters[0]:
            width = 0
            if "A" in factors:
                width += adapter.inputs
            if "B" in factors:
                width += adapter.outputs
            widths.append(width)

        ranks = torch.tensor([self.ranks(fed, client) for client in clients])  # (K, L)
        if most is not None:
            ranks = torch.minimum(ranks, most.to(ranks))
        others = torch.tensor([state.layout.floats.only(self.others).numel for state in fed.groups])
        groups = [fed.home_group(client) for client in clients]
        return 4 * (ranks @ torch.tensor(widths) + others[groups])

    def _missed(self, clients: Sequence[int]) -> Tensor:
        """Return the bytes of what was added to W since each client was served, (K,).

        It is sent as factors, or as a dense matrix if that is smaller.
        """
        shapes = torch.tensor([(adapter.inputs, adapter.outputs) for adapter in self.adapters[0]])
        factors = (self.added - self.seen[clients]).cpu() * shapes.sum(1)  # (K, L) elements
        dense = shapes.prod(1)  # (L,)
        return 4 * torch.minimum(factors, dense).sum(1)

    @override
    def session_start(self, s: SessionContext) -> None:
        if s.round < 0:
            return  # an evaluation begins with what a client deploys, which is cut already
        self.take(s.fed, s.client, s.row.floats)

    def take(self, fed: Fleet, client: int, row: Tensor) -> None:
        """Set B_k = D / s_k, and cut to r_k ranks, in a row (P,) as the server sends it."""
        adapters = self.adapters[fed.home_group(client)]
        ranks = self.ranks(fed, client)
        factors = self.factors(fed, client, row)
        for adapter, rank, (A, B) in zip(adapters, ranks, factors, strict=True):
            A[rank:] = 0
            B[:, rank:] = 0
            B.div_(adapter.scale)

    def factors(self, fed: Fleet, client: int, row: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return views (r, in) of A and (out, r) of B, by layer.

        Args:
            fed: The federation.
            client: Number of the client.
            row: The client's row or a gradient, (P,).
        """
        state = fed.state(client)
        floats = state.layout.floats
        parameters = floats.entries[: state.layout.parameters]
        tensors = {entry.name: floats.view(row, entry) for entry in parameters}
        tensors |= state.live.frozen  # FFA-LoRA's A
        return [adapter.factors(tensors) for adapter in self.adapters[fed.home_group(client)]]

    def server_factors(self) -> list[tuple[Tensor, Tensor]]:
        """Return views (R, in) of the server's A and (out, R) of its D, by layer."""
        tensors = {}
        for adapter, A in zip(self.adapters[0], self.starts, strict=True):
            # FFA-LoRA's A, which is in no model; of other rules the next line replaces it.
            tensors[adapter.a] = A.T if adapter.embedding else A
        tensors |= self.model.layout.floats.views(self.model.floats)
        return [adapter.factors(tensors) for adapter in self.adapters[0]]

    def merge(self, fed: Fleet, clients: Sequence[int], t: int) -> None:
        """Average all other tensors, and merge each layer by the rule, on one rank each."""
        self._merge_others(fed, clients)

        weights = {}
        added = torch.zeros(len(self.starts), dtype=torch.int64)
        if self.changes_base:
            weights = self.base.layout.floats.views(self.base.floats)
            # A plan merges nothing, and has no results: it counts the most that a merge can add.
            added = self.most_added(fed, clients)

        factors = self.server_factors()
        jobs = (partial(self._merge_on_host, sent) for sent in self._sent_by_layer(fed, clients, t))
        norms = []
        for merged in fed.once(jobs):
            old_A, old_D = factors[merged.layer]
            if merged.A is not None:
                old_A.copy_(merged.A)
            if merged.D is not None:
                old_D.copy_(merged.D)
            if merged.base is not None:
                adapter = self.adapters[0][merged.layer]
                adapter.weight(weights).add_(merged.base.to(fed.device))
                added[merged.layer] = merged.base_rank
            if merged.kept is not None:
                self.layer_kept(merged.layer, merged.kept)
            norms.append(merged.error)

            # What was added to the base can have gigabytes. Without this it would be in memory
            # while the next layer is merged.
            del merged

        if self.changes_base:
            self.added += added.to(self.added.device)
        self._report_errors(fed, norms)

    def _merge_others(self, fed: Fleet, clients: Sequence[int]) -> None:
        """Average all other tensors."""
        if not self.others:
            return
        if fed.keeps_late:
            # The merge itself keeps late updates, and adds those that arrive.
            clients = sorted({*clients, *fed.clock.late}.difference(fed.clock.arrived))
        fed.merge(
            clients,
            into=self.model,
            weights=self.weights,
            tensors=self.others,
            sizes=dict.fromkeys(clients, 0),  # their bytes are charged with the adapters'
        )

    def most_added(self, fed: Fleet, clients: Sequence[int]) -> Tensor:
        """Return the most ranks that a merge of these clients can add to W, (L,) by layer.

        By default it is what FLoRA and FedEx-LoRA add: the clients' products, and where the server
        has adapters also its old one, D A.
        """
        own = [len(start) if self.down else 0 for start in self.starts]
        theirs = [self.ranks(fed, client) for client in clients]
        return torch.tensor([own, *theirs]).sum(0)

    def layer_kept(self, layer: int, components: int) -> None:
        """Called on all ranks with how many components of M a layer has kept, if a rule says so."""

    def _report_errors(self, fed: Fleet, norms: Sequence[tuple[float, float]]) -> None:
        """Report the relative error of the merge, over all layers and of the worst.

        Args:
            fed: The federation.
            norms: Norms of the error and of the mean update, by layer.
        """
        errors, means = torch.tensor(norms).reshape(-1, 2).T
        if not means.any():
            return
        relative = torch.where(means > 0, errors / means, torch.zeros(()))
        fed.report("aggregation_error", float(errors.norm() / means.norm()))
        fed.report("aggregation_error_worst", float(relative.max()))

    def _merge_on_host(self, sent: Sent) -> _OnHost:
        """Return a layer after the merge, and its error.

        Raises:
            UserError: LAPACK found no decomposition. `Fleet.once` raises it on all ranks.
        """
        try:
            merged = self.merge_layer(sent)
            error = merged.error(sent.mean)
        except torch.linalg.LinAlgError as failure:
            layer = self.adapters[0][sent.layer].layer
            raise UserError(
                "model.algorithm",
                f"no decomposition of {layer} in round {sent.round} ({reason(failure)})",
                "lower the learning rate, or choose a rule that decomposes nothing, as RankMean",
            ) from failure

        base = merged.base
        return _OnHost(
            layer=sent.layer,
            A=None if merged.A is None else merged.A.float().cpu(),
            D=None if merged.D is None else merged.D.float().cpu(),
            base=None if base is None else base.dense.float().cpu(),
            base_rank=0 if base is None else base.left.shape[1],
            kept=merged.kept,
            error=error,
        )

    @abstractmethod
    def merge_layer(self, sent: Sent) -> Merged:
        """Return a layer after the round, from what the clients sent of it."""

    def _sent_by_layer(self, fed: Fleet, clients: Sequence[int], t: int) -> Iterator[Sent]:
        """Yield what the clients sent, layer by layer, on every rank."""
        if self.weights == "samples":
            numbers: list[float] = [fed.data.num_samples(client) for client in clients]
        else:
            numbers = [1] * len(clients)
        for position, client in enumerate(clients):
            if client in fed.clock.arrived:
                numbers[position] *= fed.clock.discount(client)
        p = [number / sum(numbers) for number in numbers]

        mine = {client: self._factors_on_host(fed, client) for client in fed.mine(clients)}
        factors_of = fed.collect(mine)
        for layer, (old_A, old_D) in enumerate(self.server_factors()):
            all_A = []
            all_D = []
            scales = []
            for client in clients:
                A, B = factors_of[client][layer]
                scale = self.adapters[fed.home_group(client)][layer].scale
                all_A.append(A.to(old_A).double())
                all_D.append(scale * B.to(old_D).double())
                scales.append(scale)

            yield Sent(
                round=t,
                layer=layer,
                p=p,
                scales=scales,
                A=all_A,
                D=all_D,
                old_A=old_A.double(),
                old_D=old_D.double(),
                start=self.starts[layer].double(),
            )

    def _factors_on_host(self, fed: Fleet, client: int) -> list[tuple[Tensor, Tensor]]:
        """Return A_k (r_k, in) and B_k (out, r_k) of every layer, in host memory."""
        factors = self.factors(fed, client, self.sent_row(fed, client))
        on_host = []
        for (A, B), rank in zip(factors, self.ranks(fed, client), strict=True):
            on_host.append((A[:rank].detach().cpu(), B[:, :rank].cpu()))
        return on_host

    @override
    def newcomers(self, fed: Fleet, clients: Sequence[int]) -> Newcomers | None:
        newcomers = super().newcomers(fed, clients)
        if newcomers is None or not newcomers.trained:
            return newcomers
        # The server's adapters, cut to the clients' ranks.
        start = self.models(fed, "aggregated", clients)
        assert start is not None, "clients have models"
        return replace(newcomers, start=start)

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        """Return the server's adapters, cut to a client's rank.

        "global" is the server's model in the module of the group with the greatest ranks.
        """
        if kind == "trained":
            return fed.rows(clients)
        if kind == "local":
            return None

        if fed.personal and not clients:
            return None  # clients have a head of their own, for example
        return self._in_modules(fed, clients)

    @override
    def model_to_write(self, fed: Fleet, model: ServerModel) -> Rows | None:
        """Return the server's adapters as the module with the greatest ranks holds them."""
        return self._in_modules(fed, []) if model is self.model else None

    def widest_group(self) -> int:
        """Return the position of the group with the greatest ranks."""
        ranks = [sum(adapter.rank for adapter in adapters) for adapters in self.adapters]
        return ranks.index(max(ranks))

    def _in_modules(self, fed: Fleet, clients: Sequence[int]) -> Rows | None:
        """Return the server's adapters as modules of clients hold them, cut to the clients' ranks.

        Without clients, it is one row for the module of the group with the greatest ranks.
        """
        read_as = clients or [fed.places.home_groups.index(self.widest_group())]
        rows = fed.server_rows(self.model, read_as)
        if rows is None:
            return None

        def read(some: Sequence[int]) -> Row:
            floats = []
            integers = []
            for client in some if clients else read_as:
                row = rows.read([client]).clone()
                self.take(fed, client, row.floats[0])
                floats.append(row.floats)
                integers.append(row.integers)
            return Row(torch.cat(floats), torch.cat(integers))

        return replace(rows, read=read, clients=clients or range(1), shared=not clients)


def drawn(own: Adapter, rank: int, generator: torch.Generator) -> Tensor:
    """Return new values of A, (rank, in), distributed as peft draws them.

    They are drawn row by row, so that a lower rank has the first rows of a greater one.
    """
    A = torch.empty(rank, own.inputs)
    bound = own.inputs**-0.5
    for row in A:
        if own.embedding:
            row.normal_(generator=generator)
        else:
            row.uniform_(-bound, bound, generator=generator)
    return A


def rounded(values: Tensor) -> Tensor:
    """Return float64 values rounded to what rows hold, float32."""
    return values.float().double()


def finished(fed: Fleet, clients: Sequence[int]) -> list[int]:
    """Return the clients whose sessions of this round gave a finite update, in time or late."""
    return [client for client in clients if fed.outcomes.usable.get(client, True)]
