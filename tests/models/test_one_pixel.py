"""Convolutions of images of one pixel against torch's own."""

import pytest
import torch
from torch import nn

from lightfed.models.networks.cnn import Conv
from lightfed.models.networks.one_pixel import OnePixelConv2d


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("pixels", [1, 2])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_values_and_gradients_are_those_of_torch(
    kernel: int, pixels: int, memory: torch.memory_format
) -> None:
    ours = OnePixelConv2d(5, 7, kernel).to(memory_format=memory)
    theirs = nn.Conv2d(5, 7, kernel, padding=kernel // 2)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(6, 5, pixels, pixels).to(memory_format=memory)
    found = []
    for layer in (ours, theirs):
        given = x.clone().requires_grad_()
        out = layer(given)
        out.square().sum().backward()
        found.append([out, given.grad, *(p.grad for p in layer.parameters())])
    for own, expected in zip(*found, strict=True):
        assert own is not None
        torch.testing.assert_close(own, expected)


@pytest.mark.parametrize(("pixels", "expected"), [(8, [False] * 3 + [True]), (28, [False] * 4)])
def test_a_network_has_them_where_one_pixel_is_left(pixels: int, expected: list[bool]) -> None:
    layers = [m for m in Conv(10, (1, pixels, pixels)).modules() if isinstance(m, nn.Conv2d)]
    assert [isinstance(layer, OnePixelConv2d) for layer in layers] == expected


def test_initial_values_are_those_of_torch() -> None:
    torch.manual_seed(3)
    ours = OnePixelConv2d(2, 3)
    torch.manual_seed(3)
    theirs = nn.Conv2d(2, 3, 3, padding=1)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
