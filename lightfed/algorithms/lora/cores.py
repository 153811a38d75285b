"""Adapters of three tensors: two factors that are frozen and common, and a trained core between.

The update of client k to a layer's weight is s_k B K_k A, with the first r_k columns of B and rows
of A. B has orthonormal columns and A orthonormal rows. All draw them from the same seeds, so they
are never sent. The core K_k (r_k, r_k) is made of the tensors that are trained, and starts at 0.

A is replaced by K A with `torch.nn.utils.parametrize`. So the rules take any module with factors A
and B, such as peft's, which does not notice.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule, Factors, Merged, Sent, rounded
from lightfed.algorithms.lora.adapters import Adapter, adapters_of
from lightfed.algorithms.lora.products import Product
from lightfed.api.fleet import Fleet
from lightfed.models.build import DataSpec
from lightfed.utils.errors import UserError
from lightfed.utils.rng import torch_generator


class Core(nn.Module):
    """The trained tensors of one layer. It is put before A, which then reads as K A.

    Attributes:
        adapter: The adapter as it was before. Its factors are frozen now.
        a: The name that the frozen A has now.
        main: Name of the parameter whose columns are the ranks, (·, r).
    """

    main: str

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self.adapter = adapter
        self.a = original(adapter.a)

    @override
    def forward(self, A: Tensor) -> Tensor:
        """Return K A in the form in which the layer stores A."""
        if self.adapter.embedding:
            return self.times(A.T).T
        return self.times(A.flatten(1)).view_as(A)

    @abstractmethod
    def times(self, A: Tensor) -> Tensor:
        """Return K A, (r, in)."""

    @abstractmethod
    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters by name, at another rank."""


