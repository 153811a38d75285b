"""The figures of regressions, of targets of any offset and scale."""

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightfed.models.client_module import Regressor


class Given(nn.Module):
    """Returns the predictions that its inputs are."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x


def figures(predicted: Tensor, target: Tensor, batch: int = 100) -> dict[str, float]:
    """What a client reports of a test set, in batches."""
    client = Regressor(Given())
    logged: dict[str, object] = {}
    client.log = lambda name, metric: logged.update({name: metric})  # type: ignore[assignment, misc]
    for start in range(0, len(target), batch):
        part = slice(start, start + batch)
        client.validation_step((predicted[part], target[part]), 0)
    return {name: float(metric.compute()) for name, metric in logged.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("offset", "scale"),
    [(0.0, 1.0), (1013.0, 0.5), (100_000.0, 1.0), (-3e6, 50.0), (0.0, 1e-4), (0.0, 1e5)],
)
def test_figures_are_right_far_from_zero_and_for_any_scale(offset: float, scale: float) -> None:
    draw = torch.Generator().manual_seed(0)
    y = offset + scale * torch.randn(2000, generator=draw)
    predicted = y + 0.1 * scale * torch.randn(2000, generator=draw)
    found = figures(predicted, y)
    error, spread = (predicted.double() - y.double()), y.double() - y.double().mean()
    expected = 1 - float(error.square().sum() / spread.square().sum())
    assert found["r2"] == pytest.approx(expected, abs=1e-6)
    assert found["loss"] == pytest.approx(float(error.square().mean()), rel=1e-9)
    assert found["mae"] == pytest.approx(float(error.abs().mean()), rel=1e-9)
    assert 0.98 < expected < 1


def test_the_mean_of_several_outputs() -> None:
    draw = torch.Generator().manual_seed(0)
    y = torch.tensor([1013.0, 0.0]) + torch.randn(500, 2, generator=draw)
    predicted = y + torch.tensor([0.1, 0.5]) * torch.randn(500, 2, generator=draw)
    error, spread = predicted.double() - y.double(), y.double() - y.double().mean(0)
    expected = (1 - error.square().sum(0) / spread.square().sum(0)).mean()
    assert figures(predicted, y)["r2"] == pytest.approx(float(expected), abs=1e-9)


@pytest.mark.parametrize(("error", "expected"), [(0.0, 1.0), (0.5, 0.0)])
def test_equal_targets(error: float, expected: float) -> None:
    y = torch.full((300,), 1013.25)
    assert figures(y + error, y)["r2"] == expected


def test_counts_are_exact_beyond_float32() -> None:
    """2^24 samples, and then some: a float32 counter would stand still."""
    client = Regressor(Given())
    client.r2.update(torch.zeros(4), torch.tensor([-1.0, 1.0, -1.0, 1.0]).double())
    client.r2.total += 2**24
    before = int(client.r2.total)
    client.r2.update(torch.zeros(1).double(), torch.zeros(1).double())
    assert int(client.r2.total) == before + 1
    assert client.mse.sum_squared_error.dtype == torch.float64
    assert client.mae.sum_abs_error.dtype == torch.float64
