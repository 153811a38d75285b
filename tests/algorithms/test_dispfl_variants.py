"""My-1, My-2 and D-PSGD by hand, and what a round of each draws."""

from functools import partial
from typing import Any

import torch
from lightfed_kernels import unpack_mask
from torch import Tensor
from torch.optim import SGD

from lightfed.algorithms.dispfl import DisPFL
from lightfed.algorithms.dpsgd import DPSGD
from lightfed.algorithms.my2 import My2
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.models.networks.mlp import MLP
from lightfed.topology.topology import Full
from tests.algorithms.dispfl_cases import Starts
from tests.small import fleet_of, random_data, run_round

SIZES = [9, 6, 12, 7, 5]
CLIENTS = range(len(SIZES))


def fleet(algorithm: Algorithm, **work: Any) -> Fleet:
    data = random_data(SIZES, batch_size=4)
    groups = [ClientGroup(len(SIZES), partial(MLP, hidden=(16,)))]
    return fleet_of(groups, algorithm, data, optimizer=partial(SGD, lr=0.1), **work)


def rows(fed: Fleet) -> Tensor:
    return torch.stack([fed.row(k).floats for k in CLIENTS])


def bits(algorithm: DisPFL) -> Tensor:
    return torch.stack([unpack_mask(algorithm.masks[k]) for k in CLIENTS])


class StartsOfMy2(Starts, My2):
    pass


def test_my2_starts_from_the_mean() -> None:
    algorithm = StartsOfMy2(Full(), density=0.4, distribution="uniform", rounds=4)
    fed = fleet(algorithm)
    run_round(fed, 0)
    before, masks, drops = rows(fed).clone(), bits(algorithm), algorithm.drops(fed, 1)
    mean = before.mean(0)
    run_round(fed, 1)
    for client in CLIENTS:
        # Kept are all but the smallest of every tensor.
        kept = masks[client].clone()
        for entry, count in zip(fed.groups[0].layout.floats, drops[client], strict=True):
            part = slice(entry.offset, entry.offset + entry.numel)
            sizes = torch.where(kept[part], before[client, part].abs(), torch.inf)
            kept[part][sizes.argsort(stable=True)[:count]] = False
        now = unpack_mask(algorithm.masks[client])
        assert not (kept & ~now).any()
        start = algorithm.starts[client]
        torch.testing.assert_close(start, torch.where(now, mean, 0.0), rtol=0, atol=1e-7)
        grown = now & ~kept
        assert (grown & (before[client] == 0)).any()


def test_dpsgd_is_among_the_participants() -> None:
    fed = fleet(DPSGD(Full()), fraction=0.4)
    run_round(fed, 0)
    before = rows(fed).clone()
    chosen = fed.participants(1)
    assert len(chosen) == 2
    up = fed.ledger.totals[:, fed.ledger.UP].copy()
    metrics = run_round(fed, 1)
    assert metrics["participants"] == 2
    row = 4 * fed.groups[0].layout.floats.numel
    for client in CLIENTS:
        changed = not torch.equal(fed.row(client).floats, before[client])
        assert changed == (client in chosen)
        sent = fed.ledger.totals[client, fed.ledger.UP] - up[client]
        assert sent == (row if client in chosen else 0)
