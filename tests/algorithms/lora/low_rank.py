"""Recorded federations of low-rank adapters, and a network that has its own."""

import json
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset
from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule, Merged, Sent
from lightfed.algorithms.lora.adapters import Adapter
from lightfed.algorithms.lora.fedexlora import FedExLoRA
from lightfed.algorithms.lora.fedmomentum import FedMomentum
from lightfed.algorithms.lora.fedrotlora import FedRotLoRA
from lightfed.algorithms.lora.fedsalora import FedSALoRA
from lightfed.algorithms.lora.fedsvd import FedSVD
from lightfed.algorithms.lora.ffalora import FFALoRA
from lightfed.algorithms.lora.flexlora import FlexLoRA
from lightfed.algorithms.lora.flora import FLoRA
from lightfed.algorithms.lora.hetlora import HetLoRA
from lightfed.algorithms.lora.lorafair import LoRAFAIR
from lightfed.algorithms.lora.products import Product
from lightfed.algorithms.lora.rankmean import RankMean
from lightfed.algorithms.lora.rolora import RoLoRA
from lightfed.algorithms.lora.zeropadded import ZeroPadded
from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.torch_data import FromTorch
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import SessionContext
from lightfed.local.local_work import RoundPlan
from tests.small import GOLDEN, Given, fleet_of, run_round

RULES: dict[str, type[AdapterRule]] = {
    "rankmean": RankMean, "zeropad": ZeroPadded, "hetlora": HetLoRA, "flexlora": FlexLoRA,
    "flora": FLoRA, "fedex": FedExLoRA, "ffa": FFALoRA, "fedsa": FedSALoRA,
    "rolora": RoLoRA, "fedsvd": FedSVD, "fedrot": FedRotLoRA, "fedmomentum": FedMomentum,
    "lorafair": LoRAFAIR,
}  # fmt: skip
# Arguments of a rule that a recording names alike.
ARGUMENTS = (
    "period", "strength", "energy", "similarity", "regularization", "steps", "step_size",
)  # fmt: skip
NAMES = {"down": "up"}


class Adapted(nn.Module):
    """A frozen matrix, or kernel, with an adapter of its own: down is A, up is B."""

    def __init__(self, weight: Tensor, rank: int, scaling: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.float().clone(), requires_grad=False)
        one = [1] * (weight.dim() - 2)
        self.down = nn.Parameter(torch.ones(rank, *weight.shape[1:]))
        self.up = nn.Parameter(torch.zeros(len(weight), rank, *one))
        self.scaling = scaling

    @override
    def forward(self, x: Tensor) -> Tensor:
        update = (self.up.flatten(1) @ self.down.flatten(1)).view_as(self.weight)
        weight = self.weight + self.scaling * update
        if weight.dim() == 2:
            return F.linear(x, weight)
        return F.conv2d(x.view(len(x), weight.shape[1], 3, 3), weight).flatten(1)


class Client(L.LightningModule):
    """h <- tanh(W h + s B A h) by layer, a head, and the mean of squares."""

    def __init__(
        self, weights: dict[str, Tensor], head: tuple[Tensor, Tensor], rank: int, alpha: float
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {name: Adapted(weight, rank, alpha / rank) for name, weight in weights.items()}
        )
        self.head = nn.Linear(*head[0].shape[::-1])
        self.head.load_state_dict(dict(zip(("weight", "bias"), head, strict=True)))

    @override
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return self.head(x)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("loss", F.mse_loss(self(x), y))


