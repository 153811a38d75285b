"""VGG: torchvision's arithmetic, small versions."""

from typing import Any, get_args

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


def small(depth: Depth = 11, channels: int = 3, size: int = 32, **given: Any) -> VGG:
    given = {"width": 0.0625, "hidden": 8} | given
    return VGG(5, (channels, size, size), depth=depth, **given)


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
        model, full = small(depth, width=width, hidden=hidden), VGG(depth=depth)
    convs, wide = (
        [m.out_channels for m in net.modules() if isinstance(m, nn.Conv2d)] for net in (model, full)
    )
    assert all(c - 1 < w * width <= c for c, w in zip(convs, wide, strict=True))
    linears = [m for m in model.classifier if isinstance(m, nn.Linear)]
    assert [m.in_features for m in linears] == [convs[-1], hidden, hidden]
    assert [m.out_features for m in linears] == [hidden, hidden, 5]


def test_what_cannot_be_built() -> None:
    with pytest.raises(UserError, match=r"^input_shape: samples of shape \(64,\); use images"):
        VGG(10, (64,), depth=11)
