"""Clients with layers of their own below common ones."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.lgfedavg import LGFedAvg
from lightfed.api.fleet import Fleet
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from lightfed.state.server_model import ServerModel
from lightfed.utils.errors import UserError
from tests.small import (
    fit,
    fleet_of,
    has_global_model,
    module_of,
    random_data,
    row_held,
    run_round,
    server_row,
)

SIZES = [5, 7, 4]
CLIENTS = len(SIZES)
mlp = partial(MLP, hidden=(6, 5))
slow = partial(SGD, lr=0.1)


class Normed(nn.Module):
    """Three layers: linear, BatchNorm, linear."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__()
        self.low = nn.Linear(input_shape[0], 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.low(x)).relu())


def lg_fleet(algorithm: LGFedAvg, model: Any = mlp, **work: Any) -> Fleet:
    return fleet_of([ClientGroup(3, model)], algorithm, random_data(SIZES), optimizer=slow, **work)


def row_of(fleet: Fleet, client: int) -> dict[str, Tensor]:
    """Return copies of a client's tensors, as they are in its row."""
    views = fleet.state(client).layout.floats.views(fleet.row(client).floats)
    return {name.removeprefix("net."): view.clone() for name, view in views.items()}


def model_of(fleet: Fleet) -> ServerModel:
    assert isinstance(fleet.algorithm, LGFedAvg)
    return fleet.algorithm.model


def server_of(fleet: Fleet) -> dict[str, Tensor]:
    model = model_of(fleet)
    views = model.layout.floats.views(model.floats)
    return {name.removeprefix("net."): view.clone() for name, view in views.items()}


def shared_names(algorithm: LGFedAvg, model: Any) -> set[str]:
    """Return the names of the tensors that a round changes on the server."""
    fleet = lg_fleet(algorithm, model)
    before = server_of(fleet)
    run_round(fleet, 0)
    after = server_of(fleet)
    return {name for name in after if not torch.equal(after[name], before[name])}


@pytest.mark.parametrize(
    ("count", "side", "expected"),
    [
        (1, "top", {"head"}),
        (2, "top", {"head", "norm"}),
        (1, "bottom", {"low"}),
        (2, "bottom", {"low", "norm"}),
    ],
)
def test_the_layers_of_a_side_are_shared_with_their_statistics(
    count: int, side: Any, expected: set[str]
) -> None:
    names = shared_names(LGFedAvg(count, side), Normed)
    layers = {name.split(".")[0] for name in names}
    assert layers == expected
    assert ("norm.running_mean" in names) == ("norm" in expected)


def test_a_client_is_tested_with_its_own_layers_and_the_servers() -> None:
    fleet = lg_fleet(LGFedAvg(2), clients_per_round=1)
    for t in range(3):
        run_round(fleet, t)
    assert not has_global_model(fleet)

    server = server_of(fleet)
    *_, weight_2, bias_2, weight_3, bias_3 = server
    global_tensors = {weight_2, bias_2, weight_3, bias_3}  # of two layers
    for client in range(CLIENTS):
        own = row_of(fleet, client)
        tested = module_of(fleet, client).get_submodule("net").state_dict()
        for name, value in tested.items():
            expected = server[name] if name in global_tensors else own[name]
            assert torch.equal(value, expected), name


def test_all_layers_global_is_fedavg(tmp_path: Path) -> None:
    def trained(algorithm: LGFedAvg | FedAvg) -> tuple[Tensor, dict[str, float]]:
        """Return the server's model and the metrics of a run."""
        federation = Federation(
            algorithm, [ClientGroup(3, Normed)], optimizer=slow, clients_per_round=2, local_epochs=2
        )
        trainer = fit(federation, random_data(SIZES), tmp_path, rounds=3)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return server_row(federation), metrics

    row, metrics = trained(LGFedAvg(3, weights="samples"))
    fedavg_row, fedavg_metrics = trained(FedAvg())
    assert torch.equal(row, fedavg_row)
    # Models of one client each are tested by other operators than one model of all.
    assert metrics == pytest.approx(fedavg_metrics, rel=1e-6)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """The run folder of a FedAvg run, and its model."""
    folder = tmp_path_factory.mktemp("finished")
    federation = Federation(FedAvg(), [ClientGroup(3, Normed)], optimizer=slow)
    fit(federation, random_data(SIZES), folder, rounds=2)
    return folder / "run", server_row(federation)


