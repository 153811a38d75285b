"""FedDPA (FedDPA-T): beside the adapter that is merged, every client has one of its own.

Yang, Long, Shen, Jiang, Blumenstein: Dual-Personalizing Adapter for Federated Foundation Models.
NeurIPS 2024. https://arxiv.org/abs/2403.19211

    (A', B') <- SGD on  W x + (1 - w) s B A x + w s B' A' x,  with A, B and the head as received
    (A, B)   <- SGD on  W x + s B A x,  with the head
    A, D     <- means of the clients' factors;  A' and B' stay with their client

A session of round 0 has the second part only. Both parts are as long as configured, and train on
the same batches; the reported loss is that of the second. A client deploys the mixture of the first
line, with the server's A and D. A' starts as the common A and B' at 0; their rank is that of A, B.

Deviations: clients are weighted by samples; the released code has uniform weights. Unlike ranks are
averaged by rank. w is the same for all samples: weights by the likeness of a sample to those of
training are not implemented.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from typing_extensions import override

from lightfed.aggregation.coverage import Parts
from lightfed.algorithms.lora.adapters import Adapter, adapters_of
from lightfed.algorithms.lora.cores import original
from lightfed.algorithms.lora.rankmean import RankMean
from lightfed.api.fleet import Fleet
from lightfed.local.hooks import SessionContext
from lightfed.models.build import DataSpec
from lightfed.state.rows import ModelKind, Moment, Row, Rows
from lightfed.state.server_model import ServerModel
from lightfed.utils.bounds import Part


class OwnA(nn.Module):
    """Is put before A, which then reads as A above A'.

    Attributes:
        own: A', in the form of A.
    """

    packs = True

    def __init__(self, A: Tensor, ranks_at: int) -> None:
        super().__init__()
        self.own = nn.Parameter(A.detach().clone())
        self._ranks_at = ranks_at

    @override
    def forward(self, A: Tensor) -> Tensor:
        return torch.cat([A, self.own], self._ranks_at)


class OwnB(nn.Module):
    """Is put before B, which then reads as (1 - w) B beside w B'.

    Attributes:
        own: B', in the form of B.
        mixture: (2,) the weights of B and B'. It is (1, 0) while B trains.
        adapter: The adapter that has both.
    """

    mixture: Tensor
    packs = True

    def __init__(
        self, B: Tensor, ranks_at: int, adapter: "TwoAdapters", local_weight: float
    ) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros_like(B.detach()))
        self.register_buffer("mixture", torch.tensor([1 - local_weight, local_weight]))
        self.adapter = adapter
        self._ranks_at = ranks_at

    @override
    def forward(self, B: Tensor) -> Tensor:
        return torch.cat([self.mixture[0] * B, self.mixture[1] * self.own], self._ranks_at)


@dataclass(frozen=True)
class TwoAdapters(Adapter):
    """An adapter with a second, personal one beside it.

    Attributes:
        before: The adapter before the second one was added.
        own_a: Name of A'.
        own_b: Name of B'.
        mixture: Name of the weights of the two.
    """

    before: Adapter
    own_a: str
    own_b: str
    mixture: str

    @classmethod
    def beside(cls, adapter: Adapter) -> "TwoAdapters":
        """Return an adapter with a second one, by the names that it is going to have."""
        a = original(adapter.a)
        b = original(adapter.b)
        fields: dict[str, Any] = {**vars(adapter), "a": a, "b": b}
        before_a = a.removesuffix("original") + "0"
        before_b = b.removesuffix("original") + "0"
        return cls(
            **fields,
            before=adapter,
            own_a=f"{before_a}.own",
            own_b=f"{before_b}.own",
            mixture=f"{before_b}.mixture",
        )

    @property
    @override
    def bias(self) -> str:
        return self.before.bias

    @override
    def shapes(self, tensors: Mapping[str, Tensor], rank: int) -> dict[str, tuple[int, ...]]:
        shapes = super().shapes(tensors, rank)
        return shapes | {self.own_a: shapes[self.a], self.own_b: shapes[self.b]}


class FedDPA(RankMean):
    """The mean by rank of (A, B); an adapter (A', B') of each client's own, which is never sent."""

    takes_late = True
    side_by_side = True
    moments: tuple[Moment, ...] = ("aggregated", "trained")
    no_kept_optimizer = "clients train two adapters"
    no_memory = "clients train two adapters, and both would enter one memory"
    holds = "the server's adapters and its own, mixed"
    deployed_with = (
        "the factors of both adapters stand side by side: build the network with twice the rank "
        "and the same alpha / rank"
    )

    def __init__(self, local_weight: Part = 0.5, **rule: Any) -> None:
        """Set the mixture.

        Args:
            local_weight: w, the weight of a client's own adapter, from 0 to 1.
            **rule: `weights` and `adapters`, as for `RankMean`.
        """
        super().__init__(**rule)
        self.local_weight = local_weight
        self._part: Literal["own", "common"] = "common"  # which adapter trains

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        super().prepare_module(module, data)
        for adapter in adapters_of(module, self.names):
            A = module.get_parameter(adapter.a)
            B = module.get_parameter(adapter.b)
            ranks_of_A, ranks_of_B = (1, 0) if adapter.embedding else (0, 1)
            own_b = OwnB(B, ranks_of_B, TwoAdapters.beside(adapter), self.local_weight)

            # Not checked by torch: the layer's factors have twice the ranks now.
            for name, own in ((adapter.a, OwnA(A, ranks_of_A)), (adapter.b, own_b)):
                owner, _, tensor = name.rpartition(".")
                layer = module.get_submodule(owner)
                register_parametrization(layer, tensor, own, unsafe=True)

    @override
    def adapters_in(self, module: nn.Module) -> list[Adapter]:
        return [part.adapter for part in module.modules() if isinstance(part, OwnB)]

    @override
    def personal(self, module: L.LightningModule) -> set[str]:
        names = set()
        for adapter in self.adapters_in(module):
            assert isinstance(adapter, TwoAdapters)
            names |= {adapter.own_a, adapter.own_b, adapter.mixture}
        return names

    @override
    def sessions(self, fed: Fleet, clients: Sequence[int], t: int) -> None:
        own = self.personal(fed.groups[0].module)
        common = set()
        for name, parameter in fed.groups[0].module.named_parameters():
            if parameter.requires_grad and name not in own:
                common.add(name)

        if t > 0:
            self._part = "own"  # (A', B')
            fed.train(clients, t, phases=[self.phase_without(fed, common)])
        self._part = "common"  # (A, B) and the head
        fed.train(clients, t, phases=[self.phase_without(fed, own)])

    @override
    def session_start(self, s: SessionContext) -> None:
        if s.round < 0:
            return  # an evaluation begins with what a client deploys

        # The second part of a session goes on with what the first one has received.
        if self._part == "own" or s.round == 0:
            self.take(s.fed, s.client, s.row.floats)
        if self._part == "common":
            self._mix(s.fed, s.client, s.row.floats, own=0.0)

    @override
    def session_end(self, s: SessionContext) -> None:
        self._mix(s.fed, s.client, s.row.floats, own=self.local_weight)

    @override
    def take(self, fed: Fleet, client: int, row: Tensor) -> None:
        """Set B_k = D / s_k, and the mixture of both adapters."""
        super().take(fed, client, row)
        self._mix(fed, client, row, own=self.local_weight)

    def _mix(self, fed: Fleet, client: int, row: Tensor, *, own: float) -> None:
        """Set the weights of both adapters in a client's row (P,), from that of its own one."""
        tensors = fed.state(client).layout.floats.views(row)
        for adapter in self.adapters[fed.home_group(client)]:
            assert isinstance(adapter, TwoAdapters)
            mixture = tensors[adapter.mixture]
            mixture[0].fill_(1 - own)
            mixture[1].fill_(own)

    @override
    def models(self, fed: Fleet, kind: ModelKind, clients: Sequence[int]) -> Rows | None:
        """Return the mixtures of clients; "global" is the server's adapters alone."""
        if kind != "global":
            return super().models(fed, kind, clients)
        if fed.personal - self.personal(fed.groups[0].module):
            return None  # a head, for example, that the user has made personal
        return self._without_own(fed)

    @override
    def model_to_write(self, fed: Fleet, model: ServerModel) -> Rows | None:
        return self._without_own(fed) if model is self.model else None

    def _without_own(self, fed: Fleet) -> Rows:
        """Return the server's adapters alone, in the module with the greatest ranks."""
        widest = self.widest_group()
        state = fed.groups[widest]
        reader = fed.places.home_groups.index(widest)

        def read(_: Sequence[int]) -> Row:
            row = state.initial.clone().to(fed.device)
            fed.coverages.take(self.model, widest, Parts(True, None, fed.personal), row)
            self.take(fed, reader, row.floats)
            self._mix(fed, reader, row.floats, own=0.0)
            return row.repeated(1)

        return Rows(state.live, range(1), read, shared=True)
