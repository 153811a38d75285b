"""Convolutional networks: parameter counts of the papers, widths, and where things are."""

import json
from functools import partial
from math import ceil

import pytest
import torch
from torch import nn

from lightfed.models.networks.cnn import Conv, SimpleCNN, make_norm
from lightfed.models.networks.layers import Scaler
from lightfed.state.rows import ModelLayout
from tests.small import GOLDEN

RATES = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.125, "e": 0.0625}


def numel(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("level", RATES)
def test_conv_has_the_parameters_of_the_released_code(level: str) -> None:
    counts = json.loads((GOLDEN / "heterofl/param_counts.json").read_text())["conv_mnist_10classes"]
    model = Conv(rate=RATES[level])
    assert numel(model) == counts[level]
    assert ModelLayout.of(model).parameter_numel == counts[level]


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("make", [partial(Conv, norm="bn"), partial(Conv, norm="none"), SimpleCNN])
@pytest.mark.parametrize("rate", [0.5, 0.3, 0.0625])
def test_a_narrow_model_is_a_leading_slice_of_the_full_one(
    make: partial[nn.Module], rate: float
) -> None:
    full, narrow = (shapes(make(5, (1, 16, 16), rate=r)) for r in (1.0, rate))
    assert list(full) == list(narrow)
    for name, wide in full.items():
        assert len(wide) == len(narrow[name])
        assert all(n <= w for n, w in zip(narrow[name], wide, strict=True)), name
    last = list(full)[-1]
    assert narrow[last] == full[last] == (5,)  # every model has all classes


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
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    plain = Conv(3, (1, 8, 8), hidden=(4, 8), norm="none", rate=0.5, scaler=False)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.train()(x), 4.0 * plain.train()(x))
    assert torch.equal(model.eval()(x), plain.eval()(x))


@pytest.mark.parametrize(("norm", "groups"), [("in", 8), ("ln", 1), ("gn", 4)])
def test_norms_are_groups_of_channels(norm: str, groups: int) -> None:
    layer = make_norm(norm, 8)  # type: ignore[arg-type]
    assert isinstance(layer, nn.GroupNorm)
    assert (layer.num_groups, layer.num_channels) == (groups, 8)
    x = torch.randn(2, 8, 3, 3, generator=torch.Generator().manual_seed(0))
    grouped = layer(x).view(2, groups, -1)
    assert grouped.mean(-1).abs().max() < 1e-5
    assert (grouped.var(-1, unbiased=False) - 1).abs().max() < 1e-3
