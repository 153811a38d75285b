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
    """A client's tensors, as they lie in its row."""
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
    """The tensors that a round changes on the server."""
    fleet = lg_fleet(algorithm, model)
    before = server_of(fleet)
    run_round(fleet, 0)
    return {
        name for name, value in server_of(fleet).items() if not torch.equal(value, before[name])
    }


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
    found = shared_names(LGFedAvg(count, side), Normed)
    assert {name.split(".")[0] for name in found} == expected
    assert ("norm.running_mean" in found) == ("norm" in expected)


def test_a_client_is_tested_with_its_own_layers_and_the_servers() -> None:
    fleet = lg_fleet(LGFedAvg(2), clients_per_round=1)
    for t in range(3):
        run_round(fleet, t)
    kept, server = [row_of(fleet, k) for k in range(CLIENTS)], server_of(fleet)
    *local, _, _, _, _ = server
    assert not has_global_model(fleet)
    for client in range(CLIENTS):
        module = module_of(fleet, client)
        for name, value in module.get_submodule("net").state_dict().items():
            assert torch.equal(value, (kept[client] if name in local else server)[name]), name


def test_all_layers_global_is_fedavg(tmp_path: Path) -> None:
    found = []
    for algorithm in (LGFedAvg(3, weights="samples"), FedAvg()):
        federation = Federation(
            algorithm, [ClientGroup(3, Normed)], optimizer=slow, clients_per_round=2, local_epochs=2
        )
        trainer = fit(federation, random_data(SIZES), tmp_path, rounds=3)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        found.append((server_row(federation), metrics))
    (ours, our_metrics), (theirs, their_metrics) = found
    assert torch.equal(ours, theirs)
    # Models of one client each are tested by other operators than one model of all.
    assert our_metrics == pytest.approx(their_metrics, rel=1e-6)


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
    names = [list(row_of(fleet, k))[-4:] for k in range(CLIENTS)]
    assert names[0] != names[1]
    before = [row_of(fleet, k) for k in range(CLIENTS)]
    metrics = run_round(fleet, 0)
    numel = 6 * 5 + 5 + 5 * 3 + 3
    assert metrics["bytes_up"] == metrics["bytes_down"] == CLIENTS * 4 * numel
    rows = [row_of(fleet, k) for k in range(CLIENTS)]
    shares = torch.tensor(SIZES if weights == "samples" else [1, 1, 1]).double()
    server = list(server_of(fleet).values())
    assert len(server) == 4
    for i, value in enumerate(server):
        stacked = torch.stack([row[own[i]].double() for row, own in zip(rows, names, strict=True)])
        mean = torch.tensordot(shares / shares.sum(), stacked, 1)
        assert torch.allclose(value.double(), mean, atol=1e-7)
    for row, old in zip(rows, before, strict=True):
        assert all(not torch.equal(value, old[name]) for name, value in row.items())
    assert not has_global_model(fleet)
    for client in range(CLIENTS):
        layout, row = row_held(fleet, client)
        now = layout.floats.views(row.floats)
        for full, value in now.items():
            name = full.removeprefix("net.")
            received = name in names[client]
            expected = server[names[client].index(name)] if received else rows[client][name]
            assert torch.equal(value, expected)


def test_what_is_private_to_different_networks_never_reaches_the_server() -> None:
    one, two = (other_shapes(LGFedAvg(1), mlp, deep) for _ in range(2))
    for fleet in (one, two):
        run_round(fleet, 0)
    for client in range(CLIENTS):
        views = two.state(client).layout.floats.views(two.row(client).floats)
        for name in list(views)[:-2]:
            views[name].add_(1.0)
    for fleet in (one, two):
        fleet.merge(range(CLIENTS), into=model_of(fleet))
    assert torch.equal(model_of(one).floats, model_of(two).floats)
    shapes = [entry.shape for entry in model_of(one).layout.floats]
    assert shapes == [(3, 5), (3,)]


def test_different_networks_have_no_common_start(finished: tuple[Path, Tensor]) -> None:
    folder, _ = finished
    start = str(folder / "models/server.safetensors")
    with pytest.raises(UserError, match="but the groups have different architectures") as error:
        other_shapes(LGFedAvg(1, start=start), mlp, deep)
    assert error.value.key == "model.algorithm.init_args.start"
