"""Several steps on every batch: `fed.train(..., repeat=n)`."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from tests.small import Line, data_of, fleet_of, run_round

X, Y = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 1.0]]), torch.tensor([1, 2, 0])


class Repeats(FedAvg):
    """Three steps on every batch."""

    @override
    def round(self, fed: Fleet, t: int) -> None:
        fed.send(self.model, [0])
        fed.train([0], t, repeat=3)
        fed.merge([0], into=self.model)


class Scheduled(Line):
    """Halves its rate after every epoch."""

    @override
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.02)
        return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]


@pytest.mark.parametrize(
    ("work", "batches"), [({"epochs": 2}, 4), ({"steps": 3}, 3), ({"epochs": 5, "limit": 3}, 3)]
)
@pytest.mark.parametrize("model", [Line, Scheduled])
def test_a_batch_is_trained_on_so_many_times(
    model: type[Line], work: dict[str, int], batches: int
) -> None:
    algorithm, data = Repeats(), data_of(X, Y, [range(3)], batch_size=2)
    optimizer = partial(SGD, lr=0.02)
    fed = fleet_of([ClientGroup(1, model)], algorithm, data, optimizer=optimizer, **work)
    seen = list(fed.client_sessions.plans.batches(0, 0, batches, ""))
    run_round(fed, 0)
    w = torch.zeros(2)
    for number, (x, y) in enumerate(seen):
        for _ in range(3):
            rate = 0.02 * 0.5 ** (number // 2 if model is Scheduled else 0)
            w = w - rate * x.T @ (x @ w - y)
    torch.testing.assert_close(algorithm.model.floats[:2], w)
