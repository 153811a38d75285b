"""Clients that train alone: nothing of one is in another."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from lightfed.algorithms.standalone import Standalone
from lightfed.api.fleet import Fleet
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from tests.small import Line, data_of, fit, fleet_of, random_data, row_held, run_round

SIZES = [5, 7, 4]
CLIENTS = len(SIZES)
mlp = partial(MLP, hidden=(6,), dropout=0.2)


def rows_after(changed: int | None, groups: list[ClientGroup]) -> list[Tensor]:
    """Train three rounds and return the clients' rows.

    Args:
        changed: A client whose data is other than it is by default.
        groups: The clients.
    """
    data = random_data(SIZES, batch_size=3)
    if changed is not None:
        start = sum(SIZES[:changed])
        data.dataset.load("train").x[start : start + SIZES[changed]] += 1.0
    fleet = fleet_of(
        groups,
        Standalone(),
        data,
        optimizer=partial(SGD, lr=0.1, momentum=0.9),
        clients_per_round=2,
    )
    for t in range(3):
        run_round(fleet, t)
    return [row_of(fleet, k).clone() for k in range(CLIENTS)]


def row_of(fleet: Fleet, client: int) -> Tensor:
    _, row = row_held(fleet, client)
    return row.floats


@pytest.mark.parametrize(
    "groups",
    [[ClientGroup(3, mlp)], [ClientGroup(2, mlp), ClientGroup(1, partial(MLP, hidden=(3,)))]],
)
def test_a_clients_data_change_its_own_row_alone(groups: list[ClientGroup]) -> None:
    before = rows_after(None, groups)
    for changed in range(CLIENTS):
        after = rows_after(changed, groups)
        for client in range(CLIENTS):
            is_same = torch.equal(before[client], after[client])
            assert is_same == (client != changed)


def test_a_client_goes_on_from_its_own_weights() -> None:
    # x = (1, 0) and y = 1 for client 0, y = 3 for client 1; steps of 1/2 halve the distance to y.
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    data = data_of(x, torch.tensor([1, 3]), [[0], [1]])
    fleet = fleet_of([ClientGroup(2, Line)], Standalone(), data)
    weights = []
    for t in range(3):
        run_round(fleet, t)
        weights.append([float(row_of(fleet, 0)[0]), float(row_of(fleet, 1)[0])])
    assert weights == [[0.5, 1.5], [0.75, 2.25], [0.875, 2.625]]


def test_who_does_not_take_part_stays_as_it_is() -> None:
    fleet = fleet_of([ClientGroup(3, mlp)], Standalone(), random_data(SIZES), clients_per_round=1)
    for t in range(4):
        before = [row_of(fleet, k).clone() for k in range(CLIENTS)]
        chosen = fleet.participants(t)
        run_round(fleet, t)
        for client in range(CLIENTS):
            is_same = torch.equal(row_of(fleet, client), before[client])
            assert is_same == (client not in chosen)


def test_there_are_personal_figures_and_no_server(tmp_path: Path) -> None:
    federation = Federation(
        Standalone(),
        [ClientGroup(3, mlp)],
        optimizer=partial(SGD, lr=0.1),
        export=["server", "clients"],
    )
    trainer = fit(federation, random_data(SIZES), tmp_path, rounds=2)
    kinds = {name.split("/")[0] for name in trainer.callback_metrics if "/" in name}
    assert kinds == {"personal"}
    assert trainer.callback_metrics["bytes_up"] == 0.0

    files = sorted(path.name for path in (tmp_path / "run" / "models").iterdir())
    assert files == [
        "client0.safetensors",
        "client1.safetensors",
        "client2.safetensors",
        "inputs.json",
        "models.json",
    ]
