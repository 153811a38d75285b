"""What the rules of federated low-rank adapters have in common: all but the merge of a layer.

The update of client k to a layer's weight W is s_k B_k A_k, with a scale s_k and a rank r_k of its
own. Papers assume one scale. Here a client sends A_k and s_k B_k, the factors of what it applies.
The server holds A and D = s B of the greatest rank R. Client k starts from A[:r_k] and
B_k = D[:, :r_k] / s_k. All start from one A, drawn row by row, and B = 0. Other trained tensors,
such as a head, are averaged as in FedAvg. Integer buffers keep their initial values.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import lightning.pytorch as L
import torch
from lightfed_kernels import Layout
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.lora.adapters import PEFT, Adapter, adapters_of
from lightfed.algorithms.lora.merge_check import MergeCheck
from lightfed.algorithms.lora.products import Product
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
        return max(map(len, self.A))

    @cached_property
    def mean(self) -> Product:
        """M = sum_k p_k s_k B_k A_k, the mean of the clients' updates."""
        return Product.sum(self.p, self.D, self.A)

    def averaged(self, weights: Sequence[float], *, by_rank: bool = False) -> tuple[Tensor, Tensor]:
        """A (R, in) and D (out, R): sums of the clients' padded factors.

        With `by_rank` a rank is divided by the weights of the clients that have it. A rank of no
        client with a weight keeps its values: otherwise both of its factors, and so their
        gradients, would be 0 for good.
        """
        A, D = torch.zeros_like(self.old_A), torch.zeros_like(self.old_D)
        owned = torch.zeros_like(A[:, 0])
        for weight, own_A, own_D in zip(weights, self.A, self.D, strict=True):
            owned[: len(own_A)] += weight
            A[: len(own_A)] += weight * own_A
            D[:, : len(own_A)] += weight * own_D
        over, present = owned if by_rank else torch.ones_like(owned), owned > 0
        A = torch.where(present[:, None], A / over[:, None], self.old_A)
        return rounded(A), rounded(torch.where(present, D / over, self.old_D))


@dataclass(frozen=True)
class Merged:
    """A layer after a merge.

    Attributes:
        applied: what the server's adapter applies, besides `base`.
        A, D: of the server; None if they do not change.
        base: (out, in) added to the weight W of all clients; None for nothing.
    """

    applied: Product
    A: Tensor | None = None
    D: Tensor | None = None
    base: Tensor | None = None

    def error(self, mean: Product) -> tuple[float, float]:
        """||applied - M|| and ||M||, of what is added, in the precision of rows."""
        wrong = self.applied - mean
        if self.base is None:
            return wrong.norm(), mean.norm()
        return float((wrong.dense + rounded(self.base)).norm()), mean.norm()


