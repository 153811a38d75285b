"""Which networks get images in channels_last, and what they get instead."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.models.image_format import channels_first, suits_channels_last
from lightfed.networks.cifar_resnet import ResNet18GN
from lightfed.networks.cnn import Conv, SimpleCNN
from lightfed.networks.mlp import MLP
from lightfed.networks.vgg import VGG
from lightfed.utils.errors import UserError
from tests.core.models.client_cases import random
from tests.small import data_of, fit


@pytest.mark.parametrize(
    ("network", "suits"),
    [
        (Conv(hidden=(8, 16)), True),
        (Conv(hidden=(16, 7)), False),
        (Conv(hidden=(32, 64), norm="gn"), True),
        (Conv(hidden=(28, 64), norm="gn"), False),
        (Conv(hidden=(64,), norm="in"), False),
        (ResNet18GN(width=8, groups=4), False),
        (nn.Sequential(nn.Conv2d(3, 64, 3), nn.InstanceNorm2d(64)), False),
        (SimpleCNN(channels=(2, 4)), True),
        (nn.Sequential(nn.Flatten(), nn.Linear(9, 4), nn.BatchNorm1d(4)), True),
        (MLP(), True),
        (VGG(depth=11, width=0.125, hidden=8), True),
        (nn.Sequential(nn.Conv2d(3, 64, 3), nn.Dropout(), nn.Flatten(), nn.Linear(64, 2)), False),
        (nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Dropout(), nn.Linear(64, 2)), True),
        (nn.Conv2d(7, 64, 1, stride=(1, 2)), False),
        (nn.Conv2d(8, 64, 1, stride=2), True),
        (nn.Conv2d(7, 64, 1), True),
        (nn.Conv2d(7, 64, 2, stride=2), True),
    ],
)
def test_networks_that_are_slow_or_guarded_or_drop_pixels_do_not_suit(
    network: nn.Module, suits: bool
) -> None:
    assert suits_channels_last(network) == suits


def trained(
    model: Any, folder: Path, *, planes: int = 3, channels_last: Any = "auto"
) -> Federation:
    """A round of two clients with six images each."""
    images, y = random(12, planes, 16, 16), torch.arange(12) % 2
    data = data_of(images, y, [range(6), range(6, 12)], channels_last=channels_last)
    federation = Federation(
        FedAvg(), [ClientGroup(2, model)], optimizer=partial(SGD, lr=0.1), side_by_side="off"
    )
    fit(federation, data, folder)
    return federation


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


@pytest.mark.parametrize(
    ("planes", "given", "width", "last"),
    [(3, "auto", 8, True), (1, "auto", 4, False), (3, True, 4, True), (1, False, 8, False)],
)
def test_clients_get_the_format_that_suits_them_unless_one_is_configured(
    planes: int, given: Any, width: int, last: bool, tmp_path: Path
) -> None:
    found: set[bool] = set()
    trained(partial(Watched, found, (width, 8)), tmp_path, planes=planes, channels_last=given)
    assert found == {last}


class Shortcut(nn.Module):
    """A strided 1x1 convolution of few channels, and what it has met."""

    def __init__(self, num_classes: int, input_shape: Any) -> None:
        super().__init__()
        self.first, self.strided = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 1, stride=2)
        self.last = nn.Linear(8 * 7 * 7, num_classes)
        self.formats: set[bool] = set()
        # After the hooks of a run, which are registered later.
        self.strided.register_forward_hook(lambda _, images, __: self._note(*images))

    def _note(self, images: Tensor) -> None:
        self.formats.add(images.is_contiguous())

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.strided(self.first(x)).flatten(1))


class UserShortcut(L.LightningModule):
    """A user's module, whose steps call the network and not the module."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = Shortcut(num_classes, None)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))


@pytest.mark.parametrize("model", [Shortcut, UserShortcut])
def test_a_guarded_convolution_gets_torchs_own_format(model: Any, tmp_path: Path) -> None:
    federation = trained(model, tmp_path)
    module: Any = federation.fleet.groups[0].module
    assert module.net.formats == {True}
    with pytest.raises(UserError, match=r"data\.channels_last: .*net\.strided"):
        trained(model, tmp_path, channels_last=True)


def test_its_values_stay() -> None:
    images = torch.randn(2, 5, 5, 3).permute(0, 3, 1, 2)
    (found,) = channels_first(MLP(), (images,))
    assert torch.equal(found, images)
    assert found.is_contiguous()
