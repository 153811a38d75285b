"""VGG: torchvision's arithmetic, small versions."""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchvision.models.vgg import cfgs, make_layers

from lightfed.networks.vgg import VGG, Depth
from lightfed.utils.errors import UserError
from tests.core.models.client_cases import random

DEPTHS = get_args(Depth)


@torch.no_grad()
def test_its_features_are_those_of_torchvision() -> None:
    model = VGG(depth=11, hidden=4).eval()
    theirs = make_layers(cfgs["A"], batch_norm=True).eval()
    theirs.load_state_dict(model.features.state_dict())
    x = random(2, 3, 32, 32)
    assert torch.equal(model.features(x), theirs(x))


@settings(max_examples=6)
@given(width=st.floats(0.01, 0.2), hidden=st.integers(1, 9), depth=st.sampled_from(DEPTHS))
def test_channels_are_scaled_and_rounded_up(width: float, hidden: int, depth: Depth) -> None:
    with torch.device("meta"):
        narrow = VGG(5, depth=depth, width=width, hidden=hidden)
        full = VGG(depth=depth)
    channels = channels_of(narrow)
    for number, full_number in zip(channels, channels_of(full), strict=True):
        assert number - 1 < full_number * width <= number

    linears = [layer for layer in narrow.classifier if isinstance(layer, nn.Linear)]
    assert [layer.in_features for layer in linears] == [channels[-1], hidden, hidden]
    assert [layer.out_features for layer in linears] == [hidden, hidden, 5]


def channels_of(model: VGG) -> list[int]:
    """Return the output channels of all convolutions."""
    return [layer.out_channels for layer in model.modules() if isinstance(layer, nn.Conv2d)]


def test_what_cannot_be_built() -> None:
    with pytest.raises(UserError, match=r"^input_shape: samples of shape \(64,\); use images"):
        VGG(10, (64,), depth=11)
