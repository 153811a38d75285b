"""q-FFL against its formulas in plain torch."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from lightfed.algorithms.qffl import QFFL
from lightfed.local.client_group import ClientGroup
from tests.small import fleet_of, random_data, run_round

SIZES = (11, 6, 17, 9)
RATE = 0.2
FLOPS = 2 * 4 * 3  # of a sample's forward pass
MODEL_BYTES = 4 * (4 * 3 + 3)


def vector_of(net: nn.Module) -> Tensor:
    """Return the parameters of a network in float64, copied."""
    return nn.utils.parameters_to_vector(net.parameters()).detach().double()


def trained(net: nn.Module, w: Tensor, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    """Return F_k(w), and w_k after two steps from w on all samples of a client."""
    nn.utils.vector_to_parameters(w.float(), net.parameters())
    loss = F.cross_entropy(net(x), y).item()
    optimizer = SGD(net.parameters(), lr=RATE)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return loss, vector_of(net)


@pytest.mark.parametrize("q", [0.0, 0.5, 2.0])
def test_rounds_by_the_formulas(q: float) -> None:
    L = 1 / RATE
    algorithm = QFFL(q, L)
    data = random_data(SIZES, batch_size=1000, eval_batch_size=4)
    fed = fleet_of(
        [ClientGroup(4, lambda: nn.Linear(4, 3))],
        algorithm,
        data,
        optimizer=partial(SGD, lr=RATE),
        clients_per_round=3,
        epochs=2,
    )
    samples_of = {}
    for k in range(4):
        (samples_of[k],) = data.batches(data.client_plan(k, 1000))

    server = algorithm.model.layout.floats.views(algorithm.model.floats)
    net = nn.Linear(4, 3)
    with torch.no_grad():
        net.weight.copy_(server["net.weight"])
        net.bias.copy_(server["net.bias"])

    for t in range(3):
        w = vector_of(net)
        step = torch.zeros_like(w)  # sum_k D_k
        h = 0.0  # sum_k h_k
        samples = 0
        for k in fed.participants(t):
            x, y = samples_of[k]
            loss, w_k = trained(net, w, x, y)
            d = L * (w - w_k)
            step += loss**q * d
            h += q * loss ** (q - 1) * float(d.square().sum()) + L * loss**q
            samples += len(y)
        nn.utils.vector_to_parameters((w - step / h).float(), net.parameters())

        metrics = run_round(fed, t)
        torch.testing.assert_close(server["net.weight"], net.weight.data, rtol=0, atol=1e-5)
        torch.testing.assert_close(server["net.bias"], net.bias.data, rtol=0, atol=1e-5)
        # Two epochs of a pass and its gradient, and a pass for the loss.
        assert metrics["flops"] == FLOPS * samples * (3 * 2 + 1)
        assert metrics["bytes_up"] == 3 * (MODEL_BYTES + 4)
        assert metrics["bytes_down"] == 3 * MODEL_BYTES
