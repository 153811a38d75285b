"""Steps that a pack would run in another way than a client alone, found before the first round."""

import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.local.hooks import SessionContext
from tests.core.packs import CLIENTS, Residual, Smooth, after, fleet, most

Batch = tuple[Tensor, Tensor]


class Listed(Smooth):
    """Penalises a parameter that it has in a list."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__(num_classes, input_shape)
        self.small = [self.net.inner.weight]

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.small[0].square().sum()


class Remembers(Smooth):
    """Keeps the last loss in an attribute."""

    last: Tensor | float = 0.0

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last = loss.detach()
        return loss


class Counts(Residual):
    """Counts its passes in Python; a graph would count none."""

    passes = 0

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x) / self.passes


class Skips(Residual):
    """A pass in two, as Python draws, is without its first layer."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x) if random.random() < 0.5 else super().forward(x)


class Mixed(Smooth):
    """Mixes samples by numbers of numpy."""

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step((x * np.random.default_rng().random(), y), batch_idx) * float(
            np.random.rand()
        )


class Turned(Residual):
    """Drops what lies in memory in another order; a client alone draws in that order."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.inner(x).unflatten(1, (2, 2)).transpose(1, 2), 0.5, self.training)
        return self.outer(h.flatten(1))


class Attends(nn.Module):
    """Samples attend to each other; the bits of their products depend on where they lie."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(input_shape[0], 23), nn.Linear(23, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.inner(x))
        return self.outer(torch.addmm(h, h @ h.t(), h))


class Clamps(Smooth):
    """Its optimiser keeps weights small after every step."""

    @override
    def configure_optimizers(self) -> Optimizer:
        made = self.made(self.parameters())
        made.register_step_post_hook(
            lambda *_: [p.data.clamp_(-0.1, 0.1) for p in self.parameters()]
        )
        return made

    made = partial(SGD, lr=0.1)


class ClampsAdam(Clamps):
    made = partial(Adam, lr=0.1)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Listed, "not those of a client alone"),
        (Remembers, "attributes"),
        (Counts, "attributes"),
        (Skips, "draws"),
        (Mixed, "draws"),
        (Turned, "not those of a client alone"),
        (Attends, "depend on the others"),
        (Clamps, "hooks"),
        (ClampsAdam, "hooks"),
    ],
)
def test_what_a_pack_would_run_differently_is_not_packed(
    model: type[nn.Module], reason: str
) -> None:
    made = fleet("mlp", CLIENTS, model=model)
    assert most(made) == []
    assert reason in str(list(made.training.side_by_side.values()))


@pytest.mark.parametrize("model", [Clamps, ClampsAdam])
def test_hooks_of_an_optimiser_are_called(model: type[nn.Module]) -> None:
    rows, _ = after(fleet("mlp", "off", model=model), 1)
    assert float(rows.abs().max()) == pytest.approx(0.1)


class Warms(Clamps):
    """Sets the rate in every step: 0 after the first."""

    first = 0.0

    @override
    def configure_optimizers(self) -> Optimizer:
        self.own = self.made(self.parameters())
        return self.own

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.own.param_groups[0]["lr"] = 0.0 if batch_idx else self.first
        return super().training_step(batch, batch_idx)


class WarmsAdam(Warms):
    made = partial(Adam, lr=0.1)


class StartsAdam(WarmsAdam):
    first = 0.1


@pytest.mark.parametrize("model", [Warms, WarmsAdam, StartsAdam])
def test_a_step_sets_the_rate_of_its_optimiser(model: type[Warms]) -> None:
    made = fleet("mlp", CLIENTS, model=model)
    assert most(made) == [CLIENTS]
    rows, alone = (after(one)[0] for one in (made, fleet("mlp", "off", model=model)))
    torch.testing.assert_close(rows, alone)
    still = made.groups[0].initial.floats.expand_as(rows)
    assert torch.equal(rows, still) == (model.first == 0)


class Noisy(FedAvg):
    """Adds noise from the generator that a session of one client has seeded."""

    side_by_side = True

    @override
    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        gradient += 0.1 * torch.randn_like(gradient)


def test_noise_of_a_hook_is_that_of_a_client_alone() -> None:
    found, alone = (after(fleet("mlp", side, algorithm=Noisy), 1)[0] for side in (CLIENTS, "off"))
    assert torch.equal(found, alone)


class Bent(Smooth):
    """Functions of odd numbers of elements, with a number first and in place; a loss of one."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__(num_classes, input_shape)
        self.net = nn.Sequential(nn.Linear(input_shape[0], 23), nn.Linear(23, num_classes))

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        first, second = self.net
        h = first(x + torch.rand_like(x, dtype=torch.float64).float())
        h = torch.atan2(h.sinh(), 2**h) + (0.5 * h).sigmoid_() + (h @ h.t()).softmax(1) @ h
        self.log("one", h.mean().view(1))
        return F.huber_loss(second(h), F.one_hot(y, 3).float(), delta=0.2).view(1)


def test_functions_have_the_bits_of_any_pack() -> None:
    made = [fleet("mlp", size, model=Bent) for size in (CLIENTS, 3, 2)]
    assert [most(one) for one in made] == [[CLIENTS], [3], [3]]
    rows = [after(one)[0] for one in made]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    torch.testing.assert_close(rows[0], after(fleet("mlp", "off", model=Bent))[0])
