"""A check calls a user's module without a trace, and before it says what the module cannot take."""

import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.models.trials import on_trial
from tests.small import fit, random_data


class Busy(nn.Module):
    """Its forward pass counts, draws, writes buffers, and takes a step of its own."""

    mean: Tensor

    def __init__(self, num_classes: int = 3, *, copies: bool = True) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, num_classes)
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.calls, self.seen = 0, list[int]()
        self.lock = None if copies else threading.Lock()

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = self.mean + 1
        random.random()
        np.random.rand()
        torch.rand(1)
        if self.lock is None:
            self.seen.append(1)
        with torch.enable_grad():
            self.layer(x).sum().backward()
        self.layer.weight.data.add_(1.0)
        return self.layer(self.norm(x))


def trace(module: nn.Module) -> Any:
    tensors = {name: t.clone().tolist() for name, t in module.named_parameters()}
    tensors |= {name: t.clone().tolist() for name, t in module.named_buffers()}
    grads = [p.grad for p in module.parameters()]
    draws = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    parts = [(part.training, {*vars(part)}) for part in module.modules()]
    return tensors, grads, draws, parts


@pytest.mark.parametrize("copies", [True, False])
def test_a_trial_leaves_no_trace(copies: bool) -> None:
    net = Busy(copies=copies)
    before, place = trace(net), net.layer.weight.data_ptr()
    with on_trial(net) as trial:
        trial.train()
        trial(torch.randn(2, 4))
        trial.extra = 1  # type: ignore[assignment]
        assert trial.calls == 1
    assert trace(net) == before
    assert (net.calls, net.seen, net.layer.weight.data_ptr()) == (0, [], place)


def test_frozen_tensors_are_not_copied() -> None:
    net = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    with on_trial(net) as trial:
        assert trial[0].weight is net[0].weight  # type: ignore[union-attr]
        assert trial[1].weight is not net[1].weight  # type: ignore[union-attr]


def test_a_run_begins_with_a_module_that_nothing_has_called(tmp_path: Path) -> None:
    made: list[Busy] = []

    def build(num_classes: int = 3) -> nn.Module:
        made.append(Busy(num_classes))
        return made[-1]

    federation = Federation(
        FedAvg(),
        [ClientGroup(2, build)],
        optimizer=partial(torch.optim.SGD, lr=0.1),
        evaluate=(),
        side_by_side=2,
    )
    fit(federation, random_data([4, 3]), tmp_path, limit_train_batches=1)
    net = made[0]
    assert net.calls == 0  # a session's are its client's, and no check leaves any
    assert torch.equal(net.mean, torch.zeros(4))


class Query(nn.Module):
    """A learned query that is expanded to the batch, as of DETR and Perceiver."""

    def __init__(self, num_classes: int = 3, *, frozen: bool = False) -> None:
        super().__init__()
        self.layer, self.key = nn.Linear(4, 6), nn.Linear(5, 6).requires_grad_(not frozen)
        self.head, self.query = nn.Linear(6, num_classes), nn.Parameter(torch.randn(1, 5))

    @override
    def forward(self, x: Tensor) -> Tensor:
        query = self.query.expand(len(x), -1)
        return self.head((self.layer(x) + self.key(query)).relu())


class EncoderDecoder(nn.Module):
    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.transformer = nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True)
        self.query = nn.Parameter(torch.randn(1, num_classes, 4))
        self.head = nn.Linear(4, 1)

    @override
    def forward(self, x: Tensor) -> Tensor:
        query = self.query.expand(len(x), -1, -1)
        return self.head(self.transformer(x.unsqueeze(1), query)).squeeze(2)


@pytest.mark.parametrize("model", [Query, partial(Query, frozen=True), EncoderDecoder])
@pytest.mark.parametrize("side_by_side", ["auto", 2])
def test_networks_with_an_expanded_parameter_train(
    model: Any, side_by_side: Any, tmp_path: Path
) -> None:
    federation = Federation(
        FedAvg(),
        [ClientGroup(2, model)],
        optimizer=partial(torch.optim.SGD, lr=0.1),
        side_by_side=side_by_side,
    )
    fit(federation, random_data([4, 3]), tmp_path)
    assert federation.fleet.groups[0].flops > 0
