"""Networks that write into activations, or prepare inputs, train and are tested in packs too."""

import logging
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam
from typing_extensions import override

from lightfed.algorithms.standalone import Standalone
from tests.core.packs import CLIENTS, Residual, Smooth, after, fleet, images, most, windows
from tests.core.test_packed_evaluation import evaluate


class Odd(nn.Module):
    """A hidden layer between two others."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__()
        self.inner = nn.Linear(input_shape[0], 16)
        self.outer = nn.Linear(16, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.hidden(self.inner(x)))

    def hidden(self, h: Tensor) -> Tensor:
        return h


class DropsInPlace(Odd):
    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__(num_classes, input_shape)
        self.drop = nn.Dropout(0.3, inplace=True)

    @override
    def hidden(self, h: Tensor) -> Tensor:
        return h + self.drop(h)


class BendsInPlace(Odd):
    @override
    def hidden(self, h: Tensor) -> Tensor:
        return h + F.silu(h, inplace=True)


class AddsInPlace(Odd):
    @override
    def hidden(self, h: Tensor) -> Tensor:
        before = h
        h += torch.relu(h)
        return before + h


class FlatInPlace(nn.Module):
    """Cuts off below 0 what lies in memory twice: flattened, and not."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (1, 8, 8)) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.flat, self.cut = nn.Flatten(), nn.ReLU(inplace=True)
        self.out = nn.Linear(4 * 64, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        flat = self.cut(self.flat(x))
        return self.out(flat) + self.out(self.flat(self.second(x)))


class Prepared(Odd):
    """A hook gives it other inputs."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__(num_classes, input_shape)
        self.register_forward_pre_hook(lambda module, given: (3 * given[0] + 1,))


class Called(Odd):
    @override
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(2 * x)


class Inherits(Called):
    """Gets its call from another class."""


class Patched(Odd):
    """A layer has a forward of its own, as adapters put one there."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__(num_classes, input_shape)
        own = self.inner.forward
        self.inner.forward = lambda x: 3 * own(x)  # type: ignore[method-assign]


class Taught(Smooth):
    """A teacher follows the network, by steps that write into its parameters."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__(num_classes, input_shape)
        self.teacher = Residual(num_classes, input_shape).requires_grad_(False)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
        x, _ = batch
        return super().training_step(batch, batch_idx) + F.mse_loss(self.net(x), self.teacher(x))


class Words(nn.Module):
    """Does not train the embedding of a word that pads."""

    def __init__(self, num_classes: int = 11, input_shape: tuple[int, ...] = (6,)) -> None:
        super().__init__()
        self.words = nn.Embedding(num_classes, 8, padding_idx=-2, max_norm=0.5)
        self.out = nn.Linear(8, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x))


class Heated(Odd):
    """Has a parameter without dimensions."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__(num_classes, input_shape)
        self.heat = nn.Parameter(torch.tensor(2.0))

    @override
    def hidden(self, h: Tensor) -> Tensor:
        return self.heat * torch.relu(h)


class Named(Odd):
    """Layers with several names; two of them share a weight."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__(num_classes, input_shape)
        one, other, norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.GroupNorm(2, 16)
        other.weight = one.weight
        self.layers = nn.ModuleList([one, nn.Tanh(), norm, other, one, norm])
        self.first = one

    @override
    def hidden(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
        return h


class Same(FlatInPlace):
    """Pads by a word, which packs do not know."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (1, 8, 8)) -> None:
        super().__init__(num_classes, input_shape)
        self.second = nn.Conv2d(4, 4, 3, padding="same")

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.flat(self.second(self.first(x))))


class Twice(Smooth):
    """Logs a name twice in a step."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        self.log("loss", 2 * loss)
        return loss


TESTED = (
    DropsInPlace, BendsInPlace, AddsInPlace, FlatInPlace, Prepared, Called, Inherits, Patched,
    Heated, Named,
)  # fmt: skip
ODD = (*TESTED, Taught, Words)


def settings(model: type[nn.Module]) -> dict[str, Any]:
    data = {FlatInPlace: images, Same: images, Words: windows}
    return {"model": model} | ({"data": data[model]} if model in data else {})


@pytest.mark.parametrize("model", ODD)
def test_packs_train_what_a_client_alone_trains(
    model: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        pack = fleet("mlp", CLIENTS, **settings(model))
        rows, metrics = after(pack)
    assert most(pack) == [CLIENTS]
    assert "side by side" not in caplog.text  # none of the packs was given up
    alone, its = after(fleet("mlp", "off", **settings(model)))
    torch.testing.assert_close(rows, alone, rtol=1e-5, atol=2e-5)
    assert metrics == pytest.approx(its, rel=1e-5)


def test_a_layer_of_several_names_keeps_its_parameters_after_a_pack() -> None:
    made = [fleet("mlp", side, model=Named) for side in (CLIENTS, "off")]
    assert all(isinstance(p, nn.Parameter) for p in made[0].groups[0].module.parameters())
    for one in made:
        after(one)
    pack, alone = (evaluate(one, "off")[0] for one in made)
    assert pack == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("model", [*TESTED, Same])
def test_clients_tested_at_once_have_the_metrics_of_one_at_a_time(model: type[nn.Module]) -> None:
    made = fleet("mlp", "off", algorithm=Standalone, **settings(model))
    after(made, 1)
    together, one = (evaluate(made, side)[0] for side in (3, "off"))
    assert together == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"model": Twice}, "twice"),
        ({"model": Residual, "optimizer": partial(SGD, lr=0.1, fused=True)}, "fused"),
        ({"model": Residual, "optimizer": partial(Adam, lr=0.01, fused=True)}, "fused"),
    ],
)
def test_what_a_pack_would_get_wrong_is_not_packed(more: dict[str, Any], reason: str) -> None:
    made = fleet("mlp", CLIENTS, **more)
    assert most(made) == []
    assert reason in str(list(made.training.side_by_side.values()))
    (rows, metrics), (alone, its) = after(made), after(fleet("mlp", "off", **more))
    assert torch.equal(rows, alone)
    assert metrics == its
