"""The multilayer perceptron and torchvision's models."""

import pytest
import torch
from torch import nn

from lightfed.networks.mlp import MLP
from lightfed.networks.torchvision import Torchvision
from lightfed.utils.errors import UserError


def widths(model: MLP) -> list[tuple[int, int]]:
    return [(m.in_features, m.out_features) for m in model.layers if isinstance(m, nn.Linear)]


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (1.0, [(12, 7), (7, 10), (10, 3)]),
        (0.5, [(12, 4), (4, 5), (5, 3)]),
        (0.1, [(12, 1), (1, 1), (1, 3)]),
    ],
)
def test_hidden_layers_have_their_share_of_units(
    rate: float, expected: list[tuple[int, int]]
) -> None:
    model = MLP(3, (3, 2, 2), hidden=(7, 10), rate=rate)
    assert widths(model) == expected
    assert model(torch.zeros(5, 3, 2, 2)).shape == (5, 3)


def test_dropout_follows_every_hidden_layer() -> None:
    model = MLP(3, (4,), hidden=(5, 6), dropout=0.25)
    drops = [m for m in model.layers if isinstance(m, nn.Dropout)]
    assert [d.p for d in drops] == [0.25, 0.25]
    assert isinstance(model.layers[-1], nn.Linear)
    assert not any(isinstance(m, nn.Dropout) for m in MLP(3, (4,), hidden=(5, 6)).layers)


def test_torchvision_builds_a_model_by_its_name() -> None:
    model = Torchvision("squeezenet1_1", num_classes=4)
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 4)


def test_an_unknown_torchvision_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"torchvision has no model 'resnet19'"):
        Torchvision("resnet19")
