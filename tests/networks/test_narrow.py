"""Networks of several widths nest in each other."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightfed.networks import MLP, Conv, SimpleCNN
from lightfed.networks.resnet import PreActResNet
from tests.core.models.client_cases import random

NETWORKS = [
    *(partial(PreActResNet, hidden=(4, 8), blocks=(2, 1), norm=n) for n in ("bn", "in", "none")),
    *(partial(Conv, hidden=(4, 8), norm=n) for n in ("bn", "in", "none")),
    partial(SimpleCNN, channels=(4, 8)),
    partial(MLP, hidden=(7, 10)),
]


@torch.no_grad()
@pytest.mark.parametrize("make", NETWORKS, ids=lambda make: make.func.__name__)
@settings(max_examples=8)
@given(rate=st.floats(0.05, 1.0))
def test_a_narrow_network_is_the_wide_one_whose_other_weights_are_zero(
    make: Callable[..., nn.Module], rate: float
) -> None:
    """Norms are of single channels; a norm over channels would count the zeros."""
    wide, narrow = (make(3, (3, 8, 8), rate=r).eval() for r in (1.0, rate))
    parts = dict(narrow.named_parameters())
    assert list(parts) == [name for name, _ in wide.named_parameters()]
    for name, value in wide.named_parameters():
        value.zero_()
        value[tuple(slice(size) for size in parts[name].shape)] = parts[name]
    x = random(3, 3, 8, 8)
    torch.testing.assert_close(wide(x), narrow(x), rtol=1e-4, atol=1e-5)
