"""q-FFL against its formulas in plain torch."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

from lightfed.algorithms.qffl import QFFL
from lightfed.local.client_group import ClientGroup
from tests.small import fleet_of, random_data, run_round

SIZES, RATE = (11, 6, 17, 9), 0.2
FLOPS, SIZE = 2 * 4 * 3, 4 * (4 * 3 + 3)  # of a sample, and bytes of the model


@pytest.mark.parametrize("q", [0.0, 0.5, 2.0])
def test_rounds_by_the_formulas(q: float) -> None:
    algorithm, lipschitz = QFFL(q, 1 / RATE), 1 / RATE
    data = random_data(SIZES, batch_size=1000, eval_batch_size=4)
    fed = fleet_of(
        [ClientGroup(4, lambda: nn.Linear(4, 3))], algorithm, data,
        optimizer=partial(SGD, lr=RATE), clients_per_round=3, epochs=2,
    )  # fmt: skip
    every = {k: next(iter(data.batches(data.client_plan(k, 1000)))) for k in range(4)}
    net = nn.Linear(4, 3)
    views = algorithm.model.layout.floats.views(algorithm.model.floats)
    with torch.no_grad():
        net.weight.copy_(views["net.weight"])
        net.bias.copy_(views["net.bias"])
    for t in range(3):
        w = nn.utils.parameters_to_vector(net.parameters()).detach().double()
        steps, h, samples = torch.zeros_like(w), 0.0, 0
        for k in fed.participants(t):
            x, y = every[k]
            nn.utils.vector_to_parameters(w.float(), net.parameters())
            loss = F.cross_entropy(net(x), y).item()
            optimizer = SGD(net.parameters(), lr=RATE)
            for _ in range(2):
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
            d = lipschitz * (w - nn.utils.parameters_to_vector(net.parameters()).detach())
            steps += loss**q * d
            h += q * loss ** (q - 1) * float(d.square().sum()) + lipschitz * loss**q
            samples += len(y)
        w = w - steps / h
        nn.utils.vector_to_parameters(w.float(), net.parameters())
        sums = run_round(fed, t)
        torch.testing.assert_close(views["net.weight"], net.weight.data, rtol=0, atol=1e-5)
        torch.testing.assert_close(views["net.bias"], net.bias.data, rtol=0, atol=1e-5)
        # Two epochs of a pass and its gradient, and a pass for the loss.
        assert sums["flops"] == FLOPS * samples * (3 * 2 + 1)
        assert (sums["bytes_up"], sums["bytes_down"]) == (3 * SIZE + 3 * 4, 3 * SIZE)