def test_it_starts_from_a_finished_run(finished: tuple[Path, Tensor]) -> None:
    folder, trained = finished
    fleet = lg_fleet(LGFedAvg(1, start=str(folder / "models/server.safetensors")), Normed)
    assert torch.equal(model_of(fleet).floats, trained)
    for client in range(CLIENTS):
        assert torch.equal(fleet.row(client).floats, trained)
        assert int(fleet.row(client).integers[0]) > 0  # BatchNorm's count


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("nowhere.safetensors", "cannot be read"),
        ("checkpoints/last.ckpt", "cannot be read"),
        ("models/server.safetensors", r"as \[0\], not"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(
    name: str, fragment: str, finished: tuple[Path, Tensor]
) -> None:
    folder, _ = finished
    with pytest.raises(UserError, match=fragment) as error:
        lg_fleet(LGFedAvg(1, start=str(folder / name)), mlp)
    assert error.value.key == "model.algorithm.init_args.start"


@pytest.mark.parametrize(
    ("count", "fragment"), [(0, "use Standalone"), (4, "4, but the model has 3 layers")]
)
def test_a_count_that_cannot_be_is_refused(count: int, fragment: str) -> None:
    with pytest.raises(UserError, match=fragment):
        lg_fleet(LGFedAvg(count))


def other_shapes(algorithm: LGFedAvg, *models: Any, **work: Any) -> Fleet:
    groups = [ClientGroup(1, models[0]), ClientGroup(2, models[1])]
    return fleet_of(groups, algorithm, random_data(SIZES), optimizer=slow, **work)


deep = partial(MLP, hidden=(7, 6, 5))


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_different_networks_share_the_layers_that_agree(weights: Any) -> None:
    """Layers 2 and 3 of the one are 3 and 4 of the other."""
    fleet = other_shapes(LGFedAvg(2, weights=weights), mlp, deep)
    assert not has_global_model(fleet)
    before = [row_of(fleet, k) for k in range(CLIENTS)]
    metrics = run_round(fleet, 0)
    after = [row_of(fleet, k) for k in range(CLIENTS)]
    shared_elements = 6 * 5 + 5 + 5 * 3 + 3
    assert metrics["bytes_up"] == CLIENTS * 4 * shared_elements
    assert metrics["bytes_down"] == CLIENTS * 4 * shared_elements

    # Every layer has been trained, the local ones too.
    for k in range(CLIENTS):
        for name, value in after[k].items():
            assert not torch.equal(value, before[k][name])

    # The server has the mean of the last four tensors, whose names differ.
    global_names = [list(row)[-4:] for row in after]
    assert global_names[0] != global_names[1]
    counts = torch.tensor(SIZES if weights == "samples" else [1, 1, 1]).double()
    shares = counts / counts.sum()
    server = list(server_of(fleet).values())
    assert len(server) == 4
    for i, value in enumerate(server):
        of_clients = [after[k][global_names[k][i]].double() for k in range(CLIENTS)]
        mean = torch.tensordot(shares, torch.stack(of_clients), 1)
        assert torch.allclose(value.double(), mean, atol=1e-7)

    # A client is tested with these, and with its own for the rest.
    for k in range(CLIENTS):
        layout, row = row_held(fleet, k)
        for full_name, value in layout.floats.views(row.floats).items():
            name = full_name.removeprefix("net.")
            if name in global_names[k]:
                assert torch.equal(value, server[global_names[k].index(name)])
            else:
                assert torch.equal(value, after[k][name])


def test_what_is_private_to_different_networks_never_reaches_the_server() -> None:
    one = other_shapes(LGFedAvg(1), mlp, deep)
    other = other_shapes(LGFedAvg(1), mlp, deep)
    run_round(one, 0)
    run_round(other, 0)

    # Change the private tensors of the one, all but the last weight and bias.
    for client in range(CLIENTS):
        views = one.state(client).layout.floats.views(one.row(client).floats)
        for name in list(views)[:-2]:
            views[name].add_(1.0)
    for fleet in (one, other):
        fleet.merge(range(CLIENTS), into=model_of(fleet))
    assert torch.equal(model_of(one).floats, model_of(other).floats)
    assert [entry.shape for entry in model_of(one).layout.floats] == [(3, 5), (3,)]


def test_different_networks_have_no_common_start(finished: tuple[Path, Tensor]) -> None:
    folder, _ = finished
    start = str(folder / "models/server.safetensors")
    with pytest.raises(UserError, match="but the groups have different architectures") as error:
        other_shapes(LGFedAvg(1, start=start), mlp, deep)
    assert error.value.key == "model.algorithm.init_args.start"