class Recorded:
    """A recorded federation, as `tests/golden/lora` has it.

    Attributes:
        about: its settings and numbers.
        tensors: the recorded ones.
        started: what clients started with, by round and client: A, B and W by layer.
        trained: what sessions ended with, likewise, before anything is done for the message.
        means: the mean of the products that each layer's merge saw, of all rounds in turn.
        kept: how many components each layer's merge has kept, likewise.
        fleet: the clients.
    """

    def __init__(self, method: str, case: str) -> None:
        place = GOLDEN / "lora" / method / case
        self.about = json.loads(place.with_suffix(".json").read_text())
        self.tensors = load_file(place.with_suffix(".safetensors"))
        self.started: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.trained: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.means: list[Product] = []
        self.kept: list[int] = []
        self.layers = {layer["name"]: layer for layer in self.about["layers"]}
        weights = {
            name: self.tensors[f"init/{name}/W"].view(layer.get("conv_weight", (-1, layer["in"])))
            for name, layer in self.layers.items()
        }
        head = (self.tensors["init/head/weight"], self.tensors["init/head/bias"])
        groups = [
            ClientGroup(1, partial(Client, weights, head, own["rank"], own["alpha"]), name=f"c{k}")
            for k, own in enumerate(self.about["clients"])
        ]
        self.rule = self._rule(method)
        work = self.about.get("sgd", {"lr": 0.0, "steps": 1})
        self.fleet = fleet_of(
            groups, self.rule, self._data(), optimizer=partial(SGD, lr=work["lr"]),
            steps=work["steps"],
        )  # fmt: skip

    def _data(self) -> FederatedDataModule:
        sizes = [own["n"] for own in self.about["clients"]]
        inputs = next(iter(self.layers.values()))["in"]
        x, y = torch.zeros(sum(sizes), inputs), torch.zeros(sum(sizes), self.about["outputs"])
        if "sgd" in self.about:
            x, y = (
                torch.cat([self.tensors[f"data/{k}/{name}"].float() for k in range(len(sizes))])
                for name in "xy"
            )
        ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
        parts = [range(a, b) for a, b in pairwise(ends)]
        splits = TensorDataset(x, y), TensorDataset(x[:1] + 1, y[:1])
        return FederatedDataModule(FromTorch(*splits), Given(*parts), batch_size=1000)

    def _rule(self, method: str) -> AdapterRule:
        recorded, about = self, self.about
        given: dict[str, Any] = {"weights": about["weights"], "adapters": NAMES}
        if method == "flexlora":
            given["server_rank"] = about["server_rank"]
        if method == "fedsa":
            given["head"] = about["head"]
        given |= {name: about[name] for name in ARGUMENTS if name in about}
        if "prune" in about:
            given |= {"gamma": about["prune"]["gamma"], "decay": about["prune"]["lambda"]}
        real = "sgd" in about

        class Replayed(RULES[method]):  # type: ignore[misc]
            @override
            def initial(self, own: Adapter, rank: int) -> Tensor:
                return recorded.tensors[f"init/{own.layer.split('.')[-1]}/A"][:rank].float()

            def fresh(self, s: SessionContext, own: Adapter) -> Tensor:
                layer = own.layer.split(".")[-1]
                return recorded.tensors[f"r{s.round}/fresh/{s.client}/{layer}/A"].float()

            @override
            def before_sending(self, fed: Fleet, clients: Sequence[int], t: int) -> None:
                for client in clients:
                    row = fed.row(client).floats
                    recorded.trained[t, client] = recorded.named(client, row)
                super().before_sending(fed, clients, t)

            @override
            def merge_layer(self, sent: Sent) -> Merged:
                recorded.means.append(sent.mean)
                return super().merge_layer(sent)

            @override
            def layer_kept(self, layer: int, components: int) -> None:
                recorded.kept.append(components)
                super().layer_kept(layer, components)

            @override
            def session_start(self, s: SessionContext) -> None:
                super().session_start(s)
                recorded.started[s.round, s.client] = recorded.named(s.client, s.row.floats)
                if not real:
                    for name, own in recorded.named(s.client, s.row.floats, copy=False).items():
                        value = recorded.tensors.get(f"r{s.round}/local/{s.client}/{name}")
                        if value is not None:
                            own[tuple(slice(size) for size in value.shape)] = value.float()

        return Replayed(**given)

    def named(self, client: int, row: Tensor, *, copy: bool = True) -> dict[str, Tensor]:
        """A client's tensors by their recorded names; A, B and W as matrices."""
        state = self.fleet.state(client)
        tensors = state.layout.floats.views(row) | state.live.frozen
        found = {f"head/{name}": tensors[f"head.{name}"] for name in ("weight", "bias")}
        for layer in self.layers:
            for name, own in (("A", "down"), ("B", "up"), ("W", "weight")):
                found[f"{layer}/{name}"] = tensors[f"layers.{layer}.{own}"].flatten(1)
        return {name: part.detach().clone() if copy else part for name, part in found.items()}

    def run(self, t: int) -> dict[str, float]:
        """One recorded round; its metrics."""
        active = self.about["rounds"][t]["active"]
        self.fleet.participants = lambda t: sorted(active)  # type: ignore[method-assign]
        self.fleet.plan = RoundPlan(lr=self.about.get("sgd", {"lr": 0.0})["lr"])
        return run_round(self.fleet, t)
