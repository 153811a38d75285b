"""Layers read from modules: what is one layer, what makes two alike, and what cannot be read."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18
from typing_extensions import override

from lightfed.algorithms.flexifed.signature import Layer, layers_of
from lightfed.utils.errors import UserError

IMAGES = torch.zeros(2, 3, 8, 8)
VECTORS = torch.zeros(2, 4)


def read(module: nn.Module, batch: Tensor = IMAGES) -> tuple[Layer, ...]:
    return layers_of(module, batch, key="model.clients.0.model")


def conv(*behind: nn.Module, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(3, 3, 3, stride, padding=1), *behind]


def net(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(*parts)


def alike(one: nn.Module, other: nn.Module, batch: Tensor = IMAGES) -> list[bool]:
    """Layer by layer, whether they are equal."""
    pairs = zip(read(one, batch), read(other, batch), strict=True)
    return [a.signature == b.signature for a, b in pairs]


def test_a_convolution_with_norm_and_activation_is_one_layer() -> None:
    found = read(net(*conv(nn.BatchNorm2d(3), nn.ReLU()), *conv(nn.GroupNorm(1, 3), nn.GELU())))
    assert [layer.path for layer in found] == ["0", "3"]
    assert found[0].tensors == (
        "0.weight", "0.bias",
        "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked",
    )  # fmt: skip
    assert found[0].shapes == ((3, 3, 3, 3), (3,), (3,), (3,), (3,), (3,), ())
    assert found[0].parameters == 81 + 3 + 3 + 3
    assert found[0].text == "Conv2d 3x3x3x3 + BatchNorm2d + ReLU"
    assert found[1].tensors == ("3.weight", "3.bias", "4.weight", "4.bias")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (conv(), conv(stride=2), [False]),
        (conv(), conv(nn.ReLU()), [False]),
        (conv(nn.ReLU()), conv(nn.GELU()), [False]),
        (conv(nn.BatchNorm2d(3)), conv(nn.BatchNorm2d(3, momentum=0.2)), [False]),
        (conv(nn.PReLU()), conv(nn.PReLU(3)), [False]),
        ([nn.Dropout(0.1), *conv()], [nn.Dropout(0.2), *conv()], [False]),
        (conv(), [nn.Conv2d(3, 3, 3, padding=1, bias=False)], [False]),
        (conv(), [nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect")], [False]),
        # A pooling belongs to the layer that follows, and what is behind the last one to that.
        (
            [*conv(), nn.MaxPool2d(2), *conv(), *conv()],
            [*conv(), *conv(), *conv()],
            [True, False, True],
        ),
        (conv(*conv(), nn.Flatten()), conv(*conv()), [True, False]),
        # Neither memory nor wrapping makes another layer.
        (conv(nn.ReLU()), conv(nn.ReLU(inplace=True)), [True]),
        (conv(), conv(nn.Identity(), nn.Sequential()), [True]),
        ([nn.Dropout(0.1), *conv()], [nn.Sequential(nn.Dropout(0.1), net(*conv()))], [True]),
    ],
)
def test_layers_of_the_same_settings_are_alike(
    one: list[nn.Module], other: list[nn.Module], same: list[bool]
) -> None:
    assert alike(net(*one), net(*other)) == same


def test_a_norm_behind_a_pooling_is_a_layer_of_its_own() -> None:
    found = read(net(*conv(), nn.MaxPool2d(2), nn.BatchNorm2d(3), nn.ReLU(), *conv()))
    assert [layer.kind for layer in found] == ["Conv2d", "BatchNorm2d", "Conv2d"]


class Gain(nn.Module):
    """A module that draws at random."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain.sum() + torch.rand(1)


def test_a_network_that_shares_its_activations_is_read() -> None:
    found = read(resnet18(num_classes=5), torch.zeros(2, 3, 32, 32))
    assert [layer.kind for layer in found] == ["Conv2d"] * 20 + ["Linear"]
    assert found[7].path == "layer2.0.downsample.0"  # a shortcut, where it is called
    assert sum(layer.parameters for layer in found) == 11_179_077


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1, 2))
        return self.attention(x, x, x)[0]


def test_attention_with_all_its_projections_is_one_layer() -> None:
    embed, attention = read(Attending())
    assert [embed.kind, attention.kind] == ["Linear", "MultiheadAttention"]
    assert "attention.out_proj.weight" in attention.tensors
    assert attention.parameters == 4 * (6 * 6 + 6)


def test_reading_leaves_the_network_and_the_random_state_alone() -> None:
    module = net(*conv(nn.BatchNorm2d(3)), nn.Dropout(0.5), *conv(), Gain())
    module.train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    read(module, torch.ones(2, 3, 8, 8))
    assert module.training
    assert not any(part._forward_pre_hooks for part in module.modules())
    assert all(torch.equal(value, before[n]) for n, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x))


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Token(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.token = nn.Parameter(torch.zeros(4))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.token


@pytest.mark.parametrize(
    ("make", "fragment"),
    [
        (Twice, "inner is called 2 times"),
        (Idle, "spare is never called"),
        (lambda: net(Token()), "0 has its own token next to its parts"),
        (Token, "Token has its own token"),
        (nn.Flatten, "without layers that have weights"),
    ],
)
def test_layers_without_an_order_are_refused(make: Callable[[], nn.Module], fragment: str) -> None:
    module = make()
    with pytest.raises(UserError, match=f"model.clients.0.model: .*{fragment}.*; "):
        read(module, VECTORS)
    assert not any(part._forward_pre_hooks for part in module.modules())
