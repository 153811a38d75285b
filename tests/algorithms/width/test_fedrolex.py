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
        first, second = (rounded_up(width * rate) for width in hidden)
        self.block = nn.Module()
        if kind == "mlp":
            self.conv1: nn.Module = nn.Linear(inputs, first)
            self.block.conv2 = nn.Linear(first, second)
        else:
            self.conv1 = nn.Conv2d(inputs, first, 3, padding=1)
            self.block.conv2 = nn.Conv2d(first, second, 3, stride=2, padding=1)
        self.linear = nn.Linear(second, classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.block.get_submodule("conv2")(x))
        if x.dim() > 2:
            x = x.flatten(2).mean(2)
        return self.linear(x)


def recorded_run(name: str, algorithm: FedRolex) -> Recorded:
    """Return a recorded run, whose clients come after one that never takes part.

    That one holds the whole model.
    """
    about = settings_of("fedrolex", name)
    model = about["model"]
    factory = partial(Plain, model["kind"], model["input"][0], model["hidden"], model["classes"])
    groups = [ClientGroup(1, factory, rate=rate) for rate in (1.0, *about["client_rate"])]
    return Recorded("fedrolex", name, algorithm, groups)


@pytest.mark.parametrize("name", ["mlp_count", "mlp_uncovered", "conv_labels_count"])
def test_the_recorded_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = FedRolex(mask=name.startswith("conv"))
    run = recorded_run(name, algorithm)
    for t, _ in run.rounds(monkeypatch):
        close(algorithm.model.floats, run.row(f"r{t}/server"))


class Drawn(FedRolex):
    """Has the recorded units.

    Attributes:
        drawn: Round, client and width of a layer -> the units that were drawn.
    """

    drawn: dict[tuple[int, int, int], list[int]]

    @override
    def units(self, fed: Fleet, client: int, t: int, width: int) -> Tensor:
        drawn = self.drawn[t, client - 1, width]
        others = [unit for unit in range(width) if unit not in drawn]
        return torch.tensor([*drawn, *others])


def test_the_recorded_run_of_random_units(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = Drawn(window="random", mask=False)
    run = recorded_run("conv_random", algorithm)
    algorithm.drawn = {}
    for t, recorded in enumerate(run.about["rounds"]):
        for client, indices in recorded["indices"].items():
            # Indices of the outputs come first; the layers have 8 and 12 units.
            algorithm.drawn[t, int(client), 8] = indices["conv1.weight"][0]
            algorithm.drawn[t, int(client), 12] = indices["block.conv2.weight"][0]
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
    recording = GOLDEN / "fedrolex/transformer_count"
    about = json.loads(recording.with_suffix(".json").read_text())
    tensors = load_file(f"{recording}.safetensors")
    model = about["model"]
    network = partial(
        Transformer,
        embedding=model["embedding"],
        heads=model["heads"],
        hidden=model["hidden"],
        layers=model["layers"],
    )

    # Two windows of each client, which have all of its tokens.
    length = model["positions"]
    tokens = [list(islice(cycle(held), 2 * length)) for held in about["label_split"]]
    x = torch.tensor(tokens).view(-1, length)
    y = torch.zeros(len(x), dtype=torch.int64)
    windows = Windows(x, y, classes=model["tokens"], test=(x, y))
    data = FederatedDataModule(windows, Given([0, 1], [2, 3], [4, 5]))

    algorithm = ReplayedFedRolex(mask_token=False)
    groups = [ClientGroup(1, network, rate=rate) for rate in about["client_rate"]]
    fed = fleet_of(groups, algorithm, data)

    names = list(about["rounds"][0]["indices"]["0"])

    def recorded(layout: Layout, prefix: str) -> Tensor:
        """Return recorded tensors as a row; they are in the order of the parameters."""
        row = layout.new_row()
        for view, name in zip(layout.views(row).values(), names, strict=True):
            view.copy_(tensors[f"{prefix}/{name}"])
        return row

    layout = algorithm.model.layout.floats
    algorithm.model.floats.copy_(recorded(layout, "init"))
    for t in range(len(about["rounds"])):
        for k in range(3):
            of_client = fed.groups[k].layout
            floats = recorded(of_client.floats, f"r{t}/local/{k}")
            algorithm.ends[k] = Row(floats, of_client.integers.new_row())
        run_round(fed, t)
        close(algorithm.model.floats, recorded(layout, f"r{t}/server"))


def trained(algorithm: HeteroFL, groups: list[ClientGroup], sizes: list[int]) -> Tensor:
    """Return the server's model after two rounds of clients with these numbers of samples."""
    fed = fleet_of(groups, algorithm, random_data(sizes), optimizer=partial(SGD, lr=0.1))
    for t in range(2):
        run_round(fed, t)
    return algorithm.model.floats


def test_a_window_that_does_not_move_is_heterofl() -> None:
    mlp = partial(MLP, hidden=(8,))
    groups = [ClientGroup(2, mlp, level="a"), ClientGroup(2, mlp, level="b")]
    sizes = [6, 5, 7, 4]
    heterofl = trained(HeteroFL(), groups, sizes)
    assert torch.equal(trained(FedRolex(0), groups, sizes), heterofl)
    assert not torch.allclose(trained(FedRolex(1), groups, sizes), heterofl)
    assert not torch.allclose(trained(FedRolex(window="random"), groups, sizes), heterofl)


def test_random_units_of_whole_models_are_heterofl() -> None:
    groups = [ClientGroup(3, partial(MLP, hidden=(8,)))]
    sizes = [6, 5, 7]
    heterofl = trained(HeteroFL(weights="samples"), groups, sizes)
    fedrolex = trained(FedRolex(0, "random", weights="samples"), groups, sizes)
    torch.testing.assert_close(fedrolex, heterofl)
