"""What FedBCD refuses: one line each, with the numbers."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

from lightfed.algorithms.fedbcd import FedBCD
from lightfed.algorithms.shared.aspg import ASPG
from lightfed.engine.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.models.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.algorithms.fedbcd_clouds import SIZES, fleet, mlp, rows, servers, spread
from tests.small import fit, fleet_of, random_data, run_round

KEY = "model.algorithm.init_args"


def refusal(make: Any) -> str:
    with pytest.raises(UserError) as stated:
        make()
    assert "\n" not in str(stated.value)
    return str(stated.value)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"servers": 0}, "servers: 0; give at least 1"),
        ({"wait": 11}, "wait: wait for 11 of 10 servers; give at least 1 and at most 10"),
        ({"wait": 0}, "wait: wait for 0 of 10 servers; give at least 1 and at most 10"),
        ({"gamma": -1.0}, "gamma: -1.0; give numbers of 0 or more"),
        ({"gamma": [1.0, float("nan")]}, "gamma: [1.0, nan]; give numbers of 0 or more"),
        ({"gamma": []}, "gamma: []; give numbers of 0 or more"),
        ({"server_lr": 0.0}, "server_lr: 0.0; give a number above 0"),
        ({"server_lr": float("inf")}, "server_lr: inf; give a number above 0"),
        ({"steps": (3, 2)}, "steps: [3, 2]; give 1 <= low <= high"),
        ({"servers": 2, "mixing": [[0.9, 0.2], [0.1, 0.8]]}, "mixing: not doubly stochastic: row"),
        ({"servers": 2, "mixing": [[1.0]]}, "mixing: of shape [1, 1] for 2 servers; give 2 rows"),
        (
            {"servers": 2, "wait": 1, "mixing": [[1, 0], [0, 1]]},
            "mixing: given, and wait: 1 of 2 servers; leave one out",
        ),
    ],
)
def test_arguments_that_are_refused(settings: dict[str, Any], line: str) -> None:
    assert refusal(lambda: FedBCD(**settings)).startswith(f"{KEY}.{line}")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"server_lr": 2.0}, "2, times the sum of gamma, 1, is 2; it must be less than 2"),
        (
            {"server_lr": 0.4, "server_step": "sum", "gamma": [1.0, 0.5, 1.0]},
            "0.4, times the sum of gamma, 5, is 2; it must be less than 2; or",
        ),
        (
            {"server_lr": 0.5, "server_step": "sum", "gamma": [1.0, 1.0, 0.5], "wait": 1},
            "0.5, times the sum of gamma, 2.5, is 1.25; it must be at most 1; or server_step: mean",
        ),
        (
            {
                "server_lr": 0.5, "server_step": "sum", "gamma": [0.1, 0.1, 0.1, 1.0, 2.0, 3.0],
                "wait": 1,
            },
            "0.5, times the sum of gamma, 6, is 3; it must be at",
        ),
        (
            {"server_lr": 0.5, "server_step": "sum", "mixing": [[0.5, 0.5], [0.5, 0.5]]},
            "0.5, times the sum of gamma, 3, is 1.5; it must be",
        ),
    ],
)  # fmt: skip
def test_a_server_step_that_diverges_is_refused_with_its_numbers(
    settings: dict[str, Any], line: str
) -> None:
    found = refusal(lambda: fleet(FedBCD(2, 1, **settings)))
    assert found.startswith(f"{KEY}.server_lr: {line}")


@pytest.mark.parametrize(
    "settings",
    [
        {"server_lr": 1.99},
        {"server_lr": 0.39, "server_step": "sum", "gamma": [1.0, 0.5, 1.0]},
        {"server_lr": 0.4, "server_step": "sum", "gamma": [1.0, 1.0, 0.5], "wait": 1},
    ],
)
def test_a_server_step_below_the_bound_converges(settings: dict[str, Any]) -> None:
    """Devices that stand still: z comes closer to the mean of all, or of those of its server."""
    algorithm = FedBCD(2, 1, **settings)
    fed = fleet(algorithm, optimizer=partial(SGD, lr=0.0))
    spread(fed)
    alone = "wait" in settings
    parts = [[0, 1, 2], [3, 4, 5]] if alone else [list(range(6))] * 2
    gammas = torch.tensor([algorithm.gamma(k) for k in range(6)])
    means = torch.stack([gammas[p] @ rows(fed)[p] / gammas[p].sum() for p in parts])
    gaps = [(servers(fed) - means).norm(dim=1)]
    for t in range(8):
        run_round(fed, t)
        gaps.append((servers(fed) - means).norm(dim=1))
        assert (gaps[-1] <= gaps[-2]).all()
    assert (gaps[-1] < 0.95 * gaps[0]).all()


@pytest.mark.parametrize(
    ("algorithm", "settings", "line"),
    [
        (FedBCD(4, 1), {}, f"{KEY}.servers: 4 servers for 6 clients; give a divisor"),
        (FedBCD(3, 3), {}, f"{KEY}.active: 3 of the 2 devices of a server; give at most 2"),
        (FedBCD(3, 1), {"fraction": 0.5}, "model.fraction: given; leave it out"),
        (FedBCD(3, 1), {"clients_per_round": 2}, "model.clients_per_round: given; leave it out"),
        (FedBCD(3, 1), {"epochs": 5}, "model.local_epochs: given; leave it out"),
        (FedBCD(3, 1), {"steps": 5}, "model.local_steps: given; leave it out"),
    ],
)
def test_federations_that_are_refused(algorithm: FedBCD, settings: Any, line: str) -> None:
    assert refusal(lambda: fleet(algorithm, **settings)).startswith(line)


def test_a_checkpoint_of_another_hierarchy_is_refused(tmp_path: Path) -> None:
    def run(servers: int, **settings: Any) -> None:
        federation = Federation(
            FedBCD(servers, 1, wait=1), [ClientGroup(6, mlp)], optimizer=partial(ASPG, lr=0.05)
        )
        fit(federation, random_data(SIZES, batch_size=4), tmp_path, **settings)

    run(3)
    path = str(tmp_path / "run" / "checkpoints" / "last.ckpt")
    line = refusal(lambda: run(2, rounds=2, ckpt_path=path))
    assert line.startswith("ckpt_path: a checkpoint of another federation: its server state is ")
    run(3, rounds=2, ckpt_path="last")
    assert [folder.name for folder in tmp_path.iterdir()] == ["run"]


def test_one_architecture_for_all() -> None:
    groups = [ClientGroup(3, mlp), ClientGroup(3, partial(MLP, hidden=(9,)))]
    line = refusal(lambda: fleet_of(groups, FedBCD(3, 1), random_data(SIZES)))
    assert line == (
        "model.clients: groups MLP and MLP-1 have different architectures; FedBCD needs one for all"
    )
