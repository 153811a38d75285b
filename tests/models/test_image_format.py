"""Which networks get images in channels_last, and what they get instead."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.engine.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.models.image_format import channels_first, columns_of, suits_channels_last
from lightfed.models.networks.cifar_resnet import ResNet18GN
from lightfed.models.networks.cnn import Conv, SimpleCNN
from lightfed.models.networks.mlp import MLP
from lightfed.models.networks.vgg import VGG
from tests.pretend import DEVICE, pretended_device
from tests.small import data_of, fit


@pytest.mark.parametrize(
    ("network", "suits"),
    [
        (Conv(hidden=(8, 16)), True),
        (Conv(hidden=(16, 7)), False),
        (Conv(hidden=(32, 64), norm="gn"), True),
        (Conv(hidden=(28, 64), norm="gn"), False),
        (Conv(hidden=(64,), norm="in"), False),
        (ResNet18GN(), False),
        (nn.Sequential(nn.Conv2d(3, 64, 3), nn.InstanceNorm2d(64)), False),
        (SimpleCNN(channels=(2, 4)), True),
        (nn.Sequential(nn.Flatten(), nn.Linear(9, 4), nn.BatchNorm1d(4)), True),
        (MLP(), True),
        (VGG(depth=11), True),
        (nn.Sequential(nn.Conv2d(3, 64, 3), nn.Dropout(), nn.Flatten(), nn.Linear(64, 2)), False),
        (nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Dropout(), nn.Linear(64, 2)), True),
    ],
)
def test_networks_that_normalise_few_channels_together_or_drop_pixels_do_not_suit(
    network: nn.Module, suits: bool
) -> None:
    assert suits_channels_last(network) == suits


class Watched(Conv):
    """Notes whether the channels of a pixel are adjacent in the batches of the clients."""

    def __init__(self, last: set[bool], hidden: tuple[int, int], input_shape: Any) -> None:
        super().__init__(2, input_shape, hidden=hidden)
        self.last = last

    @override
    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 6:
            self.last.add(x.stride(1) == 1)
        return super().forward(x)


@pytest.mark.parametrize("planes", [1, 3])
@pytest.mark.parametrize(
    ("given", "width", "last"),
    [("auto", 8, True), ("auto", 4, False), (True, 4, True), (False, 8, False)],
)
def test_clients_get_the_format_that_suits_them_unless_one_is_configured(
    planes: int, given: Any, width: int, last: bool, tmp_path: Path
) -> None:
    images = torch.randn(12, planes, 16, 16, generator=torch.Generator().manual_seed(0))
    data = data_of(images, torch.arange(12) % 2, [range(6), range(6, 12)], channels_last=given)
    found: set[bool] = set()
    clients = [ClientGroup(2, partial(Watched, found, (width, 8)))]
    optimizer = partial(SGD, lr=0.1)
    federation = Federation(FedAvg(), clients, optimizer=optimizer, side_by_side="off")
    fit(federation, data, tmp_path)
    assert found == {last}
    assert (federation.fleet.groups[0].session.channels_last is not None) == last


def test_its_values_stay() -> None:
    images = torch.randn(2, 5, 5, 3).permute(0, 3, 1, 2)
    (found,) = channels_first(MLP(), (images,))
    assert torch.equal(found, images)
    assert found.is_contiguous()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        ((3, 3), (1, 1), (1, 1), (1, 1)),
        ((3, 2), (2, 1), (1, 0), (2, 1)),
        ((5, 5), (1, 1), (2, 2), (3, 3)),
        ((1, 1), (1, 1), (0, 0), (1, 1)),
    ],
)
def test_columns_on_a_card_have_the_bits_of_unfold(
    how: tuple[Any, ...], last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(3, 2, 4, 7, 8, generator=torch.Generator().manual_seed(1))
    if last:
        x = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    x.requires_grad_()
    expected = columns_of(x, *how)
    [theirs] = torch.autograd.grad(expected.square().sum(), x)
    with pretended_device(monkeypatch):
        there = x.detach().to(DEVICE).requires_grad_()
        found = columns_of(there, *how)
        [ours] = torch.autograd.grad(found.square().sum(), there)
    assert torch.equal(found.here, expected)  # type: ignore[attr-defined]
    assert torch.equal(ours.here, theirs)  # type: ignore[attr-defined]
