"""Recorded federations whose clients have cores, or a second adapter."""

import json
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import TensorDataset
from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule
from lightfed.algorithms.lora.adapters import Adapter
from lightfed.algorithms.lora.feddpa import FedDPA
from lightfed.algorithms.lora.fedsb import FedSB
from lightfed.algorithms.lora.ravan import RAVAN
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.torch_data import FromTorch
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import SessionContext
from lightfed.local.local_work import RoundPlan
from tests.algorithms.lora.low_rank import NAMES, Client
from tests.small import GOLDEN, Given, fleet_of, run_round

RULES: dict[str, type[AdapterRule]] = {"feddpa": FedDPA, "fedsb": FedSB, "ravan": RAVAN}

# By rule, where a layer has the tensors that are recorded.
DOWN, UP = "parametrizations.down", "parametrizations.up"
TENSORS = {
    "feddpa": {
        "A": f"{DOWN}.original", "B": f"{UP}.original", "PA": f"{DOWN}.0.own", "PB": f"{UP}.0.own",
    },
    "fedsb": {"A": f"{DOWN}.original", "B": "up", "C": f"{DOWN}.0.C"},
    "ravan": {
        "A": f"{DOWN}.original", "B": "up", "H": f"{DOWN}.0.H", "sigma": f"{DOWN}.0.sigma",
    },
}  # fmt: skip


class Recorded:
    """A recorded federation, as `tests/golden/lora_cores` has it.

    Attributes:
        about: Its settings and numbers.
        tensors: The recorded tensors.
        started: What clients started a part of a session with, by round, client and the number of
            the part: tensors by their recorded names.
        fleet: The clients.
        rule: The rule.
    """

    def __init__(self, method: str, case: str) -> None:
        place = GOLDEN / "lora_cores" / method / case
        self.about = json.loads(place.with_suffix(".json").read_text())
        self.tensors = load_file(place.with_suffix(".safetensors"))
        self.started: dict[tuple[int, int, int], dict[str, Tensor]] = {}
        self.method = method
        self.layers = {layer["name"]: layer for layer in self.about["layers"]}
        self.scales = [own["alpha"] / own["rank"] for own in self.about["clients"]]
        self.sgd = self.about.get("sgd", {"lr": 0.0, "steps": 1})

        weights = {}
        for name, layer in self.layers.items():
            shape = layer.get("conv_weight", (-1, layer["in"]))
            weights[name] = self.tensors[f"init/{name}/W"].view(shape)
        head = (self.tensors["init/head/weight"], self.tensors["init/head/bias"])
        groups = []
        for number, own in enumerate(self.about["clients"]):
            model = partial(Client, weights, head, own["rank"], own["alpha"])
            groups.append(ClientGroup(1, model, name=f"c{number}"))

        self.rule = self._rule()
        self.fleet = fleet_of(
            groups,
            self.rule,
            self._data(),
            optimizer=partial(SGD, lr=self.sgd["lr"]),
            steps=self.sgd["steps"],
        )
        for layer in self.layers:
            first_core = self.tensors.get(f"init/{layer}/C")
            if first_core is not None:
                self.server(layer)["C"].copy_(first_core)

    def _data(self) -> FederatedDataModule:
        sizes = [own["n"] for own in self.about["clients"]]
        if "sgd" in self.about:
            clients = range(len(sizes))
            x = torch.cat([self.tensors[f"data/{client}/x"].float() for client in clients])
            y = torch.cat([self.tensors[f"data/{client}/y"].float() for client in clients])
        else:
            inputs = next(iter(self.layers.values()))["in"]
            x = torch.zeros(sum(sizes), inputs)
            y = torch.zeros(sum(sizes), self.about["outputs"])

        ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
        parts = [range(start, end) for start, end in pairwise(ends)]
        splits = TensorDataset(x, y), TensorDataset(x[:1] + 1, y[:1])
        return FederatedDataModule(FromTorch(*splits), Given(*parts), batch_size=1000)

    def _rule(self) -> Any:
        recorded = self
        given: dict[str, Any] = {"weights": self.about["weights"], "adapters": NAMES}
        for name in ("head_rank", "local_weight"):
            if name in self.about:
                given[name] = self.about[name]

        class Replayed(RULES[self.method]):  # type: ignore[misc]
            side_by_side = False

            @override
            def initial(self, own: Adapter, rank: int) -> Tensor:
                return recorded.tensors[f"init/{own.layer.split('.')[-1]}/A"][:rank].float()

            def initial_b(self, own: Adapter, rank: int) -> Tensor:
                return recorded.tensors[f"init/{own.layer.split('.')[-1]}/B"][:, :rank].float()

            @override
            def session_start(self, s: SessionContext) -> None:
                super().session_start(s)
                recorded.start(s)

        return Replayed(**given)

    def start(self, s: SessionContext) -> None:
        """Note what a session starts with; where its result is given, write that."""
        part = sum((s.round, s.client, earlier) in self.started for earlier in range(2))
        self.started[s.round, s.client, part] = self.named(s.client, s.row.floats)
        if "sgd" in self.about:
            return

        for name, own in self.views(s.client, s.row.floats).items():
            value = self.tensors.get(f"r{s.round}/local/{s.client}/{name}")
            if value is not None:
                own.copy_(value.view_as(own) if name[-1] != "H" else side_by_side(value))

    def views(self, client: int, row: Tensor) -> dict[str, Tensor]:
        """Return views of a client's tensors, by their recorded names."""
        state = self.fleet.state(client)
        tensors = {**state.layout.floats.views(row), **state.live.frozen}
        named = {f"head/{name}": tensors[f"head.{name}"] for name in ("weight", "bias")}
        for layer in self.layers:
            for name, path in TENSORS[self.method].items():
                tensor = tensors[f"layers.{layer}.{path}"]
                named[f"{layer}/{name}"] = tensor if tensor.dim() < 3 else tensor.flatten(1)
        return named

    def named(self, client: int, row: Tensor) -> dict[str, Tensor]:
        """Return copies of a client's tensors, and the products of its layers, s B A or s B K A."""
        own = {name: view.detach().clone() for name, view in self.views(client, row).items()}
        for layer in self.layers:
            A = own[f"{layer}/A"]
            if self.method == "fedsb":
                A = own[f"{layer}/C"] @ A
            if self.method == "ravan":
                heads = stacked(own[f"{layer}/H"])
                own[f"{layer}/H"] = heads
                A = torch.block_diag(*(own[f"{layer}/sigma"][:, None, None] * heads)) @ A
            own[f"{layer}/product"] = self.scales[client] * own[f"{layer}/B"] @ A
        return own

    def server(self, layer: str) -> dict[str, Tensor]:
        """Return what the server holds of a layer, by the recorded names."""
        A, main = self.rule.server_factors()[[*self.layers].index(layer)]
        if self.method == "feddpa":
            return {"A": A, "D": main}
        if self.method == "fedsb":
            return {"C": main}
        return {"H": stacked(main)}

    def run(self, t: int) -> dict[str, float]:
        """Run a recorded round, and return its metrics."""
        active = self.about["rounds"][t]["active"]
        self.fleet.participants = lambda t: sorted(active)  # type: ignore[method-assign]
        self.fleet.plan = RoundPlan(lr=self.sgd["lr"])
        return run_round(self.fleet, t)


def stacked(heads: Tensor) -> Tensor:
    """Return heads (n, q, q) that are side by side, (q, n q)."""
    return torch.stack(heads.split(len(heads), 1))


def side_by_side(heads: Tensor) -> Tensor:
    """Return heads (n, q, q) side by side, (q, n q)."""
    return torch.cat(list(heads), 1)
