"""What the rules of federated low-rank adapters have in common: all but the merge of a layer.

The update of client k to a layer's weight W is s_k B_k A_k, with a scale s_k and a rank r_k of its
own. Papers assume one scale. Here a client sends A_k and s_k B_k, the factors of what it applies.
The server holds A and D = s B of the greatest rank R. Client k starts from A[:r_k] and
B_k = D[:, :r_k] / s_k. All start from one A, drawn row by row, and B = 0. Other trained tensors,
such as a head, are averaged as in FedAvg. Integer buffers keep their initial values.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import lightning.pytorch as L
import torch
from lightfed_kernels import Layout
from torch import Tensor
from typing_extensions import override

from lightfed.aggregation.adapters import PEFT, Adapter, adapters_of, matched
from lightfed.aggregation.products import Product
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet, Weights
from lightfed.local.hooks import SessionContext
from lightfed.models.build import DataSpec
from lightfed.state.rows import ModelKind, Row, Rows
from lightfed.state.server_model import ServerModel
from lightfed.utils.errors import require
from lightfed.utils.rng import torch_generator


@dataclass(frozen=True)
class Sent:
    """What the clients of a round sent of one layer, in the order of their numbers; all float64.

    Attributes:
        p: the clients' shares, of sum 1.
        A: a client's A_k (r_k, in).
        D: a client's s_k B_k (out, r_k).
        old_A, old_D: the server's, (R, in) and (out, R).
        start: the common initial A (R, in).
    """

    p: list[float]
    A: list[Tensor]
    D: list[Tensor]
    old_A: Tensor
    old_D: Tensor
    start: Tensor

    @property
    def top(self) -> int:
        """The greatest rank of the round."""
        return max(len(A) for A in self.A)

    @cached_property
    def mean(self) -> Product:
        """M = sum_k p_k s_k B_k A_k, the mean of the clients' updates."""
        return Product.sum(self.p, self.D, self.A)

    def owners(self, weights: Sequence[float]) -> Tensor:
        """(R,) the sum of the weights of the clients that have rank j."""
        total = torch.zeros_like(self.old_A[:, 0])
        for weight, A in zip(weights, self.A, strict=True):
            total[: len(A)] += weight
        return total

    def averaged(
        self, weights: Sequence[float], *, over: Tensor | float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """A (R, in) and D (out, R): sums of the clients' padded factors, divided by `over` (R,).

        A rank of no client with a weight keeps its values: otherwise both of its factors, and so
        their gradients, would be 0 for good.
        """
        sum_A, sum_D = torch.zeros_like(self.old_A), torch.zeros_like(self.old_D)
        for weight, A, D in zip(weights, self.A, self.D, strict=True):
            sum_A[: len(A)] += weight * A
            sum_D[:, : len(A)] += weight * D
        present, over = self.owners(weights) > 0, torch.as_tensor(over).to(sum_A)
        A = torch.where(present[:, None], sum_A / over.expand(len(sum_A))[:, None], self.old_A)
        return rounded(A), rounded(torch.where(present, sum_D / over, self.old_D))


@dataclass(frozen=True)
class Merged:
    """A layer after a merge.

    Attributes:
        applied: what the server applies instead of the clients' mean update, besides `base`.
        A, D: of the server; None if they do not change.
        base: (out, in) added to the weight W of all clients; None for nothing.
    """

    applied: Product | None
    A: Tensor | None = None
    D: Tensor | None = None
    base: Tensor | None = None

    def error(self, mean: Product) -> tuple[float, float]:
        """||applied - M|| and ||M||, of what is added, in the precision of rows."""
        if self.base is None:
            assert self.applied is not None
            return (self.applied - mean).norm(), mean.norm()
        applied = rounded(self.base)
        if self.applied is not None:
            applied = applied + self.applied.dense
        return float((applied - mean.dense).norm()), float(mean.dense.norm())


class LowRank(Algorithm):
    """A rule: `merge_layer`, and which factors are sent.

    Attributes:
        up: the factors that clients send.
        down: those that the server sends.
        changes_base: the rule adds to the weights W of all clients.
        model: A and D, and all other trained tensors.
        base: the weights W, if the rule changes them.
    """

    side_by_side = True
    holds = "the server's adapters, cut to its rank"
    up = down = "AB"
    changes_base = False
    model: ServerModel
    base: ServerModel
    added: Tensor  # (L,) ranks of all that was added to W, by layer
    seen: Tensor  # (N, L) the same when a client was served last

    def __init__(
        self, weights: Weights = "samples", adapters: dict[str, str] | None = None
    ) -> None:
        """Set the clients' weights, and the names of the adapters.

        Args:
            weights: p_k, by the number of samples, or uniform.
            adapters: The part of a parameter's name that marks a factor A, and that of its B, such
                as `{down: up}`; by default those of peft. A module's attribute `scaling` is s_k.
        """
        super().__init__()
        self.weights: Weights = weights
        self.names = PEFT if adapters is None else adapters
        self._draws = 0

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        self._draws = torch.initial_seed()  # the one of (seed, "prepare"), the same for all groups
        parameters = dict(module.named_parameters())
        tensors = {name: p.detach() for name, p in parameters.items()}
        for own in adapters_of(module, self.names):
            A, B = own.factors(tensors)
            both = parameters[own.a].requires_grad and parameters[own.b].requires_grad
            found, fix = f"one of {own.a} and {own.b} is frozen", "train both; FFALoRA freezes A"
            require(both, "model.clients", found, fix)
            fix = "choose an initialisation that does not change the model, as peft's default"
            require(not B.any(), "model.clients", f"{own.b} does not start at 0", fix)
            found = f"base_layer.weight, base.weight or weight of {own.layer} is missing, trained, "
            found, fix = f"{found}quantised or shared", f"{type(self).__name__} needs a frozen one"
            require(bool(own.base) or not self.changes_base, "model.clients", found, fix)
            A.copy_(self.initial(own, len(A)))

    def initial(self, own: Adapter, rank: int) -> Tensor:
        """(rank, in) the values of a layer's A at the start: of fewer ranks the first rows."""
        return drawn(own, rank, torch_generator(self._draws, f"adapters/{own.layer}"))

    @override
    def setup(self, fed: Fleet) -> None:
        each = [(state.name, adapters_of(state.module, self.names)) for state in fed.groups]
        self.layers = matched(each)
        self.starts = [
            self.initial(layer[0], rank).to(fed.device)
            for layer, rank in zip(self.layers, self.server_ranks(), strict=True)
        ]
        factors = {name for layer in self.layers for name in (layer[0].a, layer[0].b)}
        layout = fed.groups[0].layout.floats
        self.others = frozenset(entry.name for entry in layout if entry.name not in factors)
        self.model = self._server_model(fed)
        for (A, _), start in zip(self.server_factors(), self.starts, strict=True):
            A.copy_(start)
        for group in range(len(fed.groups)):
            fed.check_nested(self.model, group)
        self._others_numel = [s.layout.floats.only(self.others).numel for s in fed.groups]
        if self.changes_base:
            self.base = fed.base_model([layer[0].base for layer in self.layers])
            self.register_buffer("added", torch.zeros(len(self.layers), dtype=torch.int64))
            self.register_buffer("seen", self.added.repeat(fed.clients, 1))

    def server_ranks(self) -> list[int]:
        """The server's rank R of every layer: the greatest of a group."""
        return [max(own.rank for own in layer) for layer in self.layers]

    def _server_model(self, fed: Fleet) -> ServerModel:
        """The first group's initial values, but A and D with R ranks."""
        state = fed.groups[0]
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, start in zip(self.layers, self.starts, strict=True):
            shapes |= layer[0].shapes(dict(state.module.named_parameters()), len(start))
        floats = Layout.build((e.name, shapes.get(e.name, e.shape)) for e in state.layout.floats)
        row = Row(floats.new_row(device=fed.device), state.initial.integers.to(fed.device))
        values, places = state.layout.floats.views(state.initial.floats), floats.views(row.floats)
        for name in self.others:
            places[name].copy_(values[name])
        return ServerModel(replace(state.layout, floats=floats), row)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)  # S
        self.send(fed, clients)
        fed.train(clients, t)
        self.before_sending(fed, clients)
        fed.metrics |= dict.fromkeys(("aggregation_error", "aggregation_error_worst"), 0.0)
        fed.charge(clients, up=[self.size(fed, k, self.up) for k in clients])
        if valid := [k for k in clients if fed.usable(k)]:
            with fed.server_step(self.model):
                self.merge(fed, valid)

    def before_sending(self, fed: Fleet, clients: Sequence[int]) -> None:
        """What clients do between their sessions and their messages."""

    def merge(self, fed: Fleet, valid: Sequence[int]) -> None:
        """The mean of all other tensors, and the rule's merge of the adapters."""
        if self.others:
            nothing = dict.fromkeys(valid, 0)  # their bytes are charged with the adapters'
            fed.merge(
                valid, into=self.model, weights=self.weights, tensors=self.others, sizes=nothing
            )
        self.merge_adapters(fed, valid)

    def send(self, fed: Fleet, clients: Sequence[int]) -> None:
        """A[:r_k], D[:, :r_k], the other tensors, and what was added to W since the last time."""
        sizes = [self.size(fed, k, self.down) for k in clients]
        if self.changes_base:
            sizes = [size + self._base_size(k) for k, size in zip(clients, sizes, strict=True)]
            self.seen[clients] = self.added
        fed.send(self.model, clients, size=sizes)

    def rank(self, fed: Fleet, client: int, layer: Sequence[Adapter]) -> int:
        """r_k."""
        return layer[fed.home_group(client)].rank

    def size(self, fed: Fleet, client: int, factors: str) -> int:
        """Bytes of some factors of a client, and of the other tensors."""
        others = self._others_numel[fed.home_group(client)]
        widths = [
            own.inputs * ("A" in factors) + own.outputs * ("B" in factors)
            for own, *_ in self.layers
        ]
        ranks = [self.rank(fed, client, layer) for layer in self.layers]
        return 4 * (others + sum(r * width for r, width in zip(ranks, widths, strict=True)))

    def _base_size(self, client: int) -> int:
        """Bytes of what was added to W since a client was served: factors, or dense if smaller."""
        number = 0
        for (own, *_), ranks in zip(self.layers, self.added - self.seen[client], strict=True):
            factors = int(ranks) * (own.inputs + own.outputs)
            number += min(own.inputs * own.outputs, factors)
        return 4 * number

    @override
    def session_start(self, s: SessionContext) -> None:
        if s.round >= 0:  # an evaluation begins with what a client deploys
            self.take(s.fed, s.client, s.row.floats)

    def take(self, fed: Fleet, client: int, row: Tensor) -> None:
        """B_k = D / s_k, and no more ranks than r_k, in a row (P,) as the server sends it."""
        for layer, (A, B) in zip(self.layers, self.factors(fed, client, row), strict=True):
            rank = self.rank(fed, client, layer)
            A[rank:], B[:, rank:] = 0, 0
            B.div_(layer[fed.home_group(client)].scale)

    def factors(self, fed: Fleet, client: int, row: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Views (r, in) of A and (out, r) of B, by layer, in a client's row or a gradient (P,)."""
        state, group = fed.state(client), fed.home_group(client)
        floats, trained = state.layout.floats, state.layout.parameters
        tensors = {e.name: floats.view(row, e) for e in floats.entries[:trained]}
        tensors |= state.live.frozen  # FFA-LoRA's A
        return [layer[group].factors(tensors) for layer in self.layers]

    def server_factors(self) -> list[tuple[Tensor, Tensor]]:
        """Views (R, in) of the server's A and (out, R) of its D, by layer."""
        first = [layer[0] for layer in self.layers]
        frozen = zip(first, self.starts, strict=True)  # FFA-LoRA's A
        tensors = {own.a: A.T if own.embedding else A for own, A in frozen}
        tensors |= self.model.layout.floats.views(self.model.floats)
        return [own.factors(tensors) for own in first]

    def merge_adapters(self, fed: Fleet, clients: Sequence[int]) -> None:
        """Merge layer by layer, each on one rank, and measure the error of what is applied."""
        if self.changes_base:
            for i, layer in enumerate(self.layers):
                own = len(self.starts[i]) if self.down else 0  # those of D A in FedEx-LoRA
                self.added[i] += own + sum(self.rank(fed, k, layer) for k in clients)
        every = fed.once(partial(self._job, sent) for sent in self.sent(fed, clients))
        # Not strict: a plan has no results.
        for i, ((merged, _), (A, D)) in enumerate(zip(every, self.server_factors(), strict=False)):
            if merged.A is not None:
                A.copy_(merged.A)
            if merged.D is not None:
                D.copy_(merged.D)
            if merged.base is not None:
                weights = self.base.layout.floats.views(self.base.floats)
                self.layers[i][0].weight(weights).add_(merged.base.to(fed.device))
        errors = torch.tensor([error for _, error in every]).reshape(-1, 2)
        if errors.any():
            wrong, right = errors.T
            each = torch.where(right > 0, wrong / right, torch.zeros(()))
            fed.metrics["aggregation_error"] = float(wrong.norm() / right.norm())
            fed.metrics["aggregation_error_worst"] = float(each.max())

    def _job(self, sent: Sent) -> tuple[Merged, tuple[float, float]]:
        merged = self.merge_layer(sent)
        parts = {name: getattr(merged, name) for name in ("A", "D", "base")}
        host = {name: part.float().cpu() for name, part in parts.items() if part is not None}
        return Merged(None, **host), merged.error(sent.mean)

    @abstractmethod
    def merge_layer(self, sent: Sent) -> Merged:
        """The layer after the round."""

    def sent(self, fed: Fleet, clients: Sequence[int]) -> Iterator[Sent]:
        """What the clients sent, by layer, on every rank."""
        numbers = [fed.data.num_samples(k) if self.weights == "samples" else 1 for k in clients]
        every = fed.collect({k: self._factors(fed, k) for k in fed.mine(clients)})
        for i, (layer, (A, D)) in enumerate(zip(self.layers, self.server_factors(), strict=True)):
            own = [tuple(part.to(A).double() for part in every[k][i]) for k in clients]
            scales = [layer[fed.home_group(k)].scale for k in clients]
            yield Sent(
                p=[number / sum(numbers) for number in numbers],
                A=[A for A, _ in own],
                D=[scale * B for scale, (_, B) in zip(scales, own, strict=True)],
                old_A=A.double(),
                old_D=D.double(),
                start=self.starts[i].double(),
            )

    def _factors(self, fed: Fleet, client: int) -> list[tuple[Tensor, Tensor]]:
        """A_k and B_k of every layer, in host memory."""
        every = self.factors(fed, client, fed.row(client).floats)
        ranks = [self.rank(fed, client, layer) for layer in self.layers]
        each = zip(ranks, every, strict=True)
        return [(A[:r].detach().cpu(), B[:, :r].cpu()) for r, (A, B) in each]

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        """The server's adapters, cut to a client's rank; "global" in the module of the widest."""
        if kind in ("trained", "local"):
            return fed.rows(clients) if kind == "trained" else None
        whose = clients or [self._widest(fed)]
        rows = fed.server_rows(self.model, whose)

        def read(some: Sequence[int]) -> Row:
            each = []
            for client in some if clients else whose:
                each.append(rows.read([client]).clone())
                self.take(fed, client, each[-1].floats[0])
            return Row(torch.cat([r.floats for r in each]), torch.cat([r.integers for r in each]))

        return replace(rows, read=read, clients=clients or range(1), shared=not clients)

    def _widest(self, fed: Fleet) -> int:
        """The first client of the greatest ranks."""
        groups = [sum(own[g].rank for own in self.layers) for g in range(len(fed.groups))]
        return fed.places.home_groups.index(groups.index(max(groups)))


def drawn(own: Adapter, rank: int, generator: torch.Generator) -> Tensor:
    """(rank, in) new values of A, as peft draws them: row by row."""
    rows, bound = torch.empty(rank, own.inputs), own.inputs**-0.5
    for row in rows:
        if own.embedding:
            row.normal_(generator=generator)
        else:
            row.uniform_(-bound, bound, generator=generator)
    return rows


def rounded(values: Tensor) -> Tensor:
    """float64 values as rows hold them."""
    return values.float().double()
