"""The pre-activation ResNet: the papers' sizes, where its parts are, how widths nest."""

import json
from itertools import pairwise
from math import ceil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightfed.models.networks.resnet import PreActBlock, PreActResNet
from lightfed.state.rows import ModelLayout
from tests.small import GOLDEN

RATES = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.125, "e": 0.0625}
COUNTS = json.loads((GOLDEN / "heterofl/param_counts.json").read_text())


def small(num_classes: int = 3, channels: int = 3, **given: Any) -> PreActResNet:
    given = {"hidden": (4, 8), "blocks": (2, 1)} | given
    return PreActResNet(num_classes, (channels, 8, 8), **given)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("level", RATES)
@pytest.mark.parametrize(
    ("blocks", "key"),
    [
        ((2, 2, 2, 2), "resnet_cifar10_blocks_2222_released_code"),
        ((1, 1, 1, 2), "resnet_cifar10_blocks_1112_as_in_paper_table"),
    ],
)
def test_it_has_the_papers_numbers_of_parameters(
    blocks: tuple[int, ...], key: str, level: str
) -> None:
    with torch.device("meta"):
        model = PreActResNet(blocks=blocks, rate=RATES[level])
    assert ModelLayout.of(model).parameter_numel == COUNTS[key][level]


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


norms = st.sampled_from(["bn", "in", "none"])
rates = st.floats(0.05, 1.0)


@settings(deadline=None, max_examples=25)
@given(rates=st.lists(rates, min_size=2, max_size=4), norm=norms)
def test_narrower_models_are_leading_slices_of_wider_ones(rates: list[float], norm: str) -> None:
    found = [shapes(small(norm=norm, rate=r)) for r in sorted(rates)]
    for narrow, wide in pairwise(found):
        assert list(narrow) == list(wide)
        for name, shape in wide.items():
            assert all(n <= w for n, w in zip(narrow[name], shape, strict=True)), name
        assert narrow["linear.weight"][0] == wide["linear.weight"][0] == 3


@torch.no_grad()
@settings(deadline=None, max_examples=15)
@given(rate=rates, norm=norms)
def test_a_narrow_model_is_the_wide_one_whose_other_weights_are_zero(
    rate: float, norm: str
) -> None:
    # Norms of single channels; a norm over channels would count the zeros.
    wide, narrow = (small(norm=norm, rate=r).eval() for r in (1.0, rate))
    for value, part in zip(wide.parameters(), narrow.parameters(), strict=True):
        value.zero_()
        value[tuple(slice(size) for size in part.shape)] = part
    x = random(3, 3, 8, 8)
    torch.testing.assert_close(wide(x), narrow(x), rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(rate=rates)
def test_group_norm_needs_four_whole_groups(rate: float) -> None:
    if not any(width % 4 for width in (ceil(8 * rate), ceil(16 * rate))):
        small(hidden=(8, 16), norm="gn", rate=rate)
        return
    with pytest.raises(ValueError, match="divisible"):
        small(hidden=(8, 16), norm="gn", rate=rate)
