"""The pre-activation ResNet: where its parts are, and its groups."""

from math import ceil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightfed.networks.resnet import PreActBlock, PreActResNet
from tests.core.models.client_cases import random


def small(num_classes: int = 3, channels: int = 3, **given: Any) -> PreActResNet:
    given = {"hidden": (4, 8), "blocks": (2, 1)} | given
    return PreActResNet(num_classes, (channels, 8, 8), **given)


def expected_logits(model: PreActResNet, x: Tensor, divisor: float) -> Tensor:
    """The network of one stage of one block without norms, as a formula of its parameters."""
    own = dict(model.named_parameters())
    block = "stages.0.0"
    x = F.conv2d(x, own["stem.weight"], padding=1)
    first = y = F.relu(x / divisor)
    for index in (0, 2, 4):
        if f"{block}.body.{index}.weight" in own:
            weight = own[f"{block}.body.{index}.weight"]
            y = F.relu(y / divisor) if index else y
            y = F.conv2d(y, weight, padding=weight.shape[-1] // 2)
    shortcut = own.get(f"{block}.shortcut.weight")
    y = y + (x if shortcut is None else F.conv2d(first, shortcut))
    return F.relu(y / divisor).mean((2, 3)) @ own["linear.weight"].T + own["linear.bias"]


@pytest.mark.parametrize("scaler", [True, False])
def test_the_scaler_is_at_the_input_of_every_norm(scaler: bool) -> None:
    model = PreActResNet(
        3, (2, 5, 5), hidden=(6,), blocks=(1,), norm="none", scaler=scaler, rate=0.5
    )
    x = random(2, 2, 5, 5)
    torch.testing.assert_close(model.train()(x), expected_logits(model, x, 0.5 if scaler else 1.0))
    torch.testing.assert_close(model.eval()(x), expected_logits(model, x, 1.0))


def test_the_identity_shortcut_adds_the_unscaled_input() -> None:
    block = small(rate=0.5).stages[0][1]  # type: ignore[index]
    assert isinstance(block, PreActBlock)
    assert block.shortcut is None
    with torch.no_grad():
        block.body[-1].weight.zero_()  # type: ignore[operator]
    x = random(2, 2, 4, 4)
    assert torch.equal(block.train()(x), x)


def test_the_shortcut_convolution_takes_the_activated_input() -> None:
    block = small(rate=0.5).stages[1][0]  # type: ignore[index]
    assert isinstance(block, PreActBlock)
    assert block.shortcut is not None
    with torch.no_grad():
        block.body[-1].weight.zero_()  # type: ignore[operator]
    x = random(4, 2, 4, 4)
    assert torch.equal(block(x), block.shortcut(block.activate(x)))


@settings(deadline=None, max_examples=25)
@given(rate=st.floats(0.05, 1.0))
def test_group_norm_needs_four_whole_groups(rate: float) -> None:
    if not any(width % 4 for width in (ceil(8 * rate), ceil(16 * rate))):
        small(hidden=(8, 16), norm="gn", rate=rate)
        return
    with pytest.raises(ValueError, match="divisible"):
        small(hidden=(8, 16), norm="gn", rate=rate)
