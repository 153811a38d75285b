"""FedRolex against recorded runs of the released code, and as HeteroFL."""

import json
from functools import partial
from itertools import cycle, islice

import pytest
import torch
from lightfed_kernels import Layout
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.width.fedrolex import FedRolex
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from lightfed.networks.transformer import Transformer
from lightfed.state.rows import Row
from lightfed.utils.counts import rounded_up
from tests.algorithms.peers.dispfl_cases import Replayed
from tests.algorithms.recorded import Recorded, close, settings_of
from tests.packs.federations import Windows
from tests.small import GOLDEN, Given, fleet_of, random_data, run_round


class Plain(nn.Module):
    """Two linear layers or convolutions, then a classifier, by their recorded names."""

    def __init__(
        self, kind: str, inputs: int, hidden: list[int], classes: int, rate: float = 1.0
    ) -> None:
        super().__init__()
        a, b = (rounded_up(width * rate) for width in hidden)
        mlp = kind == "mlp"
        self.block = nn.Module()
        self.conv1 = nn.Linear(inputs, a) if mlp else nn.Conv2d(inputs, a, 3, padding=1)
        second = nn.Linear(a, b) if mlp else nn.Conv2d(a, b, 3, stride=2, padding=1)
        self.block.conv2 = second
        self.linear = nn.Linear(b, classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.block.get_submodule("conv2")(x))
        return self.linear(x.flatten(2).mean(2) if x.dim() > 2 else x)


def recorded_run(name: str, algorithm: FedRolex) -> Recorded:
    """The clients come after one that holds the whole model and never takes part."""
    model = settings_of("fedrolex", name)
    inputs, rates, net = model["model"]["input"][0], model["client_rate"], model["model"]
    factory = partial(Plain, net["kind"], inputs, net["hidden"], net["classes"])
    groups = [ClientGroup(1, factory, rate=rate) for rate in (1.0, *rates)]
    return Recorded("fedrolex", name, algorithm, groups)


@pytest.mark.parametrize("name", ["mlp_count", "mlp_uncovered", "conv_labels_count"])
def test_the_recorded_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = FedRolex(mask=name.startswith("conv"))
    run = recorded_run(name, algorithm)
    for t, _ in run.rounds(monkeypatch):
        close(algorithm.model.floats, run.row(f"r{t}/server"))


class Drawn(FedRolex):
    """Has the recorded units."""

    layers: dict[tuple[int, int, int], list[int]]

    @override
    def units(self, fed: Fleet, client: int, t: int, width: int) -> Tensor:
        first = self.layers[t, client - 1, width]
        return torch.tensor([*first, *(unit for unit in range(width) if unit not in first)])


def test_the_recorded_run_of_random_units(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = Drawn(window="random", mask=False)
    run = recorded_run("conv_random", algorithm)
    algorithm.layers = {
        (t, int(client), width): found[layer][0]
        for t, recorded in enumerate(run.about["rounds"])
        for client, found in recorded["indices"].items()
        for layer, width in (("conv1.weight", 8), ("block.conv2.weight", 12))
    }
    for t, _ in run.rounds(monkeypatch):
        close(algorithm.model.floats, run.row(f"r{t}/server"))


@pytest.mark.parametrize("name", ["mlp_published", "mlp_width_weighted"])
def test_sessions_are_those_of_the_released_code(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server has another mean, so that each round starts from the recorded model."""
    algorithm = FedRolex(mask=False)
    run = recorded_run(name, algorithm)
    for t, clients in run.rounds(monkeypatch):
        for client in clients:
            close(run.fleet.row(client).floats, run.row(f"r{t}/local/{client - 1}", client))
        algorithm.model.floats.copy_(run.row(f"r{t}/server"))


class ReplayedFedRolex(Replayed, FedRolex):
    pass


def test_the_recorded_rounds_of_a_transformer(monkeypatch: pytest.MonkeyPatch) -> None:
    """No training was recorded: sessions end with the recorded rows."""
    place = GOLDEN / "fedrolex/transformer_count"
    about = json.loads(place.with_suffix(".json").read_text())
    tensors = load_file(f"{place}.safetensors")
    names, model = [*about["rounds"][0]["indices"]["0"]], about["model"]
    net = {key: model[key] for key in ("embedding", "heads", "hidden", "layers")}
    algorithm = ReplayedFedRolex(mask_token=False)
    groups = [ClientGroup(1, partial(Transformer, **net), rate=r) for r in about["client_rate"]]
    length = model["positions"]
    x = torch.tensor([[*islice(cycle(own), 2 * length)] for own in about["label_split"]])
    x = x.view(-1, length)  # two windows of each client, which have all of its tokens
    y = torch.zeros(len(x), dtype=torch.int64)
    windows = Windows(x, y, classes=model["tokens"], test=(x, y))
    fed = fleet_of(groups, algorithm, FederatedDataModule(windows, Given([0, 1], [2, 3], [4, 5])))

    def recorded(layout: Layout, prefix: str) -> Tensor:
        row = layout.new_row()
        for view, name in zip(layout.views(row).values(), names, strict=True):
            view.copy_(tensors[f"{prefix}/{name}"])
        return row

    layout = algorithm.model.layout.floats
    algorithm.model.floats.copy_(recorded(layout, "init"))
    for t in range(len(about["rounds"])):
        for k in range(3):
            own = fed.groups[k].layout
            algorithm.ends[k] = Row(recorded(own.floats, f"r{t}/local/{k}"), own.integers.new_row())
        run_round(fed, t)
        close(algorithm.model.floats, recorded(layout, f"r{t}/server"))


def test_a_window_that_does_not_move_is_heterofl() -> None:
    models = []
    for algorithm in (HeteroFL(), FedRolex(0), FedRolex(1), FedRolex(window="random")):
        groups = [ClientGroup(2, partial(MLP, hidden=(8,)), level=level) for level in "ab"]
        fed = fleet_of(groups, algorithm, random_data([6, 5, 7, 4]), optimizer=partial(SGD, lr=0.1))
        for t in range(2):
            run_round(fed, t)
        models.append(algorithm.model.floats)
    assert torch.equal(models[0], models[1])
    assert not torch.allclose(models[0], models[2])
    assert not torch.allclose(models[0], models[3])


def test_random_units_of_whole_models_are_heterofl() -> None:
    models = []
    for algorithm in (HeteroFL(weights="samples"), FedRolex(0, "random", weights="samples")):
        group, data = ClientGroup(3, partial(MLP, hidden=(8,))), random_data([6, 5, 7])
        fed = fleet_of([group], algorithm, data, optimizer=partial(SGD, lr=0.1))
        for t in range(2):
            run_round(fed, t)
        models.append(algorithm.model.floats)
    torch.testing.assert_close(*models)
