"""FedRolex against recorded runs of the released code, and the promises."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightfed.local.client_group import ClientGroup
from lightfed.models.networks.cnn import Conv
from lightfed.testing import conformance
from lightfed.utils.counts import rounded_up
from tests.strangers.fedrolex import FedRolex
from tests.strangers.golden import RANKS, Recorded


class Plain(nn.Module):
    """Two linear layers or convolutions, then a classifier, by their recorded names."""

    def __init__(
        self, kind: str, inputs: int, hidden: list[int], classes: int, rate: float = 1.0
    ) -> None:
        super().__init__()
        a, b = (rounded_up(width * rate) for width in hidden)
        mlp = kind == "mlp"
        self.block = nn.Module()
        self.conv1 = nn.Linear(inputs, a) if mlp else nn.Conv2d(inputs, a, 3, padding=1)
        second = nn.Linear(a, b) if mlp else nn.Conv2d(a, b, 3, stride=2, padding=1)
        self.block.conv2 = second
        self.linear = nn.Linear(b, classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.block.get_submodule("conv2")(x))
        return self.linear(x.flatten(2).mean(2) if x.dim() > 2 else x)


@pytest.mark.parametrize(
    ("name", "kind", "inputs", "hidden", "rates", "classes"),
    [
        ("mlp_count", "mlp", 10, [16, 12], [1.0, 0.5, 0.25, 0.5], 5),
        ("mlp_uncovered", "mlp", 6, [10, 7], [0.5, 0.3, 0.2], 3),
        ("conv_labels_count", "conv", 3, [8, 12], [0.5, 0.25, 1.0], 4),
    ],
)
def test_the_recorded_runs(
    name: str,
    kind: str,
    inputs: int,
    hidden: list[int],
    rates: list[float],
    classes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    algorithm = FedRolex(mask=kind == "conv")
    model = partial(Plain, kind, inputs, hidden, classes)
    groups = [ClientGroup(1, model, rate=rate) for rate in (1.0, *rates)]
    run = Recorded("fedrolex", name, algorithm, groups)
    algorithm.model.floats.copy_(run.row("init"))
    for t, _ in run.rounds(monkeypatch):
        expected = run.row(f"r{t}/server")
        torch.testing.assert_close(algorithm.model.floats, expected, rtol=0, atol=3e-6)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", RANKS)
def test_the_promises(ranks: tuple[int, ...]) -> None:
    conformance(FedRolex, model=partial(Conv, hidden=(8, 12)), levels="abd", ranks=ranks)
