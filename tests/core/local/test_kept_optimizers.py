"""Clients that keep the state of their optimiser from session to session."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, RMSprop
from typing_extensions import override

from lightfed.algorithms.ditto import Ditto
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd.aspg import ASPG
from lightfed.algorithms.fedbcd.fedbcd import FedBCD
from lightfed.algorithms.fednova import FedNova
from lightfed.algorithms.lora.flexlora import FlexLoRA
from lightfed.algorithms.scaffold import SCAFFOLD
from lightfed.algorithms.standalone import Standalone
from lightfed.algorithms.width.fedrolex import FedRolex
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.local.local_work import RoundPlan
from lightfed.local.penalties import Pull
from lightfed.networks.mlp import MLP
from lightfed.utils.errors import UserError
from tests.core.local.optimizers import Counting, Lookahead, Warm
from tests.core.local.test_abandoned import breaks
from tests.small import data_of, fleet_of, random_data, run_round

MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)
mlp = partial(MLP, hidden=(6,))


def fleet(algorithm: Any, optimizer: Any = MOMENTUM, sizes: Any = (6, 9, 7), **given: Any) -> Fleet:
    groups = [ClientGroup(len(sizes), given.pop("model", mlp))]
    settings = {"keep_optimizer": True} | given
    made = fleet_of(groups, algorithm, random_data(sizes), optimizer=optimizer, **settings)
    made.plan = RoundPlan(lr=0.1)
    return made


class Late(nn.Module):
    """`side` takes part in every fourth batch only, so it has no gradient in the first session."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.body, self.side = nn.Linear(4, num_classes), nn.Linear(4, num_classes)
        self.seen = 0

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.body(x) + (self.side(x) if self.seen % 4 == 0 else 0.0)


@pytest.mark.parametrize(
    ("optimizer", "model"),
    [
        (MOMENTUM, mlp),
        (partial(SGD, momentum=0.8, weight_decay=5e-3, dampening=0.1), mlp),
        (partial(SGD, momentum=0.8, weight_decay=5e-3, nesterov=True), Late),
        (partial(SGD, momentum=0.9, maximize=True), Late),
        (Adam, Late),
        (partial(AdamW, amsgrad=True), Late),
        (RMSprop, Late),
        (Adagrad, Late),
        (Adafactor, mlp),  # factors of rows and columns
        (Counting, Late),
        (Warm, mlp),
        (Lookahead, mlp),
    ],
)
@pytest.mark.parametrize("algorithm", [Standalone, FedAvg])
def test_sessions_are_one_of_torch(optimizer: Any, model: Any, algorithm: Any) -> None:
    """Of a single client, two steps each on all of its samples."""
    made = fleet(algorithm(), partial(optimizer, lr=0.1), sizes=[8], model=model, epochs=2)
    made.groups[0].module.net.seen = 0  # type: ignore[union-attr, assignment]
    twin = made.groups[0].group.build(made.data, position=0, seed=0)
    stepper = optimizer(twin.parameters(), lr=0.1)
    ((x, y),) = made.data.batches(made.data.client_plan(0, 8))
    for t in range(4):
        run_round(made, t)
        for _ in range(2):
            stepper.zero_grad()
            F.cross_entropy(twin(x), y).backward()
            stepper.step()
    views = made.groups[0].layout.floats.views(made.row(0).floats)
    for name, p in twin.named_parameters():
        torch.testing.assert_close(views[name], p.detach(), rtol=0, atol=3e-6)


def trained(made: Fleet) -> list[Tensor]:
    for t in range(3):
        run_round(made, t)
    return [made.deployed(k).row(k).floats.clone() for k in range(made.clients)]


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [
        (FedAvg, MOMENTUM), (FedAvg, partial(ASPG, lr=0.1)), (SCAFFOLD, MOMENTUM),
        (partial(HeteroFL, mask=False), MOMENTUM),
    ],
)  # fmt: skip
def test_packs_keep_what_clients_alone_keep(algorithm: Any, optimizer: Any) -> None:
    work = {"clients_per_round": 2, "epochs": 2}
    alone, packed, reset = (
        trained(fleet(algorithm(), optimizer, side_by_side=side, keep_optimizer=keep, **work))
        for side, keep in (("off", True), (3, True), ("off", False))
    )
    for one, other in zip(alone, packed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not all(torch.allclose(a, b, atol=1e-4) for a, b in zip(alone, reset, strict=True))


def test_optimisers_that_count_steps_train_alone() -> None:
    made = fleet(FedAvg(), partial(Adam, lr=0.1), side_by_side=3)
    assert "steps" in made.groups[0].packing.reason


def test_what_is_kept_is_the_client_s() -> None:
    made = fleet(FedAvg(), clients_per_round=2)
    run_round(made, 0)
    assert made.optimizers is not None
    assert sorted(made.optimizers) == made.participants(0)
    row = 4 * made.groups[0].layout.floats.numel
    state = 4 * made.groups[0].layout.parameter_size
    kept = [made.stored_bytes(k) for k in range(3)]
    assert kept == [row + state * (k in made.optimizers) for k in range(3)]


def test_a_pull_of_shared_tensors_goes_with_it() -> None:
    """A client's own tensors keep their momentum, and are not pulled."""
    settings = {"personal": ["net.layers.3"], "epochs": 2}
    pulled = fleet(FedAvg(), local_penalty=Pull(0.0), **settings)
    plain = fleet(FedAvg(), **settings)
    assert all(map(torch.equal, trained(pulled), trained(plain)))
    far = trained(fleet(FedAvg(), local_penalty=Pull(0.5), **settings))
    assert not torch.equal(far[0], plain.deployed(0).row(0).floats)


def test_a_session_that_fails_leaves_the_state_before_it() -> None:
    made = fleet(FedAvg(), epochs=2)
    run_round(made, 0)
    assert made.optimizers is not None
    before = made.optimizers[1].clone()
    breaks(made, 1, after=1)
    assert run_round(made, 1)["excluded"] == 1.0
    assert torch.equal(made.optimizers[1], before)


@pytest.mark.usefixtures("unchecked_data")
def test_a_client_that_is_reset_begins_without() -> None:
    x = torch.zeros(6, 4)
    x[5] = float("nan")
    data = data_of(x, torch.zeros(6, dtype=torch.long), [[0, 1], [2, 3], [4, 5]], classes=3)
    made = fleet_of([ClientGroup(3, mlp)], FedAvg(), data, optimizer=MOMENTUM, keep_optimizer=True)
    run_round(made, 0)
    assert made.optimizers is not None
    assert sorted(made.optimizers) == [0, 1]


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [
        (FedAvg, partial(SGD, lr=0.1)),
        (Ditto, MOMENTUM),
        (FedNova, MOMENTUM),
        (FedRolex, MOMENTUM),
        (FlexLoRA, MOMENTUM),
        (partial(FedBCD, 3, 1), MOMENTUM),
        (partial(SCAFFOLD, momentum=0.9), MOMENTUM),
    ],
)
def test_what_makes_no_sense_is_refused(algorithm: Any, optimizer: Any) -> None:
    with pytest.raises(UserError) as error:
        fleet(algorithm(), optimizer)
    assert error.value.key == "model.keep_optimizer"


def test_a_client_whose_shape_changes_is_refused() -> None:
    with pytest.raises(UserError):
        run_round(fleet(HeteroFL("dynamic")), 0)
