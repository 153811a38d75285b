"""Convolutional networks: widths, and where scalers and norms are."""

from math import ceil

import pytest
import torch
from torch import nn

from lightfed.networks.cnn import Conv, make_norm
from lightfed.networks.layers import Scaler
from tests.core.models.client_cases import random, shapes


@pytest.mark.parametrize("rate", [1.0, 0.3, 0.07])
def test_hidden_widths_are_rounded_up(rate: float) -> None:
    found = shapes(Conv(7, (3, 8, 8), hidden=(6, 10, 33), rate=rate))
    widths = [ceil(6 * rate), ceil(10 * rate), ceil(33 * rate)]
    assert [found[f"blocks.{b}.weight"][0] for b in (0, 5, 10)] == widths
    assert found["blocks.0.weight"][1] == 3
    assert found["blocks.16.weight"] == (7, widths[-1])


def test_the_scaler_divides_in_training_alone() -> None:
    x = torch.tensor([1.0, -3.0])
    scaler = Scaler(0.25)
    assert scaler.train()(x).tolist() == [4.0, -12.0]
    assert scaler.eval()(x).tolist() == [1.0, -3.0]


def test_conv_scales_by_its_rate() -> None:
    # Without normalisation and biases a factor passes ReLU and pooling: 1 / rate of each block.
    model = Conv(3, (1, 8, 8), hidden=(4, 8), norm="none", rate=0.5)
    with torch.no_grad():
        for block in (0, 5):
            model.blocks[block].bias.zero_()  # type: ignore[operator]
    x = random(2, 1, 8, 8)
    plain = Conv(3, (1, 8, 8), hidden=(4, 8), norm="none", rate=0.5, scaler=False)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.train()(x), 4.0 * plain.train()(x))
    assert torch.equal(model.eval()(x), plain.eval()(x))


@pytest.mark.parametrize(("norm", "groups"), [("in", 8), ("ln", 1), ("gn", 4)])
def test_norms_are_groups_of_channels(norm: str, groups: int) -> None:
    layer = make_norm(norm, 8)  # type: ignore[arg-type]
    assert isinstance(layer, nn.GroupNorm)
    assert (layer.num_groups, layer.num_channels) == (groups, 8)
    x = random(2, 8, 3, 3)
    grouped = layer(x).view(2, groups, -1)
    assert grouped.mean(-1).abs().max() < 1e-5
    assert (grouped.var(-1, unbiased=False) - 1).abs().max() < 1e-3