class AdapterRule(Algorithm):
    """A rule: `merge_layer`, and which factors are sent.

    Attributes:
        up: the factors that clients send.
        down: those that the server sends.
        shared: names of the tensors that the server writes into rows; None for all.
        changes_base: the rule adds to the weights W of all clients.
        model: A and D, and all other trained tensors.
        base: the weights W, if the rule changes them.
    """

    side_by_side = True
    holds = "the server's adapters, cut to its rank"
    up = down = "AB"
    shared: Collection[str] | None = None
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
        each = [{a.layer: a for a in adapters_of(s.module, self.names)} for s in fed.groups]
        for state, theirs in zip(fed.groups, each, strict=True):
            unlike = ", ".join(sorted(each[0].keys() ^ theirs.keys())[:2])
            found = f"groups {fed.groups[0].name} and {state.name} differ in adapters of {unlike}"
            fix = "adapt the same layers; groups may differ in rank"
            require(not unlike, "model.clients", found, fix)
        self.adapters = [[theirs[layer] for layer in each[0]] for theirs in each]
        self.starts = [
            self.initial(own, rank).to(fed.device)
            for own, rank in zip(self.adapters[0], self.server_ranks(), strict=True)
        ]
        factors = {name for own in self.adapters[0] for name in (own.a, own.b)}
        layout = fed.groups[0].layout.floats
        mixed = factors & fed.personal - self.personal(fed.groups[0].module)
        fix = "leave them out, or choose FedSALoRA, whose clients keep B"
        require(not mixed, "model.personal", f"factors of adapters, {min(mixed, default='')}", fix)
        self.others = frozenset(e.name for e in layout if e.name not in factors | fed.personal)
        for i, own in enumerate(self.adapters[0]):
            bias = own.b.removesuffix("weight") + "bias"
            fits = bias not in self.others or len({group[i].scale for group in self.adapters}) == 1
            found, fix = f"{bias} of groups with unlike alpha / rank", "leave out lora_bias"
            require(fits, "model.clients", found, fix)
        self.model = self._server_model(fed)
        for group in range(len(fed.groups)):
            fed.check_nested(self.model, group)
        if self.changes_base:
            for state, own_adapters in zip(fed.groups, self.adapters, strict=True):
                MergeCheck(state, own_adapters, fed.data).run(type(self).__name__)
            # Clients' models have views of this row: a change is theirs at once, and no message.
            names = [state.name for state in fed.groups]
            self.base = fed.base.server_model(names, [own.base for own in self.adapters[0]])
            self.register_buffer("added", torch.zeros(len(self.starts), dtype=torch.int64))
            self.register_buffer("seen", self.added.repeat(fed.clients, 1))

    def server_ranks(self) -> list[int]:
        """The server's rank R of every layer: the greatest of a group."""
        return [max(own.rank for own in layer) for layer in zip(*self.adapters, strict=True)]

    def _server_model(self, fed: Fleet) -> ServerModel:
        """The first group's initial values, but of R ranks: the common A, and D = 0."""
        state = fed.groups[0]
        shapes: dict[str, tuple[int, ...]] = {}
        for own, start in zip(self.adapters[0], self.starts, strict=True):
            shapes |= own.shapes(dict(state.module.named_parameters()), len(start))
        floats = Layout.build((e.name, shapes.get(e.name, e.shape)) for e in state.layout.floats)
        row = Row(floats.new_row(device=fed.device), state.initial.integers.to(fed.device))
        values, places = state.layout.floats.views(state.initial.floats), floats.views(row.floats)
        for name in self.others:
            places[name].copy_(values[name])
        for own, start in zip(self.adapters[0], self.starts, strict=True):
            if own.a in places:  # not FFA-LoRA's
                own.factors(places)[0].copy_(start)
        return ServerModel(replace(state.layout, floats=floats), row)

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)  # S
        sizes = self.sizes(fed, clients, self.down)
        if self.changes_base:
            sizes += self._missed(clients)
            self.seen[clients] = self.added
        fed.send(self.model, clients, tensors=self.shared, size=sizes.tolist())
        fed.train(clients, t)
        self.before_sending(fed, clients)
        fed.metrics |= dict.fromkeys(("aggregation_error", "aggregation_error_worst"), 0.0)
        fed.charge(clients, up=self.sizes(fed, clients, self.up).tolist())
        if valid := [k for k in clients if fed.usable(k)]:
            with fed.server_step(self.model):
                self.merge(fed, valid)

    def before_sending(self, fed: Fleet, clients: Sequence[int]) -> None:
        """What clients do between their sessions and their messages."""

    def ranks(self, fed: Fleet, client: int) -> list[int]:
        """r_k by layer."""
        return [own.rank for own in self.adapters[fed.home_group(client)]]

    def sizes(self, fed: Fleet, clients: Sequence[int], factors: str) -> Tensor:
        """(K,) bytes of some factors of each client, and of the other tensors."""
        widths = [
            own.inputs * ("A" in factors) + own.outputs * ("B" in factors)
            for own in self.adapters[0]
        ]
        ranks = torch.tensor([self.ranks(fed, k) for k in clients])
        others = torch.tensor([s.layout.floats.only(self.others).numel for s in fed.groups])
        whose = [fed.home_group(k) for k in clients]
        return 4 * (ranks @ torch.tensor(widths) + others[whose])

    def _missed(self, clients: Sequence[int]) -> Tensor:
        """(K,) bytes of what was added to W since each was served: factors, or dense if smaller."""
        shapes = torch.tensor([(own.inputs, own.outputs) for own in self.adapters[0]])
        factors = (self.added - self.seen[clients]).cpu() * shapes.sum(1)
        return 4 * torch.minimum(factors, shapes.prod(1)).sum(1)

    @override
    def session_start(self, s: SessionContext) -> None:
        if s.round >= 0:  # an evaluation begins with what a client deploys
            self.take(s.fed, s.client, s.row.floats)

    def take(self, fed: Fleet, client: int, row: Tensor) -> None:
        """B_k = D / s_k, and no more ranks than r_k, in a row (P,) as the server sends it."""
        adapters, ranks = self.adapters[fed.home_group(client)], self.ranks(fed, client)
        every = self.factors(fed, client, row)
        for own, rank, (A, B) in zip(adapters, ranks, every, strict=True):
            A[rank:], B[:, rank:] = 0, 0
            B.div_(own.scale)

    def factors(self, fed: Fleet, client: int, row: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Views (r, in) of A and (out, r) of B, by layer, in a client's row or a gradient (P,)."""
        state = fed.state(client)
        floats, trained = state.layout.floats, state.layout.parameters
        tensors = {e.name: floats.view(row, e) for e in floats.entries[:trained]}
        tensors |= state.live.frozen  # FFA-LoRA's A
        return [own.factors(tensors) for own in self.adapters[fed.home_group(client)]]

    def server_factors(self) -> list[tuple[Tensor, Tensor]]:
        """Views (R, in) of the server's A and (out, R) of its D, by layer."""
        frozen = zip(self.adapters[0], self.starts, strict=True)  # FFA-LoRA's A
        tensors = {own.a: A.T if own.embedding else A for own, A in frozen}
        tensors |= self.model.layout.floats.views(self.model.floats)
        return [own.factors(tensors) for own in self.adapters[0]]

    def merge(self, fed: Fleet, clients: Sequence[int]) -> None:
        """The mean of all other tensors, and layer by layer the rule's merge, each on one rank."""
        if self.others:
            free = dict.fromkeys(clients, 0)  # their bytes are charged with the adapters'
            fed.merge(
                clients, into=self.model, weights=self.weights, tensors=self.others, sizes=free
            )
        if self.changes_base:
            mean = [len(start) if self.down else 0 for start in self.starts]  # D A of FedEx-LoRA
            self.added += torch.tensor([mean, *(self.ranks(fed, k) for k in clients)]).sum(0)
        norms = []
        jobs = (partial(self._job, sent) for sent in self._sent(fed, clients))
        places = zip(self.adapters[0], self.server_factors(), strict=True)
        # Not strict: a plan has no results.
        for (own, factors), ((*merged, base), error) in zip(places, fed.once(jobs), strict=False):
            for place, value in zip(factors, merged, strict=True):
                if value is not None:
                    place.copy_(value)
            if base is not None:
                weights = self.base.layout.floats.views(self.base.floats)
                own.weight(weights).add_(base.to(fed.device))
            norms.append(error)
        wrong, right = torch.tensor(norms).reshape(-1, 2).T
        if right.any():
            each = torch.where(right > 0, wrong / right, torch.zeros(()))
            fed.report("aggregation_error", float(wrong.norm() / right.norm()))
            fed.report("aggregation_error_worst", float(each.max()))

    def _job(self, sent: Sent) -> tuple[list[Tensor | None], tuple[float, float]]:
        """A, D and what is added to the base, in host memory, and the error."""
        merged = self.merge_layer(sent)
        parts = (merged.A, merged.D, merged.base)
        host = [None if part is None else part.float().cpu() for part in parts]
        return host, merged.error(sent.mean)

    @abstractmethod
    def merge_layer(self, sent: Sent) -> Merged:
        """The layer after the round."""

    def _sent(self, fed: Fleet, clients: Sequence[int]) -> Iterator[Sent]:
        """What the clients sent, by layer, on every rank."""
        numbers = [fed.data.num_samples(k) if self.weights == "samples" else 1 for k in clients]
        every = fed.collect({k: self._factors(fed, k) for k in fed.mine(clients)})
        for i, (A, D) in enumerate(self.server_factors()):
            scales = [self.adapters[fed.home_group(k)][i].scale for k in clients]
            yield Sent(
                p=[number / sum(numbers) for number in numbers],
                A=[every[k][i][0].to(A).double() for k in clients],
                D=[s * every[k][i][1].to(D).double() for k, s in zip(clients, scales, strict=True)],
                old_A=A.double(),
                old_D=D.double(),
                start=self.starts[i].double(),
            )

    def _factors(self, fed: Fleet, client: int) -> list[tuple[Tensor, Tensor]]:
        """A_k and B_k of every layer, in host memory."""
        every, ranks = self.factors(fed, client, fed.row(client).floats), self.ranks(fed, client)
        each = zip(every, ranks, strict=True)
        return [(A[:rank].detach().cpu(), B[:, :rank].cpu()) for (A, B), rank in each]

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        """The server's adapters, cut to a client's rank; "global" in the module of the widest."""
        if kind in ("trained", "local"):
            return fed.rows(clients) if kind == "trained" else None
        ranks = [sum(own.rank for own in group) for group in self.adapters]
        whose = clients or [fed.places.home_groups.index(ranks.index(max(ranks)))]
        rows = fed.server_rows(self.model, whose)
        if rows is None or (fed.personal and not clients):
            return None

        def read(some: Sequence[int]) -> Row:
            own = some if clients else whose
            each = [rows.read([client]).clone() for client in own]
            for client, row in zip(own, each, strict=True):
                self.take(fed, client, row.floats[0])
            return Row(torch.cat([r.floats for r in each]), torch.cat([r.integers for r in each]))

        return replace(rows, read=read, clients=clients or range(1), shared=not clients)


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
