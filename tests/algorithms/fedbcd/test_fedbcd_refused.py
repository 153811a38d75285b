"""What FedBCD and FedAvg in its hierarchy refuse, and steps just below what is refused."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD

from lightfed.algorithms.fedbcd.cloudfedavg import CloudFedAvg
from lightfed.algorithms.fedbcd.fedbcd import FedBCD
from lightfed.local.client_group import ClientGroup
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.algorithms.fedbcd.fedbcd_clouds import SIZES, fleet, mlp, rows, servers, spread
from tests.small import fleet_of, random_data, run_round

HALVES = [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"wait": 0}, "wait: 0; give at least 1"),
        ({"gamma": -1.0}, r"gamma: -1\.0;"),
        ({"gamma": [1.0, float("nan")]}, "gamma: nan;"),
        ({"gamma": []}, "gamma: an empty list;"),
        ({"wait": 3}, "wait: wait for 3 of 2 servers"),
        ({"server_lr": 0.0}, r"server_lr: 0\.0;"),
        ({"server_lr": float("inf")}, "server_lr: inf;"),
        ({"mixing": [[1.0]]}, r"mixing: of shape \[1, 1\] for 2 servers;"),
        ({"mixing": HALVES, "wait": 1}, "mixing: given, and wait: 1 of 2 servers;"),
        # Steps that diverge: the sum of gamma is of all devices, or of the largest cloud.
        ({"server_lr": 0.4, "server_step": "sum", "gamma": [1.0, 0.5, 1.0]}, r".*, 5, is 2;"),
        (
            {"server_lr": 0.5, "server_step": "sum", "gamma": [0.1] * 3 + [1.0, 2.0, 3.0],
             "wait": 1},
            r".*, 6, is 3; it must be at most 1;",
        ),
        ({"server_step": "sum", "mixing": HALVES}, r".*, 3, is 1\.5; it must be at most 1;"),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=rf"^model\.algorithm\.init_args\.{line}"):
        fleet(FedBCD(2, 1, **settings))


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
    ("algorithm", "settings", "key"),
    [
        (partial(CloudFedAvg, mu=-1.0), {}, "model.algorithm.init_args.mu"),
        (CloudFedAvg, {"fraction": 0.5}, "model.fraction"),
        (FedBCD, {"clients_per_round": 2}, "model.clients_per_round"),
        (FedBCD, {"steps": 5}, "model.local_steps"),
    ],
)
def test_federations_that_are_refused(algorithm: Any, settings: Any, key: str) -> None:
    with pytest.raises(UserError) as error:
        fleet(algorithm(3, 1), **settings)
    assert error.value.key == key


def test_one_architecture_for_all() -> None:
    groups = [ClientGroup(3, mlp), ClientGroup(3, partial(MLP, hidden=(9,)))]
    with pytest.raises(UserError, match=r"^model\.clients: .* different architectures; FedBCD"):
        fleet_of(groups, FedBCD(3, 1), random_data(SIZES))
