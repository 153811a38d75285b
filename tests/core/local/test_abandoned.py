"""Of a session that raises nothing is left for the next one, nor for its client's own next one."""

from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import ASGD, SGD
from torchmetrics import MeanMetric
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd.aspg import ASPG
from lightfed.algorithms.fedbcd.fedbcd import FedBCD
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import SessionPlans
from lightfed.networks.mlp import MLP
from tests.small import Line, data_of, fleet_of, run_round

BROKEN = 1


def breaks(fleet: Fleet, client: int, *, after: int = 0) -> None:
    """The client's sessions raise where they would take the batch after so many."""

    class Broken(SessionPlans):
        @override
        def batches(self, k: int, *rest: Any) -> Any:
            for index, batch in enumerate(super().batches(k, *rest)):
                if k == client and index == after:
                    raise OSError("its samples cannot be read")
                yield batch

    plans = fleet.client_sessions.plans
    settings = {field.name: getattr(plans, field.name) for field in fields(plans) if field.init}
    fleet.client_sessions.plans = Broken(**settings)


@pytest.mark.parametrize("after", [0, 1])
def test_a_device_that_fails_keeps_the_model_and_not_the_point_ahead_of_it(after: int) -> None:
    """One of two devices does not get beyond a batch in any round but the first."""
    fleet = fleet_of(
        [ClientGroup(2, Line)], FedBCD(1, 2, gamma=0.5, steps=(2, 2)),
        data_of(torch.ones(8, 2), torch.full((8,), 9), [range(4), range(4, 8)], batch_size=1),
        optimizer=partial(ASPG, lr=0.01, momentum=0.9, box=(-1.0, 1.0)),
    )  # fmt: skip
    run_round(fleet, 0)
    breaks(fleet, BROKEN, after=after)
    before = fleet.row(BROKEN).floats.clone()
    for t in range(1, 9):
        assert run_round(fleet, t)["excluded"] == 1.0
    assert fleet.row(BROKEN).floats.abs().max() <= 1.0, "in the box"
    if after == 0:
        assert torch.equal(fleet.row(BROKEN).floats, before), "it has not taken a step"


class Torn(torch.autograd.Function):
    """Its gradient cannot be computed where an input is marked."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, torn: bool) -> Tensor:  # type: ignore[override]
        ctx.torn = torn
        return x.clone()

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        if ctx.torn:
            raise RuntimeError("out of memory")
        return grad, None


class TwoLines(Line):
    """The second line's gradient is there when that of the first cannot be computed."""

    def __init__(self) -> None:
        super().__init__()
        self.v = torch.nn.Parameter(torch.zeros(2))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        first = Torn.apply(x @ self.w, bool(y.max() > 100))
        return ((first + x @ self.v - y.clamp(max=1)) ** 2).sum()


def test_half_a_backward_pass_leaves_no_gradient_for_the_next_client() -> None:
    found = []
    for drawn in ([0, 1], [1]):
        algorithm = FedAvg()
        y = torch.tensor([900, 900, 1, 2])
        fleet = fleet_of(
            [ClientGroup(2, TwoLines)], algorithm,
            data_of(torch.ones(4, 2), y, [[0, 1], [2, 3]]), optimizer=partial(ASGD, lr=0.1),
        )  # fmt: skip
        fleet.participants = lambda t, drawn=drawn: drawn  # type: ignore[method-assign,misc]
        for t in range(2):
            metrics = run_round(fleet, t)
        assert metrics["excluded"] == len(drawn) - 1
        found.append(algorithm.model.floats.tolist())
    assert found[0] == found[1]


class Metered(Line):
    """Logs a metric, as Lightning's users do, at the end of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.mean.update(batch[1].float())
        if batch[1].max() > 100:
            raise ValueError("a sample it cannot take")
        self.log("mean", self.mean)
        return super().training_step(batch, batch_idx)


def test_a_metric_that_was_not_logged_is_not_the_next_clients() -> None:
    fleet = fleet_of(
        [ClientGroup(2, Metered)], FedAvg(),
        data_of(torch.ones(4, 2), torch.tensor([900, 900, 1, 2]), [[0, 1], [2, 3]]),
    )  # fmt: skip
    assert run_round(fleet, 0)["mean"] == 1.5


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_heterofl_goes_on_with_a_client_that_has_no_batch_to_mask(broken: int) -> None:
    x, y = torch.randn(12, 4), torch.tensor([0, 1] * 2 + [1, 2] * 2 + [0, 2] * 2)
    parts = [range(4), range(4, 8), range(8, 12)]
    fleet = fleet_of(
        [ClientGroup(3, partial(MLP, hidden=(6,)))], HeteroFL(), data_of(x, y, parts, classes=3),
        optimizer=partial(SGD, lr=0.1), side_by_side="off",
    )  # fmt: skip
    breaks(fleet, broken)
    for t in range(2):
        assert run_round(fleet, t)["excluded"] == 1.0