@dataclass(frozen=True)
class CoreAdapter(Adapter):
    """An adapter whose core is trained.

    Attributes:
        path: Name of the core in the module.
        core: The core.
    """

    path: str
    core: Core

    @property
    @override
    def names(self) -> set[str]:
        trained = {f"{self.path}.{name}" for name, _ in self.core.named_parameters()}
        return super().names | trained

    @override
    def factors(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return views (r, in) of A and (·, r) of the core, from tensors by name."""
        A = tensors[self.a]
        A = A.T if self.embedding else A.flatten(1)
        return A, tensors[f"{self.path}.{self.core.main}"]

    @override
    def shapes(self, tensors: Mapping[str, Tensor], rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the core's tensors by name, but with another rank."""
        return {f"{self.path}.{name}": shape for name, shape in self.core.shapes(rank).items()}


class CoreRule(AdapterRule):
    """A rule whose clients train and send cores.

    In the coordinates of the common B, client k's update is the padded core s_k K_k (R, r_k) times
    A_k. This is what `Sent` has as D, so that sums and errors are those of updates: B has
    orthonormal columns and changes no norm.
    """

    holds = "the server's cores, cut to its rank"

    @override
    def prepare_module(self, module: L.LightningModule, data: DataSpec) -> None:
        adapters = adapters_of(module, self.names)
        for adapter in adapters:
            self.check_rank(adapter)

        super().prepare_module(module, data)
        for adapter in adapters:
            A = module.get_parameter(adapter.a).requires_grad_(False)
            B = module.get_parameter(adapter.b).requires_grad_(False)
            _, columns = adapter.factors({adapter.a: A, adapter.b: B})
            columns.copy_(self.initial_b(adapter, adapter.rank))

            owner, _, name = adapter.a.rpartition(".")
            register_parametrization(module.get_submodule(owner), name, self.new_core(adapter))

    def check_rank(self, adapter: Adapter) -> None:
        """Refuse a rank for which there are no factors.

        Raises:
            UserError: It is above the size of the layer.
        """
        greatest = min(adapter.inputs, adapter.outputs)
        if adapter.rank > greatest:
            raise UserError(
                "model.clients",
                f"rank {adapter.rank} in {adapter.layer}, of {adapter.inputs} inputs and "
                f"{adapter.outputs} outputs",
                f"give at most {greatest}: {type(self).__name__} needs orthonormal factors",
            )

    @override
    def initial(self, own: Adapter, rank: int) -> Tensor:
        """Return a layer's A, (rank, in) with orthonormal rows."""
        generator = torch_generator(self._draws, f"adapters/{own.layer}")
        return orthonormal(rank, own.inputs, generator)

    def initial_b(self, own: Adapter, rank: int) -> Tensor:
        """Return a layer's B, (out, rank) with orthonormal columns."""
        generator = torch_generator(self._draws, f"adapters/{own.layer}/B")
        return orthonormal(rank, own.outputs, generator).T

    @abstractmethod
    def new_core(self, adapter: Adapter) -> Core:
        """Return the core of a layer in one client's module; its update is 0."""

    @override
    def adapters_in(self, module: nn.Module) -> list[Adapter]:
        adapters: list[Adapter] = []
        for path, core in module.named_modules():
            if isinstance(core, Core):
                fields: dict[str, Any] = {**vars(core.adapter), "a": core.a}
                adapters.append(CoreAdapter(**fields, path=path, core=core))
        return adapters

    @override
    def sizes(
        self,
        fed: Fleet,
        clients: Sequence[int],
        factors: Factors,
        *,
        most: Tensor | None = None,
    ) -> Tensor:
        """Return the bytes of a message of each client, (K,): its cores, and the other tensors."""
        sizes = super().sizes(fed, clients, "")
        for position, client in enumerate(clients):
            for adapter in self.adapters[fed.home_group(client)]:
                assert isinstance(adapter, CoreAdapter)
                sizes[position] += 4 * adapter.core.get_parameter(adapter.core.main).numel()
        return sizes

    @override
    def _factors_on_host(self, fed: Fleet, client: int) -> list[tuple[Tensor, Tensor]]:
        """Return A_k (r_k, in) and the padded core K_k (R, r_k) of every layer, in host memory."""
        row = self.sent_row(fed, client)
        factors = self.factors(fed, client, row)
        on_host = []
        for (A, _), K, start in zip(
            factors, self.cores(fed, client, row), self.starts, strict=True
        ):
            padded = torch.zeros(len(start), len(A))
            padded[: len(A)] = K.detach().cpu()
            on_host.append((A.detach().cpu(), padded))
        return on_host

    def cores(self, fed: Fleet, client: int, row: Tensor) -> list[Tensor]:
        """Return K_k (r_k, r_k) of every layer, from a row (P,)."""
        return [K for _, K in self.factors(fed, client, row)]

    def mean_core(self, sent: Sent) -> Tensor:
        """Return sum_k p_k s_k pad(K_k), (R, R)."""
        R = len(sent.start)
        mean = sent.start.new_zeros(R, R)
        for p_k, D_k in zip(sent.p, sent.D, strict=True):
            mean[:, : D_k.shape[1]] += p_k * D_k
        return rounded(mean)

    def merged(self, sent: Sent, mean: Tensor, main: Tensor) -> Merged:
        """Return a layer after the round.

        Args:
            sent: What the clients sent.
            mean: The merged core, (R, R).
            main: What the server holds of it, (·, R).
        """
        return Merged(applied=Product(mean[:, : sent.top], sent.old_A[: sent.top]), D=main)


def original(name: str) -> str:
    """Return the name that a parameter gets when `parametrize` puts something before it."""
    owner, _, own = name.rpartition(".")
    return f"{owner}.parametrizations.{own}.original".lstrip(".")


def orthonormal(rank: int, size: int, generator: torch.Generator) -> Tensor:
    """Return orthonormal rows, (rank, size), by the Gram-Schmidt process on normal draws.

    A lower rank has the first rows of a greater one, bit for bit.
    """
    rows = torch.zeros(rank, size, dtype=torch.float64)
    for index in range(rank):
        row = torch.randn(size, dtype=torch.float64, generator=generator)
        # Twice: what rounding leaves of the earlier rows after the first time is gone then.
        for _ in range(2):
            row -= (rows[:index] @ row) @ rows[:index]
        rows[index] = row / row.norm()
    return rows.float()
