"""Padding of every row stays zero, whatever core does to the row: kernels count on it."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedprox import FedProx
from lightfed.algorithms.standalone import Standalone
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.engine.session_setup import OptimizerFactory
from lightfed.local.client_group import ClientGroup
from lightfed.networks.cnn import Conv
from lightfed.state.server_model import ServerModel
from tests.small import data_of, fleet_of, row_held, run_round

SGD_PLAIN = partial(SGD, lr=0.1)
SGD_FULL = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)


def fleet(algorithm: Algorithm, optimizer: OptimizerFactory, levels: str) -> Fleet:
    rng = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 1, 4, 4, generator=rng), torch.arange(24) % 3
    data = data_of(x, y, [range(0, 12), range(12, 24)], batch_size=5)
    # 33 and 3 channels: tensors that end anywhere in their last 32 elements.
    model = partial(Conv, hidden=(33, 3))
    groups = [ClientGroup(2 // len(levels), model, level=level) for level in levels]  # type: ignore[arg-type]
    return fleet_of(groups, algorithm, data, optimizer=optimizer, clip=1.0, epochs=2)


def padding(row: Tensor, live: Tensor) -> Tensor:
    return row.masked_select(~live)


@pytest.mark.parametrize(
    ("algorithm", "levels", "optimizer"),
    [
        (FedAvg, "a", SGD_PLAIN),
        (FedAvg, "a", partial(Adam, lr=0.1)),
        (partial(FedAvg, buffers="local"), "a", SGD_FULL),
        (partial(FedProx, mu=0.5), "a", SGD_FULL),
        (HeteroFL, "ac", SGD_FULL),
        (Standalone, "ac", SGD_FULL),
    ],
)
def test_a_round_leaves_padding_zero(
    algorithm: Callable[[], Algorithm], levels: str, optimizer: OptimizerFactory
) -> None:
    fed = fleet(algorithm(), optimizer, levels)
    for t in range(2):
        run_round(fed, t)
    models = [m for m in fed.algorithm.modules() if isinstance(m, ServerModel)]
    trained = [(state.layout, fed.row(k)) for k in range(2) for state in [fed.state(k)]]
    deployed = [row_held(fed, k) for k in range(2)]
    for layout, row in [*((m.layout, m.row) for m in models), *trained, *deployed]:
        assert row.floats.any()
        assert not padding(row.floats, layout.floats.live()).any()
        assert not padding(row.integers, layout.integers.live()).any()
