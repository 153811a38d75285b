"""The gradient of one batch, which says where masks grow."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.standalone import Standalone
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.utils.rng import torch_generator
from tests.core.engine.spy import Noisy
from tests.small import fleet_of, random_data, run_round, state_dict


class Net(nn.Module):
    """Statistics, dropout, a layer that is not trained, and one that is not used."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.drop = nn.Dropout(0.5)
        self.unused = nn.Linear(5, 2)
        self.head = nn.Linear(5, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.frozen(x))))


def fleet(model: Any, **settings: Any) -> Fleet:
    data = random_data([10, 7, 12], batch_size=4)
    optimizer = partial(SGD, lr=0.2)
    return fleet_of([ClientGroup(3, model)], Standalone(), data, optimizer=optimizer, **settings)


def test_it_is_that_of_one_batch_in_evaluation() -> None:
    fed = fleet(Net)
    run_round(fed, 0)
    layout, row = fed.groups[0].layout, fed.row(1)
    before = row.floats.clone(), row.integers.clone()
    found = layout.floats.views(fed.gradient(1, 3))
    assert torch.equal(row.floats, before[0])
    assert torch.equal(row.integers, before[1])
    net = Net()
    net.load_state_dict(state_dict(layout, row), strict=False)
    net.frozen = fed.groups[0].module.net.frozen  # type: ignore[union-attr, assignment]
    net.eval()
    order = torch_generator(0, "gradient-order", 3, 1)
    x, y = next(
        iter(fed.data.batches(fed.data.train_plan(1, order=order, augment=None, limit=1, t=3)))
    )
    assert len(y) == 4
    F.cross_entropy(net(x), y).backward()
    for name, parameter in net.named_parameters():
        if not parameter.requires_grad:
            continue
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[f"net.{name}"], grad, rtol=0, atol=1e-6)
    assert found["net.head.weight"].any()
    assert not any(value.any() for name, value in found.items() if "running" in name)


def test_it_is_drawn_by_round_and_client() -> None:
    fed = fleet(Noisy)
    fed.row(2).copy_(fed.row(0))
    drawn = {(k, t): fed.gradient(k, t) for k in (0, 2) for t in (0, 1)}
    torch.rand(7)
    again = {(k, t): fed.gradient(k, t) for k, t in drawn}
    assert all(torch.equal(drawn[name], again[name]) for name in drawn)
    assert len({tuple(gradient.tolist()) for gradient in drawn.values()}) == 4


def test_it_is_of_full_precision_where_training_is_mixed() -> None:
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=False)
    mixed, full = fleet(Net, precision=autocast), fleet(Net)
    assert torch.equal(mixed.gradient(0, 0), full.gradient(0, 0))


def test_rows_on_the_host_have_the_same() -> None:
    device, host = fleet(Net), fleet(Net, host_rows=True)
    with torch.inference_mode():
        host.bind(0)  # evaluated before
    for client in range(3):
        assert torch.equal(host.gradient(client, 1), device.gradient(client, 1))
