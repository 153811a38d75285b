"""Networks as extractor and head."""

import re

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightfed.models.split import feature_dim, split
from lightfed.networks import MLP, VGG, CIFARResNet, Conv, MoECNN, SimpleCNN, Torchvision
from lightfed.networks.charcnn import CharCNN
from lightfed.networks.resnet import PreActResNet
from lightfed.utils.errors import UserError
from tests.core.models.client_cases import random, values

SMALL = [8, 8, 8, 8]
NETWORKS = {
    "mlp": (lambda: MLP(4, (3, 8, 8), hidden=(6, 5)), (3, 8, 8), 5, "layers.5"),
    "linear": (lambda: MLP(4, (3, 8, 8), hidden=()), (3, 8, 8), 192, "layers.1"),
    "alone": (lambda: nn.Linear(7, 4), (7,), 7, ""),
    "lenet": (lambda: MoECNN(4, (1, 16, 16), variant=3, width=0.02), (1, 16, 16), 10, "head"),
    "cnn": (lambda: SimpleCNN(4, (3, 8, 8), channels=[2, 3]), (3, 8, 8), 128, "classifier.3"),
    "conv": (lambda: Conv(4, (3, 8, 8), hidden=SMALL), (3, 8, 8), 8, "blocks.21"),
    "preact": (lambda: PreActResNet(4, (3, 8, 8), hidden=SMALL), (3, 8, 8), 8, "linear"),
    "resnet": (lambda: CIFARResNet(4, (3, 8, 8), depth=20, width=0.2), (3, 8, 8), 13, "linear"),
    "vgg": (
        lambda: VGG(4, depth=11, width=0.02, hidden=9), (3, 32, 32), 9, "classifier.6"
    ),
    "torchvision": (lambda: Torchvision("resnet18", 4), (3, 32, 32), 512, "net.fc"),
    "charcnn": (
        lambda: CharCNN(3, 4, (200,), width=0.02, hidden=9), (200,), 9, "classifier.7"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_the_parts_are_the_network(name: str) -> None:
    make, shape, num_features, head_name = NETWORKS[name]
    net = make().eval()
    x = (10 * random(3, *shape)).abs().round()
    logits = net(x)
    state = values(net)

    parts = split(net, torch.zeros(2, *shape))

    assert parts.feature_dim == num_features
    assert parts.extractor(x).shape == (3, num_features)
    assert isinstance(parts.head, nn.Linear)
    assert torch.equal(parts.head(parts.extractor(x)), logits)
    assert torch.equal(parts(x), logits)

    # Nothing is copied or lost: the head has its two tensors, and the extractor all others.
    of_head = {f"{head_name}.{n}".lstrip("."): t for n, t in values(parts.head).items()}
    assert len(of_head) == 2
    for tensor_name, tensor in of_head.items():
        assert torch.equal(tensor, state[tensor_name])
    others = state.keys() - of_head.keys()
    if name == "lenet":
        # It names both parts itself.
        others = {other.removeprefix("extractor.") for other in others}
    assert values(parts.extractor).keys() == others


def test_a_network_that_names_its_parts_keeps_them() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.extractor = nn.Linear(7, 5)
            self.head = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 4))

        @override
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.extractor(x))

    net = Own()
    parts = split(net, random(2, 7))
    assert parts.extractor is net.extractor
    assert parts.head is net.head
    assert parts.feature_dim == 5


@pytest.mark.parametrize(
    ("layers", "x", "found"),
    [
        ([nn.Linear(7, 4), nn.Softmax(1)], (2, 7), "Sequential: no linear layer of it gives"),
        ([nn.Conv2d(1, 4, 2), nn.Flatten()], (2, 1, 2, 2), "Sequential: no linear layer of it"),
        ([nn.Unflatten(1, (1, 7)), nn.Linear(7, 4)], (2, 7), "the extractor Sequential gives (2,"),
    ],
)
def test_a_network_that_cannot_be_split_is_refused(
    layers: list[nn.Module], x: tuple[int, ...], found: str
) -> None:
    net = nn.Sequential(*layers)
    with pytest.raises(UserError, match=rf"^model: {re.escape(found)}"):
        split(net, torch.ones(x))
    assert not any(part._forward_hooks for part in net.modules())


@pytest.mark.parametrize(
    ("net", "x", "found"),
    [
        (nn.Conv2d(1, 4, 2), (2, 1, 2, 2), "extractor Conv2d gives (2, 4, 1, 1) for (2, 1, 2, 2)"),
        (nn.LSTM(5, 4), (2, 3, 5), "extractor LSTM gives tuple for (2, 3, 5)"),
    ],
)
def test_features_must_be_vectors(net: nn.Module, x: tuple[int, ...], found: str) -> None:
    with pytest.raises(UserError, match=re.escape(found)):
        feature_dim(net, torch.zeros(x))


def test_looking_at_a_network_changes_nothing() -> None:
    net = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 4))
    net[1].eval()
    values_before = values(net)
    random_state = torch.random.get_rng_state()

    assert feature_dim(net, random(2, 7)) == 4

    assert [layer.training for layer in net] == [True, False, True, True]
    for name, value in values_before.items():
        assert torch.equal(net.state_dict()[name], value)
    assert torch.equal(torch.random.get_rng_state(), random_state)
