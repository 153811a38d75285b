"""CharCNN: frozen letters, their types, and the sizes that can be chosen."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightfed.networks.charcnn import CharCNN
from lightfed.state.rows import LiveModule, ModelLayout
from lightfed.utils.errors import UserError


def small(layers: int = 3, length: int = 100, **settings: float) -> CharCNN:
    return CharCNN(layers, 4, (length,), **({"width": 0.03, "hidden": 8} | settings))  # type: ignore[arg-type]


def letters(*shape: int) -> Tensor:
    return torch.randint(0, 71, shape, generator=torch.Generator().manual_seed(0))


def test_letters_are_one_hot_and_stay_so() -> None:
    model = small()
    assert torch.equal(model.embedding(torch.arange(1, 71)), torch.eye(70))
    assert not model.embedding(torch.tensor(0)).any()
    live = LiveModule(model, ModelLayout.of(model))
    assert all(p is not model.embedding.weight for p in live.trainable)
    optimizer = torch.optim.SGD(live.trainable, lr=0.1, weight_decay=0.1)
    F.cross_entropy(model(letters(8, 100)), letters(8) % 4).backward()
    optimizer.step()
    assert torch.equal(model.embedding.weight[1:], torch.eye(70))
    assert not model.embedding.weight[0].any()


def test_letters_may_come_in_any_type() -> None:
    model = small().eval()
    x = letters(3, 100)
    assert model(x).shape == (3, 4)
    for dtype in (torch.uint8, torch.float32):
        assert torch.equal(model(x.to(dtype)), model(x))


def test_the_size_can_be_chosen() -> None:
    model = CharCNN(4, 7, (120,), width=0.1, hidden=9, dropout=0.25)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["features.0.weight"] == (26, 70, 7)  # 25.6, rounded up
    assert shapes["classifier.7.weight"] == (7, 9)
    drops = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    assert drops == [0.25, 0.25]
    assert [m.p for m in small().modules() if isinstance(m, nn.Dropout)] == [0.5, 0.5]


def test_images_are_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"input_shape: samples of shape \(1, 8, 8\)"):
        CharCNN(input_shape=(1, 8, 8))
