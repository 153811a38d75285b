"""Residual networks of small images: torchvision's arithmetic, shortcuts."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet18

from lightfed.networks.cifar_resnet import (
    CIFARResNet,
    PadShortcut,
    ResidualBlock,
    ResNet18GN,
)
from lightfed.state.rows import ModelLayout
from lightfed.utils.errors import UserError
from tests.core.models.client_cases import random


def test_fedbcds_has_padded_shortcuts_and_biases() -> None:
    model = CIFARResNet(depth=20, shortcut="pad", conv_bias=True)
    assert ModelLayout.of(model).parameter_numel == 270_410
    assert sum(isinstance(m, PadShortcut) for m in model.modules()) == 2
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convs) == 19
    assert not any(conv.bias.any() for conv in convs if conv.bias is not None)


@torch.no_grad()
def test_a_padded_shortcut_adds_every_second_pixel_to_the_first_channels() -> None:
    block = ResidualBlock(2, 5, 2, norm=nn.BatchNorm2d, shortcut="pad", conv_bias=False).eval()
    block.body[-1].weight.zero_()  # type: ignore[operator]
    x = random(2, 2, 5, 4)
    y = block(x)
    assert torch.equal(y[:, :2], x[:, :, [0, 2, 4]][..., [0, 2]].relu())
    assert not y[:, 2:].any()


@torch.no_grad()
def test_a_block_is_its_formula() -> None:
    block = ResidualBlock(2, 4, 2, norm=nn.BatchNorm2d, shortcut="conv", conv_bias=True).eval()
    p = dict(block.named_parameters())
    scale = (1 + 1e-5) ** -0.5  # a fresh batch normalisation in evaluation

    def conv(x: Tensor, name: str, stride: int) -> Tensor:
        weight = p[f"{name}.weight"]
        return scale * F.conv2d(x, weight, p[f"{name}.bias"], stride, weight.shape[-1] // 2)

    x = random(2, 2, 6, 6)
    expected = conv(conv(x, "body.0", 2).relu(), "body.3", 1) + conv(x, "shortcut.0", 2)
    torch.testing.assert_close(block(x), expected.relu())


def test_convolutions_start_by_their_outputs() -> None:
    for conv in CIFARResNet(depth=20).modules():
        if isinstance(conv, nn.Conv2d):
            pixels = conv.kernel_size[0] ** 2
            std = (2 / (pixels * conv.out_channels)) ** 0.5
            assert conv.weight.std().item() == pytest.approx(std, rel=0.15)


@torch.no_grad()
def test_resnet18gn_is_torchvisions_with_another_norm_and_stem() -> None:
    model = ResNet18GN()
    assert not list(model.buffers())
    theirs = resnet18(num_classes=10, norm_layer=partial(nn.GroupNorm, 32))
    theirs.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    theirs.maxpool = nn.Identity()
    for ours, copy in zip(model.parameters(), theirs.parameters(), strict=True):
        copy.copy_(ours)
    x = random(2, 3, 32, 32)
    torch.testing.assert_close(model(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_what_cannot_be_built() -> None:
    with pytest.raises(ValueError, match="divisible"):
        ResNet18GN(width=16)
    with pytest.raises(UserError, match=r"^input_shape: samples of shape \(1014,\)"):
        CIFARResNet(4, (1014,), depth=20)
